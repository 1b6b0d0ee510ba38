"""From a graph and a strategy to index launches: point tasks, their tiles and privileges.

This is the one place where an operator meets its configuration. Executors launch what is made here,
and a simulator prices the same launches.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from soapstone.ir.configuration import Configuration, Keep
from soapstone.ir.dims import Ints, Signature
from soapstone.ir.errors import StrategyError
from soapstone.ir.graph import Graph, Node
from soapstone.ir.spec import Tile
from soapstone.ir.strategy import Strategy
from soapstone.ir.tensor import Array
from soapstone.kernels.entry import Call, Entry
from soapstone.kernels.select import run_reference, select
from soapstone.runtime import (
    Partition,
    PointContext,
    Privilege,
    Read,
    ReadWrite,
    Reduce,
    Region,
    Runtime,
    Task,
    Write,
)
from soapstone.runtime.lower import in_place


@dataclass(frozen=True)
class Argument:
    """One region argument of a launch: the region's name, every point's box, and the privilege."""

    region: str
    lo: Ints
    hi: Ints
    privilege: Privilege


@dataclass(frozen=True)
class NodeLaunch:
    """A node as an index launch.

    `inputs` and `outputs` give, for each operand of the node, the argument that carries it; an
    output that overwrites an input shares that input's argument.
    """

    node: Node
    signature: Signature
    configuration: Configuration
    grid: tuple[int, ...]
    lo: Mapping[str, Ints]
    hi: Mapping[str, Ints]
    arguments: tuple[Argument, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    variant: str | None = None

    @property
    def points(self) -> int:
        total = 1
        for degree in self.grid:
            total *= degree
        return total

    def attributes(self, point: int) -> Mapping[str, Any]:
        """Return the operator's attributes for one point's tile."""
        spec = self.node.spec
        if spec.localize is None:
            return self.node.attributes
        return spec.localize(self.node.attributes, self.tile(point))

    def tile(self, point: int) -> Tile:
        """Return the intervals and boxes of one point."""

        def boxes(positions: Sequence[int]) -> tuple[tuple[Ints, Ints], ...]:
            return tuple(
                (self.arguments[i].lo[point], self.arguments[i].hi[point]) for i in positions
            )

        return Tile(
            {name: (int(self.lo[name][point]), int(self.hi[name][point])) for name in self.lo},
            boxes(self.inputs),
            boxes(self.outputs),
            tuple(operand.shape for operand in self.signature.inputs),
            tuple(operand.shape for operand in self.signature.outputs),
        )


def expand(graph: Graph, strategy: Strategy) -> tuple[NodeLaunch, ...]:
    """Return the launches of a lowered graph, in program order.

    Every tensor is kept and moves as its readers need it: chosen resharding paths, recomputation
    and offloading are refused rather than ignored.

    Raises:
        StrategyError: a configuration is not legal, or a choice is not carried out; names the
            operator and the dim, or the value.
    """
    for value, keep in strategy.tensors.items():
        if keep is not Keep.KEEP:
            raise StrategyError(f"value {value!r}: {keep} found; tensors are only kept so far")
    for value, consumer in strategy.reshards:
        raise StrategyError(
            f"value {value!r} to {consumer!r}: a resharding path found; paths are not chosen so far"
        )
    aliases = in_place(graph)
    return tuple(_node_launch(graph, strategy, node, aliases) for node in graph.nodes)


def _node_launch(
    graph: Graph, strategy: Strategy, node: Node, aliases: Mapping[str, str]
) -> NodeLaunch:
    signature = graph.signature(node)
    configuration = strategy.configuration(graph, node)
    degrees = configuration.degrees
    grid, lo, hi = signature.points(degrees, configuration.cuts)
    points = 1
    for degree in grid:
        points *= degree
    arguments: list[Argument] = []
    inputs: list[int] = []
    for name, operand in zip(node.inputs, signature.inputs):
        inputs.append(len(arguments))
        arguments.append(Argument(name, *operand.tiles(lo, hi, points), Read))
    outputs: list[int] = []
    for position, (name, operand) in enumerate(zip(node.outputs, signature.outputs)):
        if name in aliases:
            index = inputs[node.inputs.index(aliases[name])]
            shared = arguments[index]
            arguments[index] = Argument(shared.region, shared.lo, shared.hi, ReadWrite)
            outputs.append(index)
            continue
        monoid = signature.monoid(position, degrees)
        privilege = Write if monoid is None else Reduce(monoid)
        outputs.append(len(arguments))
        arguments.append(Argument(name, *operand.tiles(lo, hi, points), privilege))
    return NodeLaunch(
        node,
        signature,
        configuration,
        grid,
        lo,
        hi,
        tuple(arguments),
        tuple(inputs),
        tuple(outputs),
        strategy.variants.get(node.name),
    )


@dataclass
class Program:
    """The launches of a graph on concrete regions; records which variant served each node."""

    launches: tuple[NodeLaunch, ...]
    regions: dict[str, Region]
    variants: dict[str, str] = field(default_factory=dict)

    def launch(self, runtime: Runtime) -> None:
        """Launch every node once, in program order."""
        for item in self.launches:
            partitions = [
                Partition.of(self.regions[a.region], a.lo, a.hi, item.grid or (1,))
                for a in item.arguments
            ]
            runtime.launch(
                self._task(item), *partitions, name=item.node.name, tag=item, initialise=True
            )

    def _task(self, item: NodeLaunch) -> Task:
        """Return the task of a node: native variants where they serve, else the reference."""

        def call(context: PointContext, arrays: Sequence[Array]) -> Call:
            return Call(
                item.node.operator,
                item.attributes(context.point),
                tuple(arrays[i] for i in item.inputs),
                tuple(arrays[i] for i in item.outputs),
                context.processor.threads,
            )

        def bind(context: PointContext, arrays: Sequence[Array]) -> Entry | None:
            chosen = context.variant or item.variant
            name, entry = select(call(context, arrays), context.processor.kind, chosen)
            self.variants[item.node.name] = name
            return entry

        def body(context: PointContext, *arrays: Array) -> None:
            run_reference(call(context, arrays))

        privileges = tuple(argument.privilege for argument in item.arguments)
        return Task(item.node.operator, privileges, body, bind, context=True)


def program(graph: Graph, strategy: Strategy, persistent: Mapping[str, Region]) -> Program:
    """Return the launches of a lowered graph with a region for each value.

    Args:
        persistent: regions that outlive a step, by value: the graph's inputs and outputs.
    """
    regions = dict(persistent)
    for value, old in in_place(graph).items():
        regions[value] = regions[old]
    for name, spec in graph.tensors.items():
        if name not in regions:
            regions[name] = Region(spec.shape, spec.dtype, name, transient=True)
    return Program(expand(graph, strategy), regions)
