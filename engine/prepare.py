"""From a graph and a strategy to what is launched: one arrangement for all who run or price graphs.

Training, inference, measuring and the cost models of searches come through here, so what is priced
is what runs. An inference graph is first divided into what its weights alone determine, and the
rest, whose weights are constant (`folded`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import replace
from functools import cached_property

from soapstone.engine.carry import CARRY, carry_out
from soapstone.engine.carry.waiting import waiting
from soapstone.engine.expand import NodeLaunch, expand
from soapstone.engine.lower import View, fold_weights, launched, lower, split_constants, views
from soapstone.engine.lower.passes import SPLIT, Watch
from soapstone.engine.lower.rebuild import called
from soapstone.engine.lower.verify import check_graph
from soapstone.ir.graph import Graph, Node
from soapstone.ir.interpret import interpret
from soapstone.ir.strategy import Strategy
from soapstone.ir.tensor import Array, TensorSpec
from soapstone.native.memory import CHECKED
from soapstone.records import dataclass


@dataclass(frozen=True)
class Prepared:
    """A graph as it is launched: lowered, with the values that are constants or views of others.

    What the strategy says of values is nodes by now, and `strategy` has their configurations.
    """

    graph: Graph
    strategy: Strategy
    constants: frozenset[str]
    seen: Mapping[str, View]

    @cached_property
    def nodes(self) -> tuple[Node, ...]:
        """The nodes that are launched, in order."""
        return tuple(node for node in self.graph.nodes if launched(node, self.seen))

    @cached_property
    def copies(self) -> Mapping[str, int]:
        """How many copies of a value there are, where there are several."""
        return self.strategy.copies(self.graph)

    def region(self, value: str) -> TensorSpec:
        """Return what memory holds of a value: its copies, one after the other along axis 0."""
        spec, count = self.graph.tensors[value], self.copies.get(value, 1)
        return spec if count == 1 else replace(spec, shape=(count * spec.shape[0], *spec.shape[1:]))

    @cached_property
    def launches(self) -> tuple[NodeLaunch, ...]:
        """The launches of these nodes: point tasks, their tiles and privileges.

        Raises:
            StrategyError: a configuration is not legal.
        """
        made = expand(self.graph, self.strategy, self.constants, self.seen)
        return waiting(self.graph, made)


def prepare(
    graph: Graph,
    strategy: Strategy,
    constants: Set[str] = frozenset(),
    *,
    fuse: bool = True,
    halves: bool = False,
    watch: Watch | None = None,
) -> Prepared:
    """Return a graph as it is launched under a strategy.

    Args:
        constants: inputs that never change.
        fuse: let several operators be one launch, and look at reshaped and transposed values in
            place; without it, each operator is a launch.
        halves: whether the processors' kernels take halves.
        watch: is told each pass, the graph before it and the graph after it.

    Raises:
        StrategyError: what the strategy says of a value cannot be carried out.
    """
    carried, strategy = carry_out(graph, strategy)
    if carried is not graph:
        if CHECKED:
            check_graph(carried, graph, f"step {CARRY!r}")
        if watch is not None:
            watch(CARRY, graph, carried)
    lowered = lower(carried, strategy, fuse=fuse, halves=halves, watch=watch)
    held = frozenset(constants)
    return Prepared(lowered, strategy, held, views(lowered, strategy, held) if fuse else {})


def folded(
    graph: Graph,
    weights: Mapping[str, Array],
    watch: Watch | None = None,
    *,
    processor: str = "cpu",
) -> tuple[Graph, Graph]:
    """Return the graph of what constant weights alone determine, and the rest, which takes it.

    Batch norms, scales and biases go into the weights first, so outputs may be called otherwise.

    processor: the kind that will run it.
    """
    known = fold_weights(graph, weights, watch, processor=processor)
    parts = split_constants(known, graph.roles.keys() & weights.keys())
    if watch is not None:
        watch(SPLIT, known, parts[1])
    return parts


def evaluated(
    graph: Graph, weights: Mapping[str, Array], outputs: Sequence[str]
) -> tuple[Graph, dict[str, Array]]:
    """Return a graph with what its weights alone determine as weights, its outputs called so.

    The weights that are returned are all that were given and made, by their names in the graph.
    """
    first, rest = split_constants(graph, graph.roles.keys() & weights.keys())
    made = interpret(first, {name: weights[name] for name in first.roles}) if first.nodes else {}
    rest, names = called(rest, outputs)
    return rest, {names.get(name, name): array for name, array in {**weights, **made}.items()}
