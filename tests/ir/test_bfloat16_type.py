"""bfloat16 as an element type: kept in two bytes, computed in single precision, rounded once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from helpers.session_runs import ran

from soapstone import InferenceSession
from soapstone.frontend.training import checkpoint
from soapstone.frontend.training.checkpoint import CheckpointError
from soapstone.ir.builder import GraphBuilder
from soapstone.ir.files.graphs import load_graph, save_graph
from soapstone.ir.graph import Graph
from soapstone.ir.interpret import interpret
from soapstone.ir.spec import operator
from soapstone.ir.strategy import Configuration, Strategy
from soapstone.ir.tensor import Array, Role, TensorSpec
from soapstone.kernels.entry import Call
from soapstone.kernels.registry import variants
from soapstone.native import memory
from soapstone.runtime import Machine, Partition, Reduce, Region, Runtime, Task

EVERY = np.arange(1 << 16, dtype=np.uint16)
ULP = 2.0**-8  # half the distance of neighbours, of the lower one


def native(array: Array, to: str) -> Array:
    """Return a cast by the CPU's kernel."""
    output = np.zeros(array.shape, to)
    (variant,) = variants("cast")
    entry = variant.bind(Call("cast", operator("cast").normalise({"to": to}), (array,), (output,)))
    assert entry is not None and memory.run(entry) == 0
    return output


def same(found: Array, needed: Array) -> bool:
    """Return whether arrays of one type have the same bits, but for those of NaN."""
    bits = [array.view(f"u{array.itemsize}") for array in (found, needed)]
    nan = [np.isnan(array.astype(np.float32)) for array in (found, needed)]
    return bool((found.dtype == needed.dtype) and ((bits[0] == bits[1]) | (nan[0] & nan[1])).all())


@pytest.mark.parametrize("step", [1, 3])
def test_kernels_cast_every_number_as_ml_dtypes_does(step: int) -> None:
    every = EVERY.view("bfloat16")[::step]
    assert same(native(every, "float32"), every.astype(np.float32))
    ends = np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], np.uint32)
    singles = ((EVERY.astype(np.uint32) << 16)[:, np.newaxis] + ends).reshape(-1).view(np.float32)
    with np.errstate(all="ignore"):
        assert same(native(singles[::step], "bfloat16"), singles[::step].astype("bfloat16"))
        halves = EVERY.view(np.float16)[::step]
        assert same(native(halves, "bfloat16"), halves.astype("bfloat16"))
        assert same(native(every, "float16"), every.astype(np.float16))


def drawn(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).uniform(-1, 1, shape).astype(ml_dtypes.bfloat16)


def chain(add: Callable[..., str], x: str) -> str:
    return add("tanh", add("mul", add("gelu", x), add("sigmoid", x)))


Make = Callable[[Callable[..., str], str], str]
MODELS: Mapping[str, tuple[tuple[int, ...], Make, Callable[[Any], Any]]] = {
    "elements": (
        (37, 65),
        chain,
        lambda x: torch.tanh(torch.nn.functional.gelu(x) * torch.sigmoid(x)),
    ),
    "softmax": ((9, 300), lambda add, x: add("softmax", x, axis=1), lambda x: x.softmax(1)),
    "sum": (
        (4096, 3),
        lambda add, x: add("reduce_sum", add("abs", x), axes=(0,)),
        lambda x: x.abs().sum(0),
    ),
    "product": (
        (300, 300),
        lambda add, x: add("matmul", x, add("transpose", x, permutation=(1, 0))),
        lambda x: x @ x.T,
    ),
    "moved": (
        (6, 8),
        lambda add, x: add("concat", add("reverse", x, axes=(1,)), x, axis=0),
        lambda x: torch.cat([x.flip(1), x]),
    ),
}


def graph_of(make: Make, shape: Sequence[int]) -> Graph:
    builder = GraphBuilder("narrow")
    x = builder.input("x", tuple(shape), "bfloat16")
    builder.output(make(lambda *given, **kept: builder.apply(*given, **kept)[0], x))
    return builder.build()


@pytest.mark.parametrize("name", MODELS)
def test_sessions_give_what_double_precision_does_rounded(name: str) -> None:
    shape, make, meaning = MODELS[name]
    graph, x = graph_of(make, shape), drawn(*shape)
    exact = meaning(torch.from_numpy(x.astype(np.float64))).numpy()
    (output,) = graph.outputs
    with InferenceSession(graph, {}, threads=1) as session:
        found = session.run({"x": x})[output]
    reference = interpret(graph, {"x": x})[output]
    assert found.dtype == reference.dtype == ml_dtypes.bfloat16
    for made in (found, reference):
        scale = np.abs(exact).max()
        np.testing.assert_allclose(made.astype(np.float64), exact, rtol=4 * ULP, atol=ULP * scale)


def test_weights_are_widened_once_and_chains_are_one_launch() -> None:
    builder = GraphBuilder("product")
    x = builder.input("x", (4, 6), "bfloat16")
    w = builder.input("w", (6, 5), "bfloat16", Role.PARAMETER)
    (y,) = builder.apply("matmul", x, w)
    builder.output(chain(lambda *given: builder.apply(*given)[0], y))
    graph, given = builder.build(), {"x": drawn(4, 6), "w": drawn(6, 5, seed=1)}
    with InferenceSession(graph, {"w": given["w"]}, threads=1) as session:
        (found,) = session.run({"x": given["x"]}).values()
        launches = session.variants({"x": given["x"]})
    assert len(launches) <= 4, launches  # x is cast; a product; gelu, which is read twice; a chain
    (needed,) = interpret(graph, given).values()
    np.testing.assert_allclose(
        found.astype(np.float32), needed.astype(np.float32), rtol=4 * ULP, atol=ULP
    )


def test_split_sums_round_once() -> None:
    shape, make, _ = MODELS["sum"]
    graph, x = graph_of(make, shape), np.full(shape, 1 + 2.0**-7, ml_dtypes.bfloat16)
    (node,) = [node for node in graph.nodes if node.operator == "reduce_sum"]
    strategy = Strategy({node.name: Configuration({"d0": 2})})
    found, _ = ran(graph, {"x": x}, strategy, Machine.local(cpus=2))
    needed = np.full(3, 4096 * (1 + 2.0**-7)).astype(ml_dtypes.bfloat16)
    np.testing.assert_array_equal(found[graph.outputs[0]], needed)


def add_one(part: Array) -> None:
    part[...] += part.dtype.type(1)


@pytest.mark.parametrize("processes", [False, True])
def test_folds_of_the_runtime_round_once(processes: bool) -> None:
    total = Region((4,), np.dtype(ml_dtypes.bfloat16), "total")
    with Runtime(Machine.local(2, processes=processes)) as runtime:
        whole = Partition.whole(total, (512,))
        runtime.launch(Task("add", (Reduce("sum"),), body=add_one), whole, initialise=True)
        np.testing.assert_array_equal(runtime.array(total).astype(np.float32), np.full(4, 512.0))


def test_files_keep_it(tmp_path: Path) -> None:
    arrays = {name: drawn(3, 2).astype(name) for name in ("bfloat16", "float8_e4m3fn", "float32")}
    checkpoint.save(tmp_path / "a.safetensors", arrays, {})
    found, _ = checkpoint.load(tmp_path / "a.safetensors")
    assert all(same(found[name], array) for name, array in arrays.items())
    with pytest.raises(CheckpointError, match=r"'bfloat16' of bfloat16 found.*safetensors needed"):
        checkpoint.save(tmp_path / "a.npz", arrays, {})
    with pytest.raises(CheckpointError, match="'x' of int4 found, which files of this kind do not"):
        checkpoint.save(tmp_path / "a.safetensors", {"x": np.zeros(3, "int4")}, {})
    graph = graph_of(chain, (3, 2))
    save_graph(graph, tmp_path / "g.json", {"x": arrays["bfloat16"]})
    again, values = load_graph(tmp_path / "g.json")
    assert again.tensors["x"] == TensorSpec((3, 2), "bfloat16")
    assert same(values["x"], arrays["bfloat16"])


def test_tensors_of_torch_are_read_where_they_are() -> None:
    graph, x = graph_of(chain, (5, 4)), torch.randn(5, 4).bfloat16()
    (output,) = graph.outputs
    with InferenceSession(graph, {}, threads=1) as session:
        found = session.run({"x": x})[output]
        needed = session.run({"x": x.float().numpy().astype(ml_dtypes.bfloat16)})[output]
        into = torch.empty(5, 4, dtype=torch.bfloat16)
        session.run({"x": x}, out={output: into})
    assert same(found, needed)
    assert same(into.view(torch.int16).numpy().view(ml_dtypes.bfloat16), needed)
