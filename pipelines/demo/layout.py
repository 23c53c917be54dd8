"""Where a headless run keeps its things, and the environment that points Dagster there."""

import os
from dataclasses import dataclass
from pathlib import Path

DAGSTER_YAML = """\
# No telemetry, and no welcome dialog in the UI.
telemetry:
  enabled: false
nux:
  enabled: false
"""


@dataclass(frozen=True)
class Layout:
    """Everything of one run lies under one folder.

    Attributes:
        out: the run's folder.
        source: what is run; the demo cohort where None.
        mpp: level-0 µm/px for slides that state none.
        model: a checkpoint or model file, instead of the pipeline's own.
    """

    out: Path
    source: Path | None = None
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
        if not (home / "dagster.yaml").exists():
            (home / "dagster.yaml").write_text(DAGSTER_YAML, encoding="utf-8")
        os.environ.update(self.environment())
        os.environ.setdefault("SLIDE_MODEL_CACHE", str(self.out / "models"))
