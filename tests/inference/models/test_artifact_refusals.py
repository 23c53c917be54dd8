"""A checkpoint that is not what its manifest pins is refused before any loader sees it."""

import io
import json
import os
import pickle
import subprocess
import sys
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from inference.errors import ArtifactRefused, ConfigError, UnknownModel
from inference.models.archive import _harmless_expression
from inference.models.artifact import load_manifest, manifest_path
from inference.models.registry import Checkpoint
from inference.models.regular_files import hash_regular_file
from inference.models.runtime import TorchRuntime
from inference.models.verification import cpu_features
from tests.inference.store.mounts import fill, tmpfs


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The paths that torch was asked to load."""
    paths: list[str] = []

    def spy(function: Callable[..., object]) -> Callable[..., object]:
        def call(path: str, *args: object, **kwargs: object) -> object:
            paths.append(path)
            return function(path, *args, **kwargs)

        return call

    monkeypatch.setattr(torch.export, "load", spy(torch.export.load))
    monkeypatch.setattr(torch._C._aoti, "AOTIModelPackageLoader", spy(torch._C._aoti.AOTIModelPackageLoader))
    return paths


def _load(path: Path, device: str = "cpu") -> TorchRuntime:
    return TorchRuntime(path, load_manifest(path), device)


def _edit(path: Path, **changes: object) -> None:
    fields = json.loads(manifest_path(path).read_text())
    manifest_path(path).write_text(json.dumps(fields | changes))


def _flip(path: Path, at: int) -> None:
    raw = bytearray(path.read_bytes())
    raw[at] ^= 1
    path.write_bytes(raw)


def _rewrite(path: Path, change: dict[str, bytes] | None = None, more: dict[str, bytes] | None = None) -> None:
    """Pack a `.pt2` anew with members changed (by their end) or added, and pin the result: bytes are then no excuse."""
    with zipfile.ZipFile(path) as archive:
        members = {info.filename: archive.read(info) for info in archive.infolist()}
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in members.items():
            new = next((value for end, value in (change or {}).items() if name.endswith(end)), content)
            archive.writestr(name, new)
        for name, content in (more or {}).items():
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # zipfile's own remark on doubled names
                archive.writestr(name, content)
    size, digest = hash_regular_file(path)
    _edit(path, size=size, sha256=digest)


def test_a_checkpoint_that_matches_its_manifest_runs(tiny: Checkpoint, loaded: list[str]) -> None:
    tile = np.full((1, 3, 8, 8), 9, np.uint8)
    embedding, prediction = _load(tiny.path).run(tile)
    assert embedding.tolist() == [[9.0, 9.0, 9.0]]
    assert prediction.tolist() == [[9.0, 9.0]]
    assert len(loaded) == 1


@pytest.mark.parametrize("where", [0, 0.5, -1], ids=["first", "middle", "last"])
def test_a_flipped_bit_anywhere_is_refused_before_the_loader(tiny: Checkpoint, loaded: list[str], where: float) -> None:
    at = int(where * tiny.manifest.size) if where >= 0 else tiny.manifest.size - 1
    _flip(tiny.path, at)
    with pytest.raises(ArtifactRefused, match=r"tiny\.pt2 is not the file its manifest pins .* export it again"):
        _load(tiny.path)
    assert loaded == []
    _flip(tiny.path, at)
    assert _load(tiny.path).kind == "exported-program"


def test_a_truncated_checkpoint_is_refused_with_both_sizes(tiny: Checkpoint, loaded: list[str]) -> None:
    os.truncate(tiny.path, 100)
    with pytest.raises(ArtifactRefused, match=rf"100 bytes, .* expected {tiny.manifest.size},"):
        _load(tiny.path)
    assert loaded == []


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"torch_version": "2.9.0"}, "was exported by torch 2.9.0, this is "),
        ({"arch": "sparc"}, "is compiled for sparc, this machine is "),
        ({"cpu_features": ["avx2048"]}, "is compiled for a processor with avx2048, which this one lacks"),
        ({"sha256": "f" * 64}, "is not the file its manifest pins"),
    ],
)
def test_a_compiled_checkpoint_of_another_machine_is_refused_with_the_remedy(
    tiny: Checkpoint, loaded: list[str], changes: dict[str, object], says: str
) -> None:
    _edit(tiny.path, format="aotinductor", **changes)
    with pytest.raises(ArtifactRefused, match=rf"{says}.*; export it again: slide-inference export tiny"):
        _load(tiny.path)
    assert loaded == []


def test_a_checkpoint_compiled_for_another_device_says_where_it_runs(tiny: Checkpoint, loaded: list[str]) -> None:
    # Exporting again would give the same: the remedy is the device.
    _edit(tiny.path, format="aotinductor", device="cuda")
    with pytest.raises(
        ArtifactRefused, match=r"is compiled for cuda, not cpu; run it on cuda, or export it with --device cpu"
    ):
        _load(tiny.path)
    assert loaded == []


def test_a_portable_checkpoint_runs_whatever_the_processor_it_was_made_on(tiny: Checkpoint) -> None:
    _edit(tiny.path, arch="sparc", cpu_features=["avx2048"])
    assert _load(tiny.path).kind == "exported-program"


def test_a_compiled_checkpoint_is_pinned_to_the_instruction_sets_it_may_use(demo_checkpoint: Checkpoint) -> None:
    compiled = demo_checkpoint.manifest.format == "aotinductor"
    assert demo_checkpoint.manifest.cpu_features == (cpu_features() if compiled else ())


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "is not an artifact manifest"),
        ("[]", "is not an artifact manifest"),
        ("{}", "is not an artifact manifest: .*sha256|file: Field required"),
        ("[" * 100_000, "is not an artifact manifest"),
        ('{"schema_version": 3, "new": 1}', "has schema 3, this version reads 2: upgrade"),
        (" " * (16 << 20) + "{}", "over 16777216 bytes"),
    ],
    ids=["empty", "list", "no fields", "deep", "newer schema", "huge"],
)
def test_a_manifest_that_cannot_be_used_is_refused(tiny: Checkpoint, loaded: list[str], text: str, says: str) -> None:
    manifest_path(tiny.path).write_text(text)
    with pytest.raises(ArtifactRefused, match=says):
        _load(tiny.path)
    assert loaded == []


def test_a_manifest_that_is_not_text_is_refused(tiny: Checkpoint) -> None:
    manifest_path(tiny.path).write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ArtifactRefused, match="is not an artifact manifest"):
        load_manifest(tiny.path)


def test_a_checkpoint_without_a_manifest_is_refused_because_it_is_code(tiny: Checkpoint) -> None:
    manifest_path(tiny.path).unlink()
    with pytest.raises(ArtifactRefused, match=r"has no manifest tiny\.pt2\.json: a \.pt2 is code"):
        load_manifest(tiny.path)


def test_a_missing_checkpoint_is_an_unknown_model(tmp_path: Path) -> None:
    with pytest.raises(UnknownModel, match="no checkpoint at"):
        load_manifest(tmp_path / "none.pt2")


def _symlink(path: Path) -> None:
    path.rename(path.with_suffix(".real"))
    path.symlink_to(path.with_suffix(".real"))


def _hard_link(path: Path) -> None:
    path.with_suffix(".real").hardlink_to(path)


def _pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def _folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize("replace", [_symlink, _hard_link, _pipe, _folder])
@pytest.mark.parametrize("of_manifest", [False, True], ids=["checkpoint", "manifest"])
def test_what_is_not_a_regular_file_with_one_name_is_refused_without_waiting(
    tiny: Checkpoint, loaded: list[str], replace: Callable[[Path], None], of_manifest: bool
) -> None:
    path = manifest_path(tiny.path) if of_manifest else tiny.path
    replace(path)
    with pytest.raises(ArtifactRefused, match="regular file"):
        _load(tiny.path)
    if not of_manifest:
        with pytest.raises(ArtifactRefused, match="regular file"):
            TorchRuntime(tiny.path, tiny.manifest)
    assert loaded == []


def test_what_is_loaded_is_what_was_hashed_even_if_the_file_is_swapped_in_between(
    tiny: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    load = torch.export.load

    def swap_then_load(path: str) -> object:
        tiny.path.write_bytes(b"something else")
        assert hash_regular_file(Path(path)) == (tiny.manifest.size, tiny.manifest.sha256)
        return load(path)

    monkeypatch.setattr(torch.export, "load", swap_then_load)
    assert TorchRuntime(tiny.path, tiny.manifest).run(np.zeros((1, 3, 8, 8), np.uint8))[0].tolist() == [[0.0] * 3]


def test_no_copy_is_left_behind(tiny: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = tmp_path / "temporary"
    place.mkdir()
    monkeypatch.setenv("TMPDIR", str(place))
    _load(tiny.path)
    _flip(tiny.path, 10)
    with pytest.raises(ArtifactRefused):
        _load(tiny.path)
    assert list(place.iterdir()) == []


@pytest.mark.parametrize("leave", [0, 1 << 20, 3 << 20])
def test_a_temporary_folder_without_room_is_named_with_what_is_needed_and_left_empty(
    demo: Checkpoint, loaded: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, leave: int
) -> None:
    with tmpfs(tmp_path / "disk", "size=8m") as disk:
        monkeypatch.setenv("TMPDIR", str(disk))
        full = fill(disk, leave)
        with pytest.raises(ConfigError, match=rf"{disk}.*; point TMPDIR to a folder with room") as caught:
            _load(demo.path)
        assert "demo.pt2" in caught.value.message
        assert loaded == []
        assert list(disk.iterdir()) == [full]
        full.unlink()
        assert _load(demo.path).kind == demo.manifest.format


def test_a_temporary_folder_that_does_not_exist_is_named(tiny: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", "/nowhere/tmp")
    with pytest.raises(ConfigError, match=r"tiny\.pt2 cannot be copied to /nowhere/tmp: No such file or directory"):
        _load(tiny.path)


def test_a_pinned_file_that_no_loader_understands_is_refused(tiny: Checkpoint, loaded: list[str]) -> None:
    tiny.path.write_bytes(b"not a package")
    size, digest = hash_regular_file(tiny.path)
    _edit(tiny.path, size=size, sha256=digest)
    with pytest.raises(ArtifactRefused, match=r"tiny\.pt2 is no \.pt2 archive: .*; export it again"):
        _load(tiny.path)
    assert loaded == []


def test_a_pinned_archive_that_the_loader_does_not_understand_is_refused(tiny: Checkpoint) -> None:
    _rewrite(tiny.path, change={"models/model.json": b"{}"})
    with pytest.raises(ArtifactRefused, match=r"tiny\.pt2 does not load: .*; export it again"):
        _load(tiny.path)


@pytest.mark.parametrize("device", ["gpu0", "", "cuda:99", "meta"])
def test_a_device_that_is_not_there_is_a_config_error_before_the_loader(
    tiny: Checkpoint, loaded: list[str], device: str
) -> None:
    with pytest.raises(ConfigError, match=r"is no device: give cpu|this machine has no device"):
        _load(tiny.path, device)
    assert loaded == []


def _torch_file(value: object) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


class _Boom:
    def __init__(self, proof: Path) -> None:
        self.proof = proof

    def __reduce__(self) -> tuple[object, ...]:
        return (os.mkdir, (str(self.proof),))


@pytest.mark.parametrize("wrap", [_torch_file, pickle.dumps], ids=["torch file", "bare pickle"])
def test_a_pickle_in_a_package_is_refused_before_anything_in_it_runs(
    tiny: Checkpoint, loaded: list[str], tmp_path: Path, wrap: Callable[[object], bytes]
) -> None:
    proof = tmp_path / "ran"
    _rewrite(tiny.path, change={"sample_inputs/model.pt": wrap(_Boom(proof))})
    with pytest.raises(ArtifactRefused, match=r"tiny\.pt2 holds a (bare )?pickle"):
        _load(tiny.path)
    assert loaded == []
    assert not proof.exists()


@pytest.mark.slow
def test_the_loader_itself_would_have_run_that_pickle(tiny: Checkpoint, tmp_path: Path) -> None:
    proof = tmp_path / "ran"
    _rewrite(tiny.path, change={"sample_inputs/model.pt": _torch_file(_Boom(proof))})
    command = [sys.executable, "-c", "import sys, torch; torch.export.load(sys.argv[1])", str(tiny.path)]
    subprocess.run(command, capture_output=True, check=False, timeout=100)
    assert proof.exists()


def test_the_inputs_that_other_exports_keep_are_no_reason_to_refuse_them(tiny: Checkpoint) -> None:
    kept = (torch.zeros((2, 3, 8, 8), dtype=torch.uint8),)
    _rewrite(tiny.path, change={"sample_inputs/model.pt": _torch_file((kept, {}))})
    assert _load(tiny.path).kind == "exported-program"


@pytest.mark.parametrize("value", [b"true", b"1", b'"yes"', b"[0]", b"null"])
def test_weights_stored_as_a_pickle_are_refused_before_the_loader(
    tiny: Checkpoint, loaded: list[str], value: bytes
) -> None:
    config = b'{"config": {"scale": {"use_pickle": ' + value + b"}}}"
    _rewrite(tiny.path, change={"model_weights_config.json": config})
    with pytest.raises(ArtifactRefused, match="holds weights as a pickle"):
        _load(tiny.path)
    assert loaded == []


def test_a_key_given_twice_is_refused_for_readers_differ_in_which_they_take(
    tiny: Checkpoint, loaded: list[str]
) -> None:
    config = b'{"config": {"scale": {"use_pickle": true, "use_pickle": false}}}'
    _rewrite(tiny.path, change={"model_weights_config.json": config})
    with pytest.raises(ArtifactRefused, match="a key is given twice"):
        _load(tiny.path)
    assert loaded == []


def test_a_pickle_with_an_archive_behind_it_is_refused(tiny: Checkpoint, loaded: list[str]) -> None:
    both = pickle.dumps(print) + _torch_file((torch.zeros(1),))
    _rewrite(tiny.path, change={"sample_inputs/model.pt": both})
    with pytest.raises(ArtifactRefused, match="holds a bare pickle"):
        _load(tiny.path)
    assert loaded == []


@pytest.mark.parametrize(
    ("text", "harmless"),
    [
        ("Symbol('s0', positive=True, integer=True)", True),
        ("2*s0 + Mod(Integer(3), Symbol('s0'))", True),
        ("__import__('os').system('true')", False),
        ("exec('x')", False),
        ("Symbol.__class__", False),
        ("Symbol('s0').func", False),
        ("Symbol('a b')", False),
        ("open('passwd')", False),
        ("[x for x in (1,)]", False),
    ],
)
def test_symbolic_sizes_call_nothing_but_classes(text: str, harmless: bool) -> None:
    assert _harmless_expression(text) is harmless


@pytest.mark.parametrize(
    ("member", "says"),
    [
        ("../../escaped.so", "leads out of it"),
        ("/escaped.so", "leads out of it"),
        ("archive/data/..\\escaped.so", "leads out of it"),
        ("C:escaped.so", "leads out of it"),
        ("archive/data/aotinductor/../../../escaped.so", "leads out of it"),
        ("archive/data/constants/custom_obj_0", "is no part of a .pt2"),
        ("archive/extra/code.py", "is no part of a .pt2"),
        ("archive/byteorder", "twice"),
    ],
)
def test_a_member_that_leads_out_of_the_package_is_refused_before_the_loader(
    tiny: Checkpoint, loaded: list[str], member: str, says: str
) -> None:
    with zipfile.ZipFile(tiny.path) as archive:
        root = archive.namelist()[0].split("/")[0]
    _rewrite(tiny.path, more={member.replace("archive/", f"{root}/", 1): b"x"})
    with pytest.raises(ArtifactRefused, match=rf"tiny\.pt2 has (a|the) member .*{says}"):
        _load(tiny.path)
    assert loaded == []


def test_a_link_in_a_package_is_refused_before_the_loader(tiny: Checkpoint, loaded: list[str]) -> None:
    link = zipfile.ZipInfo("archive/byteorder2")
    link.external_attr = 0o120777 << 16
    with zipfile.ZipFile(tiny.path, "a") as archive:
        archive.writestr(link, "/etc/passwd")
    size, digest = hash_regular_file(tiny.path)
    _edit(tiny.path, size=size, sha256=digest)
    with pytest.raises(ArtifactRefused, match="no plain file"):
        _load(tiny.path)
    assert loaded == []


def test_a_package_that_would_unpack_to_much_more_than_it_is_is_refused(tiny: Checkpoint, loaded: list[str]) -> None:
    with zipfile.ZipFile(tiny.path) as archive:
        root = archive.namelist()[0].split("/")[0]
    with zipfile.ZipFile(tiny.path, "a", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(f"{root}/data/weights/weight_99", bytes(64 << 20))
    size, digest = hash_regular_file(tiny.path)
    _edit(tiny.path, size=size, sha256=digest)
    with pytest.raises(ArtifactRefused, match="would unpack to"):
        _load(tiny.path)
    assert loaded == []


def test_a_manifest_of_the_first_schema_is_read(tiny: Checkpoint) -> None:
    fields = json.loads(manifest_path(tiny.path).read_text())
    first = {"schema_version": 1} | {name: fields[name] for name in FIRST_SCHEMA}
    manifest_path(tiny.path).write_text(json.dumps(first))
    assert _load(tiny.path).kind == "exported-program"


FIRST_SCHEMA = (
    "file", "size", "sha256", "format", "torch_version", "arch", "cpu_features", "device", "max_batch",
    "weights_sha256", "source_sha256", "spec",
)  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"torch_version": None}, "torch_version is missing"),
        ({"data_files": [{"file": "w.data", "size": 1, "sha256": "0" * 64}]}, "data_files are for onnx"),
        ({"format": "onnx", "data_files": [{"file": "../w.data", "size": 1, "sha256": "0" * 64}]}, "data_files.0.file"),
        ({"format": "onnx", "data_files": [{"file": "Tiny.pt2", "size": 1, "sha256": "0" * 64}]}, "pinned twice"),
        ({"kind": "slide aggregator"}, "is a slide aggregator, where a model of tiles is needed"),
    ],
)
def test_a_manifest_that_contradicts_itself_is_refused(tiny: Checkpoint, changes: dict[str, object], says: str) -> None:
    _edit(tiny.path, **({"file": "tiny.pt2"} | changes))
    with pytest.raises(ArtifactRefused, match=says):
        load_manifest(tiny.path)
