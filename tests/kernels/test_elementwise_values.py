"""The element-wise machine on other types than float32; accuracy, and special values."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
from helpers.elementwise_calls import SPECIAL, fused, run
from helpers.kernel_calls import random, reference, served
from helpers.operator_checks import parse

from soapstone.ir.spec import Case, OpSpec, operators
from soapstone.kernels.cpu.elementwise.machine import elementwise, fused_elementwise
from soapstone.kernels.entry import Call
from soapstone.kernels.registry import variants
from soapstone.native import memory

Array = np.ndarray[Any, Any]


def typed(dtype: str, *shape: int, seed: int = 0) -> Array:
    values = 4 * random(*shape, seed=seed)
    return values > 0 if dtype == "bool" else np.asarray(np.abs(values), dtype)


@pytest.mark.parametrize("source", ["float32", "bool", "int32", "int64", "uint8", "float64"])
@pytest.mark.parametrize("target", ["float32", "bool", "int32", "int64", "uint8", "float64"])
def test_casts(source: str, target: str) -> None:
    large = 123_456_789 if source in ("int32", "int64") else 3
    for shape in ((), (1,), (77,), (5, 3000), (3, 8, 5)):
        x = np.asarray(typed(source, *shape) * np.asarray(large, source))
        y = np.zeros(shape, target)
        entry = elementwise(Call("cast", {"to": target}, (x,), (y,)))
        exact = source in ("float32", "bool", "uint8") or target == "float32"
        exact = exact or {source, target} <= {"int32", "int64"}
        assert (entry is not None) == (exact or (target == "bool" and source != "float64"))
        if entry is not None:
            assert memory.run(entry) == 0
            np.testing.assert_array_equal(y, x.astype(target))


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("shape", [(7,), (300, 70), (2, 8, 7, 5)])
def test_comparisons_and_choices(shape: tuple[int, ...], threads: int) -> None:
    a, b = np.round(random(*shape)), np.round(random(*shape[-1:], seed=1))
    mask = np.zeros(shape, np.bool_)
    for operator, function in (
        ("equal", np.equal),
        ("less", np.less),
        ("less_equal", np.less_equal),
        ("greater", np.greater),
        ("greater_equal", np.greater_equal),
    ):
        mask[...] = False
        run(operator, [a, b], [mask], threads)
        np.testing.assert_array_equal(mask, function(a, b), err_msg=operator)
    y = np.zeros_like(a)
    row = b > 0
    run("where", [row, a, np.array(-np.inf, np.float32)], [y], threads)
    np.testing.assert_array_equal(y, np.where(row, a, -np.inf))
    backwards = mask[..., ::-1]
    run("where", [backwards, a, b], [y], threads)
    np.testing.assert_array_equal(y, np.where(backwards, a, b))


def test_logic_in_one_pass() -> None:
    a, b, c = (typed("bool", 5000, seed=i) for i in range(3))
    y = np.zeros(5000, np.bool_)
    chain = [
        ("logical_and", (0, 1), {}),
        ("logical_not", (3,), {}),
        ("logical_xor", (4, 2), {}),
        ("logical_or", (5, 0), {}),
    ]
    fused([a, b, c], [y], chain, (6,))
    np.testing.assert_array_equal(y, (~(a & b) ^ c) | a)


def test_a_mask_of_integers_joins_a_chain_of_floats() -> None:
    x, ids = random(40, 33), np.arange(33, dtype=np.int64)
    y = np.zeros_like(x)
    chain = [
        ("cast", (1,), {"to": "float32"}),
        ("affine", (2,), {"scale": -1e4, "shift": 1e4}),
        ("add", (0, 3), {}),
    ]
    fused([x, ids], [y], chain, (4,))
    np.testing.assert_allclose(y, x + (1 - ids.astype(np.float32)) * 1e4, rtol=1e-6)


@pytest.mark.parametrize("count", [3, 5000])
@pytest.mark.parametrize("source", ["float32", "uint8", "int8"])
@pytest.mark.parametrize("target", ["uint8", "int8"])
def test_later_steps_of_a_chain_see_bytes_as_they_are_stored(
    target: str, source: str, count: int
) -> None:
    least = 0 if "uint8" in (source, target) and source != "int8" else -128
    x = np.linspace(least, 127.9 if "int8" in (source, target) else 255.9, count).astype(source)
    held, y = np.zeros(count, target), np.zeros(count, np.float32)
    chain = [
        ("cast", (0,), {"to": target}),
        ("cast", (1,), {"to": "float32"}),
        ("affine", (2,), {"scale": 0.5, "shift": 1.0}),
    ]
    fused([x], [held, y], chain, (1, 3))
    np.testing.assert_array_equal(held, x.astype(target))
    np.testing.assert_array_equal(y, x.astype(target).astype(np.float32) * 0.5 + 1)


def test_what_float32_would_not_hold_is_computed_in_integers() -> None:
    ids = np.arange(5) + (1 << 53)
    for operator, inputs, output, expected in (
        ("add", (ids, ids), ids.copy(), ids + ids),
        ("equal", (ids, ids[1:2]), np.zeros(5, np.bool_), ids == ids[1]),
        ("where", (ids > ids[2], ids, ids[:1]), ids.copy(), np.where(ids > ids[2], ids, ids[0])),
    ):
        run(operator, list(inputs), [output])
        np.testing.assert_array_equal(output, expected)
    attributes = {"program": (("neg", (1,), ()),), "results": (0, 2)}
    outputs = (ids.copy(), np.zeros(5, np.float32))
    call = Call("fused_elementwise", attributes, (ids, random(5)), outputs)
    assert fused_elementwise(call) is None


def test_gelu_is_accurate_also_in_its_left_tail() -> None:
    x = np.linspace(-12, 12, 20_001, dtype=np.float32)
    y = np.zeros_like(x)
    run("gelu", [x], [y], approximate="none")
    wide = x.astype(np.float64)
    want = wide * 0.5 * np.vectorize(math.erfc)(-wide / math.sqrt(2))
    np.testing.assert_allclose(y, want, rtol=1e-4, atol=1e-11)
    np.testing.assert_allclose(y[x > -5.5], want[x > -5.5], rtol=3e-5)
    assert np.abs(y - want).max() < 5e-7


CALLS: tuple[tuple[str, int, dict[str, Any]], ...] = (  # operator, operands, attributes
    *((name, 1, {}) for name in ("relu", "sigmoid", "tanh", "exp", "log", "sqrt", "neg")),
    *((name, 2, {}) for name in ("add", "sub", "mul", "div")),
    *((name, 2, {}) for name in ("relu_grad", "sigmoid_grad", "tanh_grad")),
    ("leaky_relu", 1, {"alpha": 0.2}),
    ("leaky_relu_grad", 2, {"alpha": 0.1}),
    ("affine", 1, {"scale": 2.5, "shift": -1.0}),
    ("accumulate", 4, {}),
    ("accumulate", 1, {}),
    *(("gelu", 1, {"approximate": how}) for how in ("none", "tanh")),
    *(("gelu_grad", 2, {"approximate": how}) for how in ("none", "tanh")),
    *(("power", 1, {"exponent": e}) for e in (2.0, 3, 7.0, -1.0, -2.0, 0.5, 1.0, 0.0, 1.7, 11.0)),
)


@pytest.mark.parametrize(("name", "operands", "attributes"), CALLS, ids=str)
def test_every_length(name: str, operands: int, attributes: dict[str, Any]) -> None:
    for size in (1, 15, 16, 77, 5000):
        inputs = [3 * random(size, seed=i) for i in range(operands)]
        assert served(name, inputs, attributes, only="numba", threads=1, tolerance=2e-6)


FUNCTIONS = (
    *("sin", "cos", "tan", "atan", "sinh", "cosh", "asinh", "erf", "softplus", "mish", "silu"),
    *("elu", "round", "floor", "ceil", "sign", "abs", "softsign"),
)
WIDE = np.concatenate([np.linspace(-20, 20, 5001), np.linspace(-0.1, 0.1, 999), [0.5, 1.5, 2.5]])
RANGES = [  # where functions are compared
    *((name, WIDE) for name in FUNCTIONS),
    *((name, np.linspace(-1, 1, 10_001)) for name in ("asin", "acos")),
    ("atanh", np.linspace(-0.99, 0.99, 10_001)),
    ("acosh", np.linspace(1, 1e4, 10_001)),
    *((name, np.linspace(-1e5, 1e5, 10_001)) for name in ("sin", "cos")),
]


@pytest.mark.parametrize(("name", "places"), RANGES, ids=[name for name, _ in RANGES])
def test_function(name: str, places: Array) -> None:
    x = places.astype(np.float32)
    assert served(name, [x], only="numba", threads=1, tolerance=1e-6)


SUBNORMAL = ("sigmoid", "tanh", "exp", "sqrt", "power")  # of such results few bits are left


@pytest.mark.parametrize(
    ("name", "attributes"),
    [
        *((name, {}) for name in ("relu", "sigmoid", "tanh", "exp", "sqrt", "neg", "log")),
        *((name, {}) for name in ("atan", "sinh", "cosh", "asinh", "softplus", "floor", "ceil")),
        *((name, {}) for name in ("round", "sign", "abs", "erf", "asin", "acos", "acosh", "atanh")),
        *((name, {}) for name in ("sin", "reciprocal", "is_nan", "is_inf")),
        ("leaky_relu", {"alpha": 0.2}),
        *(("power", {"exponent": exponent}) for exponent in (2.0, 3)),
    ],
    ids=str,
)
def test_special_values(name: str, attributes: dict[str, Any]) -> None:
    x = SPECIAL[np.abs(np.nan_to_num(SPECIAL)) < 1e30] if name == "sin" else SPECIAL
    y = np.empty(x.shape, np.bool_ if name.startswith("is_") else np.float32)
    run(name, [x], [y], **attributes)
    (want,) = reference(name, [x], attributes)
    with np.errstate(over="ignore"):
        want = want.astype(y.dtype)
    np.testing.assert_allclose(y, want, rtol=1e-3 if name in SUBNORMAL else 1e-5, atol=1e-37)


@pytest.mark.parametrize("exponent", [1.7, -1.7, 0.3, 9.0, 10.0, -9.0, -10.0])
def test_power_special_values(exponent: float) -> None:
    x = np.array([0.0, -0.0, 1, -1, np.inf, -np.inf, np.nan, 2, -2, 1e-30, 1e-42], np.float32)
    y = np.empty_like(x)
    run("power", [x], [y], exponent=exponent)
    with np.errstate(all="ignore"):
        np.testing.assert_allclose(y, np.power(x, np.float32(exponent)), rtol=1e-6)


@pytest.mark.parametrize("fmod", [False, True])
def test_remainders(fmod: bool) -> None:
    x = np.array([5, -5, 5, -5, 7.5, 1e30, 0, np.inf, 3, np.nan], np.float32)
    y = np.array([3, 3, -3, -3, 2.5, 7, 2, 2, np.inf, 1], np.float32)
    z = np.empty_like(x)
    run("mod", [x, y], [z], fmod=fmod)
    with np.errstate(invalid="ignore"):
        np.testing.assert_allclose(z, (np.fmod if fmod else np.mod)(x, y), rtol=1e-6)


PLACES = np.array([0, -0.0, 1, -1, 0.5, -2, np.inf, -np.inf, np.nan], np.float32)
REAL = {  # the cases of real operands alone, one for each attributes of an operator
    f"{spec.name} {dict(case.attributes)}": (spec, case)
    for spec in operators()
    if spec.elementwise
    for case in reversed(spec.cases)
    if all(parse(text)[0].is_float for text in case.inputs)
}


@pytest.mark.parametrize(("spec", "case"), REAL.values(), ids=REAL)
def test_every_kernel_has_the_values_of_the_reference_everywhere(spec: OpSpec, case: Case) -> None:
    """At zeros of both signs, infinities and NaN too: in all combinations of the operands."""
    places = np.array(list(itertools.product(PLACES, repeat=len(case.inputs))), np.float32)
    arrays = tuple(np.ascontiguousarray(column) for column in places.T)
    attributes = spec.normalise(case.attributes)
    with np.errstate(all="ignore"):
        wanted = spec.run(attributes, *arrays)
    for variant in variants(spec.name):
        outputs = tuple(np.full(array.shape, 77, array.dtype) for array in wanted)
        entry = variant.kernel(Call(spec.name, attributes, arrays, outputs))
        if entry is not None:
            assert memory.run(entry) == 0
            for want, output in zip(wanted, outputs):
                np.testing.assert_allclose(output, want, 1e-4, 1e-6, err_msg=variant.name)
