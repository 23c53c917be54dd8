"""Slides in object stores: looked at where they lie, fetched into the local cache when they are opened.

A fetched slide lies in a folder of its own, named by a digest of its URL and of the versions of its objects: a replaced
object is another entry, and a reader never sees its files change. File names tell nothing either, but for VMS and VMU
sets, whose key file names the others.
"""

import base64
import binascii
import hashlib
import logging
import os
import re
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Protocol

from inference.errors import ConfigError, SlideChanged, SourceUnavailable, UnreadableSlide
from inference.slides._cache import Pin, SlideCache, cache_folder
from inference.slides._companions import COMPANION_FORMATS
from inference.slides._remote import (
    FileSystem,
    RemoteFile,
    described,
    locate,
    open_filesystem,
    remote_errors,
)

if TYPE_CHECKING:
    from inference.slides.discovery import SlideRef

log = logging.getLogger(__name__)

PIECE_BYTES = 16 << 20
"""Each request asks for this much, so that a broken connection costs little."""
PARALLEL = 4
"""Requests at a time: one connection to S3 carries some 50-90 MB/s (AWS, S3 performance guidelines)."""
ATTEMPTS, BACKOFF_S = 3, 0.5
_SUFFIX = re.compile(r"\.[A-Za-z0-9]{1,8}")
_HEX_MD5 = re.compile(r"[0-9a-f]{32}")

_opaque_tags: set[str] = set()
"""Buckets whose tags look like an MD5 and are none (objects encrypted with SSE-KMS)."""


class _Slide(Protocol):
    """What of a `SlideRef` is needed here."""

    @property
    def key(self) -> str: ...
    @property
    def name(self) -> str: ...
    @property
    def remote(self) -> tuple[RemoteFile, ...]: ...


def local_files(remote: Sequence[RemoteFile]) -> tuple[Path, ...]:
    """Where a slide's objects lie once they are fetched; none for local files."""
    if not remote:
        return ()
    folder = cache_folder() / _entry(remote)
    return tuple(folder / name for name in _local_names(remote))


def refreshed(ref: "SlideRef") -> "SlideRef":
    """The slide as its store has it now, asked without reading it; a local slide as it is.

    Raises:
        UnreadableSlide: an object is gone.
        SourceUnavailable: the store refuses, or cannot be reached.
    """
    if not ref.remote:
        return ref
    with ThreadPoolExecutor(min(PARALLEL, len(ref.remote))) as pool:
        now = tuple(pool.map(partial(_look, ref), ref.remote))
    if now == ref.remote and local_files(now) == ref.files:
        return ref
    files = local_files(now)
    return replace(ref, path=files[0], files=files, root=cache_folder(), remote=now)


def fetch(ref: "SlideRef") -> Pin | None:
    """Bring a slide's objects to `ref.files` unless they are there, and keep them there until the pin is closed.

    None for local slides. Takes what `refreshed` returned.

    Raises:
        UnreadableSlide: an object is gone, or kept in an archive.
        SlideChanged: one was replaced since the store was asked.
        SourceUnavailable: the store cannot be reached, or a download was cut short again and again.
        ConfigError: the slide is larger than the cache may be.
        StoreFull: there is no room for it.
    """
    if not ref.remote:
        return None
    names, remote = _local_names(ref.remote), ref.remote
    return SlideCache().pin(
        _entry(remote),
        sum(file.size for file in remote),
        whole=lambda folder: all(_is_there(folder / name, file) for name, file in zip(names, remote, strict=True)),
        fetch=lambda folder: _fetch_all(ref, [folder / name for name in names]),
        name=ref.name,
    )


def _entry(remote: Sequence[RemoteFile]) -> str:
    told = "\0".join(f"{file.url}\0{file.size}\0{file.mtime_ns}\0{file.version}" for file in remote)
    return hashlib.sha256(told.encode("utf-8", "surrogateescape")).hexdigest()[:32]


def _local_names(remote: Sequence[RemoteFile]) -> list[str]:
    """Names in the entry's folder: readers need the suffix, and of companions what the format lets refer to them."""
    names = []
    main = PurePosixPath(remote[0].name).suffix
    for number, file in enumerate(remote):
        path = PurePosixPath(file.name)
        suffix = path.suffix if _SUFFIX.fullmatch(path.suffix) else ""
        if number == 0:
            names.append(f"slide{suffix}")
        elif main.lower() == ".mrxs":
            names.append(f"slide/{path.name}")
        elif main.lower() in COMPANION_FORMATS:
            names.append(path.name)
        else:
            names.append(f"part-{number:05d}{suffix}")
    return names


def _is_there(path: Path, file: RemoteFile) -> bool:
    try:
        status = path.stat()
    except OSError:
        return False
    return (status.st_size, status.st_mtime_ns) == (file.size, file.mtime_ns)


def _look(ref: _Slide, file: RemoteFile) -> RemoteFile:
    place = locate(file.url)
    filesystem, path = open_filesystem(place)
    try:
        with remote_errors(ref.name):
            info = filesystem.info(path)
    except FileNotFoundError:
        raise _gone(ref) from None
    if info.get("type") == "directory":
        raise _gone(ref)
    if not isinstance(info.get("size"), int):
        raise UnreadableSlide(f"{ref.name}: its server does not tell its size; copy it to a bucket", slide=ref.key)
    return described(info, file.url, file.name)


def _fetch_all(ref: _Slide, targets: Sequence[Path]) -> None:
    started = time.monotonic()
    for file, target in zip(ref.remote, targets, strict=True):
        target.parent.mkdir(mode=0o700, exist_ok=True)
        _fetch_verified(ref, file, target)
        os.utime(target, ns=(file.mtime_ns, file.mtime_ns))
        if not _is_there(target, file):
            raise ConfigError("the disk of the slide cache does not keep times exactly: name another with SLIDE_CACHE")
    size, seconds = sum(file.size for file in ref.remote), time.monotonic() - started
    log.info("%s: fetched %.1f MB in %.1f s", ref.key, size / 1e6, seconds)


def _fetch_verified(ref: _Slide, file: RemoteFile, target: Path) -> None:
    """Fetch one object; its MD5 is compared where the store tells one.

    A tag may look like an MD5 and be none: then two downloads agree with each other.
    """
    wanted, bucket = _md5_told(file), file.url.split("/")[2]
    seen: list[str] = []
    for _ in range(2):
        _download(ref, file, target)
        if wanted is None or bucket in _opaque_tags:
            return
        with target.open("rb") as stream:
            seen.append(hashlib.file_digest(stream, partial(hashlib.md5, usedforsecurity=False)).hexdigest())
        if seen[-1] == wanted:
            return
    if seen[0] != seen[1]:
        raise SourceUnavailable(f"{ref.name}: the download differs each time: check the network, then run again")
    log.info("%s: the store's tags are no MD5, so downloads are checked by their size and version", ref.key)
    _opaque_tags.add(bucket)


def _md5_told(file: RemoteFile) -> str | None:
    """Hexadecimal MD5 of the object, if its version may be one."""
    kind, _, text = (file.version or "").partition(":")
    if kind == "md5hash":
        try:
            return base64.b64decode(text, validate=True).hex()
        except (ValueError, binascii.Error):
            return None
    return text if _HEX_MD5.fullmatch(text) else None


def _download(ref: _Slide, file: RemoteFile, target: Path) -> None:
    """All bytes of one object, flushed to disk; what the store says of it must be the same before and after."""
    filesystem, path = open_filesystem(locate(file.url))
    with target.open("wb") as out, ThreadPoolExecutor(PARALLEL) as pool:
        pieces = [
            pool.submit(_copy_piece, ref, filesystem, path, out.fileno(), start, min(start + PIECE_BYTES, file.size))
            for start in range(0, file.size, PIECE_BYTES)
        ]
        try:
            for piece in pieces:
                piece.result()
        except BaseException as error:
            pool.shutdown(wait=True, cancel_futures=True)
            if isinstance(error, SourceUnavailable):  # a shorter object has no such bytes
                _refuse_replaced(ref, file)
            raise
        os.fsync(out.fileno())
    _refuse_replaced(ref, file)


def _refuse_replaced(ref: _Slide, file: RemoteFile) -> None:
    if _look(ref, file) != file:
        raise SlideChanged(f"{ref.name}: the object was replaced while it was fetched; run again", slide=ref.key)


def _copy_piece(ref: _Slide, filesystem: FileSystem, path: str, out: int, start: int, end: int) -> None:
    """Bytes `start` to `end` into the open file, in up to `ATTEMPTS` attempts."""
    problem = SourceUnavailable(f"{ref.name}: the download was cut short: check the network, then run again")
    for attempt in range(ATTEMPTS):
        if attempt:
            time.sleep(BACKOFF_S * 2 ** (attempt - 1))
        try:
            with remote_errors(ref.name):
                data = filesystem.cat_file(path, start=start, end=end)
        except FileNotFoundError:
            raise _gone(ref) from None
        except SourceUnavailable as error:
            if error.fields.get("store_code") == "InvalidObjectState":
                text = f"{ref.name}: the object is in an archive (Glacier): restore it, then run again"
                raise UnreadableSlide(text, slide=ref.key) from None
            problem = error
            continue
        if len(data) == end - start:
            _write_at(out, data, start)
            return
    raise problem


def _write_at(out: int, data: bytes, offset: int) -> None:
    view = memoryview(data)
    while view:
        written = os.pwrite(out, view, offset)
        view, offset = view[written:], offset + written


def _gone(ref: _Slide) -> UnreadableSlide:
    return UnreadableSlide(f"{ref.name}: the object is not in its bucket: deleted, moved or misspelt", slide=ref.key)
