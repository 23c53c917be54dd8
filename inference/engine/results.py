"""Result tables of one slide: embeddings, predictions, failures."""

import contextlib
import re
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Self

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pydantic import JsonValue

from inference.errors import InferenceError
from inference.models.sample import TileOutput
from inference.models.spec import ModelSpec
from inference.store.tables import SHARD, TILE_KEYS, VECTOR, TableWriter, vectors

TileStage = Literal["read", "prepare", "forward", "output"]
TileKeys = tuple[int, int, int, int]
"""Row, column, x, y."""

FAILURES_SCHEMA = pa.schema(
    [
        *TILE_KEYS,
        pa.field("stage", pa.string(), nullable=False),
        pa.field("code", pa.string(), nullable=False),
        pa.field("message", pa.string(), nullable=False),
        pa.field("retryable", pa.bool_(), nullable=False),
        pa.field("attempts", pa.int32(), nullable=False),
    ]
)


MAX_MESSAGE = 300
# Absolute paths of two parts or more, quoted ones with their spaces; "tiles/s" and "1/2" are none.
_PATH = re.compile(r"""(?<=['"])/[^'"\n]*/[^'"\n]*(?=['"])|(?<![\w.<])~?/[^\s/'":,;()]+(?:/[^\s/'":,;()]+)+/?""")
_ADDRESS = re.compile(r"0x[0-9a-fA-F]{6,}")


@dataclass(frozen=True)
class FailedTile:
    """Why a tile has no result."""

    stage: TileStage
    code: str
    message: str
    retryable: bool
    attempts: int = 1

    @classmethod
    def of(cls, error: InferenceError, stage: TileStage) -> "FailedTile":
        """From the error that a stage raised; a read is tried twice, on a fresh handle the second time."""
        message = plain_message(error.message)
        return cls(stage, error.code, message, error.retryable, 2 if error.code == "read_error" else 1)


def plain_message(text: str) -> str:
    """One short line without paths and addresses, so that it is the same in every run and names no file."""
    line = " ".join(_PATH.sub("<path>", _ADDRESS.sub("<address>", text)).split())
    return line if len(line) <= MAX_MESSAGE else f"{line[: MAX_MESSAGE - 1]}…"


QUALITY_SCHEMA = pa.schema([*TILE_KEYS, pa.field("focus", pa.float32())])
"""One row per planned tile; the focus is null where the tile was not read (see `slides.quality.focus`)."""


class ResultTables:
    """Writes embeddings and predictions, quality and failures shard by shard, in tile order."""

    def __init__(self, folder: Path, spec: ModelSpec, metadata: dict[str, JsonValue]) -> None:
        self._stack = contextlib.ExitStack()
        self._heads: dict[str, tuple[TableWriter, int]] = {}
        for output in spec.outputs:
            column = pa.field(output.name, VECTOR)
            schema = pa.schema([*TILE_KEYS, pa.field("status", pa.string(), nullable=False), column])
            about: dict[str, JsonValue] = {"length": output.shape[0]}
            if output.components:
                about["components"] = list(output.components)
            writer = TableWriter(folder / f"{output.name}s.parquet", schema, {**metadata, **about})
            self._heads[output.name] = (self._stack.enter_context(writer), output.shape[0])
        self._failures = self._stack.enter_context(TableWriter(folder / "failures.parquet", FAILURES_SCHEMA, metadata))
        self._quality = self._stack.enter_context(TableWriter(folder / "quality.parquet", QUALITY_SCHEMA, metadata))
        self._shard: list[tuple[TileKeys, TileOutput | FailedTile, float | None]] = []
        self.failures: list[tuple[TileKeys, FailedTile]] = []
        self.n_ok = 0
        self.write_s = 0.0

    def add(self, keys: TileKeys, result: TileOutput | FailedTile, focus: float | None = None) -> None:
        """Append one tile's result, and how sharp it is."""
        if isinstance(result, FailedTile):
            self.failures.append((keys, result))
        else:
            self.n_ok += 1
        self._shard.append((keys, result, focus))
        if len(self._shard) == SHARD:
            self._flush()

    def failed_summary(self) -> list[JsonValue]:
        """Failed tiles by stage and code: count and the first as an example."""
        counts = Counter((failed.stage, failed.code) for _, failed in self.failures)
        found: list[JsonValue] = []
        for (stage, code), count in sorted(counts.items()):
            keys, first = next(f for f in self.failures if (f[1].stage, f[1].code) == (stage, code))
            example: JsonValue = {"row": keys[0], "col": keys[1], "x": keys[2], "y": keys[3], "message": first.message}
            found.append({"stage": stage, "code": code, "count": count, "example": example})
        return found

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *exc: object) -> None:
        with self._stack:
            if kind is None:
                self._flush()

    def _flush(self) -> None:
        if not self._shard:
            return
        clock = time.monotonic()
        ok = np.array([isinstance(result, TileOutput) for _, result, _ in self._shard])
        keys = _key_columns([keys for keys, _, _ in self._shard])
        status = pa.array(["ok" if good else "failed" for good in ok])
        for name, (writer, size) in self._heads.items():
            values = np.zeros((len(ok), size), np.float32)
            for i, (_, result, _) in enumerate(self._shard):
                if isinstance(result, TileOutput):
                    values[i] = result.embedding if name == "embedding" else result.prediction
            writer.write({**keys, "status": status, name: vectors(values, ok)})
        self._quality.write({**keys, "focus": pa.array([focus for _, _, focus in self._shard], pa.float32())})
        bad = [(keys, result) for keys, result, _ in self._shard if isinstance(result, FailedTile)]
        if bad:
            self._failures.write({**_key_columns([keys for keys, _ in bad]), **_failure_columns([f for _, f in bad])})
        self._shard.clear()
        self.write_s += time.monotonic() - clock


def _key_columns(keys: list[TileKeys]) -> dict[str, pa.Array | NDArray[np.generic]]:
    row, col, x, y = (np.array(column) for column in zip(*keys, strict=True))
    return {"row": row.astype(np.int32), "col": col.astype(np.int32), "x": x, "y": y}


def _failure_columns(failed: list[FailedTile]) -> dict[str, pa.Array | NDArray[np.generic]]:
    def column(kind: pa.DataType, get: Callable[[FailedTile], object]) -> pa.Array:
        return pa.array([get(f) for f in failed], type=kind)

    return {
        "stage": column(pa.string(), lambda f: f.stage),
        "code": column(pa.string(), lambda f: f.code),
        "message": column(pa.string(), lambda f: f.message),
        "retryable": column(pa.bool_(), lambda f: f.retryable),
        "attempts": column(pa.int32(), lambda f: f.attempts),
    }
