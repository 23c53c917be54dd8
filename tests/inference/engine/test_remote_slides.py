"""Slides in object stores through the whole engine: fetched once, never again while their results stand."""

import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from inference.engine.inventory import read_inventory, write_inventory
from inference.engine.run import run_slide
from inference.errors import ConfigError, SourceUnavailable
from inference.models.registry import Checkpoint
from inference.slides.discovery import discover
from inference.slides.resolution import SlideResolution, recall_mpp
from inference.store.store import Store
from tests.inference.engine.runs import contents
from tests.inference.engine.tiny_slides import section, write_slide
from tests.inference.slides.buckets import Bucket, serve_bucket


@pytest.fixture(scope="module")
def server() -> Iterator[Bucket]:
    yield from serve_bucket()


@pytest.fixture
def bucket(server: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bucket:
    monkeypatch.setenv("SLIDE_CACHE", str(tmp_path / "cache"))
    return server


def _entries(cache: Path) -> list[str]:
    return [path.name for path in cache.iterdir() if path.is_dir()] if cache.exists() else []


def _slide(folder: Path, seed: int = 1, mpp: str | None = "0.5") -> Path:
    return write_slide(folder / "a.svs", section(2, 3, seed=seed), mpp=mpp)


def test_results_of_an_unchanged_object_are_reused_without_fetching_it(
    bucket: Bucket, tmp_path: Path, demo_checkpoint: Checkpoint
) -> None:
    model, out, cache = str(demo_checkpoint.path), tmp_path / "out", tmp_path / "cache"
    url = bucket.put("one/a.svs", _slide(tmp_path))
    first = run_slide(url, model, out)
    assert (first.status, len(_entries(cache))) == ("ok", 1)
    before = contents(out)
    shutil.rmtree(cache)
    bucket.put("one/a.svs", tmp_path / "a.svs")  # the same bytes, with a later time
    assert run_slide(url, model, out).reused
    assert not _entries(cache)
    assert {name: data for name, data in contents(out).items() if "cohort" not in name} == {
        name: data for name, data in before.items() if "cohort" not in name
    }
    bucket.put("one/a.svs", _slide(tmp_path / "one", seed=2))
    again = run_slide(url, model, out)
    assert not again.reused
    assert len(_entries(cache)) == 1
    local = run_slide(tmp_path / "one" / "a.svs", model, tmp_path / "local")
    for one, other in zip(again.results, local.results, strict=True):
        assert one.manifest.files == other.manifest.files, f"{one.stage}: the same bytes as from a local file"


def test_a_resolution_that_was_filled_in_is_recalled_only_while_it_is_the_same(
    bucket: Bucket, tmp_path: Path, demo_checkpoint: Checkpoint
) -> None:
    model, out, cache = str(demo_checkpoint.path), tmp_path / "out", tmp_path / "cache"
    url = bucket.put("two/a.svs", _slide(tmp_path, mpp=None))
    run_slide(url, model, out, mpp=0.5)
    shutil.rmtree(cache)
    assert run_slide(url, model, out, mpp=0.5).reused
    assert not _entries(cache)
    assert not run_slide(url, model, out, mpp=0.55).reused
    assert len(_entries(cache)) == 1


@pytest.mark.parametrize(
    ("recorded", "cohort", "fallback", "expected"),
    [
        ({"mpp_source": "slide", "mpp": [0.5, 0.25]}, None, 1.0, SlideResolution((0.5, 0.25), "slide")),
        ({"mpp_source": "slide", "mpp": [0.5, 0.25]}, 1.0, None, SlideResolution((1.0, 1.0), "cohort file")),
        ({"mpp_source": "--mpp", "mpp": [0.5, 0.5]}, None, 1.0, SlideResolution((1.0, 1.0), "--mpp")),
        ({"mpp_source": "--mpp", "mpp": [0.5, 0.5]}, None, None, None),
        ({"mpp_source": "cohort file", "mpp": [0.5, 0.5]}, None, 1.0, None),
        ({}, None, 1.0, None),
    ],
)
def test_what_a_result_tells_of_its_slides_resolution(
    recorded: dict[str, object], cohort: float | None, fallback: float | None, expected: SlideResolution | None
) -> None:
    assert recall_mpp(recorded, cohort_mpp=cohort, fallback_mpp=fallback) == expected


def test_the_inventory_keeps_urls_and_finds_the_cache_of_the_host_that_reads_it(
    bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = bucket.put("three/é a.svs", b"x")
    slides = discover([url]).slides
    store = Store(tmp_path / "out")
    write_inventory(store, slides)
    assert read_inventory(store) == {ref.key: ref for ref in slides}
    assert pq.read_table(store.root / "cohort.parquet").column("path").to_pylist() == [url]
    monkeypatch.setenv("SLIDE_CACHE", str(tmp_path / "elsewhere"))
    (moved,) = read_inventory(store).values()
    assert moved.path.is_relative_to(tmp_path / "elsewhere")
    assert moved.remote == slides[0].remote


def test_an_inventory_written_before_there_were_objects_is_read(tmp_path: Path) -> None:
    store = Store(tmp_path / "out")
    slides = discover([_slide(tmp_path)]).slides
    path = write_inventory(store, slides)
    pq.write_table(pq.read_table(path).drop_columns(["remote", "roi"]), path)
    assert read_inventory(store) == {ref.key: ref for ref in slides}


def test_another_objects_results_are_not_replaced_by_one_with_the_same_key(
    bucket: Bucket, tmp_path: Path, demo_checkpoint: Checkpoint
) -> None:
    model, out = str(demo_checkpoint.path), tmp_path / "out"
    bucket.put("x/slides/a.svs", _slide(tmp_path, seed=3))
    bucket.put("y/slides/a.svs", _slide(tmp_path, seed=4))
    bucket.put("z/slides/a.svs", write_slide(tmp_path / "a.svs", section(2, 3, seed=3)))
    run_slide(bucket.url("x/slides/a.svs"), model, out)
    with pytest.raises(ConfigError, match=r"y/slides/: its key \S+ has results of another slide .*/x/slides/a\.svs"):
        run_slide(bucket.url("y/slides/a.svs"), model, out)
    assert run_slide(bucket.url("z/slides/a.svs"), model, out).reused, "a copy is the same slide"


def test_a_store_that_refuses_stops_the_run_and_blames_no_slide(
    bucket: Bucket, tmp_path: Path, demo_checkpoint: Checkpoint
) -> None:
    out = tmp_path / "out"
    ref = discover([bucket.put("four/a.svs", _slide(tmp_path))]).slides[0]
    bucket.check_credentials(check=True)
    try:
        with pytest.raises(SourceUnavailable):
            run_slide(bucket.url("four/a.svs"), str(demo_checkpoint.path), out)
    finally:
        bucket.check_credentials(check=False)
    assert Store(out).failure(ref.key) is None


@pytest.mark.slow
def test_the_command_runs_a_prefix_of_a_bucket_and_the_second_time_fetches_nothing(
    bucket: Bucket, tmp_path: Path, demo_checkpoint: Checkpoint, shared_data: Path
) -> None:
    bucket.put("cohort/CMU-1-Small-Region.svs", shared_data / "slides" / "CMU-1-Small-Region.svs")
    command = [
        sys.executable,
        "-m",
        "inference.cli",
        "run",
        bucket.url("cohort/"),
        "--model",
        str(demo_checkpoint.path),
    ]
    command += ["--out", str(tmp_path / "out")]
    for _ in range(2):
        ended = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
        assert ended.returncode == 0, ended.stdout + ended.stderr
    assert len(_entries(tmp_path / "cache")) == 1
    shutil.rmtree(tmp_path / "cache")
    assert subprocess.run(command, capture_output=True, timeout=300, check=False).returncode == 0
    assert not _entries(tmp_path / "cache")
    assert list((tmp_path / "out").glob("heatmap/*/CMU-1-Small-Region-svs-*/manifest.json"))
