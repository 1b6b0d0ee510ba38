"""Element types of ONNX that NumPy lacks: tensors in and out, casts and quantisation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from soapstone import InferenceSession, from_onnx, to_onnx
from soapstone.dtypes import BITS, floats, integers, kind_of
from soapstone.frontend.onnx.errors import UnsupportedError
from soapstone.frontend.onnx.export.write import EXTERNAL_BYTES
from soapstone.frontend.onnx.file.tensors import ONNX_OF, TYPE_STRINGS, array_of, stored
from soapstone.ir.builder import GraphBuilder
from soapstone.ir.interpret import interpret
from soapstone.ir.tensor import Array, Role

NARROW = tuple(BITS)
FLOAT8 = ("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz")
FEW = ("int4", "uint4", "int2", "uint2")


def every(dtype: str, count: int | None = None) -> Array:
    """Return all numbers of a type, or the first of them, again and again."""
    bits = BITS[dtype]
    kind = np.uint16 if bits == 16 else np.uint8
    whole = np.arange(1 << bits, dtype=kind)
    return np.resize(whole, whole.size if count is None else count).view(dtype)


def same(found: Array, needed: Array) -> bool:
    """Return whether arrays are of one type and shape, and of one sign and number everywhere."""
    assert (found.dtype, found.shape) == (needed.dtype, needed.shape)
    one, two = found.astype(np.float64), needed.astype(np.float64)
    return np.array_equal(one, two, equal_nan=True) and np.array_equal(
        np.signbit(one) & ~np.isnan(one), np.signbit(two) & ~np.isnan(two)
    )


@pytest.mark.parametrize("dtype", NARROW)
def test_names_are_those_of_onnx(dtype: str) -> None:
    assert helper.tensor_dtype_to_np_dtype(ONNX_OF[dtype]) == np.dtype(dtype)
    name = TensorProto.DataType.Name(ONNX_OF[dtype]).lower()
    assert TYPE_STRINGS[dtype] == f"tensor({name})"


@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("count", [0, 1, 2, 3, 5, 300])
def test_tensors_are_read_and_written_as_onnx_does(dtype: str, count: int) -> None:
    array = every(dtype, count)
    tensor = numpy_helper.from_array(array, "w")
    assert same(array_of(tensor), array)
    assert stored(array).tobytes() == tensor.raw_data
    bits = array.view(np.uint16 if BITS[dtype] == 16 else np.uint8)
    whole = bits if BITS[dtype] >= 8 else stored(array)
    plain = TensorProto(dims=[count], data_type=ONNX_OF[dtype], int32_data=whole.tolist())
    assert same(array_of(plain), numpy_helper.to_array(plain))


@pytest.mark.parametrize("dtype", ["int4", "uint4", "float8_e5m2", "bfloat16"])
def test_weights_go_out_and_come_back(dtype: str, tmp_path: Path) -> None:
    builder, count = GraphBuilder("kept"), EXTERNAL_BYTES + 3
    weight = builder.input("w", (count,), dtype, Role.PARAMETER)
    builder.output(*builder.apply("cast", weight, to="float32", name="y"))
    graph, array = builder.build(), every(dtype, count)
    to_onnx(graph, {"w": array}, tmp_path / "m.onnx", external_data=True, opset=21)
    onnx.checker.check_model(tmp_path / "m.onnx")
    model = from_onnx(tmp_path / "m.onnx")
    assert same(model.weights["w"], array)
    with InferenceSession(model, threads=1) as session:
        (found,) = session.run({}).values()
    assert same(found, array.astype(np.float32))


def test_types_of_newer_opsets_are_not_written(tmp_path: Path) -> None:
    builder = GraphBuilder("new")
    builder.output(*builder.apply("cast", builder.input("x", (3,)), to="int4", name="y"))
    with pytest.raises(UnsupportedError, match=r"value 'y': int4\[3\] found, a type of opset 21"):
        to_onnx(builder.build(), {}, tmp_path / "m.onnx")


def run(
    operator: str, feeds: dict[str, Array], *outputs: str, opset: int = 25, **attributes: Any
) -> tuple[Array, Array]:
    """Return what a session and ONNX's reference make of one node."""
    to = outputs[0]
    graph = helper.make_graph(
        [helper.make_node(operator, list(feeds), ["y"], **attributes)],
        "one",
        [
            helper.make_tensor_value_info(n, ONNX_OF[a.dtype.name], a.shape)
            for n, a in feeds.items()
        ],
        [helper.make_tensor_value_info("y", ONNX_OF[to], None)],
    )
    imports = [helper.make_opsetid("", opset)]
    model = helper.make_model(graph, opset_imports=imports, ir_version=12)
    with InferenceSession(from_onnx(model), threads=1) as session, np.errstate(all="ignore"):
        found = session.run(feeds)["y"]
        (needed,) = ReferenceEvaluator(model).run(None, feeds)
    return found, np.asarray(needed)


NUMBERS = np.concatenate(
    [
        np.random.default_rng(0).standard_normal(500) * np.logspace(-6, 6, 500),
        every("bfloat16").astype(np.float32)[::7],
    ]
).astype(np.float32)


@pytest.mark.parametrize("saturate", [0, 1])
@pytest.mark.parametrize("dtype", FLOAT8)
@pytest.mark.parametrize("source", ["float32", "float16", "bfloat16"])
def test_casts_to_float8(source: str, dtype: str, saturate: int) -> None:
    with np.errstate(over="ignore"):
        x = NUMBERS.astype(source)
    found, needed = run("Cast", {"x": x}, dtype, to=ONNX_OF[dtype], saturate=saturate)
    assert same(found, needed)


@pytest.mark.parametrize("dtype", NARROW)
def test_casts_from_narrow_types(dtype: str) -> None:
    x = every(dtype)
    for to in ("float32", "float16"):
        with np.errstate(over="ignore"):
            found, needed = run("Cast", {"x": x}, to, to=ONNX_OF[to])
        assert same(found, needed)


@pytest.mark.parametrize("dtype", FEW)
def test_integers_lose_their_higher_bits(dtype: str) -> None:
    x = np.arange(-300, 300, dtype=np.int32)
    found, _ = run("Cast", {"x": x}, dtype, to=ONNX_OF[dtype])
    bits, low = BITS[dtype], x & ((1 << BITS[dtype]) - 1)
    signed = np.where(low >> (bits - 1), low - (1 << bits), low)
    np.testing.assert_array_equal(found.astype(np.int32), signed if kind_of(dtype) == "i" else low)


@pytest.mark.parametrize(
    ("saturate", "mode", "needed"),
    [
        (1, "up", [2.0**-127, np.nan, 2.0**127, 2.0**127, 2.0**-127, 2, 4, 4, 4, 1]),
        (1, "down", [2.0**-127, np.nan, 2.0**127, 2.0**127, 2.0**-127, 2, 2, 2, 2, 0.5]),
        (1, "nearest", [2.0**-127, np.nan, 2.0**127, 2.0**127, 2.0**-127, 2, 2, 4, 4, 1]),
        (0, "nearest", [np.nan, np.nan, np.nan, np.nan, np.nan, 2, 2, 4, 4, 1]),
    ],
)
def test_powers_of_two_follow_the_table(saturate: int, mode: str, needed: list[float]) -> None:
    x = np.array([0, np.nan, np.inf, 3e38, 2.0**-140, 2, 2.9, 3, 3.5, 0.75], np.float32)
    found, _ = run(*("Cast", {"x": x}, "float8_e8m0fnu"), to=24, saturate=saturate, round_mode=mode)
    np.testing.assert_array_equal(found.astype(np.float32), np.float32(needed))
    ordinary = np.abs(NUMBERS[np.isfinite(NUMBERS) & (np.abs(NUMBERS) > 2.0**-120)])[:400]
    assert same(*run("Cast", {"x": ordinary}, "float8_e8m0fnu", to=24, saturate=1, round_mode=mode))


@pytest.mark.parametrize("dtype", [*FLOAT8, "float4_e2m1fn", *FEW])
@pytest.mark.parametrize("how", ["one", "axis", "blocks"])
def test_quantised_there_and_back(dtype: str, how: str) -> None:
    x = np.random.default_rng(1).uniform(-9, 9, (6, 8)).astype(np.float32)
    shape: tuple[int, ...] = {"one": (), "axis": (8,), "blocks": (6, 4)}[how]
    scale = np.random.default_rng(2).uniform(0.5, 3, shape).astype(np.float32)
    zero = np.zeros(shape, dtype)
    if kind_of(dtype) in "iu":
        limits = integers(dtype)
        zero = np.random.default_rng(3).integers(limits.min, limits.max, shape).astype(dtype)
    axis = {"axis": 1, **({"block_size": 2} if how == "blocks" else {})}
    feeds = {"x": x, "scale": scale, "zero": zero}
    found, needed = run("QuantizeLinear", feeds, dtype, **axis)
    assert same(found, needed)
    found, needed = run("DequantizeLinear", {**feeds, "x": needed}, "float32", **axis)
    assert same(found, needed)


@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize(
    ("operator", "inputs", "attributes"),
    [
        ("Identity", (), {}),
        ("Reshape", (np.array([4, 6]),), {}),
        ("Transpose", (), {"perm": [1, 0]}),
        ("Flatten", (), {"axis": 0}),
    ],
)
def test_elements_are_moved_bit_by_bit(
    dtype: str, operator: str, inputs: tuple[Array, ...], attributes: dict[str, Any]
) -> None:
    x = every(dtype, 24).reshape(6, 4)
    if dtype.startswith("float") and BITS[dtype] == 8:
        x[0] = every(dtype)[-4:].reshape(4)  # with what is no number, where there is such
    feeds = {"x": x, **{f"i{place}": array for place, array in enumerate(inputs)}}
    assert same(*run(operator, feeds, dtype, **attributes))


def test_infinity_is_moved_as_it_is() -> None:
    """Movement that widens rounds back without saturating."""
    builder = GraphBuilder("moved")
    x = builder.input("x", (2, 3), "float8_e5m2")
    builder.output(*builder.apply("pad", x, low=(0, 1), high=(0, 1), interior=(0, 0), name="y"))
    array = np.array([[np.inf, -np.inf, 1], [2, np.nan, 57344]]).astype(ml_dtypes.float8_e5m2)
    with InferenceSession(builder.build(), {}, threads=1) as session:
        (found,) = session.run({"x": array}).values()
    assert same(found[:, 1:-1], array)
    assert float(floats("float8_e5m2").max) == 57344


def test_gates_of_channels_in_bfloat16_are_widened_by_one_product() -> None:
    """What widens a gate may join the product that makes it, or the one that it is for."""
    builder, at = GraphBuilder("gated"), {"bias": False}
    x = builder.input("x", (2, 4, 5, 5), "bfloat16")
    wide = builder.input("wide", (4, 4, 3, 3), "bfloat16", Role.PARAMETER)
    thin = builder.input("thin", (4, 4, 1, 1), "bfloat16", Role.PARAMETER)
    (made,) = builder.apply("conv2d", x, wide, padding=(1, 1, 1, 1), **at)
    (mean,) = builder.apply("reduce_mean", x, axes=(2, 3), keepdims=True)
    (gate,) = builder.apply("sigmoid", *builder.apply("conv2d", mean, thin, **at))
    builder.output(*builder.apply("mul", made, gate))
    graph, random = builder.build(), np.random.default_rng(0)
    given = {
        name: random.standard_normal(graph.tensors[name].shape).astype(ml_dtypes.bfloat16)
        for name in graph.roles
    }
    (expected,) = interpret(graph, given).values()
    feed = {"x": given.pop("x")}
    with InferenceSession(graph, given, threads=1) as session:
        (found,) = session.run(feed).values()
    np.testing.assert_allclose(*(each.astype(np.float32) for each in (found, expected)), 0.02, 0.02)
