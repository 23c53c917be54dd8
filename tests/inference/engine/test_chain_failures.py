"""What ends a slide, what ends a run, what is remembered, and how it goes on afterwards."""

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from inference.engine import chain as chain_module
from inference.engine.chain import SlideOutcome
from inference.engine.job import Draft, Progress, SlideJob
from inference.engine.recipes import Addresses
from inference.engine.settings import Stage
from inference.engine.summarise import summarise_predictions
from inference.engine.survey import plan_tiles
from inference.errors import (
    ArtifactRefused,
    Broken,
    ConfigError,
    DeviceBroken,
    InferenceError,
    ResolutionTooCoarse,
    SlideChanged,
    StoreFull,
    TooManyTileFailures,
    UnknownResolution,
    UnreadableSlide,
)
from inference.models.demo import DemoNet
from inference.models.registry import Checkpoint
from inference.models.regular_files import hash_regular_file
from inference.models.spec import ModelSpec
from inference.store.store import Store
from tests.inference.engine.runs import contents, make_chain, result, run, script, stages_of, vectors_of
from tests.inference.engine.tiny_slides import poisoned, ref, section, write_slide
from tests.inference.store.mounts import fill, tmpfs

TABLES: list[Stage] = ["info", "tiles", "predict", "features", "prediction"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "slides"


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return tmp_path / "store"


def code_of(root: Path, outcome: SlideOutcome) -> str | None:
    """The code that the store remembers of a slide's last failure."""
    failure = Store(root).failure(outcome.ref.key)
    return failure.code if failure else None


def at_tile(number: int, action: Callable[[], object]) -> Progress:
    """Do something in the middle of a slide."""

    def progress(_key: str, _stage: Stage, done: int, _total: int) -> None:
        if done == number:
            action()

    return progress


def test_a_slide_without_resolution_fails_with_the_remedy_and_following_it_clears_the_failure(
    folder: Path, store: Path, demo_checkpoint: Checkpoint
) -> None:
    slide = ref(write_slide(folder / "a.svs", section(), mpp=None))
    (outcome,) = run(store, demo_checkpoint, [slide])
    assert isinstance(outcome.error, UnknownResolution)
    assert "--mpp X" in outcome.error.message
    assert outcome.results == ()
    failure = Store(store).failure(slide.key)
    assert failure is not None
    assert (failure.code, failure.retryable, failure.stage, failure.attempts) == (
        "unknown_resolution",
        False,
        "open",
        1,
    )
    (outcome,) = run(store, demo_checkpoint, [slide], stages=TABLES, mpp=0.5)
    assert (outcome.status, code_of(store, outcome)) == ("ok", None)


@pytest.mark.parametrize(("claim", "stated"), [("nan", None), ("-1", [-1, -1]), ("1e9", [1e9, 1e9])])
def test_a_slide_that_claims_an_absurd_resolution_runs_with_the_one_that_is_given(
    claim: str, stated: object, folder: Path, store: Path, demo_checkpoint: Checkpoint
) -> None:
    slide = ref(write_slide(folder / "a.svs", section(), mpp=claim))
    (outcome,) = run(store, demo_checkpoint, [slide], stages=TABLES)
    assert isinstance(outcome.error, UnknownResolution)
    (outcome,) = run(store, demo_checkpoint, [slide], stages=TABLES, mpp=0.5)
    assert outcome.error is None
    assert result(outcome, "info").manifest.summary["mpp_stated"] == stated


def test_a_slide_that_is_too_coarse_fails_after_what_does_not_depend_on_it(
    folder: Path, store: Path, demo_checkpoint: Checkpoint
) -> None:
    slide = ref(write_slide(folder / "a.svs", section(), mpp="0.8"))
    (outcome,) = run(store, demo_checkpoint, [slide], stages=TABLES)
    assert isinstance(outcome.error, ResolutionTooCoarse)
    assert stages_of(outcome, reused=False) == ["info"]
    assert (failure := Store(store).failure(slide.key)) is not None
    assert (failure.code, failure.stage) == ("resolution_too_coarse", "after info")
    (outcome,) = run(store, demo_checkpoint, [slide], stages=TABLES, allow_upsampling=True)
    assert (outcome.status, code_of(store, outcome)) == ("ok", None)


def test_bad_slides_of_every_kind_cost_the_good_ones_nothing(
    folder: Path, store: Path, demo_checkpoint: Checkpoint
) -> None:
    good = [ref(write_slide(folder / name, section(3, 4, seed=seed))) for seed, name in enumerate(("a.svs", "z.svs"))]
    (folder / "empty.svs").touch()
    (folder / "page.svs").write_text("<html>404</html>")
    whole = good[0].path.read_bytes()
    (folder / "cut.svs").write_bytes(whole[: len(whole) // 2])
    bad = [ref(folder / name) for name in ("empty.svs", "page.svs", "cut.svs")]
    gone = ref(write_slide(folder / "gone.svs", section(3, 4)))
    gone.path.unlink()
    outcomes = run(store, demo_checkpoint, [good[0], *bad, gone, good[1]], stages=TABLES)
    assert [outcome.status for outcome in outcomes] == ["ok", "failed", "failed", "failed", "failed", "ok"]
    for outcome in outcomes[1:-1]:
        assert isinstance(outcome.error, UnreadableSlide)
        assert outcome.error.message.startswith(f"{outcome.ref.name}: ")
        assert code_of(store, outcome) == "unreadable_slide"
    assert not list(store.glob("*/*/*.work"))


def test_more_failed_tiles_than_allowed_fail_the_slide_and_keep_the_earlier_stages(
    folder: Path, store: Path, demo_checkpoint: Checkpoint
) -> None:
    slide = ref(write_slide(folder / "a.svs", section(), damaged=[(1, 1)]))
    (outcome,) = run(store, demo_checkpoint, [slide], stages=TABLES, max_failed_tiles=3)
    assert isinstance(outcome.error, TooManyTileFailures)
    assert "4 of 16 tiles failed (allowed: 3); the first: row 1, col 1 at (224, 224), read: " in outcome.error.message
    assert stages_of(outcome, reused=False) == ["info", "tiles"]
    failure = Store(store).failure(slide.key)
    assert failure is not None
    assert (failure.code, failure.retryable, failure.stage) == ("too_many_tile_failures", False, "after tiles")
    assert failure.message == outcome.error.message
    assert failure.tiles[0] == ("read_error", 1, "row 1, col 1 at (224, 224)")
    assert len(failure.tiles) == 4
    assert not list(store.glob("predict/*/*"))
    (outcome,) = run(store, demo_checkpoint, [slide], stages=TABLES, max_failed_tiles=4)
    assert (outcome.status, code_of(store, outcome)) == ("ok with failures", None)
    assert stages_of(outcome, reused=True) == ["info", "tiles"]


def test_a_slide_of_which_every_tile_fails_fails_whatever_the_budget(
    folder: Path, store: Path, demo_checkpoint: Checkpoint
) -> None:
    slide = ref(write_slide(folder / "a.svs", poisoned(section(1, 2, glass_cols=1), 0, 0)))
    with make_chain(store, demo_checkpoint) as chain:
        script(chain, "raise")
        outcome = chain.run_slide(slide, TABLES)
    assert isinstance(outcome.error, TooManyTileFailures)
    assert "1 of 1 tiles failed" in outcome.error.message
    (outcome,) = run(store, demo_checkpoint, [slide], stages=TABLES)
    assert outcome.status == "ok"


@pytest.mark.parametrize("stage", ["predict", "prediction"])
def test_a_slide_that_grows_while_it_is_processed_is_not_kept_and_succeeds_once_it_is_quiet(
    stage: Stage, folder: Path, store: Path, demo_checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    slide = ref(write_slide(folder / "a.svs", section()))

    def grow() -> None:
        with slide.path.open("ab") as stream:
            stream.write(b"\0")

    if stage == "prediction":

        def late(job: SlideJob, spec: ModelSpec, at: Addresses, work: Path) -> Draft:
            grow()
            return summarise_predictions(job, spec, at, work)

        monkeypatch.setattr(chain_module, "summarise_predictions", late)
    (outcome,) = run(
        store, demo_checkpoint, [slide], stages=TABLES, progress=at_tile(3, grow) if stage == "predict" else None
    )
    assert isinstance(outcome.error, SlideChanged)
    assert outcome.error.retryable
    assert "nothing was kept; run again when it is complete" in outcome.error.message
    assert stages_of(outcome, reused=False) == TABLES[: TABLES.index(stage)], "nothing that follows is committed"
    assert not list(store.glob("*/*/*.work"))
    assert code_of(store, outcome) == "slide_changed"
    monkeypatch.undo()
    (outcome,) = run(store, demo_checkpoint, [slide], stages=TABLES)
    assert (outcome.status, code_of(store, outcome)) == ("ok", None)
    assert stages_of(outcome, reused=False) == TABLES, "all of it belongs to the bytes as they are now"


def test_a_slide_replaced_while_it_is_processed_is_never_mixed_with_its_successor(
    folder: Path, store: Path, demo_checkpoint: Checkpoint, tmp_path: Path
) -> None:
    slide = ref(write_slide(folder / "a.svs", section()))
    successor = write_slide(tmp_path / "elsewhere" / "a.svs", section(seed=7))
    (outcome,) = run(
        store, demo_checkpoint, [slide], stages=TABLES, progress=at_tile(2, lambda: successor.replace(slide.path))
    )
    assert isinstance(outcome.error, SlideChanged)
    (outcome,) = run(store, demo_checkpoint, [slide], stages=TABLES)
    (fresh,) = run(tmp_path / "fresh", demo_checkpoint, [slide], stages=TABLES)
    assert vectors_of(outcome, "embedding") == vectors_of(fresh, "embedding")


def _cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size * 9 // 10)


def _garble(path: Path) -> None:
    path.write_bytes(b"<html>still syncing</html>")


def _become_a_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


@pytest.mark.parametrize("change", [_cut, _garble, _become_a_pipe])
def test_a_slide_cut_or_replaced_while_it_is_processed_is_worth_another_try(
    change: Callable[[Path], None], folder: Path, store: Path, demo_checkpoint: Checkpoint
) -> None:
    """Whatever it became, reading it on is not its fault as it will be; nor does a pipe in its place hang the run."""
    slide = ref(write_slide(folder / "a.svs", section()))
    whole = slide.path.read_bytes()
    (outcome,) = run(store, demo_checkpoint, [slide], stages=TABLES, progress=at_tile(2, lambda: change(slide.path)))
    assert isinstance(outcome.error, SlideChanged)
    assert code_of(store, outcome) == "slide_changed"
    assert not list(store.glob("predict/*/*"))
    slide.path.unlink()
    slide.path.write_bytes(whole)
    (outcome,) = run(store, demo_checkpoint, [slide], stages=TABLES)
    assert (outcome.status, code_of(store, outcome)) == ("ok", None)


@pytest.mark.parametrize("error", [UnreadableSlide("damaged"), TooManyTileFailures("all of them"), ValueError("odd")])
def test_what_fails_since_the_slide_changed_is_reported_as_the_change(
    error: Exception, folder: Path, store: Path, demo_checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    slide = ref(write_slide(folder / "a.svs", section(2, 3)))

    def faulty(job: SlideJob, _spec: ModelSpec, _at: Addresses, _work: Path) -> Draft:
        _cut(job.ref.path)
        raise error

    monkeypatch.setattr(chain_module, "plan_tiles", faulty)
    (outcome,) = run(store, demo_checkpoint, [slide], stages=TABLES)
    assert isinstance(outcome.error, SlideChanged)
    assert stages_of(outcome, reused=False) == ["info"]


def test_a_slide_deleted_while_it_is_processed_fails_and_the_next_one_runs(
    folder: Path, store: Path, demo_checkpoint: Checkpoint
) -> None:
    slides = [ref(write_slide(folder / name, section())) for name in ("a.svs", "b.svs")]
    progress = at_tile(2, lambda: slides[0].path.unlink(missing_ok=True))
    outcomes = run(store, demo_checkpoint, slides, stages=TABLES, progress=progress)
    assert [outcome.status for outcome in outcomes] == ["failed", "ok"]
    assert isinstance(outcomes[0].error, UnreadableSlide)


def test_an_unforeseen_error_in_one_slide_is_recorded_and_the_others_go_on(
    folder: Path,
    store: Path,
    demo_checkpoint: Checkpoint,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    slides = [ref(write_slide(folder / name, section(3, 4))) for name in ("a.svs", "b.svs", "c.svs")]

    def faulty(job: SlideJob, spec: ModelSpec, at: Addresses, work: Path) -> Draft:
        if job.ref == slides[1]:
            raise ZeroDivisionError("a fault\nof ours")
        return plan_tiles(job, spec, at, work)

    monkeypatch.setattr(chain_module, "plan_tiles", faulty)
    outcomes = run(store, demo_checkpoint, slides, stages=TABLES)
    assert [outcome.status for outcome in outcomes] == ["ok", "failed", "ok"]
    error = outcomes[1].error
    assert isinstance(error, InferenceError)
    assert error.message == "b.svs: unexpected ZeroDivisionError: a fault; please report it"
    assert stages_of(outcomes[1], reused=False) == ["info"], "what was finished is kept"
    assert (failure := Store(store).failure(slides[1].key)) is not None
    assert (failure.code, failure.stage) == ("error", "after info")
    assert "Traceback" in caplog.text
    monkeypatch.undo()
    outcomes = run(store, demo_checkpoint, slides, stages=TABLES)
    assert [outcome.status for outcome in outcomes] == ["ok"] * 3
    assert stages_of(outcomes[1], reused=True) == ["info"]


def test_an_unforeseen_error_of_a_hidden_slide_tells_where_it_happened_but_not_what_it_said(
    folder: Path,
    store: Path,
    demo_checkpoint: Checkpoint,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    slide = ref(write_slide(folder / "ACC-0042.svs", section(2, 3)), secret="a secret")  # noqa: S106

    def faulty(job: SlideJob, _spec: ModelSpec, _at: Addresses, _work: Path) -> Draft:
        raise LookupError(f"no entry for {job.ref.path}")

    monkeypatch.setattr(chain_module, "plan_tiles", faulty)
    (outcome,) = run(store, demo_checkpoint, [slide], stages=TABLES)
    assert outcome.error is not None
    assert outcome.error.message == f"{slide.key}: unexpected LookupError; please report it"
    assert "in faulty" in caplog.text
    recorded = (store / ".failures" / f"{slide.key}.json").read_text()
    assert "ACC-0042" not in caplog.text + recorded + outcome.error.message


def test_an_error_of_whoever_watches_the_progress_ends_that_slide_alone(
    folder: Path, store: Path, demo_checkpoint: Checkpoint, caplog: pytest.LogCaptureFixture
) -> None:
    slides = [ref(write_slide(folder / name, section(3, 4))) for name in ("a.svs", "b.svs")]
    told: list[str] = []

    def progress(key: str, _stage: Stage, done: int, _total: int) -> None:
        told.append(key)
        if key == slides[0].key and done == 2:
            raise RuntimeError("the screen is gone")

    with make_chain(store, demo_checkpoint) as chain:
        outcomes = list(chain.run(slides, TABLES, progress))
        statistics = chain.models[0].scheduler.statistics()
    assert [outcome.status for outcome in outcomes] == ["failed", "ok"]
    assert told.count(slides[0].key) == 2
    assert statistics.queued == statistics.running == 0


def test_a_store_that_fills_up_stops_the_run_wherever_it_happens_blames_no_slide_and_is_completed_later(
    folder: Path, demo_checkpoint: Checkpoint, tmp_path: Path
) -> None:
    slides = [ref(write_slide(folder / name, section(2, 3, seed=seed))) for seed, name in enumerate(("a.svs", "b.svs"))]
    run(tmp_path / "roomy", demo_checkpoint, slides)
    expected = contents(tmp_path / "roomy")
    stopped = 0
    with tmpfs(tmp_path / "disk", "size=4m") as disk, make_chain(disk / "store", demo_checkpoint) as chain:
        assert chain.run_slide(slides[0]).status == "ok"
        first = contents(disk / "store")
        for leave in range(0, 4_000_000, 16_384):
            filler = fill(disk, leave)
            with suppress(StoreFull):
                assert chain.run_slide(slides[1]).status == "ok"
                break
            stopped += 1
            filler.unlink()
            assert chain.store.failure(slides[1].key) is None
            assert not list((disk / "store").glob("*/*/*.work"))
            assert first.items() <= contents(disk / "store").items()
        filler.unlink()
        assert contents(disk / "store") == expected
    assert stopped > 5


def static_checkpoint(folder: Path, like: Checkpoint) -> Checkpoint:
    """A checkpoint that is what its manifest pins, and yet runs only with batches of 2."""
    example = (torch.zeros((2, 3, 224, 224), dtype=torch.uint8),)
    folder.mkdir(parents=True)
    path = folder / "static.pt2"
    torch.export.save(torch.export.export(DemoNet().eval(), example), path)
    size, digest = hash_regular_file(path)
    pin = {"file": path.name, "size": size, "sha256": digest, "format": "exported-program"}
    manifest = like.manifest.model_copy(update=pin)
    path.with_name("static.pt2.json").write_text(manifest.model_dump_json())
    return Checkpoint(path, manifest)


def test_a_model_that_does_not_run_stops_the_run_and_blames_no_slide(
    folder: Path, store: Path, demo_checkpoint: Checkpoint
) -> None:
    slides = [ref(write_slide(folder / name, section(2, 3))) for name in ("a.svs", "b.svs")]
    with make_chain(store, static_checkpoint(folder / "models", demo_checkpoint)) as chain:
        with pytest.raises(ArtifactRefused, match=r"static\.pt2 does not run on cpu with batches of 8: "):
            list(chain.run(slides, TABLES))
        assert [chain.store.failure(slide.key) for slide in slides] == [None, None]


@pytest.mark.parametrize(
    ("does", "code"),
    [
        ("break the device", "device_broken"),
        ("break the contract", "model_contract"),
        ("run out of memory always", "device_broken"),
    ],
)
def test_a_device_or_model_that_breaks_while_it_runs_stops_the_run_and_blames_no_slide(
    does: str, code: str, folder: Path, store: Path, demo_checkpoint: Checkpoint
) -> None:
    slides = [ref(write_slide(folder / "a.svs", section(2, 3)))]
    slides.append(ref(write_slide(folder / "b.svs", poisoned(section(2, 3), 1, 1))))
    seen: list[SlideOutcome] = []
    with make_chain(store, demo_checkpoint) as chain:
        script(chain, does)
        with pytest.raises(Broken) as caught:
            seen.extend(chain.run(slides, TABLES))
        assert caught.value.code == code
        assert [outcome.status for outcome in seen] == ["ok"]
        assert chain.store.failure(slides[1].key) is None
    assert [outcome.status for outcome in run(store, demo_checkpoint, slides, stages=TABLES)] == ["ok", "ok"]


def test_a_batch_that_lacks_memory_is_tried_again_whole_once_what_could_be_freed_was(
    folder: Path, store: Path, demo_checkpoint: Checkpoint
) -> None:
    slide = ref(write_slide(folder / "a.svs", poisoned(section(2, 3), 1, 1)))
    with make_chain(store, demo_checkpoint) as chain:
        runtime = script(chain, "run out of memory once")
        assert chain.run_slide(slide, TABLES).status == "ok"
        assert (runtime.calls, runtime.refused) == (2, 1)
    with make_chain(store.with_name("other"), demo_checkpoint) as chain:
        runtime = script(chain, "run out of memory always")
        with pytest.raises(
            DeviceBroken, match="cpu has no memory for a batch of 8 tiles; free some, or choose a small"
        ):
            list(chain.run([slide], TABLES))
        assert runtime.calls == 2, "its halves would be padded to the same size"


def test_a_device_that_the_model_cannot_use_stops_the_run_and_blames_no_slide(
    folder: Path, store: Path, demo_checkpoint: Checkpoint
) -> None:
    slide = ref(write_slide(folder / "a.svs", section(2, 3)))
    with make_chain(store, demo_checkpoint, device="cuda:99") as chain:
        with pytest.raises(ArtifactRefused, match="cuda:99"):
            chain.run_slide(slide, TABLES)
        assert chain.store.failure(slide.key) is None


def test_batches_larger_than_the_model_takes_are_refused_at_the_start(store: Path, demo_checkpoint: Checkpoint) -> None:
    with pytest.raises(ConfigError, match=r"takes batches of 1 to \d+ tiles, not 5000"):
        make_chain(store, demo_checkpoint, batch_size=5000)


def test_a_slide_whose_name_is_not_utf8_runs_like_any_other(
    folder: Path, store: Path, demo_checkpoint: Checkpoint
) -> None:
    plain = write_slide(folder / "a.svs", section(2, 3))
    path = Path(os.fsdecode(os.fsencode(folder) + b"/caf\xe9.svs"))
    path.write_bytes(plain.read_bytes())
    for reused in (False, True):
        (outcome,) = run(store, demo_checkpoint, [ref(path)], stages=TABLES)
        assert (outcome.status, outcome.error, outcome.reused) == ("ok", None, reused)
