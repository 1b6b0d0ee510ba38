"""Strategies for serving: how the cores of this computer are shared out among requests.

Cores are divided in every way: so many requests at once, each on so many processors of so many
threads. For each kind of group the search finds the fastest way through the graph that is served,
whose weights are constant and folded, by times measured in it; then every division runs. A request
takes its latency, all of them give the throughput: what no other division passes in both is best.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from soapstone.deadline import Deadline
from soapstone.engine.constants import Constants
from soapstone.engine.measuring import drawn
from soapstone.engine.prepare import folded
from soapstone.frontend.inference.latency import asked
from soapstone.frontend.inference.session import InferenceSession
from soapstone.frontend.model import Model
from soapstone.frontend.strategies.finding import forward_of, measure_tasks
from soapstone.frontend.strategies.task_times import Progress as Stage
from soapstone.ir.errors import GraphError
from soapstone.ir.graph import Graph
from soapstone.ir.strategy import Strategy
from soapstone.ir.strategy.transfer import to_original, to_rewritten
from soapstone.ir.tensor import Array, Role
from soapstone.search.cost.profile import measured_machine
from soapstone.search.cost.tasks import MeasuredMachine
from soapstone.search.parallel import Options
from soapstone.search.parallel.mcmc.search import Progress, StrategyResult, search
from soapstone.search.parallel.problem.timing import step_kind
from soapstone.system import usable_cores

OBJECTIVES = ("latency", "throughput")
_ROUNDS, _ROUND_S = 5, 0.4  # of runs of each division, in turns
_SECONDS = 10.0  # of the search for one kind of group


@dataclass(frozen=True)
class FoldedGraph:
    """A forward graph whose constant weights are folded, as inference sessions run it.

    Attributes:
        original: the graph of the model. rewritten: what folding leaves of it.
        contents: the weights that `rewritten` reads.
    """

    original: Graph
    rewritten: Graph
    contents: Mapping[str, Array]

    @cached_property
    def graph(self) -> Graph:
        """`rewritten` as a graph of its own, with weights as constants and no `sources`."""
        rewritten = self.rewritten
        roles = {name: role for name, role in rewritten.roles.items() if role is Role.INPUT}
        fixed = dict.fromkeys(rewritten.roles.keys() - roles.keys(), Role.CONSTANT)
        nodes = tuple(replace(node, sources=()) for node in rewritten.nodes)
        return replace(rewritten, nodes=nodes, roles={**roles, **fixed})

    @staticmethod
    def of(graph: Graph, weights: Mapping[str, Array]) -> FoldedGraph:
        """Return a forward graph with its weights folded; weights that are not given are drawn."""
        graph = replace(graph, updates={})
        names = [name for name, role in graph.roles.items() if role is not Role.INPUT]
        held = {name: weights[name] if name in weights else drawn(graph, name) for name in names}
        prologue, rewritten = folded(graph, held)
        return FoldedGraph(graph, rewritten, Constants(held, prologue))

    def to_original(self, result: StrategyResult) -> StrategyResult:
        """Return the result of a search on `graph` with its strategy stated for `original`."""
        strategy = to_original(result.strategy, self.rewritten, self.original)
        return replace(result, strategy=strategy)

    def to_rewritten(self, strategy: Strategy) -> Strategy:
        """Return a strategy of `original` as one of `graph`."""
        return to_rewritten(strategy, self.original, self.rewritten)


@dataclass(frozen=True)
class Division:
    """One way to share out the cores, and what it gives.

    Attributes:
        requests: at once. cpus, threads: processors of each, and threads of those.
        strategy: that each request runs under.
        simulated_ms: what a request takes while as many as may are under way.
        latency_ms, requests_per_s: the same, and how many end in a second, as measured.
    """

    requests: int
    cpus: int
    threads: int
    strategy: Strategy
    simulated_ms: float
    latency_ms: float
    requests_per_s: float

    @property
    def simulated_per_s(self) -> float:
        """How many requests end in a second, by simulation."""
        return self.requests / self.simulated_ms * 1e3

    def as_dict(self) -> dict[str, Any]:
        """Return the figures as JSON can say them."""
        names = [name for name in self.__dataclass_fields__ if name != "strategy"]
        return {name: getattr(self, name) for name in (*names, "simulated_per_s")}


@dataclass(frozen=True)
class Serving:
    """The divisions of this computer's cores for a model.

    Attributes:
        divisions: all that were measured.
        objective: by which `best` is chosen.
    """

    divisions: tuple[Division, ...]
    objective: str

    @property
    def frontier(self) -> tuple[Division, ...]:
        """Those that no other passes in latency and throughput, by latency."""
        found: list[Division] = []
        ordered = sorted(self.divisions, key=lambda d: (d.latency_ms, -d.requests_per_s))
        for each in ordered:
            if not found or each.requests_per_s > found[-1].requests_per_s:
                found.append(each)
        return tuple(found)

    @property
    def best(self) -> Division:
        """The division of the least latency, or of the most requests in a second."""
        return self.frontier[0 if self.objective == "latency" else -1]

    @property
    def strategy(self) -> Strategy:
        """That of the best division."""
        return self.best.strategy

    def as_dict(self) -> dict[str, Any]:
        """Return the figures as JSON can say them."""
        return {
            "objective": self.objective,
            "best": self.best.as_dict(),
            "frontier": [each.as_dict() for each in self.frontier],
            "divisions": [each.as_dict() for each in self.divisions],
        }

    def __str__(self) -> str:
        rows = [
            "requests  processors  threads     ms (simulated)   requests/s (simulated)",
            *(
                f"{d.requests:8}  {d.cpus:10}  {d.threads:7}"
                f"  {d.latency_ms:9.3f} ({d.simulated_ms:9.3f})"
                f"  {d.requests_per_s:10.1f} ({d.simulated_per_s:10.1f})"
                f"{'  best trade-off' if d in self.frontier else ''}"
                for d in self.divisions
            ),
            f"{self.objective}: requests={self.best.requests}, cpus={self.best.cpus},"
            f" threads={self.best.threads}",
        ]
        return "\n".join(rows)


def find_serving(
    model: Model | Graph | str | Path,
    weights: Mapping[str, Array] | None = None,
    *,
    objective: str = "latency",
    batch_size: int | None = None,
    sizes: Mapping[str, Any] | None = None,
    dims: Mapping[str, int] | None = None,
    cores: int | None = None,
    options: Options | None = None,
    stage: Stage | None = None,
    deadline: Deadline | None = None,
    progress: Progress | None = None,
) -> Serving:
    """Return the ways to share out this computer's cores among requests, and the best of them.

    Args:
        model: an app's name or script, an ONNX file, a graph file, or a graph with its weights.
        objective: "latency", of one request, or "throughput", requests in a second.
        batch_size, sizes, dims: see `finding.graph_of`.
        cores: how many are shared out; all by default.
        options: of the search for one kind of group; by default 10 s.
        stage, progress: called with what is measured, and with what is searched. deadline: until
            which tasks are measured. Ctrl-C ends measuring and searching; what was found is timed.

    Raises:
        GraphError: an unknown objective, or a model that does not run here.
    """
    if objective not in OBJECTIVES:
        raise GraphError(f"objective: {objective!r} found; {' or '.join(OBJECTIVES)} needed")
    graph, known = (
        (model, weights or {})
        if isinstance(model, Graph)
        else forward_of(model, batch_size, sizes=sizes, dims=dims)
    )
    held = {n: known[n] if n in known else drawn(graph, n) for n in graph.roles}
    folded_graph = FoldedGraph.of(graph, held)
    options, deadline = options or Options(seconds=_SECONDS), deadline or Deadline()
    found: dict[tuple[int, int], tuple[StrategyResult, MeasuredMachine]] = {}
    ways = divisions(cores or usable_cores())
    for cpus, threads in dict.fromkeys((p, t) for _, p, t in ways):
        machine = measured_machine(cpus, threads)
        measure_tasks(folded_graph.graph, machine, stage, deadline, folded_graph.contents)
        if deadline.stopped:
            options = replace(options, seconds=0.0)
        result = search(folded_graph.graph, machine, options, progress=progress)
        if result.interrupted:
            deadline.stop()
        found[cpus, threads] = folded_graph.to_original(result), machine
    kind = step_kind(folded_graph.graph)
    slower = {t: m.times.step(kind).slower for (p, t), (_, m) in found.items() if p > 1}
    with ExitStack() as stack:
        sessions = [
            stack.enter_context(
                InferenceSession(
                    folded_graph.original, held, strategy=found[p, t][0].strategy, requests=requests
                )
            )
            for requests, p, t in ways
        ]
        given = {
            name: drawn(folded_graph.original, name)
            for name in folded_graph.original.inputs(Role.INPUT)
        }
        taken: list[list[tuple[float, float]]] = [[] for _ in ways]
        for _ in range(1 + _ROUNDS):
            for session, times in zip(sessions, taken):
                times.append(loaded(session, given, _ROUND_S))
    rows = []
    for (requests, p, t), times in zip(ways, taken):
        result = found[p, t][0]
        shared = 1 + slower.get(t, 0.0) if requests > 1 and p == 1 else 1.0
        provenance = {**result.strategy.provenance, "requests": requests}
        rows.append(
            Division(
                requests,
                p,
                t,
                replace(result.strategy, provenance=provenance),
                result.simulation.step_us * shared / 1e3,
                *(statistics.median(column) for column in zip(*times[1:])),
            )
        )
    return Serving(tuple(rows), objective)


def divisions(cores: int) -> list[tuple[int, int, int]]:
    """Return all (requests, processors of each, threads of those) of so many cores."""
    numbers = [n for n in range(1, cores + 1) if cores % n == 0]
    return [
        (requests, cpus, cores // (requests * cpus))
        for requests in numbers
        for cpus in numbers
        if cores % (requests * cpus) == 0
    ]


def loaded(
    session: InferenceSession, given: Mapping[str, Array], seconds: float
) -> tuple[float, float]:
    """Return the median ms of a run, and runs in a second, while as many as may are under way."""
    least = session.requests
    times, wall = asked(session, given, lambda n, spent: n >= least and spent >= seconds)
    return statistics.median(times) * 1e3, len(times) / wall
