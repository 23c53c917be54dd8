"""One file per model: what is refused, and what a file means."""

from pathlib import Path

import pytest

from inference.errors import ConfigError
from inference.models.registry import Checkpoint
from pipelines.model_files import pipeline_models


def test_the_pipelines_own_models_include_the_demo_and_need_no_checkpoint_to_load(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("SLIDE_MODELS", raising=False)
    demo = next(model for model in pipeline_models() if model.name == "demo")
    assert demo.tiling == "t224_s224_0_5um"
    assert demo.spec.prediction_names[0] == "hematoxylin_area"


def test_slide_models_may_name_a_checkpoint_a_file_or_a_folder(
    demo_checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLIDE_MODELS", str(demo_checkpoint.path))
    assert [m.resolve().path for m in pipeline_models()] == [demo_checkpoint.path]
    file = tmp_path / "mine.yaml"
    file.write_text(f"checkpoint: {demo_checkpoint.path}\nheatmaps: [{{output: eosin_od, low: 0, high: 2}}]\n")
    for place in (file, tmp_path):
        monkeypatch.setenv("SLIDE_MODELS", str(place))
        (model,) = pipeline_models()
        assert model.resolve().path == demo_checkpoint.path
        assert [h.output for h in model.heatmaps] == ["eosin_od"]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("checkpont: demo\n", "bad.yaml"),
        ("[1, 2", "bad.yaml"),
        ("checkpoint: demo\nheatmaps: [{output: a, low: 1, high: 0}]\n", "bad.yaml"),
    ],
)
def test_a_model_file_that_cannot_be_used_is_named(
    text: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "bad.yaml"
    file.write_text(text)
    monkeypatch.setenv("SLIDE_MODELS", str(file))
    with pytest.raises(ConfigError, match=says):
        pipeline_models()


def test_two_models_of_one_name_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("one.yaml", "two.yaml"):
        (tmp_path / name).write_text("checkpoint: demo\n")
    monkeypatch.setenv("SLIDE_MODELS", str(tmp_path))
    with pytest.raises(ConfigError, match="more than one model is called demo"):
        pipeline_models()


def test_a_place_that_does_not_exist_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLIDE_MODELS", str(tmp_path / "nowhere"))
    with pytest.raises(ConfigError, match="nowhere"):
        pipeline_models()
