"""Pixel arithmetic that every reader shares: compositing, exact reduction, resampling."""

from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray
from PIL import Image

_A = TypeVar("_A", bound=np.generic)

_FOUR_CHANNELS, _OPAQUE = np.dtype("<u4"), 0xFF000000


def composite(rgba: NDArray[np.uint8], background: tuple[int, int, int]) -> NDArray[np.uint8]:
    """RGBA (H, W, 4) over an opaque background -> RGB (H, W, 3); rounded to nearest."""
    rgb, alpha = rgba[..., :3], rgba[..., 3]
    if alpha.min(initial=255) == 255:
        return np.ascontiguousarray(rgb)
    weight = alpha[..., None].astype(np.uint16)  # 255 * 255 + 127 still fits
    mixed = rgb * weight
    mixed += np.asarray(background, np.uint16) * (255 - weight)
    mixed += 127
    mixed //= 255
    return mixed.astype(np.uint8)


def flatten(
    rgba: NDArray[np.uint8], background: tuple[int, int, int], factor: int
) -> tuple[NDArray[np.uint8], NDArray[np.float32] | None]:
    """RGBA (H, W, 4) over a background, reduced by the area mean: RGB, and the share of each pixel without any.

    For blocks that are not whole the last row or column is repeated. None where no alpha is 0.
    """
    rgba = edge_padded(np.ascontiguousarray(rgba), factor)
    alpha = rgba[..., 3]
    if rgba.view(_FOUR_CHANNELS).min(initial=_OPAQUE) >= _OPAQUE:
        return _packed(_reduced_four(rgba, factor)), None
    absent = alpha == 0
    missing = _share(absent, factor) if absent.any() else None
    if not ((alpha == 255) | absent).all():
        return reduce_area(composite(rgba, background), factor), missing
    filled = rgba.copy()
    filled.view(_FOUR_CHANNELS)[..., 0][absent] = int.from_bytes(bytes((*background, 255)), "little")
    return _packed(_reduced_four(filled, factor)), missing


def _share(plane: NDArray[np.bool_], factor: int) -> NDArray[np.float32]:
    """Share of each factor x factor block that is set; counted in whole numbers, which is several times faster."""
    rows = np.zeros((plane.shape[0] // factor, plane.shape[1]), np.uint16)
    for offset in range(factor):
        rows += plane[offset::factor]
    counts = np.zeros((rows.shape[0], rows.shape[1] // factor), np.uint16)
    for offset in range(factor):
        counts += rows[:, offset::factor]
    return np.asarray(counts / np.float32(factor * factor), np.float32)


def _reduced_four(image: NDArray[np.uint8], factor: int) -> NDArray[np.uint8]:
    """`reduce_area` of four channels, which are summed as lanes of one number: several times faster than three."""
    if factor == 1:
        return image
    height, width, _ = image.shape
    rows = np.zeros((height // factor, width, 4), np.uint16)
    for offset in range(factor):
        rows += image[offset::factor]
    lanes = rows.view(np.uint64)[..., 0]
    total = lanes[:, ::factor].copy()
    for offset in range(1, factor):
        total += lanes[:, offset::factor]  # no lane overflows: 255 * 8 * 8 fits 16 bits
    sums = total.view(np.uint16).reshape(height // factor, width // factor, 4)
    return ((sums + factor * factor // 2) // (factor * factor)).astype(np.uint8)


def _packed(rgba: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """The first three channels side by side; Pillow's packer is five times as fast as NumPy's copy."""
    height, width, _ = rgba.shape
    image = Image.frombuffer("RGBA", (width, height), rgba, "raw", "RGBA", 0, 1)
    return np.frombuffer(image.tobytes("raw", "RGB"), np.uint8).reshape(height, width, 3)


def reduce_area(image: NDArray[np.uint8], factor: int) -> NDArray[np.uint8]:
    """Mean over factor x factor blocks, rounded half up; height and width must divide by the factor."""
    if factor == 1:
        return image
    height, width, channels = image.shape
    # 255 * 16 * 16 still fits 16 bits, with the half that rounds. Strided sums, one axis after the other, are several
    # times faster than a mean over reshaped axes, and exact.
    dtype = np.uint16 if factor <= 16 else np.uint32
    rows = np.zeros((height // factor, width, channels), dtype)
    for offset in range(factor):
        rows += image[offset::factor]
    total = np.zeros((height // factor, width // factor, channels), dtype)
    for offset in range(factor):
        total += rows[:, offset::factor]
    return ((total + factor * factor // 2) // (factor * factor)).astype(np.uint8)


def block_mean(plane: NDArray[np.floating], factor: int) -> NDArray[np.float32]:
    """Mean over factor x factor blocks of a 2-D plane whose sides divide by the factor."""
    height, width = plane.shape
    blocks = plane.reshape(height // factor, factor, width // factor, factor)
    return np.asarray(blocks.mean(axis=(1, 3), dtype=np.float64), np.float32)


def edge_padded(image: NDArray[_A], factor: int) -> NDArray[_A]:
    """Sides repeated up to a multiple of the factor, so that the last cell is the mean of what it covers."""
    rest = [(0, -side % factor) for side in image.shape[:2]]
    return np.pad(image, rest + [(0, 0)] * (image.ndim - 2), mode="edge") if any(after for _, after in rest) else image


def resample_area(
    image: NDArray[np.uint8], x: float, y: float, width: float, height: float, out: tuple[int, int]
) -> NDArray[np.uint8]:
    """Area mean of the rectangle (x, y, width, height), in the image's pixels, on a raster of `out` (rows, columns).

    Each output pixel is the mean of the input weighted by exact overlap; the rectangle may leave the image by less
    than half an output pixel.
    """
    rows = _area_taps(y, height, out[0], image.shape[0])
    columns = _area_taps(x, width, out[1], image.shape[1])
    return _resample(image, rows, columns)


def resample_bilinear(
    image: NDArray[np.uint8], x: float, y: float, width: float, height: float, out: tuple[int, int]
) -> NDArray[np.uint8]:
    """Bilinear samples at the output pixels' centres, edges repeated; arguments as in `resample_area`."""
    rows = _bilinear_taps(y, height, out[0], image.shape[0])
    columns = _bilinear_taps(x, width, out[1], image.shape[1])
    return _resample(image, rows, columns)


@dataclass(frozen=True, eq=False)
class _Taps:
    """Along one axis, the input pixels of each output pixel and their weights: both (outputs, taps), rows summing to 1.

    Taps beyond the image weigh nothing.
    """

    index: NDArray[np.intp]
    weight: NDArray[np.float32]


def _resample(image: NDArray[np.uint8], rows: _Taps, columns: _Taps) -> NDArray[np.uint8]:
    width, channels = image.shape[1:]
    mixed = _mix(image.reshape(len(image), -1), rows).reshape(-1, width, channels)
    turned = np.ascontiguousarray(mixed.transpose(1, 0, 2)).reshape(width, -1)
    mixed = _mix(turned, columns).reshape(len(columns.index), -1, channels)
    rounded = np.clip(mixed + np.float32(0.5), 0, 255).astype(np.uint8)
    return np.ascontiguousarray(rounded.transpose(1, 0, 2))


def _mix(lines: NDArray[np.uint8] | NDArray[np.float32], taps: _Taps) -> NDArray[np.float32]:
    """Weighted sums of lines, tap after tap: the same bits on every machine and for any number of threads."""
    total = np.zeros((len(taps.index), lines.shape[1]), np.float32)
    for k in range(taps.index.shape[1]):
        total += lines[taps.index[:, k]] * taps.weight[:, k, None]
    return total


def _area_taps(start: float, length: float, count: int, size: int) -> _Taps:
    """Overlaps of output intervals with unit input intervals."""
    edges = start + length / count * np.arange(count + 1)
    first = np.floor(edges[:-1]).astype(np.intp)
    cells = first[:, None] + np.arange(int((np.ceil(edges[1:]) - first).max()))
    overlap = np.minimum(edges[1:, None], cells + 1) - np.maximum(edges[:-1, None], cells)
    return _taps(cells, np.clip(overlap, 0, None), size)


def _bilinear_taps(start: float, length: float, count: int, size: int) -> _Taps:
    centres = np.clip(start + length / count * (np.arange(count) + 0.5) - 0.5, 0, size - 1)
    cells = np.floor(centres).astype(np.intp)[:, None] + np.arange(2)
    return _taps(cells, 1 - np.abs(centres[:, None] - cells), size)


def _taps(cells: NDArray[np.intp], weights: NDArray[np.float64], size: int) -> _Taps:
    weights = np.where((cells >= 0) & (cells < size), weights, 0)
    weights /= weights.sum(axis=1, keepdims=True)
    return _Taps(np.clip(cells, 0, size - 1), weights.astype(np.float32))
