"""Heatmap files: an 8-bit pyramid for viewers and a float OME-TIFF for computing.

Both carry no clock, host or software version, so equal rasters give equal bytes. They are written
in place: the caller writes into a work folder and publishes.
"""

import json
import math
import uuid
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import tifffile
from numpy.typing import NDArray

from inference.errors import ConfigError
from inference.outputs.raster import HeatmapRaster, halvings

SCHEMA_VERSION = 1
STAGE_VERSION = 1  # raise when the numbers in the files change

_TILE_PX = 256
# Readers take a level's downsample from its size. Halving an odd side rounds up, which on a short
# side would be read as another factor, so a raster is never reduced below this side.
_MIN_SIDE_PX = 32
_UUID_NAMESPACE = uuid.uuid5(uuid.NAMESPACE_URL, "https://www.openmicroscopy.org/Schemas/OME/2016-06#slide-inference")


def write_heatmap_tiff(
    path: Path, raster: HeatmapRaster, *, low: float, high: float, description: Mapping[str, object]
) -> None:
    """Write values as a tiled uint8 BigTIFF pyramid: 1 to 255 spans `low` to `high`, 0 is no prediction.

    Values beyond the scale are clipped to it. `description` (JSON values; the recipe digest belongs
    in it) is stored with the scale as JSON in ImageDescription. Opens in OpenSlide and QuPath with
    the cell's µm/px. Raises `ConfigError` for an empty scale.
    """
    if not (math.isfinite(low) and math.isfinite(high) and low < high):
        raise ConfigError(f"a heatmap scale must rise from a finite low to a finite high, not {low} to {high}")
    text = _json(
        {
            **description,
            "scale": {"low": low, "high": high, "pixel_of_low": 1, "pixel_of_high": 255, "pixel_of_no_prediction": 0},
            **_geometry(raster),
        }
    )
    levels = _reductions(raster.values.shape)
    with tifffile.TiffWriter(path, bigtiff=True) as tif:
        for level, (values, _) in enumerate(halvings(raster, levels)):
            tif.write(
                _quantise(values, low, high),
                photometric="minisblack",
                tile=(_TILE_PX, _TILE_PX),
                compression="zlib",
                predictor=True,
                subfiletype=1 if level else 0,
                resolution=_pixels_per_cm(raster, level),
                resolutionunit="CENTIMETER",
                description=None if level else text,
                metadata=None,
                software=False,
            )


def write_heatmap_ome(
    path: Path, raster: HeatmapRaster, *, name: str, uuid_seed: str, description: Mapping[str, object]
) -> None:
    """Write a float32 OME-TIFF with two channels: the value, NaN where not predicted, and the validity.

    `name` names the image and its first channel; the file's UUID follows from `uuid_seed` alone.
    Reductions lie in SubIFDs. `description` is stored as JSON in the image's Description.
    """
    metadata = {
        "axes": "CYX",
        "Creator": "slide-inference",
        "UUID": f"urn:uuid:{uuid.uuid5(_UUID_NAMESPACE, uuid_seed)}",
        "Name": name,
        "Description": _json({**description, **_geometry(raster)}),
        "Channel": {"Name": [name, "validity: 0 not covered, 1 skipped, 2 failed, 3 predicted"]},
        "PhysicalSizeX": raster.cell_mpp[0],
        "PhysicalSizeXUnit": "µm",
        "PhysicalSizeY": raster.cell_mpp[1],
        "PhysicalSizeYUnit": "µm",
    }
    levels = _reductions(raster.values.shape)
    with tifffile.TiffWriter(path, bigtiff=True, ome=True) as tif:
        for level, (values, validity) in enumerate(halvings(raster, levels)):
            tif.write(
                np.stack([values, validity.astype(np.float32)]),
                photometric="minisblack",
                tile=(_TILE_PX, _TILE_PX),
                compression="zlib",
                subifds=None if level else levels,
                subfiletype=1 if level else 0,
                resolution=_pixels_per_cm(raster, level),
                resolutionunit="CENTIMETER",
                metadata=None if level else metadata,
                software=False,
            )


def _quantise(values: NDArray[np.float32], low: float, high: float) -> NDArray[np.uint8]:
    """Values to 1–255, rounded half up; NaN to 0."""
    share = np.clip((values - np.float32(low)) / np.float32(high - low), 0, 1)
    return np.where(np.isnan(share), 0, np.floor(share * 254 + 1.5)).astype(np.uint8)


def _reductions(shape: tuple[int, ...]) -> int:
    """How often to halve until one file tile holds the whole raster."""
    levels, longest, shortest = 0, max(shape), min(shape)
    while longest > _TILE_PX and shortest >= 2 * _MIN_SIDE_PX:
        levels, longest, shortest = levels + 1, (longest + 1) // 2, (shortest + 1) // 2
    return levels


def _pixels_per_cm(raster: HeatmapRaster, level: int) -> tuple[float, float]:
    return (1e4 / (raster.cell_mpp[0] * 2**level), 1e4 / (raster.cell_mpp[1] * 2**level))


def _geometry(raster: HeatmapRaster) -> dict[str, object]:
    """What is needed to find a pixel on the slide again."""
    return {
        "schema_version": SCHEMA_VERSION,
        "cell_px": raster.cell_px,
        "cell_footprint_level0_px": list(raster.cell_footprint),
        "cell_mpp": list(raster.cell_mpp),
        "origin_level0_px": [0, 0],
    }


def _json(content: Mapping[str, object]) -> str:
    """ASCII JSON with sorted keys: the TIFF tag holds nothing else, and equal content gives equal bytes."""
    return json.dumps(content, sort_keys=True, allow_nan=False)
