"""The tissue U-Net, a graph of others in its own layout, through the segmentation model."""

import hashlib
import platform
import shutil
from pathlib import Path

import numpy as np
import openslide
import pytest
from numpy.typing import NDArray

from inference.models.artifact import ArtifactManifest, manifest_path
from inference.models.segmentation import SegmentationServerModel
from inference.models.server_model import build_server_model
from tests.inference.models.kinds import make_request, make_spec, sound

SIDE = 500
TISSUE_SHARE = {"CMU-1-Small-Region.svs": 0.38, "tcga-cr-7395-01a-01-ts1.svs": 0.64}
"""Measured with the graph alone on thumbnails squeezed to its input."""


@pytest.fixture(scope="module")
def unet(shared_data: Path, tmp_path_factory: pytest.TempPathFactory) -> SegmentationServerModel:
    pytest.importorskip("onnxruntime")
    checkpoint = tmp_path_factory.mktemp("unet") / "unet.onnx"
    shutil.copyfile(shared_data / "models" / "superfast-tissue" / "best_unet.onnx", checkpoint)
    digest = hashlib.sha256(checkpoint.read_bytes()).hexdigest()
    spec = make_spec(
        "superfast-tissue", output_type="prediction", embedding_dim=None, prediction_names=["tissue"],
        tile_spec={"size": SIDE, "stride": SIDE, "resolution": 32.0}, mask={"size": SIDE, "threshold": 0.6},
        graph={"input_name": "input", "output_names": ["cropping2d_12"], "layout": "NHWC", "dtype": "float32"},
    )  # fmt: skip
    manifest = ArtifactManifest(
        file=checkpoint.name, size=checkpoint.stat().st_size, sha256=digest, format="onnx", device="cpu",
        arch=platform.machine(), weights_sha256=digest, source_sha256=digest, spec=spec,
    )  # fmt: skip
    manifest_path(checkpoint).write_text(manifest.model_dump_json())
    found = build_server_model("superfast-tissue", checkpoint)
    assert isinstance(found, SegmentationServerModel)
    return found


def _thumbnail(path: Path) -> NDArray[np.uint8]:
    with openslide.OpenSlide(path) as slide:
        image = slide.get_thumbnail((2 * SIDE, 2 * SIDE)).convert("RGB").resize((SIDE, SIDE))
    return np.asarray(image, np.uint8)


def test_the_tissue_of_real_slides_is_found_and_neither_glass_nor_black(
    unet: SegmentationServerModel, shared_data: Path
) -> None:
    tiles = [_thumbnail(shared_data / "slides" / name) for name in TISSUE_SHARE]
    tiles += [np.full((SIDE, SIDE, 3), value, np.uint8) for value in (255, 0)]
    rows = unet.forward_tiles([unet.prepare_tile(tile) for tile in tiles], ["prediction"] * 4)
    shares = []
    for row in map(sound, rows):
        assert row.mask is not None
        assert row.prediction is not None
        assert row.mask.nbytes == SIDE * SIDE // 8
        assert row.mask.unpack().mean() == pytest.approx(row.prediction[0])
        shares.append(float(row.prediction[0]))
    assert shares == pytest.approx([*TISSUE_SHARE.values(), 0, 0], abs=0.02)


def test_its_mask_lies_where_the_tissue_is(unet: SegmentationServerModel, shared_data: Path) -> None:
    tile = _thumbnail(shared_data / "slides" / "CMU-1-Small-Region.svs")
    request = make_request(tile)
    (answer,) = unet.forward_batch([unet.prepare_sample(request)], [request], "prediction")
    mask = np.reshape(answer.output, (SIDE, SIDE)) == 1
    pixels = tile.astype(float)
    saturated = (pixels.max(axis=2) - pixels.min(axis=2)) / np.maximum(pixels.max(axis=2), 1) > 0.1
    assert (mask & saturated).sum() / (mask | saturated).sum() > 0.8
    assert (mask.T & saturated).sum() / (mask.T | saturated).sum() < 0.7, "a transposed mask would be seen"
