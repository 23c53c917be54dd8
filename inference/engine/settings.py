"""What a run may be told, with the defaults that everything shares."""

import math
import os
import re
from dataclasses import dataclass, field
from typing import Literal

from inference.errors import ConfigError
from inference.slides.resolution import PLAUSIBLE, plausible

Stage = Literal["info", "tiles", "predict", "features", "prediction", "heatmap"]
STAGES: tuple[Stage, ...] = ("info", "tiles", "predict", "features", "prediction", "heatmap")
"""In the order in which they need each other."""

_DEVICE = re.compile(r"cpu|mps|cuda(:\d{1,3})?")


@dataclass(frozen=True)
class Settings:
    """One run's settings.

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
        if self.mpp is not None and not plausible(self.mpp):
            raise ConfigError(
                f"--mpp {self.mpp:g} is no µm/px of a slide: give a value in {PLAUSIBLE[0]:g}-{PLAUSIBLE[1]:g}"
            )
        if not math.isfinite(self.threshold) or math.isnan(self.lock_wait_s):
            raise ConfigError(f"threshold {self.threshold} and lock_wait_s {self.lock_wait_s} must be numbers")
        if not _DEVICE.fullmatch(self.device):
            raise ConfigError(f"{self.device!r} is no device: give cpu, cuda, cuda:1 or mps")
        if not 0 <= self.min_tissue <= 1 or not 0 <= self.max_failed_share <= 1:
            raise ConfigError("min_tissue and max_failed_share are shares between 0 and 1")
        if min(self.batch_size, self.readers, self.top_k) < 1 or self.max_failed_tiles < 0 or self.lock_wait_s < 0:
            raise ConfigError("batch_size, readers and top_k start at 1, max_failed_tiles and lock_wait_s at 0")

    def failure_budget(self, planned: int) -> int:
        """Tiles of a slide that may fail before the slide does."""
        return max(self.max_failed_tiles, int(self.max_failed_share * planned))
