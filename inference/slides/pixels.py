"""Pixel arithmetic that every reader shares: compositing, exact reduction, resampling."""

import numpy as np
from numpy.typing import NDArray


def composite(rgba: NDArray[np.uint8], background: tuple[int, int, int]) -> NDArray[np.uint8]:
    """RGBA (H, W, 4) over an opaque background -> RGB (H, W, 3); rounded to nearest."""
    rgb, alpha = rgba[..., :3], rgba[..., 3]
    if alpha.min(initial=255) == 255:
        return np.ascontiguousarray(rgb)
    weight = alpha[..., None].astype(np.uint32)
    mixed = rgb * weight + np.asarray(background, np.uint32) * (255 - weight)
    return ((mixed + 127) // 255).astype(np.uint8)


def reduce_area(image: NDArray[np.uint8], factor: int) -> NDArray[np.uint8]:
    """Mean over factor x factor blocks, rounded half up; height and width must divide by the factor."""
    if factor == 1:
        return image
    height, width, channels = image.shape
    # Strided sums: several times faster than a mean over reshaped axes.
    total = np.zeros((height // factor, width // factor, channels), np.uint32)
    for dy in range(factor):
        for dx in range(factor):
            total += image[dy::factor, dx::factor]
    return ((total + factor * factor // 2) // (factor * factor)).astype(np.uint8)


def block_mean(plane: NDArray[np.floating], factor: int) -> NDArray[np.float32]:
    """Mean over factor x factor blocks of a 2-D plane whose sides divide by the factor."""
    height, width = plane.shape
    blocks = plane.reshape(height // factor, factor, width // factor, factor)
    return np.asarray(blocks.mean(axis=(1, 3), dtype=np.float64), np.float32)


def resample_area(
    image: NDArray[np.uint8], x: float, y: float, width: float, height: float, out: tuple[int, int]
) -> NDArray[np.uint8]:
    """Area mean of the rectangle (x, y, width, height), in the image's pixels, on a raster of `out` (rows, columns).

    Each output pixel is the mean of the input weighted by exact overlap; the rectangle must lie inside the image.
    """
    rows = _area_weights(y, height, out[0], image.shape[0])
    columns = _area_weights(x, width, out[1], image.shape[1])
    return _apply(image, rows, columns)


def resample_bilinear(
    image: NDArray[np.uint8], x: float, y: float, width: float, height: float, out: tuple[int, int]
) -> NDArray[np.uint8]:
    """Bilinear samples at the output pixels' centres, edges repeated; arguments as in `resample_area`."""
    rows = _bilinear_weights(y, height, out[0], image.shape[0])
    columns = _bilinear_weights(x, width, out[1], image.shape[1])
    return _apply(image, rows, columns)


def _apply(image: NDArray[np.uint8], rows: NDArray[np.float32], columns: NDArray[np.float32]) -> NDArray[np.uint8]:
    planes = image.transpose(2, 0, 1).astype(np.float32)
    mixed = rows @ planes @ columns.T
    return np.ascontiguousarray(np.clip(np.floor(mixed + 0.5), 0, 255).astype(np.uint8).transpose(1, 2, 0))


def _area_weights(start: float, length: float, count: int, size: int) -> NDArray[np.float32]:
    """(count, size) overlaps of output intervals with unit input intervals, rows summing to 1."""
    edges = start + length / count * np.arange(count + 1)
    cells = np.arange(size)
    overlap = np.minimum(edges[1:, None], cells + 1) - np.maximum(edges[:-1, None], cells)
    weights = np.clip(overlap, 0, None)
    return np.asarray(weights / weights.sum(axis=1, keepdims=True), np.float32)


def _bilinear_weights(start: float, length: float, count: int, size: int) -> NDArray[np.float32]:
    centres = np.clip(start + length / count * (np.arange(count) + 0.5) - 0.5, 0, size - 1)
    distance = np.abs(centres[:, None] - np.arange(size))
    return np.asarray(np.clip(1 - distance, 0, None), np.float32)
