"""Operators of ATen as operators of soapstone: one rule for each, for inference of fixed shapes.

A rule is given an operator's arguments, with a `Value` for each tensor, emits nodes, and returns
what the operator does, in its order; None stands for a result that the rule does not make. It
raises `NoRule` (`operators.py`) where it does not hold, and PyTorch then runs the operator. What
rules make is compared with PyTorch's own shapes and types before use.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from soapstone.dtypes import kind_of
from soapstone.frontend.torch import aten_layers as layers
from soapstone.frontend.torch.emit import DTYPES, Emit, Rule, Value, axes_of, axis_of, needs

# Element by element


def unary(operator: str, **attributes: Any) -> Rule:
    """Return the rule of a function of one tensor, computed in the result's element type."""

    def rule(e: Emit, x: Value) -> Value:
        return e(operator, e.cast(x, e.out.dtype), **attributes)

    return rule


def predicate(operator: str) -> Rule:
    """Return the rule of a function of one tensor, computed in the tensor's element type."""
    return lambda e, x: e(operator, x)


def binary(operator: str) -> Rule:
    """Return the rule of arithmetic on two tensors or numbers, in the result's element type.

    Arithmetic of a floating-point tensor and a number becomes one `affine` where that is exact.
    """

    def rule(e: Emit, x: Any, y: Any, *, alpha: Any = 1, rounding_mode: Any = None) -> Value:
        needs(rounding_mode is None, "a division without rounding")
        dtype = e.out.dtype
        if alpha != 1:
            y = e("mul", e.cast(y, dtype), e.known(alpha, dtype))
        if isinstance(x, Value) and isinstance(y, (int, float)) and kind_of(dtype) == "f":
            number = float(y)
            scale = {"mul": number, "div": 1 / number if number else math.inf}.get(operator, 1.0)
            shift = {"add": number, "sub": -number}.get(operator, 0.0)
            exact = operator != "div" or math.frexp(number)[0] in (0.5, -0.5)  # a power of two
            if operator in ("add", "sub", "mul", "div") and exact and math.isfinite(scale + shift):
                return e("affine", e.cast(x, dtype), scale=scale, shift=shift)
        return e(operator, e.cast(x, dtype), e.cast(y, dtype))

    return rule


def comparison(operator: str, negated: bool = False) -> Rule:
    """Return the rule of a comparison, in the type that PyTorch promotes both sides to.

    negated: whether it is the opposite of what the operator computes.
    """

    def rule(e: Emit, x: Value, y: Any) -> Value:
        dtype = x.dtype
        if isinstance(y, Value):
            kinds = {name: kind for kind, name in DTYPES.items()}
            dtype = DTYPES[torch.promote_types(kinds[x.dtype], kinds[y.dtype])]
        elif isinstance(y, float) and not x.is_float:
            dtype = "float32"
        made = e(operator, e.cast(x, dtype), e.cast(y, dtype))
        return e("logical_not", made) if negated else made

    return rule


def logical(operator: str, bits: str = "") -> Rule:
    """Return the rule of a logical operator of booleans. bits: its operator of integers, if any."""

    def rule(e: Emit, *given: Any) -> Value:
        if e.out.dtype == "bool":
            return e(operator, *(e.cast(each, "bool") for each in given))
        needs(bool(bits), "booleans")
        return e(bits, *(e.cast(each, e.out.dtype) for each in given))

    return rule


def _power(e: Emit, x: Any, y: Any) -> Value:
    dtype = e.out.dtype
    if isinstance(y, (int, float)) and kind_of(dtype) == "f":
        return e("power", e.cast(x, dtype), exponent=float(y))
    return e("pow", e.cast(x, dtype), e.cast(y, dtype))


def _where(e: Emit, condition: Value, x: Any, y: Any) -> Value:
    return e("where", condition, e.cast(x, e.out.dtype), e.cast(y, e.out.dtype))


def _clamp(e: Emit, x: Value, low: Any = None, high: Any = None) -> Value:
    needs(x.is_float, "floating-point numbers")
    limits = {"low": low, "high": high}
    return e("clip", x, **{k: None if v is None else float(v) for k, v in limits.items()})


def _elu(e: Emit, x: Value, alpha: float = 1, scale: float = 1, input_scale: float = 1) -> Value:
    needs(scale == 1 == input_scale, "scales of 1")
    return e("elu", x, alpha=float(alpha))


def _sign(e: Emit, x: Value) -> Value:
    """Return signs as PyTorch has them: that of NaN is 0."""
    sign = e("sign", x)
    return e("where", e("is_nan", x), e.known(0, x.dtype), sign) if x.is_float else sign


def _softplus(e: Emit, x: Value, beta: float = 1, threshold: float = 20) -> Value:
    needs(beta == 1 and threshold >= 20, "beta 1 and a threshold of 20 or more")
    return e("softplus", x)


def _cast(e: Emit, x: Value, *_: Any, **__: Any) -> Value:
    return e.cast(x, e.out.dtype)


def _copied(e: Emit, x: Value, y: Value, *_: Any) -> Value:
    return _expand(e, e.cast(y, e.out.dtype))


def _remainder(e: Emit, x: Any, y: Any) -> Value:
    return e("mod", e.cast(x, e.out.dtype), e.cast(y, e.out.dtype))


def _full_like(e: Emit, x: Value, value: Any, **_: Any) -> Value:
    return e("broadcast", e.known(value, e.out.dtype), shape=e.out.shape)


# Movement


def _view(e: Emit, x: Value, *_: Any, **__: Any) -> Value:
    return e.reshape(x, e.out.shape)


def _permute(e: Emit, x: Value, dims: Any) -> Value:
    return e("transpose", x, permutation=tuple(axis_of(d, x.rank) for d in dims))


def _transpose(e: Emit, x: Value, a: int, b: int) -> Value:
    order = list(range(x.rank))
    a, b = axis_of(a, x.rank), axis_of(b, x.rank)
    order[a], order[b] = b, a
    return e("transpose", x, permutation=tuple(order))


def _t(e: Emit, x: Value) -> Value:
    return x if x.rank < 2 else _transpose(e, x, 0, 1)


def _expand(e: Emit, x: Value, *_: Any, **__: Any) -> Value:
    return x if x.shape == e.out.shape else e("broadcast", x, shape=e.out.shape)


def _part(e: Emit, x: Value, axis: int, start: int, stop: int, step: int = 1) -> Value:
    starts, stops, steps = [0] * x.rank, list(x.shape), [1] * x.rank
    starts[axis], stops[axis], steps[axis] = start, stop, step
    return e("slice", x, starts=tuple(starts), stops=tuple(stops), steps=tuple(steps))


def _slice(
    e: Emit, x: Value, axis: int = 0, start: Any = None, stop: Any = None, step: int = 1
) -> Value:
    axis = axis_of(axis, x.rank)
    begin, end, step = slice(start, stop, step).indices(x.shape[axis])
    if (begin, end, step) == (0, x.shape[axis], 1):
        return x
    return _part(e, x, axis, begin, max(begin, end), step)


def _select(e: Emit, x: Value, axis: int, index: int) -> Value:
    axis = axis_of(axis, x.rank)
    index = axis_of(index, x.shape[axis])
    return e.reshape(_part(e, x, axis, index, index + 1), e.out.shape)


def _between(e: Emit, x: Value, y: Value, axis: int, start: int, stop: int) -> Value:
    """Return x with y from `start` to `stop` of an axis."""
    needs(y.dtype == x.dtype, "one type")
    extent = x.shape[axis]
    parts = [_part(e, x, axis, 0, start)] if start else []
    parts += [y, _part(e, x, axis, stop, extent)] if stop < extent else [y]
    return y if len(parts) == 1 else e("concat", *parts, axis=axis)


def _select_scatter(e: Emit, x: Value, y: Value, axis: int, index: int) -> Value:
    axis = axis_of(axis, x.rank)
    index = axis_of(index, x.shape[axis])
    y = e.reshape(y, (*x.shape[:axis], 1, *x.shape[axis + 1 :]))
    return _between(e, x, y, axis, index, index + 1)


def _slice_scatter(
    e: Emit,
    x: Value,
    y: Value,
    axis: int = 0,
    start: Any = None,
    stop: Any = None,
    step: int = 1,
) -> Value:
    axis = axis_of(axis, x.rank)
    begin, end, step = slice(start, stop, step).indices(x.shape[axis])
    needs(step == 1 and begin < end, "a slice of elements that follow each other")
    return _between(e, x, y, axis, begin, end)


def _cat(e: Emit, values: Sequence[Value], axis: int = 0) -> Value:
    kept = [each for each in values if each.shape != (0,)]
    axis = axis_of(axis, kept[0].rank if kept else 1)
    needs(bool(kept), "elements")
    cast = [e.cast(each, e.out.dtype) for each in kept]
    return cast[0] if len(cast) == 1 else e("concat", *cast, axis=axis)


def _split(e: Emit, x: Value, sizes: Any, axis: int = 0) -> Any:
    axis = axis_of(axis, x.rank)
    if isinstance(sizes, int):
        sizes = [min(sizes, x.shape[axis] - at) for at in range(0, x.shape[axis], sizes)]
    return e.all("split", x, axis=axis, sizes=tuple(sizes))


def _unbind(e: Emit, x: Value, axis: int = 0) -> Any:
    return tuple(_select(e, x, axis, n) for n in range(x.shape[axis_of(axis, x.rank)]))


def _pad(e: Emit, x: Value, pads: Any, value: Any = 0) -> Value:
    needs(min(pads, default=0) >= 0, "widths of 0 or more")
    low, high = [0] * x.rank, [0] * x.rank
    for n in range(len(pads) // 2):
        low[-1 - n], high[-1 - n] = pads[2 * n], pads[2 * n + 1]
    none = (0,) * x.rank
    return e("pad", x, low=tuple(low), high=tuple(high), interior=none, value=float(value))


def triangle(upper: bool) -> Rule:
    """Return the rule of `triu` or `tril`."""
    return lambda e, x, k=0: e("trilu", x, k=k, upper=upper)


def _flip(e: Emit, x: Value, axes: Any) -> Value:
    return e("reverse", x, axes=axes_of(axes, x.rank))


def _repeat(e: Emit, x: Value, repeats: Any) -> Value:
    return e("tile", e.reshape(x, (1,) * (len(repeats) - x.rank) + x.shape), repeats=tuple(repeats))


def _cumsum(e: Emit, x: Value, axis: int, **_: Any) -> Value:
    needs(x.rank > 0, "a dim")
    return e("cumsum", e.cast(x, e.out.dtype), axis=axis_of(axis, x.rank))


# Indexing


def _embedding(e: Emit, table: Value, ids: Value, *_: Any, **__: Any) -> Value:
    return e("embedding", ids, table)


def _index_select(e: Emit, x: Value, axis: int, ids: Value) -> Value:
    needs(x.rank > 0 and ids.rank == 1, "a dim, and a list of places")
    return e("gather", x, ids, axis=axis_of(axis, x.rank))


def _gather(e: Emit, x: Value, axis: int, ids: Value, **_: Any) -> Value:
    needs(x.rank > 0, "a dim")
    return e("gather_elements", x, ids, axis=axis_of(axis, x.rank))


def _index(e: Emit, x: Value, ids: Sequence[Value | None]) -> Value:
    given = {axis: each for axis, each in enumerate(ids) if each is not None}
    axes = list(given)
    needs(all(each.dtype in ("int32", "int64") for each in given.values()), "places by number")
    if len(given) == 1:
        return e("gather", x, given[axes[0]], axis=axes[0])
    shape = torch.broadcast_shapes(*(each.shape for each in given.values()))
    columns = [_spread(e, e.cast(each, "int64"), shape) for each in given.values()]
    columns = [e.reshape(each, (*shape, 1)) for each in columns]
    rest = [axis for axis in range(x.rank) if axis not in given]
    moved = e("transpose", x, permutation=(*axes, *rest))
    made = e("gather_nd", moved, e("concat", *columns, axis=len(shape)))
    if axes != list(range(axes[0], axes[0] + len(axes))):
        return made  # what places give comes first
    before, count = axes[0], len(shape)
    behind = range(count + before, made.rank)
    return e("transpose", made, permutation=(*range(count, count + before), *range(count), *behind))


def _spread(e: Emit, x: Value, shape: Sequence[int]) -> Value:
    return x if x.shape == tuple(shape) else e("broadcast", x, shape=tuple(shape))


_ALIKE = "relu sigmoid tanh exp log neg sqrt abs erf sin cos tan asin acos atan sinh cosh asinh"
_ALIKE += " acosh atanh floor ceil round reciprocal silu mish"
_ARITHMETIC = "add sub mul div maximum minimum"
_VIEWS, _SAME = "view _unsafe_view reshape unsqueeze squeeze", "clone alias detach lift_fresh"
_MOVEMENT: dict[str, Rule] = {
    **dict.fromkeys(_VIEWS.split(), _view),
    **dict.fromkeys(_SAME.split(), lambda e, x, **_: x),
    "permute": _permute,
    "transpose": _transpose,
    "t": _t,
    "expand": _expand,
    "slice": _slice,
    "select": _select,
    "split": _split,
    "split_with_sizes": _split,
    "unbind": _unbind,
}
RULES: Mapping[str, Rule] = {
    **{name: unary(name) for name in _ALIKE.split()},
    "hardswish": unary("hard_swish"),
    **_MOVEMENT,
    **{f"{name}_copy": rule for name, rule in _MOVEMENT.items()},
    "hardsigmoid": unary("hard_sigmoid", alpha=1 / 6, beta=0.5),
    "rsqrt": lambda e, x: e("reciprocal", e("sqrt", e.cast(x, e.out.dtype))),
    "square": lambda e, x: e("mul", x, x),
    "gelu": lambda e, x, approximate="none": e("gelu", x, approximate=approximate),
    "leaky_relu": lambda e, x, slope=0.01: e("leaky_relu", x, alpha=float(slope)),
    "elu": _elu,
    "sign": _sign,
    "softplus": _softplus,
    "isnan": predicate("is_nan"),
    "isinf": predicate("is_inf"),
    **{name: binary(name) for name in _ARITHMETIC.split()},
    "eq": comparison("equal"),
    "ne": comparison("equal", negated=True),
    "lt": comparison("less"),
    "le": comparison("less_equal"),
    "gt": comparison("greater"),
    "ge": comparison("greater_equal"),
    "logical_and": logical("logical_and"),
    "logical_or": logical("logical_or"),
    "logical_xor": logical("logical_xor"),
    "logical_not": logical("logical_not"),
    "bitwise_and": logical("logical_and", "bitwise_and"),
    "bitwise_or": logical("logical_or", "bitwise_or"),
    "bitwise_xor": logical("logical_xor", "bitwise_xor"),
    "bitwise_not": logical("logical_not", "bitwise_not"),
    "pow": _power,
    "where": _where,
    "clamp": _clamp,
    "_to_copy": _cast,
    "copy": _copied,
    "full_like": _full_like,
    "remainder": _remainder,
    "linear": layers.linear,
    "mm": layers.mm,
    "bmm": layers.mm,
    "addmm": layers.addmm,
    "_scaled_dot_product_flash_attention_for_cpu": layers.attention,
    "convolution": layers.convolution,
    "max_pool2d_with_indices": layers.max_pool(2),
    "max_pool3d_with_indices": layers.max_pool(3),
    **{f"avg_pool{count}d": layers.avg_pool(count) for count in (1, 2, 3)},
    "_adaptive_avg_pool2d": layers.adaptive,
    "native_batch_norm": layers.batch_norm,
    "_native_batch_norm_legit": layers.batch_norm,
    "_native_batch_norm_legit_no_training": layers.batch_norm,
    "native_layer_norm": layers.layer_norm,
    "native_group_norm": layers.group_norm,
    "_softmax": layers.softmax("softmax"),
    "_log_softmax": layers.softmax("log_softmax"),
    "sum": layers.fold("reduce_sum"),
    "mean": layers.fold("reduce_mean"),
    "amax": layers.fold("reduce_max"),
    "amin": layers.fold("reduce_min"),
    "prod": layers.fold("reduce_prod"),
    "any": layers.truth("reduce_max"),
    "all": layers.truth("reduce_min"),
    "argmax": layers.extreme("argmax"),
    "argmin": layers.extreme("argmin"),
    "var": layers.variance,
    "cat": _cat,
    "select_scatter": _select_scatter,
    "slice_scatter": _slice_scatter,
    "constant_pad_nd": _pad,
    "triu": triangle(True),
    "tril": triangle(False),
    "flip": _flip,
    "repeat": _repeat,
    "cumsum": _cumsum,
    "embedding": _embedding,
    "index": _index,
    "index_select": _index_select,
    "gather": _gather,
}
MOVES = frozenset(_MOVEMENT) | {f"{name}_copy" for name in _MOVEMENT}  # which compute nothing
