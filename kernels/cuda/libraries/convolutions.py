"""Convolutions and their gradients by cuDNN; what follows one is a pass over its result.

Of halves it has no plans with single results, so these are rounded once before the pass.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from soapstone.kernels.cuda.entry import DeviceEntry, sequence
from soapstone.kernels.cuda.libraries.cudnn import bindings, convolving, executed
from soapstone.kernels.cuda.libraries.device import asked
from soapstone.kernels.cuda.libraries.images import Kind, convolution
from soapstone.kernels.cuda.libraries.products import with_pass
from soapstone.kernels.cuda.products.convolution import bias_grad
from soapstone.kernels.cuda.products.matmul import ending, product_of
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


@variant((*FORWARD, "with_epilogue"), NAME, processor="cuda")
def served(call: Call) -> DeviceEntry | None:
    """Return the entry of a convolution, or of its gradient to its input, then its steps."""
    if not asked(call, bindings):
        return None
    of, precision = product_of(call), call.precision
    if of.name not in FORWARD:
        return None
    write, operands = ending(of)
    return with_pass(
        lambda sums: convolved(of.name, of.attributes, of.inputs, sums, precision),
        *(write, operands, of.y, of.inputs[0].dtype),
    )


@variant([name for name in KINDS if name not in FORWARD], NAME, processor="cuda")
def weight_grad(call: Call) -> DeviceEntry | None:
    """Return the entry of the weights' gradient and, where it is asked for, the bias's."""
    if not asked(call, bindings):
        return None
    inputs, (dw, *db) = views(call)
    found = convolved(call.operator, call.attributes, inputs, dw, call.precision)
    return sequence((found, bias_grad(inputs[1], db[0]))) if found and db else found


for _name in (*KINDS, "with_epilogue"):
    arrange(_name, "cuda", (NAME, "cublaslt", "tiled"))
