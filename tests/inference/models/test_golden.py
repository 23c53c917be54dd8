"""The inputs that every checkpoint is tried with, and how what it returns is compared."""

import hashlib

import numpy as np
import pytest

from inference.models.golden import COUNT, MAX_VALUES, difference, golden_inputs, run_golden, thinned
from inference.models.spec import ModelSpec, load_model_spec


def test_the_inputs_are_these_and_will_be_in_every_version() -> None:
    tiles, extras = golden_inputs(load_model_spec("uni"))
    assert (tiles.shape, tiles.dtype.name, extras) == ((COUNT, 3, 224, 224), "uint8", {})
    assert hashlib.sha256(tiles.tobytes()).hexdigest()[:16] == "57c1539166687fff"
    tiles, extras = golden_inputs(load_model_spec("m-optimus"))
    assert {name: (values.shape, values.dtype.name) for name, values in extras.items()} == {
        "bulk_rna": ((COUNT, 19374), "float32"), "bulk_rna_present": ((COUNT, 1), "float32"),
    }  # fmt: skip
    assert extras["bulk_rna_present"].ravel().tolist() == [0, 1, 0, 1]
    assert hashlib.sha256(extras["bulk_rna"].tobytes()).hexdigest()[:16] == "eca7dd04f66bd3ab"


def test_tiles_differ_from_each_other_and_are_not_flat() -> None:
    tiles, _ = golden_inputs(load_model_spec("tissue-seg"))
    assert tiles.shape == (COUNT, 3, 512, 512)
    assert len({tile.tobytes() for tile in tiles}) == COUNT
    assert tiles.std() > 20


def test_a_heads_inputs_are_vectors() -> None:
    head = {"backbone": "uni", "embedding_dim": 10, "backbone_weights_sha256": "0" * 64}
    changes = {"head": head, "output_type": "prediction", "prediction_dim": 2, "embedding_dim": None}
    spec = load_model_spec("uni").model_dump() | changes
    vectors, _ = golden_inputs(ModelSpec.model_validate(spec))
    assert (vectors.shape, vectors.dtype.name) == ((COUNT, 10), "float32")
    assert -1 <= vectors.min() < 0 < vectors.max() < 1


@pytest.mark.parametrize("most", [1, 2, 3, 4, 100])
def test_a_graph_that_takes_fewer_rows_is_asked_in_parts(most: int) -> None:
    sizes = []

    def run(batch: object, extras: object) -> tuple[np.ndarray[tuple[int, ...], np.dtype[np.float32]], ...]:
        assert isinstance(batch, np.ndarray)
        sizes.append(len(batch))
        return (batch.reshape(len(batch), -1)[:, :3].astype(np.float32),)

    (found,) = run_golden(load_model_spec("uni"), run, most)
    assert found.shape == (COUNT, 3)
    assert max(sizes) <= most
    assert sum(sizes) == COUNT


def test_of_a_dense_output_as_many_values_are_kept_as_of_any_other() -> None:
    assert thinned(np.zeros((4, 1536), np.float32)).shape == (4, 1536)
    plane = np.arange(4 * 512 * 512, dtype=np.float32).reshape(4, 1, 512, 512)
    kept = thinned(plane)
    assert kept.shape == (4, MAX_VALUES)
    assert (kept[0, 0], kept[0, -1]) == (0, 512 * 512 - 1)


@pytest.mark.parametrize(
    ("found", "expected", "part"),
    [
        ([1.0, 2.0], [1.0, 2.0], 0.0),
        ([1.0, 2.2], [1.0, 2.0], 0.1),
        ([0.0, 0.5], [0.0, 0.0], 0.5),
        ([1.0, np.nan], [1.0, 2.0], np.inf),
        ([1.0, np.inf], [1.0, 2.0], np.inf),
    ],
)
def test_a_difference_is_a_part_of_the_largest_value(found: list[float], expected: list[float], part: float) -> None:
    assert difference(np.array(found, np.float32), np.array(expected, np.float32)) == pytest.approx(part)
