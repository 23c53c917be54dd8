"""Turns amounts of stain into the pixels a scanner would record.

Colour follows Beer-Lambert with the stain vectors of Ruifrok & Johnston (2001), so unmixing a slide
gives back the amounts painted. "Half" arrays have one sample per 2 x 2 level-0 pixels, which is all
that shows beneath nuclei, sensor noise and JPEG 4:2:0.
"""

from dataclasses import dataclass

import numpy as np

from pipelines.demo.textures import Bytes, Floats, Mask

HAEMATOXYLIN_OD = np.array((0.65, 0.70, 0.29))  # base-10 optical density of R, G, B per unit of stain
EOSIN_OD = np.array((0.07, 0.99, 0.11))
RESIDUAL_OD = np.array((0.27, 0.57, 0.78))
GLASS = 243  # 8-bit grey of bare glass
STAIN_PER_UNIT = 1 / 200  # stain amount of one step of a stored 8-bit stain map


@dataclass(frozen=True, eq=False)
class PaintedSection:
    """Stain maps and masks of one section; 8-bit stain maps are in steps of `STAIN_PER_UNIT`."""

    eosin: Bytes  # half
    haematoxylin: Bytes  # half, all but nuclei
    nuclei: Bytes  # full resolution, haematoxylin of nuclei
    nuclei_count: Bytes  # half, pixels of each 2 x 2 block that a nucleus covers
    tissue: Mask  # half
    dense: Mask  # half
    dense_polygon: Floats  # (vertices, 2) as x, y in level-0 pixels
    noise: Bytes  # square, sensor noise modulo 256


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
    """RGB by 256 * haematoxylin byte + eosin byte; eosin brings some residual stain, which makes it rosy."""
    stain = np.arange(256) * STAIN_PER_UNIT
    residual = 0.35 * stain + 0.8 * np.maximum(stain - 0.36, 0)  # red cells are orange, not pink
    density = stain[:, None, None] * HAEMATOXYLIN_OD + (stain[:, None] * EOSIN_OD + residual[:, None] * RESIDUAL_OD)
    # Kept away from 0 and 255 so that adding noise cannot wrap around.
    colours: Bytes = np.rint(GLASS * 10**-density).clip(12, GLASS).astype(np.uint8).reshape(-1, 3)
    return colours


_COLOURS = _colour_table()


def stain_bytes(stain: Floats) -> Bytes:
    """Amounts of stain in steps of `STAIN_PER_UNIT`."""
    steps: Bytes = np.rint(stain / np.float32(STAIN_PER_UNIT)).clip(0, 255).astype(np.uint8)
    return steps


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


def sensor_noise(rng: np.random.Generator) -> Bytes:
    """A square of noise in grey levels modulo 256, to be laid side by side."""
    noise = np.rint(rng.normal(0, 1.3, (1024, 1024)).clip(-5, 5))
    wrapped: Bytes = noise.astype(np.int8).view(np.uint8)
    return wrapped
