"""What every slide reader must do, as a class to subclass: one suite, whatever decodes the pixels."""

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest

from inference.errors import TileReadError
from inference.slides.reader import MAX_REGION_PIXELS, SlideReader
from inference.slides.resolution import REDUCTIONS
from tests.inference.slides.known_slides import BACKGROUND, DAMAGED, HALVES, MISSING, TILE, Known, tile_of
from tests.inference.slides.synthetic import Size


class SlideReaderContract(ABC):
    """Subclass as `Test…`, say how to write and open a slide, and every reader is held to the same.

    Attributes:
        sizes: of the levels.
        bound: grey levels by which a reduced pixel may differ from the area mean, in the mean and anywhere: what
            rounding leaves, or more where a JPEG decoder reduces by a smaller inverse DCT.
        damages: whether the reader can meet damage.
    """

    sizes: ClassVar[Sequence[Size]] = HALVES
    bound: ClassVar[tuple[float, float]] = (0.51, 0.51)
    damages: ClassVar[bool] = True

    _made: ClassVar[dict[type, Known]] = {}

    @abstractmethod
    def make(self, folder: Path) -> Known:
        """Write the slide."""

    @abstractmethod
    def open(self, known: Known) -> SlideReader:
        """Open it with the reader under test."""

    @pytest.fixture
    def known(self, tmp_path_factory: pytest.TempPathFactory) -> Known:
        if type(self) not in self._made:
            self._made[type(self)] = self.make(tmp_path_factory.mktemp(type(self).__name__))
        return self._made[type(self)]

    @pytest.fixture
    def reader(self, known: Known) -> Iterator[SlideReader]:
        with self.open(known) as reader:
            yield reader

    # --- what it says of itself -------------------------------------------------------------------------------

    def test_it_says_what_the_slide_is(self, reader: SlideReader) -> None:
        assert tuple(reader.level_sizes) == tuple(self.sizes)
        assert reader.mpp == pytest.approx((0.5, 0.5))
        assert reader.background == BACKGROUND
        assert all((reader.vendor, reader.kind, reader.reason))
        for level in range(len(self.sizes)):
            assert min(reader.stored_tile(level)) > 0

    # --- regions ----------------------------------------------------------------------------------------------

    def test_any_region_of_any_level_has_exactly_the_known_pixels(self, known: Known, reader: SlideReader) -> None:
        """In a tile, across tiles, of one pixel, of the whole level, and beyond every edge, where alpha is 0."""
        for level, (width, height) in enumerate(self.sizes):
            for region in _regions(width, height):
                if not _touches(region, level):
                    found = reader.read_region(level, *region)
                    assert found.dtype == np.uint8
                    assert np.array_equal(found, known.region(level, *region)), f"level {level} {region}"

    def test_missing_pixels_are_transparent(self, reader: SlideReader) -> None:
        level, row, column = MISSING
        assert (reader.read_region(level, column * TILE, row * TILE, TILE, TILE) == 0).all()
        corner = reader.read_region(level, column * TILE - 4, row * TILE - 4, 8, 8)[..., 3]
        assert (corner[4:, 4:] == 0).all()
        assert (corner[:4] == 255).all()
        assert (corner[:, :4] == 255).all()

    def test_a_region_that_cannot_be_is_refused_and_never_blank(self, known: Known, reader: SlideReader) -> None:
        assert not _taken(lambda region: reader.read_region(*region), _IMPOSSIBLE)
        assert np.array_equal(reader.read_region(0, 3, 4, 5, 6), known.region(0, 3, 4, 5, 6)), "it reads on"

    # --- reductions -------------------------------------------------------------------------------------------

    @pytest.mark.parametrize("reduction", REDUCTIONS)
    def test_reduced_pixels_are_the_area_mean_to_the_last_row_and_column(
        self, known: Known, reader: SlideReader, reduction: int
    ) -> None:
        """Of what the level has: nothing that lies beyond it may be mixed in."""
        for level, size in enumerate(self.sizes):
            rgb, missing = known.reduced(level, reduction)
            width, height = (-(-side // reduction) for side in size)
            assert rgb.shape[:2] == (height, width)
            for x, y, w, h in _regions(width, height):
                x0, y0, x1, y1 = max(x, 0), max(y, 0), min(x + w, width), min(y + h, height)
                if x0 >= x1 or y0 >= y1 or _touches((x0, y0, x1 - x0, y1 - y0), level, reduction):
                    continue
                found = reader.read_reduced(level, reduction, x0, y0, x1 - x0, y1 - y0)
                off = np.abs(found.rgb - rgb[y0:y1, x0:x1])
                where = f"level {level} {(x0, y0, x1 - x0, y1 - y0)} / {reduction}"
                assert off.mean() <= self.bound[0] or off.size < 1000, where
                assert off.max() <= self.bound[1], where
                share = np.zeros((y1 - y0, x1 - x0)) if found.missing is None else found.missing
                assert np.abs(share - missing[y0:y1, x0:x1]).max() <= 1e-6, where

    def test_what_misses_nothing_says_so(self, reader: SlideReader) -> None:
        assert reader.read_reduced(0, 2, 0, 0, 64, 64).missing is None

    @pytest.mark.parametrize("reduction", REDUCTIONS)
    def test_a_fully_missing_part_is_background_and_counted_whole(self, reader: SlideReader, reduction: int) -> None:
        level, row, column = MISSING
        side = TILE // reduction
        found = reader.read_reduced(level, reduction, column * side, row * side, side, side)
        assert (found.rgb == BACKGROUND).all()
        assert found.missing is not None
        assert (found.missing == 1).all()

    @pytest.mark.parametrize("reduction", REDUCTIONS)
    def test_blocks_cover_a_level_and_give_the_same_pixels_as_any_other_cut(
        self, reader: SlideReader, reduction: int
    ) -> None:
        rng = np.random.default_rng(reduction)
        for level, size in enumerate(self.sizes):
            if level == DAMAGED[0] and self.damages:
                continue
            width, height = (-(-side // reduction) for side in size)
            block_w, block_h = reader.block_size(level, reduction)
            assert min(block_w, block_h) > 0
            whole, missing = np.zeros((height, width, 3), np.uint8), np.zeros((height, width))
            for y in range(0, height, block_h):
                for x in range(0, width, block_w):
                    w, h = min(block_w, width - x), min(block_h, height - y)
                    block = reader.read_reduced(level, reduction, x, y, w, h)
                    whole[y : y + h, x : x + w] = block.rgb
                    missing[y : y + h, x : x + w] = 0 if block.missing is None else block.missing
            for _ in range(6):
                w, h = int(rng.integers(1, width + 1)), int(rng.integers(1, height + 1))
                x, y = int(rng.integers(0, width - w + 1)), int(rng.integers(0, height - h + 1))
                cut = reader.read_reduced(level, reduction, x, y, w, h)
                assert np.array_equal(cut.rgb, whole[y : y + h, x : x + w])
                share = np.zeros((h, w)) if cut.missing is None else cut.missing
                assert np.array_equal(share, missing[y : y + h, x : x + w])

    def test_a_reduced_region_that_leaves_its_level_is_refused_and_never_filled_with_anything(
        self, reader: SlideReader
    ) -> None:
        assert not _taken(lambda region: reader.read_reduced(*region), _LEAVING)

    # --- damage -----------------------------------------------------------------------------------------------

    @pytest.mark.parametrize("reduction", REDUCTIONS)
    def test_damage_fails_what_touches_it_and_nothing_else_ever(
        self, known: Known, reader: SlideReader, reduction: int
    ) -> None:
        if not self.damages:
            pytest.skip("this reader meets no damage")
        level, row, column = DAMAGED
        side = TILE // reduction
        x, y = column * side, row * side
        around = [(x - side, y, side, side), (x + side, y, side, side), (x, y - side, side, side)]
        before = [reader.read_reduced(level, reduction, *region).rgb for region in around]
        for inside in ((x, y, 4, 4), (x - 2, y - 2, 4, 4), (x + side - 2, y + 4, 4, 4), (0, y, 6 * side, 4)):
            with pytest.raises(TileReadError) as raised:
                reader.read_reduced(level, reduction, *inside)
            assert str(known.path.parent) not in str(raised.value), "a name may be an accession number"
            with pytest.raises(TileReadError):
                reader.read_region(level, *(value * reduction for value in inside))
            for region, truth in zip(around, before, strict=True):
                assert np.array_equal(reader.read_reduced(level, reduction, *region).rgb, truth)
        full = (x * reduction - TILE, y * reduction, TILE, TILE)
        assert np.array_equal(reader.read_region(level, *full), known.region(level, *full))

    # --- threads and closing ----------------------------------------------------------------------------------

    def test_threads_that_read_at_once_get_their_own_pixels(self, known: Known, reader: SlideReader) -> None:
        """Regions, reductions and damage, all mixed."""
        barrier, (halved, _) = threading.Barrier(4), known.reduced(1, 2)

        def read(number: int) -> None:
            rng = np.random.default_rng(number)
            barrier.wait(10)
            for _ in range(12):
                level = int(rng.integers(0, len(self.sizes)))
                width, height = self.sizes[level]
                x, y = int(rng.integers(0, width - 60)), int(rng.integers(0, height - 50))
                if _touches((x, y, 60, 50), level) and self.damages:
                    with pytest.raises(TileReadError):
                        reader.read_region(level, x, y, 60, 50)
                else:
                    assert np.array_equal(reader.read_region(level, x, y, 60, 50), known.region(level, x, y, 60, 50))
                x, y = int(rng.integers(0, 140)), int(rng.integers(0, 100))
                found = reader.read_reduced(1, 2, x, y, 50, 40).rgb
                assert np.abs(found - halved[y : y + 40, x : x + 50]).max() <= self.bound[1]

        with ThreadPoolExecutor(4) as pool:
            for done in [pool.submit(read, number) for number in range(4)]:
                done.result(60)

    def test_a_closed_reader_refuses_to_read(self, known: Known) -> None:
        reader = self.open(known)
        reader.read_region(0, 0, 0, 8, 8)
        reader.close()
        reader.close()
        for level in range(len(self.sizes)):
            with pytest.raises(ValueError):  # noqa: PT011 - its text is the reader's own
                reader.read_region(level, 0, 0, 8, 8)
            with pytest.raises(ValueError):  # noqa: PT011
                reader.read_reduced(level, 2, 0, 0, 8, 8)

    def test_reads_under_way_when_it_is_closed_end_right_or_are_refused(self, known: Known) -> None:
        """Never with another file's bytes: a descriptor's number is soon another file's."""
        reader = self.open(known)
        truth, started = known.region(1, 100, 90, 80, 70), threading.Barrier(4)

        def read() -> int:
            reads = 0
            started.wait(10)
            while reads < 5000:
                try:
                    found = reader.read_region(1, 100, 90, 80, 70)
                except ValueError:
                    return reads
                assert np.array_equal(found, truth)
                reads += 1
            raise AssertionError("it reads on for ever")

        with ThreadPoolExecutor(3) as pool:
            reading = [pool.submit(read) for _ in range(3)]
            started.wait(10)
            reader.read_region(0, 0, 0, 8, 8)
            reader.close()
            for done in reading:
                done.result(60)

    def test_a_closed_reader_holds_no_file_open(self, known: Known) -> None:
        descriptors = Path("/proc/self/fd")
        if not descriptors.is_dir():
            pytest.skip("this system does not list a process's open files")
        self.open(known).close()
        before = len(list(descriptors.iterdir()))
        for _ in range(3):
            with self.open(known) as reader:
                reader.read_region(1, 0, 0, 8, 8)
        assert len(list(descriptors.iterdir())) <= before


_IMPOSSIBLE = [
    (-1, 0, 0, 8, 8),
    (3, 0, 0, 8, 8),
    (0, 0, 0, 0, 8),
    (0, 0, 0, 8, 0),
    (0, 0, 0, -8, 8),
    (0, 804, 0, 8, 8),
    (0, 0, 597, 8, 8),
    (0, -8, 0, 8, 8),
    (0, 0, -8, 8, 8),
    (0, 0, 0, MAX_REGION_PIXELS, 2),
    (0, 0, 0, 1 << 31, 1 << 31),
]
"""Level and rectangle of what no reader has."""

_LEAVING = [
    (3, 2, 0, 0, 8, 8),
    (-1, 2, 0, 0, 8, 8),
    (0, 2, 0, 0, 0, 8),
    (0, 2, 0, 0, 8, -8),
    (0, 2, -1, 0, 8, 8),
    (0, 2, 0, -1, 8, 8),
    (0, 2, 395, 0, 8, 8),
    (0, 2, 0, 292, 8, 8),
    (0, 2, 402, 0, 8, 8),
    (2, 8, 0, 0, 200, 150),
    (0, 1, 0, 0, 1 << 31, 1 << 31),
]
"""Level, reduction and rectangle of what no reader has."""


def _taken(read: Callable[[tuple[int, ...]], object], regions: Sequence[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Those that are not refused with a `ValueError`."""
    taken = []
    for region in regions:
        try:
            read(region)
        except ValueError:
            continue
        taken.append(region)
    return taken


def _regions(width: int, height: int) -> list[tuple[int, int, int, int]]:
    """x, y, width and height of regions that try a level of a size, some beyond it."""
    tried = [
        (0, 0, width, height),
        (0, 0, 1, 1),
        (width - 1, height - 1, 1, 1),
        (5, 7, 11, 13),
        (width // 3, height // 3, 37, 29),
        (TILE - 3, TILE - 5, 7, 9),
        (TILE, TILE, TILE, TILE),
        (0, height // 2, width, 3),
        (width // 2, 0, 3, height),
        (width - 21, height - 17, 40, 40),
        (-9, -7, 20, 20),
        (-5, height - 6, width + 11, 12),
    ]
    return [region for region in tried if region[0] < width and region[1] < height]


def _touches(region: tuple[int, int, int, int], level: int, reduction: int = 1) -> bool:
    """Whether a region, in reduced pixels, needs the damaged tile."""
    if level != DAMAGED[0]:
        return False
    x, y, width, height = (value * reduction for value in region)
    rows, columns = tile_of(*DAMAGED)
    return bool(x < columns.stop and x + width > columns.start and y < rows.stop and y + height > rows.start)
