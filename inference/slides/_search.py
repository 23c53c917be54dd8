"""The search behind `discover`: what each kind of source stands for, and which files make up a slide."""

import contextlib
import os
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from inference.errors import ConfigError, SourceUnavailable
from inference.slides._companions import companions
from inference.slides._files import EVERYTHING, GlobPattern, Skipped, is_inside, kind_of, list_files, resolved
from inference.slides._listing import RemoteTree
from inference.slides._remote import RemoteFile, is_url, local_path, without_secrets
from inference.slides.cohort import CohortRow, is_cohort_file, read_cohort
from inference.slides.dicom import DicomInstance, group_series, is_dicom, read_instance

SLIDE_SUFFIXES = frozenset(
    {".svs", ".tif", ".tiff", ".ndpi", ".mrxs", ".scn", ".bif", ".vms", ".vmu", ".svslide", ".czi", ".dcm"}
)
IMAGE_SUFFIXES = frozenset({".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".jp2"})
_PLAIN_IMAGE = (
    "a plain image, which no slide reader opens; save it as a tiled TIFF (vips tiffsave IMAGE OUT.tif --tile --pyramid)"
    " and give its µm/px"
)
_GLOB_CHARS = frozenset("*?[")

Files = tuple[Path, ...]
_Value = TypeVar("_Value", float, str, Path)


@dataclass(frozen=True)
class Root:
    """The folder that paths are relative to, and the label that keys are made with."""

    path: Path
    label: str


@dataclass(frozen=True)
class FoundSlide:
    """One slide before it has a key."""

    files: Files
    root: Root
    relpath: str
    mpp: float | None = None
    slide_key: str | None = None
    roi: Path | None = None
    remote: tuple[RemoteFile, ...] = ()


class Search:
    """Collects slides from sources, each slide once; what lies in object stores as stand-ins, until it is closed."""

    def __init__(self, root: str | Path | None, *, hide_names: bool) -> None:
        self._hide_names = hide_names
        self._tree = RemoteTree(SLIDE_SUFFIXES)
        self._fixed_root: Path | None = None
        if root is not None and is_url(os.fspath(root)):
            self._fixed_root = self._tree.folder_of(os.fspath(root))
        elif root is not None:
            self._fixed_root = _absolute(Path(local_path(os.fspath(root))))
        if self._fixed_root is not None and kind_of(self._fixed_root) != "folder":
            raise ConfigError(f"the root{self._shown(self._fixed_root)} is not a folder")
        self._labels: dict[str, str] = {}
        self._slides: dict[str, FoundSlide] = {}
        self._skipped: dict[Path, Skipped] = {}
        self._series: dict[Path, dict[str, list[DicomInstance]]] = {}

    @property
    def slides(self) -> list[FoundSlide]:
        """In the order found."""
        return [replace(slide, remote=self._tree.remote_files(slide.files)) for slide in self._slides.values()]

    @property
    def skipped(self) -> list[Skipped]:
        """In the order met, each path once; never a file that another source took."""
        taken = {path for slide in self._slides.values() for path in slide.files}
        left = [item for item in self._skipped.values() if item.path not in taken]
        return [
            replace(item, path=Path(self._tree.url_of(item.path))) if self._tree.holds(item.path) else item
            for item in left
        ]

    def close(self) -> None:
        """Remove the stand-ins."""
        self._tree.close()

    def add_source(self, number: int, source: str | Path) -> None:
        """Find the slides of one source; `number` names it in messages where its name is hidden."""
        text = os.fspath(source)
        where = f"source {number}" if self._hide_names else f"source '{without_secrets(text)}'"
        if not text.strip() or "\0" in text:
            raise ConfigError(f"source {number} is empty or not a path")
        try:
            try:
                path = self._place(text)
            except ConfigError as error:
                raise ConfigError(f"{where}: {error.message}") from None
            self._add_path(path, where)
        except SourceUnavailable as error:
            raise SourceUnavailable(f"{where}: {error.message}") from None
        except OSError as error:
            raise SourceUnavailable(f"{where} cannot be read: {error.strerror}; check who may read it") from None

    def _place(self, text: str) -> Path:
        """The path to search for a source: a stand-in's for a URL."""
        path = self._tree.place(text) if is_url(text) else _absolute(Path(local_path(text)))
        self._skip(*self._tree.skipped)
        return path

    def _add_path(self, path: Path, where: str) -> None:
        kind = kind_of(path)
        if kind == "denied":
            raise SourceUnavailable("permission denied; check who may read it")
        if kind == "other":
            raise ConfigError(f"{where} is neither a regular file nor a folder")
        if kind == "folder":
            root = self._root(path)
            self._add(self._below(path, EVERYTHING, root), root)
        elif kind == "file" and is_cohort_file(path):
            self._add_cohort(path)
        elif kind == "file":
            files = self._named(path)
            if files is None:
                raise ConfigError(f"{where} {_why_no_slide(path)}")
            self._add(files, self._root(path.parent))
        elif (glob := _split_glob(path)) is not None:
            root = self._root(glob[0])
            found = self._matching(*glob, root)
            if not found:
                why = "check the pattern, and quote it against the shell"
                if glob[1].suffix in IMAGE_SUFFIXES:
                    why = f"what it asks for is {_PLAIN_IMAGE}"
                raise ConfigError(f"{where} matches no slide; {why}")
            self._add(found, root)
        else:
            raise ConfigError(f"{where} does not exist; check {self._where_to_look(path)}")

    def _where_to_look(self, path: Path) -> str:
        if self._tree.holds(path):
            return "bucket and folder, and the endpoint (AWS_ENDPOINT_URL)"
        return "the spelling, and that its disk or share is mounted"

    def _add_cohort(self, path: Path) -> None:
        folder = self._root(path.parent)
        rows = read_cohort(path)
        self._look_up(rows, path.parent)
        for row in rows:
            try:
                place = self._row_place(row, path.parent)
                root = self._row_root(place, folder)
                found = self._row(row, place, root)
                if row.slide_key is not None and len(found) > 1:
                    raise ConfigError(f"one slide_key for {len(found)} slides; give each slide a row of its own")
                self._add(found, root, row, self._roi(row, path.parent))
            except ConfigError as error:
                raise ConfigError(f"cohort file '{path.name}': row {row.number}: {error.message}") from None

    def _look_up(self, rows: Sequence[CohortRow], folder: Path) -> None:
        """Ask for all objects that rows name before they are taken one by one."""
        urls = []
        for row in rows:
            with contextlib.suppress(ConfigError):  # said with its row
                if url := self._row_url(row, folder):
                    urls.append(url)
        if urls:
            self._tree.look_up(urls)

    def _row_url(self, row: CohortRow, folder: Path) -> str | None:
        """The URL that a row means: its own, or a path relative to a cohort file that lies in a store."""
        if is_url(row.path):
            return row.path
        if self._tree.holds(folder) and not row.path.startswith("/"):
            path = Path(os.path.normpath(folder / row.path))
            if not path.is_relative_to(self._tree.bucket_of(folder)):
                raise ConfigError("the path leaves the bucket; give a URL")
            return self._tree.url_of(path)
        return None

    def _row_place(self, row: CohortRow, folder: Path) -> Path:
        url = self._row_url(row, folder)
        return _absolute(folder / local_path(row.path)) if url is None else self._place(url)

    def _row_root(self, place: Path, folder: Root) -> Root:
        """The cohort file's folder; for a URL elsewhere its bucket, which is all that rows must have in common."""
        if self._fixed_root or not self._tree.holds(place) or place.is_relative_to(folder.path):
            return folder
        return self._root(self._tree.bucket_of(place))

    def _roi(self, row: CohortRow, folder: Path) -> Path | None:
        if row.roi is None:
            return None
        if is_url(row.roi) or self._tree.holds(folder):
            raise ConfigError("a ROI is read from a local file; copy it beside a local cohort file")
        return _absolute(folder / local_path(row.roi))

    def _row(self, row: CohortRow, path: Path, root: Root) -> list[Files]:
        kind = kind_of(path)
        if kind == "folder":
            found = self._below(path, EVERYTHING, root)
        elif kind == "file":
            files = self._named(path)
            if files is None and path.suffix.lower() in IMAGE_SUFFIXES:
                self._skip(Skipped(path, "plain_image", f"{_PLAIN_IMAGE} (row {row.number} of the cohort file)"))
                return []
            return [(path,)] if files is None else files
        elif kind == "other":
            self._skip(Skipped(path, "not_regular", "not a regular file (FIFO, socket or device)"))
            return []
        elif (glob := _split_glob(path)) is None:
            return [(path,)]  # missing: kept, so that it becomes a visible failed slide
        else:
            found = self._matching(*glob, root)
        if not found:
            text = f"row {row.number} of the cohort file matches no slide; check the path or pattern"
            self._skip(Skipped(path, "no_match", text))
        return found

    def _root(self, default: Path) -> Root:
        path = self._fixed_root or default
        root, real = Root(path, path.name), resolved(path)
        if self._labels.setdefault(root.label, real) != real:
            label = "one name" if self._hide_names else f"the name '{root.label}'"
            raise ConfigError(f"two source folders share {label}, so their keys could clash; give --root above both")
        return root

    def _add(self, found: Iterable[Files], root: Root, row: CohortRow | None = None, roi: Path | None = None) -> None:
        mpp, key = (row.mpp, row.slide_key) if row else (None, None)
        for files in found:
            slide = FoundSlide(files, root, self._relpath(files[0], root), mpp, key, roi)
            real = resolved(files[0])
            known = self._slides.setdefault(real, slide)
            if known is not slide:
                self._slides[real] = replace(
                    known,
                    mpp=_agreed(known.mpp, mpp, "mpp"),
                    slide_key=_agreed(known.slide_key, key, "slide_key"),
                    roi=_agreed(known.roi, roi, "roi"),
                )

    def _relpath(self, path: Path, root: Root) -> str:
        if path.is_relative_to(root.path):
            return path.relative_to(root.path).as_posix()
        # The same folder under another name (a linked parent) is still inside.
        real = Path(resolved(path.parent)) / path.name
        if real.is_relative_to(resolved(root.path)):
            return real.relative_to(resolved(root.path)).as_posix()
        outside = f"the path{self._shown(path)} lies outside the root{self._shown(root.path)}"
        raise ConfigError(f"{outside}; give --root above it")

    def _matching(self, prefix: Path, pattern: GlobPattern, root: Root) -> list[Files]:
        return self._below(prefix, pattern, root) if kind_of(prefix) == "folder" else []

    def _below(self, folder: Path, pattern: GlobPattern, root: Root) -> list[Files]:
        """Slides among the files under `folder` that match, sorted by path."""
        self._relpath(folder / "any", root)  # refuse a folder outside the root even when it is empty
        paths, skipped = list_files(folder, boundary=root.path, pattern=pattern)
        self._skip(*skipped)
        parts_of = {path: companions(path) for path in paths}
        parts = {part for group in parts_of.values() for part in group}
        found: list[Files] = []
        dicom: list[Path] = []
        for path in paths:
            suffix = path.suffix.lower()
            if path in parts:
                continue
            if suffix == ".dcm" or (suffix not in SLIDE_SUFFIXES and is_dicom(path)):
                dicom.append(path)
            elif suffix in SLIDE_SUFFIXES and self._contained(path, parts_of[path], root):
                found.append((path, *parts_of[path]))
        if pattern is EVERYTHING:
            found += self._grouped(read_instance(path) for path in dicom)
        else:
            found += dict.fromkeys(files for path in dicom for files in self._series_of(path))
        return sorted(found, key=lambda files: files[0].relative_to(folder).as_posix())

    def _contained(self, path: Path, parts: Files, root: Root) -> bool:
        if all(is_inside(part, root.path) for part in parts):
            return True
        self._skip(Skipped(path, "outside_root", "a companion file is a link that leaves the root"))
        return False

    def _named(self, path: Path) -> list[Files] | None:
        """The slide at a path given outright; None where its kind is unknown."""
        suffix = path.suffix.lower()
        if suffix == ".dcm" or (suffix not in SLIDE_SUFFIXES and is_dicom(path)):
            return self._series_of(path)
        return [(path, *companions(path))] if suffix in SLIDE_SUFFIXES else None

    def _series_of(self, path: Path) -> list[Files]:
        """The DICOM series that a file belongs to, with its siblings in the same folder."""
        instance = read_instance(path)
        if isinstance(instance, Skipped):
            self._skip(instance)
            return []
        folder = path.parent
        if folder not in self._series:
            siblings: dict[str, list[DicomInstance]] = defaultdict(list)
            for sibling in list_files(folder, boundary=folder, recursive=False)[0]:
                header = read_instance(sibling) if sibling.suffix.lower() == ".dcm" or is_dicom(sibling) else None
                if isinstance(header, DicomInstance):
                    siblings[header.series_uid].append(header)
            self._series[folder] = siblings
        known = self._series[folder].get(instance.series_uid, [])
        return self._grouped(known if instance in known else [*known, instance])

    def _grouped(self, instances: Iterable[DicomInstance | Skipped]) -> list[Files]:
        usable = []
        for item in instances:
            if isinstance(item, Skipped):
                self._skip(item)
            else:
                usable.append(item)
        series, skipped = group_series(usable)
        self._skip(*skipped)
        return [item.files for item in series]

    def _skip(self, *items: Skipped) -> None:
        for item in items:
            self._skipped.setdefault(item.path, item)

    def _shown(self, path: Path) -> str:
        shown = self._tree.url_of(path) if self._tree.holds(path) else path
        return "" if self._hide_names else f" '{shown}'"


def _agreed(first: _Value | None, second: _Value | None, column: str) -> _Value | None:
    if first is not None and second is not None and first != second:
        raise ConfigError(f"the same slide was given another {column} before")
    return second if first is None else first


def _absolute(path: Path) -> Path:
    """Absolute and without '..'; links are kept, because a folder is labelled by the name it was given."""
    path = path.absolute()
    return Path(resolved(path)) if ".." in path.parts else path


def _split_glob(path: Path) -> tuple[Path, GlobPattern] | None:
    """The part before the first wildcard, and the rest; None without one. An existing name is no wildcard."""
    for index, part in enumerate(path.parts):
        if not _GLOB_CHARS.isdisjoint(part) and not os.path.lexists(Path(*path.parts[: index + 1])):
            return Path(*path.parts[:index]), GlobPattern(path.parts[index:])
    return None


def _why_no_slide(path: Path) -> str:
    if path.suffix.lower() in IMAGE_SUFFIXES:
        return f"is {_PLAIN_IMAGE}"
    return f"has no suffix of a slide ({' '.join(sorted(SLIDE_SUFFIXES))}), and is not DICOM"
