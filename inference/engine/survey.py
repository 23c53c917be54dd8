"""The stages before any model runs: look at the slide, then plan its tiles."""

import io
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from PIL import Image
from pydantic import JsonValue

from inference.engine.job import Draft, SlideJob
from inference.engine.recipes import Addresses, execution
from inference.engine.settings import Settings
from inference.errors import DamagedResult
from inference.models.spec import ModelSpec
from inference.slides.grid import TileGrid
from inference.slides.overview import Overview, read_overview
from inference.slides.quality import SlideQuality, TileQuality, percent, slide_quality, tile_quality
from inference.slides.roi import Roi
from inference.slides.tissue import METHOD, Coverage, appearance, coverage
from inference.store.files import canonical_json, write_atomic
from inference.store.manifest import Counts
from inference.store.tables import SHARD, TILE_KEYS, TableWriter, read_table

TILES_SCHEMA = pa.schema(
    [
        *TILE_KEYS,
        pa.field("tissue_fraction", pa.float32(), nullable=False),
        pa.field("missing_fraction", pa.float32(), nullable=False),
        pa.field("pen_fraction", pa.float32(), nullable=False),
        pa.field("dark_fraction", pa.float32(), nullable=False),
        pa.field("saturation", pa.float32(), nullable=False),
        pa.field("blank_fraction", pa.float32(), nullable=False),
    ]
)


def survey_slide(job: SlideJob, work: Path) -> Draft:
    """Stage `info`: properties (an allow-list), thumbnail, and the overview that the tissue mask is made from."""
    reader, overview = job.reader, read_overview(job.reader, job.resolution.mpp)
    save_image(work / "thumbnail.jpg", Image.fromarray(overview.thumbnail), quality=85)
    save_image(work / "overview.png", Image.fromarray(overview.rgb))
    _save_plane(work / "missing.png", overview.missing)
    _save_plane(work / "unreadable.png", overview.unreadable.astype(np.float32))
    width, height = reader.level_sizes[0]
    summary: dict[str, JsonValue] = {
        "width": width,
        "height": height,
        "levels": [list(size) for size in reader.level_sizes],
        "vendor": reader.vendor,
        "reader": reader.reason,
        "objective_power": _json_number(reader.objective_power),
        "mpp_stated": [_json_number(value) for value in reader.mpp] if reader.mpp else None,
        "mpp": list(job.resolution.mpp),
        "mpp_source": job.resolution.source,
        "overview_scale": list(overview.scale),
        "missing_share": round(float(overview.missing.mean()), 6),
        "unreadable_share": round(float(overview.unreadable.mean()), 6),
    }
    write_atomic(work / "slide.json", (canonical_json(summary) + "\n").encode())
    return Draft(summary=summary, execution=execution(None, job.settings, reader.kind))


def plan_tiles(job: SlideJob, spec: ModelSpec, at: Addresses, work: Path) -> Draft:
    """Stage `tiles`: tissue mask and the planned tiles, row-major, with what they look like."""
    grid, plan = job.grid(spec), job.plan(spec)
    overview = load_overview(job, job.require(at.info, "tiles"))
    seen = appearance(overview)
    mask = job.tissue_model.mask(overview) if job.tissue_model else seen.tissue
    region = job.roi_on(overview)
    shares = coverage(*_limited(overview, mask, region), grid)
    quality, whole = tile_quality(seen, overview.scale, grid), slide_quality(overview, seen, mask)
    with_tissue = shares.planned(job.settings.min_tissue)
    chosen = np.flatnonzero(with_tissue & _clean(shares, quality, job.settings.max_pen))
    save_image(work / "mask.png", Image.fromarray(mask.astype(np.uint8) * 255).convert("1"))
    summary: dict[str, JsonValue] = {
        "grid": [grid.n_rows, grid.n_cols],
        "tile_px": grid.tile_px,
        "stride_px": grid.stride_px,
        "edge": grid.edge,
        "mpp": list(grid.mpp),
        "footprint": list(grid.footprint),
        "level": plan.level,
        "reduction": plan.reduction,
        "resample": plan.resample,
        "tissue_method": job.tissue_model.method if job.tissue_model else METHOD,
        "tissue_share": round(float(mask.mean()), 6),
        "quality": whole.to_json(),
        "warnings": list(whole.warnings(by_model=job.tissue_model is not None)),
    }
    if region:
        save_image(work / "roi.png", Image.fromarray(region[1].astype(np.uint8) * 255).convert("1"))
        summary |= {"roi_share": round(float(region[1].mean()), 6), "roi_ignored": region[0].ignored}
    _write_tiles(work / "tiles.parquet", grid, (shares, quality), chosen, {"slide_key": job.ref.key, **summary})
    counts = Counts(grid=grid.n_rows * grid.n_cols, planned=len(chosen))
    reason = None
    if not len(chosen):
        reason = _why_drawn(with_tissue, job.settings) or _why_none_inside(grid, mask, region)
        reason = reason or _why_empty(grid, whole, job.settings)
    return Draft("empty" if reason else "ok", reason, counts, summary, _made_by(job))


def _made_by(job: SlideJob) -> dict[str, JsonValue]:
    """The execution of stage `tiles`; a tissue model runs with settings of its own."""
    if job.tissue_model is None:
        return execution(None, job.settings, job.reader.kind)
    return execution(job.tissue_model.manifest, job.tissue_model.settings, job.reader.kind)


def _clean(shares: Coverage, quality: TileQuality, max_pen: float | None) -> NDArray[np.bool_]:
    """Tiles without too much ink; damage, which must not hide behind it, is let through."""
    return shares.damaged | (quality.pen <= (1 if max_pen is None else max_pen))


def _limited(
    overview: Overview, mask: NDArray[np.bool_], region: tuple[Roi, NDArray[np.bool_]] | None
) -> tuple[Overview, NDArray[np.bool_]]:
    """Overview and tissue mask; with a region of interest only what lies in it is tissue, or damage to be shown."""
    if region is None:
        return overview, mask
    return replace(overview, unreadable=overview.unreadable & region[1]), mask & region[1]


def load_overview(job: SlideJob, info: Path) -> Overview:
    """The overview as stage `info` stored it."""
    width, height = job.reader.level_sizes[0]
    rgb, thumbnail = load_image(info / "overview.png"), load_image(info / "thumbnail.jpg")
    missing, unreadable = (load_image(info / f"{name}.png") for name in ("missing", "unreadable"))
    scale = read_scale(info)
    # A level-0 pixel is allowed for: the scale is a quotient and may be rounded down.
    if rgb.shape[0] * scale[1] < height - 1 or rgb.shape[1] * scale[0] < width - 1:
        raise DamagedResult(f"{info}: the overview does not cover the slide; delete the folder to compute it again")
    return Overview(rgb, (missing / np.float32(255)).astype(np.float32), unreadable > 0, scale, thumbnail)


def read_scale(info: Path) -> tuple[float, float]:
    """Level-0 pixels per overview pixel, x and y."""
    try:
        x, y = json.loads((info / "slide.json").read_bytes())["overview_scale"]
        return (float(x), float(y))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DamagedResult(f"{info / 'slide.json'} cannot be read: delete its folder to compute it again") from error


class PlannedTiles(NamedTuple):
    """Columns of the planned tiles, in order."""

    row: NDArray[np.int32]
    col: NDArray[np.int32]
    x: NDArray[np.int64]
    y: NDArray[np.int64]
    tissue_fraction: NDArray[np.float32]


def read_tiles(folder: Path) -> PlannedTiles:
    """The planned tiles of a finished stage `tiles`."""
    table, _ = read_table(folder / "tiles.parquet")
    return PlannedTiles(*(table.column(name).to_numpy() for name in PlannedTiles._fields))


def _write_tiles(
    path: Path,
    grid: TileGrid,
    about: tuple[Coverage, TileQuality],
    chosen: NDArray[np.intp],
    metadata: dict[str, JsonValue],
) -> None:
    rows, cols = grid.cells()
    shares, quality = about
    with TableWriter(path, TILES_SCHEMA, metadata) as table:
        for start in range(0, len(chosen), SHARD):
            index = chosen[start : start + SHARD]
            table.write(
                {
                    "row": rows[index],
                    "col": cols[index],
                    "x": grid.origins(cols[index], 0),
                    "y": grid.origins(rows[index], 1),
                    "tissue_fraction": shares.tissue[index],
                    "missing_fraction": shares.missing[index],
                    "pen_fraction": quality.pen[index],
                    "dark_fraction": quality.dark[index],
                    "saturation": quality.saturation[index],
                    "blank_fraction": quality.blank[index],
                }
            )


def _why_none_inside(
    grid: TileGrid, mask: NDArray[np.bool_], region: tuple[Roi, NDArray[np.bool_]] | None
) -> str | None:
    """Why a slide with a region of interest has no tiles, if that is the region's doing."""
    if region is None or not mask.any() or not grid.n_rows * grid.n_cols:
        return None
    share = f"{region[1].mean():.2%} of the slide"
    return f"no tile has enough tissue inside the region of interest (ROI), which covers {share}"


def _why_drawn(with_tissue: NDArray[np.bool_], settings: Settings) -> str | None:
    """Why a slide has no tiles, if all that have tissue are drawn over."""
    if settings.max_pen is None or not with_tissue.any():
        return None
    count = int(with_tissue.sum())
    return f"all {count} tiles with tissue are more than {percent(settings.max_pen)} ink (max_pen)"


def _why_empty(grid: TileGrid, whole: SlideQuality, settings: Settings) -> str:
    if not grid.n_rows * grid.n_cols:
        width, height = grid.slide_size
        covers = " x ".join(f"{side:.0f}" for side in grid.footprint)
        return f"the slide ({width} x {height} pixels) is smaller than one tile ({covers}); --edge pad takes it"
    if whole.tissue:
        return f"no tile has {percent(settings.min_tissue)} tissue (min_tissue): the slide is {whole.seen()}"
    return f"no tissue was found: the slide is {whole.seen()}"


def save_image(path: Path, image: Image.Image, **options: int) -> None:
    """Encode by the suffix, then write: Pillow alone takes a disk that fills for success."""
    data = io.BytesIO()
    image.save(data, Image.registered_extensions()[path.suffix], **options)
    write_atomic(path, data.getvalue())


def load_image(path: Path) -> NDArray[np.uint8]:
    """Pixels of a stored image.

    Raises:
        DamagedResult: it does not decode.
    """
    try:
        with Image.open(path) as image:
            return np.asarray(image, np.uint8)
    except (OSError, ValueError, SyntaxError) as error:
        text = f"{path} cannot be read ({type(error).__name__}): delete its folder to compute it again"
        raise DamagedResult(text) from error


def _save_plane(path: Path, plane: NDArray[np.float32]) -> None:
    """A plane of shares as 8-bit grey; any share above 0 stays above 0."""
    save_image(path, Image.fromarray(np.ceil(np.clip(plane, 0, 1) * 255).astype(np.uint8)))


def _json_number(value: float | None) -> float | None:
    """The number, or None where a slide states NaN or infinity, which JSON has no word for."""
    return value if value is not None and math.isfinite(value) else None
