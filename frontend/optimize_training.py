"""Optimised training steps: run beside the original on scratch parameters, kept for training.

Both steps run as `Model.fit` runs them, in sessions of their own, so no parameter of a user is
touched. What a search found for a step is kept for the process.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from soapstone.frontend.optimize_check import drawn, in_turns
from soapstone.frontend.optimizers import LEARNING_RATE
from soapstone.frontend.session import Bound, Session
from soapstone.ir.errors import GraphError
from soapstone.ir.graph import Graph
from soapstone.ir.tensor import Array, Role
from soapstone.mappers import load as load_mapper
from soapstone.mappers.base import GraphMapper
from soapstone.runtime import Machine

if TYPE_CHECKING:
    from soapstone.frontend.optimize import OptimizeResult, Progress

_TOLERANCE = 1e-2  # of the largest change of a value in a step; gradients add up rounding
_NOISE = 0.05  # on scratch parameters, so that none is all zero
_KNOWN: dict[tuple[str, str, str], OptimizeResult] = {}


@dataclass(frozen=True)
class Ground:
    """Where steps run: a machine and the mapper of its work, as `Model.compile` takes them."""

    machine: Machine
    mapper: GraphMapper

    @staticmethod
    def local(cpus: int | None = None) -> Ground:
        """Return the ground of a model that is compiled without any choice."""
        return Ground(Machine.local(cpus=cpus), load_mapper("data_parallel"))

    @property
    def threads(self) -> int:
        """How many threads compute."""
        return sum(processor.threads for processor in self.machine.processors)


@contextmanager
def _running(graph: Graph, ground: Ground) -> Iterator[tuple[Session, Bound]]:
    """Yield a session in which a step is bound to scratch parameters and fed with random inputs."""
    session = Session(ground.machine, copy.copy(ground.mapper), seed=0)
    try:
        mapper = session.mapper
        bound = session.bind(graph, mapper.strategy(graph, ground.machine))
        for name, feed in bound.feeds.items():
            if graph.roles[name] is Role.INPUT:
                feed[...] = drawn(graph, name)
            else:
                feed[...] = 1  # scalars: the number of the step, the learning rate
        yield session, bound
    finally:
        session.close()


def verified_step(graph: Graph, new: Graph, ground: Ground | None = None) -> float:
    """Return the largest difference after one step of two training graphs, from equal parameters.

    Raises:
        GraphError: names or shapes of what they take and make differ, or values by more than
            rounding; names the value.
    """
    check_interface(graph, new, f"graph {new.name!r}")
    ground = ground or Ground.local()
    with _running(graph, ground) as one, _running(new, ground) as other:
        start = _noisy(graph, one[0].state())
        ends = []
        for session, bound in (one, other):
            session.load_state(start)
            session.run(bound)
            results = {name: np.array(bound.results[name]) for name in graph.outputs}
            ends.append((results, session.state()))
    worst = 0.0
    (results, state), (others, after) = ends
    for name in graph.outputs:
        worst = max(worst, _error(f"output {name!r}", results[name], others[name]))
    for name in graph.updates:
        label = f"the next value of {name!r}"
        worst = max(worst, _error(label, state[name], after[name], start[name]))
    return worst


def _noisy(graph: Graph, state: Mapping[str, Array]) -> dict[str, Array]:
    """Return parameters and states with noise added; states, such as variances, only grow."""
    random = np.random.default_rng(0)
    result = {}
    for name, value in state.items():
        noise = _NOISE * random.standard_normal(value.shape)
        if graph.roles[name] is Role.STATE:
            noise = np.abs(noise)
        result[name] = (value + noise).astype(value.dtype) if value.dtype.kind == "f" else value
    return result


def _error(label: str, one: Array, other: Array, start: Array | None = None) -> float:
    """Return how much two arrays differ, of which the changes since the start should be equal."""
    if one.size == 0:
        return 0.0
    before = np.zeros(one.shape) if start is None else start.astype(np.float64)
    least = 1e-6 * float(np.abs(one.astype(np.float64)).max()) + 1e-9
    error = float(np.abs(one.astype(np.float64) - other).max())
    if not error <= _TOLERANCE * float(np.abs(one - before).max()) + least:
        raise GraphError(f"{label} differs by {error:.3g} after one step")
    return error


def measured_steps(before: Graph, after: Graph, ground: Ground) -> tuple[float, float]:
    """Return the median time of a step of two training graphs, in microseconds, in turns."""

    def runner(session: Session, bound: Bound) -> Callable[[], object]:
        if LEARNING_RATE in bound.feeds:
            bound.feeds[LEARNING_RATE][...] = 0  # parameters stay what they are
        return lambda: session.run(bound)

    with _running(before, ground) as one, _running(after, ground) as other:
        return in_turns(runner(*one), runner(*other))


def check_interface(graph: Graph, found: Graph, label: str) -> None:
    """Check that a training graph takes and makes what another does.

    Raises:
        GraphError: an input, output or update is missing, unknown, or of another role or type.
    """
    for name, role in graph.roles.items():
        needed = f"{role} {name!r}"
        if name not in found.roles:
            raise GraphError(f"{label}: {needed} is missing; {graph.tensors[name]} needed")
        if found.roles[name] is not role:
            raise GraphError(f"{label}: {found.roles[name]} {name!r} found, {needed} needed")
        if found.tensors[name] != graph.tensors[name]:
            what = f"{found.tensors[name]} found, {graph.tensors[name]} needed"
            raise GraphError(f"{label}: {needed}: {what}")
    for name, role in found.roles.items():
        if name not in graph.roles:
            raise GraphError(f"{label}: {role} {name!r} is unknown to graph {graph.name!r}")
    if found.outputs != graph.outputs:
        raise GraphError(f"{label}: outputs {found.outputs} found, {graph.outputs} needed")
    if found.updates.keys() != graph.updates.keys():
        name = min(found.updates.keys() ^ graph.updates.keys())
        what = "is missing" if name in graph.updates else "found, none needed"
        raise GraphError(f"{label}: the next value of {name!r} {what}")
    for name in graph.outputs:
        if found.tensors[name] != graph.tensors[name]:
            what = f"{found.tensors[name]} found, {graph.tensors[name]} needed"
            raise GraphError(f"{label}: output {name!r}: {what}")


def loaded_step(step: Graph | str | Path) -> tuple[Graph, str]:
    """Return a training graph, from its file, and what errors call it.

    Raises:
        GraphError: the file holds no training graph.
    """
    from soapstone.ir.files import load_graph

    if isinstance(step, Graph):
        graph, label = step, f"step graph {step.name!r}"
    else:
        graph, label = load_graph(step)[0], f"step file {str(step)!r}"
    if not graph.updates:
        raise GraphError(f"{label}: a graph without updates found, a training graph needed")
    return graph, label


def optimized_step(graph: Graph, ground: Ground, progress: Progress | None) -> OptimizeResult:
    """Return what the search finds for a training graph on a machine, once in a process."""
    from soapstone.frontend.optimize import optimize

    key = (str(graph), str(ground.machine.describe()), repr(type(ground.mapper)))
    if key not in _KNOWN:
        _KNOWN[key] = optimize(graph, ground=ground, progress=progress)
    found = _KNOWN[key]
    return replace(found, graph=replace(found.graph, initials=graph.initials))


__all__ = [
    "Ground",
    "check_interface",
    "loaded_step",
    "measured_steps",
    "optimized_step",
    "verified_step",
]
