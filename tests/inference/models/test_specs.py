"""The specs that come with the library: what they say, and that a network can be built from each."""

import re

import pytest
import torch

from inference.errors import ConfigError
from inference.models.networks import _make, build_tile_net, constants
from inference.models.spec import SPEC_FOLDER, ModelSpec, known_specs, load_model_spec

UNPUBLISHED = {"tissue-seg", "m-optimus"}
NETWORKS = sorted(set(known_specs()) - UNPUBLISHED - {"demo"})

MILLIONS = {
    "h0": 1134.8, "h1": 1134.8, "h0-mini": 85.7, "virchow": 631.2, "virchow2": 631.2, "prov-gigapath": 1134.9,
    "uni": 303.4, "uni2-h": 681.4, "phikon": 85.8, "phikon-v2": 303.4, "hibou-b": 85.7,
    "lunit-vits8": 21.7, "lunit-vits16": 21.7,
}  # fmt: skip
"""Published numbers of parameters; where a card says 1.1 B, 681 M or 632 M, to the digits given there."""


def test_the_models_that_must_be_there_are() -> None:
    wanted = {"h0-mini", "h0", "h1", "virchow2", "prov-gigapath", "uni", "uni2-h", "mobilenetv2", "demo"}
    assert wanted | UNPUBLISHED <= set(known_specs())
    assert len(NETWORKS) >= 12


@pytest.mark.parametrize("name", known_specs())
def test_a_spec_names_its_source_licence_and_gate_in_a_file_of_its_name(name: str) -> None:
    spec = load_model_spec(name)
    text = (SPEC_FOLDER / f"{name}.yaml").read_text(encoding="utf-8")
    comment = "\n".join(line for line in text.splitlines() if line.startswith("#"))
    assert spec.model_name == name
    assert spec.license
    assert spec.weights_source
    assert re.search(r"https://|vendor's public documentation|Anal Quant Cytol", comment)


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("h0-mini", {"num_prefix_tokens": 5, "embedding_dim": 1536, "pooling": "class_token_and_patch_mean"}),
        ("virchow2", {"num_prefix_tokens": 5, "embedding_dim": 2560, "pooling": "class_token_and_patch_mean"}),
        ("prov-gigapath", {"resize": 256, "crop": 224, "interpolation": "bicubic", "embedding_dim": 1536}),
        ("h0", {"mean": (0.707223, 0.578729, 0.703617), "std": (0.211883, 0.230117, 0.177517)}),
        ("m-optimus", {"mean": None, "std": None, "embedding_dim": 1536, "prediction_dim": 6002}),
        ("tissue-seg", {"mean": None, "std": None, "access": "proprietary"}),
    ],
)
def test_the_traps_of_public_examples_are_avoided(name: str, fields: dict[str, object]) -> None:
    spec = load_model_spec(name)
    assert {field: getattr(spec, field) for field in fields} == fields


def test_gigapaths_tile_is_the_one_whose_resize_changes_nothing() -> None:
    spec = load_model_spec("prov-gigapath")
    assert spec.tile_spec.size == spec.resize == 256


@pytest.mark.parametrize("name", sorted(UNPUBLISHED))
def test_what_is_not_published_is_refused_at_export_with_the_way_out(name: str) -> None:
    spec = load_model_spec(name)
    with pytest.raises(ConfigError, match="not published, so it cannot be exported; a checkpoint of it"):
        build_tile_net(spec)
    with pytest.raises(ConfigError, match="mean and std are not published"):
        constants(spec)


@pytest.mark.parametrize("name", sorted(MILLIONS))
def test_the_network_has_the_published_number_of_parameters(name: str) -> None:
    spec = load_model_spec(name)
    with torch.device("meta"):
        network = _make(spec)
    assert sum(p.numel() for p in network.parameters()) / 1e6 == pytest.approx(MILLIONS[name], abs=0.06)


@pytest.mark.parametrize("name", NETWORKS)
def test_a_networks_tokens_and_width_are_those_of_its_spec(name: str) -> None:
    with torch.device("meta"):  # checked while building
        _make(load_model_spec(name))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"num_prefix_tokens": 1}, "num_prefix_tokens is 1, its network .* has 5"),
        ({"embedding_dim": 768}, "embedding_dim is 768, its network .* has 1536"),
        ({"architecture": "vit_huge_patch99"}, "timm .* knows no network 'vit_huge_patch99'"),
        ({"architecture": "../x"}, "knows no network"),
        ({"architecture_args": {"mlp_layer": "os.system"}}, "mlp_layer is 'os.system', known are SwiGLUPacked"),
        ({"architecture_args": {"checkpoint_path": "/etc/passwd"}}, "architecture_args.checkpoint_path is no number"),
        ({"architecture_args": {"no_such_argument": 1}}, "timm cannot build"),
        ({"pooling": "none"}, "pooling is none"),
        ({"color_space": "HED"}, "statistics of the whole slide"),
        ({"stain_normalization": "macenko"}, "statistics of the whole slide"),
        ({"mean": None}, "mean and std are not published"),
        ({"output_type": "prediction", "prediction_dim": 2}, "only networks that embed tiles are built here"),
    ],
)
def test_a_spec_that_contradicts_its_network_is_refused(changes: dict[str, object], says: str) -> None:
    spec = ModelSpec.model_validate(load_model_spec("h0-mini").model_dump() | changes)
    with pytest.raises(ConfigError, match=says):
        build_tile_net(spec, state={})
