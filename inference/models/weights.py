"""State dicts from local files, and the names that other libraries give to the same tensors."""

import re
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from inference.errors import ConfigError
from inference.models.regular_files import open_regular

State = dict[str, Tensor]

SAFETENSORS = (".safetensors",)
PICKLED = (".pt", ".pth", ".bin", ".torch", ".ckpt")

_WRAPPERS = ("state_dict", "model", "teacher")
_PREFIXES = ("module.", "_orig_mod.", "backbone.", "model.")

_QKV = ("query", "key", "value")


def local_file(path: Path) -> Path:
    """The file that a user's own argument leads to: download caches hand out links.

    Raises:
        ConfigError: there is none.
    """
    found = path.resolve()
    if not found.is_file():
        raise ConfigError(f"no file {path}")
    return found


def load_state(path: Path) -> State:
    """The tensors of a safetensors file, or of a torch file without any other object in it, on the CPU.

    A dictionary around the tensors (`state_dict`, `model`, `teacher`) and a prefix that all names share are taken off.

    Raises:
        ConfigError: no such file, another kind of file, or a torch file that holds more than tensors.
    """
    if path.suffix in SAFETENSORS:
        found = _load_safetensors(path)
    elif path.suffix in PICKLED:
        found = _load_torch(path)
    else:
        kinds = ", ".join(SAFETENSORS + PICKLED)
        raise ConfigError(f"{path.name} is no weights file: give one of {kinds}, safetensors where there is a choice")
    return _unwrapped(found, path.name)


def _load_safetensors(path: Path) -> object:
    try:
        from safetensors import SafetensorError
        from safetensors.torch import load_file
    except ImportError:
        raise ConfigError("reading .safetensors needs another package: pip install 'slide-inference[export]'") from None
    with open_regular(path):
        pass
    try:
        return load_file(path)
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"{path.name} is not a safetensors file: {error}") from None


def _load_torch(path: Path) -> object:
    with open_regular(path) as stream:
        try:
            return torch.load(stream, map_location="cpu", weights_only=True)
        except Exception as error:  # noqa: BLE001 - a hostile or broken file raises anything
            reason = " ".join(str(error).split())[:200]
            raise ConfigError(
                f"{path.name} is not a file of tensors alone ({reason}); objects in it could run code, so it is not "
                "loaded: save its state_dict, or convert it to safetensors"
            ) from None


def _unwrapped(found: object, name: str) -> State:
    for _ in range(3):
        if isinstance(found, Mapping) and not all(isinstance(value, Tensor) for value in found.values()):
            inner = next((found[key] for key in _WRAPPERS if isinstance(found.get(key), Mapping)), None)
            if inner is None:
                break
            found = inner
    if not isinstance(found, Mapping) or not found or not all(isinstance(value, Tensor) for value in found.values()):
        raise ConfigError(f"{name} holds no state_dict: names and tensors, or a dictionary with one as 'state_dict'")
    state = {str(key): value for key, value in found.items()}
    for prefix in _PREFIXES:
        if all(key.startswith(prefix) for key in state):
            state = {key.removeprefix(prefix): value for key, value in state.items()}
    return state


def to_timm(state: State) -> State:
    """Names of a vision transformer as timm has them, from those of transformers' ViT and DINOv2 and of DINOv2 itself.

    Query, key and value become one tensor. Where there are registers, DINOv2 adds a position to the class token, timm's
    network does not: it is added here once. What only training needs (mask token) is dropped.
    """
    if any(key.startswith("embeddings.") for key in state):
        state = _from_transformers(state)
    if "register_tokens" in state:
        state["reg_token"] = state.pop("register_tokens")
        state["cls_token"] = state["cls_token"] + state["pos_embed"][:, :1]
        state["pos_embed"] = state["pos_embed"][:, 1:]
    # Two spellings of the gated MLP, and blocks that were stored in chunks for training.
    renamed = {_in_blocks(key).replace(".mlp.w12.", ".mlp.fc1.").replace(".mlp.w3.", ".mlp.fc2."): value
               for key, value in state.items()}  # fmt: skip
    return {key: value for key, value in renamed.items() if key != "mask_token"}


def _in_blocks(key: str) -> str:
    return re.sub(r"^blocks\.\d+\.(\d+)\.", r"blocks.\1.", key)


_TRANSFORMERS = {
    "embeddings.cls_token": "cls_token",
    "embeddings.mask_token": "mask_token",
    "embeddings.register_tokens": "register_tokens",
    "embeddings.position_embeddings": "pos_embed",
    "embeddings.patch_embeddings.projection.": "patch_embed.proj.",
    "layernorm.": "norm.",
}

_LAYER = {
    "attention.output.dense.": "attn.proj.",
    "layer_scale1.lambda1": "ls1.gamma",
    "layer_scale2.lambda1": "ls2.gamma",
    "layernorm_before.": "norm1.",
    "layernorm_after.": "norm2.",
    "intermediate.dense.": "mlp.fc1.",
    "output.dense.": "mlp.fc2.",
    "mlp.weights_in.": "mlp.fc1.",
    "mlp.weights_out.": "mlp.fc2.",
}


def _from_transformers(state: State) -> State:
    found: State = {}
    parts: dict[str, dict[str, Tensor]] = {}
    for key, value in state.items():
        layer = re.match(r"encoder\.layer\.(\d+)\.(.*)", key)
        if layer is None:
            found[_renamed(key, _TRANSFORMERS)] = value
            continue
        block, rest = f"blocks.{layer[1]}.", layer[2]
        attention = re.match(r"attention\.attention\.(query|key|value)\.(weight|bias)$", rest)
        if attention is None:
            found[block + _renamed(rest, _LAYER)] = value
        else:
            parts.setdefault(f"{block}attn.qkv.{attention[2]}", {})[attention[1]] = value
    for key, three in parts.items():
        if set(three) == set(_QKV):
            found[key] = torch.cat([three[name] for name in _QKV])
    return {key: value for key, value in found.items() if not key.startswith("pooler.")}


def _renamed(key: str, names: Mapping[str, str]) -> str:
    for old, new in names.items():
        if key == old or (old.endswith(".") and key.startswith(old)):
            return new + key.removeprefix(old)
    return key


def to_torchvision_mobilenet(state: State) -> State:
    """Names of a MobileNetV2's features as torchvision nests them, from the flat `conv.N` of the original port.

    There a block is convolution, norm, ReLU in a row, so N counts the ReLUs, which torchvision puts into groups.
    """
    return {_nested(key, state): value for key, value in state.items() if key.startswith("features.")}


def _nested(key: str, state: State) -> str:
    block = re.match(r"features\.(\d+)\.conv\.(\d+)\.(weight|bias|running_mean|running_var|num_batches_tracked)$", key)
    if block is None:
        return key.removeprefix("features.")
    expands = f"features.{block[1]}.conv.7.weight" in state
    places = {0: "0.0", 1: "0.1"} | ({3: "1.0", 4: "1.1", 6: "2", 7: "3"} if expands else {3: "1", 4: "2"})
    return f"{block[1]}.conv.{places.get(int(block[2]), block[2])}.{block[3]}"


REMAPS: dict[str, Callable[[State], State]] = {"timm": to_timm, "torchvision/mobilenet_v2": to_torchvision_mobilenet}
"""By what builds the network."""
