"""Softmax, its logarithm, their gradients, and what else normalises along one axis."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from soapstone.kernels.cuda.elementwise.text import Text, Value, literal, wide
from soapstone.kernels.cuda.entry import DeviceEntry
from soapstone.kernels.cuda.normalization.rowwise import Phase, rowwise
from soapstone.kernels.cuda.substrate.arrays import views
from soapstone.kernels.entry import Call
from soapstone.kernels.registry import variant

Values = Sequence[Value]


def largest(kind: str) -> Phase:
    """Return the fold to the largest element of operand 0, of those that are numbers."""
    return Phase([("greatest", kind)], lambda text, x, known: [x[0]])


def powers(kind: str) -> Phase:
    """Return the fold to the sum of e to the power of operand 0 less the statistic before."""

    def item(text: Text, x: Values, known: Values) -> list[Value]:
        shifted = text.set(f"{x[0].name} - {known[-1].name}", kind)
        return [text.set(f"exp({shifted.name})", kind)]

    return Phase([("sum", kind)], item, powers=True)


def _softmax(name: str, call: Call) -> DeviceEntry:
    (x,), (y,) = views(call)
    kind, axis = wide(x.dtype), call.attributes["axis"] % len(x.shape)

    def total(text: Text, folded: Values, operands: Values, known: Values) -> list[Value]:
        made = (
            f"log({folded[0].name})" if "log" in name else f"{literal(1, kind)} / {folded[0].name}"
        )
        return [text.set(made, kind)]

    def item(text: Text, operands: Values, known: Values) -> list[Value]:
        most, end = known
        shifted = text.set(f"{operands[0].name} - {most.name}", kind)
        if "log" in name:
            return [text.set(f"{shifted.name} - {end.name}", kind)]
        power = text.set(f"exp({shifted.name})", kind)
        return [text.set(f"{power.name} * {end.name}", kind)]

    phases = [largest(kind), replace(powers(kind), row=total)]
    return rowwise([x], [axis], phases, [y], item)


def _softmax_grad(name: str, call: Call) -> DeviceEntry:
    (dy, y), (dx,) = views(call)
    kind, axis = wide(y.dtype), call.attributes["axis"] % len(y.shape)
    log = "log" in name

    def weighted(text: Text, x: Values, known: Values) -> list[Value]:
        return [x[0] if log else text.set(f"{x[0].name} * {x[1].name}", kind)]

    def item(text: Text, x: Values, known: Values) -> list[Value]:
        d, made, total = x[0].name, x[1].name, known[0].name
        if log:
            return [text.set(f"{d} - exp({made}) * {total}", kind)]
        return [text.set(f"{made} * ({d} - {total})", kind)]

    return rowwise([dy, y], [axis], [Phase([("sum", kind)], weighted)], [dx], item)


for _name in ("softmax", "log_softmax"):
    variant(_name, "numba", processor="cuda")(partial(_softmax, _name))
    variant(f"{_name}_grad", "numba", processor="cuda")(partial(_softmax_grad, _name))


@variant("reduce_log_sum_exp", "numba", processor="cuda")
def log_sum_exp(call: Call) -> DeviceEntry | None:
    """Return the entry of the logarithm of the sum of powers over axes."""
    from soapstone.ir.ops.reduction.folds import reduced_axes

    (x,), (y,) = views(call)
    if 0 in x.shape:
        return None
    kind, axes = wide(x.dtype), reduced_axes(call.attributes, len(x.shape))

    def row(text: Text, known: Values, operands: Values, _: Values) -> list[Value]:
        most, total = known
        found = text.set(f"{most.name} + log({total.name})", kind)
        endless = f"{most.name} - {most.name} != {literal(0, kind)}"
        return [text.set(f"({most.name} if {endless} else {found.name})", kind)]

    # An infinite element is the result, and so is what is no number: the greatest must tell.
    greatest = Phase([("max", kind)], lambda text, x, known: [x[0]])
    phases = [greatest, replace(powers(kind), powers=False)]
    return rowwise([x], axes, phases, [], lambda text, v, known: [], [y], row)


@variant("lp_norm", "numba", processor="cuda")
def lp_norm(call: Call) -> DeviceEntry:
    """Return the entry of x over its norm along an axis; zeros stay zeros."""
    (x,), (y,) = views(call)
    kind, axis = wide(x.dtype), call.attributes["axis"] % len(x.shape)
    first = call.attributes["p"] == 1

    def size(text: Text, v: Values, known: Values) -> list[Value]:
        return [text.set(f"abs({v[0].name})" if first else f"{v[0].name} * {v[0].name}", kind)]

    def total(text: Text, folded: Values, operands: Values, known: Values) -> list[Value]:
        norm = folded[0] if first else text.set(f"sqrt({folded[0].name})", kind)
        return [
            text.set(
                f"({norm.name} if {norm.name} != {literal(0, kind)} else {literal(1, kind)})", kind
            )
        ]

    def item(text: Text, v: Values, known: Values) -> list[Value]:
        return [text.set(f"{v[0].name} / {known[0].name}", kind)]

    return rowwise([x], [axis], [Phase([("sum", kind)], size, total)], [y], item)
