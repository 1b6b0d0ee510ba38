"""From a graph and a strategy to index launches: point tasks, their tiles and privileges.

This is the one place where an operator meets its configuration. Executors launch what is made here,
and cost models price the same launches (`prepare.py`). The simulator of strategies does not,
since a search asks it about very many: its tasks are the operators of the graph before lowering,
with their gradients, and compiled loops work out their tiles from the same interval maps
(`search/parallel/problem/geometry.py`; a test compares every box). So it knows no fusion and no
views: on this computer they are in the times of tasks, which are measured inside whole steps
(`frontend/strategies/task_times.py`), and on described machines they are not counted.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence, Set
from dataclasses import field, replace
from functools import partial
from types import MappingProxyType
from typing import Any, Protocol

import numpy as np

from soapstone.engine.constants import promised
from soapstone.engine.devices import Seen, device_entry
from soapstone.engine.lower import View, in_place, launched
from soapstone.engine.replicas import Replicas, replicas_of
from soapstone.ir.dims import Ints, Signature
from soapstone.ir.graph import Graph, Node
from soapstone.ir.spec import Tile
from soapstone.ir.strategy import Strategy
from soapstone.ir.strategy.configuration import Configuration
from soapstone.ir.tensor import Array
from soapstone.kernels.choices import Choices
from soapstone.kernels.entry import Call
from soapstone.kernels.equal import Equal
from soapstone.kernels.select import REFERENCE, run_reference, select
from soapstone.native.memory import held
from soapstone.records import dataclass
from soapstone.runtime import (
    MapperError,
    Partition,
    PointContext,
    Privilege,
    Read,
    ReadWrite,
    Reduce,
    Region,
    Task,
    Write,
)
from soapstone.runtime.machines.machine import CUDA

NO_VIEWS: Mapping[str, View] = MappingProxyType({})


@dataclass(frozen=True)
class Argument:
    """One region argument of a launch: the region's name, every point's box, and the privilege."""

    region: str
    lo: Ints
    hi: Ints
    privilege: Privilege


@dataclass(frozen=True)
class Operand:
    """One operand of a node: every point's box in its own axes, and where its contents are.

    They are in the launch's region argument numbered `argument`, seen through `view`, or they are
    those of the constant named `constant`.
    """

    lo: Ints
    hi: Ints
    argument: int = -1
    view: View | None = None
    constant: str | None = None

    def array(self, point: int, arrays: Sequence[Array], constants: Mapping[str, Array]) -> Array:
        """Return a point's tile of the operand, given those of the launch's arguments."""
        if self.constant is None and (self.view is None or not self.view.steps):
            return arrays[self.argument]
        box: tuple[Any, ...] = tuple(map(slice, self.lo[point].tolist(), self.hi[point].tolist()))
        if self.constant is not None:
            tile: Array = promised(constants, self.constant)[(*box, ...)]
            return tile
        array = arrays[self.argument]
        assert self.view is not None
        if len(self.lo) > 1:  # the tile is of all there is of its samples
            return self.view.apply(array, int(self.hi[point][0] - self.lo[point][0]))
        seen: Array = self.view.apply(array)[(*box, ...)]
        return seen


@dataclass(frozen=True)
class NodeLaunch:
    """A node as an index launch; an output that overwrites an input shares that one's argument."""

    node: Node
    signature: Signature
    configuration: Configuration
    grid: tuple[int, ...]
    lo: Mapping[str, Ints]
    hi: Mapping[str, Ints]
    arguments: tuple[Argument, ...]
    inputs: tuple[Operand, ...]
    outputs: tuple[Operand, ...]
    variant: str | None = None

    @property
    def points(self) -> int:
        """Number of point tasks."""
        return math.prod(self.grid)

    def attributes(self, point: int) -> Mapping[str, Any]:
        """Return the operator's attributes for one point's tile."""
        spec = self.node.spec
        if spec.localize is None:
            return self.node.attributes
        return spec.localize(self.node.attributes, self.tile(point))

    def tile(self, point: int) -> Tile:
        """Return the intervals and boxes of one point."""

        def boxes(operands: Sequence[Operand]) -> tuple[tuple[Ints, Ints], ...]:
            return tuple((operand.lo[point], operand.hi[point]) for operand in operands)

        return Tile(
            {name: (int(self.lo[name][point]), int(self.hi[name][point])) for name in self.lo},
            boxes(self.inputs),
            boxes(self.outputs),
            tuple(operand.shape for operand in self.signature.inputs),
            tuple(operand.shape for operand in self.signature.outputs),
        )


def expand(
    graph: Graph,
    strategy: Strategy,
    constants: Set[str] = frozenset(),
    seen: Mapping[str, View] = NO_VIEWS,
) -> tuple[NodeLaunch, ...]:
    """Return the launches of a lowered graph, in program order.

    What the strategy says beyond configurations has become nodes before (`engine.carry`).

    Args:
        constants: values that never change; they are no region arguments.
        seen: values that are views of others (`engine.lower.views`); they are not launched.

    Raises:
        StrategyError: a configuration is not legal; names the operator and the dim.
    """
    aliases, copied = in_place(graph), replicas_of(graph, strategy)
    return tuple(
        _node_launch(graph, strategy, node, aliases, copied, constants, seen)
        for node in graph.nodes
        if launched(node, seen)
    )


def _node_launch(
    graph: Graph,
    strategy: Strategy,
    node: Node,
    aliases: Mapping[str, str],
    copied: Mapping[str, Replicas],
    constants: Set[str],
    seen: Mapping[str, View],
) -> NodeLaunch:
    signature = graph.signature(node)
    configuration = strategy.configuration(graph, node)
    split = configuration.points > 1
    tiled = signature.tiled(*configuration.cutting) if split else signature.undivided
    arguments: list[Argument] = []

    def place(name: str, boxes: tuple[Ints, Ints], privilege: Privilege) -> Operand:
        if name in constants:
            return Operand(*boxes, constant=name)
        view = seen.get(name)
        region = name if view is None else view.root
        shape = graph.tensors[region].shape
        box = boxes if view is None else _root_boxes(shape, view, boxes)
        if region in copied:
            written = None if privilege is Read else signature
            box = copied[region].moved(box, shape[0], configuration, written)
        arguments.append(Argument(region, *box, privilege))
        return Operand(*boxes, argument=len(arguments) - 1, view=view)

    inputs = [place(name, boxes, Read) for name, boxes in zip(node.inputs, tiled.inputs)]
    outputs: list[Operand] = []
    for position, name in enumerate(node.outputs):
        if name in aliases:
            shared = inputs[node.inputs.index(aliases[name])]
            arguments[shared.argument] = replace(arguments[shared.argument], privilege=ReadWrite)
            outputs.append(shared)
            continue
        monoid = signature.monoid(position, configuration.parts) if split else None
        privilege = Write if monoid is None else Reduce(monoid)
        outputs.append(place(name, tiled.outputs[position], privilege))
    return NodeLaunch(
        node,
        signature,
        configuration,
        tiled.grid,
        tiled.lo,
        tiled.hi,
        tuple(arguments),
        tuple(inputs),
        tuple(outputs),
        strategy.variants.get(node.name),
    )


def _root_boxes(shape: tuple[int, ...], view: View, boxes: tuple[Ints, Ints]) -> tuple[Ints, Ints]:
    """Return the boxes in a view's root: the same samples where there are several, else all."""
    points = len(boxes[0])
    if view.box is not None:
        first, past = np.array(view.box, np.int64)
        return (first[None], past[None]) if view.steps else (boxes[0] + first, boxes[1] + first)
    lo, hi = (
        np.zeros((points, len(shape)), np.int64),
        np.tile(np.array(shape, np.int64), (points, 1)),
    )
    if points > 1:
        lo[:, 0], hi[:, 0] = boxes[0][:, 0], boxes[1][:, 0]
    return lo, hi


class Launcher(Protocol):
    """What launches tasks: a runtime, or a plan of what one would hold."""

    def launch(
        self,
        task: Task,
        *arguments: object,
        name: str = "",
        tag: Hashable = None,
        initialise: bool = False,
    ) -> Any:
        """Launch a task; see `Runtime.launch`."""


@dataclass
class Program:
    """The launches of a graph on concrete regions; records which variant served each node.

    `choices` are those of the run: which variant serves each form of call. `precision`: see `Call`.
    `equal` are the entries that each processor, by its name, runs one after another.
    """

    launches: tuple[NodeLaunch, ...]
    regions: dict[str, Region]
    constants: Mapping[str, Array] = field(default_factory=dict)
    variants: dict[str, str] = field(default_factory=dict)
    choices: Choices = field(default_factory=Choices)
    precision: str = "float32"
    equal: dict[str, Equal] = field(default_factory=dict)

    def launch(self, runtime: Launcher) -> None:
        """Launch every node once, in program order."""
        for item in self.launches:
            partitions = [
                _partition(self.regions[a.region], a, item.grid or (1,)) for a in item.arguments
            ]
            runtime.launch(
                self._task(item), *partitions, name=item.node.name, tag=item, initialise=True
            )

    def release(self) -> None:
        """Forget the constants that no Python body reads: kernels keep what they need of them.

        Those of nodes that are not bound yet are kept.
        """
        read = {
            operand.constant
            for item in self.launches
            if self.variants.get(item.node.name, REFERENCE) == REFERENCE
            for operand in item.inputs
        }
        self.constants = {name: self.constants[name] for name in read if name is not None}

    def _task(self, item: NodeLaunch) -> Task:
        """Return the task of a node: native variants where they serve, else the reference."""

        constants = frozenset(i for i, o in enumerate(item.inputs) if o.constant is not None)

        def tiles(
            operands: Sequence[Operand], point: int, arrays: Sequence[Array], seen: Seen
        ) -> tuple[Array, ...]:
            return tuple(
                seen(o.array(point, arrays, self.constants), o.constant is not None)
                for o in operands
            )

        def call_on(
            context: PointContext, inputs: tuple[Array, ...], outputs: tuple[Array, ...]
        ) -> Call:
            return Call(
                item.node.operator,
                item.attributes(context.point),
                inputs,
                outputs,
                context.processor.threads,
                constants,
                self.precision,
            )

        def call(context: PointContext, arrays: Sequence[Array], seen: Seen = _contents) -> Call:
            sides = (
                tiles(side, context.point, arrays, seen) for side in (item.inputs, item.outputs)
            )
            return call_on(context, *sides)

        def bind(context: PointContext, arrays: Sequence[Array]) -> Any:
            chosen = context.variant or item.variant
            try:
                with self.choices.current():
                    if context.processor.kind == CUDA:
                        on_device = partial(call, context, arrays)
                        name, entry = device_entry(item.node.operator, on_device, chosen)
                    elif item.points > 1:  # with attributes of their own
                        bound = call(context, arrays, _as_it_is)
                        name, entry = select(bound, context.processor.kind, chosen)
                    else:
                        equal = self.equal.setdefault(context.processor.name, Equal())
                        inputs = tiles(item.inputs, 0, arrays, _as_it_is)
                        outputs = tiles(item.outputs, 0, arrays, _as_it_is)
                        name, entry = equal.select(
                            item.node.operator,
                            (item.node.items, chosen),
                            *(inputs, outputs, constants),
                            lambda: select(call_on(context, inputs, outputs), "cpu", chosen),
                        )
            except ValueError as error:
                if context.variant is None:
                    raise
                raise MapperError(
                    f"task {item.node.name!r}: variant of point {context.point} on processor "
                    f"{context.processor.name!r} is {context.variant!r}: {error}"
                ) from None
            self.variants[item.node.name] = name
            return entry

        def body(context: PointContext, *arrays: Array) -> None:
            run_reference(call(context, arrays))

        privileges = tuple(argument.privilege for argument in item.arguments)
        return Task(item.node.operator, privileges, body, bind, context=True)


def _partition(region: Region, argument: Argument, grid: tuple[int, ...]) -> Partition:
    lo, hi = argument.lo, argument.hi
    if len(lo) == 1 and not lo.any() and tuple(hi[0].tolist()) == region.shape:
        return Partition.whole(region, grid)
    return Partition.of(region, lo, hi, grid)


def _contents(tile: Array, constant: bool) -> Array:
    return held(tile) if constant else tile


def _as_it_is(tile: Array, constant: bool) -> Array:
    return tile
