"""Weights of narrow types before products: they stay packed, and give what the file says."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

from soapstone import InferenceSession, from_onnx
from soapstone.dtypes import floats, integers, kind_of
from soapstone.engine.lower import fold_weights
from soapstone.ir.builder import GraphBuilder
from soapstone.ir.tensor import Array, Role

INTEGERS = ("int4", "uint4", "int2", "uint2", "int8", "uint8")
FLOATS = ("float8_e4m3fn", "float8_e5m2", "float4_e2m1fn")
DEPTH, COLUMNS = 160, 520
BIAS = np.linspace(-3, 3, COLUMNS, dtype=np.float32)
RANDOM = np.random.default_rng(0)


def drawn(dtype: str, shape: tuple[int, ...]) -> Array:
    """Return numbers of a type."""
    if kind_of(dtype) in "iu":
        limits = integers(dtype)
        return RANDOM.integers(limits.min, limits.max + 1, shape).astype(dtype)
    most = min(200.0, float(floats(dtype).max))
    return RANDOM.uniform(-most, most, shape).astype(dtype)


def model(
    w: Array, scale: Array, zero: Array | None, turned: bool, bias: bool, **attributes: Any
) -> onnx.ModelProto:
    """Return a product with dequantised weights, which are transposed first if they are (n, k)."""
    kept = {"w": w, "scale": scale, **({} if zero is None else {"zero": zero})}
    nodes = [helper.make_node("DequantizeLinear", list(kept), ["real"], **attributes)]
    if turned:
        nodes.append(helper.make_node("Transpose", ["real"], ["turned"], perm=[1, 0]))
    product = "product" if bias else "y"
    nodes.append(helper.make_node("MatMul", ["x", nodes[-1].output[0]], [product]))
    if bias:
        kept["bias"] = BIAS
        nodes.append(helper.make_node("Add", ["product", "bias"], ["y"]))
    graph = helper.make_graph(
        nodes,
        "narrow",
        [helper.make_tensor_value_info("x", 1, ["rows", DEPTH])],
        [helper.make_tensor_value_info("y", 1, ["rows", COLUMNS])],
        [numpy_helper.from_array(array, name) for name, array in kept.items()],
    )
    opsets = [helper.make_opsetid("", 25)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=13)


def check(source: onnx.ModelProto, wanted: Array, x: Array, packed: bool = True) -> None:
    """Assert that a session gives the products, and whether with packed weights."""
    read = from_onnx(source)
    graph = fold_weights(read.graph({"rows": len(x)}), read.weights)
    operators = [node.operator for node in graph.nodes]
    assert ("matmul_nbits" in operators) == packed
    with InferenceSession(read, threads=1) as session:
        (found,) = session.run({"x": x}).values()
    most = np.abs(wanted).max()
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=2e-6 * most)


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("how", ["one", "axis", "blocks", "zeros"])
@pytest.mark.parametrize("dtype", [*INTEGERS, *FLOATS])
def test_weights_stay_packed(dtype: str, how: str, turned: bool) -> None:
    w = drawn(dtype, (DEPTH, COLUMNS))
    blocks = {"one": (), "axis": (COLUMNS,)}.get(how, (DEPTH // 32, COLUMNS))
    scale = RANDOM.uniform(0.1, 2, blocks).astype(np.float32)
    zero = drawn(dtype, blocks) if how == "zeros" and dtype in INTEGERS else None
    x = RANDOM.standard_normal((3, DEPTH)).astype(np.float32)
    wide = [np.float64(each) for each in (w, scale, 0 if zero is None else zero)]
    if len(blocks) == 2:
        wide[1:] = [np.repeat(each, 32, 0) if each.ndim else each for each in wide[1:]]
    real = (wide[0] - wide[2]) * wide[1]
    attributes: dict[str, Any] = {"axis": int(not turned)}
    if len(blocks) == 2:
        attributes = {"axis": int(turned), "block_size": 32}
    given = [each if not turned or each is None else each.T for each in (w, scale, zero)]
    source = model(given[0], given[1], given[2], turned, how == "axis", **attributes)
    wanted = x @ real + (BIAS if how == "axis" else 0)
    check(source, wanted, x)


@pytest.mark.parametrize("dtype", FLOATS[:2])
def test_what_is_no_number_stays_none(dtype: str) -> None:
    w = drawn(dtype, (DEPTH, COLUMNS))
    w[70, 3] = np.nan
    x = np.ones((1, DEPTH), np.float32)
    wanted = x @ np.float64(w)
    assert np.isnan(wanted[0]).nonzero()[0].tolist() == [3]
    source = model(w, np.array(1, np.float32), None, False, False)
    with InferenceSession(from_onnx(source), threads=1) as session:
        (found,) = session.run({"x": x}).values()
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-2)


def test_what_does_not_fit_is_computed_as_it_is_written() -> None:
    w = drawn("int4", (DEPTH, COLUMNS))
    scale = RANDOM.uniform(0.1, 2, (DEPTH, 1)).astype(np.float32)  # one for each number of k
    x = RANDOM.standard_normal((2, DEPTH)).astype(np.float32)
    source = model(w, scale.reshape(-1), None, False, False, axis=0)
    check(source, x @ (np.float64(w) * scale), x, packed=False)
    w = drawn("int8", (DEPTH, COLUMNS))
    narrow = RANDOM.uniform(0.1, 2, (DEPTH // 4, COLUMNS)).astype(np.float32)
    source = model(w, narrow, None, False, False, axis=0, block_size=4)
    check(source, x @ (np.float64(w) * np.repeat(narrow, 4, 0)), x, packed=False)


@pytest.mark.parametrize("case", ["within a block", "blocks of two sizes", "a column"])
def test_scales_that_are_none_of_whole_blocks_stay(case: str) -> None:
    depth, columns = {"within a block": 112, "blocks of two sizes": 96, "a column": 64}[case], 32
    builder, held = GraphBuilder("sliced"), dict[str, Array]()

    def constant(name: str, shape: tuple[int, ...], dtype: str = "float32") -> str:
        held[name] = drawn("int8", shape).astype(dtype)
        return builder.input(name, shape, dtype, role=Role.CONSTANT)

    def repeated(name: str, block: int, begin: int = 0) -> str:
        blocks = -(-depth // block)
        (wide,) = builder.apply(
            "broadcast", constant(name, (blocks, 1, columns)), shape=(blocks, block, columns)
        )
        (flat,) = builder.apply("reshape", wide, shape=(blocks * block, columns))
        at = {"starts": (begin, 0), "stops": (begin + depth, columns), "steps": (1, 1)}
        return builder.apply("slice", flat, **at)[0]

    narrow = constant("w", (depth, 1 if case == "a column" else columns), "int8")
    (w,) = builder.apply("cast", narrow, to="float32")
    if case == "blocks of two sizes":
        (w,) = builder.apply("sub", w, repeated("zero", 64))
    scale = {
        "within a block": lambda: repeated("scale", 32, 16),
        "blocks of two sizes": lambda: repeated("scale", 48),
        "a column": lambda: constant("scale", (1, columns)),
    }[case]()
    (w,) = builder.apply("mul", w, scale)
    x, bias = builder.input("x", (3, depth)), constant("bias", (columns,))
    builder.output(*builder.apply("linear", x, w, bias))
    graph = builder.build()
    folded = fold_weights(graph, held)
    assert "matmul_nbits" not in {node.operator for node in folded.nodes}
