"""`ctc`: the loss of labels that are not aligned with the steps they are found in.

The probability of a label sequence is the sum over all ways to spread it over the steps, each label
over one step or more, with blanks between (needed between two equal labels). It is summed forward
and backward in log space; both give the share of each way through a step and a class, and so the
gradient of the logits. Dims: n (samples), t (steps), c (classes), l (places of labels).

Source: Graves et al., Connectionist temporal classification, ICML 2006, sections 4.1 and 4.2.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from soapstone.ir.attributes import Attribute, Attributes
from soapstone.ir.dims import Kind, Signature
from soapstone.ir.errors import GraphError, ShapeError
from soapstone.ir.ops.checks import need_float, need_integer
from soapstone.ir.ops.signatures import einsum
from soapstone.ir.spec import Case, GradientContext, define
from soapstone.ir.tensor import Array, TensorSpec

_KINDS = {"t": Kind.WHOLE, "c": Kind.WHOLE, "l": Kind.WHOLE}


def _signature(inputs: tuple[TensorSpec, ...], attributes: Attributes) -> Signature:
    lengths = len(inputs) == 3
    need_float(inputs, 0)
    need_integer(inputs, 1)
    if lengths:
        need_integer(inputs, 2)
    text = f"n t c, n l{', n' * lengths} -> n, n t c"
    signature = einsum(text, inputs, dtypes=[inputs[0].dtype] * 2, kinds=_KINDS)
    classes = inputs[0].shape[2]
    if attributes["blank"] >= classes:
        raise ShapeError(f"dim c is {classes}; more needed, since blank is {attributes['blank']}")
    return signature


def _ctc(attributes: Attributes, logits: Array, labels: Array, *lengths: Array) -> Sequence[Array]:
    samples, steps, classes = logits.shape
    loss, slopes = np.zeros(samples, logits.dtype), np.zeros_like(logits)
    for n in range(samples):
        own = labels[n][: int((np.append(labels[n], -1) < 0).argmax())]
        if (own >= classes).any():
            raise GraphError(f"label {own.max()} found, 0 to {classes - 1} needed")
        last = int(np.clip(lengths[0][n], 0, steps)) if lengths else steps
        # Sums over thousands of steps cancel in the shares: in double precision, as in the kernel.
        wide = logits[n, :last].astype(np.float64)
        loss[n], slopes[n, :last] = _sample(attributes, wide, own)
    return loss, slopes


def _sample(attributes: Attributes, logits: Array, labels: Array) -> tuple[float, Array]:
    """Return the loss of labels (l,) in logits (t, c), and its gradient."""
    infinite = 0.0 if attributes["zero_infinity"] else np.inf
    if not len(logits):
        return (infinite if len(labels) else 0.0), logits
    with np.errstate(divide="ignore", invalid="ignore"):
        logs = logits - np.logaddexp.reduce(logits, axis=1, keepdims=True)
        path = np.full(2 * len(labels) + 1, attributes["blank"])
        path[1::2] = labels
        skips = np.zeros(len(path), bool)  # states that follow the one two before
        skips[3::2] = labels[1:] != labels[:-1]
        each = logs[:, path]
        forward = _summed(each, skips)
        # From the end, the step's own probability left out: the path mirrored.
        skips = np.concatenate([[False] * 2, skips[2:][::-1]])[: len(path)]
        backward = (_summed(each[::-1, ::-1], skips) - each[::-1, ::-1])[::-1, ::-1]
        log = np.logaddexp.reduce(forward[-1, -2:])
        slopes = np.exp(logs)
        if np.isneginf(log):
            return infinite, np.zeros_like(slopes) if infinite == 0 else slopes * np.nan
        shares = np.exp(forward + backward - log)
        shares[np.isneginf(each)] = 0
        slopes -= shares @ (path[:, None] == np.arange(logits.shape[1])).astype(np.float64)
    return -float(log), slopes


def _summed(each: Array, skips: Array) -> Array:
    """Return the logarithms of what leads to each step and state, itself included."""
    made = np.full_like(each, -np.inf)
    made[0, :2] = each[0, :2]
    for step in range(1, len(each)):
        before = made[step - 1]
        one = np.append(-np.inf, before[:-1])
        two = np.where(skips, np.append([-np.inf] * 2, before[:-2])[: len(before)], -np.inf)
        made[step] = each[step] + np.logaddexp(np.logaddexp(before, one), two)
    return made


def _gradient(g: GradientContext) -> list[str | None]:
    dloss = g.only_grad()
    (samples,) = g.spec(dloss).shape
    rename = {"f0": "n"} if samples != 1 else {}
    rows = g.emit("reshape", dloss, shape=(samples, 1, 1), rename=rename)
    made = g.emit("mul", rows, g.outputs[1], rename={"d0": "n", "d1": "t", "d2": "c"})
    return [made, *(None for _ in g.inputs[1:])]


define(
    name="ctc",
    inputs=("logits", "labels", "lengths?"),
    outputs=("loss", "slopes"),
    signature=_signature,
    reference=_ctc,
    attributes={
        "blank": Attribute("int", 0, minimum=0),
        "zero_infinity": Attribute("bool", False),
    },
    gradient=_gradient,
    flops_per_point=40,
    layer=None,
    cases=(
        Case(("2 6 5", "int32 2 2 >=1 <5")),
        Case(("2 5 4", "int32 2 4 >=-1 <3"), {"blank": 3, "zero_infinity": True}),
        Case(("3 6 4", "int64 3 3 >=1 <4", "int32 3 <7"), {"zero_infinity": True}),
        Case(("1 1 2", "int32 1 1 >=1 <2")),
        Case(("0 3 4", "int32 0 2 >=1 <4")),
        Case(("2 2 3", "int32 2 3 >=1 <3"), {}, ()),
        Case(("3 33 29", "int32 3 9 >=-1 <29", "int32 3 <34"), {"zero_infinity": True}, ()),
    ),
    doc="minus the logarithm of the probability of each row of labels, which ends at the first"
    " -1,\nand the gradient of the logits of each (saved)",
)
