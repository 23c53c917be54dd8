"""The commands that make models runnable: `export`, `import` and the list of them."""

from pathlib import Path
from typing import Annotated, cast

import typer
from rich.console import Console

from inference.errors import ConfigError
from inference.models.catalogue import CatalogueEntry, catalogue
from inference.models.registry import model_cache, registered_models, resolve_model
from inference.models.spec import load_model_spec

ABMIL = "abmil"

_out = Console(soft_wrap=True, highlight=False)

_OUT_HELP = "Folder for checkpoints, each in a folder of its own name; by default where models are found by name."


def add_model_commands(app: typer.Typer) -> None:
    """Add the commands to the command line."""
    app.command("export")(export)
    app.command("import")(import_)
    app.command("models")(models)


def models(
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="With the commands for those not exported.")] = False,
) -> None:
    """List every model there is a spec or a checkpoint of: licence, gate, weights' source and state."""
    for entry in catalogue():
        for line in _described(entry, verbose):
            _out.print(line, markup=False)


def export(
    name: Annotated[str, typer.Argument(help=f"A model that `models` lists, a spec file (.yaml), or {ABMIL}.")],
    weights: Annotated[Path | None, typer.Option(help="Local weights: .safetensors, or .pt/.bin of tensors.")] = None,
    device: Annotated[str, typer.Option(help="What it is compiled for: cpu or cuda.")] = "cpu",
    form: Annotated[str, typer.Option("--format", help="pt2 (compiled), portable or onnx.")] = "pt2",
    precision: Annotated[str | None, typer.Option(help="fp32, bf16 or fp16; by default the spec's.")] = None,
    random_init: Annotated[
        bool, typer.Option("--random-init", help="Random weights, for tests; the name then ends in -random.")
    ] = False,
    depth: Annotated[int | None, typer.Option(help="Blocks of a network with random weights.")] = None,
    out: Annotated[Path | None, typer.Option(help=_OUT_HELP)] = None,
    backbone: Annotated[str | None, typer.Option(help=f"Of {ABMIL}: the model whose embeddings it takes.")] = None,
    classes: Annotated[str | None, typer.Option(help=f"Of {ABMIL}: names of its classes, with commas.")] = None,
) -> None:
    """Export a network from local weights, and compare the result with it before saying so."""
    if precision not in (None, "fp32", "bf16", "fp16"):
        raise ConfigError(f"--precision {precision}: give fp32, bf16 or fp16")
    folder = out or model_cache()
    if name == ABMIL:
        if weights is None:
            raise ConfigError(
                f"export {ABMIL} needs --weights FILE, the state dict of a CLAM or gated-attention network"
            )
        _export_abmil(weights, folder, device, form, backbone, classes)
        return
    if name in registered_models():
        _out.print(f"{resolve_model(name, cache=folder).path}", markup=False)
        return
    from inference.models.conversion import Precision, export_tile_model

    made = export_tile_model(
        load_model_spec(name), folder, weights=weights, random_init=random_init, depth=depth, device=device, form=form,
        precision=cast(Precision | None, precision),
    )  # fmt: skip
    golden = made.manifest.golden
    assert golden is not None, "an export is compared"
    _out.print(
        f"{made.path} ({made.manifest.format}, {made.manifest.spec.precision}, {made.manifest.device}): "
        f"{golden.measured:.1e} from its network in fp32, {golden.tolerance:.0e} allowed",
        markup=False,
    )


def import_(
    file: Annotated[Path, typer.Argument(help="An .onnx graph, or a .pt2 from a source you trust: a .pt2 is code.")],
    spec: Annotated[Path, typer.Option(help="What the graph is: a spec file (.yaml) with a graph part.")],
    device: Annotated[str, typer.Option(help="Device to try it on: cpu or cuda.")] = "cpu",
    out: Annotated[Path | None, typer.Option(help=_OUT_HELP)] = None,
) -> None:
    """Pin a graph that was not exported here, once it has run a batch and returned what its spec declares."""
    if not file.is_file():
        raise ConfigError(f"no file {file}")
    described = load_model_spec(spec)
    from inference.models.foreign import import_graph

    made = import_graph(file, described, out or model_cache(), device=device)
    _out.print(f"{made.path} ({made.manifest.format}): tried and pinned", markup=False)


def _export_abmil(
    weights: Path, folder: Path, device: str, form: str, backbone: str | None, classes: str | None
) -> None:
    from inference.models.abmil import SlideAggregator, export_aggregator

    names = tuple(part.strip() for part in classes.split(",")) if classes else ()
    path = export_aggregator(weights, folder, device=device, form=form, backbone=backbone, class_names=names)
    spec = SlideAggregator(path, device=device).spec
    _out.print(
        f"{path} ({spec.architecture}): embeddings (tiles, {spec.embedding_dim}) -> attention (tiles, "
        f"{spec.n_branches}), logits ({spec.n_classes},)",
        markup=False,
    )


def _described(entry: CatalogueEntry, verbose: bool) -> list[str]:
    spec = entry.spec
    gate = {"open": "open", "gated": "asks for access", "proprietary": "proprietary"}[spec.access]
    lines = [f"{entry.name:20} {gate:16} {entry.state}", f"{'':20} {spec.license}; {spec.weights_source}"]
    if verbose:
        lines += [f"{'':20} - {command}" for command in entry.commands]
    return lines
