"""Matrix products and linear layers by cuBLASLt, what follows them in it or in one pass after.

A bias and a rectification are computed with the sums; any other activation or chain is a pass over
the result, which is single precision in between where operands are halves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from soapstone.kernels.cuda.elementwise.pointwise import Writer, pointwise
from soapstone.kernels.cuda.elementwise.text import wide
from soapstone.kernels.cuda.entry import DeviceEntry, sequence
from soapstone.kernels.cuda.libraries.cublaslt import bindings, product
from soapstone.kernels.cuda.libraries.device import asked
from soapstone.kernels.cuda.products.matmul import PROBLEMS, Problem, Product, ending, product_of
from soapstone.kernels.cuda.substrate.arrays import View, room
from soapstone.kernels.entry import Call
from soapstone.kernels.registry import arrange, variant

NAME = "cublaslt"
SERVED = ("matmul", "linear", "linear_grad_input", "linear_grad_weight")


def multiplied(of: Product, precision: str) -> DeviceEntry | None:
    """Return the entry of a product, then its steps; None where cuBLASLt has none."""
    write, operands = ending(of)
    activation = of.attributes.get("activation")

    def compute(y: View) -> Problem:
        return PROBLEMS[of.name](of.attributes, of.inputs, y)

    if of.more is None and activation in (None, "relu"):
        bias = of.inputs[2] if of.attributes.get("bias", False) else None
        found = product(compute(of.y), precision, bias, activation == "relu")
        if found is not None or write is None:
            return found
    kept = wide(of.inputs[0].dtype)
    return with_pass(lambda y: product(compute(y), precision), write, operands, of.y, kept)


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


@variant((*SERVED, "with_epilogue"), NAME, processor="cuda")
def served(call: Call) -> DeviceEntry | None:
    """Return the entry of a product, a linear layer or its gradients, then its steps."""
    if not asked(call, bindings) or len(call.outputs) != 1:
        return None
    of = product_of(call)
    return multiplied(of, call.precision) if of.name in SERVED else None


for _name in (*SERVED, "with_epilogue"):
    arrange(_name, "cuda", (NAME, "tiled"))
