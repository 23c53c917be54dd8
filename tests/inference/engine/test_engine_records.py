"""Settings, addresses, failure messages and the inventory: what is written down about a run."""

import os
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from inference.engine.inventory import read_inventory, write_inventory
from inference.engine.recipes import Addresses, execution, tiling_name
from inference.engine.results import MAX_MESSAGE, FailedTile, plain_message
from inference.engine.settings import Settings
from inference.errors import ConfigError, StoreFull, TileReadError
from inference.models.registry import Checkpoint
from inference.models.spec import HeatmapSpec
from inference.slides.discovery import SlideRef, discover
from inference.store.store import Store
from tests.inference.store.mounts import fill, tmpfs


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"mpp": 0.0}, "no µm/px of a slide: give a value in 0.05-50"),
        ({"mpp": float("nan")}, "no µm/px"),
        ({"mpp": 500.0}, "no µm/px"),
        ({"min_tissue": 1.5}, "between 0 and 1"),
        ({"min_tissue": float("nan")}, "between 0 and 1"),
        ({"max_failed_share": -0.1}, "between 0 and 1"),
        ({"min_tissue": "0.5"}, "min_tissue is '0.5': give a number between 0 and 1"),
        ({"min_tissue": True}, "min_tissue is True"),
        ({"max_pen": 1.5}, "max_pen is 1.5: give a number between 0 and 1, or None"),
        ({"tissue_model": ""}, "tissue_model is '': give a model's name or path, or None"),
        ({"tissue_model": 3}, "tissue_model is 3"),
        ({"max_failed_share": None}, "max_failed_share is None"),
        ({"mpp": "0.5"}, "no µm/px"),
        ({"mpp": True}, "no µm/px"),
        ({"mpp": float("inf")}, "no µm/px"),
        ({"batch_size": 0}, "batch_size is 0: give a whole number, 1 or more"),
        ({"batch_size": 2.5}, "batch_size is 2.5"),
        ({"batch_size": 2.0}, "batch_size is 2.0"),
        ({"batch_size": True}, "batch_size is True"),
        ({"batch_size": "8"}, "batch_size is '8'"),
        ({"batch_size": float("nan")}, "batch_size is nan"),
        ({"batch_size": None}, "batch_size is None"),
        ({"readers": 0}, "readers is 0: give a whole number, 1 or more"),
        ({"readers": 1.5}, "readers is 1.5"),
        ({"top_k": 0}, "top_k is 0"),
        ({"top_k": False}, "top_k is False"),
        ({"max_failed_tiles": -1}, "max_failed_tiles is -1: give a whole number, 0 or more"),
        ({"max_failed_tiles": 1.5}, "max_failed_tiles is 1.5"),
        ({"threshold": float("nan")}, "threshold is nan: give a number"),
        ({"threshold": float("-inf")}, "threshold is -inf"),
        ({"threshold": 10**400}, "threshold is 1000"),
        ({"threshold": "x"}, "threshold is 'x'"),
        ({"lock_wait_s": -1}, "lock_wait_s is -1: give a number"),
        ({"lock_wait_s": float("nan")}, "lock_wait_s is nan"),
        ({"lock_wait_s": float("inf")}, "lock_wait_s is inf"),
        ({"allow_upsampling": 1}, "allow_upsampling is 1: give True or False"),
        ({"allow_upsampling": "no"}, "allow_upsampling is 'no'"),
        ({"device": None}, "None is no device"),
        ({"device": 0}, "0 is no device"),
        ({"device": "gpu"}, "'gpu' is no device: give cpu, cuda, cuda:1 or mps"),
        ({"device": "cuda:x"}, "no device"),
    ],
    ids=str,
)
def test_settings_that_cannot_be_meant_are_refused_with_what_would_do(wrong: dict[str, object], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        Settings(**wrong)  # type: ignore[arg-type]


def test_settings_that_mean_the_same_are_the_same_whatever_they_were_written_as() -> None:
    whole = Settings(mpp=1, min_tissue=0, max_failed_share=1, threshold=0, lock_wait_s=3)
    assert [str(v) for v in (whole.mpp, whole.min_tissue, whole.max_failed_share)] == ["1.0", "0.0", "1.0"]
    assert repr(whole) == repr(
        Settings(mpp=1.0, min_tissue=-0.0, max_failed_share=1.0, threshold=-0.0, lock_wait_s=3.0)
    )


@pytest.mark.parametrize(("planned", "allowed"), [(0, 16), (100, 16), (320, 16), (340, 17), (100_000, 5000)])
def test_the_failure_budget_is_16_tiles_or_five_percent_of_the_planned_whichever_is_more(
    planned: int, allowed: int
) -> None:
    assert Settings().failure_budget(planned) == allowed


def addresses(checkpoint: Checkpoint, **settings: object) -> dict[str, str]:
    at = Addresses("key", checkpoint.manifest, Settings(**settings))  # type: ignore[arg-type]
    heatmap = at.heatmap(HeatmapSpec(output="hematoxylin_area"))
    found = {"info": at.info, "tiles": at.tiles, "predict": at.predict}
    found |= {"features": at.features, "prediction": at.prediction, "heatmap": heatmap}
    return {name: address.folder for name, address in found.items()}


def test_results_lie_under_a_readable_name_a_digest_of_their_recipe_and_the_slides_key(
    demo_checkpoint: Checkpoint,
) -> None:
    found = addresses(demo_checkpoint)
    assert [folder.split("@")[0] for folder in found.values()] == [
        "info/qc",
        "tiles/t224-s224-0.5um",
        "predict/demo",
        "slide/demo-features",
        "slide/demo-prediction",
        "heatmap/demo-hematoxylin_area",
    ]
    assert all(folder.endswith("/key") for folder in found.values())
    assert tiling_name(demo_checkpoint.manifest.spec) == "t224-s224-0.5um"


def test_what_moves_a_stages_numbers_moves_its_address_and_all_that_follow_and_nothing_else_does(
    demo_checkpoint: Checkpoint,
) -> None:
    before = addresses(demo_checkpoint)

    def moved(after: dict[str, str]) -> list[str]:
        return [name for name in before if before[name] != after[name]]

    later = ["predict", "features", "prediction", "heatmap"]
    assert moved(addresses(demo_checkpoint, min_tissue=0.2)) == ["tiles", *later]
    assert moved(addresses(demo_checkpoint, max_pen=1.0)) == ["tiles", *later]
    assert moved(addresses(demo_checkpoint, max_pen=None)) == []
    assert moved(addresses(demo_checkpoint, top_k=3)) == ["prediction"]
    assert moved(addresses(demo_checkpoint, batch_size=7, readers=3, device="cuda", lock_wait_s=1.0)) == []
    manifest = demo_checkpoint.manifest
    for change in ({"weights_sha256": "0" * 64}, {"source_sha256": "0" * 64}, {"format": "exported-program"}):
        other = replace(demo_checkpoint, manifest=manifest.model_copy(update=change))
        assert moved(addresses(other)) == ([] if manifest.format in change.values() else later)
    for update in ({"sha256": "0" * 64}, {"torch_version": "0"}):
        other = replace(demo_checkpoint, manifest=manifest.model_copy(update=update))
        assert moved(addresses(other)) == [], "another export of the same model keeps its results"
    drawn = manifest.spec.model_copy(update={"heatmaps": ()})
    assert moved(addresses(replace(demo_checkpoint, manifest=manifest.model_copy(update={"spec": drawn})))) == []


def test_the_execution_record_names_what_can_move_the_last_bits(demo_checkpoint: Checkpoint) -> None:
    found = execution(demo_checkpoint.manifest, Settings(batch_size=9), "openslide 4")
    assert found["artifact_sha256"] == demo_checkpoint.manifest.sha256
    assert (found["batch_size"], found["device"], found["reader"]) == (9, "cpu", "openslide 4")
    packages = found["packages"]
    assert isinstance(packages, dict)
    assert packages.keys() >= {"numpy", "pyarrow"}


@pytest.mark.parametrize(
    ("text", "plain"),
    [
        ("level 0 cannot be decoded here: Not a JPEG file: starts with 0x3f 0x2a", None),
        ("120 tiles/s, 1/2 of it, a level/row", None),
        ("at 0x7f00deadbeef", "at <address>"),
        ("open '/data/Patient Doe/slide 1.svs' failed", "open '<path>' failed"),
        ("in /build/pytorch/runner.cpp, line 145", "in <path>, line 145"),
        ("/data/a/b.svs: gone", "<path>: gone"),
        ("~/slides/a.svs", "<path>"),
        ("first\n  second\tthird", "first second third"),
        ("x" * 1000, "x" * (MAX_MESSAGE - 1) + "…"),
    ],
)
def test_a_failure_message_is_one_short_line_without_paths_and_addresses(text: str, plain: str | None) -> None:
    assert plain_message(text) == (text if plain is None else plain)
    assert FailedTile.of(TileReadError(text), "read").message == plain_message(text)


@given(st.text())
def test_a_plain_message_stays_as_it_is(text: str) -> None:
    plain = plain_message(text)
    assert plain_message(plain) == plain
    assert len(plain) <= MAX_MESSAGE
    assert len(plain.splitlines()) <= 1


@pytest.fixture
def slides(tmp_path: Path) -> tuple[SlideRef, ...]:
    folder = tmp_path / "slides"
    folder.mkdir()
    for name in (b"a.svs", b"caf\xe9.svs", "größe µ.svs".encode()):
        Path(os.fsdecode(os.fsencode(folder) + b"/" + name)).touch()
    found = discover([folder]).slides
    assert len(found) == 3
    return (replace(found[0], mpp=0.25), replace(found[1], hidden=True), found[2])


def test_an_inventory_is_read_back_as_it_was_written_whatever_bytes_the_names_hold(
    slides: tuple[SlideRef, ...], tmp_path: Path
) -> None:
    store = Store(tmp_path / "store")
    path = write_inventory(store, slides)
    assert tuple(read_inventory(store).values()) == slides
    assert path.stat().st_mode & 0o777 == 0o600, "it names files"
    assert [p.name for p in store.root.iterdir() if not p.name.startswith(".")] == ["cohort.parquet"]
    write_inventory(store, slides[:1])
    assert list(read_inventory(store)) == [slides[0].key]
    assert pq.read_table(path).num_rows == 3, "the keys of an earlier cohort stay taken"
    write_inventory(store, slides[1:], keep=True)
    assert list(read_inventory(store)) == [slides[1].key, slides[2].key, slides[0].key]


def test_an_inventory_is_looked_at_by_people_with_plain_tools(slides: tuple[SlideRef, ...], tmp_path: Path) -> None:
    table = pq.read_table(write_inventory(Store(tmp_path / "store"), slides))
    assert table.column("slide_key").to_pylist() == [ref.key for ref in slides]
    assert table.column("path").to_pylist()[2] == str(slides[2].path)


def test_an_absent_or_damaged_inventory_says_what_to_do(slides: tuple[SlideRef, ...], tmp_path: Path) -> None:
    store = Store(tmp_path / "store")
    with pytest.raises(ConfigError, match="no inventory of slides yet: materialise slide_inventory first"):
        read_inventory(store)
    for damage in (b"", b"PAR1 not"):
        (store.root / "cohort.parquet").write_bytes(damage)
        with pytest.raises(ConfigError, match="materialise slide_inventory"):
            read_inventory(store)
    pq.write_table(pa.table({"slide_key": ["a"]}), store.root / "cohort.parquet")
    with pytest.raises(ConfigError, match="materialise slide_inventory"):
        read_inventory(store)
    write_inventory(store, slides)
    assert len(read_inventory(store)) == 3


def test_an_inventory_that_does_not_fit_leaves_the_older_one(slides: tuple[SlideRef, ...], tmp_path: Path) -> None:
    with tmpfs(tmp_path / "disk", "size=256k") as disk:
        store = Store(disk)
        write_inventory(store, slides[:1])
        fill(disk, leave_bytes=0)
        with pytest.raises(StoreFull):
            write_inventory(store, slides)
        assert list(read_inventory(store)) == [slides[0].key]
