"""Prices graphs for ONNX Runtime: groups of operators, each measured once as it runs them.

Follows TASO, section 2.6: the cost of a graph is the sum of the measured times of what is launched,
with ONNX Runtime's own fusions, its folding of constants, and the conversions between plain and
blocked layouts where operators that want different ones meet.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass
from typing import Any

import numpy as np

from soapstone.cache.environment import installed
from soapstone.cache.sources import modules_of, stamp
from soapstone.cache.store import Store
from soapstone.engine.constants import determined as value_of
from soapstone.ir.files.layouts import Layouts
from soapstone.ir.graph import Graph, Node
from soapstone.ir.tensor import Array, Arrays, TensorSpec
from soapstone.search.cost.cost import NO_LAYOUTS, Cost
from soapstone.search.cost.measure import Weights
from soapstone.search.cost.measured import MeasuredCost
from soapstone.search.cost.ort_groups import Group, determined, groups, small
from soapstone.search.cost.ort_measure import (
    Bench,
    Export,
    Measured,
    Reads,
    conversion_us,
    measure,
    node_us,
)
from soapstone.system import cache_bytes


@dataclass(frozen=True)
class _Priced:
    """A group with what it costs where it stands."""

    group: Group
    measured: Measured


class OnnxRuntimeCost(MeasuredCost):
    """The cost model of ONNX Runtime's CPU provider on this computer.

    Boundary values whose layout is not plain count as being in ONNX Runtime's blocked layout.

    Args:
        export: writes a graph with its weights as a serialised ONNX model.
    """

    target = "onnxruntime"

    def __init__(
        self,
        export: Export,
        threads: int | None = None,
        *,
        database: Store | None = None,
        weights: Weights = Weights.COLD,
    ) -> None:
        super().__init__(threads, database, weights)
        span = cache_bytes(3) * 3 // 2 if weights is Weights.COLD else 4 * cache_bytes(2)
        self._bench = Bench(export, self.threads, span)
        made = stamp(*modules_of(export, measure, groups), compiled=True)
        about = ["onnxruntime", installed("onnxruntime"), made, str(weights), self.threads]
        self._label = json.dumps(about)
        self._known: dict[tuple[Any, ...], Measured] = {}
        self._flops: dict[tuple[Any, ...], float] = {}
        self._node_us: float | None = None

    def cost(self, graph: Graph, constants: Arrays, layouts: Layouts = NO_LAYOUTS) -> Cost:
        """Return what one run of the graph in ONNX Runtime costs.

        Raises:
            UnsupportedError: an operator has no counterpart in ONNX (from `export`).
        """
        known = determined(graph, constants.keys())
        priced = self._priced(graph, constants, known, layouts)
        time_us, launches, nbytes = 0.0, 0, 0.0
        for each in priced:
            time_us += each.measured.time_us
            launches += each.measured.launches
            nbytes += each.measured.nbytes
        for spec, inward in _conversions(graph, priced, layouts):
            time_us += self._conversion(spec, inward).time_us
            launches += 1
            nbytes += 2 * spec.nbytes
        flops = sum(self._flops_of(graph, node) for each in priced for node in each.group.nodes)
        peak = _peak_bytes(graph, [each.group for each in priced], known)
        return Cost(time_us + launches * self._overhead(), flops, nbytes, launches, peak)

    def explain(
        self, graph: Graph, constants: Arrays, layouts: Layouts = NO_LAYOUTS
    ) -> list[tuple[str, float]]:
        """Return each group's operators with their time in microseconds, conversions last."""
        known = determined(graph, constants.keys())
        priced = self._priced(graph, constants, known, layouts)
        lines = [
            (" + ".join(node.operator for node in each.group.nodes), each.measured.time_us)
            for each in priced
        ]
        for spec, inward in _conversions(graph, priced, layouts):
            word = "to blocked" if inward else "to plain"
            lines.append((f"{word} {spec}", self._conversion(spec, inward).time_us))
        return lines

    def _priced(
        self, graph: Graph, constants: Arrays, known: Set[str], layouts: Layouts
    ) -> list[_Priced]:
        def contents(name: str) -> Array:
            if name in constants:
                return np.asarray(constants[name])
            return value_of(graph, name, lambda weight: np.asarray(constants[weight]))

        blocked = {name: _is_blocked(name, layouts) for name in graph.roles}
        pieces = []
        for group in groups(graph, known):
            mask = tuple(
                _may_be_blocked(graph.tensors[name]) and blocked.get(name, False)
                for name in group.inputs
            )
            measured = self._measured(graph, group, contents, mask)
            blocked |= zip(group.outputs, measured.blocked)
            pieces.append(_Priced(group, measured))
        return pieces

    def _measured(
        self, graph: Graph, group: Group, contents: Callable[[str], Array], mask: tuple[bool, ...]
    ) -> Measured:
        chosen = {n: contents(n) for n in group.fixed if small(graph.tensors[n])}
        key = (group.form(graph, chosen), mask)
        measured = self._known.get(key)
        if measured is None:
            about = json.dumps(key, default=str, separators=(",", ":"))
            held = self._kept(
                f"{self._label} {about}",
                lambda: _record(measure(graph, group, chosen, mask, self._bench, self.deadline)),
            )
            measured = self._known[key] = _measured(held)
        return measured

    def _conversion(self, spec: TensorSpec, inward: bool) -> Measured:
        """Return the time from the plain layout to the blocked one, or back."""
        key = ("conversion", spec, inward)
        measured = self._known.get(key)
        if measured is None:

            def make() -> dict[str, Any]:
                us = conversion_us(spec, inward, self._bench, self.deadline)
                return _record(Measured(us, 1, 2.0 * spec.nbytes, (), ()))

            what = f"{self._label} {'to' if inward else 'from'} blocked {spec}"
            measured = self._known[key] = _measured(self._kept(what, make))
        return measured

    def _overhead(self) -> float:
        if self._node_us is None:  # 0 where it is too little to see
            held = self._kept(f"{self._label} node", lambda: {"us": node_us(self._bench)})
            self._node_us = float(held["us"])
        return self._node_us

    def _flops_of(self, graph: Graph, node: Node) -> float:
        key = (node.operator, node.items, tuple(graph.tensors[name] for name in node.inputs))
        flops = self._flops.get(key)
        if flops is None:
            flops = self._flops[key] = graph.flops(node)
        return flops


def _record(made: Measured) -> dict[str, Any]:
    """Return what the database keeps of a group or a conversion."""
    return {
        "us": float(made.time_us),
        "launches": int(made.launches),
        "nbytes": float(made.nbytes),
        "reads": [[bool(reads.plain), bool(reads.blocked)] for reads in made.reads],
        "blocked": [bool(blocked) for blocked in made.blocked],
    }


def _measured(record: Any) -> Measured:
    """Return what a record of the database says."""
    reads = tuple(Reads(*each) for each in record["reads"])
    blocked = tuple(record["blocked"])
    return Measured(record["us"], record["launches"], record["nbytes"], reads, blocked)


def _is_blocked(name: str, layouts: Layouts) -> bool:
    order = layouts.get(name)
    return order is not None and order != tuple(range(len(order)))


def _may_be_blocked(spec: TensorSpec) -> bool:
    return spec.rank == 4 and spec.dtype == "float32"


def _conversions(
    graph: Graph, priced: Sequence[_Priced], layouts: Layouts
) -> Iterator[tuple[TensorSpec, bool]]:
    """Yield the conversions of a graph: the value, and whether it is to the blocked layout.

    A value is converted once for all readers that want it otherwise than it was made.
    """
    wanted: dict[str, list[bool]] = {}
    for each in priced:
        for name, reads in zip(each.group.inputs, each.measured.reads):
            wanted.setdefault(name, []).extend(
                apart for apart, found in ((False, reads.plain), (True, reads.blocked)) if found
            )
    for name in graph.outputs:
        wanted.setdefault(name, []).append(_is_blocked(name, layouts))
    made = {name: _is_blocked(name, layouts) for name in graph.roles}
    for each in priced:
        made |= zip(each.group.outputs, each.measured.blocked)
    for name, layouts_read in wanted.items():
        spec = graph.tensors[name]
        if name in made and _may_be_blocked(spec) and (not made[name]) in layouts_read:
            yield spec, not made[name]


def _peak_bytes(graph: Graph, order: Sequence[Group], known: Set[str]) -> int:
    """Return the most bytes alive at once of values that groups pass on, constants left out."""
    last: dict[str, int] = {}
    for position, group in enumerate(order):
        last |= dict.fromkeys(group.inputs, position)
    kept = graph.results
    live = sum(graph.tensors[name].nbytes for name in graph.roles if name not in known)
    peak = live
    for position, group in enumerate(order):
        live += sum(graph.tensors[name].nbytes for name in group.outputs)
        peak = max(peak, live)
        for name in {*group.inputs, *group.outputs}:
            if name not in kept and last.get(name, position) == position:
                live -= graph.tensors[name].nbytes
    return peak
