"""Slides that OpenSlide does not open, or of which it sees one level: the same pixels, levels and resolution."""

from pathlib import Path

import numpy as np
import pytest
import tifffile

from inference.errors import TileReadError, UnreadableSlide
from inference.slides.opening import open_slide
from tests.inference.slides.synthetic import Size, coordinates, noise, write_pyramid

SIZES: list[Size] = [(1000, 700), (500, 350), (250, 175)]


def _ome(path: Path, *, compression: str = "zlib", unit: str = "µm", size: float = 0.25, tile: int = 128) -> Path:
    """An OME-TIFF whose smaller levels are SubIFDs of the first."""
    with tifffile.TiffWriter(path, ome=True) as tiff:
        about = {"axes": "YXS", "PhysicalSizeX": size, "PhysicalSizeXUnit": unit, "PhysicalSizeY": size * 1.5}
        about["PhysicalSizeYUnit"] = unit
        for level, size_px in enumerate(SIZES):
            tiff.write(
                coordinates(level, size_px),
                photometric="rgb",
                tile=(tile, tile),
                compression=compression,
                subifds=None if level else len(SIZES) - 1,
                subfiletype=int(level > 0),
                metadata=None if level else about,
            )
    return path


@pytest.mark.parametrize(("unit", "size"), [("µm", 0.25), ("nm", 250.0), ("mm", 0.00025)])
def test_all_levels_of_an_ome_tiff_are_read_exactly_with_its_resolution(tmp_path: Path, unit: str, size: float) -> None:
    with open_slide(_ome(tmp_path / "s.ome.tif", unit=unit, size=size), "S1") as slide:
        assert (slide.vendor, list(slide.level_sizes)) == ("ome-tiff", SIZES)
        assert slide.mpp == pytest.approx((0.25, 0.375))
        assert "OpenSlide sees 1 of its 3 levels" in slide.reason
        for level, (width, height) in enumerate(SIZES):
            assert np.array_equal(
                slide.read_region(level, 0, 0, width, height)[..., :3], coordinates(level, (width, height))
            )


def test_the_shared_ome_tiff_has_four_levels_as_tifffile_sees_them(shared_data: Path) -> None:
    path = shared_data / "derived" / "ome-pyramid.ome.tif"
    with open_slide(path, "S1") as slide, tifffile.TiffFile(path) as tiff:
        assert slide.quickhash
        for level, stored in enumerate(tiff.series[0].levels):
            truth = stored.asarray()
            height, width = truth.shape[:2]
            assert slide.level_sizes[level] == (width, height)
            assert np.array_equal(slide.read_region(level, 0, 0, width, height)[..., :3], truth)


@pytest.mark.parametrize("compression", ["webp", "zstd", "packbits", "lzw", "zlib"])
def test_tiled_tiffs_of_any_lossless_codec_are_read_exactly(tmp_path: Path, compression: str) -> None:
    """OpenSlide opens none of WebP; tifffile does."""
    path = write_pyramid(tmp_path / "s.tif", SIZES[:2], coordinates, compression=compression, mpp=(0.5, 0.25))
    with open_slide(path, "S1") as slide:
        assert slide.kind.startswith(f"compressed tiles ({compression.replace('zlib', 'deflate')}, ")
        assert slide.mpp == pytest.approx((0.5, 0.25))
        for level, size in enumerate(SIZES[:2]):
            assert np.array_equal(slide.read_region(level, 0, 0, *size)[..., :3], coordinates(level, size))


def _tile_bytes(path: Path, index: int) -> tuple[int, int, int]:
    """Offset and length of a tile of the first level, and where its length is stored."""
    with tifffile.TiffFile(path) as tiff:
        page = tiff.pages[0]
        counts = page.tags["TileByteCounts"]
        each = counts.valuebytecount // counts.count
        return page.dataoffsets[index], page.databytecounts[index], counts.valueoffset + index * each


def test_damage_costs_its_tile_alone_where_no_other_reader_helps(tmp_path: Path) -> None:
    path = write_pyramid(
        tmp_path / "s.tif", [(512, 256)], lambda _, size: noise(size), compression="webp", tile=128, mpp=(0.5, 0.5)
    )
    offset, length, _ = _tile_bytes(path, 1)
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(b"\xaa" * length)
    with open_slide(path, "S1") as slide:
        with pytest.raises(TileReadError, match=r"^level 0 cannot be decoded here: a tile does not decode$"):
            slide.read_region(0, 130, 5, 10, 10)
        assert np.array_equal(slide.read_region(0, 256, 0, 128, 128)[..., :3], noise((512, 256))[:128, 256:384])


def test_a_missing_tile_is_transparent_where_no_other_reader_fills_it_in(tmp_path: Path) -> None:
    path = write_pyramid(
        tmp_path / "s.tif", [(512, 256)], lambda _, size: noise(size), compression="webp", tile=128, mpp=(0.5, 0.5)
    )
    *_, length_at = _tile_bytes(path, 1)
    with path.open("r+b") as file:
        file.seek(length_at)
        file.write(bytes(2))
    with open_slide(path, "S1") as slide:
        assert (slide.read_region(0, 130, 5, 10, 10) == 0).all()
        pixels = slide.read_reduced(0, 2, 60, 0, 8, 8)
        assert pixels.missing is not None
        assert pixels.missing.tolist() == [[0.0] * 4 + [1.0] * 4] * 8
        assert (pixels.rgb[:, 4:] == 255).all()


def test_channels_in_16_bit_stay_refused(tmp_path: Path) -> None:
    path = tmp_path / "s.ome.tif"
    with tifffile.TiffWriter(path, ome=True) as tiff:
        tiff.write(np.zeros((256, 256), np.uint16), tile=(128, 128), metadata={"axes": "YX"})
    with pytest.raises(UnreadableSlide, match="16 bits per channel"):
        open_slide(path, "S1")
