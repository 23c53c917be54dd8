"""Files that are what their names say: regular, with one name, and hashed through the descriptor that was opened."""

import hashlib
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from inference.errors import ArtifactRefused


@contextmanager
def open_regular(path: Path) -> Iterator[BinaryIO]:
    """A file opened for reading, once it is known to be a regular one with one name.

    Raises:
        ArtifactRefused: it is not.
    """
    # O_NONBLOCK: a pipe must be refused, not waited for.
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise ArtifactRefused(f"{path.name} cannot be opened as a regular file, not a link: {error.strerror}") from None
    info = os.fstat(descriptor)
    if not stat.S_ISREG(info.st_mode) or info.st_nlink != 1:
        os.close(descriptor)
        raise ArtifactRefused(f"{path.name} is not a regular file with one name: copy the file itself there")
    with os.fdopen(descriptor, "rb") as stream:
        yield stream


def hash_regular_file(path: Path) -> tuple[int, str]:
    """Size and SHA-256 of the opened descriptor; links, pipes and devices are refused."""
    with open_regular(path) as stream:
        return _hash(stream)


def copy_regular_file(source: Path, target: Path) -> tuple[int, str]:
    """Copy to a new file; returns size and SHA-256 of what was copied."""
    with open_regular(source) as stream, target.open("xb") as copy:
        return _hash(stream, copy)


def _hash(source: BinaryIO, copy: BinaryIO | None = None) -> tuple[int, str]:
    digest, size = hashlib.sha256(), 0
    while block := source.read(1 << 20):
        digest.update(block)
        size += len(block)
        if copy is not None:
            copy.write(block)
    return size, digest.hexdigest()
