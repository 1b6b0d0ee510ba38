"""One step of a warp's tensor cores: c + a b of halves, 16 x 16 times 16 x 8, in single precision.

Of the 32 threads each holds some elements: with g = lane // 4 and t = lane % 4, a word of a has two
neighbours along k from 2 t on, of row g, g + 8, g, g + 8, the last two 8 further along k; a word of
b those of column g, the second one 8 further; and c the columns 2 t and 2 t + 1 of row g, then of
row g + 8. So the words of a next a are sums of two neighbouring steps, which `packed` rounds. In
the simulator a warp's words meet in memory, and the same elements are multiplied.

Source: NVIDIA, PTX ISA, "Matrix fragments for mma.m16n8k16 with floating point type".
"""

from __future__ import annotations

from typing import Any

import numpy as np

from soapstone.dtypes import HALVES, learn
from soapstone.kernels.cuda.substrate.target import SIMULATED, WARP, capability, cuda

WORDS = 6  # of a thread: four of a, two of b
SCRATCH = WARP * WORDS if SIMULATED else 1  # words of a warp that the simulator needs


def serves(dtype: str) -> bool:
    """Return whether elements of a type are multiplied so by the GPU that is current."""
    return dtype in HALVES and (SIMULATED or capability() >= (8, 0))


def _simulated(dtype: str) -> Any:
    kind = np.dtype(learn(dtype))

    def multiplied(*given: Any) -> tuple[Any, ...]:
        *words, scratch = given
        lane = int(cuda.threadIdx.x) % WARP
        first = int(cuda.threadIdx.x) // WARP * SCRATCH
        for number, word in enumerate(words[:WORDS]):
            scratch[first + lane * WORDS + number] = word
        cuda.syncthreads()

        def element(holder: int, number: int, k: int) -> Any:
            word = int(scratch[first + holder * WORDS + number])
            return np.array([word >> 16 * (k % 2) & 0xFFFF], np.uint16).view(kind)[0]

        made = []
        for number, total in enumerate(words[WORDS:]):
            row, column = lane // 4 + 8 * (number // 2), 2 * (lane % 4) + number % 2
            for k in range(16):
                one = element(row % 8 * 4 + k % 8 // 2, row // 8 + 2 * (k // 8), k)
                two = element(column * 4 + k % 8 // 2, 4 + k // 8, k)
                total = np.float32(total + np.float32(one) * np.float32(two))
            made.append(total)
        cuda.syncthreads()
        return tuple(made)

    return multiplied


def _packed_simulated(dtype: str) -> Any:
    kind = np.dtype(learn(dtype))

    def packed(low: Any, high: Any) -> Any:
        return np.array([low, high], np.float32).astype(kind).view(np.uint32)[0]

    return packed


def _packed_of_gpu(dtype: str) -> Any:
    from llvmlite import ir
    from numba import types
    from numba.cuda.extending import intrinsic

    text = f"cvt.rn.{ {'float16': 'f16', 'bfloat16': 'bf16'}[dtype] }x2.f32 $0, $2, $1;"

    def packed(typing: Any, low: Any, high: Any) -> Any:
        def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            of = ir.FunctionType(ir.IntType(32), [ir.FloatType()] * 2)
            return builder.call(ir.InlineAsm(of, text, "=r,f,f", False), arguments)

        return types.uint32(types.float32, types.float32), emit

    packed.__name__ = f"packed_{dtype}"
    return intrinsic(packed)


def _of_gpu(dtype: str) -> Any:
    from llvmlite import ir
    from numba import types
    from numba.cuda.extending import intrinsic

    kind = {"float16": "f16", "bfloat16": "bf16"}[dtype]
    word, single = ir.IntType(32), ir.FloatType()
    operands = [[f"${n}" for n in part] for part in (range(4), range(4, 8), (8, 9), range(10, 14))]
    text = f"mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32 "
    text += ", ".join(f"{{{', '.join(part)}}}" for part in operands) + ";"
    constraints = ",".join(["=f"] * 4 + ["r"] * WORDS + ["f"] * 4)

    def multiplied(
        typing: Any, a0: Any, a1: Any, a2: Any, a3: Any, b0: Any, b1: Any,
        c0: Any, c1: Any, c2: Any, c3: Any, scratch: Any,
    ) -> Any:  # fmt: skip
        def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            made = ir.FunctionType(
                ir.LiteralStructType([single] * 4), [word] * WORDS + [single] * 4
            )
            step = ir.InlineAsm(made, text, constraints, True)
            found = builder.call(step, arguments[:-1], attrs=("convergent",))
            parts = [builder.extract_value(found, n) for n in range(4)]
            return context.make_tuple(builder, signature.return_type, parts)

        given = [types.uint32] * WORDS + [types.float32] * 4
        return types.UniTuple(types.float32, 4)(*given, scratch), emit

    multiplied.__name__ = f"multiplied_{dtype}"
    return intrinsic(multiplied)


MULTIPLIED = {
    f"multiplied_{dtype}": (_simulated if SIMULATED else _of_gpu)(dtype) for dtype in HALVES
} | {
    f"packed_{dtype}": (_packed_simulated if SIMULATED else _packed_of_gpu)(dtype)
    for dtype in HALVES
}
