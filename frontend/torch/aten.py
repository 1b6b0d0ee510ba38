"""Operators of ATen as operators of soapstone: one rule for each, for inference of fixed shapes.

A rule is given an operator's arguments, with a `Value` for each tensor, emits nodes, and returns
what the operator does, in its order; None stands for a result that the rule does not make. It
raises `NoRule` (`operators.py`) where it does not hold, and PyTorch then runs the operator. What
rules make is compared with PyTorch's own shapes and types before use.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from soapstone.frontend.torch.operators import NoRule
from soapstone.ir.builder import GraphBuilder
from soapstone.ir.tensor import Array, Role, TensorSpec

_TYPES = "float32 float64 float16 int8 int16 int32 int64 uint8 bool"
DTYPES: dict[Any, str] = {getattr(torch, name): name for name in _TYPES.split()}


@dataclass(frozen=True)
class Value:
    """A tensor in a graph that is being made: its name there, and what it is."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def rank(self) -> int:
        """How many dims it has."""
        return len(self.shape)

    @property
    def is_float(self) -> bool:
        """Whether its elements are floating-point numbers."""
        return self.dtype.startswith("float")


class Emit:
    """Emits operators into a graph.

    Attributes:
        builder: of the graph. constants: contents of what rules made known, by name.
        wanted: types of what the operator returns by PyTorch. used: which of them are looked at.
    """

    def __init__(self, builder: GraphBuilder, constants: dict[str, Array]) -> None:
        self.builder = builder
        self.constants = constants
        self.wanted: tuple[TensorSpec, ...] = ()
        self.used: frozenset[int] = frozenset((0,))

    def __call__(self, operator: str, *inputs: Value, **attributes: Any) -> Value:
        """Emit an operator and return its first output."""
        return self.all(operator, *inputs, **attributes)[0]

    def all(self, operator: str, *inputs: Value, **attributes: Any) -> tuple[Value, ...]:
        """Emit an operator and return its outputs."""
        names = self.builder.apply(operator, *(each.name for each in inputs), **attributes)
        return tuple(self.value(name) for name in names)

    def value(self, name: str) -> Value:
        """Return a value of the graph."""
        spec = self.builder.spec(name)
        return Value(name, spec.shape, spec.dtype)

    def known(self, contents: Any, dtype: str) -> Value:
        """Return a value whose contents are known."""
        array = np.array(contents, dtype)
        role = Role.PARAMETER if array.dtype.kind == "f" else Role.STATE
        name = self.builder.input(self.builder.unique("known"), array.shape, dtype, role)
        self.constants[name] = array
        return self.value(name)

    def cast(self, x: Any, dtype: str) -> Value:
        """Return a tensor or number in an element type."""
        if not isinstance(x, Value):
            return self.known(x, dtype)
        return x if x.dtype == dtype else self("cast", x, to=dtype)

    def reshape(self, x: Value, shape: Sequence[int]) -> Value:
        """Return a tensor in another shape."""
        return x if x.shape == tuple(shape) else self("reshape", x, shape=tuple(shape))

    @property
    def out(self) -> TensorSpec:
        """The type of the first result."""
        return self.wanted[0]


Rule = Callable[..., Any]


def _axis(axis: int, rank: int) -> int:
    return axis + rank if axis < 0 else axis


def _axes(axes: Any, rank: int) -> tuple[int, ...]:
    given = [axes] if isinstance(axes, int) else list(axes or range(rank))
    return tuple(sorted(_axis(axis, rank) for axis in given))


def _needs(holds: bool, what: str) -> None:
    if not holds:
        raise NoRule(f"{what} needed")


def _pairs(values: Any, count: int) -> tuple[int, ...]:
    found = [values] * count if isinstance(values, int) else list(values)
    return tuple(int(v) for v in (found * count if len(found) == 1 else found))


# Element by element


def unary(operator: str, **attributes: Any) -> Rule:
    def rule(e: Emit, x: Value) -> Value:
        return e(operator, e.cast(x, e.out.dtype), **attributes)

    return rule


def test(operator: str) -> Rule:
    return lambda e, x: e(operator, x)


def binary(operator: str) -> Rule:
    def rule(e: Emit, x: Any, y: Any, *, alpha: Any = 1, rounding_mode: Any = None) -> Value:
        _needs(rounding_mode is None, "a division without rounding")
        dtype = e.out.dtype
        if alpha != 1:
            y = e("mul", e.cast(y, dtype), e.known(alpha, dtype))
        if isinstance(x, Value) and isinstance(y, (int, float)) and dtype.startswith("float"):
            number = float(y)
            scale = {"mul": number, "div": 1 / number if number else math.inf}.get(operator, 1.0)
            shift = {"add": number, "sub": -number}.get(operator, 0.0)
            exact = operator != "div" or math.frexp(number)[0] in (0.5, -0.5)  # a power of two
            if operator in ("add", "sub", "mul", "div") and exact and math.isfinite(scale + shift):
                return e("affine", e.cast(x, dtype), scale=scale, shift=shift)
        return e(operator, e.cast(x, dtype), e.cast(y, dtype))

    return rule


def comparison(operator: str, negated: bool = False) -> Rule:
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
    def rule(e: Emit, *given: Any) -> Value:
        if e.out.dtype == "bool":
            return e(operator, *(e.cast(each, "bool") for each in given))
        _needs(bool(bits), "booleans")
        return e(bits, *(e.cast(each, e.out.dtype) for each in given))

    return rule


def _power(e: Emit, x: Any, y: Any) -> Value:
    dtype = e.out.dtype
    if isinstance(y, (int, float)) and dtype.startswith("float"):
        return e("power", e.cast(x, dtype), exponent=float(y))
    return e("pow", e.cast(x, dtype), e.cast(y, dtype))


def _where(e: Emit, condition: Value, x: Any, y: Any) -> Value:
    return e("where", condition, e.cast(x, e.out.dtype), e.cast(y, e.out.dtype))


def _clamp(e: Emit, x: Value, low: Any = None, high: Any = None) -> Value:
    _needs(x.is_float, "floating-point numbers")
    limits = {"low": low, "high": high}
    return e("clip", x, **{k: None if v is None else float(v) for k, v in limits.items()})


def _elu(e: Emit, x: Value, alpha: float = 1, scale: float = 1, input_scale: float = 1) -> Value:
    _needs(scale == 1 == input_scale, "scales of 1")
    return e("elu", x, alpha=float(alpha))


def _softplus(e: Emit, x: Value, beta: float = 1, threshold: float = 20) -> Value:
    _needs(beta == 1 and threshold >= 20, "beta 1 and a threshold of 20 or more")
    return e("softplus", x)


def _cast(e: Emit, x: Value, *_: Any, **__: Any) -> Value:
    return e.cast(x, e.out.dtype)


def _copied(e: Emit, x: Value, y: Value, *_: Any) -> Value:
    return _expand(e, e.cast(y, e.out.dtype))


def _remainder(e: Emit, x: Any, y: Any) -> Value:
    return e("mod", e.cast(x, e.out.dtype), e.cast(y, e.out.dtype))


def _full_like(e: Emit, x: Value, value: Any, **_: Any) -> Value:
    return e("broadcast", e.known(value, e.out.dtype), shape=e.out.shape)


# Products and windows


def _linear(e: Emit, x: Value, w: Value, b: Value | None = None) -> Value:
    turned = e("transpose", w, permutation=(1, 0))
    return e("linear", x, turned, *([b] if b else []), bias=b is not None)


def _mm(e: Emit, x: Value, y: Value) -> Value:
    return e("matmul", x, y)


def _addmm(e: Emit, b: Value, x: Value, y: Value, *, beta: Any = 1, alpha: Any = 1) -> Value:
    _needs((beta, alpha) == (1, 1), "alpha and beta of 1")
    if b.shape == y.shape[1:]:
        return e("linear", x, y, b)
    return e("add", e("matmul", x, y), b)


def _attention(
    e: Emit,
    q: Value,
    k: Value,
    v: Value,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    attn_mask: Value | None = None,
    scale: float | None = None,
) -> Any:
    _needs(dropout_p == 0 and e.used <= {0}, "no dropout, and nothing but the result looked at")
    _needs(q.shape[:-2] == k.shape[:-2] == v.shape[:-2], "equal dims before the last two")
    mask = []
    if attn_mask is not None:
        _needs(attn_mask.dtype == q.dtype, "a mask that is added")
        mask = [e("broadcast", attn_mask, shape=(*q.shape[:-1], k.shape[-2]))]
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    made = e("matmul", e("affine", q, scale=scale), k, transpose_b=True)
    if is_causal:
        _needs(not mask, "a mask or a causal one")
        later = np.triu(np.full((q.shape[-2], k.shape[-2]), -np.inf), 1)
        mask = [e.known(later, q.dtype)]
    for each in mask:
        made = e("add", made, each)
    return e("matmul", e("softmax", made, axis=made.rank - 1), v), None


def _convolution(
    e: Emit,
    x: Value,
    w: Value,
    b: Value | None,
    stride: Any,
    padding: Any,
    dilation: Any,
    transposed: bool,
    output_padding: Any,
    groups: int,
) -> Value:
    count = w.rank - 2
    _needs(x.rank == w.rank and 1 <= count <= 3, "samples of 1 to 3 spatial dims")
    given = {
        "stride": _pairs(stride, count),
        "padding": _pairs(padding, count) * 2,
        "dilation": _pairs(dilation, count),
        "groups": groups,
        "bias": b is not None,
    }
    if transposed:
        given["output_padding"] = _pairs(output_padding, count)
    name = f"conv_transpose{count}d" if transposed else f"conv{count}d"
    return e(name, x, w, *([b] if b else []), **given)


def max_pool(count: int) -> Rule:
    def rule(
        e: Emit,
        x: Value,
        kernel: Any,
        stride: Any = (),
        padding: Any = 0,
        dilation: Any = 1,
        ceil_mode: bool = False,
    ) -> Any:
        _needs(x.rank == count + 2 and e.used <= {0}, "samples, and no indices")
        made = e(
            f"max_pool{count}d",
            x,
            kernel=_pairs(kernel, count),
            stride=_pairs(stride or kernel, count),
            padding=_pairs(padding, count) * 2,
            dilation=_pairs(dilation, count),
            ceil_mode=ceil_mode,
        )
        return made, None

    return rule


def avg_pool(count: int) -> Rule:
    def rule(
        e: Emit,
        x: Value,
        kernel: Any,
        stride: Any = (),
        padding: Any = 0,
        ceil_mode: bool = False,
        include_pad: bool = True,
        divisor: Any = None,
    ) -> Value:
        _needs(x.rank == count + 2 and divisor is None, "samples, and no divisor")
        return e(
            f"avg_pool{count}d",
            x,
            kernel=_pairs(kernel, count),
            stride=_pairs(stride or kernel, count),
            padding=_pairs(padding, count) * 2,
            ceil_mode=ceil_mode,
            include_pad=include_pad,
        )

    return rule


def _adaptive(e: Emit, x: Value, size: Any) -> Value:
    _needs(x.rank == 4, "samples")
    sizes = _pairs(size, 2)
    _needs(all(n % s == 0 for n, s in zip(x.shape[2:], sizes)), "windows of one size")
    kernel = tuple(n // s for n, s in zip(x.shape[2:], sizes))
    return e("avg_pool2d", x, kernel=kernel, stride=kernel)


# Normalization


def _scale(e: Emit, given: Value | None, number: float, shape: Any, dtype: str) -> Value:
    return given or e.known(np.full(tuple(shape), number), dtype)


def _batch_norm(
    e: Emit,
    x: Value,
    gamma: Value | None,
    beta: Value | None,
    mean: Value | None,
    var: Value | None,
    *rest: Any,
) -> Any:
    training, epsilon = (rest[0] if len(rest) == 3 else False), rest[-1]
    _needs(not training, "inference")
    _needs(mean is not None and var is not None, "running statistics")
    _needs(e.used <= {0}, "nothing but the result looked at")
    shape = x.shape[1:2]
    gamma, beta = _scale(e, gamma, 1, shape, x.dtype), _scale(e, beta, 0, shape, x.dtype)
    assert mean is not None and var is not None
    made = e("batch_norm_inference", x, gamma, beta, mean, var, epsilon=float(epsilon))
    return (made, *[None] * (len(e.wanted) - 1))


def _layer_norm(
    e: Emit, x: Value, shape: Any, gamma: Value | None, beta: Value | None, epsilon: float
) -> Any:
    _needs(e.used <= {0}, "nothing but the result looked at")
    gamma, beta = _scale(e, gamma, 1, shape, x.dtype), _scale(e, beta, 0, shape, x.dtype)
    made = e("layer_norm", x, gamma, beta, epsilon=float(epsilon), axis=x.rank - len(shape))
    return made, None, None


def _group_norm(
    e: Emit, x: Value, gamma: Any, beta: Any, n: int, c: int, hw: int, groups: int, epsilon: float
) -> Any:
    _needs(e.used <= {0}, "nothing but the result looked at")
    gamma, beta = _scale(e, gamma, 1, (c,), x.dtype), _scale(e, beta, 0, (c,), x.dtype)
    made = e("group_norm", x, gamma, beta, num_groups=groups, epsilon=float(epsilon))
    return made, None, None


def softmax(operator: str) -> Rule:
    def rule(e: Emit, x: Value, axis: int, half: bool = False, **_: Any) -> Value:
        _needs(x.rank > 0, "a dim")
        return e(operator, e.cast(x, e.out.dtype), axis=_axis(axis, x.rank))

    return rule


# Folds


def fold(operator: str) -> Rule:
    def rule(e: Emit, x: Value, axes: Any = None, keepdim: bool = False, **_: Any) -> Value:
        _needs(x.rank > 0, "a dim")
        made = e.cast(x, e.out.dtype)
        return e(operator, made, axes=_axes(axes, x.rank), keepdims=keepdim)

    return rule


def extreme(operator: str) -> Rule:
    def rule(e: Emit, x: Value, axis: Any = None, keepdim: bool = False) -> Value:
        _needs(axis is not None and x.rank > 0, "one dim")
        return e(operator, x, axis=_axis(axis, x.rank), keepdims=keepdim)

    return rule


def truth(operator: str) -> Rule:
    """A rule of `any` or `all`: the greatest or least of 0 and 1."""

    def rule(e: Emit, x: Value, axes: Any = None, keepdim: bool = False) -> Value:
        _needs(x.rank > 0, "a dim")
        bits = e.cast(e.cast(x, "bool"), "int32")
        return e.cast(e(operator, bits, axes=_axes(axes, x.rank), keepdims=keepdim), e.out.dtype)

    return rule


def _variance(
    e: Emit, x: Value, axes: Any = None, *, correction: Any = 1, keepdim: bool = False
) -> Value:
    over = _axes(axes, x.rank)
    count = math.prod(x.shape[axis] for axis in over)
    _needs(count > correction, "more elements than the correction")
    apart = e("sub", x, e("reduce_mean", x, axes=over, keepdims=True))
    total = e("reduce_sum_square", apart, axes=over, keepdims=keepdim)
    return e("affine", total, scale=1 / (count - correction))


# Movement


def _view(e: Emit, x: Value, *_: Any, **__: Any) -> Value:
    return e.reshape(x, e.out.shape)


def _permute(e: Emit, x: Value, dims: Any) -> Value:
    return e("transpose", x, permutation=tuple(_axis(d, x.rank) for d in dims))


def _transpose(e: Emit, x: Value, a: int, b: int) -> Value:
    order = list(range(x.rank))
    a, b = _axis(a, x.rank), _axis(b, x.rank)
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
    axis = _axis(axis, x.rank)
    begin, end, step = slice(start, stop, step).indices(x.shape[axis])
    if (begin, end, step) == (0, x.shape[axis], 1):
        return x
    return _part(e, x, axis, begin, max(begin, end), step)


def _select(e: Emit, x: Value, axis: int, index: int) -> Value:
    axis = _axis(axis, x.rank)
    index = _axis(index, x.shape[axis])
    return e.reshape(_part(e, x, axis, index, index + 1), e.out.shape)


def _between(e: Emit, x: Value, y: Value, axis: int, start: int, stop: int) -> Value:
    """Return x with y from `start` to `stop` of an axis."""
    _needs(y.dtype == x.dtype, "one type")
    extent = x.shape[axis]
    parts = [_part(e, x, axis, 0, start)] if start else []
    parts += [y, _part(e, x, axis, stop, extent)] if stop < extent else [y]
    return y if len(parts) == 1 else e("concat", *parts, axis=axis)


def _select_scatter(e: Emit, x: Value, y: Value, axis: int, index: int) -> Value:
    axis = _axis(axis, x.rank)
    index = _axis(index, x.shape[axis])
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
    axis = _axis(axis, x.rank)
    begin, end, step = slice(start, stop, step).indices(x.shape[axis])
    _needs(step == 1 and begin < end, "a slice of elements that follow each other")
    return _between(e, x, y, axis, begin, end)


def _cat(e: Emit, values: Sequence[Value], axis: int = 0) -> Value:
    kept = [each for each in values if each.shape != (0,)]
    axis = _axis(axis, kept[0].rank if kept else 1)
    _needs(bool(kept), "elements")
    cast = [e.cast(each, e.out.dtype) for each in kept]
    return cast[0] if len(cast) == 1 else e("concat", *cast, axis=axis)


def _split(e: Emit, x: Value, sizes: Any, axis: int = 0) -> Any:
    axis = _axis(axis, x.rank)
    if isinstance(sizes, int):
        sizes = [min(sizes, x.shape[axis] - at) for at in range(0, x.shape[axis], sizes)]
    return e.all("split", x, axis=axis, sizes=tuple(sizes))


def _unbind(e: Emit, x: Value, axis: int = 0) -> Any:
    return tuple(_select(e, x, axis, n) for n in range(x.shape[_axis(axis, x.rank)]))


def _pad(e: Emit, x: Value, pads: Any, value: Any = 0) -> Value:
    _needs(min(pads, default=0) >= 0, "widths of 0 or more")
    low, high = [0] * x.rank, [0] * x.rank
    for n in range(len(pads) // 2):
        low[-1 - n], high[-1 - n] = pads[2 * n], pads[2 * n + 1]
    none = (0,) * x.rank
    return e("pad", x, low=tuple(low), high=tuple(high), interior=none, value=float(value))


def triangle(upper: bool) -> Rule:
    return lambda e, x, k=0: e("trilu", x, k=k, upper=upper)


def _flip(e: Emit, x: Value, axes: Any) -> Value:
    return e("reverse", x, axes=_axes(axes, x.rank))


def _repeat(e: Emit, x: Value, repeats: Any) -> Value:
    return e("tile", e.reshape(x, (1,) * (len(repeats) - x.rank) + x.shape), repeats=tuple(repeats))


def _cumsum(e: Emit, x: Value, axis: int, **_: Any) -> Value:
    _needs(x.rank > 0, "a dim")
    return e("cumsum", e.cast(x, e.out.dtype), axis=_axis(axis, x.rank))


# Indexing


def _embedding(e: Emit, table: Value, ids: Value, *_: Any, **__: Any) -> Value:
    return e("embedding", ids, table)


def _index_select(e: Emit, x: Value, axis: int, ids: Value) -> Value:
    _needs(x.rank > 0 and ids.rank == 1, "a dim, and a list of places")
    return e("gather", x, ids, axis=_axis(axis, x.rank))


def _gather(e: Emit, x: Value, axis: int, ids: Value, **_: Any) -> Value:
    _needs(x.rank > 0, "a dim")
    return e("gather_elements", x, ids, axis=_axis(axis, x.rank))


_ALIKE = "relu sigmoid tanh exp log neg sqrt abs erf sin cos tan asin acos atan sinh cosh asinh"
_ALIKE += " acosh atanh floor ceil round sign reciprocal silu mish"
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
    "softplus": _softplus,
    "isnan": test("is_nan"),
    "isinf": test("is_inf"),
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
    "linear": _linear,
    "mm": _mm,
    "bmm": _mm,
    "addmm": _addmm,
    "_scaled_dot_product_flash_attention_for_cpu": _attention,
    "convolution": _convolution,
    "max_pool2d_with_indices": max_pool(2),
    "max_pool3d_with_indices": max_pool(3),
    **{f"avg_pool{count}d": avg_pool(count) for count in (1, 2, 3)},
    "_adaptive_avg_pool2d": _adaptive,
    "native_batch_norm": _batch_norm,
    "_native_batch_norm_legit": _batch_norm,
    "_native_batch_norm_legit_no_training": _batch_norm,
    "native_layer_norm": _layer_norm,
    "native_group_norm": _group_norm,
    "_softmax": softmax("softmax"),
    "_log_softmax": softmax("log_softmax"),
    "sum": fold("reduce_sum"),
    "mean": fold("reduce_mean"),
    "amax": fold("reduce_max"),
    "amin": fold("reduce_min"),
    "prod": fold("reduce_prod"),
    "any": truth("reduce_max"),
    "all": truth("reduce_min"),
    "argmax": extreme("argmax"),
    "argmin": extreme("argmin"),
    "var": _variance,
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
    "index_select": _index_select,
    "gather": _gather,
}
MOVES = frozenset(_MOVEMENT) | {f"{name}_copy" for name in _MOVEMENT}  # which compute nothing

__all__ = ["DTYPES", "MOVES", "RULES", "Emit", "Value"]
