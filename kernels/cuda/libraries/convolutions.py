"""Convolutions and their gradients by cuDNN; what follows one is a pass over its result.

Of halves it has no plans with single results, so these are rounded once before the pass.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from soapstone.kernels.cuda.elementwise.pointwise import Writer
from soapstone.kernels.cuda.entry import DeviceEntry, sequence
from soapstone.kernels.cuda.libraries.cudnn import bindings, convolving, executed
from soapstone.kernels.cuda.libraries.device import of_gpu
from soapstone.kernels.cuda.libraries.images import Kind, convolution
from soapstone.kernels.cuda.libraries.products import with_pass
from soapstone.kernels.cuda.products.convolution import bias_grad
from soapstone.kernels.cuda.products.matmul import ending, wrapped
from soapstone.kernels.cuda.substrate.arrays import View, views
from soapstone.kernels.entry import Call
from soapstone.kernels.registry import arrange, variant

NAME = "cudnn"
# What cuDNN calls it, and which of inputs 0 and 1 and the output are x, w and y.
_FORWARD: tuple[Kind, tuple[int, int, int]] = ("conv_fprop", (0, 1, 2))
_TO_INPUT: tuple[Kind, tuple[int, int, int]] = ("conv_dgrad", (2, 1, 0))
_TO_WEIGHT: tuple[Kind, tuple[int, int, int]] = ("conv_wgrad", (0, 2, 1))
KINDS = {
    name: found
    for rank in (1, 2, 3)
    for name, found in (
        (f"conv{rank}d", _FORWARD),
        (f"conv{rank}d_grad_input", _TO_INPUT),
        (f"conv{rank}d_grad_weight", _TO_WEIGHT),
        (f"conv_transpose{rank}d", _TO_INPUT),
    )
}
FORWARD = tuple(name for name, kind in KINDS.items() if kind is not _TO_WEIGHT)


def convolved(
    name: str, attributes: Mapping[str, Any], inputs: Sequence[View], y: View, precision: str
) -> DeviceEntry | None:
    """Return the entry of a convolution or gradient without what follows it, or None."""
    kind, order = KINDS[name]
    operands = (*inputs[:2], y)
    x, w, result = (operands[position] for position in order)
    of = convolution(kind, attributes, x, w, result)
    return None if of is None else executed(convolving, of, precision, inputs[:2], (y,))


def with_steps(
    name: str,
    attributes: Mapping[str, Any],
    inputs: Sequence[View],
    y: View,
    more: Writer | None = None,
    extras: Sequence[View] = (),
    *,
    precision: str,
) -> DeviceEntry | None:
    """Return the entry of a convolution with bias and activation, then the steps of `more`."""
    write, operands = ending(name, attributes, inputs, y, more, extras)
    return with_pass(
        lambda sums: convolved(name, attributes, inputs, sums, precision),
        write,
        operands,
        y,
        inputs[0].dtype,
    )


@variant(FORWARD, NAME, processor="cuda")
def plain(call: Call) -> DeviceEntry | None:
    """Return the entry of a convolution, or of its gradient to its input."""
    if not of_gpu(call) or bindings() is None:
        return None
    inputs, (y,) = views(call)
    return with_steps(call.operator, call.attributes, inputs, y, precision=call.precision)


@variant([name for name in KINDS if name not in FORWARD], NAME, processor="cuda")
def weight_grad(call: Call) -> DeviceEntry | None:
    """Return the entry of the weights' gradient and, where it is asked for, the bias's."""
    if not of_gpu(call) or bindings() is None:
        return None
    inputs, (dw, *db) = views(call)
    found = convolved(call.operator, call.attributes, inputs, dw, call.precision)
    return sequence((found, bias_grad(inputs[1], db[0]))) if found and db else found


@variant("with_epilogue", NAME, processor="cuda")
def with_epilogue(call: Call) -> DeviceEntry | None:
    """Return the entry of a convolution, then that of its element-wise steps."""
    if not of_gpu(call) or bindings() is None or call.attributes["operator"] not in FORWARD:
        return None
    return with_steps(*wrapped(call), precision=call.precision)


for _name in (*KINDS, "with_epilogue"):
    arrange(_name, "cuda", (NAME, "cublaslt", "tiled"))
