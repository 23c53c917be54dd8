"""The page says what it should, links to what is there, and takes any name."""

import base64
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote

import numpy as np
import pytest
from PIL import Image

from inference.errors import StoreError
from inference.outputs.report import FailedTiles, SlideReport, write_report

HOSTILE = "<script>alert('1')</script>\"><img src=x onerror=alert(2)>{{ 7*7 }}\u202egnp.svs"

GOOD = SlideReport(
    key="good-1a2b3c4d",
    name="good.svs",
    status="ok with failures",
    reason="4 of 1,057 planned tiles failed.",
    remedy="Copy the slide again.",
    n_grid=2117,
    n_planned=1057,
    n_ok=1053,
    n_failed=4,
    tissue_share=0.374,
    mpp=(0.499, 0.25),
    mpp_source="cohort file",
    level="1, halved",
    tiles_per_s=61.34,
    bound_by="forward",
    failures=(FailedTiles("read_error", 4, "row 5, col 7 at (1568, 1120)"),),
    prediction={"tumour": {"mean": 0.31234, "fraction_above": 0.5}, "stroma": {"mean": 0.00001}},
    digests={"Recipe": "3f0c9a1be77d"},
)
BAD = SlideReport("bad-1", "bad.svs", "failed", reason="No resolution.", remedy="Give --mpp X.")
EMPTY = SlideReport("empty-1", "empty.svs", "empty", reason="No tissue.")


class _Page(HTMLParser):
    """Elements, links and visible text of a page."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str, str]] = []
        self.open: list[str] = []
        self.text = ""
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        if tag not in {"meta", "img", "br"}:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] != "style":
            self.text = re.sub(r"\s+", " ", f"{self.text} {data}")

    def values(self, tag: str, name: str) -> list[str]:
        return [value for found, key, value in self.attributes if (found, key) == (tag, name)]


def _write(folder: Path, *slides: SlideReport, title: str = "Report", run: dict[str, str] | None = None) -> _Page:
    write_report(folder / "report.html", title, slides, generated="12 March 2026", run=run or {})
    page = _Page((folder / "report.html").read_text(encoding="utf-8"))
    assert page.open == []
    return page


def test_the_page_counts_slides_by_result_and_tiles(tmp_path: Path) -> None:
    page = _write(tmp_path, GOOD, BAD, BAD, EMPTY, replace(GOOD, status="ok", n_ok=1057, n_failed=0))
    for shown in ("slides 5", "✓ ok 1", "! ok with failures 1", "○ empty 1", "✕ failed 2", "tiles analysed 2,110"):
        assert shown in page.text
    assert "tiles failed, of 2,114 planned 4" in page.text


def test_a_slides_card_says_what_was_found_and_how(tmp_path: Path) -> None:
    text = _write(tmp_path, GOOD, run={"Model": "demo"}).text
    for shown in (
        "Tiles 1,053 ok, 4 failed; 1,057 planned of 2,117 in the grid",
        "Tissue 37.4 %",
        "Resolution 0.499 × 0.25 µm/px, from the cohort file",
        "Level read 1, halved",
        "Speed 61.34 tiles/s, bound by forward",
        "Output mean fraction above tumour 0.3123 0.5 stroma 1.000e-05 –",
        "read_error 4 row 5, col 7 at (1568, 1120)",
        "Recipe 3f0c9a1be77d",
        "How this was made Model demo",
        "12 March 2026",
    ):
        assert shown in text


def test_failed_slides_stand_first_with_reason_and_remedy(tmp_path: Path) -> None:
    page = _write(tmp_path, GOOD, EMPTY, BAD)
    attention = page.text[page.text.index("Needs attention") : page.text.index("Bound by")]
    assert attention.index("bad.svs") < attention.index("good.svs")
    assert "No resolution." in attention
    assert "empty.svs" not in attention.split(" Slides ")[0]
    assert "What to do: Give --mpp X." in page.text
    assert set(page.values("a", "href")) <= {
        f"#{anchor}" for tag in ("article", "h2") for anchor in page.values(tag, "id")
    }


def test_a_run_without_slides_or_trouble_still_has_a_page(tmp_path: Path) -> None:
    assert "There are no slides in this run." in _write(tmp_path).text
    assert "Needs attention" not in _write(tmp_path, replace(GOOD, status="ok"), EMPTY).text


def test_everything_written_by_others_is_escaped(tmp_path: Path) -> None:
    hostile = SlideReport(
        key=HOSTILE,
        name=HOSTILE,
        status="ok with failures",
        reason=HOSTILE,
        remedy=HOSTILE,
        n_grid=1,
        level=HOSTILE,
        tiles_per_s=1.0,
        bound_by=HOSTILE,
        failures=(FailedTiles(HOSTILE, 1, HOSTILE),),
        prediction={HOSTILE: {HOSTILE: 1.0}},
        overlay=tmp_path / HOSTILE.replace("/", ""),
        files={HOSTILE: tmp_path / HOSTILE.replace("/", "")},
        digests={HOSTILE: HOSTILE},
    )
    page = _write(tmp_path, hostile, title=HOSTILE, run={HOSTILE: HOSTILE})
    assert "script" not in page.tags
    assert "img" not in page.tags
    assert not [name for _, name, _ in page.attributes if name.startswith("on")]
    assert page.text.count(HOSTILE) >= 15


def test_the_page_loads_nothing_and_runs_nothing(tmp_path: Path) -> None:
    Image.fromarray(np.zeros((8, 8, 3), np.uint8)).save(tmp_path / "overlay.png")
    page = _write(tmp_path, replace(GOOD, overlay=tmp_path / "overlay.png", files={"heatmap": tmp_path / "h.tif"}))
    assert not {"script", "link", "iframe", "object"} & set(page.tags)
    assert all(src.startswith("data:image/") for src in page.values("img", "src"))
    assert "url(" not in (tmp_path / "report.html").read_text(encoding="utf-8")
    assert any("default-src 'none'" in content for content in page.values("meta", "content"))
    assert all(page.values("img", "alt"))


def test_links_are_relative_and_lead_to_the_file_whatever_its_name(tmp_path: Path) -> None:
    names = ["heatmap.tif", "a b#c?d%20.tif", "javascript:alert(1).tif", "ü–µ.tif", '"quoted".tif']
    (tmp_path / "store").mkdir()
    (tmp_path / "report").mkdir()
    files = {name: tmp_path / "store" / name for name in names}
    for file in files.values():
        file.write_bytes(b"")
    page = _write(tmp_path / "report", replace(GOOD, files=files))
    links = [href for href in page.values("a", "href") if not href.startswith("#")]
    assert len(links) == len(names)
    for link in links:
        assert re.fullmatch(r"\.\./store/[A-Za-z0-9%._~-]+", link)
        assert (tmp_path / "report" / unquote(link)).is_file()


def test_a_small_picture_is_embedded_as_it_is_and_a_large_one_as_a_preview(tmp_path: Path) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (400, 600, 3), dtype=np.uint8)
    Image.fromarray(noise[:40, :40]).save(tmp_path / "small.png")
    Image.fromarray(noise).save(tmp_path / "large.png")
    small, large = (tmp_path / "small.png"), (tmp_path / "large.png")
    sources = _write(tmp_path, replace(GOOD, overlay=small), replace(GOOD, overlay=large)).values("img", "src")
    assert sources[0] == "data:image/png;base64," + base64.b64encode(small.read_bytes()).decode()
    assert sources[1].startswith("data:image/jpeg;base64,")
    assert len(sources[1]) < 70_000


@pytest.mark.parametrize("content", [None, b"", b"not a picture"])
def test_a_picture_that_cannot_be_read_is_linked_instead(tmp_path: Path, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / "overlay.png").write_bytes(content)
    page = _write(tmp_path, replace(GOOD, overlay=tmp_path / "overlay.png"))
    assert "img" not in page.tags
    assert "overlay.png" in page.values("a", "href")


def test_a_gene_panel_is_cut_and_says_so(tmp_path: Path) -> None:
    text = _write(tmp_path, replace(GOOD, prediction={f"gene {i}": {"mean": float(i)} for i in range(1030)})).text
    assert "gene 29" in text
    assert "gene 30" not in text
    assert "and 1,000 more outputs in the files" in text


def test_a_file_name_that_is_no_text_does_not_stop_the_report(tmp_path: Path) -> None:
    page = _write(tmp_path, replace(GOOD, name="slide-\udcff.svs", files={"heatmap": tmp_path / "h-\udcff.tif"}))
    assert "slide-\\udcff.svs" in page.text
    assert "h-%FF.tif" in page.values("a", "href")


def test_a_folder_that_cannot_be_made_is_a_store_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(StoreError):
        _write(tmp_path / "file", GOOD)


def test_the_page_is_replaced_whole_or_not_at_all(tmp_path: Path) -> None:
    _write(tmp_path, GOOD)
    before = (tmp_path / "report.html").read_bytes()
    with pytest.raises(ValueError, match="format code"):
        _write(tmp_path, replace(GOOD, tissue_share="much"))  # type: ignore[arg-type]
    assert (tmp_path / "report.html").read_bytes() == before
    _write(tmp_path, BAD)
    assert (tmp_path / "report.html").read_bytes() != before
    assert [path.name for path in tmp_path.iterdir()] == ["report.html"]
