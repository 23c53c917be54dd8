"""Slides in object stores: found by the rules of local folders, fetched when opened, evicted when unused longest."""

import contextlib
import errno
import hashlib
import os
import re
import shutil
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import ClassVar

import fsspec
import numpy as np
import pytest

from inference.errors import ConfigError, InferenceError, SlideChanged, SourceUnavailable, StoreFull, UnreadableSlide
from inference.slides import objects
from inference.slides._cache import SlideCache, cache_bytes
from inference.slides.discovery import Inventory, SlideRef, discover, split_sources
from inference.slides.identity import SlideIdentity, same_content, slide_identity, stamp
from inference.slides.keys import slide_key
from inference.slides.objects import fetch, refreshed
from inference.slides.opening import open_slide
from tests.inference.slides.buckets import BUCKET, Bucket, serve_bucket
from tests.inference.slides.test_mirax_length import _write as write_mirax

SECRET = "a secret"  # noqa: S105 - a test's own
NOT_A_SLIDE_UID = b"1.2.840.10008.5.1.4.1.1.2"


@pytest.fixture(scope="module")
def server() -> Iterator[Bucket]:
    yield from serve_bucket()


@pytest.fixture
def bucket(server: Bucket, cache: Path) -> Iterator[Bucket]:
    """The bucket, emptied after the test."""
    yield server
    server.check_credentials(check=False)
    for key in fsspec.filesystem("s3", use_listings_cache=False).find(BUCKET):
        server.delete(key.removeprefix(f"{BUCKET}/"))


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where fetched slides go."""
    monkeypatch.setattr(objects, "BACKOFF_S", 0.0)
    monkeypatch.setenv("SLIDE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def _paths(result: Inventory) -> list[str]:
    return [slide.relpath for slide in result.slides]


def _codes(result: Inventory) -> dict[str, str]:
    return {item.path.name: item.code for item in result.skipped}


def _fetched(cache: Path) -> set[str]:
    """Names of the entries that are there and whole."""
    return {path.name for path in cache.iterdir() if path.is_dir()} if cache.exists() else set()


def _one(url: str) -> SlideRef:
    (ref,) = discover([url]).slides
    return ref


# What a store yields


def test_a_prefix_yields_what_the_same_local_folder_yields(bucket: Bucket, shared_data: Path, cache: Path) -> None:
    local = discover([shared_data / "derived"])
    remote = discover([bucket.put_tree(shared_data / "derived", "study/derived")])
    assert len(remote.slides) == 8
    assert [(ref.key, ref.relpath, ref.root_label, len(ref.files)) for ref in remote.slides] == [
        (ref.key, ref.relpath, ref.root_label, len(ref.files)) for ref in local.slides
    ]
    assert _codes(remote) == _codes(local)
    assert [[file.size for file in ref.remote] for ref in remote.slides] == [
        [path.stat().st_size for path in ref.files] for ref in local.slides
    ]
    assert not _fetched(cache), "looking at them fetches none"


def test_equal_names_in_nested_folders_spaces_and_unicode_are_kept_apart(bucket: Bucket) -> None:
    names = ["a/same.svs", "b/c/same.svs", "same.svs", "with space/é 病理.svs", "[1]/slide (1)?.svs", "a#b%20c&d.svs"]
    for name in [*names, ".hidden.svs", "x/.trash/t.svs", "notes.txt", "p.png", "empty/"]:
        bucket.put(f"top/{name}", b"x")
    result = discover([bucket.url("top/")])
    assert _paths(result) == sorted(names)
    assert [ref.key for ref in result.slides] == [slide_key("top", name) for name in sorted(names)]
    assert result.skipped == ()
    assert discover([bucket.url("top")]) == result, "with and without the slash"
    for ref in result.slides:
        assert _one(ref.remote[0].url).remote == ref.remote, "named outright"


def test_names_that_no_local_path_can_have_are_skipped_with_a_reason(bucket: Bucket) -> None:
    for name in ("a//b.svs", "x" * 300 + ".svs", "../up.svs", "ok.svs"):
        bucket.put(f"top/{name}", b"x")
    result = discover([bucket.url("top/")])
    assert _paths(result) == ["ok.svs"]
    assert {item.code for item in result.skipped} == {"bad_name"}
    assert len(result.skipped) == 3


def test_companions_are_found_by_listing(bucket: Bucket, tmp_path: Path) -> None:
    folder = tmp_path / "mixed"
    for name in ("s.mrxs", "s/Slidedat.ini", "s/Data0.dat", "s/notes.txt", "v-0.jpg", "v.opt", "other.jpg", "lone.dat"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(b"x")
    (folder / "v.vms").write_text("[Virtual Microscope Specimen]\nImageFile=v-0.jpg\nOptimisationFile=v.opt\n")
    local, url = discover([folder]), bucket.put_tree(folder, "mixed")
    remote = discover([url])
    for one, other in zip(remote.slides, local.slides, strict=True):
        assert [file.name for file in one.remote] == [file.name for file in stamp(other)]
        assert one.key == other.key
    assert [len(ref.remote) for ref in remote.slides] == [3, 3]
    for name in ("s.mrxs", "v.vms"):
        assert len(_one(f"{url}{name}").remote) == 3
    assert discover([f"{url}*.vms"]).slides[0].remote == remote.slides[1].remote


def test_dicom_is_found_by_its_magic_where_the_name_may_be_dicoms(bucket: Bucket, shared_data: Path) -> None:
    source = shared_data / "slides" / "dicom-highdicom" / "sm_image.dcm"
    dicom = source.read_bytes()
    for name in ("one/1.2.840.99", "two/IMG0001", "three/scan.dicom", "no/readme", "no/1.2.3"):
        bucket.put(f"d/{name}", dicom if not name.startswith("no") else b"x" * 500)
    bucket.put("d/hidden-in.bin", dicom)
    bucket.put("d/no/ct", dicom.replace(b"1.2.840.10008.5.1.4.1.1.77.1.6", NOT_A_SLIDE_UID.ljust(30, b"\0")))
    result = discover([bucket.url("d/")])
    assert _paths(result) == ["one/1.2.840.99"], "the other two are copies of the same instance"
    assert _codes(result) == {"IMG0001": "dicom_copy", "scan.dicom": "dicom_copy", "ct": "dicom_not_a_slide"}
    assert _paths(discover([bucket.url("d/hidden-in.bin")])) == ["hidden-in.bin"], "named outright"


def test_a_header_longer_than_the_first_piece_is_read_on(bucket: Bucket, tmp_path: Path) -> None:
    import pydicom

    data = pydicom.Dataset()
    data.SOPClassUID, data.SOPInstanceUID = "1.2.840.10008.5.1.4.1.1.77.1.6", "1.2.3"
    data.SeriesInstanceUID, data.ImageType = "1.2.4", ["ORIGINAL", "PRIMARY", "VOLUME", "NONE"]
    data.add_new(0x00282000, "OB", bytes(300_000))
    data.TotalPixelMatrixColumns = 100
    data.add_new(0x00540220, "SQ", [])
    data.file_meta = pydicom.dataset.FileMetaDataset()
    data.file_meta.TransferSyntaxUID = "1.2.840.10008.1.2.1"
    data.save_as(tmp_path / "long.dcm", enforce_file_format=True)
    bucket.put("long/a.dcm", tmp_path / "long.dcm")
    result = discover([bucket.url("long/")])
    assert (_paths(result), result.skipped) == (["a.dcm"], ())


def test_the_key_depends_on_the_prefix_given_and_never_on_the_order(bucket: Bucket) -> None:
    for name in ("x/slides/a.svs", "x/slides/b.svs", "x/other/c.svs"):
        bucket.put(name, b"x")
    ref = _one(bucket.url("x/slides/a.svs"))
    assert (ref.root_label, ref.relpath, ref.key) == ("slides", "a.svs", slide_key("slides", "a.svs"))
    sources = [bucket.url("x/slides/b.svs"), bucket.url("x/other/"), bucket.url("x/slides/")]
    forward, backward = (discover(order).slides for order in (sources, sources[::-1]))
    assert sorted(r.key for r in forward) == sorted(r.key for r in backward)
    assert discover([bucket.url("x/*/a.svs")]).slides[0].relpath == "slides/a.svs"
    rooted = discover([bucket.url("x/slides/a.svs")], root=bucket.url()).slides[0]
    assert (rooted.root_label, rooted.relpath) == (BUCKET, "x/slides/a.svs")
    with pytest.raises(ConfigError, match=f"the path 's3://{BUCKET}/x/other/any' lies outside the root"):
        discover([bucket.url("x/other/")], root=bucket.url("x/slides"))


def test_a_cohort_file_may_mix_urls_and_local_paths(bucket: Bucket, tmp_path: Path) -> None:
    bucket.put("x/one/a.svs", b"x")
    bucket.put("y/one/a.svs", b"xy")
    (tmp_path / "a.svs").write_bytes(b"x")
    rows = f"path,mpp,slide_key\na.svs,,\n{bucket.url('x/one/a.svs')},0.5,\n{bucket.url('y/one/')},,case-7\n"
    (tmp_path / "cohort.csv").write_text(rows + f"{bucket.url('gone.svs')},,\n{bucket.url('none/*.svs')},,\n")
    result = discover([tmp_path / "cohort.csv"])
    assert _paths(result) == ["a.svs", "x/one/a.svs", "y/one/a.svs", "gone.svs"]
    local, one, two, gone = result.slides
    assert (local.remote, one.mpp, one.root_label, two.key) == ((), 0.5, BUCKET, "case-7")
    assert [item.code for item in result.skipped] == ["no_match"]
    with pytest.raises(UnreadableSlide, match=r"gone\.svs: the object is not in its bucket"):
        refreshed(gone)


def test_a_cohort_file_may_lie_in_the_bucket_with_relative_rows(bucket: Bucket) -> None:
    bucket.put("study/in/a.svs", b"x")
    url = bucket.put("study/cohort.csv", b"path,mpp\nin/a.svs,0.25\n")
    ref = _one(url)
    assert (ref.relpath, ref.mpp, ref.key) == ("in/a.svs", 0.25, slide_key("study", "in/a.svs"))
    bucket.put("study/cohort.csv", b"path\n../../../../etc/a.svs\n")
    with pytest.raises(ConfigError, match="row 2: the path leaves the bucket"):
        discover([url])


def test_any_fsspec_url_will_do(cache: Path) -> None:
    memory = fsspec.filesystem("memory")
    memory.pipe_file("/ward/a.svs", b"abc")
    try:
        ref = _one("memory://ward/a.svs")
        assert (ref.root_label, ref.relpath, ref.remote[0].size) == ("ward", "a.svs", 3)
        with fetch(refreshed(ref)) or contextlib.nullcontext():
            assert refreshed(ref).path.read_bytes() == b"abc"
    finally:
        memory.rm("/ward", recursive=True)


# What cannot be used


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("s3://no-such-bucket/x/", "does not exist; check bucket and folder"),
        (f"s3://{BUCKET}/none/", "does not exist"),
        (f"s3://{BUCKET}/none.svs", "does not exist"),
        (f"s3://{BUCKET}/none/*.svs", "matches no slide"),
        ("s3://", "names no bucket"),
        ("s3://Not_A_Bucket!/x", "no bucket can have this name"),
        ("nonsense://x/y", "no file system is known by nonsense://"),
        (Path("s3://bucket/a.svs"), "give it as text, not as a Path"),
        ("simplecache::s3://bucket/a.svs", "does not exist"),
        ("zip://a.svs::s3://bucket/a.zip", "a URL within a URL"),
    ],
)
def test_a_wrong_url_is_the_callers_to_mend(bucket: Bucket, url: str | Path, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        discover([url])


def test_refused_access_is_told_as_such_without_the_keys(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    ref = _one(bucket.put("top/a.svs", b"x"))
    bucket.check_credentials(check=True)
    for ask in (lambda: discover([bucket.url("top/")]), lambda: refreshed(ref), lambda: fetch(ref)):
        with pytest.raises(SourceUnavailable, match=r"refuses access \(\w+\): check the credentials") as caught:
            ask()
        assert caught.value.retryable


def test_an_unreachable_endpoint_is_the_sources_fault(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    s3fs = pytest.importorskip("s3fs")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "test")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    s3fs.S3FileSystem.clear_instance_cache()
    try:
        with pytest.raises(SourceUnavailable, match="source 's3://b-b-b/x': the object store cannot be reached"):
            discover(["s3://b-b-b/x"])
    finally:
        s3fs.S3FileSystem.clear_instance_cache()


def test_a_url_with_a_password_or_a_signed_query_is_refused_and_not_repeated() -> None:
    for url in ("s3://me:hunter2@bucket/a.svs", "https://host/a.svs?X-Amz-Signature=hunter2"):
        with pytest.raises(ConfigError, match="carries a password or a signed query") as caught:
            discover([url])
        assert "hunter2" not in caught.value.message


def test_a_missing_package_is_named() -> None:
    with pytest.raises(ConfigError, match="gs:// needs a package that is not installed: pip install gcsfs"):
        discover(["gs://bucket/x/"])


def test_under_a_secret_neither_messages_nor_cache_tell_a_name(bucket: Bucket, cache: Path) -> None:
    url = bucket.put("ward/SMITH.svs", b"x")
    (ref,) = discover([url], secret=SECRET).slides
    assert ref.hidden
    ref = refreshed(ref)
    with fetch(ref) or contextlib.nullcontext():
        assert ref.path.read_bytes() == b"x"
    bucket.delete("ward/SMITH.svs")
    said = []
    for ask in (lambda: refreshed(ref), lambda: discover([bucket.url("ward/SMITH.svs")], secret=SECRET)):
        with pytest.raises(InferenceError) as caught:
            ask()
        said.append(caught.value.message)
    told = [*said, repr(ref), repr(ref.remote), *(str(path) for path in cache.rglob("*"))]
    assert not [text for text in told if "SMITH" in text or "ward" in text]
    assert cache.stat().st_mode & 0o777 == 0o700


def test_sources_in_one_text_are_split_at_colons_that_belong_to_no_url() -> None:
    for text, parts in {
        "/a:/b": ["/a", "/b"],
        "s3://a/b:/c:s3://d": ["s3://a/b", "/c", "s3://d"],
        "http://h:8080/x:y": ["http://h:8080/x", "y"],
    }.items():
        assert split_sources(text, ":") == parts


# Fetching


def test_a_fetched_slide_reads_as_the_local_one(bucket: Bucket, shared_data: Path, cache: Path) -> None:
    for folder, name in (("slides", "CMU-1-Small-Region.svs"), ("derived", "dicom-jpeg")):
        local = discover([shared_data / folder / name]).slides[0]
        source = shared_data / folder / name
        url = bucket.put_tree(source, f"r/{name}") if source.is_dir() else bucket.put(f"r/{name}", source)
        ref = refreshed(_one(url))
        pin = fetch(ref)
        assert pin is not None
        with pin, open_slide(ref.path, ref.name, ref.files) as one, open_slide(local.path, "l", local.files) as other:
            assert one.level_sizes == other.level_sizes
            assert np.array_equal(one.read_region(0, 900, 900, 300, 200), other.read_region(0, 900, 900, 300, 200))
            identities = slide_identity(ref, one.quickhash), slide_identity(local, other.quickhash)
            assert identities[0].sampled_sha256 == identities[1].sampled_sha256
            assert [file.name for file in identities[0].files] == [file.name for file in identities[1].files]
            assert one.quickhash == other.quickhash


def test_stamps_are_the_stores_before_and_after_fetching_and_after_an_eviction(bucket: Bucket, cache: Path) -> None:
    ref = refreshed(_one(bucket.put("top/a.svs", b"content")))
    before = stamp(ref)
    assert before[0].name == "a.svs"
    assert before[0].version == f"etag:{hashlib.md5(b'content').hexdigest()}"  # noqa: S324 - S3's own
    for _ in range(2):
        with fetch(ref) or contextlib.nullcontext():
            assert (stamp(ref), slide_identity(ref, "q").files) == (before, before)
        shutil.rmtree(cache)
    recorded = SlideIdentity.from_json(SlideIdentity(before, "q", "0" * 64).to_json())
    assert recorded.files == before
    assert same_content(recorded, ref, None), "without fetching it"
    assert not _fetched(cache)


def test_a_replaced_object_is_another_entry_and_no_longer_the_content_recorded(bucket: Bucket, cache: Path) -> None:
    old = refreshed(_one(bucket.put("top/a.svs", b"old 1")))
    with fetch(old) or contextlib.nullcontext():
        recorded = slide_identity(old, None)
        bucket.put("top/a.svs", b"new 2")  # the same size, and within the second
        new = refreshed(old)
        assert new.path != old.path
        with fetch(new) or contextlib.nullcontext():
            assert (old.path.read_bytes(), new.path.read_bytes()) == (b"old 1", b"new 2")
            assert not same_content(recorded, new, None)
    shutil.rmtree(cache)
    with pytest.raises(SlideChanged, match=r"a\.svs: the object was replaced"):
        fetch(old)
    assert not _fetched(cache)


def test_the_same_bytes_uploaded_again_are_the_same_slide(bucket: Bucket) -> None:
    ref = refreshed(_one(bucket.put("top/a.svs", b"content")))
    recorded = SlideIdentity((stamp(ref)[0],), "q", "0" * 64)
    later = SlideIdentity((stamp(ref)[0].__class__("a.svs", 7, 0, stamp(ref)[0].version),), "q", "0" * 64)
    assert same_content(recorded, ref, None)
    assert same_content(later, ref, None), "the tag counts, not the time"


# The cache's bound


def _put(folder: Path, size: int) -> None:
    (folder / "slide.svs").write_bytes(bytes(size))


def _pin(cache: SlideCache, number: int, size: int = 40) -> contextlib.AbstractContextManager[object]:
    return cache.pin(
        f"{number:032x}",
        size,
        whole=lambda folder: (folder / "slide.svs").is_file(),
        fetch=lambda folder: _put(folder, size),
        name="S1",
    )


def test_those_unused_longest_go_first_and_those_in_use_stay(tmp_path: Path) -> None:
    cache = SlideCache(tmp_path, 100, wait_s=0)
    for number in (1, 2):
        with _pin(cache, number):
            pass
        os.utime(tmp_path / f"{number:032x}.lock", (number, number))
    with _pin(cache, 1):  # used again, so it is the younger
        pass
    with _pin(cache, 3):
        assert _fetched(tmp_path) == {f"{n:032x}" for n in (1, 3)}
        with _pin(cache, 4):
            assert _fetched(tmp_path) == {f"{n:032x}" for n in (3, 4)}
            with pytest.raises(StoreFull, match=r"S1: no room to fetch the slide .* raise SLIDE_CACHE_GB"):
                _pin(cache, 5)
    with _pin(cache, 5, 90):
        assert _fetched(tmp_path) == {f"{5:032x}"}


def test_many_at_once_fetch_an_entry_once_and_each_keeps_it(tmp_path: Path) -> None:
    fetched, ready, mine = [], threading.Barrier(4), f"{1:032x}"

    def use() -> bool:
        def fill(folder: Path) -> None:
            fetched.append(folder)
            _put(folder, 40)

        ready.wait(10)
        with SlideCache(tmp_path, 100, wait_s=0).pin(mine, 40, lambda f: (f / "slide.svs").is_file(), fill, "S1"):
            with pytest.raises(StoreFull):
                _pin(SlideCache(tmp_path, 100, wait_s=0), 2, 90)
            return (tmp_path / mine / "slide.svs").is_file()

    with ThreadPoolExecutor(4) as pool:
        assert all(future.result(20) for future in [pool.submit(use) for _ in range(4)])
    assert len(fetched) == 1


def test_an_mrxs_slide_opens_from_the_cache(bucket: Bucket, tmp_path: Path) -> None:
    main = write_mirax(tmp_path / "ward")
    ref = refreshed(_one(f"{bucket.put_tree(main.parent, 'ward')}{main.name}"))
    assert len(ref.files) == 5
    pin = fetch(ref)
    assert pin is not None
    with pin, open_slide(ref.path, ref.name, ref.files) as one, open_slide(main, "local") as other:
        assert one.vendor == "mirax"
        assert np.array_equal(one.read_region(0, 0, 0, 200, 150), other.read_region(0, 0, 0, 200, 150))


def test_a_tag_that_is_no_md5_is_found_out_by_fetching_twice(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fsspec.register_implementation("torn", Torn, clobber=True)
    monkeypatch.setattr(Torn, "tag", "0" * 32)
    monkeypatch.setattr(objects, "_opaque_tags", set())
    ref = refreshed(_one("torn://box/a.svs"))
    with fetch(ref) or contextlib.nullcontext():
        assert ref.path.read_bytes() == Torn.data
    assert objects._opaque_tags == {"box"}


def test_a_slide_larger_than_the_cache_may_be_is_refused_and_evicts_nothing(tmp_path: Path) -> None:
    cache = SlideCache(tmp_path, 100, wait_s=0)
    with _pin(cache, 1):
        pass
    with pytest.raises(ConfigError, match=r"more than all fetched slides may take .* raise SLIDE_CACHE_GB"):
        _pin(cache, 2, 101)
    assert _fetched(tmp_path) == {f"{1:032x}"}


def test_a_fetch_that_died_or_an_entry_that_was_damaged_is_fetched_anew(tmp_path: Path) -> None:
    cache = SlideCache(tmp_path, 100, wait_s=0)
    (tmp_path / f"{1:032x}.part").mkdir(parents=True)
    (tmp_path / f"{1:032x}.part" / "slide.svs").write_bytes(b"half")
    with _pin(cache, 1):
        (tmp_path / f"{1:032x}" / "slide.svs").unlink()
    with _pin(cache, 1):
        assert (tmp_path / f"{1:032x}" / "slide.svs").stat().st_size == 40
    assert {path.suffix for path in tmp_path.iterdir()} == {"", ".lock"}


def test_a_cache_that_cannot_be_written_or_bounded_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"cannot be written .*: name another folder with SLIDE_CACHE"):
        _pin(SlideCache(tmp_path / "file", 100), 1)
    for text in ("0", "-1", "nan", "much"):
        monkeypatch.setenv("SLIDE_CACHE_GB", text)
        with pytest.raises(ConfigError, match="give a number of gigabytes above 0"):
            cache_bytes()


def test_a_full_disk_leaves_nothing_and_says_what_to_do(tmp_path: Path) -> None:
    def fill(folder: Path) -> None:
        _put(folder, 10)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(StoreFull, match="the disk of the slide cache is full: free space"):
        SlideCache(tmp_path, 100).pin(f"{1:032x}", 40, Path.is_dir, fill, "S1")
    assert [path.name for path in tmp_path.iterdir()] == ["lock"]


def test_an_object_without_a_size_or_turned_into_a_folder_is_told(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fsspec.register_implementation("torn", Torn, clobber=True)
    ref = _one("torn://box/a.svs")
    for info, message in (
        ({"type": "file", "size": None}, "does not tell its size"),
        ({"type": "directory", "size": 0}, "is not in its bucket"),
    ):
        monkeypatch.setattr(Torn, "told", info)
        with pytest.raises(UnreadableSlide, match=message):
            refreshed(ref)


def test_a_tiny_bound_holds_for_real_objects(bucket: Bucket, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLIDE_CACHE_GB", "0.0000025")  # 2500 bytes
    for name in "abcd":
        bucket.put(f"top/{name}.svs", name.encode() * 1000)
    for ref in map(refreshed, discover([bucket.url("top/")]).slides):
        with fetch(ref) or contextlib.nullcontext():
            assert ref.path.stat().st_size == 1000
        assert sum(path.stat().st_size for path in cache.rglob("slide.svs")) <= 2500
    assert len(_fetched(cache)) == 2


# Downloads cut short


class Torn(fsspec.AbstractFileSystem):  # type: ignore[misc]  # untyped base
    """Objects whose first reads come back short."""

    protocol = "torn"
    cachable = False
    short_reads, tag = 0, ""
    told: ClassVar[dict[str, object]] = {}
    data = b"0123456789"

    def info(self, path: str, **_: object) -> dict[str, object]:
        return {
            "name": path,
            "size": len(self.data),
            "type": "file",
            "created": 1_700_000_000.25,
            "ETag": self.tag,
        } | self.told

    def cat_file(self, path: str, start: int = 0, end: int | None = None, **_: object) -> bytes:
        part = self.data[start:end]
        if Torn.short_reads:
            Torn.short_reads -= 1
            return part[:-1]
        return part


@pytest.mark.parametrize(("short_reads", "arrives"), [(2, True), (3, False)])
def test_a_download_cut_short_is_tried_three_times(
    short_reads: int, arrives: bool, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fsspec.register_implementation("torn", Torn, clobber=True)
    ref = refreshed(_one("torn://box/a.svs"))
    monkeypatch.setattr(objects, "PARALLEL", 1)
    monkeypatch.setattr(objects, "PIECE_BYTES", 4)
    monkeypatch.setattr(Torn, "short_reads", short_reads)
    if arrives:
        with fetch(ref) or contextlib.nullcontext():
            assert ref.path.read_bytes() == Torn.data
            assert ref.path.stat().st_mtime_ns == 1_700_000_000_250_000_000
        return
    with pytest.raises(SourceUnavailable, match=r"a\.svs: the download was cut short") as caught:
        fetch(ref)
    assert caught.value.retryable
    assert not _fetched(cache)
    with fetch(ref) or contextlib.nullcontext():
        assert ref.path.read_bytes() == Torn.data
