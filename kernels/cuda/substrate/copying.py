"""What a pipeline of tiles is made of: copies to shared memory, begun ahead, and fragments.

A tile is shared memory of 16-bit words. `copied` starts a copy of eight of them, `committed` makes
a group of all that a thread has started, and `waited1` waits until all but the last one are there.
`fragments` gives a warp four matrices of 8 x 8 words, as tensor cores take them: lane n says where
row n % 8 of matrix n // 8 begins, and gets of each matrix the words 2 t and 2 t + 1 of row g, with
g = lane // 4 and t = lane % 4; `crossed` gives it those of column g. In the simulator copies are
done when they are waited for, so that a wait that is missing shows.

Source: NVIDIA, PTX ISA, "cp.async" and "ldmatrix".
"""

from __future__ import annotations

import threading
from functools import partial
from typing import Any

import numpy as np

from soapstone.kernels.cuda.substrate.target import SIMULATED, WARP, cuda

WORDS = 8  # of a copy, at a boundary of 16 bytes
LEFT = 4  # groups at most of which some are waited for
SCRATCH = WARP if SIMULATED else 1  # numbers of a warp that the simulator needs
# Of the four matrices that a warp loads at once: which row a lane names, and where matrices begin,
# of which the second one is next to the first, and the last two to these.
ROW, NEXT, LAST = "(lane & 7)", "((lane >> 3) & 1) * 8", "(lane >> 4) * 8"


def exchanged(row: str, along: str, length: int) -> str:
    """Return the text of a word's place in a tile of rows of `length`, 16 at least, a power of two.

    In a row the places of its pieces of eight are exchanged according to its number: the rows of a
    matrix that a warp loads at once then lie in different banks.
    """
    pieces = length // WORDS
    mask, shift = min(8, pieces) - 1, max(8 // pieces, 1).bit_length() - 1
    piece = f"((({along}) >> 3) ^ ((({row}) >> {shift}) & {mask}))"
    return f"({row}) * {length} + {piece} * {WORDS}"


def _simulated() -> dict[str, Any]:
    class Started(threading.local):
        """Copies of a thread: those of the group that is open, and groups."""

        def __init__(self) -> None:
            self.open: list[Any] = []
            self.groups: list[list[Any]] = []

    started = Started()

    def copied(tile: Any, at: Any, x: Any, index: Any, count: Any) -> None:
        assert at % WORDS == 0 and 0 <= count <= WORDS
        started.open.append((tile, int(at), x, int(index), int(count)))

    def committed() -> None:
        started.groups.append(started.open)
        started.open = []

    def waited(left: int) -> None:
        while len(started.groups) > left:
            for tile, at, x, index, count in started.groups.pop(0):
                for word in range(WORDS):
                    tile[at + word] = x[index + word] if word < count else 0

    def matrices(crossed: bool) -> Any:
        def fragments(tile: Any, at: Any, scratch: Any) -> tuple[Any, ...]:
            lane = int(cuda.threadIdx.x) % WARP
            first = int(cuda.threadIdx.x) // WARP * SCRATCH
            assert at % WORDS == 0
            scratch[first + lane] = at
            cuda.syncthreads()
            row, word = lane // 4, lane % 4 * 2
            made = []
            for n in range(4):
                places = (
                    [(word, row), (word + 1, row)] if crossed else [(row, word), (row, word + 1)]
                )
                low, high = (int(tile[int(scratch[first + n * 8 + r]) + c]) for r, c in places)
                made.append(np.uint32(low | high << 16))
            cuda.syncthreads()
            return tuple(made)

        return fragments

    def put(tile: Any, at: Any, value: Any) -> None:
        tile.view(np.float32)[int(at)] = value

    def got(tile: Any, at: Any) -> Any:
        return tile.view(np.float32)[int(at)]

    return {
        "copied": copied,
        "committed": committed,
        **{f"waited{left}": partial(waited, left) for left in range(LEFT)},
        "fragments": matrices(False),
        "crossed": matrices(True),
        "put": put,
        "got": got,
    }


def _of_gpu() -> dict[str, Any]:
    from llvmlite import ir
    from numba import types
    from numba.cuda.extending import intrinsic

    void, word, long = ir.VoidType(), ir.IntType(32), ir.IntType(64)
    shared = ir.PointerType(ir.IntType(8), 3)

    def asm(builder: Any, result: Any, text: str, constraints: str, *operands: Any) -> Any:
        of = ir.FunctionType(result, [each.type for each in operands])
        step = ir.InlineAsm(of, text, constraints, True)
        return builder.call(step, operands, attrs=("convergent",))

    def data(context: Any, builder: Any, kind: Any, value: Any) -> Any:
        return context.make_array(kind)(context, builder, value).data

    def place(context: Any, builder: Any, kind: Any, tile: Any, at: Any) -> Any:
        """Return the address of a word of a tile, in shared memory."""
        first = builder.ptrtoint(
            builder.addrspacecast(data(context, builder, kind, tile), shared), word
        )
        return builder.add(first, builder.shl(at, ir.Constant(word, 1)))

    def copied(typing: Any, tile: Any, at: Any, x: Any, index: Any, count: Any) -> Any:
        def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            to = place(context, builder, signature.args[0], *arguments[:2])
            first = data(context, builder, signature.args[2], arguments[2])
            source = builder.ptrtoint(builder.gep(first, [arguments[3]]), long)
            nbytes = builder.shl(arguments[4], ir.Constant(word, 1))
            text = "cp.async.cg.shared.global [$0], [$1], 16, $2;"
            asm(builder, void, text, "r,l,r,~{memory}", to, source, nbytes)
            return context.get_dummy_value()

        return types.void(tile, types.uint32, x, types.int64, types.uint32), emit

    def committed(typing: Any) -> Any:
        def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            asm(builder, void, "cp.async.commit_group;", "~{memory}")
            return context.get_dummy_value()

        return types.void(), emit

    def waits(left: int) -> Any:
        def waited(typing: Any) -> Any:
            def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
                asm(builder, void, f"cp.async.wait_group {left};", "~{memory}")
                return context.get_dummy_value()

            return types.void(), emit

        waited.__name__ = f"waited{left}"
        return intrinsic(waited)

    def matrices(name: str, kind: str) -> Any:
        text = f"ldmatrix.sync.aligned.m8n8.x4{kind}.shared.b16 {{$0, $1, $2, $3}}, [$4];"

        def fragments(typing: Any, tile: Any, at: Any, scratch: Any) -> Any:
            def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
                of = place(context, builder, signature.args[0], *arguments[:2])
                made = ir.LiteralStructType([word] * 4)
                found = asm(builder, made, text, "=r,=r,=r,=r,r,~{memory}", of)
                parts = [builder.extract_value(found, n) for n in range(4)]
                return context.make_tuple(builder, signature.return_type, parts)

            return types.UniTuple(types.uint32, 4)(tile, types.uint32, scratch), emit

        fragments.__name__ = name
        return intrinsic(fragments)

    def single(context: Any, builder: Any, kind: Any, tile: Any, at: Any) -> Any:
        first = data(context, builder, kind, tile)
        numbers = builder.bitcast(first, ir.PointerType(ir.FloatType()))
        return builder.gep(numbers, [at])

    def put(typing: Any, tile: Any, at: Any, value: Any) -> Any:
        def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            builder.store(arguments[2], single(context, builder, signature.args[0], *arguments[:2]))
            return context.get_dummy_value()

        return types.void(tile, types.int64, types.float32), emit

    def got(typing: Any, tile: Any, at: Any) -> Any:
        def emit(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            return builder.load(single(context, builder, signature.args[0], *arguments))

        return types.float32(tile, types.int64), emit

    return {
        **{each.__name__: intrinsic(each) for each in (copied, committed, put, got)},
        **{f"waited{left}": waits(left) for left in range(LEFT)},
        "fragments": matrices("fragments", ""),
        "crossed": matrices("crossed", ".trans"),
    }


COPYING = _simulated() if SIMULATED else _of_gpu()
