"""Bytes that memory plans copy, against LRU, Belady and streaming, and against the optimum.

    python benchmarks/memory/memory_plans.py [--seconds 20] [--graphs 1000] [--only resnet18]

Training steps, as they are launched on two processors, in 25, 50 and 75 % of the working set: the
bytes with which LRU moves nothing but what every plan moves. In place of shares below what the
largest node needs stands that one, the tightest that there is. LRU without liveness is counted as
if its memory never fragmented; all others are packed. Then the steps are run in a bounded memory
under the plans of dp, LRU and streaming, in turn: the bytes that they really copy, and the median
times of a step.

Before that, small random graphs, whose optimum Dijkstra's algorithm finds over single copies, and
of some of them, where SciPy is installed, a mixed-integer program too.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import numpy as np

sys.path.append(str(Path(__file__).resolve().parents[1]))

from harness import tabulate
from helpers.memory_optimum import mixed_integer_bytes, optimum, random_graph

from soapstone.deadline import Deadline
from soapstone.engine.mapper import strategy_of
from soapstone.engine.session import Bound, Session
from soapstone.frontend.app import load_app
from soapstone.frontend.memory_plans import launched
from soapstone.frontend.strategies.finding import graph_of
from soapstone.ir.graph import Graph
from soapstone.ir.plan import MemoryPlan
from soapstone.ir.tensor import Array, Role
from soapstone.kernels.choices import Choices
from soapstone.mappers.bounded import BoundedMemoryMapper
from soapstone.runtime import Machine
from soapstone.search.placement import baselines
from soapstone.search.placement.find import memory_plan
from soapstone.search.placement.optimal import fewest_bytes
from soapstone.search.placement.packing import unpacked_bytes
from soapstone.search.placement.timeline import timeline

MODELS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "resnet18": ("resnet", 16, {"depth": 18}),
    "transformer": ("transformer", 16, {}),
    "gcn": ("gcn", 2708, {"hidden": 256, "layers": 8}),
    "gcn, wide": ("gcn", 2708, {"hidden": 2048, "layers": 4}),
    "deepgcn": ("deepgcn", 2708, {"hidden": 256, "layers": 16}),
    "gin": ("gin", 2708, {"hidden": 1024}),
    "gat": ("gat", 2708, {"hidden": 64, "heads": 16}),
    "inception": ("inception", 8, {}),
}
SHARES = (0.25, 0.5, 0.75)
ROOMY = 1 << 60
CPUS = 2
ROUNDS = 9  # of steps that are timed; the first does not count


def models(only: str | None, seconds: float) -> Iterator[dict[str, Any]]:
    """Yield a row for each model and share of its working set."""
    for name, (app, batch_size, sizes) in MODELS.items():
        if only is not None and name != only:
            continue
        graph = graph_of(app, batch_size, sizes=sizes)
        with load_app(app).build(batch_size, **sizes) as built:
            constants = {value: built.constants[value] for value in graph.inputs(Role.CONSTANT)}
        footprint = launched(graph, CPUS)
        roomy = timeline(footprint, ROOMY)
        working_set, least = roomy.working_set_bytes, int(roomy.needs.max())
        for capacity in sorted({max(least, int(working_set * share)) for share in SHARES}):
            row = {"model": name, "nodes": len(footprint.nodes), "share": capacity / working_set}
            found = memory_plan(footprint, capacity, deadline=Deadline(seconds))
            moved = found.transfer_bytes
            tight = roomy.within(capacity)
            dead = baselines.recent_without_liveness(tight)
            plans = {
                "dp": found.plan,
                "LRU": baselines.least_recently_used(footprint, capacity),
                "streaming": baselines.stream(footprint, capacity),
            }
            belady = baselines.furthest_use(footprint, capacity)
            yield row | {
                "MB": moved / 1e6,
                "gap": moved / found.lower_bound_bytes - 1,
                "exact": found.exact,
                "reordered": found.reordered,
                "LRU, no liveness / dp": unpacked_bytes(tight, dead, liveness=False) / moved,
                "LRU / dp": found.lru_bytes / moved,
                "Belady / dp": belady.moved_bytes / moved,
                "streaming / dp": found.streaming_bytes / moved,
                "seconds": found.seconds,
                **run(graph, constants, capacity, plans),
            }


def run(
    graph: Graph, constants: Mapping[str, Array], capacity: int, plans: Mapping[str, MemoryPlan]
) -> dict[str, Any]:
    """Return what a step copies and takes under each plan; steps alternate."""
    choices, steps = Choices(), {}
    with ExitStack() as stack:
        for name, plan in plans.items():
            machine, mapper = Machine.local(cpus=CPUS).bounded(capacity), BoundedMemoryMapper(plan)
            session = stack.enter_context(closing(Session(machine, mapper, 0, choices=choices)))
            bound = session.bind(graph, strategy_of(mapper, graph, machine), constants)
            assert bound.trace.copied_bytes == plan.moved_bytes
            steps[name] = session, bound
        times: dict[str, list[float]] = {name: [] for name in plans}
        for _ in range(ROUNDS):
            for name, (session, bound) in steps.items():
                times[name].append(timed(session, bound))
        medians = {name: float(np.median(values[1:])) for name, values in times.items()}
        return {
            "counted MB": steps["dp"][1].trace.copied_bytes / 1e6,
            "step ms": medians["dp"] * 1e3,
            "LRU's step / dp's": medians["LRU"] / medians["dp"],
            "streaming's step / dp's": medians["streaming"] / medians["dp"],
        }


def timed(session: Session, bound: Bound) -> float:
    """Return the seconds of one step."""
    began = time.perf_counter()
    session.run(bound)
    return time.perf_counter() - began


def small(count: int) -> Iterator[dict[str, Any]]:
    """Yield how many small graphs have the optimum of Dijkstra, and of the integer program."""
    equal = exact = same = programs = 0
    began = time.perf_counter()
    for seed in range(count):
        graph = random_graph(seed)
        roomy = timeline(graph, ROOMY)
        least, most = int(roomy.needs.max()), sum(roomy.padded.values())
        capacity = int(least + (0.0, 0.15, 0.4)[seed % 3] * max(0, most - least))
        found = fewest_bytes(roomy.within(capacity), set())
        exact += found.exact
        equal += found.moved_bytes == optimum(graph, capacity, any_order=False)
        wanted = mixed_integer_bytes(roomy.within(capacity)) if seed < 50 else None
        if wanted is not None:
            programs += 1
            same += found.moved_bytes == wanted
    yield {
        "graphs": count,
        "exact": exact,
        "equal to Dijkstra": equal,
        "programs": programs,
        "equal to HiGHS": same,
        "seconds": time.perf_counter() - began,
    }


def main() -> None:
    """Run both."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--graphs", type=int, default=1000)
    parser.add_argument("--only", choices=tuple(MODELS))
    options = parser.parse_args()
    command = " ".join(["python benchmarks/memory/memory_plans.py", *sys.argv[1:]])
    ratios = ("LRU, no liveness / dp", "LRU / dp", "Belady / dp", "streaming / dp")
    if options.graphs:
        title = "Memory plans of small random graphs"
        tabulate("memory_optimum", title, command, small(options.graphs))
    title = "Memory plans: bytes copied for a training step"
    rows = models(options.only, options.seconds)
    tabulate("memory_plans", title, command, rows, ratios, save=options.only is None)


if __name__ == "__main__":
    main()
