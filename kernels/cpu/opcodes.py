"""The instruction set of the elementwise machine: one loop over a chunk for every operator.

Each instruction is a formula on lanes; `step` is a switch over them, written straight into the
kernel, so that any chain of operators runs without being compiled.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from llvmlite import ir

from soapstone.kernels.cpu.lanes import (
    F32,
    I64,
    LANES,
    Lanes,
    first,
    load_lanes,
    load_some,
    store_lanes,
    store_some,
    where,
)
from soapstone.kernels.cpu.mathematics import erf, exp, log, power, sigmoid, tanh
from soapstone.kernels.cpu.simd import vectorised

WIDE = 4 * LANES
_SQRT_HALF = 0.7071067811865476
_INVERSE_SQRT_2PI = 0.3989422804014327
_TANH_SCALE, _TANH_CUBE = 0.7978845608028654, 0.044715


class Instruction(NamedTuple):
    """A formula `f(a, b, p, q)`: operands a and b (b only if arity is 2), parameters p and q."""

    name: str
    arity: int
    formula: Callable[[Lanes, Lanes, Lanes, Lanes], Lanes]


def _gelu(a: Lanes) -> Lanes:
    return a * 0.5 * (erf(a * _SQRT_HALF) + 1.0)


def _doubled(a: Lanes) -> Lanes:
    return (a * a * a * _TANH_CUBE + a) * (2.0 * _TANH_SCALE)


def _gelu_slope(a: Lanes) -> Lanes:
    # For large |x| the product x * pdf must be 0, not infinity times 0: exp clamps its argument.
    density = exp(a * a * -0.5) * _INVERSE_SQRT_2PI
    inside = where(a > 30.0, 30.0, where(a < -30.0, -30.0, a))
    return (erf(a * _SQRT_HALF) + 1.0) * 0.5 + inside * density


def _gelu_tanh_slope(a: Lanes) -> Lanes:
    # With s = (1 + tanh u) / 2 = 1 / (1 + e), e = exp(-2u): 1 - tanh^2 is 4 e s^2, which does not
    # cancel where the tangent is near 1.
    x = where(a > 10.0, 10.0, where(a < -10.0, -10.0, a))
    e = exp(-_doubled(x))
    s = 1.0 / (e + 1.0)
    inner = (x * x * (3.0 * _TANH_CUBE) + 1.0) * (2.0 * _TANH_SCALE)
    return s + x * s * (e * s) * inner


INSTRUCTIONS = tuple(
    Instruction(name, arity, formula)
    for name, arity, formula in (
        ("copy", 1, lambda a, b, p, q: a),
        ("relu", 1, lambda a, b, p, q: where(a < 0.0, 0.0, a)),
        ("leaky_relu", 1, lambda a, b, p, q: where(a > 0.0, a, a * p)),
        ("gelu", 1, lambda a, b, p, q: _gelu(a)),
        ("gelu_tanh", 1, lambda a, b, p, q: a * sigmoid(_doubled(a))),
        ("sigmoid", 1, lambda a, b, p, q: sigmoid(a)),
        ("tanh", 1, lambda a, b, p, q: tanh(a)),
        ("exp", 1, lambda a, b, p, q: exp(a)),
        ("log", 1, lambda a, b, p, q: log(a)),
        ("sqrt", 1, lambda a, b, p, q: a.call("llvm.sqrt")),
        ("neg", 1, lambda a, b, p, q: -a),
        ("affine", 1, lambda a, b, p, q: a * p + q),
        ("reciprocal", 1, lambda a, b, p, q: 1.0 / a),
        ("square", 1, lambda a, b, p, q: a * a),
        ("power", 1, lambda a, b, p, q: power(a, a.like(p))),
        ("add", 2, lambda a, b, p, q: a + b),
        ("sub", 2, lambda a, b, p, q: a - b),
        ("mul", 2, lambda a, b, p, q: a * b),
        ("div", 2, lambda a, b, p, q: a / b),
        # Gradients: a is dy, b the forward operator's output or input.
        ("relu_grad", 2, lambda a, b, p, q: where(b > 0.0, a, 0.0)),
        ("leaky_relu_grad", 2, lambda a, b, p, q: where(b > 0.0, a, a * p)),
        ("gelu_grad", 2, lambda a, b, p, q: a * _gelu_slope(b)),
        ("gelu_tanh_grad", 2, lambda a, b, p, q: a * _gelu_tanh_slope(b)),
        ("sigmoid_grad", 2, lambda a, b, p, q: a * (b * (1.0 - b))),
        ("tanh_grad", 2, lambda a, b, p, q: a * (1.0 - b * b)),
    )
)
CODES = {instruction.name: code for code, instruction in enumerate(INSTRUCTIONS)}


def loop(
    builder: Any,
    count: Lanes,
    body: Callable[[Lanes, int, Lanes | None], None],
    wide: int = WIDE,
) -> None:
    """Write a loop over lanes 0 … count-1: `body(i, width, mask)` does `width` lanes from i.

    The bulk goes by wide vectors, so that the constants of a formula are loaded once for several
    registers' worth of lanes; the mask, None in the bulk, guards the last lanes.
    """

    def stretch(start: Any, stop: Any, width: int, masked: bool) -> None:
        before = builder.block
        head, run, done = (builder.append_basic_block(name) for name in ("head", "run", "done"))
        builder.branch(head)
        builder.position_at_end(head)
        i = builder.phi(I64)
        i.add_incoming(start, before)
        builder.cbranch(builder.icmp_signed("<", i, stop), run, done)
        builder.position_at_end(run)
        at = Lanes(builder, i)
        body(at, width, first(count - at, width) if masked else None)
        i.add_incoming(builder.add(i, I64(width)), builder.block)
        builder.branch(head)
        builder.position_at_end(done)

    full = builder.and_(count.value, I64(-wide))
    stretch(I64(0), full, wide, False)
    stretch(full, count.value, LANES, True)


def get(p: Lanes, i: Lanes, width: int, mask: Lanes | None) -> Lanes:
    """The lanes at p[i], or those of them that the mask admits."""
    if mask is None:
        return load_lanes(p, i, count=width)
    return load_some(p, i, mask, count=width)


def put(p: Lanes, i: Lanes, value: Lanes, mask: Lanes | None) -> None:
    """Write the lanes at p[i], or those of them that the mask admits."""
    if mask is None:
        store_lanes(p, i, value)
    else:
        store_some(p, i, value, mask)


def _function(module: Any, instruction: Instruction) -> Any:
    """The loop of one instruction as a function of its own.

    Alone, its constants are loaded once, before the loop; in the midst of a large kernel LLVM
    reloads them on every turn.
    """
    kind = ir.FunctionType(ir.VoidType(), [I64] * 6 + [F32] * 2)
    made = ir.Function(module, kind, module.get_unique_name(f"step_{instruction.name}"))
    made.linkage = "internal"
    made.attributes.add("noinline")
    builder = ir.IRBuilder(made.append_basic_block())
    to, a, b, turn_a, turn_b, n, p, q = (Lanes(builder, value) for value in made.args)

    def body(i: Lanes, width: int, mask: Lanes | None) -> None:
        left = get(a, i & turn_a, width, mask)
        right = get(b, i & turn_b, width, mask) if instruction.arity == 2 else left
        put(to, i, instruction.formula(left, right, p, q), mask)

    # The one formula in float64 would not fit in the registers any wider.
    loop(builder, n, body, LANES if instruction.name == "power" else WIDE)
    builder.ret_void()
    return made


@vectorised
def step(
    code: Lanes,
    to: Lanes,
    a: Lanes,
    b: Lanes,
    turn_a: Lanes,
    turn_b: Lanes,
    n: Lanes,
    p: Lanes,
    q: Lanes,
) -> None:
    """Run one instruction over n floats: addresses `to`, `a`, `b`; float parameters p and q.

    Operand a is read at i & turn_a: -1 for an array, 0 for `WIDE` copies of one number.
    """
    builder = code.builder
    given = [to, a, b, turn_a, turn_b, n, p.cast(F32), q.cast(F32)]
    start = builder.block
    done = builder.append_basic_block("stepped")
    blocks = []
    for instruction in INSTRUCTIONS:
        block = builder.append_basic_block(instruction.name)
        builder.position_at_end(block)
        builder.call(_function(builder.module, instruction), [lanes.value for lanes in given])
        builder.branch(done)
        blocks.append(block)
    builder.position_at_end(start)
    choice = builder.switch(code.value, done)
    for number, block in enumerate(blocks):
        choice.add_case(I64(number), block)
    builder.position_at_end(done)


@vectorised
def copy_floats(to: Lanes, a: Lanes, n: Lanes) -> None:
    """Copy n floats from address `a` to address `to`."""
    loop(n.builder, n, lambda i, width, mask: put(to, i, get(a, i, width, mask), mask))


@vectorised
def fill_floats(to: Lanes, value: Lanes, n: Lanes) -> None:
    """Write the float32 into n floats at address `to`."""
    loop(n.builder, n, lambda i, width, mask: put(to, i, value.splat(width), mask))
