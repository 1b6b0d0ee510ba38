"""Parallel convolutions of a value's parts, merged into one grouped convolution.

Networks with many paths are written so, with a small convolution for each path.
"""

from __future__ import annotations

from soapstone.engine.lower.fold import Site
from soapstone.ir.graph import Node
from soapstone.ir.ops.windows.convolution import CONVOLUTIONS


def grouped(site: Site, node: Node) -> str | None:
    """Return the grouped convolution that replaces a concatenation of convolutions, or None."""
    found = [site.only(value, *CONVOLUTIONS) for value in node.inputs]
    paths = [path for path in found if path is not None]
    if node.attributes["axis"] != 1 or len(paths) < max(2, len(found)):
        return None
    first = paths[0]
    split = site.builder.maker(first.inputs[0])
    if (
        split is None
        or split.operator != "split"
        or split.attributes["axis"] != 1
        or split.outputs != tuple(path.inputs[0] for path in paths)
        or any(site.readers.get(part) != 1 for part in split.outputs)
        or len({(p.operator, p.items, site.builder.spec(p.inputs[1])) for p in paths}) > 1
        or not all(site.fixed.issuperset(path.inputs[1:]) for path in paths)
    ):
        return None
    operands = [
        site.emit("concat", *(path.inputs[position] for path in paths), axis=0)
        for position in range(1, len(first.inputs))
    ]
    sources = tuple(name for path in (*paths, node) for name in path.work_of)
    at = {**first.attributes, "groups": len(paths) * first.attributes["groups"]}
    inputs = (split.inputs[0], *operands)
    return site.emit(first.operator, *inputs, name=node.name, sources=sources, **at)
