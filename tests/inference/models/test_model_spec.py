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

OMICS: dict[str, object] = {"rna_unit": "tpm", "n_genes": 3}
HEAD: dict[str, object] = {"backbone": "h0", "embedding_dim": 4, "backbone_weights_sha256": "ab" * 32}


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


def test_a_prediction_without_published_names_has_a_length(tmp_path: Path) -> None:
    spec = load_model_spec(_write(tmp_path, prediction_names=None, prediction_dim=7))
    assert (spec.n_predictions, spec.outputs[0].shape, spec.outputs[0].components) == (7, (7,), ())
    assert load_model_spec(_write(tmp_path, prediction_dim=2)).n_predictions == 2


def test_constants_that_are_not_published_are_none(tmp_path: Path) -> None:
    path = _write(tmp_path)
    path.write_text(path.read_text() + "mean: null\nstd: null\n")
    spec = load_model_spec(path)
    assert (spec.mean, spec.std) == (None, None)


def test_a_model_with_bulk_rna_has_two_further_inputs_in_this_order(tmp_path: Path) -> None:
    spec = load_model_spec(_write(tmp_path, omics=OMICS | {"genes": ["x", "y", "z"]}))
    assert [(x.name, x.shape, x.dtype, x.components) for x in spec.extra_inputs] == [
        ("bulk_rna", (3,), "float32", ("x", "y", "z")),
        ("bulk_rna_present", (1,), "float32", ()),
    ]
    assert (spec.input_shape, spec.input_dtype) == ((3, 224, 224), "uint8")
    assert load_model_spec(_write(tmp_path)).extra_inputs == ()


def test_a_mask_is_a_plane_per_class(tmp_path: Path) -> None:
    spec = load_model_spec(_write(tmp_path, mask={"size": 112, "values": "softmax_logit"}))
    assert [(o.shape, o.components) for o in spec.outputs] == [((2, 112, 112), ("a", "b"))]


def test_a_head_takes_its_backbones_embedding(tmp_path: Path) -> None:
    spec = load_model_spec(_write(tmp_path, head=HEAD))
    assert (spec.input_shape, spec.input_dtype, spec.outputs[0].shape) == ((4,), "float32", (2,))


KINDS: dict[str, dict[str, object]] = {
    "omics": OMICS, "head": HEAD, "mask": {"size": 112}, "graph": {"input_name": "x", "output_names": ["y"]},
}  # fmt: skip


def test_the_recipe_leaves_out_what_is_at_its_default(tmp_path: Path) -> None:
    written = {name: value for name, value in FIELDS.items() if name != "tile_spec"}
    assert load_model_spec(_write(tmp_path)).recipe() == written | {
        "tile_spec": {"size": 224, "stride": 224, "resolution": 0.5}
    }
    for name, given in KINDS.items():
        assert load_model_spec(_write(tmp_path, **{name: given})).recipe()[name] == given


def test_what_runs_a_model_and_who_may_have_it_is_no_part_of_its_recipe(tmp_path: Path) -> None:
    changed = _write(tmp_path, access="gated", hardware={"memory_gb": 6.0, "device": "cuda"})
    assert load_model_spec(changed).recipe() == load_model_spec(_write(tmp_path)).recipe()


@pytest.mark.parametrize(
    "changes",
    [
        {"mean": [0.1, 0.2, 0.3]},
        {"std": [0.5, 0.6, 0.7]},
        {"resize": 256, "crop": 224},
        {"interpolation": "bicubic"},
        {"antialias": False},
        {"color_space": "BGR"},
        {"stain_normalization": "macenko"},
        {"graph": {"input_name": "x", "output_names": ["y"], "dtype": "float32"}},
    ],
)
def test_whatever_is_done_to_pixels_changes_the_preprocessing_digest(
    tmp_path: Path, changes: dict[str, object]
) -> None:
    plain = load_model_spec(_write(tmp_path))
    changed = load_model_spec(_write(tmp_path, **changes))
    assert changed.preprocessing_sha256 != plain.preprocessing_sha256
    assert changed.recipe() != plain.recipe()
    other = load_model_spec(_write(tmp_path, version="9", precision="bf16", prediction_names=["c"]))
    assert other.preprocessing_sha256 == plain.preprocessing_sha256


def test_the_configuration_that_clients_see_has_no_long_lists_of_names(tmp_path: Path) -> None:
    found = load_model_spec(_write(tmp_path, omics=OMICS | {"genes": ["x", "y", "z"]})).config()
    assert found["omics"] == OMICS
    assert "prediction_names" not in found
    assert found["output_type"] == "prediction"


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
        ({"prediction_dim": 3}, "prediction_dim is 3 for 2 names"),
        ({"prediction_dim": 0}, "prediction_dim: "),
        ({"mean": [0.5]}, "mean has 1 values for 3 channels"),
        ({"std": [0.5, 0.5, 0.5, 0.5]}, "std has 4 values for 3 channels"),
        ({"std": [0.5, 0.0, 0.5]}, "std must be above 0"),
        ({"crop": 225}, r"crop 225 is larger than what it is cut from \(224\)"),
        ({"resize": 200, "crop": 201}, r"crop 201 is larger than what it is cut from \(200\)"),
        ({"access": "secret"}, "access: "),
        ({"pooling": "max"}, "pooling: "),
        ({"precision": "int8"}, "precision: "),
        ({"hardware": {"memory_gb": 0}}, r"hardware\.memory_gb: "),
        ({"hardware": {"device": "tpu"}}, r"hardware\.device: "),
        ({"omics": {"rna_unit": "tpm"}}, r"omics\.n_genes: Field required"),
        ({"omics": OMICS | {"rna_unit": "fpkm"}}, r"omics\.rna_unit: "),
        ({"omics": OMICS | {"n_genes": 0}}, r"omics\.n_genes: "),
        ({"omics": OMICS | {"genes": ["x", "y"]}}, "omics: 2 genes are named, n_genes is 3"),
        ({"omics": OMICS | {"genes": ["x", "y", "x"]}}, "omics: the same gene is named twice"),
        ({"omics": OMICS | {"transform": "log2"}}, r"omics\.transform: "),
        ({"omics": OMICS | {"tpm_share": 1.1}}, r"omics\.tpm_share: "),
        ({"omics": OMICS | {"tpm_share": 0}}, r"omics\.tpm_share: "),
        (
            {"omics": OMICS | {"rna_unit": "counts", "tpm_share": 0.9}},
            "omics: tpm_share is for tpm, rna_unit is counts",
        ),
        (
            {"omics": OMICS | {"output_transform": "expm1"}, "output_type": "embedding", "embedding_dim": 2},
            "omics: output_transform is for a prediction, output_type is embedding",
        ),
        ({"mask": {"size": 0}}, r"mask\.size: "),
        ({"mask": {"size": 100}}, "a mask of 100 px does not divide a tile of 224 px"),
        ({"mask": {"size": 112, "threshold": 1.5}}, r"mask\.threshold: "),
        ({"mask": {"size": 112, "values": "logit"}}, r"mask\.values: "),
        (
            {"mask": {"size": 112, "values": "softmax_logit"}, "prediction_names": ["a"]},
            "softmax_logit of a single plane: say sigmoid_logit",
        ),
        (
            {"mask": {"size": 112}, "prediction_names": None, "prediction_dim": 257},
            "a mask has at most 256 classes, not 257",
        ),
        (
            {"mask": {"size": 112}, "output_type": "embedding", "embedding_dim": 2},
            "a mask is a prediction, output_type is embedding",
        ),
        ({"head": {"backbone": "h0"}}, r"head\.embedding_dim: Field required"),
        ({"head": {"backbone": "h0", "embedding_dim": 4}}, r"head\.backbone_weights_sha256: Field required"),
        ({"head": HEAD | {"backbone": "../h0"}}, r"head\.backbone: "),
        ({"head": HEAD | {"backbone_weights_sha256": "ab"}}, r"head\.backbone_weights_sha256: "),
        (
            {"head": HEAD, "output_type": "prediction_with_embedding", "embedding_dim": 4},
            "a head gives a prediction, output_type is prediction_with_embedding",
        ),
        ({"head": HEAD, "omics": OMICS}, "omics and head cannot be combined"),
        ({"mask": {"size": 112}, "omics": OMICS}, "mask and omics cannot be combined"),
        ({"graph": {"input_name": "x", "output_names": []}}, "graph names 0 outputs, the model has 1"),
        ({"graph": {"input_name": "x", "output_names": ["y", "z"]}}, "graph names 2 outputs, the model has 1"),
        ({"graph": {"input_name": "x", "output_names": ["x"]}}, "graph: the same name is given twice"),
        ({"graph": {"input_name": "x", "output_names": ["y"], "layout": "CHWN"}}, r"graph\.layout: "),
        ({"graph": {"input_name": "x", "output_names": ["y"], "dtype": "int8"}}, r"graph\.dtype: "),
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
