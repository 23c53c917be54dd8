"""Identity: what makes a stored result still belong to a slide, and what does not."""

import json
import os
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inference.errors import SlideChanged, SourceUnavailable, StoreError, UnreadableSlide
from inference.slides import identity
from inference.slides.discovery import SlideRef, discover
from inference.slides.identity import (
    BLOCK_BYTES,
    EDGE_BYTES,
    SPREAD_BLOCKS,
    WHOLE_BYTES,
    FileStamp,
    Method,
    SlideIdentity,
    same_content,
    slide_identity,
    stamp,
)

SECRET = "a secret"  # noqa: S105 - a test's own


def _slide(folder: Path, data: bytes, *, parts: dict[str, bytes] | None = None, secret: str | None = None) -> SlideRef:
    """An MRXS slide, because any number of files can belong to it."""
    main = folder / "S21-1.mrxs"
    main.parent.mkdir(parents=True, exist_ok=True)
    main.write_bytes(data)
    for name, content in (parts or {}).items():
        (folder / "S21-1").mkdir(exist_ok=True)
        (folder / "S21-1" / name).write_bytes(content)
    return discover([main], secret=secret).slides[0]


def _patch(path: Path, offset: int, data: bytes = b"\xff") -> None:
    """Overwrite bytes in place; the size stays, the mtime moves on."""
    before = path.stat()
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(data)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns + 1))


def _age(path: Path) -> None:
    status = path.stat()
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + 10**9))


def test_a_stamp_is_the_size_and_mtime_of_every_file_relative_to_the_main_one(tmp_path: Path) -> None:
    ref = _slide(tmp_path, b"main", parts={"Slidedat.ini": b"12", "Data.dat": b"123"})
    for number, path in enumerate(ref.files):
        os.utime(path, ns=(0, 1_700_000_000_123_456_789 + number))
    assert stamp(ref) == (
        FileStamp("S21-1.mrxs", 4, 1_700_000_000_123_456_789),
        FileStamp("S21-1/Data.dat", 3, 1_700_000_000_123_456_790),
        FileStamp("S21-1/Slidedat.ini", 2, 1_700_000_000_123_456_791),
    )
    assert slide_identity(ref, None).files == stamp(ref)


def test_an_unchanged_slide_is_the_same_without_reading_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ref = _slide(tmp_path, b"main", parts={"Data.dat": b"1"})
    recorded = slide_identity(ref, "q")

    def no_reading(*_: object) -> None:
        raise AssertionError("a file was opened")

    monkeypatch.setattr(identity, "open_regular", no_reading)
    assert same_content(recorded, ref, None)
    assert same_content(recorded, ref, "q")
    assert not same_content(recorded, ref, "another quickhash")


@pytest.mark.parametrize("method", ["sampled", "full"])
def test_a_copied_or_touched_slide_is_the_same_when_its_hash_is(tmp_path: Path, method: Method) -> None:
    ref = _slide(tmp_path, os.urandom(WHOLE_BYTES * 2), parts={"Data.dat": b"1"})
    recorded = slide_identity(ref, "q", method=method)
    for path in ref.files:
        _age(path)
    assert same_content(recorded, ref, "q")


def test_a_touched_slide_that_had_a_quickhash_is_the_same_only_with_the_quickhash(tmp_path: Path) -> None:
    ref = _slide(tmp_path, bytes(10))
    without, recorded = slide_identity(ref, None), slide_identity(ref, "q")
    _age(ref.path)
    assert same_content(without, ref, None)
    assert same_content(without, ref, "q")
    assert same_content(recorded, ref, "q")
    assert not same_content(recorded, ref, None)


@pytest.mark.parametrize("size", [1, 100, WHOLE_BYTES - 1, WHOLE_BYTES])
def test_every_byte_of_a_small_file_counts(tmp_path: Path, size: int) -> None:
    ref = _slide(tmp_path, bytes(size))
    recorded = slide_identity(ref, None)
    for offset in {0, size // 3, size // 2, size - 1}:
        _patch(ref.path, offset)
        assert not same_content(recorded, ref, None)
        _patch(ref.path, offset, b"\0")
        assert same_content(recorded, ref, None)


@pytest.mark.parametrize("size", [WHOLE_BYTES + 1, 3_000_001, 50_000_000])
def test_head_tail_and_spread_blocks_of_a_large_file_count(tmp_path: Path, size: int) -> None:
    ref = _slide(tmp_path, b"")
    os.truncate(ref.path, size)
    recorded = slide_identity(ref, None)
    last = size - EDGE_BYTES - BLOCK_BYTES
    for offset in (0, EDGE_BYTES - 1, EDGE_BYTES, last, size - EDGE_BYTES, size - 1):
        _patch(ref.path, offset)
        assert not same_content(recorded, ref, None), offset
        _patch(ref.path, offset, b"\0")
    assert same_content(recorded, ref, None)


def test_a_damaged_stretch_longer_than_the_gap_between_blocks_is_always_seen(tmp_path: Path) -> None:
    size = 8_000_000
    ref = _slide(tmp_path, b"")
    os.truncate(ref.path, size)
    recorded = slide_identity(ref, None)
    stretch = size // (SPREAD_BLOCKS - 1)
    for offset in range(0, size - stretch, 611_953):
        _patch(ref.path, offset, b"\xff" * stretch)
        assert not same_content(recorded, ref, None), offset
        _patch(ref.path, offset, bytes(stretch))


def test_the_full_hash_sees_the_single_byte_that_the_samples_miss(tmp_path: Path) -> None:
    ref = _slide(tmp_path, b"")
    os.truncate(ref.path, 8_000_000)
    sampled, full = slide_identity(ref, None), slide_identity(ref, None, method="full")
    assert (sampled.method, full.method) == ("sampled", "full")
    _patch(ref.path, EDGE_BYTES + BLOCK_BYTES + 5)
    assert same_content(sampled, ref, None)
    assert not same_content(full, ref, None)


def test_any_file_of_a_slide_counts(tmp_path: Path) -> None:
    ref = _slide(tmp_path, b"main", parts={f"Data{number}.dat": bytes(WHOLE_BYTES + 9) for number in range(3)})
    recorded = slide_identity(ref, None)
    for path in ref.files:
        original = path.read_bytes()[:1]
        _patch(path, 0)
        assert not same_content(recorded, ref, None)
        _patch(path, 0, original)
    assert same_content(recorded, ref, None)


def test_another_size_or_set_of_files_is_another_slide(tmp_path: Path) -> None:
    ref = _slide(tmp_path, b"main", parts={"a.dat": b"1", "b.dat": b"2"})
    recorded = slide_identity(ref, None)
    assert not same_content(recorded, replace(ref, files=ref.files[:2]), None)
    ref.files[2].rename(ref.files[2].with_name("c.dat"))
    (renamed,) = discover([ref.path]).slides
    assert not same_content(recorded, renamed, None)
    ref = _slide(tmp_path / "again", b"main")
    recorded = slide_identity(ref, None)
    with ref.path.open("ab") as file:
        file.write(b"!")
    os.utime(ref.path, ns=(0, recorded.files[0].mtime_ns))
    assert not same_content(recorded, ref, None)


def test_bytes_moved_from_one_file_to_the_next_are_another_content(tmp_path: Path) -> None:
    one = _slide(tmp_path / "1", b"ab", parts={"x.dat": b"c"})
    two = _slide(tmp_path / "2", b"a", parts={"x.dat": b"bc"})
    assert slide_identity(one, None).sampled_sha256 != slide_identity(two, None).sampled_sha256


def test_the_hash_depends_on_content_alone_and_not_on_folder_name_time_or_secret(tmp_path: Path) -> None:
    data = os.urandom(WHOLE_BYTES + 77)
    one = _slide(tmp_path / "1", data)
    two = _slide(tmp_path / "2", data, secret=SECRET)
    _age(two.path)
    renamed = tmp_path / "other.svs"
    renamed.write_bytes(data)
    refs = (one, two, discover([renamed]).slides[0])
    assert len({slide_identity(ref, None).sampled_sha256 for ref in refs}) == 1


def test_the_sampled_hash_of_known_bytes_never_moves(tmp_path: Path) -> None:
    pattern = bytes(range(251)) * 4000
    small = slide_identity(_slide(tmp_path / "s", pattern[:1000], parts={"x.dat": b""}), None)
    large = slide_identity(_slide(tmp_path / "l", pattern), None)
    full = slide_identity(_slide(tmp_path / "f", pattern), None, method="full")
    assert [item.sampled_sha256[:16] for item in (small, large, full)] == [
        "67c27c987d28742e",
        "3e3154aaeab22eea",
        "7949579413b70e9d",
    ]


def test_a_slide_that_is_still_being_written_is_not_given_an_identity(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ref = _slide(tmp_path, bytes(WHOLE_BYTES * 2))
    real = os.pread
    changes: list[Callable[[], None]] = []

    def pread(descriptor: int, length: int, offset: int) -> bytes:
        while changes:
            changes.pop()()
        return real(descriptor, length, offset)

    monkeypatch.setattr("inference.slides.identity.os.pread", pread)
    for change in (lambda: _patch(ref.path, 5), lambda: os.truncate(ref.path, 100)):
        changes.append(change)
        with pytest.raises(SlideChanged) as caught:
            slide_identity(ref, None)
        assert caught.value.retryable
        assert caught.value.fields == {"slide": ref.key}


def test_a_missing_file_is_an_unreadable_slide_that_names_slide_and_position(tmp_path: Path) -> None:
    ref = _slide(tmp_path, b"main", parts={"a.dat": b"1"})
    recorded = slide_identity(ref, None)
    ref.files[1].unlink()
    for ask in (lambda: stamp(ref), lambda: slide_identity(ref, None), lambda: same_content(recorded, ref, None)):
        with pytest.raises(UnreadableSlide, match=r"S21-1\.mrxs, file 2 of 2: the file does not exist"):
            ask()


def test_a_fifo_in_place_of_a_file_is_refused_at_once(tmp_path: Path) -> None:
    ref = _slide(tmp_path, b"main")
    ref.path.unlink()
    os.mkfifo(ref.path)
    for ask in (lambda: stamp(ref), lambda: slide_identity(ref, None)):
        with pytest.raises(UnreadableSlide, match="not a regular file"):
            ask()


def test_a_fifo_in_place_of_a_companion_is_refused_at_once(tmp_path: Path) -> None:
    ref = _slide(tmp_path, b"main", parts={"a.dat": b"1"})
    ref.files[1].unlink()
    os.mkfifo(ref.files[1])
    for ask in (lambda: stamp(ref), lambda: slide_identity(ref, None)):
        with pytest.raises(UnreadableSlide, match="file 2 of 2: not a regular file"):
            ask()
    assert discover([ref.path]).slides[0].files == (ref.path,)


def test_a_fifo_put_there_between_the_look_and_the_opening_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ref = _slide(tmp_path, b"main")
    real, looks = os.lstat, []

    def lstat(path: str) -> os.stat_result:
        status = real(path)
        if str(path) == str(ref.path):
            looks.append(path)
            if len(looks) == 2:  # the first is that of resolving links
                ref.path.unlink()
                os.mkfifo(ref.path)
        return status

    monkeypatch.setattr("inference.slides._files.os.lstat", lstat)
    with pytest.raises(UnreadableSlide, match="not a regular file"):
        slide_identity(ref, None)
    assert len(looks) == 2


def test_a_lost_root_is_the_fault_of_the_source_and_not_of_the_slide(tmp_path: Path) -> None:
    ref = _slide(tmp_path / "mount", b"main")
    (tmp_path / "mount").rename(tmp_path / "gone")
    with pytest.raises(SourceUnavailable):
        stamp(ref)


def test_under_a_secret_neither_record_nor_error_tells_a_name(tmp_path: Path) -> None:
    ref = _slide(tmp_path, b"main", parts={"S21-1.dat": b"1"}, secret=SECRET)
    recorded = slide_identity(ref, "q").to_json(hidden=True)
    assert "S21" not in json.dumps(recorded)
    again = SlideIdentity.from_json(json.loads(json.dumps(recorded)))
    assert same_content(again, ref, "q")
    _age(ref.path)
    assert same_content(again, ref, "q")
    assert again.to_json(hidden=False) == recorded
    ref.files[1].unlink()
    for ask in (lambda: stamp(ref), lambda: slide_identity(ref, None)):
        with pytest.raises(UnreadableSlide) as caught:
            ask()
        assert "S21" not in _told(caught.value)
    ref.path.parent.rename(tmp_path.with_name("S21-moved"))
    with pytest.raises(SourceUnavailable) as lost:
        stamp(ref)
    assert "S21" not in _told(lost.value)


def _told(error: BaseException) -> str:
    """All that a log would show of an error: its text, and the causes and contexts that are not suppressed."""
    return "".join(line for line in traceback.format_exception(error) if not line.startswith("  File "))


STAMPS = st.builds(FileStamp, st.text(min_size=1), st.integers(0), st.integers())


@given(
    st.lists(STAMPS, min_size=1, max_size=4),
    st.none() | st.text(),
    st.binary(min_size=32, max_size=32),
    st.sampled_from(["sampled", "full"]),
)
def test_an_identity_survives_json(
    files: list[FileStamp], quickhash: str | None, digest: bytes, method: Method
) -> None:
    written = SlideIdentity(tuple(files), quickhash, digest.hex(), method)
    assert SlideIdentity.from_json(json.loads(json.dumps(written.to_json()))) == written


GOOD = {"size": 1, "mtime_ns": 2, "name": "a"}
RECORD: dict[str, object] = {"files": [GOOD], "quickhash": None, "sampled_sha256": "0" * 64, "method": "full"}


@pytest.mark.parametrize(
    "data",
    [
        None,
        [],
        {},
        RECORD | {"extra": 1},
        {name: value for name, value in RECORD.items() if name != "quickhash"},
        RECORD | {"quickhash": 5},
        RECORD | {"sampled_sha256": "0" * 63},
        RECORD | {"sampled_sha256": "G" * 64},
        RECORD | {"method": "md5"},
        RECORD | {"files": []},
        RECORD | {"files": "ab"},
        RECORD | {"files": [None]},
        RECORD | {"files": [GOOD | {"size": -1}]},
        RECORD | {"files": [GOOD | {"size": 1.0}]},
        RECORD | {"files": [GOOD | {"size": True}]},
        RECORD | {"files": [GOOD | {"name": ""}]},
        RECORD | {"files": [GOOD | {"name": 3}]},
        RECORD | {"files": [GOOD | {"inode": 3}]},
        RECORD | {"files": [{"size": 1}]},
        RECORD | {"files": [GOOD, {"size": 1, "mtime_ns": 2}]},
    ],
)
def test_a_damaged_record_is_refused(data: object) -> None:
    with pytest.raises(StoreError, match="damaged"):
        SlideIdentity.from_json(data)


def test_every_shared_slide_has_an_identity_and_each_file_of_a_series_counts(shared_data: Path) -> None:
    for folder in ("slides", "derived", "broken"):
        for ref in discover([shared_data / folder]).slides:
            recorded = slide_identity(ref, None)
            assert len(recorded.files) == len(ref.files)
            assert same_content(recorded, ref, None)
    (series,) = discover([shared_data / "derived" / "dicom-jpeg"]).slides
    digests = {
        slide_identity(replace(series, files=series.files[:count]), None).sampled_sha256 for count in range(1, 7)
    }
    assert len(digests) == 6
