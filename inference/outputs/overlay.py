"""A heatmap drawn over the slide's thumbnail."""

import io
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont
from scipy import ndimage

from inference.outputs.raster import HeatmapRaster, Validity

# Every 17th of the 256 colours of viridis, by N. Smith, S. van der Walt and E. Firing, CC0:
# https://github.com/BIDS/colormap. Even in lightness, and told apart with any colour vision.
_VIRIDIS = (
    (68, 1, 84), (72, 26, 108), (71, 47, 125), (65, 68, 135), (57, 86, 140), (49, 104, 142), (42, 120, 142),
    (35, 136, 142), (31, 152, 139), (34, 168, 132), (53, 183, 121), (84, 197, 104), (122, 209, 81),
    (165, 219, 54), (210, 226, 27), (253, 231, 37),
)  # fmt: skip
FAILED_COLOUR = (214, 20, 40)  # a red that viridis does not pass through
_PAPER, _INK, _SOFT_INK = (255, 255, 255), (32, 36, 40), (96, 102, 108)

_TEXTURE = 0.75  # how much of the tissue's light and dark shows through the tint
_FAILED_MIN_PX = 7  # a failed tile is drawn at least this large, so none is lost on a big slide
_PREVIEW_SIDE_PX = 512


def draw_overlay(
    thumbnail: NDArray[np.uint8],
    raster: HeatmapRaster,
    slide_size: tuple[int, int],
    *,
    title: str,
    low: float,
    high: float,
) -> Image.Image:
    """Tint the predicted cells of a thumbnail (H, W, 3) of the whole slide and add a legend.

    The thumbnail's pixel (0, 0) stays at (0, 0) of the picture. Cells are drawn at their level-0
    place, never interpolated; failed tiles are hatched in red, skipped ones left bare. `slide_size`
    is the level-0 width and height.
    """
    height, width = thumbnail.shape[:2]
    rows = _cell_of_pixel(height, slide_size[1], raster.cell_footprint[1], raster.values.shape[0])
    cols = _cell_of_pixel(width, slide_size[0], raster.cell_footprint[0], raster.values.shape[1])
    at = np.ix_(rows, cols)

    picture = thumbnail.copy()
    predicted = raster.validity[at] == Validity.PREDICTED
    picture[predicted] = _tint(thumbnail[predicted], raster.values[at][predicted], low, high)
    failed = _failed_pixels(raster, (height, width), slide_size)
    line = max(2, round(max(height, width) / 400))
    _hatch(picture, failed, line)

    legend = _Legend(
        title, f"{low:g}", f"{high:g}", bool(failed.any()), max(11, round(max(height, width) * 0.024)), line
    )
    return legend.beside(Image.fromarray(picture)) if height > width else legend.below(Image.fromarray(picture))


def preview(image: Image.Image, max_bytes: int = 48_000) -> bytes:
    """A JPEG of at most `max_bytes` (at least 2,000) whose longest side is at most 512 px."""
    side = min(_PREVIEW_SIDE_PX, max(image.size))
    while True:
        small = image.convert("RGB")
        small.thumbnail((side, side), Image.Resampling.LANCZOS)
        for quality in (90, 82, 74, 66, 58, 50, 40):
            data = io.BytesIO()
            small.save(data, "JPEG", quality=quality, subsampling="4:4:4")
            if data.tell() <= max_bytes or side <= 32:
                return data.getvalue()
        side = side * 4 // 5


def colours(values: NDArray[np.float32], low: float, high: float) -> NDArray[np.float32]:
    """RGB (…, 3), 0 to 255, of finite values; those beyond the scale take its end colours."""
    share = np.clip((values - low) / (high - low), 0, 1)
    anchors = np.linspace(0, 1, len(_VIRIDIS))
    table = np.asarray(_VIRIDIS, np.float32)
    return np.stack([np.interp(share, anchors, table[:, channel]) for channel in range(3)], axis=-1).astype(np.float32)


def _cell_of_pixel(n_pixels: int, extent: int, side: float, n_cells: int) -> NDArray[np.intp]:
    """The raster row or column under the middle of each thumbnail pixel."""
    middles = (np.arange(n_pixels) + 0.5) * (extent / n_pixels)
    cells: NDArray[np.intp] = np.minimum(middles / side, n_cells - 1).astype(np.intp)
    return cells


def _tint(pixels: NDArray[np.uint8], values: NDArray[np.float32], low: float, high: float) -> NDArray[np.uint8]:
    """Palette colours with the tissue's texture: exact where the tissue is of median grey, so the legend holds."""
    if not len(pixels):
        return pixels
    grey = pixels.astype(np.float32) @ np.array([0.299, 0.587, 0.114], np.float32)
    light = (grey - np.median(grey))[:, None] / 255 * _TEXTURE
    palette = colours(values, low, high)
    mixed = np.where(light > 0, palette + (255 - palette) * light, palette * (1 + light))
    return np.floor(mixed + 0.5).astype(np.uint8)


def _failed_pixels(raster: HeatmapRaster, shape: tuple[int, int], slide_size: tuple[int, int]) -> NDArray[np.bool_]:
    """Thumbnail pixels (H, W) under failed cells, each cell at least `_FAILED_MIN_PX` wide and high."""
    mask = np.zeros(shape, np.bool_)
    rows, cols = np.nonzero(raster.validity == Validity.FAILED)
    edges = []
    for cells, n_pixels, extent, side in (
        (rows, shape[0], slide_size[1], raster.cell_footprint[1]),
        (cols, shape[1], slide_size[0], raster.cell_footprint[0]),
    ):
        scale = side * n_pixels / extent
        start, stop = np.rint(cells * scale), np.rint((cells + 1) * scale)
        missing = np.maximum(_FAILED_MIN_PX - (stop - start), 0)
        start = np.clip(start - missing // 2, 0, max(n_pixels - _FAILED_MIN_PX, 0))
        edges += [start.astype(np.intp), np.minimum(np.maximum(stop, start + _FAILED_MIN_PX), n_pixels).astype(np.intp)]
    for top, bottom, left, right in zip(*edges, strict=True):
        mask[top:bottom, left:right] = True
    return mask


def _hatch(picture: NDArray[np.uint8], mask: NDArray[np.bool_], line: int) -> None:
    """Outline the groups of a mask and fill them with diagonal lines, on a light ground that sets them off."""
    inside = ndimage.binary_erosion(mask, structure=np.ones((3, 3)), iterations=line)
    y, x = np.nonzero(mask)
    period = 4 * line
    lines = np.zeros_like(mask)
    lines[y, x] = (x + y) % period < line
    ground = picture[mask].astype(np.float32)
    picture[mask] = (0.45 * ground + 0.55 * 255).astype(np.uint8)
    picture[mask & (~inside | lines)] = FAILED_COLOUR


@dataclass(frozen=True)
class _Legend:
    """The output's name, its scale and, where tiles failed, their mark."""

    title: str
    low: str
    high: str
    failed: bool
    font_px: int
    line: int

    def below(self, picture: Image.Image) -> Image.Image:
        """The picture with the legend as a strip beneath it."""
        em = self.font_px
        canvas = Image.new("RGB", (max(picture.width, 22 * em), picture.height + 3 * em), _PAPER)
        canvas.paste(picture)
        draw = ImageDraw.Draw(canvas)
        middle = picture.height + 3 * em // 2
        right = canvas.width - em
        if self.failed:
            right = self._mark(canvas, right, middle) - em
        right = self._text(draw, right, middle, self.high, "rm", _SOFT_INK) - em // 2
        bar = (right - min(9 * em, canvas.width // 4), middle - em // 2, right, middle + em // 2)
        canvas.paste(_gradient(bar[2] - bar[0], bar[3] - bar[1]), bar[:2])
        left = self._text(draw, bar[0] - em // 2, middle, self.low, "rm", _SOFT_INK) - em
        self._text(draw, em, middle, self._fitted(self.title, left - em), "lm", _INK)
        return canvas

    def beside(self, picture: Image.Image) -> Image.Image:
        """The picture with the legend as a column to its right."""
        em = self.font_px
        column = 11 * em
        canvas = Image.new("RGB", (picture.width + column, max(picture.height, 16 * em)), _PAPER)
        canvas.paste(picture)
        draw = ImageDraw.Draw(canvas)
        x, y = picture.width + em, 2 * em
        for row in self._wrapped(self.title, column - 2 * em):
            self._text(draw, x, y, row, "ls", _INK)
            y += 5 * em // 4
        bar = _gradient(min(9 * em, canvas.height // 3), em).transpose(Image.Transpose.ROTATE_90)
        canvas.paste(bar, (x, y))
        self._text(draw, x + 3 * em // 2, y, self.high, "lt", _SOFT_INK)
        self._text(draw, x + 3 * em // 2, y + bar.height, self.low, "lb", _SOFT_INK)
        if self.failed:
            width = round(self._font().getlength("failed")) + 3 * em // 2
            self._mark(canvas, x + width, y + bar.height + 2 * em)
        return canvas

    def _font(self) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
        return ImageFont.load_default(self.font_px)

    def _text(
        self, draw: ImageDraw.ImageDraw, x: int, y: int, text: str, anchor: str, ink: tuple[int, int, int]
    ) -> int:
        """Write text and return its left edge."""
        draw.text((x, y), text, fill=ink, font=self._font(), anchor=anchor)
        return x - round(self._font().getlength(text))

    def _mark(self, canvas: Image.Image, right: int, middle: int) -> int:
        """Draw the mark of failed tiles with its name and return its left edge."""
        em = self.font_px
        left = self._text(ImageDraw.Draw(canvas), right, middle, "failed", "rm", _SOFT_INK) - em // 2
        swatch = np.full((em, em, 3), 255, np.uint8)
        _hatch(swatch, np.ones((em, em), np.bool_), self.line)
        canvas.paste(Image.fromarray(swatch), (left - em, middle - em // 2))
        return left - em

    def _wrapped(self, text: str, width: int) -> list[str]:
        """The text in at most three lines."""
        lines = [""]
        for word in text.split():
            longer = f"{lines[-1]} {word}".strip()
            if self._font().getlength(longer) <= width or not lines[-1]:
                lines[-1] = longer
            else:
                lines.append(word)
        return [self._fitted(line, width) for line in [*lines[:2], " ".join(lines[2:])] if line]

    def _fitted(self, text: str, width: int) -> str:
        """The text, cut with an ellipsis where it is too long."""
        font = self._font()
        if font.getlength(text) <= width:
            return text
        while text and font.getlength(text + "…") > width:
            text = text[:-1]
        return text.rstrip() + "…"


def _gradient(length: int, thickness: int) -> Image.Image:
    """The palette from low to high, left to right."""
    ramp = np.floor(colours(np.linspace(0, 1, length, dtype=np.float32), 0, 1) + 0.5).astype(np.uint8)
    return Image.fromarray(np.repeat(ramp[None], thickness, axis=0))
