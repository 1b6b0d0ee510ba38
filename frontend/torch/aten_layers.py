"""Rules of ATen's products, windows, normalizations and folds (`aten.py`)."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from soapstone.frontend.torch.emit import Emit, Rule, Value, axes_of, axis_of, needs, pairs

# Products and windows


def linear(e: Emit, x: Value, w: Value, b: Value | None = None) -> Value:
    """Emit `aten.linear`: x (…, k) by the transpose of w (n, k), plus b (n)."""
    turned = e("transpose", w, permutation=(1, 0))
    return e("linear", x, turned, *([b] if b else []), bias=b is not None)


def mm(e: Emit, x: Value, y: Value) -> Value:
    """Emit the product of matrices, `aten.mm` or `aten.bmm`."""
    return e("matmul", x, y)


def addmm(e: Emit, b: Value, x: Value, y: Value, *, beta: Any = 1, alpha: Any = 1) -> Value:
    """Emit `aten.addmm`: b plus the product of x and y."""
    needs((beta, alpha) == (1, 1), "alpha and beta of 1")
    if b.shape == y.shape[1:]:
        return e("linear", x, y, b)
    return e("add", e("matmul", x, y), b)


def attention(
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
    """Emit scaled dot-product attention in inference: softmax(q kᵀ scale + mask) v.

    Operands are (b, heads, t, d). Heads of queries beside each other may share one of keys.
    """
    needs(dropout_p == 0 and e.used <= {0}, "no dropout, and nothing but the result looked at")
    needs(q.rank == 4, "samples of several heads")
    needs(attn_mask is None or attn_mask.dtype == q.dtype, "a mask that is added")
    turned = (0, 2, 1, 3)
    operands = [e("transpose", each, permutation=turned) for each in (q, k, v)]
    mask = [] if attn_mask is None else [attn_mask]
    made = e("attention", *operands, *mask, scale=scale, causal=is_causal)
    return e("transpose", made, permutation=turned), None


def convolution(
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
    """Emit `aten.convolution`, transposed or not."""
    count = w.rank - 2
    needs(x.rank == w.rank and 1 <= count <= 3, "samples of 1 to 3 spatial dims")
    given = {
        "stride": pairs(stride, count),
        "padding": pairs(padding, count) * 2,
        "dilation": pairs(dilation, count),
        "groups": groups,
        "bias": b is not None,
    }
    if transposed:
        given["output_padding"] = pairs(output_padding, count)
    name = f"conv_transpose{count}d" if transposed else f"conv{count}d"
    return e(name, x, w, *([b] if b else []), **given)


def samples(e: Emit, x: Value, count: int) -> Value:
    """Return images of `count` dims as samples; one alone is one of them."""
    return x if x.rank == count + 2 else e.reshape(x, (1, *x.shape))


def max_pool(count: int) -> Rule:
    """Return the rule of max pooling over `count` dims."""

    def rule(
        e: Emit,
        x: Value,
        kernel: Any,
        stride: Any = (),
        padding: Any = 0,
        dilation: Any = 1,
        ceil_mode: bool = False,
    ) -> Any:
        needs(e.used <= {0}, "nothing but the result looked at")
        made = e(
            f"max_pool{count}d",
            samples(e, x, count),
            kernel=pairs(kernel, count),
            stride=pairs(stride or kernel, count),
            padding=pairs(padding, count) * 2,
            dilation=pairs(dilation, count),
            ceil_mode=ceil_mode,
        )
        return e.reshape(made, e.out.shape), None

    return rule


def avg_pool(count: int) -> Rule:
    """Return the rule of average pooling over `count` dims."""

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
        needs(divisor is None, "no divisor")
        made = e(
            f"avg_pool{count}d",
            samples(e, x, count),
            kernel=pairs(kernel, count),
            stride=pairs(stride or kernel, count),
            padding=pairs(padding, count) * 2,
            ceil_mode=ceil_mode,
            include_pad=include_pad,
        )
        return e.reshape(made, e.out.shape)

    return rule


def adaptive(e: Emit, x: Value, size: Any) -> Value:
    """Emit adaptive average pooling of images to a size that divides theirs."""
    needs(x.rank == 4, "samples")
    sizes = pairs(size, 2)
    needs(all(n % s == 0 for n, s in zip(x.shape[2:], sizes)), "windows of one size")
    kernel = tuple(n // s for n, s in zip(x.shape[2:], sizes))
    return e("avg_pool2d", x, kernel=kernel, stride=kernel)


# Normalization


def scale(e: Emit, given: Value | None, number: float, shape: Any, dtype: str) -> Value:
    """Return a scale or shift that was given, or else a constant of one number."""
    return given or e.known(np.full(tuple(shape), number), dtype)


def batch_norm(
    e: Emit,
    x: Value,
    gamma: Value | None,
    beta: Value | None,
    mean: Value | None,
    var: Value | None,
    *rest: Any,
) -> Any:
    """Emit batch normalisation by running statistics, or by those of each batch."""
    training, epsilon = (rest[0] if len(rest) == 3 else False), rest[-1]
    needs(e.used <= {0}, "nothing but the result looked at")
    if training and mean is None and x.rank > 2:  # of each batch alone, as instance norm is made
        over = (0, *range(2, x.rank))
        mean = e.reshape(e("reduce_mean", x, axes=over, keepdims=True), x.shape[1:2])
        apart = e("sub", x, e.reshape(mean, (x.shape[1], *(1,) * (x.rank - 2))))
        count = x.shape[0] * math.prod(x.shape[2:])
        needs(count > 0, "elements")
        var = e("affine", e("reduce_sum_square", apart, axes=over), scale=1 / count)
    else:
        needs(not training, "inference")
    needs(mean is not None and var is not None, "running statistics")
    shape = x.shape[1:2]
    gamma, beta = scale(e, gamma, 1, shape, x.dtype), scale(e, beta, 0, shape, x.dtype)
    assert mean is not None and var is not None
    made = e("batch_norm_inference", x, gamma, beta, mean, var, epsilon=float(epsilon))
    return (made, *[None] * (len(e.wanted) - 1))


def layer_norm(
    e: Emit, x: Value, shape: Any, gamma: Value | None, beta: Value | None, epsilon: float
) -> Any:
    """Emit layer normalisation over the last dims, as many as `shape` has."""
    needs(e.used <= {0}, "nothing but the result looked at")
    gamma, beta = scale(e, gamma, 1, shape, x.dtype), scale(e, beta, 0, shape, x.dtype)
    made = e("layer_norm", x, gamma, beta, epsilon=float(epsilon), axis=x.rank - len(shape))
    return made, None, None


def group_norm(
    e: Emit, x: Value, gamma: Any, beta: Any, n: int, c: int, hw: int, groups: int, epsilon: float
) -> Any:
    """Emit group normalisation of x (n, c, …)."""
    needs(e.used <= {0}, "nothing but the result looked at")
    gamma, beta = scale(e, gamma, 1, (c,), x.dtype), scale(e, beta, 0, (c,), x.dtype)
    made = e("group_norm", x, gamma, beta, num_groups=groups, epsilon=float(epsilon))
    return made, None, None


def softmax(operator: str) -> Rule:
    """Return the rule of softmax or its logarithm along an axis."""

    def rule(e: Emit, x: Value, axis: int, half: bool = False, **_: Any) -> Value:
        needs(x.rank > 0, "a dim")
        return e(operator, e.cast(x, e.out.dtype), axis=axis_of(axis, x.rank))

    return rule


# Folds


def fold(operator: str) -> Rule:
    """Return the rule of a reduction, computed in the result's element type."""

    def rule(e: Emit, x: Value, axes: Any = None, keepdim: bool = False, **_: Any) -> Value:
        needs(x.rank > 0, "a dim")
        made = e.cast(x, e.out.dtype)
        return e(operator, made, axes=axes_of(axes, x.rank), keepdims=keepdim)

    return rule


def extreme(operator: str) -> Rule:
    """Return the rule of the place of the largest or smallest element along an axis."""

    def rule(e: Emit, x: Value, axis: Any = None, keepdim: bool = False) -> Value:
        needs(axis is not None and x.rank > 0, "one dim")
        return e(operator, x, axis=axis_of(axis, x.rank), keepdims=keepdim)

    return rule


def truth(operator: str) -> Rule:
    """A rule of `any` or `all`: the greatest or least of 0 and 1."""

    def rule(e: Emit, x: Value, axes: Any = None, keepdim: bool = False) -> Value:
        needs(x.rank > 0, "a dim")
        # Of no elements, the extreme of an unsigned type says false for any and true for all.
        bits = e.cast(e.cast(x, "bool"), "uint8")
        folded = e(operator, bits, axes=axes_of(axes, x.rank), keepdims=keepdim)
        return e.cast(e.cast(folded, "bool"), e.out.dtype)

    return rule


def variance(
    e: Emit, x: Value, axes: Any = None, *, correction: Any = 1, keepdim: bool = False
) -> Value:
    """Emit the variance over some axes, divided by their elements less `correction`."""
    over = axes_of(axes, x.rank)
    count = math.prod(x.shape[axis] for axis in over)
    needs(count > correction, "more elements than the correction")
    apart = e("sub", x, e("reduce_mean", x, axes=over, keepdims=True))
    total = e("reduce_sum_square", apart, axes=over, keepdims=keepdim)
    return e("affine", total, scale=1 / (count - correction))
