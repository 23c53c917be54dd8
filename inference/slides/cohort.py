"""Cohort files: which slides to take, in which order, and what overrides their resolution or key."""

import csv
import io
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from inference.errors import ConfigError, SourceUnavailable
from inference.slides._files import open_regular, source_lost
from inference.slides.keys import check_key

COHORT_SUFFIXES = frozenset({".csv", ".parquet"})
COLUMNS = ("path", "mpp", "slide_key")
_MPP_RANGE = (0.05, 50.0)


@dataclass(frozen=True)
class CohortRow:
    """One row: a path or glob as written, the µm/px that replaces the slide's, the key that replaces the computed one.

    Attributes:
        number: 1 for the first row below the header.
    """

    number: int
    path: str
    mpp: float | None
    slide_key: str | None


def is_cohort_file(path: Path) -> bool:
    """Whether a file's name says that it lists slides."""
    return path.suffix.lower() in COHORT_SUFFIXES


def read_cohort(path: Path) -> tuple[CohortRow, ...]:
    """Rows of a cohort file in order; only the columns path, mpp and slide_key are ever looked at.

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
            raise SourceUnavailable(message) from error
        raise ConfigError(message) from error
    try:
        records = _csv_records(data) if path.suffix.lower() == ".csv" else _parquet_records(data)
        return tuple(_row(number, record) for number, record in enumerate(records, start=1))
    except ConfigError as error:
        raise ConfigError(f"cohort file '{path.name}': {error.message}") from error


def _csv_records(data: bytes) -> Iterator[dict[str, object]]:
    try:
        text = data.decode("utf-8-sig")  # spreadsheets put a byte order mark first
    except UnicodeDecodeError as error:
        raise ConfigError("not UTF-8 text; save it as 'CSV UTF-8'") from error
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    try:
        header = [name.strip() for name in next(reader, [])]
        wanted = _wanted(header)
        number = 0
        for cells in reader:
            if not any(cells):  # spreadsheets leave lines of commas behind
                continue
            number += 1
            if len(cells) != len(header):
                raise ConfigError(
                    f"row {number} has {len(cells)} cells where the header has {len(header)};"
                    " put paths that contain a comma in double quotes"
                )
            yield {name: cells[index] for name, index in wanted.items()}
    except csv.Error as error:
        raise ConfigError(f"not a CSV file: {error} (line {reader.line_num})") from error


def _parquet_records(data: bytes) -> Iterator[dict[str, object]]:
    try:
        file = pq.ParquetFile(io.BytesIO(data))
        wanted = _wanted(file.schema_arrow.names)
        yield from file.read(columns=list(wanted)).to_pylist()
    except (pa.ArrowException, OSError) as error:
        raise ConfigError("not a readable Parquet file") from error


def _wanted(header: Sequence[str]) -> dict[str, int]:
    """Position of each column that is used."""
    if "path" not in header:
        raise ConfigError("no column named 'path'; the first line must name the columns, separated by commas")
    repeated = [name for name in COLUMNS if header.count(name) > 1]
    if repeated:
        raise ConfigError(f"column '{repeated[0]}' appears more than once")
    return {name: header.index(name) for name in COLUMNS if name in header}


def _row(number: int, record: dict[str, object]) -> CohortRow:
    path, key = record["path"], record.get("slide_key")
    if not isinstance(path, str) or not path.strip() or "\0" in path:
        raise ConfigError(f"row {number}: the path is empty or not a path")
    if isinstance(key, int) and not isinstance(key, bool):
        key = str(key)
    if key is not None and not isinstance(key, str):
        raise ConfigError(f"row {number}: slide_key is not text")
    try:
        return CohortRow(number, path, _mpp(record.get("mpp")), check_key(key.strip()) if key and key.strip() else None)
    except ConfigError as error:
        raise ConfigError(f"row {number}: {error.message}") from error


def _mpp(value: object) -> float | None:
    """µm/px of level 0; empty, null and a table's NaN mean that none is given."""
    if (
        value is None
        or (isinstance(value, float) and math.isnan(value))
        or (isinstance(value, str) and not value.strip())
    ):
        return None
    try:
        number = math.nan if isinstance(value, bool) else float(value)  # type: ignore[arg-type]  # any number or text
    except (TypeError, ValueError):
        number = math.nan
    if not _MPP_RANGE[0] <= number <= _MPP_RANGE[1]:
        raise ConfigError(
            f"mpp must be a level-0 value between {_MPP_RANGE[0]:g} and {_MPP_RANGE[1]:g} µm/px, with a decimal point"
        )
    return number
