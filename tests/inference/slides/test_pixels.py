"""Pixel arithmetic against slow references in exact or double arithmetic."""

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray

from inference.slides.pixels import block_mean, composite, reduce_area, resample_area, resample_bilinear

WHITE = (255, 255, 255)


def _images(max_side: int = 9, channels: int = 3) -> st.SearchStrategy[NDArray[np.uint8]]:
    side = st.integers(1, max_side)
    return st.tuples(side, side).flatmap(lambda hw: hnp.arrays(np.uint8, (*hw, channels)))


def _overlaps(start: float, length: float, count: int, size: int) -> NDArray[np.float64]:
    """Share of every output pixel that each input pixel covers, by exact fractions."""
    step = Fraction(length) / count
    table = np.zeros((count, size))
    for i in range(count):
        low, high = Fraction(start) + step * i, Fraction(start) + step * (i + 1)
        parts = [max(Fraction(0), min(high, Fraction(k + 1)) - max(low, Fraction(k))) for k in range(size)]
        table[i] = [float(part / sum(parts)) for part in parts]
    return table


def _area_reference(
    image: NDArray[np.uint8], x: float, y: float, width: float, height: float, out: tuple[int, int]
) -> NDArray[np.float64]:
    rows, columns = _overlaps(y, height, out[0], image.shape[0]), _overlaps(x, width, out[1], image.shape[1])
    return np.asarray(np.einsum("ry,yxc,kx->rkc", rows, image.astype(np.float64), columns))


def _bilinear_reference(
    image: NDArray[np.uint8], x: float, y: float, width: float, height: float, out: tuple[int, int]
) -> NDArray[np.float64]:
    """One output pixel after the other, from its centre's four neighbours."""
    result = np.zeros((*out, image.shape[2]))
    for i in range(out[0]):
        for j in range(out[1]):
            v = min(max(y + height / out[0] * (i + 0.5) - 0.5, 0), image.shape[0] - 1)
            u = min(max(x + width / out[1] * (j + 0.5) - 0.5, 0), image.shape[1] - 1)
            v0, u0 = math.floor(v), math.floor(u)
            v1, u1 = min(v0 + 1, image.shape[0] - 1), min(u0 + 1, image.shape[1] - 1)
            a, b = v - v0, u - u0
            top = (1 - b) * image[v0, u0].astype(float) + b * image[v0, u1]
            bottom = (1 - b) * image[v1, u0].astype(float) + b * image[v1, u1]
            result[i, j] = (1 - a) * top + a * bottom
    return result


def _assert_rounded(result: NDArray[np.uint8], exact: NDArray[np.float64]) -> None:
    """Rounded to nearest; a value within a thousandth of the middle between two may go either way."""
    assert result.dtype == np.uint8
    assert result.flags.c_contiguous
    assert np.abs(result - exact).max() <= 0.501


@st.composite
def _rectangles(draw: st.DrawFn) -> tuple[NDArray[np.uint8], tuple[float, float, float, float], tuple[int, int]]:
    """An image, a rectangle within it, and a raster that is not finer than the image (with the area mean)."""
    image = draw(_images(max_side=12))
    spans, counts = [], []
    for size in (image.shape[1], image.shape[0]):
        length = draw(st.floats(1, size))
        spans.append((draw(st.floats(0, size - length)), length))
        counts.append(draw(st.integers(1, max(1, math.floor(length)))))
    (x, width), (y, height) = spans
    return image, (x, y, width, height), (counts[1], counts[0])


@given(_images(channels=4), st.tuples(*[st.integers(0, 255)] * 3))
def test_compositing_is_the_rounded_mix_with_the_background(
    rgba: NDArray[np.uint8], background: tuple[int, int, int]
) -> None:
    result = composite(rgba, background)
    for y in range(rgba.shape[0]):
        for x in range(rgba.shape[1]):
            alpha = int(rgba[y, x, 3])
            for c in range(3):
                exact = Fraction(int(rgba[y, x, c]) * alpha + background[c] * (255 - alpha), 255)
                assert abs(int(result[y, x, c]) - exact) < Fraction(1, 2)


def test_compositing_leaves_opaque_pixels_alone_and_hides_what_is_under_alpha_zero() -> None:
    rgba = np.zeros((2, 2, 4), np.uint8)
    rgba[0, 0] = (1, 2, 3, 255)
    rgba[0, 1] = (9, 9, 9, 0)
    result = composite(rgba, (200, 210, 220))
    assert result[0].tolist() == [[1, 2, 3], [200, 210, 220]]
    assert composite(rgba[:1, :1], WHITE).tolist() == [[[1, 2, 3]]]
    assert composite(np.zeros((0, 3, 4), np.uint8), WHITE).shape == (0, 3, 3)


def test_compositing_does_not_change_its_input() -> None:
    rgba = np.full((2, 2, 4), 100, np.uint8)
    composite(rgba, WHITE)
    assert (rgba == 100).all()


@given(st.data(), st.integers(1, 9))
def test_reduction_is_the_mean_of_each_block_rounded_half_up(data: st.DataObject, factor: int) -> None:
    height, width = (data.draw(st.integers(1, 3)) * factor for _ in range(2))
    image = data.draw(hnp.arrays(np.uint8, (height, width, 3)))
    result = reduce_area(image, factor)
    for y in range(height // factor):
        for x in range(width // factor):
            block = image[y * factor : (y + 1) * factor, x * factor : (x + 1) * factor].astype(int)
            expected = [math.floor(Fraction(int(block[..., c].sum()), factor**2) + Fraction(1, 2)) for c in range(3)]
            assert result[y, x].tolist() == expected


@pytest.mark.parametrize("factor", [16, 17, 32, 256, 2048])
def test_reduction_by_large_factors_does_not_overflow(factor: int) -> None:
    side = max(factor, 64)
    side -= side % factor
    assert (reduce_area(np.full((side, side, 3), 255, np.uint8), factor) == 255).all()
    assert (reduce_area(np.full((side, side, 3), 254, np.uint8), factor) == 254).all()


@given(st.data(), st.integers(1, 5))
def test_block_means_of_a_plane_are_means(data: st.DataObject, factor: int) -> None:
    shape = tuple(data.draw(st.integers(1, 4)) * factor for _ in range(2))
    plane = data.draw(hnp.arrays(np.float32, shape, elements=st.floats(0, 1, width=32)))
    result = block_mean(plane, factor)
    assert result.dtype == np.float32
    for y, x in np.ndindex(result.shape):
        block = plane[y * factor : (y + 1) * factor, x * factor : (x + 1) * factor]
        assert result[y, x] == pytest.approx(math.fsum(block.ravel()) / factor**2, abs=1e-6)


@given(_rectangles())
def test_area_resampling_is_the_mean_weighted_by_exact_overlap(
    case: tuple[NDArray[np.uint8], tuple[float, float, float, float], tuple[int, int]],
) -> None:
    image, rectangle, out = case
    _assert_rounded(resample_area(image, *rectangle, out), _area_reference(image, *rectangle, out))


@given(_rectangles(), st.integers(1, 4))
def test_bilinear_sampling_interpolates_at_the_pixel_centres(
    case: tuple[NDArray[np.uint8], tuple[float, float, float, float], tuple[int, int]], enlarge: int
) -> None:
    image, rectangle, (rows, columns) = case
    out = (rows * enlarge, columns * enlarge)
    _assert_rounded(resample_bilinear(image, *rectangle, out), _bilinear_reference(image, *rectangle, out))


@given(st.floats(0.2, 3), st.floats(0, 0.99), st.floats(0, 0.99), st.integers(0, 255))
def test_resampling_keeps_a_constant_constant(scale: float, x: float, y: float, value: int) -> None:
    """Weights sum to one, also where the rectangle leaves the image by less than half an output pixel."""
    image = np.full((40, 50, 3), value, np.uint8)
    beyond = min(0.49 * scale, 0.49)
    out = (max(1, int(20 / scale)), max(1, int(30 / scale)))
    for resample in (resample_area, resample_bilinear) if scale >= 1 else (resample_bilinear,):
        assert (resample(image, x, y, 50 - x + beyond, 40 - y + beyond, out) == value).all()


def test_an_aligned_area_mean_is_the_exact_reduction() -> None:
    image = np.random.default_rng(0).integers(0, 256, (32, 48, 3), dtype=np.uint8)
    for factor in (1, 2, 4, 8):
        out = (32 // factor, 48 // factor)
        assert np.array_equal(resample_area(image, 0, 0, 48, 32, out), reduce_area(image, factor))


def test_rows_and_columns_are_resampled_apart() -> None:
    image = np.zeros((4, 4, 3), np.uint8)
    image[:, 2:] = 200
    assert resample_area(image, 0, 0, 4, 4, (4, 2))[:, :, 0].tolist() == [[0, 200]] * 4
    assert resample_area(image, 0, 0, 4, 4, (2, 4))[:, :, 0].tolist() == [[0, 0, 200, 200]] * 2
