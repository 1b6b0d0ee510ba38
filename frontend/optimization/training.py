"""Optimised training steps: run beside the original on scratch parameters, kept for training.

Both steps run as `Model.fit` runs them, in sessions of their own, so no parameter of a user is
touched. What a search found for a step is kept for the process.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack, closing
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np

from soapstone.dtypes import kind_of
from soapstone.engine.mapper import GraphMapper, strategy_of
from soapstone.engine.measuring import hold, running
from soapstone.engine.session import Bound, Session
from soapstone.frontend.optimization.check import Arrays, difference, median_us
from soapstone.frontend.training.loss_scale import SCALE
from soapstone.ir.errors import GraphError
from soapstone.ir.graph import Graph
from soapstone.ir.tensor import Array, Role
from soapstone.ir.training.guard import guarded
from soapstone.mappers import load as load_mapper
from soapstone.runtime import Machine

if TYPE_CHECKING:
    from soapstone.frontend.optimization.result import OptimizeResult

_TOLERANCE = 1e-2  # of the largest change of a value in a step; gradients add up rounding
_ROUNDING = 1e-5  # of the largest change of all: gradients that are zero but for rounding
_NOISE = 0.05  # on scratch parameters, of their spread, so that none is all zero
_KNOWN: dict[tuple[str, str, str], OptimizeResult] = {}


@dataclass(frozen=True)
class Ground:
    """Where steps run: a machine and the mapper of its work, as `Model.compile` takes them.

    constants: contents of a step's constants, by name, such as the edges of a graph of vertices.
    """

    machine: Machine
    mapper: GraphMapper
    constants: Arrays = field(default_factory=dict)

    @staticmethod
    def local(cpus: int | None = None) -> Ground:
        """Return the ground of a model that is compiled without any choice."""
        return Ground(Machine.local(cpus=cpus), load_mapper("data_parallel"))

    @property
    def threads(self) -> int:
        """How many threads compute."""
        return sum(processor.threads for processor in self.machine.workers)

    def running(self, graph: Graph) -> AbstractContextManager[tuple[Session, Bound]]:
        """Return a session in which a step is bound to scratch parameters and random inputs."""
        mapper = copy.copy(self.mapper)
        strategy = strategy_of(mapper, graph, self.machine)
        held = {name: self.constants[name] for name in graph.inputs(Role.CONSTANT)}
        return running(graph, self.machine, strategy, mapper, constants=held)


class StepRunner:
    """A training step on scratch parameters, to be run for its results or for its time."""

    def __init__(self, graph: Graph, ground: Ground) -> None:
        self._outputs = graph.outputs
        self._stack = ExitStack()
        self._session, self._bound = self._stack.enter_context(ground.running(graph))

    def run(self, given: Arrays) -> Arrays:
        """Return outputs, and all parameters and states after a step from those given."""
        self._session.load_state(given)
        self._session.run(self._bound)
        results = {name: np.array(self._bound.results[name]) for name in self._outputs}
        return results | self._session.state()

    def state(self) -> Arrays:
        """Return parameters and states."""
        return self._session.state()

    def round(self) -> float:
        """Return the median time of a step, in microseconds."""
        hold(self._bound)
        return median_us(lambda: self._session.run(self._bound))

    def close(self) -> None:
        """Free what it holds."""
        self._stack.close()


class _Stepping(Protocol):
    """What runs steps, here or in another process."""

    def run(self, given: Arrays) -> Arrays | None: ...

    def state(self) -> Arrays: ...


def verified_step(graph: Graph, new: Graph, ground: Ground | None = None) -> float:
    """Return the largest difference after one step of two training graphs, from equal parameters.

    Raises:
        GraphError: names or shapes of what they take and make differ, or values by more than
            rounding; names the value.
    """
    check_interface(graph, new, f"graph {new.name!r}")
    ground = ground or Ground.local()
    with (
        closing(StepRunner(graph, ground)) as one,
        closing(StepRunner(new, ground)) as other,
    ):
        return agree_steps(graph, one, other)


def agree_steps(graph: Graph, one: _Stepping, other: _Stepping) -> float:
    """Return the largest difference after one step of two runners; see `verified_step`."""
    start = _noisy(graph, one.state())
    needed, made = one.run(start), other.run(start)
    if needed is None or made is None:
        raise GraphError("a step does not run")
    worst = 0.0
    for name in graph.outputs:
        scale = _largest(needed[name])
        worst = max(worst, _error(f"output {name!r}", needed[name], made[name], scale))
    changes = {name: _largest(needed[name], start[name]) for name in graph.updates}
    least = _ROUNDING * max(changes.values(), default=0.0)
    for name, change in changes.items():
        label = f"the next value of {name!r}"
        worst = max(worst, _error(label, needed[name], made[name], change + least / _TOLERANCE))
    return worst


def _largest(array: Array, start: Array | float = 0.0) -> float:
    """Return the largest difference of an array from what it was, NaN and infinities left out."""
    with np.errstate(invalid="ignore"):
        apart = np.abs(array.astype(np.float64) - start)
    return float(apart[np.isfinite(apart)].max(initial=0.0))


def _noisy(graph: Graph, state: Mapping[str, Array]) -> dict[str, Array]:
    """Return parameters and states with noise added; states, such as variances, only grow."""
    random = np.random.default_rng(0)
    result = {}
    for name, value in state.items():
        noise = _NOISE * (float(value.std()) or 1.0) * random.standard_normal(value.shape)
        if graph.roles[name] is Role.STATE:
            noise = np.abs(noise)
        result[name] = (value + noise).astype(value.dtype) if kind_of(value.dtype) == "f" else value
    return result


def _error(label: str, one: Array, other: Array, scale: float) -> float:
    """Return how much two arrays differ; that should be little beside a scale."""
    error = _largest(one, other)
    if elsewhere := difference(one, other).elsewhere:
        raise GraphError(f"{label} differs by NaN or infinity at {elsewhere} places")
    if not error <= _TOLERANCE * scale + 1e-6 * _largest(one) + 1e-9:
        raise GraphError(f"{label} differs by {error:.3g} after one step")
    return error


def check_interface(graph: Graph, candidate: Graph, label: str) -> None:
    """Check that a training graph takes and makes what another does.

    Raises:
        GraphError: an input, output or update is missing, unknown, or of another role or type.
    """
    for name, role in graph.roles.items():
        needed = f"{role} {name!r}"
        if name not in candidate.roles:
            raise GraphError(f"{label}: {needed} is missing; {graph.tensors[name]} needed")
        if candidate.roles[name] is not role:
            raise GraphError(f"{label}: {candidate.roles[name]} {name!r} found, {needed} needed")
        if candidate.tensors[name] != graph.tensors[name]:
            what = f"{candidate.tensors[name]} found, {graph.tensors[name]} needed"
            raise GraphError(f"{label}: {needed}: {what}")
    for name, role in candidate.roles.items():
        if name not in graph.roles:
            raise GraphError(f"{label}: {role} {name!r} is unknown to graph {graph.name!r}")
    if candidate.outputs != graph.outputs:
        raise GraphError(f"{label}: outputs {candidate.outputs} found, {graph.outputs} needed")
    if candidate.updates.keys() != graph.updates.keys():
        name = min(candidate.updates.keys() ^ graph.updates.keys())
        what = "is missing" if name in graph.updates else "found, none needed"
        raise GraphError(f"{label}: the next value of {name!r} {what}")
    for name in graph.outputs:
        if candidate.tensors[name] != graph.tensors[name]:
            what = f"{candidate.tensors[name]} found, {graph.tensors[name]} needed"
            raise GraphError(f"{label}: output {name!r}: {what}")


class Steps:
    """The training graphs of a model by batch size: original, optimised, or of a file.

    Args:
        original: makes the model's own training graph of a batch size, such as batch_size.
        optimize: whether to search for a faster one, for the size of the batches.
        step: a graph that a search has found, or its file; it is for batches of one size.

    Raises:
        GraphError: a step that does not fit the model; names what differs.
    """

    def __init__(
        self,
        original: Callable[[int], Graph],
        ground: Ground,
        optimize: bool,
        step: Graph | str | Path | None,
        batch_size: int = 1,
    ) -> None:
        if optimize and step is not None:
            raise GraphError("optimize: found with a step, which is an optimised one already")
        self._original, self._ground, self._optimize = original, ground, optimize
        self._quiet = True
        self._size: int | None = None  # of the batches that optimised steps are for
        self._found: dict[int, Graph] = {}
        self.result: OptimizeResult | None = None  # of the last search
        self.given: Graph | None = None
        if step is not None:
            self.given, self._label = _loaded(step)
            self._size = _batch_size(self.given, original(batch_size), self._label)
            needed = original(self._size)
            check_interface(needed, self.given, self._label)
            self.given = replace(self.given, initials=needed.initials)
            if SCALE not in self.given.roles:  # else it is no older file's, which are not guarded
                self.given = guarded(self.given, needed.outputs[1])

    def expect(self, batch_size: int, progress: bool) -> None:
        """Prepare for batches of a size; the last one of a data set may be smaller.

        Raises:
            GraphError: the given step is for batches of another size.
        """
        if self.given is not None and batch_size != self._size:
            raise GraphError(
                f"{self._label}: it is for batches of {self._size}; {batch_size} found"
            )
        self._size, self._quiet = batch_size, not progress

    def graph(self, batch_size: int) -> Graph:
        """Return the graph of a step for a batch size: found at its first use, and checked."""
        original = self._original(batch_size)
        wanted = self._optimize or self.given is not None
        if not wanted or batch_size != (self._size or batch_size):
            return original
        if batch_size not in self._found:
            self._found[batch_size] = self._checked(original)
        return self._found[batch_size]

    def _checked(self, original: Graph) -> Graph:
        if self.given is None:
            self.result = optimized_step(original, self._ground, self._quiet)
            return self.result.graph
        try:
            verified_step(original, self.given, self._ground)
        except GraphError as error:
            raise GraphError(f"{self._label}: {error}") from None
        return self.given


def optimized_step(graph: Graph, ground: Ground, quiet: bool = False) -> OptimizeResult:
    """Return what the search finds for a training graph on a machine, once in a process."""
    from soapstone.frontend.optimization.optimize import optimize
    from soapstone.frontend.progress import staged

    key = (str(graph), str(ground.machine.describe()), repr(type(ground.mapper)))
    if key not in _KNOWN:
        search = partial(optimize, graph, weights=ground.constants, ground=ground)
        if quiet:
            _KNOWN[key] = search()
        else:
            with staged() as stages:
                _KNOWN[key] = search(progress=stages)
    found = _KNOWN[key]
    return replace(found, graph=replace(found.graph, initials=graph.initials))


def _loaded(step: Graph | str | Path) -> tuple[Graph, str]:
    """Return a training graph, perhaps from its file, and what errors call it."""
    from soapstone.ir.files.graphs import load_graph

    if isinstance(step, Graph):
        graph, label = step, f"step {step.name!r}"
    else:
        graph, label = load_graph(step)[0], f"step file {str(step)!r}"
    if not graph.updates:
        raise GraphError(f"{label}: no updates found; a training graph needed")
    return graph, label


def _batch_size(graph: Graph, model: Graph, label: str) -> int:
    """Return how many samples a training graph is for: the first extent of its inputs."""
    name = model.inputs(Role.INPUT)[0]
    spec = graph.tensors.get(name)
    if spec is None or not spec.rank or not spec.shape[0]:
        raise GraphError(f"{label}: input {name!r} is missing; {model.tensors[name]} needed")
    return spec.shape[0]
