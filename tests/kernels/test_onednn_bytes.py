"""Products of bytes by oneDNN, whose results are rounded to bytes in the same primitive."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from helpers.kernel_calls import bound, run

from soapstone.ir.spec import operator
from soapstone.kernels.cpu.onednn.library import available, multiplies_bytes
from soapstone.kernels.entry import Call
from soapstone.native.promises import Notes

pytestmark = pytest.mark.skipif(
    not (available() and multiplies_bytes()), reason="no products of bytes by oneDNN"
)


@pytest.mark.parametrize("program", [(), (("relu", (0,), ()),)], ids=len)
@pytest.mark.parametrize("zero", [0, 3, 4, 255])
def test_ties_are_rounded_to_even_before_the_zero_is_added(zero: int, program: Any) -> None:
    rng = np.random.default_rng(zero)
    x, w = rng.integers(0, 9, (6, 8), np.uint8), rng.integers(-4, 5, (8, 32), np.int8)
    numbers = np.zeros((), np.uint8), np.ones(32, np.float32)
    scale, place = np.array(2, np.float32), np.array(zero, np.uint8)
    program = (*program, ("quantize", (3 if program else 0, 1, 2), (("to", "uint8"),)))
    items = tuple(operator("quantized_linear").normalise({"to": "float"}).items())
    at = {"operator": "quantized_linear", "items": items, "arity": 4, "program": program}
    inputs = (x, w, *numbers, scale, place)
    (expected,) = operator("with_epilogue").run(at, *inputs, dtypes=[np.dtype(np.uint8)])
    y = np.zeros_like(expected)
    run(bound(Call("with_epilogue", at, inputs, (y,), 2, frozenset(range(1, 6)))))
    np.testing.assert_array_equal(y, expected)


@pytest.mark.parametrize("rows", [1, 2])
def test_weights_are_packed_for_a_single_row_too(rows: int) -> None:
    rng = np.random.default_rng(rows)
    x, w = rng.integers(0, 256, (rows, 96), np.uint8), rng.integers(-128, 128, (96, 40), np.int8)
    inputs = x, w, np.array(7, np.uint8), rng.random(40, np.float32)
    at = operator("quantized_linear").normalise({"to": "float"})
    (expected,) = operator("quantized_linear").run(at, *inputs)
    y = np.zeros_like(expected)
    with Notes().taken() as notes:
        entry = bound(Call("quantized_linear", at, inputs, (y,), 1, frozenset((1, 2, 3))))
    assert any(each.array is w for each in notes.packed)
    run(entry)
    np.testing.assert_allclose(y, expected, rtol=1e-6)
