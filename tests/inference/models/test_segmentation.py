"""Masks: planes become classes, packed on the tensor path and flat in a response."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays
from numpy.typing import NDArray
from torch import Tensor

from inference.clients import InProcessClient
from inference.errors import ConfigError, ModelContractError, NonFiniteOutput
from inference.models.registry import Checkpoint
from inference.models.sample import PackedMask
from inference.models.segmentation import SegmentationServerModel
from inference.models.server_model import build_server_model, load_server_model
from tests.inference.models.kinds import PlaneNet, export_portable, flat, make_request, make_spec, sound

ONE = make_spec("one", prediction_names=["tissue"], mask={"size": 4, "threshold": 0.6})
THREE = make_spec("three", prediction_names=["glass", "tumour", "stroma"], mask={"size": 4})


@pytest.fixture(scope="module")
def one_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return export_portable(PlaneNet(1), ONE, tmp_path_factory.mktemp("one"))


@pytest.fixture(scope="module")
def one(one_checkpoint: Checkpoint) -> SegmentationServerModel:
    found = load_server_model(one_checkpoint)
    assert isinstance(found, SegmentationServerModel)
    return found


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> SegmentationServerModel:
    found = load_server_model(export_portable(PlaneNet(3), THREE, tmp_path_factory.mktemp("three")))
    assert isinstance(found, SegmentationServerModel)
    return found


def _noise(seed: int = 0) -> NDArray[np.uint8]:
    return np.random.default_rng(seed).integers(0, 256, (8, 8, 3), dtype=np.uint8)


# One class.


def test_pixels_from_the_threshold_up_are_in_the_mask(one: SegmentationServerModel) -> None:
    tile = _noise()
    tile[0, 0], tile[2, 2] = 153, 152  # 153 / 255 is the threshold
    (row,) = one.forward_tiles([one.prepare_tile(tile)], ["prediction"])
    found = sound(row)
    assert found.mask is not None
    expected = tile[::2, ::2, 0] >= 153
    assert np.array_equal(found.mask.unpack(), expected)
    assert (found.mask.encoding, found.mask.nbytes) == ("bits", 2)
    assert found.prediction is not None
    assert found.prediction.tolist() == [np.float32(expected.mean())]
    assert found.embedding is None


def test_a_response_has_the_mask_flat_row_after_row_as_zeros_and_ones(one: SegmentationServerModel) -> None:
    tile = _noise(1)
    with InProcessClient(one) as client:
        text = client.predict_with_embedding(make_request(tile).model_dump_json())
    answer = json.loads(text)
    assert answer["output"] == (tile[::2, ::2, 0] >= 153).astype(float).ravel().tolist()
    assert {type(value) for value in answer["output"]} == {float}
    assert len(answer["embedding"]) == 3
    assert one.forward([make_request(tile)]).tolist() == [answer["output"]]
    assert one.forward([]).shape == (0, 16)


def test_a_mask_with_nan_in_it_is_that_tiles_error_alone(one: SegmentationServerModel) -> None:
    samples = [one.prepare_tile(flat(value)) for value in (6, 7, 200)]
    found = one.forward_tiles(samples, ["prediction"] * 3)
    assert [isinstance(row, NonFiniteOutput) for row in found] == [False, True, False]
    masks = [sound(row).mask for row in (found[0], found[2])]
    assert [mask.unpack().mean() for mask in masks if mask is not None] == [0, 1]
    assert not any(isinstance(row, NonFiniteOutput) for row in one.forward_tiles(samples, ["embedding"] * 3))


def test_the_embedding_alone_computes_no_mask(one: SegmentationServerModel) -> None:
    (row,) = one.forward_tiles([one.prepare_tile(flat(9))], ["embedding"])
    found = sound(row)
    assert (found.mask, found.prediction) == (None, None)
    assert found.embedding is not None
    assert found.embedding.tolist() == [9.0] * 3


@pytest.mark.parametrize("threshold", [0.0, 0.25, 1.0])
def test_logits_of_a_sigmoid_are_cut_where_their_probability_is(
    one_checkpoint: Checkpoint, tmp_path: Path, threshold: float
) -> None:
    mask = {"size": 4, "values": "sigmoid_logit", "threshold": threshold}
    spec = make_spec("logits", prediction_names=["tissue"], mask=mask)
    server = load_server_model(export_portable(PlaneNet(1, scale=12.0, shift=-6.0), spec, tmp_path))
    tile = _noise(2)
    (row,) = server.forward_tiles([server.prepare_tile(tile)], ["prediction"])
    found = sound(row).mask
    assert found is not None
    probability = 1 / (1 + np.exp(6 - 12 * (tile[::2, ::2, 0] / 255.0)))
    assert np.array_equal(found.unpack(), probability >= threshold)
    assert found.unpack().any() == (threshold < 1)


# Several classes.


@pytest.mark.parametrize("values", ["probability", "softmax_logit"])
def test_of_several_planes_the_largest_names_the_class(values: str, tmp_path: Path) -> None:
    spec = make_spec("three", prediction_names=["a", "b", "c"], mask={"size": 4, "values": values})
    server = load_server_model(export_portable(PlaneNet(3), spec, tmp_path))
    tile = _noise(3)
    (row,) = server.forward_tiles([server.prepare_tile(tile)], ["prediction"])
    found = sound(row)
    assert found.mask is not None
    expected = tile[::2, ::2].argmax(axis=2)
    assert np.array_equal(found.mask.unpack(), expected)
    assert found.prediction is not None
    np.testing.assert_allclose(found.prediction, [(expected == k).mean() for k in range(3)])


def test_a_response_of_several_classes_has_each_pixels_class(three: SegmentationServerModel) -> None:
    tile = np.zeros((8, 8, 3), np.uint8)
    tile[:4, :, 1] = 9
    tile[4:, :, 2] = 9
    request = make_request(tile)
    (answer,) = three.forward_batch([three.prepare_sample(request)], [request], "prediction")
    assert answer.output == [1.0] * 8 + [2.0] * 8


# Packing.


def _classes(top: int) -> st.SearchStrategy[NDArray[np.uint8]]:
    shapes = array_shapes(min_dims=2, max_dims=2, max_side=40)
    return arrays(np.uint8, shapes, elements=st.integers(0, top))


@given(_classes(1))
def test_a_mask_of_one_class_unpacks_to_what_was_packed_at_a_bit_a_pixel(classes: NDArray[np.uint8]) -> None:
    packed = PackedMask.pack(classes, 1)
    assert np.array_equal(packed.unpack(), classes)
    assert packed.nbytes == math.ceil(classes.size / 8)


@given(_classes(4) | _classes(255), st.integers(1, 30))
def test_a_mask_of_several_classes_unpacks_to_what_was_packed_and_never_takes_more_than_a_byte_a_pixel(
    classes: NDArray[np.uint8], enlarged: int
) -> None:
    classes = classes.repeat(enlarged, axis=1)
    packed = PackedMask.pack(classes, 256)
    assert np.array_equal(packed.unpack(), classes)
    assert packed.nbytes <= classes.size


def test_large_areas_of_one_class_are_packed_as_runs() -> None:
    classes = np.zeros((512, 512), np.uint8)
    classes[:, 256:] = 3
    packed = PackedMask.pack(classes, 4)
    assert (packed.encoding, packed.nbytes) == ("runs", 1024 * 5)
    assert packed.lengths.sum() == 512 * 512
    assert PackedMask.pack(classes > 0, 1).nbytes == 512 * 512 // 8


def test_an_empty_mask_is_packed_too() -> None:
    for count in (1, 3):
        assert PackedMask.pack(np.zeros((0, 5), np.uint8), count).unpack().shape == (0, 5)


@pytest.mark.parametrize(
    ("classes", "count"),
    [
        (np.zeros(4), 1),
        (np.zeros((2, 2, 1)), 1),
        (np.full((2, 2), 2), 1),
        (np.full((2, 2), 3), 3),
        (np.full((2, 2), -1), 3),
        (np.zeros((2, 2)), 0),
        (np.zeros((2, 2)), 257),
    ],
)
def test_what_is_no_mask_of_these_classes_is_not_packed(classes: NDArray[np.float64], count: int) -> None:
    with pytest.raises(ValueError, match=f"a mask of {count} classes"):
        PackedMask.pack(classes, count)


# Loading.


def test_the_spec_decides_the_class(one_checkpoint: Checkpoint, tiny: Checkpoint) -> None:
    assert type(build_server_model("one", one_checkpoint.path)) is SegmentationServerModel
    with pytest.raises(ConfigError, match="tiny gives no mask: its spec has no mask part"):
        SegmentationServerModel(tiny.manifest.spec, tiny.path.name, "cpu", tiny.path.parent)


def test_planes_of_another_size_than_the_spec_says_are_refused_at_load(tmp_path: Path) -> None:
    spec = make_spec("one", prediction_names=["tissue"], mask={"size": 8})
    with pytest.raises(ModelContractError, match=r"one returned .*\(4, 1, 4, 4\).*declares .*\(4, 1, 8, 8\)"):
        load_server_model(export_portable(PlaneNet(1), spec, tmp_path))


def test_a_mask_of_512_pixels_is_262144_values_on_the_wire(tmp_path: Path) -> None:
    tile_spec = {"size": 512, "stride": 512, "resolution": 8.0}
    spec = make_spec("tissue", prediction_names=["tissue"], tile_spec=tile_spec, mask={"size": 512})
    server = load_server_model(export_portable(FullPlane(), spec, tmp_path))
    tile = np.zeros((512, 512, 3), np.uint8)
    tile[100:300, 50:400] = 255
    (row,) = server.forward_tiles([server.prepare_tile(tile)], ["prediction"])
    mask = sound(row).mask
    assert mask is not None
    assert mask.nbytes == 32_768
    request = make_request(tile, resolution=8.0)
    (answer,) = server.forward_batch([server.prepare_sample(request)], [request], "prediction")
    assert len(answer.output) == 262_144
    assert np.array_equal(np.reshape(answer.output, (512, 512)) == 1, tile[:, :, 0] == 255)


class FullPlane(PlaneNet):
    """The red plane at the tile's own size."""

    def __init__(self) -> None:
        super().__init__(1)

    def forward(self, image: Tensor) -> tuple[Tensor, Tensor]:
        x = image.to(torch.float32)
        return x.mean(dim=(2, 3)), x[:, :1] / 255
