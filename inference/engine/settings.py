"""What a run may be told, with the defaults that everything shares."""

import os
import re
import sys
import threading
from dataclasses import dataclass, field
from typing import Literal

from inference.errors import ConfigError
from inference.slides.resolution import PLAUSIBLE

Stage = Literal["info", "tiles", "predict", "features", "prediction", "heatmap"]
STAGES: tuple[Stage, ...] = ("info", "tiles", "predict", "features", "prediction", "heatmap")
"""In the order in which they need each other."""

_WHOLE = {"batch_size": 1, "readers": 1, "top_k": 1, "max_failed_tiles": 0}
_NUMBERS = {
    "min_tissue": (0.0, 1.0),
    "max_failed_share": (0.0, 1.0),
    "threshold": (-sys.float_info.max, sys.float_info.max),
    "lock_wait_s": (0.0, threading.TIMEOUT_MAX),
}
_DEVICE = re.compile(r"cpu|mps|cuda(:\d{1,3})?")


@dataclass(frozen=True)
class Settings:
    """One run's settings; each is checked, its type too.

    Attributes:
        mpp: level-0 µm/px for slides that state none of their own.
        allow_upsampling: enlarge slides coarser than 1.25 times the model's resolution.
        min_tissue: share of a tile's area that must be tissue for it to be planned.
        batch_size: rows of every forward; short batches are padded.
        readers: threads that read tiles.
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
    batch_size: int = 64
    device: str = "cpu"
    readers: int = field(default_factory=lambda: max(2, min(8, os.cpu_count() or 2)))
    max_failed_tiles: int = 16
    max_failed_share: float = 0.05
    top_k: int = 10
    threshold: float = 0.5
    lock_wait_s: float = 0.0

    def __post_init__(self) -> None:
        for name, least in _WHOLE.items():
            if not (type(value := getattr(self, name)) is int and value >= least):  # a bool is an int too
                raise ConfigError(f"{name} is {value!r}: give a whole number, {least} or more")
        for name, (low, high) in _NUMBERS.items():
            self._take_number(name, low, high, f"{name} is {{}}: give a number between {low:g} and {high:g}")
        if self.mpp is not None:
            said = f"--mpp {{}} is no µm/px of a slide: give a value in {PLAUSIBLE[0]:g}-{PLAUSIBLE[1]:g}"
            self._take_number("mpp", *PLAUSIBLE, said)
        if type(self.allow_upsampling) is not bool:
            raise ConfigError(f"allow_upsampling is {self.allow_upsampling!r}: give True or False")
        if not isinstance(self.device, str) or not _DEVICE.fullmatch(self.device):
            raise ConfigError(f"{self.device!r} is no device: give cpu, cuda, cuda:1 or mps")

    def _take_number(self, name: str, low: float, high: float, message: str) -> None:
        """Check a field and make it a float: recipes are compared as text, where 0 and 0.0 differ."""
        value = getattr(self, name)
        if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:  # NaN: neither
            raise ConfigError(message.format(f"{value:g}" if isinstance(value, float) else repr(value)))
        object.__setattr__(self, name, float(value) + 0.0)  # -0.0 becomes 0.0

    def failure_budget(self, planned: int) -> int:
        """Tiles of a slide that may fail before the slide does."""
        return max(self.max_failed_tiles, int(self.max_failed_share * planned))
