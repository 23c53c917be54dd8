"""Which slides there are: sources in, slides with stable keys out.

A source is a slide file, a folder, a glob or a cohort file, or the URL of one in an object store (`s3://`, `gs://`,
whatever fsspec knows); a cohort file's rows may be URLs too. Of objects only what tells a slide is read (`_listing`);
they are fetched when they are opened (`objects`). Folders and globs yield what looks like a slide, and list
as skipped what was left out for a reason worth knowing. A cohort row is a promise: a file that is missing or of an
unknown kind stays in the inventory and fails, visibly, when it is opened; only what can never be a slide (a FIFO, other
DICOM, a plain image, a glob without a match) is skipped.
"""

from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from inference.errors import ConfigError
from inference.slides._cache import cache_folder
from inference.slides._files import Skipped
from inference.slides._remote import RemoteFile, is_url, split_sources
from inference.slides._search import SLIDE_SUFFIXES, FoundSlide, Search
from inference.slides.keys import hidden_key, slide_key
from inference.slides.objects import local_files

__all__ = ["SLIDE_SUFFIXES", "Inventory", "Skipped", "SlideRef", "discover", "is_url", "split_sources"]


@dataclass(frozen=True, repr=False)
class SlideRef:
    """Where one slide lies and what it is called.

    Attributes:
        path: main file, absolute; not resolved, because companions lie beside the name, not beside a link's target.
        files: every file of the slide, the main one first, companions sorted.
        relpath: posix path of the main file under `root`.
        mpp: level-0 µm/px from a cohort file, which replaces the slide's own.
        hidden: set under a secret: names must not appear in messages, manifests or logs.
        remote: for a slide in an object store, its objects in the order of `files`, which then are where it will lie
            once it is fetched.
        roi: file of its region of interest, from a cohort file.
    """

    key: str
    path: Path
    files: tuple[Path, ...]
    root: Path
    root_label: str
    relpath: str
    mpp: float | None = None
    hidden: bool = False
    remote: tuple[RemoteFile, ...] = ()
    roi: Path | None = None

    @property
    def name(self) -> str:
        """What messages may call the slide: its path under the root on one line, or its key when names are hidden."""
        return self.key if self.hidden else printable(self.relpath)

    def __repr__(self) -> str:
        return f"SlideRef({self.name})"


@dataclass(frozen=True)
class Inventory:
    """Slides in the order of their sources, and what was left out."""

    slides: tuple[SlideRef, ...]
    skipped: tuple[Skipped, ...]


def discover(sources: Sequence[str | Path], *, root: str | Path | None = None, secret: str | None = None) -> Inventory:
    """Slides of all sources, each once, in cohort order or sorted by path under the root.

    Roots: a folder itself, a lone file's parent, a cohort file's folder, a glob's fixed prefix; or `root` for all,
    which then must contain every slide. A slide named by several sources keeps its first place and root; a µm/px or
    key that a cohort file gives applies wherever it stands. Links to files found in a folder are followed only
    where they end under the root; a file that is named outright is trusted. In a cohort file, a URL outside the
    file's own folder has its bucket as root.

    Args:
        root: a folder, or the URL of one.
        secret: `SLIDE_KEY_SECRET`; keys, also those a cohort file gives, become HMACs and messages name no file.

    Raises:
        ConfigError: a source is missing, two slides share a key, two roots a label, or a cohort file is wrong.
        SourceUnavailable: a folder or mount cannot be read.
    """
    with closing(Search(root, hide_names=secret is not None)) as search:
        for number, source in enumerate([sources] if isinstance(sources, str) else sources, start=1):
            search.add_source(number, source)
        everything, skipped = search.slides, search.skipped
    slides: dict[str, SlideRef] = {}
    for found in everything:
        ref = _ref(found, secret)
        # Keys become folder names, and some file systems ignore case.
        other = slides.setdefault(ref.key.casefold(), ref)
        if other is not ref:
            names = f"the key {ref.key}" if ref.hidden else f"the key {ref.key}: '{other.name}' and '{ref.name}'"
            raise ConfigError(f"two slides share {names}; give one another slide_key in a cohort file")
    return Inventory(tuple(slides.values()), tuple(skipped))


def printable(text: str) -> str:
    """The text on one line, control characters and undecodable bytes escaped: a name must not forge a log line."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


def _ref(found: FoundSlide, secret: str | None) -> SlideRef:
    if found.slide_key is None:
        key = slide_key(found.root.label, found.relpath, secret=secret)
    else:
        key = found.slide_key if secret is None else hidden_key(found.slide_key, secret)
    files = local_files(found.remote) or found.files
    return SlideRef(
        key=key,
        path=files[0],
        files=files,
        root=cache_folder() if found.remote else found.root.path,
        root_label=found.root.label,
        relpath=found.relpath,
        mpp=found.mpp,
        hidden=secret is not None,
        remote=found.remote,
        roi=found.roi,
    )
