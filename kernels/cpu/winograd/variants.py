"""3x3 convolutions of stride 1 by Winograd's minimal filtering, and their gradient by the input.

F(2x2, 3x3) multiplies 2.25 times less than the direct form, F(4x4, 3x3) 4 times; each is a variant,
and measured cost decides. Constant weights are transformed when the entry is made; others on each
run, and only for F(2x2), whose rounding errors training does not notice. Infinity or NaN in x makes
NaN of the results of its whole tile, not only of those whose window holds it.

Source: Lavin and Gray, Fast Algorithms for Convolutional Neural Networks (2016).
"""

from __future__ import annotations

from functools import partial

from soapstone.kernels.cpu.products.conv_epilogue import ConvEpilogue, conv_epilogue
from soapstone.kernels.cpu.winograd.entries import Plan, Problem, entry
from soapstone.kernels.entry import Array, Call, Entry
from soapstone.kernels.registry import variant


def bind(call: Call, size: int, epilogue: ConvEpilogue, plan: Plan | None = None) -> Entry | None:
    """Return the entry of epilogue(conv2d(x, w) + b) by tiles of `size`, or None where unserved."""
    x, w, *rest = call.inputs
    (y,) = call.outputs
    constant = 1 in call.constants
    if not (constant or size == 2) or len(rest) != bool(call.attributes.get("bias", False)):
        return None
    bias = rest[0] if rest else None
    padding = _padding(call, x, w, y, tuple(map(int, call.attributes["padding"])))
    if padding is None:
        return None
    problem = Problem(x, w, y, bias, padding, epilogue, call.threads, constant)
    return entry(problem, size, plan) if problem.served() else None


def _padding(
    call: Call, x: Array, w: Array, y: Array, padding: tuple[int, ...]
) -> tuple[int, int] | None:
    """Return the padding (top, left) of a 3x3 convolution of stride 1, or None of any other."""
    at = call.attributes
    if x.ndim != 4 or w.shape[2:] != (3, 3) or int(at["groups"]) != 1:
        return None
    top, left, bottom, right = padding
    if (*at["stride"], *at["dilation"]) != (1, 1, 1, 1) or min(bottom, right) < 0:
        return None
    made = (x.shape[2] + top + bottom - 2, x.shape[3] + left + right - 2)
    return (top, left) if y.shape[2:] == made else None


@variant("conv2d_grad_input", "winograd2")
def grad_input(call: Call, plan: Plan | None = None) -> Entry | None:
    """Return the entry of dx: the convolution of dy with the weights turned by half a turn."""
    (dy, w), (dx,) = call.inputs, call.outputs
    padding = _padding(call, dy, w, dx, tuple(2 - int(pad) for pad in call.attributes["padding"]))
    if padding is None:
        return None
    problem = Problem(dy, w, dx, None, padding, ConvEpilogue(), call.threads, turned=True)
    return entry(problem, 2, plan) if problem.served() else None


def _finished(call: Call, size: int) -> Entry | None:
    """Return the entry of a convolution by F(size x size, 3x3), with what follows it."""
    found = conv_epilogue(call)
    if found is None or found[0].operator != "conv2d":
        return None
    conv2d, epilogue = found
    return bind(conv2d, size, epilogue)


# What they usually take of the direct form's time, where they serve a convolution at all.
for _size, _expected in ((2, 0.6), (4, 0.4)):
    _registered = partial(variant, name=f"winograd{_size}", expected=_expected, promises=True)
    _registered(("conv2d", "with_epilogue"))(partial(_finished, size=_size))
