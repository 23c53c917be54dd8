"""The server model: stage 1 refuses one request, stage 2 answers a batch, and no row depends on another."""

import base64
import io
import threading
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from PIL import Image

from inference.contract import ModelRequest, ModelResponse
from inference.errors import ArtifactRefused, BadRequest, ConfigError, ForwardError, ModelContractError, NonFiniteOutput
from inference.models.artifact import manifest_path
from inference.models.registry import Checkpoint
from inference.models.sample import NO_EXTRAS, Mode, PreparedSample, TileOutput
from inference.models.server_model import BaseServerModel, build_server_model, load_server_model

BATCH = 6
Extras = Mapping[str, NDArray[np.float32]]
MODES: tuple[Mode, ...] = ("embedding", "prediction", "prediction_with_embedding")
TILES = np.random.default_rng(3).integers(0, 256, (2 * BATCH, 224, 224, 3), dtype=np.uint8)


@pytest.fixture(scope="module")
def fixed(demo_checkpoint: Checkpoint) -> BaseServerModel:
    """The demo model at the fixed batch that the pipeline uses."""
    return load_server_model(demo_checkpoint, fixed_batch=BATCH)


@pytest.fixture
def server(tiny: Checkpoint) -> BaseServerModel:
    return load_server_model(tiny)


class FakeRuntime:
    """Returns what it is told to; counts the rows it was given."""

    kind, device = "fake", "cpu"

    def __init__(self, *outputs: NDArray[np.float32] | Exception) -> None:
        self._outputs = outputs
        self.rows: list[int] = []

    def run(self, batch: NDArray[np.uint8], extras: Extras = NO_EXTRAS) -> tuple[NDArray[np.float32], ...]:
        self.rows.append(len(batch))
        found = []
        for output in self._outputs:
            if isinstance(output, Exception):
                raise output
            found.append(output)
        return tuple(found)


def _tile(value: int) -> NDArray[np.uint8]:
    return np.full((8, 8, 3), value, np.uint8)


def _request(tile: NDArray[np.uint8], **changes: object) -> ModelRequest:
    buffer = io.BytesIO()
    Image.fromarray(tile).save(buffer, format="PNG")
    height, width = tile.shape[:2]
    fields: dict[str, object] = {
        "image_data": base64.b64encode(buffer.getvalue()).decode(), "slide_name": "s", "x": 5, "y": 6,
        "width": width, "height": height, "patch_idx": 7, "tissue_ratio": 0.25, "resolution": 1.0,
    }  # fmt: skip
    return ModelRequest.model_validate(fields | changes)


def _bits(model: BaseServerModel, tiles: Iterable[NDArray[np.uint8]]) -> list[bytes]:
    samples = [model.prepare_tile(tile) for tile in tiles]
    rows = model.forward_tiles(samples, ["prediction_with_embedding"] * len(samples))
    found = []
    for row in rows:
        assert not isinstance(row, NonFiniteOutput)
        assert row.embedding is not None
        assert row.prediction is not None
        found.append(row.embedding.tobytes() + row.prediction.tobytes())
    return found


# At the fixed batch.


@pytest.fixture(scope="module")
def expected(fixed: BaseServerModel) -> list[bytes]:
    return [bits for start in (0, BATCH) for bits in _bits(fixed, TILES[start : start + BATCH])]


@given(st.permutations(range(2 * BATCH)))
@settings(max_examples=20, deadline=None)
def test_a_tile_gives_the_same_bits_with_any_neighbours_in_any_place(
    fixed: BaseServerModel, expected: list[bytes], order: list[int]
) -> None:
    chosen = order[:BATCH]
    assert _bits(fixed, TILES[chosen]) == [expected[i] for i in chosen]


@pytest.mark.parametrize("count", range(1, BATCH))
def test_a_short_batch_gives_the_same_bits_as_a_full_one(
    fixed: BaseServerModel, expected: list[bytes], count: int
) -> None:
    assert _bits(fixed, TILES[:count]) == expected[:count]


def test_the_loaded_model_knows_that_its_rows_are_independent(fixed: BaseServerModel) -> None:
    assert fixed.rows_independent
    assert fixed.fixed_batch == BATCH


def test_every_forward_has_exactly_the_fixed_number_of_rows(tiny: Checkpoint) -> None:
    model = load_server_model(tiny, fixed_batch=3)
    model.runtime = fake = FakeRuntime(np.ones((3, 3), np.float32), np.ones((3, 2), np.float32))
    samples = [model.prepare_tile(_tile(value)) for value in (1, 2, 3)]
    for count in (1, 2, 3):
        assert len(model.forward_tiles(samples[:count], ["prediction"] * count)) == count
    assert fake.rows == [3, 3, 3]
    with pytest.raises(BadRequest, match="4 tiles in a batch, tiny was loaded for 3"):
        model.forward_tiles([*samples, samples[0]], ["prediction"] * 4)


@pytest.mark.parametrize("size", [0, -1, 4097])
def test_a_fixed_batch_that_the_graph_cannot_take_is_a_config_error(tiny: Checkpoint, size: int) -> None:
    with pytest.raises(ConfigError, match=f"batches of 1 to 4096 tiles, not {size}"):
        load_server_model(tiny, fixed_batch=size)


def test_a_model_whose_rows_depend_on_their_neighbours_says_so(
    tiny: Checkpoint, caplog: pytest.LogCaptureFixture
) -> None:
    model = load_server_model(tiny, fixed_batch=4)

    class Drifting(FakeRuntime):
        def run(self, batch: NDArray[np.uint8], extras: Extras = NO_EXTRAS) -> tuple[NDArray[np.float32], ...]:
            self.rows.append(len(batch))
            drift = np.float32(1 + 1e-6 * len(self.rows))
            return np.full((4, 3), drift, np.float32), np.full((4, 2), drift, np.float32)

    model.runtime = Drifting()
    assert model._warm_up() is False
    assert "rows depend on their batch" in caplog.text


def test_a_graph_that_answers_a_lone_tile_differently_is_refused_at_load(server: BaseServerModel) -> None:
    class Static(FakeRuntime):
        def run(self, batch: NDArray[np.uint8], extras: Extras = NO_EXTRAS) -> tuple[NDArray[np.float32], ...]:
            value = 1.0 if len(batch) > 1 else 37.0
            return np.full((len(batch), 3), value, np.float32), np.full((len(batch), 2), value, np.float32)

    server.runtime = Static()
    with pytest.raises(ModelContractError, match="another result alone than in a batch"):
        server._warm_up()


# Stage 1.


def test_a_request_becomes_its_pixels_channels_first(server: BaseServerModel) -> None:
    tile = np.random.default_rng(0).integers(0, 256, (8, 8, 3), dtype=np.uint8)
    sample = server.prepare_sample(_request(tile))
    assert np.array_equal(sample.tile, tile.transpose(2, 0, 1))
    assert sample.nbytes == tile.nbytes


def test_a_prepared_sample_keeps_nothing_of_the_callers_buffer(server: BaseServerModel) -> None:
    planes = np.zeros((3, 8, 8), np.uint8)
    sample = server.prepare_tile(planes.transpose(1, 2, 0))
    planes[:] = 9
    assert sample.tile.max() == 0
    with pytest.raises(ValueError, match="read-only"):
        sample.tile[0] = 1


@pytest.mark.parametrize(
    "tile",
    [np.zeros((8, 9, 3), np.uint8), np.zeros((8, 8), np.uint8), np.zeros((3, 8, 8), np.uint8), np.zeros((8, 8, 3))],
    ids=["wide", "flat", "channels first", "float"],
)
def test_a_tile_of_another_shape_or_dtype_is_a_value_error(server: BaseServerModel, tile: NDArray[np.uint8]) -> None:
    with pytest.raises(BadRequest, match=r"tiny takes 8 x 8 x 3 uint8 tiles, not \("):
        server.prepare_tile(tile)


def test_a_request_whose_image_is_sound_but_not_the_models_size_is_a_value_error(server: BaseServerModel) -> None:
    with pytest.raises(ValueError, match="tiny takes 8 x 8 tiles, not 9 x 9"):
        server.prepare_sample(_request(np.zeros((9, 9, 3), np.uint8)))


def test_counts_pass_unchanged_through_a_model_without_an_omics_transform(server: BaseServerModel) -> None:
    counts = [1.0, 2.0]
    assert server.preprocess_bulk_rna(counts) is counts


# Stage 2.


def test_each_mode_fills_its_own_heads_and_one_batch_may_mix_them(server: BaseServerModel) -> None:
    samples = [server.prepare_tile(_tile(value)) for value in (10, 20, 30)]
    found = server.forward_tiles(samples, MODES)
    shown = [
        (None if row.embedding is None else row.embedding.tolist(), None if p is None else p.tolist())
        for row in found
        if not isinstance(row, NonFiniteOutput)
        for p in [row.prediction]
    ]
    assert shown == [([10.0] * 3, None), (None, [20.0, 20.0]), ([30.0] * 3, [30.0, 30.0])]


def test_responses_answer_their_requests_in_order_with_the_place_echoed(server: BaseServerModel) -> None:
    requests = [_request(_tile(value), x=value, patch_idx=value) for value in (4, 5, 6)]
    samples = [server.prepare_sample(request) for request in requests]
    responses = server.forward_batch(samples, requests, "prediction_with_embedding")
    assert [r.output for r in responses] == [[4.0, 4.0], [5.0, 5.0], [6.0, 6.0]]
    assert [r.embedding for r in responses] == [[4.0] * 3, [5.0] * 3, [6.0] * 3]
    for request, response in zip(requests, responses, strict=True):
        echoed = {"slide_name", "x", "y", "width", "height", "patch_idx", "tissue_ratio", "resolution"}
        assert response.model_dump(include=echoed) == request.model_dump(include=echoed)


def test_a_response_is_what_its_own_schema_allows(server: BaseServerModel) -> None:
    request = _request(_tile(4))
    for mode in MODES:
        (response,) = server.forward_batch([server.prepare_sample(request)], [request], mode)
        assert ModelResponse.model_validate_json(response.to_json()) == response


def test_nothing_that_is_not_finite_gets_into_a_response(server: BaseServerModel) -> None:
    nan, one = np.array([np.nan], np.float32), np.ones(1, np.float32)
    for mode, output in (
        ("embedding", TileOutput(embedding=nan)),
        ("prediction", TileOutput(prediction=nan)),
        ("prediction_with_embedding", TileOutput(nan, one)),
    ):
        with pytest.raises(NonFiniteOutput):
            server.respond(_request(_tile(4)), output, cast("Mode", mode))


def test_a_result_keeps_no_more_than_its_own_row_alive(server: BaseServerModel) -> None:
    (row,) = server.forward_tiles([server.prepare_tile(_tile(1))], ["embedding"])
    assert not isinstance(row, NonFiniteOutput)
    assert row.embedding is not None
    assert row.embedding.base is None


@pytest.mark.parametrize("mode", ["embed", "", "metadata", "Embedding"])
def test_a_mode_that_does_not_exist_is_a_value_error_with_those_that_do(server: BaseServerModel, mode: Mode) -> None:
    with pytest.raises(ValueError, match="offers embedding, prediction, prediction_with_embedding"):
        server.forward_tiles([server.prepare_tile(_tile(1))], [mode])


def test_nothing_in_gives_nothing_out(server: BaseServerModel) -> None:
    assert server.forward_tiles([], []) == []
    assert server.forward_batch([], [], "embedding") == []
    assert server.forward([]).shape == (0, 2)


def test_unequal_numbers_of_samples_and_requests_or_modes_are_refused(server: BaseServerModel) -> None:
    sample = server.prepare_tile(_tile(1))
    with pytest.raises(BadRequest, match="2 samples and 1 modes"):
        server.forward_tiles([sample, sample], ["embedding"])
    with pytest.raises(BadRequest, match="1 samples and 0 requests"):
        server.forward_batch([sample], [], "embedding")


def test_a_sample_that_was_never_checked_is_refused_before_the_graph(server: BaseServerModel) -> None:
    server.runtime = fake = FakeRuntime()
    tiles: list[NDArray[Any]] = [np.zeros((3, 8, 9), np.uint8), np.zeros((3, 8, 8), np.float32)]
    for tile in tiles:
        with pytest.raises(BadRequest, match=r"tiny takes uint8 tiles of \(3, 8, 8\)"):
            server.forward_tiles([PreparedSample(tile)], ["embedding"])
    assert fake.rows == []


def test_a_row_that_is_not_finite_is_that_tiles_error_alone(server: BaseServerModel) -> None:
    samples = [server.prepare_tile(_tile(value)) for value in (6, 7, 8)]
    found = server.forward_tiles(samples, ["prediction_with_embedding"] * 3)
    assert [isinstance(row, NonFiniteOutput) for row in found] == [False, True, False]
    with pytest.raises(NonFiniteOutput):
        server.forward_batch(samples, [_request(_tile(value)) for value in (6, 7, 8)], "embedding")


def test_only_the_heads_asked_for_have_to_be_finite(server: BaseServerModel) -> None:
    server.runtime = FakeRuntime(np.ones((1, 3), np.float32), np.full((1, 2), np.inf, np.float32))
    sample = server.prepare_tile(_tile(1))
    assert not isinstance(server.forward_tiles([sample], ["embedding"])[0], NonFiniteOutput)
    assert isinstance(server.forward_tiles([sample], ["prediction"])[0], NonFiniteOutput)


def _f(*shape: int) -> NDArray[np.float32]:
    return np.ones(shape, np.float32)


@pytest.mark.parametrize(
    "outputs",
    [
        (_f(2, 3),),
        (_f(1, 3), _f(2, 2)),
        (_f(3, 3), _f(3, 2)),
        (_f(2, 4), _f(2, 2)),
        (_f(2, 3, 1), _f(2, 2)),
        (_f(), _f()),
    ],
    ids=["one output", "a row short", "a row more", "wide", "deep", "scalars"],
)
def test_a_graph_that_returns_other_counts_or_shapes_breaks_its_contract(
    server: BaseServerModel, outputs: tuple[NDArray[np.float32], ...]
) -> None:
    server.runtime = FakeRuntime(*outputs)
    samples = [server.prepare_tile(_tile(1))] * 2
    with pytest.raises(ModelContractError, match=r"tiny returned .*, its spec declares \[\(2, 3\), \(2, 2\)\]"):
        server.forward_tiles(samples, ["embedding"] * 2)


def test_an_exception_of_the_graph_is_one_forward_error_for_the_batch(server: BaseServerModel) -> None:
    real = server.runtime
    server.runtime = FakeRuntime(RuntimeError("first line\n/home/someone/secret"))
    sample, request = server.prepare_tile(_tile(1)), _request(_tile(1))
    with pytest.raises(ForwardError, match=r"^the forward pass of tiny failed: RuntimeError: first line$") as caught:
        server.forward_batch([sample, sample], [request, request], "embedding")
    assert isinstance(caught.value, RuntimeError)
    assert caught.value.retryable
    server.runtime = real
    assert server.forward_batch([sample], [request], "embedding")[0].output == [1.0] * 3


def test_the_legacy_forward_gives_one_row_of_predictions_per_request(server: BaseServerModel) -> None:
    found = server.forward([_request(_tile(value)) for value in (1, 2)])
    assert found.tolist() == [[1.0, 1.0], [2.0, 2.0]]
    assert found.dtype == np.float32


def test_the_legacy_forward_raises_what_is_not_finite(server: BaseServerModel) -> None:
    with pytest.raises(NonFiniteOutput):
        server.forward([_request(_tile(value)) for value in (6, 7)])


def test_a_model_answers_to_its_own_name_alone(server: BaseServerModel) -> None:
    assert server.serves("tiny")
    assert not server.serves("h1")


def test_forwards_of_several_threads_take_turns(server: BaseServerModel) -> None:
    class Watched(FakeRuntime):
        inside = most = 0

        def run(self, batch: NDArray[np.uint8], extras: Extras = NO_EXTRAS) -> tuple[NDArray[np.float32], ...]:
            self.inside += 1
            self.most = max(self.most, self.inside)
            time.sleep(0.01)  # room for another to come in, if anything lets it
            self.inside -= 1
            return np.ones((1, 3), np.float32), np.ones((1, 2), np.float32)

    server.runtime = watched = Watched()
    sample, start = server.prepare_tile(_tile(1)), threading.Barrier(4)

    def work(_: int) -> None:
        start.wait(20)
        server.forward_tiles([sample], ["embedding"])

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))
    assert watched.most == 1


def test_the_metadata_describes_what_runs(server: BaseServerModel, tiny: Checkpoint) -> None:
    found = server.get_metadata()
    assert (found.model_name, found.input_shape, found.mpp) == ("tiny", (3, 8, 8), 1.0)
    assert [output.name for output in found.outputs] == ["embedding", "prediction"]
    assert found.outputs[1].components == ("max_red", "min_red")
    assert (found.runtime, found.device) == ("exported-program", "cpu")
    assert found.artifact_sha256 == tiny.manifest.sha256
    assert (server.model_name, server.model_spec) == ("tiny", tiny.manifest.spec)


# Loading.


def test_the_constructor_takes_a_file_name_in_a_folder_as_sagemaker_lays_it_out(tiny: Checkpoint) -> None:
    model = BaseServerModel(tiny.manifest.spec, tiny.path.name, "cpu", tiny.path.parent)
    assert model.model_name == "tiny"


def test_another_spec_than_the_checkpoints_is_a_config_error(tiny: Checkpoint) -> None:
    other = tiny.manifest.spec.model_copy(update={"version": "9"})
    with pytest.raises(ConfigError, match=r"tiny\.pt2 implements another spec than tiny 9"):
        BaseServerModel(other, tiny.path.name, "cpu", tiny.path.parent)


def test_a_checkpoint_of_another_model_is_a_config_error(tiny: Checkpoint) -> None:
    with pytest.raises(ConfigError, match=r"tiny\.pt2 holds tiny, not h1"):
        build_server_model("h1", tiny.path)
    assert build_server_model("tiny", str(tiny.path)).model_name == "tiny"


def test_a_checkpoint_that_was_replaced_after_it_was_found_is_refused(tiny: Checkpoint) -> None:
    found = Checkpoint(tiny.path, tiny.manifest.model_copy(update={"weights_sha256": "1" * 64}))
    with pytest.raises(ArtifactRefused, match=r"tiny\.pt2 was replaced since it was found"):
        load_server_model(found)


def test_a_graph_with_more_outputs_than_its_spec_names_is_refused_at_load(tiny: Checkpoint) -> None:
    path = manifest_path(tiny.path)
    path.write_text(path.read_text().replace('"prediction_with_embedding"', '"embedding"'))
    with pytest.raises(ModelContractError, match="the graph returned"):
        build_server_model("tiny", tiny.path)


def test_a_damaged_checkpoint_leaves_no_half_loaded_model(tiny: Checkpoint, tmp_path: Path) -> None:
    raw = tiny.path.read_bytes()
    tiny.path.write_bytes(raw[:-1])
    with pytest.raises(ArtifactRefused):
        build_server_model("tiny", tiny.path)
    tiny.path.write_bytes(raw)
    assert build_server_model("tiny", tiny.path).rows_independent
