"""Forms and laws of softmax, reductions, layer normalisation and `merge`.

Axes count from the end. An operand is repeated along an axis where its extent is 1, or where it has
no such axis; `dim(y,a) = 1` says that it is constant there.
"""

from __future__ import annotations

from collections.abc import Sequence

from soapstone.ir.attributes import Attributes
from soapstone.ir.law import Form, Law
from soapstone.ir.ops.elementwise.laws_pointwise import law, ranks
from soapstone.ir.ops.forms import AXES, front_axis
from soapstone.ir.tensor import TensorSpec
from soapstone.ir.term import Value

Readings = list[tuple[Value, ...]]

_SAME = ranks("x y", "11", "22", "33", "44")
_FEWER = ranks("x y", "21", "32", "31")


def _softmax(parameters: Sequence[Value], *specs: TensorSpec) -> Attributes | None:
    return None if front_axis(parameters[0], specs[0]) is None else {"axis": parameters[0]}


def _read_softmax(attributes: Attributes, *specs: TensorSpec) -> Readings:
    axis, rank = attributes["axis"], specs[0].rank
    return [(axis if axis < 0 else axis - rank,)]


def _reduction(parameters: Sequence[Value], *specs: TensorSpec) -> Attributes | None:
    axis = front_axis(parameters[0], specs[0])
    return None if axis is None else {"axes": (axis,), "keepdims": True}


def _read_reduction(attributes: Attributes, *specs: TensorSpec) -> Readings:
    rank = specs[0].rank
    axes = tuple(range(rank)) if attributes["axes"] is None else attributes["axes"]
    whole = attributes.get("count") in (None, *(specs[0].shape[axis] for axis in axes[:1]))
    return [(axes[0] - rank,)] if len(axes) == 1 and attributes["keepdims"] and whole else []


def _layer_norm(parameters: Sequence[Value], *specs: TensorSpec) -> Attributes | None:
    return {"epsilon": 1e-5, "axis": -1} if specs[0].rank else None


def _read_layer_norm(attributes: Attributes, *specs: TensorSpec) -> Readings:
    last = attributes["axis"] in (-1, specs[0].rank - 1)
    return [()] if last and attributes["epsilon"] == 1e-5 else []


def _merge(parameters: Sequence[Value], *specs: TensorSpec) -> Attributes | None:
    if specs[0].rank != 3:
        return None
    b, m, k = specs[0].shape
    return {"shape": (b * m, k)}


def _read_merge(attributes: Attributes, *specs: TensorSpec) -> Readings:
    return [()] if attributes == _merge((), *specs) else []


SOFTMAX_FORMS = (Form("softmax", 1, {"a": AXES}, _softmax, _read_softmax),)
REDUCE_SUM_FORMS = (Form("reduce_sum", 1, {"a": AXES}, _reduction, _read_reduction),)
REDUCE_MEAN_FORMS = (Form("reduce_mean", 1, {"a": AXES}, _reduction, _read_reduction),)
LAYER_NORM_FORMS = (Form("layer_norm", 3, {}, _layer_norm, _read_layer_norm),)
MERGE_FORMS = (Form("merge", 1, {}, _merge, _read_merge),)


def _transposed(f: str) -> tuple[Law, ...]:
    """Return the laws of an operator along one axis and `transpose`, which swaps the last two."""
    pairs = (("-1", "-2", "234"), ("-2", "-1", "234"), ("-3", "-3", "34"), ("-4", "-4", "4"))
    return tuple(
        law(
            f"{f}-transpose{a}",
            f"{f}[{a}](transpose(x)) = transpose({f}[{b}](x))",
            *ranks("x", *which),
        )
        for a, b, which in pairs
    )


def _fewer(name: str, text: str) -> tuple[Law, ...]:
    """Return a law, which says `[a]`, for the axes that its variable y does not have."""
    return tuple(
        law(f"{name}-fewer{a}", text.replace("[a]", f"[{a}]"), *ranks("x y", *which))
        for a, which in (("-2", ("21", "31")), ("-3", ("31", "32")))
    )


SOFTMAX_LAWS = (
    *_fewer("softmax-plus-constant", "softmax[a](add(x, y)) = softmax[a](x)"),
    *_fewer("softmax-minus-constant", "softmax[a](sub(x, y)) = softmax[a](x)"),
    law(
        "softmax-plus-ones",
        "softmax[a](add(x, ones)) = softmax[a](x)",
        *ranks("x ones", "11", "22", "33", "44"),
    ),
    law(
        "softmax-minus-ones",
        "softmax[a](sub(x, ones)) = softmax[a](x)",
        *ranks("x ones", "11", "22", "33", "44"),
    ),
    law(
        "softmax-constant-minus",
        "softmax[a](sub(y, x)) = softmax[a](sub(ones, x))",
        *ranks("x y ones", "222", "333", "444"),
        where=("dim(y,a) = 1",),
    ),
    *(
        law(
            f"softmax-constant-minus-fewer{a}",
            f"softmax[{a}](sub(y, x)) = softmax[{a}](sub(ones, x))",
            *ranks("x y ones", *which),
        )
        for a, which in (("-2", ("212", "313")), ("-3", ("313", "323")))
    ),
    law("softmax-of-sum", "softmax[a](reduce_sum[a](x)) = reduce_sum[a](softmax[a](x))"),
    law("softmax-of-mean", "softmax[a](reduce_mean[a](x)) = reduce_sum[a](softmax[a](x))"),
    law("softmax-quotient", "softmax[a](x) = div(exp(x), reduce_sum[a](exp(x)))"),
    law(
        "softmax-plus-constant",
        "softmax[a](add(x, y)) = softmax[a](x)",
        *_SAME,
        *_FEWER,
        where=("dim(y,a) = 1",),
    ),
    law(
        "softmax-minus-constant",
        "softmax[a](sub(x, y)) = softmax[a](x)",
        *_SAME,
        *_FEWER,
        where=("dim(y,a) = 1",),
    ),
    law(
        "softmax-concat-before",
        "softmax[b](concat[a](x, y)) = concat[a](softmax[b](x), softmax[b](y))",
        *ranks("x y", "22", "33", "44"),
        where=("b >= a+1",),
    ),
    law(
        "softmax-concat-after",
        "softmax[b](concat[a](x, y)) = concat[a](softmax[b](x), softmax[b](y))",
        *ranks("x y", "22", "33", "44"),
        where=("a >= b+1",),
    ),
    law("softmax-merge", "softmax[-1](merge(x)) = merge(softmax[-1](x))", *ranks("x", "3")),
    law(
        "softmax-sum",
        "reduce_sum[a](softmax[a](x)) = ones",
        *ranks("x ones", "11", "22", "33", "44"),
    ),
    law(
        "softmax-one",
        "softmax[a](x) = ones",
        *ranks("x ones", "11", "22", "33", "44"),
        where=("dim(x,a) = 1",),
    ),
    *_transposed("softmax"),
)


def reduction_laws(f: str) -> tuple[Law, ...]:
    """Return the laws of a sum or mean along one axis, which is kept."""
    fits = ("dim(x,a) = dim(y,a)",)
    constant = ("dim(y,a) = 1",)
    return (
        law(
            f"{f}-sum",
            f"{f}[a](add(x, y)) = add({f}[a](x), {f}[a](y))",
            *_SAME,
            *_FEWER,
            where=fits,
        ),
        law(
            f"{f}-difference",
            f"{f}[a](sub(x, y)) = sub({f}[a](x), {f}[a](y))",
            *_SAME,
            *_FEWER,
            where=fits,
        ),
        law(
            f"{f}-smul",
            f"{f}[a](smul(x, w)) = smul({f}[a](x), w)",
            *ranks("x w", "10", "20", "30", "40"),
        ),
        law(
            f"{f}-product",
            f"{f}[a](mul(x, y)) = mul({f}[a](x), y)",
            *_SAME,
            *_FEWER,
            where=constant,
        ),
        law(
            f"{f}-quotient",
            f"{f}[a](div(x, y)) = div({f}[a](x), y)",
            *_SAME,
            *_FEWER,
            where=constant,
        ),
        *_fewer(f"{f}-product", f"{f}[a](mul(x, y)) = mul({f}[a](x), y)"),
        *_fewer(f"{f}-quotient", f"{f}[a](div(x, y)) = div({f}[a](x), y)"),
        law(f"{f}-concat", f"{f}[b](concat[a](x, y)) = concat[a]({f}[b](x), {f}[b](y))"),
        law(f"{f}-of-one", f"{f}[a](x) = x", where=("dim(x,a) = 1",)),
        law(
            f"{f}-matmul-rows",
            f"{f}[-2](matmul(x, y)) = matmul({f}[-2](x), y)",
            *ranks("x y", "22", "32", "23", "33", "44"),
        ),
        law(
            f"{f}-matmul-columns",
            f"{f}[-1](matmul(x, y)) = matmul(x, {f}[-1](y))",
            *ranks("x y", "22", "32", "23", "33", "44"),
        ),
        law(
            f"{f}-matmul-batch",
            f"{f}[-3](matmul(x, y)) = matmul({f}[-3](x), y)",
            *ranks("x y", "32"),
        ),
        law(f"{f}-merge", f"{f}[-1](merge(x)) = merge({f}[-1](x))", *ranks("x", "3")),
        law(f"{f}-merge-rows", f"{f}[-2](merge(x)) = merge({f}[-3]({f}[-2](x)))", *ranks("x", "3")),
        *_transposed(f),
    )


REDUCE_SUM_LAWS = (
    *reduction_laws("reduce_sum"),
    law("reduce_sum-order", "reduce_sum[a](reduce_sum[b](x)) = reduce_sum[b](reduce_sum[a](x))"),
    law(
        "reduce_sum-concat-along",
        "reduce_sum[a](concat[a](x, y)) = add(reduce_sum[a](x), reduce_sum[a](y))",
    ),
    law(
        "reduce_sum-rows", "matmul(ones, x) = reduce_sum[-2](x)", *ranks("x ones", "22", "32", "33")
    ),
    law(
        "reduce_sum-columns",
        "matmul(x, ones) = reduce_sum[-1](x)",
        *ranks("x ones", "22", "32", "33"),
    ),
)
REDUCE_MEAN_LAWS = (
    *reduction_laws("reduce_mean"),
    *_fewer("reduce_mean-constant", "reduce_mean[a](add(x, y)) = add(reduce_mean[a](x), y)"),
    *_fewer("reduce_mean-constant-minus", "reduce_mean[a](sub(y, x)) = sub(y, reduce_mean[a](x))"),
    law(
        "reduce_mean-constant-minus",
        "reduce_mean[a](sub(y, x)) = sub(y, reduce_mean[a](x))",
        *_SAME,
        *_FEWER,
        where=("dim(y,a) = 1",),
    ),
    law(
        "reduce_mean-concat-swap",
        "reduce_mean[a](concat[a](x, y)) = reduce_mean[a](concat[a](y, x))",
    ),
    *_fewer("reduce_mean-minus-constant", "reduce_mean[a](sub(x, y)) = sub(reduce_mean[a](x), y)"),
    law(
        "reduce_mean-order", "reduce_mean[a](reduce_mean[b](x)) = reduce_mean[b](reduce_mean[a](x))"
    ),
    *(
        law(
            f"reduce_mean-and-sum-{name}",
            "reduce_mean[a](reduce_sum[b](x)) = reduce_sum[b](reduce_mean[a](x))",
            where=(where,),
        )
        for name, where in (("before", "b >= a+1"), ("after", "a >= b+1"))
    ),
    law(
        "reduce_mean-constant",
        "reduce_mean[a](add(x, y)) = add(reduce_mean[a](x), y)",
        *_SAME,
        *_FEWER,
        where=("dim(y,a) = 1",),
    ),
    law(
        "reduce_mean-minus-constant",
        "reduce_mean[a](sub(x, y)) = sub(reduce_mean[a](x), y)",
        *_SAME,
        *_FEWER,
        where=("dim(y,a) = 1",),
    ),
    law(
        "reduce_mean-quotient-of-sums",
        "div(reduce_sum[a](x), reduce_sum[a](ones)) = reduce_mean[a](x)",
        *ranks("x ones", "11", "22", "33", "44"),
        where=("dim(ones,a) = dim(x,a)",),
    ),
)
LAYER_NORM_LAWS = (
    law(
        "layer_norm-plus-constant",
        "layer_norm(add(x, y), w, b) = layer_norm(x, w, b)",
        *ranks("x y w b", "1111", "2211", "3311", "3211"),
        where=("dim(y,-1) = 1",),
    ),
    law(
        "layer_norm-minus-constant",
        "layer_norm(sub(x, y), w, b) = layer_norm(x, w, b)",
        *ranks("x y w b", "1111", "2211", "3311", "3211"),
        where=("dim(y,-1) = 1",),
    ),
    law(
        "layer_norm-constant-minus",
        "layer_norm(sub(y, x), w, b) = layer_norm(sub(ones, x), w, b)",
        *ranks("x y w b ones", "22112", "33113"),
        where=("dim(y,-1) = 1",),
    ),
    law(
        "layer_norm-shift",
        "layer_norm(x, w, add(b, y)) = add(layer_norm(x, w, b), y)",
        *ranks("x w b y", "1111", "2111", "3111"),
    ),
    law(
        "layer_norm-scale",
        "layer_norm(x, mul(w, y), mul(b, y)) = mul(layer_norm(x, w, b), y)",
        *ranks("x w b y", "1111", "2111", "3111"),
    ),
    law(
        "layer_norm-smul",
        "layer_norm(x, smul(w, y), smul(b, y)) = smul(layer_norm(x, w, b), y)",
        *ranks("x w b y", "1110", "2110", "3110"),
    ),
    law(
        "layer_norm-concat",
        "layer_norm(concat[a](x, y), w, b) = concat[a](layer_norm(x, w, b), layer_norm(y, w, b))",
        *ranks("x y w b", "2211", "3311"),
    ),
    law(
        "layer_norm-merge",
        "layer_norm(merge(x), w, b) = merge(layer_norm(x, w, b))",
        *ranks("x w b", "311"),
    ),
)
MERGE_LAWS = (
    law(
        "transpose-one",
        "transpose(x) = x",
        *ranks("x", "2", "3", "4"),
        where=("dim(x,-1) = 1", "dim(x,-2) = 1"),
    ),
    law("merge-matmul", "matmul(merge(x), y) = merge(matmul(x, y))", *ranks("x y", "32")),
    law("merge-relu", "relu(merge(x)) = merge(relu(x))", *ranks("x", "3")),
    law("merge-smul", "smul(merge(x), w) = merge(smul(x, w))", *ranks("x w", "30")),
    law(
        "merge-concat-columns",
        "concat[-1](merge(x), merge(y)) = merge(concat[-1](x, y))",
        *ranks("x y", "33"),
    ),
    law(
        "merge-concat-rows",
        "concat[-2](merge(x), merge(y)) = merge(concat[-3](x, y))",
        *ranks("x y", "33"),
    ),
)
