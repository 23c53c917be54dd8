"""Attention over a slide: the networks of CLAM and AttentionDeepMIL, for any number of tiles."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from inference.errors import ArtifactRefused, BadRequest, ConfigError, InferenceError
from inference.models.abmil import SlideAggregator, export_aggregator, read_aggregator
from inference.models.artifact import load_manifest
from inference.models.golden import golden_path

WIDTH, HIDDEN, INNER, CLASSES = 12, 8, 6, 3


class Gated(nn.Module):
    """Attn_Net_Gated of CLAM: tanh and sigmoid branches, with dropout between where it was trained so."""

    def __init__(self, branches: int, dropout: bool) -> None:
        super().__init__()
        more = [nn.Dropout(0.25)] if dropout else []
        self.attention_a = nn.Sequential(nn.Linear(HIDDEN, INNER), nn.Tanh(), *more)
        self.attention_b = nn.Sequential(nn.Linear(HIDDEN, INNER), nn.Sigmoid(), *more)
        self.attention_c = nn.Linear(INNER, branches)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.attention_c(self.attention_a(x) * self.attention_b(x))
        return found


class Plain(nn.Module):
    """Attn_Net of CLAM."""

    def __init__(self, branches: int, dropout: bool) -> None:
        super().__init__()
        more = [nn.Dropout(0.25)] if dropout else []
        self.module = nn.Sequential(nn.Linear(HIDDEN, INNER), nn.Tanh(), *more, nn.Linear(INNER, branches))

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.module(x)
        return found


class Clam(nn.Module):
    """CLAM_SB or CLAM_MB as far as slides go, with the instance classifiers that training adds."""

    def __init__(self, multi: bool, gate: bool, dropout: bool) -> None:
        super().__init__()
        branches = CLASSES if multi else 1
        attention = (Gated if gate else Plain)(branches, dropout)
        more = [nn.Dropout(0.25)] if dropout else []
        self.attention_net = nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.ReLU(), *more, attention)
        if multi:
            self.classifiers: nn.Module = nn.ModuleList([nn.Linear(HIDDEN, 1) for _ in range(CLASSES)])
        else:
            self.classifiers = nn.Linear(HIDDEN, CLASSES)
        self.instance_classifiers = nn.ModuleList([nn.Linear(HIDDEN, 2) for _ in range(CLASSES)])
        self.multi = multi

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.attention_net[:-1](x)
        attention = torch.softmax(self.attention_net[-1](hidden).T, dim=1)
        pooled = attention @ hidden
        if not self.multi:
            return attention.T, self.classifiers(pooled)[0]
        assert isinstance(self.classifiers, nn.ModuleList)
        return attention.T, torch.stack([layer(pooled[i])[0] for i, layer in enumerate(self.classifiers)])


class Ilse(nn.Module):
    """GatedAttention and Attention of AttentionDeepMIL on embeddings."""

    def __init__(self, gate: bool, first: bool = False, branches: int = 1) -> None:
        super().__init__()
        width = HIDDEN if first else WIDTH
        if first:
            self.feature_extractor_part2 = nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.ReLU())
        if gate:
            self.attention_V = nn.Sequential(nn.Linear(width, INNER), nn.Tanh())
            self.attention_U = nn.Sequential(nn.Linear(width, INNER), nn.Sigmoid())
            self.attention_w = nn.Linear(INNER, branches)
        else:
            self.attention = nn.Sequential(nn.Linear(width, INNER), nn.Tanh(), nn.Linear(INNER, branches))
        self.classifier = nn.Sequential(nn.Linear(width * branches, 1), nn.Sigmoid())
        self.gate, self.first = gate, first

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.feature_extractor_part2(x) if self.first else x
        scores = (
            self.attention_w(self.attention_V(hidden) * self.attention_U(hidden))
            if self.gate
            else self.attention(hidden)
        )
        attention = torch.softmax(scores.T, dim=1)
        return attention.T, self.classifier[0]((attention @ hidden).flatten())


NETWORKS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "clam sb": (lambda: Clam(False, True, True), "clam-sb"),
    "clam sb without gate": (lambda: Clam(False, False, False), "clam-sb"),
    "clam sb without gate, dropout": (lambda: Clam(False, False, True), "clam-sb"),
    "clam mb": (lambda: Clam(True, True, False), "clam-mb"),
    "gated attention": (lambda: Ilse(True), "abmil"),
    "attention": (lambda: Ilse(False), "abmil"),
    "gated attention of two branches after a layer": (lambda: Ilse(True, True, 2), "abmil"),
}


def a_network(name: str) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return NETWORKS[name][0]().eval()


def embeddings(count: int) -> NDArray[np.float32]:
    return np.random.default_rng(count).standard_normal((count, WIDTH), np.float32)


@pytest.mark.parametrize("name", NETWORKS)
def test_a_state_dict_gives_the_network_it_is_of(name: str) -> None:
    theirs = a_network(name)
    ours, spec = read_aggregator(theirs.state_dict())
    batch = torch.from_numpy(embeddings(9))
    with torch.inference_mode():
        for one, other in zip(ours(batch), theirs(batch), strict=True):
            torch.testing.assert_close(one, other)
        attention, logits = theirs(batch)
    assert spec.architecture == NETWORKS[name][1]
    assert (spec.embedding_dim, spec.n_branches, spec.n_classes) == (WIDTH, attention.shape[1], len(logits))
    assert [output.shape for output in spec.outputs] == [attention.shape[1:], logits.shape]
    assert spec.values == ("softmax_logit" if "clam" in name else "sigmoid_logit")


def _saved(tmp_path: Path, name: str = "clam sb") -> Path:
    torch.save(a_network(name).state_dict(), tmp_path / "w.pt")
    return tmp_path / "w.pt"


@pytest.mark.parametrize(
    "form",
    ["portable", pytest.param("onnx", marks=pytest.mark.slow), pytest.param("pt2", marks=pytest.mark.slow)],
)
def test_an_exported_aggregator_takes_any_number_of_tiles(tmp_path: Path, form: str) -> None:
    path = export_aggregator(
        _saved(tmp_path), tmp_path / "models", form=form, backbone="uni", class_names=("a", "b", "c")
    )
    aggregator, theirs = SlideAggregator(path), a_network("clam sb")
    assert aggregator.spec.backbone == "uni"
    assert aggregator.spec.outputs[1].components == ("a", "b", "c")
    for count in (1, 2, 3, 100, 5000):
        with torch.inference_mode():
            attention, logits = theirs(torch.from_numpy(embeddings(count)))
        found = aggregator.run(embeddings(count))
        assert found.attention.shape == (count, 1)
        np.testing.assert_allclose(found.attention, attention.numpy(), atol=1e-5)
        np.testing.assert_allclose(found.logits, logits.numpy(), atol=1e-5)
        assert found.attention.sum() == pytest.approx(1, abs=1e-4)


@pytest.mark.parametrize(
    ("batch", "says"),
    [
        (np.zeros((0, WIDTH), np.float32), "takes float32 embeddings of"),
        (np.zeros((3, WIDTH + 1), np.float32), "takes float32 embeddings of"),
        (np.zeros(WIDTH, np.float32), "takes float32 embeddings of"),
        (np.zeros((3, WIDTH)), "takes float32 embeddings of"),
        (np.full((3, WIDTH), np.nan, np.float32), "an embedding has NaN or infinity: leave failed tiles out"),
    ],
    ids=["none", "width", "vector", "doubles", "nan"],
)
def test_what_an_aggregator_does_not_take_is_refused(tmp_path: Path, batch: NDArray[np.float32], says: str) -> None:
    aggregator = SlideAggregator(export_aggregator(_saved(tmp_path), tmp_path / "models"))
    with pytest.raises(BadRequest, match=says):
        aggregator.run(batch)


def test_an_aggregator_is_no_model_of_tiles_and_is_pinned_like_one(tmp_path: Path) -> None:
    path = export_aggregator(_saved(tmp_path), tmp_path / "models")
    with pytest.raises(ArtifactRefused, match=r"abmil\.pt2 is a slide aggregator, where a model of tiles is needed"):
        load_manifest(path)
    golden = golden_path(path)
    golden.write_bytes(golden.read_bytes() + b"x")
    with pytest.raises(ArtifactRefused, match=r"golden\.npz is not the file that the manifest of abmil\.pt2 pins"):
        SlideAggregator(path)
    assert SlideAggregator(export_aggregator(_saved(tmp_path), tmp_path / "models")).spec.n_classes == CLASSES


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda state: state.clear() or state.update(x=torch.ones(1)), "no attention network that is known"),
        (lambda state: state.pop("attention_net.0.weight"), r"attention_net\.0 is missing"),
        (lambda state: state.update({"classifiers.weight": torch.ones(3, 9)}), "do not fit together"),
        (lambda state: state.update({"classifiers.bias": torch.ones(4)}), r"not \(3, 8\) and \(4,\)"),
        (lambda state: [state.pop(k) for k in list(state) if "attention_c" in k], "no attention layer"),
        (lambda state: state.clear() or state.update({"feature_extractor_part1.0.weight": torch.ones(1)}),
         "takes images, not embeddings"),
    ],
)  # fmt: skip
def test_a_state_dict_of_another_network_is_refused(change: Callable[[dict[str, Tensor]], object], says: str) -> None:
    state = dict(a_network("clam sb").state_dict())
    change(state)
    with pytest.raises(ConfigError, match=says):
        read_aggregator(state)


def test_names_for_other_classes_than_there_are_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InferenceError, match="2 class names for 3 classes"):
        export_aggregator(_saved(tmp_path), tmp_path / "models", class_names=("a", "b"))
