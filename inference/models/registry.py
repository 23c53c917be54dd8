"""From what a user calls a model to a checkpoint on disk."""

import hashlib
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from inference.errors import ConfigError, UnknownModel
from inference.models.artifact import ArtifactManifest, load_manifest
from inference.models.spec import MODEL_NAME, load_model_spec

SAGEMAKER_MODELS = Path("/opt/ml/model")


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint file and its manifest."""

    path: Path
    manifest: ArtifactManifest


def resolve_model(name_or_path: str, *, cache: Path | None = None) -> Checkpoint:
    """Find, or export on first use, the checkpoint a user means.

    Looks at, in this order: a path that ends in `.pt2`; `<name>.pt2` among the files and in the folders of
    `SLIDE_MODELS`, then in /opt/ml/model; registered models that export themselves (`demo`), cached in `cache`,
    else in `SLIDE_MODEL_CACHE`, else in the user's cache folder.

    Raises:
        UnknownModel: nothing has this name.
        ArtifactRefused: the checkpoint has no usable manifest.
        ConfigError: `SLIDE_MODELS` names what does not exist, or the export failed.
    """
    if name_or_path.endswith(".pt2"):
        path = Path(name_or_path)
        return Checkpoint(path, load_manifest(path))
    # A name is looked up, never taken as part of a path that leads out of the model folders.
    if re.fullmatch(MODEL_NAME, name_or_path):
        for found in _candidates(name_or_path):
            if os.path.lexists(found):
                return Checkpoint(found, load_manifest(found))
        if exporter := _EXPORTERS.get(name_or_path):
            exported = exporter(cache or model_cache())
            return Checkpoint(exported, load_manifest(exported))
    raise UnknownModel(
        f"no model {name_or_path!r}: give the path of a .pt2 checkpoint with its manifest, "
        f"or one of the registered names: {', '.join(sorted(_EXPORTERS))}"
    )


def registered_models() -> tuple[str, ...]:
    """Names of models that export themselves on first use."""
    return tuple(sorted(_EXPORTERS))


def model_cache() -> Path:
    """Where exported checkpoints are kept: `SLIDE_MODEL_CACHE`, else the user's cache folder."""
    if configured := os.environ.get("SLIDE_MODEL_CACHE"):
        return Path(configured)
    home = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(home) / "slide-inference" / "models"


def model_places() -> list[Path]:
    """Files and folders that `SLIDE_MODELS` names, separated as in `PATH`; a name with ':' in it that exists is one.

    Raises:
        ConfigError: one does not exist.
    """
    parts = [part for part in os.environ.get("SLIDE_MODELS", "").split(os.pathsep) if part]
    places = []
    while parts:
        joined = [os.pathsep.join(parts[:count]) for count in range(len(parts), 0, -1)]
        name = next((name for name in joined if os.path.lexists(name)), None)
        if name is None or not Path(name).exists():
            raise ConfigError(f"SLIDE_MODELS names {name or parts[0]}, which does not exist")
        places.append(Path(name))
        parts = parts[len(parts) - joined.index(name) :]
    return places


def _candidates(name: str) -> Iterator[Path]:
    """Where the checkpoint of a model may lie, the preferred place first."""
    for place in [*model_places(), SAGEMAKER_MODELS]:
        if place.is_file():
            if place.name == f"{name}.pt2":
                yield place
        else:
            yield place / f"{name}.pt2"
            yield place / name / f"{name}.pt2"


def _export_demo(cache: Path) -> Path:
    # Compiling needs torch; a checkpoint that only has to be found does not.
    from inference.models import demo
    from inference.models.export import export_model

    source = hashlib.sha256(Path(demo.__file__).read_bytes()).hexdigest()
    return export_model(demo.DemoNet(), load_model_spec("demo"), cache, source_sha256=source)


_EXPORTERS: dict[str, Callable[[Path], Path]] = {"demo": _export_demo}
