"""What lies in a `.pt2`, looked at before its loader does: the loader unpacks names as they are and runs pickles."""

import io
import json
import pickletools
import re
import stat
import zipfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from inference.errors import ArtifactRefused

MAX_MEMBERS = 100_000
MAX_EXPANSION = 4
"""torch stores members uncompressed; what unpacks to more than this is a bomb."""

MAX_JSON_BYTES = 1 << 28

MAX_EXPRESSION = 10_000
"""Characters of a symbolic size."""

_COMPILED = r"data/aotinductor/[\w.-]+/(?:[\w.-]+/)*[\w.-]+"
_PORTABLE = r"models/[\w.-]+\.json|data/(?:weights|constants)/(?:weight_\d+|tensor_\d+|[\w.-]+_config\.json)"
_FRAME = (
    r"archive_format|archive_version|byteorder|version|\.data/\w+|\.format_version|\.storage_alignment"
    r"|data/sample_inputs/[\w.-]+\.pt"
)
_KNOWN = re.compile(rf"[\w.-]+/(?:{_COMPILED}|{_PORTABLE}|{_FRAME})")

_SYMBOLS = re.compile(r"[\w\s+\-*/%(),.<>=!&|~]*", re.ASCII)
_CALL = re.compile(r"(\w+)\s*\(")
_ATTRIBUTE = re.compile(r"\.\s*[A-Za-z_]")

_HARMLESS = frozenset(
    {
        "torch._utils _rebuild_tensor_v2",
        "torch._utils _rebuild_tensor",
        "collections OrderedDict",
        "torch device",
        "torch.serialization _get_layout",
        *(f"torch {kind}Storage" for kind in ("Byte", "Char", "Short", "Int", "Long", "Half", "BFloat16", "Float",
                                              "Double", "Bool")),
    }
)  # fmt: skip
"""What the pickle of a tuple of tensors names; every other name is code."""


def check_archive(path: Path, name: str) -> None:
    """Refuse a `.pt2` whose members lead out of it, hold objects, or are no part of the format.

    Raises:
        ArtifactRefused: with the member.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            members = archive.infolist()
            if len(members) > MAX_MEMBERS:
                raise ArtifactRefused(f"{name} has {len(members)} members, more than {MAX_MEMBERS}")
            _check_names(members, name)
            total = sum(member.file_size for member in members)
            if total > MAX_EXPANSION * path.stat().st_size:
                raise ArtifactRefused(f"{name} would unpack to {total} bytes, it has {path.stat().st_size}")
            for member in members:
                _check_content(archive, member, name)
    except (zipfile.BadZipFile, NotImplementedError, RuntimeError, EOFError, OSError) as error:
        raise ArtifactRefused(f"{name} is no .pt2 archive: {error}; export it again") from None


def compiled(path: Path) -> bool:
    """Whether a checked `.pt2` is an AOTInductor package; else it is an exported program."""
    with zipfile.ZipFile(path) as archive:
        return any("/data/aotinductor/" in member for member in archive.namelist())


def _check_names(members: list[zipfile.ZipInfo], name: str) -> None:
    seen: set[str] = set()
    for member in members:
        # `orig_filename`: zipfile mends names that other readers take as they are.
        raw = member.orig_filename
        parts = PurePosixPath(raw).parts
        kind = stat.S_IFMT(member.external_attr >> 16)
        if raw.startswith("/") or ".." in parts or "\\" in raw or ":" in raw or "\0" in raw:
            raise ArtifactRefused(f"{name} has a member {raw!r} that leads out of it: it is not unpacked")
        if kind not in (0, stat.S_IFREG) or member.flag_bits & 1:
            raise ArtifactRefused(f"{name} has a member {raw!r} that is no plain file: it is not unpacked")
        if raw in seen:
            raise ArtifactRefused(f"{name} has the member {raw!r} twice: it is not unpacked")
        if not _KNOWN.fullmatch(raw):
            raise ArtifactRefused(f"{name} has a member {raw!r} that is no part of a .pt2: it is not unpacked")
        seen.add(raw)


def _check_content(archive: zipfile.ZipFile, member: zipfile.ZipInfo, name: str) -> None:
    inside = member.filename.split("/", 1)[1]
    if inside.endswith("_config.json") and inside.startswith("data/"):
        if any(value is not False for value in _values_of("use_pickle", _json(archive, member, name))):
            raise ArtifactRefused(f"{name} holds weights as a pickle, which can run code: export it again")
    elif inside.startswith("models/"):
        for text in _values_of("expr_str", _json(archive, member, name)):
            if not isinstance(text, str) or not _harmless_expression(text):
                raise ArtifactRefused(
                    f"{name} holds the expression {str(text)[:80]!r}, which could run code, so it is not loaded"
                )
    elif inside.startswith("data/sample_inputs/"):
        _check_sample(archive.read(member), name)


def _harmless_expression(text: str) -> bool:
    """Whether a symbolic size is one: torch has sympy read it, which evaluates it as Python.

    Such as `Symbol('s0', positive=True, integer=True)` or `2*s0`: classes of sympy are called, nothing else.
    """
    bare = re.sub(r"'\w+'", "name", text)
    return (
        len(text) <= MAX_EXPRESSION
        and _SYMBOLS.fullmatch(bare) is not None
        and "__" not in text
        and not _ATTRIBUTE.search(bare)
        and all(called[0].isupper() for called in _CALL.findall(bare))
    )


def _json(archive: zipfile.ZipFile, member: zipfile.ZipInfo, name: str) -> object:
    if member.file_size > MAX_JSON_BYTES:
        raise ArtifactRefused(f"{name}: {member.filename} has {member.file_size} bytes")
    try:
        found: object = json.loads(archive.read(member), object_pairs_hook=_object)
    except (ValueError, RecursionError) as error:
        raise ArtifactRefused(f"{name}: {member.filename} is no JSON: {error}") from None
    return found


def _object(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) != len(pairs):  # which of two values another reader takes is not known
        raise ValueError("a key is given twice")
    return found


def _values_of(key: str, value: object) -> Iterator[object]:
    """Every value under this key, however deep."""
    waiting = [value]
    while waiting:
        found = waiting.pop()
        if isinstance(found, dict):
            yield from (inner for name, inner in found.items() if name == key)
            waiting += found.values()
        elif isinstance(found, list):
            waiting += found


def _check_sample(raw: bytes, name: str) -> None:
    """The format has one torch file, the inputs it was exported with: nothing, as ours, or tensors and no more."""
    if not raw:
        return
    # By its first bytes: a pickle with an archive behind it is both, and torch may take it for either.
    if not raw.startswith(b"PK\x03\x04") or not zipfile.is_zipfile(io.BytesIO(raw)):
        raise ArtifactRefused(f"{name} holds a bare pickle, which can run code, so it is not loaded")
    with zipfile.ZipFile(io.BytesIO(raw)) as inner:
        pickles = [inner.read(member) for member in inner.infolist() if member.filename.endswith(".pkl")]
    for data in pickles:
        try:
            named = _names(data)
        except Exception as error:  # noqa: BLE001 - a hostile pickle breaks the disassembler in many ways
            raise ArtifactRefused(f"{name} holds a pickle that cannot be read: {error}") from None
        if foreign := sorted(named - _HARMLESS):
            raise ArtifactRefused(
                f"{name} holds a pickle that names {foreign[0]}: unpickling would run code, so it is not loaded"
            )


def _names(data: bytes) -> set[str]:
    """Every global that a pickle asks for; instructions that build one from values count as unknown."""
    found = set()
    for opcode, argument, _ in pickletools.genops(data):
        if opcode.name in {"GLOBAL", "INST"}:
            found.add(str(argument))
        elif opcode.name in {"STACK_GLOBAL", "EXT1", "EXT2", "EXT4"}:
            found.add("something that it builds itself")
    return found
