"""Operators of com.microsoft that ONNX Runtime's optimiser joins of several, mostly of ONNX's.

A product or a convolution takes a sum and an activation behind it; images have their channels
last. What each means is what it is made of.
"""

from __future__ import annotations

from collections.abc import Mapping

from soapstone.frontend.onnx.call import Call
from soapstone.frontend.onnx.declared import entry_of
from soapstone.frontend.onnx.errors import OnnxError, UnsupportedError
from soapstone.frontend.onnx.rules.products import gemm
from soapstone.frontend.onnx.rules.windows import convolved, max_pooled
from soapstone.frontend.onnx.values import MICROSOFT, PLAIN, STRIDED, Value, rule
from soapstone.ir.spec import operator_of_onnx

# The names that `activation_params` of a convolution have, in their order, where there are any.
_PARAMETERS = {
    "LeakyRelu": ("alpha",),
    "Clip": ("min", "max"),
    "HardSigmoid": ("alpha", "beta"),
}
_ACTIVATIONS = (
    *("Relu", "Sigmoid", "Tanh", "LeakyRelu", "Clip", "HardSigmoid", "HardSwish", "Elu", "Selu"),
    *("Softplus", "Softsign", "ThresholdedRelu"),
)


def _activated(n: Call, y: Value, given: Mapping[str, float]) -> Value:
    """Return the node's activation of y, if it has one; given: its attributes by ONNX's names."""
    name = n.attribute("activation", "")
    if not name:
        return y
    n.text("activation", name, _ACTIVATIONS)
    if name == "Clip":
        return n("clip", y, low=given.get("min"), high=given.get("max"))
    spec = operator_of_onnx(name)
    assert spec is not None  # of those named above
    entry, own = entry_of(spec), {}
    for attribute in spec.attributes:
        item = entry.attribute(attribute)
        if item is not None and item.name in given:
            own[attribute] = given[item.name]
    return n(spec.name, y, **own)


def fused_convolution(n: Call, x: Value, w: Value, bias: Value | None, more: Value | None) -> Value:
    """Return a convolution by the node's attributes, plus `more`, and its activation of that."""
    y = convolved(n, x, w, bias)
    if more is not None:
        if more.shape != y.shape:
            raise OnnxError(f"{more.spec} found to be added; shape {y.shape} needed")
        y = n("add", y, more)
    numbers = n.attribute("activation_params", ())
    names = _PARAMETERS.get(n.attribute("activation", ""), ())
    if len(numbers) != len(names):
        raise OnnxError(f"attribute 'activation_params' is {numbers}; {len(names)} numbers needed")
    return _activated(n, y, dict(zip(names, numbers)))


@rule("FusedConv", domain=MICROSOFT, even=STRIDED)
def fused_conv(n: Call) -> Value:
    return fused_convolution(n, n.value(0), n.value(1), n.maybe(2), n.maybe(3))


@rule("FusedGemm", domain=MICROSOFT, even=PLAIN)
def fused_gemm(n: Call) -> Value:
    given = {
        name: n.attribute(f"activation_{name}")
        for name in ("alpha", "beta", "gamma")
        if n.attribute(f"activation_{name}") is not None
    }
    return _activated(n, gemm(n), given)


# ------------------------------------------------------------------------ channels that are last
def channels_first(n: Call, x: Value) -> Value:
    """Return an image (n, …, c) as (n, c, …)."""
    return n.transpose(x, (0, x.rank - 1, *range(1, x.rank - 1)))


def channels_last(n: Call, x: Value) -> Value:
    """Return an image (n, c, …) as (n, …, c)."""
    return n.transpose(x, (0, *range(2, x.rank), 1))


@rule("NhwcConv", domain=MICROSOFT)
def nhwc_conv(n: Call) -> Value:
    """Weights have their channels last too, as ONNX Runtime's tool for diffusion writes them.

    Its documentation says otherwise, so they need not where that does not fit.
    """
    x, w = channels_first(n, n.value(0)), n.value(1)
    if w.rank == x.rank and w.shape[-1] * n.attribute("group", 1) == x.shape[1]:
        w = channels_first(n, w)
    return channels_last(n, convolved(n, x, w, n.maybe(2)))


@rule("NhwcFusedConv", domain=MICROSOFT)
def nhwc_fused_conv(n: Call) -> Value:
    x, more = channels_first(n, n.value(0)), n.maybe(3)
    more = None if more is None else channels_first(n, more)
    return channels_last(n, fused_convolution(n, x, n.value(1), n.maybe(2), more))


@rule("NhwcMaxPool", domain=MICROSOFT)
def nhwc_max_pool(n: Call) -> Value:
    return channels_last(n, max_pooled(n, channels_first(n, n.value()))[0])


# ------------------------------------------------------------------------------------- diffusion
@rule("GroupNorm", domain=MICROSOFT)
def group_norm(n: Call) -> Value:
    return _group_normed(n, n.value(0))


@rule("SkipGroupNorm", domain=MICROSOFT)
def skip_group_norm(n: Call) -> list[Value]:
    x, skip = n.value(0), n.value(3)
    last = bool(n.attribute("channels_last", 1))
    if skip.rank == 2:
        samples, channels = skip.shape
        skip = n.reshape(skip, (samples, 1, 1, channels) if last else (samples, channels, 1, 1))
    total = n("add", x, skip)
    if n.has(4):
        bias = n.value(4)
        shape = (bias.spec.size,) if last else (bias.spec.size, *(1,) * (x.rank - 2))
        total = n("add", total, n.reshape(bias, shape))
    if total.shape != x.shape:
        raise OnnxError(f"{skip.spec} found to be added to {x.spec}")
    return [_group_normed(n, total), total]


def _group_normed(n: Call, x: Value) -> Value:
    last = bool(n.attribute("channels_last", 1))
    image = channels_first(n, x) if last else x
    scale, shift = (n.cast(n.value(position), x.dtype) for position in (1, 2))
    groups, epsilon = n.attribute("groups"), n.attribute("epsilon", 1e-5)
    y = n("group_norm", image, scale, shift, num_groups=groups, epsilon=epsilon)
    kind = n.attribute("activation", 0)
    if kind not in (0, 1):
        raise UnsupportedError(f"attribute 'activation' is {kind}; 0 and 1 are supported")
    y = n("silu", y) if kind else y
    return channels_last(n, y) if last else y


@rule("BiasSplitGelu", domain=MICROSOFT)
def bias_split_gelu(n: Call) -> Value:
    x = n("add", n.value(0), n.value(1))
    axis, half = x.rank - 1, x.shape[-1] // 2
    if x.shape[-1] % 2:
        raise OnnxError(f"{x.spec} found; an even last extent needed")
    left, right = n.part(x, axis, 0, half), n.part(x, axis, half, 2 * half)
    return n("mul", left, n("gelu", right))


@rule("BiasAdd", domain=MICROSOFT)
def bias_add(n: Call) -> Value:
    return n("add", n("add", n.value(0), n.value(1)), n.value(2))
