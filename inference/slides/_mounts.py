"""Whether a file lies on a file system that may stop answering."""

import functools
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

_MOUNTS = Path("/proc/self/mountinfo")

_NETWORK = {
    *("nfs", "nfs4", "cifs", "smb3", "smbfs", "9p", "afs", "coda", "ncpfs", "ceph", "lustre", "gpfs", "beegfs"),
    *("ocfs2", "gfs2", "glusterfs", "pvfs2", "panfs", "wekafs"),
}

_LOCAL_FUSE = {"fuse.fuse-overlayfs", "fuse.lxcfs", "fuse.ntfs-3g", "fuse.exfat"}


def on_network(path: Path) -> bool:
    """Whether a path, its links resolved, lies on a network or user-space file system; False where none can tell.

    Only Linux tells.
    """
    if sys.platform != "linux":
        return False
    try:
        mounts = _MOUNTS.read_text("utf-8", errors="surrogateescape")
        return is_network(file_system_of(os.path.realpath(path), mounts))
    except OSError:
        return False


@functools.lru_cache(maxsize=256)
def has_lasting_inodes(device: int) -> bool:
    """Whether a file on a device keeps its inode number; those of FUSE may not. True where none can tell."""
    if sys.platform != "linux":
        return True
    number = f"{os.major(device)}:{os.minor(device)}"
    try:
        mounts = _MOUNTS.read_text("utf-8", errors="surrogateescape")
    except OSError:
        return True
    kinds = [kind for place, kind in _mounted(mounts) if place[2] == number]
    return not any(kind.startswith("fuse") for kind in kinds)


def is_network(kind: str | None) -> bool:
    """Whether a file system of this type may wait for another machine or process."""
    return kind is not None and (kind in _NETWORK or (kind.startswith("fuse.") and kind not in _LOCAL_FUSE))


def file_system_of(path: str, mounts: str) -> str | None:
    """Type of the file system that an absolute path lies on: the longest mount point above it, the last mounted there.

    Args:
        mounts: text of /proc/self/mountinfo; see proc_pid_mountinfo(5).
    """
    found: tuple[int, str | None] = (-1, None)
    for fields, kind in _mounted(mounts):
        point = _unescaped(fields[4]).rstrip("/")
        if (path == point or path.startswith(f"{point}/")) and len(point) >= found[0]:
            found = (len(point), kind)
    return found[1]


def _mounted(mounts: str) -> Iterator[tuple[list[str], str]]:
    """The fields before the dash of each line, and the type of the file system."""
    for line in mounts.split("\n"):
        place, _, source = line.partition(" - ")
        fields = place.split(" ")
        if len(fields) >= 5 and source:
            yield fields, source.split(" ")[0]


def _unescaped(text: str) -> str:
    """Space, tab, line feed and backslash are written as octal numbers."""
    return re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), text)
