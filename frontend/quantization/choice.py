"""Which values of a network become bytes: what products with constant weights read, and onwards.

Operators that only move elements pass bytes on by one scale; sums of two values, averages and joins
of what becomes bytes take bytes. All other operators are left as they are.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
from onnx import NodeProto

from soapstone.errors import DataError, hint
from soapstone.frontend.quantization.network import Network, attribute

_MOVES = ("MaxPool", "Reshape", "Flatten", "Transpose", "Squeeze", "Unsqueeze")
_ROUNDED = ("Relu", "Clip")  # after a sum, which is rounded once it is done
_AVERAGES = ("AveragePool", "GlobalAveragePool")


@dataclass
class Choice:
    """What is to be quantised.

    Attributes:
        products: nodes with constant weights, by the axis of these that is their channels.
        readers: all nodes that read bytes, by the names of their first results.
        values: the values that become bytes, in order; by each one that stands for all of its
            scale.
    """

    products: list[tuple[NodeProto, int]] = field(default_factory=list)
    readers: set[str] = field(default_factory=set)
    values: dict[str, str] = field(default_factory=dict)

    def scale_of(self, value: str) -> str:
        """Return the value that stands for all that have the scale of this one."""
        while self.values[value] != value:
            value = self.values[value]
        return value

    def share(self, first: str, second: str) -> None:
        """Let two values have one scale."""
        self.values[self.scale_of(first)] = self.scale_of(second)


def choose(network: Network, exclude: Iterable[str] = ()) -> Choice:
    """Return what to quantise; exclude: names of nodes that stay as they are.

    Raises:
        DataError: a name that no node has, or a model without a product to quantise.
    """
    left = set(exclude)
    known = {node.name for node in network.nodes if node.name}
    for name in sorted(left - known):
        raise DataError(f"exclude: no node {name!r} found in the model{hint(name, known)}")
    made = Choice()
    for node in network.nodes:
        axis = _channels(network, node)
        if axis is not None and node.name not in left and node.input[0] not in network.constants:
            made.products.append((node, axis))
            made.readers.add(node.output[0])
            made.values.setdefault(node.input[0], node.input[0])
    if not made.products:
        raise DataError(
            "model: no Conv, MatMul or Gemm with constant float32 weights found, 1 or more needed"
        )
    todo = list(made.values)
    while todo:
        value = todo.pop()
        node = network.maker.get(value)
        if node is None or node.name in left:
            continue
        sources, shared = _sources(network, made, value, node)
        for source in sources:
            if source not in made.values:
                made.values[source] = source
                todo.append(source)
            if shared:
                made.share(value, source)
    return made


def _sources(network: Network, made: Choice, value: str, node: NodeProto) -> tuple[list[str], bool]:
    """Return what else becomes bytes since a value does, and whether by its scale.

    Who reads it is noted.
    """
    summed = node
    if node.op_type in _ROUNDED:
        before = network.maker.get(node.input[0])
        if before is None or node.input[0] in network.outputs:
            return [], False
        if len(network.readers[node.input[0]]) > 1:
            return [], False
        summed = before
    inputs = [name for name in summed.input if name]
    known = [name in network.constants for name in inputs]
    if summed.op_type == "Add" and not any(known):
        made.readers.add(summed.output[0])
        return inputs, False
    if node.op_type in _AVERAGES:
        made.readers.add(value)
        return inputs[:1], False
    if node.op_type in _MOVES and not known[0] and len([o for o in node.output if o]) == 1:
        made.readers.add(value)
        return inputs[:1], True
    if node.op_type == "Concat" and not any(known):
        made.readers.add(value)
        return inputs, True
    return [], False


def _channels(network: Network, node: NodeProto) -> int | None:
    """Return the axis of a product's constant weights that is its channels; None: it is no such."""
    if node.op_type not in ("Conv", "MatMul", "Gemm") or node.domain not in ("", "ai.onnx"):
        return None
    weights = network.constants.get(node.input[1])
    if weights is None or weights.dtype != np.float32 or weights.size == 0:
        return None
    if any(name and name not in network.constants for name in node.input[2:]):
        return None
    if node.op_type == "Conv":
        return 0
    if weights.ndim != 2:
        return None
    if node.op_type == "MatMul":
        return 1
    plain = all(attribute(node, name, 1.0) == 1.0 for name in ("alpha", "beta"))
    if not plain or attribute(node, "transA", 0):
        return None
    return 0 if attribute(node, "transB", 0) else 1
