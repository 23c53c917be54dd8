"""Parquet files whose bytes depend on their content alone."""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Self

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray
from pydantic import JsonValue

from inference.errors import DamagedResult, StoreError
from inference.store.files import canonical_json, store_errors

SCHEMA_VERSION = 1

SHARD = 4096
"""Planned tiles per row group."""

_META = b"slide_inference"


class TableWriter:
    """Writes one Parquet file, one row group per call; no clock, no host, no file name enters it."""

    def __init__(self, path: Path, schema: pa.Schema, metadata: Mapping[str, JsonValue]) -> None:
        text = canonical_json({"schema_version": SCHEMA_VERSION, **metadata})
        self._schema = schema.with_metadata({_META: text.encode()})
        self._path = path
        with store_errors(path):
            self._writer = pq.ParquetWriter(
                path, self._schema, compression="zstd", compression_level=3, write_page_checksum=True
            )

    def write(self, columns: Mapping[str, pa.Array | NDArray[np.generic]]) -> None:
        """Append one row group; columns by name, in the schema's types."""
        arrays = [pa.array(columns[f.name], type=f.type) if isinstance(columns[f.name], np.ndarray) else columns[f.name]
                  for f in self._schema]  # fmt: skip
        table = pa.Table.from_arrays(arrays, schema=self._schema)
        with store_errors(self._path):
            self._writer.write_table(table, row_group_size=max(len(table), 1))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        with store_errors(self._path):
            self._writer.close()


def read_table(path: Path) -> tuple[pa.Table, dict[str, JsonValue]]:
    """A table and the metadata it was written with.

    Raises:
        DamagedResult: not a table of this library.
        StoreError: of a newer schema.
    """
    with _open_table(path) as file:
        return file.read(), _metadata(path, file)


def read_column(path: Path, name: str) -> Iterator[pa.ChunkedArray]:
    """One column, a row group at a time, so that memory does not grow with the table.

    Raises:
        DamagedResult, StoreError: as `read_table`.
    """
    with _open_table(path) as file:
        _metadata(path, file)
        for group in range(file.num_row_groups):
            yield file.read_row_group(group, columns=[name]).column(name)


@contextmanager
def _open_table(path: Path) -> Iterator[pq.ParquetFile]:
    try:
        with pq.ParquetFile(path, page_checksum_verification=True) as file:
            yield file
    except (OSError, ValueError, pa.ArrowException) as error:
        text = f"{path} cannot be read as a result table ({type(error).__name__})"
        raise DamagedResult(f"{text}: delete its folder to compute it again") from error


def _metadata(path: Path, file: pq.ParquetFile) -> dict[str, JsonValue]:
    raw = (file.schema_arrow.metadata or {}).get(_META)
    metadata: object = json.loads(raw) if raw else None
    version = metadata.get("schema_version") if isinstance(metadata, dict) else None
    if not isinstance(metadata, dict) or not isinstance(version, int):
        raise DamagedResult(f"{path} is not a result table: delete its folder to compute it again")
    if version > SCHEMA_VERSION:
        raise StoreError(f"{path} has schema {version}, this version reads up to {SCHEMA_VERSION}: upgrade")
    return metadata


TILE_KEYS = (
    pa.field("row", pa.int32(), nullable=False),
    pa.field("col", pa.int32(), nullable=False),
    pa.field("x", pa.int64(), nullable=False),
    pa.field("y", pa.int64(), nullable=False),
)
"""What names a tile, in every table that has tiles: grid row and column, level-0 pixel of its top-left corner."""

VECTOR = pa.list_(pa.float32())
"""Type of a column of vectors.

Parquet knows no fixed-size list, and Arrow writes but cannot read back a fixed-size list with null rows
("Expected all lists to be of size"). The length is the same in every row that is not null.
"""


def vectors(values: NDArray[np.float32], valid: NDArray[np.bool_]) -> pa.ListArray:
    """(N, D) float32 -> one list per row; null where invalid, never zeros."""
    offsets = np.concatenate([[0], np.cumsum(valid)]).astype(np.int32) * np.int32(values.shape[1])
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(values[valid].ravel()), VECTOR, mask=pa.array(~valid))


def matrix(column: pa.ChunkedArray, size: int) -> tuple[NDArray[np.float32], NDArray[np.bool_]]:
    """The inverse of `vectors`: (N, size) float32 with NaN in invalid rows, and which rows are valid.

    Raises:
        DamagedResult: a row has another length.
    """
    array = pa.concat_arrays(column.chunks) if column.num_chunks else pa.array([], VECTOR)
    valid = np.asarray(array.is_valid())
    lengths = np.asarray(array.value_lengths().drop_null())
    if (lengths != size).any():
        raise DamagedResult(f"a row holds {lengths[lengths != size][0]} values instead of {size}: the table is damaged")
    values = np.full((len(array), size), np.nan, np.float32)
    values[valid] = np.asarray(array.flatten(), np.float32).reshape(-1, size)
    return values, valid
