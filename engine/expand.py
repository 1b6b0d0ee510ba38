"""Turns a graph and a strategy into index launches: point tasks, their tiles and privileges.

This is the one place where an operator meets its configuration. Executors run these launches, and
cost models price them (`prepare.py`). The simulator of strategies does not use them, since a search
simulates very many strategies. Its tasks are the operators of the graph before lowering, with their
gradients, and compiled loops compute their tiles from the same interval maps
(`search/parallel/problem/geometry.py`; a test compares every box). So the simulator knows neither
fusion nor views: on this computer both are part of the times of tasks, which are measured inside
whole steps (`frontend/strategies/task_times.py`); on described machines they are not counted.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence, Set
from dataclasses import field, replace
from functools import lru_cache, partial
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
from soapstone.kernels.entry_cache import EntryCache
from soapstone.kernels.select import REFERENCE, run_reference, select
from soapstone.native.promises import held
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
from soapstone.runtime.model.tiling import Tiling
from soapstone.turns import give_way

NO_VIEWS: Mapping[str, View] = MappingProxyType({})
Tiles = tuple[Array, ...]  # of the operands of a point


@dataclass(frozen=True)
class Argument:
    """A region argument of a launch: the region's name, the points' boxes, and the privilege."""

    region: str
    lo: Ints
    hi: Ints
    privilege: Privilege


@dataclass(frozen=True)
class Operand:
    """An operand of a node: the points' boxes in the operand's axes, and where its contents are.

    The contents are either in the launch's region argument number `argument`, seen through `view`,
    or those of the constant named `constant`.
    """

    lo: Ints
    hi: Ints
    argument: int = -1
    view: View | None = None
    constant: str | None = None

    def array(self, point: int, arrays: Sequence[Array], constants: Mapping[str, Array]) -> Array:
        """Return a point's tile of the operand, given the tiles of the launch's arguments."""
        if self.constant is None and (self.view is None or not self.view.steps):
            return arrays[self.argument]
        lo, hi = self.lo[point].tolist(), self.hi[point].tolist()
        box: tuple[Any, ...] = tuple(map(slice, lo, hi))
        if self.constant is not None:
            whole = promised(constants, self.constant)
            return whole if hi == list(whole.shape) and not any(lo) else whole[(*box, ...)]
        array = arrays[self.argument]
        assert self.view is not None
        if len(self.lo) > 1:  # the tile is of all there is of its samples
            return self.view.apply(array, int(self.hi[point][0] - self.lo[point][0]))
        seen: Array = self.view.apply(array)[(*box, ...)]
        return seen


@dataclass(frozen=True)
class NodeLaunch:
    """A node as an index launch. An output that overwrites an input shares its region argument."""

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

    What a strategy says beyond configurations has been turned into nodes before (`engine.carry`).

    Args:
        graph: the lowered graph. strategy: a configuration for each of its operators.
        constants: names of values that never change; they are not region arguments.
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


@lru_cache(maxsize=1 << 10)
def _one_box(first: tuple[int, ...], past: tuple[int, ...]) -> tuple[Ints, Ints]:
    """Return the box of one point, which many may share; so it is never written to."""
    lo, hi = np.array([[first], [past]], np.int64).reshape(2, 1, len(first))
    return lo, hi


def _root_boxes(shape: tuple[int, ...], view: View, boxes: tuple[Ints, Ints]) -> tuple[Ints, Ints]:
    """Return the boxes in a view's root: the same samples where there are several, else all."""
    points = len(boxes[0])
    if view.box is not None:
        if view.steps:
            return _one_box(*view.box)
        first = np.array(view.box[0], np.int64)
        return boxes[0] + first, boxes[1] + first
    if points == 1:
        return _one_box((0,) * len(shape), shape)
    lo, hi = (
        np.zeros((points, len(shape)), np.int64),
        np.tile(np.array(shape, np.int64), (points, 1)),
    )
    lo[:, 0], hi[:, 0] = boxes[0][:, 0], boxes[1][:, 0]
    return lo, hi


class Launcher(Protocol):
    """Anything that launches tasks: a runtime, or a plan of the memory that one would need."""

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
    """The launches of a graph on concrete regions; records which kernel variant serves each node.

    choices: the run's choices of variants, by form of call. precision: see `Call`.
    caches: by processor, the entries that it runs one after another.
    """

    launches: tuple[NodeLaunch, ...]
    regions: dict[str, Region]
    constants: Mapping[str, Array] = field(default_factory=dict)
    variants: dict[str, str] = field(default_factory=dict)
    choices: Choices = field(default_factory=Choices)
    precision: str = "float32"
    caches: dict[str, EntryCache] = field(default_factory=dict)

    def launch(self, runtime: Launcher) -> None:
        """Launch every node once, in program order."""
        tilings = dict[Hashable, Tiling]()

        def partition(argument: Argument, grid: tuple[int, ...]) -> Partition:
            region = self.regions[argument.region]
            key = region.shape, grid, argument.lo.tobytes(), argument.hi.tobytes()
            if key not in tilings:
                tilings[key] = _partition(region, argument, grid).tiling
            return Partition.cut(region, tilings[key], grid)

        for item in self.launches:
            grid = item.grid or (1,)
            partitions = [partition(argument, grid) for argument in item.arguments]
            runtime.launch(
                self._task(item), *partitions, name=item.node.name, tag=item, initialise=True
            )

    def release(self) -> None:
        """Forget what only binding needs: entries by call, and constants that no Python body reads.

        Those of nodes that are not bound yet are kept.
        """
        self.caches.clear()
        read = {
            operand.constant
            for item in self.launches
            if self.variants.get(item.node.name, REFERENCE) == REFERENCE
            for operand in item.inputs
        }
        self.constants = {name: self.constants[name] for name in read if name is not None}

    def _task(self, item: NodeLaunch) -> Task:
        """Return the task of a node: native variants where they serve, else the reference."""
        privileges = tuple(argument.privilege for argument in item.arguments)
        node = _NodeTask(self, item)
        return Task(item.node.operator, privileges, node.body, node.bind, context=True)


class _NodeTask:
    """What binds and runs the points of a launch of a program."""

    def __init__(self, program: Program, item: NodeLaunch) -> None:
        self.program, self.item = program, item

    def body(self, context: PointContext, *arrays: Array) -> None:
        """Run a point by the operator's reference."""
        run_reference(self._call(context, *self._tiles(context.point, arrays, _contents)))

    def bind(self, context: PointContext, arrays: Sequence[Array]) -> Any:
        """Return the entry of a point, None where its body is to run."""
        give_way()
        program, item = self.program, self.item
        chosen = context.variant or item.variant
        try:
            if context.processor.kind == CUDA:
                with program.choices.current():

                    def on_device(seen: Seen) -> Call:
                        return self._call(context, *self._tiles(context.point, arrays, seen))

                    name, entry = device_entry(item.node.operator, on_device, chosen)
            else:
                tiles = self._tiles(context.point, arrays, None)
                bind = partial(self._selected, context, *tiles, chosen)
                if item.points > 1:  # with attributes of their own
                    name, entry = bind()
                else:
                    cache = program.caches.get(context.processor.name)
                    if cache is None:
                        cache = program.caches[context.processor.name] = EntryCache()
                    of = item.node.operator, (item.node.items, chosen)
                    name, entry = cache.select(*of, *tiles, self._constants, bind)
        except ValueError as error:
            if context.variant is None:
                raise
            raise MapperError(
                f"task {item.node.name!r}: variant of point {context.point} on processor "
                f"{context.processor.name!r} is {context.variant!r}: {error}"
            ) from None
        program.variants[item.node.name] = name
        return entry

    def _selected(
        self, context: PointContext, inputs: Tiles, outputs: Tiles, chosen: str | None
    ) -> tuple[str, Any]:
        with self.program.choices.current():
            return select(self._call(context, inputs, outputs), context.processor.kind, chosen)

    @property
    def _constants(self) -> frozenset[int]:
        return frozenset([i for i, o in enumerate(self.item.inputs) if o.constant is not None])

    def _call(self, context: PointContext, inputs: Tiles, outputs: Tiles) -> Call:
        """Return the call of a point on its tiles."""
        return Call(
            self.item.node.operator,
            self.item.attributes(context.point),
            inputs,
            outputs,
            context.processor.threads,
            self._constants,
            self.program.precision,
        )

    def _tiles(self, point: int, arrays: Sequence[Array], seen: Seen | None) -> tuple[Tiles, Tiles]:
        """Return a point's inputs and outputs, or what `seen` makes of them."""

        def tile(operand: Operand) -> Array:
            array = operand.array(point, arrays, self.program.constants)
            return array if seen is None else seen(array, operand.constant is not None)

        return tuple(map(tile, self.item.inputs)), tuple(map(tile, self.item.outputs))


def _partition(region: Region, argument: Argument, grid: tuple[int, ...]) -> Partition:
    lo, hi = argument.lo, argument.hi
    if len(lo) == 1 and not lo.any() and tuple(hi[0].tolist()) == region.shape:
        return Partition.whole(region, grid)
    return Partition.of(region, lo, hi, grid)


def _contents(tile: Array, constant: bool) -> Array:
    return held(tile) if constant else tile
