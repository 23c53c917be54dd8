"""Paints a synthetic haematoxylin-and-eosin section and records what was painted where.

Lengths are level-0 pixels of 0.25 µm unless they are said to be half pixels.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray
from scipy.ndimage import gaussian_filter

from pipelines.demo.staining import STAIN_PER_UNIT, PaintedSection, sensor_noise, stain_bytes
from pipelines.demo.textures import (
    TURNS,
    Bytes,
    Floats,
    Outline,
    Points,
    SmoothNoise,
    Stamp,
    half_grid,
    jittered_lattice,
    nucleus_stamps,
    streaks_at,
)

T = TypeVar("T", bound=np.generic)

GLAND_SPACING_PX = 400.0
RING_PX = 27.0  # radial distance between the rows of nuclei of a gland
ANGLES = 96  # samples of a gland's outline


@dataclass(frozen=True)
class Ellipse:
    """Where a piece of tissue lies: centre and semi-axes as fractions of the slide's width and height."""

    x: float
    y: float
    half_width: float
    half_height: float
    turn_deg: float = 0.0


@dataclass(frozen=True)
class SectionPlan:
    """What to paint; the dense region lies within a piece and is clipped to it."""

    width: int
    height: int
    seed: int
    pieces: tuple[Ellipse, ...]
    dense: Ellipse


def rough_outline(
    rng: np.random.Generator, plan: SectionPlan, ellipse: Ellipse, roughness: float, corners: int
) -> Outline:
    """An ellipse whose radius is disturbed by about `roughness` of itself."""
    angle = np.arange(corners) * (2 * np.pi / corners)
    turned = angle - np.deg2rad(ellipse.turn_deg)
    a, b = ellipse.half_width * plan.width, ellipse.half_height * plan.height
    radii = a * b / np.hypot(b * np.cos(turned), a * np.sin(turned))
    swell = np.zeros(corners)
    for k in range(2, min(24, corners // 4)):
        swell += rng.normal(0, k**-1.35) * np.cos(k * angle + rng.uniform(0, 2 * np.pi))
    radii = radii * np.exp(roughness * swell)
    return Outline(ellipse.x * plan.width, ellipse.y * plan.height, radii.astype(np.float32))


class SectionPainter:
    """Holds the arrays of one section while they are painted, in the order of `paint`."""

    def __init__(self, plan: SectionPlan) -> None:
        self.plan = plan
        self.rng = np.random.default_rng(plan.seed)
        self.shape = (plan.height // 2, plan.width // 2)
        self.pieces = [rough_outline(self.rng, plan, piece, 0.13, 512) for piece in plan.pieces]
        self.outline = rough_outline(self.rng, plan, plan.dense, 0.13, 256)
        self.eosin: Floats = np.zeros(self.shape, np.float32)
        self.haematoxylin: Floats = np.zeros(self.shape, np.float32)
        self.depth: Floats = np.full(self.shape, -1e4, np.float32)  # of the tissue's edge
        self.dense_depth: Floats = np.full(self.shape, -1e4, np.float32)
        self.fibre: Floats = np.zeros(self.shape, np.float32)  # coordinate across the fibres
        self.crowded = np.zeros(self.shape, np.bool_)  # where stroma cells have no room
        self.nuclei: Bytes = np.zeros((plan.height, plan.width), np.uint8)
        self.painted = np.zeros((plan.height, plan.width), np.bool_)

    def paint(self) -> PaintedSection:
        self._outline_tissue()
        self._paint_stroma()
        self._paint_vessels(round(self.plan.width * self.plan.height / 8e5))
        self._paint_glands()
        self._scatter_stroma_nuclei()
        tissue = self.depth > 0
        ink = self.painted.view(np.uint8)
        return PaintedSection(
            eosin=stain_bytes(self.eosin),
            haematoxylin=stain_bytes(self.haematoxylin),
            nuclei=self.nuclei,
            nuclei_count=ink[::2, ::2] + ink[1::2, ::2] + ink[::2, 1::2] + ink[1::2, 1::2],
            tissue=tissue,
            dense=(self.dense_depth > 0) & tissue,
            dense_polygon=self.outline.vertices(),
            noise=sensor_noise(self.rng),
        )

    def _outline_tissue(self) -> None:
        for piece in self.pieces:
            window = piece.window(self.shape)
            self.depth[window] = np.maximum(self.depth[window], piece.depth(*half_grid(window)))
        for amplitude, period in ((12, 40), (5, 9)):
            noise = SmoothNoise(self.rng, self.shape, period)
            for band in _bands(self.shape[0]):
                self.depth[band] += amplitude * noise.rows(band.start, band.stop)
        window = self.outline.window(self.shape, margin=200)
        self.dense_depth[window] = self.outline.depth(*half_grid(window))

    def _paint_stroma(self) -> None:
        """Wavy collagen: a streaked texture looked up at bent coordinates."""
        bends = ((420, 700), (34, 150), (7, 42), (0.9, 11))  # amplitude and period across the fibres
        across = [(amplitude, SmoothNoise(self.rng, self.shape, period)) for amplitude, period in bends]
        along = SmoothNoise(self.rng, self.shape, 600)
        patches = SmoothNoise(self.rng, self.shape, 220)
        for band in _bands(self.shape[0]):
            top, bottom = band.start, band.stop
            self.fibre[band] = np.arange(top, bottom)[:, None]
            for amplitude, noise in across:
                self.fibre[band] += amplitude * noise.rows(top, bottom)
            column = np.arange(self.shape[1], dtype=np.float32) + 300 * along.rows(top, bottom)
            texture = streaks_at(self.fibre[band], column)
            patch = patches.rows(top, bottom)
            clefts = np.clip((-texture - 1.55 - 0.4 * patch) * 2.2, 0, 1)  # white slits between bundles
            rim = np.exp(-np.abs(self.dense_depth[band] + 30) / 26) * np.float32(0.06)  # capsule of the dense region
            edge = np.exp(-np.maximum(self.depth[band], 0) / 60) * np.float32(0.04)  # stain gathers at cut edges
            stain = np.clip(0.185 + 0.02 * patch + 0.038 * texture + edge, 0.05, 0.5)
            inside = np.clip(self.depth[band] / 3, 0, 1)
            self.eosin[band] = (stain * (1 - 0.97 * clefts) + rim) * inside
            self.haematoxylin[band] = (0.015 + 0.06 * np.maximum(stain - 0.16, 0)) * (1 - clefts) * inside
            self.crowded[band] = clefts > 0.3

    def _paint_vessels(self, count: int) -> None:
        for _ in range(count):
            radius = self.rng.uniform(22, 62)
            swell = self.rng.uniform(0.75, 1.25, 9)[np.arange(72) // 8]
            radii = radius * gaussian_filter(swell, 4, mode="wrap")
            x, y = self.rng.uniform(0.02, 0.98, 2) * (self.plan.width, self.plan.height)
            vessel = Outline(float(x), float(y), radii.astype(np.float32))
            row, col = int(y) // 2, int(x) // 2
            if self.depth[row, col] < 2.5 * radius or self.dense_depth[row, col] > -2.5 * radius:
                continue
            window = vessel.window(self.shape, margin=40)
            grid = half_grid(window)
            depth = vessel.depth(*grid)
            wall = np.exp(-((depth + 9) ** 2) / 120) * np.float32(0.16)
            lumen = np.clip(depth / 3, 0, 1)
            blood = self._red_cells(vessel, grid)
            self.eosin[window] = (self.eosin[window] + wall) * (1 - 0.97 * lumen) + blood * lumen
            self.haematoxylin[window] *= 1 - lumen
            self.crowded[window] |= depth > -12

    def _red_cells(self, vessel: Outline, grid: tuple[Floats, Floats]) -> Floats:
        blood = np.zeros(np.broadcast_shapes(grid[0].shape, grid[1].shape), np.float32)
        reach = float(vessel.radii.max())
        for dx, dy in self.rng.uniform(-reach, reach, (int(reach * reach / 170), 2)):
            far = np.hypot(grid[0] - vessel.x - dx, grid[1] - vessel.y - dy)
            cell = np.clip((13 - far) / 2, 0, 1) * np.float32(self.rng.uniform(0.40, 0.48))
            blood = np.maximum(blood, cell * (1 - 0.15 * (far < 5)))
        return blood

    def _paint_glands(self) -> None:
        centres = self._gland_centres()
        angle = np.arange(ANGLES) * (2 * np.pi / ANGLES)
        stamps = nucleus_stamps(self.rng, (14.0, 10.0), shapes=8, vesicular=True)
        for i, centre in enumerate(centres):
            offset = np.delete(centres, i, axis=0) - centre
            offset = offset[np.hypot(*offset.T) < 2.4 * GLAND_SPACING_PX]
            facing = np.maximum(offset[:, :1] * np.cos(angle) + offset[:, 1:] * np.sin(angle), 1e-3)
            wall = (offset**2).sum(1)[:, None] / 2 / facing  # where each neighbour's half begins
            # The power mean of the walls rounds the corners of the Voronoi cell.
            wall = np.vstack([wall, self._reach(centre, angle)])
            radii = (wall**-7.0).sum(0) ** (-1 / 7) - self.rng.uniform(4, 20)
            gland = Outline(float(centre[0]), float(centre[1]), radii.astype(np.float32))
            rings = int(self.rng.choice((3, 4, 4, 5, 6)))
            self._paint_epithelium(gland, rings)
            self._place_gland_nuclei(gland, rings, stamps)

    def _gland_centres(self) -> Points:
        xy = self.outline.vertices()
        low, high = xy.min(0) - GLAND_SPACING_PX, xy.max(0) + GLAND_SPACING_PX
        centres = jittered_lattice(self.rng, low, high, GLAND_SPACING_PX, 0.2)
        deep = self.outline.depth(*centres.T.astype(np.float32)) > 100
        return centres[deep & (self._sample(self.depth, centres) > 60)]

    def _reach(self, centre: Points, angle: NDArray[np.floating]) -> Points:
        """How far a gland may grow in each direction before it leaves the dense region."""
        r = np.linspace(0.1, 0.62, 40)[:, None] * GLAND_SPACING_PX
        x, y = centre[0] + r * np.cos(angle), centre[1] + r * np.sin(angle)
        outside = self.outline.depth(x.astype(np.float32), y.astype(np.float32)) < 0
        outside[-1] = True
        reach: Points = r[outside.argmax(0), 0]
        return reach

    def _paint_epithelium(self, gland: Outline, rings: int) -> None:
        window = gland.window(self.shape, margin=12)
        depth = gland.depth(*half_grid(window))
        thickness = rings * RING_PX + self.rng.uniform(12, 30)
        grain = SmoothNoise(self.rng, (depth.shape[0], depth.shape[1]), 5).whole()
        within = np.clip(depth / 3 + 0.5, 0, 1) * np.clip(self.dense_depth[window] / 3, 0, 1)
        lumen = np.clip((depth - thickness + 5 * grain) / 4, 0, 1)
        brush = np.exp(-((depth - thickness) ** 2) / 40) * np.float32(0.07)  # apical border
        membrane = np.exp(-((depth + 3) ** 2) / 14) * np.float32(0.06)
        mucin = self.rng.choice((0.012, 0.02, 0.06))
        cell = 0.15 + 0.018 * grain + brush
        paint = cell * (1 - lumen) + (mucin + 0.008 * grain) * lumen
        self.eosin[window] = self.eosin[window] * (1 - within) + (paint + membrane) * within
        tint = (0.11 + 0.012 * grain) * (1 - lumen)
        self.haematoxylin[window] = self.haematoxylin[window] * (1 - within) + tint * within
        self.crowded[window] |= (depth > -6) & (self.dense_depth[window] > -4)

    def _place_gland_nuclei(self, gland: Outline, rings: int, stamps: Sequence[Sequence[Stamp]]) -> None:
        rng = self.rng
        stain = rng.normal(0.72, 0.035)
        for ring in range(rings):
            inset = 17 + RING_PX * ring
            count = int(2 * np.pi * (float(gland.radii.mean()) - inset) / 21.5)
            if count < 5:
                break
            at = np.arange(ANGLES + 1) * (2 * np.pi / ANGLES)
            arc = np.insert(np.cumsum(np.maximum(gland.radii - inset, 1)), 0, 0)
            share = (np.arange(count) + rng.uniform(-0.2, 0.2, count) + rng.uniform()) / count % 1
            turn = np.interp(share * arc[-1], arc, at)
            radius = np.interp(turn % (2 * np.pi), at, np.append(gland.radii, gland.radii[0]))
            radius = radius - inset + rng.normal(0, 3.5, count)
            xy = np.stack([gland.x + radius * np.cos(turn), gland.y + radius * np.sin(turn)], axis=1)
            keep = (radius > 12) & (self._sample(self.dense_depth, xy) > 17) & (self._sample(self.depth, xy) > 20)
            self._stamp(stamps, xy[keep], turn[keep] + rng.normal(0, 0.28, keep.sum()), stain)

    def _scatter_stroma_nuclei(self) -> None:
        rng = self.rng
        xy = jittered_lattice(rng, np.zeros(2), np.array((self.plan.width, self.plan.height)), 52.0, 0.5)
        depth, dense = self._sample(self.depth, xy), self._sample(self.dense_depth, xy)
        free = (depth > 30) & ~self._sample(self.crowded, xy) & (np.abs(dense) > 16)
        coarse = (self.shape[0] // 8 + 1, self.shape[1] // 8 + 1)
        clusters = SmoothNoise(rng, coarse, 30).whole()  # lymphocytes gather here and there
        lymph = self._sample(clusters, xy / 8) > 1.9
        chosen = free & (rng.uniform(size=len(xy)) < np.where(dense > 0, 0.6, np.where(lymph, 0.8, 0.33)))
        xy, lymph = xy[chosen], lymph[chosen] | (rng.uniform(size=int(chosen.sum())) < 0.12)
        step = np.array((8.0, 0.0))
        slope_x = self._sample(self.fibre, xy + step) - self._sample(self.fibre, xy - step)
        slope_y = self._sample(self.fibre, xy + step[::-1]) - self._sample(self.fibre, xy - step[::-1])
        along = np.arctan2(-slope_x, slope_y) + rng.normal(0, 0.15, len(xy))
        self._stamp(nucleus_stamps(rng, (21.0, 5.6), shapes=8), xy[~lymph], along[~lymph], 0.74)
        self._stamp(nucleus_stamps(rng, (10.5, 9.8), shapes=6), xy[lymph], along[lymph], 0.86)

    def _stamp(self, stamps: Sequence[Sequence[Stamp]], xy: Points, turn: Points, stain: float) -> None:
        """Put one nucleus of haematoxylin `stain` at each x, y; those that reach past the slide are left out."""
        steps = np.rint(turn * (TURNS / np.pi)).astype(int) % TURNS
        kinds = self.rng.integers(0, len(stamps[0]), len(xy))
        strength = np.rint(self.rng.normal(stain, 0.035, len(xy)).clip(0.55, 0.95) / STAIN_PER_UNIT).astype(np.uint16)
        for (x, y), step, kind, amount in zip(np.rint(xy).astype(int), steps, kinds, strength, strict=True):
            shade, mask = stamps[step][kind]
            reach = len(shade) // 2
            top, left = y - reach, x - reach
            place = slice(top, top + len(shade)), slice(left, left + len(shade))
            if top < 0 or left < 0 or place[0].stop > self.plan.height or place[1].stop > self.plan.width:
                continue
            ink = ((shade * amount) >> 8).astype(np.uint8)
            np.maximum(self.nuclei[place], ink, out=self.nuclei[place])
            self.painted[place] |= mask

    def _sample(self, field: NDArray[T], xy: Points) -> NDArray[T]:
        row = np.clip(xy[:, 1] / 2, 0, field.shape[0] - 1).astype(int)
        col = np.clip(xy[:, 0] / 2, 0, field.shape[1] - 1).astype(int)
        values: NDArray[T] = field[row, col]
        return values


def _bands(rows: int) -> list[slice]:
    """Slices of few enough rows that what is computed on one stays in the processor's cache."""
    return [slice(top, min(top + 64, rows)) for top in range(0, rows, 64)]
