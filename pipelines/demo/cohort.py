"""Writes the demo cohort: three synthetic slides, the cohort file that lists them, and the truth about them."""

import csv
import fcntl
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import imagecodecs
import numpy as np
import tifffile
from numpy.typing import NDArray

from pipelines.demo import staining, textures, tissue_painter
from pipelines.demo.staining import PaintedSection, render_rows
from pipelines.demo.textures import Bytes, Floats
from pipelines.demo.tissue_painter import Ellipse, SectionPainter, SectionPlan

MPP = 0.25  # level 0
TILE_PX = 448  # level-0 pixels of one cell of the truth: 224 px at 0.5 µm/px
JPEG_TILE_PX = 256
JPEG_QUALITY = 85
BAND_PX = 1024  # rows rendered at a time; a multiple of the JPEG tile and of the reduction
REDUCTION = 4  # from one level to the next
COHORT_FILE = "cohort.csv"
TRUTH_FILE = "truth.json"
TRUTH_RASTERS_FILE = "truth.npz"
RECORD_FILE = "written.json"


@dataclass(frozen=True)
class DemoSlide:
    """One slide of the cohort; `states_mpp` says whether the file itself gives its resolution."""

    name: str
    section: SectionPlan
    states_mpp: bool = True
    damaged: bool = False


@dataclass(frozen=True)
class TileBox:
    """A compressed tile of level 0, in level-0 pixels, and the cell of the truth that holds it."""

    x: int
    y: int
    width: int
    height: int
    row: int
    col: int


def demo_slides(scale: float = 1.0) -> tuple[DemoSlide, ...]:
    """The three slides; `scale` shrinks the slides and their tissue, not the cells."""

    def section(width: int, height: int, seed: int, pieces: tuple[Ellipse, Ellipse], dense: Ellipse) -> SectionPlan:
        return SectionPlan(2 * round(width * scale / 2), 2 * round(height * scale / 2), seed, pieces, dense)

    first = section(
        8130, 6070, 11, (Ellipse(0.27, 0.5, 0.2, 0.36, 8), Ellipse(0.74, 0.5, 0.2, 0.34, -12)),
        Ellipse(0.28, 0.46, 0.14, 0.19, 20),
    )  # fmt: skip
    second = section(
        7850, 6290, 23, (Ellipse(0.29, 0.47, 0.22, 0.3, -18), Ellipse(0.75, 0.56, 0.18, 0.33, 5)),
        Ellipse(0.75, 0.6, 0.125, 0.2, 0),
    )  # fmt: skip
    third = section(
        8390, 5930, 37, (Ellipse(0.3, 0.54, 0.23, 0.34, 15), Ellipse(0.76, 0.44, 0.17, 0.33, -6)),
        Ellipse(0.32, 0.6, 0.15, 0.18, -25),
    )  # fmt: skip
    return (
        DemoSlide("demo-1.svs", first),
        DemoSlide("demo-2.svs", second, damaged=True),
        DemoSlide("demo-3.svs", third, states_mpp=False),
    )


def write_demo_cohort(folder: Path) -> Path:
    """Write the demo cohort into `folder`, unless it is there already, and return its cohort file.

    Every call writes the same bytes; another processor or NumPy can move the last bits. A second process
    waits for the first. `demo-2.svs` has one damaged JPEG tile; `demo-3.svs` has no resolution of its own,
    the cohort file supplies it.
    """
    return write_cohort(folder, demo_slides())


def write_cohort(folder: Path, slides: Sequence[DemoSlide]) -> Path:
    """Write `slides`, their cohort file and their truth into `folder`; the record comes last."""
    folder.mkdir(parents=True, exist_ok=True)
    with _locked(folder):
        if not _is_finished(folder, slides):
            for stale in folder.glob(".writing-*"):  # of a killed process: the lock is ours
                shutil.rmtree(stale, ignore_errors=True)
            (folder / RECORD_FILE).unlink(missing_ok=True)
            with tempfile.TemporaryDirectory(prefix=".writing-", dir=folder) as name:
                _write_files(Path(name), slides)
                _publish(Path(name), folder, slides)
    return folder / COHORT_FILE


def _write_files(folder: Path, slides: Sequence[DemoSlide]) -> None:
    truth: dict[str, object] = {}
    rasters: dict[str, Floats] = {}
    for slide in slides:
        section = SectionPainter(slide.section).paint()
        damage = _tile_to_damage(section) if slide.damaged else None
        _write_svs(folder / slide.name, slide, section, damage)
        truth[slide.name] = _truth_of(slide, section, damage)
        for key, cells in _cells(section).items():
            rasters[f"{Path(slide.name).stem}.{key}"] = cells
    with (folder / COHORT_FILE).open("w", newline="", encoding="utf-8") as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow(("path", "mpp"))
        table.writerows((slide.name, "" if slide.states_mpp else MPP) for slide in slides)
    document = {"tile_px": TILE_PX, "slides": truth}
    (folder / TRUTH_FILE).write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    np.savez_compressed(folder / TRUTH_RASTERS_FILE, allow_pickle=False, **rasters)


def _truth_of(slide: DemoSlide, section: PaintedSection, damage: TileBox | None) -> dict[str, object]:
    outside = section.tissue & ~section.dense
    return {
        "width": slide.section.width,
        "height": slide.section.height,
        "mpp": MPP,
        "mpp_in_file": slide.states_mpp,
        "nuclei_fraction_dense": round(float(section.nuclei_count[section.dense].mean()) / 4, 6),
        "nuclei_fraction_outside": round(float(section.nuclei_count[outside].mean()) / 4, 6),
        "damaged_tile": vars(damage) if damage else None,
        "dense_polygon": [[round(float(x), 1), round(float(y), 1)] for x, y in section.dense_polygon],
    }


def _cells(section: PaintedSection) -> dict[str, Floats]:
    """Shares of each complete cell of the tile grid, as (rows, cols)."""
    return {
        "nuclei_fraction": _block_means(section.nuclei_count, TILE_PX // 2) / np.float32(4),
        "dense_fraction": _block_means(section.dense, TILE_PX // 2),
        "tissue_fraction": _block_means(section.tissue, TILE_PX // 2),
    }


def _block_means(image: NDArray[np.uint8] | NDArray[np.bool_], side: int) -> Floats:
    rows, cols = image.shape[0] // side, image.shape[1] // side
    blocks = image[: rows * side, : cols * side].reshape(rows, side, cols, side)
    means: Floats = (blocks.sum((1, 3), dtype=np.int64) / side**2).astype(np.float32)
    return means


def _tile_to_damage(section: PaintedSection) -> TileBox:
    """The compressed tile nearest the dense region that is all stroma and lies in one cell of the grid."""
    side = JPEG_TILE_PX // 2
    tissue, dense = _block_means(section.tissue, side), _block_means(section.dense, side)
    target = section.dense_polygon.mean(0) / JPEG_TILE_PX
    best: list[tuple[float, float, int, int]] = []
    for row, col in np.ndindex(*tissue.shape):
        ends = [(at * JPEG_TILE_PX // TILE_PX, ((at + 1) * JPEG_TILE_PX - 1) // TILE_PX) for at in (row, col)]
        if dense[row, col] == 0 and all(first == last for first, last in ends):
            far = float(np.hypot(col + 0.5 - target[0], row + 0.5 - target[1]))
            best.append((-float(tissue[row, col]), far, row, col))
    _, _, row, col = min(best)
    x, y = col * JPEG_TILE_PX, row * JPEG_TILE_PX
    return TileBox(x, y, JPEG_TILE_PX, JPEG_TILE_PX, y // TILE_PX, x // TILE_PX)


def _write_svs(path: Path, slide: DemoSlide, section: PaintedSection, damage: TileBox | None) -> None:
    """Levels 1, 4 and 16 and the thumbnail, in Aperio's order: level 0, thumbnail, the other levels."""
    width, height = slide.section.width, slide.section.height
    tiles, reduced = _encode_level_0(section, height)
    if damage is not None:
        index = damage.y // JPEG_TILE_PX * -(-width // JPEG_TILE_PX) + damage.x // JPEG_TILE_PX
        # Headers included: decoders pass over damage to the coefficients alone with a warning.
        tiles[index] = np.random.default_rng(slide.section.seed).bytes(len(tiles[index]))
    head = f"Aperio Image Library v12.0.0 \n{width}x{height}"
    text = f"{head} [0,0 {width}x{height}] (256x256) JPEG/RGB Q={JPEG_QUALITY}|Title = synthetic section, not a scan"
    if slide.states_mpp:
        text += f"|AppMag = {round(10 / MPP)}|MPP = {MPP:.4f}"
    smallest = _reduce(reduced)
    with tifffile.TiffWriter(path) as tif:
        _write_level(tif, tiles, (height, width), text, subfiletype=0)
        tif.write(
            np.ascontiguousarray(smallest[::2, ::2]), photometric="rgb", compression="lzw", rowsperstrip=16,
            description=f"{head} -> thumbnail", metadata=None, software=False,
        )  # fmt: skip
        for level in (reduced, smallest):
            size = f"{level.shape[1]}x{level.shape[0]}"
            text = f"{head} -> {size} JPEG/RGB Q={JPEG_QUALITY}"
            _write_level(tif, _encode_tiles(level), (level.shape[0], level.shape[1]), text, subfiletype=1)


def _write_level(
    tif: tifffile.TiffWriter, tiles: list[bytes], shape: tuple[int, int], text: str, subfiletype: int
) -> None:
    tif.write(
        iter(tiles), shape=(*shape, 3), dtype="uint8", tile=(JPEG_TILE_PX, JPEG_TILE_PX), photometric="ycbcr",
        subsampling=(2, 2), compression="jpeg", description=text, subfiletype=subfiletype, metadata=None,
        software=False,
    )  # fmt: skip


def _encode_level_0(section: PaintedSection, height: int) -> tuple[list[bytes], Bytes]:
    tiles: list[bytes] = []
    reduced: list[Bytes] = []
    for top in range(0, height, BAND_PX):
        band = render_rows(section, top, min(top + BAND_PX, height))
        tiles += _encode_tiles(band)
        reduced.append(_reduce(band))
    return tiles, np.concatenate(reduced)


def _encode_tiles(image: Bytes) -> list[bytes]:
    side = JPEG_TILE_PX
    rows, cols = -(-image.shape[0] // side), -(-image.shape[1] // side)
    spare = (0, rows * side - image.shape[0]), (0, cols * side - image.shape[1]), (0, 0)
    padded = np.pad(image, spare, mode="edge")
    return [
        bytes(imagecodecs.jpeg8_encode(np.ascontiguousarray(tile), level=JPEG_QUALITY, subsampling="420"))
        for row in np.split(padded, rows, axis=0)
        for tile in np.split(row, cols, axis=1)
    ]


def _reduce(image: Bytes) -> Bytes:
    """Area means of blocks of `REDUCTION` pixels; a remainder at the right and bottom is dropped."""
    rows, cols = image.shape[0] // REDUCTION, image.shape[1] // REDUCTION
    total = np.zeros((rows, cols, 3), np.uint16)
    for dy, dx in np.ndindex(REDUCTION, REDUCTION):
        total += image[dy : rows * REDUCTION : REDUCTION, dx : cols * REDUCTION : REDUCTION]
    return ((total + REDUCTION**2 // 2) // REDUCTION**2).astype(np.uint8)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold the folder itself locked, so that two processes do not write the cohort at once."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _publish(source: Path, folder: Path, slides: Sequence[DemoSlide]) -> None:
    names = sorted(path.name for path in source.iterdir())
    record = {"recipe": _recipe(slides), "files": {name: _sha256(source / name) for name in names}}
    (source / RECORD_FILE).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    for name in (*names, RECORD_FILE):
        (source / name).replace(folder / name)


def _is_finished(folder: Path, slides: Sequence[DemoSlide]) -> bool:
    try:
        record = json.loads((folder / RECORD_FILE).read_text(encoding="utf-8"))
        return record["recipe"] == _recipe(slides) and all(
            _sha256(folder / name) == digest for name, digest in record["files"].items()
        )
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return False  # absent, damaged or of another version: written anew


def _recipe(slides: Sequence[DemoSlide]) -> str:
    """Digest of the plans and of the code that turns them into files."""
    digest = hashlib.sha256(repr(slides).encode())
    for source in (staining.__file__, textures.__file__, tissue_painter.__file__, __file__):
        digest.update(Path(source).read_bytes())
    return digest.hexdigest()


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
