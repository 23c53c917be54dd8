"""Which slide a key means: the look-up table of a store, `cohort.parquet`."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from inference.errors import ConfigError
from inference.slides.discovery import SlideRef, printable
from inference.store.files import write_atomic
from inference.store.store import Store

FILE = "cohort.parquet"

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
    ]
)


def write_inventory(store: Store, slides: Sequence[SlideRef], *, keep: bool = False) -> Path:
    """Replace the store's table of slides; readable by its owner alone, since it names files.

    With `keep`, slides of earlier runs stay in it, after these.
    """
    path = store.root / FILE
    if keep and path.is_file():
        now = {ref.key for ref in slides}
        slides = [*slides, *(ref for key, ref in read_inventory(store).items() if key not in now)]
    rows = [
        {
            "slide_key": ref.key,
            "path": printable(os.fspath(ref.path)),
            "files": [os.fsencode(p) for p in ref.files],
            "root": os.fsencode(ref.root),
            "root_label": os.fsencode(ref.root_label),
            "relpath": os.fsencode(ref.relpath),
            "mpp": ref.mpp,
            "hidden": ref.hidden,
        }
        for ref in slides
    ]
    table = pa.BufferOutputStream()
    pq.write_table(pa.Table.from_pylist(rows, schema=_SCHEMA), table, compression="zstd")
    write_atomic(path, table.getvalue().to_pybytes(), mode=0o600)
    return path


def read_inventory(store: Store) -> dict[str, SlideRef]:
    """Slides by key, in cohort order.

    Raises:
        ConfigError: the store has no table yet, or it is damaged.
    """
    path = store.root / FILE
    if not path.is_file():
        raise ConfigError("the store has no inventory of slides yet: materialise slide_inventory first")
    try:
        with pq.ParquetFile(path) as file:
            rows = file.read(_SCHEMA.names).cast(_SCHEMA).to_pylist()
    except (OSError, ValueError, pa.ArrowException) as error:
        raise ConfigError(
            f"{FILE} in the store is damaged or of another version: materialise slide_inventory"
        ) from error
    return {row["slide_key"]: _ref(row) for row in rows}


def _ref(row: dict[str, Any]) -> SlideRef:
    files = tuple(Path(os.fsdecode(name)) for name in row["files"])
    return SlideRef(
        key=row["slide_key"],
        path=files[0],
        files=files,
        root=Path(os.fsdecode(row["root"])),
        root_label=os.fsdecode(row["root_label"]),
        relpath=os.fsdecode(row["relpath"]),
        mpp=row["mpp"],
        hidden=row["hidden"],
    )
