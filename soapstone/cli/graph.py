"""`soapstone graph info`, `generate` and `convert`: graphs of vertices and edges, as data."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from soapstone.cli.common import Json, answer, command, tell

app = typer.Typer(
    help="Show, generate and convert graphs that models learn from.", no_args_is_help=True
)
Source = Annotated[
    str, typer.Argument(metavar="GRAPH", help="A file, a name in SOAPSTONE_DATA, or a preset.")
]
Target = Annotated[Path, typer.Argument(help="The file to write: .npz, .lux, .mtx, .txt, .csv.")]


@command(app)
def info(graph: Source, as_json: Json = False) -> None:
    """Show vertices, edges, degrees, features, classes, and which vertices are for what."""
    from soapstone.frontend.graphs.files import read_graph

    found = read_graph(graph)
    answer(found, found.as_dict(), as_json)


@command(app)
def generate(
    kind: Annotated[str, typer.Argument(help="rmat, blocks, or a preset such as reddit-like:0.1.")],
    target: Target,
    vertices: Annotated[int, typer.Option(min=1, help="Vertices, for rmat and blocks.")] = 1000,
    edges: Annotated[int, typer.Option(min=0, help="Edges to draw.")] = 10_000,
    features: Annotated[int, typer.Option(min=1, help="Features of a vertex, for blocks.")] = 32,
    classes: Annotated[int, typer.Option(min=1, help="Classes, for blocks.")] = 4,
    homophily: Annotated[
        float, typer.Option(min=0, max=1, help="The share of edges within a class.")
    ] = 0.8,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the draws.")] = 0,
    as_json: Json = False,
) -> None:
    """Generate a graph of skewed degrees, with classes that can be learned unless it is R-MAT."""
    from soapstone.files import check_suffix, check_targets
    from soapstone.frontend.graphs.dataset import GraphData
    from soapstone.frontend.graphs.files import SUFFIXES, write_graph
    from soapstone.frontend.graphs.generate import Shape, block_model, named, rmat

    check_targets(target)
    check_suffix(target, *SUFFIXES)
    if kind == "rmat":
        made = GraphData("rmat", rmat(vertices, edges, seed=seed), synthetic=True)
    elif kind == "blocks":
        shape = Shape(vertices, edges, features, classes)
        made = block_model(shape, homophily=homophily, seed=seed)
    else:
        made = named(kind, seed)
    write_graph(target, made)
    tell(made, made.as_dict(), as_json)


@command(app)
def convert(graph: Source, target: Target, as_json: Json = False) -> None:
    """Write a graph to another kind of file; only .npz and .lux keep features, labels and parts."""
    from soapstone.files import check_suffix, check_targets
    from soapstone.frontend.graphs.files import SUFFIXES, read_graph, write_graph

    check_targets(target, reads=[graph])
    check_suffix(target, *SUFFIXES)
    found = read_graph(graph)
    write_graph(target, found)
    tell(found, found.as_dict(), as_json)
