"""Cohort files: only path, mpp and slide_key are read, and every mistake is told by its row."""

import math
import os
from decimal import Decimal
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from inference.errors import ConfigError
from inference.slides.cohort import CohortRow, is_cohort_file, read_cohort


def _csv(folder: Path, text: str | bytes) -> Path:
    path = folder / "cohort.csv"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def _parquet(folder: Path, columns: dict[str, list[object]]) -> Path:
    path = folder / "cohort.parquet"
    pq.write_table(pa.table(columns), path)
    return path


def test_rows_come_in_file_order_with_their_overrides(tmp_path: Path) -> None:
    text = 'patient,path,mpp,slide_key\nDoe,b.svs,0.25,B1\nRoe,"a, old.svs", ,\nPoe,sub/*.ndpi,0.5,\n'
    assert read_cohort(_csv(tmp_path, text)) == (
        CohortRow(2, "b.svs", 0.25, "B1"),
        CohortRow(3, "a, old.svs", None, None),
        CohortRow(4, "sub/*.ndpi", 0.5, None),
    )


def test_a_parquet_cohort_reads_like_a_csv_cohort(tmp_path: Path) -> None:
    columns: dict[str, list[object]] = {
        "label": ["tumour", "normal", "normal"],
        "path": ["b.svs", "a.svs", "c.svs"],
        "mpp": [0.25, None, math.nan],
        "slide_key": ["B1", None, ""],
    }
    assert read_cohort(_parquet(tmp_path, columns)) == (
        CohortRow(1, "b.svs", 0.25, "B1"),
        CohortRow(2, "a.svs", None, None),
        CohortRow(3, "c.svs", None, None),
    )


def test_whole_number_keys_of_a_parquet_cohort_become_text(tmp_path: Path) -> None:
    rows = read_cohort(_parquet(tmp_path, {"path": ["a.svs"], "slide_key": [1234]}))
    assert rows[0].slide_key == "1234"


def test_what_spreadsheets_add_is_tolerated(tmp_path: Path) -> None:
    rows = read_cohort(_csv(tmp_path, b"\xef\xbb\xbf path ,mpp\r\na b.svs,0.5\r\n,\r\n\r\nc.svs,\r\n"))
    assert rows == (CohortRow(2, "a b.svs", 0.5, None), CohortRow(5, "c.svs", None, None))


def test_a_quoted_path_may_hold_a_line_break(tmp_path: Path) -> None:
    assert read_cohort(_csv(tmp_path, 'path\n"a\nb.svs"\n'))[0].path == "a\nb.svs"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "no column named 'path'"),
        ("file,mpp\na.svs,1\n", "no column named 'path'"),
        ("path;mpp\na.svs;0,5\n", "no column named 'path'"),
        ("path,MPP\na.svs,1\n", "column 'MPP' would be ignored: call it 'mpp'"),
        ("path,SlideKey\na.svs,k\n", "column 'SlideKey' would be ignored: call it 'slide_key'"),
        ("path,slide key\na.svs,k\n", "column 'slide key' would be ignored: call it 'slide_key'"),
        ("path,path\na,b\n", "more than once"),
        ("path,mpp\na, b.svs,0.5\n", "row 2 has 3 cells"),
        ("path,mpp\na.svs\n", "row 2 has 1 cells"),
        ("path,mpp\na.svs,0.5\n,0.5\n", "row 3: the path is empty"),
        ("path,mpp\na.svs,wide\n", "row 2: mpp"),
        ("path,mpp\na.svs,0\n", "row 2: mpp"),
        ("path,mpp\na.svs,-0.5\n", "row 2: mpp"),
        ("path,mpp\na.svs,inf\n", "row 2: mpp"),
        ("path,mpp\na.svs,nan\n", "row 2: mpp"),
        ("path,mpp\na.svs,0_1.0_5\n", "row 2: mpp"),
        ("path,mpp\na.svs,١\n", "row 2: mpp"),
        ("path,mpp\na.svs,0x1p-2\n", "row 2: mpp"),
        ("path,mpp\na.svs,1e999999999\n", "row 2: mpp"),
        ('path,mpp\n"a\nb.svs",0.5\n\n,,\n \nc.svs,wide\n', "row 5 has 3 cells|row 6: mpp"),
        ("path,mpp\na.svs,51\n", "row 2: mpp"),
        ('path,mpp\na.svs,"0,5"\n', "row 2: mpp"),
        ("path,slide_key\na.svs,../up\n", "row 2: a slide key"),
        ("path,slide_key\na.svs,has space\n", "row 2: a slide key"),
        ('path\n"open quote\n', "not a CSV file"),
        (b"path\n\xff.svs\n", "UTF-8"),
        ("path\na\0b.svs\n", "row 2"),
    ],
)
def test_a_csv_mistake_is_told_with_file_and_row(tmp_path: Path, text: str | bytes, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem) as caught:
        read_cohort(_csv(tmp_path, text))
    assert "cohort.csv" in str(caught.value)


@pytest.mark.parametrize(
    ("text", "row"),
    [
        ("path,mpp\nbad.svs,x\n", 2),
        ("path,mpp\na.svs,1\nbad.svs,x\n", 3),
        ("path,mpp\n\n,\n , \nbad.svs,x\n", 5),
        ('path,mpp\n"a\n\nb.svs",1\nbad.svs,x\n', 3),
        ("path,mpp\r\na.svs,1\r\n\r\nbad.svs,x\r\n", 4),
    ],
)
def test_a_row_is_counted_as_a_spreadsheet_shows_it(tmp_path: Path, text: str, row: int) -> None:
    with pytest.raises(ConfigError, match=rf"cohort\.csv': row {row}: mpp"):
        read_cohort(_csv(tmp_path, text))


@pytest.mark.parametrize(("text", "mpp"), [("0.25", 0.25), ("+.5", 0.5), ("1.", 1.0), ("2.5e-1", 0.25), (" 1 ", 1.0)])
def test_the_usual_ways_to_write_a_number_are_taken(tmp_path: Path, text: str, mpp: float) -> None:
    assert read_cohort(_csv(tmp_path, f"path,mpp\na.svs,{text}\n"))[0].mpp == mpp


@pytest.mark.parametrize(
    ("column", "says"),
    [
        ({"mpp": pa.array([10**18 + 1], pa.timestamp("ns"))}, "the column mpp holds timestamp"),
        ({"mpp": pa.array([0], pa.timestamp("us", tz="Nowhere/City"))}, "the column mpp holds timestamp"),
        ({"mpp": pa.array([[0.5]])}, "the column mpp holds list<"),
        ({"mpp": pa.array([b"0.5"])}, "the column mpp holds binary, not a number or text"),
        ({"mpp": pa.array([True])}, "the column mpp holds bool"),
        ({"path": pa.array([b"a.svs"])}, "the column path holds binary, not text"),
        ({"path": pa.array([{"path": "a.svs"}])}, "the column path holds struct<"),
        ({"slide_key": pa.array([1.5])}, "the column slide_key holds double, not text or a whole number"),
        ({"path": pa.array([b"\xff.svs"]).view(pa.string())}, "not UTF-8"),
        ({"slide_key": pa.array([b"\xff"]).view(pa.string())}, "not UTF-8"),
    ],
)
def test_a_parquet_column_of_another_type_or_with_broken_text_is_refused_in_one_line(
    tmp_path: Path, column: dict[str, pa.Array], says: str
) -> None:
    pq.write_table(pa.table({"path": pa.array(["a.svs"])} | column), tmp_path / "cohort.parquet")
    with pytest.raises(ConfigError, match=f"cohort file 'cohort.parquet': .*{says}") as caught:
        read_cohort(tmp_path / "cohort.parquet")
    assert "\n" not in caught.value.message


@pytest.mark.parametrize(
    "mpp",
    [
        pa.array([Decimal("0.25"), None]),
        pa.array([0.25, math.nan], pa.float16()),
        pa.array([0.25, None], pa.float32()),
        pa.array(["0.25", ""]).dictionary_encode(),
        pa.array(["0.25", None], pa.large_string()),
    ],
    ids=lambda array: str(array.type),
)
def test_every_kind_of_number_and_text_is_read_from_parquet(tmp_path: Path, mpp: pa.Array) -> None:
    path = pa.array(["a.svs", "b.svs"], pa.large_string()).dictionary_encode()
    pq.write_table(
        pa.table({"path": path, "mpp": mpp, "other": pa.array([0, 1], pa.time64("ns"))}), tmp_path / "c.parquet"
    )
    assert read_cohort(tmp_path / "c.parquet") == (CohortRow(1, "a.svs", 0.25, None), CohortRow(2, "b.svs", None, None))


@pytest.mark.parametrize(
    "columns",
    [
        {"path": [1, 2]},
        {"path": [None]},
        {"path": ["a.svs"], "mpp": [True]},
        {"path": ["a.svs"], "mpp": ["wide"]},
        {"path": ["a.svs"], "slide_key": [1.5]},
        {"slide": ["a.svs"]},
    ],
)
def test_a_parquet_mistake_is_refused(tmp_path: Path, columns: dict[str, list[object]]) -> None:
    with pytest.raises(ConfigError, match=r"cohort\.parquet"):
        read_cohort(_parquet(tmp_path, columns))


def test_no_message_repeats_a_value_because_a_shifted_column_may_hold_a_name(tmp_path: Path) -> None:
    for text in ("path,mpp\na.svs,Jane Doe\n", "path,slide_key\na.svs,Jane Doe\n", "Jane Doe,mpp\na.svs,1\n"):
        with pytest.raises(ConfigError) as caught:
            read_cohort(_csv(tmp_path, text))
        assert "Jane" not in str(caught.value)


def test_a_file_that_is_not_parquet_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "cohort.parquet"
    path.write_bytes(b"PAR1 but not really")
    with pytest.raises(ConfigError, match="not a readable Parquet"):
        read_cohort(path)


def test_a_missing_cohort_or_a_fifo_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.csv")
    for name in ("absent.csv", "pipe.csv"):
        with pytest.raises(ConfigError, match=name):
            read_cohort(tmp_path / name)


def test_cohort_files_are_known_by_their_suffix() -> None:
    assert is_cohort_file(Path("a.CSV"))
    assert is_cohort_file(Path("a.parquet"))
    assert not is_cohort_file(Path("a.svs"))
