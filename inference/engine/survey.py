"""The stages before any model runs: look at the slide, then plan its tiles."""

import io
import json
import math
from pathlib import Path

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from PIL import Image
from pydantic import JsonValue

from inference.engine.job import Draft, SlideJob
from inference.engine.recipes import Addresses, execution
from inference.errors import DamagedResult
from inference.models.spec import ModelSpec
from inference.slides.grid import TileGrid
from inference.slides.overview import Overview, read_overview
from inference.slides.tissue import METHOD, Coverage, coverage, tissue_mask
from inference.store.files import canonical_json, write_atomic
from inference.store.manifest import Counts
from inference.store.tables import SHARD, TILE_KEYS, TableWriter, read_table

TILES_SCHEMA = pa.schema(
    [
        *TILE_KEYS,
        pa.field("tissue_fraction", pa.float32(), nullable=False),
        pa.field("missing_fraction", pa.float32(), nullable=False),
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
    """Stage `tiles`: tissue mask and the planned tiles, row-major."""
    grid, plan = job.grid(spec), job.plan(spec)
    overview = load_overview(job, job.require(at.info, "tiles"))
    mask = tissue_mask(overview)
    shares = coverage(overview, mask, grid)
    chosen = np.flatnonzero(shares.planned(job.settings.min_tissue))
    save_image(work / "mask.png", Image.fromarray(mask.astype(np.uint8) * 255).convert("1"))
    summary: dict[str, JsonValue] = {
        "grid": [grid.n_rows, grid.n_cols],
        "tile_px": grid.tile_px,
        "stride_px": grid.stride_px,
        "mpp": list(grid.mpp),
        "footprint": list(grid.footprint),
        "level": plan.level,
        "reduction": plan.reduction,
        "resample": plan.resample,
        "tissue_method": METHOD,
        "tissue_share": round(float(mask.mean()), 6),
    }
    _write_tiles(work / "tiles.parquet", grid, shares, chosen, {"slide_key": job.ref.key, **summary})
    counts = Counts(grid=grid.n_rows * grid.n_cols, planned=len(chosen))
    reason = _why_empty(grid) if not len(chosen) else None
    done = execution(None, job.settings, job.reader.kind)
    return Draft("empty" if reason else "ok", reason, counts, summary, done)


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


def read_tiles(folder: Path) -> tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.int64], NDArray[np.int64]]:
    """Row, column, x and y of the planned tiles, in order."""
    table, _ = read_table(folder / "tiles.parquet")
    row, col, x, y = (table.column(name).to_numpy() for name in ("row", "col", "x", "y"))
    return row, col, x, y


def _write_tiles(
    path: Path, grid: TileGrid, shares: Coverage, chosen: NDArray[np.intp], metadata: dict[str, JsonValue]
) -> None:
    rows, cols = grid.cells()
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
                }
            )


def _why_empty(grid: TileGrid) -> str:
    if not grid.n_rows * grid.n_cols:
        width, height = grid.slide_size
        covers = " x ".join(f"{side:.0f}" for side in grid.footprint)
        return f"the slide ({width} x {height} pixels) is smaller than one tile ({covers})"
    return "no tissue was found"


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
