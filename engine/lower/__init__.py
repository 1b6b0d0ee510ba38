"""Lowering passes: from a graph and a strategy to the graph whose nodes are launched one by one.

The passes decide how a graph runs and never what it computes (docs/lowering.md). `passes.py` lists
them; `views` then says which values need no launch at all.
"""

from __future__ import annotations

from soapstone.engine.lower.layouts import CHANNELS_LAST, boundary_orders, channels_last, stored
from soapstone.engine.lower.parts import merge_parts
from soapstone.engine.lower.passes import fold_weights, lower
from soapstone.engine.lower.updates import in_place
from soapstone.engine.lower.views import View, launched, views
from soapstone.engine.lower.weights import split_constants

__all__ = [
    "CHANNELS_LAST",
    "View",
    "boundary_orders",
    "channels_last",
    "fold_weights",
    "in_place",
    "launched",
    "lower",
    "merge_parts",
    "split_constants",
    "stored",
    "views",
]
