"""Reverse-mode differentiation: from a graph under construction to a graph with gradients.

The gradient of an operator is operators of the same kind, which follow the configuration of their
forward operator by dim name. Splitting the sample dim then makes a weight's gradient a partial sum,
so parameter synchronisation is a reduction like any other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from soapstone.ir.builder import Emitter, GraphBuilder
from soapstone.ir.errors import GraphError
from soapstone.ir.graph import Node
from soapstone.ir.spec import GradientContext


def gradients(builder: GraphBuilder, loss: str, wrt: Sequence[str]) -> dict[str, str]:
    """Append the operators that compute d loss / d value, and return the gradient of each value.

    Gradients that reach one value along several paths are summed by one n-ary `accumulate`.

    Args:
        loss: a scalar value, shape ().
        wrt: the values to differentiate with respect to.

    Raises:
        GraphError: the loss is not a scalar, does not depend on a value of `wrt`, or an operator in
            between has no gradient.
    """
    if builder.spec(loss).shape != ():
        raise GraphError(f"loss {loss!r} has shape {builder.spec(loss).shape}; () needed")
    dtype = builder.spec(loss).dtype
    one = builder.apply("full", name="one", shape=(), value=1.0, dtype=dtype)[0]
    result = pulled_back(builder, {loss: one}, wrt)
    for value in wrt:
        if value not in result:
            raise GraphError(f"loss {loss!r} does not depend on {value!r}")
    return result


def pulled_back(
    builder: GraphBuilder, seeds: Mapping[str, str], wrt: Sequence[str]
) -> dict[str, str]:
    """Append the operators that compute gradients from those of other values; return them.

    Args:
        seeds: the gradient of each value at which differentiation begins.
        wrt: the values to differentiate with respect to; those that no seed depends on are left
            out.

    Raises:
        GraphError: an operator in between has no gradient.
    """
    nodes = builder.nodes
    reached = set(wrt)
    path = []
    for node in nodes:
        if reached.intersection(node.inputs):
            reached.update(node.outputs)
            path.append(node)
    arriving = {value: [seed] for value, seed in seeds.items()}
    result: dict[str, str] = {}

    def total(value: str) -> str | None:
        parts = arriving.pop(value, [])
        if len(parts) < 2:
            return parts[0] if parts else None
        return builder.apply("accumulate", *parts, name=f"{value}.grad")[0]

    for node in reversed(path):
        grads: list[str | None] = []
        for output in node.outputs:
            grad = total(output)
            grads.append(grad)
            if grad is not None and output in wrt:
                result[output] = grad
        if all(grad is None for grad in grads):
            continue
        spec = node.spec
        if spec.gradient is None:
            raise GraphError(
                f"{node.label}: the operator has no gradient; {_behind(nodes, node, wrt)}"
            )
        context = GradientContext(
            Emitter(builder, node, "grad."), node, node.inputs, node.outputs, tuple(grads)
        )
        for name, grad in zip(node.inputs, spec.gradient(context), strict=True):
            if grad is not None and name in reached:
                arriving.setdefault(name, []).append(grad)
    for value in wrt:
        if value in result:
            continue
        grad = total(value)
        if grad is not None:
            result[value] = grad
    return result


def _behind(nodes: Sequence[Node], node: Node, wrt: Sequence[str]) -> str:
    """Return which of some values a node depends on."""
    read = set(node.inputs)
    for other in reversed(nodes):
        if read.intersection(other.outputs):
            read.update(other.inputs)
    names = [repr(value) for value in wrt if value in read]
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"freeze what it is made of: {', '.join(names[:3])}{more}"
