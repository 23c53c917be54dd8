"""Cohort files: which slides to take, in which order, what overrides their resolution or key, and their ROI."""

import csv
import io
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from inference.errors import ConfigError, SourceUnavailable
from inference.slides._files import open_regular, source_lost
from inference.slides.keys import check_key
from inference.slides.resolution import parse_mpp

COHORT_SUFFIXES = frozenset({".csv", ".parquet"})
COLUMNS = ("path", "mpp", "slide_key", "roi")


@dataclass(frozen=True)
class CohortRow:
    """One row: a path or glob as written, the µm/px that replaces the slide's, the key that replaces the computed one.

    Attributes:
        number: as a spreadsheet counts: the header of a CSV file is row 1, and a cell of several lines or an empty
            line is one row. A Parquet file has no header row; its first row is 1.
        roi: path of its region of interest, as written.
    """

    number: int
    path: str
    mpp: float | None
    slide_key: str | None
    roi: str | None = None


def is_cohort_file(path: Path) -> bool:
    """Whether a file's name says that it lists slides."""
    return path.suffix.lower() in COHORT_SUFFIXES


def read_cohort(path: Path) -> tuple[CohortRow, ...]:
    """Rows of a cohort file in order; only the columns path, mpp, slide_key and roi are ever looked at.

    Messages name the file and the row, never a value: a shifted column may hold a patient's name.

    Raises:
        ConfigError: it has no `path` column, or a value that cannot be used.
        SourceUnavailable: it cannot be read.
    """
    try:
        with open_regular(path) as file:
            data = file.read()
    except OSError as error:
        message = f"the cohort file '{path.name}' cannot be read: {error.strerror}"
        if source_lost(error) or isinstance(error, PermissionError):
            raise SourceUnavailable(message) from None
        raise ConfigError(message) from None
    try:
        records = _csv_records(data) if path.suffix.lower() == ".csv" else _parquet_records(data)
        return tuple(_row(number, record) for number, record in records)
    except ConfigError as error:
        raise ConfigError(f"cohort file '{path.name}': {error.message}") from None


def _csv_records(data: bytes) -> Iterator[tuple[int, dict[str, object]]]:
    try:
        text = data.decode("utf-8-sig")  # spreadsheets put a byte order mark first
    except UnicodeDecodeError:
        raise ConfigError("not UTF-8 text; save it as 'CSV UTF-8'") from None
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    try:
        header = [name.strip() for name in next(reader, [])]
        wanted = _wanted(header)
        for number, cells in enumerate(reader, start=2):
            if not any(cell.strip() for cell in cells):  # spreadsheets leave lines of commas behind
                continue
            if len(cells) != len(header):
                raise ConfigError(
                    f"row {number} has {len(cells)} cells where the header has {len(header)};"
                    " put paths that contain a comma in double quotes"
                )
            yield number, {name: cells[index] for name, index in wanted.items()}
    except csv.Error as error:
        raise ConfigError(f"not a CSV file: {error} (line {reader.line_num})") from None


def _parquet_records(data: bytes) -> Iterator[tuple[int, dict[str, object]]]:
    try:
        with pq.ParquetFile(io.BytesIO(data)) as file:
            schema = file.schema_arrow
            columns = list(_wanted(schema.names))
            for name in columns:
                _require_type(name, schema.field(name).type)
            table = file.read(columns=columns)
            table.validate(full=True)  # text that is no UTF-8 is read without complaint
            yield from enumerate(table.to_pylist(), start=1)
    except ConfigError:
        raise
    except (pa.ArrowException, OSError, ValueError):
        raise ConfigError("not a readable Parquet file, or text in it is not UTF-8") from None


def _require_type(name: str, kind: pa.DataType) -> None:
    """Refuse a column whose values could only be misread, such as times or bytes."""
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    text = pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)
    number = pa.types.is_integer(kind) or (name == "mpp" and (pa.types.is_floating(kind) or pa.types.is_decimal(kind)))
    if not (text or pa.types.is_null(kind) or (number and name in ("mpp", "slide_key"))):
        wanted = {"mpp": "a number or text", "slide_key": "text or a whole number"}.get(name, "text")
        raise ConfigError(f"the column {name} holds {kind}, not {wanted}")


def _wanted(header: Sequence[str]) -> dict[str, int]:
    """Position of each column that is used."""
    if "path" not in header:
        raise ConfigError("no column named 'path'; the first line must name the columns, separated by commas")
    for name in header:
        meant = re.sub(r"[^a-z]", "", name.casefold())
        if name not in COLUMNS and (near := [c for c in COLUMNS if c.replace("_", "") == meant]):
            raise ConfigError(f"column {name!r} would be ignored: call it '{near[0]}'")
    repeated = [name for name in COLUMNS if header.count(name) > 1]
    if repeated:
        raise ConfigError(f"column '{repeated[0]}' appears more than once")
    return {name: header.index(name) for name in COLUMNS if name in header}


def _row(number: int, record: dict[str, object]) -> CohortRow:
    path, key, roi = record["path"], record.get("slide_key"), record.get("roi")
    if not isinstance(path, str) or not path.strip() or "\0" in path:
        raise ConfigError(f"row {number}: the path is empty or not a path")
    if isinstance(key, int) and not isinstance(key, bool):
        key = str(key)
    if key is not None and not isinstance(key, str):
        raise ConfigError(f"row {number}: slide_key is not text")
    if roi is not None and (not isinstance(roi, str) or "\0" in roi):
        raise ConfigError(f"row {number}: roi is not the path of a file")
    try:
        checked = check_key(key.strip()) if key and key.strip() else None
        return CohortRow(number, path, _mpp(record.get("mpp")), checked, roi if roi and roi.strip() else None)
    except ConfigError as error:
        raise ConfigError(f"row {number}: {error.message}") from None


def _mpp(value: object) -> float | None:
    """µm/px of level 0; empty, null and a table's NaN mean that none is given."""
    if isinstance(value, int | float | Decimal | np.floating):
        return None if math.isnan(value) else parse_mpp(str(float(value)))
    if value is None or (isinstance(value, str) and not value.strip()):
        return None
    return parse_mpp(value if isinstance(value, str) else "")
