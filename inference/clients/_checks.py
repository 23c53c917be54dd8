"""What a service may answer: anything else is its own fault, and no result."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from inference.contract.faults import rebuild
from inference.contract.frames import OutputRows, TileAnswers, decode_answers
from inference.contract.validation import parse_json
from inference.errors import BadRequest, InferenceError, ModelContractError
from inference.models.sample import Mode, PackedMask, TileOutput

ECHOED = ("slide_name", "x", "y", "width", "height", "patch_idx")
"""Fields of a request that its answer repeats."""

OUTPUTS: dict[Mode, tuple[str, ...]] = {
    "embedding": ("embedding",),
    "prediction": ("prediction",),
    "prediction_with_embedding": ("prediction", "embedding"),
}
"""What the rows of a batch have in each mode; a segmentation model's have a mask too."""


def wrong_answer(problem: str) -> ModelContractError:
    """The error that stands for an answer which cannot be used."""
    return ModelContractError(f"the service's answer {problem}: does the address lead to this model's service?")


def json_object(content: bytes) -> dict[str, object]:
    """An answer's JSON object.

    Raises:
        ModelContractError: it is none.
    """
    try:
        found = parse_json(content)
    except BadRequest as error:
        raise wrong_answer(error.message.removeprefix("the body ")) from None
    if not isinstance(found, dict):
        raise wrong_answer("is no JSON object")
    return found


def tile_answer(content: bytes, body: bytes, *, combined: bool) -> str:
    """The answer to one tile's request, as it came.

    Args:
        body: the request.
        combined: an embedding was asked for beside the output.

    Raises:
        ModelContractError: it has no finite numbers, or is of another tile.
    """
    answer = json_object(content)
    for name in ("output", "embedding") if combined else ("output",):
        if not _finite_numbers(answer.get(name)):
            raise wrong_answer(f"has no finite numbers as {name!r}")
    asked = _request(body)
    for name in ECHOED:
        if name not in answer or name not in asked or answer[name] != asked[name]:
            raise wrong_answer(f"is not of the tile that was sent: it has another {name!r}")
    return content.decode()


def tile_rows(content: bytes, n_tiles: int, mode: Mode) -> list[TileOutput | InferenceError]:
    """A result or an error per tile, in order, from the answer to a batch.

    Raises:
        ModelContractError: it does not have one for each, or an output is missing, not finite or of another shape.
    """
    try:
        header, arrays = decode_answers(content)
    except (BadRequest, OverflowError, ValueError) as error:
        problem = error.message.removeprefix("the ") if isinstance(error, BadRequest) else "a shape is too large"
        raise wrong_answer(f"cannot be read ({problem})") from None
    _check_rows(header, arrays, n_tiles, mode)
    rows = iter(range(n_tiles))
    return [rebuild(error) if error else _row(header.outputs, arrays, next(rows)) for error in header.errors]


def _finite_numbers(values: object) -> bool:
    if not isinstance(values, list) or not values or not set(map(type, values)) <= {int, float}:
        return False
    try:
        return all(map(math.isfinite, values))
    except OverflowError:  # an integer that no float can hold
        return False


def _request(body: bytes) -> dict[str, object]:
    try:
        found = parse_json(body)
    except BadRequest:
        return {}
    return found if isinstance(found, dict) else {}


def _check_rows(header: TileAnswers, arrays: Sequence[NDArray[Any]], n_tiles: int, mode: Mode) -> None:
    if header.mode != mode:
        raise wrong_answer("is of another mode")
    if len(header.errors) != n_tiles:
        raise wrong_answer(f"is about {len(header.errors)} tiles, {n_tiles} were sent")
    n_good = header.errors.count(None)
    names = [output.name for output in header.outputs]
    missing = [name for name in OUTPUTS[mode] if name not in names]
    if len(set(names)) != len(names) or (missing and n_good):
        raise wrong_answer(f"has the outputs {names}, not one each of {list(OUTPUTS[mode])}")
    for output, array in zip(header.outputs, arrays, strict=True):
        if len(array) != n_good:
            raise wrong_answer(f"has {len(array)} rows of {output.name!r}, {n_good} tiles succeeded")
        if output.name != "mask" and (output.encoding != "float32" or array.ndim != 2 or array.size == 0 < n_good):
            raise wrong_answer(f"has no vector of numbers per tile as {output.name!r}")
        if output.name != "mask" and not np.isfinite(array).all():
            raise wrong_answer(f"has numbers that are not finite as {output.name!r}")


def _row(outputs: Sequence[OutputRows], arrays: Sequence[NDArray[Any]], row: int) -> TileOutput:
    found = {output.name: array[row].copy() for output, array in zip(outputs, arrays, strict=True)}
    try:
        masks = [PackedMask.pack(found[o.name], o.n_classes) for o in outputs if o.name == "mask"]
    except ValueError:
        raise wrong_answer("has a mask that is not one class per pixel") from None
    return TileOutput(found.get("embedding"), found.get("prediction"), masks[0] if masks else None)
