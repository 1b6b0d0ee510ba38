"""How near to memory's speed a large decoder's layer reads its weights for one token.

    python benchmarks/execution/decoding_layer.py [--bits 4,8,32] [--rounds 5] [--threads 2]

A layer of a model of seven billion parameters is seven products, each of what the one before made:
a run takes long enough that waking threads does not count, and leaves nothing in caches for the
next. What it is held against is a loop that reads the same bytes by as many threads, in its turns.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from llvmlite import ir

sys.path.append(str(Path(__file__).resolve().parents[1]))

from arguments import common
from harness import in_turns, median, serve, show, write

from soapstone.kernels.cpu.products.panels_lanes import stretch
from soapstone.native.blocks import Fields
from soapstone.native.entries import native
from soapstone.native.lanes import I32, I64, LANES, Lanes, load_lanes, prefetch
from soapstone.native.memory import aligned_array, run
from soapstone.native.simd import vectorised
from soapstone.native.threads.parallel import parallel_for
from soapstone.system import usable_cores

WIDTH, INNER, BLOCK, LAYERS = 4096, 11008, 128, 2
# Depth and columns: four of attention, two into the inner width, and the one back.
PRODUCTS = [(WIDTH, WIDTH)] * 4 + [(WIDTH, INNER), (WIDTH, INNER), (INNER, WIDTH)]
_STREAMS, _LINES, _AHEAD = (
    4,
    2,
    32,
)  # lines of 64 bytes: at a time, and asked for before they are read
_PIECE = 64 * _LINES
_READ = Fields("x to")
_read_of = _READ.at


def _joined(x: Lanes, begin: Lanes, end: Lanes) -> Lanes:
    """Return the bits of some pieces joined to one number.

    They are read in streams side by side, as products read theirs: prefetchers end at a page.
    """
    zero = Lanes(x.builder, ir.Constant(ir.VectorType(I32, LANES), [0] * LANES))
    length = (end - begin) >> (_STREAMS.bit_length() - 1)

    def some(k: Lanes, held: list[Lanes]) -> list[Lanes]:
        made = []
        for which, each in enumerate(held):
            stream, line = divmod(which, _LINES)
            at = x + (begin + length * stream + k) * _PIECE + 64 * line
            prefetch(at + 64 * _AHEAD)
            made.append(each | load_lanes(at, 0, I32))
        return made

    none = [zero] * (_STREAMS * _LINES)
    first, *rest = stretch(x.builder, (I64(0), length.value), 1, none, some)
    for each in rest:
        first = first | each
    return first.fold(lambda p, q: p | q)


_join = vectorised(_joined)


@native("body")
def read(block: Any, begin: int, end: int) -> int:
    w = _read_of(block)
    return 0 if _join(w.x, begin, end) != 0 else 1


def reading(nbytes: int, threads: int) -> Any:
    """Return what reads so many bytes."""
    held = aligned_array((nbytes,), np.uint8)
    held[:] = 1
    entry = parallel_for(read, _READ.pack(x=held, to=0), nbytes // _PIECE, threads)
    return lambda: run(entry)


def layers(bits: int, threads: int) -> Any:
    """Return what runs the layers for one row, with weights of so many bits, of 32 in float32."""
    from soapstone import GraphBuilder, InferenceSession
    from soapstone.ir.tensor import Role

    random, builder = np.random.default_rng(0), GraphBuilder("layers")
    weights: dict[str, Any] = {}

    def times(x: str, depth: int, columns: int) -> str:
        name, spread = f"w{len(weights)}", depth**-0.5
        if bits == 32:
            weights[name] = random.standard_normal((depth, columns), np.float32) * spread
            builder.input(name, (depth, columns), role=Role.PARAMETER)
            return builder.apply("matmul", x, name)[0]
        spread *= 12**0.5 / 2**bits  # of numbers that are drawn evenly
        w = random.integers(0, 256, (columns, depth // BLOCK, BLOCK * bits // 8), np.uint8)
        weights[name], scales = w, f"{name}.scales"
        weights[scales] = np.full(w.shape[:2], spread, np.float32)
        builder.input(name, w.shape, "uint8", Role.STATE)
        builder.input(scales, w.shape[:2], role=Role.PARAMETER)
        return builder.apply("matmul_nbits", x, name, scales, bits=bits)[0]

    x = builder.input("x", (1, WIDTH))
    for _ in range(LAYERS if bits < 32 else 1):
        for depth, columns in PRODUCTS[:4]:
            x = times(x, depth, columns)
        both = [times(x, depth, columns) for depth, columns in PRODUCTS[4:6]]
        x = times(builder.apply("add", *both)[0], *PRODUCTS[6])
    builder.output(x)
    session = InferenceSession(builder.build(), weights, threads=threads)
    given = {"x": random.standard_normal((1, WIDTH), np.float32)}
    return lambda: session.run(given)


def bytes_of(bits: int) -> int:
    """Return the bytes of the weights, with a float32 scale for each block of those of few bits."""
    numbers = sum(depth * columns for depth, columns in PRODUCTS)
    if bits == 32:
        return 4 * numbers
    return LAYERS * numbers * (BLOCK * bits // 8 + 4) // BLOCK


def peer(bits: int, threads: int) -> None:
    """Be the products, and the loop that reads as many bytes, in turns."""
    runs = {"ms": layers(bits, threads), "read_ms": reading(bytes_of(bits), threads)}
    for each in runs.values():
        each()

    def best() -> dict[str, float]:
        least = dict.fromkeys(runs, float("inf"))
        for _ in range(10):
            for name, each in runs.items():
                start = time.perf_counter()
                each()
                least[name] = min(least[name], 1e3 * (time.perf_counter() - start))
        return least

    serve(best)


def main() -> None:
    parser = common(__doc__, rounds=5, threads=usable_cores())
    parser.add_argument("--bits", default="4,8,32")
    parser.add_argument("--peer", action="store_true", help="be the one that is measured")
    options = parser.parse_args()
    widths = [int(each) for each in options.bits.split(",")]
    if options.peer:
        peer(widths[0], options.threads)
        return
    rows = []
    for bits in widths:
        command = [sys.executable, __file__, "--threads", str(options.threads), "--peer", "--bits"]
        found = in_turns({"layer": [*command, str(bits)]}, options.rounds)["layer"]
        least = {name: min(each[name] for each in found) for name in ("ms", "read_ms")}
        held = 1 if bits == 32 else LAYERS
        row = {
            "bits": bits,
            "layer ms": least["ms"] / held,
            "read ms": least["read_ms"] / held,
            "GB/s": bytes_of(bits) / least["ms"] / 1e6,
            "read GB/s": bytes_of(bits) / least["read_ms"] / 1e6,
            "of memory's time": least["ms"] / least["read_ms"],
            "median of it": median([{"r": e["ms"] / e["read_ms"]} for e in found], "r"),
        }
        rows.append(row)
        show(row)
    if not options.no_write:
        title = "A layer of seven billion parameters, one row, against reading its weights"
        command_line = "python benchmarks/execution/decoding_layer.py"
        write("decoding_layer", title, command_line, list(rows[0]), rows)


if __name__ == "__main__":
    main()
