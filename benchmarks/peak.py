"""What a processor's cores multiply and add at most: the floor of whatever is made of products."""

from __future__ import annotations

import threading
import time
from typing import Any

import numba
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from soapstone.native.lanes import features

TURNS = 20_000_000
SUMS = 12  # independent, so that none waits for its last; with operands they fit 16 registers


def _lanes() -> int:
    return 16 if "avx512f" in features() else 8


@intrinsic  # type: ignore[untyped-decorator, unused-ignore]
def _multiply_and_add(typing: Any, turns: Any) -> Any:
    """Return a sum of `SUMS` vectors that were multiplied and added to so many times each."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind, count = ir.VectorType(ir.FloatType(), _lanes()), ir.IntType(64)
        name, form = f"llvm.fma.v{_lanes()}f32", ir.FunctionType(kind, [kind] * 3)
        fma = builder.module.globals.get(name) or ir.Function(builder.module, form, name)
        factor, term = (ir.Constant(kind, [value] * _lanes()) for value in (0.999, 0.5))
        before = builder.block
        loop, after = builder.append_basic_block("loop"), builder.append_basic_block("after")
        builder.branch(loop)
        builder.position_at_end(loop)
        turn, sums = builder.phi(count), [builder.phi(kind) for _ in range(SUMS)]
        made = [builder.call(fma, [total, factor, term]) for total in sums]
        following = builder.add(turn, count(1))
        turn.add_incoming(count(0), before)
        turn.add_incoming(following, loop)
        for number, (total, result) in enumerate(zip(sums, made)):
            total.add_incoming(ir.Constant(kind, [float(number)] * _lanes()), before)
            total.add_incoming(result, loop)
        builder.cbranch(builder.icmp_signed("<", following, args[0]), loop, after)
        builder.position_at_end(after)
        total = made[0]
        for result in made[1:]:
            total = builder.fadd(total, result)
        return builder.extract_element(total, ir.IntType(32)(0))

    return types.float32(types.int64), emit


@numba.njit(nogil=True)  # type: ignore[untyped-decorator, unused-ignore]
def _loop(turns: int) -> float:
    return _multiply_and_add(turns)  # type: ignore[no-any-return, unused-ignore]


def flops_per_s(threads: int) -> float:
    """Return the operations a second of as many threads, each in registers of its own.

    Float32; a multiplication and an addition are two.
    """
    _loop(1)
    workers = [threading.Thread(target=_loop, args=(TURNS,)) for _ in range(threads)]
    start = time.perf_counter()
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return threads * TURNS * SUMS * _lanes() * 2 / (time.perf_counter() - start)
