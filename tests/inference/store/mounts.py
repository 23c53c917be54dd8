"""Small file systems for tests of full and read-only disks."""

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def tmpfs(folder: Path, options: str) -> Iterator[Path]:
    """A file system in memory mounted at a new folder; skips where mounting is not permitted."""
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)], capture_output=True, text=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"cannot mount a tmpfs: {mounted.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def make_read_only(mounted: Path) -> None:
    """Remount a tmpfs so that nothing more can be written."""
    subprocess.run(["mount", "-o", "remount,ro", str(mounted)], check=True)


def fill(folder: Path, leave_bytes: int) -> Path:
    """Write one file that leaves about so many bytes free; returns it."""
    filler = folder / "filler"
    with filler.open("wb", buffering=0) as stream:
        try:
            while stream.write(bytes(4096)):
                pass
        except OSError:
            stream.truncate(max(0, stream.tell() - leave_bytes))
    return filler
