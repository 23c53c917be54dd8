"""Which slide a key means: the look-up table of a store, `cohort.parquet`."""

import os
from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from inference.errors import ConfigError
from inference.slides.discovery import SlideRef
from inference.store.files import store_errors
from inference.store.store import Store

FILE = "cohort.parquet"

_SCHEMA = pa.schema(
    [
        pa.field("slide_key", pa.string(), nullable=False),
        pa.field("path", pa.string(), nullable=False),
        pa.field("files", pa.list_(pa.string()), nullable=False),
        pa.field("root", pa.string(), nullable=False),
        pa.field("root_label", pa.string(), nullable=False),
        pa.field("relpath", pa.string(), nullable=False),
        pa.field("mpp", pa.float64()),
        pa.field("hidden", pa.bool_(), nullable=False),
    ]
)


def write_inventory(store: Store, slides: Sequence[SlideRef]) -> Path:
    """Replace the store's table of slides; readable by its owner alone, since it names files."""
    path = store.root / FILE
    rows = [
        {
            "slide_key": ref.key,
            "path": os.fspath(ref.path),
            "files": [os.fspath(p) for p in ref.files],
            "root": os.fspath(ref.root),
            "root_label": ref.root_label,
            "relpath": ref.relpath,
            "mpp": ref.mpp,
            "hidden": ref.hidden,
        }
        for ref in slides
    ]
    scratch = path.with_name(f".{FILE}.{os.getpid()}.tmp")
    with store_errors(path):
        try:
            os.close(os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600))
            pq.write_table(pa.Table.from_pylist(rows, schema=_SCHEMA), scratch, compression="zstd")
            scratch.replace(path)
        finally:
            scratch.unlink(missing_ok=True)
    return path


def read_inventory(store: Store) -> dict[str, SlideRef]:
    """Slides by key, in cohort order.

    Raises:
        ConfigError: the store has no table yet.
    """
    path = store.root / FILE
    if not path.is_file():
        raise ConfigError("the store has no inventory of slides yet: materialise slide_inventory first")
    found = {}
    for row in pq.read_table(path).to_pylist():
        found[row["slide_key"]] = SlideRef(
            key=row["slide_key"],
            path=Path(row["path"]),
            files=tuple(Path(p) for p in row["files"]),
            root=Path(row["root"]),
            root_label=row["root_label"],
            relpath=row["relpath"],
            mpp=row["mpp"],
            hidden=row["hidden"],
        )
    return found
