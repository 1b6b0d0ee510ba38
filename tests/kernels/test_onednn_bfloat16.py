"""Products of operands rounded to bfloat16: numbers, and which calls get them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib import import_module
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from helpers.kernel_calls import LAYOUTS, around, bound, near, place, random, reference, run

from soapstone.ir.spec import operator
from soapstone.ir.tensor import Array
from soapstone.kernels.choices import Choices
from soapstone.kernels.cpu.onednn.library import multiplies_bfloat16
from soapstone.kernels.entry import BFLOAT16, Call
from soapstone.kernels.measure import form
from soapstone.kernels.select import select

NAME, PRODUCT = "onednn_bfloat16", "onednn_bfloat16_product"
CONV = {"stride": (1, 1), "padding": (1, 1, 1, 1), "dilation": (1, 1), "groups": 1}
CONV |= {"bias": True, "activation": "relu"}
pytestmark = pytest.mark.skipif(
    not multiplies_bfloat16(), reason="this processor has no instructions for bfloat16"
)


def rounded(array: Array) -> Array:
    """Return the nearest numbers of eight significant bits, ties to even."""
    bits = array.astype(np.float32).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000).view(np.float32)


def call_of(
    name: str, inputs: Sequence[Array], at: Mapping[str, Any], layout: str = "plain"
) -> Call:
    """Return a call with constant weights, which may be rounded."""
    at = {**at, **operator(name).normalise(at)}
    y = np.asarray(reference(name, inputs, at)[0], np.float32)
    placed = (place(inputs[0], layout), *inputs[1:])
    constants = frozenset(range(1, len(inputs)))
    return Call(name, at, placed, (place(y, layout),), 2, constants, BFLOAT16)


def check(
    name: str, inputs: Sequence[Array], at: Mapping[str, Any], layout: str, variant: str = NAME
) -> None:
    """Compare with the reference on rounded operands: sums, bias and results are float32."""
    call = call_of(name, inputs, at, layout)
    x, w, *rest = inputs
    run(bound(call, variant))
    near(call.outputs[0], reference(name, [rounded(x), rounded(w), *rest], at)[0], 1e-5)
    assert around(call.outputs[0])
    assert bound(replace(call, precision="float32"), variant) is None
    assert bound(replace(call, constants=frozenset()), variant) is None


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("x", "w", "changed"),
    [
        ((2, 16, 9, 8), (24, 16, 3, 3), {}),
        ((2, 16, 9, 8), (24, 4, 3, 3), {"groups": 4}),
        ((1, 32, 7, 7), (48, 32, 1, 1), {"padding": (0, 0, 0, 0)}),
        ((1, 3, 21, 20), (16, 3, 7, 7), {"stride": (2, 2), "padding": (3, 3, 3, 3)}),
        ((2, 3, 20, 21), (16, 3, 7, 7), {"stride": (1, 2), "padding": (0, 0, 0, 0)}),
        ((1, 3, 20, 27), (16, 3, 5, 11), {"stride": (3, 4), "padding": (0, 2, 1, 0)}),
        ((1, 1, 12, 17), (8, 1, 3, 5), {"stride": (2, 3), "padding": (1, 2, 0, 1)}),
        ((1, 5, 9, 6), (8, 5, 2, 9), {"stride": (1, 2), "padding": (1, 1, 0, 6)}),
    ],
    ids=str,
)
def test_convolutions(
    x: tuple[int, ...], w: tuple[int, ...], changed: dict[str, Any], layout: str
) -> None:
    operands = [random(*x), random(*w, seed=1), random(w[0], seed=2)]
    check("conv2d", operands, CONV | changed, layout)


@pytest.mark.parametrize("layout", ["last", "last tile", "tile"])
def test_convolutions_of_pixels(layout: str) -> None:
    operands = [random(2, 16, 5, 6), random(24, 16, 1, 1, seed=1), random(24, seed=2)]
    at = CONV | {"padding": (0, 0, 0, 0)}
    if "tile" in layout:  # of which pixels are no rows of a matrix
        assert bound(call_of("conv2d", operands, at, layout), PRODUCT) is None
    else:
        check("conv2d", operands, at, layout, PRODUCT)


def test_convolutions_of_pixels_fill_part_of_a_concatenation() -> None:
    operands = [random(2, 16, 5, 6), random(24, 16, 1, 1, seed=1), random(24, seed=2)]
    call = call_of("conv2d", operands, CONV | {"padding": (0, 0, 0, 0)}, "last")
    whole = np.full((2, 5, 6, 40), 7, np.float32)
    part = np.moveaxis(whole[..., 8:32], -1, 1)
    run(bound(replace(call, outputs=(part,)), PRODUCT))
    run(bound(call, PRODUCT))
    np.testing.assert_array_equal(part, call.outputs[0])
    assert (whole[..., :8] == 7).all() and (whole[..., 32:] == 7).all()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_sequences_and_volumes(layout: str) -> None:
    w = random(24, 16, 3, seed=1)
    at = {"stride": (2,), "padding": (1, 1), "dilation": (1,), "groups": 1, "bias": False}
    check("conv1d", [random(2, 16, 11), w], at, layout)
    at = {"stride": (1, 1, 1), "padding": (0, 1, 0, 0, 1, 0), "dilation": (1, 1, 1), "groups": 1}
    volumes = [random(1, 8, 4, 5, 6), random(12, 8, 2, 3, 2, seed=1)]
    check("conv3d", volumes, {**at, "bias": False}, layout)


@pytest.mark.parametrize("layout", ["plain", "tile"])
@pytest.mark.parametrize("shape", [(1, 20), (20,), (9, 20), (3, 4, 20)], ids=str)
def test_products(shape: tuple[int, ...], layout: str) -> None:
    x, w, b = random(*shape), random(20, 33, seed=1), random(33, seed=2)
    for activation in (None, "gelu"):
        check("linear", [x, w, b], {"bias": True, "activation": activation}, layout)
    if len(shape) > 1:
        check("matmul", [x, w], {}, layout)
        check("matmul", [x, np.ascontiguousarray(w.T)], {"transpose_b": True}, layout)


def test_batches_of_weights() -> None:
    check("matmul", [random(3, 6, 20), random(3, 20, 7, seed=1)], {}, "plain")


def test_steps_on_the_result_are_in_float32() -> None:
    x, w, more = random(9, 20), random(20, 33, seed=1), random(9, 33, seed=2)
    at = {"operator": "linear", "arity": 2, "items": (("bias", False),)}
    at["program"] = (("add", (0, 1), ()), ("relu", (2,), ()))
    y = np.empty((9, 33), np.float32)
    call = Call("with_epilogue", at, (x, w, more), (y,), 2, frozenset({1}), BFLOAT16)
    run(bound(call, NAME))
    near(y, np.maximum(rounded(x).astype(float) @ rounded(w) + more, 0), 1e-5)


ROUNDS = ("cast", (3,), (("to", "bfloat16"),))
SUM = (("cast", (1,), (("to", "float32"),)), ("add", (0, 2), ()))


@pytest.mark.parametrize("name", [NAME, "two_passes"])
@pytest.mark.parametrize("program", [(), SUM, (*SUM, ROUNDS)], ids=len)
@pytest.mark.parametrize("operator_", ["linear", "conv1d", "conv2d", "conv3d", "matmul"])
def test_halves_are_read_and_written(operator_: str, program: Any, name: str) -> None:
    """Of operands that are of the type, nothing is rounded but the result, whatever is allowed."""
    images = operator_.startswith("conv")
    rank = int(operator_[4]) if images else 0
    size, ones = (9, 8, 5)[:rank], (1,) * rank
    shapes = ((2, 16, *size), (24, 16, *(3,) * rank)) if images else ((2, 9, 20), (20, 33))
    x, w = (
        random(*shape, seed=seed).astype(ml_dtypes.bfloat16) for seed, shape in enumerate(shapes)
    )
    more = random(*((2, 24, *size) if images else (2, 9, 33)), seed=2).astype(ml_dtypes.bfloat16)
    windows = {"stride": ones, "padding": 2 * ones, "dilation": ones, "groups": 1}
    own = {"linear": {"bias": False}, "matmul": {}}.get(operator_, {**windows, "bias": False})
    items = tuple(operator(operator_).normalise(own).items())
    at: dict[str, Any] = {"operator": operator_, "items": items, "arity": 2}
    at = operator("with_epilogue").normalise({**at, "program": program, "wide": True})
    given = (x, w, more)[: 3 if program else 2]
    (expected,) = operator("with_epilogue").run(at, *given)
    layout = "last" if images else "plain"
    placed = (place(x, layout), w, *given[2:])
    for weights, constants in ((w, frozenset[int]()), (w.astype(np.float32), frozenset({1}))):
        y = place(np.zeros(expected.shape, expected.dtype), layout)
        inputs = (placed[0], weights, *placed[2:])
        call = Call("with_epilogue", at, inputs, (y,), 2, constants)
        run(bound(call, name))
        near(y.astype(np.float32), expected.astype(np.float32), 8e-3 if ROUNDS in program else 1e-5)
    inexact = replace(call, inputs=(placed[0], weights + np.float32(1e-3), *placed[2:]))
    assert bound(inexact, NAME) is None
    assert bound(replace(inexact, precision=BFLOAT16), NAME) is not None


def test_numbers_that_are_none() -> None:
    x, w = random(4, 20), random(20, 8, seed=1)
    x[0, 0], x[1, 0], x[2] = np.nan, np.inf, 1e-45
    call = call_of("linear", [x, w], {"bias": False})
    run(bound(call, NAME))
    (y,) = call.outputs
    assert np.isnan(y[0]).all() and np.isinf(y[1]).all() and np.abs(y[2]).max() < 1e-40


def test_a_convolution_of_single_channels_stays_float32() -> None:
    at = CONV | {"groups": 16}
    call = call_of("conv2d", [random(1, 16, 9, 9), random(16, 1, 3, 3), random(16)], at)
    assert bound(call, NAME) is None and select(call)[0] != NAME


def test_a_choice_of_one_precision_is_none_of_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """A choice is kept by a call's form, and a variant that is named serves no other precision."""
    module = import_module("soapstone.kernels.cpu.onednn.bfloat16")
    monkeypatch.setattr(module, "gains_by_bfloat16", lambda: True)
    call = call_of("linear", [random(64, 64), random(64, 64, seed=1)], {"bias": False})
    single = replace(call, precision="float32")
    assert form(call) != form(single) and form(single).endswith("[1]]")
    choices = Choices(tune=False)
    with choices.current():
        assert [select(each)[0] for each in (call, single, call)] == [NAME, "onednn", NAME]
    assert len(choices.made) == 2
    with pytest.raises(ValueError, match="variant 'onednn_bfloat16' does not serve this call"):
        select(single, variant=NAME)


@pytest.mark.parametrize("keys", [24, 700])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_attention(keys: int, causal: bool, masked: bool) -> None:
    """Queries, keys, values and weights are rounded; scores, their sums and results are not."""
    q, k, v = (random(2, keys, 3, 16, seed=seed) for seed in range(3))
    mask = [random(2, 1, keys, keys, seed=3)] if masked else []
    at = operator("attention").normalise({"causal": causal})
    expected = reference("attention", [*map(rounded, (q, k, v)), *mask], at)
    outputs = tuple(np.empty(each.shape, np.float32) for each in expected)
    call = Call("attention", at, (q, k, v, *mask), outputs, 2, frozenset(), BFLOAT16)
    run(bound(call, NAME))
    near(outputs[0], expected[0], 1e-2)
    near(outputs[1], expected[1], 1e-4)
    assert bound(replace(call, precision="float32"), NAME) is None
