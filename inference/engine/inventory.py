"""Which slide a key means: the look-up table of a store, `cohort.parquet`."""

import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from inference.errors import ConfigError, StoreError
from inference.slides._remote import RemoteFile
from inference.slides.discovery import SlideRef, printable
from inference.slides.identity import SlideIdentity, slide_identity
from inference.slides.objects import local_files
from inference.store.files import write_atomic
from inference.store.store import Store

log = logging.getLogger(__name__)

FILE = "cohort.parquet"
LOCK_WAIT_S = 60.0

_REMOTE = pa.struct(
    [
        pa.field("url", pa.binary(), nullable=False),
        pa.field("name", pa.binary(), nullable=False),
        pa.field("size", pa.int64(), nullable=False),
        pa.field("mtime_ns", pa.int64(), nullable=False),
        pa.field("version", pa.string()),
    ]
)

# `path` is for people; the others are the bytes on disk, since names from old systems need not be UTF-8.
_SCHEMA = pa.schema(
    [
        pa.field("slide_key", pa.string(), nullable=False),
        pa.field("path", pa.string(), nullable=False),
        pa.field("files", pa.list_(pa.binary()), nullable=False),
        pa.field("root", pa.binary(), nullable=False),
        pa.field("root_label", pa.binary(), nullable=False),
        pa.field("relpath", pa.binary(), nullable=False),
        pa.field("mpp", pa.float64()),
        pa.field("hidden", pa.bool_(), nullable=False),
        # False for slides of an earlier cohort: their results are still here, so their keys are taken.
        pa.field("listed", pa.bool_(), nullable=False),
        # Of slides in object stores; what `files` says of them is where they would lie on the host that wrote it.
        pa.field("remote", pa.list_(_REMOTE)),
        pa.field("roi", pa.binary()),
    ]
)
_ADDED_LATER = ("remote", "roi")
"""Columns that a table of an older version may lack."""


def write_inventory(store: Store, slides: Sequence[SlideRef], *, keep: bool = False) -> Path:
    """Make these the store's slides; the table is readable by its owner alone, since it names files.

    With `keep`, slides of earlier runs stay listed, after these.

    Raises:
        ConfigError: a key already belongs to another slide, whose results would be replaced.
        PartitionBusy: another process holds the table.
    """
    path = store.root / FILE
    with store.lock_file("cohort", "the list of slides", LOCK_WAIT_S):
        known = _known(store, keep=keep)
        if keep and all(known.get(ref.key) == (ref, True) for ref in slides):
            return path
        for ref in slides:
            if earlier := known.get(ref.key):
                _refuse_stranger(store, ref, earlier[0])
        now = {ref.key for ref in slides}
        rows = [_row(ref, listed=True) for ref in slides]
        rows += [_row(ref, listed=listed and keep) for key, (ref, listed) in known.items() if key not in now]
        table = pa.BufferOutputStream()
        pq.write_table(pa.Table.from_pylist(rows, schema=_SCHEMA), table, compression="zstd")
        write_atomic(path, table.getvalue().to_pybytes(), mode=0o600)
    return path


def read_inventory(store: Store) -> dict[str, SlideRef]:
    """Slides by key, in cohort order.

    Raises:
        ConfigError: the store has no table yet, or it is damaged.
    """
    if not (store.root / FILE).is_file():
        raise ConfigError("the store has no inventory of slides yet: materialise slide_inventory first")
    return {key: ref for key, (ref, listed) in _read(store).items() if listed}


def _known(store: Store, *, keep: bool) -> dict[str, tuple[SlideRef, bool]]:
    """Every slide the table knows, and whether it is listed; nothing where a damaged table is to be replaced."""
    if not (store.root / FILE).is_file():
        return {}
    try:
        return _read(store)
    except ConfigError as error:
        if keep:
            raise
        log.warning("%s: written anew, since it could not be read: %s", FILE, error.message)
        return {}


def _read(store: Store) -> dict[str, tuple[SlideRef, bool]]:
    try:
        with pq.ParquetFile(store.root / FILE) as file:
            rows = _completed(file.read()).cast(_SCHEMA).to_pylist()
    except (OSError, ValueError, pa.ArrowException) as error:
        raise ConfigError(
            f"{FILE} in the store is damaged or of another version: materialise slide_inventory, or delete the file "
            "(results are kept) and run again"
        ) from error
    return {row["slide_key"]: (_ref(row), row["listed"]) for row in rows}


def _completed(table: pa.Table) -> pa.Table:
    """The table with our columns alone; what an older version did not write is empty."""
    for name in _ADDED_LATER:
        if name not in table.column_names:
            field = _SCHEMA.field(name)
            table = table.append_column(field, pa.nulls(table.num_rows, field.type))
    return table.select([name for name in _SCHEMA.names if name in table.column_names])


def _refuse_stranger(store: Store, ref: SlideRef, earlier: SlideRef) -> None:
    """Refuse a slide whose key has results of another file: its results would silently replace them.

    A slide that was moved or copied is the same one: what counts is its content. One that is not there is left to
    fail by itself.
    """
    if _place(ref) == _place(earlier) or not (ref.remote or ref.path.is_file()):
        return
    recorded = _recorded(store, ref.key)
    if not recorded:
        return
    if ref.remote:
        # Its bytes are not fetched for this: slides of one size may take turns, but neither passes for the other.
        if any([old.size for old in item.files] == [file.size for file in ref.remote] for item in recorded):
            return
        raise _stranger(ref, earlier)
    now = {method: slide_identity(ref, None, method=method).sampled_sha256 for method in {r.method for r in recorded}}
    if any(now[identity.method] == identity.sampled_sha256 for identity in recorded):
        return
    raise _stranger(ref, earlier)


def _place(ref: SlideRef) -> str:
    """What a slide's place is called."""
    return ref.remote[0].url if ref.remote else os.path.realpath(ref.path)


def _stranger(ref: SlideRef, earlier: SlideRef) -> ConfigError:
    root = ref.remote[0].url.removesuffix(ref.relpath) if ref.remote else os.fspath(ref.root)
    what = ref.name if ref.hidden else f"{ref.name} in {printable(root)}"
    before = earlier.remote[0].url if earlier.remote else os.fspath(earlier.path)
    whose = "" if ref.hidden else f" ({printable(before)})"
    return ConfigError(
        f"{what}: its key {ref.key} has results of another slide{whose} in this store: keys are made of the source "
        "folder's name and the path below it. Use another store, or --root with a folder above both, or a cohort "
        "file with a slide_key for it"
    )


def _recorded(store: Store, key: str) -> list[SlideIdentity]:
    """The slide contents that the results under a key were made from."""
    found = []
    for manifest in store.results_of(key):
        try:
            found.append(SlideIdentity.from_json(manifest.identity))
        except StoreError:
            continue  # says nothing of any slide
    return found


def _row(ref: SlideRef, *, listed: bool) -> dict[str, Any]:
    return {
        "slide_key": ref.key,
        "path": printable(ref.remote[0].url if ref.remote else os.fspath(ref.path)),
        "files": [os.fsencode(p) for p in ref.files],
        "root": os.fsencode(ref.root),
        "root_label": os.fsencode(ref.root_label),
        "relpath": os.fsencode(ref.relpath),
        "mpp": ref.mpp,
        "hidden": ref.hidden,
        "listed": listed,
        "remote": [_remote_row(file) for file in ref.remote] or None,
        "roi": None if ref.roi is None else os.fsencode(ref.roi),
    }


def _remote_row(file: RemoteFile) -> dict[str, Any]:
    return {
        "url": os.fsencode(file.url),
        "name": os.fsencode(file.name),
        "size": file.size,
        "mtime_ns": file.mtime_ns,
        "version": file.version,
    }


def _ref(row: dict[str, Any]) -> SlideRef:
    remote = tuple(
        RemoteFile(os.fsdecode(r["url"]), os.fsdecode(r["name"]), r["size"], r["mtime_ns"], r["version"])
        for r in row["remote"] or ()
    )
    files = local_files(remote) or tuple(Path(os.fsdecode(name)) for name in row["files"])
    return SlideRef(
        key=row["slide_key"],
        path=files[0],
        files=files,
        root=Path(os.fsdecode(row["root"])),
        root_label=os.fsdecode(row["root_label"]),
        relpath=os.fsdecode(row["relpath"]),
        mpp=row["mpp"],
        hidden=row["hidden"],
        remote=remote,
        roi=None if row["roi"] is None else Path(os.fsdecode(row["roi"])),
    )
