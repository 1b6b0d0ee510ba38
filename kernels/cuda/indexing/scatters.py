"""Scatters, and the gradients of gathers, which are sums by scattering."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from soapstone.kernels.cuda.elementwise.pointwise import pointwise
from soapstone.kernels.cuda.elementwise.text import Text, Value, literal, wide
from soapstone.kernels.cuda.entry import DeviceArray, DeviceEntry, sequence
from soapstone.kernels.cuda.indexing.pieces import Put, Reader
from soapstone.kernels.cuda.indexing.puts import put, put_elements
from soapstone.kernels.cuda.indexing.rows import checked, checked_axes, found, row_of
from soapstone.kernels.cuda.movement.copies import copy, fill
from soapstone.kernels.cuda.products.tiled import indices
from soapstone.kernels.cuda.substrate.arrays import View, room, views
from soapstone.kernels.cuda.substrate.element import each_element, numbered, place, read
from soapstone.kernels.entry import Call
from soapstone.kernels.registry import variant

Where = Callable[[Call, View, Sequence[int]], "Scatter"]


@dataclass(frozen=True)
class Scatter:
    """Where updates of a shape come to in a target of a shape.

    Attributes:
        updates: their shape.
        status, statuses: what tells of an index outside.
        put: (target, operands, what is put, reduction) to the entry that combines all updates;
            zero: whether the target holds zeros.
        find: statements by which a thread of update at_0 and so on finds its element: `row` is
            negative where there is none, else its indices are `spot`. They read `ids`.
    """

    updates: tuple[int, ...]
    status: DeviceArray | None
    statuses: Mapping[int, str]
    put: Callable[..., DeviceEntry]
    find: Sequence[str] = ()
    spot: Sequence[str] = ()

    def entry(self, *entries: DeviceEntry) -> DeviceEntry:
        """Return the entries in order, with the status."""
        return DeviceEntry(sequence(entries).launches, self.status, self.statuses)

    def updated(
        self, target: View, updates: View, reduction: str, *, zero: bool = False
    ) -> DeviceEntry:
        """Return the entry that combines updates with a target."""

        def value(update: Sequence[str], spot: Sequence[str], read: Reader) -> str:
            return read("updates", updates, update)

        return self.put(target, {"updates": updates}, value, reduction, zero=zero)


def by_line(call: Call, ids: View, shape: Sequence[int]) -> Scatter:
    """Return where updates come to that each name an element of their line along an axis."""
    at, axis = call.attributes, call.attributes["axis"]
    total, base = at.get("total", shape[axis]), at.get("base", 0)
    status, statuses = checked(call, total)

    def row(own: Sequence[str]) -> list[str]:
        return [f"row = int64(ids[{place('ids', own)}])", *found(total, base, wraps=True)]

    def put_there(
        target: View,
        operands: Mapping[str, View],
        value: Put,
        reduction: str,
        *,
        zero: bool = False,
    ) -> DeviceEntry:
        own = row([f"at_u{d}" for d, _ in enumerate(shape)])
        return put_elements(target, axis, ids, own, value, operands, reduction, status, zero=zero)

    spot = numbered(len(shape))
    find = [*row(spot), f"if row >= {shape[axis]}: row = -1"]
    spot[axis] = "row"
    return Scatter(ids.shape, status, statuses, put_there, find, spot)


def by_slice(call: Call, ids: View, shape: Sequence[int], batch: int = 0) -> Scatter:
    """Return where updates come to that each name a slice by several indices."""
    depth, lead = ids.shape[-1], len(ids.shape) - 1
    extents = shape[batch : batch + depth]
    status, statuses = checked_axes(call, extents)

    def put_there(
        target: View,
        operands: Mapping[str, View],
        value: Put,
        reduction: str,
        *,
        zero: bool = False,
    ) -> DeviceEntry:
        def seen(update: Sequence[str], spot: Sequence[str], read: Reader) -> str:
            return value([*update, *spot[batch + depth :]], spot, read)

        row = row_of(ids, [f"at_u{d}" for d in range(lead)], extents)
        before = " + ".join(
            f"at_u{d} * {math.prod(shape[d + 1 : batch + depth])}" for d in range(batch)
        )
        row += [f"if row >= 0: row = row + {before}"] if batch else []
        given, own = {**operands, "ids": ids}, range(batch + depth)
        return put(target, own, ids.shape[:-1], row, seen, given, reduction, status, zero=zero)

    updates = (*ids.shape[:-1], *shape[batch + depth :])
    here = numbered(len(updates))
    axes = [(f"r{d}", extent) for d, extent in enumerate(extents)]
    find = [*row_of(ids, here[:lead], extents), *indices("row", axes, "")]
    spot = [*here[:batch], *(f"at_{name}" for name, _ in axes), *here[lead:]]
    return Scatter(updates, status, statuses, put_there, find, spot)


def by_axis(call: Call, ids: View, shape: Sequence[int], axis: int, checks: bool) -> Scatter:
    """Return where updates come to of which those of an index name an element of an axis.

    checks: whether indices may count from the end, and one outside is told of.
    """
    base = call.attributes.get("base", 0)
    total = call.attributes.get("total", shape[axis])
    status, statuses = checked(call, total) if checks else (None, {})
    own = [f"at_u{d}" for d, _ in enumerate(ids.shape)]
    row = [f"row = int64(ids[{place('ids', own)}])"]
    row += found(total, base, wraps=True) if checks else [f"row = row - {base}"]

    row += [f"if row >= {shape[axis]}: row = int64(-1)"]

    def put_there(
        target: View,
        operands: Mapping[str, View],
        value: Put,
        reduction: str,
        *,
        zero: bool = False,
    ) -> DeviceEntry:
        def seen(update: Sequence[str], spot: Sequence[str], read: Reader) -> str:
            return value([*spot[:axis], *update, *spot[axis + 1 :]], spot, read)

        given = {**operands, "ids": ids}
        return put(target, (axis,), ids.shape, row, seen, given, reduction, status, zero=zero)

    updates = (*shape[:axis], *ids.shape, *shape[axis + 1 :])
    return Scatter(updates, status, statuses, put_there)


@variant("embedding_grad", "numba", processor="cuda")
def embedding_grad(call: Call) -> DeviceEntry:
    """Return the entry of dy added up by the row of the table that it came from.

    A tile's ids may name rows of others; none that is outside of all, which the forward tells of.
    """
    (dy, ids), (dtable,) = views(call)
    scatter = by_axis(call, ids, dtable.shape, 0, checks=False)
    return scatter.entry(fill(dtable, 0), scatter.updated(dtable, dy, "add", zero=True))


@variant("embedding_bag_grad", "numba", processor="cuda")
def embedding_bag_grad(call: Call) -> DeviceEntry:
    """Return the entry of dy times the scale, added to each of the rows of its bag."""
    (dy, ids), (dtable,) = views(call)
    factor = literal(call.attributes["scale"], wide(dy.dtype))

    def value(update: Sequence[str], spot: Sequence[str], read: Reader) -> str:
        return f"{read('dy', dy, [update[0], update[-1]])} * {factor}"

    scatter = by_axis(call, ids, dtable.shape, 0, checks=False)
    summed = scatter.put(dtable, {"dy": dy}, value, "add", zero=True)
    return scatter.entry(fill(dtable, 0), summed)


@variant("gather_grad", "numba", processor="cuda")
def gather_grad(call: Call) -> DeviceEntry:
    """Return the entry of dy added up by the element of the axis that it came from."""
    (dy, ids), (dx,) = views(call)
    scatter = by_axis(call, ids, dx.shape, call.attributes["axis"], checks=True)
    return scatter.entry(fill(dx, 0), scatter.updated(dx, dy, "add", zero=True))


@variant("gather_nd_grad", "numba", processor="cuda")
def gather_nd_grad(call: Call) -> DeviceEntry:
    """Return the entry of dy added up by the slice it came from."""
    (dy, ids), (dx,) = views(call)
    scatter = by_slice(call, ids, dx.shape, call.attributes["batch_dims"])
    return scatter.entry(fill(dx, 0), scatter.updated(dx, dy, "add", zero=True))


def _scatter(where: Where, call: Call) -> DeviceEntry:
    (x, ids, updates), (y,) = views(call)
    scatter = where(call, ids, x.shape)
    return scatter.entry(copy(x, y), scatter.updated(y, updates, call.attributes["reduction"]))


def _scatter_grad(where: Where, call: Call) -> DeviceEntry:
    (dy, ids, *rest), outputs = views(call)
    scatter = where(call, ids, dy.shape)
    made = _GRADIENTS[call.attributes["reduction"]]
    return scatter.entry(*made(scatter, ids, dy, rest, outputs))


def _last(
    scatter: Scatter, ids: View, dy: View, rest: Sequence[View], outputs: Sequence[View]
) -> list[DeviceEntry]:
    """Return the gradients where the last update counts: which it is, is found first."""
    dx, dupdates = outputs
    order = room(dy.shape, "int64", dx.span)

    def number(update: Sequence[str]) -> str:
        text = "int64(0)"
        for at, extent in zip(update, scatter.updates):
            text = f"({text} * {extent} + {at})"
        return text

    here = numbered(len(scatter.updates))
    cleared = [*scatter.find, f"if row >= 0: dx[{place('dx', scatter.spot)}] = {dx.dtype}(0)"]
    counted = [
        *scatter.find,
        f"value = {dy.dtype}(0)",
        f"if row >= 0 and order[{place('order', scatter.spot)}] == {number(here)}:",
        f"    value = dy[{place('dy', scatter.spot)}]",
        f"dupdates[{place('dupdates', here)}] = value",
    ]
    reads = {"ids": ids, "dy": dy, "order": order, "dupdates": dupdates}
    return [
        scatter.put(order, {}, lambda update, spot, read: number(update), "none"),
        copy(dy, dx),
        each_element(cleared, scatter.updates, {"ids": ids, "dx": dx}, scatter.status),
        each_element(counted, scatter.updates, reads, scatter.status),
    ]


def _extreme(
    scatter: Scatter, ids: View, dy: View, rest: Sequence[View], outputs: Sequence[View]
) -> list[DeviceEntry]:
    """Return the gradients where the largest or least counts: those that are equal share it."""
    (x, updates, y), (dx, dupdates), kind = rest, outputs, wide(dy.dtype)
    ties = room(dy.shape, kind, dx.span)
    zero, one = literal(0, kind), literal(1, kind)

    def mine(text: Text, values: Sequence[Value]) -> list[Value]:
        return [text.set(f"({one} if {values[0].name} == {values[1].name} else {zero})", kind)]

    def hit(update: Sequence[str], spot: Sequence[str], read: Reader = read) -> str:
        same = f"{read('updates', updates, update)} == {read('y', y, spot)}"
        return f"({one} if {same} else {zero})"

    def share(text: Text, values: Sequence[Value]) -> list[Value]:
        d, of, most, count = (value.name for value in values)
        made = text.set(f"{d} / max({count}, {one})", kind)
        return [text.set(f"({made.name} if {of} == {most} else {zero})", kind)]

    here, spot = numbered(len(scatter.updates)), scatter.spot
    body = [
        *scatter.find,
        f"value = {zero}",
        "if row >= 0:",
        f"    value = {hit(here, spot)} * {read('dy', dy, spot)}",
        f"    value = value / max(ties[{place('ties', spot)}], {one})",
        f"dupdates[{place('dupdates', here)}] = {dupdates.dtype}(value)",
    ]
    reads = {"updates": updates, "y": y}
    more = {"ids": ids, "dy": dy, "ties": ties, "dupdates": dupdates}
    return [
        pointwise(mine, [x, y], [ties]),
        scatter.put(ties, reads, hit, "add"),
        pointwise(share, [dy, x, y, ties], [dx]),
        each_element(body, scatter.updates, {**reads, **more}, scatter.status),
    ]


def _product(
    scatter: Scatter, ids: View, dy: View, rest: Sequence[View], outputs: Sequence[View]
) -> list[DeviceEntry]:
    """Return dy times the other factors, of which zeros are counted and the rest multiplied."""
    (x, updates, _), (dx, dupdates), kind = rest, outputs, wide(dy.dtype)
    zeros = room(dy.shape, "int64", dx.span)
    product = room(dy.shape, kind, dx.span)
    zero, one = literal(0, kind), literal(1, kind)

    def start(text: Text, values: Sequence[Value]) -> list[Value]:
        factor = values[0].name
        return [
            text.set(f"(1 if {factor} == {zero} else 0)", "int64"),
            text.set(f"({one} if {factor} == {zero} else {factor})", kind),
        ]

    def empty(update: Sequence[str], spot: Sequence[str], read: Reader) -> str:
        return f"(1 if {read('updates', updates, update)} == {zero} else 0)"

    def factor(update: Sequence[str], spot: Sequence[str], read: Reader) -> str:
        own = read("updates", updates, update)
        return f"({one} if {own} == {zero} else {own})"

    def others(own: str, none: str, whole: str) -> str:
        left = f"{none} - (1 if {own} == {zero} else 0)"
        return f"({zero} if {left} > 0 else {whole} / ({one} if {own} == {zero} else {own}))"

    def share(text: Text, values: Sequence[Value]) -> list[Value]:
        d, own, none, whole = (value.name for value in values)
        return [text.set(f"{d} * {others(own, none, whole)}", kind)]

    here, spot = numbered(len(scatter.updates)), scatter.spot
    body = [
        *scatter.find,
        f"value = {zero}",
        "if row >= 0:",
        f"    own = {read('updates', updates, here)}",
        f"    none, whole = zeros[{place('zeros', spot)}], product[{place('product', spot)}]",
        f"    value = {read('dy', dy, spot)} * {others('own', 'none', 'whole')}",
        f"dupdates[{place('dupdates', here)}] = {dupdates.dtype}(value)",
    ]
    reads = {"ids": ids, "dy": dy, "updates": updates, "zeros": zeros, "product": product}
    return [
        pointwise(start, [x], [zeros, product]),
        scatter.put(zeros, {"updates": updates}, empty, "add"),
        scatter.put(product, {"updates": updates}, factor, "mul"),
        pointwise(share, [dy, x, zeros, product], [dx]),
        each_element(body, scatter.updates, {**reads, "dupdates": dupdates}, scatter.status),
    ]


_GRADIENTS = {"none": _last, "max": _extreme, "min": _extreme, "mul": _product}
for _name, _where in (("scatter_elements", by_line), ("scatter_nd", by_slice)):
    variant(_name, "numba", processor="cuda")(partial(_scatter, _where))
    variant(f"{_name}_grad", "numba", processor="cuda")(partial(_scatter_grad, _where))
