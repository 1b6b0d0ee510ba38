"""Our products of bytes, by sums of two or of four in one instruction, with what follows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from helpers.kernel_calls import run

from soapstone.dtypes import BYTES
from soapstone.ir.spec import operator
from soapstone.ir.tensor import Array
from soapstone.kernels.cpu.products.pairs import pairs
from soapstone.kernels.cpu.products.pairs_lanes import has_pairs
from soapstone.kernels.cpu.products.quads import quads
from soapstone.kernels.cpu.products.quads_lanes import has_quads
from soapstone.kernels.entry import Call, Entry

Kernel = Callable[[Call], Entry | None]
PAIRS = pytest.param(pairs, marks=pytest.mark.skipif(not has_pairs(), reason="no AVX2"))
QUADS = pytest.param(quads, marks=pytest.mark.skipif(not has_quads(), reason="no AVX-512 VNNI"))
of_both = pytest.mark.parametrize("kernel", [PAIRS, QUADS])


def last(array: Array) -> Array:
    """Return an image whose channels lie side by side."""
    return np.moveaxis(np.ascontiguousarray(np.moveaxis(array, 1, -1)), -1, 1)


def drawn(rng: np.random.Generator, dtype: str, *shape: int) -> Array:
    limits = np.iinfo(dtype)
    return rng.integers(limits.min, limits.max + 1, shape).astype(dtype)


def compare(
    kernel: Kernel, name: str, at: dict[str, Any], inputs: tuple[Array, ...], threads: int
) -> None:
    """Assert that results of a product are the reference's."""
    spec = operator(name)
    at = dict(spec.normalise(at))
    (wanted,) = spec.run(at, *inputs)
    images = wanted.ndim > 3
    y = last(np.full_like(wanted, 77)) if images else np.full_like(wanted, 77)
    given = (last(inputs[0]) if images else inputs[0], *inputs[1:])
    run(kernel(Call(name, at, given, (y,), threads, frozenset(range(1, len(inputs))))))
    if wanted.dtype == np.int32:
        np.testing.assert_array_equal(y, wanted)
    else:
        np.testing.assert_allclose(y, wanted, rtol=1e-6, atol=1e-6 * np.abs(wanted).max())


WINDOWS: list[tuple[tuple[int, ...], tuple[int, ...], dict[str, Any]]] = [
    ((1, 37, 9, 11), (33, 37, 3, 3), {"padding": (1, 0, 2, 1)}),
    ((2, 3, 23, 17), (20, 3, 7, 5), {"padding": (3, 2, 3, 2), "stride": (2, 2)}),
    ((1, 40, 13, 12), (16, 40, 1, 1), {}),
    ((1, 129, 6, 7), (35, 129, 3, 3), {"dilation": (2, 1), "padding": (2, 1, 2, 1)}),
    ((2, 20, 9, 9), (7, 20, 1, 1), {"stride": (2, 3)}),
]
POSITIONS: list[tuple[tuple[int, ...], tuple[int, ...], dict[str, Any]]] = [
    ((1, 40, 13, 12), (64, 40, 1, 1), {}),
    ((3, 36, 29, 41), (192, 36, 1, 1), {}),
    ((1, 1028, 2, 3), (256, 1028, 1, 1), {}),
    ((1, 1024, 31, 9), (64, 1024, 1, 1), {}),
    ((2, 20, 9, 9), (128, 20, 1, 1), {"stride": (2, 3)}),
]


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("kind", BYTES)
@pytest.mark.parametrize(
    ("kernel", "image", "filters", "window"),
    [
        pytest.param(*kernel.values, *case, marks=kernel.marks)
        for kernel, cases in ((PAIRS, WINDOWS), (QUADS, POSITIONS))
        for case in cases
    ],
)
def test_convolutions(
    kernel: Kernel,
    image: tuple[int, ...],
    filters: tuple[int, ...],
    window: dict[str, Any],
    kind: str,
    threads: int,
) -> None:
    """Of the largest bytes too, whose sums of two products need more than 16 bits."""
    rng = np.random.default_rng(sum(image))
    x, w = drawn(rng, kind, *image), drawn(rng, "int8", *filters)
    x[0, :, :2], w[0], w[1] = np.iinfo(kind).max, 127, -128
    zero = np.array(5, kind)
    scale, bias = (rng.standard_normal(filters[0]).astype(np.float32) for _ in "sb")
    compare(
        kernel, "quantized_conv2d", {**window, "bias": True}, (x, w, zero, scale, bias), threads
    )
    compare(kernel, "quantized_conv2d", {**window, "to": "int32"}, (x, w, zero), threads)


@pytest.mark.parametrize(
    ("kernel", "columns", "step", "w_zero"),
    [
        *(pytest.param(pairs, 37, 1, w_zero, marks=PAIRS.marks) for w_zero in (0, -51, 127)),
        pytest.param(quads, 128, 4, 0, marks=QUADS.marks),
    ],
)
@pytest.mark.parametrize("shape", [(1, 67), (5, 7, 1200), (43, 2051), (64,)])
def test_products_of_rows(
    shape: tuple[int, ...], kernel: Kernel, columns: int, step: int, w_zero: int
) -> None:
    rng = np.random.default_rng(len(shape))
    depth = shape[-1] // step * step
    x, w = drawn(rng, "uint8", *shape[:-1], depth), drawn(rng, "int8", depth, columns)
    zero, scale = np.array(131, np.int32), rng.random(columns).astype(np.float32)
    compare(kernel, "quantized_linear", {"w_zero": w_zero}, (x, w, zero, scale), 2)
    compare(kernel, "quantized_linear", {"w_zero": w_zero, "to": "int32"}, (x, w, zero), 1)


def real(value: float) -> Array:
    return np.array(value, np.float32)


_TO = (("to", "uint8"),)
_BYTE, _SIGNED = np.array(3, np.uint8), np.array(-7, np.int8)
# Steps on a product, by what they are: the operands besides its own (None: of its shape, in bytes;
# "x": in float32; "channels": a number a channel), and the program.
ENDINGS: dict[str, tuple[list[Any], list[Any]]] = {
    "relu, then bytes": (
        [real(0.7), _BYTE],
        [("relu", (0,), ()), ("quantize", (3, 1, 2), _TO)],
    ),
    "signed bytes, clipped": (
        [real(0.9), _SIGNED],
        [
            ("clip", (0,), (("high", 40.0), ("low", -30.0))),
            ("quantize", (3, 1, 2), (("to", "int8"),)),
        ],
    ),
    "rounded, added to bytes, relu, rounded": (
        [real(0.5), _BYTE, None, real(0.31), np.array(128, np.uint8), real(0.8)],
        [
            ("quantize", (0, 1, 2), _TO),
            ("dequantize", (7, 1, 2), ()),
            ("dequantize", (3, 4, 5), ()),
            ("add", (9, 8), ()),
            ("relu", (10,), ()),
            ("quantize", (11, 6, 2), _TO),
        ],
    ),
    "rounded, a number a channel added, rounded": (
        [real(0.5), _BYTE, "channels", real(0.6)],
        [
            ("quantize", (0, 1, 2), _TO),
            ("dequantize", (5, 1, 2), ()),
            ("add", (3, 6), ()),
            ("quantize", (7, 4, 2), _TO),
        ],
    ),
    "rounded, added to bytes, rounded, made real": (
        [real(0.5), _BYTE, None, real(0.31), np.array(128, np.uint8), real(0.8)],
        [
            ("quantize", (0, 1, 2), _TO),
            ("dequantize", (7, 1, 2), ()),
            ("dequantize", (3, 4, 5), ()),
            ("add", (9, 8), ()),
            ("relu", (10,), ()),
            ("quantize", (11, 6, 2), _TO),
            ("dequantize", (12, 6, 2), ()),
        ],
    ),
    "added to real numbers": (
        ["x"],
        [
            ("affine", (0,), (("scale", 2.0), ("shift", 1.0))),
            ("add", (2, 1), ()),
            ("relu", (3,), ()),
        ],
    ),
}


@pytest.mark.parametrize(
    ("kernel", "columns", "depth"),
    [
        *(pytest.param(pairs, columns, 19, marks=PAIRS.marks) for columns in (16, 21)),
        pytest.param(quads, 128, 20, marks=QUADS.marks),
    ],
)
@pytest.mark.parametrize("images", [True, False])
@pytest.mark.parametrize("case", ENDINGS)
def test_steps_on_results(
    case: str, images: bool, kernel: Kernel, columns: int, depth: int
) -> None:
    rng = np.random.default_rng(columns)
    name = "quantized_conv2d" if images else "quantized_linear"
    shape = (2, columns, 5, 9) if images else (13, columns)
    x = drawn(rng, "uint8", *((2, depth, 5, 9) if images else (13, depth)))
    w = drawn(rng, "int8", *((columns, depth, 1, 1) if images else (depth, columns)))
    scale, bias = rng.random(columns) / 2000, rng.standard_normal(columns)
    own = (x, w, np.array(9, np.uint8), scale.astype(np.float32), bias.astype(np.float32))
    more, program = ENDINGS[case]
    drawn_like = {None: drawn(rng, "uint8", *shape)}
    drawn_like["x"] = rng.standard_normal(shape).astype(np.float32)
    row = rng.standard_normal(columns).astype(np.float32)
    drawn_like["channels"] = row.reshape(columns, 1, 1) if images else row
    extras = [drawn_like[e] if e is None or isinstance(e, str) else e for e in more]
    inputs = (*own, *extras)
    items = tuple(operator(name).normalise({"bias": True}).items())
    at = {"operator": name, "items": items, "arity": 5, "wide": False, "program": tuple(program)}
    (wanted,) = operator("with_epilogue").run(at, *inputs)
    y = np.full_like(wanted, 77)
    fixed = frozenset(i for i in range(1, len(inputs)) if inputs[i].shape != shape)
    if images:
        inputs, y = tuple(last(a) if a.ndim == 4 and a is not w else a for a in inputs), last(y)
    entry = kernel(Call("with_epilogue", at, inputs, (y,), 1, fixed))
    stands_for = program[-1][0] == "dequantize"
    if stands_for and kernel is pairs:
        assert entry is None
        return
    run(entry)
    if stands_for:  # multiples of 0.8
        np.testing.assert_allclose(y / 0.8, np.rint(y / 0.8), atol=1e-4)
        y, wanted = np.rint(y / 0.8), np.rint(wanted / 0.8)
    elif y.dtype == np.float32:
        np.testing.assert_allclose(y, wanted, rtol=1e-5, atol=1e-5)
        return
    apart = np.abs(y.astype(int) - wanted.astype(int))
    assert apart.max() <= 1 and (apart > 0).mean() < 0.01
    assert len(np.unique(wanted)) > 20


@of_both
def test_steps_that_do_not_fit_are_refused(kernel: Kernel) -> None:
    x, w = np.zeros((3, 4), np.uint8), np.zeros((4, 64), np.int8)
    own = (x, w, np.array(0, np.uint8), np.ones(64, np.float32))
    items = tuple(operator("quantized_linear").normalise({}).items())
    row = np.ones((3, 1), np.float32)
    for program, extras in (
        ((("tanh", (0,), ()),), ()),
        ((("add", (0, 1), ()),), (row,)),
        ((("affine", (0,), (("scale", -1.0), ("shift", 0.0))),), ()),
    ):
        at = {"operator": "quantized_linear", "items": items, "arity": 4, "program": program}
        call = Call("with_epilogue", at, (*own, *extras), (np.zeros((3, 64), np.float32),), 1)
        assert kernel(Call(call.operator, at, call.inputs, call.outputs, 1, frozenset({1}))) is None
