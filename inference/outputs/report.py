"""One self-contained HTML page about a run: what came out for every slide, and what to do where nothing did."""

import base64
import io
import math
import os
import urllib.parse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple

import jinja2
from PIL import Image

from inference.outputs.overlay import preview
from inference.store.files import store_errors, write_atomic

Status = Literal["ok", "ok with failures", "empty", "failed", "not run"]
STATUSES: tuple[Status, ...] = ("ok", "ok with failures", "empty", "failed", "not run")
_ATTENTION: tuple[Status, ...] = ("failed", "ok with failures")

_PICTURE_BYTES = 100_000  # a larger picture is embedded as a preview
_ALL_PICTURES_BYTES = 24_000_000  # beyond it pictures are linked, so a large cohort's page still opens

_MAX_OUTPUTS = 30  # a gene panel's thousands belong in the files


class FailedTiles(NamedTuple):
    """Tiles of a slide that failed in one way, with one of them as an example: 'row 5, col 7 at (1568, 1120)'."""

    code: str
    n_tiles: int
    example: str


@dataclass(frozen=True)
class SlideReport:
    """What the page says about one slide; a slide that failed early has few of these.

    Attributes:
        name: what a person knows the slide by.
        reason: why the slide failed, is empty or has failures.
        remedy: what the reader can do about it.
        n_grid: tiles of the whole grid; planned ones are those with tissue.
        notes: what else a person should know of it: ink, folds, blur.
        tissue_share: 0 to 1.
        mpp: µm/px of level 0 that was used, x and y.
        level: what was read, such as "0" or "1, halved".
        bound_by: the stage that limited the speed.
        prediction: statistic by name, by output.
        overlay: a JPEG or PNG file.
        files: what to link, by label.
        digests: recipe digests and the like, by label.
    """

    key: str
    name: str
    status: Status
    reason: str | None = None
    remedy: str | None = None
    n_grid: int = 0
    n_planned: int = 0
    n_ok: int = 0
    n_failed: int = 0
    notes: tuple[str, ...] = ()
    tissue_share: float | None = None
    mpp: tuple[float, float] | None = None
    mpp_source: Literal["slide", "cohort file", "--mpp"] | None = None
    level: str | None = None
    tiles_per_s: float | None = None
    bound_by: str | None = None
    failures: tuple[FailedTiles, ...] = ()
    prediction: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    overlay: Path | None = None
    files: Mapping[str, Path] = field(default_factory=dict)
    digests: Mapping[str, str] = field(default_factory=dict)


def write_report(
    path: Path, title: str, slides: Sequence[SlideReport], *, generated: str, run: Mapping[str, str]
) -> None:
    """Write the page in one step, so a reader never meets half of it.

    Needs no network and no script. Slides keep their order. Links to files are relative to the
    page; pictures are embedded. `generated` is the date to show, `run` what else to say of the run.
    Raises `StoreFull` or `StoreError` where the page cannot be written.
    """
    cards = _cards(slides)
    page = (
        _environment()
        .get_template("report.html.j2")
        .render(
            title=title,
            generated=generated,
            run=run,
            cards=cards,
            max_outputs=_MAX_OUTPUTS,
            attention=[card for status in _ATTENTION for card in cards if card.slide.status == status],
            counts={status: sum(slide.status == status for slide in slides) for status in STATUSES},
            n_slides=len(slides),
            n_planned=sum(slide.n_planned for slide in slides),
            n_ok=sum(slide.n_ok for slide in slides),
            n_failed=sum(slide.n_failed for slide in slides),
            link=lambda file: _link(file, path.parent),
        )
    )
    with store_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    # A file name that is no text holds lone surrogates, which have no UTF-8.
    write_atomic(path, page.encode("utf-8", "backslashreplace"))


def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"grouped": _grouped, "percent": _percent, "number": _number, "mpp": _mpp}
    return environment


class _Card(NamedTuple):
    """A slide with what the template needs beside it."""

    slide: SlideReport
    anchor: str
    picture: str | None
    statistics: list[str]


def _cards(slides: Sequence[SlideReport]) -> list[_Card]:
    """Cards with their pictures as data URIs; None where there is no readable picture, or no room for more."""
    cards = []
    room = _ALL_PICTURES_BYTES
    for number, slide in enumerate(slides, start=1):
        data = _picture(slide.overlay) if slide.overlay is not None and room > 0 else None
        room -= len(data[1]) if data else 0
        picture = f"data:{data[0]};base64,{base64.b64encode(data[1]).decode()}" if data else None
        statistics = list(dict.fromkeys(key for row in slide.prediction.values() for key in row))
        cards.append(_Card(slide, f"slide-{number}", picture, statistics))
    return cards


def _picture(path: Path) -> tuple[str, bytes] | None:
    """Media type and bytes of a picture, made small where it is large."""
    try:
        data = path.read_bytes()
        with Image.open(io.BytesIO(data), formats=("JPEG", "PNG")) as image:
            image.load()
    except OSError:
        return None
    if len(data) > _PICTURE_BYTES:
        return "image/jpeg", preview(image)
    return f"image/{str(image.format).lower()}", data


def _link(file: Path, folder: Path) -> str:
    """A relative link; every character that could mean something in a URL is quoted."""
    return urllib.parse.quote(os.fsencode(os.path.relpath(file, folder)))


def _grouped(value: int) -> str:
    return f"{value:,}"


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _number(value: float) -> str:
    """Four significant digits, without an exponent where a reader does not need one."""
    if not math.isfinite(value) or value == 0:
        return f"{value:g}"
    return f"{value:.3e}" if not 1e-4 <= abs(value) < 1e6 else f"{value:.4g}" if abs(value) < 1000 else f"{value:,.0f}"


def _mpp(mpp: tuple[float, float]) -> str:
    x, y = f"{mpp[0]:.4g}", f"{mpp[1]:.4g}"
    return x if x == y else f"{x} × {y}"
