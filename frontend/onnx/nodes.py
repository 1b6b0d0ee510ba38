"""Nodes of an ONNX graph: what they read, and what errors call them."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from soapstone.frontend.onnx.errors import OnnxError
from soapstone.ir.errors import GraphError

if TYPE_CHECKING:
    import onnx

_MALFORMED = (TypeError, ValueError, LookupError, ArithmeticError)


def needed(nodes: Sequence[onnx.NodeProto], outputs: Iterable[str]) -> list[onnx.NodeProto]:
    """Return the nodes that make some values, in their order."""
    wanted, found = set(outputs), []
    for node in reversed(nodes):
        if wanted.intersection(node.output):
            found.append(node)
            wanted |= read_by(node)
    return found[::-1]


def read_by(node: onnx.NodeProto) -> set[str]:
    """Return the names of the values that a node reads, those that its subgraphs read outside."""
    found = set(node.input)
    graphs = [graph for a in node.attribute for graph in a.graphs]
    for graph in graphs + [a.g for a in node.attribute if a.HasField("g")]:
        own = {each.name for each in (*graph.input, *graph.initializer)}
        own.update(name for each in graph.node for name in each.output)
        inner = (read_by(each) for each in graph.node)
        found |= {value.name for value in graph.output}.union(*inner) - own
    return found


def order_of(nodes: Sequence[onnx.NodeProto]) -> list[int] | None:
    """Return the places of nodes such that each comes after those that make what it reads.

    None: they are so already. What is or waits for a cycle comes last, in the order that it has.
    """
    makers: dict[str, int] = {}
    for place, node in enumerate(nodes):
        for name in node.output:
            makers.setdefault(name, place)
    waits = [{makers[n] for n in read_by(node) if n and n in makers} for node in nodes]
    if all(place > max(each, default=-1) for place, each in enumerate(waits)):
        return None
    readers: dict[int, list[int]] = {}
    for place, each in enumerate(waits):
        for maker in each:
            readers.setdefault(maker, []).append(place)
    ready = [place for place, each in enumerate(waits) if not each]  # a heap, being sorted
    order: dict[int, None] = {}
    while ready:
        made = heapq.heappop(ready)
        order[made] = None
        for place in readers.get(made, ()):
            waits[place].remove(made)
            if not waits[place]:
                heapq.heappush(ready, place)
    return [*order, *(place for place in range(len(waits)) if place not in order)]


@contextmanager
def placed(node: onnx.NodeProto, position: int, prefix: str) -> Iterator[None]:
    """Let errors inside be `OnnxError`s that name a node, the `position`-th of its graph."""
    label = f"{prefix}{title(node, position)}"
    try:
        yield
    except OnnxError as error:
        if not getattr(error, "placed", False):
            error.args = (f"{label}: {error}",)
            error.placed = True  # type: ignore[attr-defined]
        raise
    except GraphError as error:
        raise _placed(label, str(error)) from None
    except RecursionError:
        raise _placed(label, "nested too deeply") from None
    except _MALFORMED as error:  # an attribute or operand that no check foresaw
        raise _placed(label, f"malformed: {error}") from error


def title(node: onnx.NodeProto, position: int) -> str:
    """Return how errors call a node, the `position`-th of its graph."""
    name = f"node {node.name!r}" if node.name else f"node {position}"
    return f"{name} ({node.op_type})"


def single_shape(value: onnx.ValueInfoProto) -> tuple[int, ...]:
    """Return the shape of the one number that an input of a loop's body is declared to hold."""
    return (1,) if value.type.tensor_type.shape.dim else ()


def _placed(label: str, text: str) -> OnnxError:
    """Return an error that says which node it is of."""
    error = OnnxError(f"{label}: {text}")
    error.placed = True  # type: ignore[attr-defined]
    return error


def without(node: onnx.NodeProto, absent: set[str]) -> onnx.NodeProto:
    """Return a node that does not read these values: their places are empty."""
    if not absent.intersection(node.input):
        return node
    copy = type(node)()
    copy.CopyFrom(node)
    copy.input[:] = ["" if name in absent else name for name in node.input]
    return copy
