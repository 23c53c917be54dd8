"""Heads over one backbone: it runs once a batch, whichever heads are wanted, and by one caller at a time."""

import json
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from inference.clients import InProcessClient
from inference.errors import BadRequest, ConfigError, ForwardError, NonFiniteOutput, UnknownModel
from inference.models.heads import DownstreamHeadModel, EmbeddingHead
from inference.models.registry import Checkpoint
from inference.models.runtime import Runtime
from inference.models.sample import NO_EXTRAS, Mode, PreparedSample
from inference.models.server_model import build_server_model, load_server_model
from tests.inference.models.conftest import TinyNet, tiny_spec
from tests.inference.models.kinds import (
    TPM,
    CountingRuntime,
    HeadNet,
    RnaNet,
    export_portable,
    flat,
    head_spec,
    make_request,
    rna_spec,
    sound,
)

GRADE, STAGE = (1.0, 10.0), (-1.0,)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("heads")


@pytest.fixture(scope="module")
def grade(folder: Path) -> Checkpoint:
    return export_portable(HeadNet(*GRADE), head_spec("grade", "low", "high"), folder)


@pytest.fixture(scope="module")
def stage(folder: Path) -> Checkpoint:
    return export_portable(HeadNet(*STAGE), head_spec("stage", "late"), folder)


@pytest.fixture(scope="module")
def backbone_checkpoint(folder: Path) -> Checkpoint:
    return export_portable(TinyNet(), tiny_spec(), folder)


@pytest.fixture(scope="module")
def shared(backbone_checkpoint: Checkpoint, grade: Checkpoint, stage: Checkpoint) -> DownstreamHeadModel:
    return DownstreamHeadModel(load_server_model(backbone_checkpoint), {"grade": grade.path, "stage": stage.path})


@pytest.fixture
def model(shared: DownstreamHeadModel) -> Iterator[DownstreamHeadModel]:
    parts = (shared.backbone, *shared.heads.values())
    real = [part.runtime for part in parts]
    yield shared
    for part, runtime in zip(parts, real, strict=True):
        part.runtime = runtime


def _count(model: DownstreamHeadModel) -> tuple[CountingRuntime, dict[str, CountingRuntime]]:
    model.backbone.runtime = below = CountingRuntime(model.backbone.runtime)
    above = {}
    for name, head in model.heads.items():
        head.runtime = above[name] = CountingRuntime(head.runtime)
    return below, above


def _sample(model: DownstreamHeadModel, value: int, head: str | None) -> PreparedSample:
    return model.prepare_sample(make_request(flat(value), model_name=head))


# What it gives.


def test_one_pass_of_the_backbone_feeds_the_heads_that_a_batch_asks_for(model: DownstreamHeadModel) -> None:
    below, above = _count(model)
    asked: list[tuple[int, str | None, Mode]] = [
        (10, "stage", "prediction"),
        (20, None, "prediction_with_embedding"),
        (30, "stage", "embedding"),
        (40, "grade", "prediction"),
        (50, "stage", "prediction"),
    ]
    samples = [_sample(model, value, head) for value, head, _ in asked]
    found = [sound(row) for row in model.forward_tiles(samples, [mode for _, _, mode in asked])]
    assert below.rows == [5]
    assert {name: runtime.rows for name, runtime in above.items()} == {"grade": [2], "stage": [2]}
    predictions = [None if row.prediction is None else row.prediction.tolist() for row in found]
    assert predictions == [[-30], [60, 600], None, [120, 1200], [-150]]
    embeddings = [None if row.embedding is None else row.embedding.tolist() for row in found]
    assert embeddings == [None, [20] * 3, [30] * 3, None, None]


def test_embeddings_alone_run_no_head(model: DownstreamHeadModel) -> None:
    below, above = _count(model)
    model.forward_tiles([_sample(model, 1, "stage"), _sample(model, 2, "grade")], ["embedding"] * 2)
    assert below.rows == [2]
    assert {name: runtime.rows for name, runtime in above.items()} == {"grade": [], "stage": []}


def test_every_head_of_every_tile_comes_from_one_pass(model: DownstreamHeadModel) -> None:
    below, above = _count(model)
    found = model.predict_heads([model.prepare_tile(flat(value)) for value in (1, 2)])
    assert below.rows == [2]
    assert {name: runtime.rows for name, runtime in above.items()} == {"grade": [2], "stage": [2]}
    for value, rows in zip((1, 2), found, strict=True):
        assert list(rows) == ["grade", "stage"]
        for name, expected in (("grade", [3 * value, 30 * value]), ("stage", [-3 * value])):
            row = sound(rows[name])
            assert row.prediction is not None
            assert row.embedding is not None
            assert row.prediction.tolist() == expected
            assert row.embedding.tolist() == [value] * 3
    assert [list(rows) for rows in model.predict_heads([model.prepare_tile(flat(1))], ["stage"])] == [["stage"]]
    assert model.predict_heads([]) == []
    assert model.forward_tiles([], []) == []


def test_a_head_gives_a_tile_the_same_whether_others_share_its_pass(model: DownstreamHeadModel) -> None:
    alone = sound(model.forward_tiles([_sample(model, 33, "stage")], ["prediction"])[0]).prediction
    batch = [_sample(model, 33 + i, ("stage", "grade")[i % 2]) for i in range(6)]
    among = sound(model.forward_tiles(batch, ["prediction"] * 6)[0]).prediction
    assert alone is not None
    assert among is not None
    np.testing.assert_allclose(alone, among, rtol=1e-6)


def test_what_is_not_finite_is_that_tiles_error_alone(model: DownstreamHeadModel) -> None:
    # 7s have no embedding; above 200 there is an embedding but no prediction.
    samples = [model.prepare_tile(flat(value)) for value in (6, 7, 201, 9)]
    _, above = _count(model)
    found = model.forward_tiles(samples, ["prediction"] * 4)
    assert [isinstance(row, NonFiniteOutput) for row in found] == [False, True, True, False]
    assert above["grade"].rows == [3], "a head sees no embedding that is not finite"
    found = model.forward_tiles(samples, ["embedding"] * 4)
    assert [isinstance(row, NonFiniteOutput) for row in found] == [False, True, False, False]
    rows = model.predict_heads(samples)
    assert [[isinstance(r, NonFiniteOutput) for r in row.values()] for row in rows] == [[x, x] for x in (0, 1, 1, 0)]


def test_a_request_chooses_its_head_by_model_name_through_a_client(
    model: DownstreamHeadModel, grade: Checkpoint, stage: Checkpoint
) -> None:
    with InProcessClient(model) as client:
        for name, expected in (("stage", [-12.0]), ("grade", [12.0, 120.0]), (None, [12.0, 120.0])):
            body = make_request(flat(4), model_name=name).model_dump_json()
            answer = json.loads(client.predict_with_embedding(body))
            assert (answer["output"], answer["embedding"]) == (expected, [4.0] * 3)
            made = stage if name == "stage" else grade
            lineage = answer["lineage"]
            assert (lineage["model_name"], lineage["weights_sha256"], lineage["artifact_sha256"]) == (
                name or "grade", made.manifest.weights_sha256, made.manifest.sha256
            )  # fmt: skip
            assert lineage["backbone_weights_sha256"] == model.backbone.manifest.weights_sha256
        below = json.loads(client.embed(body))["lineage"]
        assert (below["model_name"], below["backbone_weights_sha256"]) == ("tiny", None)
        with pytest.raises(BadRequest, match="runs grade, the request names 'tiny'"):
            client.predict(make_request(flat(4), model_name="tiny").model_dump_json())


def test_a_head_that_does_not_exist_is_a_bad_request_with_those_that_do(model: DownstreamHeadModel) -> None:
    with pytest.raises(BadRequest, match="no head 'h9': there are grade, stage"):
        _sample(model, 1, "h9")
    with pytest.raises(BadRequest, match="no head 'h9'"):
        model.predict_heads([model.prepare_tile(flat(1))], ["h9"])


def test_the_default_head_can_be_chosen(shared: DownstreamHeadModel) -> None:
    model = DownstreamHeadModel(shared.backbone, shared.heads, default="stage")
    assert model.model_name == "stage"
    row = sound(model.forward_tiles([model.prepare_tile(flat(2))], ["prediction"])[0])
    assert row.prediction is not None
    assert row.prediction.tolist() == [-6]


def test_the_spec_and_metadata_are_the_backbones_input_and_the_heads_outputs(model: DownstreamHeadModel) -> None:
    found = model.get_metadata()
    assert [(x.name, x.shape, x.components) for x in found.outputs] == [
        ("embedding", (3,), ()),
        ("prediction", (2,), ("low", "high")),
        ("prediction.stage", (1,), ("late",)),
    ]
    assert (found.model_name, found.input_shape, found.input_dtype) == ("grade", (3, 8, 8), "uint8")
    assert model.model_spec.preprocessing_sha256 == model.backbone.model_spec.preprocessing_sha256
    assert model.rows_independent


def test_a_failed_head_is_a_forward_error_of_the_batch(model: DownstreamHeadModel) -> None:
    class Failing(CountingRuntime):
        def run(
            self, batch: NDArray[np.uint8], extras: Mapping[str, NDArray[np.float32]] = NO_EXTRAS
        ) -> tuple[NDArray[np.float32], ...]:
            raise RuntimeError("no")

    model.heads["stage"].runtime = Failing(model.heads["stage"].runtime)
    with pytest.raises(ForwardError, match="the forward pass of stage failed"):
        model.forward_tiles([_sample(model, 1, "stage")], ["prediction"])
    assert sound(model.forward_tiles([_sample(model, 1, "grade")], ["prediction"])[0]).prediction is not None


def test_a_head_feeds_on_a_backbone_that_takes_rna(tmp_path: Path) -> None:
    backbone = load_server_model(export_portable(RnaNet(), rna_spec(), tmp_path))
    rna_head = head_spec("h", "x", backbone="rna", backbone_weights_sha256=backbone.manifest.weights_sha256)
    head = export_portable(HeadNet(1.0), rna_head, tmp_path)
    model = DownstreamHeadModel(backbone, {"h": head.path})
    request = make_request(flat(51), bulk_rna=list(TPM))
    (answer,) = model.forward_batch([model.prepare_sample(request)], [request], "prediction")
    assert answer.output == pytest.approx([0.6]), "the backbone's way back into TPM is not for a head"


def test_at_a_fixed_batch_backbone_and_head_are_padded_to_it(
    backbone_checkpoint: Checkpoint, grade: Checkpoint
) -> None:
    model = DownstreamHeadModel(load_server_model(backbone_checkpoint, fixed_batch=3), {"grade": grade.path})
    below, above = _count(model)
    found = model.forward_tiles([model.prepare_tile(flat(value)) for value in (1, 2)], ["prediction", "embedding"])
    assert len(found) == 2
    assert (below.rows, above["grade"].rows) == ([3], [3])
    assert model.fixed_batch == 3


# One device.


class Overlapping(CountingRuntime):
    """Sees whether a second forward begins while one runs."""

    def __init__(self, real: Runtime, second_starts: threading.Event) -> None:
        super().__init__(real)
        self._second_starts = second_starts
        self.entered = threading.Event()
        self.inside = self.most = 0

    def run(
        self, batch: NDArray[np.uint8], extras: Mapping[str, NDArray[np.float32]] = NO_EXTRAS
    ) -> tuple[NDArray[np.float32], ...]:
        self.inside += 1
        self.most = max(self.most, self.inside)
        self.entered.set()
        assert self._second_starts.wait(20)
        time.sleep(0.1)  # room for the second to come in, if anything lets it
        self.inside -= 1
        return super().run(batch, extras)


def test_models_and_clients_that_share_a_backbone_run_it_by_turns(model: DownstreamHeadModel) -> None:
    other = DownstreamHeadModel(model.backbone, {"stage": model.heads["stage"]})
    second_starts = threading.Event()
    model.backbone.runtime = watched = Overlapping(model.backbone.runtime, second_starts)
    body = make_request(flat(5)).model_dump_json()

    def second() -> str:
        assert watched.entered.wait(20)
        second_starts.set()
        return client_of_other.predict(body)

    with InProcessClient(model) as client, InProcessClient(other) as client_of_other, ThreadPoolExecutor(2) as pool:
        answers = [pool.submit(client.predict, body), pool.submit(second)]
        assert [json.loads(answer.result(30))["output"] for answer in answers] == [[15.0, 150.0], [-15.0]]
    assert (watched.rows, watched.most) == ([1, 1], 1)


# What does not fit.


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"backbone": "h1"}, "the backbone h1, this is tiny"),
        ({"embedding_dim": 4}, "embeddings of 4 values, tiny gives 3"),
        ({"backbone_weights_sha256": "a" * 64}, r"other weights of tiny \(aaaaaaaaaaaa\)"),
    ],
)
def test_a_head_of_another_backbone_is_refused(
    shared: DownstreamHeadModel, tmp_path: Path, changes: dict[str, object], says: str
) -> None:
    n_values = changes.get("embedding_dim", 3)
    assert isinstance(n_values, int)
    found = export_portable(HeadNet(1.0, n_values=n_values), head_spec("h", "x", **changes), tmp_path)
    with pytest.raises(ConfigError, match=f"the head h was made for {says}"):
        DownstreamHeadModel(shared.backbone, {"h": found.path})


def test_a_head_for_other_tiles_or_another_batch_is_refused(
    shared: DownstreamHeadModel, grade: Checkpoint, tmp_path: Path
) -> None:
    spec = head_spec("h", "x").model_copy(update={"tile_spec": tiny_spec().tile_spec.model_copy(update={"stride": 4})})
    found = export_portable(HeadNet(1.0), spec, tmp_path)
    with pytest.raises(ConfigError, match="h was made for other tiles than tiny takes"):
        DownstreamHeadModel(shared.backbone, {"h": found.path})
    padded = EmbeddingHead(grade.manifest.spec, grade.path.name, "cpu", grade.path.parent, fixed_batch=5)
    with pytest.raises(ConfigError, match="grade was made for batches of 5, tiny was loaded for None"):
        DownstreamHeadModel(shared.backbone, {"grade": padded})


def test_no_heads_or_an_unknown_default_is_a_config_error(shared: DownstreamHeadModel, grade: Checkpoint) -> None:
    with pytest.raises(ConfigError, match="at least one head"):
        DownstreamHeadModel(shared.backbone, {})
    with pytest.raises(ConfigError, match="no head 'x': there are grade"):
        DownstreamHeadModel(shared.backbone, {"grade": grade.path}, default="x")


def test_a_backbone_is_no_head_and_a_head_alone_takes_no_tiles(
    shared: DownstreamHeadModel, backbone_checkpoint: Checkpoint
) -> None:
    with pytest.raises(ConfigError, match="tiny takes tiles, not embeddings"):
        DownstreamHeadModel(shared.backbone, {"tiny": backbone_checkpoint.path})
    head = shared.heads["grade"]
    with pytest.raises(BadRequest, match="grade takes embeddings of tiny, not tiles"):
        head.prepare_tile(flat(1))
    with pytest.raises(BadRequest, match="grade takes embeddings of tiny, not tiles"):
        head.prepare_sample(make_request(flat(1)))
    assert head.predict(np.ones((2, 3), np.float32)).tolist() == [[3, 30]] * 2
    with pytest.raises(BadRequest, match=r"1 to 4096 float32 inputs of \(3,\)"):
        head.predict(np.ones((2, 4), np.float32))


# Loading by name.


def test_a_head_brings_its_backbone_along(
    backbone_checkpoint: Checkpoint, grade: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SLIDE_MODELS", raising=False)
    with pytest.raises(UnknownModel, match="no model 'tiny'"):
        build_server_model("grade", grade.path)
    for found in (backbone_checkpoint, grade):
        for path in (found.path, found.path.with_name(found.path.name + ".json")):
            (tmp_path / path.name.replace(found.path.stem, found.manifest.spec.model_name)).write_bytes(
                path.read_bytes()
            )
    monkeypatch.setenv("SLIDE_MODELS", str(tmp_path))
    for model in (build_server_model("grade"), build_server_model("grade", tmp_path / "grade.pt2", fixed_batch=2)):
        assert isinstance(model, DownstreamHeadModel)
        row = sound(model.forward_tiles([model.prepare_tile(flat(2))], ["prediction"])[0])
        assert row.prediction is not None
        assert row.prediction.tolist() == [6, 60]
        assert (model.backbone.model_name, model.backbone.fixed_batch) == ("tiny", model.fixed_batch)
