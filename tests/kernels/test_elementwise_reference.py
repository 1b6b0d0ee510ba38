"""Element-wise operators by reference: types, integers, gradients at ties; chains in a graph."""

from __future__ import annotations

import numpy as np
import pytest

from soapstone import InferenceSession
from soapstone.dtypes import DTYPES, learn
from soapstone.ir.builder import GraphBuilder
from soapstone.ir.errors import ShapeError
from soapstone.ir.interpret import interpret
from soapstone.ir.spec import OpSpec, operator, operators
from soapstone.ir.tensor import Array, TensorSpec, spec_of
from soapstone.ir.training.autodiff import gradients

FAMILY = [o for o in operators() if o.elementwise and o.name != "fused_elementwise"]
FLOATS = ("float16", "float32", "float64")
# Floating-point exponents and slopes: these gradients are never asked of integers.
FLOAT_ONLY = {"pow_grad", "affine"}


def run(name: str, *arrays: Array, **attributes: object) -> Array:
    spec = operator(name)
    values = spec.normalise(attributes)
    signature = spec.bind([spec_of(array) for array in arrays], values)
    (result,) = spec.run(values, *arrays)
    assert spec_of(result) == signature.output_specs[0]
    return result


@pytest.mark.parametrize("spec", FAMILY, ids=[spec.name for spec in FAMILY])
def test_every_type_gives_the_declared_type_or_is_refused(spec: OpSpec) -> None:
    attributes = spec.normalise(spec.cases[0].attributes)
    served = []
    for dtype in DTYPES:
        if dtype not in FLOATS and spec.name in FLOAT_ONLY:
            continue
        arrays = [np.array([1, 2, 3, 0, 1]).astype(learn(dtype)) for _ in spec.inputs]
        if spec.name == "where":
            arrays[0] = arrays[0] > 1
        for place in {"quantize": (2,), "dequantize": (0, 2)}.get(spec.name, ()):
            arrays[place] = arrays[place].astype(np.uint8)
        try:
            signature = spec.bind([spec_of(array) for array in arrays], attributes)
        except ShapeError as error:
            assert "needed" in str(error)
            continue
        if dtype == "bool" and spec.name in ("power", "accumulate"):
            continue
        with np.errstate(all="ignore"):
            (result,) = spec.run(attributes, *arrays)
        assert result.dtype.name == signature.output_specs[0].dtype
        served.append(dtype)
    floats = not spec.name.startswith(("logical", "bit"))
    assert set(FLOATS) <= set(served) if floats else served


def test_integers_divide_toward_zero_and_remainders_follow() -> None:
    x = np.array([7, -7, 7, -7, 6, 0], np.int64)
    y = np.array([2, 2, -2, -2, 3, 5], np.int64)
    np.testing.assert_array_equal(run("div", x, y), [3, -3, -3, 3, 2, 0])
    np.testing.assert_array_equal(run("mod", x, y), [1, 1, -1, -1, 0, 0])
    np.testing.assert_array_equal(run("mod", x, y, fmod=True), [1, -1, 1, -1, 0, 0])
    np.testing.assert_array_equal(run("mul", x, y) + run("add", x, y), x * y + x + y)
    np.testing.assert_array_equal(run("div", np.uint8([250]), np.uint8([7])), [35])


def test_powers_keep_the_type_of_the_base() -> None:
    np.testing.assert_array_equal(
        run("pow", np.int32([1, 2, 3]), np.float32([4, 5, 6])), [1, 32, 729]
    )
    np.testing.assert_array_equal(
        run("pow", np.int64([1, 2, -1]), np.int64([-1, -1, -3])), [1, 0, -1]
    )
    np.testing.assert_allclose(run("pow", np.float32([4, 9]), np.int64([2, -1])), [16, 1 / 9])


def test_limits_of_integers_are_not_rounded() -> None:
    x = np.array([-(2**62) - 1, 5, 2**62 + 1], np.int64)
    np.testing.assert_array_equal(run("clip", x, high=2.0**63), x)
    np.testing.assert_array_equal(run("clip", x, low=0.0), np.maximum(x, 0))
    np.testing.assert_array_equal(run("clip", np.uint8([0, 9]), low=-1.0, high=300.0), [0, 9])


def test_types_that_would_change_the_result_are_refused() -> None:
    with pytest.raises(ShapeError, match="input 1 has type int64; float32 of input 0 needed"):
        operator("add").bind([TensorSpec((2,)), TensorSpec((2,), "int64")], {})
    with pytest.raises(ShapeError, match="input 0 has type float32; bool needed"):
        operator("where").bind([TensorSpec((2,))] * 3, {})
    with pytest.raises(ShapeError, match="input 0 has type int32; a floating-point type needed"):
        operator("exp").bind([TensorSpec((2,), "int32")], {})


def gradient_of(name: str, *arrays: Array, **attributes: object) -> list[Array]:
    builder = GraphBuilder("gradient")
    names = [builder.input(f"x{i}", a.shape, a.dtype.name) for i, a in enumerate(arrays)]
    (y,) = builder.apply(name, *names, **attributes)
    (loss,) = builder.apply("reduce_sum", y, axes=tuple(range(builder.spec(y).rank)))
    wanted = [n for n in names if builder.spec(n).is_float]
    found = gradients(builder, loss, wanted)
    builder.output(*found.values())
    values = interpret(builder.build(), dict(zip(names, arrays)))
    return [values[found[n]] for n in wanted]


def test_ties_share_the_gradient_and_limits_pass_it() -> None:
    x, y = np.array([1.0, 2.0, 3.0]), np.array([2.0, 2.0, 2.0])
    np.testing.assert_array_equal(gradient_of("maximum", x, y), [[0, 0.5, 1], [1, 0.5, 0]])
    np.testing.assert_array_equal(gradient_of("minimum", x, y), [[1, 0.5, 0], [0, 0.5, 1]])
    (dx,) = gradient_of("clip", x, low=1.0, high=2.5)
    np.testing.assert_array_equal(dx, [1, 1, 0])


def test_gradients_off_the_usual_range() -> None:
    x = np.array([1.5, 3.0, 40.0])
    np.testing.assert_allclose(gradient_of("acosh", x)[0], 1 / np.sqrt(x * x - 1))
    mask = np.array([True, False, True])
    broken = np.array([1.0, np.nan, np.inf])
    dx, dy = gradient_of("where", mask, x, broken)
    np.testing.assert_array_equal([dx, dy], [[1, 0, 1], [0, 1, 0]])
    base, exponent = np.array([0.0, 2.0, 3.0]), np.array([2.0, 0.0, 2.0])
    dbase, dexponent = gradient_of("pow", base, exponent)
    np.testing.assert_allclose(dbase, [0, 0, 6])
    np.testing.assert_allclose(dexponent, [0, np.log(2), 9 * np.log(3)])


@pytest.mark.parametrize("threads", [1, 2])
def test_a_session_runs_activations_spelt_out_and_masks(threads: int) -> None:
    builder = GraphBuilder("spelt")
    x = builder.input("x", (2, 20, 96))
    keep = builder.input("keep", (2, 1, 96), "int64")
    constants = {
        name: builder.apply("full", shape=(), value=value)[0]
        for name, value in (("root", 2**0.5), ("one", 1.0), ("half", 0.5), ("low", -1e4))
    }

    def apply(name: str, *inputs: str, **attributes: object) -> str:
        return builder.apply(name, *inputs, **attributes)[0]

    inner = apply("erf", apply("div", x, constants["root"]))
    gelu = apply("mul", apply("mul", x, apply("add", inner, constants["one"])), constants["half"])
    mask = apply("greater", gelu, constants["one"])
    kept = apply("logical_or", mask, apply("cast", keep, to="bool"))
    masked = apply("where", kept, gelu, constants["low"])
    added = apply("add", masked, apply("cast", keep, to="float32"))
    builder.output(added, apply("cast", kept, to="int64"))
    graph = builder.build()
    random = np.random.default_rng(3)
    values = {
        "x": random.standard_normal((2, 20, 96)).astype(np.float32),
        "keep": random.integers(0, 2, (2, 1, 96)),
    }
    want = interpret(graph, values)
    with InferenceSession(graph, {}, threads=threads) as session:
        got = session.run(values)
        assert set(session.variants(values).values()) == {"numba"}
    for name in graph.outputs:
        np.testing.assert_allclose(got[name], want[name], rtol=1e-5, atol=1e-5)
