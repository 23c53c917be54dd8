"""`import`: graphs of others, tried with a batch and pinned."""

import logging
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper
from PIL import Image
from torch import nn

from inference.errors import ArtifactRefused, BadRequest, ConfigError
from inference.models.artifact import load_manifest
from inference.models.conversion import Exported
from inference.models.foreign import import_graph
from inference.models.registry import Checkpoint
from inference.models.runtime import open_runtime
from inference.models.segmentation import SegmentationServerModel
from inference.models.server_model import load_server_model
from inference.models.spec import ModelSpec
from inference.models.tracing import trace

CLASSES = (
    "adipose", "background", "debris", "lymphocytes", "mucus", "smooth_muscle", "normal_mucosa", "stroma",
    "adenocarcinoma",
)  # fmt: skip


def a_spec(**changes: object) -> ModelSpec:
    fields: dict[str, object] = {
        "model_name": "theirs", "version": "1", "weights_source": "somewhere", "license": "MIT",
        "tile_spec": {"size": 8, "stride": 8, "resolution": 1.0}, "architecture": "theirs", "embedding_dim": 3,
        "graph": {"input_name": "input", "output_names": ["mean"], "dtype": "float32"},
    }  # fmt: skip
    return ModelSpec.model_validate(fields | changes)


UNET = {
    "model_name": "tissue-unet", "architecture": "unet", "tile_spec": {"size": 500, "stride": 500, "resolution": 8.0},
    "embedding_dim": None, "output_type": "prediction", "prediction_names": ["tissue"],
    "mask": {"size": 500, "threshold": 0.6},
    "graph": {"input_name": "input", "output_names": ["cropping2d_12"], "layout": "NHWC", "dtype": "float32"},
}  # fmt: skip

CAPRICORN = {
    "model_name": "capricorn", "architecture": "densenet121", "embedding_dim": None, "output_type": "prediction",
    "tile_spec": {"size": 224, "stride": 224, "resolution": 0.5}, "prediction_names": CLASSES,
    "graph": {"input_name": "input", "output_names": ["probs"], "dtype": "float32"},
}  # fmt: skip

SHELL = {
    "model_name": "shell", "architecture": "unet", "tile_spec": {"size": 256, "stride": 256, "resolution": 1.0},
    "embedding_dim": None, "output_type": "prediction", "prediction_names": ["lumen", "epithelium", "stroma"],
    "mask": {"size": 256, "values": "sigmoid_logit"},
    "graph": {"input_name": "input", "output_names": ["logits"], "dtype": "float32"},
}  # fmt: skip


def mean_graph(path: Path, batch: int | str = "n", scale: float = 1.0, channels: int = 3) -> Path:
    """input (n, 3, 8, 8) float32 -> mean (n, 3) over each channel, times a constant."""
    shape = [batch, channels, 8, 8]
    graph = helper.make_graph(
        [
            helper.make_node("ReduceMean", ["input", "axes"], ["plain"], keepdims=0),
            helper.make_node("Mul", ["plain", "scale"], ["mean"]),
        ],
        "mean",
        [helper.make_tensor_value_info("input", TensorProto.FLOAT, shape)],
        [helper.make_tensor_value_info("mean", TensorProto.FLOAT, [batch, channels])],
        [
            helper.make_tensor("axes", TensorProto.INT64, [2], [2, 3]),
            numpy_helper.from_array(np.array([scale], np.float32), "scale"),
        ],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8), path)
    return path


def tile_of(values: tuple[int, int, int]) -> NDArray[np.uint8]:
    return np.broadcast_to(np.array(values, np.uint8)[:, None, None], (3, 8, 8))[None].copy()


@pytest.fixture
def imported(tmp_path: Path) -> Callable[..., Exported]:
    def run(source: Path, **changes: object) -> Exported:
        return import_graph(source, a_spec(**changes), tmp_path / "models")

    return run


def test_a_graph_gets_pixels_as_its_spec_declares_them(imported: Callable[..., Exported], tmp_path: Path) -> None:
    made = imported(mean_graph(tmp_path / "g.onnx"), mean=(0.5, 0.4, 0.3), std=(0.1, 0.2, 0.25))
    (found,) = open_runtime(made.path, made.manifest).run(tile_of((255, 0, 51)))
    np.testing.assert_allclose(found, [[5.0, -2.0, -0.4]], atol=1e-6)


def test_blue_first_means_that_the_channels_are_turned_round(imported: Callable[..., Exported], tmp_path: Path) -> None:
    made = imported(mean_graph(tmp_path / "g.onnx"), color_space="BGR")
    (found,) = open_runtime(made.path, made.manifest).run(tile_of((255, 0, 51)))
    np.testing.assert_allclose(found, [[0.2, 0.0, 1.0]], atol=1e-6)


def test_what_is_imported_is_a_copy_that_is_pinned_and_found_by_name(
    imported: Callable[..., Exported], tmp_path: Path
) -> None:
    source = mean_graph(tmp_path / "g.onnx")
    made = imported(source)
    assert made.path == tmp_path / "models" / "theirs" / "theirs.onnx"
    assert made.manifest.golden is not None
    assert made.manifest.torch_version is None
    source.unlink()
    model = load_server_model(Checkpoint(made.path, load_manifest(made.path)))
    assert model.get_metadata().runtime == "onnx"
    made.path.write_bytes(mean_graph(tmp_path / "h.onnx", scale=2.0).read_bytes())
    with pytest.raises(ArtifactRefused, match=r"theirs\.onnx is not the file its manifest pins"):
        load_server_model(Checkpoint(made.path, load_manifest(made.path)))


def test_another_graph_of_the_same_name_takes_its_place(imported: Callable[..., Exported], tmp_path: Path) -> None:
    first = imported(mean_graph(tmp_path / "g.onnx"))
    assert imported(mean_graph(tmp_path / "g.onnx")) == first
    second = imported(mean_graph(tmp_path / "g.onnx", scale=2.0))
    assert second.path == first.path
    (found,) = open_runtime(second.path, second.manifest).run(tile_of((255, 0, 0)))
    np.testing.assert_allclose(found, [[2.0, 0.0, 0.0]], atol=1e-6)


def test_a_graph_for_one_tile_at_a_time_is_told_apart(
    imported: Callable[..., Exported], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made = imported(mean_graph(tmp_path / "g.onnx", batch=1))
    assert made.manifest.max_batch == 1
    assert any("takes one tile at a time" in record.getMessage() for record in caplog.records)
    runtime = open_runtime(made.path, made.manifest)
    with pytest.raises(BadRequest, match="the graph takes 1 to 1 "):
        runtime.run(np.repeat(tile_of((1, 2, 3)), 2, 0))


def _mixing(path: Path) -> Path:
    """Subtracts the batch's own mean: a tile's result depends on its neighbours."""
    model = onnx.load(mean_graph(path))
    model.graph.node[1].CopyFrom(helper.make_node("Sub", ["plain", "all"], ["mean"]))
    model.graph.node.insert(1, helper.make_node("ReduceMean", ["plain", "rows"], ["all"], keepdims=1))
    model.graph.initializer.append(helper.make_tensor("rows", TensorProto.INT64, [1], [0]))
    onnx.save(model, path)
    return path


@pytest.mark.parametrize(
    ("make", "changes", "says"),
    [
        (mean_graph, {"embedding_dim": 4}, r"returns embedding of \(3,\) for 1 tiles, its spec declares \(4,\)"),
        (mean_graph, {"tile_spec": {"size": 9, "stride": 9, "resolution": 1.0}}, r"does not run a tile of \(3, 9, 9\)"),
        (lambda path: mean_graph(path, channels=4), {}, r"does not run a tile of \(3, 8, 8\)"),
        (lambda path: mean_graph(path, batch=7), {}, r"does not run a tile of \(3, 8, 8\)"),
        (lambda path: mean_graph(path, scale=float("nan")), {}, "returns NaN or infinity as embedding"),
        (_mixing, {}, "gives a tile another result alone than in a batch"),
        (mean_graph, {"graph": {"input_name": "x", "output_names": ["mean"], "dtype": "float32"}},
         "takes input and returns mean; its spec names x and mean"),
        (mean_graph, {"graph": {"input_name": "input", "output_names": ["y"], "dtype": "float32"}},
         "its spec names input and y"),
        (mean_graph, {"graph": {"input_name": "input", "output_names": ["mean"], "dtype": "uint8"}},
         "does not run a tile of"),
    ],
    ids=["width", "size", "channels", "batch", "nan", "mixing", "input", "output", "uint8"],
)  # fmt: skip
def test_a_graph_that_is_not_what_its_spec_says_is_refused_and_leaves_nothing(
    imported: Callable[..., Exported], tmp_path: Path, make: Callable[[Path], Path], changes: dict[str, object],
    says: str,
) -> None:  # fmt: skip
    with pytest.raises(ArtifactRefused, match=says) as raised:
        imported(make(tmp_path / "g.onnx"), **changes)
    assert "\n" not in raised.value.message
    assert not [path for path in (tmp_path / "models").rglob("*.*") if path.suffix in {".onnx", ".json", ".npz"}]


def test_a_graph_without_names_in_its_spec_is_told_which_it_has(
    imported: Callable[..., Exported], tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=r"needs graph: .* takes input tensor\(float\) .* and returns mean"):
        imported(mean_graph(tmp_path / "g.onnx"), graph=None)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"color_space": "HED"}, "statistics of the whole slide"),
        ({"stain_normalization": "macenko"}, "statistics of the whole slide"),
        ({"resize": 16}, "resize and crop are done in graphs exported here"),
        ({"mean": None}, "its spec has no mean and std"),
    ],
)
def test_a_spec_that_asks_for_more_than_a_graph_of_tiles_can_have_is_refused(
    imported: Callable[..., Exported], tmp_path: Path, changes: dict[str, object], says: str
) -> None:
    with pytest.raises((ConfigError, ArtifactRefused), match=says):
        imported(mean_graph(tmp_path / "g.onnx"), **changes)


def test_what_is_no_graph_is_refused(imported: Callable[..., Exported], tmp_path: Path) -> None:
    (tmp_path / "g.onnx").write_bytes(b"nothing")
    with pytest.raises(ArtifactRefused, match=r"g\.onnx is no ONNX graph"):
        imported(tmp_path / "g.onnx")
    with pytest.raises(ConfigError, match=r"g\.txt is no \.onnx or \.pt2"):
        imported(tmp_path / "g.txt")


class _Mean(nn.Module):
    def forward(self, image: torch.Tensor) -> torch.Tensor:
        return image.to(torch.float32).mean(dim=(2, 3))


def test_a_foreign_pt2_is_code_and_says_so_and_holds_no_pickle(
    imported: Callable[..., Exported], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    program = trace(_Mean(), a_spec(graph=None), "cpu")
    torch.export.save(program, tmp_path / "g.pt2")
    made = imported(tmp_path / "g.pt2", graph=None)
    assert made.manifest.format == "exported-program"
    assert [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING] == [
        "g.pt2 is code, and runs with your rights: import only what you trust"
    ]
    (found,) = open_runtime(made.path, made.manifest).run(tile_of((1, 2, 3)))
    assert found.tolist() == [[1.0, 2.0, 3.0]]


# The graphs in shared data.


def _thumbnail(shared_data: Path, size: int) -> NDArray[np.uint8]:
    import openslide

    with openslide.OpenSlide(shared_data / "slides" / "CMU-1-Small-Region.svs") as slide:
        picture = slide.read_region((0, 0), 0, slide.dimensions).convert("RGB").resize((size, size))
    return np.asarray(picture, np.uint8)


@pytest.mark.slow
def test_the_tissue_unet_finds_the_tissue_of_a_thumbnail(shared_data: Path, tmp_path: Path) -> None:
    source = shared_data / "models" / "superfast-tissue" / "best_unet.onnx"
    made = import_graph(source, a_spec(**UNET), tmp_path)
    model = load_server_model(Checkpoint(made.path, made.manifest))
    assert isinstance(model, SegmentationServerModel)
    skin = _thumbnail(shared_data, 500)
    tiles = [skin, np.full_like(skin, 255), np.zeros_like(skin)]
    found = model.forward_tiles([model.prepare_tile(tile) for tile in tiles], ["prediction"] * 3)
    shares = [float(output.predicted().mean()) for output in found]  # type: ignore[union-attr]
    assert shares == pytest.approx([0.38, 0, 0], abs=0.01)


@pytest.mark.slow
def test_capricorn_knows_gland_from_fat_and_takes_no_uint8(shared_data: Path, tmp_path: Path) -> None:
    source = shared_data / "models" / "capricorn" / "capricorn_pathmnist9.onnx"
    made = import_graph(source, a_spec(**CAPRICORN), tmp_path)
    runtime = open_runtime(made.path, made.manifest)
    images = shared_data / "images"
    batch = np.stack([
        np.asarray(Image.open(images / name).convert("RGB").crop((100, 100, 324, 324))).transpose(2, 0, 1)
        for name in ("histolab-high-nuclei-score-level0.png", "histolab-low-nuclei-score-level0.png", "skimage-ihc.png")
    ])  # fmt: skip
    (probabilities,) = runtime.run(batch)
    np.testing.assert_allclose(probabilities.sum(1), 1, atol=1e-5)
    assert [CLASSES[probabilities[i].argmax()] for i in (0, 2)] == ["adenocarcinoma", "adenocarcinoma"]
    assert {"mucus", "adipose"} == {CLASSES[i] for i in np.argsort(probabilities[1])[-2:]}
    for row, tile in zip(probabilities, batch, strict=True):
        np.testing.assert_allclose(runtime.run(tile[None])[0][0], row, atol=1e-6)
    spec = a_spec(**(CAPRICORN | {"graph": {**CAPRICORN["graph"], "dtype": "uint8"}}))  # type: ignore[dict-item]
    with pytest.raises(ArtifactRefused, match="does not run a tile"):
        import_graph(source, spec, tmp_path / "uint8")


@pytest.mark.slow
def test_shell_comes_with_its_external_data_and_is_fed_stain_planes_directly(shared_data: Path, tmp_path: Path) -> None:
    source = shared_data / "models" / "lavlab-shell" / "model_v1.onnx"
    with pytest.raises(ConfigError, match="statistics of the whole slide"):
        import_graph(source, a_spec(**SHELL, color_space="HED", stain_normalization="macenko"), tmp_path)
    made = import_graph(source, a_spec(**SHELL), tmp_path)
    assert [(p.file, p.sha256[:12]) for p in made.manifest.data_files] == [("model_v1.onnx.data", "4aaf2db842c8")]
    assert {path.name for path in made.path.parent.iterdir()} >= {"shell.onnx", "model_v1.onnx.data"}
    planes = np.random.default_rng(0).integers(0, 256, (2, 3, 256, 256), dtype=np.uint8)
    (logits,) = open_runtime(made.path, made.manifest).run(planes)
    assert logits.shape == (2, 3, 256, 256)
    assert np.isfinite(logits).all()
    odd = a_spec(**(SHELL | {"tile_spec": {"size": 100, "stride": 100, "resolution": 1.0}, "mask": {"size": 100}}))
    with pytest.raises(ArtifactRefused, match=r"does not run a tile of \(3, 100, 100\)"):
        import_graph(source, odd, tmp_path / "odd")


def test_external_data_that_changed_or_went_away_is_refused(imported: Callable[..., Exported], tmp_path: Path) -> None:
    source = outside(mean_graph(tmp_path / "g.onnx"))
    made = imported(source)
    assert [pinned.file for pinned in made.manifest.data_files] == ["w.data"]
    data = made.path.with_name("w.data")
    kept = data.read_bytes()
    data.write_bytes(bytes([kept[0] ^ 1]) + kept[1:])
    with pytest.raises(ArtifactRefused, match=r"w\.data is not the file that the manifest of theirs\.onnx pins"):
        open_runtime(made.path, made.manifest)
    data.unlink()
    data.symlink_to(source.with_name("w.data"))
    with pytest.raises(ArtifactRefused, match="not a link"):
        open_runtime(made.path, made.manifest)
    data.unlink()
    with pytest.raises(ArtifactRefused, match=r"comes with w\.data, which is not there"):
        open_runtime(made.path, made.manifest)
    data.write_bytes(kept)
    assert open_runtime(made.path, made.manifest).kind == "onnx"


def outside(path: Path) -> Path:
    """The graph with its tensors in `w.data` beside it."""
    onnx.save(onnx.load(path), path, save_as_external_data=True, location="w.data", size_threshold=0)
    return path


def _told(**changes: str) -> Callable[[onnx.TensorProto], None]:
    def change(tensor: onnx.TensorProto) -> None:
        told = {entry.key: entry.value for entry in tensor.external_data} | changes
        del tensor.external_data[:]
        for key, value in told.items():
            tensor.external_data.add(key=key, value=value)

    return change


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (_told(location="../w.data"), "only files in the graph's own folder are read"),
        (_told(location="/etc/passwd"), "only files in the graph's own folder are read"),
        (_told(location="sub/w.data"), "only files in the graph's own folder are read"),
        (_told(location=".hidden"), "only files in the graph's own folder are read"),
        (_told(location=""), "only files in the graph's own folder are read"),
        (_told(location="gone.data"), "no regular file there"),
        (_told(location="link.data"), "no regular file there"),
        (_told(offset="-8"), "ends at -8"),
        (_told(length="99999"), "which has"),
        (_told(basepath="/etc"), "only .* are known"),
    ],
    ids=["up", "absolute", "folder", "hidden", "none", "gone", "link", "negative", "too long", "unknown key"],
)
@pytest.mark.parametrize("inside", [False, True], ids=["initializer", "subgraph"])
def test_tensors_outside_the_graphs_own_folder_or_file_are_refused(
    imported: Callable[..., Exported],
    tmp_path: Path,
    change: Callable[[onnx.TensorProto], None],
    says: str,
    inside: bool,
) -> None:
    source = outside(mean_graph(tmp_path / "g.onnx"))
    (tmp_path / "link.data").symlink_to(tmp_path / "w.data")
    model = onnx.load(source, load_external_data=False)
    tensor = model.graph.initializer[-1]
    change(tensor)
    if inside:
        hidden = helper.make_node("Constant", [], ["hidden"])
        hidden.attribute.add(name="value", type=onnx.AttributeProto.TENSOR).t.CopyFrom(tensor)
        branch = helper.make_graph([hidden], "branch", [], [helper.make_tensor_value_info("hidden", 1, [1])])
        choose = helper.make_node("If", ["cond"], ["either"], then_branch=branch, else_branch=branch)
        model.graph.node.append(choose)
        del model.graph.initializer[-1]
    source.write_bytes(model.SerializeToString())
    with pytest.raises(ArtifactRefused, match=says):
        imported(source)
    assert not (tmp_path / "models").exists()
