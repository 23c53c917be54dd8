"""DICOM: whole-slide series are told by their headers, whatever the files are called."""

import os
import shutil
import zlib
from pathlib import Path

import pytest
from pydicom.dataset import Dataset, FileMetaDataset
from pydicom.uid import DeflatedExplicitVRLittleEndian, ExplicitVRLittleEndian, ImplicitVRLittleEndian

from inference.errors import ConfigError
from inference.slides.dicom import DicomInstance, group_series, is_dicom, read_instance
from inference.slides.discovery import Inventory, Skipped, discover

WSM = "1.2.840.10008.5.1.4.1.1.77.1.6"
CT = "1.2.840.10008.5.1.4.1.1.2"


def _write(
    path: Path,
    series: str = "1.2.3",
    instance: str = "",
    *,
    kind: str = "VOLUME",
    columns: int | None = 1000,
    sop_class: str = WSM,
    syntax: str = ExplicitVRLittleEndian,
    comment_bytes: int = 0,
) -> Path:
    """A small DICOM file; `comment_bytes` come before the element that discovery reads last."""
    path.parent.mkdir(parents=True, exist_ok=True)
    meta = FileMetaDataset()
    meta.MediaStorageSOPClassUID = sop_class
    meta.MediaStorageSOPInstanceUID = instance or f"1.2.{len(path.name)}.{columns or 0}.{zlib.crc32(os.fsencode(path))}"
    meta.TransferSyntaxUID = syntax
    data = Dataset()
    data.file_meta = meta
    data.SOPClassUID = sop_class
    data.SOPInstanceUID = meta.MediaStorageSOPInstanceUID
    data.SeriesInstanceUID = series
    data.ImageType = ["ORIGINAL", "PRIMARY", kind, "NONE"]
    data.PatientName = "Doe^Jane"
    if comment_bytes:
        data.RedPaletteColorLookupTableData = bytes(comment_bytes)
    if columns is not None:
        data.TotalPixelMatrixColumns = columns
    data.NumberOfFrames = 1
    data.add_new(0x52009229, "SQ", [])
    data.save_as(path, enforce_file_format=True)
    return path


def _one(result: Inventory) -> tuple[Path, ...]:
    assert len(result.slides) == 1
    return result.slides[0].files


@pytest.fixture
def series(tmp_path: Path) -> Path:
    """A folder with a series of three volumes and a label under names that tell nothing, and a CT image."""
    folder = tmp_path / "study"
    _write(folder / "IM3", columns=500)
    _write(folder / "IM2", columns=4000)
    _write(folder / "IM1", columns=60000, kind="LABEL")
    _write(folder / "IM4.dcm", columns=100)
    _write(folder / "CT1.dcm", sop_class=CT)
    return folder


def test_a_series_is_one_slide_whose_main_file_is_the_widest_volume(series: Path) -> None:
    result = discover([series])
    assert _one(result) == tuple(series / name for name in ("IM2", "IM1", "IM3", "IM4.dcm"))
    assert result.slides[0].relpath == "IM2"


def test_dicom_that_is_no_slide_is_skipped_with_its_class(series: Path) -> None:
    (skipped,) = discover([series]).skipped
    assert (skipped.path, skipped.code) == (series / "CT1.dcm", "dicom_not_a_slide")
    assert CT in skipped.reason


@pytest.mark.parametrize("name", ["IM1", "IM2", "IM3", "IM4.dcm"])
def test_naming_any_file_of_a_series_gives_the_whole_series(series: Path, name: str) -> None:
    named = discover([series / name])
    assert _one(named) == _one(discover([series]))
    assert named.slides[0].key == discover([series]).slides[0].key
    assert named.skipped == ()


def test_a_glob_that_matches_one_file_of_a_series_gives_the_whole_series(series: Path) -> None:
    assert _one(discover([f"{series}/*.dcm"])) == _one(discover([series]))


def test_cohort_rows_that_name_files_of_one_series_are_one_slide(series: Path) -> None:
    cohort = series.parent / "cohort.csv"
    cohort.write_text("path,mpp\nstudy/IM1,\nstudy/IM3,0.5\n")
    result = discover([cohort])
    assert _one(result)[0] == series / "IM2"
    assert result.slides[0].mpp == 0.5


def test_a_cohort_row_may_name_the_folder_of_a_series(series: Path) -> None:
    cohort = series.parent / "cohort.csv"
    cohort.write_text("path,slide_key\nstudy,case-7\n")
    assert discover([cohort]).slides[0].key == "case-7"


def test_a_named_file_that_is_no_slide_is_skipped(series: Path) -> None:
    result = discover([series / "CT1.dcm"])
    assert result.slides == ()
    assert [item.code for item in result.skipped] == ["dicom_not_a_slide"]


def test_two_series_in_one_folder_are_two_slides(tmp_path: Path) -> None:
    _write(tmp_path / "a.dcm", "1.2.1", columns=10)
    _write(tmp_path / "b.dcm", "1.2.2", columns=10)
    _write(tmp_path / "c.dcm", "1.2.1", columns=20)
    result = discover([tmp_path])
    assert [slide.relpath for slide in result.slides] == ["b.dcm", "c.dcm"]


def test_a_series_spread_over_folders_is_one_slide(tmp_path: Path) -> None:
    low = _write(tmp_path / "low" / "x.dcm", columns=10)
    high = _write(tmp_path / "high" / "x.dcm", columns=20)
    assert _one(discover([tmp_path])) == (high, low)


def test_volumes_of_equal_width_give_the_smallest_path(tmp_path: Path) -> None:
    b = _write(tmp_path / "b.dcm")
    a = _write(tmp_path / "a.dcm")
    assert _one(discover([tmp_path])) == (a, b)


def test_a_second_copy_of_a_series_is_skipped(tmp_path: Path) -> None:
    first = _write(tmp_path / "a" / "x.dcm")
    (tmp_path / "b").mkdir()
    copy = Path(shutil.copy(first, tmp_path / "b" / "x.dcm"))
    result = discover([tmp_path])
    assert _one(result) == (first,)
    assert [(item.path, item.code) for item in result.skipped] == [(copy, "dicom_copy")]


def test_a_series_without_a_volume_is_skipped(tmp_path: Path) -> None:
    _write(tmp_path / "a.dcm", kind="LABEL")
    _write(tmp_path / "b.dcm", kind="OVERVIEW")
    result = discover([tmp_path])
    assert result.slides == ()
    assert [item.code for item in result.skipped] == ["dicom_no_volume"] * 2


@pytest.mark.parametrize("syntax", [ExplicitVRLittleEndian, ImplicitVRLittleEndian])
def test_the_header_is_read_in_both_encodings(tmp_path: Path, syntax: str) -> None:
    path = _write(tmp_path / "a.dcm", "1.2.9", "1.2.9.1", columns=1234, syntax=syntax)
    assert read_instance(path) == DicomInstance(path, "1.2.9", "1.2.9.1", True, 1234)


@pytest.mark.parametrize("size", [300 << 10, 2 << 20])
def test_a_header_longer_than_the_first_piece_is_read_on(tmp_path: Path, size: int) -> None:
    path = _write(tmp_path / "a.dcm", columns=77, comment_bytes=size)
    instance = read_instance(path)
    assert isinstance(instance, DicomInstance)
    assert instance.matrix_columns == 77


def test_a_volume_without_a_width_counts_as_narrowest(tmp_path: Path) -> None:
    none = _write(tmp_path / "a.dcm", columns=None)
    some = _write(tmp_path / "b.dcm", columns=5)
    assert _one(discover([tmp_path])) == (some, none)


@pytest.mark.parametrize("cut", [0, 100, 131, 132, 140, 200, 300, 400])
def test_a_header_cut_anywhere_is_skipped_and_never_raises(tmp_path: Path, cut: int) -> None:
    path = _write(tmp_path / "a.dcm")
    os.truncate(path, cut)
    result = discover([tmp_path])
    assert result.slides == ()
    assert [item.code for item in result.skipped] == ["dicom_broken"]


def test_any_damaged_byte_of_a_header_gives_an_instance_or_a_reason(tmp_path: Path) -> None:
    path = _write(tmp_path / "a.dcm")
    good = path.read_bytes()
    for index in range(132, len(good)):
        path.write_bytes(good[:index] + bytes([good[index] ^ 0xFF]) + good[index + 1 :])
        assert isinstance(read_instance(path), DicomInstance | Skipped)


def test_a_length_of_gigabytes_is_a_broken_header(tmp_path: Path) -> None:
    path = _write(tmp_path / "a.dcm")
    data = path.read_bytes()
    at = data.index(b"\x20\x00\x0e\x00UI")
    path.write_bytes(data[:at] + b"\x20\x00\x0e\x00UN\0\0\xf0\xff\xff\xff" + data[at + 8 :])
    result = read_instance(path)
    assert isinstance(result, Skipped)
    assert result.code == "dicom_broken"


def test_a_deflated_file_is_not_unpacked(tmp_path: Path) -> None:
    result = read_instance(_write(tmp_path / "a.dcm", syntax=DeflatedExplicitVRLittleEndian))
    assert isinstance(result, Skipped)
    assert "deflated" in result.reason


def test_reasons_and_records_never_tell_a_file_or_patient_name(tmp_path: Path) -> None:
    _write(tmp_path / "S21-1234.dcm", sop_class=CT)
    (tmp_path / "S21-1235.dcm").write_bytes(b"no")
    _write(tmp_path / "S21-1236.dcm", kind="LABEL")
    skipped = discover([tmp_path]).skipped
    assert len(skipped) == 3
    for item in skipped:
        assert "S21" not in item.reason + repr(item)
        assert "Doe" not in item.reason


def test_the_magic_is_looked_for_at_byte_128_only(tmp_path: Path) -> None:
    cases = {"good": bytes(128) + b"DICM", "early": bytes(127) + b"DICM", "short": bytes(128) + b"DIC", "empty": b""}
    for name, data in cases.items():
        (tmp_path / name).write_bytes(data)
    os.mkfifo(tmp_path / "fifo")
    assert {name: is_dicom(tmp_path / name) for name in (*cases, "fifo", "absent")} == {
        "good": True, "early": False, "short": False, "empty": False, "fifo": False, "absent": False,
    }  # fmt: skip


def test_grouping_does_not_depend_on_the_order_of_files(tmp_path: Path) -> None:
    items = [DicomInstance(tmp_path / f"{n}", "1", f"1.{n}", True, n % 3) for n in range(7)]
    assert group_series(items) == group_series(reversed(items))


def test_a_slide_key_for_a_folder_of_two_series_is_refused(tmp_path: Path) -> None:
    _write(tmp_path / "d" / "a.dcm", "1.2.1")
    _write(tmp_path / "d" / "b.dcm", "1.2.2")
    (tmp_path / "cohort.csv").write_text("path,slide_key\nd,one\n")
    with pytest.raises(ConfigError, match="row 2: one slide_key for 2 slides"):
        discover([tmp_path / "cohort.csv"])


def test_every_file_of_the_real_series_is_found_from_any_of_them(shared_data: Path) -> None:
    folder = shared_data / "derived" / "dicom-jpeg"
    expected = ("volume-0", "label", "overview", "thumbnail", "volume-1", "volume-2")
    for path in sorted(folder.iterdir()):
        files = _one(discover([path]))
        assert tuple(file.stem for file in files) == expected
