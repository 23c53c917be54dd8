"""Ink that a pen left on the glass: coloured like no stain, and smoother than any tissue."""

from collections.abc import Sequence
from functools import cache
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

Plane = NDArray[np.bool_]
T = TypeVar("T", bound=np.generic)

SMOOTH = 12.0
"""Mean absolute Laplacian of grey around an ink pixel, at most, in grey levels. At 8 µm/px 98 % of the pixels of
stained tissue have more; strokes of ink have 2 there and 8 on thumbnails (pictures of histolab and HistoQC)."""

REACH = 3
"""Pixels from sure ink within which its paler, blurred rim is ink too."""

BLACK = 70
"""Brightest channel of black ink, at most."""

COLOURLESS = 16
"""Brightest minus darkest channel below which a pixel has no colour."""

BLOCK_PX = 512
"""Side of the blocks in which the picture is taken."""

_BORDER = REACH + 3
"""Pixels around a block that decide in it: the rim's reach, the majority, the Laplacian and its mean."""

_PALE, _SURE = 1, 2


def find_ink(rgb: NDArray[np.uint8], glass: int, usable: Plane) -> Plane:
    """Pixels of a bright-field overview that are ink on glass.

    Ink over tissue shows the tissue's texture or its colour and stays tissue; so does ink so pale that it could be
    eosin. Pixels more than 6 away do not matter. What is as smooth as ink and has its colour is taken for it: a large
    pool of blood for red ink, one of mucus in alcian blue for blue.

    Args:
        rgb: uint8 (H, W, 3).
        glass: grey level of the glass.
        usable: bool (H, W), pixels that were read; the others are no ink.
    """
    height, width = usable.shape
    ink = np.zeros((height, width), np.bool_)
    for top in range(0, height, BLOCK_PX):
        for left in range(0, width, BLOCK_PX):
            first = max(top - _BORDER, 0), max(left - _BORDER, 0)
            block = slice(first[0], top + BLOCK_PX + _BORDER), slice(first[1], left + BLOCK_PX + _BORDER)
            found = _ink(rgb[block], glass, usable[block])[top - first[0] :, left - first[1] :][:BLOCK_PX, :BLOCK_PX]
            ink[top : top + BLOCK_PX, left : left + BLOCK_PX] = found
    return ink


def majority(mask: Plane) -> Plane:
    """What most of the 3 x 3 pixels around each one are: removes specks and gaps, and nothing far away moves it."""
    return np.asarray(_around(mask.view(np.uint8)) >= 5)


def _ink(rgb: NDArray[np.uint8], glass: int, usable: Plane) -> Plane:
    """Ink of one block, right but for its border."""
    kind = _looked_up(rgb, _kinds(glass)) * usable
    sure = kind == _SURE
    if not majority(sure).any():  # most blocks
        return np.zeros_like(sure)
    sure = majority(sure & (_texture(rgb) <= SMOOTH))
    return np.asarray(_grown(sure) & (kind >= _PALE))


def _looked_up(rgb: NDArray[np.uint8], table: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """The table's entry for every pixel; it has 64 levels per channel."""
    index = (rgb[..., 0] >> 2).astype(np.intp)
    for channel in (1, 2):
        index <<= 6
        index |= rgb[..., channel] >> 2
    return table[index]


@cache
def _kinds(glass: int) -> NDArray[np.uint8]:
    """What a colour may be: sure ink, its pale rim, or 0 for anything else."""
    levels = np.arange(64) * 4 + 2
    red, green, blue = np.meshgrid(levels, levels, levels, indexing="ij", sparse=True)
    brightest = np.maximum(np.maximum(red, green), blue)
    colourless = brightest - np.minimum(np.minimum(red, green), blue) < COLOURLESS
    density = [np.maximum(np.log10(glass / channel), 0) for channel in (red, green, blue)]
    pale = _coloured(density, (0.05, 0.04, 0.08)) | (colourless & (brightest < glass - COLOURLESS))
    sure = _coloured(density, (0.2, 0.1, 0.4)) | (colourless & (brightest <= BLACK))
    return np.where(sure, _SURE, np.where(pale, _PALE, 0)).astype(np.uint8).ravel()


def _coloured(density: Sequence[NDArray[np.float64]], least: tuple[float, float, float]) -> Plane:
    """Whether optical densities of red, green and blue are those of red, green or blue ink of some strength at least.

    Haematoxylin and eosin absorb green most, DAB blue (Ruifrok and Johnston 2001). Green ink absorbs green least. Blue
    ink absorbs red by far most. Red ink absorbs blue 0.6 to 0.75 times as much as green, eosin 0.5 times, and it
    absorbs hardly any red, where haematoxylin absorbs some (as measured on the pictures named at `SMOOTH`).
    """
    red, green, blue = density
    is_red = (green >= least[0]) & (5 * red <= green) & (20 * blue >= 13 * green) & (4 * blue <= 5 * green)
    is_green = (red >= least[1]) & (4 * green <= 3 * red) & (4 * blue >= 3 * green)
    is_blue = (red >= least[2]) & (10 * green <= 9 * red) & (2 * blue <= red)
    return np.asarray(is_red | is_green | is_blue)


def _texture(rgb: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Mean absolute Laplacian of grey over 3 x 3 pixels, in grey levels."""
    total = np.pad(rgb.sum(axis=2, dtype=np.int16), 1, mode="edge")
    sides = total[:-2, 1:-1] + total[2:, 1:-1] + total[1:-1, :-2] + total[1:-1, 2:]
    bend = np.abs(4 * total[1:-1, 1:-1] - sides)
    return np.asarray(_around(bend.astype(np.float32)) / 27, np.float32)  # 9 pixels of three times the grey


def _grown(mask: Plane) -> Plane:
    """Everything within `REACH` rows and columns of the mask."""
    for _ in range(2):
        padded = np.pad(mask, ((REACH, REACH), (0, 0)))
        mask = np.logical_or.reduce([padded[k : k + len(mask)] for k in range(2 * REACH + 1)]).T
    return mask


def _around(plane: NDArray[T]) -> NDArray[T]:
    """Sums over the 3 x 3 pixels around each one, the outermost repeated beyond the edge."""
    padded = np.pad(plane, 1, mode="edge")
    rows = padded[:-2] + padded[1:-1] + padded[2:]
    return np.asarray(rows[:, :-2] + rows[:, 1:-1] + rows[:, 2:])
