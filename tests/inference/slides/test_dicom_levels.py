"""DICOM series are read by their frames where these lead to OpenSlide's pixels, and by OpenSlide elsewhere."""

import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import imagecodecs
import numpy as np
import openslide
import pydicom
import pytest
from pydicom.encaps import generate_frames

from inference.errors import SlideChanged, TileReadError, UnreadableSlide
from inference.slides.compressed_reader import CompressedReader
from inference.slides.discovery import discover
from inference.slides.opening import open_slide
from inference.slides.openslide_reader import OpenSlideReader
from inference.slides.pixels import reduce_area
from tests.inference.slides.dicom_series import CODECS, LOSSLESS, TILE, frames_of, item, places, sparse, write_level
from tests.inference.slides.known_slides import smooth
from tests.inference.slides.synthetic import Pixels, Size, coordinates

SIZE: Size = (400, 300)
"""7 x 5 frames, the last of a row and of a column not full."""
LEVEL = smooth(0, SIZE)


def _by_openslide(path: Path, level: int = 0) -> Pixels:
    """A level whole: from its origin OpenSlide reads without interpolating."""
    with openslide.OpenSlide(path) as slide:
        rgba = np.asarray(slide.read_region((0, 0), level, slide.level_dimensions[level]))
    assert (rgba[..., 3] == 255).all()
    return rgba[..., :3]


def _whole(slide: CompressedReader | OpenSlideReader, level: int = 0) -> Pixels:
    rgba = slide.read_region(level, 0, 0, *slide.level_sizes[level])
    assert (rgba[..., 3] == 255).all()
    return rgba[..., :3]


def _opened_fast(path: Path, *files: Path) -> CompressedReader:
    slide = open_slide(path, "S1", files)
    assert isinstance(slide, CompressedReader)
    assert "agree with OpenSlide's pixels" in slide.reason
    return slide


def _left_to_openslide(path: Path) -> str:
    """Why a file is read by OpenSlide alone."""
    with open_slide(path, "S1") as slide:
        assert isinstance(slide, OpenSlideReader)
        assert slide.kind == f"openslide {openslide.__library_version__}"
        return slide.reason


# --- real slides --------------------------------------------------------------------------------------------------


@pytest.fixture
def series(shared_data: Path, tmp_path: Path) -> tuple[Path, ...]:
    """A copy of the derived series, as discovery finds it."""
    shutil.copytree(shared_data / "derived" / "dicom-jpeg", tmp_path / "series")
    (slide,) = discover([tmp_path / "series"]).slides
    return slide.files


def test_every_level_of_a_series_has_the_pixels_of_its_own_frames(series: tuple[Path, ...]) -> None:
    """OpenSlide's too, but for the places between pixels at which it interpolates on levels 1 and 2."""
    with _opened_fast(series[0], *series) as slide:
        assert slide.kind.startswith("compressed tiles (jpeg, simplejpeg")
        assert "through OpenSlide" not in slide.reason
        for level in range(3):
            path = series[0].with_name(f"volume-{level}.dcm")
            found = _whole(slide, level)
            assert np.array_equal(found, _from_frames(path))
            assert np.array_equal(found, _by_openslide(path, level))


def _from_frames(path: Path) -> Pixels:
    """A level put together from its frames, which pydicom finds and imagecodecs decodes."""
    data = pydicom.dcmread(path)
    width, height, side = data.TotalPixelMatrixColumns, data.TotalPixelMatrixRows, data.Columns
    columns = -(-width // side)
    whole = np.zeros((-(-height // side) * side, columns * side, 3), np.uint8)
    for index, frame in enumerate(generate_frames(data.PixelData, number_of_frames=data.NumberOfFrames)):
        y, x = (place * side for place in divmod(index, columns))
        whole[y : y + side, x : x + side] = imagecodecs.jpeg8_decode(frame)
    return whole[:height, :width]


@pytest.mark.parametrize("main", ["volume-0.dcm", "volume-1.dcm", "volume-2.dcm", "label.dcm"])
def test_any_file_may_be_the_main_one(series: tuple[Path, ...], main: str) -> None:
    path = series[0].with_name(main)
    with _opened_fast(path, path, *sorted(set(series) - {path}, reverse=True)) as slide:
        assert "through OpenSlide" not in slide.reason
        for level in range(3):
            assert np.array_equal(_whole(slide, level), _by_openslide(path, level))


def test_levels_whose_files_were_not_named_are_left_to_openslide(series: tuple[Path, ...]) -> None:
    with _opened_fast(series[0], series[0]) as slide:
        assert slide.reason.endswith("2 of its levels through OpenSlide: level 1: 0 files of the series hold an image "
                                     "of its size")  # fmt: skip
        assert np.array_equal(_whole(slide, 2), _by_openslide(series[0], 2))


@pytest.mark.parametrize(
    ("file", "codec"),
    [
        ("dicom-camelyon/multiframe_camelyon_challenge_image.dcm", "jpeg, simplejpeg"),
        ("dicom-highdicom/sm_image.dcm", "uncompressed"),
    ],
)
def test_other_makers_files_have_openslides_pixels(shared_data: Path, file: str, codec: str) -> None:
    path = shared_data / "slides" / file
    with _opened_fast(path) as slide:
        assert slide.kind.startswith(f"compressed tiles ({codec}")
        assert np.array_equal(_whole(slide), _by_openslide(path))


# --- codecs and tables --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("table", ["basic", "extended", "none"])
@pytest.mark.parametrize("codec", CODECS)
def test_every_codec_and_sort_of_offset_table_gives_the_stored_pixels(tmp_path: Path, codec: str, table: str) -> None:
    path = write_level(tmp_path / "a.dcm", LEVEL, codec, table=table)
    with _opened_fast(path) as slide:
        assert slide.mpp == pytest.approx((0.5, 0.5))
        assert slide.stored_tile(0) == (TILE, TILE)
        found = _whole(slide)
        assert np.array_equal(found, _by_openslide(path))
        assert np.abs(found.astype(int) - LEVEL).max() <= (0 if codec in LOSSLESS else 12)
        half = slide.read_reduced(0, 2, 0, 0, 200, 150).rgb
        assert np.abs(half.astype(int) - reduce_area(found, 2)).mean() <= (0 if codec in LOSSLESS else 2)


def test_pixels_of_an_exact_pyramid_are_known_on_every_level(tmp_path: Path) -> None:
    sizes = [SIZE, (201, 150), (50, 37)]
    files = [write_level(tmp_path / f"{k}.dcm", coordinates(k, size), "raw", is_first=not k)
             for k, size in enumerate(sizes)]  # fmt: skip
    with _opened_fast(files[1], *files) as slide:
        assert slide.level_sizes == tuple(sizes)
        for level, size in enumerate(sizes):
            assert np.array_equal(_whole(slide, level), coordinates(level, size))


def test_a_header_longer_than_the_first_read_is_read_on(tmp_path: Path) -> None:
    path = write_level(tmp_path / "a.dcm", LEVEL, elements={"RedPaletteColorLookupTableData": bytes(300_000)})
    with _opened_fast(path) as slide:
        assert np.array_equal(_whole(slide), _by_openslide(path))


@pytest.mark.parametrize(("codec", "said"), [("jpeg2000-ict", "RGB"), ("jpeg-of-rgb", "YBR_FULL_422"), ("jpeg", "RGB")])
def test_what_a_header_says_wrong_of_the_colours_is_never_worse_than_openslide(
    tmp_path: Path, codec: str, said: str
) -> None:
    path = write_level(tmp_path / "a.dcm", LEVEL, codec, elements={"PhotometricInterpretation": said})
    with open_slide(path, "S1") as slide:
        assert isinstance(slide, CompressedReader | OpenSlideReader)
        assert np.array_equal(_whole(slide), _by_openslide(path))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Of its own: OpenSlide takes all files of a series that lie in one."""
    (tmp_path / "undamaged").mkdir()
    return tmp_path / "undamaged"


# --- damage -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("codec", ["jpeg", "jpeg2000"])
@pytest.mark.parametrize("index", [0, 9])
def test_a_damaged_frame_costs_its_tile_alone(tmp_path: Path, folder: Path, codec: str, index: int) -> None:
    def damaged(frames: list[bytes]) -> list[bytes]:
        frames[index] = b"\xaa" * len(frames[index])
        return frames

    truth = _by_openslide(write_level(folder / "a.dcm", LEVEL, codec))
    row, column = divmod(index, 7)
    with _opened_fast(write_level(tmp_path / "a.dcm", LEVEL, codec, frames=damaged)) as slide:
        for reduction in (1, 2):
            side = TILE // reduction
            with pytest.raises(TileReadError, match=r"^level 0 cannot be decoded here: ") as raised:
                slide.read_reduced(0, reduction, column * side, row * side, side, side)
            assert str(tmp_path) not in str(raised.value)
        right = (column + 1) * TILE
        found = slide.read_region(0, right, 0, SIZE[0] - right, SIZE[1])[..., :3]
        assert np.array_equal(found, truth[:, right:])


def test_an_empty_frame_costs_its_tile_alone(tmp_path: Path) -> None:
    path = write_level(tmp_path / "a.dcm", LEVEL, table="none", frames=lambda f: [*f[:3], b"", *f[4:]])
    with _opened_fast(path) as slide:
        with pytest.raises(TileReadError):
            slide.read_region(0, 3 * TILE, 0, 8, 8)
        assert (slide.read_region(0, 4 * TILE, 0, 8, 8)[..., 3] == 255).all()


def test_an_offset_that_lies_where_it_was_not_tried_costs_the_tiles_beside_it(tmp_path: Path, folder: Path) -> None:
    """Only some of many frames are tried at opening; each is tried when it is read."""
    size = (40 * TILE, 2 * TILE)
    lying = write_level(tmp_path / "a.dcm", smooth(0, size), lie=lambda at: [*at[:41], at[41] + 2, *at[42:]])
    truth = _by_openslide(write_level(folder / "a.dcm", smooth(0, size)))
    with _opened_fast(lying) as slide:
        assert np.array_equal(slide.read_region(0, 0, 0, size[0], TILE)[..., :3], truth[:TILE])
        with pytest.raises(TileReadError):
            slide.read_region(0, TILE, TILE, TILE, TILE)
        rest = slide.read_region(0, 2 * TILE, TILE, size[0] - 2 * TILE, TILE)[..., :3]
        assert np.array_equal(rest, truth[TILE:, 2 * TILE :])
        left = slide.read_region(0, 0, TILE, TILE, TILE)[..., :3]
        assert np.array_equal(left, truth[TILE:, :TILE]), "its item ends before the next offset: OpenSlide reads it"


# --- files that lie ------------------------------------------------------------------------------------------------

FULL = 7 * 5


@pytest.mark.parametrize("table", ["basic", "extended"])
@pytest.mark.parametrize(
    "lie",
    [
        lambda at: [*at[:3], at[4], at[3], *at[5:]],
        lambda at: [*at[:3], at[2], *at[4:]],
        lambda at: [0] * len(at),
        lambda at: [8, *at[1:]],
        lambda at: [*at[:-1], at[-1] + 6],
        lambda at: [*at[:-1], 0xFFFFFFF0],
        lambda at: [at[0], *(place + 4 for place in at[1:])],
        lambda at: [*at[:-1], at[-2] + 16],
        lambda at: at[:-1],
        lambda at: [*at, at[-1] + 8],
    ],
    ids=["swapped", "twice", "nowhere", "not-first", "odd", "beyond", "shifted", "overlap", "short", "long"],
)
def test_an_offset_table_that_lies_is_not_believed(
    tmp_path: Path, lie: Callable[[list[int]], list[int]], table: str
) -> None:
    path = write_level(tmp_path / "a.dcm", LEVEL, lie=lie, table=table)
    assert "level 0: its offset table does not lead to its frames" in _left_to_openslide(path)


def test_offsets_beyond_four_gigabytes_are_no_harm(tmp_path: Path) -> None:
    path = write_level(tmp_path / "a.dcm", LEVEL, table="extended", lie=lambda at: [*at[:-1], 1 << 63])
    assert "offset table" in _left_to_openslide(path)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda frames: frames[:-1], "it holds 34 of its 35 frames"),
        (lambda frames: [*frames, frames[0]], "it holds more items than frames"),
        (lambda frames: [*frames[:-1], frames[-1][:20], frames[-1][20:]], "it holds more items than frames"),
    ],
    ids=["fewer", "more", "fragments"],
)
def test_items_that_are_not_the_frames_are_left_to_openslide(
    tmp_path: Path, change: Callable[[list[bytes]], list[bytes]], reason: str
) -> None:
    path = write_level(tmp_path / "a.dcm", LEVEL, table="none", frames=change)
    assert reason in _left_to_openslide(path)


@pytest.mark.parametrize(
    ("elements", "reason"),
    [
        ({"NumberOfFrames": FULL - 1}, "it has 35 tiles, but its header counts 34 frames"),
        ({"NumberOfFrames": 10**9}, "it has 35 tiles, but its header counts 1,000,000,000 frames"),
        (
            {"DimensionOrganizationType": "TILED_SPARSE", **sparse(SIZE)},
            "its frames are not stored as a full grid of tiles",
        ),
        ({"NumberOfOpticalPaths": 2}, "it has several focal planes or optical paths"),
        ({"InConcatenationNumber": 1}, "it is split into several files"),
    ],
)
def test_what_is_no_full_grid_in_one_plane_is_left_to_openslide_or_refused(
    tmp_path: Path, elements: dict[str, object], reason: str
) -> None:
    path = write_level(tmp_path / "a.dcm", LEVEL, elements=elements)
    try:
        assert f"level 0: {reason}" in _left_to_openslide(path)
    except UnreadableSlide as error:
        assert str(error).startswith("S1: ")  # noqa: PT017 - either ending is right


@pytest.mark.parametrize("frames", [lambda f: f[:-1], lambda f: [f[0][:-4], *f[1:]]])
def test_uncompressed_pixels_that_are_too_short_are_left_to_openslide(
    tmp_path: Path, frames: Callable[[list[bytes]], list[bytes]]
) -> None:
    path = write_level(tmp_path / "a.dcm", LEVEL, "raw", frames=frames)
    assert "its pixel data are not as long as its frames" in _left_to_openslide(path)


def test_a_broken_companion_costs_its_level_alone(series: tuple[Path, ...]) -> None:
    """A header that pydicom does not read through; OpenSlide leaves the file out, or refuses the slide."""
    broken = series[0].with_name("volume-2.dcm")
    data = bytearray(broken.read_bytes())
    at = data.index(struct.pack("<HH", 0x0028, 0x0010))
    data[at + 4 : at + 8] = b"\xff\xff\xff\xff"
    broken.write_bytes(data)
    try:
        with open_slide(series[0], "S1", series) as slide:
            assert np.array_equal(slide.read_region(0, 0, 0, 300, 300)[..., :3], _from_frames(series[0])[:300, :300])
    except UnreadableSlide as error:
        assert str(error).startswith("S1: ")  # noqa: PT017 - either ending is right


# --- changes and closing --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("replaced", ["volume-0.dcm", "volume-2.dcm", "label.dcm"])
def test_a_file_replaced_while_the_series_is_open_is_a_changed_slide(series: tuple[Path, ...], replaced: str) -> None:
    with _opened_fast(series[0], *series) as slide:
        slide.read_region(0, 0, 0, 8, 8)
        path = series[0].with_name(replaced)
        other = path.with_name("other")
        other.write_bytes(path.read_bytes() + bytes(2))
        other.replace(path)
        for level in range(3):
            with pytest.raises(SlideChanged, match=r"^S1: "):
                slide.read_region(level, 0, 0, 8, 8)
            with pytest.raises(SlideChanged, match=r"^S1: "):
                slide.read_reduced(level, 2, 0, 0, 8, 8)


def test_one_file_a_level_is_held_open_and_let_go_when_closed(series: tuple[Path, ...]) -> None:
    held = Path("/proc/self/fd")
    if not held.is_dir():
        pytest.skip("this system does not list open files")

    def of_series() -> int:
        names = [link.readlink() for link in held.iterdir() if link.is_symlink()]
        return sum(name.parent == series[0].parent for name in names)

    with OpenSlideReader(series[0], "S1", series):
        before = of_series()
    with _opened_fast(series[0], *series):
        assert of_series() == before + 3
    assert of_series() == 0


def test_the_written_files_are_what_the_tests_take_them_for() -> None:
    """The tables of the writer lead to its items."""
    frames = frames_of(LEVEL, CODECS["jpeg"])
    stored = b"".join(map(item, frames))
    assert len(frames) == FULL
    assert all(stored[at + 8 : at + 8 + len(frame)] == frame for at, frame in zip(places(frames), frames, strict=True))


def test_a_sparse_image_without_positions_is_refused_and_does_not_end_the_process(tmp_path: Path) -> None:
    """OpenSlide 4.0.1 reads a null pointer there."""
    path = write_level(tmp_path / "a.dcm", smooth(0, SIZE), elements={"DimensionOrganizationType": "TILED_SPARSE"})
    with pytest.raises(UnreadableSlide, match=r"^S1: a sparse DICOM image that does not say where its frames lie: "):
        open_slide(path, "S1", [path])


def test_what_openslide_refuses_of_a_dicom_is_said_without_its_path(tmp_path: Path) -> None:
    path = write_level(tmp_path / "a.dcm", smooth(0, SIZE), elements={"PhotometricInterpretation": "YBR_FULL"})
    with pytest.raises(UnreadableSlide) as raised:
        open_slide(path, "S1", [path])
    assert "photometric" in raised.value.message.lower()
    assert str(tmp_path) not in raised.value.message
    assert "a.dcm" not in raised.value.message
