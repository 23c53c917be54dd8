"""From what a user calls a model to the checkpoint that is meant."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from inference.errors import ArtifactRefused, ConfigError, UnknownModel
from inference.models import registry
from inference.models.artifact import manifest_path
from inference.models.registry import Checkpoint, model_cache, registered_models, resolve_model


@pytest.fixture(autouse=True)
def _no_folders_of_this_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("SLIDE_MODELS", raising=False)
    monkeypatch.setattr(registry, "SAGEMAKER_MODELS", tmp_path / "opt")


def _place(checkpoint: Checkpoint, path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(checkpoint.path, path)
    shutil.copy(manifest_path(checkpoint.path), manifest_path(path))
    return path


def test_a_path_means_the_checkpoint_there(tiny: Checkpoint) -> None:
    assert resolve_model(str(tiny.path)) == tiny


@pytest.mark.parametrize("place", ["tiny.pt2", "tiny/tiny.pt2"])
def test_a_name_is_found_in_a_folder_of_slide_models(
    tiny: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    expected = _place(tiny, tmp_path / "models" / place)
    (tmp_path / "first").mkdir()
    monkeypatch.setenv("SLIDE_MODELS", f"{tmp_path / 'first'}:{tmp_path / 'models'}")
    assert resolve_model("tiny").path == expected


@pytest.mark.parametrize("others", ["", ":first", "first:", "first::"])
def test_a_place_with_a_colon_in_its_name_is_one_place(
    tiny: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, others: str
) -> None:
    expected = _place(tiny, tmp_path / "site:1" / "tiny.pt2")
    (tmp_path / "first").mkdir()
    monkeypatch.chdir(tmp_path)
    listed = f"{others}site:1" if others.endswith(":") else f"site:1{others}"
    monkeypatch.setenv("SLIDE_MODELS", listed)
    assert resolve_model("tiny").path == expected.relative_to(tmp_path)
    monkeypatch.setenv("SLIDE_MODELS", f"{listed}:gone")
    with pytest.raises(ConfigError, match="SLIDE_MODELS names gone, which does not exist"):
        resolve_model("tiny")


def test_a_list_of_places_longer_than_a_path_may_be_is_a_list(
    tiny: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = _place(tiny, tmp_path / "models" / "tiny.pt2")
    (tmp_path / "first").mkdir()
    monkeypatch.setenv("SLIDE_MODELS", ":".join([str(tmp_path / "first")] * 200 + [str(tmp_path / "models")]))
    assert resolve_model("tiny").path == expected


def test_a_name_is_found_among_the_files_of_slide_models(tiny: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLIDE_MODELS", str(tiny.path))
    assert resolve_model("tiny").path == tiny.path
    with pytest.raises(UnknownModel):
        resolve_model("other")


def test_a_name_is_found_where_sagemaker_puts_models(tiny: Checkpoint, tmp_path: Path) -> None:
    expected = _place(tiny, tmp_path / "opt" / "tiny.pt2")
    assert resolve_model("tiny").path == expected


def test_a_folder_named_in_slide_models_that_is_not_there_is_a_config_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLIDE_MODELS", "/nowhere/models")
    with pytest.raises(ConfigError, match="SLIDE_MODELS names /nowhere/models, which does not exist"):
        resolve_model("demo")


def test_a_stray_file_with_a_models_name_does_not_stand_in_for_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tiny: Checkpoint
) -> None:
    (tmp_path / "tiny").write_text("notes")
    _place(tiny, tmp_path / "models" / "tiny.pt2")
    monkeypatch.setenv("SLIDE_MODELS", str(tmp_path / "models"))
    monkeypatch.chdir(tmp_path)
    assert resolve_model("tiny").manifest == tiny.manifest


@pytest.mark.parametrize("name", ["h9", "", "../models/tiny", "/etc/passwd", "tiny\0", "a" * 5000, "Demo"])
def test_a_name_that_means_nothing_is_refused_with_the_names_there_are(
    tiny: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    _place(tiny, tmp_path / "models" / "tiny.pt2")
    (tmp_path / "other").mkdir()
    monkeypatch.setenv("SLIDE_MODELS", str(tmp_path / "other"))
    with pytest.raises(UnknownModel, match="one of the registered names: demo"):
        resolve_model(name)


def test_a_path_where_no_checkpoint_lies_is_an_unknown_model(tmp_path: Path) -> None:
    with pytest.raises(UnknownModel, match=r"no checkpoint at .*gone\.pt2"):
        resolve_model(str(tmp_path / "gone.pt2"))


def test_a_checkpoint_found_by_name_without_its_manifest_is_refused_not_passed_over(
    tiny: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest_path(tiny.path).unlink()
    monkeypatch.setenv("SLIDE_MODELS", str(tiny.path.parent))
    with pytest.raises(ArtifactRefused, match=r"no manifest tiny\.pt2\.json"):
        resolve_model("tiny")


def test_a_registered_model_is_exported_into_the_configured_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, export_tiny: Callable[..., Path]
) -> None:
    monkeypatch.setitem(registry._EXPORTERS, "tiny", lambda cache: (cache.mkdir(), export_tiny())[1])
    monkeypatch.setenv("SLIDE_MODEL_CACHE", str(tmp_path / "here"))
    assert resolve_model("tiny").manifest.spec.model_name == "tiny"
    assert (tmp_path / "here").is_dir()


def test_the_cache_is_the_users_unless_configured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("SLIDE_MODEL_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert model_cache() == tmp_path / "slide-inference" / "models"
    monkeypatch.setenv("SLIDE_MODEL_CACHE", str(tmp_path / "own"))
    assert model_cache() == tmp_path / "own"


def test_the_demo_model_is_registered_and_resolves_to_its_own_spec(demo_checkpoint: Checkpoint) -> None:
    assert "demo" in registered_models()
    assert demo_checkpoint.manifest.spec.model_name == "demo"
