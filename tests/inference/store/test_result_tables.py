"""Parquet files: bytes from content alone, nulls for what failed, damage noticed."""

import socket
import tempfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray

from inference.errors import DamagedResult, StoreError, StoreFull
from inference.store import tables
from inference.store.tables import VECTOR, TableWriter, matrix, read_column, read_table, vectors
from tests.inference.store.mounts import tmpfs

SCHEMA = pa.schema([pa.field("row", pa.int32(), nullable=False), pa.field("embedding", VECTOR)])

Values = NDArray[np.float32]
Mask = NDArray[np.bool_]


def write(path: Path, groups: list[tuple[Values, Mask]], metadata: dict[str, object] | None = None) -> Path:
    with TableWriter(path, SCHEMA, metadata or {"slide_key": "k", "length": 3}) as table:  # type: ignore[arg-type]
        for values, valid in groups:
            table.write({"row": np.arange(len(values), dtype=np.int32), "embedding": vectors(values, valid)})
    return path


@st.composite
def vector_rows(draw: st.DrawFn, max_width: int = 9, min_width: int = 1) -> tuple[Values, Mask]:
    shape = draw(st.tuples(st.integers(0, 20), st.integers(min_width, max_width)))
    values = draw(hnp.arrays(np.float32, shape, elements=st.floats(width=32)))
    return values, draw(hnp.arrays(np.bool_, shape[0]))


@given(vector_rows())
def test_vectors_and_matrix_are_inverse_bit_for_bit_and_nulls_stay_nulls(rows: tuple[Values, Mask]) -> None:
    values, valid = rows
    column = pa.chunked_array([vectors(values, valid)])
    again, still_valid = matrix(column, values.shape[1])
    np.testing.assert_array_equal(still_valid, valid)
    np.testing.assert_array_equal(again[valid].view(np.uint32), values[valid].view(np.uint32))
    assert np.isnan(again[~valid]).all()


@settings(max_examples=25)
@given(st.lists(vector_rows(3, 3), max_size=3))
def test_what_is_written_is_read_back_by_plain_pyarrow_with_nulls_where_a_tile_failed(
    groups: list[tuple[Values, Mask]],
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = write(Path(folder) / "t.parquet", groups)
        plain = pq.read_table(path).column("embedding").to_pylist()
        own = [matrix(part, 3) for part in read_column(path, "embedding")]
    expected = [row if ok else None for values, valid in groups for row, ok in zip(values.tolist(), valid, strict=True)]
    np.testing.assert_equal(plain, expected)
    assert [len(values) for values, _ in own] == [len(values) for values, _ in groups], "one row group per write"
    for (values, valid), (read, read_valid) in zip(groups, own, strict=True):
        np.testing.assert_array_equal(read_valid, valid)
        np.testing.assert_array_equal(read[valid], values[valid])


def rows(n: int = 5) -> tuple[Values, Mask]:
    return np.arange(3 * n, dtype=np.float32).reshape(n, 3), np.arange(n) % 3 != 1


def test_equal_content_gives_equal_bytes_and_other_content_other_bytes(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    one = write(tmp_path / "one.parquet", [rows(), rows(2)])
    same = write(tmp_path / "elsewhere" / "another-name.parquet", [rows(), rows(2)], {"length": 3, "slide_key": "k"})
    other = write(tmp_path / "other.parquet", [rows(), rows(3)])
    assert one.read_bytes() == same.read_bytes()
    assert one.read_bytes() != other.read_bytes()


def test_a_file_says_nothing_of_the_clock_the_host_or_its_own_path(tmp_path: Path) -> None:
    path = write(tmp_path / "secret-name.parquet", [rows()])
    raw = path.read_bytes()
    for text in (socket.gethostname(), "secret-name", str(tmp_path)):
        assert text.encode() not in raw
    _, metadata = read_table(path)
    assert metadata == {"schema_version": 1, "slide_key": "k", "length": 3}


def test_a_table_under_a_folder_that_looks_like_a_partition_has_no_column_of_it(tmp_path: Path) -> None:
    folder = tmp_path / "stain=HE"
    folder.mkdir()
    table, _ = read_table(write(folder / "t.parquet", [rows()]))
    assert table.column_names == ["row", "embedding"]


def test_vectors_of_unequal_lengths_are_damage_even_if_their_sum_is_right() -> None:
    column = pa.chunked_array([pa.array([[1, 2], [1, 2, 3, 4], None], VECTOR)])
    with pytest.raises(DamagedResult, match="2 values instead of 3"):
        matrix(column, 3)


def test_a_flipped_byte_anywhere_in_the_data_is_noticed(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    path = write(tmp_path / "t.parquet", [(rng.random((400, 3), np.float32), np.ones(400, np.bool_))])
    whole = path.read_bytes()
    for position in rng.integers(4, len(whole) - 1500, 40):
        damaged = bytearray(whole)
        damaged[position] ^= 0x10
        path.write_bytes(damaged)
        with pytest.raises(DamagedResult, match="delete its folder to compute it again"):
            read_table(path)
    path.write_bytes(whole)
    read_table(path)


def test_what_is_no_result_table_is_refused_with_the_remedy(tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    pq.write_table(pa.table({"row": [1]}), path)
    with pytest.raises(DamagedResult, match="is not a result table"):
        read_table(path)
    for content in (b"", b"PAR1", b"not parquet at all"):
        path.write_bytes(content)
        with pytest.raises(DamagedResult, match="delete its folder"):
            list(read_column(path, "row"))
    with pytest.raises(DamagedResult):
        read_table(tmp_path / "absent.parquet")


def test_a_table_of_a_newer_schema_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "SCHEMA_VERSION", 2)
    path = write(tmp_path / "t.parquet", [rows()])
    monkeypatch.undo()
    for read in (read_table, lambda p: list(read_column(p, "row"))):
        with pytest.raises(StoreError, match="has schema 2, this version reads up to 1: upgrade") as caught:
            read(path)
        assert not isinstance(caught.value, DamagedResult)


def test_a_disk_that_fills_while_a_table_is_written_is_a_full_store(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    values, valid = rng.random((4000, 3), np.float32), np.ones(4000, np.bool_)
    with tmpfs(tmp_path / "disk", "size=128k") as disk:
        with pytest.raises(StoreFull):
            write(disk / "t.parquet", [(values, valid)] * 20)
        (disk / "t.parquet").unlink()
        assert len(read_table(write(disk / "t.parquet", [(values[:100], valid[:100])]))[0]) == 100
