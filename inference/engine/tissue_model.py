"""A learned tissue mask: any segmentation model, run once per slide on a picture of all of it."""

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from inference.batching import FailureKind, classify_failure
from inference.engine.model import EngineModel, require_usable
from inference.engine.results import plain_message
from inference.engine.settings import Settings
from inference.errors import ArtifactRefused, Broken, ConfigError, DeviceBroken, NonFiniteOutput
from inference.models.artifact import ArtifactManifest
from inference.models.registry import Checkpoint, resolve_model
from inference.slides.overview import Overview

TISSUE = "tissue"
"""Name of the class that is tissue, among several; the only class is, whatever its name."""

_RESAMPLING = {"area": Image.Resampling.BOX, "bilinear": Image.Resampling.BILINEAR}


def find_tissue_model(settings: Settings) -> "TissueModel | None":
    """The model that `Settings.tissue_model` names, not loaded yet; None where the mask is made without one.

    Raises:
        UnknownModel, ArtifactRefused: as `resolve_model`.
        ConfigError: it is no segmentation model, or none of its classes is tissue.
    """
    return TissueModel(resolve_model(settings.tissue_model), settings) if settings.tissue_model else None


def require_usable_tissue_model(settings: Settings) -> None:
    """Refuse the model before anything is created for it; reads its checkpoint once.

    Raises:
        UnknownModel, ArtifactRefused, ConfigError: as `find_tissue_model` and `require_usable`.
    """
    if model := find_tissue_model(settings):
        require_usable(model.checkpoint, model.settings)


class TissueModel:
    """Finds the tissue of slide after slide; its checkpoint is loaded once, when first needed."""

    def __init__(self, checkpoint: Checkpoint, settings: Settings) -> None:
        self.checkpoint = checkpoint
        self.settings = replace(settings, batch_size=1, stride_px=None)
        self._class = _tissue_class(checkpoint.manifest)
        self._model = EngineModel(checkpoint, self.settings)

    @property
    def manifest(self) -> ArtifactManifest:
        return self.checkpoint.manifest

    @property
    def loads(self) -> int:
        """How often the checkpoint was loaded."""
        return self._model.loads

    @property
    def method(self) -> str:
        return f"model {self.manifest.model_name}"

    def mask(self, overview: Overview) -> NDArray[np.bool_]:
        """Tissue at mask scale, as the model sees it in the whole slide, squeezed to its tile whatever its shape.

        Missing pixels are background and unreadable ones tissue, as in the mask without a model; but what surrounds
        them may be decided differently for their sake.

        Raises:
            Broken: the model does not load, does not run, or returns what it must not; no slide is to blame.
        """
        picture = max(overview.thumbnail, overview.rgb, key=np.size)  # of a small slide, the thumbnail is the finer
        found = self._classify(_squeezed(picture, self.manifest.spec.tile_spec.size, self.manifest)) == self._class
        height, width = overview.unreadable.shape
        share = Image.fromarray(found.astype(np.uint8) * 255).resize((width, height), Image.Resampling.BOX)
        return np.asarray((np.asarray(share) >= 128) & (overview.missing < 0.5) | overview.unreadable)

    def _classify(self, tile: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """The class of every pixel of the picture."""
        server, name = self._model.server, self.manifest.model_name
        try:
            (row,) = server.forward_tiles([server.prepare_tile(tile)], ["prediction"])
        except Broken:
            raise
        except Exception as error:
            text = plain_message(str(error)) or type(error).__name__
            if classify_failure(error) is FailureKind.OUT_OF_MEMORY:
                raise DeviceBroken(f"{self.settings.device} has no memory for the tissue model {name}") from error
            raise ArtifactRefused(f"the tissue model {name} does not run: {text}; export or import it again") from error
        if isinstance(row, NonFiniteOutput):
            raise ArtifactRefused(f"the tissue model {name} returned NaN or infinity; choose another --tissue-model")
        assert row.mask is not None, "a segmentation model's prediction"
        return row.mask.unpack()

    def close(self) -> None:
        """Let the model go."""
        self._model.close()


def _tissue_class(manifest: ArtifactManifest) -> int:
    spec = manifest.spec
    if spec.mask is None:
        raise ConfigError(f"{spec.model_name} gives no mask: --tissue-model needs a segmentation model")
    if spec.n_predictions == 1:
        return 1
    if TISSUE not in spec.prediction_names:
        named = ", ".join(spec.prediction_names[:9]) or "without names"
        raise ConfigError(f"{spec.model_name} has the classes {named}: --tissue-model needs one called {TISSUE}")
    return spec.prediction_names.index(TISSUE)


def _squeezed(picture: NDArray[np.uint8], side: int, manifest: ArtifactManifest) -> NDArray[np.uint8]:
    kernel = _RESAMPLING[manifest.spec.tile_spec.kernel]
    return np.asarray(Image.fromarray(picture).resize((side, side), kernel), np.uint8)
