"""Every reader keeps the contract of `SlideReader`; how fast it decodes is its own affair."""

from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest

from inference.errors import TileReadError
from inference.slides.compressed_reader import CompressedReader
from inference.slides.opening import open_slide
from inference.slides.openslide_reader import OpenSlideReader
from inference.slides.process_reader import ProcessReader
from inference.slides.reader import SlideReader, require_region
from tests.inference.slides.conformance import SlideReaderContract
from tests.inference.slides.known_slides import (
    APERIO_JP2000_RGB,
    DAMAGED,
    HALVES,
    MISSING,
    ODD,
    TILE,
    Known,
    tile_of,
    write_known,
)
from tests.inference.slides.synthetic import ArrayReader, Pixels, coordinates

JPEG_BOUND = (2.0, 24.0)
"""A smaller inverse DCT is no area mean: 2 grey levels in the mean is what the fast reader allows itself. The largest
difference of a pixel is 5 on these slides, and 22 in a level's last row and column, into which full decoding bleeds
the chroma of the encoder's filling."""


class MemoryReader(ArrayReader):
    """A slide in memory that minds its edges, as a reader that only knows regions has to."""

    _closed = False

    def read_region(self, level: int, x: int, y: int, width: int, height: int) -> Pixels:
        if self._closed:
            raise ValueError("S1: the slide is closed")
        require_region(self, "S1", level, x, y, width, height)
        found = np.zeros((height, width, 4), np.uint8)
        left, top = max(x, 0), max(y, 0)
        inside = super().read_region(level, left, top, x + width - left, y + height - top)
        found[top - y :, left - x :] = inside
        return found

    def close(self) -> None:
        self._closed = True


class TestArrays(SlideReaderContract):
    """What a reader inherits that only knows regions."""

    sizes = ODD

    def make(self, folder: Path) -> Known:
        levels = [
            np.dstack([coordinates(k, size), np.full(size[::-1], 255, np.uint8)]) for k, size in enumerate(self.sizes)
        ]
        levels[MISSING[0]][tile_of(*MISSING)] = 0
        return Known(levels)

    def open(self, known: Known) -> SlideReader:
        return MemoryReader(known.levels, tile=TILE, damaged=[DAMAGED])

    def test_a_reduction_reads_no_more_than_it_needs(self, known: Known) -> None:
        reader = MemoryReader(known.levels, tile=TILE)
        reader.read_reduced(0, 8, 3, 5, 7, 2)
        assert reader.requests == [(0, 24, 40, 56, 16)]


class TestOpenSlideDeflate(SlideReaderContract):
    """Where OpenSlide does not interpolate it must be exact too."""

    sizes = HALVES

    def make(self, folder: Path) -> Known:
        return write_known(folder / "s.tif", self.sizes, "zlib")

    def open(self, known: Known) -> SlideReader:
        return OpenSlideReader(known.path, "S1")


class TestOpenSlideJpeg(TestOpenSlideDeflate):
    """JPEG, which OpenSlide's own code decodes; what OpenSlide reduces is averaged here, so the bound is exact."""

    def make(self, folder: Path) -> Known:
        return write_known(folder / "s.tif", self.sizes, "jpeg")


class _CompressedTiles(SlideReaderContract):
    sizes = ODD
    compression: ClassVar[str | int | None]
    suffix: ClassVar[str] = ".tif"

    def make(self, folder: Path) -> Known:
        return write_known(folder / f"s{self.suffix}", self.sizes, self.compression)

    def open(self, known: Known) -> SlideReader:
        return open_slide(known.path, "S1")

    def test_its_compressed_tiles_are_read_directly(self, reader: SlideReader) -> None:
        """Else this is OpenSlide tested once more."""
        assert isinstance(reader, CompressedReader)
        assert reader.block_size(0, 1) == (TILE, TILE)
        assert "of its levels through OpenSlide" not in reader.reason


class TestTiffJpeg(_CompressedTiles):
    compression = "jpeg"
    bound = JPEG_BOUND


class TestTiffJpegOfWholeBlocks(_CompressedTiles):
    """Levels that end with a block of 8 pixels: no filling is averaged into their last pixels."""

    compression = "jpeg"
    sizes = ((800, 592), (400, 296), (200, 152))
    bound = JPEG_BOUND


class TestTiffRaw(_CompressedTiles):
    compression = None

    def test_damage_cannot_be_seen_in_raw_pixels(self, reader: SlideReader) -> None:
        assert (reader.read_region(*_damaged_place())[..., :3] == 0xAA).all()

    damages = False


class TestTiffLzw(_CompressedTiles):
    compression = "lzw"


class TestTiffDeflate(_CompressedTiles):
    compression = "zlib"


class TestTiffZstandard(_CompressedTiles):
    compression = "zstd"


class TestAperioJpeg2000(_CompressedTiles):
    """Stored with the reversible wavelet, so that every pixel is known; reduced by the area mean."""

    compression = APERIO_JP2000_RGB
    suffix = ".svs"


class _TifffileAlone(_CompressedTiles):
    """Slides, or levels, that OpenSlide does not see."""

    vendor: ClassVar[str]

    def test_its_levels_are_those_that_tifffile_finds(self, reader: SlideReader) -> None:
        assert reader.vendor == self.vendor
        assert "tifffile" in reader.kind


class TestOmeTiff(_TifffileAlone):
    """Its lower levels are SubIFDs."""

    compression, suffix, vendor = "zlib", ".ome.tif", "ome-tiff"


class TestOmeTiffJpeg(_TifffileAlone):
    compression, suffix, vendor = "jpeg", ".ome.tif", "ome-tiff"
    bound = JPEG_BOUND


class TestTiffWebp(_TifffileAlone):
    """A codec that OpenSlide does not have, here without loss."""

    compression, vendor = "webp", "tiff"
    sizes = HALVES  # tifffile takes no 1/8 for a level of a plain pyramid


class TestProcess(TestOpenSlideDeflate):
    """A reader in a process of its own, here around the compressed tiles."""

    sizes = ODD

    def open(self, known: Known) -> SlideReader:
        return ProcessReader(known.path, "S1", timeout_s=60, processes=2)

    def test_its_pixels_come_from_another_process(self, reader: SlideReader) -> None:
        assert reader.kind.endswith("in a process of its own")


def _damaged_place() -> tuple[int, int, int, int, int]:
    level, row, column = DAMAGED
    return level, column * TILE, row * TILE, TILE, TILE


def test_the_suite_itself_tells_a_wrong_pixel(tmp_path: Path) -> None:
    """A reader that shifts a single level by a pixel must fail it."""

    class Shifted(MemoryReader):
        def read_region(self, level: int, x: int, y: int, width: int, height: int) -> Pixels:
            found = super().read_region(level, x, y, width, height)
            return np.roll(found, 1, axis=1) if level == 2 else found

    suite = TestArrays()
    known = suite.make(tmp_path)
    reader = Shifted(known.levels, tile=TILE, damaged=[DAMAGED])
    suite.test_missing_pixels_are_transparent(reader)
    with pytest.raises(AssertionError, match="level 2"):
        suite.test_any_region_of_any_level_has_exactly_the_known_pixels(known, reader)


def test_the_suite_itself_tells_a_tile_that_fails_its_neighbours(tmp_path: Path) -> None:
    class Poisoned(MemoryReader):
        broken = False

        def read_region(self, level: int, x: int, y: int, width: int, height: int) -> Pixels:
            if self.broken:
                raise TileReadError("damaged")
            try:
                return super().read_region(level, x, y, width, height)
            except TileReadError:
                self.broken = True
                raise

    suite = TestArrays()
    known = suite.make(tmp_path)
    with pytest.raises(TileReadError):
        suite.test_damage_fails_what_touches_it_and_nothing_else_ever(
            known, Poisoned(known.levels, tile=TILE, damaged=[DAMAGED]), 1
        )
