"""From a graph and a strategy to what is launched, for everything that runs or prices graphs.

Training, inference, measurements and the cost models of searches all use `prepare`, so what is
priced is what runs. An inference graph is first divided into the part that its weights alone
determine and the rest, for which that part is constant (`folded`).
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
    """A lowered graph, as it is launched.

    Attributes:
        graph: the lowered graph. What the strategy says beyond configurations has become nodes.
        strategy: the configurations of these nodes.
        constants: the values whose contents never change.
        seen: the values that are views of others' memory, and so are not launched.
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
        """The number of copies of each value that has several."""
        return self.strategy.copies(self.graph)

    def region(self, value: str) -> TensorSpec:
        """Return the shape and type of a value's region: its copies are stacked along axis 0."""
        spec, count = self.graph.tensors[value], self.copies.get(value, 1)
        return spec if count == 1 else replace(spec, shape=(count * spec.shape[0], *spec.shape[1:]))

    @cached_property
    def launches(self) -> tuple[NodeLaunch, ...]:
        """The launches of these nodes: point tasks with their tiles and privileges.

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
        constants: the names of inputs that never change.
        fuse: whether one launch may run several operators, and reshaped and transposed values may
            be views; otherwise each operator is a launch.
        halves: whether the processors' kernels take half-precision operands.
        watch: called after each pass with its name, the graph before it and the graph after it.

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
    """Divide a graph: return what constant weights alone determine, and the rest, which reads it.

    Batch norms, scales and biases are folded into the weights first, which may rename outputs.

    processor: the kind of processor that will run the graph.
    """
    known = fold_weights(graph, weights, watch, processor=processor)
    parts = split_constants(known, graph.roles.keys() & weights.keys())
    if watch is not None:
        watch(SPLIT, known, parts[1])
    return parts


def evaluated(
    graph: Graph, weights: Mapping[str, Array], outputs: Sequence[str]
) -> tuple[Graph, dict[str, Array]]:
    """Evaluate what weights alone determine; return the rest of the graph, and all weights by name.

    outputs: names for the outputs of the graph that is returned. The weights are those given and
    those evaluated, by their names in that graph.
    """
    first, rest = split_constants(graph, graph.roles.keys() & weights.keys())
    made = interpret(first, {name: weights[name] for name in first.roles}) if first.nodes else {}
    rest, names = called(rest, outputs)
    return rest, {names.get(name, name): array for name, array in {**weights, **made}.items()}
