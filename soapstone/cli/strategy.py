"""`soapstone strategy`: parallelizations searched for, simulated and shown."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from soapstone.cli.common import Devices, Dims, Json, bytes_of, command, dims_of, tell, with_output

if TYPE_CHECKING:
    from collections.abc import Mapping

    from soapstone.deadline import Deadline
    from soapstone.frontend.strategies.serving import FoldedGraph
    from soapstone.ir.graph import Graph
    from soapstone.ir.strategy import Strategy
    from soapstone.ir.tensor import Array
    from soapstone.runtime import Machine

app = typer.Typer(help="Parallelization strategies: search, simulate, show.", no_args_is_help=True)

_SECONDS = 60.0  # of a search without a budget, at most
_MEASURING = 0.5  # of a budget, after which no more tasks are measured

ModelName = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="An app's name, a .py script with build(), an .onnx file or a graph file.",
    ),
]
MachineName = Annotated[
    str, typer.Option("--machine", "-m", help="local, a preset (`machine list`), or a file.")
]
BatchSize = Annotated[
    int | None, typer.Option(min=1, help="Samples of a step, all devices together.")
]
Sizes = Annotated[
    list[str] | None, typer.Option("--size", help="NAME=VALUE for an app's build; may repeat.")
]
Inference = Annotated[
    bool,
    typer.Option(
        "--inference",
        help="An app's forward graph alone; on this computer, as it is served: weights constant.",
    ),
]
Memory = Annotated[
    str | None,
    typer.Option(help="What a device may hold: 16GB; default: what the machine's have."),
]
Timeline = Annotated[
    Path | None, typer.Option(help="Write the simulated step here (trace-event JSON).")
]


def _prepared(
    model: str,
    machine: str,
    devices: int | None,
    batch_size: int | None,
    size: list[str] | None,
    dim: list[str] | None,
    inference: bool,
    memory: str | None,
) -> tuple[Graph, Machine]:
    """Return the graph and the machine, which may have to be measured and so comes second."""
    from soapstone.frontend.strategies import finding

    sizes, dims, limit = finding.parse_sizes(size), dims_of(dim), bytes_of("--memory", memory)
    graph = finding.graph_of(model, batch_size, training=not inference, sizes=sizes, dims=dims)
    where = finding.machine_of(machine, devices)
    return graph, where if limit is None else where.limited(limit)


def _folded(
    model: str,
    machine: Machine,
    batch_size: int | None,
    size: list[str] | None,
    dim: list[str] | None,
    inference: bool,
) -> FoldedGraph | None:
    """Return a model as it is served, where that is asked for and the machine is this one."""
    from soapstone.search.cost.tasks import MeasuredMachine

    if not (inference and isinstance(machine, MeasuredMachine)):
        return None
    from soapstone.frontend.strategies import finding
    from soapstone.frontend.strategies.serving import FoldedGraph

    sizes = finding.parse_sizes(size)
    return FoldedGraph.of(*finding.forward_of(model, batch_size, sizes=sizes, dims=dims_of(dim)))


def _measure(
    graph: Graph,
    machine: Machine,
    deadline: Deadline | None = None,
    constants: Mapping[str, Array] | None = None,
) -> None:
    """Measure a graph's tasks if the machine is this one: long, so after whatever can be refused.

    deadline: until which they are. constants: the contents of inputs that never change.
    """
    from soapstone.frontend.progress import staged
    from soapstone.frontend.strategies import finding

    with staged() as stages:
        finding.measure_tasks(graph, machine, stages, deadline, constants or {})


def _check_objective(serves: bool, more: Mapping[str, object]) -> None:
    """Check what is given with an objective.

    serves: whether the search is for inference on this computer. more: by option, what only the
    search for one machine takes; None where it is not given.

    Raises:
        GraphError: it is not, or one of these is given.
    """
    from soapstone.ir.errors import GraphError

    if not serves:
        raise GraphError("objective: found without --inference on machine 'local'")
    for option, found in more.items():
        if found is not None:
            raise GraphError(f"objective: found with {option}, which is of one machine's search")


def _write(
    strategy: Strategy, graph: Graph | None, output: Path | None, picture: Path | None
) -> None:
    """Write a strategy to a file, and a picture of it, of the graph if there is one, to another."""
    if output is not None:
        strategy.save(output)
    if picture is not None:
        from soapstone.frontend.strategies.picture import save_picture

        save_picture(strategy, graph, picture)


@command(app, "search")
def search(
    model: ModelName,
    machine: MachineName = "local",
    devices: Devices = None,
    batch_size: BatchSize = None,
    size: Sizes = None,
    dim: Dims = None,
    inference: Inference = False,
    memory: Memory = None,
    method: Annotated[
        str,
        typer.Option(
            help="mcmc: Markov chains; optcnn: dynamic programming, for linear graphs;"
            " exhaustive: small ones, with a certificate; optimum: of equal parts of results only."
        ),
    ] = "mcmc",
    budget: Annotated[
        float | None,
        typer.Option(
            min=0,
            help="Seconds, measuring among them; all are used, unless the gap to the bound is below"
            " 1 %. By default 60 at most.",
        ),
    ] = None,
    proposals: Annotated[
        int | None, typer.Option(min=0, help="Proposals instead of seconds; repeatable.")
    ] = None,
    patience: Annotated[
        float | None,
        typer.Option(
            min=0.0,
            max=1.0,
            help="Stop when this share of a search has found nothing better;"
            " 1, the default with a budget: begin anew until it is spent. Else 0.5.",
        ),
    ] = None,
    simulation: Annotated[str, typer.Option(help="delta or full.")] = "delta",
    objective: Annotated[
        str | None,
        typer.Option(
            help="latency or throughput, with --inference: this computer's cores are shared out"
            " among requests in all ways, and each is measured."
        ),
    ] = None,
    start: Annotated[
        Path | None, typer.Option("--from", help="A strategy file to begin with, besides others.")
    ] = None,
    chains: Annotated[int, typer.Option(min=1, help="Markov chains, one a core.")] = 1,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the proposals.")] = 0,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write the strategy here (JSON).")
    ] = None,
    picture: Annotated[Path | None, typer.Option(help="Draw it here (SVG).")] = None,
    timeline: Timeline = None,
    as_json: Json = False,
) -> None:
    """Search for the fastest parallelization of a model on a machine, real or described."""
    from soapstone.deadline import Deadline
    from soapstone.files import check_suffix, check_targets
    from soapstone.frontend.progress import searching, staged
    from soapstone.frontend.strategies import finding
    from soapstone.frontend.strategies.serving import find_serving
    from soapstone.ir.strategy import Strategy
    from soapstone.search.parallel import Options, method_named

    check_targets(output, picture, timeline, reads=(model, machine))
    check_suffix(picture, ".svg", what="picture")
    for path in (output, timeline):
        check_suffix(path, ".json")
    deadline = Deadline(_SECONDS if budget is None else budget)
    half = deadline.part(_MEASURING) if budget is not None else Deadline()
    if objective is not None:
        more = {
            "--method": None if method == "mcmc" else method,
            "--proposals": proposals,
            "--patience": patience,
            "--from": start,
            "--chains": None if chains == 1 else chains,
            "--memory": memory,
            "--timeline": timeline,
        }
        _check_objective(inference and machine == "local", more)
        options = Options(seconds=_SECONDS / 6 if budget is None else budget / 6, seed=seed)
        with staged() as stages:
            serving = find_serving(
                model,
                objective=objective,
                batch_size=batch_size,
                sizes=finding.parse_sizes(size),
                dims=dims_of(dim),
                cores=devices,
                options=options,
                stage=stages,
                deadline=half,
            )
        _write(serving.strategy, None, output, picture)
        tell(serving, with_output(serving.as_dict(), output), as_json)
        return
    graph, where = _prepared(model, machine, devices, batch_size, size, dim, inference, memory)
    given = None if start is None else finding.imported(graph, where, start)
    find = method_named(method)
    options = Options(
        seconds=_SECONDS if proposals is None else None,
        proposals=proposals,
        patience=(0.5 if budget is None else 1.0) if patience is None else patience,
        simulation=simulation,
        chains=chains,
        seed=seed,
    )
    options.check()
    folded = _folded(model, where, batch_size, size, dim, inference)
    split = graph if folded is None else folded.graph
    if folded is not None and given is not None:
        given = dict(folded.to_rewritten(Strategy(given)).configurations)
    _measure(split, where, half, None if folded is None else folded.contents)
    if half.stopped:  # by Ctrl-C: the best of what needs no search
        options = replace(options, seconds=0.0)
    elif proposals is None and budget is not None:
        options = replace(options, seconds=deadline.left)
    with searching() as progress:
        result = find(split, where, options, start=given, progress=progress)
    if folded is not None:
        result = folded.to_original(result)
    _write(result.strategy, graph, output, picture)
    if timeline is not None:
        result.simulation.timeline.save(timeline)
    tell(result, with_output(result.as_dict(), output), as_json)


@command(app, "simulate")
def simulate(
    model: ModelName,
    strategy: Annotated[
        str, typer.Option("--strategy", "-s", help="data, model, expert, tensor or a file.")
    ],
    machine: MachineName = "local",
    devices: Devices = None,
    batch_size: BatchSize = None,
    size: Sizes = None,
    dim: Dims = None,
    inference: Inference = False,
    memory: Memory = None,
    timeline: Timeline = None,
    as_json: Json = False,
) -> None:
    """Simulate a strategy on a machine, real or described; nothing is searched."""
    from soapstone.files import check_suffix, check_targets
    from soapstone.frontend.strategies import finding

    check_targets(timeline, reads=(model, machine, strategy))
    check_suffix(timeline, ".json")
    graph, where = _prepared(model, machine, devices, batch_size, size, dim, inference, memory)
    given = finding.given(graph, where, strategy)
    folded = _folded(model, where, batch_size, size, dim, inference)
    if folded is not None:
        graph = folded.graph
        given = given if isinstance(given, str) else folded.to_rewritten(given)
    _measure(graph, where, constants=None if folded is None else folded.contents)
    result = finding.simulated(graph, where, given)
    if timeline is not None:
        result.timeline.save(timeline)
    tell(result, result.as_dict(), as_json)


@command(app, "frontier")
def frontier(
    model: ModelName,
    machine: MachineName = "local",
    option: Annotated[
        str,
        typer.Option(
            help="mini-time: the shortest step on so many devices; mini-parallelism: the fewest"
            " devices that have enough memory; profiling: the shortest step on each number."
        ),
    ] = "mini-time",
    devices: Annotated[
        int | None, typer.Option(min=1, help="Devices; the most of those that are tried.")
    ] = None,
    memory: Memory = None,
    batch_size: BatchSize = None,
    size: Sizes = None,
    eps: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="Share above the exact frontier; 0: exact.")
    ] = 0.01,
    saving: Annotated[
        list[str] | None,
        typer.Option(
            help="What memory may be saved by, at the cost of time; repeat. recompute: values are"
            " made again for the backward pass; offload: they are in the host's memory meanwhile;"
            " copies: what was resharded is moved again, or kept in one layout alone."
        ),
    ] = None,
    paths: Annotated[
        bool, typer.Option(help="Values may be moved from layout to layout in several steps.")
    ] = False,
    replicate: Annotated[
        bool, typer.Option(help="Several devices may compute the same, which saves messages.")
    ] = False,
    network: Annotated[
        bool, typer.Option(help="Time on the network is a third cost, besides that of the step.")
    ] = False,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write the strategy here (JSON).")
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw the frontier here (.svg).")] = None,
    as_json: Json = False,
) -> None:
    """Find all best trade-offs of memory and time, and choose one."""
    from soapstone.files import check_suffix, check_targets
    from soapstone.frontend.progress import staged
    from soapstone.frontend.strategies import finding
    from soapstone.frontend.strategies.plot import save_plot
    from soapstone.frontend.strategies.preferences import Option, find_strategy
    from soapstone.search.parallel import ParallelError

    check_targets(output, plot, reads=(model, machine))
    check_suffix(output, ".json")
    check_suffix(plot, ".svg", what="picture")
    if output is not None and option == Option.PROFILING:
        raise ParallelError(f"--output found with {option}, which chooses no strategy")
    graph = finding.graph_of(model, batch_size, sizes=finding.parse_sizes(size))
    with staged() as stages:
        result = find_strategy(
            graph,
            machine,
            option,
            memory=bytes_of("--memory", memory),
            devices=devices,
            eps=eps,
            saving=saving or (),
            paths=paths,
            replicate=replicate,
            network=network,
            progress=stages,
        )
    if plot is not None:
        save_plot(result, graph.name, plot)
    if option != Option.PROFILING:
        strategy = result.strategy  # or a reason, where nothing fits
        if output is not None:
            strategy.save(output)
    tell(result, with_output(result.as_dict(), output), as_json)


@command(app, "show")
def show(
    file: Annotated[Path, typer.Argument(help="A strategy file.")],
    picture: Annotated[Path | None, typer.Option(help="Draw it here (SVG).")] = None,
    as_json: Json = False,
) -> None:
    """Show a strategy: a table of operators, and a picture of who runs what."""
    from soapstone.ir.strategy import Strategy

    found = Strategy.load(file)
    _write(found, None, None, picture)
    tell(found, found.to_json(), as_json)
