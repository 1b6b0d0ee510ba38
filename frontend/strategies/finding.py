"""Searches for strategies from outside: the graph, the machine, and the presentation of results."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from soapstone.deadline import Deadline, TimeUpError
from soapstone.errors import hint
from soapstone.frontend.app import AppError, load_app
from soapstone.frontend.strategies.task_times import Progress as Stage, measure
from soapstone.ir.errors import GraphError, StrategyError
from soapstone.ir.graph import Graph
from soapstone.ir.strategy import Strategy
from soapstone.ir.strategy.configuration import Configuration
from soapstone.ir.tensor import NOTHING, Array
from soapstone.runtime import Machine
from soapstone.runtime.machines.cluster import load_machine
from soapstone.runtime.machines.routes import routes
from soapstone.search.cost.profile import measured_machine
from soapstone.search.cost.tasks import MeasuredMachine
from soapstone.search.parallel import NAMED, Simulation, Simulator, simulate
from soapstone.search.parallel.problem.prepare import prepare

if TYPE_CHECKING:
    from soapstone.frontend.model import Model


def graph_of(
    model: str | Path,
    batch_size: int | None = None,
    *,
    training: bool = True,
    sizes: Mapping[str, Any] | None = None,
    dims: Mapping[str, int] | None = None,
) -> Graph:
    """Return the graph of an app's name or script, an ONNX file, or a graph file.

    Args:
        model: any of these.
        batch_size: of an app, by default its own; of an ONNX file whose first dims are symbolic, 1.
        training: whether it is an app's training step or its inference graph.
        sizes: further arguments of the app's `build`, such as layers or hidden.
        dims: the extents of an ONNX file's symbolic dims, by name.

    Raises:
        AppError, GraphError, OSError: it is none of these, or the sizes or extents do not fit.
    """
    return with_constants(model, batch_size, training=training, sizes=sizes, dims=dims)[0]


def with_constants(
    model: str | Path,
    batch_size: int | None = None,
    *,
    training: bool = True,
    sizes: Mapping[str, Any] | None = None,
    dims: Mapping[str, int] | None = None,
) -> tuple[Graph, Mapping[str, Array]]:
    """Return the graph of `graph_of`, and for an app the contents of its constants.

    Arguments and errors are those of `graph_of`.
    """
    path = Path(model)
    of_onnx, of_graph = path.suffix == ".onnx", path.suffix == ".json" or path.is_dir()
    if dims and not of_onnx:
        raise GraphError(f"dims found for {str(path)!r}; an ONNX file, with symbolic dims, needed")
    if sizes and (of_onnx or of_graph):
        raise GraphError(f"sizes found for {str(path)!r}; an app needed")
    if batch_size is not None and of_graph:
        raise GraphError(f"batch size {batch_size} found; graph file {str(path)!r} has its own")
    if of_onnx or of_graph:
        from soapstone.frontend.optimization.optimize import taken

        return taken(path, {}, batch_size or 1, dims or {})[0], {}
    from soapstone.frontend.training.optimizers import optimizer
    from soapstone.frontend.training.step_graph import training_graph

    app = load_app(model)
    known = list(inspect.signature(app.build).parameters)[1:]  # the first is the batch size
    for name in sizes or {}:
        if name not in known:
            raise AppError(
                f"app {app.name!r}: size {name!r} found, one of {', '.join(known) or 'none'} needed"
            )
    size = app.options["batch_size"] if batch_size is None else batch_size
    with app.build(size, **dict(sizes or {})) as made:
        constants = dict(made.constants)
        if not training:
            return made.graph, constants
        options = app.options
        chosen = optimizer(options["optimizer"])
        forward = made.build(training=True)
        metrics = tuple(options["metrics"])
        return training_graph(forward, options["loss"], chosen, metrics), constants


def forward_of(
    model: Model | str | Path,
    batch_size: int | None = None,
    *,
    sizes: Mapping[str, Any] | None = None,
    dims: Mapping[str, int] | None = None,
) -> tuple[Graph, Mapping[str, Array]]:
    """Return the forward graph of `graph_of` or of a model, and its weights if there are any.

    Arguments and errors are those of `graph_of`.
    """
    from soapstone.frontend.model import Model
    from soapstone.frontend.optimization.optimize import taken

    if isinstance(model, Model):
        return taken(model, {}, batch_size or model.batch_size, dims or {})[:2]
    graph = graph_of(model, batch_size, training=False, sizes=sizes, dims=dims)
    path = Path(model)
    if path.suffix in (".onnx", ".json") or path.is_dir():
        return taken(path, {}, batch_size or 1, dims or {})[:2]
    app = load_app(model)
    with app.build(batch_size or app.options["batch_size"], **dict(sizes or {})) as made:
        return graph, {**made.weights(), **made.constants}


def machine_of(name: str | Path, devices: int | None = None) -> Machine:
    """Return the machine of a name or file; `local` is this computer, measured.

    The machine has no copiers, since no task is placed on them.

    devices: the number of processors; by default the machine's own.

    Raises:
        MachineError: an unknown machine.
    """
    if str(name) == "local":
        return measured_machine(devices)
    found = load_machine(name, devices)
    return replace(found, processors=found.workers)


def measure_tasks(
    graph: Graph,
    machine: Machine,
    progress: Stage | None = None,
    deadline: Deadline | None = None,
    constants: Mapping[str, Array] = NOTHING,
) -> int:
    """Measure the missing task times of a graph on this computer; return how many were missing.

    What is measured until the deadline is kept, and the rest is estimated. With a deadline, Ctrl-C
    ends only the measuring, and stops the deadline.

    Args:
        graph: a training step or inference graph. machine: that of `machine_of("local")`; for
            another machine nothing is measured and 0 is returned.
        progress: called with a stage, how much of it is done, and its total or None.
        constants: the contents of inputs that never change, by name.

    Raises:
        GraphError, StrategyError: the graph does not run here.
    """
    if not isinstance(machine, MeasuredMachine):
        return 0

    def say(stage: str, done: int, total: int | None) -> None:
        if deadline is not None:
            deadline.check()
        if progress is not None:
            progress(stage, done, total)

    known = len(machine.times)
    try:
        return measure(graph, machine, say, constants=constants)
    except TimeUpError:
        return len(machine.times) - known
    except KeyboardInterrupt:
        if deadline is None:
            raise
        deadline.stop()
        return len(machine.times) - known


def parse_sizes(texts: list[str] | None) -> dict[str, Any]:
    """Return sizes parsed from texts such as `layers=2` or `unrolled=true`.

    Raises:
        GraphError: a text of another form.
    """
    found: dict[str, Any] = {}
    for text in texts or []:
        name, equals, value = text.partition("=")
        if not equals or not name.isidentifier():
            raise GraphError(f"size {text!r} found, NAME=VALUE needed")
        if value.lower() in ("true", "false"):
            found[name] = value.lower() == "true"
        else:
            try:
                found[name] = int(value)
            except ValueError:
                found[name] = value
    return found


def imported(graph: Graph, machine: Machine, path: str | Path) -> dict[str, Configuration]:
    """Return the configurations in a strategy file, without replication of operators.

    Raises:
        StrategyError: it cannot be read, or is for another graph or machine.
    """
    strategy = Strategy.load(path)
    strategy.check(graph, machine.describe())
    return {
        name: replace(item, replicated=()) if item.replicated else item
        for name, item in strategy.configurations.items()
    }


def given(graph: Graph, machine: Machine, strategy: str | Path) -> str | Strategy:
    """Return the strategy named data, model, expert or tensor, or that of a file.

    Raises:
        StrategyError: neither, or a file that cannot be read or is for another graph or machine.
    """
    if str(strategy) in NAMED:
        return str(strategy)
    if not Path(strategy).is_file():
        raise StrategyError(
            f"strategy {str(strategy)!r} found; one of {', '.join(NAMED)}, or a file needed"
            f"{hint(strategy, NAMED)}"
        )
    found = Strategy.load(strategy)
    found.check(graph, machine.describe())
    return found


def simulated(graph: Graph, machine: Machine, strategy: str | Path | Strategy) -> Simulation:
    """Return the simulated cost of a strategy: one known by name, a file's, or a given one.

    Raises:
        StrategyError, ParallelError: the strategy does not fit.
    """
    found = strategy if isinstance(strategy, Strategy) else given(graph, machine, strategy)
    if isinstance(found, Strategy):
        return simulate(graph, machine, found)
    simulator = Simulator(prepare(graph, machine))
    return simulator.simulate(NAMED[found](simulator.model))


def machine_table(machine: Machine) -> str:
    """Return a machine as text: processors, memories, links, and the routes between devices."""
    lines = [f"machine {machine.name}"]
    for processor in machine.processors:
        where = f" in {processor.node}" if processor.node else ""
        rate = f", {processor.flops / 1e9:,.1f} GFLOP/s" if processor.flops else ""
        lines.append(
            f"  processor {processor.name}: {processor.kind}, {processor.threads} threads,"
            f" {processor.memory}{where}{rate}"
        )
    for memory in machine.memories:
        rate = f", {memory.bytes_per_s / 1e9:,.1f} GB/s" if memory.bytes_per_s else ""
        lines.append(f"  memory {memory.name}: {memory.capacity_bytes / 2**30:,.1f} GiB{rate}")
    for link in machine.links:
        shared = f", on {link.bus}" if link.bus else ""
        lines.append(
            f"  link {link.source} -> {link.target}: {link.bytes_per_s / 1e9:,.1f} GB/s,"
            f" {link.latency_s * 1e6:,.1f} us{shared}"
        )
    found = routes(machine)
    count = len(machine.processors)
    ways = {
        (round(found.latency_s[a, b] * 1e6, 2), round(1e-9 / found.s_per_byte[a, b], 2))
        for a in range(count)
        for b in range(count)
        if found.s_per_byte[a, b] > 0
    }
    for latency, rate in sorted(ways):
        lines.append(f"  routes of {latency} us and {rate} GB/s at the narrowest place")
    return "\n".join(lines)
