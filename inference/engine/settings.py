"""What a run may be told, with the defaults that everything shares."""

import os
import re
import sys
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, get_args

from inference.errors import ConfigError
from inference.slides.grid import EDGE_POLICIES, EdgePolicy
from inference.slides.resolution import PLAUSIBLE

Stage = Literal["info", "tiles", "predict", "features", "prediction", "heatmap"]
STAGES: tuple[Stage, ...] = ("info", "tiles", "predict", "features", "prediction", "heatmap")
"""In the order in which they need each other."""

_WHOLE = {"batch_size": 1, "readers": 1, "read_buffer_mb": 1, "top_k": 1, "max_failed_tiles": 0}
_NUMBERS = {
    "min_tissue": (0.0, 1.0),
    "max_failed_share": (0.0, 1.0),
    "threshold": (-sys.float_info.max, sys.float_info.max),
    "lock_wait_s": (0.0, threading.TIMEOUT_MAX),
    "read_timeout_s": (0.1, 86400.0),
}
ReaderMode = Literal["auto", "threads", "process"]
_DEVICE = re.compile(r"cpu|mps|cuda(:\d{1,3})?")


@dataclass(frozen=True)
class Settings:
    """One run's settings; each is checked, its type too.

    Attributes:
        mpp: level-0 µm/px for slides that state none of their own.
        allow_upsampling: enlarge slides coarser than 1.25 times the model's resolution.
        min_tissue: share of a tile's area that must be tissue for it to be planned.
        max_pen: share of a tile's area that may be ink of a pen; None for any.
        tissue_model: segmentation model that finds the tissue, by name or path; None to go by colours.
        stride_px: pixels between tiles, at most the tile's side, instead of what the model's spec says.
        edge: what becomes of the right and bottom rest of a slide where no whole tile fits.
        roi: region of interest of every slide that a cohort file gives none for: a file, or a folder with one for each.
        icc: convert tiles to sRGB by the slide's ICC profile, where it has one.
        batch_size: rows of every forward; short batches are padded.
        readers: threads that read tiles.
        read_buffer_mb: decoded pixels kept at most for tiles still to come; less may decode some twice.
        reader: in processes of their own, which are killed where a read hangs or crashes, in this one's threads, or
            by where the slide lies: in processes if on a network file system.
        read_timeout_s: for each try of a read, and to open the slide, where processes read.
        max_failed_tiles: failed tiles a slide may have, whatever its size.
        max_failed_share: share of planned tiles that may fail, where that is more.
        top_k: tiles in the mean of the highest.
        threshold: value above which a tile counts in `fraction_above`.
        lock_wait_s: how long to wait for another process that writes the same result.

    Raises:
        ConfigError: a value that a field cannot have.
    """

    mpp: float | None = None
    allow_upsampling: bool = False
    min_tissue: float = 0.01
    max_pen: float | None = None
    tissue_model: str | None = None
    stride_px: int | None = None
    edge: EdgePolicy = "drop"
    roi: Path | None = None
    icc: bool = False
    batch_size: int = 64
    device: str = "cpu"
    readers: int = field(default_factory=lambda: max(2, min(8, os.cpu_count() or 2)))
    reader: ReaderMode = "auto"
    read_timeout_s: float = 60.0
    read_buffer_mb: int = 256
    max_failed_tiles: int = 16
    max_failed_share: float = 0.05
    top_k: int = 10
    threshold: float = 0.5
    lock_wait_s: float = 0.0

    def __post_init__(self) -> None:
        for name, least in _WHOLE.items():
            if not (type(value := getattr(self, name)) is int and value >= least):  # a bool is an int too
                raise ConfigError(f"{name} is {value!r}: give a whole number, {least} or more")
        self._check_tiling()
        for name, (low, high) in _NUMBERS.items():
            self._take_number(name, low, high, f"{name} is {{}}: give a number between {low:g} and {high:g}")
        if self.mpp is not None:
            said = f"--mpp {{}} is no µm/px of a slide: give a value in {PLAUSIBLE[0]:g}-{PLAUSIBLE[1]:g}"
            self._take_number("mpp", *PLAUSIBLE, said)
        if self.max_pen is not None:
            self._take_number("max_pen", 0.0, 1.0, "max_pen is {}: give a number between 0 and 1, or None")
        if not (self.tissue_model is None or (isinstance(self.tissue_model, str) and self.tissue_model)):
            raise ConfigError(f"tissue_model is {self.tissue_model!r}: give a model's name or path, or None")
        for name in ("allow_upsampling", "icc"):
            if type(getattr(self, name)) is not bool:
                raise ConfigError(f"{name} is {getattr(self, name)!r}: give True or False")
        if not isinstance(self.device, str) or not _DEVICE.fullmatch(self.device):
            raise ConfigError(f"{self.device!r} is no device: give cpu, cuda, cuda:1 or mps")

    def _check_tiling(self) -> None:
        if self.stride_px is not None and not (type(self.stride_px) is int and self.stride_px >= 1):
            raise ConfigError(f"stride_px is {self.stride_px!r}: give a whole number, 1 or more")
        if self.reader not in get_args(ReaderMode):
            raise ConfigError(f"reader is {self.reader!r}: give auto, threads or process")
        if self.edge not in EDGE_POLICIES:
            raise ConfigError(f"edge is {self.edge!r}: give {', '.join(EDGE_POLICIES[:-1])} or {EDGE_POLICIES[-1]}")
        given: object = self.roi  # whatever its type says
        if isinstance(given, str) and given:
            object.__setattr__(self, "roi", Path(given))
        elif not isinstance(given, Path | None):
            raise ConfigError("roi is no path: give that of a file or folder")

    def _take_number(self, name: str, low: float, high: float, message: str) -> None:
        """Check a field and make it a float: recipes are compared as text, where 0 and 0.0 differ."""
        value = getattr(self, name)
        if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:  # NaN: neither
            raise ConfigError(message.format(f"{value:g}" if isinstance(value, float) else repr(value)))
        object.__setattr__(self, name, float(value) + 0.0)  # -0.0 becomes 0.0

    def changed(self) -> dict[str, str]:
        """What is not at its default and moves results, as text, by name; a path is its last part alone."""
        names = ("mpp", "allow_upsampling", "min_tissue", "max_pen", "tissue_model", "stride_px", "edge", "roi", "icc")
        found = {}
        for name in names:
            value = getattr(self, name)
            if value != type(self).__dataclass_fields__[name].default:
                found[name] = value.name if isinstance(value, Path) else str(value)
        return found

    def failure_budget(self, planned: int) -> int:
        """Tiles of a slide that may fail before the slide does."""
        return max(self.max_failed_tiles, int(self.max_failed_share * planned))
