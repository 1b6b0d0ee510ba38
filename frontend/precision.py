"""In which precision products may be computed, and where they cannot."""

from __future__ import annotations

from soapstone.engine.lower.few_bits import ROUNDING
from soapstone.errors import hint
from soapstone.ir.errors import GraphError
from soapstone.ir.training.precision import SINGLE
from soapstone.kernels.cpu.onednn.library import available, multiplies_bfloat16
from soapstone.kernels.entry import BFLOAT16, TF32
from soapstone.runtime.machines.machine import CUDA

PRECISIONS = (SINGLE, BFLOAT16, TF32, *ROUNDING)


def check_precision(precision: str, processor: str, streamed: bool, plain: bool = False) -> None:
    """Refuse a precision of a session that products on a kind of processor do not have.

    streamed: whether weights are streamed. plain: whether they are left as they are.

    Raises:
        GraphError: it is unknown, or products cannot be computed in it; says why.
    """
    if precision == SINGLE:
        return
    if precision not in PRECISIONS:
        *others, last = map(repr, PRECISIONS)
        raise GraphError(
            f"precision: {precision!r} found, {', '.join(others)} or {last} needed"
            f"{hint(precision, PRECISIONS)}"
        )
    if precision == TF32:
        check_tf32(processor)
        return
    if precision in ROUNDING:
        if not (processor == CUDA or streamed or plain):
            return
        lacks = "weights are rounded for CPUs alone, and neither streamed nor in a plain session"
    elif processor == CUDA:
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


def check_tf32(processor: str) -> None:
    """Refuse TF32 where nothing multiplies in it: on a CPU, and on a GPU without cuBLASLt.

    Raises:
        GraphError: says what is missing.
    """
    if processor != CUDA:
        lacks = "it is of NVIDIA's GPUs"
    else:
        from soapstone.kernels.cuda.libraries.cublaslt import bindings
        from soapstone.native.cuda.device import simulated

        if bindings() is not None:
            return
        simulator = "Numba's simulator has no cuBLASLt"
        lacks = simulator if simulated() else "cuBLASLt is not there (extra cuda-libs)"
    raise GraphError(f"precision: {TF32!r} found, but {lacks}; {SINGLE!r} needed")
