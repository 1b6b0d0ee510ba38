"""Models written for any batch size, or any extent of a symbolic dim.

A graph has fixed shapes. The model is written twice, for two extents that nothing else has, and
what differs between the two files follows the extent: dims of inputs and outputs get its name,
shapes that operators are given as constants are computed from the first input's shape.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx
from onnx import helper, numpy_helper

from soapstone.frontend.onnx.errors import UnsupportedError
from soapstone.frontend.onnx.file.tensors import as_tensor
from soapstone.ir.tensor import Array

_EXTENTS = (1009, 1013)  # primes


def for_any(written: Callable[[int], onnx.ModelProto], dim: str) -> onnx.ModelProto:
    """Return a model in which an extent is symbolic.

    written: makes the model for an extent, which is that of the first input's first axis. dim: its
    name in the file.

    Raises:
        UnsupportedError: what is computed depends on the extent in another way; names the node.
    """
    model, other = map(written, _EXTENTS)
    graph = model.graph
    if len(graph.node) != len(other.graph.node):
        raise UnsupportedError(f"dim {dim!r}: another graph for each extent; give it a number")
    for node, twin in zip(graph.node, other.graph.node):
        given = zip(node.attribute, twin.attribute)
        same = (node.op_type, node.input, node.output) == (twin.op_type, twin.input, twin.output)
        names = [one.name for one, two in given if one != two]
        if names or not same or len(node.attribute) != len(twin.attribute):
            what = f"attribute {names[0]!r}" if names else "what it is"
            raise UnsupportedError(
                f"{node.op_type} {node.name!r}: {what} depends on dim {dim!r}; give it a number"
            )
    for field in ("input", "output", "value_info"):
        for value, twin in zip(getattr(graph, field), getattr(other.graph, field)):
            pairs = zip(value.type.tensor_type.shape.dim, twin.type.tensor_type.shape.dim)
            for extent, twin_extent in pairs:
                if extent.dim_value != twin_extent.dim_value:
                    once = extent.dim_value == _EXTENTS[0]
                    extent.Clear()
                    if once:
                        extent.dim_param = dim
    _computed(graph, other.graph, dim)
    return model


def _computed(graph: onnx.GraphProto, other: onnx.GraphProto, dim: str) -> None:
    """Compute the constants that depend on the extent from the first input's shape."""
    kept, first = [], []
    extent = f"{dim}.extent"
    twins = {tensor.name: tensor for tensor in other.initializer}
    for tensor in graph.initializer:
        array = numpy_helper.to_array(tensor)
        twin = numpy_helper.to_array(twins[tensor.name])
        if np.array_equal(array, twin):
            kept.append(tensor)
            continue
        name = tensor.name
        uniform = array.size and len(np.unique(np.append(array, twin))) == 1
        users = [node for node in graph.node if name in node.input]
        shapes = array.shape == twin.shape and array.dtype == np.int64 and array.ndim == 1
        if not shapes and not (
            uniform and array.ndim == twin.ndim and array.flat[0] == twin.flat[0]
        ):
            raise UnsupportedError(
                f"{users[0].op_type} {users[0].name!r}: operand {name!r} depends on dim {dim!r};"
                " give it a number"
            )
        one, two = (array, twin) if shapes else (np.array(array.shape), np.array(twin.shape))
        factors, rest = _linear(one, two, f"{users[0].op_type} {users[0].name!r}", dim)
        if shapes and np.count_nonzero(factors) == 1 and all(n.op_type == "Reshape" for n in users):
            kept.append(as_tensor(np.where(factors, -1, array), name))
            continue
        made = name if shapes else f"{name}.shape"
        kept += [as_tensor(factors, f"{name}.factors"), as_tensor(rest, f"{name}.rest")]
        product = f"{name}.scaled"
        first.append(helper.make_node("Mul", [extent, f"{name}.factors"], [product]))
        first.append(helper.make_node("Add", [product, f"{name}.rest"], [made]))
        if not shapes:
            kept.append(as_tensor(np.array(array.flat[0], array.dtype), f"{name}.element"))
            first.append(helper.make_node("Expand", [f"{name}.element", made], [name]))
    if first:
        source = graph.input[0].name
        first.insert(0, helper.make_node("Shape", [source], [extent], start=0, end=1))
    nodes = [*first, *graph.node]
    del graph.node[:], graph.initializer[:]
    graph.node.extend(nodes)
    graph.initializer.extend(kept)


def _linear(one: Array, two: Array, node: str, dim: str) -> tuple[Array, Array]:
    """Return factors and rests of what is linear in the extent."""
    factors, left = np.divmod(two - one, _EXTENTS[1] - _EXTENTS[0])
    if left.any():
        raise UnsupportedError(f"{node}: a shape depends on dim {dim!r}; give it a number")
    return factors, one - factors * _EXTENTS[0]
