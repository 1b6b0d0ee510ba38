"""Prices graphs for ONNX Runtime: groups of operators, each measured once as it runs them.

Follows TASO, section 2.6: the cost of a graph is the sum of the measured times of what is launched,
with ONNX Runtime's own fusions, its folding of constants, and the conversions between plain and
blocked layouts where operators that want different ones meet.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from soapstone.cache.environment import installed
from soapstone.cache.sources import modules_of, stamp
from soapstone.cache.store import Store
from soapstone.ir.graph import Graph, Node
from soapstone.ir.interpret import interpret
from soapstone.ir.tensor import Array, TensorSpec
from soapstone.search.cost import database as store
from soapstone.search.cost.cost import NO_LAYOUTS, Cost, CostModel
from soapstone.search.cost.measure import Weights
from soapstone.search.cost.ort_groups import Group, determined, groups, small
from soapstone.search.cost.ort_measure import (
    Export,
    Measured,
    Reads,
    conversion_us,
    measure,
    node_us,
)
from soapstone.system import cache_bytes, usable_cores


@dataclass(frozen=True)
class _Priced:
    """A group with what it costs where it stands."""

    group: Group
    measured: Measured


class OnnxRuntimeCost(CostModel):
    """The cost model of ONNX Runtime's CPU provider on this computer.

    Boundary values whose layout is not plain count as being in ONNX Runtime's blocked layout.

    Args:
        export: writes a graph with its weights as a serialised ONNX model.
        threads: how many threads ONNX Runtime computes with; all cores by default.
        database: where times are kept; the process's own by default.
        weights: whether constants are read from memory or from the last cache, which depends on the
            size of the whole network that a graph is part of: see `for_weights`.
    """

    target = "onnxruntime"
    noise = 0.03  # share of a cost that one measurement may be off

    def __init__(
        self,
        export: Export,
        threads: int | None = None,
        *,
        database: Store | None = None,
        weights: Weights = Weights.COLD,
    ) -> None:
        self.threads = threads or usable_cores()
        self.weights = weights
        self.measured = 0  # groups and conversions that this model had to measure
        self.measuring_s = 0.0  # how long that took
        self._export = export
        self._database = database
        span = cache_bytes(3) * 3 // 2 if weights is Weights.COLD else 4 * cache_bytes(2)
        self._sweep_bytes = span
        made = stamp(*modules_of(export, measure, groups), compiled=True)
        about = ["onnxruntime", installed("onnxruntime"), made, str(weights), self.threads]
        self._label = json.dumps(about)
        self._known: dict[tuple[Any, ...], Measured] = {}
        self._flops: dict[tuple[Any, ...], float] = {}
        self._node_us: float | None = None

    @staticmethod
    def for_weights(
        export: Export,
        constants: Mapping[str, Array],
        threads: int | None = None,
        *,
        database: Store | None = None,
    ) -> OnnxRuntimeCost:
        """Return the model for a network with these weights."""
        return OnnxRuntimeCost(export, threads, database=database, weights=Weights.of(constants))

    @property
    def database(self) -> Store:
        """Where times are kept."""
        if self._database is None:
            self._database = store.database()
        return self._database

    def cost(
        self,
        graph: Graph,
        constants: Mapping[str, Array],
        layouts: Mapping[str, tuple[int, ...]] = NO_LAYOUTS,
    ) -> Cost:
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
        self,
        graph: Graph,
        constants: Mapping[str, Array],
        layouts: Mapping[str, tuple[int, ...]] = NO_LAYOUTS,
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
        self,
        graph: Graph,
        constants: Mapping[str, Array],
        known: Set[str],
        layouts: Mapping[str, tuple[int, ...]],
    ) -> list[_Priced]:
        contents = _Contents(graph, constants, known)
        blocked = {name: _is_blocked(name, layouts) for name in graph.roles}
        found = []
        for group in groups(graph, known):
            mask = tuple(
                _may_be_blocked(graph.tensors[name]) and blocked.get(name, False)
                for name in group.inputs
            )
            measured = self._measured(graph, group, contents, mask)
            blocked |= zip(group.outputs, measured.blocked)
            found.append(_Priced(group, measured))
        return found

    def _measured(
        self, graph: Graph, group: Group, contents: _Contents, mask: tuple[bool, ...]
    ) -> Measured:
        chosen = {n: contents[n] for n in group.fixed if small(graph.tensors[n])}
        key = (group.form(graph, chosen), mask)
        found = self._known.get(key)
        if found is None:
            what = f"{self._label} {json.dumps(key, default=str, separators=(',', ':'))}"
            held = self.database.get(what)
            if held is None:
                with self._measuring():
                    held = self.database.get(what)  # another process may have been first
                    if held is None:
                        self.measured += 1
                        made = measure(
                            graph,
                            group,
                            chosen,
                            mask,
                            self._export,
                            self.threads,
                            self._sweep_bytes,
                            self.deadline,
                        )
                        held = self.database.put(what, _record(made))
            found = self._known[key] = _measured(held)
        return found

    @contextmanager
    def _measuring(self) -> Iterator[None]:
        began = time.monotonic()
        try:
            with self.database.measuring(self.deadline.check):
                self.deadline.check()
                yield
        finally:
            self.measuring_s += time.monotonic() - began

    def _conversion(self, spec: TensorSpec, inward: bool) -> Measured:
        """Return the time from the plain layout to the blocked one, or back."""
        key = ("conversion", spec, inward)
        found = self._known.get(key)
        if found is None:
            what = f"{self._label} {'to' if inward else 'from'} blocked {spec}"
            held = self.database.get(what)
            if held is None:
                self.measured += 1
                with self._measuring():
                    us = conversion_us(
                        spec,
                        inward,
                        self._export,
                        self.threads,
                        self._sweep_bytes,
                        self.deadline,
                    )
                    made = Measured(us, 1, 2.0 * spec.nbytes, (), ())
                    held = self.database.put(what, _record(made))
            found = self._known[key] = _measured(held)
        return found

    def _overhead(self) -> float:
        if self._node_us is None:
            what = f"{self._label} node"
            found = self.database.get(what)
            if found is None:
                with self._measuring():
                    us = node_us(self._export, self.threads)  # 0 where it is too little to see
                    found = self.database.put(what, {"us": us})
            self._node_us = float(found["us"])
        return self._node_us

    def _flops_of(self, graph: Graph, node: Node) -> float:
        key = (node.operator, node.items, tuple(graph.tensors[name] for name in node.inputs))
        found = self._flops.get(key)
        if found is None:
            found = self._flops[key] = node.spec.flops(graph.signature(node))
        return found


class _Contents:
    """The contents of constants, computed from others where need be."""

    def __init__(self, graph: Graph, constants: Mapping[str, Array], known: Set[str]) -> None:
        self._graph, self._constants, self._known = graph, constants, known

    def __getitem__(self, name: str) -> Array:
        if name in self._constants:
            return np.asarray(self._constants[name])
        graph = replace(self._graph, outputs=(name,), updates={}).pruned()
        read = {i for node in graph.nodes for i in node.inputs} & graph.roles.keys()
        graph = replace(graph, roles={n: role for n, role in graph.roles.items() if n in read})
        return interpret(graph, {n: np.asarray(self._constants[n]) for n in read})[name]


def _record(made: Measured) -> dict[str, Any]:
    """Return what the database keeps of a group or a conversion."""
    return {
        "us": float(made.time_us),
        "launches": int(made.launches),
        "nbytes": float(made.nbytes),
        "reads": [[bool(reads.plain), bool(reads.blocked)] for reads in made.reads],
        "blocked": [bool(blocked) for blocked in made.blocked],
    }


def _measured(found: Any) -> Measured:
    """Return what a record of the database says."""
    reads = tuple(Reads(*each) for each in found["reads"])
    blocked = tuple(found["blocked"])
    return Measured(found["us"], found["launches"], found["nbytes"], reads, blocked)


def _is_blocked(name: str, layouts: Mapping[str, tuple[int, ...]]) -> bool:
    order = layouts.get(name)
    return order is not None and order != tuple(range(len(order)))


def _may_be_blocked(spec: TensorSpec) -> bool:
    return spec.rank == 4 and spec.dtype == "float32"


def _conversions(
    graph: Graph, priced: Sequence[_Priced], layouts: Mapping[str, tuple[int, ...]]
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
    kept = {*graph.outputs, *graph.updates.values()}
    live = sum(graph.tensors[name].nbytes for name in graph.roles if name not in known)
    peak = live
    for position, group in enumerate(order):
        live += sum(graph.tensors[name].nbytes for name in group.outputs)
        peak = max(peak, live)
        for name in {*group.inputs, *group.outputs}:
            if name not in kept and last.get(name, position) == position:
                live -= graph.tensors[name].nbytes
    return peak


__all__ = ["OnnxRuntimeCost"]
