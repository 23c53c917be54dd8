"""The store's folders: what is refused at the start, what is listed, what is remembered of failures."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from inference.errors import DamagedResult, StoreError, StoreFull
from inference.store.store import Address, FailureRecord, Store
from tests.inference.store.mounts import fill, make_read_only, tmpfs
from tests.inference.store.publisher import ADDRESS, leftovers, manifest, publish, published


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store")


def failure(key: str, code: str = "unreadable_slide") -> FailureRecord:
    return FailureRecord(slide_key=key, code=code, message="a reason", retryable=False, stage="open")


def publish_large_manifest(store: Store) -> None:
    with store.lock(ADDRESS), store.work(ADDRESS) as work:
        (work / "a.bin").write_bytes(b"data")
        store.publish(ADDRESS, work, manifest("x" * 200_000))


def test_a_disk_that_can_only_be_read_is_refused_at_the_start(tmp_path: Path) -> None:
    with tmpfs(tmp_path / "disk", "size=1m") as disk:
        Store(disk / "store")
        make_read_only(disk)
        for root in (disk / "store", disk / "other"):
            with pytest.raises(StoreError, match="name a folder that this user may write to") as caught:
                Store(root)
            assert type(caught.value) is StoreError


def test_a_file_in_the_stores_place_is_refused_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "store").write_text("no folder")
    with pytest.raises(StoreError, match="cannot write"):
        Store(tmp_path / "store")


def test_opening_a_store_leaves_nothing_in_it_and_removes_old_scratch_files_alone(store: Store) -> None:
    assert list(store.root.iterdir()) == []
    store.record_failure(failure("a"))
    old = [store.root / ".probe-1-1", store.root / ".report.html.x.tmp", store.root / ".failures" / ".a.json.x.tmp"]
    kept = [store.root / ".probe-2-2", store.root / "mine.tmp", store.root / ".failures" / ".b.json.y.tmp"]
    for path in [*old, *kept]:
        path.touch()
    for path in [*old, store.root / "mine.tmp"]:
        os.utime(path, (0, 0))
    Store(store.root)
    assert [path.exists() for path in old] == [False] * 3
    assert [path.exists() for path in kept] == [True] * 3
    assert store.failure("a") is not None


def test_a_recipes_digest_names_its_folder_and_does_not_depend_on_the_order_of_its_keys() -> None:
    one = Address("tiles", "t224", {"a": 1, "b": [1.5, None]}, "k")
    same = Address("tiles", "t224", {"b": [1.5, None], "a": 1}, "k")
    other = Address("tiles", "t224", {"a": 2, "b": [1.5, None]}, "k")
    assert one.folder == same.folder == f"tiles/t224@{one.digest[:12]}/k"
    assert other.folder != one.folder


def test_a_result_is_there_only_once_it_is_published(store: Store) -> None:
    with store.lock(ADDRESS), store.work(ADDRESS) as work:
        (work / "a.bin").write_bytes(b"data")
        assert store.read(ADDRESS) is None
        assert list(store.results()) == []
        complete = store.publish(ADDRESS, work, manifest("text"))
    assert store.read(ADDRESS) == complete
    assert [(record.name, record.size) for record in complete.files] == [("a.bin", 4)]
    assert [path for path, _ in store.results()] == [store.path(ADDRESS)]


def test_work_that_is_left_unpublished_goes_and_its_own_error_is_the_one_seen(store: Store) -> None:
    def fail() -> None:
        with store.work(ADDRESS) as work:
            (work / "a.bin").write_bytes(b"data")
            raise RuntimeError("mine")

    with pytest.raises(RuntimeError, match="mine"):
        fail()
    assert leftovers(store.root) == []


def test_results_under_keys_that_look_like_leftovers_are_results(store: Store) -> None:
    for key in ("a", "a.old", "a.tmp"):
        address = Address(ADDRESS.stage, ADDRESS.name, ADDRESS.recipe, key)
        for _ in range(2):
            with store.lock(address), store.work(address) as work:
                store.publish(address, work, manifest(key))
    assert [path.name for path, _ in store.results()] == ["a", "a.old", "a.tmp"]


def test_a_full_disk_keeps_the_older_result_and_the_newer_one_is_published_once_there_is_room(tmp_path: Path) -> None:
    with tmpfs(tmp_path / "disk", "size=512k") as disk:
        publish(disk, "old")
        filler = fill(disk, leave_bytes=100_000)
        with pytest.raises(StoreFull) as caught:
            publish_large_manifest(Store(disk))
        assert caught.value.code == "store_full"
        assert published(disk) == "old"
        filler.unlink()
        publish(disk, "new")
        assert published(disk) == "new"
        assert leftovers(disk) == []


def test_a_lock_that_cannot_be_written_for_want_of_space_is_a_full_store(tmp_path: Path) -> None:
    with tmpfs(tmp_path / "disk", "size=64k,nr_inodes=40") as disk:
        store = Store(disk)
        fill(disk, leave_bytes=0)
        with pytest.raises(StoreFull), store.lock(ADDRESS):
            pass
        assert not (disk / ".locks" / f"slide-1.info.{ADDRESS.digest[:12]}").exists()


def test_a_failure_is_remembered_with_the_number_of_times_it_came_and_forgotten_when_cleared(store: Store) -> None:
    assert store.failure("a") is None
    for attempts in (1, 2):
        store.record_failure(failure("a"))
        found = store.failure("a")
        assert found is not None
        assert (found.attempts, found.code, found.message) == (attempts, "unreadable_slide", "a reason")
    store.record_failure(failure("a", "slide_changed"))
    assert (found := store.failure("a")) is not None
    assert found.attempts == 1, "another reason is counted from the start"
    store.clear_failure("a")
    store.clear_failure("a")
    assert store.failure("a") is None


def test_a_damaged_record_of_a_failure_counts_as_none(store: Store) -> None:
    store.record_failure(failure("a"))
    (store.root / ".failures" / "a.json").write_bytes(b"\xff{")
    assert store.failure("a") is None
    store.record_failure(failure("a"))
    assert (found := store.failure("a")) is not None
    assert found.attempts == 1


def test_a_damaged_manifest_is_an_error_with_the_remedy_and_costs_no_other_result(store: Store) -> None:
    publish(store.root, "text")
    path = store.path(ADDRESS) / "manifest.json"
    for damage in (b"", b"{", b"\xff\xfe", b"[]", b"null", path.read_bytes()[:-20], b'{"schema_version": 1}'):
        path.write_bytes(damage)
        with pytest.raises(DamagedResult, match="delete its folder to compute it again") as caught:
            store.read(ADDRESS)
        assert isinstance(caught.value, StoreError)
        assert not caught.value.retryable
    publish(store.root, "again")
    assert published(store.root) == "again"


@pytest.fixture(params=['"brand_new_field": 1, ', ""], ids=["with a field unknown here", "with the same fields"])
def newer(store: Store, request: pytest.FixtureRequest) -> Iterator[bytes]:
    publish(store.root, "text")
    path = store.path(ADDRESS) / "manifest.json"
    text = path.read_text().replace('"schema_version": 1,', f'"schema_version": 2, {request.param}')
    path.write_text(text)
    yield text.encode()
    assert path.read_bytes() == text.encode(), "it was touched"


def test_a_manifest_of_a_newer_schema_is_refused_and_never_called_damaged(store: Store, newer: bytes) -> None:
    with pytest.raises(StoreError, match=r"has schema 2, this version reads up to 1: upgrade") as caught:
        store.read(ADDRESS)
    assert not isinstance(caught.value, DamagedResult)
    with pytest.raises(StoreError, match="upgrade"):
        list(store.results())
