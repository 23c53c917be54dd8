"""The resolution policy: whose µm/px counts, and which pixels are read for a target."""

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Literal

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from inference.errors import ResolutionTooCoarse, UnknownResolution
from inference.slides.resolution import ReadPlan, SlideResolution, plan_reading, plausible, resolve_mpp

ABSURD = [0.0, -0.25, math.nan, math.inf, -math.inf, 0.04, 51.0, 352.778]
APERIO = [(100_000, 80_000), (25_000, 20_000), (6_250, 5_000)]
"""Downsamples 1, 4 and 16."""


def _plan(
    mpp: float | tuple[float, float],
    target: float,
    sizes: Sequence[tuple[int, int]] = APERIO,
    *,
    kernel: Literal["area", "bilinear"] = "area",
    allow_upsampling: bool = False,
) -> ReadPlan:
    pair = mpp if isinstance(mpp, tuple) else (mpp, mpp)
    return plan_reading("S1", sizes, pair, target, kernel=kernel, allow_upsampling=allow_upsampling)


def test_the_slides_own_resolution_is_used_whatever_fills_in() -> None:
    assert resolve_mpp("S1", (0.25, 0.26), 40, fallback_mpp=0.5) == SlideResolution((0.25, 0.26), "slide")


def test_a_cohort_file_replaces_what_the_slide_says_and_what_fills_in() -> None:
    expected = SlideResolution((0.3, 0.3), "cohort file")
    assert resolve_mpp("S1", (0.25, 0.25), 40, cohort_mpp=0.3, fallback_mpp=0.5) == expected
    assert resolve_mpp("S1", None, None, cohort_mpp=0.3) == expected


@pytest.mark.parametrize("stated", [None, *[(value, value) for value in ABSURD], (0.25, 0.0), (math.nan, 0.25)])
def test_the_fallback_counts_only_where_the_slide_has_no_usable_resolution(stated: tuple[float, float] | None) -> None:
    assert resolve_mpp("S1", stated, None, fallback_mpp=0.5) == SlideResolution((0.5, 0.5), "--mpp")
    with pytest.raises(UnknownResolution, match=r"--mpp X \(make: MPP=X\) or in a cohort file's mpp column$") as raised:
        resolve_mpp("S1", stated, None)
    assert raised.value.code == "unknown_resolution"
    assert not raised.value.retryable
    assert str(raised.value).startswith("S1: ")
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("value", ABSURD)
def test_an_absurd_value_in_a_cohort_file_is_refused_even_if_the_slide_knows_better(value: float) -> None:
    with pytest.raises(UnknownResolution, match="cohort file"):
        resolve_mpp("S1", (0.25, 0.25), 40, cohort_mpp=value, fallback_mpp=0.5)
    assert resolve_mpp("S1", (0.25, 0.25), 40).source == "slide"


@pytest.mark.parametrize("value", ABSURD)
def test_an_absurd_fallback_fills_in_nothing(value: float) -> None:
    with pytest.raises(UnknownResolution):
        resolve_mpp("S1", None, None, fallback_mpp=value)
    assert resolve_mpp("S1", (0.25, 0.25), None, fallback_mpp=value).source == "slide"


@pytest.mark.parametrize(
    ("mpp", "believed"), [(0.05, True), (50.0, True), (0.0499, False), (50.01, False), (1e-300, False), (None, False)]
)
def test_the_plausible_range_includes_its_ends(mpp: float | None, believed: bool) -> None:
    assert plausible(mpp) is believed


def test_the_remedy_says_what_the_objective_suggests() -> None:
    with pytest.raises(UnknownResolution, match=r"objective of 20x suggests about 0\.5$"):
        resolve_mpp("S1", None, 20)
    with pytest.raises(UnknownResolution, match=r"claims 0 µm/px.*40x suggests about 0\.25$"):
        resolve_mpp("S1", (0.0, 0.0), 40)


@pytest.mark.parametrize("power", [None, 0.0, -20.0, math.nan, math.inf, 1e6, 1e-9])
def test_an_absurd_objective_suggests_nothing(power: float | None) -> None:
    with pytest.raises(UnknownResolution) as raised:
        resolve_mpp("S1", None, power)
    assert "objective" not in str(raised.value)


@pytest.mark.parametrize(
    ("mpp", "target", "level", "reduction"),
    [
        (0.25, 0.25, 0, 1),
        (0.25, 0.5, 0, 2),
        (0.25, 1.0, 1, 1),  # a stored level before level 0 by 4
        (0.25, 2.0, 1, 2),
        (0.25, 4.0, 2, 1),
        (0.25, 32.0, 2, 8),
        (0.2525, 1.0, 1, 1),  # 1.01: 1 % coarser is used as it is
        (0.2475, 1.0, 1, 1),  # 0.99: 1 % finer too
        (0.245, 0.25, 0, 1),  # exactly 2 %
        (0.255, 0.25, 0, 1),
        (0.51, 0.5, 0, 1),
    ],
)
def test_a_candidate_within_two_percent_is_used_pixel_for_pixel(
    mpp: float, target: float, level: int, reduction: int
) -> None:
    plan = _plan(mpp, target)
    assert (plan.level, plan.reduction, plan.resample) == (level, reduction, "none")
    true = mpp * (1, 4, 16)[level] * reduction
    assert plan.mpp == pytest.approx((true, true)), "the true µm/px is recorded, not the target"


def test_exactly_equal_candidates_are_read_from_the_coarser_stored_level() -> None:
    """Level 1 by 2 and level 0 by 8 are both 2 µm/px; the first needs a sixteenth of the pixels."""
    assert (_plan(0.25, 2.0).level, _plan(0.25, 2.0).reduction) == (1, 2)
    assert (_plan(0.25, 1.5).level, _plan(0.25, 1.5).reduction) == (1, 1)


def test_of_two_stored_levels_within_two_percent_the_nearer_is_read_then_the_finer() -> None:
    sizes = [(10_000, 10_000), (9_900, 9_900), (9_800, 9_800)]
    assert _plan(0.495, 0.5, sizes).level == 1  # 0.495, 0.5, 0.5051
    sizes = [(10_200, 10_200), (9_800, 9_800)]
    assert _plan(0.49, 0.5, sizes).level == 0  # 0.49 and 0.51 are equally far: the finer


@pytest.mark.parametrize(
    ("mpp", "target", "level", "reduction"),
    [
        (0.23, 0.5, 0, 2),  # 0.46, not level 1's 0.92
        (0.25, 0.6, 0, 2),
        (0.25, 1.5, 1, 1),
        (0.25, 3.0, 1, 2),
        (0.25, 100.0, 2, 8),
        (0.4, 0.5, 0, 1),
    ],
)
def test_else_the_coarsest_that_is_not_coarser_is_resampled_to_the_target(
    mpp: float, target: float, level: int, reduction: int
) -> None:
    for kernel in ("area", "bilinear"):
        plan = _plan(mpp, target, kernel=kernel)
        assert (plan.level, plan.reduction, plan.resample) == (level, reduction, kernel)
        assert plan.mpp == (target, target)


@pytest.mark.parametrize("mpp", [0.511, 0.55, 0.6, 0.625])
def test_a_level_0_up_to_a_quarter_too_coarse_is_enlarged_bilinearly(mpp: float) -> None:
    assert _plan(mpp, 0.5) == ReadPlan(0, (1.0, 1.0), 1, (0.5, 0.5), "bilinear")


@pytest.mark.parametrize(("mpp", "target"), [(0.625, 0.5), (0.375, 0.3), (0.055, 0.044), (0.11, 0.088)])
def test_exactly_a_quarter_too_coarse_is_still_enlarged(mpp: float, target: float) -> None:
    assert _plan(mpp, target).resample == "bilinear"


@pytest.mark.parametrize("mpp", [0.6256, 1.0, 28.969, (0.25, 0.63), (0.63, 0.25)])
def test_a_coarser_level_0_is_refused_unless_upsampling_is_allowed(mpp: float | tuple[float, float]) -> None:
    with pytest.raises(
        ResolutionTooCoarse, match=r"^S1: level 0 has .*needs 0\.5: .*--allow-upsampling; .*mpp column.*"
    ) as raised:
        _plan(mpp, 0.5)
    assert raised.value.code == "resolution_too_coarse"
    assert _plan(mpp, 0.5, allow_upsampling=True) == ReadPlan(0, (1.0, 1.0), 1, (0.5, 0.5), "bilinear")


def test_the_permission_to_enlarge_changes_nothing_where_there_are_pixels_enough() -> None:
    for mpp in (0.25, 0.23, 0.505, 0.6):
        assert _plan(mpp, 0.5, allow_upsampling=True) == _plan(mpp, 0.5)


def test_downsamples_are_the_true_ones_of_each_axis() -> None:
    """3.9952 read as 3 made tiles a third too wide elsewhere."""
    plan = _plan(0.25, 1.0, [(9_988, 4_000), (2_500, 1_000)])
    assert plan.level == 1
    assert plan.downsample == (3.9952, 4.0)
    assert plan.mpp == pytest.approx((0.9988, 1.0))


@pytest.mark.parametrize(
    ("mpp", "expected"),
    [
        ((0.5, 0.504), ("none", 0, 1)),  # a hair apart: as it is
        ((0.25, 0.50), ("area", 0, 1)),  # by a factor of two: each axis resampled on its own
        ((0.25, 0.2525), ("none", 0, 2)),
        ((0.45, 0.55), ("bilinear", 0, 1)),
    ],
)
def test_both_axes_must_fit(mpp: tuple[float, float], expected: tuple[str, int, int]) -> None:
    plan = _plan(mpp, 0.5)
    assert (plan.resample, plan.level, plan.reduction) == expected
    scale = plan.reduction if plan.resample == "none" else 1
    assert plan.mpp == (pytest.approx((mpp[0] * scale, mpp[1] * scale)) if plan.resample == "none" else (0.5, 0.5))


@st.composite
def _pyramids(draw: st.DrawFn) -> tuple[list[tuple[int, int]], tuple[float, float], float]:
    width, height = draw(st.integers(500, 200_000)), draw(st.integers(500, 200_000))
    sizes = [(width, height)]
    for _ in range(draw(st.integers(0, 6))):
        factor = draw(st.sampled_from([2, 3, 4, 2.0005]))
        size = (math.ceil(sizes[-1][0] / factor), math.floor(sizes[-1][1] / factor))
        if min(size) < 50:
            break
        sizes.append(size)
    x = draw(st.floats(0.05, 2))
    y = draw(st.sampled_from([x, x * 1.001, x * 2]))
    return sizes, (x, y), draw(st.sampled_from([0.25, 0.5, 1.0, 2.0, 4.0]))


@given(_pyramids())
def test_a_plan_is_what_the_rule_says_for_any_pyramid(
    case: tuple[list[tuple[int, int]], tuple[float, float], float],
) -> None:
    """The rule again, word by word and in exact arithmetic."""
    sizes, mpp, target = case
    wanted = Fraction(target)
    found: list[tuple[int, int, Fraction, Fraction]] = []
    for level, (w, h) in enumerate(sizes):
        for reduction in (1, 2, 4, 8):
            x = Fraction(mpp[0]) * sizes[0][0] / w * reduction
            y = Fraction(mpp[1]) * sizes[0][1] / h * reduction
            found.append((level, reduction, x, y))
    worst = {c: max(abs(c[2] / wanted - 1), abs(c[3] / wanted - 1)) for c in found}
    # Where rounding decides, either answer is right.
    assume(all(abs(float(d) - 0.02) > 1e-6 for d in worst.values()))
    assume(all(abs(float(max(c[2:]) / wanted) - edge) > 1e-6 for c in found for edge in (1, 1.25)))
    plan = _plan(mpp, target, sizes, allow_upsampling=True)
    if max(mpp) > 1.25 * target:
        with pytest.raises(ResolutionTooCoarse):
            _plan(mpp, target, sizes)
    else:
        assert _plan(mpp, target, sizes) == plan
    true = next((c for c in found if c[:2] == (plan.level, plan.reduction)), None)
    assert true is not None
    same = [c for c in found if worst[c] < Fraction(2, 100)]
    finer = [c for c in found if max(c[2:]) <= wanted]
    if same:
        assert plan.resample == "none"
        assert plan.mpp == pytest.approx((float(true[2]), float(true[3])))
        stored = [c for c in same if c[1] == 1] or same
        assert true in stored
        assert float(worst[true]) == pytest.approx(float(min(worst[c] for c in stored)), abs=1e-8)
    elif finer:
        assert plan.resample == "area"
        assert float(max(true[2:])) == pytest.approx(float(max(max(c[2:]) for c in finer)))
    else:
        assert (plan.level, plan.reduction, plan.resample) == (0, 1, "bilinear")
    if plan.resample != "none":
        assert plan.mpp == (target, target)
