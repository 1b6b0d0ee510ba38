"""Training over a graph in parts: the runtime's own times are fed back, and cuts move by them.

A part is a range of vertices, which its worker computes in every layer. What each layer takes on
each part is read from the timeline of a step; a `Partitioner` learns from it where to cut, and the
graph is bound again there. What is computed stays the same but for the order of sums.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path

import numpy as np

from soapstone.engine.peers import Peers
from soapstone.engine.session import Bound
from soapstone.frontend.graphs.adjacency import Adjacency
from soapstone.frontend.model import Model
from soapstone.frontend.strategies.step_times import UNDISTURBED_S
from soapstone.frontend.training.state import Callback, TrainingState
from soapstone.ir.dims import Whole
from soapstone.ir.graph import Graph
from soapstone.ir.tensor import Array
from soapstone.mappers.ranges import RangesMapper
from soapstone.runtime import Profile
from soapstone.search.partition.costs import Costs
from soapstone.search.partition.cuts import Cuts, PartitionError
from soapstone.search.partition.features import Features
from soapstone.search.partition.partitioner import Partitioner
from soapstone.system import preemptions

_TASK = "task"  # what events of a timeline are that compute something


class Partitioned(Callback):
    """A graph's vertices in parts, to compile and to fit a model with.

    Attributes:
        partitioner: which cuts there are, and what was learned.
        mapper: what follows them; a model is compiled with it.
        path: of the file of costs, or None.

    Args:
        model: whose layers gather from neighbours.
        edges: those neighbours.
        parts: how many.
        method: "learned", "vertex", "edge" or "metis"; see `Partitioner`. given: the cuts of METIS.
        costs: a file of what was learned before; where there is none it is made by `save`.

    Raises:
        PartitionError: more parts than vertices, a model that gathers nothing, or costs that
            cannot be read or are those of another number of layers.

    Example:
        >>> split = Partitioned(model, graph.adjacency, 2)
        >>> model.compile("adam", "masked_cross_entropy", mapper=split.mapper)
        >>> model.fit(splits.train_x, splits.train_y, epochs=50, shuffle=False, callbacks=[split])
    """

    def __init__(
        self,
        model: Model,
        edges: Adjacency,
        parts: int,
        method: str = "learned",
        *,
        costs: str | Path | None = None,
        given: Cuts | None = None,
    ) -> None:
        known = Costs.load(costs) if costs is not None and Path(costs).exists() else None
        _, widths = layers_of(model.build(training=True))
        forward, backward = (edges.indptr, edges.indices), (edges.indptr_t, edges.indices_t)
        features = Features.of(forward, backward, widths)
        self.partitioner = Partitioner(features, parts, method, known, given)
        self.mapper = RangesMapper(self.partitioner.cuts, self.partitioner.settled)
        self.path = costs
        self._context: AbstractContextManager[Profile] | None = None
        self._timeline: Profile | None = None
        self._lost = 0  # how often processors were taken away before the step

    def on_train_begin(self, state: TrainingState) -> None:
        """Time the first step, if cuts are learned."""
        if state.model is not None:
            self.partitioner.processors = len(state.model.trainer.machine.workers)
        self._begin(state)

    def on_step_end(self, state: TrainingState) -> None:
        """Learn from the step, and bind the graph again where cuts have moved."""
        timeline, model = self._timeline, state.model
        self._end()
        if timeline is None or model is None:
            return
        trainer, learning = model.trainer, self.partitioner
        shape = len(learning.features.widths), learning.parts
        lost = float(preemptions() - self._lost > state.step_us * 1e-6 / UNDISTURBED_S)
        mine = spent_ns(trainer.bound("train", model.batch_size), timeline, shape)
        peers = Peers(trainer.executor)
        found = peers.all(np.array([lost, *mine.ravel()])).sum(axis=0)
        moved = learning.observe(found[1:].reshape(shape), disturbed=bool(found[0]))
        again = moved or (learning.settled and trainer.planned)  # what is kept is planned well
        found = peers.first(np.array([again, learning.settled, *learning.cuts]))
        if found[0]:  # all processes cut where the first does, whatever their last bits are
            learning.cuts = self.mapper.cuts = tuple(int(cut) for cut in found[2:])
            self.mapper.settled = bool(found[1])
            trainer.rebind()
        self._begin(state)

    def on_train_end(self, state: TrainingState) -> None:
        """Take no more times."""
        self._end()

    def save(self) -> None:
        """Write what was learned to the file of costs, if there is one and anything was."""
        if self.path is not None and self.partitioner.measured:
            self.partitioner.costs.save(self.path)

    def _begin(self, state: TrainingState) -> None:
        if not self.partitioner.settled and state.model is not None:
            self._context = state.model.trainer.session.timed()
            self._timeline = self._context.__enter__()
            self._lost = preemptions()

    def _end(self) -> None:
        context, self._context, self._timeline = self._context, None, None
        if context is not None:
            context.__exit__(None, None, None)


def layers_of(graph: Graph) -> tuple[Mapping[str, int], tuple[int, ...]]:
    """Return the layer of each node that sees samples, and the columns that each layer gathers.

    A layer ends with what gathers from neighbours: a node is in the layer of as many gathers as
    come before it, what is after the last in the last layer, and a gradient where its node is.

    graph: a model's, or that of a step.

    Raises:
        PartitionError: nothing in it gathers.
    """
    layers: dict[str, int] = {}
    before: dict[str, int] = {}  # gathers on the longest way to a value
    widths: dict[int, int] = {}
    for node in graph.nodes:
        own = layers.get(node.origin or "")
        layer = max((before.get(name, 0) for name in node.inputs), default=0)
        layers[node.name] = layer = layer if own is None else own
        gathers = 0
        for operand in graph.signature(node).inputs:
            for axis in operand.axes:
                if isinstance(axis, Whole) and axis.of and own is None:
                    gathers = 1
                    width = int(np.prod(operand.shape)) // max(axis.extent, 1)
                    widths[layer] = max(widths.get(layer, 0), width)
        before.update(dict.fromkeys(node.outputs, layer + gathers))
    if not widths:
        raise PartitionError(
            f"partition: model {graph.name!r} gathers nothing from neighbours; a layer over a"
            " graph needed"
        )
    samples, last = graph.sample_dims, max(widths)
    found = {name: min(layer, last) for name, layer in layers.items() if name in samples}
    return found, tuple(widths.get(layer, 0) for layer in range(last + 1))


def spent_ns(bound: Bound, timeline: Profile, shape: tuple[int, int]) -> Array:
    """Return what each layer's tasks took on each part in a step: (layers, parts) nanoseconds.

    bound: the step. timeline: of this process, of that step. shape: layers and parts.
    """
    layers, _ = layers_of(bound.graph)
    layer_of: dict[str, int] = {}
    for launch in bound.program.launches:
        known = [layers[name] for name in launch.node.work_of if name in layers]
        if known and launch.points == shape[1]:
            layer_of[launch.node.name] = known[0]
    spent = np.zeros(shape)
    for event in timeline.events:
        layer = layer_of.get(event.name)
        if layer is not None and event.category == _TASK:
            spent[layer, event.point] += event.duration_ns
    return spent
