"""Model specs: one YAML each, refused with the file's name and the field's."""

from pathlib import Path

import pytest
import yaml

from inference.errors import ConfigError
from inference.models.spec import known_specs, load_model_spec

FIELDS: dict[str, object] = {
    "model_name": "m", "version": "1", "weights_source": "none", "license": "MIT", "architecture": "vit",
    "tile_spec": {"size": 224, "stride": 224, "resolution": 0.5}, "output_type": "prediction",
    "prediction_names": ["a", "b"],
}  # fmt: skip


def _write(folder: Path, **changes: object) -> Path:
    path = folder / "m.yaml"
    fields = {**FIELDS, **changes}
    path.write_text(yaml.safe_dump({k: v for k, v in fields.items() if v is not None}))
    return path


@pytest.mark.parametrize("name", known_specs())
def test_every_spec_that_comes_with_the_library_loads_under_its_own_name(name: str) -> None:
    assert load_model_spec(name).model_name == name


def test_a_spec_gives_the_shapes_of_its_inputs_and_outputs_in_the_graphs_order(tmp_path: Path) -> None:
    spec = load_model_spec(_write(tmp_path, output_type="prediction_with_embedding", embedding_dim=5))
    assert spec.input_shape == (3, 224, 224)
    assert [(o.name, o.shape, o.components) for o in spec.outputs] == [
        ("embedding", (5,), ()),
        ("prediction", (2,), ("a", "b")),
    ]


def test_how_a_prediction_is_drawn_is_no_part_of_what_defines_the_numbers(tmp_path: Path) -> None:
    plain = load_model_spec(_write(tmp_path))
    drawn = load_model_spec(_write(tmp_path, heatmaps=[{"output": "a", "high": 2.0}]))
    assert plain.recipe() == drawn.recipe()
    assert plain.recipe() != load_model_spec(_write(tmp_path, version="2")).recipe()


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"colour": 1}, "colour: Extra inputs"),
        ({"tile_spec": {"size": 224, "stride": 225, "resolution": 0.5}}, "stride 225 is larger than the tile"),
        ({"tile_spec": {"size": 224, "stride": 0, "resolution": 0.5}}, r"tile_spec\.stride: "),
        ({"tile_spec": {"size": 224, "stride": 224, "resolution": 0.01}}, r"tile_spec\.resolution: "),
        ({"tile_spec": {"size": 224, "stride": 224, "resolution": float("nan")}}, r"tile_spec\.resolution: "),
        ({"tile_spec": {"size": 224, "stride": 224, "resolution": 0.5, "unit": "mm"}}, r"tile_spec\.unit: "),
        ({"license": None}, "license: Field required"),
        ({"model_name": "../m"}, "model_name: "),
        ({"prediction_names": None}, "needs prediction_names"),
        ({"prediction_names": ["a", "a"]}, "same name twice"),
        ({"output_type": "embedding"}, "needs embedding_dim"),
        ({"output_type": "embedding", "embedding_dim": 0}, "embedding_dim: "),
        ({"num_channels": 0}, "num_channels: "),
        ({"heatmaps": [{"output": "c"}]}, "heatmaps name c, which is no prediction"),
        ({"heatmaps": [{"output": "a", "low": 1.0, "high": 1.0}]}, "low 1.0 must be below high 1.0"),
    ],
)
def test_a_spec_with_a_wrong_field_is_refused_by_file_and_field(
    tmp_path: Path, changes: dict[str, object], says: str
) -> None:
    with pytest.raises(ConfigError, match=rf"model spec m\.yaml cannot be used: .*{says}") as caught:
        load_model_spec(_write(tmp_path, **changes))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"- a\n", b"a: [\n", b"\xff\xfe\x00"], ids=["empty", "list", "cut", "binary"])
def test_a_file_that_is_no_spec_is_refused_by_name(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "m.yaml"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"model spec m\.yaml cannot be"):
        load_model_spec(path)


def test_a_name_that_no_spec_has_is_refused_with_the_names_there_are() -> None:
    with pytest.raises(ConfigError, match=r"no model spec h9: known are .*demo"):
        load_model_spec("h9")
