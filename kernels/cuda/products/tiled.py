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

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache

from soapstone.kernels.cuda.elementwise.integers import INTEGERS
from soapstone.kernels.cuda.elementwise.pointwise import Writer
from soapstone.kernels.cuda.elementwise.text import Text, Value, wide
from soapstone.kernels.cuda.entry import DeviceEntry, Launch
from soapstone.kernels.cuda.products.operands import Axes, Operand, side_by_side
from soapstone.kernels.cuda.products.staged import LARGE, SMALL, Staged, rows_of
from soapstone.kernels.cuda.substrate.arrays import reinterpreted
from soapstone.kernels.cuda.substrate.copying import COPYING
from soapstone.kernels.cuda.substrate.target import SIMULATED, WARP, Kernel, built, processors
from soapstone.kernels.cuda.substrate.tensor_cores import MULTIPLIED, SCRATCH, serves

THREADS = WARP if SIMULATED else 256  # of a block


class Sums:
    """How a block multiplies its tiles: each thread has `EACH` rows and columns of c.

    Attributes:
        high, wide, depth: of tiles, along m, n and k. together: elements along k that are one word
            of a tile. sums: of a thread: name, row and column in the block's tile.
        kernel: its name. head, body: statements before all tiles, and for each of them.
    """

    MANY = (4, 8) if SIMULATED else (16, 16)  # threads along m and n
    EACH = 2 if SIMULATED else 4
    depth, together, kernel = 16, 1, "product"

    def __init__(self, kind: str) -> None:
        each, (down, across) = self.EACH, self.MANY
        self.high, self.wide, self.word = down * each, across * each, kind
        names = [(f"c{i}_{j}", i, j) for i in range(each) for j in range(each)]
        self.sums = [(name, f"row + {i}", f"column + {j}") for name, i, j in names]
        self.head = [f"row = thread // {across} * {each}", f"column = thread % {across} * {each}"]
        self.body = self.steps("c")

    def steps(self, to: str, a: str = "a", first: str = "") -> list[str]:
        """Return the statements that add the products of a pair of tiles to sums.

        to: what the sums' names begin with. a: the tile of rows. first: text of what is added to k
            there.
        """
        lines, each = [f"for k in range({self.depth}):"], range(self.EACH)
        lines += [f"    a{i} = {self.slot(a, f'{first}k', f'row + {i}')}" for i in each]
        lines += [f"    b{j} = {self.slot('b', 'k', f'column + {j}')}" for j in each]
        for i in each:
            for j in each:
                name = f"{to}{i}_{j}"
                made = f"{name} + a{i} * b{j}"  # of integers Numba would make sums of 64 bits
                made = made if self.word[0] == "f" else f"{self.word}({made})"
                lines.append(f"    {name} = {made}")
        return lines

    def words(self, name: str) -> int:
        """Return the words of a tile, in memory."""
        return self.depth * ((self.high if name == "a" else self.wide) + 1)

    def slot(self, name: str, k: str, at: str) -> str:
        """Return the text of a word of a tile; those of columns are b's."""
        length = (self.wide if name == "b" else self.high) + 1
        return f"tile_{name}[uint64(({k}) * {length} + {at})]"  # which is not looked for a sign


class Fragments(Sums):
    """The same by tensor cores: a warp has 16 rows of c, and 8 columns as often as `EACH`.

    A row of a tile, or a column, has its words side by side, and four more: so the threads of a
    warp read from different banks.
    """

    MANY = (1, 1) if SIMULATED else (4, 2)  # warps along m and n
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

    def slot(self, name: str, k: str, at: str) -> str:
        """Return the text of a word of a tile."""
        return f"tile_{name}[uint64(({at}) * {self.depth // 2 + 4} + {k})]"


@cache
def compiled(source: str) -> Kernel:
    """Return the kernel of a source text, which begins with its name."""
    name = source[len("def ") : source.index("(")]
    return built(name, source, **INTEGERS, **MULTIPLIED, **COPYING)


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
    return " + ".join(terms), before, " and ".join(tests)


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
    by: Sums | Staged = Sums(kind)
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
        for axis, step in operand.strides.items():
            if step:
                parameters.append(f"s_{name}_{axis}")
                arguments.append(step)
    if isinstance(by, Staged):
        parameters += [f"row_{name}" for name in "ab"]
        arguments += [by.steps[name] for name in "ab"]
    lines = [
        f"def {by.kernel}(m_count, n_count, k_count, {', '.join(parameters)}):",
        "    thread = cuda.threadIdx.x",
        f"    tiles_m = (m_count + {by.high - 1}) // {by.high}",
        f"    tiles_n = (n_count + {by.wide - 1}) // {by.wide}",
        "    tile = cuda.blockIdx.x",  # along the other axes there are at most 65535 blocks
        f"    first_m = tile // tiles_n % tiles_m * {by.high}",
        f"    first_n = tile % tiles_n * {by.wide}",
        "    batch = tile // tiles_n // tiles_m",
        *indices("batch", axes["b"], "    "),
    ]

    def stored(total: str, indent: str) -> list[str]:
        return _stored(Value(total, kind), operands, axes, writer, indent)

    if isinstance(by, Staged):
        for name in "ab":
            terms = [
                f" + at_{axis} * s_{name}_{axis}"
                for axis, _ in axes["b"]
                if operands[name].strides.get(axis)
            ]
            lines.append(f"    o_{name} = o_{name}{''.join(terms)}")
        lines += ["    next_k = 0", *("    " + line for line in by.start())]
        lines += [f"    {name} = {kind}(0)" for name in by.sums]
        lines += ["    " + line for line in (*by.loop(), *by.store(stored("total", "")))]
    else:
        lines += _tiles(by)
        lines += [f"    {name} = {kind}(0)" for name, _, _ in by.sums]
        lines += _loop(by, operands, axes)
        for name, row, column in by.sums:
            lines += [f"    m_at = first_m + {row}", f"    n_at = first_n + {column}"]
            lines += ["    if m_at < m_count and n_at < n_count:", *stored(name, " " * 8)]
    grid = (-(-counts["n"] // by.wide) * -(-counts["m"] // by.high) * counts["b"],)
    kernel = compiled("\n".join(lines))
    launch = (counts["m"], counts["n"], counts["k"], *arguments)
    return DeviceEntry((Launch(kernel, grid, (THREADS,), launch),))


def staged(
    a: Operand, b: Operand, axes: Mapping[str, Axes], counts: Mapping[str, int]
) -> Staged | None:
    """Return how tiles of halves are loaded ahead, or None where they cannot be."""
    rows = {"a": rows_of(a, axes["m"], axes["k"]), "b": rows_of(b, axes["n"], axes["k"])}
    known = {name: found for name, found in rows.items() if found is not None}
    if len(known) < 2:
        return None
    large = Staged(a.view.dtype, LARGE, known)
    tiles = counts["b"] * -(-counts["m"] // large.high) * -(-counts["n"] // large.wide)
    return large if tiles >= processors() else Staged(a.view.dtype, SMALL, known)


def _tiles(by: Sums) -> list[str]:
    """Return the statements that make room for a pair of tiles."""
    return [
        f"    tile_a = cuda.shared.array({by.words('a')}, {by.word})",
        f"    tile_b = cuda.shared.array({by.words('b')}, {by.word})",
        *("    " + line for line in by.head),
    ]


def _loop(by: Sums, operands: Mapping[str, Operand], axes: Mapping[str, Axes]) -> list[str]:
    """Return the statements that add all products to the sums, a pair of tiles after the other."""
    lines = ["    first_k = 0", "    while first_k < k_count:"]
    inner, deeper = " " * 8, " " * 12
    for name, across, size in (("a", "m", by.high), ("b", "n", by.wide)):
        operand, words = operands[name], by.depth // by.together
        deep = side_by_side(operand, axes["k"]) <= side_by_side(operand, axes[across])
        place, before, test = _place(operand, name)
        for load in range(-(-words * size // THREADS)):
            number = f"(thread + {load * THREADS})" if load else "thread"
            k_at, at = f"{number} // {size}", f"{number} % {size}"
            if deep:  # neighbouring threads have neighbouring k
                k_at, at = f"{number} % {words}", f"{number} // {words}"
            lines += [f"{inner}kk = {k_at}", f"{inner}mm = {at}"]
            lines += [f"{inner}at = first_{across} + mm", f"{inner}word = {by.word}(0)"]
            for n in range(by.together):
                lines += [f"{inner}k_at = first_k + kk * {by.together} + {n}"]
                lines += [f"{inner}if k_at < k_count and at < {across}_count:"]
                lines += indices("k_at", axes["k"], deeper)
                lines += indices("at", axes[across], deeper)
                lines += [deeper + line for line in before]
                read = f"{by.word}({name}[{place}])"
                read = f"word = {by.word}(word | {read} << {16 * n})" if n else f"word = {read}"
                lines += [f"{deeper}if {test}:", f"{deeper}    {read}"] if test else [deeper + read]
            lines += [f"{inner}{by.slot(name, 'kk', 'mm')} = word"]
    lines += ["        cuda.syncthreads()", *(inner + line for line in by.body)]
    return [*lines, "        cuda.syncthreads()", f"        first_k += {by.depth}"]


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
