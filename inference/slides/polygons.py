"""Polygons on a plane of pixels."""

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

Ring = NDArray[np.float64]
"""Corners of a closed line, (n, 2): x and y. The last one is joined to the first."""

CROSSINGS = 1 << 22
"""Places where edges cross rows of pixels, held at a time."""


def fill_polygon(plane: NDArray[np.bool_], rings: Sequence[Ring]) -> None:
    """Set the pixels whose centre lies inside by the even-odd rule: a ring within another is a hole.

    Corners are in pixels of the plane, whose pixel (0, 0) has its centre at (0.5, 0.5); what lies outside the plane is
    cut off. The area set is that of the polygon without bias; drawing libraries add the outline. Time grows with the
    bounding box and with the rows that each edge spans, not with their product.
    """
    height, width = plane.shape
    corners = np.concatenate(rings)
    # Half-open intervals of centres: two polygons that share an edge share no pixel, and leave none out.
    left, top = np.clip(np.ceil(corners.min(axis=0) - 0.5), 0, (width, height)).astype(np.intp)
    right, bottom = np.clip(np.ceil(corners.max(axis=0) - 0.5), 0, (width, height)).astype(np.intp)
    if left >= right or top >= bottom:
        return
    # Each crossing of a row turns inside and outside over from there to the right.
    turns = np.zeros((bottom - top, right - left + 1), np.uint8)
    for rows, x in _crossings(rings, top, bottom):
        columns = np.clip(np.ceil(x - 0.5), left, right).astype(np.intp)
        np.bitwise_xor.at(turns, (rows - top, columns - left), np.uint8(1))
    np.bitwise_xor.accumulate(turns, axis=1, out=turns)
    plane[top:bottom, left:right] |= turns[:, :-1].view(np.bool_)


def filling_work(shape: tuple[int, ...], rings: Sequence[Ring]) -> float:
    """About how many pixels `fill_polygon` touches; a crossing of an edge and a row costs as much as 32."""
    limits = (shape[1], shape[0])
    corners = np.clip(np.concatenate(rings), 0, limits)
    box = float(np.prod(corners.max(axis=0) - corners.min(axis=0) + 1))
    crossings = sum(
        float(np.abs(np.diff(np.clip(ring[:, 1], 0, shape[0]), append=ring[:1, 1])).sum()) for ring in rings
    )
    return box + 32 * crossings


def _crossings(
    rings: Sequence[Ring], top: np.intp, bottom: np.intp
) -> Iterator[tuple[NDArray[np.intp], NDArray[np.float64]]]:
    """Rows within the bounds and the x at which an edge crosses their middle, some edges at a time."""
    begin = np.concatenate(rings)
    end = np.concatenate([np.roll(ring, -1, axis=0) for ring in rings])
    low, high = np.minimum(begin[:, 1], end[:, 1]), np.maximum(begin[:, 1], end[:, 1])
    first = np.clip(np.ceil(low - 0.5), top, bottom).astype(np.intp)
    count = np.clip(np.ceil(high - 0.5), top, bottom).astype(np.intp) - first
    edges = np.flatnonzero(count)
    reached = np.cumsum(count[edges])
    start = 0
    while start < len(edges):
        before = reached[start - 1] if start else 0
        stop = max(start + 1, int(np.searchsorted(reached, before + CROSSINGS, side="right")))
        some = edges[start:stop]
        which = np.repeat(some, count[some])
        rows = np.arange(len(which)) - np.repeat(reached[start:stop] - count[some] - before, count[some]) + first[which]
        (x0, y0), (x1, y1) = begin[which].T, end[which].T
        yield rows, x0 + (rows + 0.5 - y0) * (x1 - x0) / (y1 - y0)
        start = stop
