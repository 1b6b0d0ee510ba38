"""Strategies of a graph for what passes make of it, and back: constant weights are folded, say.

Whose work a node does is known (`Node.sources`), and which dims split alike is told by the axes of
results that they index. What cannot be split so any more is whole, on the first of its devices.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from soapstone.ir.graph import Graph, Node
from soapstone.ir.strategy.configuration import Configuration, inherited, resolved
from soapstone.ir.strategy.strategy import DEFAULT, Strategy


def followed(strategy: Strategy, given: Graph, made: Graph) -> Strategy:
    """Return the strategy of a graph for what passes have made of that.

    strategy: of `given`. What it says of values that are there no more is left out.
    """
    items = strategy.configurations
    found = {}
    for node in made.nodes:
        names = (node.name, *reversed(node.work_of))
        source = next((given.by_name[n] for n in names if n in items and n in given.by_name), None)
        if source is not None:
            found[node.name] = _taken(made, node, given, source, items[source.name])
    reshards = strategy.reshards.items()
    return replace(
        strategy,
        configurations=_with_default(found, items),
        reshards={
            key: item for key, item in reshards if key[0] in made.tensors and key[1] in made.by_name
        },
        tensors={name: keep for name, keep in strategy.tensors.items() if name in made.tensors},
        layouts={name: order for name, order in strategy.layouts.items() if name in made.tensors},
        variants={name: v for name, v in strategy.variants.items() if name in made.by_name},
        model_hash="",
    )


def told(strategy: Strategy, made: Graph, given: Graph) -> Strategy:
    """Return the strategy of what passes have made of a graph as one of the graph itself.

    strategy: of `made`. `followed` has it again.
    """
    items = strategy.configurations
    doer = {name: node for node in made.nodes for name in node.work_of}
    found = {}
    for node in given.nodes:
        source = made.by_name.get(node.name) or doer.get(node.name)
        if source is not None and source.name in items:
            found[node.name] = _taken(given, node, made, source, items[source.name])
    layouts = {name: order for name, order in strategy.layouts.items() if name in given.tensors}
    return replace(
        strategy,
        configurations=_with_default(found, items),
        layouts=layouts,
        model=given.name,
        model_hash=given.structural_hash,
    )


def _with_default(
    found: dict[str, Configuration], items: Mapping[str, Configuration]
) -> dict[str, Configuration]:
    return {DEFAULT: items.get(DEFAULT, Configuration()), **found}


def _taken(
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
