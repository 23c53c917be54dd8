"""Where a headless run keeps its things, and the environment that points Dagster there."""

import hashlib
import os
import re
from dataclasses import dataclass
from pathlib import Path

from inference.slides.keys import hidden_key

DAGSTER_YAML = """\
# No telemetry, and no welcome dialog in the UI.
telemetry:
  enabled: false
nux:
  enabled: false
"""

SOURCE_DIGEST = ".source"
"""In a run's folder: which source it belongs to, as a digest, since its name may be secret."""


@dataclass(frozen=True)
class Layout:
    """Everything of one run lies under one folder.

    Attributes:
        out: the run's folder.
        source: what is run, as text if it is a URL; the demo cohort where None.
        mpp: level-0 µm/px for slides that state none.
        model: a checkpoint or model file, instead of the pipeline's own.
    """

    out: Path
    source: str | Path | None = None
    mpp: float | None = None
    model: str | None = None

    @property
    def slides(self) -> Path:
        return self.out / "slides"

    @property
    def report(self) -> Path:
        return self.out / "report.html"

    @property
    def store(self) -> Path:
        return self.out / "store"

    def environment(self) -> dict[str, str]:
        """The variables that `pipelines.definitions` and Dagster read."""
        found = {
            "DAGSTER_HOME": str(self.out / "dagster"),
            "SLIDE_SOURCE": str(self.source or self.slides / "cohort.csv"),
            "SLIDE_STORE": str(self.store),
            "SLIDE_REPORT": str(self.report),
        }
        if self.mpp is not None:
            found["SLIDE_MPP"] = str(self.mpp)
        if self.model is not None and Path(self.model).exists():
            found["SLIDE_MODELS"] = str(Path(self.model).absolute())
        return found

    def prepare(self) -> None:
        """Create the folders, keep Dagster's telemetry off, and export the environment to this process."""
        home = self.out / "dagster"
        home.mkdir(parents=True, exist_ok=True)
        if self.source is not None:
            (self.out / SOURCE_DIGEST).write_text(_digest(self.source), encoding="utf-8")
        if not (home / "dagster.yaml").exists():
            (home / "dagster.yaml").write_text(DAGSTER_YAML, encoding="utf-8")
        os.environ.update(self.environment())
        os.environ.setdefault("SLIDE_MODEL_CACHE", str(self.out / "models"))


def run_folder(runs: Path, source: str | Path, secret: str | None) -> Path:
    """The folder of a source's runs: called as the source is, unless that is secret or taken by another source."""
    path = Path(source)
    name = path.stem if path.is_file() else path.name
    if secret is not None:
        return runs / hidden_key(str(source), secret)
    folder = runs / (re.sub(r"[^\w.-]+", "-", name).strip("-.") or "slides")
    marked = folder / SOURCE_DIGEST
    if marked.is_file() and marked.read_text(encoding="utf-8") != _digest(source):
        return folder.with_name(f"{folder.name}-{_digest(source)[:8]}")
    return folder


def _digest(source: str | Path) -> str:
    return hashlib.sha256(os.fsencode(source)).hexdigest()
