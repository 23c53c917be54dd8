"""The list of models: licence, gate, source, and what stands between each and being run."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from inference.errors import UnknownModel
from inference.models import registry
from inference.models.artifact import manifest_path
from inference.models.catalogue import CatalogueEntry, catalogue
from inference.models.registry import Checkpoint, resolve_model
from inference.models.spec import known_specs


@pytest.fixture(autouse=True)
def _no_folders_of_this_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("SLIDE_MODELS", raising=False)
    monkeypatch.setenv("SLIDE_MODEL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(registry, "SAGEMAKER_MODELS", tmp_path / "opt")


def entry(name: str) -> CatalogueEntry:
    return next(entry for entry in catalogue() if entry.name == name)


def _place(tiny: Checkpoint, path: Path, name: str) -> Path:
    path.parent.mkdir(parents=True)
    shutil.copy(tiny.path, path)
    spec = tiny.manifest.spec.model_copy(update={"model_name": name})
    manifest_path(path).write_text(tiny.manifest.model_copy(update={"spec": spec, "file": path.name}).model_dump_json())
    return path


def test_every_spec_is_listed_with_what_one_must_know_of_it() -> None:
    listed = {entry.name: entry for entry in catalogue()}
    assert set(listed) == set(known_specs())
    assert listed["demo"].state == "exports itself when first run"
    assert listed["uni"].state == "not exported"
    assert listed["m-optimus"].state == "not published"
    assert listed["uni"].commands == (
        "download the weights from https://huggingface.co/MahmoodLab/UNI, which asks for access first",
        "slide-inference export uni --weights FILE",
    )
    assert "SLIDE_MODELS" in listed["tissue-seg"].commands[0]
    assert listed["demo"].commands == ()


@pytest.mark.parametrize("name", sorted(set(known_specs()) - {"demo"}))
def test_the_error_for_a_model_that_is_not_exported_prints_its_commands(name: str) -> None:
    with pytest.raises(UnknownModel, match=f"{name} is not exported yet: ") as raised:
        resolve_model(name)
    for command in entry(name).commands:
        assert command in raised.value.message
    assert "\n" not in raised.value.message


@pytest.mark.parametrize("folder", ["cache", "opt"])
def test_what_was_exported_is_found_and_listed_with_its_place(tiny: Checkpoint, tmp_path: Path, folder: str) -> None:
    path = _place(tiny, tmp_path / folder / "uni" / "uni.pt2", "uni")
    assert resolve_model("uni").path == path
    assert entry("uni").state == f"exported: {path} (exported-program, fp32, cpu)"
    assert entry("uni").commands == ()


def test_an_imported_model_without_a_spec_of_ours_is_listed_too(tiny: Checkpoint, tmp_path: Path) -> None:
    path = _place(tiny, tmp_path / "cache" / "theirs" / "theirs.pt2", "theirs")
    assert entry("theirs").checkpoints[0].path == path
    assert resolve_model("theirs").path == path


def _no_manifest(path: Path) -> None:
    manifest_path(path).unlink()


def _newer(path: Path) -> None:
    manifest_path(path).write_text('{"schema_version": 99}')


@pytest.mark.parametrize(("damage", "says"), [(_no_manifest, "has no manifest"), (_newer, "upgrade slide-inference")])
def test_a_checkpoint_that_cannot_be_used_is_listed_with_the_reason_and_the_commands(
    tiny: Checkpoint, tmp_path: Path, damage: Callable[[Path], None], says: str
) -> None:
    damage(_place(tiny, tmp_path / "cache" / "uni" / "uni.pt2", "uni"))
    assert entry("uni").state.startswith("refused: ")
    assert says in entry("uni").state
    assert entry("uni").commands


def test_an_onnx_checkpoint_is_found_by_name_and_by_path(tiny: Checkpoint, tmp_path: Path) -> None:
    path = _place(tiny, tmp_path / "cache" / "theirs" / "theirs.onnx", "theirs")
    assert resolve_model("theirs").path == path
    assert resolve_model(str(path)).path == path
    (tmp_path / "cache" / "theirs" / "theirs.pt2").write_bytes(b"")
    assert [p.name for p in registry.checkpoints_of("theirs")] == ["theirs.pt2", "theirs.onnx"]
