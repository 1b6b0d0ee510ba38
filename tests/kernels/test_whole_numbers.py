"""Kernels on integers and truths, exactly: against the operators' references."""

from __future__ import annotations

import numpy as np
import pytest

from soapstone.ir.spec import operator
from soapstone.kernels.entry import Array, Call
from soapstone.kernels.registry import variants
from soapstone.native.memory import run

INTEGERS = ("int32", "int64")


def draw(dtype: str, *shape: int, seed: int = 0) -> Array:
    """Return numbers of all magnitudes; a third of two draws are equal."""
    random = np.random.default_rng(seed)
    if dtype == "bool":
        return random.integers(0, 2, shape) == 1
    ends = np.iinfo(dtype)
    drawn = random.integers(ends.min, ends.max, shape, dtype, endpoint=True)
    few = random.integers(-1, 2, shape, dtype)
    return np.where(random.integers(0, 2, shape) == 1, drawn, few).astype(dtype)


def check(name: str, inputs: list[Array], outputs: list[Array], attributes: object = ()) -> None:
    """Compare what the native kernel writes with the reference."""
    spec = operator(name)
    given = spec.normalise(dict(attributes))  # type: ignore[call-overload]
    with np.errstate(over="ignore"):
        expected = spec.run(given, *inputs, dtypes=[y.dtype for y in outputs])
    call = Call(name, given, tuple(inputs), tuple(outputs), 2, frozenset())
    (kernel,) = [v for v in variants(name) if v.name == "numba"]
    entry = kernel.bind(call)
    assert entry is not None and run(entry) == 0
    for y, wanted in zip(outputs, expected, strict=True):
        np.testing.assert_array_equal(y, wanted)


@pytest.mark.parametrize("dtype", INTEGERS)
@pytest.mark.parametrize("name", ["add", "sub", "mul", "minimum", "maximum", "equal", "less"])
def test_two_operands_broadcast_in_any_layout(name: str, dtype: str) -> None:
    to = "bool" if name in ("equal", "less") else dtype
    x, y = draw(dtype, 5, 131), draw(dtype, 131, 5, seed=1)
    out = np.zeros((5, 263), to)
    check(name, [x, y.T], [out[:, 1:262:2]])
    assert not out[:, ::2].any()
    check(name, [x[::-1], y.T[2]], [np.zeros((5, 131), to)])
    check(name, [x[:1, :1], x[1:2, :1]], [np.zeros((1, 1), to)])


@pytest.mark.parametrize("source", ["bool", *INTEGERS])
@pytest.mark.parametrize("target", ["bool", *INTEGERS])
def test_casts_wrap(source: str, target: str) -> None:
    check("cast", [draw(source, 3, 300)], [np.zeros((3, 300), target)], {"to": target})


@pytest.mark.parametrize("dtype", INTEGERS)
def test_magnitudes_and_choices(dtype: str) -> None:
    x, y = draw(dtype, 257), draw(dtype, 3, 1, seed=1)
    check("abs", [x], [np.zeros_like(x)])
    check("neg", [x], [np.zeros_like(x)])
    check("where", [draw("bool", 3, 257), x, y], [np.zeros((3, 257), dtype)])


def test_a_chain_in_place() -> None:
    x, y = draw("int32", 2, 150), draw("int64", 150, seed=1)
    program = (
        ("cast", (0,), (("to", "int64"),)),
        ("add", (2, 1), ()),
        ("less", (3, 1), ()),
        ("mul", (0, 0), ()),
    )
    outputs = [np.zeros((2, 150), "int64"), np.zeros((2, 150), "bool"), x]
    check("fused_elementwise", [x, y], outputs, {"program": program, "results": (3, 4, 5)})


@pytest.mark.parametrize("dtype", INTEGERS)
@pytest.mark.parametrize("name", ["reduce_sum", "reduce_max", "reduce_min"])
def test_reductions(name: str, dtype: str) -> None:
    x = draw(dtype, 3, 5, 7, 4)
    for axes in [(0,), (3,), (1, 3), (0, 2), (0, 1, 2, 3), ()]:
        shape = tuple(n for d, n in enumerate(x.shape) if d not in axes)
        at = {"axes": axes, "keepdims": False}
        check(name, [x], [np.zeros(shape, dtype)], at)
        check(
            name,
            [x.transpose(0, 3, 2, 1)[::-1].transpose(0, 3, 2, 1)],
            [np.zeros(shape, dtype)],
            at,
        )
    check(name, [x[:1, :1, :1]], [np.zeros((1, 1, 1, 1), dtype)], {"axes": (3,), "keepdims": True})


def test_a_sum_of_nothing_is_zero() -> None:
    check("reduce_sum", [np.zeros((3, 0), "int64")], [np.ones(3, "int64")], {"axes": (1,)})
