"""Products of halves whose tiles are copied while others are multiplied; see `tiled.product`.

A block has three pairs of tiles in shared memory: what is multiplied, and two whose copies are
under way. Operands are copied eight elements at a time, so they have to lie in rows of them along k
or across it.
"""

from __future__ import annotations

from collections.abc import Mapping

from soapstone.kernels.cuda.products.operands import Axes, Operand, step
from soapstone.kernels.cuda.substrate.copying import LAST, NEXT, ROW, SCRATCH, WORDS, exchanged
from soapstone.kernels.cuda.substrate.target import SIMULATED, WARP
from soapstone.kernels.cuda.substrate.tensor_cores import SCRATCH as HELD

STAGES, DEPTH = 3, 32  # pairs of tiles; elements of them along k
MANY = (1, 1) if SIMULATED else (2, 4)  # warps along m and n
THREADS = MANY[0] * MANY[1] * WARP
# Tiles of 16 x 16 that a warp has along m and n: of large products, and of those with few tiles.
LARGE, SMALL = ((2, 1), (1, 1)) if SIMULATED else ((4, 2), (2, 1))


def rows_of(operand: Operand, across: Axes, deep: Axes) -> tuple[bool, int] | None:
    """Return whether an operand's rows lie along k, and the step from row to row.

    None where it is not copied in pieces: it has windows, or rows that begin anywhere.
    """
    steps = step(operand, across), step(operand, deep)
    if operand.windows or None in steps or operand.view.span is None:
        return None
    others = [s for name, s in operand.strides.items() if name not in dict((*across, *deep))]
    if any(each % WORDS for each in (operand.view.offset, *others)) or not operand.view.aligned(16):
        return None
    for along_k, one, row in ((True, steps[1], steps[0]), (False, steps[0], steps[1])):
        if one == 1 and row is not None and row % WORDS == 0:
            return along_k, row
    return None


class Staged:
    """How a block multiplies tiles of halves.

    Args:
        dtype: of operands. many: tiles of 16 x 16 of a warp along m and n.
        rows: of a and b, see `rows_of`.

    Attributes:
        kernel: its name. high, wide, depth: of tiles, along m, n and k. sums: names of a thread's.
        steps: from row to row of a and b.
    """

    depth = DEPTH

    def __init__(
        self, dtype: str, many: tuple[int, int], rows: Mapping[str, tuple[bool, int]]
    ) -> None:
        self.dtype, self.many = dtype, many
        self.kernel = "staged" if many == LARGE else "staged_small"
        self.high, self.wide = MANY[0] * many[0] * 16, MANY[1] * many[1] * 16
        self.deep = {name: deep for name, (deep, _) in rows.items()}
        self.steps = {name: row for name, (_, row) in rows.items()}
        self.size = DEPTH * (self.high + self.wide)  # words of a pair of tiles
        self.sums = [
            f"c{i}_{j}_{n}" for i in range(many[0]) for j in range(2 * many[1]) for n in range(4)
        ]

    def place(self, name: str, at: str, k: str) -> str:
        """Return the text of a word's index in a tile: of row or column `at`, and element `k`."""
        length = DEPTH if self.deep[name] else self.high if name == "a" else self.wide
        row, along = (at, k) if self.deep[name] else (k, at)
        begin = "" if name == "a" else f"{DEPTH * self.high} + "
        return begin + exchanged(row, along, length)

    def start(self) -> list[str]:
        """Return the statements before the first tiles."""
        down, across = self.many[0] * 16, self.many[1] * 16
        lines = [
            f"tiles = cuda.shared.array({max(STAGES * self.size, 2 * self.room)}, uint16, 16)",
            f"scratch = cuda.shared.array({HELD}, uint32)",
            f"places = cuda.shared.array({SCRATCH}, int64)",
            f"warp, lane = thread >> 5, thread & {WARP - 1}",
            f"warp_m, warp_n = warp // {MANY[1]}, warp % {MANY[1]}",
            f"row, column = warp_m * {down}, warp_n * {across}",
            *self._lanes(),
        ]
        for name, across_name, size in (("a", "m", self.high), ("b", "n", self.wide)):
            pieces = (DEPTH if self.deep[name] else size) // WORDS
            for n in range(DEPTH * size // WORDS // THREADS):
                number = f"(thread + {n * THREADS})" if n else "thread"
                lines += [f"r = {number} // {pieces}", f"p = {number} % {pieces} * {WORDS}"]
                at, k = ("r", "p") if self.deep[name] else ("p", "r")
                lines += [
                    f"to_{name}{n} = {self.place(name, at, k)}",
                    f"k_{name}{n} = {k}",
                    f"at = first_{across_name} + {at}",
                    f"left_{name}{n} = min(max({across_name}_count - at, 0), {WORDS})",
                    f"from_{name}{n} = o_{name} + at * {self._step(name, False)}",
                ]
        lines += ["writing = 0"]
        for _ in range(STAGES - 1):
            lines += self._copies()
        return lines

    def _step(self, name: str, of_k: bool) -> str:
        """Return the text of an operand's step along k, or across it."""
        return "1" if self.deep[name] == of_k else f"row_{name}"

    def _lanes(self) -> list[str]:
        """Return the statements that say which row of which matrix a lane loads."""
        # Matrices of a follow one another along m, then k; those of b along k, then n.
        a = (f"{NEXT} + {ROW}", LAST) if self.deep["a"] else (NEXT, f"{LAST} + {ROW}")
        b = (f"{LAST} + {ROW}", NEXT) if self.deep["b"] else (LAST, f"{NEXT} + {ROW}")
        return [
            f"a_at, a_k = row + {a[0]}, {a[1]}",
            f"b_at, b_k = column + {b[0]}, {b[1]}",
        ]

    def _copies(self) -> list[str]:
        """Return the statements that start the copies of the tiles from `next_k` on."""
        lines = []
        for name, size in (("a", self.high), ("b", self.wide)):
            for n in range(DEPTH * size // WORDS // THREADS):
                k = f"next_k + k_{name}{n}"
                if self.deep[name]:
                    count = f"min(max(k_count - ({k}), 0), {WORDS}) if left_{name}{n} > 0 else 0"
                else:
                    count = f"left_{name}{n} if {k} < k_count else 0"
                index = f"from_{name}{n} + ({k}) * {self._step(name, True)}"
                lines += [
                    f"count = {count}",
                    f"index = {index} if count > 0 else 0",
                    f"copied(tiles, uint32(writing + to_{name}{n}), {name}, index, uint32(count))",
                ]
        lines += ["committed()", f"next_k += {DEPTH}", f"writing += {self.size}"]
        return [*lines, f"if writing == {STAGES * self.size}:", "    writing = 0"]

    def loop(self) -> list[str]:
        """Return the statements that add all products to the sums."""
        lines = ["reading = 0", "while first_k < k_count:"]
        body = [f"waited{STAGES - 2}()", "cuda.syncthreads()", *self._copies()]
        for k in range(0, DEPTH, 16):
            for i in range(self.many[0]):
                at = self.place("a", f"a_at + {16 * i}", f"a_k + {k}")
                load = "fragments" if self.deep["a"] else "crossed"
                body.append(
                    f"a{i}0, a{i}1, a{i}2, a{i}3 = {load}(tiles, uint32(reading + {at}), places)"
                )
            for j in range(self.many[1]):
                at = self.place("b", f"b_at + {16 * j}", f"b_k + {k}")
                load = "fragments" if self.deep["b"] else "crossed"
                body.append(f"b0, b1, b2, b3 = {load}(tiles, uint32(reading + {at}), places)")
                for i in range(self.many[0]):
                    for half in range(2):
                        sums = ", ".join(f"c{i}_{2 * j + half}_{n}" for n in range(4))
                        words = ", ".join(f"a{i}{n}" for n in range(4))
                        words += f", b{2 * half}, b{2 * half + 1}"
                        body.append(f"{sums} = multiplied_{self.dtype}({words}, {sums}, scratch)")
        body += [f"first_k += {DEPTH}", f"reading += {self.size}"]
        body += [f"if reading == {STAGES * self.size}:", "    reading = 0"]
        return [*lines, *("    " + line for line in body)]

    @property
    def room(self) -> int:
        """Sums of the warps beside one another along n, which are stored together."""
        return self.many[0] * 16 * self.wide

    def store(self, write: list[str]) -> list[str]:
        """Return the statements that store the sums, those of one row of warps at a time.

        write: statements that store `total`, at m_at and n_at where these are within counts.
        """
        down = self.many[0] * 16
        lines = ["waited0()", f"for part in range({MANY[0]}):", "    cuda.syncthreads()"]
        lines += ["    if warp_m == part:"]
        for name in self.sums:
            i, j, n = map(int, name[1:].split("_"))
            row = f"((lane >> 2) + {16 * i + n // 2 * 8})"
            column = f"column + {8 * j + n % 2} + (lane & 3) * 2"
            lines.append(f"        put(tiles, {row} * {self.wide} + {column}, {name})")
        lines += ["    cuda.syncthreads()", f"    for turn in range({self.room // THREADS}):"]
        body = [
            f"number = thread + turn * {THREADS}",
            f"m_at = first_m + part * {down} + number // {self.wide}",
            f"n_at = first_n + number % {self.wide}",
            "if m_at < m_count and n_at < n_count:",
            "    total = got(tiles, number)",
            *("    " + line for line in write),
        ]
        return [*lines, *(" " * 8 + line for line in body)]
