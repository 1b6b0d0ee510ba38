"""Points of cost frontiers against steps that run here: what they take, what they hold.

    python benchmarks/strategies/frontier_fidelity.py [--models transformer,resnet,rnnlm] [--cpus 2]
    python benchmarks/strategies/frontier_fidelity.py --cpus 1 --halves
    mpiexec -n 2 python benchmarks/strategies/frontier_fidelity.py [...]

Points are sampled over the whole frontier, with recomputation and without, and run; where there are
fewer than asked for, random strategies follow. Times are
those of `strategy_fidelity.py`: tasks are measured in covering strategies, which run in turns with
the points, and steps at one speed of the processors are compared. Bytes are those of the memory of
the device that holds most: by sums, of which the frontier is made; by the plan of the strategy,
which is what its simulation says; and as the session has allocated them. With `--memory` nothing is
timed, and tasks take what a roofline says. The row `all` of a model has the mean errors, and the
least and most that is planned for each byte that is held.

`--halves`: the point that keeps everything beside that of least memory. Activations are what is
held beyond parameters, states and inputs.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

sys.path.append(str(Path(__file__).resolve().parents[1]))

from arguments import common
from harness import tabulate
from strategy_fidelity import Fidelity, agreement

from soapstone.frontend.strategies.finding import graph_of
from soapstone.frontend.strategies.step_times import Run
from soapstone.frontend.strategies.task_times import strategy_of
from soapstone.ir.graph import Graph
from soapstone.ir.strategy import Strategy
from soapstone.ir.strategy.configuration import Keep
from soapstone.runtime.machines.start import default_executor, rank_of
from soapstone.search.cost.profile import measured_machine
from soapstone.search.cost.tasks import MeasuredMachine
from soapstone.search.parallel import simulate
from soapstone.search.parallel.frontier.costs import keeping
from soapstone.search.parallel.frontier.points import CostFrontier, FrontierPoint, cost_frontier
from soapstone.search.parallel.mcmc.initial import randomly
from soapstone.search.parallel.problem.prepare import Model, prepare

Row = dict[str, Any]
EPS = 0.01
# An app, samples of a step, and sizes.
MODELS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "transformer": (
        "transformer",
        16,
        {"layers": 3, "hidden": 256, "heads": 4, "inner": 1024, "vocabulary": 1000},
    ),
    "resnet50": ("resnet", 8, {"depth": 50, "image_size": 64, "classes": 10}),
    "rnnlm": ("rnnlm", 256, {"unrolled": True, "hidden": 128, "length": 12, "vocabulary": 500}),
}


def sampled(
    model: Model, frontier: CostFrontier, count: int
) -> dict[str, tuple[Strategy, FrontierPoint | None]]:
    """Return so many strategies: points from end to end, by their number, then what chance makes.

    Those are random configurations, with half of what the backward pass reads recomputed.
    """
    points = frontier.points
    places = np.linspace(0, len(points) - 1, min(count, len(points))).round().astype(int)
    found: dict[str, tuple[Strategy, FrontierPoint | None]] = {
        str(at): (points[at].strategy, points[at]) for at in places.tolist()
    }
    graph, late = model.graph, keeping(model.graph)
    read = [
        name
        for item in model.operators
        for node in item.ahead
        for name in node.outputs
        if name not in node.overwrites and any(r.name in late for r in graph.consumers[name])
    ]
    for seed in range(count - len(found)):
        strategy = strategy_of(model, randomly(model, seed))
        chosen = np.random.default_rng(seed).random(len(read)) < 0.5
        again = {name: Keep.RECOMPUTE for name, some in zip(read, chosen) if some}
        found[f"random {seed}"] = replace(strategy, tensors=again), None
    return found


def about(strategy: Strategy, point: FrontierPoint | None, planned: int, held: int) -> Row:
    """Return what is known of a strategy's memory."""
    row: Row = {"recomputed": len(strategy.tensors), "MB planned": planned / 1e6}
    row |= {"MB held": held / 1e6, "planned / held": planned / held}
    if point is not None:
        row |= {"MB by sums": point.memory_bytes / 1e6, "sums / held": point.memory_bytes / held}
    return row


def compared(
    graph: Graph, machine: MeasuredMachine, executor: str, count: int, seconds: float
) -> Iterator[Row]:
    """Yield a row a sampled strategy. seconds: of steps, 0 for none."""
    if not seconds:
        model = prepare(graph, machine)
        frontier = cost_frontier(graph, machine, eps=EPS, saving=("recompute",))
        for name, (strategy, point) in sampled(model, frontier, count).items():
            planned = max(simulate(graph, machine, strategy).peak_bytes_per_device)
            with closing(Run(model, strategy, tasks=False, executor=executor)) as run:
                run.step()
                held = max(run.peak_bytes_per_device)
            yield {"strategy": name, **about(strategy, point, planned, held)}
        return
    with Fidelity(graph, machine, executor) as beside:
        frontier = cost_frontier(graph, beside.look(seconds / 4), eps=EPS, saving=("recompute",))
        some = sampled(beside.model, frontier, count)
        strategies = {name: strategy for name, (strategy, _) in some.items()}
        for row, found, bytes_held in beside.compared(strategies, seconds):
            most = max(found.peak_bytes_per_device)
            yield {**row, **about(*some[row["strategy"]], most, max(bytes_held))}


def summary(rows: Sequence[Mapping[str, Any]]) -> Row:
    """Return mean and worst errors of a model's rows."""

    def errors(ratio: str) -> list[float]:
        return [abs(row[ratio] - 1) * 100 for row in rows if ratio in row]

    planned = [row["planned / held"] for row in rows]
    found: Row = {"strategy": "all", "strategies": len(rows)}
    found["mean error of MB planned %"] = statistics.mean(errors("planned / held"))
    found |= {"least planned / held": min(planned), "most planned / held": max(planned)}
    found["mean error of MB by sums %"] = statistics.mean(errors("sums / held"))
    if "simulated / measured" in rows[0]:
        found["mean error of ms %"] = statistics.mean(errors("simulated / measured"))
        found["worst error of ms %"] = max(errors("simulated / measured"))
        pairs = [(row["measured ms"], row["simulated ms"]) for row in rows]
        kept, of = agreement(pairs)
        found["tau"] = kept / max(1, of)
    return found


def fidelity(names: Sequence[str], executor: str, given: argparse.Namespace) -> Iterator[Row]:
    """Yield a row a point of each model, and one of its errors."""
    cpus = 1 if executor == "mpi" else given.cpus
    machine = measured_machine(cpus, executor=executor)
    seconds = 0.0 if given.memory else given.seconds
    for name in names:
        app, batch, sizes = MODELS[name]
        graph = graph_of(app, batch, sizes=sizes)
        rows = []
        for row in compared(graph, machine, executor, given.points, seconds):
            rows.append({"model": name, **row})
            yield rows[-1]
        yield {"model": name, **summary(rows)}


def halves(names: Sequence[str], executor: str, given: argparse.Namespace) -> Iterator[Row]:
    """Yield a row a model: activations kept and recomputed, planned and held, and both steps."""
    machine = measured_machine(given.cpus, executor=executor)
    for name in names:
        app, batch, sizes = MODELS[name]
        graph = graph_of(app, batch, sizes=sizes)
        lasting = sum(graph.tensors[value].nbytes for value in graph.roles)
        with Fidelity(graph, machine, executor) as model:
            frontier = cost_frontier(
                graph, model.look(given.seconds / 4), eps=EPS, saving=("recompute",)
            )
            kept = [each for each in frontier.points if not each.recomputed]
            ends = {"kept": kept[-1], "recomputed": frontier.points[0]}
            strategies = {which: each.strategy for which, each in ends.items()}
            row: Row = {"model": name, "MB that lasts": lasting / 1e6}
            for found, simulation, held in model.compared(strategies, given.seconds):
                which = found["strategy"]
                row[f"MB planned, {which}"] = max(simulation.peak_bytes_per_device) / 1e6
                row[f"MB held, {which}"] = max(held) / 1e6
                row[f"activations, {which}"] = (max(held) - lasting) / 1e6
                row[f"ms simulated, {which}"] = found["simulated ms"]
                row[f"ms, {which}"] = found["measured ms"]
        row["activations ratio"] = row["activations, recomputed"] / row["activations, kept"]
        row["time ratio"] = row["ms, recomputed"] / row["ms, kept"]
        yield row


def main() -> None:
    """Write the table that is asked for."""
    parser = common(__doc__, models=MODELS)
    parser.add_argument("--points", type=int, default=20, help="of each model")
    parser.add_argument("--cpus", type=int, default=2, help="workers, where there are no ranks")
    parser.add_argument("--seconds", type=float, default=200.0, help="of a model's steps, at most")
    parser.add_argument("--memory", action="store_true", help="time nothing")
    parser.add_argument("--halves", action="store_true", help="only the ends of frontiers")
    given = parser.parse_args()
    executor, names = default_executor(), given.models.split(",")
    rows = (halves if given.halves else fidelity)(names, executor, given)
    if rank_of(executor):
        list(rows)
        return
    place = "over two ranks" if executor == "mpi" else f"on {given.cpus} workers"
    name = "halves" if given.halves else "memory" if given.memory else "fidelity"
    where = "_mpi" if executor == "mpi" else f"_{given.cpus}"
    options = f" --cpus {given.cpus}" if executor != "mpi" else ""
    options += " --halves" if given.halves else " --memory" if given.memory else ""
    options += "" if given.memory else f" --seconds {given.seconds:g}"
    command = f"python benchmarks/strategies/frontier_fidelity.py{options}"
    if executor == "mpi":
        command = f"mpiexec -n 2 {command}"
    title = f"Points of cost frontiers against steps that run, {place}"
    tabulate(f"frontier_{name}{where}", title, command, rows, save=not given.no_write)


if __name__ == "__main__":
    main()
