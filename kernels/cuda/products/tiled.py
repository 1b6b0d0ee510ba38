"""Products c[b, m, n] = sum over k of a[b, m, k] * b[b, k, n] through tiles in shared memory.

What m, n and k are is up to the operands: each is several axes, and an operand's place is a sum
over axes, of which some are windows, that have a place only where they lie inside. So a convolution
and its gradients are the same kernel as a matrix product, without a matrix of windows in memory. A
block has a tile of c; each thread keeps a few rows and columns of it in registers, and what threads
load together lies side by side where the operand's strides allow it. Halves are multiplied by
tensor cores, a warp's rows and columns at a time, and added in single precision; of matrices whose
rows are copied in pieces, tiles are loaded ahead (`staged.py`).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence, Set
from dataclasses import replace
from functools import cache
from typing import NamedTuple

from soapstone.kernels.cuda.elementwise.integers import INTEGERS
from soapstone.kernels.cuda.elementwise.pointwise import Writer
from soapstone.kernels.cuda.elementwise.text import Text, Value, wide
from soapstone.kernels.cuda.entry import DeviceEntry, Launch
from soapstone.kernels.cuda.products.operands import Axes, Operand, side_by_side, step
from soapstone.kernels.cuda.products.staged import (
    LARGE as STAGED,
    SMALL as STAGED_SMALL,
    Staged,
    rows_of,
)
from soapstone.kernels.cuda.substrate.arrays import View, reinterpreted, scratch
from soapstone.kernels.cuda.substrate.copying import COPYING
from soapstone.kernels.cuda.substrate.grid import flat_launch
from soapstone.kernels.cuda.substrate.target import SIMULATED, WARP, Kernel, built, processors
from soapstone.kernels.cuda.substrate.tensor_cores import MULTIPLIED, SCRATCH, serves
from soapstone.kernels.cuda.substrate.vectors import VECTORS, WIDTHS, load

THREADS = WARP if SIMULATED else 256  # of a block
TOGETHER = 2 if SIMULATED else 4  # neighbouring words of a tile that a thread reads at once
PART = 32 if SIMULATED else 128  # terms at least of a part of a sum that has blocks of its own


_MANY = 1 << 20  # more than a tile has along any axis
OWN = (("a", "m"), ("b", "n"))  # operands, and the axes that each has beside those of k


class Shape(NamedTuple):
    """How a block's threads share its tile of c.

    Attributes:
        kernel: the kernel's name. down, across: threads along m and n. each: rows and columns of
            one, a multiple of `TOGETHER`.
    """

    kernel: str
    down: int
    across: int
    each: int

    @property
    def tile(self) -> tuple[int, int]:
        """Rows and columns of a tile."""
        return self.down * self.each, self.across * self.each


SMALL = Shape("product", 4, 8, 2) if SIMULATED else Shape("product", 16, 16, 4)
LARGE = SMALL._replace(kernel="product_large", each=2 * SMALL.each)
FEW_ROWS = Shape("product_few", 2, 16, 2) if SIMULATED else Shape("product_few", 4, 64, 4)
# And for each the rate at which it multiplies, relative to the best.
SHAPES = {
    FEW_ROWS: 0.6,
    SMALL: 0.7,
    LARGE: 1.0,
    LARGE._replace(down=LARGE.down // 2, across=LARGE.across * 2): 1.0,
    LARGE._replace(down=LARGE.down * 2, across=LARGE.across // 2): 1.0,
}
SHAPES = {shape: rate for shape, rate in SHAPES.items() if max(shape.tile) <= THREADS}


class Sums:
    """How a block multiplies its tiles: each thread has some rows and columns of c.

    A thread's rows, and its columns, lie `TOGETHER` side by side, such pieces `down` and `across`
    of them apart: so neighbouring threads read neighbouring pieces.

    Attributes:
        high, wide, depth: of tiles, along m, n and k. together: elements along k that are one word
            of a tile. sums: of a thread: name, row and column in the block's tile.
        kernel: its name. head, body: statements before all tiles, and for each of them.
    """

    depth, together = 16, 1

    def __init__(self, kind: str, shape: Shape = SMALL) -> None:
        self.shape, self.kernel, self.word = shape, shape.kernel, kind
        self.high, self.wide = shape.tile
        self.rows = [f"row + {self._away(i, shape.down)}" for i in range(shape.each)]
        self.columns = [f"column + {self._away(j, shape.across)}" for j in range(shape.each)]
        self.sums = [
            (f"c{i}_{j}", row, column)
            for i, row in enumerate(self.rows)
            for j, column in enumerate(self.columns)
        ]
        self.head = [
            f"row = thread // {shape.across} * {TOGETHER}",
            f"column = thread % {shape.across} * {TOGETHER}",
        ]
        self.body = self.steps("c", together=16 // shape.each)

    @staticmethod
    def _away(number: int, threads: int) -> int:
        return number // TOGETHER * TOGETHER * threads + number % TOGETHER

    def steps(self, to: str, a: str = "a", first: str = "", together: int = 1) -> list[str]:
        """Return the statements that add the products of a pair of tiles to sums.

        to: what the sums' names begin with. a: the tile of rows. first: text of what is added to k
            there. together: steps along k that are one turn of a loop.
        """
        lines = [f"for k in range(0, {self.depth}, {together}):"]
        for further in range(together):
            k = f"k + {further}"
            body = self._read("a", a, first + k, self.rows) + self._read("b", "b", k, self.columns)
            for i, j in itertools.product(range(self.shape.each), repeat=2):
                name = f"{to}{i}_{j}"
                made = f"{name} + a{i} * b{j}"  # of integers Numba would make sums of 64 bits
                made = made if self.word[0] == "f" else f"{self.word}({made})"
                body.append(f"{name} = {made}")
            lines += ["    " + line for line in body]
        return lines

    def _read(self, name: str, tile: str, k: str, places: Sequence[str]) -> list[str]:
        """Return the statements that read a thread's rows or columns of a tile."""
        if TOGETHER not in WIDTHS:
            return [f"{name}{n} = {self.slot(tile, k, at)}" for n, at in enumerate(places)]
        return [
            load(
                [f"{name}{n + m}" for m in range(TOGETHER)], f"tile_{tile}", self.index(tile, k, at)
            )
            for n, at in enumerate(places)
            if n % TOGETHER == 0
        ]

    def pitch(self, name: str) -> int:
        """Return the words from one k to the next in a tile; those of columns are b's."""
        return (self.wide if name == "b" else self.high) + TOGETHER

    def words(self, name: str) -> int:
        """Return the words of a tile, in memory."""
        return self.depth * self.pitch(name)

    def index(self, name: str, k: str, at: str) -> str:
        """Return the text of a word's index in a tile."""
        return f"({k}) * {self.pitch(name)} + {at}"

    def slot(self, name: str, k: str, at: str) -> str:
        """Return the text of a word of a tile."""
        return f"tile_{name}[uint64({self.index(name, k, at)})]"  # which is not looked for a sign


class Fragments(Sums):
    """The same by tensor cores: a warp has 16 rows of c, and 8 columns as often as `EACH`.

    A row of a tile, or a column, has its words side by side, and four more: so the threads of a
    warp read from different banks.
    """

    MANY, EACH = ((1, 1), 2) if SIMULATED else ((4, 2), 4)  # warps along m and n; columns by 8
    depth, together, word, kernel = 32, 2, "uint32", "fragments"

    def __init__(self, dtype: str) -> None:
        down, across = self.MANY
        self.high, self.wide = down * 16, across * self.EACH * 8
        self.sums = [
            (f"c{j}_{n}", f"row + {n // 2 * 8}", f"column + {j * 8 + n % 2} + pair")
            for j in range(self.EACH)
            for n in range(4)
        ]
        self.head = [
            f"scratch = cuda.shared.array({SCRATCH}, uint32)",
            f"warp, group, near = thread // {WARP}, thread % {WARP} // 4, thread % 4",
            f"row, column = warp // {across} * 16 + group, warp % {across} * {self.EACH * 8}",
            "pair = near * 2",
        ]
        self.body = []
        for first in range(0, self.depth // 2, 8):
            near = [f"near + {first}", f"near + {first + 4}"]
            words = [self.slot("a", k, row) for k in near for row in ("row", "row + 8")]
            self.body += [f"a{n} = {word}" for n, word in enumerate(words)]
            for j in range(self.EACH):
                sums = ", ".join(f"c{j}_{n}" for n in range(4))
                words = [self.slot("b", k, f"column + {j * 8} + group") for k in near]
                self.body += [f"b{n} = {word}" for n, word in enumerate(words)]
                step = f"multiplied_{dtype}(a0, a1, a2, a3, b0, b1, {sums}, scratch)"
                self.body.append(f"{sums} = {step}")

    def words(self, name: str) -> int:
        """Return the words of a tile, in memory."""
        return (self.high if name == "a" else self.wide) * (self.depth // 2 + 4)

    def index(self, name: str, k: str, at: str) -> str:
        """Return the text of a word's index in a tile."""
        return f"({at}) * {self.depth // 2 + 4} + {k}"


@cache
def compiled(source: str) -> Kernel:
    """Return the kernel of a source text, which begins with its name."""
    name = source[len("def ") : source.index("(")]
    return built(name, source, **INTEGERS, **MULTIPLIED, **COPYING, **VECTORS)


def indices(number: str, axes: Axes, indent: str) -> list[str]:
    """Return the statements that make the axes' indices of a row-major number.

    Where 32 bits hold every number, it is divided in them: 64 take a hundred instructions.
    """
    lines, rest = [], number
    narrow = math.prod(extent for _, extent in axes) <= 2**32
    for name, extent in reversed(axes[1:]):
        quotient = f"int64(uint32({rest}) // uint32({extent}))" if narrow else f"{rest} // {extent}"
        lines.append(f"{indent}q{name} = {quotient}")
        lines.append(f"{indent}at_{name} = {rest} - q{name} * {extent}")
        rest = f"q{name}"
    return [*lines, f"{indent}at_{axes[0][0]} = {rest}"]


def _place(operand: Operand, name: str) -> tuple[str, list[str], str]:
    """Return the text of an element's index, the statements before it, and when there is one."""
    terms, before, tests = [f"o_{name}"], [], []
    terms += [f"at_{axis} * s_{name}_{axis}" for axis, step in operand.strides.items() if step]
    for n, window in enumerate(operand.windows):
        at = f"w_{name}_{n}"
        sum_of = " + ".join(f"at_{axis} * {step}" for axis, step in window.steps.items())
        before.append(f"{at} = {sum_of} + {window.shift}")
        if window.divisor > 1:
            tests.append(f"{at} >= 0 and {at} % {window.divisor} == 0")
            tests.append(f"{at} // {window.divisor} < {window.size}")
            terms.append(f"{at} // {window.divisor} * {window.stride}")
        else:
            tests.append(f"{at} >= 0 and {at} < {window.size}")
            terms.append(f"{at} * {window.stride}")
    return f"uint64({' + '.join(terms)})", before, " and ".join(tests)  # not looked for a sign


def product(
    a: Operand,
    b: Operand,
    c: Operand,
    axes: Mapping[str, Axes],
    writer: Writer | None = None,
    extras: Sequence[Operand] = (),
    kind: str | None = None,
) -> DeviceEntry:
    """Return the entry of a product.

    Args:
        a, b, c: operands along the axes of batch, m, n, k. axes: those, under b, m, n and k; each
            at least one. writer: statements from a sum, and the extras' values, to what is written
            to c. extras: along the axes of batch, m and n. kind: the type in which products are
            added, by default that of a.
    """
    counts = {key: math.prod(extent for _, extent in axes[key]) for key in "bmnk"}
    if counts["b"] * counts["m"] * counts["n"] == 0:
        return DeviceEntry(())
    kind = kind or wide(a.view.dtype)
    halves = kind == "float32" and a.view.dtype == b.view.dtype and serves(a.view.dtype)
    if not (halves and counts["k"]) and counts["n"] <= FEW_ROWS.tile[0] < counts["m"]:
        a, b, axes = b, a, {**axes, "m": axes["n"], "n": axes["m"]}  # a transpose of few rows
        counts |= {"m": counts["n"], "n": counts["m"]}
    by: Sums | Staged = Sums(kind, _shape(counts))
    if halves and counts["k"]:
        by = staged(a, b, axes, counts) or Fragments(a.view.dtype)
    if not isinstance(by, Sums) or by.together > 1:  # tiles have the bits of elements
        a, b = (replace(x, view=reinterpreted(x.view, "uint16")) for x in (a, b))
    operands = {"a": a, "b": b, "c": c, **{f"x{n}": one for n, one in enumerate(extras)}}
    parameters, arguments = [], []
    for name, operand in operands.items():
        parameters += [name, f"o_{name}"]
        # One without elements is never read.
        span = c.view.span if operand.view.span is None else operand.view.span
        arguments += [span, operand.view.offset]
        steps = {axis: stride for axis, stride in operand.strides.items() if stride}
        parameters += [f"s_{name}_{axis}" for axis in steps]
        arguments += steps.values()
    plain = {}
    if isinstance(by, Staged):
        parameters += [f"row_{name}" for name in "ab"]
        arguments += [by.steps[name] for name in "ab"]
    else:
        plain = {name: _steps(operands[name], axes[across], axes["k"]) for name, across in OWN}
        for name, found in plain.items():
            if found is not None:
                parameters += [f"across_{name}", f"deep_{name}"]
                arguments += found
    tiles = _tiles_of(counts, by.high, by.wide)
    splits = max(1, min(-(-processors() // tiles), counts["k"] // PART))
    each = -(-counts["k"] // splits // by.depth) * by.depth  # of a part's terms
    splits = -(-counts["k"] // each) if splits > 1 else 1
    lines = [
        f"def {by.kernel}(m_count, n_count, k_count, {', '.join(parameters)}):",
        "    thread = cuda.threadIdx.x",
        f"    tiles_m = (m_count + {by.high - 1}) // {by.high}",
        f"    tiles_n = (n_count + {by.wide - 1}) // {by.wide}",
        "    tile = cuda.blockIdx.x",  # along the other axes there are at most 65535 blocks
        f"    first_m = tile // tiles_n % tiles_m * {by.high}",
        f"    first_n = tile % tiles_n * {by.wide}",
        "    batch = tile // tiles_n // tiles_m",
        "    first_k = 0",
    ]
    if splits > 1:
        lines += [
            f"    part = batch // {counts['b']}",
            f"    batch -= part * {counts['b']}",
            f"    first_k = part * {each}",
            f"    k_count = min(k_count, first_k + {each})",
        ]
    lines += indices("batch", axes["b"], "    ")

    def stored(total: str, indent: str) -> list[str]:
        if splits == 1:
            return _stored(Value(total, kind), operands, axes, writer, indent)
        return [f"{indent}parts[(({row}) * m_count + m_at) * n_count + n_at] = {total}"]

    row, launches = f"part * {counts['b']} + batch", []
    if splits > 1:
        parts = scratch(splits * counts["b"] * counts["m"] * counts["n"], kind, c.view.span)
        lines[0] = lines[0].replace("(", "(parts, ", 1)
        launches.append(_together(parts, splits, counts, operands, axes, writer, kind))
    if isinstance(by, Staged):
        for name in "ab":
            terms = [
                f" + at_{axis} * s_{name}_{axis}"
                for axis, _ in axes["b"]
                if operands[name].strides.get(axis)
            ]
            lines.append(f"    o_{name} = o_{name}{''.join(terms)}")
        lines += ["    next_k = first_k", *("    " + line for line in by.start())]
        lines += [f"    {name} = {kind}(0)" for name in by.sums]
        lines += ["    " + line for line in (*by.loop(), *by.store(stored("total", "")))]
    else:
        lines += _tiles(by)
        lines += [f"    {name} = {kind}(0)" for name, _, _ in by.sums]
        lines += _loop(by, operands, axes, {name for name, found in plain.items() if found})
        for name, row_at, column_at in by.sums:
            lines += [f"    m_at = first_m + {row_at}", f"    n_at = first_n + {column_at}"]
            lines += ["    if m_at < m_count and n_at < n_count:", *stored(name, " " * 8)]
    kernel = compiled("\n".join(lines))
    given = (counts["m"], counts["n"], counts["k"], *arguments)
    given = (parts.span, *given) if splits > 1 else given
    return DeviceEntry((Launch(kernel, (tiles * splits,), (THREADS,), given), *launches))


def _steps(operand: Operand, across: Axes, deep: Axes) -> tuple[int, int] | None:
    """Return an operand's steps across k and along it, or None where it has several or windows."""
    wide_, along = step(operand, across), step(operand, deep)
    if operand.windows or wide_ is None or along is None:
        return None
    return wide_, along


def _tiles_of(counts: Mapping[str, int], high: int, wide_: int) -> int:
    return counts["b"] * -(-counts["m"] // high) * -(-counts["n"] // wide_)


def _shape(counts: Mapping[str, int]) -> Shape:
    """Return how threads share tiles: with the least time for all of them, or for their parts,
    which occupy all multiprocessors if there are enough."""

    def time(shape: Shape) -> float:
        tiles, (high, wide_) = _tiles_of(counts, *shape.tile), shape.tile
        idle = processors() / (tiles * max(1, counts["k"] // PART))
        return tiles * high * wide_ / SHAPES[shape] * max(1, idle)

    return min(SHAPES, key=time)


def _together(
    parts: View,
    splits: int,
    counts: Mapping[str, int],
    operands: Mapping[str, Operand],
    axes: Mapping[str, Axes],
    writer: Writer | None,
    kind: str,
) -> Launch:
    """Return the launch that adds the parts of sums, in order, and stores what is made of them."""
    parameters, arguments = [], []
    for name, operand in operands.items():
        if name in "ab":
            continue
        span = parts.span if operand.view.span is None else operand.view.span
        steps = {axis: stride for axis, stride in operand.strides.items() if stride}
        parameters += [name, f"o_{name}", *(f"s_{name}_{axis}" for axis in steps)]
        arguments += [span, operand.view.offset, *steps.values()]
    size = counts["b"] * counts["m"] * counts["n"]
    lines = [
        f"def sums(parts, splits, items, m_count, n_count, {', '.join(parameters)}):",
        "    item = cuda.grid(1)",
        "    while item < items:",
        f"        total = {kind}(0)",
        "        for part in range(splits):",
        f"            total = {kind}(total + parts[part * items + item])",
        "        n_at, row = item % n_count, item // n_count",
        "        m_at, batch = row % m_count, row // m_count",
        *indices("batch", axes["b"], " " * 8),
        *_stored(Value("total", kind), operands, axes, writer, " " * 8),
        "        item += cuda.gridsize(1)",
    ]
    grid, threads = flat_launch(size)
    given = (parts.span, splits, size, counts["m"], counts["n"], *arguments)
    return Launch(compiled("\n".join(lines)), (grid,), (threads,), given)


def staged(
    a: Operand, b: Operand, axes: Mapping[str, Axes], counts: Mapping[str, int]
) -> Staged | None:
    """Return how tiles of halves are loaded ahead, or None where they cannot be."""
    rows = {"a": rows_of(a, axes["m"], axes["k"]), "b": rows_of(b, axes["n"], axes["k"])}
    known = {name: found for name, found in rows.items() if found is not None}
    if len(known) < 2:
        return None
    large = Staged(a.view.dtype, STAGED, known)
    tiles = _tiles_of(counts, large.high, large.wide)
    return large if tiles >= processors() else Staged(a.view.dtype, STAGED_SMALL, known)


def _tiles(by: Sums) -> list[str]:
    """Return the statements that make room for a pair of tiles."""
    return [
        f"    tile_a = cuda.shared.array({by.words('a')}, {by.word}, 16)",
        f"    tile_b = cuda.shared.array({by.words('b')}, {by.word}, 16)",
        *("    " + line for line in by.head),
    ]


def _loop(
    by: Sums, operands: Mapping[str, Operand], axes: Mapping[str, Axes], plain: Set[str]
) -> list[str]:
    """Return the statements that add all products to the sums, a pair of tiles after the other.

    plain: operands with one step across k and one along it.
    """
    parts = [_loads(by, *own, operands[own[0]], axes, own[0] in plain) for own in OWN]
    before, reads, writes, after = ([x for part in parts for x in part[n]] for n in range(4))
    body = [*reads, *writes, "cuda.syncthreads()", *by.body, "cuda.syncthreads()"]
    lines = [*before, "while first_k < k_count:"]
    lines += ["    " + line for line in (*body, f"first_k += {by.depth}", *after)]
    return ["    " + line for line in lines]


def _loads(
    by: Sums, name: str, across: str, operand: Operand, axes: Mapping[str, Axes], plain: bool
) -> tuple[list[str], list[str], list[str], list[str]]:
    """Return the statements that fill an operand's tile: those before all tiles, that read words,
    that write them to the tile, and after each.

    All words that a thread reads have one place along k, or one across it, so the indices of that
    are made once.
    """
    size, words = by.high if name == "a" else by.wide, by.depth // by.together
    deep = side_by_side(operand, axes["k"]) <= side_by_side(operand, axes[across])
    length = words if deep else size  # of what neighbouring threads read side by side
    apart, turns = THREADS // length, range(-(-words * size // THREADS))
    kk, mm = ("near", "far") if deep else ("far", "near")
    k_first = f"first_k + {kk}_{name} * {by.together}"
    before = [
        f"near_{name}, far_{name} = thread % {length}, thread // {length}",
        f"base_{name} = first_{across} + {mm}_{name}",
        f"room_{name} = int32(min({across}_count - base_{name}, {_MANY}))",
    ]
    if plain:
        steps = [f"at_{x} * s_{name}_{x}" for x, _ in axes["b"] if operand.strides.get(x)]
        steps += [f"base_{name} * across_{name}", f"({k_first}) * deep_{name}"]
        jump = f"across_{name}" if deep else f"{by.together} * deep_{name}"
        before += [f"from_{name} = {' + '.join([f'o_{name}', *steps])}"]
        before += [f"jump_{name} = {apart} * {jump}"]
    elif not deep:
        before += indices(f"base_{name}", axes[across], "")
    reads = [f"word_{name}{turn} = {by.word}(0)" for turn in turns]
    reads += [f"left_{name} = int32(min(k_count - ({k_first}), {_MANY}))"]
    place, windows, test = _place(operand, name)
    for n in range(by.together):
        if plain:
            reads += [f"at = from_{name} + {n} * deep_{name}"]
            place, windows, test = "uint64(at)", [], ""
        elif deep:
            reads += [f"k_at = {k_first} + {n}", *indices("k_at", axes["k"], "")]
        for turn in turns:
            further, terms = turn * apart, 0 if deep else turn * apart * by.together
            reads += [f"if left_{name} > {terms + n} and room_{name} > {further if deep else 0}:"]
            inner = list(windows)
            if not plain and deep:
                inner = [f"at = base_{name} + {further}", *indices("at", axes[across], ""), *inner]
            elif not plain:
                k_at = f"k_at = {k_first} + {terms + n}"
                inner = [k_at, *indices("k_at", axes["k"], ""), *inner]
            word, read = f"word_{name}{turn}", f"{by.word}({name}[{place}])"
            read = f"{word} = " + (f"{by.word}({word} | {read} << {16 * n})" if n else read)
            inner += [f"if {test}:", f"    {read}"] if test else [read]
            reads += ["    " + line for line in inner]
            reads += [f"at += jump_{name}"] if plain and turn < turns[-1] else []
    writes = []
    for turn in turns:
        far = f"far_{name} + {turn * apart}"
        at = (f"near_{name}", far) if deep else (far, f"near_{name}")
        writes += [f"{by.slot(name, *at)} = word_{name}{turn}"]
    return before, reads, writes, [f"from_{name} += {by.depth} * deep_{name}"] if plain else []


def _stored(
    total: Value,
    operands: Mapping[str, Operand],
    axes: Mapping[str, Axes],
    writer: Writer | None,
    indent: str,
) -> list[str]:
    """Return the statements that store what is made of a sum at m_at and n_at."""
    lines = indices("m_at", axes["m"], indent) + indices("n_at", axes["n"], indent)
    c, text, made = operands["c"], Text(), total
    if writer is not None:
        values = []
        for name, extra in operands.items():
            if name[0] != "x":
                continue
            dtype = extra.view.dtype
            read = f"{name}[{_place(extra, name)[0]}]"
            read = f"{wide(dtype)}({read})" if wide(dtype) != dtype else read
            values.append(text.set(read, wide(dtype)))
        (made,) = writer(text, [total, *values])
    stored = text.cast(made, c.view.dtype).name
    lines += [indent + line for line in text.lines]
    return [*lines, f"{indent}c[{_place(c, 'c')[0]}] = {stored}"]
