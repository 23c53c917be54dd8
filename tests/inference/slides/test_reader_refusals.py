"""Every file that cannot be read is refused at once, with a typed error, the likely reason and nothing of its path."""

import os
import resource
import shutil
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import openslide
import pytest
import tifffile

from inference.errors import SourceUnavailable, UnreadableSlide
from inference.slides._refusal import require_regular_file
from inference.slides._tiff_refusal import MAX_SIDE_PX
from inference.slides.opening import open_slide
from inference.slides.reader import SlideReader
from tests.inference.slides.conftest import OpenHandles
from tests.inference.slides.synthetic import coordinates, write_pyramid


def _open(path: Path) -> SlideReader:
    return open_slide(path, "S1")


def _refusal(path: Path) -> str:
    """The one-line message with which a file is refused; it must name the slide and nothing of the path."""
    with pytest.raises(UnreadableSlide) as raised:
        _open(path)
    message = str(raised.value)
    assert raised.value.code == "unreadable_slide"
    assert message.startswith("S1: ")
    assert "\n" not in message
    assert str(path.parent) not in message
    assert path.name not in message
    return message.removeprefix("S1: ")


@pytest.mark.parametrize(
    ("file", "reason"),
    [
        ("empty.svs", "the file is empty (0 bytes); copy it again"),
        ("html-error-page.svs", "not a slide but a web page or XML (an error page saved as a slide?); fetch it again"),
        ("cut-half.svs", "truncated: its data reach byte "),
    ],
)
def test_a_file_that_is_no_slide_is_refused_with_the_likely_reason(shared_data: Path, file: str, reason: str) -> None:
    assert _refusal(shared_data / "broken" / file).startswith(reason)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"\xef\xbb\xbf<html>", "not a slide but a web page"),
        (b"\n\n <?xml version='1.0'?>", "not a slide but a web page"),
        (b"\x89PNG\r\n\x1a\n" + bytes(100), "a PNG or JPEG picture"),
        (b"plain text", "no known slide format"),
        (b"II", "a TIFF that is damaged"),
        (b"II*\0", "a TIFF that is damaged"),
        (b"II*\0\x08\0\0\0", "a TIFF that is damaged"),
        (b"II*\0\xff\xff\xff\x7f", "truncated: its data reach byte 2,147,483,647"),
        (b"MM\0*\x7f\xff\xff\xff", "truncated: its data reach byte 2,147,483,647"),
        (b"II+\0\x08\0\0\0" + b"\xff" * 7 + b"\x7f", "truncated: "),
        (bytes(500), "no known slide format"),
    ],
)
def test_any_other_content_is_refused_with_a_reason(tmp_path: Path, content: bytes, reason: str) -> None:
    path = tmp_path / "S21-4711 Müller.svs"
    path.write_bytes(content)
    assert _refusal(path).startswith(reason)


@pytest.mark.parametrize("size", [0, 8, 100, *(f"{percent} %" for percent in (1, 10, 25, 50, 75, 90, 99))])
def test_a_slide_cut_anywhere_is_refused_as_truncated(shared_data: Path, tmp_path: Path, size: int | str) -> None:
    data = (shared_data / "slides" / "CMU-1-Small-Region.svs").read_bytes()
    end = len(data) * int(size.removesuffix(" %")) // 100 if isinstance(size, str) else size
    path = tmp_path / "cut.svs"
    path.write_bytes(data[:end])
    assert _refusal(path).startswith("truncated: " if end not in (0, 8) else "the file is empty" if not end else "")


def tiff_header(path: Path, width: int, height: int, tiles: int, *, next_directory: int = 0) -> Path:
    """A little-endian TIFF of `tiles` tiles of 256 pixels that all share the same bytes."""
    data = 256 * 256 * 3
    tags = [(256, 4, 1, width), (257, 4, 1, height), (258, 3, 3, None), (259, 3, 1, 1), (262, 3, 1, 2),
            (277, 3, 1, 3), (284, 3, 1, 1), (322, 4, 1, 256), (323, 4, 1, 256), (324, 4, tiles, None),
            (325, 4, tiles, None)]  # fmt: skip
    bits = 8 + 2 + 12 * len(tags) + 4
    offsets = bits + 6
    counts = offsets + 4 * tiles
    pixels = counts + 4 * tiles
    values = {258: bits, 324: pixels if tiles == 1 else offsets, 325: data if tiles == 1 else counts}
    head = b"II*\0" + struct.pack("<IH", 8, len(tags))
    for tag, kind, count, value in tags:
        head += struct.pack("<HHII", tag, kind, count, values[tag] if value is None else value)
    head += struct.pack("<IHHH", next_directory, 8, 8, 8)
    path.write_bytes(head + struct.pack(f"<{2 * tiles}I", *[pixels] * tiles, *[data] * tiles) + bytes(data))
    return path


@pytest.mark.parametrize(
    ("width", "height", "tiles"),
    [
        (1 << 31, 1 << 31, 1),
        ((1 << 31) - 1, (1 << 31) - 1, 1),
        ((1 << 32) - 1, (1 << 32) - 1, 4),
        (MAX_SIDE_PX + 256, 256, MAX_SIDE_PX // 256 + 1),
        (256, MAX_SIDE_PX + 256, MAX_SIDE_PX // 256 + 1),
        (0, 0, 1),
    ],
)
def test_an_absurd_size_is_refused_at_once(
    tmp_path: Path, width: int, height: int, tiles: int, opened: OpenHandles
) -> None:
    path = tiff_header(tmp_path / "s.tif", width, height, tiles)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    clock = time.monotonic()
    assert _refusal(path)
    assert time.monotonic() - clock < 5
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10, "KiB"
    assert opened.now == 0


@pytest.mark.parametrize(
    ("tag", "value", "reason"),
    [
        (322, 1 << 24, "compressed tiles"),
        (323, 1 << 30, "compressed tiles"),
        (325, (1 << 32) - 1, "truncated: its data reach byte 4,29"),
    ],
)
def test_a_claim_that_would_end_the_process_is_refused_before_memory_is_asked_for(
    tmp_path: Path, tag: int, value: int, reason: str
) -> None:
    """GLib aborts where it gets no memory for a tile; so this runs in a process of its own."""
    path = tiff_header(tmp_path / "s.tif", 512, 512, 1)
    data = bytearray(path.read_bytes())
    entry = next(at for at in range(10, 200, 12) if data[at : at + 2] == struct.pack("<H", tag))
    data[entry + 8 : entry + 12] = struct.pack("<I", value)
    path.write_bytes(data)
    code = (
        "import resource, sys; from pathlib import Path; from inference.slides.opening import open_slide\n"
        "resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))\n"
        "with open_slide(Path(sys.argv[1]), 'S1') as slide: slide.read_region(0, 0, 0, 10, 10)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1, done.stderr
    assert "UnreadableSlide: S1: " in done.stderr
    assert reason in done.stderr


@pytest.mark.parametrize(
    ("tag", "value", "reason"),
    [
        (256, 700, "claims to be 700 x 512 pixels in 6 tiles, but lists 8"),
        (256, 1025, "claims to be 1,025 x 512 pixels in 10 tiles, but lists 8"),
        (257, 200, "claims to be 1,024 x 200 pixels in 4 tiles, but lists 8"),
    ],
)
def test_a_size_that_does_not_fit_the_number_of_tiles_is_refused_since_tiles_would_change_places(
    tmp_path: Path, tag: int, value: int, reason: str
) -> None:
    path = tiff_header(tmp_path / "s.tif", 1024, 512, 8)
    with _open(path) as slide:
        assert slide.level_sizes == ((1024, 512),)
    data = bytearray(path.read_bytes())
    entry = next(at for at in range(10, 200, 12) if data[at : at + 2] == struct.pack("<H", tag))
    data[entry + 8 : entry + 12] = struct.pack("<I", value)
    path.write_bytes(data)
    assert reason in str(_refusal(path))


def test_tiles_that_begin_in_the_files_header_are_refused_and_those_of_a_sparse_file_are_not(tmp_path: Path) -> None:
    path = write_pyramid(tmp_path / "s.tif", [(1024, 512)], coordinates, compression="none")
    with tifffile.TiffFile(path) as tiff:
        offsets, counts = (tiff.pages[0].tags[tag].valueoffset for tag in (324, 325))
    data = bytearray(path.read_bytes())
    data[offsets : offsets + 4] = bytes(4)
    path.write_bytes(data)
    assert "1 of its tiles begin inside the file's own header" in str(_refusal(path))
    data[counts : counts + 4] = bytes(4)
    path.write_bytes(data)
    with _open(path) as slide:
        assert (slide.read_region(0, 0, 0, 256, 256)[..., 3] == 0).all(), "a tile that is not there"


def test_the_largest_size_still_opens(tmp_path: Path) -> None:
    with _open(tiff_header(tmp_path / "s.tif", MAX_SIDE_PX, 256, MAX_SIDE_PX // 256)) as slide:
        assert slide.level_sizes == ((MAX_SIDE_PX, 256),)
        assert (
            slide.read_region(0, MAX_SIDE_PX - 2, 254, 4, 4)[..., 3] == [[255, 255, 0, 0]] * 2 + [[0] * 4] * 2
        ).all()


def test_a_tiff_whose_directories_form_a_ring_is_refused_at_once(tmp_path: Path) -> None:
    clock = time.monotonic()
    assert _refusal(tiff_header(tmp_path / "s.tif", 256, 256, 1, next_directory=8))
    assert time.monotonic() - clock < 5


@pytest.mark.timeout(20)
@pytest.mark.parametrize("kind", ["fifo", "socket", "folder", "device", "link to a fifo"])
def test_what_would_hang_a_reader_is_refused_at_once(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "s.svs"
    with socket.socket(socket.AF_UNIX) as listener:
        if kind == "socket":
            listener.bind(str(path))
        elif kind == "folder":
            path.mkdir()
        elif kind == "device":
            path.symlink_to("/dev/zero")
        else:
            pipe = path if kind == "fifo" else tmp_path / "pipe"
            os.mkfifo(pipe)
            if pipe != path:
                path.symlink_to(pipe)
        assert _refusal(path) == "not a regular file"


def test_a_missing_file_is_the_slides_fault_and_a_missing_folder_is_not(tmp_path: Path) -> None:
    assert _refusal(tmp_path / "s.svs") == "the file is gone; put it back or remove it from the cohort"
    (tmp_path / "dangling.svs").symlink_to(tmp_path / "nothing")
    assert _refusal(tmp_path / "dangling.svs").startswith("the file is gone")
    with pytest.raises(SourceUnavailable, match=r"^S1: its folder cannot be reached") as raised:
        _open(tmp_path / "unmounted" / "s.svs")
    assert raised.value.retryable
    assert "unmounted" not in str(raised.value)


@pytest.fixture
def unprivileged() -> Iterator[Path]:
    """A folder of a user who is not root, for the length of the test."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o755)
    user = os.geteuid()
    if user == 0:
        os.chown(folder, 65534, 65534)
        os.seteuid(65534)
    try:
        yield folder
    finally:
        os.seteuid(user)
        shutil.rmtree(folder)


def test_a_file_without_permission_is_refused_and_others_still_open(unprivileged: Path) -> None:
    path = write_pyramid(unprivileged / "s.tif", [(300, 200)], coordinates)
    path.chmod(0)
    if os.geteuid() != os.getuid():
        # `access` asks for the real user, who is root here; the effective one meets the refusal when it opens.
        with pytest.raises(UnreadableSlide, match=r"Permission denied|no permission"):
            _open(path)
    else:
        assert _refusal(path) == "no permission to read it"
    path.chmod(0o600)
    with _open(path) as slide:
        assert slide.level_sizes == ((300, 200),)


@pytest.mark.parametrize("room", [0, 1])
def test_too_many_open_files_are_nobodys_fault_and_pass(tmp_path: Path, room: int) -> None:
    """With room for one descriptor OpenSlide begins to open the slide and then cannot go on."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    path = write_pyramid(tmp_path / "s.tif", [(300, 200)], coordinates)
    lowest_free = os.dup(0)
    os.close(lowest_free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free + room, limits[1]))
    try:
        with pytest.raises(SourceUnavailable) as raised:
            _open(path)
        assert raised.value.retryable
        assert str(path.parent) not in str(raised.value)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    with _open(path) as slide:
        assert slide.level_sizes == ((300, 200),)


def test_an_open_slide_is_read_on_while_files_run_out(tmp_path: Path) -> None:
    """Its compressed tiles are read through the one descriptor that it holds."""
    path = write_pyramid(tmp_path / "s.tif", [(901, 601), (300, 200)], coordinates)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    with _open(path) as slide:
        lowest_free = os.dup(0)
        os.close(lowest_free)
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free, limits[1]))
        try:
            found = slide.read_region(1, 7, 5, 64, 64)[..., :3]
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert np.array_equal(found, coordinates(1, (300, 200))[5:69, 7:71])


@pytest.mark.parametrize(
    "name", ["a b.tif", "ünï😀.tif", "-rf.tif", "new\nline.tif", "x" * 251 + ".tif", "(1) [2] {3}.tif", "%s%n.tif"]
)
def test_any_file_name_opens(tmp_path: Path, name: str) -> None:
    with _open(write_pyramid(tmp_path / name, [(300, 200)], coordinates)) as slide:
        assert np.array_equal(slide.read_region(0, 0, 0, 300, 200)[..., :3], coordinates(0, (300, 200)))


def test_a_name_that_is_no_text_opens_or_is_refused(tmp_path: Path) -> None:
    path = tmp_path / os.fsdecode(b"\xff\xfe.tif")
    write_pyramid(tmp_path / "s.tif", [(300, 200)], coordinates).rename(path)
    try:
        with _open(path) as slide:
            assert slide.level_sizes == ((300, 200),)
    except UnreadableSlide as error:
        assert "no slide" in str(error)  # noqa: PT017 - either outcome is right


@pytest.mark.parametrize("stem", ["TIFF", "Invalid", "S21-4711, Müller", "a"])
def test_no_message_tells_the_name_or_place_of_the_file(tmp_path: Path, stem: str) -> None:
    """OpenSlide's own messages hold the path; names of files can be accession numbers."""
    path = tiff_header(tmp_path / f"{stem}.tif", 256, 256, 1)
    path.write_bytes(
        path.read_bytes().replace(struct.pack("<HH", 325, 4), struct.pack("<HH", 325, 2))
    )  # lengths as text
    with pytest.raises(openslide.OpenSlideError, match=r"\.tif$"):
        openslide.OpenSlide(path)
    message = _refusal(path)
    assert f"{stem}." not in message
    assert message.startswith("a TIFF that is damaged or no slide")


def test_nothing_is_logged_or_printed_about_a_damaged_file(
    shared_data: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    with caplog.at_level(0):
        for name in ("cut-half.svs", "empty.svs", "html-error-page.svs"):
            with pytest.raises(UnreadableSlide):
                _open(shared_data / "broken" / name)
    assert not [record for record in caplog.records if "svs" in record.getMessage()]
    assert capfd.readouterr() == ("", "")


def test_require_regular_file_accepts_a_link_to_a_slide(tmp_path: Path) -> None:
    (tmp_path / "s.svs").write_bytes(b"x")
    (tmp_path / "link.svs").symlink_to(tmp_path / "s.svs")
    require_regular_file(tmp_path / "link.svs", "S1")
