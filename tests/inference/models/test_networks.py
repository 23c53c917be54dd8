"""From a spec and a weights file to one module: what it does to pixels, tokens and names."""

import pickle
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from safetensors.torch import save_file
from torch import Tensor, nn
from torchvision import transforms

from inference.errors import ArtifactRefused, ConfigError
from inference.models.networks import TileNet, build_tile_net, read_weights
from inference.models.spec import ModelSpec, load_model_spec
from inference.models.weights import load_state, to_timm

SMALL: dict[str, object] = {
    "model_name": "small", "version": "1", "weights_source": "none", "license": "Apache-2.0",
    "tile_spec": {"size": 28, "stride": 28, "resolution": 1.0}, "architecture": "vit_small_patch14_reg4_dinov2",
    "architecture_args": {"embed_dim": 24, "depth": 2, "num_heads": 2}, "patch_size": 14, "num_prefix_tokens": 5,
    "pooling": "class_token_and_patch_mean", "embedding_dim": 48,
    "mean": (0.7, 0.5, 0.6), "std": (0.2, 0.25, 0.3),
}  # fmt: skip


def small(**changes: object) -> ModelSpec:
    return ModelSpec.model_validate(SMALL | changes)


class _Pixels(nn.Module):
    """Hands the normalised pixels through as the first two of its tokens."""

    def forward(self, pixels: Tensor) -> Tensor:
        return pixels.flatten(1)[:, None]


def _tile(side: int = 28) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    return np.random.default_rng(0).integers(0, 256, (side, side, 3), dtype=np.uint8)


def _normalised(spec: ModelSpec, tile: np.ndarray[tuple[int, ...], np.dtype[np.uint8]]) -> Tensor:
    net = TileNet(spec.model_copy(update={"pooling": "class_token"}), _Pixels())
    found: Tensor = net(torch.from_numpy(tile.transpose(2, 0, 1).copy())[None])
    return found[0]


def test_pixels_are_normalised_as_torchvision_does_it() -> None:
    tile = _tile()
    expected = transforms.Compose([transforms.ToTensor(), transforms.Normalize((0.7, 0.5, 0.6), (0.2, 0.25, 0.3))])(
        tile
    )
    torch.testing.assert_close(_normalised(small(), tile), expected.flatten())


def test_channels_are_turned_round_for_a_network_that_wants_blue_first() -> None:
    tile = _tile()
    turned = _normalised(small(color_space="BGR"), tile)
    torch.testing.assert_close(turned, _normalised(small(), tile[:, :, ::-1]))


@pytest.mark.parametrize("side", [20, 32, 64])
def test_a_resize_and_crop_in_the_graph_are_those_of_an_image_library(side: int) -> None:
    # Pillow rounds to whole values after each of its two passes, the graph does not.
    tile = np.asarray(Image.fromarray(_tile(8)).resize((side, side), Image.Resampling.BICUBIC))
    spec = small(tile_spec={"size": side, "stride": side, "resolution": 1.0}, resize=32, crop=28,
                 interpolation="bicubic", mean=(0, 0, 0), std=(1, 1, 1))  # fmt: skip
    steps = [transforms.Resize(32, transforms.InterpolationMode.BICUBIC), transforms.CenterCrop(28)]
    expected = transforms.Compose([*steps, transforms.ToTensor()])(Image.fromarray(tile))
    torch.testing.assert_close(_normalised(spec, tile), expected.flatten(), atol=2.01 / 255, rtol=0)


def test_a_tile_that_has_the_size_already_is_only_cropped() -> None:
    spec = small(tile_spec={"size": 32, "stride": 32, "resolution": 1.0}, resize=32, crop=28, interpolation="bicubic",
                 mean=(0, 0, 0), std=(1, 1, 1))  # fmt: skip
    tile = _tile(32)
    torch.testing.assert_close(_normalised(spec, tile), transforms.ToTensor()(tile[2:30, 2:30].copy()).flatten())


@pytest.mark.parametrize(
    ("pooling", "width", "of"),
    [
        ("class_token", 24, lambda tokens: tokens[:, 0]),
        ("patch_mean", 24, lambda tokens: tokens[:, 5:].mean(1)),
        ("class_token_and_patch_mean", 48, lambda tokens: torch.cat((tokens[:, 0], tokens[:, 5:].mean(1)), 1)),
    ],
)
def test_registers_are_part_of_no_pooling(pooling: str, width: int, of: Callable[[Tensor], Tensor]) -> None:
    net = build_tile_net(small(pooling=pooling, embedding_dim=width))
    image = torch.randint(0, 256, (3, 3, 28, 28), dtype=torch.uint8)
    with torch.inference_mode():
        tokens = net.network((image / 255 - net.mean) / net.std)
        assert tokens.shape == (3, 9, 24)
        torch.testing.assert_close(net(image), of(tokens))


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_in_half_precision_the_network_is_halved_and_the_embedding_is_not(precision: str) -> None:
    image = torch.randint(0, 256, (2, 3, 28, 28), dtype=torch.uint8)
    whole, half = build_tile_net(small()), build_tile_net(small(precision=precision))
    assert next(half.network.parameters()).dtype.itemsize == 2
    with torch.inference_mode():
        one, other = whole(image), half(image)
    assert other.dtype == torch.float32
    assert 0 < (one - other).abs().max() < 0.1


def test_random_weights_are_the_same_each_time_and_leave_torchs_numbers_alone() -> None:
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    one, other = build_tile_net(small()), build_tile_net(small())
    assert torch.equal(torch.rand(1), expected)
    for first, second in zip(one.state_dict().values(), other.state_dict().values(), strict=True):
        assert torch.equal(first, second)


# Weights.


def _state(spec: ModelSpec) -> dict[str, Tensor]:
    """Weights of its own network, none of them zero."""
    vit = build_tile_net(spec).network.vit
    assert isinstance(vit, nn.Module)
    source = torch.Generator().manual_seed(1)
    return {name: torch.randn(value.shape, generator=source) * 0.1 for name, value in vit.state_dict().items()}


def _embed(spec: ModelSpec, state: dict[str, Tensor]) -> Tensor:
    with torch.inference_mode():
        found: Tensor = build_tile_net(spec, state)(torch.arange(3 * 28 * 28).view(1, 3, 28, 28).to(torch.uint8))
    return found


def _as_transformers(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """The names of transformers' DINOv2 with registers, whose class token has a position of its own."""
    found = {"embeddings.mask_token": torch.ones(1, 24), "embeddings.register_tokens": state["reg_token"]}
    place = torch.randn(1, 1, 24, generator=torch.Generator().manual_seed(2))
    found["embeddings.cls_token"] = state["cls_token"] - place
    found["embeddings.position_embeddings"] = torch.cat((place, state["pos_embed"]), 1)
    plain = {"patch_embed.proj": "embeddings.patch_embeddings.projection", "norm": "layernorm"}
    inner = {"attn.proj": "attention.output.dense", "ls1.gamma": "layer_scale1.lambda1",
             "ls2.gamma": "layer_scale2.lambda1"}  # fmt: skip
    for name, value in state.items():
        parts = name.split(".")
        if parts[0] == "blocks":
            prefix, rest = f"encoder.layer.{parts[1]}.", ".".join(parts[2:])
            if rest.startswith("attn.qkv"):
                for part, third in zip(("query", "key", "value"), value.chunk(3), strict=True):
                    found[f"{prefix}attention.attention.{part}.{parts[-1]}"] = third
                continue
            for old, new in inner.items():
                rest = rest.replace(old, new)
            found[prefix + rest] = value
        for old, new in plain.items():
            if name.startswith(f"{old}."):
                found[name.replace(old, new, 1)] = value
    return found


def test_weights_under_transformers_names_are_the_same_network() -> None:
    state = _state(small())
    expected = _embed(small(), state)
    torch.testing.assert_close(_embed(small(), to_timm(_as_transformers(state))), expected, atol=1e-5, rtol=1e-5)


def test_weights_under_dinov2s_own_names_are_the_same_network_as_timm_itself_reads_them() -> None:
    spec = small(architecture_args={"embed_dim": 24, "depth": 2, "num_heads": 2, "mlp_layer": "SwiGLUPacked",
                                    "act_layer": "SiLU"})  # fmt: skip
    state = _state(spec)
    place = torch.randn(1, 1, 24, generator=torch.Generator().manual_seed(2))
    theirs = {name.replace("blocks.", "blocks.0.").replace("mlp.fc1", "mlp.w12").replace("mlp.fc2", "mlp.w3"): value
              for name, value in state.items()}  # fmt: skip
    theirs |= {"mask_token": torch.ones(1, 24), "register_tokens": theirs.pop("reg_token")}
    theirs["cls_token"] = theirs["cls_token"] - place
    theirs["pos_embed"] = torch.cat((place, theirs["pos_embed"]), 1)
    found = to_timm(theirs)
    assert set(found) == set(state)
    for name, value in state.items():
        torch.testing.assert_close(found[name], value)


def test_a_plain_transformers_vit_is_read_too() -> None:
    spec = small(architecture="vit_small_patch16_224", num_prefix_tokens=1)
    state = _state(spec)
    names = {"layer_scale": "", "norm1.": "layernorm_before.", "norm2.": "layernorm_after.",
             "mlp.fc1": "intermediate.dense", "mlp.fc2": "output.dense"}  # fmt: skip
    theirs = _as_transformers(state | {"reg_token": torch.zeros(1, 0, 24)})
    theirs = {name: value for name, value in theirs.items() if "register" not in name and "mask" not in name}
    theirs["embeddings.cls_token"] = state["cls_token"]
    theirs["embeddings.position_embeddings"] = state["pos_embed"]
    for old, new in names.items():
        theirs = {name.replace(old, new) if old else name: value for name, value in theirs.items()}
    theirs["pooler.dense.weight"] = torch.zeros(24, 24)
    torch.testing.assert_close(_embed(spec, to_timm(theirs)), _embed(spec, state), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    "store",
    [
        lambda state, path: save_file(state, path.with_suffix(".safetensors")),
        torch.save,
        lambda state, path: torch.save({"epoch": 3, "state_dict": state}, path),
        lambda state, path: torch.save({"teacher": {f"backbone.{k}": v for k, v in state.items()}}, path),
        lambda state, path: torch.save({f"module.{k}": v for k, v in state.items()}, path),
        lambda state, path: torch.save(state, path, _use_new_zipfile_serialization=False),
        lambda state, path: torch.save({k: v.half() for k, v in state.items()}, path),
    ],
    ids=["safetensors", "torch", "state_dict inside", "teacher's backbone", "data parallel", "legacy torch", "half"],
)
def test_weights_are_read_from_the_files_they_come_in(
    tmp_path: Path, store: Callable[[dict[str, Tensor], Path], object]
) -> None:
    state = {name: value.half().float().contiguous() for name, value in _state(small()).items()}
    store(state, tmp_path / "weights.pth")
    (path,) = tmp_path.iterdir()
    assert torch.equal(_embed(small(), read_weights(small(), path)), _embed(small(), state))


class _Marker:
    def __init__(self, proof: Path) -> None:
        self.proof = proof

    def __reduce__(self) -> tuple[object, ...]:
        return (Path.mkdir, (self.proof,))


def test_a_weights_file_with_objects_in_it_is_refused_and_runs_nothing(tmp_path: Path) -> None:
    torch.save({"state_dict": {"a": torch.ones(1)}, "args": _Marker(tmp_path / "ran")}, tmp_path / "w.pt")
    with pytest.raises(ConfigError, match=r"w\.pt is not a file of tensors alone .* convert it to safetensors"):
        load_state(tmp_path / "w.pt")
    (tmp_path / "w.bin").write_bytes(pickle.dumps(_Marker(tmp_path / "ran")))
    with pytest.raises(ConfigError, match=r"w\.bin is not a file of tensors alone"):
        load_state(tmp_path / "w.bin")
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("w.safetensors", b"\x08\0\0\0\0\0\0\0{}      ", "holds no state_dict"),
        ("w.safetensors", b"nothing", "is not a safetensors file"),
        ("w.safetensors", b"\xff" * 100, "is not a safetensors file"),
        ("w.pt", b"nothing", "is not a file of tensors alone"),
        ("w.pkl", b"x", r"is no weights file: give one of \.safetensors"),
        ("w", b"x", "is no weights file"),
    ],
)
def test_what_is_no_weights_file_is_refused_in_one_line(tmp_path: Path, name: str, content: bytes, says: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=says) as raised:
        load_state(tmp_path / name)
    assert "\n" not in raised.value.message


def test_a_weights_file_that_is_not_there_or_a_link_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ArtifactRefused, match="cannot be opened"):
        load_state(tmp_path / "gone.safetensors")
    save_file({"a": torch.ones(1)}, tmp_path / "real.safetensors")
    (tmp_path / "link.safetensors").symlink_to(tmp_path / "real.safetensors")
    with pytest.raises(ArtifactRefused, match="not a link"):
        load_state(tmp_path / "link.safetensors")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda state: state.pop("cls_token"), "cls_token is missing"),
        (lambda state: state.update(head=torch.ones(1)), "head is not of this network"),
        (
            lambda state: state.update(pos_embed=torch.ones(1, 1369, 24)),
            r"pos_embed is \(1, 1369, 24\), not \(1, 4, 24\)",
        ),
    ],
)
def test_weights_of_another_network_are_refused_with_what_differs(
    change: Callable[[dict[str, Tensor]], object], says: str
) -> None:
    state = _state(small())
    change(state)
    with pytest.raises(ConfigError, match=rf"these are not the weights of small .*: {says}$"):
        build_tile_net(small(), state)


def test_a_network_filled_from_a_file_is_timms_own(tmp_path: Path) -> None:
    spec = load_model_spec("kaiko-vits16")
    with torch.random.fork_rng():
        torch.manual_seed(3)
        vit = timm.create_model("vit_small_patch16_224", num_classes=0, depth=2).eval()
    save_file(vit.state_dict(), tmp_path / "w.safetensors")
    spec = spec.model_copy(update={"architecture_args": {"depth": 2}})
    image = torch.randint(0, 256, (2, 3, 224, 224), dtype=torch.uint8)
    with torch.inference_mode():
        expected = vit((image / 255 - 0.5) / 0.5)
        torch.testing.assert_close(
            build_tile_net(spec, read_weights(spec, tmp_path / "w.safetensors"))(image), expected
        )
