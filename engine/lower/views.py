"""Views: values that need no launch, since they are in the memory of another value.

A reshape of a contiguous value costs nothing: its readers read the old memory. A transpose costs
nothing for readers that take any strides, such as matrix products; and if such an operator makes
its operand and nobody else reads that, it is written transposed in the first place. A part of a
value, made by a split or a slice, is a box of it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Set
from typing import Any

import numpy as np

from soapstone.engine.lower.concat import places
from soapstone.engine.lower.readers import takes_rows, takes_strides
from soapstone.ir.graph import Graph, Node
from soapstone.ir.strategy import Strategy
from soapstone.ir.tensor import Array, TensorSpec
from soapstone.records import dataclass, replace

# ("reshape", shape), ("transpose", order), or ("slice", starts, then stops, then steps)
Step = tuple[str, tuple[int, ...]]
Box = tuple[tuple[int, ...], tuple[int, ...]]  # first, past the last index


@dataclass(frozen=True)
class View:
    """How a value lies in the memory of another, its root: the whole or a box of it, then steps."""

    root: str
    steps: tuple[Step, ...] = ()
    box: Box | None = None

    @property
    def part(self) -> bool:
        """Whether it is of a part of the root."""
        return self.box is not None or any(kind == "slice" for kind, _ in self.steps)

    def then(self, kind: str, argument: tuple[int, ...]) -> View:
        """Return the view of this view; consecutive steps of a kind are merged.

        A reshape after a reshape has the same elements in the same order, and a transpose that
        undoes the previous one removes it.
        """
        before = self.steps[:-1]
        last, old = self.steps[-1] if self.steps else ("", ())
        if kind == last == "transpose":
            argument = tuple(old[axis] for axis in argument)
            if argument == tuple(range(len(argument))):
                return replace(self, steps=before)
        elif not kind == last == "reshape":
            before = self.steps
        return replace(self, steps=(*before, (kind, argument)))

    def apply(self, array: Array, samples: int | None = None) -> Array:
        """Return the view of the root's array. samples: the extent of axis 0 of a tile.

        Raises:
            ValueError: the array's strides do not allow it without a copy.
        """
        for kind, argument in self.steps:
            if kind == "transpose":
                array = array.transpose(argument)
            elif kind == "slice":
                starts, stops, steps = np.reshape(argument, (3, array.ndim)).tolist()
                cut: tuple[Any, ...] = (*map(slice, starts, stops, steps), ...)
                array = array[cut]
            else:
                shape = argument if samples is None else (samples, *argument[1:])
                array = np.reshape(array, shape, copy=False)
        return array


def views(graph: Graph, strategy: Strategy, constants: Set[str] = frozenset()) -> dict[str, View]:
    """Return the view of each value of a lowered graph that has no memory of its own.

    Constants have no memory in the runtime, so there are no views of them.
    """
    return scan(graph, strategy, constants)[0]


def scan(
    graph: Graph, strategy: Strategy, constants: Set[str] = frozenset()
) -> tuple[dict[str, View], dict[str, tuple[str, ...]]]:
    """Return the views, and for each node with several results those that cannot be views.

    Such a node is launched if any of its results cannot be a view.
    """
    found: dict[str, View] = {}
    refused: dict[str, tuple[str, ...]] = {}
    copied = strategy.copies(graph).keys()  # are beside each other in one memory
    for value, (root, first) in places(graph, strategy).items():
        past = tuple(low + extent for low, extent in zip(first, graph.tensors[value].shape))
        found[value] = View(root, box=(first, past))
    for node in graph.nodes:
        if node.spec.view in (None, "concat") or node.inputs[0] in constants:
            continue
        source = node.inputs[0]
        behind = found.get(source, View(source))
        if not copied.isdisjoint((behind.root, *node.outputs)):
            continue
        made = _views_by(graph, node, behind)
        transposed = _written_through(graph, strategy, node, found.keys() | graph.results)
        strict = transposed is not None
        bad = tuple(v for v in made if not _allowed(graph, strategy, made[v], v, strict))
        if not bad:
            found.update(made)
        elif transposed is not None:
            found[source] = transposed
        elif len(made) > 1:
            refused[node.name] = bad
    return found, refused


def _views_by(graph: Graph, node: Node, behind: View) -> dict[str, View]:
    """Return the views that a node makes of its operand; empty if strides do not allow them."""
    at = node.attributes
    if node.spec.view == "transpose":
        view = behind.then("transpose", tuple(at["permutation"]))
    elif node.spec.view == "reshape":
        view = behind.then("reshape", graph.tensors[node.outputs[0]].shape)
    elif node.spec.view == "slice":
        cuts = (at["starts"], at["stops"], at["steps"])
        fine = all(by > 0 for by in at["steps"]) and graph.tensors[node.outputs[0]].size
        return {node.outputs[0]: _cut(behind, *cuts)} if fine else {}
    else:
        return _parts(graph.tensors[node.inputs[0]], node, behind)
    return {node.outputs[0]: view}


def _parts(spec: TensorSpec, node: Node, behind: View) -> dict[str, View]:
    """Return each part of a split as a box; an empty part has no place in memory."""
    axis, sizes = node.attributes["axis"], node.attributes["sizes"]
    if spec.size == 0 or 0 in sizes:
        return {}
    result = {}
    for value, (low, high) in zip(
        node.outputs, itertools.pairwise(itertools.accumulate(sizes, initial=0))
    ):
        starts = tuple(low if i == axis else 0 for i in range(spec.rank))
        stops = tuple(high if i == axis else extent for i, extent in enumerate(spec.shape))
        result[value] = _cut(behind, starts, stops, (1,) * spec.rank)
    return result


def _cut(
    behind: View, starts: tuple[int, ...], stops: tuple[int, ...], steps: tuple[int, ...]
) -> View:
    """Return the view of a part of a view, as a box of the root if possible."""
    if behind.steps or any(by != 1 for by in steps):
        return behind.then("slice", (*starts, *stops, *steps))
    first = behind.box[0] if behind.box else (0,) * len(starts)
    low, high = (tuple(a + b for a, b in zip(first, side)) for side in (starts, stops))
    return replace(behind, box=(low, high))


def _written_through(graph: Graph, strategy: Strategy, node: Node, taken: Set[str]) -> View | None:
    """Return the view of a transpose's result as which its operand can be written, or None."""
    source, value = node.inputs[0], node.outputs[0]
    maker = graph.producers.get(source)
    if (
        node.spec.view != "transpose"
        or maker is None
        or source in taken
        or graph.only_reader(source) is None
        or {value, source} & strategy.layouts.keys()
        or not takes_strides(maker)
    ):
        return None
    order = tuple(int(i) for i in np.argsort(node.attributes["permutation"]))
    view = View(value, (("transpose", order),))
    return view if _tiles_fit(graph, strategy, maker, source, view) else None


def _allowed(graph: Graph, strategy: Strategy, view: View, value: str, strict: bool) -> bool:
    """Return whether a value may be a view: its root's strides and all its readers allow it.

    A reshape or transpose of the view may always be launched as a copy; `strict` requires that
    those be views too. A reader that takes no rows with gaps copies a part itself, which costs as
    much as a launched copy, so one such reader is allowed.
    """
    if value in graph.results:
        return False
    try:
        whole = example(graph.tensors[view.root].shape, strategy.layouts.get(view.root))
        box = tuple(map(slice, *view.box)) if view.box else ...
        seen = view.apply(whole[box])
    except ValueError:
        return False
    rows = view.part and _in_order(seen, strategy.layouts.get(value))
    copies = 0
    for reader in graph.consumers[value]:
        if value in reader.overwrites.values() or not _tiles_fit(
            graph, strategy, reader, value, view
        ):
            return False
        if reader.spec.view in (None, "concat"):
            if reader.spec.view is None and (seen.flags.c_contiguous or takes_strides(reader)):
                continue
            if not rows:
                return False
            copies += not takes_rows(graph, reader, value)
        elif strict:
            for name, further in _views_by(graph, reader, view).items():
                if not _allowed(graph, strategy, further, name, strict):
                    return False
    return copies <= 1


def example(shape: tuple[int, ...], order: tuple[int, ...] | None) -> Array:
    """Return an array with the strides of a dense value in the axis order, to inspect only."""
    axes = order or tuple(range(len(shape)))
    strides, step = {}, 1
    for axis in reversed(axes):
        strides[axis] = step
        step *= max(shape[axis], 1)
    one = np.empty(1, np.uint8)
    return np.lib.stride_tricks.as_strided(one, shape, [strides[i] for i in range(len(shape))])


def _in_order(seen: Array, order: tuple[int, ...] | None) -> bool:
    """Return whether a view has its elements in the axis order, with the last axis contiguous."""
    axes = order or range(seen.ndim)
    strides = [seen.strides[axis] for axis in axes if seen.shape[axis] > 1]
    return strides == sorted(strides, reverse=True) and strides[-1:] in ([], [seen.itemsize])


def _tiles_fit(graph: Graph, strategy: Strategy, node: Node, value: str, view: View) -> bool:
    """Return whether a node's tiles of a view are tiles of the root: all of it, or its samples."""
    configuration = strategy.configuration(graph, node)
    if not configuration.degrees:
        return True
    if view.part:
        return not view.steps
    samples = graph.tensors[view.root].shape[:1]
    if not samples:  # a scalar has none
        return False
    for kind, argument in view.steps:
        if (argument[:1] != samples) if kind == "reshape" else (argument[0] != 0):
            return False
    signature = graph.signature(node)
    grid, lo, hi = signature.points(*configuration.cutting)
    operands = zip((*node.inputs, *node.outputs), (*signature.inputs, *signature.outputs))
    shape = graph.tensors[value].shape
    for name, operand in operands:
        if name == value:
            starts, stops = operand.tiles(lo, hi, math.prod(grid))
            if starts[:, 1:].any() or (stops[:, 1:] != shape[1:]).any():
                return False
    return True


def launched(node: Node, seen: Mapping[str, View]) -> bool:
    """Return whether a node of a lowered graph is launched."""
    if node.spec.view is None:
        return True
    if node.spec.view == "concat":
        return not _in_place(node, seen)
    source, value = node.inputs[0], node.outputs[0]
    return value not in seen and not (source in seen and seen[source].root == value)


def _in_place(node: Node, seen: Mapping[str, View]) -> bool:
    """Return whether the parts of a concatenation are consecutive in its memory."""
    whole, axis = seen.get(node.outputs[0], View(node.outputs[0])), node.attributes["axis"]
    low = None if whole.box is None else whole.box[0]
    for name in node.inputs:
        part = seen.get(name)
        if part is None or part.box is None or part.root != whole.root or part.steps:
            return False
        if part.box[0] != (low or (0,) * len(part.box[0])):
            return False
        low = tuple(part.box[1][i] if i == axis else first for i, first in enumerate(part.box[0]))
    return not whole.steps
