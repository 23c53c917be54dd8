"""DICOM whole-slide files made in code, whose frames, tables and headers may also lie."""

import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import imagecodecs
import numpy as np
import simplejpeg
from pydicom.dataset import Dataset, FileMetaDataset

from tests.inference.slides.synthetic import Pixels

TILE = 64
WHOLE_SLIDE = "1.2.840.10008.5.1.4.1.1.77.1.6"
ITEM, SEQUENCE_END = b"\xfe\xff\x00\xe0", b"\xfe\xff\xdd\xe0"


@dataclass(frozen=True)
class Codec:
    """How the frames of a file are stored."""

    syntax: str
    photometric: str
    encode: Callable[[Pixels], bytes]


def _jpeg(tile: Pixels) -> bytes:
    return bytes(simplejpeg.encode_jpeg(tile, quality=90, colorspace="RGB", colorsubsampling="420"))


def _jpeg_of_rgb(tile: Pixels) -> bytes:
    return bytes(imagecodecs.jpeg8_encode(tile, level=95, colorspace="RGB", outcolorspace="RGB"))


def _jpeg2000(*, mct: bool, lossy: bool = False) -> Callable[[Pixels], bytes]:
    level = 60 if lossy else 0
    return lambda tile: bytes(
        imagecodecs.jpeg2k_encode(tile, level=level, codecformat="J2K", reversible=not lossy, mct=mct, numthreads=1)
    )


LOSSLESS = ("raw", "jpeg2000", "jpeg2000-rct")
CODECS = {
    "raw": Codec("1.2.840.10008.1.2.1", "RGB", lambda tile: tile.tobytes()),
    "jpeg": Codec("1.2.840.10008.1.2.4.50", "YBR_FULL_422", _jpeg),
    "jpeg-of-rgb": Codec("1.2.840.10008.1.2.4.50", "RGB", _jpeg_of_rgb),
    "jpeg2000": Codec("1.2.840.10008.1.2.4.90", "RGB", _jpeg2000(mct=False)),
    "jpeg2000-ict": Codec("1.2.840.10008.1.2.4.91", "YBR_ICT", _jpeg2000(mct=True, lossy=True)),
    "jpeg2000-rct": Codec("1.2.840.10008.1.2.4.90", "YBR_RCT", _jpeg2000(mct=True)),
}


def frames_of(pixels: Pixels, codec: Codec) -> list[bytes]:
    """The encoded tiles of an image, row by row, of even length as DICOM wants them."""
    height, width = pixels.shape[:2]
    filled = np.pad(pixels, ((0, -height % TILE), (0, -width % TILE), (0, 0)), mode="edge")
    found = [
        codec.encode(np.ascontiguousarray(filled[y : y + TILE, x : x + TILE]))
        for y in range(0, height, TILE)
        for x in range(0, width, TILE)
    ]
    return [frame + bytes(len(frame) % 2) for frame in found]


def item(value: bytes) -> bytes:
    """Encapsulated bytes with their head."""
    return ITEM + struct.pack("<I", len(value)) + value


def places(frames: Sequence[bytes]) -> list[int]:
    """Where each frame's item begins, from the first item."""
    return [sum(8 + len(frame) for frame in frames[:k]) for k in range(len(frames))]


def write_level(
    path: Path,
    pixels: Pixels,
    codec: str = "jpeg",
    *,
    table: str = "basic",
    lie: Callable[[list[int]], list[int]] = list,
    frames: Callable[[list[bytes]], list[bytes]] = list,
    is_first: bool = True,
    elements: Mapping[str, object] | None = None,
) -> Path:
    """One level of a series as a file.

    Args:
        table: "basic", "extended" or "none".
        lie: changes the offsets in the table.
        frames: changes the frames that are stored, after the table was made.
        elements: further elements of the header, by keyword.
    """
    how = CODECS[codec]
    encoded = frames_of(pixels, how)
    offsets = lie(places(encoded))
    stored = frames(encoded)
    data = _header(pixels, how, len(encoded), is_first, name=path.name)
    if codec == "raw":
        data.add_new(0x7FE00010, "OW", b"".join(stored))
    else:
        basic = struct.pack(f"<{len(offsets)}I", *offsets) if table == "basic" else b""
        if table == "extended":
            data.add_new(0x7FE00001, "OV", struct.pack(f"<{len(offsets)}Q", *offsets))
            data.add_new(0x7FE00002, "OV", struct.pack(f"<{len(encoded)}Q", *map(len, encoded)))
        data.add_new(0x7FE00010, "OB", item(basic) + b"".join(map(item, stored)) + SEQUENCE_END + bytes(4))
        data["PixelData"].is_undefined_length = True
    for keyword, value in (elements or {}).items():
        setattr(data, keyword, value)
    data.save_as(path, enforce_file_format=True)
    if codec != "raw":  # pydicom ends the sequence itself, after the end that is there
        whole = path.read_bytes()
        path.write_bytes(whole.removesuffix(SEQUENCE_END + bytes(4)))
    return path


def sparse(size: tuple[int, int]) -> dict[str, object]:
    """The elements that place each frame of an image by itself; without them OpenSlide ends the process."""
    groups = []
    for y in range(0, size[1], TILE):
        for x in range(0, size[0], TILE):
            place, group = Dataset(), Dataset()
            place.ColumnPositionInTotalImagePixelMatrix, place.RowPositionInTotalImagePixelMatrix = x + 1, y + 1
            group.PlanePositionSlideSequence = [place]
            groups.append(group)
    return {"PerFrameFunctionalGroupsSequence": groups}


def _header(pixels: Pixels, codec: Codec, frames: int, is_first: bool, *, name: str) -> Dataset:
    height, width = pixels.shape[:2]
    data = Dataset()
    data.file_meta = FileMetaDataset()
    data.file_meta.MediaStorageSOPClassUID = data.SOPClassUID = WHOLE_SLIDE
    data.file_meta.MediaStorageSOPInstanceUID = data.SOPInstanceUID = f"1.2.3.{int.from_bytes(name.encode()[:8])}"
    data.file_meta.TransferSyntaxUID = codec.syntax
    data.SeriesInstanceUID = "1.2.3.4"
    data.ImageType = ["ORIGINAL", "PRIMARY", "VOLUME", "NONE"] if is_first else [
        "DERIVED", "PRIMARY", "VOLUME", "RESAMPLED"]  # fmt: skip
    data.SamplesPerPixel, data.PlanarConfiguration, data.PhotometricInterpretation = 3, 0, codec.photometric
    data.BitsAllocated, data.BitsStored, data.HighBit, data.PixelRepresentation = 8, 8, 7, 0
    data.Columns = data.Rows = TILE
    data.NumberOfFrames, data.DimensionOrganizationType = frames, "TILED_FULL"
    data.TotalPixelMatrixColumns, data.TotalPixelMatrixRows = width, height
    measures, shared = Dataset(), Dataset()
    measures.PixelSpacing = [0.0005, 0.0005]
    shared.PixelMeasuresSequence = [measures]
    data.SharedFunctionalGroupsSequence = [shared]
    return data
