"""A spec's network, with all that is done to a tile's pixels before it and to its tokens after it, as one module."""

import hashlib
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from inference.errors import ConfigError
from inference.models.spec import ModelSpec
from inference.models.weights import REMAPS, State, load_state

MOBILENET_V2 = "torchvision/mobilenet_v2"

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

_NEEDS_EXPORT = "building a network needs further packages: pip install 'slide-inference[export]'"


class TileNet(nn.Module):
    """uint8 tiles (B, C, H, W) -> float32 embedding (B, D), everything in between as the spec says.

    The network runs in the spec's precision; resizing, normalisation and pooling are done in float32.
    """

    mean: Tensor
    std: Tensor

    def __init__(self, spec: ModelSpec, network: nn.Module) -> None:
        super().__init__()
        mean, std = constants(spec)
        self.register_buffer("mean", torch.tensor(mean).view(1, -1, 1, 1))
        self.register_buffer("std", torch.tensor(std).view(1, -1, 1, 1))
        self.dtype = DTYPES[spec.precision]
        self.network = network.to(self.dtype)
        self._size, self._resize, self._crop = spec.tile_spec.size, spec.resize, spec.crop
        self._mode, self._antialias = spec.interpolation, spec.antialias
        self._bgr = spec.color_space == "BGR"
        self._pool = _pooling(spec)

    def forward(self, image: Tensor) -> Tensor:
        pixels = image.to(torch.float32)
        if self._bgr:
            pixels = pixels.flip(1)
        if self._resize not in (None, self._size):
            side = (self._resize, self._resize)
            pixels = F.interpolate(pixels, size=side, mode=self._mode, antialias=self._antialias, align_corners=False)
            pixels = pixels.clamp(0, 255)  # bicubic overshoots
        if self._crop is not None:
            edge = ((self._resize or self._size) - self._crop) // 2
            pixels = pixels[:, :, edge : edge + self._crop, edge : edge + self._crop]
        normal = (pixels / 255 - self.mean) / self.std
        return self._pool(self.network(normal.to(self.dtype)).to(torch.float32))


class _Tokens(nn.Module):
    """A timm vision transformer up to its normalised tokens, (B, prefix + patches, D)."""

    def __init__(self, vit: nn.Module) -> None:
        super().__init__()
        self.vit = vit

    def forward(self, pixels: Tensor) -> Tensor:
        tokens: Tensor = self.vit.forward_features(pixels)  # type: ignore[operator]
        return tokens


def constants(spec: ModelSpec) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation per channel.

    Raises:
        ConfigError: they are not published.
    """
    if spec.mean is None or spec.std is None:
        raise ConfigError(
            f"{spec.model_name}: mean and std are not published, so it cannot be exported; use a checkpoint whose "
            "manifest has them, or give a spec file that does"
        )
    return spec.mean, spec.std


def build_tile_net(spec: ModelSpec, state: State | None = None) -> TileNet:
    """The spec's module, ready to be exported.

    Args:
        state: its weights; None for reproducible random ones.

    Raises:
        ConfigError: a spec that no network can be built from, or weights that are not this network's.
    """
    _refuse_what_needs_the_slide(spec)
    constants(spec)
    _pooling(spec)
    if state is None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            network = _make(spec)
        _wake_layer_scales(network)
    else:
        with torch.device("meta"):  # no memory and no time for weights that are replaced at once
            network = _make(spec)
        _fill(network, spec, state)
    return TileNet(spec, network).eval()


def read_weights(spec: ModelSpec, path: Path) -> State:
    """The weights in a local file, under the names that the spec's network has.

    Raises:
        ConfigError: as `load_state`.
    """
    return REMAPS[MOBILENET_V2 if spec.architecture == MOBILENET_V2 else "timm"](load_state(path))


def source_sha256() -> str:
    """Digest of the code that defines the modules: this file and the libraries that it builds them with."""
    digest = hashlib.sha256(Path(__file__).read_bytes())
    for name in ("timm", "torchvision"):
        digest.update(f"{name}=={version(name)};".encode())
    return digest.hexdigest()


def _make(spec: ModelSpec) -> nn.Module:
    if spec.architecture == MOBILENET_V2:
        return _mobilenet(spec)
    return _Tokens(_vision_transformer(spec))


def _mobilenet(spec: ModelSpec) -> nn.Module:
    try:
        from torchvision.models import mobilenet_v2
    except ImportError:
        raise ConfigError(_NEEDS_EXPORT) from None
    if spec.architecture_args:
        raise ConfigError(f"{spec.model_name}: {MOBILENET_V2} takes no architecture_args")
    features: nn.Module = mobilenet_v2(weights=None).features
    return features


def _vision_transformer(spec: ModelSpec) -> nn.Module:
    try:
        import timm
    except ImportError:
        raise ConfigError(_NEEDS_EXPORT) from None
    name = spec.architecture
    if not timm.is_model(name):
        raise ConfigError(f"{spec.model_name}: timm {version('timm')} knows no network {name!r}")
    side = spec.crop or spec.resize or spec.tile_spec.size
    try:
        vit: nn.Module = timm.create_model(
            name, pretrained=False, num_classes=0, global_pool="", img_size=side, **_arguments(spec)
        )
    except (TypeError, AssertionError, RuntimeError, ValueError) as error:
        raise ConfigError(f"{spec.model_name}: timm cannot build {name}: {' '.join(str(error).split())}") from None
    _check_against_spec(spec, vit)
    return vit


def _arguments(spec: ModelSpec) -> dict[str, object]:
    """The spec's arguments for timm, classes by name: only these few, for a YAML file must not name code."""
    from timm.layers import SwiGLUPacked

    classes: dict[str, type[nn.Module]] = {"SwiGLUPacked": SwiGLUPacked, "SiLU": nn.SiLU, "GELU": nn.GELU}
    found: dict[str, object] = {}
    for key, value in spec.architecture_args.items():
        if key in {"mlp_layer", "act_layer"}:
            if value not in classes:
                raise ConfigError(f"{spec.model_name}: {key} is {value!r}, known are {', '.join(classes)}")
            found[key] = classes[str(value)]
        elif isinstance(value, bool | int | float):
            found[key] = value
        else:
            raise ConfigError(f"{spec.model_name}: architecture_args.{key} is no number")
    if spec.patch_size is not None:
        found.setdefault("patch_size", spec.patch_size)
    return found


def _check_against_spec(spec: ModelSpec, vit: nn.Module) -> None:
    """Refuse a spec that says one thing in its fields and another through its network."""
    size = vit.get_submodule("patch_embed").patch_size
    width = vit.embed_dim
    assert isinstance(size, tuple)
    assert isinstance(width, int)
    parts = 2 if spec.pooling == "class_token_and_patch_mean" else 1
    for what, declared, found in (
        ("patch_size", spec.patch_size, size[0]),
        ("num_prefix_tokens", spec.num_prefix_tokens, vit.num_prefix_tokens),
        ("embedding_dim", spec.embedding_dim, parts * width),
    ):
        if declared != found:
            raise ConfigError(f"{spec.model_name}: {what} is {declared}, its network {spec.architecture} has {found}")


def _fill(network: nn.Module, spec: ModelSpec, state: State) -> None:
    inner = network.vit if isinstance(network, _Tokens) else network
    assert isinstance(inner, nn.Module)
    wanted = {key: value.shape for key, value in inner.state_dict().items()}
    wrong = [f"{key} is missing" for key in wanted if key not in state]
    wrong += [f"{key} is not of this network" for key in state if key not in wanted]
    wrong += [f"{key} is {tuple(state[key].shape)}, not {tuple(shape)}" for key, shape in wanted.items()
              if key in state and state[key].shape != shape]  # fmt: skip
    if wrong:
        more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        raise ConfigError(
            f"these are not the weights of {spec.model_name} ({spec.architecture}): {'; '.join(wrong[:3])}{more}"
        )
    # Floats in one type: released weights are often stored in half precision, and the export decides its own.
    as_float = {key: value.float() if value.is_floating_point() else value for key, value in state.items()}
    inner.load_state_dict(as_float, strict=True, assign=True)
    inner.requires_grad_(False)


def _wake_layer_scales(network: nn.Module) -> None:
    """Random weights with layer scales of 1e-5 would let nothing through, and a test of them see nothing."""
    for name, parameter in network.named_parameters():
        if name.endswith(".gamma"):
            nn.init.constant_(parameter, 0.5)
    network.requires_grad_(False)


def _pooling(spec: ModelSpec) -> Callable[[Tensor], Tensor]:
    if spec.architecture == MOBILENET_V2:
        return _map_mean
    prefix = spec.num_prefix_tokens or 0
    if spec.pooling == "class_token":
        return _class_token
    if spec.pooling == "patch_mean":
        return lambda tokens: tokens[:, prefix:].mean(dim=1)
    if spec.pooling == "class_token_and_patch_mean":
        return lambda tokens: torch.cat((tokens[:, 0], tokens[:, prefix:].mean(dim=1)), dim=1)
    raise ConfigError(f"{spec.model_name}: pooling is none, which gives no embedding: say how its tokens become one")


def _map_mean(features: Tensor) -> Tensor:
    return features.mean(dim=(2, 3))


def _class_token(tokens: Tensor) -> Tensor:
    return tokens[:, 0]


def _refuse_what_needs_the_slide(spec: ModelSpec) -> None:
    if spec.architecture == "unpublished":
        raise ConfigError(
            f"{spec.model_name}: its network is not published, so it cannot be exported; a checkpoint of it is used "
            "as it is: put it and its manifest into a folder of SLIDE_MODELS"
        )
    if spec.color_space == "HED" or spec.stain_normalization != "none":
        raise ConfigError(
            f"{spec.model_name}: stain separation and normalisation need statistics of the whole slide, which a graph "
            "of single tiles has not; export it with color_space RGB and stain_normalization none"
        )
    if spec.mask is not None or spec.omics is not None or spec.head is not None or spec.output_type != "embedding":
        raise ConfigError(
            f"{spec.model_name}: only networks that embed tiles are built here; bring others as .onnx or .pt2 with "
            "slide-inference import"
        )
