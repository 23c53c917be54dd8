"""Attention over a slide's tile embeddings: CLAM and gated-attention networks, for any number of tiles.

Sources of the networks and of the names in their state dicts: M. Ilse et al., https://arxiv.org/abs/1802.04712 with
https://github.com/AMLab-Amsterdam/AttentionDeepMIL; M. Lu et al., https://arxiv.org/abs/2004.09666 with
https://github.com/mahmoodlab/CLAM.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor, nn

from inference.contract import OutputSpec
from inference.errors import BadRequest, ConfigError
from inference.models.artifact import Pin, read_manifest
from inference.models.checkpoint_cache import cached, environment, place_of, with_identity
from inference.models.export import weights_sha256
from inference.models.golden import TOLERANCES, compare, pin_vectors
from inference.models.onnx_runtime import open_session
from inference.models.regular_files import hash_regular_file
from inference.models.runtime import call_program, load_program
from inference.models.spec import MODEL_NAME
from inference.models.tracing import write_graph
from inference.models.verification import verified_copy
from inference.models.weights import State, load_state, local_file

INPUT, OUTPUTS = "embeddings", ("attention", "logits")

_GOLDEN_TILES = 7


class AggregatorSpec(BaseModel):
    """What an aggregator takes and gives: float32 embeddings (N, `embedding_dim`) of one slide, any N from 1 up ->
    attention (N, `n_branches`), which sums to 1 over the tiles, and slide logits (`n_classes`,).

    Attributes:
        architecture: `clam-sb` and `abmil` have one attention for all classes, `clam-mb` one for each.
        gated: whether the attention has a sigmoid gate beside its tanh.
        values: whether the logits are of a softmax over the classes, or of a sigmoid each.
        backbone: `model_name` of the tile model whose embeddings it was trained on, where that is known.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())

    model_name: Annotated[str, Field(pattern=MODEL_NAME)]
    version: str = "1"
    weights_source: str
    license: str = "unknown"
    architecture: Literal["clam-sb", "clam-mb", "abmil"]
    gated: bool
    embedding_dim: Annotated[int, Field(gt=0)]
    n_branches: Annotated[int, Field(gt=0)]
    n_classes: Annotated[int, Field(gt=0)]
    class_names: tuple[str, ...] = ()
    values: Literal["softmax_logit", "sigmoid_logit"]
    backbone: Annotated[str, Field(pattern=MODEL_NAME)] | None = None

    @property
    def outputs(self) -> tuple[OutputSpec, ...]:
        """The graph's outputs, in order; the first axis of `attention` is the tiles'."""
        return (
            OutputSpec(name="attention", shape=(self.n_branches,)),
            OutputSpec(name="logits", shape=(self.n_classes,), components=self.class_names),
        )


class AggregatorManifest(Pin):
    """Pins an aggregator."""

    KIND = "slide aggregator"

    kind: Literal["slide aggregator"] = "slide aggregator"
    spec: AggregatorSpec

    @property
    def model_name(self) -> str:
        """The name in its spec."""
        return self.spec.model_name


class AttentionPool(nn.Module):
    """Embeddings (N, D) -> attention (N, K) and logits (C,)."""

    def __init__(
        self, first: nn.Module, tanh: nn.Linear, gate: nn.Linear | None, score: nn.Linear, classify: nn.Linear,
        per_class: bool,
    ) -> None:  # fmt: skip
        super().__init__()
        self.first, self.tanh, self.gate, self.score, self.classify = first, tanh, gate, score, classify
        self._per_class = per_class

    def forward(self, embeddings: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.first(embeddings)
        scores = torch.tanh(self.tanh(hidden))
        if self.gate is not None:
            scores = scores * torch.sigmoid(self.gate(hidden))
        attention = torch.softmax(self.score(scores), dim=0)
        pooled = attention.T @ hidden
        if self._per_class:
            return attention, (self.classify.weight * pooled).sum(dim=1) + self.classify.bias
        return attention, self.classify(pooled.flatten())


@dataclass(frozen=True)
class AggregatorOutput:
    """What an aggregator says of one slide.

    Attributes:
        attention: float32 (N, K); each column sums to 1.
        logits: float32 (C,).
    """

    attention: NDArray[np.float32]
    logits: NDArray[np.float32]


def export_aggregator(
    weights: Path, folder: Path, *, model_name: str = "abmil", device: str = "cpu", form: str = "portable",
    backbone: str | None = None, class_names: tuple[str, ...] = (), license: str = "unknown",  # noqa: A002 - the field's name
) -> Path:  # fmt: skip
    """Export the attention network in a local state dict and compare the result with it.

    Raises:
        ConfigError: a state dict of another network, or class names of another number.
        ArtifactRefused: the export returns something else than the network.
    """
    from inference.models.conversion import FORMATS

    if form not in FORMATS:
        raise ConfigError(f"{form!r} is no format: give {', '.join(FORMATS)}")
    name, weights = weights.name, local_file(weights)
    net, spec = read_aggregator(load_state(weights), model_name=model_name, weights_source=name)
    if class_names and len(class_names) != spec.n_classes:
        raise ConfigError(f"{len(class_names)} class names for {spec.n_classes} classes")
    spec = AggregatorSpec.model_validate(
        spec.model_dump() | {"class_names": class_names, "backbone": backbone, "license": license}
    )
    kind = FORMATS[form]
    pinned = with_identity(AggregatorManifest(
        file="", size=0, sha256="0" * 64, format=kind, device=device, spec=spec, weights_sha256=weights_sha256(net),
        weights_file_sha256=hash_regular_file(weights)[1], source_sha256=hash_regular_file(Path(__file__))[1],
        **environment(kind, device),
    ))  # fmt: skip

    def build(path: Path) -> AggregatorManifest:
        tiles = torch.export.Dim("tiles", min=1)
        example = (torch.zeros((5, spec.embedding_dim), device=device),)
        reference = _eager(net, spec)  # before the network moves
        program = torch.export.export(net.to(device), example, dynamic_shapes=({0: tiles},))
        data = write_graph(program, path, kind, (INPUT,), OUTPUTS)
        size, digest = hash_regular_file(path)
        made = pinned.model_copy(update={"file": path.name, "size": size, "sha256": digest, "data_files": data})
        made = made.model_copy(update={"golden": pin_vectors(path, reference, TOLERANCES["fp32"])})
        SlideAggregator(path, made, device)
        return made

    return cached(place_of(folder, model_name, kind, pinned.identity, model_name), pinned, build)


class SlideAggregator:
    """A loaded aggregator. Calls may come from any thread, but one at a time.

    Raises:
        ArtifactRefused: the checkpoint is not what its manifest pins, or returns something else than its network.
        ConfigError: this machine has no such device.
    """

    def __init__(self, checkpoint: Path, manifest: AggregatorManifest | None = None, device: str = "cpu") -> None:
        self.manifest = manifest or read_manifest(checkpoint, AggregatorManifest)
        self.spec, self.device = self.manifest.spec, device
        self._call = self._loaded(checkpoint)
        vectors = self.run(_golden_embeddings(self.spec))
        compare(checkpoint, self.manifest, {"attention": vectors.attention, "logits": vectors.logits})

    def run(self, embeddings: NDArray[np.float32]) -> AggregatorOutput:
        """Attention and logits of one slide.

        Raises:
            BadRequest: not float32 (N, D) with N of 1 or more, or a value is not finite.
        """
        width = self.spec.embedding_dim
        if (
            embeddings.ndim != 2
            or not len(embeddings)
            or embeddings.shape[1] != width
            or embeddings.dtype != np.float32
        ):
            raise BadRequest(
                f"{self.spec.model_name} takes float32 embeddings of (tiles, {width}), not {embeddings.dtype} "
                f"{embeddings.shape}"
            )
        if not np.isfinite(embeddings).all():
            raise BadRequest("an embedding has NaN or infinity: leave failed tiles out")
        attention, logits = self._call(np.ascontiguousarray(embeddings))
        return AggregatorOutput(attention, logits)

    def _loaded(self, checkpoint: Path) -> Callable[[NDArray[np.float32]], list[NDArray[np.float32]]]:
        if self.manifest.format == "onnx":
            with verified_copy(checkpoint, self.manifest, self.device) as private:
                session = open_session(private, checkpoint.name, self.device)
            return lambda array: [np.asarray(found, np.float32) for found in session.run(list(OUTPUTS), {INPUT: array})]
        program = load_program(checkpoint, self.manifest, self.device)
        return lambda array: call_program(program, (array,), self.device)


def read_aggregator(
    state: State, *, model_name: str = "abmil", weights_source: str = "unknown"
) -> tuple[AttentionPool, AggregatorSpec]:
    """The network that a state dict is of.

    Raises:
        ConfigError: none of those that are known.
    """
    clam = any(key.startswith("attention_net.") for key in state)
    parts = _clam_parts(state) if clam else _ilse_parts(state)
    net = AttentionPool(parts.first, parts.tanh, parts.gate, parts.score, parts.classify, parts.per_class).eval()
    net.requires_grad_(False)
    branches, classes = parts.score.out_features, parts.classify.out_features
    first = parts.first[0] if isinstance(parts.first, nn.Sequential) else parts.tanh
    assert isinstance(first, nn.Linear)
    expected = parts.tanh.in_features * (1 if parts.per_class else branches)
    if parts.classify.in_features != expected or (parts.per_class and branches != classes):
        raise ConfigError("these weights do not fit together: the classifier has another width than the attention")
    spec = AggregatorSpec(
        model_name=model_name, weights_source=weights_source, gated=parts.gate is not None,
        architecture=("clam-mb" if parts.per_class else "clam-sb") if clam else "abmil",
        embedding_dim=first.in_features, n_branches=branches, n_classes=classes,
        values="softmax_logit" if clam else "sigmoid_logit",
    )  # fmt: skip
    return net, spec


@dataclass(frozen=True)
class _Parts:
    first: nn.Module
    tanh: nn.Linear
    gate: nn.Linear | None
    score: nn.Linear
    classify: nn.Linear
    per_class: bool


def _clam_parts(state: State) -> _Parts:
    """A hidden layer, then attention, whose place depends on the dropout layers; instance classifiers are left out."""
    prefix = next(
        (m[1] for key in state if (m := re.match(r"(attention_net\.\d+\.)(?:attention_c|module)\.", key))), None
    )
    if prefix is None:
        raise ConfigError(
            "this CLAM state dict has no attention layer: expected attention_net.N.attention_c or .module"
        )
    if f"{prefix}attention_c.weight" in state:
        tanh, gate = _linear(state, f"{prefix}attention_a.0"), _linear(state, f"{prefix}attention_b.0")
        score = _linear(state, f"{prefix}attention_c")
    else:
        last = max(int(m[1]) for key in state if (m := re.match(rf"{re.escape(prefix)}module\.(\d+)\.weight", key)))
        tanh, gate, score = _linear(state, f"{prefix}module.0"), None, _linear(state, f"{prefix}module.{last}")
    first = nn.Sequential(_linear(state, "attention_net.0"), nn.ReLU())
    if "classifiers.weight" in state:
        return _Parts(first, tanh, gate, score, _linear(state, "classifiers"), per_class=False)
    each = [_linear(state, f"classifiers.{number}") for number in range(score.out_features)]
    joined = _filled(torch.cat([one.weight for one in each]), torch.cat([one.bias for one in each]))
    return _Parts(first, tanh, gate, score, joined, per_class=True)


def _ilse_parts(state: State) -> _Parts:
    if "feature_extractor_part1.0.weight" in state:
        raise ConfigError("this network takes images, not embeddings: its convolutions (feature_extractor_part1) stay")
    first: nn.Module = nn.Identity()
    for name in ("feature_extractor_part2.0", "feature_extractor.0"):
        if f"{name}.weight" in state:
            first = nn.Sequential(_linear(state, name), nn.ReLU())
    classify = _linear(state, "classifier.0" if "classifier.0.weight" in state else "classifier")
    if "attention_V.0.weight" in state:
        gated = _linear(state, "attention_V.0"), _linear(state, "attention_U.0"), _linear(state, "attention_w")
        return _Parts(first, *gated, classify, per_class=False)
    return _Parts(first, _linear(state, "attention.0"), None, _linear(state, "attention.2"), classify, per_class=False)


def _linear(state: State, name: str) -> nn.Linear:
    try:
        return _filled(state[f"{name}.weight"], state[f"{name}.bias"])
    except KeyError:
        raise ConfigError(
            f"no attention network that is known has these weights: {name} is missing; known are CLAM_SB, CLAM_MB, and "
            "Attention and GatedAttention of AttentionDeepMIL"
        ) from None


def _filled(weight: Tensor, bias: Tensor) -> nn.Linear:
    if weight.ndim != 2 or bias.shape != weight.shape[:1]:
        raise ConfigError(
            f"a linear layer has a matrix and a vector, not {tuple(weight.shape)} and {tuple(bias.shape)}"
        )
    layer = nn.Linear(weight.shape[1], weight.shape[0])
    with torch.no_grad():
        layer.weight.copy_(weight)
        layer.bias.copy_(bias)
    return layer


def _golden_embeddings(spec: AggregatorSpec) -> NDArray[np.float32]:
    # A sequence of its own: no random generator promises its numbers for ever.
    steps = np.arange(_GOLDEN_TILES * spec.embedding_dim, dtype=np.int64) * 40503 % 65536
    return (steps.astype(np.float32) / np.float32(32768) - np.float32(1)).reshape(_GOLDEN_TILES, spec.embedding_dim)


@torch.inference_mode()
def _eager(net: AttentionPool, spec: AggregatorSpec) -> dict[str, Any]:
    found = net(torch.from_numpy(_golden_embeddings(spec)))
    return {name: tensor.numpy() for name, tensor in zip(OUTPUTS, found, strict=True)}
