"""How a block computes a tile of scores and what they weigh: in registers, or by tensor cores.

A block owns rows, such as queries, and walks over others, such as keys. A tile of scores has a row
for each that it owns and a column for each other one; both ways say which of its elements a thread
has, and write the statements for two products: `scores` of rows by rows, and `mixed`, what weights
make of other rows. Single precision takes tiles of operands through shared memory, a few elements
at a time. Halves are copied there whole, while others are multiplied, and weights stay in
registers: of two neighbouring steps of tensor cores, the sums are what the next product takes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from soapstone.kernels.cuda.products.tiled import THREADS, Sums
from soapstone.kernels.cuda.substrate.copying import (
    LAST,
    NEXT,
    ROW,
    SCRATCH,
    WORDS,
    exchanged,
)
from soapstone.kernels.cuda.substrate.folds import COMBINE
from soapstone.kernels.cuda.substrate.target import (
    FUNCTIONS,
    SIMULATED,
    TYPES,
    WARP,
    device,
    float32,
)
from soapstone.kernels.cuda.substrate.tensor_cores import SCRATCH as HELD

uint64 = TYPES["uint64"]
MOST_SHARED = 48 * 1024  # bytes of a block that are declared in its kernel
STEP = 16  # rows, or elements, of a step of tensor cores
WARPS, WIDE = ((1,), (STEP,)) if SIMULATED else ((4, 2), (64, 32, 16))  # of tiles, the best first
MOST_KEPT = 192  # elements of a row of results, and of two tiles beside it, in registers


def _chosen(condition: Any, one: Any, other: Any) -> Any:
    return one if condition else other


def _read(x: Any, at: Any, inside: Any) -> Any:
    return float32(x[uint64(at)]) if inside else float32(0)  # not looked for a sign


def _write(x: Any, at: Any, value: Any, inside: Any) -> None:
    if inside:
        x[uint64(at)] = value


# What would branch in a kernel: Numba takes many seconds for one of hundreds of branches.
BRANCHES = {
    "chosen": device(_chosen),
    "read": device(_read),
    "write": device(_write),
    "larger": COMBINE["max"],
    "fmax": FUNCTIONS["fmax"],
}


@dataclass(frozen=True)
class Rows:
    """Rows of one sample and head.

    Attributes:
        name: of the operand, in the kernel. count: text of how many there are. width: elements of
            one. dtype: their type.
    """

    name: str
    count: str
    width: int
    dtype: str

    def begin(self, row: str) -> str:
        """Return the text of the index of a row's first element."""
        return f"o_{self.name} + ({row}) * s_{self.name}_1"

    def element(self, row: str, number: str) -> str:
        """Return the text of an element's index."""
        return f"{self.begin(row)} + ({number}) * s_{self.name}_3"


class Element(NamedTuple):
    """A thread's element of a tile: its variable, which of the thread's rows, and its column."""

    name: str
    slot: int
    column: str


class Registers:
    """A thread has a few rows and columns, as of a product (`products.tiled`).

    Attributes:
        kernel: what its kernels' names begin with. high, wide: rows and columns of a tile.
        threads: of a block. lanes: neighbours that have a row. rows: texts of a thread's.
        copied: names of operands that are read as bits. most: elements at most of the rows of
            results, of which a thread has its part.
    """

    kernel, most = "attention", 128

    def __init__(self, own: Sequence[Rows], other: Sequence[Rows]) -> None:
        self.by = Sums("float32")
        self.high, self.wide, self.threads = self.by.high, self.by.wide, THREADS
        self.lanes, self.rows = self.by.shape.across, self.by.rows
        self.copied = frozenset[str]()
        self.parts = {each.name: -(-each.width // self.wide) for each in (*own, *other)}

    def elements(self, name: str) -> list[Element]:
        """Return a thread's elements of scores."""
        each = range(self.by.shape.each)
        return [Element(f"{name}{i}_{j}", i, self.by.columns[j]) for i in each for j in each]

    def sums(self, name: str, width: int) -> list[Element]:
        """Return a thread's elements of what is mixed of rows of a width."""
        found = []
        for part in range(-(-width // self.wide)):
            for each in self.elements(f"{name}{part}_"):
                found.append(each._replace(column=f"{each.column} + {part * self.wide}"))
        return found

    def start(self) -> list[str]:
        """Return the statements before all others."""
        by = self.by
        weights = by.wide * by.pitch("w")
        rooms = (("a", by.words("a")), ("b", by.words("b")), ("w", weights))
        return [
            *(f"tile_{name} = cuda.shared.array({words}, float32, 16)" for name, words in rooms),
            *by.head,
        ]

    def turn(self, needed: Rows | None, next_one: Rows | None, at: str = "other") -> list[str]:
        """Return the statements that wait for rows, and begin to copy others from `at` on."""
        return []

    def scores(self, to: str, own: Rows, other: Rows) -> list[str]:
        """Return the statements that make scores of rows."""
        by = self.by
        return [
            *(f"{each.name} = float32(0)" for each in self.elements(to)),
            f"for deep in range(0, {own.name}_width, {by.depth}):",  # not unrolled
            *("    " + line for line in self._loaded("a", by.high, own, "first", "deep")),
            *("    " + line for line in self._loaded("b", by.wide, other, "other", "deep")),
            "    cuda.syncthreads()",
            *("    " + line for line in by.steps(to)),
            "    cuda.syncthreads()",
        ]

    def mixed(self, to: str, weights: str, other: Rows) -> list[str]:
        """Return the statements that add other rows, times their weights, to sums."""
        by = self.by
        lines = [
            f"{by.slot('w', each.column, self.rows[each.slot])} = {each.name}"
            for each in self.elements(weights)
        ]
        for part in range(self.parts[other.name]):
            first = str(part * self.wide)
            lines += [
                f"for deep in range(0, min({self.wide}, {other.count} - other), {by.depth}):",
                *("    " + line for line in self._loaded("b", by.wide, other, "deep", first)),
                "    cuda.syncthreads()",
                *("    " + line for line in by.steps(f"{to}{part}_", "w", "deep + ")),
                "    cuda.syncthreads()",
            ]
        return lines

    def _loaded(self, tile: str, size: int, rows: Rows, first: str, element: str) -> list[str]:
        """Return the statements that fill a tile: `depth` elements of rows from `first` on, or of
        so many other rows from `first` on the elements from a number on.
        """
        by, lines, deep = self.by, list[str](), not element.isdigit()
        for load in range(-(-by.depth * size // THREADS)):
            number = f"(thread + {load * THREADS})" if load else "thread"
            across, along = (by.depth, "kk") if deep else (size, "mm")
            lines += [f"{along} = {number} % {across}"]
            lines += [f"{'mm' if deep else 'kk'} = {number} // {across}"]
            row = f"{first} + mm" if deep else f"other + {first} + kk"
            lines += [
                f"at_row, at_element = {row}, {element} + {along}",
                f"inside = (at_row < {rows.count}) & (at_element < {rows.name}_width)",
                f"word = read({rows.name}, {rows.element('at_row', 'at_element')}, inside)",
                f"{by.slot(tile, 'kk', 'mm')} = word",
            ]
        return lines


class Fragments:
    """A warp has 16 rows, of which a thread has two, and in them two columns of each eight.

    Args:
        dtype: of operands. own, other: rows that lie in pieces of eight elements. kept: elements of
            the rows of results, of which a thread has its part in registers. widest: columns at
            most of a tile of scores.

    Attributes: see `Registers`.
    """

    kernel, most = "attention_halves", 256
    lanes = 4

    def __init__(
        self, dtype: str, own: Sequence[Rows], other: Sequence[Rows], kept: int, widest: int
    ) -> None:
        self.dtype = dtype
        self.length = {each.name: _length(each.width) for each in (*own, *other)}
        self.copied = frozenset(self.length)
        owned, walked = (sum(self.length[each.name] for each in side) for side in (own, other))
        fitting = (
            (warps, wide)
            for warps in WARPS
            for wide in WIDE
            if wide <= widest
            and 2 * (warps * STEP * owned + wide * walked) <= MOST_SHARED
            and (kept + 2 * wide <= MOST_KEPT or wide == WIDE[-1])
        )
        warps, self.wide = next(fitting)
        self.high, self.threads = warps * STEP, warps * WARP
        self.rows = ["row + group", "row + group + 8"]
        self.own, self.begin, self.words = own, dict[str, int](), 0
        for size, side in ((self.high, own), (self.wide, other)):
            for each in side:
                self.begin[each.name] = self.words
                self.words += size * self.length[each.name]

    def elements(self, name: str) -> list[Element]:
        """Return a thread's elements of scores."""
        return self.sums(name, self.wide)

    def sums(self, name: str, width: int) -> list[Element]:
        """Return a thread's elements of what is mixed of rows of a width."""
        return [
            Element(f"{name}{j}_{n}", n // 2, f"column + {8 * j + n % 2}")
            for j in range(2 * -(-width // STEP))
            for n in range(4)
        ]

    def start(self) -> list[str]:
        """Return the statements before all others, which begin to copy the rows that are owned."""
        lines = [
            f"tiles = cuda.shared.array({self.words}, uint16, 16)",
            f"scratch = cuda.shared.array({HELD}, uint32)",
            f"places = cuda.shared.array({SCRATCH}, int64)",
            f"lane = thread & {WARP - 1}",
            f"row, group, column = thread // {WARP} * {STEP}, lane >> 2, (lane & 3) * 2",
        ]
        for name, length in self.length.items():
            begin = self.begin[name]
            if name in [each.name for each in self.own]:
                lines += [
                    f"a_{name} = {begin} + {exchanged(f'row + {NEXT} + {ROW}', LAST, length)}"
                ]
            else:
                lines += [f"b_{name} = {begin} + {exchanged(f'{LAST} + {ROW}', NEXT, length)}"]
                lines += [f"c_{name} = {begin} + {exchanged(f'{NEXT} + {ROW}', LAST, length)}"]
        for each in self.own:
            lines += self._copies(each, self.high, "first")
        return lines

    def turn(self, needed: Rows | None, next_one: Rows | None, at: str = "other") -> list[str]:
        """Return the statements that wait for rows, and begin to copy others from `at` on.

        Nobody reads these any more once all threads have come here.
        """
        lines = ["waited0()"] if needed else []
        lines += ["cuda.syncthreads()"]
        return [*lines, *(self._copies(next_one, self.wide, at) if next_one else [])]

    def _copies(self, rows: Rows, size: int, first: str) -> list[str]:
        """Return the statements that begin to copy rows from `first` on."""
        length, lines = self.length[rows.name], []
        pieces = -(-rows.width // STEP) * (STEP // WORDS)
        for turn in range(-(-size * pieces // self.threads)):
            number = f"(thread + {turn * self.threads})" if turn else "thread"
            left = f"min(max({rows.width} - p, 0), {WORDS})"
            place = f"{self.begin[rows.name]} + {exchanged('r', 'p', length)}"
            copy = [
                f"count = chosen({first} + r < {rows.count}, {left}, 0)",
                f"index = chosen(count > 0, {rows.begin(f'{first} + r')} + p, 0)",
                f"copied(tiles, uint32({place}), {rows.name}, index, uint32(count))",
            ]
            if (turn + 1) * self.threads > size * pieces:
                copy = [f"if {number} < {size * pieces}:", *("    " + line for line in copy)]
            lines += [f"r, p = {number} // {pieces}, {number} % {pieces} * {WORDS}", *copy]
        return [*lines, "committed()"]

    def scores(self, to: str, own: Rows, other: Rows) -> list[str]:
        """Return the statements that make scores of rows."""
        lines = [f"{each.name} = float32(0)" for each in self.elements(to)]
        lines.append(f"for deep in range(0, {own.name}_width, {STEP}):")
        body = [f"a0, a1, a2, a3 = fragments(tiles, uint32(a_{own.name} ^ deep), places)"]
        for j in range(self.wide // STEP):
            at = f"(b_{other.name} ^ deep) + {STEP * j * self.length[other.name]}"
            body.append(f"b0, b1, b2, b3 = fragments(tiles, uint32({at}), places)")
            body += self._steps(to, j)
        return [*lines, *("    " + line for line in body)]

    def mixed(self, to: str, weights: str, other: Rows) -> list[str]:
        """Return the statements that add other rows, times their weights, to sums."""
        lines = []
        for k in range(self.wide // STEP):
            for n in range(4):
                low, high = (f"{weights}{2 * k + n // 2}_{n % 2 * 2 + m}" for m in range(2))
                lines.append(f"a{n} = packed_{self.dtype}({low}, {high})")
            for j in range(-(-other.width // STEP)):
                at = f"(c_{other.name} ^ {STEP * j}) + {STEP * k * self.length[other.name]}"
                lines.append(f"b0, b1, b2, b3 = crossed(tiles, uint32({at}), places)")
                lines += self._steps(to, j)
        return lines

    def _steps(self, to: str, j: int) -> list[str]:
        """Return the statements that add to sums of sixteen columns, a step for each eight."""
        lines = []
        for half in range(2):
            sums = ", ".join(f"{to}{2 * j + half}_{n}" for n in range(4))
            words = f"a0, a1, a2, a3, b{2 * half}, b{2 * half + 1}"
            lines.append(f"{sums} = multiplied_{self.dtype}({words}, {sums}, scratch)")
        return lines


def _length(width: int) -> int:
    """Return the words of a row in shared memory: the least power of two from 16 on."""
    return max(STEP, 1 << (width - 1).bit_length())
