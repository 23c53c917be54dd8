"""From what a user calls a model to a checkpoint on disk."""

import hashlib
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from inference.errors import ConfigError, UnknownModel
from inference.models.artifact import SUFFIXES, ArtifactManifest, load_manifest
from inference.models.spec import MODEL_NAME, known_specs, load_model_spec

SAGEMAKER_MODELS = Path("/opt/ml/model")


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint file and its manifest."""

    path: Path
    manifest: ArtifactManifest

    @classmethod
    def at(cls, path: Path) -> Self:
        """The checkpoint at a path.

        Raises:
            UnknownModel, ArtifactRefused: as `load_manifest`.
        """
        return cls(path, load_manifest(path))


def resolve_model(name_or_path: str, *, cache: Path | None = None) -> Checkpoint:
    """Find, or export on first use, the checkpoint a user means.

    Looks at, in this order: a path that ends in `.pt2` or `.onnx`; `<name>.pt2`, then `<name>.onnx`, then the newest
    `<name>-<digest>`, among the files and in the folders of `SLIDE_MODELS`, then in /opt/ml/model, then among those
    exported to `cache`, else to `SLIDE_MODEL_CACHE`, else to the user's cache folder; registered models that export
    themselves (`demo`), there.

    Raises:
        UnknownModel: nothing has this name, or its weights have not been exported yet; then with the commands.
        ArtifactRefused: the checkpoint has no usable manifest.
        ConfigError: `SLIDE_MODELS` names what does not exist, or the export failed.
    """
    if name_or_path.endswith(SUFFIXES):
        return Checkpoint.at(Path(name_or_path))
    for found in checkpoints_of(name_or_path, cache):
        return Checkpoint.at(found)
    if exporter := _EXPORTERS.get(name_or_path):
        return Checkpoint.at(exporter(cache or model_cache()))
    if name_or_path in known_specs():
        raise UnknownModel(f"{name_or_path} is not exported yet: {'; then '.join(export_commands(name_or_path))}")
    raise UnknownModel(
        f"no model {name_or_path!r}: give the path of a .pt2 or .onnx checkpoint with its manifest, one of the "
        f"registered names: {', '.join(sorted(_EXPORTERS))}, or one that slide-inference models lists"
    )


def checkpoints_of(name: str, cache: Path | None = None) -> Iterator[Path]:
    """Checkpoint files that lie where this name is looked for, the preferred place first; existing ones only.

    Raises:
        ConfigError: `SLIDE_MODELS` names what does not exist.
    """
    # A name is looked up, never taken as part of a path that leads out of the model folders.
    if re.fullmatch(MODEL_NAME, name):
        for path in _candidates(name, cache):
            if os.path.lexists(path):
                yield path


def export_commands(name: str) -> tuple[str, ...]:
    """What a user does to make a known spec runnable, step by step."""
    spec = load_model_spec(name)
    if spec.access == "proprietary":
        return (f"put the checkpoint and the manifest of {name} from its vendor into a folder of SLIDE_MODELS",)
    gate = ", which asks for access first" if spec.access == "gated" else ""
    return (
        f"download the weights from {spec.weights_source}{gate}",
        f"slide-inference export {name} --weights FILE",
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


def model_folders(cache: Path | None = None) -> list[Path]:
    """Folders and files in which checkpoints are looked for by name, the preferred place first.

    Raises:
        ConfigError: as `model_places`.
    """
    return [*model_places(), SAGEMAKER_MODELS, cache or model_cache()]


def _candidates(name: str, cache: Path | None) -> Iterator[Path]:
    """Where the checkpoint of a model may lie, the preferred place first."""
    for place in model_folders(cache):
        if place.is_file():
            if place.stem == name and place.suffix in SUFFIXES:
                yield place
        else:
            for suffix in SUFFIXES:
                yield place / f"{name}{suffix}"
                yield place / name / f"{name}{suffix}"
            if name not in _EXPORTERS:  # those know which of theirs is the right one
                yield from _newest_first(place, name)


def _newest_first(place: Path, name: str) -> list[Path]:
    """Exports that have no name of their own: `<name>-<12 digits of their identity>`."""
    found = [path for suffix in SUFFIXES for path in place.glob(f"{name}-*{suffix}") if model_of(path.stem) == name]
    return sorted(found, key=lambda path: path.stat().st_mtime_ns, reverse=True)


def model_of(stem: str) -> str:
    """The model's name in that of a checkpoint file: `brightness-0a1b2c3d4e5f` -> `brightness`."""
    return re.sub(r"-[0-9a-f]{12}$", "", stem)


def _export_demo(cache: Path) -> Path:
    # Compiling needs torch; a checkpoint that only has to be found does not.
    from inference.models import demo
    from inference.models.export import export_model

    source = hashlib.sha256(Path(demo.__file__).read_bytes()).hexdigest()
    return export_model(demo.DemoNet(), load_model_spec("demo"), cache, source_sha256=source)


_EXPORTERS: dict[str, Callable[[Path], Path]] = {"demo": _export_demo}
