"""Shapes, noise and nuclei from which a synthetic tissue section is painted.

Lengths are level-0 pixels of 0.25 µm; a half pixel is a block of 2 x 2 of them.
"""

from dataclasses import dataclass
from functools import cache
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray
from scipy.ndimage import gaussian_filter

Floats: TypeAlias = NDArray[np.float32]
Points: TypeAlias = NDArray[np.float64]
Bytes: TypeAlias = NDArray[np.uint8]
Mask: TypeAlias = NDArray[np.bool_]
Stamp: TypeAlias = tuple[Bytes, Mask]

TURNS = 24  # orientations in a bank of stamps, over half a turn


@dataclass(frozen=True, eq=False)
class Outline:
    """A star-shaped polygon with its vertices at equal angles about its centre."""

    x: float
    y: float
    radii: Floats

    def vertices(self) -> Floats:
        angle = np.arange(len(self.radii)) * (2 * np.pi / len(self.radii))
        xy = np.stack([self.x + self.radii * np.cos(angle), self.y + self.radii * np.sin(angle)], axis=1)
        return xy.astype(np.float32)

    def depth(self, x: Floats, y: Floats) -> Floats:
        """Radial distance to the edge, positive inside; its sign is exact for the polygon."""
        corners = self.vertices() - np.array((self.x, self.y), np.float32)
        following = np.roll(corners, -1, axis=0)
        cross = corners[:, 0] * following[:, 1] - corners[:, 1] * following[:, 0]
        normal = np.stack([following[:, 1] - corners[:, 1], corners[:, 0] - following[:, 0]]) / cross
        dx, dy = x - np.float32(self.x), y - np.float32(self.y)
        turns = np.arctan2(dy, dx) * np.float32(len(self.radii) / (2 * np.pi))
        sector = np.floor(turns).astype(np.int32) % len(self.radii)
        share = np.maximum(normal[0, sector] * dx + normal[1, sector] * dy, np.float32(1e-6))  # 1 on the edge
        depth: Floats = np.hypot(dx, dy) * (1 / share - 1)
        return depth

    def window(self, shape: tuple[int, int], margin: float = 0.0) -> tuple[slice, slice]:
        """Half-pixel rows and columns that hold the outline and `margin` level-0 pixels around it."""
        xy = self.vertices()
        low, high = (xy.min(0) - margin) / 2, (xy.max(0) + margin) / 2 + 1
        rows = slice(max(0, int(low[1])), min(shape[0], max(0, int(high[1]))))
        return rows, slice(max(0, int(low[0])), min(shape[1], max(0, int(high[0]))))


def half_grid(window: tuple[slice, slice]) -> tuple[Floats, Floats]:
    """Level-0 x and y of the centres of the half pixels of a window, ready to broadcast."""
    rows, cols = window
    y = np.arange(rows.start, rows.stop, dtype=np.float32)[:, None] * 2 + 1
    x = np.arange(cols.start, cols.stop, dtype=np.float32)[None] * 2 + 1
    return x, y


class SmoothNoise:
    """Cubic B-spline noise with its knots `period` samples apart, about mean 0 and deviation 1."""

    def __init__(self, rng: np.random.Generator, shape: tuple[int, int], period: float) -> None:
        size = [int(n / period) + 5 for n in shape]
        self.shape, self.period = shape, period
        self._knots: Floats = rng.standard_normal(size).astype(np.float32) * np.float32(2.1)

    def rows(self, top: int, bottom: int) -> Floats:
        tall = self._interpolate(self._knots, np.arange(top, bottom)).T
        wide = self._interpolate(np.ascontiguousarray(tall), np.arange(self.shape[1]))
        return wide.T

    def whole(self) -> Floats:
        return self.rows(0, self.shape[0])

    def _interpolate(self, knots: Floats, samples: NDArray[np.int_]) -> Floats:
        at = np.divide(samples, self.period, dtype=np.float32)
        knot = at.astype(np.int32)
        f = (at - knot.astype(np.float32))[:, None]
        weights = ((1 - f) ** 3 / 6, (3 * f**3 - 6 * f**2 + 4) / 6, (-3 * f**3 + 3 * f**2 + 3 * f + 1) / 6, f**3 / 6)
        total: Floats = np.multiply(knots[knot], weights[0], dtype=np.float32)
        for k in (1, 2, 3):
            total += knots[knot + k] * weights[k]
        return total


def streaks_at(across: Floats, along: Floats) -> Floats:
    """Fibre texture, mean 0 and deviation 1, at half-pixel coordinates across and along the fibres."""
    streaks = _streaks()
    row = np.floor(across * 2).astype(np.int32) % len(streaks)  # two rows per half pixel
    col = np.floor(along).astype(np.int32) % streaks.shape[1]
    texture: Floats = streaks[row, col]
    return texture


@cache
def _streaks() -> Floats:
    """A texture of streaks along x that repeats in both directions."""
    rows, cols = 2048, 1024
    white = np.random.default_rng(5).standard_normal((rows, cols))
    fy, fx = np.fft.fftfreq(rows)[:, None], np.fft.rfftfreq(cols)[None]
    gain = np.zeros((rows, cols // 2 + 1))
    for across, along, weight in ((1.5, 9, 0.55), (5, 26, 1.0), (16, 70, 0.8)):  # Gaussians of these deviations
        blur = np.exp(-2 * np.pi**2 * ((across * fy) ** 2 + (along * fx) ** 2))
        gain += weight * np.sqrt(across * along) * blur
    texture = np.fft.irfft2(np.fft.rfft2(white) * gain, s=(rows, cols))
    texture -= texture.mean()
    streaks: Floats = (texture / texture.std()).astype(np.float32)
    return streaks


def nucleus_stamps(
    rng: np.random.Generator, semi_axes_px: tuple[float, float], shapes: int, vesicular: bool = False
) -> list[list[Stamp]]:
    """Nuclei by orientation and shape: haematoxylin as a share of 256, and the painted mask.

    Orientation k is a turn of k * pi / `TURNS`. A vesicular nucleus is pale within and has a nucleolus.
    """
    reach = int(max(semi_axes_px) * 1.35) + 3
    y, x = np.mgrid[-reach : reach + 1, -reach : reach + 1].astype(np.float32)
    bank: list[list[Stamp]] = [[] for _ in range(TURNS)]
    for step in range(TURNS):
        angle = step * np.pi / TURNS
        for _ in range(shapes):
            a, b = np.array(semi_axes_px) * rng.uniform(0.84, 1.16, 2)
            u, v = x * np.cos(angle) + y * np.sin(angle), y * np.cos(angle) - x * np.sin(angle)
            around = np.arctan2(v / b, u / a)
            lobes = sum(rng.normal(0, 0.04) * np.cos(k * around + rng.uniform(0, 6.28)) for k in (2, 3, 4))
            size = np.hypot(u / a, v / b) / (1 + lobes)  # 1 on the nucleus's edge
            edge = np.clip(0.5 + (1 - size) * np.sqrt(a * b) / 1.8, 0, 1)  # optics blur the edge
            chromatin = gaussian_filter(rng.standard_normal(x.shape), 1.5) * 4
            shade = 0.93 + 0.05 * chromatin
            if vesicular:
                shade += 0.07 - 0.17 * np.clip((0.86 - size) * 3, 0, 1)  # dark membrane, pale centre
                spot = rng.uniform(-0.3, 0.3, 2) * (a, b)
                shade += 0.22 * np.exp(-((u - spot[0]) ** 2 + (v - spot[1]) ** 2) / 7)
            bank[step].append((np.rint(255 * edge * shade.clip(0.5, 1)).astype(np.uint8), size < 1))
    return bank


def jittered_lattice(
    rng: np.random.Generator, low: NDArray[np.floating], high: NDArray[np.floating], spacing: float, jitter: float
) -> Points:
    """Points of a triangular lattice, each moved by up to `jitter` spacings in x and y; (n, 2) as x, y."""
    y = np.arange(low[1], high[1], spacing * np.sqrt(0.75), dtype=np.float64)
    x = np.arange(low[0], high[0], spacing, dtype=np.float64)
    shift = (np.arange(len(y)) % 2) * (spacing / 2)
    xy = np.stack(np.broadcast_arrays(x[None] + shift[:, None], y[:, None]), axis=-1).reshape(-1, 2)
    return xy + rng.uniform(-jitter * spacing, jitter * spacing, xy.shape)
