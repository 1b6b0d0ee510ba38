"""Matrix products and linear layers by cuBLASLt, what follows them in it or in one pass after.

A bias and a rectification are computed with the sums; any other activation or chain is a pass over
the result, which is single precision in between where operands are halves.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from soapstone.kernels.cuda.elementwise.pointwise import Writer, pointwise
from soapstone.kernels.cuda.elementwise.text import wide
from soapstone.kernels.cuda.entry import DeviceEntry, sequence
from soapstone.kernels.cuda.libraries.cublaslt import bindings, product
from soapstone.kernels.cuda.libraries.device import of_gpu
from soapstone.kernels.cuda.products.matmul import PROBLEMS, ending, wrapped
from soapstone.kernels.cuda.substrate.arrays import View, room, views
from soapstone.kernels.entry import Call
from soapstone.kernels.registry import arrange, variant

NAME = "cublaslt"
SERVED = ("matmul", "linear", "linear_grad_input", "linear_grad_weight")


def multiplied(
    name: str,
    attributes: Mapping[str, Any],
    inputs: Sequence[View],
    y: View,
    more: Writer | None = None,
    extras: Sequence[View] = (),
    *,
    precision: str,
) -> DeviceEntry | None:
    """Return the entry of a product, then the steps of `more`; None where cuBLASLt has none."""
    write, operands = ending(name, attributes, inputs, y, more, extras)
    activation = attributes.get("activation")
    if more is None and activation in (None, "relu"):
        problem = PROBLEMS[name](attributes, inputs, y)
        bias = inputs[2] if attributes.get("bias", False) else None
        found = product(problem, precision, bias, activation == "relu")
        if found is not None or write is None:
            return found
    return with_pass(
        lambda sums: product(PROBLEMS[name](attributes, inputs, sums), precision),
        write,
        operands,
        y,
        wide(inputs[0].dtype),
    )


def with_pass(
    compute: Callable[[View], DeviceEntry | None],
    writer: Writer | None,
    operands: Sequence[View],
    y: View,
    dtype: str,
) -> DeviceEntry | None:
    """Return the entry of what a library computes, then a pass over it; None where it declines.

    Args:
        compute: makes the entry that stores sums. writer, operands: of the pass, see `ending`.
        dtype: in which sums are kept for the pass, in memory of their own where it is not y's.
    """
    if writer is None:
        return compute(y)
    sums = y if y.dtype == dtype else room(y.shape, dtype, y.span)
    found = compute(sums)
    if found is None:
        return None
    return sequence((found, pointwise(writer, [sums, *operands], [y])))


@variant(SERVED, NAME, processor="cuda")
def plain(call: Call) -> DeviceEntry | None:
    """Return the entry of a product, a linear layer or its gradients."""
    if not of_gpu(call) or bindings() is None or len(call.outputs) != 1:
        return None
    inputs, (y,) = views(call)
    return multiplied(call.operator, call.attributes, inputs, y, precision=call.precision)


@variant("with_epilogue", NAME, processor="cuda")
def with_epilogue(call: Call) -> DeviceEntry | None:
    """Return the entry of a product, then that of its element-wise steps."""
    if not of_gpu(call) or bindings() is None or call.attributes["operator"] not in SERVED:
        return None
    return multiplied(*wrapped(call), precision=call.precision)


for _name in (*SERVED, "with_epilogue"):
    arrange(_name, "cuda", (NAME, "tiled"))
