"""Products c[b, m, n] = sum over k of a[b, m, k] * b[b, k, n] through tiles in shared memory.

What m, n and k are is up to the operands: each is several axes, and an operand's place is a sum
over axes, of which some are windows, that have a place only where they lie inside. So a convolution
and its gradients are the same kernel as a matrix product, without a matrix of windows in memory. A
block has a tile of c; each thread keeps a few rows and columns of it in registers, and what threads
load together lies side by side where the operand's strides allow it. Sums are in single precision
for halves. This is the fallback: it uses no tensor cores.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache

from soapstone.kernels.cuda.elementwise.integers import INTEGERS
from soapstone.kernels.cuda.elementwise.pointwise import Writer
from soapstone.kernels.cuda.elementwise.text import Text, Value, wide
from soapstone.kernels.cuda.entry import DeviceEntry, Launch
from soapstone.kernels.cuda.substrate.arrays import View
from soapstone.kernels.cuda.substrate.target import SIMULATED, Kernel, built

# Threads of a block along m and n, elements of c a thread has along each, and the depth of a tile.
THREADS_M, THREADS_N = (4, 8) if SIMULATED else (16, 16)
EACH = 2 if SIMULATED else 4
DEPTH = 16


@dataclass(frozen=True)
class Window:
    """A place along one axis of an operand, found from several axes of the product.

    It is (sum of axes times `steps`, plus `shift`) / `divisor`, where that is whole and from 0 to
    `size` - 1; elsewhere the element is zero. `stride`: of the operand along it.
    """

    steps: Mapping[str, int]
    shift: int
    size: int
    stride: int
    divisor: int = 1


@dataclass(frozen=True)
class Operand:
    """A view, its strides along axes of the product, and its windows."""

    view: View
    strides: Mapping[str, int]
    windows: tuple[Window, ...] = ()


Axes = Sequence[tuple[str, int]]  # names and extents


@cache
def compiled(source: str) -> Kernel:
    """Return the kernel `product` of a source text."""
    return built("product", source, **INTEGERS)


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
    operands = {"a": a, "b": b, "c": c, **{f"x{n}": one for n, one in enumerate(extras)}}
    tile_m, tile_n = THREADS_M * EACH, THREADS_N * EACH
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
    lines = [
        f"def product(m_count, n_count, k_count, {', '.join(parameters)}):",
        f"    tile_a = cuda.shared.array({DEPTH * (tile_m + 1)}, {kind})",
        f"    tile_b = cuda.shared.array({DEPTH * (tile_n + 1)}, {kind})",
        "    thread = cuda.threadIdx.x",
        f"    row = thread // {THREADS_N} * {EACH}",
        f"    column = thread % {THREADS_N} * {EACH}",
        f"    tiles_m = (m_count + {tile_m - 1}) // {tile_m}",
        f"    tiles_n = (n_count + {tile_n - 1}) // {tile_n}",
        "    tile = cuda.blockIdx.x",  # along the other axes there are at most 65535 blocks
        f"    first_m = tile // tiles_n % tiles_m * {tile_m}",
        f"    first_n = tile % tiles_n * {tile_n}",
        "    batch = tile // tiles_n // tiles_m",
        *indices("batch", axes["b"], "    "),
    ]
    each = [(i, j) for i in range(EACH) for j in range(EACH)]
    lines += [f"    c{i}_{j} = {kind}(0)" for i, j in each]
    lines += ["    first_k = 0", "    while first_k < k_count:"]
    threads = THREADS_M * THREADS_N
    for name, across, size in (("a", "m", tile_m), ("b", "n", tile_n)):
        operand = operands[name]
        deep = _side_by_side(operand, axes["k"]) <= _side_by_side(operand, axes[across])
        place, before, test = _place(operand, name)
        for load in range(-(-DEPTH * size // threads)):
            number = f"(thread + {load * threads})" if load else "thread"
            k_at, at = f"{number} // {size}", f"{number} % {size}"
            if deep:  # neighbouring threads have neighbouring k
                k_at, at = f"{number} % {DEPTH}", f"{number} // {DEPTH}"
            inner = " " * 8
            lines += [f"{inner}kk = {k_at}", f"{inner}mm = {at}"]
            lines += [f"{inner}k_at = first_k + kk", f"{inner}at = first_{across} + mm"]
            lines += [f"{inner}value = {kind}(0)"]
            lines += [f"{inner}if k_at < k_count and at < {across}_count:"]
            deeper = inner + "    "
            lines += indices("k_at", axes["k"], deeper)
            lines += indices("at", axes[across], deeper)
            lines += [deeper + line for line in before]
            read = f"value = {kind}({name}[{place}])"
            lines += [f"{deeper}if {test}:", f"{deeper}    {read}"] if test else [deeper + read]
            lines += [f"{inner}tile_{name}[kk * {size + 1} + mm] = value"]
    lines += ["        cuda.syncthreads()", f"        for k in range({DEPTH}):"]
    lines += [f"            a{i} = tile_a[k * {tile_m + 1} + row + {i}]" for i in range(EACH)]
    lines += [f"            b{j} = tile_b[k * {tile_n + 1} + column + {j}]" for j in range(EACH)]
    # Of integers Numba would make sums of 64 bits.
    sums = [(f"c{i}_{j}", f"c{i}_{j} + a{i} * b{j}") for i, j in each]
    lines += [
        f"            {c} = {made if kind[0] == 'f' else f'{kind}({made})'}" for c, made in sums
    ]
    lines += ["        cuda.syncthreads()", f"        first_k += {DEPTH}"]
    place, _, _ = _place(c, "c")
    for i, j in each:
        lines += [f"    m_at = first_m + row + {i}", f"    n_at = first_n + column + {j}"]
        lines += ["    if m_at < m_count and n_at < n_count:"]
        lines += indices("m_at", axes["m"], " " * 8) + indices("n_at", axes["n"], " " * 8)
        text, total = Text(), Value(f"c{i}_{j}", kind)
        made = total
        if writer is not None:
            values = []
            for n, extra in enumerate(extras):
                dtype = extra.view.dtype
                read = f"x{n}[{_place(extra, f'x{n}')[0]}]"
                values.append(
                    text.set(
                        f"{wide(dtype)}({read})" if wide(dtype) != dtype else read, wide(dtype)
                    )
                )
            (made,) = writer(text, [total, *values])
        stored = text.cast(made, c.view.dtype).name
        lines += [" " * 8 + line for line in text.lines]
        lines += [f"        c[{place}] = {stored}"]
    grid = (-(-counts["n"] // tile_n) * -(-counts["m"] // tile_m) * counts["b"],)
    kernel = compiled("\n".join(lines))
    launch = (counts["m"], counts["n"], counts["k"], *arguments)
    return DeviceEntry((Launch(kernel, grid, (threads,), launch),))


def _side_by_side(operand: Operand, axes: Axes) -> int:
    """Return the step between neighbours along the innermost of axes that has more than one."""
    name = next((axis for axis, extent in reversed(axes) if extent > 1), axes[-1][0])
    step = operand.strides.get(name, 0)
    step += sum(w.stride * abs(w.steps.get(name, 0)) for w in operand.windows)
    return step or 1 << 60
