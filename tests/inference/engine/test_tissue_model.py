"""The learned tissue mask: made by a segmentation model, once per slide, and no slide's fault where it fails."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from numpy.typing import NDArray

from inference.engine.chain import Chain
from inference.engine.recipes import Addresses
from inference.engine.settings import Settings
from inference.engine.tissue_model import TissueModel, find_tissue_model, require_usable_tissue_model
from inference.errors import ArtifactRefused, Broken, ConfigError, DeviceBroken, UnknownModel
from inference.models.foreign import import_graph
from inference.models.registry import Checkpoint
from inference.models.sample import NO_EXTRAS
from inference.slides.opening import open_slide
from inference.slides.overview import Overview, read_overview
from inference.slides.tissue import tissue_mask
from inference.store.store import Store
from tests.inference.engine.runs import result, run
from tests.inference.engine.tiny_slides import Pixels, ref, section, write_slide
from tests.inference.models.kinds import PlaneNet, export_portable, make_spec

PLANNING = ["info", "tiles"]
SIDE = 64


def _mask_spec(*classes: str, **mask: object) -> dict[str, object]:
    size = {"size": SIDE, "stride": SIDE, "resolution": 32.0}
    return {
        "output_type": "prediction_with_embedding", "prediction_names": classes, "tile_spec": size,
        "mask": {"size": SIDE // 2, "threshold": 0.2} | mask,
    }  # fmt: skip


@pytest.fixture(scope="module")
def darkness(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """Tissue is where red is below 204: at 1 - red / 255 of 0.2 or more."""
    spec = make_spec("darkness", **_mask_spec("anything"))
    return export_portable(PlaneNet(1, scale=-1.0, shift=1.0), spec, tmp_path_factory.mktemp("darkness"))


def _overview(rgb: Pixels, **planes: NDArray[np.generic]) -> Overview:
    none = np.zeros(rgb.shape[:2], np.bool_)
    found = {"missing": none.astype(np.float32), "unreadable": none, "thumbnail": rgb[:1, :1]} | planes
    return Overview(rgb=rgb, scale=(16.0, 16.0), **found)  # type: ignore[arg-type]


def _halves(left: int = 100) -> Pixels:
    rgb = np.full((96, 160, 3), 243, np.uint8)
    rgb[:, :80] = left
    return rgb


# --- the mask -------------------------------------------------------------------------------------------------


def test_the_mask_is_the_models_squeezed_and_stretched_back(darkness: Checkpoint) -> None:
    model = TissueModel(darkness, Settings())
    mask = model.mask(_overview(_halves()))
    assert mask.shape == (96, 160)
    assert mask[:, :79].all()
    assert not mask[:, 81:].any()
    assert model.loads == 1
    model.mask(_overview(_halves()))
    assert model.loads == 1
    model.close()


def test_the_finer_of_overview_and_thumbnail_is_looked_at(darkness: Checkpoint) -> None:
    model = TissueModel(darkness, Settings())
    mask = model.mask(_overview(_halves(243), thumbnail=_halves().repeat(2, 0).repeat(2, 1)))
    assert mask[:, :79].all()
    assert not mask[:, 81:].any()


def test_missing_pixels_are_background_and_unreadable_ones_tissue_whatever_the_model_says(darkness: Checkpoint) -> None:
    missing, unreadable = np.zeros((96, 160), np.float32), np.zeros((96, 160), np.bool_)
    missing[:40], unreadable[60:, 120:] = 1, True
    mask = TissueModel(darkness, Settings()).mask(_overview(_halves(), missing=missing, unreadable=unreadable))
    assert not mask[:40].any()
    assert mask[40:, :79].all()
    assert np.array_equal(mask[:, 81:], unreadable[:, 81:])


def test_of_several_classes_the_one_called_tissue_is(tmp_path: Path) -> None:
    spec = make_spec("planes", **_mask_spec("glass", "tissue"))
    model = TissueModel(export_portable(PlaneNet(2), spec, tmp_path), Settings())
    rgb = np.zeros((64, 64, 3), np.uint8)
    rgb[:32, :, 0], rgb[32:, :, 1] = 200, 200
    mask = model.mask(_overview(rgb))
    assert not mask[:32].any()
    assert mask[32:].all()


def test_a_model_that_cannot_find_tissue_is_refused(demo_checkpoint: Checkpoint, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="demo gives no mask: --tissue-model needs a segmentation model"):
        TissueModel(demo_checkpoint, Settings())
    spec = make_spec("planes", **_mask_spec("lumen", "stroma"))
    with pytest.raises(ConfigError, match="has the classes lumen, stroma: --tissue-model needs one called tissue"):
        TissueModel(export_portable(PlaneNet(2), spec, tmp_path), Settings())


@pytest.mark.parametrize("check", [find_tissue_model, require_usable_tissue_model])
def test_a_model_that_does_not_exist_is_refused_before_anything_is_made(check: object, tmp_path: Path) -> None:
    assert callable(check)
    assert check(Settings()) is None
    with pytest.raises(UnknownModel):
        check(Settings(tissue_model=str(tmp_path / "none.pt2")))
    with pytest.raises(UnknownModel), Chain(Store(tmp_path), [], Settings(tissue_model="no-such-model")):
        pass


def test_a_model_whose_file_was_changed_is_refused_before_anything_is_made(
    darkness: Checkpoint, tmp_path: Path
) -> None:
    for file in darkness.path.parent.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    path = tmp_path / darkness.path.name
    require_usable_tissue_model(Settings(tissue_model=str(path), stride_px=100))
    path.write_bytes(path.read_bytes() + b"more")
    with pytest.raises(ArtifactRefused, match=f"{path.name} is not the file its manifest pins"):
        require_usable_tissue_model(Settings(tissue_model=str(path)))


# --- in a run -------------------------------------------------------------------------------------------------


def test_a_run_loads_the_model_once_and_says_what_made_the_mask(
    darkness: Checkpoint, demo_checkpoint: Checkpoint, tmp_path: Path
) -> None:
    slides = [ref(write_slide(tmp_path / name, section(2, 3))) for name in ("a.svs", "b.svs")]
    settings = Settings(tissue_model=str(darkness.path))
    with Chain(Store(tmp_path / "store"), [demo_checkpoint], settings) as chain:
        outcomes = list(chain.run(slides, PLANNING))  # type: ignore[arg-type]
        assert chain.tissue_model is not None
        assert chain.tissue_model.loads == 1
    for outcome in outcomes:
        assert outcome.status == "ok"
        manifest = result(outcome, "tiles").manifest
        assert manifest.summary["tissue_method"] == "model darkness"
        assert manifest.execution["artifact_sha256"] == darkness.manifest.sha256
        assert manifest.execution["batch_size"] == 1
        # Tissue is 225 red and its nuclei 90: only where those are dense is red below 204.
        assert 0 < float(str(manifest.summary["tissue_share"])) < 0.66
    again = run(tmp_path / "store", demo_checkpoint, slides, stages=PLANNING, tissue_model=str(darkness.path))  # type: ignore[arg-type]
    assert all(outcome.reused for outcome in again)
    (plain, _) = run(tmp_path / "store", demo_checkpoint, slides, stages=PLANNING)  # type: ignore[arg-type]
    assert [r.reused for r in plain.results] == [True, False], "another mask, another address"


def test_what_makes_the_mask_is_part_of_the_tiles_address_and_where_the_model_lies_is_not(
    darkness: Checkpoint, demo_checkpoint: Checkpoint
) -> None:
    def digest(manifest: object) -> str:
        return Addresses("key", demo_checkpoint.manifest, Settings(), manifest).tiles.digest  # type: ignore[arg-type]

    base = darkness.manifest
    assert base.spec.mask is not None
    other = base.spec.model_copy(update={"mask": base.spec.mask.model_copy(update={"threshold": 0.3})})
    changes: list[dict[str, object]] = [
        {"weights_sha256": "1" * 64}, {"source_sha256": "1" * 64}, {"format": "onnx"}, {"spec": other},
    ]  # fmt: skip
    digests = {digest(None), digest(base), *(digest(base.model_copy(update=change)) for change in changes)}
    assert len(digests) == 2 + len(changes)
    assert digest(base.model_copy(update={"file": "elsewhere.pt2", "sha256": "2" * 64})) == digest(base)


class _Failing:
    """A runtime that raises, or returns NaN where there is nothing to raise."""

    kind, device = "exported-program", "cpu"

    def __init__(self, error: Exception | None) -> None:
        self._error = error

    def run(
        self, batch: NDArray[np.uint8], _extras: Mapping[str, NDArray[np.float32]] = NO_EXTRAS
    ) -> tuple[NDArray[np.float32], ...]:
        if self._error is not None:
            raise self._error
        return np.zeros((len(batch), 3), np.float32), np.full((len(batch), 1, SIDE // 2, SIDE // 2), np.nan, np.float32)


@pytest.mark.parametrize(
    ("error", "kind", "words"),
    [
        (RuntimeError("bad weights in /build/x/model.cpp"), ArtifactRefused, "the tissue model darkness does not run"),
        (None, ArtifactRefused, "the tissue model darkness returned NaN or infinity"),
        (MemoryError("out of memory"), DeviceBroken, "cpu has no memory for the tissue model darkness"),
        (DeviceBroken("the device failed"), DeviceBroken, "the device failed"),
    ],
)
def test_a_model_that_fails_stops_the_run_and_is_no_slides_fault(
    error: Exception | None,
    kind: type[Broken],
    words: str,
    darkness: Checkpoint,
    demo_checkpoint: Checkpoint,
    tmp_path: Path,
) -> None:
    slide = ref(write_slide(tmp_path / "a.svs", section(2, 3)))
    store = Store(tmp_path / "store")
    with Chain(store, [demo_checkpoint], Settings(tissue_model=str(darkness.path))) as chain:
        assert chain.tissue_model is not None
        chain.tissue_model._model.server.runtime = _Failing(error)
        with pytest.raises(kind, match=words) as raised:
            chain.run_slide(slide, PLANNING)  # type: ignore[arg-type]
    assert "/build/x" not in raised.value.message
    assert store.failure(slide.key) is None


# --- the tissue U-Net -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def unet(shared_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    pytest.importorskip("onnxruntime")
    spec = make_spec(
        "superfast-tissue", output_type="prediction", embedding_dim=None, prediction_names=["tissue"],
        tile_spec={"size": 500, "stride": 500, "resolution": 32.0}, mask={"size": 500, "threshold": 0.6},
        graph={"input_name": "input", "output_names": ["cropping2d_12"], "layout": "NHWC", "dtype": "float32"},
    )  # fmt: skip
    source = shared_data / "models" / "superfast-tissue" / "best_unet.onnx"
    made = import_graph(source, spec, tmp_path_factory.mktemp("unet"))
    return Checkpoint(made.path, made.manifest)


@pytest.fixture(scope="module")
def loaded_unet(unet: Checkpoint) -> TissueModel:
    return TissueModel(unet, Settings())


@pytest.mark.parametrize(
    ("file", "mpp", "share", "within", "overlap"),
    [
        ("slides/CMU-1-Small-Region.svs", None, 0.38, 0.02, 0.9),
        ("slides/tcga-cr-7395-01a-01-ts1.svs", (0.25, 0.25), 0.64, 0.03, 0.95),
        ("slides/test3-DAPI-2-(387).ndpi", None, 0.31, 0.03, 0.0),
        ("derived/leica.scn", None, 0.25, 0.02, 0.9),
    ],
)
@pytest.mark.slow
def test_the_tissue_unet_finds_what_it_is_known_to_find(
    loaded_unet: TissueModel,
    shared_data: Path,
    file: str,
    mpp: tuple[float, float] | None,
    share: float,
    within: float,
    overlap: float,
) -> None:
    with open_slide(shared_data / file, "S1") as slide:
        stated = mpp or slide.mpp
        assert stated is not None
        overview = read_overview(slide, stated)
    mask = loaded_unet.mask(overview)
    assert mask.mean() == pytest.approx(share, abs=within)
    by_colour = tissue_mask(overview)
    assert (mask & by_colour).sum() / (mask | by_colour).sum() > overlap
    if file.endswith("scn"):
        assert not mask[overview.missing >= 0.5].any()


@pytest.mark.slow
def test_the_tissue_unet_finds_none_on_white_or_black(loaded_unet: TissueModel) -> None:
    for value in (255, 0):
        assert not loaded_unet.mask(_overview(np.full((200, 300, 3), value, np.uint8))).any()


@pytest.mark.slow
def test_a_slide_planned_with_the_tissue_unet_has_the_tiles_that_colours_plan(
    unet: Checkpoint, demo_checkpoint: Checkpoint, shared_data: Path, tmp_path: Path
) -> None:
    slide = ref(shared_data / "slides" / "CMU-1-Small-Region.svs")
    cells = []
    for settings in ({"tissue_model": str(unet.path)}, {}):
        (outcome,) = run(tmp_path, demo_checkpoint, [slide], stages=PLANNING, min_tissue=0.5, **settings)  # type: ignore[arg-type]
        assert outcome.status == "ok"
        table = pq.read_table(result(outcome, "tiles").folder / "tiles.parquet")
        cells.append(set(zip(table["row"].to_pylist(), table["col"].to_pylist(), strict=True)))
    assert len(cells[0] & cells[1]) / len(cells[0] | cells[1]) > 0.85
