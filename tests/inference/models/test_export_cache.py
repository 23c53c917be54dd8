"""Exports: made once, made again when damaged, by one process at a time, with a compiler or without."""

import json
import logging
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch._inductor import config as inductor

from inference.errors import ConfigError
from inference.models.artifact import load_manifest, manifest_path
from inference.models.catalogue import catalogue
from inference.models.export import export_model, weights_sha256
from inference.models.registry import Checkpoint, resolve_model
from inference.models.runtime import TorchRuntime
from inference.models.spec import ModelSpec
from inference.models.tracing import has_cpp_compiler
from inference.models.verification import verify_artifact
from tests.inference.engine.tiny_slides import section, write_slide
from tests.inference.models.conftest import TinyNet, tiny_spec
from tests.inference.models.kinds import make_spec, rna_spec
from tests.inference.store.mounts import fill, tmpfs

Export = Callable[..., Path]


def _stamps(checkpoint: Path) -> list[tuple[int, int]]:
    return [(s.st_ino, s.st_mtime_ns) for s in (checkpoint.stat(), manifest_path(checkpoint).stat())]


def test_an_export_verifies_and_leaves_nothing_but_itself_and_its_lock(export_tiny: Export) -> None:
    checkpoint = export_tiny()
    verify_artifact(checkpoint, load_manifest(checkpoint), "cpu")
    names = {checkpoint.name, manifest_path(checkpoint).name, f".{checkpoint.name}.lock"}
    assert {path.name for path in checkpoint.parent.iterdir()} == names


def test_the_second_export_is_the_first(export_tiny: Export, caplog: pytest.LogCaptureFixture) -> None:
    first = export_tiny()
    stamps = _stamps(first)
    caplog.clear()
    assert export_tiny() == first
    assert _stamps(first) == stamps
    assert caplog.records == []


def test_without_a_compiler_one_line_says_that_the_portable_form_is_slower(
    export_tiny: Export, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoint = export_tiny()
    assert load_manifest(checkpoint).format == "exported-program"
    assert [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING] == [
        "no C++ compiler found: tiny is exported as a portable program, slower to run"
    ]


def test_other_weights_or_another_spec_are_another_checkpoint(export_tiny: Export) -> None:
    assert len({export_tiny(), export_tiny(scale=2.0), export_tiny(version="2")}) == 3


def test_a_change_of_how_results_are_drawn_reaches_the_manifest_without_an_export(export_tiny: Export) -> None:
    first = export_tiny()
    inode = first.stat().st_ino
    assert export_tiny(heatmaps=[{"output": "max_red", "high": 3.0}]) == first
    assert load_manifest(first).spec.heatmaps[0].high == 3.0
    assert first.stat().st_ino == inode


def _flip_a_bit(checkpoint: Path) -> None:
    raw = bytearray(checkpoint.read_bytes())
    raw[len(raw) // 2] ^= 1
    checkpoint.write_bytes(raw)


def _empty_the_manifest(checkpoint: Path) -> None:
    manifest_path(checkpoint).write_text("")


@pytest.mark.parametrize("damage", [_flip_a_bit, _empty_the_manifest])
def test_a_damaged_export_is_made_anew_with_a_warning(
    export_tiny: Export, caplog: pytest.LogCaptureFixture, damage: Callable[[Path], None]
) -> None:
    first = export_tiny()
    damage(first)
    caplog.clear()
    assert export_tiny() == first
    assert any("is exported anew: " in r.getMessage() and r.levelno == logging.WARNING for r in caplog.records)
    verify_artifact(first, load_manifest(first), "cpu")


@pytest.mark.parametrize("lost", ["checkpoint", "manifest"])
def test_half_an_export_as_a_crash_leaves_it_is_completed(export_tiny: Export, lost: str) -> None:
    first = export_tiny()
    (first if lost == "checkpoint" else manifest_path(first)).unlink()
    (first.parent / f".{first.stem}-killed").mkdir()
    verify_artifact(export_tiny(), load_manifest(first), "cpu")
    assert not (first.parent / f".{first.stem}-killed").exists()


def test_a_cache_that_cannot_be_written_to_is_a_config_error(tmp_path: Path, demo_checkpoint: Checkpoint) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"cannot be exported to .*; set SLIDE_MODEL_CACHE"):
        export_model(nn.Identity(), demo_checkpoint.manifest.spec, tmp_path / "file", source_sha256="0" * 64)


def test_an_export_in_a_cache_that_cannot_be_written_to_is_used_all_the_same(export_tiny: Export) -> None:
    first = export_tiny()
    lock = first.parent / f".{first.name}.lock"
    lock.unlink()
    lock.mkdir()  # root may write anywhere, but not into a file that is a folder
    assert export_tiny() == first
    with pytest.raises(ConfigError, match="set SLIDE_MODEL_CACHE"):
        export_tiny(heatmaps=[{"output": "max_red"}])


def test_a_compiler_that_fails_is_a_config_error_that_names_the_way_out(
    tmp_path: Path, demo_checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", "false")
    compiler = inductor.patch({"cpp.cxx": (None, "false")})  # torch read the environment when it was imported
    with (
        compiler,
        pytest.raises(ConfigError, match=r"compiling failed: .*; mend the C\+\+ compiler, or set CXX to nothing"),
    ):
        export_model(_HalfPrecision(), _half_spec(demo_checkpoint.manifest.spec), tmp_path, source_sha256="0" * 64)
    assert [p.suffix for p in tmp_path.iterdir()] == [".lock"]


FULL = "No space left on device; set SLIDE_MODEL_CACHE to a folder with room"


@pytest.mark.parametrize("leave", [0, 4096, 12288])
def test_a_cache_that_is_full_is_a_config_error_and_keeps_nothing_of_the_export(
    no_compiler: None, tmp_path: Path, leave: int
) -> None:
    with tmpfs(tmp_path / "disk", "size=2m") as disk:
        cache = disk / "cache"
        cache.mkdir()
        full = fill(disk, leave)
        with pytest.raises(ConfigError, match=f"models cannot be exported to {cache}: {FULL}"):
            export_model(TinyNet(), tiny_spec(), cache, source_sha256="0" * 64)
        assert [path.suffix for path in cache.iterdir()] in ([], [".lock"])
        full.unlink()
        checkpoint = export_model(TinyNet(), tiny_spec(), cache, source_sha256="0" * 64)
        verify_artifact(checkpoint, load_manifest(checkpoint), "cpu")


def _run_demo(tmp_path: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    write_slide(tmp_path / "slides" / "a.svs", section(2, 3))
    clean = {name: value for name, value in os.environ.items() if name not in ("SLIDE_MODELS", "SLIDE_KEY_SECRET")}
    command = [sys.executable, "-m", "inference.cli", "run", tmp_path / "slides", "--model", "demo"]
    return subprocess.run(
        [*map(str, command), "--out", str(tmp_path / "out")], env=clean | environment, capture_output=True, text=True,
        timeout=100, check=False,
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.skipif(not has_cpp_compiler(), reason="no C++ compiler")
def test_a_full_cache_ends_a_compiled_export_in_one_line_and_not_in_an_abort(tmp_path: Path) -> None:
    with tmpfs(tmp_path / "disk", "size=100k") as disk:
        ended = _run_demo(tmp_path, SLIDE_MODEL_CACHE=str(disk))
        assert (ended.returncode, ended.stdout) == (2, "")
        assert ended.stderr == f"error: models cannot be exported to {disk}: {FULL}\n"
        assert [path.suffix for path in disk.iterdir()] == [".lock"]
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
@pytest.mark.skipif(not has_cpp_compiler(), reason="no C++ compiler")
def test_a_full_temporary_folder_ends_a_compiled_export_in_one_line_that_names_it(tmp_path: Path) -> None:
    with tmpfs(tmp_path / "disk", "size=100k") as disk:
        ended = _run_demo(tmp_path, SLIDE_MODEL_CACHE=str(tmp_path / "cache"), TMPDIR=str(disk))
        assert ended.returncode == 2
        assert re.fullmatch(
            rf"error: compiling failed: no space is left in {disk}\S*; free some, or point TMPDIR to a folder .*\n",
            ended.stderr,
        )
    assert [path.suffix for path in (tmp_path / "cache").iterdir()] == [".lock"]


@pytest.mark.parametrize(
    ("cxx", "found"), [("", False), ("no-such-compiler", False), (sys.executable, True), (f"{sys.executable} -x", True)]
)
def test_the_compiler_looked_for_is_the_one_torch_will_call(
    monkeypatch: pytest.MonkeyPatch, cxx: str, found: bool
) -> None:
    monkeypatch.setenv("CXX", cxx)
    assert has_cpp_compiler() is found


def test_with_nothing_on_the_path_there_is_no_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert not has_cpp_compiler()


class _HalfPrecision(nn.Module):
    weight: Tensor

    def __init__(self, value: float = 1.0) -> None:
        super().__init__()
        self.register_buffer("weight", torch.tensor([value], dtype=torch.bfloat16))
        self.register_buffer("count", torch.tensor(3))

    def forward(self, image: Tensor) -> Tensor:
        return image.to(torch.float32).mean(dim=(2, 3)) * self.weight


def _half_spec(spec: ModelSpec) -> ModelSpec:
    return spec.model_copy(update={"model_name": "half", "embedding_dim": 3, "output_type": "embedding"})


def test_the_digest_of_weights_covers_every_dtype_name_and_bit() -> None:
    digests = {
        weights_sha256(module)
        for module in (_HalfPrecision(), _HalfPrecision(1.0078125), nn.Linear(1, 1), nn.Identity())
    }
    assert len(digests) == 4
    assert weights_sha256(_HalfPrecision()) == weights_sha256(_HalfPrecision())


def test_torchs_remark_on_a_missing_gpu_is_kept_out_and_its_other_warnings_are_not() -> None:
    logger = logging.getLogger("torch.utils.cpp_extension")
    remark, other = (
        logger.makeRecord(logger.name, logging.WARNING, "", 0, text, ("/usr/local",), None)
        for text in ("No CUDA runtime is found, using CUDA_HOME='%s'", "no ninja in %s")
    )
    assert not logger.filter(remark)
    assert logger.filter(other)


EXPORT_DEMO = """
import json, sys
import numpy as np
from inference.models.registry import resolve_model
from inference.models.server_model import load_server_model
print("ready", flush=True)
sys.stdin.readline()
found = resolve_model("demo")
assert resolve_model("demo") == found
server = load_server_model(found)
np.savez(sys.argv[2], *server.runtime.run(np.load(sys.argv[1])))
print(json.dumps([server.runtime.kind, str(found.path)]))
"""

TILES = np.random.default_rng(0).integers(0, 256, (3, 3, 224, 224), dtype=np.uint8)


class _Process:
    """A process that exports the demo model without a compiler in its path, once told to."""

    def __init__(self, folder: Path, name: str) -> None:
        self.outputs = folder / f"{name}.npz"
        command = [sys.executable, "-W", "error", "-c", EXPORT_DEMO, str(folder / "tiles.npy"), str(self.outputs)]
        own = {"PATH": str(folder / "nothing"), "SLIDE_MODEL_CACHE": str(folder / "cache"), "SLIDE_MODELS": ""}
        self.process = subprocess.Popen(
            command, env={k: v for k, v in os.environ.items() if k != "CXX"} | own, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip

    def wait_until_ready(self) -> None:
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "ready\n"

    def finish(self) -> None:
        self.answer, self.said = self.process.communicate("\n", timeout=100)
        assert self.process.returncode == 0, self.said


@pytest.fixture(scope="module")
def two_at_once(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[_Process]]:
    """Two processes that start to export the same model into the same empty cache at the same time."""
    folder = tmp_path_factory.mktemp("at-once")
    np.save(folder / "tiles.npy", TILES)
    both = [_Process(folder, name) for name in ("one", "other")]
    try:
        for one in both:
            one.wait_until_ready()
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(_Process.finish, both))
        yield both
    finally:
        for one in both:
            one.process.kill()
            one.process.wait()


@pytest.mark.slow
def test_two_processes_that_export_at_once_end_with_one_good_checkpoint(two_at_once: list[_Process]) -> None:
    paths = {json.loads(one.answer)[1] for one in two_at_once}
    assert len(paths) == 1
    checkpoint = Path(paths.pop())
    verify_artifact(checkpoint, load_manifest(checkpoint), "cpu")


def test_without_a_compiler_the_demo_model_gives_the_same_numbers_and_one_line_says_so(
    two_at_once: list[_Process], demo_checkpoint: Checkpoint
) -> None:
    assert [json.loads(one.answer)[0] for one in two_at_once] == ["exported-program"] * 2
    said = [line for one in two_at_once for line in one.said.splitlines()]
    assert said == ["no C++ compiler found: demo is exported as a portable program, slower to run"]
    expected = TorchRuntime(demo_checkpoint.path, demo_checkpoint.manifest).run(TILES)
    for one in two_at_once:
        for found, value in zip(np.load(one.outputs).values(), expected, strict=True):
            np.testing.assert_allclose(found, value, atol=1e-5)


def test_without_a_digest_of_its_code_a_module_is_told_by_what_it_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", "")

    class Scaled(torch.nn.Module):
        def __init__(self, by: float) -> None:
            super().__init__()
            self.by = by

        def forward(self, tiles: torch.Tensor) -> torch.Tensor:
            return tiles.float().mean(dim=(2, 3)) * self.by

    spec = make_spec("scaled", output_type="embedding", prediction_names=())
    first = export_model(Scaled(1.0), spec, tmp_path)
    assert export_model(Scaled(1.0), spec, tmp_path) == first
    other = export_model(Scaled(2.0), spec, tmp_path)
    assert other != first
    found = resolve_model("scaled", cache=tmp_path)
    assert found.path == other, "the newest is found by name"
    assert [entry.name for entry in catalogue(tmp_path) if entry.checkpoints] == ["scaled"]


def test_a_network_that_does_not_take_the_specs_inputs_is_refused_with_them(tmp_path: Path) -> None:
    class Alone(torch.nn.Module):
        def forward(self, tiles: torch.Tensor) -> torch.Tensor:
            return tiles.float().mean(dim=(2, 3))

    with pytest.raises(ConfigError, match=r"rna cannot be traced as forward\(tiles, bulk_rna, bulk_rna_present\)"):
        export_model(Alone(), rna_spec(), tmp_path)
