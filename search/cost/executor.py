"""The cost of a graph on soapstone's own executor: the measured times of what it lowers to.

A graph costs what its launches cost, and which launches there are is asked of the passes that the
executor itself uses (docs/lowering.md): there is no second model of fusion. Each launch is measured
once for its operator, attributes, shapes, strides, constant operands and threads.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from hashlib import sha256
from types import MappingProxyType
from typing import Any

import numpy as np

from soapstone.cache.environment import digest
from soapstone.cache.sources import modules_of, stamp
from soapstone.cache.store import Store
from soapstone.engine.expand import NodeLaunch
from soapstone.engine.lower import channels_last
from soapstone.engine.prepare import Prepared, folded, prepare
from soapstone.ir.files.layouts import Layouts
from soapstone.ir.graph import Graph, Node
from soapstone.ir.spec import operator
from soapstone.ir.strategy import DEFAULT, Configuration, Strategy
from soapstone.ir.tensor import Array, Arrays
from soapstone.kernels.cpu.onednn.library import threads
from soapstone.kernels.entry import Call
from soapstone.kernels.measure import made_of, until
from soapstone.kernels.registry import variants
from soapstone.runtime.machines.machine import CUDA
from soapstone.search.cost.cost import NO_LAYOUTS, Cost
from soapstone.search.cost.database import interleaved
from soapstone.search.cost.launches import Key, call, filled, hollow, keys, peak_bytes, work
from soapstone.search.cost.measure import Weights, Yardstick, measure
from soapstone.search.cost.measured import MeasuredCost

Rule = Callable[[Graph, Layouts], Layouts]
NO_CONSTANTS: Mapping[str, Array] = MappingProxyType({})
_BATCH_BYTES = 1 << 29  # scratch operands that are in memory at once
_BUSY = "busy machine: "  # before the keys of times that did not settle


class ExecutorCost(MeasuredCost):
    """Prices graphs for soapstone's executor on this machine.

    Args:
        training: whether graphs are training graphs, which run without the passes for constants.
        rule: which axis orders values have that `cost` is given none for.
        processor: the kind of processor whose launches `prepared` gives.
    """

    target = "soapstone"

    def __init__(
        self,
        threads: int | None = None,
        *,
        database: Store | None = None,
        weights: Weights = Weights.COLD,
        training: bool = False,
        rule: Rule = channels_last,
        processor: str = "cpu",
    ) -> None:
        super().__init__(threads, database, weights)
        self.rule = rule
        self.processor = processor
        self.training = training
        self._yardstick: Yardstick | None = None
        self._known: dict[Key, tuple[float, float, float]] = {}
        self._first_us: dict[str, float] = {}  # of point tasks, by what they are kept under
        self._digests: dict[int, tuple[Array, str]] = {}  # of constants, by identity
        self.unsettled = 0  # of the launches measured: the machine was too busy or slow for them

    def cost(self, graph: Graph, constants: Arrays, layouts: Layouts = NO_LAYOUTS) -> Cost:
        """Return what one execution of the graph costs; see `CostModel`."""
        prepared = self.prepared(graph, constants, layouts)
        found = self._priced(prepared, constants)
        return Cost(
            sum(self._together(prepared, [us for us, _, _ in found])),
            sum([flops for _, flops, _ in found]),
            sum([nbytes for _, _, nbytes in found]),
            len(found),
            peak_bytes(prepared),
        )

    def _together(self, prepared: Prepared, times: list[float]) -> list[float]:
        """Return what launches take in one execution, given what each takes alone."""
        return times

    def prepared(self, graph: Graph, constants: Arrays, layouts: Layouts = NO_LAYOUTS) -> Prepared:
        """Return the graph as the executor launches it."""
        fixed = graph.roles.keys() & constants.keys()
        if not self.training:
            pruned = replace(graph, updates={}).pruned()
            first, graph = folded(pruned, constants, processor=self.processor)
            fixed |= {output for node in first.nodes for output in node.outputs}
        orders = {n: o for n, o in self.rule(graph, layouts).items() if n not in fixed}
        strategy = Strategy({DEFAULT: Configuration()}, layouts=orders)
        return prepare(graph, strategy, fixed, halves=self.processor == CUDA)

    def _priced(self, prepared: Prepared, constants: Arrays) -> list[tuple[float, float, float]]:
        """Return time, operations and bytes of each launch, measuring those that are not known."""
        known, wanted = self._known, keys(prepared)
        missing = {key: node for key, node in zip(wanted, prepared.nodes) if key not in known}
        if missing:
            self._price(prepared, missing, constants)
        return [known[key] for key in wanted]

    def _price(self, prepared: Prepared, missing: Mapping[Key, Node], constants: Arrays) -> None:
        by_name = {launch.node.name: launch for launch in prepared.launches}
        launches = {key: by_name[node.name] for key, node in missing.items()}
        texts = {
            key: self._text(each.node, self._hollow(prepared, each))
            for key, each in launches.items()
        }
        times = self._times(prepared, {texts[key]: launches[key] for key in texts}, constants)
        for key, node in missing.items():
            self._known[key] = (times[texts[key]], *work(prepared.graph, node))

    def launch_us(self, prepared: Prepared, constants: Arrays) -> Mapping[str, float]:
        """Return the microseconds of the first point task of each launch, by its node.

        constants: contents of those of whole numbers; times are of these contents.
        """
        texts = {
            each.node.name: self._text(each.node, self._hollow(prepared, each))
            + self._contents(each, constants)
            for each in prepared.launches
        }
        launches = {texts[each.node.name]: each for each in prepared.launches}
        missing = {text: each for text, each in launches.items() if text not in self._first_us}
        self._first_us |= self._times(prepared, missing, constants)
        return {name: self._first_us[text] for name, text in texts.items()}

    def _hollow(self, prepared: Prepared, launch: NodeLaunch) -> Call:
        return call(prepared, launch, self.threads, hollow, NO_CONSTANTS)

    def _contents(self, launch: NodeLaunch, constants: Arrays) -> str:
        """Return what tells the contents of a launch's constants of whole numbers."""
        found = []
        for operand in launch.inputs:
            array = constants.get(operand.constant or "")
            if array is not None and array.dtype.kind in "iu":
                if id(array) not in self._digests:
                    self._digests[id(array)] = (
                        array,
                        sha256(np.ascontiguousarray(array).data).hexdigest(),
                    )
                found.append(self._digests[id(array)][1])
        return json.dumps(found) if found else ""

    def _times(
        self, prepared: Prepared, launches: Mapping[str, NodeLaunch], constants: Arrays
    ) -> dict[str, float]:
        """Return the times of launches, by what they are kept under; those missing are measured."""
        times: dict[str, float] = dict(self.database.find(launches))
        wanted = {text: each for text, each in launches.items() if text not in times}
        if wanted:
            with self._measuring(), until(self.deadline), threads(self.threads):
                times |= self._taken(prepared, wanted, constants)
        return times

    def _taken(
        self, prepared: Prepared, wanted: Mapping[str, NodeLaunch], constants: Arrays
    ) -> dict[str, float]:
        """Return the times of launches that the database lacked.

        Times that a busy or slow machine kept from being settled are kept apart: they serve while
        it is so, and are taken again when it is not.
        """
        times = self.database.find(wanted)  # by another process, meanwhile
        rest = {text: item for text, item in wanted.items() if text not in times}
        mark = json.dumps(["yardstick", self.threads, sources("matmul")])
        if self._yardstick is None:
            self._yardstick = Yardstick(self.threads, self.database.get(mark) or math.inf)
        if rest and self._yardstick.mostly_slow():
            found = self.database.find(_BUSY + text for text in rest)
            times |= {text.removeprefix(_BUSY): us for text, us in found.items()}
            rest = {text: item for text, item in rest.items() if text not in times}
        if rest:
            times |= self._measure(prepared, rest, constants, self._yardstick)
            if 0 < self._yardstick.best_us < math.inf:
                self.database.lowest(mark, self._yardstick.best_us)
        return times

    def _measure(
        self,
        prepared: Prepared,
        launches: Mapping[str, NodeLaunch],
        constants: Arrays,
        yardstick: Yardstick,
    ) -> dict[str, float]:
        """Return the times of launches, measured in turns, and record them."""
        times: dict[str, float] = {}
        batch: dict[str, Call] = {}
        held = 0

        def finish() -> None:
            calls = list(batch.values())
            found = dict(zip(batch, measure(calls, self.weights, yardstick, self.deadline)))
            settled = {text: each.us for text, each in found.items() if each.settled}
            rest = {text: each.us for text, each in found.items() if not each.settled}
            times.update(self.database.update(settled) | rest)
            self.database.update({_BUSY + text: us for text, us in rest.items()})
            self.measured += len(found)
            self.unsettled += len(rest)
            batch.clear()

        for text, launch in launches.items():
            batch[text] = made = call(prepared, launch, self.threads, filled, constants)
            held += sum(array.nbytes for array in (*made.inputs, *made.outputs))
            if held > _BATCH_BYTES:
                finish()
                held = 0
        finish()
        return times

    def _sources(self, operator: str) -> str:
        """Return the stamp of what runs an operator and of what measures it."""
        return sources(operator)

    def _text(self, node: Node, example: Call) -> str:
        """Return all there is to say of a launch: what its time is kept under."""

        def forms(arrays: tuple[Array, ...]) -> list[Any]:
            return [[a.dtype.name, a.shape, a.strides] for a in arrays]

        parts = [
            *(self.target, self._sources(node.operator)),
            *(str(self.weights) if example.constants else "", self.threads),
            *(node.operator, node.items, forms(example.inputs), forms(example.outputs)),
            *(sorted(example.constants), [node.inputs.index(name) for name in node.inputs]),
        ]
        return json.dumps(parts, default=str)


@cache
def sources(name: str) -> str:
    """Return the stamp of what runs an operator and of what measures it: its time is of these."""
    reference = stamp(*modules_of(operator(name).reference), compiled=True)
    harness = stamp(Yardstick.__module__, interleaved.__module__, compiled=True)
    return digest(json.dumps(made_of(variants(name))), reference, harness)
