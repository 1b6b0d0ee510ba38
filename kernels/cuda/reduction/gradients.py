"""Gradients of reductions, by rows: of an extreme value, a product, a norm."""

from __future__ import annotations

from collections.abc import Sequence

from soapstone.ir.ops.reduction.folds import reduced_axes
from soapstone.kernels.cuda.elementwise.pointwise import pointwise
from soapstone.kernels.cuda.elementwise.text import Text, Value, literal, wide
from soapstone.kernels.cuda.entry import DeviceEntry
from soapstone.kernels.cuda.normalization.rowwise import Phase, rowwise
from soapstone.kernels.cuda.reduction.fold import spread
from soapstone.kernels.cuda.substrate.arrays import views
from soapstone.kernels.entry import Call
from soapstone.kernels.registry import variant

Values = Sequence[Value]


@variant("reduce_max_grad", "numba", processor="cuda")
def reduce_max_grad(call: Call) -> DeviceEntry:
    """Return the entry of dy where x is the extreme value, split evenly among ties."""
    (dy, x, y), (dx,) = views(call)
    axes = reduced_axes(call.attributes, len(x.shape))
    kind = wide(x.dtype)

    def hits(text: Text, v: Values, known: Values) -> list[Value]:
        hit = f"{v[1].name} == {v[2].name}"
        return [text.set(f"({literal(1, kind)} if {hit} else {literal(0, kind)})", kind)]

    def item(text: Text, v: Values, known: Values) -> list[Value]:
        hit, share = f"{v[1].name} == {v[2].name}", f"{v[0].name} / {known[0].name}"
        return [text.set(f"({share} if {hit} else {literal(0, kind)})", kind)]

    operands = [spread(dy, x.shape, axes), x, spread(y, x.shape, axes)]
    return rowwise(operands, axes, [Phase([("sum", kind)], hits)], [dx], item)


@variant("reduce_prod_grad", "numba", processor="cuda")
def reduce_prod_grad(call: Call) -> DeviceEntry:
    """Return the entry of dy times the product of the other elements, of which one may be zero."""
    (dy, x), (dx,) = views(call)
    axes = reduced_axes(call.attributes, len(x.shape))
    kind = wide(x.dtype)
    zero, one = literal(0, kind), literal(1, kind)

    def factors(text: Text, v: Values, known: Values) -> list[Value]:
        empty = text.set(f"(1 if {v[1].name} == {zero} else 0)", "int64")
        return [empty, text.set(f"({one} if {v[1].name} == {zero} else {v[1].name})", kind)]

    def item(text: Text, v: Values, known: Values) -> list[Value]:
        zeros, product = (each.name for each in known)
        own = text.set(f"({one} if {v[1].name} == {zero} else {v[1].name})", kind).name
        others = text.set(f"{zeros} - (1 if {v[1].name} == {zero} else 0)", "int64").name
        rest = text.set(f"({zero} if {others} > 0 else {product} / {own})", kind).name
        return [text.set(f"{v[0].name} * {rest}", kind)]

    phase = Phase([("sum", "int64"), ("prod", kind)], factors)
    return rowwise([spread(dy, x.shape, axes), x], axes, [phase], [dx], item)


@variant("reduce_l2_grad", "numba", processor="cuda")
def reduce_l2_grad(call: Call) -> DeviceEntry:
    """Return the entry of x dy / y, and of zero where the norm y is."""
    inputs, outputs = views(call)

    def write(text: Text, values: Values) -> list[Value]:
        dy, x, y = values
        made = text.set(f"{x.name} * {dy.name} / {y.name}", x.type).name
        zero = literal(0, x.type)
        return [text.set(f"({zero} if {y.name} == {zero} else {made})", x.type)]

    return pointwise(write, inputs, outputs)
