"""Which pixels of a slide a model should see: the resolution policy, in one place.

A slide's µm/px comes from the slide; a cohort file replaces it, `--mpp` only fills in where the slide has no
valid one. From it and the model's target follows a `ReadPlan`: which stored level to read, by how much to
reduce it exactly, and whether to resample what is left.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from inference.errors import ConfigError, ResolutionTooCoarse, UnknownResolution

SAME = 0.02
"""Relative difference below which a resolution is used pixel for pixel."""

TOO_COARSE = 1.25
"""Level 0 coarser than this many times the target is refused."""

PLAUSIBLE = (0.05, 50.0)
"""µm/px outside this range are not believed."""

REDUCTIONS = (1, 2, 4, 8)

_NOISE = 1e-9  # what dividing decimal fractions leaves: 0.51 is 2 % above 0.5

_NUMBER = re.compile(r"\+?([0-9]{1,9}(\.[0-9]{0,30})?|\.[0-9]{1,30})([eE][+-]?[0-9]{1,2})?")

MppSource = Literal["slide", "cohort file", "--mpp"]


def parse_mpp(text: str) -> float:
    """A level-0 µm/px that a person wrote.

    Raises:
        ConfigError: no plain number, or outside `PLAUSIBLE`.
    """
    # Not all that float() takes: in another column's text or another country's, 0_5 and ١ are no resolutions.
    number = float(text) if _NUMBER.fullmatch(text.strip()) else math.nan
    if not PLAUSIBLE[0] <= number <= PLAUSIBLE[1]:
        low, high = PLAUSIBLE
        raise ConfigError(f"mpp must be a level-0 value between {low:g} and {high:g} µm/px, with a decimal point")
    return number


@dataclass(frozen=True)
class SlideResolution:
    """Level-0 µm/px, x and y, and where it came from."""

    mpp: tuple[float, float]
    source: MppSource


@dataclass(frozen=True)
class ReadPlan:
    """How to get the model's pixels from a slide.

    Attributes:
        level: stored level to read.
        downsample: level-0 pixels per pixel of that level, x and y.
        reduction: exact area reduction applied to it: 1, 2, 4 or 8.
        mpp: µm per pixel of the tiles, x and y, as they truly are.
        resample: what follows the reduction: nothing, the area mean, or bilinear enlargement.
    """

    level: int
    downsample: tuple[float, float]
    reduction: int
    mpp: tuple[float, float]
    resample: Literal["none", "area", "bilinear"]


def plausible(mpp: float | None) -> bool:
    """Whether a µm/px value can be believed."""
    return mpp is not None and math.isfinite(mpp) and PLAUSIBLE[0] <= mpp <= PLAUSIBLE[1]


def resolve_mpp(
    name: str,
    slide_mpp: tuple[float, float] | None,
    objective_power: float | None,
    *,
    cohort_mpp: float | None = None,
    fallback_mpp: float | None = None,
) -> SlideResolution:
    """Decide a slide's level-0 µm/px.

    Raises:
        UnknownResolution: nothing usable, with the option that would supply it.
    """
    if cohort_mpp is not None:
        if not plausible(cohort_mpp):
            raise UnknownResolution(f"{name}: the cohort file says {cohort_mpp} µm/px, which is not plausible: mend it")
        return SlideResolution((cohort_mpp, cohort_mpp), "cohort file")
    if slide_mpp is not None and all(plausible(value) for value in slide_mpp):
        return SlideResolution(slide_mpp, "slide")
    if plausible(fallback_mpp) and fallback_mpp is not None:
        return SlideResolution((fallback_mpp, fallback_mpp), "--mpp")
    says = "says nothing of its resolution" if slide_mpp is None else f"claims {_pair(slide_mpp)} µm/px"
    power = objective_power or 0.0
    hint = f"; its objective of {power:g}x suggests about {10 / power:.3g}" if power and plausible(10 / power) else ""
    raise UnknownResolution(
        f"{name}: the slide {says}: give its level-0 µm/px with --mpp X (make: MPP=X) or in a cohort file's mpp "
        f"column{hint}"
    )


def recall_mpp(
    recorded: Mapping[str, object], *, cohort_mpp: float | None, fallback_mpp: float | None
) -> SlideResolution | None:
    """What `resolve_mpp` would say of a slide of unchanged content, from the inputs of a result made from it.

    None where that cannot be told without opening the slide: what it states itself is known only if it was used, or if
    it had to be filled in.
    """
    if cohort_mpp is not None:
        return resolve_mpp("", None, None, cohort_mpp=cohort_mpp) if plausible(cohort_mpp) else None
    match recorded:
        case {"mpp_source": "slide", "mpp": [int() | float() as x, int() | float() as y]}:
            return SlideResolution((float(x), float(y)), "slide")
        case {"mpp_source": "--mpp"} if fallback_mpp is not None and plausible(fallback_mpp):
            return SlideResolution((fallback_mpp, fallback_mpp), "--mpp")
    return None


def plan_reading(
    name: str,
    level_sizes: Sequence[tuple[int, int]],
    mpp: tuple[float, float],
    target_mpp: float,
    *,
    kernel: Literal["area", "bilinear"] = "area",
    allow_upsampling: bool = False,
) -> ReadPlan:
    """Choose level, reduction and resampling for a target resolution.

    Candidates are all stored levels and their exact 1/2, 1/4 and 1/8 reductions. One within 2 % of the target is
    used pixel for pixel (stored levels before reductions, then nearest, then finer); else the coarsest that
    is not coarser than the target is resampled; a level 0 up to 1.25 times too coarse is enlarged.

    Raises:
        ResolutionTooCoarse: level 0 is coarser still and upsampling was not allowed.
    """
    if max(mpp) > TOO_COARSE * target_mpp * (1 + _NOISE) and not allow_upsampling:
        raise ResolutionTooCoarse(
            f"{name}: level 0 has {_pair(mpp)} µm/px, the model needs {target_mpp:g}: scan the slide at a higher "
            "magnification, use another model, or pass --allow-upsampling; if the slide states a wrong value, a cohort "
            "file's mpp column replaces it (--mpp only fills in where it states none)"
        )
    candidates = list(_candidates(level_sizes, mpp))
    same = [c for c in candidates if _distance(c.mpp, target_mpp) <= SAME + _NOISE]
    if same:
        # Of equals the one that decodes the fewest pixels: level 1 by 2 rather than level 0 by 8.
        return min(same, key=lambda c: (c.reduction > 1, *_rounded(_distance(c.mpp, target_mpp), max(c.mpp)), -c.level))
    finer = [c for c in candidates if max(c.mpp) <= target_mpp]
    target = (target_mpp, target_mpp)
    if finer:
        best = max(finer, key=lambda c: (*_rounded(max(c.mpp)), c.level))
        return ReadPlan(best.level, best.downsample, best.reduction, target, kernel)
    return ReadPlan(0, (1.0, 1.0), 1, target, "bilinear")


def _candidates(level_sizes: Sequence[tuple[int, int]], mpp: tuple[float, float]) -> list[ReadPlan]:
    width, height = level_sizes[0]
    found = []
    for level, (w, h) in enumerate(level_sizes):
        down = (width / w, height / h)
        for r in REDUCTIONS:
            scaled = (mpp[0] * down[0] * r, mpp[1] * down[1] * r)
            found.append(ReadPlan(level, down, r, scaled, "none"))
    return found


def _distance(mpp: tuple[float, float], target: float) -> float:
    """Relative difference along the worse axis."""
    return max(abs(m / target - 1) for m in mpp)


def _rounded(*values: float) -> tuple[float, ...]:
    return tuple(round(value, 9) for value in values)


def _pair(mpp: tuple[float, float]) -> str:
    return f"{mpp[0]:g}" if mpp[0] == mpp[1] else f"{mpp[0]:g} x {mpp[1]:g}"
