"""The element-wise machine against NumPy in float64: operators, layouts, broadcasts, chains."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from helpers.elementwise_calls import fused, run
from helpers.kernel_calls import random

from soapstone.dtypes import learn
from soapstone.ir.spec import operator
from soapstone.kernels.cpu.elementwise.machine import elementwise, fused_elementwise
from soapstone.kernels.entry import Call
from soapstone.native import entries, intrinsics, memory
from soapstone.native.intrinsics import words
from soapstone.native.memory import Block
from soapstone.native.threads.parallel import parallel_for

Array = np.ndarray[Any, Any]


@pytest.mark.parametrize("threads", [1, 2])
def test_large_and_threads(threads: int) -> None:
    a, b = random(513, 517), random(513, 517, seed=1)
    y = np.empty_like(a)
    run("add", [a, b], [y], threads)
    np.testing.assert_array_equal(y, a + b)


def _last(shape: tuple[int, ...]) -> Array:
    """An (n, c, h, w) array stored channels-last."""
    n, c, h, w = shape
    return np.zeros((n, h, w, c), np.float32).transpose(0, 3, 1, 2)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("shape", [(2, 3, 5, 7), (3, 16, 9, 9), (2, 64, 20, 20), (1, 1, 1, 1)])
@pytest.mark.parametrize("layouts", ["plain", "last", "mixed", "tile", "reversed"])
def test_layouts(shape: tuple[int, ...], layouts: str, threads: int) -> None:
    a, b = random(*shape), random(*shape, seed=1)
    y = np.zeros(shape, np.float32)
    if layouts in ("last", "mixed"):
        x = _last(shape)
        x[...] = a
        a, y = x, _last(shape)
    if layouts == "last":
        x = _last(shape)
        x[...] = b
        b = x
    if layouts == "tile":
        big = np.full((shape[0] + 2, shape[1] + 1, shape[2] + 3, shape[3] + 5), 9, np.float32)
        inside = (slice(1, -1), slice(0, -1), slice(2, -1), slice(3, -2))
        x = big.copy()
        x[inside] = a
        a, y = x[inside], big[inside]
    if layouts == "reversed":
        a = a[:, ::-1, :, ::-1]
    run("sub", [a, b], [y], threads)
    np.testing.assert_array_equal(y, np.asarray(a) - np.asarray(b))
    if layouts == "tile":
        outside = np.ones(big.shape, bool)
        outside[inside] = False
        assert (big[outside] == 9).all()


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("to", ["uint8", "bfloat16"])
def test_narrow_results_in_another_layout(to: str, threads: int) -> None:
    """A second operand lies as the first, as the result, or is repeated."""
    shape, kind = (2, 3, 33, 40), learn(to)
    a, last = np.abs(random(*shape)), _last(shape)
    last[...] = np.abs(random(*shape, seed=1))
    for b in (np.ascontiguousarray(last), last, last[:1, :, :1, :1], last[..., :1, :1]):
        y = np.zeros((2, 33, 40, 3), kind).transpose(0, 3, 1, 2)
        fused([a, b], [y], [("add", (0, 1), {}), ("cast", (2,), {"to": to})], (3,), threads)
        np.testing.assert_array_equal(y, (a + b).astype(kind))


BROADCASTS = [
    ((4, 5), (5,)),
    ((4, 5), (4, 1)),
    ((4, 5), ()),
    ((300, 700), (700,)),
    ((300, 700), (300, 1)),
    ((2, 8, 7, 7), (8, 1, 1)),
    ((2, 3, 40, 40), (3, 1, 1)),
    ((2, 8, 7, 7), (2, 1, 7, 1)),
    ((5, 1, 6), (1, 4, 1)),
    ((3,), (2, 2, 1)),
    ((2, 3, 4, 5, 6, 7), (3, 1, 5, 1, 7)),
]


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("left,right", BROADCASTS)
def test_broadcasting(left: tuple[int, ...], right: tuple[int, ...], threads: int) -> None:
    a, b = random(*left), random(*right, seed=1)
    y = np.zeros(np.broadcast_shapes(left, right), np.float32)
    run("mul", [a, b], [y], threads)
    np.testing.assert_array_equal(y, a * b)
    run("sub", [b, a], [y], threads)
    np.testing.assert_array_equal(y, b - a)


def test_bias_in_channels_last() -> None:
    x, y, bias = _last((2, 24, 9, 9)), _last((2, 24, 9, 9)), random(24, 1, 1)
    x[...] = random(2, 24, 9, 9)
    run("add", [x, bias], [y])
    np.testing.assert_array_equal(y, x + bias)


@pytest.mark.parametrize("shape", [(0,), (3, 0, 4)])
def test_nothing_to_do(shape: tuple[int, ...]) -> None:
    run("relu", [np.zeros(shape, np.float32)], [np.zeros(shape, np.float32)])


def test_in_place() -> None:
    a, b = random(3000), random(3000, seed=1)
    want = a + b
    run("add", [a, b], [a])
    np.testing.assert_array_equal(a, want)


@pytest.mark.parametrize("shape", [(7,), (1000, 33), (3, 8, 6, 6)])
@pytest.mark.parametrize("threads", [1, 2])
def test_chain(shape: tuple[int, ...], threads: int) -> None:
    a, b = random(*shape), random(*shape, seed=1)
    bias = random(*([1] * (len(shape) - 1)), shape[-1], seed=2)
    program = [
        ("add", (0, 2), {}),
        ("tanh", (3,), {}),
        ("mul", (4, 1), {}),
        ("affine", (5,), {"scale": 0.5, "shift": 1.0}),
        ("power", (6,), {"exponent": 3.0}),
        ("accumulate", (7, 0, 1, 4), {}),
    ]
    y, t = np.zeros(shape, np.float32), np.zeros(shape, np.float32)
    fused([a, b, bias], [y, t], program, (8, 4), threads)
    tanh = np.tanh(a.astype(np.float64) + bias)
    np.testing.assert_allclose(t, tanh, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(y, (tanh * b * 0.5 + 1) ** 3 + a + b + tanh, rtol=1e-5, atol=1e-5)


def test_chain_results_that_are_inputs_or_repeated() -> None:
    a = random(2000)
    outputs = [np.zeros_like(a) for _ in range(4)]
    fused([a], outputs, [("neg", (0,), {}), ("exp", (1,), {})], (0, 1, 1, 2))
    np.testing.assert_array_equal(outputs[0], a)
    np.testing.assert_array_equal(outputs[1], -a)
    np.testing.assert_array_equal(outputs[2], -a)
    np.testing.assert_allclose(outputs[3], np.exp(-a), rtol=1e-6)


def test_chain_in_place_reads_before_it_writes() -> None:
    a = random(5000)
    keep, other = a.copy(), np.zeros_like(a)
    fused([a], [a, other], [("neg", (0,), {}), ("add", (0, 1), {})], (1, 2))
    np.testing.assert_array_equal(a, -keep)
    np.testing.assert_array_equal(other, np.zeros_like(a))


def test_long_chain_reuses_registers() -> None:
    a = random(3000)
    y = np.zeros_like(a)
    fused([a], [y], [("affine", (i,), {"scale": 1.01, "shift": 0.1}) for i in range(150)], (150,))
    want = a.astype(np.float64)
    for _ in range(150):
        want = want * 1.01 + 0.1
    np.testing.assert_allclose(y, want, rtol=1e-4)


@pytest.mark.parametrize("count", [24, 25, 62, 300])
@pytest.mark.parametrize("shape", [(), (3, 700)])
def test_sums_of_any_number_of_operands_have_the_bits_of_one(
    count: int, shape: tuple[int, ...]
) -> None:
    parts = [random(*shape, seed=seed) for seed in range(count)]
    (wanted,) = operator("accumulate").run({}, *parts)
    made = np.zeros(shape, np.float32)
    run("accumulate", parts, [made])
    np.testing.assert_array_equal(made, wanted)
    program = [
        ("accumulate", tuple(range(count)), {}),
        ("affine", (count,), {"scale": 2.0}),
        ("add", (count + 1, count - 1), {}),
    ]
    outputs = [np.zeros(shape, np.float32), parts[0].copy(), np.zeros(shape, np.float32)]
    fused(parts, outputs, program, (count + 2, 0, count))
    wholes = [wanted * np.float32(2) + parts[-1], parts[0], wanted]
    for output, whole in zip(outputs, wholes):
        np.testing.assert_allclose(output, whole, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("to", ["uint8", "int8"])
@pytest.mark.parametrize("source", ["uint8", "int8"])
def test_bytes_of_bytes(source: str, to: str, threads: int) -> None:
    """As many as a table is made for, and of those that lie apart, whatever the scale is."""
    drawn = np.random.default_rng(0).integers(0, 256, (4, 301, 150)).astype(np.uint8)
    scale, zero, after = np.array(0.05, np.float32), np.array(7, source), np.array(3, to)
    program: list[Any] = [
        ("dequantize", (0, 1, 2), {}),
        ("sigmoid", (4,), {}),
        ("mul", (4, 5), {}),
        ("quantize", (6, 1, 3), {"to": to}),
    ]
    for x in (drawn, drawn[:1, :1], drawn[:, :, 1:149], drawn.transpose(2, 0, 1)):
        x, made = x.view(source), np.zeros_like(x.view(to))
        steps = tuple((o, i, tuple(a.items())) for o, i, a in program)
        attributes = {"program": steps, "results": (7,)}
        operands = (x, scale, zero, after)
        entry = fused_elementwise(Call("fused_elementwise", attributes, operands, (made,), threads))
        assert entry is not None
        for scale[...] in (0.05, 0.02):
            assert memory.run(entry) == 0
            real = (x.astype(np.float32) - zero.astype(np.float32)) * scale
            real = real / (1 + np.exp(-real.astype(np.float64)))
            wanted = np.rint(real / scale) + after
            limits = np.iinfo(to)
            apart = made - np.clip(wanted, limits.min, limits.max)
            assert np.abs(apart).max() <= 1 and (apart != 0).mean() < 0.01


def test_what_is_not_served() -> None:
    a = random(4)
    wide = a.astype(np.float64)
    assert elementwise(Call("relu", {}, (wide,), (wide.copy(),))) is None
    unknown = {"program": (("softmax", (0,), ()),), "results": (1,)}
    assert fused_elementwise(Call("fused_elementwise", unknown, (a,), (a.copy(),))) is None


# ------------------------------------------------------------------------------- native entries
@entries.native("body")
def _fill(block: Any, begin: int, end: int) -> int:
    w = words(block)
    if w[1] >= begin and w[1] < end:
        return 7
    for i in range(begin, end):
        intrinsics.i64p(w[0])[i] += i
    return 0


@pytest.mark.parametrize("threads", [1, 2, 3, 5])
def test_parallel_for_covers_every_item_once(threads: int) -> None:
    out = np.zeros(101, np.int64)
    block: Block = memory.pack(out, -1)
    assert memory.run(parallel_for(_fill, block, 101, threads)) == 0
    np.testing.assert_array_equal(out, np.arange(101))


@pytest.mark.parametrize("threads", [1, 2])
def test_status_of_a_part_is_returned_and_ends_a_sequence(threads: int) -> None:
    out, after = np.zeros(10, np.int64), np.zeros(10, np.int64)
    bad = parallel_for(_fill, memory.pack(out, 8), 10, threads, {7: "broken"})
    good = parallel_for(_fill, memory.pack(after, -1), 10, threads)
    both = entries.sequence([bad, good])
    assert memory.run(both) == 7
    assert both.statuses == {7: "broken"}
    assert not after.any()
    assert memory.run(entries.sequence([entries.noop(), good])) == 0
    assert after.any()


def test_pack_flattens_and_keeps_bits() -> None:
    array = np.zeros(3)
    block = memory.pack(1, (2.5, [array, True]), (1 << 64) - 1)
    assert block.words[0] == 1 and block.words[3] == 1 and block.words[4] == -1
    assert np.array(block.words[1:2]).view(np.float64)[0] == 2.5
    assert block.words[2] == array.ctypes.data
