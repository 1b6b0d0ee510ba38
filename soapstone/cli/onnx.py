"""`soapstone onnx check`, `import` and `export`: ONNX files in and out."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from soapstone.cli.common import Dims, Json, answer, command, dims_of

app = typer.Typer(help="Check, import and export ONNX files.", no_args_is_help=True)
Source = Annotated[Path, typer.Argument(help="The file to read.", metavar="FILE")]
Target = Annotated[Path, typer.Argument(help="The file to write.")]


@command(app)
def check(file: Source, dim: Dims = None, as_json: Json = False) -> None:
    """Show opset, inputs, outputs, operators and which are unsupported, parameters and work."""
    from soapstone.frontend.onnx.check import check_onnx

    report = check_onnx(file, dims_of(dim))
    answer(report, report.as_dict(), as_json)
    if report.problem is not None:
        raise typer.Exit(1)


@command(app, "import")
def import_(
    file: Source,
    target: Target,
    dim: Dims = None,
    as_json: Json = False,
) -> None:
    """Write an ONNX file as a graph file (JSON), and its weights as safetensors beside it."""
    from soapstone.files import check_suffix, check_targets
    from soapstone.frontend.onnx import from_onnx
    from soapstone.ir.files.graphs import save_graph
    from soapstone.ir.tensor import Role

    check_suffix(target, ".json")
    check_targets(target, reads=[file])
    model = from_onnx(file)
    graph = model.graph(dims_of(dim))
    weights = model.weights
    names = [n for n, role in graph.roles.items() if role is not Role.INPUT]
    layouts = model.layouts
    if layouts is not None:
        layouts = {name: order for name, order in layouts.items() if name in graph.tensors}
    save_graph(graph, target, {name: weights[name] for name in names}, layouts)
    answer(
        f"{target}: {len(graph.nodes)} operators, {len(names)} weights",
        {"graph": str(target), "nodes": len(graph.nodes), "weights": len(names)},
        as_json,
    )


@command(app)
def export(
    source: Annotated[
        str, typer.Argument(help="A graph file (.json), an app's name, or a .py script.")
    ],
    target: Target,
    batch_size: Annotated[
        int | None, typer.Option(min=1, help="Samples of an app's inputs; default 1.")
    ] = None,
    opset: Annotated[int | None, typer.Option(help="The version of the operators.")] = None,
    external_data: Annotated[
        bool, typer.Option("--external-data", help="Write weights to a file beside it.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Write a graph file with its weights, or an app with its initial ones, as an ONNX file."""
    from soapstone.files import check_suffix, check_targets
    from soapstone.frontend.app import load_app
    from soapstone.frontend.onnx import OnnxError, to_onnx
    from soapstone.frontend.onnx.export.write import OPSET
    from soapstone.ir.files.graphs import load_graph, load_layouts

    check_suffix(target, ".onnx")
    check_targets(target, reads=[source])
    version = OPSET if opset is None else opset
    outside = True if external_data else None
    if source.endswith(".json"):
        if batch_size is not None:
            raise OnnxError(f"--batch-size {batch_size} found; a graph file has its own")
        graph, weights = load_graph(source)
        layouts = load_layouts(source)
        to_onnx(graph, weights, target, opset=version, external_data=outside, layouts=layouts)
    else:
        model = load_app(source).build(batch_size or 1)
        to_onnx(model, None, target, opset=version, external_data=outside)
    answer(f"{target}: opset {version}", {"model": str(target), "opset": version}, as_json)
