"""Passes from a graph and a strategy to the graph whose nodes are launched one by one.

These passes decide how a graph runs and never what it computes (docs/lowering.md). First those that
make launches fewer; `views` then says which values need no launch at all.
"""

from __future__ import annotations

from soapstone.engine.lower.composites import lower_composites
from soapstone.engine.lower.concat import place_parts
from soapstone.engine.lower.elementwise import fuse_elementwise
from soapstone.engine.lower.epilogue import fuse_epilogues
from soapstone.engine.lower.halves import widen_halves
from soapstone.engine.lower.layouts import CHANNELS_LAST, channels_last, plain, stored
from soapstone.engine.lower.parts import copy_parts, merge_parts
from soapstone.engine.lower.updates import hoist_updates, in_place, merge_stores, store_updates
from soapstone.engine.lower.views import View, launched, views
from soapstone.engine.lower.weights import fold_weights, split_constants
from soapstone.ir.graph import Graph
from soapstone.ir.strategy import Strategy


def lower(graph: Graph, strategy: Strategy, *, fuse: bool = True) -> Graph:
    """Return the graph as it is launched under a strategy; without `fuse`, an operator a launch."""
    graph = store_updates(lower_composites(widen_halves(graph, strategy), strategy))
    if fuse:
        graph = merge_parts(graph, strategy)
        graph = fuse_epilogues(graph, strategy)
        graph = fuse_elementwise(graph, strategy)
        graph = place_parts(graph, strategy)
        graph = copy_parts(graph, strategy)
        graph = merge_stores(graph, strategy)
    return hoist_updates(graph)


__all__ = [
    "CHANNELS_LAST",
    "View",
    "channels_last",
    "fold_weights",
    "in_place",
    "launched",
    "lower",
    "merge_parts",
    "plain",
    "split_constants",
    "stored",
    "views",
]
