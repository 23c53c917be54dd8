"""The Dagster UI in a real browser: the graph, the overlay picture, the table of failed tiles."""

import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Page, sync_playwright

from inference.models.registry import Checkpoint
from tests.conftest import REPO

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, shared_data: Path, demo_checkpoint: Checkpoint) -> Iterator[str]:
    """A web server over the run of one damaged slide."""
    out = tmp_path_factory.mktemp("ui")
    source = out / "slides"
    source.mkdir()
    shutil.copy(shared_data / "broken/tile-garbage.svs", source / "damaged.svs")
    env = {**os.environ, "SLIDE_MODEL_CACHE": str(demo_checkpoint.path.parent)}
    command = [sys.executable, "-m", "pipelines.demo", "--out", str(out), "--slides", str(source)]
    subprocess.run(command, cwd=REPO, env=env, check=True, capture_output=True, timeout=200)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    run = out / "runs" / "slides"
    env |= {"DAGSTER_HOME": str(run / "dagster"), "SLIDE_SOURCE": str(source), "SLIDE_STORE": str(run / "store")}
    web = [str(Path(sys.executable).with_name("dagster-webserver")), "-w", "workspace.yaml", "-h", "127.0.0.1"]
    with (out / "web.log").open("wb") as log:
        process = subprocess.Popen([*web, "-p", str(port)], cwd=REPO, env=env, stdout=log, stderr=log)
    try:
        address = f"http://127.0.0.1:{port}"
        wait_for(address)
        yield address
    finally:
        process.terminate()
        process.wait(30)


@pytest.fixture(scope="module")
def page() -> Iterator[Page]:
    """A page of headless Chromium."""
    chromium = shutil.which("chromium")
    if chromium is None:
        pytest.skip("no chromium: install Debian's package of that name")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=FLAGS)
        yield browser.new_page(viewport={"width": 1500, "height": 1000})
        browser.close()


def test_the_graph_shows_a_group_for_the_slides_the_model_and_the_cohort(server: str, page: Page) -> None:
    page.goto(f"{server}/asset-groups")
    for group in ("slides", "demo", "cohort"):
        page.get_by_text(group, exact=True).first.wait_for(timeout=30_000)
    keep(page, "graph")


def test_the_heatmap_page_shows_the_overlay_at_its_natural_size(server: str, page: Page) -> None:
    page.goto(f"{server}/assets/demo/heatmap?view=partitions")
    page.get_by_text("damaged-svs", exact=False).first.click(timeout=30_000)
    page.get_by_text("[Show Markdown]").first.click(timeout=30_000)
    picture = page.locator("img[alt='heatmap of hematoxylin_area']")
    picture.wait_for(timeout=10_000)
    width, height = picture.evaluate("i => [i.naturalWidth, i.naturalHeight]")
    assert 300 <= max(width, height) <= 512
    assert min(width, height) >= 200
    keep(page, "overlay")


def test_the_predictions_page_shows_the_failed_tiles(server: str, page: Page) -> None:
    page.goto(f"{server}/assets/demo/tile_predictions?view=partitions")
    page.get_by_text("damaged-svs", exact=False).first.click(timeout=30_000)
    table = page.locator("table", has=page.get_by_role("columnheader", name="stage")).last
    table.wait_for(timeout=30_000)
    rows = [row.locator("td").all_inner_texts() for row in table.locator("tbody tr").all()]
    assert [row[:7] for row in rows] == [["read", "read_error", "4", "5", "7", "1568", "1120"]]
    keep(page, "failed-tiles")


def wait_for(address: str) -> None:
    """Until the server answers."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            with urllib.request.urlopen(f"{address}/server_info", timeout=2):  # noqa: S310 - loopback
                return
        except OSError:
            time.sleep(0.5)
    pytest.fail("the web server did not answer within a minute")


def keep(page: Page, name: str) -> None:
    """A screenshot for people to look at."""
    folder = REPO / "out" / "ui"
    folder.mkdir(parents=True, exist_ok=True)
    page.screenshot(path=folder / f"{name}.png")
