"""Half precision: operators accumulate in single precision and round once, at real extents."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import onnxruntime
import pytest
from helpers.operator_checks import draw, subject
from helpers.random_graphs import grown
from helpers.session_runs import ran
from onnx import TensorProto, helper, numpy_helper

from soapstone import InferenceSession, from_onnx
from soapstone.ir.builder import GraphBuilder
from soapstone.ir.dims import Kind
from soapstone.ir.errors import GraphError
from soapstone.ir.spec import Case, OpSpec, operators
from soapstone.ir.strategy import Configuration, Strategy
from soapstone.ir.tensor import Array, TensorSpec, spec_of
from soapstone.kernels.entry import Call
from soapstone.kernels.registry import variants
from soapstone.native import memory
from soapstone.runtime import Machine, Partition, Reduce, Region, Runtime, Task

LONG, WIDE, MOST_POINTS = 4096, 192, 1 << 19  # sums of halves in halves stop at 2,048
HALF_ULP = 2.0**-11


def enlarged(spec: OpSpec, case: Case) -> Iterator[tuple[str, list[TensorSpec]]]:
    """Yield the inputs of a case with one dim long, and two dims wide, where it is legal.

    Dims that are reduced come first: over them an operator accumulates.
    """
    item = subject(spec, case, "float16")
    found = item.signature
    if any(dim.extent == 0 for dim in found.dims):
        return
    dims = sorted((dim for dim in found.dims if dim.extent > 1), key=lambda d: d.kind is Kind.FREE)
    choices = [{dim.name: LONG} for dim in dims]
    choices += [{a.name: WIDE, b.name: WIDE} for a, b in itertools.pairwise(dims)]
    given = [spec_of(array) for array in item.arrays]
    for sizes in choices:
        shapes = grown(found, sizes)
        points = math.prod(sizes.get(dim.name, dim.extent) for dim in found.dims)
        if points > MOST_POINTS:
            continue
        specs = [TensorSpec(shape, old.dtype) for shape, old in zip(shapes, given)]
        try:
            made = spec.bind(specs, item.attributes)
        except GraphError:
            continue
        if all(made.by_name[name].extent == size for name, size in sizes.items()):
            yield " ".join(f"{name}={size}" for name, size in sizes.items()), specs


def positive(case: Case, specs: Sequence[TensorSpec], seed: int) -> tuple[Array, ...]:
    """Return inputs of a case's kind in other shapes; reals are of one sign, so that sums grow."""
    generator = np.random.default_rng(seed)
    arrays = []
    for text, spec in zip(case.inputs, specs, strict=True):
        limits = [term for term in text.split() if term[0] in "<>"]
        shape = map(str, spec.shape)
        kind = "float32" if spec.is_float else spec.dtype
        arrays.append(draw(" ".join([kind, *shape, *limits]), generator, True, "float16"))
    return tuple(arrays)


def judge(made: Sequence[Array], exact: Sequence[Array], where: str) -> None:
    """Check halves against doubles: within a rounding, and what single precision accumulates."""
    for one, value in zip(made, exact, strict=True):
        if value.dtype.kind != "f":
            continue  # positions and comparisons: what they are of may be equal in one type only
        with np.errstate(over="ignore", under="ignore"):
            inside = np.abs(value) < 65504
        scale = float(np.abs(value[inside]).max(initial=0.0))
        np.testing.assert_allclose(
            np.asarray(one, np.float64)[inside],
            value[inside],
            rtol=2 * HALF_ULP,
            atol=HALF_ULP * scale + 1e-7,
            err_msg=where,
        )
        beyond = np.isfinite(value) & (np.abs(value) > 65536)  # what is nearer may round down
        assert not np.isfinite(np.asarray(one)[beyond]).any() or scale == 0, where


def native_halves(spec: OpSpec, attributes: Mapping[str, object], given: tuple[Array, ...]) -> None:
    """Check that the kernels which serve halves give the reference's numbers, bit by bit."""
    wanted = spec.run(attributes, *given)
    for variant in variants(spec.name):
        outputs = tuple(np.zeros_like(np.asarray(value)) for value in wanted)
        entry = variant.bind(Call(spec.name, attributes, given, outputs))
        if entry is None:
            continue
        assert memory.run(entry) == 0
        for output, value in zip(outputs, wanted):
            np.testing.assert_array_equal(output, value, err_msg=f"{spec.name} {variant.name}")


@pytest.mark.parametrize("spec", operators(), ids=lambda spec: spec.name)
def test_halves_equal_doubles_rounded_once(spec: OpSpec) -> None:
    """Every operator, with each of its dims long in turn, and pairs of them wide."""
    seen: set[str] = set()
    for case in spec.cases:
        if not any(s.is_float for s in map(spec_of, subject(spec, case).arrays)):
            continue
        attributes = spec.normalise(case.attributes)
        native_halves(spec, attributes, subject(spec, case, "float16").arrays)
        for where, specs in enlarged(spec, case):
            if where in seen or case.contents:  # which would be others
                continue
            seen.add(where)
            halves = positive(case, specs, len(seen))
            doubles = tuple(a.astype(np.float64) if a.dtype.kind == "f" else a for a in halves)
            with np.errstate(all="ignore"):
                made, exact = spec.run(attributes, *halves), spec.run(attributes, *doubles)
            assert [a.dtype.name for a in made] == list(
                spec.bind([spec_of(a) for a in halves], attributes).dtypes
            )
            judge(made, exact, f"{spec.name} {where}")


@pytest.mark.parametrize(
    ("name", "shapes", "degrees", "attributes"),
    [
        ("reduce_mean", [(512, 64)], {"d0": 2}, {"axes": (0,)}),
        ("reduce_sum_square", [(4096, 8)], {"d0": 3}, {"axes": (0,)}),
        ("reduce_max", [(512, 64)], {"d0": 2}, {"axes": (0,)}),
        ("instance_norm", [(2, 3, 128, 128), (3,), (3,)], {"h": 2}, {}),
        ("matmul", [(6, 4096), (4096, 5)], {"k": 3}, {}),
        ("matmul", [(6, 4096), (4096, 5)], {"m": 2}, {}),
        ("softmax", [(4096, 6)], {"d0": 2}, {"axis": 0}),
    ],
)
def test_a_split_accumulates_in_single_precision(
    name: str,
    shapes: Sequence[tuple[int, ...]],
    degrees: Mapping[str, int],
    attributes: Mapping[str, object],
) -> None:
    builder = GraphBuilder("split")
    inputs = [builder.input(f"in{i}", shape, "float16") for i, shape in enumerate(shapes)]
    builder.output(*builder.apply(name, *inputs, name="node", **attributes))
    graph = builder.build()
    generator = np.random.default_rng(0)
    values = {n: generator.uniform(0.2, 0.9, graph.tensors[n].shape) for n in inputs}
    halves = {n: a.astype(np.float16) for n, a in values.items()}
    strategy = Strategy({"node": Configuration(degrees)})
    found, _ = ran(graph, halves, strategy, Machine.local(cpus=2))
    made = [found[output] for output in graph.outputs]
    node = graph.nodes[0]
    exact = node.spec.run(node.attributes, *(a.astype(np.float64) for a in halves.values()))
    assert all(array.dtype == np.float16 for array in made)
    judge(made, exact, f"{name} {dict(degrees)}")


def test_folds_of_halves_round_once() -> None:
    """The sum of 4,096 partial results of 1 + 1/512; in half precision it would stop at 2,048."""

    def add(part: Array) -> None:
        part[...] += np.float16(1 + 1 / 512)

    total = Region((4,), "float16", "total")
    with Runtime(Machine.local(2)) as runtime:
        whole = Partition.whole(total, (4096,))
        runtime.launch(Task("add", (Reduce("sum"),), body=add), whole, initialise=True)
        np.testing.assert_array_equal(runtime.array(total), np.full(4, 4096 + 8, np.float16))


def half(shape: Sequence[int], scale: float = 1.0, seed: int = 0) -> Array:
    values = np.random.default_rng(seed).uniform(0.2, 0.9, shape) * scale
    return values.astype(np.float16)


Node = tuple[str, tuple[str, ...], Mapping[str, object]]
MODELS: Mapping[str, tuple[tuple[int, ...], tuple[Node, ...], Mapping[str, Array]]] = {
    "InstanceNorm": (
        (1, 2, 256, 256),
        (("InstanceNormalization", ("x", "g", "b"), {}),),
        {"g": half((2,)), "b": half((2,))},
    ),
    "GroupNorm": (
        (1, 4, 128, 128),
        (("GroupNormalization", ("x", "g", "b"), {"num_groups": 2}),),
        {"g": half((4,)), "b": half((4,))},
    ),
    "LayerNorm": (
        (4, 8192),
        (("LayerNormalization", ("x", "g", "b"), {}),),
        {"g": half((8192,)), "b": half((8192,))},
    ),
    "ReduceMean": (
        (1, 3, 256, 256),
        (("ReduceMean", ("x", "axes"), {}),),
        {"axes": np.array([2, 3])},
    ),
    "ReduceMean of rows": (
        (8192, 4),
        (("ReduceMean", ("x", "axes"), {}),),
        {"axes": np.array([0])},
    ),
    "ReduceSum": ((8192, 4), (("ReduceSum", ("x", "axes"), {}),), {"axes": np.array([0])}),
    "GlobalAveragePool": (
        (1, 3, 128, 128),
        (
            ("Conv", ("x", "w"), {"pads": [1, 1, 1, 1]}),
            ("GlobalAveragePool", ("t0",), {}),
        ),
        {"w": half((4, 3, 3, 3), 0.1)},
    ),
    "Softmax": ((8192, 4), (("Softmax", ("x",), {"axis": 0}),), {}),
    "CumSum": ((4096, 2), (("CumSum", ("x", "axis"), {}),), {"axis": np.array(0)}),
    "MatMul": ((4, 8192), (("MatMul", ("x", "w"), {}),), {"w": half((8192, 4))}),
    "Gemm": (
        (4, 8192),
        (("Gemm", ("x", "w", "b"), {}), ("Relu", ("t0",), {})),
        {"w": half((8192, 4)), "b": half((4,))},
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_half_models_equal_onnx_runtime(name: str) -> None:
    shape, nodes, weights = MODELS[name]
    last = len(nodes) - 1
    made = [
        helper.make_node(operator, inputs, ["y" if i == last else f"t{i}"], **attributes)
        for i, (operator, inputs, attributes) in enumerate(nodes)
    ]
    graph = helper.make_graph(
        made,
        "half",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT16, shape)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT16, None)],
        [numpy_helper.from_array(array, key) for key, array in weights.items()],
    )
    opsets = [helper.make_opsetid("", 21)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10).SerializeToString()
    feeds = {"x": half(shape, seed=1)}
    (wanted,) = onnxruntime.InferenceSession(model).run(None, feeds)
    with InferenceSession(from_onnx(model), threads=1) as session:
        found = session.run(feeds)["y"]
    assert found.dtype == wanted.dtype == np.float16
    np.testing.assert_allclose(
        found.astype(np.float32), wanted.astype(np.float32), rtol=2e-3, atol=1e-3
    )
