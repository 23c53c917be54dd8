"""Tiles and images that are not what their TIFF says: an error for the tile or the slide, never other pixels."""

import struct
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import imagecodecs
import numpy as np
import pytest
import tifffile
from numpy.typing import NDArray

from inference.errors import TileReadError, UnreadableSlide
from inference.slides._codecs import JpegDecoder, WholeDecoder
from inference.slides._compressed import CompressedLevel
from inference.slides.opening import open_slide
from inference.slides.readahead import ReadAhead
from tests.inference.slides.known_slides import smooth
from tests.inference.slides.synthetic import noise

TILE = 256


def _jpeg(width: int, height: int) -> bytes:
    pixels = np.ascontiguousarray(smooth(0, (width, height)))
    return bytes(imagecodecs.jpeg8_encode(pixels, level=90))


@pytest.mark.parametrize("reduction", [1, 2, 4, 8])
@pytest.mark.parametrize("side", [32, 64, 128, 255, 257, 512, 2048])
def test_a_jpeg_of_another_size_is_refused_at_every_reduction(side: int, reduction: int) -> None:
    """The decoder would scale it to what is asked for."""
    decode = JpegDecoder((TILE, TILE), is_rgb=False)
    assert decode(_jpeg(TILE, TILE), reduction).shape == (TILE // reduction, TILE // reduction, 3)
    with pytest.raises(ValueError, match="not of the size"):
        decode(_jpeg(side, side), reduction)


def test_a_grey_jpeg_among_coloured_ones_is_refused() -> None:
    grey = bytes(imagecodecs.jpeg8_encode(smooth(0, (TILE, TILE))[..., 0].copy(), level=90))
    with pytest.raises(ValueError, match="size and colours"):
        JpegDecoder((TILE, TILE), is_rgb=False)(grey, 1)


@pytest.mark.parametrize("data", [b"", b"\xff\xd8", b"\xff\xd8\xff", b"\xff\xd8\xff\xc0\0\x11\x08", b"GIF89a" * 9])
def test_what_is_no_jpeg_is_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match="a tile is no"):
        JpegDecoder((TILE, TILE), is_rgb=False)(data, 1)


def test_a_tile_of_a_slide_that_is_of_another_size_fails_alone(tmp_path: Path) -> None:
    streams = [_jpeg(TILE, TILE), _jpeg(512, 512), _jpeg(TILE, TILE), _jpeg(TILE, TILE)]
    path = tmp_path / "s.tif"
    with tifffile.TiffWriter(path) as tiff:
        tiff.write(
            iter(streams), shape=(512, 512, 3), dtype="uint8", tile=(TILE, TILE), photometric="rgb",
            compression="jpeg", subsampling=(1, 1), metadata=None,
        )  # fmt: skip
    with open_slide(path, "S1") as slide:
        assert slide.kind.startswith("compressed tiles (jpeg")
        for reduction in (1, 2, 4):
            side = TILE // reduction
            with pytest.raises(TileReadError):
                slide.read_reduced(0, reduction, side, 0, side, side)
            assert slide.read_reduced(0, reduction, 0, side, side, side).rgb.shape == (side, side, 3)


def test_another_codecs_tile_of_the_same_area_is_not_reshaped() -> None:
    decode = WholeDecoder("webp", (TILE, TILE), lambda data: np.zeros((128, 512, 3), np.uint8))
    with pytest.raises(ValueError, match="does not decode"):
        decode(b"x", 1)


@pytest.mark.parametrize(("depth", "components"), [(4, 3), (8, 1), (8, 4)])
def test_jpeg_2000_of_other_depths_or_components_is_refused(depth: int, components: int) -> None:
    head = b"\xff\x4f\xff\x51" + struct.pack(
        ">HH8IH", 38 + 3 * components, 0, TILE, TILE, 0, 0, TILE, TILE, 0, 0, components
    )
    data = head + bytes([depth - 1, 1, 1]) * components + bytes(20)
    decode = WholeDecoder("jpeg2000", (TILE, TILE), lambda _: noise((TILE, TILE)), is_codestream=True)
    with pytest.raises(ValueError, match="size and colours"):
        decode(data, 1)


def _write(path: Path, images: list[tuple[NDArray[np.uint8], int]]) -> Path:
    with tifffile.TiffWriter(path) as tiff:
        for pixels, subfile in images:
            tiff.write(
                pixels, tile=(TILE, TILE), photometric="rgb", compression="zlib", subfiletype=subfile, metadata=None
            )
    return path


@pytest.mark.parametrize(
    ("images", "problem"),
    [
        (
            [(600, 400, 0), (160, 160, 1)],
            "an image of 160 x 160 pixels calls itself a level of it but has another shape",
        ),
        ([(600, 400, 0), (600, 400, 0), (600, 400, 0)], "its 3 planes .* are separate images"),
        ([(300, 200, 0), (600, 400, 0)], "its first image is not its largest"),
    ],
)
def test_a_tiff_that_holds_more_than_one_slide_is_refused(
    tmp_path: Path, images: list[tuple[int, int, int]], problem: str
) -> None:
    path = _write(tmp_path / "s.tif", [(smooth(0, (w, h)), kind) for w, h, kind in images])
    with pytest.raises(UnreadableSlide, match=problem):
        open_slide(path, "S1")


@pytest.mark.parametrize("sizes", [[(601, 403), (300, 201), (150, 100)], [(2220, 2967), (555, 741), (138, 185)]])
def test_levels_that_are_rounded_stay_levels(tmp_path: Path, sizes: list[tuple[int, int]]) -> None:
    path = _write(tmp_path / "s.tif", [(smooth(0, size), int(k > 0)) for k, size in enumerate(sizes)])
    with open_slide(path, "S1") as slide:
        assert list(slide.level_sizes) == sizes


def test_an_ome_tiff_of_one_level_has_the_resolution_of_its_header(tmp_path: Path) -> None:
    path = tmp_path / "s.ome.tif"
    with tifffile.TiffWriter(path, ome=True) as tiff:
        about = {"axes": "YXS", "PhysicalSizeX": 0.25, "PhysicalSizeY": 0.26}
        tiff.write(smooth(0, (600, 400)), photometric="rgb", tile=(TILE, TILE), compression="zlib", metadata=about)
    with open_slide(path, "S1") as slide:
        assert slide.mpp == pytest.approx((0.25, 0.26))
        assert np.array_equal(slide.read_region(0, 0, 0, 600, 400)[..., :3], smooth(0, (600, 400)))


def test_threads_that_cannot_start_end_those_that_did(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[threading.Thread] = []
    start = threading.Thread.start

    def second_fails(thread: threading.Thread) -> None:
        if thread.name == "few-1":
            raise RuntimeError("can't start new thread")
        start(thread)
        started.append(thread)

    monkeypatch.setattr(threading.Thread, "start", second_fails)
    with pytest.raises(RuntimeError, match="can't start"):
        list(ReadAhead(lambda i: i, 1000, threads=2, ahead=10, name="few"))
    assert len(started) == 1
    started[0].join(10)
    assert not started[0].is_alive()


@pytest.mark.parametrize("shuffled", [False, True])
def test_tiles_read_ahead_in_any_order_and_from_threads_are_the_files_own_bytes(tmp_path: Path, shuffled: bool) -> None:
    """Bytes right behind a tile are read with it, where they are those of the next."""
    data = noise((500, 400)).tobytes()
    rng = np.random.default_rng(3)
    lengths = rng.integers(1, 3000, 60)
    lengths[[7, 23]] = 0
    starts = np.concatenate([[0], lengths.cumsum()[:-1]])
    if shuffled:
        order = rng.permutation(60)
        starts, lengths = starts[order], lengths[order]
    path = tmp_path / "tiles"
    path.write_bytes(data)
    places = [(int(i) % 10, int(i) // 10) for i in rng.integers(0, 60, 400)] + [
        (c, r) for r in range(6) for c in range(10)
    ]
    with path.open("rb") as file:
        level = CompressedLevel(
            file.fileno(), (320, 192), (32, 32), 10, WholeDecoder("x", (32, 32), lambda _: noise((32, 32))),
            starts.tolist(), lengths.tolist(),
        )  # fmt: skip

        def check(place: tuple[int, int]) -> None:
            start, length = int(starts[place[1] * 10 + place[0]]), int(lengths[place[1] * 10 + place[0]])
            if not length:
                with pytest.raises(ValueError, match="missing"):
                    level.compressed(*place)
                return
            assert level.compressed(*place) == data[start : start + length]

        with ThreadPoolExecutor(4) as pool:
            list(pool.map(check, places * 3))
