"""The lowering passes by name, in the order in which they run; `verify.py` checks each.

`soapstone show` prints a graph after any of them; docs/lowering.md says what each is for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Generic, TypeVar

from soapstone.engine.lower.composites import lower_composites
from soapstone.engine.lower.concat import place_parts
from soapstone.engine.lower.elementwise import fuse_elementwise
from soapstone.engine.lower.epilogue import fuse_epilogues
from soapstone.engine.lower.few_bits import IN_FEW_BITS, IN_HALVES, ROUNDED_ROWS, ROUNDING
from soapstone.engine.lower.fold import fold
from soapstone.engine.lower.halves import read_halves, store_halves, widen_halves, widen_partials
from soapstone.engine.lower.integers import IN_BYTES, IN_REAL, has_bytes, multiplies_bytes
from soapstone.engine.lower.parts import copy_parts, merge_parts
from soapstone.engine.lower.updates import hoist_updates, merge_stores, store_updates
from soapstone.engine.lower.verify import check_aliases, check_graph, check_sources
from soapstone.engine.lower.weights import FOLDS, JOINS, JOINS_OF_CPUS, NAMING
from soapstone.ir.graph import Graph
from soapstone.ir.strategy import Strategy
from soapstone.ir.tensor import Array
from soapstone.ir.training.precision import SINGLE
from soapstone.kernels.entry import BFLOAT16
from soapstone.native.memory import CHECKED
from soapstone.records import dataclass

Under = TypeVar("Under")
Watch = Callable[[str, Graph, Graph], None]  # is told a pass, the graph before it, and after it


@dataclass(frozen=True)
class Pass(Generic[Under]):
    """A lowering pass: from a graph to one that computes the same.

    Attributes:
        apply: takes a graph, and the constants or the strategy under which it is lowered.
        fuses: whether the pass is skipped when each operator must be a launch of its own.
        widens: whether the pass is skipped when kernels take half-precision operands.
        multiplies: True: only if kernels multiply bytes; False: only if they do not, in either case
            of graphs that have bytes; None: always.
        processor, precision: the only ones that the pass is for; None: any.
    """

    name: str
    apply: Callable[[Graph, Under], Graph]
    fuses: bool = False
    widens: bool = False
    multiplies: bool | None = None
    processor: str | None = None
    precision: str | None = None


def _store_halves(graph: Graph, constants: Mapping[str, Array]) -> Graph:
    return store_halves(graph.pruned(), constants.keys())  # what none reads wants no halves


# Where weights never change, before a strategy is chosen: what weights alone determine.
CONSTANT_PASSES: tuple[Pass[Mapping[str, Array]], ...] = (
    *(Pass(each.name, partial(fold, each)) for each in NAMING),
    *(Pass(each.name, partial(fold, each), multiplies=True) for each in IN_BYTES),
    *(Pass(each.name, partial(fold, each), multiplies=False) for each in IN_REAL),
    Pass(IN_FEW_BITS.name, partial(fold, IN_FEW_BITS), processor="cpu"),
    *(Pass(each.name, partial(fold, each)) for each in FOLDS),
    *(Pass(each.name, partial(fold, each), processor="cpu") for each in JOINS_OF_CPUS),
    *(Pass(each.name, partial(fold, each)) for each in JOINS),
    Pass("widen_weights", lambda graph, _: widen_halves(graph, Strategy({})), processor="cpu"),
    Pass(IN_HALVES.name, partial(fold, IN_HALVES), processor="cpu"),
    Pass(ROUNDED_ROWS.name, partial(fold, ROUNDED_ROWS), processor="cpu", precision=BFLOAT16),
    Pass("store_halves", _store_halves, processor="cpu", precision=BFLOAT16),
    *(Pass(each.name, partial(fold, each), precision=name) for name, each in ROUNDING.items()),
    Pass("drop_unread", lambda graph, _: graph.pruned()),
)

# For every graph: how it is launched under a strategy.
PASSES: tuple[Pass[Strategy], ...] = (
    Pass("widen_partials", widen_partials),
    Pass("widen_halves", widen_halves, widens=True),
    Pass("lower_composites", lower_composites),
    Pass("store_updates", lambda graph, _: store_updates(graph)),
    Pass("merge_parts", merge_parts, fuses=True),
    Pass("fuse_epilogues", fuse_epilogues, fuses=True),
    Pass("read_halves", read_halves, fuses=True, widens=True),
    Pass("fuse_elementwise", fuse_elementwise, fuses=True),
    Pass("place_parts", place_parts, fuses=True),
    Pass("copy_parts", copy_parts, fuses=True),
    Pass("merge_stores", merge_stores, fuses=True),
    Pass("hoist_updates", lambda graph, _: hoist_updates(graph)),
)

SPLIT = "split_constants"  # between the two, into a graph that runs once and the rest
_CONSTANT = dict.fromkeys(each.name for each in CONSTANT_PASSES)  # those of some bits are one
NAMES = (*_CONSTANT, SPLIT, *(each.name for each in PASSES))


def fold_weights(
    graph: Graph,
    constants: Mapping[str, Array],
    watch: Watch | None = None,
    *,
    processor: str = "cpu",
    precision: str = SINGLE,
) -> Graph:
    """Return the graph with batch norms, scales and biases folded into constant weights.

    Args:
        processor: the kind of processor that will run it, whose kernels may multiply bytes.
        precision: of the session (`frontend/precision.py`).
    """
    able = multiplies_bytes(processor) if has_bytes(graph) else None
    chosen = [
        each
        for each in CONSTANT_PASSES
        if each.multiplies in (None, able)
        and each.processor in (None, processor)
        and each.precision in (None, precision)
    ]
    return _applied(graph, chosen, constants, watch, whole=False)


def lower(
    graph: Graph,
    strategy: Strategy,
    *,
    fuse: bool = True,
    halves: bool = False,
    watch: Watch | None = None,
) -> Graph:
    """Return the graph as it is launched under a strategy.

    In checked mode (docs/checked.md) the graph is verified after every pass.

    fuse: whether one launch may run several operators. halves: whether kernels take half-precision
    operands, as those of GPUs do. watch: called after each pass with its name, the graph before it
    and the graph after it.
    """
    chosen = [each for each in PASSES if (fuse or not each.fuses) and not (halves and each.widens)]
    graph = _applied(graph, chosen, strategy, watch)
    if CHECKED:
        check_aliases(graph)
    return graph


def _applied(
    graph: Graph,
    passes: Sequence[Pass[Under]],
    under: Under,
    watch: Watch | None,
    whole: bool = True,
) -> Graph:
    if watch is None and CHECKED:
        watch = verifier(graph, whole)
    for each in passes:
        before, graph = graph, each.apply(graph, under)
        if watch is not None:
            watch(each.name, before, graph)
    return graph


def verifier(began: Graph, whole: bool = True) -> Watch:
    """Return a `Watch` that verifies the graph after each pass.

    Args:
        began: the graph before the first pass.
        whole: whether the graph must still do all the work of `began`.
    """

    def watch(name: str, before: Graph, after: Graph) -> None:
        check_graph(after, before, f"pass {name!r}")
        check_sources(after, began, f"pass {name!r}", whole)

    return watch
