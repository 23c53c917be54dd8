"""Which reader a slide gets: the fast one only where it reads what OpenSlide reads."""

import io
import logging
import struct
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import openslide
import pytest
import tifffile
from numpy.typing import NDArray

from inference.slides.opening import open_slide
from tests.inference.slides.synthetic import noise

TILE = 128


def _smooth() -> NDArray[np.uint8]:
    """A picture that JPEG keeps well: 512 x 512."""
    return np.asarray(np.kron(noise((16, 16)), np.ones((32, 32, 1), np.uint8)), np.uint8)


def _adobe(transform: int) -> bytes:
    return b"\xff\xee\x00\x0eAdobe" + struct.pack(">HHHB", 100, 0, 0, transform)


def _jpeg_tiff(path: Path, *, space: str, marker: bytes = b"", keep_jfif: bool = False) -> Path:
    """A TIFF of JPEG tiles whose streams say of their colours what is wanted, or nothing."""

    def tiles() -> Iterator[bytes]:
        for data in _streams(space):
            data = data if keep_jfif else _without_apps(data)
            yield data[:2] + marker + data[2:]

    with tifffile.TiffWriter(path) as tiff:
        tiff.write(
            tiles(), shape=(512, 512, 3), dtype="uint8", tile=(TILE, TILE), photometric="rgb",
            compression="jpeg", metadata=None, subsampling=(1, 1), compressionargs={"outcolorspace": space},
        )  # fmt: skip
    with tifffile.TiffFile(path) as tiff:
        assert tiff.pages[0].photometric.name.lower() == space
    return path


def _streams(space: str) -> Iterator[bytes]:
    """The JPEG streams that tifffile makes of the picture in a colour model."""
    file = io.BytesIO()
    with tifffile.TiffWriter(file) as tiff:
        tiff.write(
            _smooth(), tile=(TILE, TILE), photometric="rgb", compression="jpeg",
            compressionargs={"level": 95, "outcolorspace": space}, subsampling=(1, 1), metadata=None,
        )  # fmt: skip
    file.seek(0)
    with tifffile.TiffFile(file) as tiff:
        page = tiff.pages[0]
        assert not page.jpegtables
        for offset, count in zip(page.dataoffsets, page.databytecounts, strict=True):
            yield file.getvalue()[offset : offset + count]


def _without_apps(data: bytes) -> bytes:
    """A JPEG without its APPn segments."""
    at, kept = 2, data[:2]
    while data[at] == 0xFF and data[at + 1] != 0xDA:
        length = 2 + int.from_bytes(data[at + 2 : at + 4], "big")
        if not 0xE0 <= data[at + 1] <= 0xEF:
            kept += data[at : at + length]
        at += length
    return kept + data[at:]


def _openslide(path: Path) -> NDArray[np.uint8]:
    with openslide.OpenSlide(path) as slide:
        return np.asarray(slide.read_region((0, 0), 0, slide.dimensions).convert("RGB"))


@pytest.mark.parametrize(
    ("space", "marker", "keep_jfif"),
    [("rgb", b"", False), ("ycbcr", b"", False), ("ycbcr", b"", True), ("rgb", _adobe(0), False)],
)
def test_colours_are_what_the_tiff_says_whatever_the_stream_keeps_silent_about(
    tmp_path: Path, space: str, marker: bytes, keep_jfif: bool
) -> None:
    path = _jpeg_tiff(tmp_path / "s.tif", space=space, marker=marker, keep_jfif=keep_jfif)
    with open_slide(path, "S1") as slide:
        assert slide.kind.startswith("compressed tiles (jpeg, ")
        found = slide.read_reduced(0, 1, 0, 0, 512, 512).rgb
    assert np.array_equal(found, _openslide(path))
    assert np.abs(found.astype(int) - _smooth()).mean() < 8


def test_a_slide_that_the_fast_reader_would_read_differently_is_left_to_openslide_and_said_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The streams claim YCbCr where the TIFF says RGB; OpenSlide believes the TIFF."""
    path = _jpeg_tiff(tmp_path / "s.tif", space="rgb", marker=_adobe(1))
    with caplog.at_level(logging.INFO, "inference"), open_slide(path, "S1") as slide:
        assert slide.kind == f"openslide {openslide.__library_version__}"
        assert "its pixels differ from OpenSlide's by" in slide.reason
        found = slide.read_reduced(0, 1, 0, 0, 512, 512).rgb
    assert np.array_equal(found, _openslide(path))
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "S1: compressed tiles are not read directly: level 0: its pixels differ" in caplog.text


def test_only_the_level_that_differs_is_left_to_openslide(tmp_path: Path) -> None:
    """A pyramid whose second level has markers that contradict its TIFF."""
    good = _jpeg_tiff(tmp_path / "good.tif", space="rgb")
    bad = _jpeg_tiff(tmp_path / "bad.tif", space="rgb", marker=_adobe(1))
    path = tmp_path / "s.tif"
    large = np.asarray(np.kron(_smooth(), np.ones((2, 2, 1), np.uint8)), np.uint8)
    with tifffile.TiffFile(bad) as source, tifffile.TiffWriter(path) as tiff:
        page = source.pages[0]
        data = bad.read_bytes()
        streams = [data[at : at + n] for at, n in zip(page.dataoffsets, page.databytecounts, strict=True)]
        tiff.write(large, tile=(TILE, TILE), photometric="rgb", compression="zlib", metadata=None)
        tiff.write(
            iter(streams), shape=(512, 512, 3), dtype="uint8", tile=(TILE, TILE), photometric="rgb",
            compression="jpeg", metadata=None, subfiletype=1, subsampling=(1, 1),
            compressionargs={"outcolorspace": "rgb"},
        )  # fmt: skip
    with open_slide(path, "S1") as slide:
        assert slide.kind.startswith("compressed tiles (deflate, ")
        assert "1 of its levels through OpenSlide: level 1: its pixels differ" in slide.reason
        assert np.array_equal(slide.read_reduced(1, 1, 0, 0, 512, 512).rgb, _openslide(good))
        assert np.array_equal(slide.read_reduced(0, 1, 0, 0, 1024, 1024).rgb, large)
