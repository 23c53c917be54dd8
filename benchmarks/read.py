"""How fast tiles are read, against the decoder alone, OpenSlide and pyvips: `python -m benchmarks.read`.

The same tiles of the same slide by every reader, in turn, five times in one run; the ratios compare medians. Bare
decoding is each JPEG tile that is touched, decoded once at the same scale, its bytes in memory and its pixels dropped.
Slides are written anew from real pixels by a script beside the test data, since large slides are not kept.
"""

import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import openslide
import pyvips
import tifffile
from PIL import Image

from benchmarks._bench import OUT, machine, print_table, write_json
from inference.slides._tiff_levels import level_of
from inference.slides.discovery import discover
from inference.slides.opening import open_slide
from inference.slides.overview import read_overview
from inference.slides.readahead import CHUNK, ReadAhead
from inference.slides.resolution import plan_reading
from inference.slides.sampling import TileSampler, make_grid

SHARED = Path(os.environ.get("SHARED_DATA", "../shared/data"))
TILE_PX, TARGET_MPP, REPEATS, TILES = 224, 0.5, 5, 1000
SMALL = {
    "jp2k": ("slides/tcga-cr-7395-01a-01-ts1.svs", 0.25),
    "dicom": ("derived/dicom-jpeg/volume-0.dcm", 0.499),
    "ndpi": ("slides/test3-DAPI-2-(387).ndpi", 0.2282),
}
"""Small slides of other formats and their µm/px: the time to open them counts for much."""

Rates = dict[str, float]


@dataclass(frozen=True)
class Case:
    """A slide and the tiles that every reader reads, in whole grid rows around the middle."""

    path: Path
    mpp: tuple[float, float] | None
    tiles: int

    def sampler(self) -> TileSampler:
        (ref,) = discover([self.path]).slides
        reader = open_slide(ref.path, "slide", ref.files)
        mpp = reader.mpp or self.mpp or (TARGET_MPP, TARGET_MPP)
        plan = plan_reading("slide", reader.level_sizes, mpp, TARGET_MPP)
        grid = make_grid(reader.level_sizes[0], mpp, plan, TILE_PX, TILE_PX)
        rows, cols = grid.cells()
        wanted = max(1, min(grid.n_rows, self.tiles // max(1, grid.n_cols)))
        chosen = abs(rows - grid.n_rows // 2) <= wanted // 2
        return TileSampler(reader, plan, grid, rows[chosen], cols[chosen])


def main() -> None:
    about = machine("openslide-python", "openslide-bin", "simplejpeg", "pyvips-binary", "numpy")
    slide = large_slide(30_000, 24_000)
    found = measure_jpeg(slide)
    targets = {"fast_vs_openslide": "at least 5", "fast_vs_decode": "at least 0.6", "thread_scaling_vs_decode": "0.9"}
    for label, (name, mpp) in SMALL.items():
        if (SHARED / name).is_file():
            found |= {f"{label}_{key}": value for key, value in measure_other(SHARED / name, mpp).items()}
    found["rss_mb"] = peak_rss_mb(large_slide(100_000, 80_000))
    rows = [(name, value, targets.get(name, "below 1000" if name == "rss_mb" else "")) for name, value in found.items()]
    print_table(f"reading: tiles of {TILE_PX} px at {TARGET_MPP} µm/px, median of {REPEATS}", rows, about)
    print("written to", write_json("read", {**found, "machine": about}))


def large_slide(width: int, height: int) -> Path:
    """A slide of that size, written once."""
    path = OUT / f"slide-{width}x{height}.svs"
    if not path.is_file():
        OUT.mkdir(parents=True, exist_ok=True)
        maker = SHARED.parent / "tools" / "make_large_slide.py"
        part = path.with_suffix(".part.svs")
        size = ["--width", str(width), "--height", str(height)]
        subprocess.run([sys.executable, str(maker), str(part), *size], check=True)  # noqa: S603 - our own arguments
        part.rename(path)
    return path


def measure_jpeg(path: Path) -> Rates:
    """Rates on a JPEG slide, and their ratios."""
    case = Case(path, None, TILES)
    sampler = case.sampler()
    starts, bare = sampler.positions, BareDecode(path, sampler)
    few = starts[:, ::8]  # it is slow
    with ThreadPoolExecutor(2) as pool:
        taken = in_turn(
            {
                "openslide": lambda: partial(OpenSlideTiles(path, sampler).read, few),
                "pyvips": lambda: partial(VipsTiles(path).read, starts),
                "fast": lambda: partial(read_all, case.sampler(), 1),
                "fast_2_threads": lambda: partial(read_all, case.sampler(), 2),
                "decode": lambda: bare.run,
                "decode_2_threads": lambda: lambda: list(pool.map(bare.part, (0, 1))),
            }
        )
    counts = dict.fromkeys(taken, starts.shape[1]) | {"openslide": few.shape[1]}
    rates = {name: counts[name] / statistics.median(times) for name, times in taken.items()}
    scaling = {name: rates[f"{name}_2_threads"] / rates[name] for name in ("fast", "decode")}
    return {
        "fast_vs_openslide": rates["fast"] / rates["openslide"],
        "fast_vs_decode": rates["fast"] / rates["decode"],
        "thread_scaling_vs_decode": scaling["fast"] / scaling["decode"],
        "fast_vs_pyvips": rates["fast"] / rates["pyvips"],
        "fast_2_threads_gain": scaling["fast"],
        "decode_2_threads_gain": scaling["decode"],
        **{f"{name}_tiles_per_s": rate for name, rate in rates.items()},
    }


def measure_other(path: Path, mpp: float) -> Rates:
    """This reader and OpenSlide tile by tile on another format."""
    case = Case(path, (mpp, mpp), TILES)
    sampler = case.sampler()
    starts = sampler.positions
    taken = in_turn(
        {
            "openslide": lambda: partial(OpenSlideTiles(path, sampler).read, starts),
            "fast": lambda: partial(read_all, case.sampler(), 1),
        }
    )
    rates = {name: starts.shape[1] / statistics.median(times) for name, times in taken.items()}
    return {"fast_vs_openslide": rates["fast"] / rates["openslide"], "tiles_per_s": rates["fast"]}


def in_turn(ways: dict[str, Callable[[], Callable[[], object]]]) -> dict[str, list[float]]:
    """Seconds of what each way, once opened, does: round by round, so that a busy machine slows all alike.

    The first round does not count.
    """
    taken: dict[str, list[float]] = {name: [] for name in ways}
    for repeat in range(REPEATS + 1):
        for name, opened in ways.items():
            way = opened()
            clock = time.perf_counter()
            way()
            if repeat:
                taken[name].append(time.perf_counter() - clock)
    return taken


def read_all(sampler: TileSampler, threads: int) -> int:
    """Every tile, as the engine reads them."""
    if threads == 1:
        return sum(len(sampler.read(index).rgb) for index in range(len(sampler)))
    return sum(len(t.rgb) for t in ReadAhead(sampler.read, len(sampler), threads=threads, ahead=8 * CHUNK))


class BareDecode:
    """The compressed tiles that a sampler touches, decoded and dropped."""

    def __init__(self, path: Path, sampler: TileSampler) -> None:
        file = path.open("rb", buffering=0)
        page = tifffile.TiffFile(str(path)).pages[0]
        self._level = level_of(file.fileno(), page)
        self._reduction = sampler.plan.reduction
        self._bytes = [self._level.compressed(column, row) for column, row in sampler.blocks()]
        file.close()

    def run(self) -> None:
        for data in self._bytes:
            self._level.decoder(data, self._reduction)

    def part(self, which: int) -> None:
        for data in self._bytes[which::2]:
            self._level.decoder(data, self._reduction)


class OpenSlideTiles:
    """What most pipelines do: `read_region` per tile from the same level, then a resize."""

    def __init__(self, path: Path, sampler: TileSampler) -> None:
        self._slide = openslide.OpenSlide(str(path))
        self._level = sampler.plan.level
        self._size = tuple(round(side * sampler.plan.reduction) for side in sampler.extent)

    def read(self, starts: np.ndarray) -> None:
        for x, y in starts.T:
            region = self._slide.read_region((round(x), round(y)), self._level, self._size).convert("RGB")
            if region.size != (TILE_PX, TILE_PX):
                region = region.resize((TILE_PX, TILE_PX), Image.Resampling.BILINEAR)
            np.asarray(region)


class VipsTiles:
    """pyvips' region fetch, and its shrink."""

    def __init__(self, path: Path) -> None:
        self._image = pyvips.Image.new_from_file(str(path), access="random")
        self._side = 2 * TILE_PX

    def read(self, starts: np.ndarray) -> None:
        region = pyvips.Region.new(self._image)
        for x, y in starts.T:
            data = region.fetch(round(x), round(y), self._side, self._side)
            tile = np.frombuffer(data, np.uint8).reshape(self._side, self._side, -1)[..., :3]
            Image.fromarray(np.ascontiguousarray(tile)).reduce(2)


def peak_rss_mb(path: Path) -> float:
    """Peak memory of a process of its own that reads rows of tiles across the whole width of a slide."""
    command = [sys.executable, "-m", "benchmarks.read", "--peak-rss", str(path)]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)  # noqa: S603


def read_rows(path: Path) -> float:
    """Reads the overview and about 20,000 tiles of a slide; the process's peak RSS in MB."""
    with open_slide(path, "slide") as reader:
        read_overview(reader, reader.mpp or (TARGET_MPP, TARGET_MPP))
    read_all(Case(path, None, 20_000).sampler(), 2)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


if __name__ == "__main__":
    if "--peak-rss" in sys.argv:
        print(read_rows(Path(sys.argv[-1])))
    else:
        main()
