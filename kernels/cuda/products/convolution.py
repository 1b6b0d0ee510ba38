"""Convolutions of any rank and their gradients, as products over windows; groups are the batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from soapstone.ir.ops.windows.window import windows_of
from soapstone.kernels.cuda.elementwise.text import wide
from soapstone.kernels.cuda.entry import DeviceEntry, sequence
from soapstone.kernels.cuda.products.matmul import PROBLEMS, Problem, Product, bound, named, tiled
from soapstone.kernels.cuda.products.operands import Operand, Window
from soapstone.kernels.cuda.reduction.fold import fold
from soapstone.kernels.cuda.substrate.arrays import View, views
from soapstone.kernels.entry import Call
from soapstone.kernels.registry import variant


def _image(view: View, group: int, channel: str, spatial: Sequence[str] | None) -> Operand:
    """Return an image whose channels are (group, channel); `spatial`: its axes, if not windows."""
    step = view.strides[1]
    strides = {"i": view.strides[0], "g": step * group, channel: step}
    if spatial is not None:
        strides |= dict(zip(spatial, view.strides[2:]))
    return Operand(view, strides)


def _weights(view: View, outputs: int) -> Operand:
    """Return weights (g co, ci, *kernel)."""
    co, ci, *kernel = view.strides
    strides = {"g": co * outputs, "o": co, "c": ci}
    return Operand(view, strides | {f"k{n}": s for n, s in enumerate(kernel)})


def _read(x: Operand, attributes: Mapping[str, Any], kernel: Sequence[int]) -> Operand:
    """Return an image that is read by windows: place p of kernel position k."""
    view = x.view
    made = [
        Window({f"p{n}": w.stride, f"k{n}": w.dilation}, -w.low, w.size, view.strides[2 + n])
        for n, w in enumerate(windows_of(attributes, view.shape[2:], kernel))
    ]
    return Operand(view, x.strides, tuple(made))


def _convolution(attributes: Mapping[str, Any], inputs: Sequence[View], y: View) -> Problem:
    x, w = inputs[:2]
    groups, rank = attributes["groups"], len(x.shape) - 2
    outputs, ci, kernel = w.shape[0] // groups, w.shape[1], w.shape[2:]
    places = [f"p{n}" for n in range(rank)]
    axes = {
        "b": [("g", groups)],
        "m": [("i", x.shape[0]), *named(places, y.shape[2:])],
        "n": [("o", outputs)],
        "k": [("c", ci), *named([f"k{n}" for n in range(rank)], kernel)],
    }
    a = _read(_image(x, ci, "c", None), attributes, kernel)
    out = ["i", f"g*{outputs}+o", *places]
    return a, _weights(w, outputs), _image(y, outputs, "o", places), axes, out


def _grad_input(attributes: Mapping[str, Any], inputs: Sequence[View], dx: View) -> Problem:
    dy, w = inputs
    groups, rank = attributes["groups"], len(dy.shape) - 2
    outputs, ci, kernel = w.shape[0] // groups, w.shape[1], w.shape[2:]
    places = [f"p{n}" for n in range(rank)]
    axes = {
        "b": [("g", groups)],
        "m": [("i", dy.shape[0]), *named(places, dx.shape[2:])],
        "n": [("c", ci)],
        "k": [("o", outputs), *named([f"k{n}" for n in range(rank)], kernel)],
    }
    made = [
        Window(
            {f"p{n}": 1, f"k{n}": -w_.dilation},
            w_.low,
            dy.shape[2 + n],
            dy.strides[2 + n],
            w_.stride,
        )
        for n, w_ in enumerate(windows_of(attributes, dx.shape[2:], kernel))
    ]
    a = Operand(dy, _image(dy, outputs, "o", None).strides, tuple(made))
    out = ["i", f"g*{ci}+c", *places]
    return a, _weights(w, outputs), _image(dx, ci, "c", places), axes, out


def _grad_weight(attributes: Mapping[str, Any], inputs: Sequence[View], dw: View) -> Problem:
    x, dy = inputs
    groups, rank = attributes["groups"], len(x.shape) - 2
    outputs, ci, kernel = dw.shape[0] // groups, dw.shape[1], dw.shape[2:]
    places = [f"p{n}" for n in range(rank)]
    axes = {
        "b": [("g", groups)],
        "m": [("o", outputs)],
        "n": [("c", ci), *named([f"k{n}" for n in range(rank)], kernel)],
        "k": [("i", x.shape[0]), *named(places, dy.shape[2:])],
    }
    b = _read(_image(x, ci, "c", None), attributes, kernel)
    return _image(dy, outputs, "o", places), b, _weights(dw, outputs), axes, []


def _with_bias(call: Call) -> DeviceEntry:
    """Return the entry of the weights' gradient and, where it is asked for, the bias's."""
    (x, dy), (dw, *db) = views(call)
    plain = {**call.attributes, "bias": False}
    first = bound(Product(call.operator, plain, (x, dy), dw))
    return sequence((first, bias_grad(dy, db[0]))) if db else first


def bias_grad(dy: View, db: View) -> DeviceEntry:
    """Return the entry of a bias's gradient: the sum over all but channels."""
    over = (0, *range(2, len(dy.shape)))
    return fold([dy], over, [("sum", wide(dy.dtype))], [db])


def _transposed(attributes: Mapping[str, Any], inputs: Sequence[View], y: View) -> Problem:
    return _grad_input(attributes, inputs[:2], y)


for _rank in (1, 2, 3):
    PROBLEMS[f"conv{_rank}d"] = _convolution
    PROBLEMS[f"conv{_rank}d_grad_input"] = _grad_input
    PROBLEMS[f"conv{_rank}d_grad_weight"] = _grad_weight
    PROBLEMS[f"conv_transpose{_rank}d"] = _transposed
    for _name in (f"conv{_rank}d", f"conv{_rank}d_grad_input", f"conv_transpose{_rank}d"):
        variant(_name, "tiled", processor="cuda")(tiled)
    variant(f"conv{_rank}d_grad_weight", "tiled", processor="cuda")(_with_bias)
