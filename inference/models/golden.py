"""Golden vectors: what a checkpoint must return for a few fixed inputs, kept beside it and compared at each load."""

import hashlib
import io
import random
import zipfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from inference.errors import ArtifactRefused
from inference.models.artifact import ArtifactManifest, GoldenPin, Pin
from inference.models.spec import ModelSpec
from inference.models.verification import read_pinned

COUNT = 4
"""Inputs per model."""

MAX_VALUES = 4096
"""Values kept per input and output; of a larger output, as many, spread evenly."""

TOLERANCES = {"fp32": 1e-3, "fp16": 1e-2, "bf16": 6e-2}
"""By precision: ten times what a ViT-S of 12 blocks differs by, other libraries and devices included."""

Arrays = tuple[NDArray[np.float32], ...]
Run = Callable[[NDArray[Any], Mapping[str, NDArray[np.float32]]], Arrays]


def golden_path(checkpoint: Path) -> Path:
    """The vectors lie beside their checkpoint: `uni.pt2` -> `uni.pt2.golden.npz`."""
    return checkpoint.with_name(checkpoint.name + ".golden.npz")


def golden_inputs(spec: ModelSpec) -> tuple[NDArray[Any], dict[str, NDArray[np.float32]]]:
    """The fixed inputs, the same in every version of Python and numpy: coloured squares with noise, or vectors.

    Returns:
        uint8 (COUNT, C, H, W), or float32 (COUNT, D) in -1 to 1 for a head; and the extra inputs.
    """
    source = random.Random(spec.model_name)  # noqa: S311 - fixed on purpose
    if spec.input_dtype == "float32":
        first: NDArray[Any] = _uniform(source, (COUNT, *spec.input_shape)) * 2 - 1
    else:
        first = _tiles(source, (COUNT, *spec.input_shape))
    extras = {extra.name: _uniform(source, (COUNT, *extra.shape)) for extra in spec.extra_inputs}
    for name, values in extras.items():
        if name.endswith("_present"):
            values[:] = np.arange(COUNT, dtype=np.float32)[:, None] % 2
    return first, extras


def run_golden(spec: ModelSpec, run: Run, most: int = COUNT) -> Arrays:
    """A graph's outputs for the fixed inputs, in batches of at most `most`."""
    first, extras = golden_inputs(spec)
    parts = []
    for start in range(0, COUNT, most):
        rows = slice(start, start + most)
        parts.append(run(first[rows], {name: values[rows] for name, values in extras.items()}))
    return tuple(np.concatenate(arrays) for arrays in zip(*parts, strict=True))


def write_golden(checkpoint: Path, spec: ModelSpec, outputs: Sequence[NDArray[np.float32]]) -> GoldenPin:
    """Keep a model's outputs beside its checkpoint; the tolerance is that of the spec's precision."""
    kept = {output.name: thinned(array) for output, array in zip(spec.outputs, outputs, strict=True)}
    return pin_vectors(checkpoint, kept, TOLERANCES[spec.precision])


def pin_vectors(checkpoint: Path, vectors: Mapping[str, NDArray[np.float32]], tolerance: float) -> GoldenPin:
    """Write arrays beside a checkpoint and say what pins them."""
    buffer = io.BytesIO()
    np.savez(buffer, allow_pickle=False, **dict(vectors))
    content = buffer.getvalue()
    path = golden_path(checkpoint)
    path.write_bytes(content)
    digest = hashlib.sha256(content).hexdigest()
    return GoldenPin(file=path.name, size=len(content), sha256=digest, tolerance=tolerance, measured=0.0)


def read_vectors(checkpoint: Path, manifest: Pin) -> dict[str, NDArray[np.float32]]:
    """The arrays beside a checkpoint; none where its manifest pins none.

    Raises:
        ArtifactRefused: they are not what the manifest pins.
    """
    if manifest.golden is None:
        return {}
    content, name = read_pinned(checkpoint, manifest.golden, manifest), manifest.golden.file
    try:
        with np.load(io.BytesIO(content), allow_pickle=False) as found:
            return {key: found[key] for key in found.files}
    except (ValueError, OSError, zipfile.BadZipFile) as error:
        raise ArtifactRefused(f"{name} holds no golden vectors: {error}; export it again") from None


def compare(checkpoint: Path, manifest: Pin, found: Mapping[str, NDArray[np.float32]], remedy: str = "") -> float:
    """Compare outputs by name with the pinned ones.

    Returns:
        The largest difference, as a part of its output's largest value.

    Raises:
        ArtifactRefused: it is not finite, or more than the manifest allows; ends with the remedy.
    """
    pinned = manifest.golden
    if pinned is None:
        return 0.0
    wanted = read_vectors(checkpoint, manifest)
    worst = 0.0
    for name, values in found.items():
        expected = wanted.get(name)
        if expected is None or expected.shape != values.shape:
            raise ArtifactRefused(f"{pinned.file} has no vectors of this model's {name}; export it again")
        worst = max(worst, difference(values, expected))
    if not worst <= pinned.tolerance:
        how = f"values {worst:.1e} from its network's" if np.isfinite(worst) else "NaN or infinity"
        raise ArtifactRefused(f"{checkpoint.name} returns {how} (allowed {pinned.tolerance:.0e}){remedy}")
    return worst


def thinned(array: NDArray[np.float32]) -> NDArray[np.float32]:
    """(B, at most MAX_VALUES) of each row's values, the same places each time."""
    flat = np.asarray(array, np.float32).reshape(len(array), -1)
    if flat.shape[1] <= MAX_VALUES:
        return flat
    return flat[:, np.linspace(0, flat.shape[1] - 1, MAX_VALUES).astype(np.int64)]


def check_golden(checkpoint: Path, manifest: ArtifactManifest, run: Run) -> float:
    """Compare what a loaded graph returns with what it must return.

    Returns:
        The largest difference, as a part of its output's largest value.

    Raises:
        ArtifactRefused: it is not finite, or differs by more than the manifest allows.
    """
    if manifest.golden is None:
        return 0.0
    spec = manifest.spec
    found = run_golden(spec, run, min(COUNT, manifest.max_batch))
    named = {output.name: thinned(array) for output, array in zip(spec.outputs, found, strict=True)}
    remedy = "" if spec.precision == "fp32" else f" in {spec.precision}: export it in bf16 or fp32"
    return compare(checkpoint, manifest, named, remedy)


def difference(found: NDArray[np.float32], expected: NDArray[np.float32]) -> float:
    """Largest difference as a part of the largest expected value; infinity if anything is not finite."""
    if not np.isfinite(found).all():
        return float("inf")
    scale = float(np.abs(expected).max(initial=0.0)) or 1.0
    return float(np.abs(found - expected).max(initial=0.0)) / scale


def _tiles(source: random.Random, shape: tuple[int, ...]) -> NDArray[np.uint8]:
    count, channels, height, width = shape
    cells, side = 16, max(1, -(-max(height, width) // 16))
    squares = np.frombuffer(source.randbytes(count * channels * cells * cells), np.uint8)
    squares = squares.reshape(count, channels, cells, cells).repeat(side, 2).repeat(side, 3)[:, :, :height, :width]
    noise = np.frombuffer(source.randbytes(count * channels * height * width), np.uint8).reshape(shape)
    return (squares // 2 + 64 + noise // 8).astype(np.uint8)


def _uniform(source: random.Random, shape: tuple[int, ...]) -> NDArray[np.float32]:
    size = int(np.prod(shape))
    values = np.frombuffer(source.randbytes(2 * size), np.dtype("<u2")).astype(np.float32)
    return (values / np.float32(65536)).reshape(shape)
