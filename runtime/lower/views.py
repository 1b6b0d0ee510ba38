"""Values that need no launch: reshapes and transposes that are another look at the same memory.

A reshape of a contiguous value costs nothing: its readers look at the old memory. A transpose is as
free for readers that take any strides, such as matrix products; and where its operand is made by
such an operator and read by nobody else, it is written transposed in the first place.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Set
from dataclasses import dataclass, replace

import numpy as np

from soapstone.ir.graph import Graph, Node
from soapstone.ir.spec import operator
from soapstone.ir.strategy import Strategy
from soapstone.ir.tensor import Array
from soapstone.runtime.lower.concat import places

Step = tuple[str, tuple[int, ...]]  # ("reshape", shape) or ("transpose", order)


@dataclass(frozen=True)
class View:
    """How a value is seen in the memory of another, its root: all of it or a box, then steps."""

    root: str
    steps: tuple[Step, ...] = ()
    box: tuple[tuple[int, ...], tuple[int, ...]] | None = None  # (first, past the last) index

    def apply(self, array: Array, samples: int | None = None) -> Array:
        """Return the view of the root's array; `samples` is the extent of axis 0 of a tile.

        Raises:
            ValueError: the array's strides do not allow it without a copy.
        """
        for kind, argument in self.steps:
            if kind == "transpose":
                array = array.transpose(argument)
                continue
            shape = argument if samples is None else (samples, *argument[1:])
            array = np.reshape(array, shape, copy=False)
        return array


def views(graph: Graph, strategy: Strategy, constants: Set[str] = frozenset()) -> dict[str, View]:
    """Return the view of each value of a lowered graph that takes no memory of its own.

    Constants have no memory in the runtime to look at.
    """
    found: dict[str, View] = {}
    for value, (root, first) in places(graph, strategy).items():
        past = tuple(low + extent for low, extent in zip(first, graph.tensors[value].shape))
        found[value] = View(root, box=(first, past))
    keep = {*graph.outputs, *graph.updates.values()}
    for node in graph.nodes:
        if node.spec.view not in ("reshape", "transpose") or node.inputs[0] in constants:
            continue
        source, value = node.inputs[0], node.outputs[0]
        behind = found.get(source, View(source))
        view = replace(behind, steps=(*behind.steps, _step(graph, node)))
        transposed = _written_through(graph, strategy, node, found.keys() | keep)
        if _allowed(graph, strategy, view, value, keep, strict=transposed is not None):
            found[value] = view
        elif transposed is not None:
            found[source] = transposed
    return found


def _step(graph: Graph, node: Node) -> Step:
    if node.spec.view == "transpose":
        return "transpose", tuple(node.attributes["permutation"])
    return "reshape", graph.tensors[node.outputs[0]].shape


def _written_through(graph: Graph, strategy: Strategy, node: Node, taken: Set[str]) -> View | None:
    """Return the view of a transpose's result in which its operand can be written, or None."""
    source, value = node.inputs[0], node.outputs[0]
    maker = graph.producers.get(source)
    if (
        node.spec.view != "transpose"
        or maker is None
        or source in taken
        or len(graph.consumers[source]) > 1
        or {value, source} & strategy.layouts.keys()
        or not _strided(maker)
    ):
        return None
    order = tuple(int(i) for i in np.argsort(node.attributes["permutation"]))
    view = View(value, (("transpose", order),))
    return view if _tiles_fit(graph, strategy, maker, source, view) else None


def _allowed(
    graph: Graph, strategy: Strategy, view: View, value: str, keep: Set[str], strict: bool
) -> bool:
    """Return whether a value may be a view: its root's strides and all its readers allow it.

    A reshape or transpose of the view may always be launched as a copy of it; `strict` asks that
    those be views too.
    """
    try:
        whole = _example(graph.tensors[view.root].shape, strategy.layouts.get(view.root))
        box = tuple(map(slice, *view.box)) if view.box else ...
        seen = view.apply(whole[box])
    except ValueError:
        return False
    if value in keep:
        return False
    for reader in graph.consumers[value]:
        if value in reader.overwrites.values() or not _tiles_fit(
            graph, strategy, reader, value, view
        ):
            return False
        if reader.spec.view is None:
            if not seen.flags.c_contiguous and not _strided(reader):
                return False
        elif reader.spec.view == "concat":
            return False
        elif strict:
            further = replace(view, steps=(*view.steps, _step(graph, reader)))
            if not _allowed(graph, strategy, further, reader.outputs[0], keep, strict):
                return False
    return True


def _example(shape: tuple[int, ...], order: tuple[int, ...] | None) -> Array:
    """Return an array with the strides of a value dense in the axis order; it is only looked at."""
    axes = order or tuple(range(len(shape)))
    strides, step = {}, 1
    for axis in reversed(axes):
        strides[axis] = step
        step *= max(shape[axis], 1)
    one = np.empty(1, np.uint8)
    return np.lib.stride_tricks.as_strided(one, shape, [strides[i] for i in range(len(shape))])


def _tiles_fit(graph: Graph, strategy: Strategy, node: Node, value: str, view: View) -> bool:
    """Return whether a node's tiles of a view are tiles of the root: all of it, or its samples."""
    configuration = strategy.configuration(graph, node)
    if not configuration.degrees:
        return True
    if view.box is not None:
        return False
    samples = graph.tensors[view.root].shape[:1]
    for kind, argument in view.steps:
        if (argument[:1] != samples) if kind == "reshape" else (argument[0] != 0):
            return False
    signature = graph.signature(node)
    grid, lo, hi = signature.points(configuration.degrees, configuration.cuts)
    operands = zip((*node.inputs, *node.outputs), (*signature.inputs, *signature.outputs))
    shape = graph.tensors[value].shape
    for name, operand in operands:
        if name == value:
            starts, stops = operand.tiles(lo, hi, math.prod(grid))
            if starts[:, 1:].any() or (stops[:, 1:] != shape[1:]).any():
                return False
    return True


def launched(node: Node, seen: Mapping[str, View]) -> bool:
    """Return whether a node of a lowered graph is launched at all."""
    if node.spec.view == "concat":
        return not all(name in seen and seen[name].box for name in node.inputs)
    if node.spec.view is None:
        return True
    source, value = node.inputs[0], node.outputs[0]
    return value not in seen and not (source in seen and seen[source].root == value)


def _strided(node: Node) -> bool:
    """Return whether a node's operands may have any strides at no cost."""
    if node.spec.strided:
        return True
    wrapped = node.attributes.get("operator")
    return node.operator == "with_epilogue" and operator(str(wrapped)).strided
