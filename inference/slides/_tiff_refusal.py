"""What a TIFF's own tables say against reading it: cut short, impossible sizes, pixels that would be read wrong."""

import math

from inference.slides._tiff_tables import TiffClaims, TiffDirectory

MAX_SIDE_PX = 1 << 21
"""Longest side of a slide: half a metre at 0.25 µm/px. A header that claims more is damaged."""

MAX_TILE_PX = 1 << 24
"""Pixels of a compressed tile at most: a larger one is decoded whole for every small region that is read."""

MAX_PX = 1 << 39
"""Pixels of a slide at most: 64 x 64 mm at 0.1 µm/px, and some more."""

_LARGE_PX, _MAX_PX_PER_BYTE = 1 << 32, 4096  # a large slide with more pixels per byte is nearly all empty
_RETILED = "rewrite it with `vips tiffsave SLIDE 'NEW.tif' --tile --pyramid --tile-width 256 --tile-height 256`"
_TURNED_BACK = "rewrite it with `vips tiffload SLIDE x.v` and then `vips autorot x.v 'NEW.tif[tile,pyramid]'`"
_CONVERTED = "convert it to 8-bit RGB, scaled to its range, with square tiles"

_SAME_SHAPE = 0.02  # relative difference of a level's downsamples along x and y, besides rounding

_TOP_LEFT, _LAST_ORIENTATION = 1, 8  # libtiff takes what lies beyond for the first
_UNSIGNED, _VOID = 1, 4
_ASSOCIATED, _UNASSOCIATED = 1, 2
_RGB = 2
_COLOURS = {0: 1, 1: 1, _RGB: 3, 3: 1, 6: 3}
"""Channels per photometric interpretation: white is zero, black is zero, RGB, palette, YCbCr."""


def refused_tables(claims: TiffClaims) -> str | None:
    """What to refuse before a decoder sees the file: it would allocate what the tables ask for, or read for ever."""
    if claims.end > claims.size:
        missing = claims.end - claims.size
        return (
            f"truncated: its data reach byte {claims.end:,}, the file ends at {claims.size:,}, so at least {missing:,} "
            "bytes are missing; copy it again"
        )
    return next(filter(None, (_refused_size(directory) for directory in claims.directories if directory.tile)), None)


def refused_pixels(claims: TiffClaims, vendor: str) -> str | None:
    """What to refuse once its format is known: levels that OpenSlide would read as something else than they are."""
    levels = [
        directory
        for index, directory in enumerate(claims.directories)
        if directory.tile and (index == 0 or directory.reduced or vendor != "generic-tiff")
    ]
    for level in levels:
        if _TOP_LEFT < level.orientation <= _LAST_ORIENTATION:
            # Tiles that are no JPEG are turned one by one, and stay where they are.
            return f"its pixels are stored turned or mirrored (TIFF orientation {level.orientation}): {_TURNED_BACK}"
        if sort := _unusual_pixels(level):
            return f"its pixels have {sort}, and only 8-bit RGB and grey are read: {_CONVERTED}"
    return _refused_images(claims, levels) if vendor == "generic-tiff" and levels else None


def _refused_images(claims: TiffClaims, levels: list[TiffDirectory]) -> str | None:
    """What a plain TIFF holds besides the one picture that would be read of it."""
    whole = levels[0]
    same = [d for d in claims.directories if not d.reduced and d.size == whole.size and d.samples == whole.samples]
    if len(same) > 1:
        kind = "channels" if whole.samples == 1 else "planes (depths or times)"
        return f"its {len(same)} {kind} are separate images, of which only one would be read: {_CONVERTED}"
    if any(math.prod(d.size) > math.prod(whole.size) for d in claims.directories if d.tile):
        return f"its first image is not its largest, so something else than the slide would be read: {_RETILED}"
    for level in levels[1:]:
        across, down = (a / b for a, b in zip(whole.size, level.size, strict=True))
        if abs(across / down - 1) > _SAME_SHAPE + 2 / min(level.size):
            width, height = level.size
            return f"an image of {width} x {height} pixels calls itself a level of it but has another shape: {_RETILED}"
    return None


def in_strips(claims: TiffClaims) -> str | None:
    """The reason and remedy for a TIFF that has no tiles at all, which no slide format does without."""
    if not claims.directories or any(directory.tile for directory in claims.directories):
        return None
    width, height = claims.directories[0].size
    return f"a TIFF of {width} x {height} pixels in strips, not tiles, which is no slide: {_RETILED}"


def _refused_size(directory: TiffDirectory) -> str | None:
    (width, height), tile = directory.size, directory.tile
    assert tile, "checked by the caller"
    claim = f"claims to be {width:,} x {height:,} pixels"
    damaged = "its header is damaged; copy it again"
    if not (0 < width <= MAX_SIDE_PX and 0 < height <= MAX_SIDE_PX) or width * height > MAX_PX:
        return f"{claim}, which no slide is: {damaged}"
    if not all(tile):
        return f"claims compressed tiles of {tile[0]:,} x {tile[1]:,} pixels: {damaged}"
    if math.prod(tile) > MAX_TILE_PX:
        return f"its compressed tiles have {tile[0]:,} x {tile[1]:,} pixels, too many to read: {_RETILED}"
    tiles = math.ceil(width / tile[0]) * math.ceil(height / tile[1])
    if directory.pieces not in (tiles, tiles * directory.samples):  # with one per channel where these lie apart
        return f"{claim} in {tiles:,} tiles, but lists {directory.pieces:,}: {damaged}"
    if directory.in_header:
        return f"{directory.in_header:,} of its tiles begin inside the file's own header: {damaged}"
    if width * height > max(_LARGE_PX, _MAX_PX_PER_BYTE * directory.data):
        return f"{claim}, but holds only {directory.data:,} bytes of them: {damaged}"
    return None


def _unusual_pixels(level: TiffDirectory) -> str | None:
    """What sets a level's pixels apart from those that are read right."""
    if odd := [bits for bits in level.bits if bits != 8]:
        return f"{odd[0]} bit{'s' * (odd[0] != 1)} per channel"
    if any(kind not in (_UNSIGNED, _VOID) for kind in level.formats):
        return "signed or floating-point numbers"
    colours = _COLOURS.get(level.photometric)
    if colours is None:
        return f"an unusual colour model (TIFF photometric interpretation {level.photometric})"
    alpha = level.photometric == _RGB and level.samples == 4 and level.extra[:1] in ((_ASSOCIATED,), (_UNASSOCIATED,))
    if level.samples != colours and not alpha:
        return f"{level.samples} channels"
    return None
