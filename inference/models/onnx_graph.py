"""Writes ONNX graphs, and says which files a graph reads beside itself."""

import re
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from inference.errors import ArtifactRefused, ConfigError
from inference.models.artifact import FILE_NAME, PinnedFile
from inference.models.regular_files import hash_regular_file

if TYPE_CHECKING:
    import torch

OPSET = 20
"""The first with GELU and resizing with antialiasing, which ONNX Runtime 1.17 and later have."""

EMBEDDED_BYTES = 1 << 30
"""Weights up to here lie in the graph; a graph of 2 GiB cannot be stored as one file."""

_EXTERNAL_KEYS = {"location", "offset", "length", "checksum"}

_NEEDS = "needs further packages: pip install 'slide-inference[export]'"


def write_onnx(
    program: "torch.export.ExportedProgram", path: Path, inputs: Sequence[str], outputs: Sequence[str]
) -> tuple[PinnedFile, ...]:
    """Write a program as an ONNX graph; larger weights go into one file beside it, which is returned.

    Raises:
        ConfigError: a package is missing, or the program cannot be written as ONNX.
    """
    import torch

    try:
        import onnxscript  # noqa: F401 - torch asks for it later, in many words
    except ImportError:
        raise ConfigError(f"exporting .onnx {_NEEDS}") from None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about its own internals
            written = torch.onnx.export(
                program, dynamo=True, input_names=list(inputs), output_names=list(outputs), opset_version=OPSET,
                verbose=False,
            )  # fmt: skip
    except Exception as error:
        reason = (str(error).strip().splitlines() or [""])[0]
        raise ConfigError(
            f"this network cannot be written as ONNX: {reason}; choose --format pt2 or portable"
        ) from error
    assert written is not None
    size = sum(tensor.numel() * tensor.element_size() for tensor in program.state_dict.values())
    written.save(path, external_data=size > EMBEDDED_BYTES)
    return pinned_data(path)


def pinned_data(path: Path) -> tuple[PinnedFile, ...]:
    """The files that a graph reads beside itself, hashed.

    Raises:
        ArtifactRefused: as `external_files`, or one is not there.
    """
    found = []
    for name in external_files(path):
        size, digest = hash_regular_file(path.with_name(name))
        found.append(PinnedFile(file=name, size=size, sha256=digest))
    return tuple(found)


def external_files(path: Path) -> tuple[str, ...]:
    """Names of the files that a graph reads beside itself; none may lie elsewhere.

    Raises:
        ConfigError: a package is missing.
        ArtifactRefused: no ONNX graph, or a tensor outside the graph's own folder, outside its file, or described by
            anything but a place in a file.
    """
    try:
        import onnx
    except ImportError:
        raise ConfigError(f"reading .onnx {_NEEDS}") from None
    try:
        model = onnx.load(str(path), load_external_data=False)
    except Exception as error:  # noqa: BLE001 - a broken file raises anything
        raise ArtifactRefused(f"{path.name} is no ONNX graph: {' '.join(str(error).split())[:200]}") from None
    names: set[str] = set()
    for tensor in _tensors(model):
        if tensor.data_location == onnx.TensorProto.EXTERNAL:
            names.add(_checked_place(path, tensor))
    return tuple(sorted(names))


def _checked_place(path: Path, tensor: Any) -> str:
    told = {entry.key: entry.value for entry in tensor.external_data}
    location = str(told.get("location", ""))
    where = f"{path.name}: the tensor {tensor.name[:80]!r}"
    if len(told) != len(tensor.external_data) or not told.keys() <= _EXTERNAL_KEYS:
        raise ArtifactRefused(f"{where} is described by {', '.join(sorted(told))}: only {_EXTERNAL_KEYS} are known")
    if not re.fullmatch(FILE_NAME, location):
        raise ArtifactRefused(f"{where} lies in {location!r}: only files in the graph's own folder are read")
    data = path.with_name(location)
    if data.is_symlink() or not data.is_file():
        raise ArtifactRefused(f"{where} lies in {location}, which is no regular file there: copy it beside the graph")
    size = data.stat().st_size
    offset, length = told.get("offset", "0"), told.get("length", "0")
    if not (offset.isdecimal() and length.isdecimal()) or int(offset) + int(length) > size:
        raise ArtifactRefused(f"{where} ends at {offset} + {length} in {location}, which has {size} bytes")
    return location


def _tensors(model: Any) -> Iterator[Any]:
    yield from _graph_tensors(model.graph)
    for function in model.functions:
        for node in function.node:
            yield from _node_tensors(node)


def _graph_tensors(graph: Any) -> Iterator[Any]:
    yield from graph.initializer
    for sparse in graph.sparse_initializer:
        yield sparse.values
        yield sparse.indices
    for node in graph.node:
        yield from _node_tensors(node)


def _node_tensors(node: Any) -> Iterator[Any]:
    for attribute in node.attribute:
        if attribute.HasField("t"):
            yield attribute.t
        yield from attribute.tensors
        for sparse in (*([attribute.sparse_tensor] if attribute.HasField("sparse_tensor") else []),
                       *attribute.sparse_tensors):  # fmt: skip
            yield sparse.values
            yield sparse.indices
        for graph in (*([attribute.g] if attribute.HasField("g") else []), *attribute.graphs):
            yield from _graph_tensors(graph)
