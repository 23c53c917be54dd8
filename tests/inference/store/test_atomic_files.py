"""A file is the old one or the new one, whatever fails while it is written."""

import subprocess
import sys
from pathlib import Path

import pytest

from inference.errors import StoreError, StoreFull
from inference.store.files import canonical_json, disk_errors, write_atomic
from tests.inference.store.mounts import fill, make_read_only, tmpfs

REPO = Path(__file__).resolve().parents[3]

WRITE_BEYOND_A_LIMIT = """
import resource, sys
from pathlib import Path
from inference.errors import StoreFull
from inference.store.files import write_atomic
path = Path(sys.argv[1])
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
try:
    write_atomic(path, bytes(200_000))
except StoreFull as error:
    print(error.code, error.retryable)
write_atomic(path.with_name("small"), b"fits")
"""


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_write_that_goes_well_replaces_the_file_and_leaves_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "f"
    for data in (b"old", b"new"):
        write_atomic(path, data)
        assert path.read_bytes() == data
    assert names(tmp_path) == ["f"]
    assert path.stat().st_mode & 0o777 == 0o644


def test_a_private_file_is_readable_by_its_owner_alone(tmp_path: Path) -> None:
    write_atomic(tmp_path / "f", b"names", mode=0o600)
    assert (tmp_path / "f").stat().st_mode & 0o777 == 0o600


def test_a_write_cut_by_a_size_limit_leaves_the_old_file_and_the_next_one_works(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_bytes(b"old")
    done = subprocess.run(
        [sys.executable, "-c", WRITE_BEYOND_A_LIMIT, str(path)],
        cwd=REPO, capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    assert done.stdout.split() == ["store_full", "True"]
    assert path.read_bytes() == b"old"
    assert names(tmp_path) == ["f", "small"]


def test_a_full_disk_is_a_typed_retryable_error_and_the_old_file_stays(tmp_path: Path) -> None:
    with tmpfs(tmp_path / "disk", "size=256k") as disk:
        write_atomic(disk / "f", b"old")
        filler = fill(disk, leave_bytes=8192)
        with pytest.raises(StoreFull, match="free space and run again") as caught:
            write_atomic(disk / "f", bytes(100_000))
        assert caught.value.retryable
        assert (disk / "f").read_bytes() == b"old"
        assert names(disk) == ["f", "filler"]
        filler.unlink()
        write_atomic(disk / "f", bytes(100_000))
        assert (disk / "f").read_bytes() == bytes(100_000)


def test_a_disk_without_inodes_counts_as_full(tmp_path: Path) -> None:
    with tmpfs(tmp_path / "disk", "size=1m,nr_inodes=3") as disk:
        write_atomic(disk / "f", b"old")
        (disk / "last").touch()
        with pytest.raises(StoreFull):
            write_atomic(disk / "f", b"new")
        assert (disk / "f").read_bytes() == b"old"


def test_a_disk_that_can_only_be_read_is_an_error_that_says_so(tmp_path: Path) -> None:
    with tmpfs(tmp_path / "disk", "size=1m") as disk:
        write_atomic(disk / "f", b"old")
        make_read_only(disk)
        with pytest.raises(StoreError, match=r"Read-only file system: name a folder that this user may write to"):
            write_atomic(disk / "f", b"new")
        assert (disk / "f").read_bytes() == b"old"


def test_disk_errors_lets_pass_what_may_be_a_slides_fault(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError), disk_errors(tmp_path):
        (tmp_path / "gone").read_bytes()
    with pytest.raises(StoreFull), disk_errors(tmp_path):
        raise OSError(28, "No space left on device")


def test_canonical_json_is_one_text_per_value_and_refuses_what_json_cannot_say() -> None:
    assert canonical_json({"b": [1, None], "a": "µ"}) == '{"a":"µ","b":[1,null]}'
    with pytest.raises(ValueError, match="Out of range"):
        canonical_json({"a": float("nan")})
