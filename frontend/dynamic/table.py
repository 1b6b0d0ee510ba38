"""Tables of vectors whose rows are values: a step reads and updates those that it uses."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from soapstone.engine.initial import materialise
from soapstone.errors import DataError
from soapstone.frontend.dynamic.rows import GraphByRows, Rows, fill, gathered, pieces
from soapstone.frontend.dynamic.values import Lazy
from soapstone.ir.builder import GraphBuilder
from soapstone.ir.errors import GraphError
from soapstone.ir.graph import Graph, Initial
from soapstone.ir.tensor import Array, Role, TensorSpec
from soapstone.ir.training.guard import LEARNING_RATE, STEP

if TYPE_CHECKING:
    from soapstone.frontend.dynamic.session import DynamicSession


class Table:
    """A trained table; `table[id]` is a row of it, a value.

    Attributes:
        name: of the parameter. data: (rows, width) float32.
    """

    def __init__(
        self, model: DynamicSession, name: str, shape: tuple[int, int], initial: Initial
    ) -> None:
        self.name = name
        self.model = model
        self.data = materialise(initial, TensorSpec(shape, "float32"), model.seed, name)
        self._states: dict[str, Array] = {}
        self._rows: Rows = model.rows_of(TensorSpec(shape[1:], "float32"))
        self._used: dict[int, Lazy] = {}
        self._places: list[int] = []  # among rows, of those that are used
        self._fetched = 0
        self._updates = GraphByRows(model.graphs, self._updating)

    def __getitem__(self, row: int) -> Lazy:
        """Return a row as a value of this step.

        Raises:
            DataError: there is no such row.
        """
        known = self._used.get(row)
        if known is not None:
            return known
        if not hasattr(row, "__index__") or not 0 <= row < len(self.data):
            raise DataError(
                f"table {self.name!r}: row {row!r} found, 0 to {len(self.data) - 1} needed"
            )
        place = self._rows.take(1)
        self._places.append(place)
        made = self._used[row] = self.model.given(self._rows, place)
        return made

    def fetch(self) -> None:
        """Copy the rows that were asked for to where values are."""
        if self._fetched < len(self._used):
            used = list(self._used)[self._fetched :]
            self._rows.data[self._places[self._fetched :]] = self.data[used]
            self._fetched = len(self._used)

    def gradients(self) -> Array:
        """Return a copy of the gradients of the rows that were used."""
        grads: Array = self._rows.grads[self._places]
        return grads

    def learn(self, grad: Array, rate: float, step: int) -> None:
        """Update the rows that were used; grad: of these, as `gradients` orders them."""
        ids = np.fromiter(self._used, np.intp, len(self._used))
        for count, size in pieces(len(ids), self.data.shape[1]):
            bound = self._updates.get(size).bound
            here, ids = ids[:count], ids[count:]
            feeds = bound.feeds
            fill(feeds[f"{self.name}.gradient"], grad[:count])
            grad = grad[count:]
            arrays = self._arrays(bound.graph)
            for name, whole in arrays.items():
                gathered(feeds[name], whole, here)
            feeds[LEARNING_RATE][...] = rate
            if STEP in feeds:
                feeds[STEP][...] = step
            self.model.graphs.run(bound)
            for whole, made in zip(arrays.values(), bound.graph.outputs):
                whole[here] = bound.results[made][:count]

    def _arrays(self, graph: Graph) -> dict[str, Array]:
        """Return the table and its states, by name, in the order of the outputs of an update."""
        names = [name for name in graph.roles if name.startswith(f"{self.name}.rows")]
        for name in names[1:]:
            if name not in self._states:
                self._states[name] = np.zeros_like(self.data)
        return {name: self._states.get(name, self.data) for name in names}

    def _updating(self, rows: int) -> Graph:
        """Return the graph that updates a number of rows: their next contents are its outputs."""
        from soapstone.frontend.dynamic.session import update_inputs

        builder = GraphBuilder(f"{self.name}.update")
        finite = update_inputs(builder)
        shape = (rows, *self.data.shape[1:])
        own = builder.input(f"{self.name}.rows", shape, role=Role.PARAMETER)
        grad = builder.input(f"{self.name}.gradient", shape)
        self.model.optimizer.emit(builder, own, grad, finite)
        graph = builder.build()
        carried = (Role.PARAMETER, Role.STATE)
        names = [name for name, role in graph.roles.items() if role in carried]
        for name in names:
            first = graph.initials.get(name)
            if graph.tensors[name].shape != shape or (first is not None and first.scale):
                raise GraphError(
                    f"table {self.name!r}: {type(self.model.optimizer).__name__} has states that"
                    " are not by row, or do not begin at 0; SGD, Adam or RMSprop needed"
                )
        roles = {n: Role.INPUT if r in carried else r for n, r in graph.roles.items()}
        outputs = tuple(graph.updates[name] for name in names)
        return replace(graph, roles=roles, updates={}, initials={}, outputs=outputs)

    def forget(self) -> None:
        """End a step."""
        self._used.clear()
        self._places.clear()
        self._fetched = 0

    def state(self) -> dict[str, Array]:
        """Return copies of the table and its states, by name."""
        return {self.name: self.data.copy(), **{k: v.copy() for k, v in self._states.items()}}

    def own(self, values: Mapping[str, Array]) -> dict[str, Array]:
        """Return those of some arrays that are the table and its states, by name.

        Raises:
            DataError: one has another shape.
        """
        own = {
            n: v for n, v in values.items() if n == self.name or n.startswith(f"{self.name}.rows")
        }
        for name, whole in own.items():
            if np.shape(whole) != self.data.shape:
                raise DataError(
                    f"{name!r}: shape {np.shape(whole)} found, {self.data.shape} needed"
                )
        return own

    def load_state(self, own: Mapping[str, Array]) -> None:
        """Replace the table and its states by what `own` returned."""
        for name, whole in own.items():
            if name == self.name:
                self.data[...] = whole
            else:
                self._states[name] = np.array(whole)
