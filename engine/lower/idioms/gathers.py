"""Gathers whose indices, which constants determine, read an axis from its first to its last.

PyTorch exports strided views so: the elements of a value in a row, each at the place that is
counted for it. They are where they were, in another shape.
"""

from __future__ import annotations

import numpy as np

from soapstone.engine.lower.fold import Site
from soapstone.ir.graph import Node
from soapstone.ir.tensor import Array


def gathered_in_order(site: Site, node: Node) -> str | None:
    """Return a gather of all elements of an axis, in their order, as a reshape; else None."""
    x, indices = node.inputs
    before, at = site.builder.spec(x).shape, site.builder.spec(indices)
    axis = node.attributes["axis"]
    if x in site.fixed or at.size != before[axis] or not site.says(indices, read_in_order):
        return None
    shape = (*before[:axis], *at.shape, *before[axis + 1 :])
    return site.emit("reshape", x, name=node.name, shape=shape)


def read_in_order(indices: Array) -> bool:
    """Return whether indices in a row are 0, 1, 2, …"""
    return bool((indices.ravel() == np.arange(indices.size)).all())
