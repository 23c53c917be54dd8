"""The commands `export`, `import` and `models`."""

from collections.abc import Callable
from pathlib import Path

import onnx
import pytest
import torch
import typer
import yaml
from typer.testing import CliRunner, Result

from inference.cli_models import add_model_commands
from inference.errors import ConfigError, InferenceError
from inference.models import registry
from inference.models.registry import resolve_model
from tests.inference.models.test_abmil import a_network
from tests.inference.models.test_foreign import a_spec, mean_graph
from tests.inference.models.test_networks import SMALL

Call = Callable[..., Result]


@pytest.fixture(autouse=True)
def _no_folders_of_this_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("SLIDE_MODELS", raising=False)
    monkeypatch.setenv("SLIDE_MODEL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(registry, "SAGEMAKER_MODELS", tmp_path / "opt")


@pytest.fixture
def call() -> Call:
    app = typer.Typer()
    add_model_commands(app)

    def run(*arguments: object) -> Result:
        result = CliRunner().invoke(app, [str(argument) for argument in arguments])
        if isinstance(result.exception, InferenceError):
            raise result.exception
        return result

    return run


@pytest.fixture
def small_spec(tmp_path: Path) -> Path:
    path = tmp_path / "small.yaml"
    path.write_text(yaml.safe_dump(SMALL | {"mean": [0.7, 0.5, 0.6], "std": [0.2, 0.25, 0.3]}))
    return path


def test_the_list_names_licence_gate_source_and_state(call: Call) -> None:
    lines = call("models").stdout.splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith("uni "))
    assert lines[first].split("  ")[0] == "uni"
    assert "asks for access" in lines[first]
    assert "not exported" in lines[first]
    assert lines[first + 1].strip() == "CC-BY-NC-ND-4.0; https://huggingface.co/MahmoodLab/UNI"
    assert "slide-inference export uni --weights FILE" not in "\n".join(lines)
    assert "- slide-inference export uni --weights FILE" in call("models", "--verbose").stdout


def test_an_export_says_how_far_it_is_from_its_network_and_is_then_found_by_name(call: Call, small_spec: Path) -> None:
    result = call("export", small_spec, "--random-init", "--depth", 1, "--format", "portable")
    assert result.exit_code == 0
    path = resolve_model("small-random").path
    assert result.stdout.startswith(f"{path} (exported-program, fp32, cpu): ")
    assert "from its network in fp32, 1e-03 allowed" in result.stdout
    assert f"exported: {path}" in call("models").stdout


def test_an_attention_network_is_exported_with_what_it_takes_and_gives(call: Call, tmp_path: Path) -> None:
    torch.save(a_network("clam mb").state_dict(), tmp_path / "clam.pt")
    options = ("--format", "portable", "--out", tmp_path / "out", "--classes", "a, b, c")
    result = call("export", "abmil", "--weights", tmp_path / "clam.pt", *options)
    assert result.stdout.strip() == (
        f"{tmp_path}/out/abmil/abmil.pt2 (clam-mb): embeddings (tiles, 12) -> attention (tiles, 3), logits (3,)"
    )


def test_an_import_is_tried_and_found_by_name(call: Call, tmp_path: Path) -> None:
    (tmp_path / "s.yaml").write_text(yaml.safe_dump(a_spec().model_dump(mode="json")))
    mean_graph(tmp_path / "g.onnx")
    assert onnx.load(tmp_path / "g.onnx").graph.name == "mean"
    result = call("import", tmp_path / "g.onnx", "--spec", tmp_path / "s.yaml")
    assert result.stdout.strip() == f"{tmp_path}/cache/theirs/theirs.onnx (onnx): tried and pinned"
    assert resolve_model("theirs").manifest.format == "onnx"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["export", "uni"], "export uni needs --weights FILE, a local file from https://"),
        (["export", "nothing", "--random-init"], "no model spec nothing: known are "),
        (["export", "tissue-seg", "--random-init"], "its network is not published"),
        (["export", "uni", "--random-init", "--precision", "int8"], "--precision int8: give fp32, bf16 or fp16"),
        (["export", "uni", "--random-init", "--format", "zip"], "'zip' is no format"),
        (["export", "abmil"], "export abmil needs --weights FILE"),
        (["export", "abmil", "--weights", "w.pt", "--format", "zip"], "'zip' is no format"),
        (["import", "gone.onnx", "--spec", "s.yaml"], "no file gone.onnx"),
    ],
)
def test_what_cannot_be_done_is_refused_in_one_line(call: Call, arguments: list[str], says: str) -> None:
    with pytest.raises(ConfigError, match=says) as raised:
        call(*arguments)
    assert "\n" not in raised.value.message
