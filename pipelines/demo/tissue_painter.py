"""Paints a synthetic haematoxylin-and-eosin section and records what was painted where.

Colour follows Beer-Lambert with the stain vectors of Ruifrok & Johnston (2001), so unmixing a slide
gives back the amounts painted. Lengths are level-0 pixels of 0.25 µm; "half" arrays have one sample
per 2 x 2 of them, which is all that shows beneath nuclei, sensor noise and JPEG 4:2:0.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray
from scipy.ndimage import gaussian_filter

Floats: TypeAlias = NDArray[np.float32]
Bytes: TypeAlias = NDArray[np.uint8]
Mask: TypeAlias = NDArray[np.bool_]
Stamp: TypeAlias = tuple[Bytes, Mask]
T = TypeVar("T", bound=np.generic)

HAEMATOXYLIN_OD = np.array((0.65, 0.70, 0.29))  # base-10 optical density of R, G, B per unit of stain
EOSIN_OD = np.array((0.07, 0.99, 0.11))
RESIDUAL_OD = np.array((0.27, 0.57, 0.78))
GLASS = 243  # 8-bit grey of bare glass
STAIN_PER_UNIT = 1 / 200  # stain amount of one step of a stored 8-bit stain map

GLAND_SPACING_PX = 400.0
RING_PX = 27.0  # radial distance between the rows of nuclei of a gland
ANGLES = 96  # samples of a gland's outline
TURNS = 24  # orientations in a stamp bank, over half a turn


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


@dataclass(frozen=True, eq=False)
class PaintedSection:
    """Stain maps and masks of one section; 8-bit stain maps are in steps of `STAIN_PER_UNIT`."""

    eosin: Bytes  # half
    haematoxylin: Bytes  # half, all but nuclei
    nuclei: Bytes  # full resolution, haematoxylin of nuclei
    nuclei_fraction: Floats  # half, painted share of each 2 x 2 block
    tissue: Mask  # half
    dense: Mask  # half
    dense_polygon: Floats  # (vertices, 2) as x, y in level-0 pixels
    noise: Bytes  # square, sensor noise modulo 256


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
        at = samples.astype(np.float32) / np.float32(self.period)
        knot = at.astype(np.int32)
        f = (at - knot)[:, None]
        weights = ((1 - f) ** 3 / 6, (3 * f**3 - 6 * f**2 + 4) / 6, (-3 * f**3 + 3 * f**2 + 3 * f + 1) / 6, f**3 / 6)
        total = knots[knot] * weights[0]
        for k in (1, 2, 3):
            total += knots[knot + k] * weights[k]
        return total


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


def half_grid(window: tuple[slice, slice]) -> tuple[Floats, Floats]:
    """Level-0 x and y of the centres of the half pixels of a window, ready to broadcast."""
    rows, cols = window
    y = np.arange(rows.start, rows.stop, dtype=np.float32)[:, None] * 2 + 1
    x = np.arange(cols.start, cols.stop, dtype=np.float32)[None] * 2 + 1
    return x, y


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
        h, w = self.shape
        share = self.painted.reshape(h, 2, w, 2).sum((1, 3), dtype=np.float32) / np.float32(4)
        return PaintedSection(
            eosin=_stain_bytes(self.eosin),
            haematoxylin=_stain_bytes(self.haematoxylin),
            nuclei=self.nuclei,
            nuclei_fraction=share,
            tissue=tissue,
            dense=(self.dense_depth > 0) & tissue,
            dense_polygon=self.outline.vertices(),
            noise=_sensor_noise(self.rng),
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
            texture = _streaks_at(self.fibre[band], column)
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

    def _gland_centres(self) -> NDArray[np.float64]:
        xy = self.outline.vertices()
        low, high = xy.min(0) - GLAND_SPACING_PX, xy.max(0) + GLAND_SPACING_PX
        centres = _jittered_lattice(self.rng, low, high, GLAND_SPACING_PX, 0.2)
        deep = self.outline.depth(*centres.T.astype(np.float32)) > 100
        return centres[deep & (self._sample(self.depth, centres) > 60)]

    def _reach(self, centre: NDArray[np.float64], angle: NDArray[np.float64]) -> NDArray[np.float64]:
        """How far a gland may grow in each direction before it leaves the dense region."""
        r = np.linspace(0.1, 0.62, 40)[:, None] * GLAND_SPACING_PX
        x, y = centre[0] + r * np.cos(angle), centre[1] + r * np.sin(angle)
        outside = self.outline.depth(x.astype(np.float32), y.astype(np.float32)) < 0
        outside[-1] = True
        reach: NDArray[np.float64] = r[outside.argmax(0), 0]
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
        xy = _jittered_lattice(rng, np.zeros(2), np.array((self.plan.width, self.plan.height)), 52.0, 0.5)
        depth, dense = self._sample(self.depth, xy), self._sample(self.dense_depth, xy)
        free = (depth > 30) & ~self._sample(self.crowded, xy) & (np.abs(dense) > 16)
        clusters = SmoothNoise(rng, self.shape, 240).whole()  # lymphocytes gather here and there
        lymph = self._sample(clusters, xy) > 2.3
        chosen = free & (rng.uniform(size=len(xy)) < np.where(dense > 0, 0.6, np.where(lymph, 0.75, 0.25)))
        xy, lymph = xy[chosen], lymph[chosen] | (rng.uniform(size=int(chosen.sum())) < 0.12)
        step = np.array((8.0, 0.0))
        slope_x = self._sample(self.fibre, xy + step) - self._sample(self.fibre, xy - step)
        slope_y = self._sample(self.fibre, xy + step[::-1]) - self._sample(self.fibre, xy - step[::-1])
        along = np.arctan2(-slope_x, slope_y) + rng.normal(0, 0.15, len(xy))
        self._stamp(nucleus_stamps(rng, (21.0, 5.6), shapes=8), xy[~lymph], along[~lymph], 0.74)
        self._stamp(nucleus_stamps(rng, (10.5, 9.8), shapes=6), xy[lymph], along[lymph], 0.86)

    def _stamp(
        self, stamps: Sequence[Sequence[Stamp]], xy: NDArray[np.float64], turn: NDArray[np.float64], stain: float
    ) -> None:
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

    def _sample(self, field: NDArray[T], xy: NDArray[np.float64]) -> NDArray[T]:
        row = np.clip(xy[:, 1] / 2, 0, self.shape[0] - 1).astype(int)
        col = np.clip(xy[:, 0] / 2, 0, self.shape[1] - 1).astype(int)
        return field[row, col]


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


def render_rows(section: PaintedSection, top: int, bottom: int) -> Bytes:
    """RGB of the level-0 rows `top` to `bottom`, both even, as (rows, width, 3)."""
    eosin = _double(section.eosin, top // 2, bottom // 2)
    blue = np.maximum(section.nuclei[top:bottom], _double(section.haematoxylin, top // 2, bottom // 2))
    rgb: Bytes = _COLOURS.take(blue.astype(np.uint16) << 8 | eosin, axis=0)
    side = len(section.noise)
    rows = np.arange(top, bottom) % side
    for left in range(0, rgb.shape[1], side):
        part = rgb[:, left : left + side]
        part += section.noise[rows, : part.shape[1], None]  # modulo 256: negative noise subtracts
    return rgb


def _colour_table() -> Bytes:
    """RGB by 256 * haematoxylin byte + eosin byte; 0.15 of the eosin's amount is residual, which makes it rosy."""
    stain = np.arange(256) * STAIN_PER_UNIT
    residual = 0.35 * stain + 0.8 * np.maximum(stain - 0.36, 0)  # red cells are orange, not pink
    density = stain[:, None, None] * HAEMATOXYLIN_OD + (stain[:, None] * EOSIN_OD + residual[:, None] * RESIDUAL_OD)
    # Kept away from 0 and 255 so that adding noise cannot wrap around.
    colours: Bytes = np.rint(GLASS * 10**-density).clip(12, GLASS).astype(np.uint8)
    return colours.reshape(-1, 3)


_COLOURS = _colour_table()


def _stain_bytes(stain: Floats) -> Bytes:
    return np.rint(stain / np.float32(STAIN_PER_UNIT)).clip(0, 255).astype(np.uint8)


def _double(half: Bytes, top: int, bottom: int) -> Bytes:
    """Rows `top` to `bottom` of `half`, enlarged twice with linear interpolation."""
    rows = half[np.clip(np.arange(top - 1, bottom + 1), 0, len(half) - 1)].astype(np.uint16)
    tall = np.empty((2 * (bottom - top), rows.shape[1]), np.uint16)
    tall[::2] = (3 * rows[1:-1] + rows[:-2] + 2) >> 2
    tall[1::2] = (3 * rows[1:-1] + rows[2:] + 2) >> 2
    wide = np.empty((len(tall), 2 * rows.shape[1]), np.uint8)
    padded = np.pad(tall, ((0, 0), (1, 1)), mode="edge")
    wide[:, ::2] = (3 * tall + padded[:, :-2] + 2) >> 2
    wide[:, 1::2] = (3 * tall + padded[:, 2:] + 2) >> 2
    return wide


def _bands(rows: int) -> list[slice]:
    """Slices of few enough rows that what is computed on one stays in the processor's cache."""
    return [slice(top, min(top + 64, rows)) for top in range(0, rows, 64)]


def _streaks_at(across: Floats, along: Floats) -> Floats:
    streaks = _streaks()
    row = np.floor(across * 2).astype(np.int32) % len(streaks)  # two rows per half pixel
    col = np.floor(along).astype(np.int32) % streaks.shape[1]
    return streaks[row, col]


@cache
def _streaks() -> Floats:
    """A periodic texture of streaks along x, mean 0 and deviation 1."""
    rows, cols = 2048, 1024
    white = np.random.default_rng(5).standard_normal((rows, cols))
    fy, fx = np.fft.fftfreq(rows)[:, None], np.fft.rfftfreq(cols)[None]
    gain = np.zeros((rows, cols // 2 + 1))
    for across, along, weight in ((1.5, 9, 0.55), (5, 26, 1.0), (16, 70, 0.8)):  # Gaussians of these deviations
        blur = np.exp(-2 * np.pi**2 * ((across * fy) ** 2 + (along * fx) ** 2))
        gain += weight * np.sqrt(across * along) * blur
    texture = np.fft.irfft2(np.fft.rfft2(white) * gain, s=(rows, cols))
    texture -= texture.mean()
    return (texture / texture.std()).astype(np.float32)


def _jittered_lattice(
    rng: np.random.Generator, low: NDArray[np.floating], high: NDArray[np.floating], spacing: float, jitter: float
) -> NDArray[np.float64]:
    """Points of a triangular lattice, each moved by up to `jitter` spacings in x and y; (n, 2) as x, y."""
    y = np.arange(low[1], high[1], spacing * np.sqrt(0.75), dtype=np.float64)
    x = np.arange(low[0], high[0], spacing, dtype=np.float64)
    shift = (np.arange(len(y)) % 2) * (spacing / 2)
    xy = np.stack(np.broadcast_arrays(x[None] + shift[:, None], y[:, None]), axis=-1).reshape(-1, 2)
    return xy + rng.uniform(-jitter * spacing, jitter * spacing, xy.shape)


def _sensor_noise(rng: np.random.Generator) -> Bytes:
    noise = np.rint(rng.normal(0, 1.3, (1024, 1024)).clip(-5, 5))
    return noise.astype(np.int8).view(np.uint8)
