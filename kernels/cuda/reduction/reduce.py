"""`reduce_*`, losses that are means of pairs, and counts."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

from soapstone.ir.ops.reduction.folds import reduced_axes
from soapstone.ir.ops.training.loss import CLIP
from soapstone.kernels.cuda.elementwise.text import Text, Value, literal, wide
from soapstone.kernels.cuda.entry import DeviceEntry
from soapstone.kernels.cuda.reduction.fold import fold
from soapstone.kernels.cuda.substrate.arrays import views
from soapstone.kernels.cuda.substrate.folds import accumulator
from soapstone.kernels.entry import Call
from soapstone.kernels.registry import variant

# What is folded of an element, the monoid, and what is made of the total; `{}` is the value.
_REDUCTIONS = {
    "reduce_sum": ("{0}", "sum", "{0}"),
    "reduce_mean": ("{0}", "sum", "{0} / {1}"),
    "reduce_max": ("{0}", "max", "{0}"),
    "reduce_min": ("{0}", "min", "{0}"),
    "reduce_prod": ("{0}", "prod", "{0}"),
    "reduce_l1": ("abs({0})", "sum", "{0}"),
    "reduce_l2": ("{0} * {0}", "sum", "sqrt({0})"),
    "reduce_sum_square": ("{0} * {0}", "sum", "{0}"),
    "reduce_log_sum": ("{0}", "sum", "log({0})"),
}


def _reduce(name: str, call: Call) -> DeviceEntry | None:
    (x,), outputs = views(call)
    element, monoid, end = _REDUCTIONS[name]
    axes = reduced_axes(call.attributes, len(x.shape))
    kind = accumulator(x.dtype)
    if "sqrt" in end and not kind.startswith("float"):
        return None
    count = call.attributes.get("count") or math.prod(x.shape[axis] for axis in axes)

    def before(text: Text, values: Sequence[Value]) -> list[Value]:
        value = text.cast(values[0], kind)
        return [value if element == "{0}" else text.set(element.format(value.name), kind)]

    def after(text: Text, values: Sequence[Value]) -> list[Value]:
        (value,) = values
        made = end.format(value.name, literal(count, kind))
        return [value if end == "{0}" else text.set(made, kind)]

    return fold([x], axes, [(monoid, kind)], outputs, before, after)


for _name in _REDUCTIONS:
    variant(_name, "numba", processor="cuda")(partial(_reduce, _name))


@variant("is_finite", "numba", processor="cuda")
def is_finite(call: Call) -> DeviceEntry:
    """Return the entry of whether all are finite: whether x - x is zero everywhere."""
    (x,), outputs = views(call)

    def before(text: Text, values: Sequence[Value]) -> list[Value]:
        (value,) = values
        zero = literal(0, value.type)
        test = f"(1 if {value.name} - {value.name} == {zero} else 0)"
        return [text.set(test, "int64")]

    return fold([x], range(len(x.shape)), [("min", "int64")], outputs, before)


def _pair(write: Callable[[Text, Value, Value], Value], call: Call) -> DeviceEntry:
    """Return the entry of a mean over pairs."""
    inputs, outputs = views(call)
    kind = accumulator(inputs[0].dtype)
    count = call.attributes["count"] or max(inputs[0].size, 1)

    def after(text: Text, values: Sequence[Value]) -> list[Value]:
        return [text.set(f"{values[0].name} / {literal(count, kind)}", kind)]

    axes = range(len(inputs[0].shape))
    return fold(inputs, axes, [("sum", kind)], outputs, lambda t, v: [write(t, v[0], v[1])], after)


def _mse(text: Text, p: Value, y: Value) -> Value:
    difference = text.set(f"{p.name} - {y.name}", p.type)
    return text.set(f"{difference.name} * {difference.name}", p.type)


@variant("mse", "numba", processor="cuda")
def mse(call: Call) -> DeviceEntry:
    """Return the entry of the mean squared difference."""
    return _pair(_mse, call)


def clipped(text: Text, p: Value) -> Value:
    """Return a probability kept from 0 and 1."""
    least, most = literal(CLIP, p.type), literal(1 - CLIP, p.type)
    p = text.set(f"({least} if {p.name} < {least} else {p.name})", p.type)
    return text.set(f"({most} if {p.name} > {most} else {p.name})", p.type)


@variant("bce", "numba", processor="cuda")
def bce(call: Call) -> DeviceEntry:
    """Return the entry of binary cross-entropy, of probabilities or of logits."""
    logits = call.attributes["from_logits"]

    def write(text: Text, x: Value, target: Value) -> Value:
        kind = x.type
        zero, one = literal(0, kind), literal(1, kind)
        if logits:
            above = text.set(f"({x.name} if {x.name} > {zero} else {zero})", kind).name
            rest = f"log1p(exp(-abs({x.name})))"
            return text.set(f"{above} - {x.name} * {target.name} + {rest}", kind)
        p, y = clipped(text, x).name, target.name
        return text.set(f"-({y} * log({p}) + ({one} - {y}) * log1p(-{p}))", kind)

    return _pair(write, call)


@variant("byte_scale", "numba", processor="cuda")
def byte_scale(call: Call) -> DeviceEntry:
    """Return the entry of the scale and zero of bytes, from the least and the greatest element."""
    (x,), outputs = views(call)
    kind = wide(x.dtype)

    def after(text: Text, values: Sequence[Value]) -> list[Value]:
        zero, most = literal(0, kind), literal(255, kind)
        low = text.set(f"min({values[0].name}, {zero})", kind).name
        high = text.set(f"max({values[1].name}, {zero})", kind).name
        step = text.set(f"({high} - {low}) / {most}", kind).name
        scale = text.set(f"({step} if {high} > {low} else {literal(1, kind)})", kind)
        middle = text.set(f"-{low} / {scale.name}", kind).name
        return [scale, text.set(f"rint_{kind}(min({middle}, {most}))", kind)]

    axes = range(len(x.shape))
    return fold([x], axes, [("min", kind), ("max", kind)], outputs, lambda t, v: [v[0]] * 2, after)
