"""Strategies of a graph carried over to what passes make of it, and back.

Passes such as the folding of constant weights merge and remove nodes. `Node.work_of` says whose
work a node of the rewritten graph does, and dims correspond where they index the same axis of the
first output. A dim that can no longer be split gets degree 1, and its node stays on the first of
its devices.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from soapstone.ir.graph import Graph, Node
from soapstone.ir.strategy.configuration import Configuration, inherited, resolved
from soapstone.ir.strategy.strategy import DEFAULT, Strategy


def to_rewritten(strategy: Strategy, original: Graph, rewritten: Graph) -> Strategy:
    """Return a strategy of `original` as one of `rewritten`, which passes have made of it.

    What it says of nodes and values that `rewritten` lacks is left out.
    """
    items, by_name = strategy.configurations, original.by_name
    found = {}
    for node in rewritten.nodes:
        names = (node.name, *reversed(node.work_of))
        source = next((by_name[name] for name in names if name in items and name in by_name), None)
        if source is not None:
            found[node.name] = _carried(rewritten, node, original, source, items[source.name])
    tensors, nodes = rewritten.tensors, rewritten.by_name
    return replace(
        strategy,
        configurations=_with_default(found, items),
        reshards={
            (value, node): item
            for (value, node), item in strategy.reshards.items()
            if value in tensors and node in nodes
        },
        tensors={name: keep for name, keep in strategy.tensors.items() if name in tensors},
        layouts={name: order for name, order in strategy.layouts.items() if name in tensors},
        variants={name: v for name, v in strategy.variants.items() if name in nodes},
        model_hash="",
    )


def to_original(strategy: Strategy, rewritten: Graph, original: Graph) -> Strategy:
    """Return a strategy of `rewritten` as one of `original`; `to_rewritten` is the inverse."""
    items = strategy.configurations
    doer = {name: node for node in rewritten.nodes for name in node.work_of}
    found = {}
    for node in original.nodes:
        source = rewritten.by_name.get(node.name) or doer.get(node.name)
        if source is not None and source.name in items:
            found[node.name] = _carried(original, node, rewritten, source, items[source.name])
    layouts = {name: order for name, order in strategy.layouts.items() if name in original.tensors}
    return replace(
        strategy,
        configurations=_with_default(found, items),
        layouts=layouts,
        model=original.name,
        model_hash=original.structural_hash,
    )


def _with_default(
    found: dict[str, Configuration], items: Mapping[str, Configuration]
) -> dict[str, Configuration]:
    return {DEFAULT: items.get(DEFAULT, Configuration()), **found}


def _carried(
    graph: Graph, node: Node, other: Graph, source: Node, item: Configuration
) -> Configuration:
    """Return the configuration of an operator of another graph for a node that does its work."""
    mine, theirs = graph.signature(node), other.signature(source)
    if mine.dims == theirs.dims:
        return item
    rename = {}
    if mine.outputs[0].shape == theirs.outputs[0].shape:
        for new, old in zip(mine.outputs[0].axes, theirs.outputs[0].axes):
            if len(new.dims) == len(old.dims) == 1:
                rename[new.dims[0]] = old.dims[0]
    degrees = inherited(node, mine, item.degrees, rename)
    return resolved(node, mine, item, degrees, rename, list(theirs.by_name))
