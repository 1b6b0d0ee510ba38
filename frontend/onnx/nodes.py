"""Nodes of an ONNX graph: what they read, and what errors call them."""

from __future__ import annotations

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
    """Return the names of the values that a node reads, its subgraphs among them."""
    graphs = [graph for a in node.attribute for graph in a.graphs]
    graphs += [a.g for a in node.attribute if a.HasField("g")]
    inner = (read_by(each) for graph in graphs for each in graph.node)
    ends = (value.name for graph in graphs for value in graph.output)
    return set(node.input).union(ends, *inner)


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
