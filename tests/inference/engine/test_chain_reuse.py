"""When a finished result is taken as it is, and when it is computed again."""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from inference.engine.chain import Chain
from inference.engine.settings import Settings, Stage
from inference.errors import MissingResult, PartitionBusy
from inference.models.registry import Checkpoint, resolve_model
from inference.slides.discovery import SlideRef
from inference.store.store import Store
from tests.inference.engine.runs import (
    ALL_STAGES,
    BATCH,
    contents,
    make_chain,
    result,
    run,
    stages_of,
    vectors_of,
)
from tests.inference.engine.tiny_slides import ref, section, write_slide

REPO = Path(__file__).resolve().parents[3]
TABLES: list[Stage] = ["info", "tiles", "predict", "features", "prediction"]
PATIENCE_S = 60.0


@pytest.fixture
def slide(tmp_path: Path) -> Path:
    return write_slide(tmp_path / "slides" / "a.svs", section())


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def done(slide: Path, store: Path, demo_checkpoint: Checkpoint) -> SlideRef:
    """The slide, run once with the defaults."""
    found = ref(slide)
    (outcome,) = run(store, demo_checkpoint, [found], stages=TABLES)
    assert outcome.status == "ok"
    return found


def test_a_second_run_reuses_everything_loads_no_model_and_writes_nothing(
    slide: Path, store: Path, demo_checkpoint: Checkpoint
) -> None:
    run(store, demo_checkpoint, [ref(slide)])
    before = {path: path.stat().st_mtime_ns for path in store.rglob("*") if path.is_file()}
    with make_chain(store, demo_checkpoint) as chain:
        outcome = chain.run_slide(ref(slide))
        assert chain.models[0].loads == 0
    assert outcome.reused
    assert stages_of(outcome, reused=True) == ALL_STAGES
    assert {path: path.stat().st_mtime_ns for path in store.rglob("*") if path.is_file()} == before


def test_a_slide_that_was_only_touched_is_reused(done: SlideRef, store: Path, demo_checkpoint: Checkpoint) -> None:
    os.utime(done.path, (1, 1))
    (outcome,) = run(store, demo_checkpoint, [done], stages=TABLES)
    assert outcome.reused


def test_a_slide_with_other_content_under_the_same_name_is_computed_again(
    done: SlideRef, store: Path, demo_checkpoint: Checkpoint, tmp_path: Path
) -> None:
    write_slide(done.path, section(seed=9))
    (outcome,) = run(store, demo_checkpoint, [done], stages=TABLES)
    assert stages_of(outcome, reused=False) == TABLES
    (fresh,) = run(tmp_path / "fresh", demo_checkpoint, [done], stages=TABLES)
    assert contents(store) == contents(tmp_path / "fresh"), "nothing of the older content is left"
    assert vectors_of(outcome, "embedding") == vectors_of(fresh, "embedding")


@pytest.mark.parametrize(
    ("settings", "again"),
    [
        ({"min_tissue": 0.5}, ["tiles", "predict", "features", "prediction"]),
        ({"allow_upsampling": True}, TABLES),
        ({"top_k": 3}, ["prediction"]),
        ({"threshold": 0.3}, ["prediction"]),
        ({"batch_size": 5}, []),
        ({"readers": 1}, []),
        ({"max_failed_tiles": 0}, []),
        ({"mpp": 0.3}, []),
    ],
    ids=str,
)
def test_what_defines_the_numbers_is_never_reused_and_what_does_not_always_is(
    settings: dict[str, object], again: list[str], done: SlideRef, store: Path, demo_checkpoint: Checkpoint
) -> None:
    (outcome,) = run(store, demo_checkpoint, [done], stages=TABLES, **settings)  # type: ignore[arg-type]
    assert outcome.status == "ok"
    assert stages_of(outcome, reused=False) == again


def test_another_resolution_from_outside_is_never_reused(slide: Path, store: Path, demo_checkpoint: Checkpoint) -> None:
    found = ref(write_slide(slide.with_name("no-mpp.svs"), section(), mpp=None))
    used = []
    for mpp in (0.5, 0.45, 0.45):
        (outcome,) = run(store, demo_checkpoint, [found], stages=TABLES, mpp=mpp)
        inputs = result(outcome, "predict").manifest.inputs
        used.append((inputs["mpp"], inputs["mpp_source"], outcome.reused))
    assert used == [
        ([0.5, 0.5], "--mpp", False),
        ([0.45, 0.45], "--mpp", False),
        ([0.45, 0.45], "--mpp", True),
    ]
    (outcome,) = run(store, demo_checkpoint, [ref(found.path, mpp=0.45)], stages=TABLES)
    assert not outcome.reused, "the same value from another source is another input"


def test_a_later_stage_alone_needs_the_earlier_ones_for_these_very_settings(
    done: SlideRef, store: Path, demo_checkpoint: Checkpoint
) -> None:
    (outcome,) = run(store, demo_checkpoint, [done], stages=["heatmap"])
    assert outcome.status == "ok"
    (outcome,) = run(store, demo_checkpoint, [done], stages=["prediction"], min_tissue=0.5)
    assert isinstance(outcome.error, MissingResult)
    assert "run that stage first, or all of them" in outcome.error.message


def test_a_stages_older_result_is_not_used_once_the_slide_has_changed(
    done: SlideRef, store: Path, demo_checkpoint: Checkpoint
) -> None:
    write_slide(done.path, section(seed=9))
    (outcome,) = run(store, demo_checkpoint, [done], stages=["predict"])
    assert isinstance(outcome.error, MissingResult)


@pytest.mark.parametrize(
    "damage", ["a manifest cut short", "a file missing", "a file cut short", "an identity of none"]
)
def test_a_result_that_is_not_whole_is_computed_again(
    damage: str, done: SlideRef, store: Path, demo_checkpoint: Checkpoint, caplog: pytest.LogCaptureFixture
) -> None:
    whole = contents(store)
    folder = next(store.glob("predict/*/*"))
    if damage == "a manifest cut short":
        os.truncate(folder / "manifest.json", 100)
    elif damage == "a file missing":
        (folder / "failures.parquet").unlink()
    elif damage == "a file cut short":
        os.truncate(folder / "embeddings.parquet", 1000)
    else:
        manifest = json.loads((folder / "manifest.json").read_text())
        (folder / "manifest.json").write_text(json.dumps(manifest | {"identity": {}}))
    (outcome,) = run(store, demo_checkpoint, [done], stages=TABLES)
    assert (outcome.status, stages_of(outcome, reused=False)) == ("ok", ["predict"])
    assert contents(store) == whole
    assert "computed again" in caplog.text


def flip_a_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("damaged", "lost", "again"),
    [
        ("predict/*/*/embeddings.parquet", "slide/demo-features@*/*", ["predict", "features"]),
        ("predict/*/*/predictions.parquet", "slide/demo-prediction@*/*", ["predict", "prediction"]),
        ("tiles/*/*/tiles.parquet", "predict/*/*", ["tiles", "predict"]),
        ("info/*/*/overview.png", "tiles/*/*", ["info", "tiles"]),
    ],
)
def test_a_bit_flipped_in_what_a_stage_needs_never_enters_it_and_is_computed_again(
    damaged: str,
    lost: str,
    again: list[str],
    done: SlideRef,
    store: Path,
    demo_checkpoint: Checkpoint,
    caplog: pytest.LogCaptureFixture,
) -> None:
    whole = contents(store)
    (path,) = store.glob(damaged)
    flip_a_bit(path)
    (folder,) = store.glob(lost)
    shutil.rmtree(folder)
    (outcome,) = run(store, demo_checkpoint, [done], stages=TABLES)
    assert outcome.status == "ok"
    assert f"damaged ({path.name} is not what was written)" in caplog.text
    assert contents(store) == whole, "the same bytes, and nothing of the damaged result"
    assert stages_of(outcome, reused=False) == again


def test_where_only_the_later_stage_is_asked_for_damage_says_what_to_run_and_then_that_helps(
    done: SlideRef, store: Path, demo_checkpoint: Checkpoint
) -> None:
    (path,) = store.glob("predict/*/*/embeddings.parquet")
    flip_a_bit(path)
    (folder,) = store.glob("slide/demo-features@*/*")
    shutil.rmtree(folder)
    other = ref(write_slide(done.path.with_name("b.svs"), section(seed=2)))
    outcomes = run(store, demo_checkpoint, [done, other], stages=["features"])
    assert isinstance(outcomes[0].error, MissingResult)
    assert "run that stage first, or all of them" in outcomes[0].error.message
    assert (path.parent / "manifest.damaged.json").is_file(), "kept to look at"
    outcomes = run(store, demo_checkpoint, [done, other], stages=TABLES)
    assert [outcome.status for outcome in outcomes] == ["ok", "ok"]
    assert not (path.parent / "manifest.damaged.json").exists()


def test_a_newer_versions_result_is_refused_and_left_alone(
    done: SlideRef, store: Path, demo_checkpoint: Checkpoint
) -> None:
    path = next(store.glob("predict/*/*")) / "manifest.json"
    text = path.read_text().replace('"schema_version": 1', '"schema_version": 2')
    path.write_text(text)
    with pytest.raises(Exception, match="this version reads up to 1: upgrade"):
        run(store, demo_checkpoint, [done], stages=TABLES)
    assert path.read_text() == text


def test_while_another_process_writes_a_result_the_slide_is_busy_and_that_is_no_failure_of_it(
    slide: Path, store: Path, demo_checkpoint: Checkpoint
) -> None:
    found = ref(slide)
    with make_chain(store, demo_checkpoint) as chain:
        (_, at), = chain.addresses(found.key)  # fmt: skip
        with chain.store.lock(at.predict):
            outcome = chain.run_slide(found, TABLES)
            assert isinstance(outcome.error, PartitionBusy)
            assert f"process {os.getpid()} on" in outcome.error.message
            assert stages_of(outcome, reused=False) == ["info", "tiles"]
        assert chain.store.failure(found.key) is None
        assert chain.run_slide(found, TABLES).status == "ok"


def test_two_writers_that_wait_for_each_other_compute_every_stage_once(
    slide: Path, store: Path, demo_checkpoint: Checkpoint
) -> None:
    found = ref(slide)
    start = threading.Barrier(2)

    def work() -> tuple[str, list[str]]:
        with make_chain(store, demo_checkpoint, lock_wait_s=PATIENCE_S) as chain:
            start.wait(PATIENCE_S)
            outcome = chain.run_slide(found, TABLES)
        return outcome.status, stages_of(outcome, reused=False)

    with ThreadPoolExecutor(2) as pool:
        both = [future.result(PATIENCE_S) for future in [pool.submit(work), pool.submit(work)]]
    assert [status for status, _ in both] == ["ok", "ok"]
    assert sorted(stage for _, computed in both for stage in computed) == sorted(TABLES)


KILLED = """
import os, signal, sys
from pathlib import Path
from inference.models.registry import resolve_model
from tests.inference.engine.runs import run
from tests.inference.engine.tiny_slides import ref

def progress(key, stage, done, total):
    if done == int(sys.argv[4]):
        os.kill(os.getpid(), signal.SIGKILL)

run(Path(sys.argv[1]), resolve_model(sys.argv[3]), [ref(Path(sys.argv[2]))], progress=progress)
"""


def test_a_run_killed_in_the_middle_of_a_slide_is_completed_by_the_next_to_the_same_bytes(
    slide: Path, store: Path, demo_checkpoint: Checkpoint, tmp_path: Path
) -> None:
    arguments = [str(store), str(slide), str(demo_checkpoint.path), "9"]
    killed = subprocess.run([sys.executable, "-c", KILLED, *arguments], cwd=REPO, timeout=PATIENCE_S, check=False)
    assert killed.returncode == -signal.SIGKILL
    assert [path.name for path in store.glob("predict/*/*")] == [f"{ref(slide).key}.work"]
    assert {manifest.stage for _, manifest in Store(store).results()} == {"info", "tiles"}
    (outcome,) = run(store, demo_checkpoint, [ref(slide)])
    assert outcome.status == "ok"
    run(tmp_path / "undisturbed", demo_checkpoint, [ref(slide)])
    assert contents(store) == contents(tmp_path / "undisturbed")


def test_models_with_the_same_tiling_share_their_tiles_and_keep_their_results_apart(
    slide: Path, store: Path, demo_checkpoint: Checkpoint, tmp_path: Path
) -> None:
    copy = tmp_path / "twin.pt2"
    copy.write_bytes(demo_checkpoint.path.read_bytes())
    spec = demo_checkpoint.manifest.spec.model_copy(update={"model_name": "twin"})
    manifest = demo_checkpoint.manifest.model_copy(update={"spec": spec, "file": copy.name})
    copy.with_name("twin.pt2.json").write_text(manifest.model_dump_json())
    settings = Settings(batch_size=BATCH, readers=2)
    with Chain(Store(store), [demo_checkpoint, resolve_model(str(copy))], settings) as chain:
        outcome = chain.run_slide(ref(slide), TABLES)
    assert outcome.status == "ok"
    assert [(r.stage, r.model) for r in outcome.results] == [
        ("info", None),
        ("tiles", None),
        *((stage, model) for model in ("demo", "twin") for stage in ("predict", "features", "prediction")),
    ]
    one, two = (pq.read_table(r.folder / "embeddings.parquet") for r in outcome.results if r.stage == "predict")
    assert one.equals(two)
