"""In which precision a session may compute products, and where it cannot."""

from __future__ import annotations

from soapstone.errors import hint
from soapstone.ir.errors import GraphError
from soapstone.ir.precision import SINGLE
from soapstone.kernels.cpu.onednn.library import available, multiplies_bfloat16
from soapstone.kernels.entry import BFLOAT16
from soapstone.runtime.machines.machine import CUDA


def check_precision(precision: str, processor: str, streamed: bool) -> None:
    """Refuse a precision that sessions on a kind of processor do not have.

    streamed: whether weights are streamed.

    Raises:
        GraphError: it is unknown, or products cannot be computed in it; says why.
    """
    if precision == SINGLE:
        return
    if precision != BFLOAT16:
        raise GraphError(
            f"precision: {precision!r} found, {SINGLE!r} or {BFLOAT16!r} needed"
            f"{hint(precision, (SINGLE, BFLOAT16))}"
        )
    if processor == CUDA:
        lacks = "the GPU's kernels have no such products"
    elif streamed:
        lacks = "products of streamed weights stay float32"
    elif not available():
        lacks = "oneDNN is not there"
    elif not multiplies_bfloat16():
        lacks = "this processor has no instructions for it (AVX512_BF16 needed)"
    else:
        return
    raise GraphError(f"precision: {precision!r} found, but {lacks}; {SINGLE!r} needed")


__all__ = ["check_precision"]
