"""Graph mappers: the strategy for a graph, and the runtime's mapping policies that carry it out.

A mapper plugin subclasses `GraphMapper` and overrides `configure`, or any policy of the runtime's
`Mapper`. Plugins are found through the entry-point group `soapstone.mappers`.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from soapstone.engine.expand import NodeLaunch
from soapstone.engine.images import Images
from soapstone.engine.lower import channels_last
from soapstone.engine.parallelism import legal
from soapstone.engine.prepare import Prepared
from soapstone.ir.dims import Kind
from soapstone.ir.errors import GraphError, StrategyError
from soapstone.ir.graph import Graph, Node
from soapstone.ir.strategy import DEFAULT, Configuration, Strategy
from soapstone.ir.strategy.configuration import Keep
from soapstone.ir.tensor import Array, Role
from soapstone.runtime import DefaultMapper, Launch, Machine, MapperError, Processor, Region
from soapstone.runtime.analysis.policy import ask, name_of
from soapstone.runtime.model.mapper import by_point

if TYPE_CHECKING:
    from soapstone.ir.plan import MemoryPlan


class Everyone(Protocol):
    """The processes of a run, as an executor represents them."""

    processors: Sequence[int]  # of this process

    def exchanged(self, value: Any) -> list[Any]:
        """Return the values of all processes, each of which must call this.

        value: of this process.
        """


class GraphMapper(DefaultMapper):
    """A mapper that configures every operator of a graph, and places points as configured."""

    name = "graph"

    def __init__(self) -> None:
        self._layouts: Mapping[str, tuple[int, ...]] = {}
        self._offloaded: frozenset[str] = frozenset()
        self._behind: Mapping[str, str] = {}

    def configure(self, graph: Graph, machine: Machine) -> Mapping[str, Configuration]:
        """Return the configuration of nodes by name; a node left out runs as one point task.

        graph: a training step or an inference graph. machine: what it runs on.
        """
        return {}

    def strategy(self, graph: Graph, machine: Machine) -> Strategy:
        """Return the whole strategy of a graph on a machine.

        Raises:
            MapperError: `configure` returned something other than configurations of the graph's
                operators.
        """
        return Strategy(
            configurations={DEFAULT: Configuration(), **_configured(self, graph, machine)},
            layouts=channels_last(graph),
            model=graph.name,
            model_hash=graph.structural_hash,
            machine=machine.describe(),
            inputs={name: graph.tensors[name].shape for name in graph.inputs(Role.INPUT)},
            provenance={"mapper": self.name},
        )

    def adopt(self, strategy: Strategy) -> None:
        """Use the layouts and the offloaded values of a strategy in the launches that follow.

        Raises:
            StrategyError: a value is offloaded, and a memory has no backing memory.
        """
        self._layouts = strategy.layouts
        kept = strategy.tensors.items()
        self._offloaded = frozenset(value for value, keep in kept if keep is Keep.OFFLOAD)
        self._behind = check_backing(self.machine, self._offloaded)

    def planned(
        self, prepared: Prepared, images: Images, everyone: Everyone
    ) -> Mapping[str, MemoryPlan]:
        """Return the memory plans that the launches which follow obey, by memory.

        There is one for each memory in which processors of this process work, or none in any
        process. All plans run the nodes in the same order, in which they are then launched.

        prepared: the graph whose launches follow. images: those launches. everyone: the processes
        of the run, all of which call this.

        Raises:
            GraphError: there is no plan for the graph.
        """
        return {}

    def memory(self, launch: Launch, argument: int, processor: Processor) -> str:
        """The backing memory for an offloaded value, else the processor's own memory."""
        if self._offloaded and launch.partitions[argument].region.name in self._offloaded:
            return self._behind[processor.memory]
        return super().memory(launch, argument, processor)

    def order(self, region: Region) -> tuple[int, ...] | None:
        """The axis order that the strategy gives the value, or C order."""
        return self._layouts.get(region.name)

    def place(self, launch: Launch, point: int) -> int:
        """The configured device of a point; by default, points are placed in consecutive blocks."""
        devices = _devices(launch)
        return devices[point] if devices else super().place(launch, point)

    def place_all(self, launch: Launch) -> Array:
        """The placement of all points; a subclass that overrides `place` need not override this."""
        devices = () if by_point(self) else _devices(launch)
        return np.asarray(devices, np.int64) if devices else super().place_all(launch)


def backing_memories(machine: Machine) -> dict[str, str]:
    """Return the backing memory of each memory in which processors work, where there is one.

    It is the larger memory that the fastest link reaches.

    Args:
        machine: whose memories and links these are.
    """
    capacity = {memory.name: memory.capacity_bytes for memory in machine.memories}
    rates = {(link.source, link.target): link.bytes_per_s for link in machine.links}
    backing: dict[str, str] = {}
    for name in sorted({processor.memory for processor in machine.processors}):
        larger = [other for other in capacity if capacity[other] > capacity[name]]
        if larger:
            backing[name] = max(larger, key=lambda other: rates.get((other, name), 0.0))
    return backing


def check_backing(machine: Machine, offloaded: Collection[str]) -> Mapping[str, str]:
    """Return the backing memories for values that are offloaded; see `backing_memories`.

    Args:
        machine: where values are offloaded.
        offloaded: their names; if there are none, the result is empty.

    Raises:
        StrategyError: a value is offloaded, and a memory has no backing memory; names both.
    """
    if not offloaded:
        return {}
    processor = without_backing(machine)
    if processor is not None:
        raise StrategyError(
            f"tensors: {min(offloaded)!r}: machine {machine.name!r} has no memory larger than"
            f" {processor.memory!r}, where processor {processor.name!r} works; a backing"
            " memory needed to offload to (`Machine.bounded` makes one of what is there)"
        )
    return backing_memories(machine)


def without_backing(machine: Machine) -> Processor | None:
    """Return a processor of a machine whose memory has no backing one; None if all have one."""
    behind = backing_memories(machine)
    return next((each for each in machine.processors if each.memory not in behind), None)


def _devices(launch: Launch) -> tuple[int, ...]:
    tag = launch.tag
    return tag.configuration.devices if isinstance(tag, NodeLaunch) else ()


def strategy_of(mapper: GraphMapper, graph: Graph, machine: Machine) -> Strategy:
    """Return the strategy of a mapper for a graph on a machine.

    Raises:
        MapperError: the mapper raised another error, or did not return a strategy; names both.
        GraphError, StrategyError: raised by the mapper.
    """
    who = f"{name_of(mapper)}, graph {graph.name!r}"
    strategy = _answer(mapper, who, "strategy", graph, machine)
    if not isinstance(strategy, Strategy):
        raise MapperError(f"{who}: strategy is {strategy!r}, needed a Strategy")
    return strategy


def _answer(mapper: GraphMapper, who: str, question: str, graph: Graph, machine: Machine) -> Any:
    try:
        return ask(mapper, who, question, graph, machine)
    except MapperError as error:
        if isinstance(error.__cause__, GraphError | MapperError):
            raise error.__cause__ from None
        raise


def _configured(mapper: GraphMapper, graph: Graph, machine: Machine) -> dict[str, Configuration]:
    """Return the result of `configure`, checked."""
    who = f"{name_of(mapper)}, graph {graph.name!r}"
    configurations = _answer(mapper, who, "configure", graph, machine)
    if not isinstance(configurations, Mapping):
        raise MapperError(
            f"{who}: configure is {configurations!r}, needed a mapping of Configurations"
        )
    names = {node.name for node in graph.nodes}
    for name, configuration in configurations.items():
        if not isinstance(name, str) or name not in names:
            raise MapperError(f"{who}: configure has {name!r}, needed names of its operators")
        if not isinstance(configuration, Configuration):
            raise MapperError(
                f"{who}: configure of operator {name!r} is {configuration!r}, needed a "
                "Configuration"
            )
    return dict(configurations)


def touched_bytes(graph: Graph, node: Node, degrees: Mapping[str, int]) -> int:
    """Return the bytes that all point tasks of a node access; partial results count twice.

    graph: that of the node. degrees: the number of tiles along each dim.
    """
    signature = graph.signature(node)
    _, lo, hi = signature.points(degrees)
    points = math.prod(degrees.values())
    total = 0
    names = (*node.inputs, *node.outputs)
    for position, (name, operand) in enumerate(zip(names, (*signature.inputs, *signature.outputs))):
        starts, stops = operand.tiles(lo, hi, points)
        elements = int((stops - starts).prod(axis=1).sum())
        output = position - len(node.inputs)
        partial = output >= 0 and signature.monoid(output, degrees) is not None
        total += elements * np.dtype(graph.tensors[name].dtype).itemsize * (2 if partial else 1)
    return total


_LEAST_BYTES = 1 << 17  # that a tile of what folds much to little reads


def summed_dims(graph: Graph, node: Node, parts: int) -> list[str]:
    """Return the dims to split where a node reduces much to little, such as the norm of a gradient.

    graph: that of the node. parts: the number of tiles, each of which reads at least
    `_LEAST_BYTES`.
    """
    signature = graph.signature(node)
    read, made = (
        sum(graph.tensors[name].nbytes for name in names) for names in (node.inputs, node.outputs)
    )
    if read < parts * max(_LEAST_BYTES, 16 * made):
        return []
    return [
        dim.name
        for dim in signature.dims
        if dim.kind is Kind.REDUCED
        and dim.extent >= parts
        and not signature.lowers({dim.name: parts})
        and legal(graph, node, {dim.name: parts})
    ]


def row_dims(graph: Graph, node: Node, parts: int, least: int = 16) -> list[str]:
    """Return the dims other than samples that split a node into final tiles of `least` rows.

    graph: that of the node. parts: the number of tiles.
    """
    signature = graph.signature(node)
    names = []
    for dim in signature.dims:
        degrees = {dim.name: parts}
        if (
            dim.kind is Kind.FREE
            and dim.extent >= least * parts
            and not signature.lowers(degrees)
            and legal(graph, node, degrees)
            and all(signature.monoid(i, degrees) is None for i in range(len(signature.outputs)))
        ):
            names.append(dim.name)
    return names
