"""Rectangles of a level in one pass: the same pixels as read alone, each block once, nothing kept."""

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from inference.errors import SourceUnavailable, TileReadError
from inference.slides.blocks import BlockPass
from inference.slides.reader import Pixels
from tests.inference.slides.synthetic import ArrayReader, noise

WIDTH, HEIGHT = 300, 220


class _Blocky(ArrayReader):
    """Its best blocks are single stored tiles, as those of compressed tiles are."""

    def block_size(self, level: int, reduction: int) -> tuple[int, int]:
        return (self._tile // reduction, self._tile // reduction)


def _grid(side: int, step: int, size: tuple[int, int] = (WIDTH, HEIGHT)) -> NDArray[np.int64]:
    """Squares row by row, within the level."""
    places = [(x, y) for y in range(0, size[1] - side + 1, step) for x in range(0, size[0] - side + 1, step)]
    return np.array([(x, y, side, side) for x, y in places], np.int64)


def _all(found: BlockPass, count: int) -> list[Pixels]:
    return [found.read(index) for index in range(count)]


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_any_rectangles_at_any_reduction_are_what_the_reader_gives_for_each_alone(data: st.DataObject) -> None:
    reduction = data.draw(st.sampled_from([1, 2, 4]))
    reader = _Blocky([noise((WIDTH, HEIGHT))], tile=32)
    width, height = -(-WIDTH // reduction), -(-HEIGHT // reduction)
    count = data.draw(st.integers(1, 12))
    rectangles = []
    for _ in range(count):
        x, y = data.draw(st.integers(0, width - 1)), data.draw(st.integers(0, height - 1))
        rectangles.append((x, y, data.draw(st.integers(1, width - x)), data.draw(st.integers(1, height - y))))
    found = BlockPass(reader, 0, reduction, np.array(rectangles, np.int64))
    for index, (x, y, w, h) in enumerate(rectangles):
        assert np.array_equal(found.read(index).rgb, reader.read_reduced(0, reduction, x, y, w, h).rgb)
    assert found.blocks_held == 0


@pytest.mark.parametrize(("side", "step"), [(56, 56), (56, 28), (20, 40), (100, 60)])
def test_each_block_is_read_once_and_let_go_after_its_last_use(side: int, step: int) -> None:
    rectangles = _grid(side, step)
    found = BlockPass(_Blocky([noise((WIDTH, HEIGHT))], tile=32), 0, 1, rectangles)
    touched = set(found.touched())
    truth = {
        (column, row)
        for x, y, w, h in rectangles.tolist()
        for row in range(y // 32, (y + h - 1) // 32 + 1)
        for column in range(x // 32, (x + w - 1) // 32 + 1)
    }
    assert touched == truth
    most = 0
    for index in range(len(rectangles)):
        found.read(index)
        most = max(most, found.blocks_held)
    assert found.blocks_read == len(truth)
    assert found.blocks_held == 0
    rows = side // 32 + 2
    assert most <= rows * -(-WIDTH // 32), "what is held is some rows of blocks, not the slide"


def test_a_buffer_too_small_costs_time_and_not_memory_or_pixels() -> None:
    pixels = noise((WIDTH, HEIGHT))
    rectangles = _grid(56, 28)
    found = BlockPass(_Blocky([pixels], tile=32), 0, 1, rectangles, buffer_bytes=3 * 3 * 32 * 32)
    for index, (x, y, w, h) in enumerate(rectangles.tolist()):
        assert np.array_equal(found.read(index).rgb, pixels[y : y + h, x : x + w])
        assert found.blocks_held <= 3
    assert found.blocks_read > len(set(BlockPass(_Blocky([pixels], tile=32), 0, 1, rectangles).touched()))


def test_missing_pixels_are_told_where_they_are() -> None:
    rgba = noise((WIDTH, HEIGHT), channels=4)
    rgba[..., 3] = 255
    rgba[64:96, 96:128, 3] = 0
    rectangles = np.array([(90, 60, 40, 40), (0, 0, 40, 40)], np.int64)
    found = BlockPass(_Blocky([rgba], tile=32), 0, 1, rectangles)
    missing = found.read(0).missing
    assert missing is not None
    truth = np.zeros((40, 40), np.float32)
    truth[4:36, 6:38] = 1
    assert np.array_equal(missing, truth)
    assert found.read(1).missing is None


@pytest.mark.parametrize("block", [1, 4])
def test_damage_costs_the_rectangles_that_touch_it_also_where_blocks_are_larger_than_tiles(block: int) -> None:
    pixels = noise((WIDTH, HEIGHT))

    class Reader(ArrayReader):
        def block_size(self, level: int, reduction: int) -> tuple[int, int]:
            return (32 * block, 32 * block)

    reader = Reader([pixels], tile=32, damaged=[(0, 2, 3)])  # x 96-127, y 64-95
    rectangles = _grid(20, 20)
    found = BlockPass(reader, 0, 1, rectangles)
    for index, (x, y, w, h) in enumerate(rectangles.tolist()):
        if x < 128 and x + w > 96 and y < 96 and y + h > 64:
            with pytest.raises(TileReadError):
                found.read(index)
        else:
            assert np.array_equal(found.read(index).rgb, pixels[y : y + h, x : x + w])
    assert found.blocks_held == 0


def test_eight_threads_get_the_same_pixels_and_read_each_block_once() -> None:
    pixels = noise((1200, 900))
    rectangles = _grid(56, 28, (1200, 900))
    found = BlockPass(_Blocky([pixels], tile=32), 0, 1, rectangles)
    with ThreadPoolExecutor(8) as pool:
        tiles = list(pool.map(found.read, range(len(rectangles))))
    for tile, (x, y, w, h) in zip(tiles, rectangles.tolist(), strict=True):
        assert np.array_equal(tile.rgb, pixels[y : y + h, x : x + w])
    # A block may be let go between the uses of threads that are far apart, but hardly ever.
    assert found.blocks_read == len(set(BlockPass(_Blocky([pixels], tile=32), 0, 1, rectangles).touched()))
    assert found.blocks_held == 0


def test_a_lost_source_is_raised_for_whoever_reads_and_never_taken_for_damage() -> None:
    """One thread is in the block when the source goes; another waits for it."""
    entered, go = threading.Event(), threading.Event()

    class Lost(_Blocky):
        def read_reduced(self, level: int, reduction: int, x: int, y: int, width: int, height: int) -> Pixels:
            entered.set()
            assert go.wait(10)
            raise SourceUnavailable("the share is gone")

    found = BlockPass(Lost([noise((64, 64))], tile=32), 0, 1, np.array([(0, 0, 20, 20), (4, 4, 20, 20)], np.int64))
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(found.read, 0)
        assert entered.wait(10)
        second = pool.submit(found.read, 1)
        go.set()
        for reading in (first, second):
            with pytest.raises(SourceUnavailable):
                reading.result(10)
