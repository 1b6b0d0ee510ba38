"""Windows of an image that is rolled, which a graph spells out, as one operator.

Shifted windows are four launches: an image is rolled along each axis, a concatenation of two parts,
and then copied window by window; and as many put it together again.
"""

from __future__ import annotations

from soapstone.engine.lower.fold import Site
from soapstone.ir.builder import GraphBuilder
from soapstone.ir.graph import Node

_TURN = (0, 1, 3, 2, 4, 5)  # rows of a window and windows beside each other in each other's place


def windowed(site: Site, node: Node) -> str | None:
    """Return what a reshape ends that cuts a rolled image, or a concatenation that rolls one."""
    if site.builder.spec(node.inputs[0]).dtype != "float32":  # halves would be cast for it
        return None
    return _cut(site, node) if node.operator == "reshape" else _joined(site, node)


def _cut(site: Site, node: Node) -> str | None:
    turned = site.only(node.inputs[0], "transpose")
    apart = _turned(site, turned)
    if turned is None or apart is None:
        return None
    shape = site.builder.spec(turned.inputs[0]).shape
    n, high, size, wide, across, c = shape
    image, parts, shift = apart.inputs[0], [apart, turned, node], [0, 0]
    if site.builder.spec(image).shape != (n, high * size, wide * across, c):
        return None
    # An image that is rolled again is read twice, by the slices of that.
    while (roll := site.only(image, "concat", readers=min(len(parts) - 2, 2))) is not None:
        found = _rolled(site.builder, roll)
        if found is None:
            break
        image, axis, by = found
        shift[axis - 1] += by
        parts.insert(0, roll)
    if len(parts) == 3:
        return None
    extents = high * size, wide * across
    shift = [by % extent for by, extent in zip(shift, extents)]
    made = site.emit(
        "window_partition",
        image,
        name=node.name,
        sources=tuple(name for part in parts for name in part.work_of),
        size=(size, across),
        shift=shift,
    )
    return site.emit("reshape", made, shape=node.attributes["shape"])


def _joined(site: Site, node: Node) -> str | None:
    found = _rolled(site.builder, node)
    if found is None:
        return None
    image, axis, by = found
    at = site.builder.spec(image).shape
    before = site.builder.maker(image)
    if before is not None and before.operator == "window_reverse":
        sizes, shift, parts = before.attributes["size"], [*before.attributes["shift"]], [before]
        windows = before.inputs[0]
    else:
        whole = before if before is not None and before.operator == "reshape" else None
        turned = site.only(whole.inputs[0], "transpose") if whole is not None else None
        apart = _turned(site, turned)
        if whole is None or turned is None or apart is None:
            return None
        n, high, wide, size, across, c = site.builder.spec(apart.outputs[0]).shape
        if at != (n, high * size, wide * across, c):
            return None
        sizes, shift, parts = (size, across), [0, 0], [apart, turned, whole]
        shape = (n * high * wide, size * across, c)
        windows = site.emit("reshape", apart.inputs[0], shape=shape)
    extents = at[1:3]
    shift[axis - 1] = (shift[axis - 1] - by) % extents[axis - 1]
    return site.emit(
        "window_reverse",
        windows,
        name=node.name,
        sources=tuple(name for part in (*parts, node) for name in part.work_of),
        extents=extents,
        size=sizes,
        shift=shift,
    )


def _turned(site: Site, turned: Node | None) -> Node | None:
    """Return the reshape of six axes that a transpose of windows reads, or None."""
    if turned is None or turned.attributes["permutation"] != _TURN:
        return None
    return site.only(turned.inputs[0], "reshape")


def _rolled(builder: GraphBuilder, node: Node) -> tuple[str, int, int] | None:
    """Return the image that a concatenation rolls, along which axis, and how far; or None."""
    axis, makers = node.attributes["axis"], [builder.maker(value) for value in node.inputs]
    if len(makers) != 2 or axis not in (1, 2):
        return None
    last, first = makers
    if last is None or first is None or {last.operator, first.operator} != {"slice"}:
        return None
    if last.inputs != first.inputs:
        return None
    (image,) = last.inputs
    shape = builder.spec(image).shape
    by = last.attributes["starts"][axis] if len(shape) == 4 else 0
    none, ones = [0] * len(shape), (1,) * len(shape)
    starts, stops = [*none], [*shape]
    starts[axis], stops[axis] = by, by
    after, before = (*starts,), (*stops,)
    if not by or (last.attributes["starts"], last.attributes["stops"]) != (after, shape):
        return None
    if (first.attributes["starts"], first.attributes["stops"]) != ((*none,), before):
        return None
    if {last.attributes["steps"], first.attributes["steps"]} != {ones}:
        return None
    return image, axis, by
