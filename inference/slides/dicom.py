"""DICOM files: which are whole-slide images, and which of them make up one slide."""

import io
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from inference.errors import SourceUnavailable
from inference.slides._files import Skipped, read_start, source_lost

if TYPE_CHECKING:
    from pydicom.dataset import FileDataset

_WHOLE_SLIDE_MICROSCOPY = "1.2.840.10008.5.1.4.1.1.77.1.6"
_DEFLATED = b"1.2.840.10008.1.2.1.99"
_MAGIC_AT = 128
MAGIC_BYTES = _MAGIC_AT + 4
_IMAGE_TYPE = 0x00080008
_SOP_CLASS_UID = 0x00080016
_SOP_INSTANCE_UID = 0x00080018
_SERIES_UID = 0x0020000E
_MATRIX_COLUMNS = 0x00480006
_TAGS = (_IMAGE_TYPE, _SOP_CLASS_UID, _SOP_INSTANCE_UID, _SERIES_UID, _MATRIX_COLUMNS)
# Headers are read in bounded pieces: most end within the first, and a broken length cannot ask for gigabytes.
HEADER_BYTES = (256 << 10, 16 << 20)


@dataclass(frozen=True)
class DicomInstance:
    """What discovery needs from the header of one whole-slide microscopy object."""

    path: Path = field(repr=False)  # a name may be an accession number
    series_uid: str
    instance_uid: str
    is_volume: bool
    matrix_columns: int


@dataclass(frozen=True)
class DicomSeries:
    """One slide: `files` are all its instances, the main one first, the others sorted."""

    files: tuple[Path, ...]


def is_dicom(path: Path) -> bool:
    """Whether a regular file has the DICOM magic at byte 128; False where it cannot be read.

    Raises:
        SourceUnavailable: the mount was lost.
    """
    try:
        return read_start(path, MAGIC_BYTES)[_MAGIC_AT:] == b"DICM"
    except OSError as error:
        if source_lost(error):
            raise SourceUnavailable(f"the slide source cannot be read: {error.strerror}") from None
        return False


def read_instance(path: Path) -> DicomInstance | Skipped:
    """Header of one DICOM file, or why it is no part of a slide; a broken header never raises.

    Raises:
        SourceUnavailable: the mount was lost.
    """
    try:
        header = _read_header(path)
    except OSError as error:
        if source_lost(error):
            raise SourceUnavailable(f"the slide source cannot be read: {error.strerror}") from None
        return Skipped(path, "dicom_unreadable", f"the DICOM file cannot be read: {error.strerror}")
    if isinstance(header, str):
        return Skipped(path, "dicom_broken", f"broken DICOM header: {header}")
    sop_class = _text(header, _SOP_CLASS_UID)
    if sop_class != _WHOLE_SLIDE_MICROSCOPY:
        # A UID is digits and dots; anything else is not repeated into messages.
        shown = sop_class if sop_class.replace(".", "").isdigit() else "missing"
        return Skipped(path, "dicom_not_a_slide", f"DICOM, but not a whole-slide image (SOP class {shown})")
    series, instance = _text(header, _SERIES_UID), _text(header, _SOP_INSTANCE_UID)
    if not series or not instance:
        return Skipped(path, "dicom_broken", "broken DICOM header: no series or instance UID")
    is_volume = "VOLUME" in [part.strip() for part in _text(header, _IMAGE_TYPE).split("\\")]
    return DicomInstance(path, series, instance, is_volume, _number(header, _MATRIX_COLUMNS))


def group_series(instances: Iterable[DicomInstance]) -> tuple[list[DicomSeries], list[Skipped]]:
    """Slides among the instances: one per SeriesInstanceUID, main file = the widest VOLUME instance.

    Ties go to the smallest path. A copy of an instance already seen, and series without a volume (only label or
    overview images), are skipped.
    """
    by_series: dict[str, dict[str, DicomInstance]] = defaultdict(dict)
    skipped = []
    for instance in sorted(instances, key=lambda item: item.path.as_posix()):
        seen = by_series[instance.series_uid]
        if instance.instance_uid in seen:
            skipped.append(Skipped(instance.path, "dicom_copy", "a second copy of a DICOM instance already found"))
        else:
            seen[instance.instance_uid] = instance
    series = []
    for members in by_series.values():
        volumes = [item for item in members.values() if item.is_volume]
        if not volumes:
            reason = "a DICOM series without a VOLUME image (label or overview only)"
            skipped += [Skipped(item.path, "dicom_no_volume", reason) for item in members.values()]
            continue
        main = max(volumes, key=lambda item: item.matrix_columns).path  # the first of equals: smallest path
        series.append(DicomSeries((main, *(item.path for item in members.values() if item.path != main))))
    return series, skipped


def _read_header(path: Path) -> "FileDataset | str":
    """The few elements of `_TAGS`, or what is wrong with the header."""
    from pydicom.filereader import read_partial  # a third of a second, and most slides are no DICOM

    problem = "cut short"
    for size in HEADER_BYTES:
        data = read_start(path, size)
        if data[_MAGIC_AT : _MAGIC_AT + 4] != b"DICM":
            return "no DICM at byte 128"
        if _DEFLATED in data[:4096]:
            return "deflated, which whole-slide images never are"  # unpacking has no bound
        reached_end = False

        def after_last_tag(tag: int, _vr: str | None, _length: int) -> bool:
            nonlocal reached_end
            reached_end = reached_end or tag > _MATRIX_COLUMNS
            return tag > _MATRIX_COLUMNS

        try:
            header = read_partial(io.BytesIO(data), stop_when=after_last_tag, specific_tags=list(_TAGS))
        except Exception as error:  # noqa: BLE001 - a parser on foreign bytes may raise anything
            problem = type(error).__name__
        else:
            if reached_end:
                return header
        if len(data) < size:
            break
    return problem


def _text(header: "FileDataset", tag: int) -> str:
    """Raw value as text: pydicom's own conversion warns about values that are merely too long."""
    value = header.get_item(tag).value if tag in header else None
    return value.decode("ascii", "replace").strip(" \0") if isinstance(value, bytes) else ""


def _number(header: "FileDataset", tag: int) -> int:
    element = header.get_item(tag) if tag in header else None
    if element is None or not isinstance(element.value, bytes):
        return 0
    return int.from_bytes(element.value, "little" if element.is_little_endian else "big")
