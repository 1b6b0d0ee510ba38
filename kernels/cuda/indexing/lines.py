"""The k greatest elements of a line, and blocks that each have a line or a part of one."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from soapstone.dtypes import kind_of
from soapstone.kernels.cuda.entry import DeviceEntry, Launch, Work
from soapstone.kernels.cuda.products.tiled import indices
from soapstone.kernels.cuda.substrate.arrays import View, reinterpreted, room, views
from soapstone.kernels.cuda.substrate.element import numbered, parameters, place
from soapstone.kernels.cuda.substrate.folds import MOST, SCANS, folds
from soapstone.kernels.cuda.substrate.grid import blocks_of, rounded
from soapstone.kernels.cuda.substrate.target import SIMULATED, WARP, Kernel, built, processors
from soapstone.kernels.cuda.substrate.vectors import VECTORS
from soapstone.kernels.entry import Call
from soapstone.kernels.registry import variant

ROUNDS = 4 if SIMULATED else 32  # that cost less than a look at each bit
_COUNT = 21  # bits of a count, three of which are in a word
# Elements of a part of a line, at least, and of one whose ranks are kept.
_PART, _KEPT = (8, 200) if SIMULATED else (1024, 4096)


@cache
def compiled(source: str) -> Kernel:
    """Return the kernel `line` of a source text."""
    scratch = MOST if SIMULATED else WARP
    return built("line", source, SCRATCH=scratch, **folds(False), **SCANS, **VECTORS)


def block_a_line(
    head: Sequence[str],
    body: Sequence[str],
    axis: int,
    operands: Mapping[str, View],
    shape: Sequence[int],
    parts: int = 1,
    each: int = 1,
) -> DeviceEntry:
    """Return the entry of a kernel whose blocks run statements for each line along an axis.

    Args:
        head: statements before, of shared memory. body: those of a line of `items` elements, in
            which at_0 and so on are its indices, that of the axis one of `parts` of the line.
        shape: of the whole. each: elements of a thread.
    """
    others = [(str(d), parts if d == axis else extent) for d, extent in enumerate(shape)]
    lines, items = math.prod(extent for _, extent in others), shape[axis]
    if lines == 0:
        return DeviceEntry(())
    names, values = parameters(operands)
    threads = rounded(-(-items // (parts * each)))
    text = [f"def line(lines, items, {', '.join(names)}):"]
    text += ["    " + line for line in head]
    text += ["    thread = cuda.threadIdx.x", "    number = cuda.blockIdx.x"]
    text += ["    while number < lines:"]
    text += indices("number", others, " " * 8)
    text += [" " * 8 + line for line in body]
    text += ["        number += cuda.gridDim.x"]
    grid = (blocks_of(lines * threads, threads),)
    launch = Launch(compiled("\n".join(text)), grid, (threads,), (lines, items, *values))
    return DeviceEntry((launch,))


def _ranked(dtype: str, largest: bool) -> list[str]:
    """Return the statements that make `rank` of an element's bits: the first of all has the least.

    Equal numbers have one rank, and NaN that of more than any number.
    """
    made = np.dtype(dtype)
    bits = made.itemsize * 8
    if kind_of(dtype) == "f":
        top = (1 << (bits - 1)) - 1
        infinite = int(np.array(np.inf, made).view(f"int{bits}"))
        lines = [
            f"size = rank & int64({top})",
            f"if size > int64({infinite}): rank = int64({top})",
            "elif size == 0: rank = int64(0)",
            f"elif rank < 0: rank = rank ^ int64({top})",
        ]
    elif dtype == "uint64":
        lines = [f"rank = rank ^ int64({-(1 << 63)})"]
    else:
        lines = []
    return [*lines, *(["rank = ~rank"] if largest else [])]


@dataclass(frozen=True)
class _Choice:
    """The k first of each line along an axis, or of each of its parts, side by side.

    Attributes:
        operands: x; bits, in which ranks are seen; values and chosen, the results; numbers, those
            of x's elements where they are not their indices.
    """

    operands: Mapping[str, View]
    axis: int
    k: int
    largest: bool
    parts: int = 1

    @property
    def items(self) -> int:
        """The elements of a part, at most."""
        return -(-self.operands["x"].shape[self.axis] // self.parts)

    @property
    def kept(self) -> bool:
        """Whether ranks are kept in shared memory, where each thread reads its own."""
        return self.items <= _KEPT

    def line(
        self, head: Sequence[str], body: Sequence[str], more: Mapping[str, View]
    ) -> DeviceEntry:
        """Return the entry of blocks that run statements for each part of `items` elements."""
        shape = self.operands["x"].shape
        extent, part = shape[self.axis], f"at_{self.axis}"
        cut = [
            f"begin = {part} * {extent} // {self.parts}",
            f"items = ({part} + 1) * {extent} // {self.parts} - begin",
        ]
        if self.kept:
            head = [*head, f"ranks = cuda.shared.array({self.items}, int64)"]
            cut += [
                "n = int64(thread)",
                "while n < items:",
                *("    " + line for line in self._found("n")),
                "    ranks[uint64(n)] = rank",
                "    n += cuda.blockDim.x",
            ]
        given = self.axis, {**self.operands, **more}, shape, self.parts
        return block_a_line(head, [*cut, *body], *given)

    def at(self, name: str, place_of: str) -> str:
        """Return the text of an element of the line."""
        here = numbered(len(self.operands["x"].shape))
        here[self.axis] = place_of
        return f"{name}[{place(name, here)}]"

    def rank(self, number: str) -> list[str]:
        """Return the statements that give `rank` of an element of the line."""
        return [f"rank = ranks[uint64({number})]"] if self.kept else self._found(number)

    def _found(self, number: str) -> list[str]:
        """Return the statements that make `rank` of an element's bits."""
        made = _ranked(self.operands["x"].dtype, self.largest)
        return [f"rank = int64({self.at('bits', f'begin + {number}')})", *made]

    def write(self, number: str, to: str) -> list[str]:
        """Return the statements that write an element of the line as one of the results."""
        to, number = f"at_{self.axis} * {self.k} + {to}", f"begin + {number}"
        named = self.at("numbers", number) if "numbers" in self.operands else number
        return [
            f"{self.at('values', to)} = {self.at('x', number)}",
            f"{self.at('chosen', to)} = {named}",
        ]


@variant("top_k", "numba", processor="cuda")
def top_k(call: Call) -> DeviceEntry:
    """Return the entry of the first k elements of each line.

    Of few lines, the first of parts are chosen before, and the first of these.
    """
    (x,), (values, chosen) = views(call)
    at, axis, k = call.attributes, call.attributes["axis"], call.attributes["k"]
    numbers: dict[str, View] = {}
    if values.size == 0:
        return DeviceEntry(())
    made: tuple[Work, ...] = ()
    extent = x.shape[axis]
    lines = x.size // extent
    parts = max(2 * processors() // lines, -(-extent // _KEPT))
    parts = min(parts, extent // max(4 * k, _PART))
    if parts > 1:
        shape = [parts * k if d == axis else e for d, e in enumerate(x.shape)]
        few, numbers = room(shape, x.dtype, x.span), {"numbers": room(shape, "int64", x.span)}
        made = _chosen(x, few, numbers["numbers"], at, {}, parts).launches
        x = few
    return DeviceEntry((*made, *_chosen(x, values, chosen, at, numbers).launches))


def _chosen(
    x: View,
    values: View,
    chosen: View,
    at: Mapping[str, Any],
    numbers: Mapping[str, View],
    parts: int = 1,
) -> DeviceEntry:
    """Return the entry of the first k elements of each line, or of each of its parts."""
    by_bits = kind_of(x.dtype) == "f" or x.dtype == "uint64"  # others are in int64 as they are
    bits = reinterpreted(x, f"int{8 * np.dtype(x.dtype).itemsize}") if by_bits else x
    operands = {"x": x, "bits": bits, "values": values, "chosen": chosen, **numbers}
    choice = _Choice(operands, at["axis"], at["k"], at["largest"], parts)
    if at["k"] <= ROUNDS:
        return _by_rounds(choice, at["sorted"])
    return _by_bits(choice, at["sorted"] and parts == 1)  # equal ones are in order of index anyway


def _by_rounds(choice: _Choice, in_order: bool) -> DeviceEntry:
    """Return the entry of k rounds over a line by a block: each finds the first after the last."""
    most = f"int64({np.iinfo(np.int64).max})"

    def rounds(after: str, better: str, put: Sequence[str]) -> list[str]:
        """Return k rounds: `after` says of which elements, `better` which of two comes first."""
        return [
            "taken = 0",
            f"while taken < {choice.k}:",
            f"    best, where = {most}, {most}",
            "    n = thread",
            "    while n < items:",
            *(" " * 8 + line for line in choice.rank("n")),
            f"        if ({after}) and ({better}): best, where = rank, n",
            "        n += cuda.blockDim.x",
            *("    " + line for line in put),
            "    taken += 1",
        ]

    write = ["if thread == 0:", *("    " + line for line in choice.write("where", "taken"))]
    pick = [
        "first = fold_min(best, scratch)",
        f"where = fold_min(where if best == first else {most}, scratch)",
        "last, place = first, where",
    ]
    later = "rank > last or (rank == last and n > place)"
    less = "rank < best or (rank == best and n < where)"
    body = [f"last, place = int64({np.iinfo(np.int64).min}), int64(-1)"]
    body += rounds(later, less, [*pick, *(write if in_order else [])])
    if not in_order:  # those up to the last one, by their indices
        inside = "n > before and (rank < last or (rank == last and n <= place))"
        again = ["where = fold_min(where, scratch)", "before = where", *write]
        body += ["before = int64(-1)", *rounds(inside, "n < where", again)]
    head = ["scratch = cuda.shared.array(SCRATCH, int64)"]
    return choice.line(head, body, {})


def _by_bits(choice: _Choice, in_order: bool) -> DeviceEntry:
    """Return the entry of a block that finds the k-th rank of its line by two bits at once.

    What has a lesser rank is taken, and the first of those that have it; then, in order, sorted.
    """
    x, k = choice.operands["x"], choice.k
    size, threads = np.dtype(x.dtype).itemsize, rounded(choice.items)
    bits = 64 if size == 8 else 8 * size + 2 * (x.dtype[0] == "u")  # of which one is the sign
    step = 2 if choice.items < 1 << _COUNT else 1  # bits at once, by counts side by side in a word
    ways = range(1, 1 << step)
    head = [
        "scratch = cuda.shared.array(SCRATCH, int64)",
        f"sums = cuda.shared.array({threads}, int64)",
    ]
    rank = choice.rank("n")
    body = [
        f"last, bit = int64({-(1 << (bits - 1))}), int64({bits - step})",
        "while bit >= 0:",
        "    less, n = int64(0), thread",
        *(f"    near_{way} = last + (int64({way}) << bit)" for way in ways),
        "    while n < items:",
        *(" " * 8 + line for line in rank),
        *(
            f"        less += int64({1 << _COUNT * (way - 1)}) if rank < near_{way} else int64(0)"
            for way in ways
        ),
        "        n += cuda.blockDim.x",
        "    less = fold_sum(less, scratch)",
        *(
            f"    if (less >> {_COUNT * (way - 1)}) & {(1 << _COUNT) - 1} < {k}: last = near_{way}"
            for way in ways
        ),
        f"    bit -= {step}",
        "less, n = int64(0), thread",
        "while n < items:",
        *("    " + line for line in rank),
        "    if rank < last: less += 1",
        "    n += cuda.blockDim.x",
        f"equal = {k} - fold_sum(less, scratch)",  # how many of the last rank are taken
        "before, chunk = int64(0), 0",  # those of lesser ranks, and in upper bits of the last one
        "while chunk < items:",
        "    n, value = chunk + thread, int64(0)",
        "    if n < items:",
        *(" " * 8 + line for line in rank),
        "        if rank < last: value = int64(1)",
        "        if rank == last: value = int64(1) << 32",
        "    sums[thread] = value",
        "    cuda.syncthreads()",
        "    step = 1",
        f"    while step < {threads}:",
        "        more = int64(0)",
        "        if thread >= step: more = sums[thread - step]",
        "        cuda.syncthreads()",
        "        sums[thread] = sums[thread] + more",
        "        cuda.syncthreads()",
        "        step = step * 2",
        "    here = before + sums[thread] - value",
        "    taken = (here & int64(0xFFFFFFFF)) + min(here >> 32, equal)",
        "    if value == 1 or (value > 1 and here >> 32 < equal):",
    ]
    put, more, sort = choice.write("n", "taken"), {}, []
    if in_order:
        power = 1 << (k - 1).bit_length()
        lines = math.prod(extent for d, extent in enumerate(x.shape) if d != choice.axis)
        shape = (blocks_of(lines * threads, threads) * power,)
        keys, places = (room(shape, "int64", x.span) for _ in range(2))
        more = {"keys": keys, "places": places}
        put = ["keys[own + taken] = rank", "places[own + taken] = n"]
        body.insert(0, f"own = cuda.blockIdx.x * {power}")
        sort = [
            *_sorted_by_pairs(power, k),
            "i = thread",
            f"while i < {k}:",
            *("    " + line for line in choice.write("places[own + i]", "i")),
            "    i += cuda.blockDim.x",
            "cuda.syncthreads()",
        ]
    body += [" " * 8 + line for line in put]
    body += [f"    before = before + sums[{threads - 1}]", "    cuda.syncthreads()"]
    body += [f"    chunk += {threads}", *sort]
    return choice.line(head, body, more)


def _sorted_by_pairs(power: int, count: int) -> list[str]:
    """Return the statements by which a block sorts `keys` and `places` from `own` on.

    power: a power of two of them, of which the first `count` are there. Batcher's bitonic network.
    """
    most = f"int64({np.iinfo(np.int64).max})"
    return [
        f"i = thread + {count}",
        f"while i < {power}:",
        f"    keys[own + i], places[own + i] = {most}, {most}",
        "    i += cuda.blockDim.x",
        "cuda.syncthreads()",
        "size = 2",
        f"while size <= {power}:",
        "    step = size // 2",
        "    while step > 0:",
        "        i = thread",
        f"        while i < {power}:",
        "            j = i ^ step",
        "            if j > i:",
        "                a, b = keys[own + i], keys[own + j]",
        "                c, d = places[own + i], places[own + j]",
        "                if (a > b or (a == b and c > d)) == ((i & size) == 0):",
        "                    keys[own + i], keys[own + j] = b, a",
        "                    places[own + i], places[own + j] = d, c",
        "            i += cuda.blockDim.x",
        "        cuda.syncthreads()",
        "        step = step // 2",
        "    size = size * 2",
    ]
