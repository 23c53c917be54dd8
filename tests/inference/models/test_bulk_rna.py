"""Bulk RNA beside the tile: given, registered or left out; what it may be, and what it may touch."""

import asyncio
import hashlib
import inspect
import json
import math
import struct
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from inference.clients import InProcessClient
from inference.errors import BadRequest, ConfigError, ModelContractError, NonFiniteOutput
from inference.models.bulk_rna import BulkRnaServerModel
from inference.models.export import export_model
from inference.models.registry import Checkpoint
from inference.models.rna import bulk_rna_sha256
from inference.models.sample import PreparedSample, TileOutput
from inference.models.server_model import BaseServerModel, build_server_model, load_server_model
from inference.models.tracing import has_cpp_compiler
from tests.conftest import REPO
from tests.inference.models.kinds import (
    GENES,
    OTHER_TPM,
    TPM,
    CountingRuntime,
    RnaNet,
    export_portable,
    flat,
    make_request,
    rna_spec,
    sound,
)

RED = 51
"""A tile of this value has the embedding 0.2."""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return export_portable(RnaNet(), rna_spec(), tmp_path_factory.mktemp("rna"))


@pytest.fixture(scope="module")
def plain_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """Counts in, counts out, without a transform."""
    spec = rna_spec(rna_unit="counts", transform="none", output_transform="none")
    return export_portable(RnaNet(), spec, tmp_path_factory.mktemp("plain"))


def _load(found: Checkpoint, **settings: object) -> BulkRnaServerModel:
    model = BulkRnaServerModel(found.manifest.spec, found.path.name, "cpu", found.path.parent, **settings)  # type: ignore[arg-type]
    assert model.rows_independent
    return model


@pytest.fixture(scope="module")
def _loaded(checkpoint: Checkpoint) -> BulkRnaServerModel:
    return _load(checkpoint)


@pytest.fixture
def server(_loaded: BulkRnaServerModel) -> Iterator[BulkRnaServerModel]:
    real = _loaded.runtime
    yield _loaded
    _loaded.runtime = real


def _expected(value: int, tpm: tuple[float, ...] | None = None) -> list[float]:
    """What the test network predicts, in TPM: its sum is of logarithms."""
    if tpm is None:
        return [math.exp(value / 255) - 1] * 2
    return [math.exp(value / 255 + 0.5) * (1 + gene) - 1 for gene in tpm[:2]]


def _predicted(row: TileOutput | NonFiniteOutput) -> NDArray[np.float32]:
    return sound(row).predicted()


# What it gives.


def test_the_spec_decides_the_class(checkpoint: Checkpoint) -> None:
    assert type(load_server_model(checkpoint)) is BulkRnaServerModel
    assert type(build_server_model("rna", checkpoint.path)) is BulkRnaServerModel


def test_tiles_with_their_rna_with_other_rna_and_without_share_one_forward(server: BulkRnaServerModel) -> None:
    digest = server.register_bulk_rna(OTHER_TPM)
    requests = [
        make_request(flat(RED), bulk_rna=list(TPM)),
        make_request(flat(0)),
        make_request(flat(102), bulk_rna_sha256=digest),
        make_request(flat(RED)),
    ]
    samples = [server.prepare_sample(request) for request in requests]
    server.runtime = counting = CountingRuntime(server.runtime)
    found = [sound(row) for row in server.forward_tiles(samples, ["prediction_with_embedding"] * 4)]
    assert counting.rows == [4]
    expected = [_expected(RED, TPM), [0.0, 0.0], _expected(102, OTHER_TPM), _expected(RED)]
    for row, values, embedding in zip(found, expected, (0.2, 0.0, 0.4, 0.2), strict=True):
        assert row.prediction is not None
        assert row.embedding is not None
        np.testing.assert_allclose(row.prediction, values, rtol=1e-5)
        np.testing.assert_allclose(row.embedding, [embedding] * 3, rtol=1e-5)


def test_an_image_only_tile_is_the_same_whatever_its_neighbours_bring(checkpoint: Checkpoint) -> None:
    server = _load(checkpoint, fixed_batch=4)
    alone = server.prepare_tile(flat(9))
    (before,) = server.forward_tiles([alone], ["prediction"])
    linked = server.prepare_sample(make_request(flat(9), bulk_rna=list(TPM)))
    among = server.forward_tiles([linked, alone, linked], ["prediction"] * 3)[1]
    assert _predicted(before).tobytes() == _predicted(among).tobytes()


@pytest.mark.parametrize("fixed_batch", [None, 3])
def test_rna_linked_or_not_the_embedding_has_the_same_bits(checkpoint: Checkpoint, fixed_batch: int | None) -> None:
    server = _load(checkpoint, fixed_batch=fixed_batch)
    without = make_request(flat(77))
    (first,) = server.forward_batch([server.prepare_sample(without)], [without], "embedding")
    server.register_bulk_rna(TPM)
    linked = make_request(flat(77), bulk_rna=list(TPM))
    (second,) = server.forward_batch([server.prepare_sample(linked)], [linked], "embedding")
    (again,) = server.forward_batch([server.prepare_sample(without)], [without], "embedding")
    assert first.output == second.output == again.output
    assert first.lineage is not None
    assert second.lineage is not None
    assert first.lineage.bulk_rna_sha256 is second.lineage.bulk_rna_sha256 is None, "it has no part in the answer"


def test_the_combined_mode_answers_both_and_only_the_prediction_is_transformed_back(server: BulkRnaServerModel) -> None:
    request = make_request(flat(RED), bulk_rna=list(TPM))
    (answer,) = server.forward_batch([server.prepare_sample(request)], [request], "prediction_with_embedding")
    np.testing.assert_allclose(answer.output, _expected(RED, TPM), rtol=1e-5)
    assert answer.embedding == pytest.approx([0.2] * 3)
    assert server.forward([request]).tolist() == [answer.output]
    assert answer.lineage is not None
    assert answer.lineage.bulk_rna_sha256 == bulk_rna_sha256(TPM), "with RNA and without are not comparable"


def test_registered_rna_answers_as_the_same_values_in_the_request(server: BulkRnaServerModel) -> None:
    digest = server.register_bulk_rna(TPM)
    inline, linked = make_request(flat(3), bulk_rna=list(TPM)), make_request(flat(3), bulk_rna_sha256=digest)
    samples = [server.prepare_sample(inline), server.prepare_sample(linked), server.prepare_tile(flat(3), digest)]
    found = [_predicted(row).tolist() for row in server.forward_tiles(samples, ["prediction"] * 3)]
    assert found == [found[0]] * 3
    assert samples[1].extra_tensors["bulk_rna"] is samples[2].extra_tensors["bulk_rna"], "held once for the slide"


def test_a_client_gathers_all_three_ways_in_one_batch(server: BulkRnaServerModel) -> None:
    digest = server.register_bulk_rna(OTHER_TPM)
    ways: list[dict[str, object]] = [{"bulk_rna": list(TPM)}, {}, {"bulk_rna_sha256": digest}]
    bodies = [make_request(flat(10 + i), **ways[i % 3]).model_dump_json() for i in range(9)]

    async def ask(client: InProcessClient) -> list[str]:
        return await asyncio.gather(*(client.predict_async(body) for body in bodies))

    server.runtime = counting = CountingRuntime(server.runtime)
    with InProcessClient(server, max_batch_size=9, max_wait_ms=60_000) as client:
        answers = [json.loads(text)["output"] for text in asyncio.run(ask(client))]
    assert counting.rows == [9]
    for i, answer in enumerate(answers):
        np.testing.assert_allclose(answer, _expected(10 + i, (TPM, None, OTHER_TPM)[i % 3]), rtol=1e-5)


def test_a_prediction_that_is_not_finite_is_that_tiles_error_alone(server: BulkRnaServerModel) -> None:
    samples = [server.prepare_tile(flat(value)) for value in (6, 7, 8)]
    found = server.forward_tiles(samples, ["prediction"] * 3)
    assert [isinstance(row, NonFiniteOutput) for row in found] == [False, True, False]
    assert not any(isinstance(row, NonFiniteOutput) for row in server.forward_tiles(samples, ["embedding"] * 3))


def test_a_prediction_that_overflows_on_the_way_back_is_that_tiles_error_alone(server: BulkRnaServerModel) -> None:
    huge = PreparedSample(
        server.prepare_tile(flat(1)).tile,
        {"bulk_rna": np.full(4, 89, np.float32), "bulk_rna_present": np.ones(1, np.float32)},
    )
    found = server.forward_tiles([huge, server.prepare_tile(flat(1))], ["prediction"] * 2)
    assert [isinstance(row, NonFiniteOutput) for row in found] == [True, False], "e^89 is above the largest float32"


def test_without_transforms_values_go_in_and_come_out_as_they_are(plain_checkpoint: Checkpoint) -> None:
    server = _load(plain_checkpoint)
    sample = server.prepare_sample(make_request(flat(0), bulk_rna=[3.0, 1000.0, 0.0, 5.5]))
    (row,) = server.forward_tiles([sample], ["prediction"])
    assert _predicted(row).tolist() == [3.5, 1000.5]


def test_the_metadata_names_the_genes_that_go_in(server: BulkRnaServerModel) -> None:
    found = server.get_metadata()
    assert [(x.name, x.shape) for x in found.extra_inputs] == [("bulk_rna", (4,)), ("bulk_rna_present", (1,))]
    assert found.extra_inputs[0].components == GENES
    assert found.config["omics"] == {
        "rna_unit": "tpm", "n_genes": 4, "transform": "log1p", "output_transform": "expm1",
    }  # fmt: skip


@pytest.mark.slow
def test_a_compiled_package_takes_the_extra_inputs_as_the_portable_form_does(server: BulkRnaServerModel) -> None:
    if not has_cpp_compiler():
        pytest.skip("no C++ compiler")
    source = hashlib.sha256(inspect.getsource(RnaNet).encode()).hexdigest()
    path = export_model(RnaNet(), rna_spec(), REPO / "out" / "cache" / "models", source_sha256=source)
    compiled = build_server_model("rna", path)
    assert compiled.runtime.kind == "aotinductor"
    requests = [make_request(flat(51), bulk_rna=list(TPM)), make_request(flat(52)), make_request(flat(53))]
    answers = [
        [_predicted(row) for row in model.forward_tiles(samples, ["prediction"] * 3)]
        for model in (server, compiled)
        for samples in [[model.prepare_sample(request) for request in requests]]
    ]
    np.testing.assert_allclose(answers[0], answers[1], rtol=1e-5)


# preprocess_bulk_rna.


def test_preprocessing_applies_the_transform_to_a_flat_list(server: BulkRnaServerModel) -> None:
    assert server.preprocess_bulk_rna([0.0, math.e - 1]) == [0.0, 1.0]
    with pytest.raises(BadRequest, match="numbers from 0 up"):
        server.preprocess_bulk_rna([1.0, -2.0])


def test_preprocessing_without_a_transform_returns_the_very_list(plain_checkpoint: Checkpoint) -> None:
    counts = [1.0, -2.0]
    assert _load(plain_checkpoint).preprocess_bulk_rna(counts) is counts


# What it refuses.


@pytest.mark.parametrize(
    ("values", "says"),
    [
        (TPM[:3], "has 3 values, this model takes 4"),
        ((*TPM, 0.0), "has 5 values, this model takes 4"),
        ((), "has 0 values"),
        ((-1.0, *TPM[1:]), "value 0 is negative"),
        ((0.0, 0.0, 0.0, 0.0), "0 for every gene: leave it out"),
        ((0.0, 0.0, 0.0, 980_000.0), r"sums to 980000, transcripts per million to 1e\+06 within 1%"),
        ((0.0, 0.0, 0.0, 1_020_000.0), r"sums to 1\.02e\+06"),
        ((0.0, 1.5, 3.0, 4.0), "sums to 8.5.*: give TPM, not counts, FPKM or logarithms"),
    ],
)
def test_rna_that_cannot_be_the_models_is_that_requests_error(
    server: BulkRnaServerModel, values: tuple[float, ...], says: str
) -> None:
    with pytest.raises(BadRequest, match=says):
        server.prepare_sample(make_request(flat(1), bulk_rna=list(values)))
    with pytest.raises(BadRequest, match=says):
        server.register_bulk_rna(values)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_values_that_are_not_finite_are_not_registered(server: BulkRnaServerModel, value: float) -> None:
    with pytest.raises(BadRequest, match="value 2 is not finite"):
        server.register_bulk_rna([0.0, 1.0, value, 2.0])


@pytest.mark.parametrize("total", [990_001.0, 1_000_000.0, 1_009_999.0])
def test_a_sum_within_one_per_cent_of_a_million_is_taken(server: BulkRnaServerModel, total: float) -> None:
    assert server.register_bulk_rna([0.0, 0.0, 0.0, total])


def test_both_forms_of_rna_in_one_request_are_refused(server: BulkRnaServerModel) -> None:
    digest = server.register_bulk_rna(TPM)
    with pytest.raises(BadRequest, match="both bulk_rna and bulk_rna_sha256: give one"):
        server.prepare_sample(make_request(flat(1), bulk_rna=list(TPM), bulk_rna_sha256=digest))


def test_a_digest_that_nobody_registered_is_refused_with_the_remedy(server: BulkRnaServerModel) -> None:
    with pytest.raises(BadRequest, match=r"no bulk RNA is registered as abababababab: register it \(again\)"):
        server.prepare_sample(make_request(flat(1), bulk_rna_sha256="ab" * 32))


def test_a_model_that_takes_no_rna_refuses_it_instead_of_leaving_it_out(tiny: Checkpoint) -> None:
    server = load_server_model(tiny)
    given: list[dict[str, object]] = [{"bulk_rna": [1.0]}, {"bulk_rna_sha256": "0" * 64}]
    for fields in given:
        with pytest.raises(BadRequest, match="tiny takes no bulk RNA: leave bulk_rna"):
            server.prepare_sample(make_request(flat(1), **fields))


def test_a_checkpoint_without_an_omics_part_is_refused_by_this_class(tiny: Checkpoint) -> None:
    with pytest.raises(ConfigError, match="tiny takes no bulk RNA: its spec has no omics part"):
        _load(tiny)


@pytest.mark.parametrize(
    "extras",
    [
        {},
        {"bulk_rna": np.zeros(4, np.float32)},
        {"bulk_rna": np.zeros(5, np.float32), "bulk_rna_present": np.zeros(1, np.float32)},
        {"bulk_rna": np.zeros(4), "bulk_rna_present": np.zeros(1, np.float32)},
        {
            "bulk_rna": np.zeros(4, np.float32),
            "bulk_rna_present": np.zeros(1, np.float32),
            "x": np.zeros(1, np.float32),
        },
    ],
    ids=["none", "one missing", "long", "double", "one more"],
)
def test_extra_inputs_of_other_names_shapes_or_kinds_never_reach_the_graph(
    server: BulkRnaServerModel, extras: dict[str, NDArray[np.float32]]
) -> None:
    server.runtime = counting = CountingRuntime(server.runtime)
    good = server.prepare_tile(flat(1))
    with pytest.raises(BadRequest, match="rna takes the further inputs"):
        server.forward_tiles([good, PreparedSample(good.tile, extras)], ["prediction"] * 2)
    assert counting.rows == []


def test_the_runtime_itself_refuses_extra_inputs_that_the_graph_does_not_take(
    server: BulkRnaServerModel, tiny: Checkpoint
) -> None:
    batch = np.zeros((2, 3, 8, 8), np.uint8)
    with pytest.raises(BadRequest, match="the graph takes the further float32 inputs"):
        server.runtime.run(batch)
    with pytest.raises(BadRequest, match=r"the graph takes the further float32 inputs \{\}"):
        load_server_model(tiny).runtime.run(batch, {"bulk_rna": np.zeros((2, 4), np.float32)})


# The embedding.


def test_a_graph_whose_embedding_depends_on_the_rna_is_refused_at_load_unless_its_spec_says_so(tmp_path: Path) -> None:
    leaking = export_portable(RnaNet(leak=0.01), rna_spec(), tmp_path)
    with pytest.raises(ModelContractError, match="rna: the embedding depends on the bulk RNA"):
        load_server_model(leaking)
    declared = export_portable(RnaNet(leak=0.01), rna_spec(embedding_uses_rna=True), tmp_path)
    server = load_server_model(declared)
    request = make_request(flat(0), bulk_rna=list(TPM))
    (answer,) = server.forward_batch([server.prepare_sample(request)], [request], "embedding")
    np.testing.assert_allclose(answer.output, [0.01 * math.log1p(tpm) for tpm in TPM[:3]], rtol=1e-5)
    assert answer.lineage is not None
    assert answer.lineage.bulk_rna_sha256 == bulk_rna_sha256(TPM)


# What is registered.


def test_the_digest_is_of_the_values_as_little_endian_doubles(server: BulkRnaServerModel) -> None:
    expected = hashlib.sha256(struct.pack("<4d", *TPM)).hexdigest()
    assert server.register_bulk_rna(TPM) == expected
    assert server.register_bulk_rna([-0.0, *TPM[1:]]) == expected, "no number tells these zeros apart"
    assert server.register_bulk_rna(OTHER_TPM) != expected


def test_beyond_its_bytes_the_longest_unused_rna_is_dropped(checkpoint: Checkpoint) -> None:
    server = _load(checkpoint, max_rna_bytes=2 * 4 * 4)
    profiles = [(float(i), 0.0, 0.0, 1e6 - i) for i in range(4)]
    first, second = (server.register_bulk_rna(values) for values in profiles[:2])
    held = server.prepare_tile(flat(1), second)
    server.prepare_tile(flat(1), first)
    third = server.register_bulk_rna(profiles[2])
    with pytest.raises(BadRequest, match="register it"):
        server.prepare_tile(flat(1), second)
    for kept in (first, third):
        server.prepare_tile(flat(1), kept)
    sound(server.forward_tiles([held], ["prediction"])[0])  # a sample in hand keeps what it needs
    assert server.register_bulk_rna(profiles[1]) == second
    server.prepare_tile(flat(1), second)


def test_rna_larger_than_the_bound_is_kept_until_the_next(checkpoint: Checkpoint) -> None:
    server = _load(checkpoint, max_rna_bytes=1)
    first = server.register_bulk_rna(TPM)
    server.prepare_tile(flat(1), first)
    second = server.register_bulk_rna(OTHER_TPM)
    server.prepare_tile(flat(1), second)
    with pytest.raises(BadRequest):
        server.prepare_tile(flat(1), first)
    with pytest.raises(ConfigError, match="max_rna_bytes 0"):
        _load(checkpoint, max_rna_bytes=0)


def test_threads_register_and_use_rna_at_once_within_the_bound(checkpoint: Checkpoint) -> None:
    server = _load(checkpoint, max_rna_bytes=3 * 16)
    start = threading.Barrier(8)

    def work(seed: int) -> int:
        rng = np.random.default_rng(seed)
        start.wait(20)
        found = 0
        for _ in range(200):
            gene = float(rng.integers(0, 6))
            digest = server.register_bulk_rna([gene, 0.0, 0.0, 1e6])
            try:
                sample = server.prepare_tile(flat(1), digest)
            except BadRequest:
                continue  # others pushed it out meanwhile
            assert sample.extra_tensors["bulk_rna"][0] == np.float32(np.log1p(gene))
            found += 1
        return found

    with ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(work, range(8))) > 0
    kept = server._registered
    assert kept._nbytes == sum(values.nbytes for values in kept._values.values()) == 3 * 16


def test_the_base_class_alone_refuses_tiles_of_an_rna_model(checkpoint: Checkpoint) -> None:
    server = BaseServerModel(checkpoint.manifest.spec, checkpoint.path.name, "cpu", checkpoint.path.parent)
    with pytest.raises(BadRequest, match=r"further inputs .*, not none"):
        server.forward_tiles([server.prepare_tile(flat(1))], ["embedding"])
