"""Every model there is a spec or a checkpoint of: licence, gate, and what stands between it and being run."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from inference.errors import InferenceError
from inference.models.artifact import SUFFIXES, ArtifactManifest
from inference.models.registry import (
    Checkpoint,
    checkpoints_of,
    export_commands,
    model_folders,
    model_of,
    registered_models,
)
from inference.models.spec import ModelSpec, known_specs, load_model_spec


@dataclass(frozen=True)
class CatalogueEntry:
    """One model.

    Attributes:
        checkpoints: those that would be found under its name, the preferred first.
        refused: of a checkpoint that lies there and cannot be used, why.
        commands: what makes it runnable; empty where it is.
    """

    spec: ModelSpec
    checkpoints: tuple[Checkpoint, ...]
    refused: tuple[str, ...]
    commands: tuple[str, ...]

    @property
    def name(self) -> str:
        return self.spec.model_name

    @property
    def state(self) -> str:
        """One word or a path: where it is exported, or what to do."""
        if self.checkpoints:
            return f"exported: {self.checkpoints[0].path} ({', '.join(_described(self.checkpoints[0].manifest))})"
        if self.refused:
            return f"refused: {self.refused[0]}"
        if self.name in registered_models():
            return "exports itself when first run"
        return "not published" if self.spec.access == "proprietary" else "not exported"


def _described(manifest: ArtifactManifest) -> tuple[str, ...]:
    return manifest.format, manifest.spec.precision, manifest.device


def catalogue(cache: Path | None = None) -> tuple[CatalogueEntry, ...]:
    """All known specs, and models in the folders of `SLIDE_MODELS` and the cache that were imported, by name.

    Raises:
        ConfigError: `SLIDE_MODELS` names what does not exist.
    """
    names = sorted({*known_specs(), *_found_names(cache)})
    return tuple(entry for name in names if (entry := _entry(name, cache)) is not None)


def _entry(name: str, cache: Path | None) -> CatalogueEntry | None:
    found, refused = [], []
    for path in checkpoints_of(name, cache):
        try:
            found.append(Checkpoint.at(path))
        except InferenceError as error:
            refused.append(error.message)
    if name in known_specs():
        spec = load_model_spec(name)
    elif found:
        spec = found[0].manifest.spec
    else:
        return None
    commands = () if found or name in registered_models() else export_commands(name)
    return CatalogueEntry(spec, tuple(found), tuple(refused), commands)


def _found_names(cache: Path | None) -> Iterator[str]:
    """Names that a checkpoint in a folder of its own, or right in a folder, is found under."""
    for folder in model_folders(cache):
        if not folder.is_dir():
            continue
        for path in folder.iterdir():
            if path.suffix in SUFFIXES:
                yield from {model_of(path.stem)} if any(checkpoints_of(model_of(path.stem), cache)) else ()
            elif path.is_dir() and any((path / f"{path.name}{suffix}").exists() for suffix in SUFFIXES):
                yield path.name
