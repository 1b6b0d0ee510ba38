"""`soapstone show`: a model's graph after any pass, what a pass changes, and its launches."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from soapstone.cli.common import Cpus, Dims, Json, answer, dims_of, print_json

if TYPE_CHECKING:
    from soapstone.engine.expand import NodeLaunch
    from soapstone.ir.graph import Graph, Node
    from soapstone.ir.tensor import Array

FIRST = "model"  # what the graph is called before the first pass


def show(
    model: Annotated[
        str, typer.Argument(help="An app's name, a .py script, an .onnx file or a graph file.")
    ],
    after: Annotated[
        str | None,
        typer.Option(metavar="PASS", help=f"Print the graph after a pass; {FIRST}: before all."),
    ] = None,
    diff: Annotated[
        bool, typer.Option("--diff", help="Print what that pass, or every pass, changes.")
    ] = False,
    inference: Annotated[
        bool, typer.Option("--inference", help="An app's forward graph, its weights constant.")
    ] = False,
    batch_size: Annotated[int | None, typer.Option(min=1, help="Samples of a step.")] = None,
    dim: Dims = None,
    mapper: Annotated[
        str | None, typer.Option(help="Whose strategy a training step has; data_parallel.")
    ] = None,
    strategy: Annotated[Path | None, typer.Option(help="A strategy file instead.")] = None,
    cpus: Cpus = None,
    machine: Annotated[
        str | None, typer.Option(help="Print what launches take on a described device, and why.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Show how a model becomes launches: its passes, the graph after each, tiles and processors."""
    from soapstone.engine.carry import CARRY
    from soapstone.engine.lower.passes import NAMES
    from soapstone.ir.files.graphs import graph_to_json

    known = (FIRST, CARRY, *NAMES)
    if after is not None and after not in known:
        raise ValueError(f"pass {after!r} found; one of {', '.join(known)} needed")
    graph, weights = _taken(model, inference, batch_size, dims_of(dim))
    if mapper is not None and strategy:
        raise ValueError(f"--mapper {mapper} and --strategy found; one of both needed")
    if strategy and cpus:
        raise ValueError(f"--cpus {cpus} found with --strategy, which has its own processors")
    if weights is not None and (mapper is not None or strategy or cpus):
        raise ValueError("a mapper, strategy or cpus found; inference runs on one processor")
    if machine is not None:
        if after or diff or mapper is not None or strategy or cpus:
            raise ValueError("--machine found beside options of passes or strategies")
        answer(*_prices(graph, weights, machine), as_json)
        return
    lowering = _lowering(
        graph, weights, "data_parallel" if mapper is None else mapper, strategy, cpus
    )
    shown = [name for name in lowering.stages if after in (None, name)]
    if not shown:
        have = ", ".join(lowering.stages)
        raise ValueError(f"pass {after!r} found, which is not for this graph; {have} are")
    if as_json:
        said: dict[str, Any] = {"graph": graph.name}
        if diff:
            said["diff"] = {name: list(lowering.changes(name)) for name in shown}
        elif after is not None:
            nodes = lowering.stages[after].nodes
            said["after"], said["nodes"] = after, graph_to_json(lowering.stages[after])["nodes"]
            for item, node in zip(said["nodes"], nodes):
                item["work_of"] = list(node.work_of)
        else:
            said["passes"] = {name: len(g.nodes) for name, g in lowering.stages.items()}
            said["launches"] = [_described(launch) for launch in lowering.launches]
        print_json(said)
    elif diff:
        for name in shown:
            typer.echo("\n".join(lowering.changes(name)) or f"{name}: no change")
    elif after is not None:
        typer.echo("\n".join(_lines(lowering.stages[after])))
    else:
        typer.echo("\n".join(_table(lowering)))


def _prices(
    graph: Graph, weights: Mapping[str, Array] | None, machine: str
) -> tuple[str, dict[str, Any]]:
    """Return the launches of a graph on a described device with their prices, as text and data."""
    from soapstone.search.cost.machine import RooflineCost

    model = RooflineCost(machine, training=weights is None)
    total = model.cost(graph, weights or {})
    found = [
        {"name": name, "us": us, **asdict(each)}
        for name, us, each in model.launches(graph, weights or {})
    ]
    lines = [f"{model.target}: {total}"]
    for row in found:
        grid, block = ("x".join(map(str, row[side])) for side in ("grid", "block"))
        kernel = f", {row['variant']} {row['kernel']}" if row["variant"] else ""
        shape = f", {grid} blocks of {block}" if grid else ""
        lines.append(
            f"  {row['us']:>10,.2f} us  {row['bound']:<10}  {row['name']}: {row['operator']}"
            f"{kernel}{shape}, {row['flops'] / 1e6:,.2f} MFLOP, {row['nbytes'] / 1e6:,.2f} MB"
        )
    us = total.time_us if math.isfinite(total.time_us) else None  # what does not fit
    value = {"graph": graph.name, "machine": model.target, "time_us": us}
    return "\n".join(lines), {**value, "estimated": True, "launches": found}


@dataclass(frozen=True)
class _Lowering:
    """The graph after each pass, by name, in order, and the launches of the last."""

    stages: Mapping[str, Graph]
    launches: tuple[NodeLaunch, ...]

    def changes(self, name: str) -> Iterator[str]:
        """Yield the lines of the difference that a pass makes."""
        names = list(self.stages)
        before = names[max(names.index(name) - 1, 0)]
        texts = (_lines(self.stages[before]), _lines(self.stages[name]))
        return difflib.unified_diff(*texts, before, name, n=1, lineterm="")


def _taken(
    model: str, inference: bool, batch_size: int | None, dims: Mapping[str, int]
) -> tuple[Graph, Mapping[str, Array] | None]:
    """Return a model's graph, and its weights where they are constant."""
    from soapstone.frontend.app import load_app
    from soapstone.frontend.optimization.optimize import taken
    from soapstone.frontend.strategies.finding import graph_of

    kind = Path(model).suffix
    if kind not in ("", ".onnx", ".json", ".py"):
        raise ValueError(
            f"model {model!r} found; an .onnx file, a graph's .json, a .py script or an app"
            " (`soapstone apps` lists them) needed"
        )
    if dims and kind != ".onnx":
        raise ValueError(f"--dim found for {model!r}; an ONNX file, with symbolic dims, needed")
    if kind in (".onnx", ".json"):
        graph, weights, _ = taken(model, {}, batch_size or 1, dims)
        return graph, None if graph.updates and not inference else weights
    if not inference:
        return graph_of(model, batch_size), None
    with load_app(model).build(batch_size or 1) as made:
        return taken(made, {}, batch_size or 1, dims)[:2]


def _lowering(
    graph: Graph,
    weights: Mapping[str, Array] | None,
    mapper: str,
    file: Path | None,
    cpus: int | None,
) -> _Lowering:
    from soapstone.engine.mapper import GraphMapper, strategy_of
    from soapstone.engine.prepare import folded, prepare
    from soapstone.ir.strategy import Strategy
    from soapstone.ir.tensor import Role
    from soapstone.mappers import load
    from soapstone.runtime import Machine

    stages = {FIRST: graph}

    def watch(name: str, before: Graph, after: Graph) -> None:
        stages[name] = after

    fixed: set[str] = set()
    if weights is not None:
        _, graph = folded(replace(graph, updates={}).pruned(), weights, watch)
        fixed = graph.roles.keys() - {*graph.inputs(Role.INPUT)}
    if file is not None:
        strategy = Strategy.load(file)
        strategy.check(graph)
    else:
        who = load(mapper) if weights is None else GraphMapper()
        strategy = strategy_of(who, graph, Machine.local(cpus=cpus if weights is None else 1))
    return _Lowering(stages, prepare(graph, strategy, fixed, watch=watch).launches)


def _lines(graph: Graph) -> list[str]:
    """Return a graph as text, and at the end of a line the nodes whose work a node does."""
    by_text = {str(node): node for node in graph.nodes}

    def line(text: str) -> str:
        node = by_text.get(text.strip().partition("  # ")[0])
        return text if node is None or not node.sources else f"{text} of {', '.join(node.sources)}"

    return [line(text) for text in str(graph).splitlines()]


def _work(node: Node) -> str:
    """Return what a launch computes: its operators, in order."""
    steps = [step[0] for step in node.attributes.get("program", ())]
    first = node.attributes.get("operator", None if steps else node.operator)
    return " + ".join([*([first] if first else []), *steps])


def _described(launch: NodeLaunch) -> dict[str, Any]:
    """Return what a launch is: the first of its tiles stands for all of one size or one less."""
    at = [(argument, (argument.hi[0] - argument.lo[0]).tolist()) for argument in launch.arguments]
    return {
        "name": launch.node.name,
        "operators": _work(launch.node),
        "work_of": list(launch.node.work_of),
        "degrees": dict(launch.configuration.degrees),
        "split": str(launch.configuration),
        "devices": list(launch.configuration.devices),
        "tiles": [
            {"region": a.region, "privilege": str(a.privilege), "shape": shape} for a, shape in at
        ],
    }


def _table(lowering: _Lowering) -> Iterator[str]:
    """Yield the passes with how many operators each leaves, and the launches."""
    width = max(map(len, lowering.stages))
    previous = None
    for name, graph in lowering.stages.items():
        same = previous is not None and graph.nodes == previous.nodes
        yield f"{name:<{width}}  {len(graph.nodes):>5} operators{', unchanged' if same else ''}"
        previous = graph
    yield f"\n{len(lowering.launches)} launches"
    for launch in map(_described, lowering.launches):
        tiles = ", ".join(
            f"{tile['privilege']} {tile['region']}{tile['shape']}" for tile in launch["tiles"]
        )
        yield f"  {launch['name']}: {launch['operators']}; {launch['split']}; {tiles}"
