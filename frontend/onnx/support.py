"""Which operators of a file can be read."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from importlib import import_module
from typing import TYPE_CHECKING

from soapstone.frontend.onnx.file.read import Source
from soapstone.frontend.onnx.file.schema import schema
from soapstone.frontend.onnx.values import MICROSOFT, RULES, domain_of
from soapstone.ir.spec import operator_of_onnx

if TYPE_CHECKING:
    import onnx


# Modules of rules whose operators are all of one domain, or of those inside it.
_OF_DOMAINS = {
    "ai.onnx.ml": ("kernel_machines", "learned", "trees"),
    "ai.onnx.preview.training": ("training",),
    MICROSOFT: ("microsoft",),
}

# What to do where a file has one of these, which are not read.
_SEARCHES = (
    "it searches with a decoder that the file holds inside it; write that decoder as a file of its"
    " own, whose tokens `InferenceSession.generate` finds greedily or draws"
)
INSTEAD = {
    (MICROSOFT, name): _SEARCHES
    for name in ("BeamSearch", "GreedySearch", "Sampling", "WhisperBeamSearch")
}


def nodes_of(nodes: Iterable[onnx.NodeProto]) -> Iterator[onnx.NodeProto]:
    """Yield nodes and those of their subgraphs."""
    todo = list(nodes)[::-1]
    while todo:
        node = todo.pop()
        yield node
        for attribute in node.attribute:
            for graph in (attribute.g, *attribute.graphs):
                todo += list(graph.node)[::-1]


def operator_name(node: onnx.NodeProto) -> str:
    """Return what a node's operator is called, with its domain where that is not ONNX's own."""
    return f"{node.domain}.{node.op_type}" if domain_of(node.domain) else str(node.op_type)


def unsupported(source: Source) -> tuple[str, ...]:
    """Return the operators that cannot be read, in branches that are never taken too."""
    nodes = _nodes(source)
    return tuple(dict.fromkeys(operator_name(node) for node in nodes if not _known(source, node)))


def register(source: Source) -> None:
    """Import the rules that a model may need: few have nodes of these domains."""
    from soapstone.frontend.onnx import rules

    domains = {node.domain for node in _nodes(source)}
    for domain, modules in _OF_DOMAINS.items():
        if any(each.startswith(domain) for each in domains):
            for module in modules:
                import_module(f"{rules.__name__}.{module}")


def _nodes(source: Source) -> Iterator[onnx.NodeProto]:
    bodies = (source.graph.node, *(function.node for function in source.functions.values()))
    return (node for body in bodies for node in nodes_of(body))


def _known(source: Source, node: onnx.NodeProto) -> bool:
    key = (domain_of(node.domain), node.op_type)
    if key in RULES or key in source.functions or operator_of_onnx(key[1], key[0]) is not None:
        return True
    declared = schema(*key, source.opsets.get(key[0], 1))
    return declared is not None and declared.has_body
