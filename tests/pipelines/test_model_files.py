"""One file per model: what is refused, and what a file means."""

import os
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


HEATMAP = "checkpoint: demo\nheatmaps: [{output: eosin_od}, {output: %s}]\n"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("checkpont: demo\n", "cannot be used: checkpoint: Field required; checkpont: Extra inputs are not permitted"),
        ("checkpoint: demo\nheatmaps: [{output: a, low: 1, high: 0}]\n", "cannot be used: heatmaps.0: .*below high"),
        ("checkpoint: demo\nheatmaps: [{output: a, low: .nan}]\n", "cannot be used: heatmaps.0.low: "),
        ("checkpoint: 5\n", "cannot be used: checkpoint: Input should be a valid string"),
        ("[1, 2", "cannot be used: it is not YAML: .*line 1"),
        ("a: 2020-99-99\n", "cannot be used: it is not YAML: month must be in"),
        pytest.param("[" * 5000, "cannot be used: it is not YAML: ", id="5000 brackets"),
        ("- demo\n", "cannot be used: it holds a list: write lines of the form 'key: value'"),
        ("demo\n", "cannot be used: it holds a single value: write lines"),
        ("", "cannot be used: it holds nothing: write lines"),
        (b"\xff\xfe", "cannot be read: it is not UTF-8 text"),
        ("checkpoint: nowhere.pt2\n", "checkpoint is 'nowhere.pt2', which is no .pt2 or .onnx file there .*: demo"),
        ("checkpoint: h9\n", "checkpoint is 'h9', which is no .pt2 or .onnx file there .*: demo"),
        (
            HEATMAP % "eosin",
            "heatmaps.1.output is 'eosin', which demo does not predict; it has hematoxylin_area, hemat",
        ),
    ],
    ids=str,
)
def test_a_model_file_that_cannot_be_used_is_named_in_one_line_with_what_is_wrong(
    text: str | bytes, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "bad.yaml"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    monkeypatch.setenv("SLIDE_MODELS", str(file))
    with pytest.raises(ConfigError, match=f"^model file bad.yaml:? {says}") as caught:
        pipeline_models()
    assert "\n" not in caught.value.message
    assert caught.value.__cause__ is None


def test_a_folder_or_a_pipe_that_is_called_a_model_file_is_refused_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLIDE_MODELS", str(tmp_path))
    (tmp_path / "odd.yaml").mkdir()
    with pytest.raises(ConfigError, match=r"model file odd\.yaml cannot be used: it is no regular file"):
        pipeline_models()
    (tmp_path / "odd.yaml").rmdir()
    os.mkfifo(tmp_path / "odd.yaml")
    with pytest.raises(ConfigError, match=r"model file odd\.yaml cannot be used: it is no regular file"):
        pipeline_models()


def test_places_may_have_a_colon_in_their_names_alone_and_in_a_list(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    colon, plain = tmp_path / "site:1" / "a.yaml", tmp_path / "b.yaml"
    colon.parent.mkdir()
    for place in (colon, plain):
        place.write_text("checkpoint: demo\n")
    for place in (colon, colon.parent):
        monkeypatch.setenv("SLIDE_MODELS", str(place))
        assert [model.name for model in pipeline_models()] == ["demo"]
    for both in (f"{colon}:{plain}", f"{plain}:{colon.parent}:"):
        monkeypatch.setenv("SLIDE_MODELS", both)
        with pytest.raises(ConfigError, match="more than one model is called demo"):
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
