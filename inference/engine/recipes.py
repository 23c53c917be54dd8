"""What defines each stage's numbers, and so where its results lie."""

import platform
from collections.abc import Mapping
from functools import cache
from importlib.metadata import version

from pydantic import JsonValue

from inference.engine.settings import Settings
from inference.models.artifact import ArtifactManifest
from inference.models.spec import HeatmapSpec, ModelSpec
from inference.slides import overview, tissue
from inference.store.manifest import recipe_digest
from inference.store.store import Address

STAGE_VERSION = {"info": 2, "tiles": 2, "predict": 2, "slide": 1, "heatmap": 1}
"""Raised by hand whenever a stage's numbers change; a golden test fails when they change and it was not."""


class Addresses:
    """Where each result of one model on one slide lies."""

    def __init__(
        self, key: str, model: ArtifactManifest, settings: Settings, tissue_model: ArtifactManifest | None = None
    ) -> None:
        spec = model.spec
        self._key = key
        self._info = _recipe("info", mask_mpp=overview.MASK_MPP, thumbnail_px=overview.THUMBNAIL_PX)
        self._tiles = _recipe("tiles", upstream=self._info, **_tiling(spec, settings, tissue_model))
        colours: dict[str, JsonValue] = {"icc": "srgb"} if settings.icc else {}
        self._predict = _recipe("predict", upstream=self._tiles, **_model(model), **colours)
        self._settings, self._spec = settings, spec

    @property
    def info(self) -> Address:
        return Address("info", "qc", self._info, self._key)

    @property
    def tiles(self) -> Address:
        return Address("tiles", tiling_name(self._spec, self._settings), self._tiles, self._key)

    @property
    def predict(self) -> Address:
        return Address("predict", self._spec.model_name, self._predict, self._key)

    @property
    def features(self) -> Address:
        return self._slide("features", {"pooling": "mean"})

    @property
    def prediction(self) -> Address:
        return self._slide("prediction", {"top_k": self._settings.top_k, "threshold": self._settings.threshold})

    def heatmap(self, spec: HeatmapSpec) -> Address:
        recipe = _recipe("heatmap", upstream=self._predict, output=spec.output, low=spec.low, high=spec.high)
        return Address("heatmap", f"{self._spec.model_name}-{spec.output}", recipe, self._key)

    def _slide(self, kind: str, settings: dict[str, JsonValue]) -> Address:
        recipe = _recipe("slide", upstream=self._predict, kind=kind, **settings)
        return Address("slide", f"{self._spec.model_name}-{kind}", recipe, self._key)


def tiling_name(spec: ModelSpec, settings: Settings | None = None) -> str:
    """A name for people: models with the same tile share its results."""
    tile = spec.tile_spec
    stride = (settings and settings.stride_px) or tile.stride
    edge = f"-{settings.edge}" if settings and settings.edge != "drop" else ""
    return f"t{tile.size}-s{stride}-{tile.resolution:g}um{edge}"


def execution(model: ArtifactManifest | None, settings: Settings, reader: str) -> dict[str, JsonValue]:
    """What can move the last bits of a result without changing its recipe."""
    found: dict[str, JsonValue] = {
        "packages": {
            name: _version(name) for name in ("numpy", "pillow", "pyarrow", "scipy", "tifffile", "imagecodecs")
        },
        "reader": reader,
        "arch": platform.machine(),
    }
    if model is not None:
        import torch  # only where a model runs anyway

        found |= {
            "artifact_sha256": model.sha256,
            "torch": _version("torch"),
            "threads": torch.get_num_threads(),
            "batch_size": settings.batch_size,
            "device": settings.device,
        }
    return found


def differing_inputs(before: Mapping[str, JsonValue], now: Mapping[str, JsonValue]) -> str:
    """What was said of a slide and is said differently now, in words."""
    what = {"mpp": "µm/px", "mpp_source": "µm/px", "roi_sha256": "ROI", "allow_upsampling": "choice of upsampling"}
    names = {what.get(name, name) for name in before.keys() | now.keys() if before.get(name) != now.get(name)}
    return " and ".join(sorted(names))


@cache
def _version(package: str) -> str:
    """Looked up once: it parses the package's metadata each time, and every stage of every slide asks."""
    return version(package)


def _recipe(stage: str, *, upstream: dict[str, JsonValue] | None = None, **own: JsonValue) -> dict[str, JsonValue]:
    recipe: dict[str, JsonValue] = {"stage": stage, "version": STAGE_VERSION[stage], **own}
    return recipe if upstream is None else {**recipe, "upstream": recipe_digest(upstream)}


def _tiling(spec: ModelSpec, settings: Settings, tissue_model: ArtifactManifest | None) -> dict[str, JsonValue]:
    found: dict[str, JsonValue] = {
        "tile_px": spec.tile_spec.size,
        "stride_px": settings.stride_px or spec.tile_spec.stride,
        "mpp": spec.tile_spec.resolution,
        "kernel": spec.tile_spec.kernel,
        "edge": settings.edge,
        "tissue": _colours() if tissue_model is None else {"method": "model", **_model(tissue_model)},
        "min_tissue": settings.min_tissue,
    }
    return found if settings.max_pen is None else {**found, "max_pen": settings.max_pen}


def _colours() -> dict[str, JsonValue]:
    return {
        "method": tissue.METHOD,
        "min_chroma": tissue.MIN_CHROMA,
        "min_darkness": tissue.MIN_DARKNESS,
        "min_glow": tissue.MIN_GLOW,
    }


def _model(model: ArtifactManifest) -> dict[str, JsonValue]:
    return {
        "model": model.spec.recipe(),
        "weights_sha256": model.weights_sha256,
        "source_sha256": model.source_sha256,
        "precision": model.spec.precision,
        "runtime": model.format,
    }
