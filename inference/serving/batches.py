"""Many tiles in one binary body: each goes into the same queue as any other tile, and has its own result or error."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from inference.clients.pipeline import ModelPipeline
from inference.contract import Lineage, ModelRequest
from inference.contract.faults import error_body
from inference.contract.frames import OutputRows, TileAnswers, TileBatch, decode_tiles, encode_answers, read_tile_header
from inference.errors import BadRequest, Broken, InferenceError, Overloaded
from inference.models.bulk_rna import BulkRnaServerModel
from inference.models.heads import DownstreamHeadModel
from inference.models.sample import Mode, PreparedSample, TileOutput
from inference.models.server_model import BaseServerModel
from inference.serving.gate import Call


async def answer_batch(pipeline: ModelPipeline, name: str, body: bytes, call: Call, max_tile_bytes: int) -> bytes:
    """The response's body. Tiles are admitted one by one: some may be refused for want of room.

    Args:
        name: of the model, or of one of its heads.

    Raises:
        InferenceError: no tile was run, and all for the same reason: the request can be sent again as it is.
    """
    header, payload = read_tile_header(body, max_tile_bytes)
    call.slide, call.tiles = header.slide_name, header.shape[0]
    mode = pipeline.model.check_mode(header.mode)
    _check_shape(pipeline.model, header)
    call.reserve(header.nbytes)  # as they are unpacked; a body of 1 MB may mean 256
    samples = await asyncio.wrap_future(pipeline.start(_prepare, pipeline.model, name, header, payload))
    found = await _run(pipeline, samples, mode, call)
    errors = [result for result in found if isinstance(result, Overloaded | Broken)]
    if len(errors) == len(found) and len({type(error) for error in errors}) == 1:
        raise errors[0]
    # One tile of the batch stands for all: where they came from and what made their answers is the same.
    request = ModelRequest(
        image_data="", slide_name=header.slide_name, x=0, y=0, width=1, height=1, patch_idx=0, model_name=name,
        bulk_rna_sha256=header.bulk_rna_sha256,
    )  # fmt: skip
    lineage = pipeline.model.lineage(request, mode).model_copy(update={"request_id": call.request_id})
    return await asyncio.wrap_future(pipeline.start(_encode, found, mode, lineage))


def _check_shape(model: BaseServerModel, header: TileBatch) -> None:
    """Refuse tiles of another size before any is unpacked."""
    channels, height, width = model.model_spec.input_shape
    if tuple(header.shape[1:]) != (height, width, channels):
        raise BadRequest(
            f"{model.model_name} takes {height} x {width} x {channels} tiles, not {tuple(header.shape[1:])}"
        )


def _prepare(model: BaseServerModel, name: str, header: TileBatch, payload: memoryview) -> list[PreparedSample]:
    tiles, rna = decode_tiles(header, payload), header.bulk_rna_sha256
    if isinstance(model, DownstreamHeadModel):
        return [replace(model.prepare_tile(tile), head=name) for tile in tiles]
    if isinstance(model, BulkRnaServerModel):
        return [model.prepare_tile(tile, rna) for tile in tiles]
    if rna is not None:
        raise BadRequest(f"{model.model_name} takes no bulk RNA: leave bulk_rna_sha256 out")
    return [model.prepare_tile(tile) for tile in tiles]


async def _run(
    pipeline: ModelPipeline, samples: Sequence[PreparedSample], mode: Mode, call: Call
) -> list[TileOutput | InferenceError]:
    waiting: list[asyncio.Future[TileOutput] | InferenceError] = []
    for sample in samples:
        try:
            waiting.append(asyncio.wrap_future(pipeline.submit(sample, mode, call.remaining_s, block=False)))
        except (Overloaded, Broken) as error:
            waiting.append(error)
    futures = [future for future in waiting if isinstance(future, asyncio.Future)]
    answers = iter(await asyncio.gather(*futures, return_exceptions=True))
    found: list[TileOutput | InferenceError] = []
    for future in waiting:
        result = next(answers) if isinstance(future, asyncio.Future) else future
        if not isinstance(result, TileOutput | InferenceError):
            raise result
        found.append(result)
    return found


def _encode(found: Sequence[TileOutput | InferenceError], mode: Mode, lineage: Lineage) -> bytes:
    rows = _stacked([result for result in found if isinstance(result, TileOutput)])
    name = lineage.request_id
    header = TileAnswers(
        request_id=name,
        mode=mode,
        errors=[error_body(result, name) if isinstance(result, InferenceError) else None for result in found],
        outputs=[output for output, _ in rows],
        lineage=lineage,
    )
    return encode_answers(header, [array for _, array in rows])


def _stacked(good: Sequence[TileOutput]) -> list[tuple[OutputRows, NDArray[np.generic]]]:
    """One array per output that the tiles have."""
    found: list[tuple[OutputRows, NDArray[np.generic]]] = []
    embeddings = [result.embedding for result in good if result.embedding is not None]
    predictions = [result.prediction for result in good if result.prediction is not None]
    masks = [result.mask for result in good if result.mask is not None]
    if embeddings:
        rows = np.stack(embeddings)
        found.append((OutputRows(name="embedding", shape=list(rows.shape)), rows))
    if predictions:
        rows = np.stack(predictions)
        found.append((OutputRows(name="prediction", shape=list(rows.shape)), rows))
    if masks:
        classes, planes = masks[0].n_classes, np.stack([mask.unpack() for mask in masks])
        output = OutputRows(
            name="mask", shape=list(planes.shape), encoding="bits" if classes == 1 else "uint8", n_classes=classes
        )
        found.append((output, planes))
    return found
