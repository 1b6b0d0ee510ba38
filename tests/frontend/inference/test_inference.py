"""Inference sessions against the sequential run of the graph that was never lowered."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.session_runs import assert_near, ran

from soapstone import InferenceSession, Model
from soapstone.cache.places import root
from soapstone.engine.constants import _Contents
from soapstone.engine.initial import materialise
from soapstone.engine.lower import fold_weights, lower, split_constants, views
from soapstone.errors import DataError
from soapstone.ir.builder import GraphBuilder
from soapstone.ir.errors import GraphError
from soapstone.ir.graph import Graph
from soapstone.ir.interpret import interpret
from soapstone.ir.strategy import Strategy
from soapstone.ir.tensor import Array, Role
from soapstone.mappers import load
from soapstone.native import shared
from soapstone.native.memory import CHECKED
from soapstone.runtime import Machine, MachineError


def weights_of(graph: Graph, seed: int = 0) -> dict[str, Array]:
    """Return random weights; variances are positive."""
    random = np.random.default_rng(seed)
    found = {}
    for name, role in graph.roles.items():
        if role is Role.INPUT:
            continue
        spec = graph.tensors[name]
        value = materialise(graph.initials.get(name), spec, seed, name)
        if spec.is_float:
            value = (value + random.uniform(0.1, 0.5, spec.shape)).astype(spec.dtype)
        found[name] = value
    return found


def inputs_of(graph: Graph, seed: int = 1) -> dict[str, Array]:
    random = np.random.default_rng(seed)
    return {
        name: random.standard_normal(graph.tensors[name].shape).astype(np.float32)
        for name in graph.inputs(Role.INPUT)
    }


def residual_network(batch: int = 2) -> Model:
    """Convolutions with batch norm, a residual, a concatenation, pools and a classifier."""
    model = Model("residual")
    x = model.input("image", (batch, 3, 12, 12))
    x = model.relu(model.batch_norm(model.conv2d(x, 16, kernel=3, padding=1, bias=False)))
    y = model.relu(model.batch_norm(model.conv2d(x, 16, kernel=1, bias=False)))
    y = model.batch_norm(model.conv2d(y, 16, kernel=3, padding=1))
    x = model.relu(x + y)
    x = model.concat([x, model.max_pool2d(x, 3, stride=1, padding=1)], axis=1)
    x = model.relu(model.batch_norm(x))
    x = model.conv2d(x, 8, kernel=3, stride=2, padding=1, activation="relu")
    model.output(model.softmax(model.dense(model.flatten(x), 5)))
    return model


def attention_network(batch: int = 2) -> Model:
    """Self-attention written with reshapes and transposes, a residual and a GELU."""
    model = Model("attention")
    x = model.input("tokens", (batch, 6, 16))

    def heads(t: object, name: str) -> object:
        split = model.reshape(model.dense(t, 16, name=name), (-1, 6, 4, 4))
        return model.transpose(split, (0, 2, 1, 3))

    q, k, v = (heads(x, name) for name in "qkv")
    scores = model.softmax(model.matmul(q, model.transpose(k, (0, 1, 3, 2))) * 0.5)
    mixed = model.reshape(model.transpose(model.matmul(scores, v), (0, 2, 1, 3)), (-1, 6, 16))
    y = model.dense(mixed, 16, name="out") + x
    model.output(y + model.dense(model.gelu(model.dense(y, 32, name="up")), 16, name="down"))
    return model


def dense_block(batch: int = 1) -> Model:
    """A growing stack: each layer reads all that came before, and adds to it."""
    model = Model("stack")
    x = model.input("image", (batch, 3, 8, 8))
    x = model.conv2d(x, 16, kernel=3, padding=1)
    for _ in range(3):
        y = model.relu(model.batch_norm(x))
        y = model.conv2d(y, 8, kernel=3, padding=1)
        x = model.concat([x, y], axis=1)
    model.output(model.conv2d(model.relu(x), 4, kernel=1))
    return model


NETWORKS = {
    "residual": residual_network,
    "attention": attention_network,
    "stack": dense_block,
}


@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("name", NETWORKS)
def test_sessions_equal_the_sequential_run(name: str, threads: int, plain: bool) -> None:
    graph = NETWORKS[name]().graph
    weights = weights_of(graph)
    with InferenceSession(graph, weights, threads=threads, plain=plain) as session:
        for seed in (1, 2):
            given = inputs_of(graph, seed)
            expected = interpret(graph, {**weights, **given})
            found = session.run(given)
            assert list(found) == list(graph.outputs)
            for output, value in found.items():
                scale = np.abs(expected[output]).max()
                np.testing.assert_allclose(value, expected[output], atol=2e-5 * scale, rtol=0)


def launched(graph: Graph, plain: bool = False) -> tuple[Graph, Strategy]:
    fixed = {name for name, role in graph.roles.items() if role is not Role.INPUT}
    _, graph = split_constants(fold_weights(graph, weights_of(graph)), fixed)
    strategy = load("sequential").strategy(graph, Machine.local(cpus=1))
    return lower(graph, strategy), strategy


def test_batch_norms_fold_and_steps_fuse() -> None:
    lowered, _ = launched(residual_network().graph)
    operators = [node.operator for node in lowered.nodes]
    assert "batch_norm_inference" not in operators
    assert "relu" not in operators
    residual = [node for node in lowered.nodes if len(dict(node.items).get("program", ())) == 2]
    assert any(len(node.inputs) == 4 for node in residual), "the residual joins a convolution"


def test_reshapes_and_transposes_are_not_launched() -> None:
    lowered, strategy = launched(attention_network().graph)
    seen = views(lowered, strategy)
    moved = {node.outputs[0] for node in lowered.nodes if node.spec.view}
    behind = {view.root for view in seen.values()}
    assert moved
    for value in moved:
        assert value in seen or value in behind, value


def test_spelled_activations_and_scales_become_parts_of_products() -> None:
    """As exporters write GELU, SiLU and scaled attention, with constants as weights."""
    builder = GraphBuilder("exported")
    x = builder.input("x", (2, 6, 16))
    w = builder.input("w", (16, 32), role=Role.PARAMETER)
    root, half, one, quarter = (
        builder.input(name, (), role=Role.PARAMETER) for name in ("root", "half", "one", "quarter")
    )

    def emit(operator: str, *values: str, **attributes: object) -> str:
        return builder.apply(operator, *values, **attributes)[0]

    y = emit("matmul", x, w)
    erf = emit("add", emit("erf", emit("div", y, root)), one)
    gelu = emit("mul", emit("mul", y, half), erf)
    z = emit("matmul", x, w)
    silu = emit("mul", emit("sigmoid", z), z)
    heads = emit("transpose", emit("reshape", emit("matmul", x, w), shape=(2, 6, 4, 8)),
                 permutation=(0, 2, 1, 3))  # fmt: skip
    builder.output(gelu, silu, emit("mul", heads, quarter))
    graph = builder.build()
    random = np.random.default_rng(3)
    numbers = {"root": np.sqrt(2.0), "half": 0.5, "one": 1.0, "quarter": 0.25}
    weights = {name: np.float32(value) for name, value in numbers.items()}
    weights = {name: np.asarray(value) for name, value in weights.items()}
    weights["w"] = random.standard_normal((16, 32)).astype(np.float32)
    folded = fold_weights(graph, weights)
    _, rest = split_constants(folded, weights.keys())
    assert {node.operator for node in rest.nodes} == {
        "linear",
        "gelu",
        "silu",
        "reshape",
        "transpose",
    }
    given = inputs_of(graph)
    expected = interpret(graph, {**weights, **given})
    with InferenceSession(graph, weights) as session:
        for name, value in session.run(given).items():
            np.testing.assert_allclose(value, expected[name], atol=1e-5)


@pytest.mark.parametrize("cubed", ["power", "mul"])
def test_rows_counted_otherwise_behind_a_product_let_what_follows_join_it(cubed: str) -> None:
    """As exporters write layers on rows: a reshape on both sides, GELU by its tangent, a sum."""
    builder = GraphBuilder("rows")
    x = builder.input("x", (2, 6, 16))
    w, v = (builder.input(n, s, role=Role.PARAMETER) for n, s in (("w", (16, 32)), ("v", (32, 16))))

    def emit(operator: str, *values: str, **attributes: object) -> str:
        return builder.apply(operator, *values, **attributes)[0]

    def product(rows: str, weights: str, width: int) -> str:
        flat = emit("reshape", rows, shape=(12, builder.spec(rows).shape[-1]))
        made = emit("linear", flat, weights, bias=False)
        return emit("reshape", made, shape=(2, 6, width))

    y = product(x, w, 32)
    cubes = {"power": emit("power", y, exponent=3.0), "mul": emit("mul", emit("mul", y, y), y)}
    inner = emit(
        "affine", emit("add", y, emit("affine", cubes[cubed], scale=0.044715)), scale=0.7978845608
    )
    gate = emit("affine", emit("tanh", inner), shift=1.0)
    gelu = emit("mul", emit("affine", y, scale=0.5), gate)
    builder.output(emit("add", product(gelu, v, 16), x))
    graph = builder.build()
    random = np.random.default_rng(3)
    weights = {n: random.standard_normal(graph.tensors[n].shape).astype(np.float32) for n in "wv"}
    folded = fold_weights(graph, weights)
    assert {n.operator for n in folded.nodes} == {"reshape", "linear", "gelu", "add"}
    launches = [n.operator for n in lower(folded, Strategy({})).nodes if not n.spec.view]
    assert launches == ["with_epilogue"] * 2
    given = inputs_of(graph)
    expected = interpret(graph, {**weights, **given})
    with InferenceSession(graph, weights) as session:
        for name, value in session.run(given).items():
            np.testing.assert_allclose(value, expected[name], atol=1e-4)


def test_the_graph_itself_is_never_changed() -> None:
    graph = residual_network().graph
    text, digest = str(graph), graph.structural_hash
    with InferenceSession(graph, weights_of(graph)) as session:
        session.run(inputs_of(graph))
    assert (str(graph), graph.structural_hash) == (text, digest)


def test_a_split_strategy_gives_the_same_numbers() -> None:
    """Epilogues and views under data-parallel tiles."""
    for build in NETWORKS.values():
        graph = build(4).graph
        weights, given = weights_of(graph), inputs_of(graph)
        expected = interpret(graph, {**weights, **given})
        given = {**weights, **given}
        found, _ = ran(graph, given, None, Machine.local(cpus=2), "data_parallel")
        assert_near(found, expected, 2e-5)


def test_shapes_are_bound_as_they_come_and_forgotten_in_turn() -> None:
    """All shapes are served by one worker: of several OpenMP teams none would spin."""
    model = residual_network()
    weights = weights_of(model.graph)
    before = threading.active_count()
    with InferenceSession(model, weights, bound_shapes=2) as session:
        whole = inputs_of(model.build(6))
        expected = interpret(model.build(6), {**weights, **whole})
        output = session.outputs[0]
        for size in (1, 6, 2, 6, 1):
            found = session.run({"image": whole["image"][:size]})[output]
            np.testing.assert_allclose(found, expected[output][:size], atol=2e-5)
        session.serial.binder.packed.warmup.wait()
        session.serial.bounds._background.wait()
        assert threading.active_count() == before + 1


@pytest.mark.skipif(CHECKED, reason="in checked mode each arena has guard zones of its own")
def test_bound_shapes_share_the_memory_of_all_but_inputs() -> None:
    """Largest first, so that all have room; each answers as before the others were bound."""
    model = residual_network()
    weights = weights_of(model.graph)
    with InferenceSession(model, weights, threads=1, tune=False) as session:
        given = [{"image": inputs_of(model.build(size))["image"]} for size in (4, 3, 2)]
        first, held = [], []
        for each in given:
            first.append(session.run(each))
            session.serial.binder.packed.warmup.wait()
            session.serial.bounds._background.wait()
            held.append(session.peak_bytes)
        inputs = [each["image"].nbytes for each in given]
        assert all(b - a <= nbytes + 256 for a, b, nbytes in zip(held, held[1:], inputs[1:]))
        for each, expected in zip(given, first):
            for name, found in session.run(each).items():
                np.testing.assert_array_equal(found, expected[name])


def test_few_shapes_with_large_inputs_stay_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    model = residual_network()
    weights, whole = weights_of(model.graph), inputs_of(model.build(6))["image"]
    image = whole[0].nbytes
    monkeypatch.setattr("soapstone.frontend.inference.bound_graphs._MOST_BYTES", 7 * image)
    monkeypatch.setattr("soapstone.frontend.inference.bound_graphs._LAUNCH_BYTES", 1)
    with InferenceSession(model, weights, tune=False) as session:
        for size in (1, 2, 3, 4, 6, 5):
            session.serial.bounds.of({"image": whole[:size]})
        kept = [key[0][0][0] for key in session.serial.bounds.held]
        assert kept == [6, 5]
    with InferenceSession(model, weights, tune=False, bound_shapes=6) as session:
        for size in (1, 2, 3, 4, 6, 5):
            session.serial.bounds.of({"image": whole[:size]})
        assert len(session.serial.bounds.held) == 6


@pytest.mark.onednn
@pytest.mark.skipif(CHECKED, reason="checked mode runs entries on copies of their arrays")
def test_weights_are_read_one_at_a_time_and_not_for_another_batch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Those that are computed from others, as with folded batch norms, too."""
    model = Model("several")
    x = model.input("image", (2, 16, 12, 12))
    for _ in range(3):
        x = model.relu(model.batch_norm(model.conv2d(x, 24, kernel=3, padding=1, bias=False)))
    model.output(model.dense(model.flatten(x), 40))
    weights, reads = weights_of(model.graph), list[str]()
    alive: list[tuple[_Contents, weakref.ref[Array]]] = []
    of = _Contents._value

    def read(contents: _Contents, name: str, weight: Callable[[Array], Array]) -> Array:
        made = of(contents, name, weight)
        if made.nbytes >= shared.LEAST and contents.weights.keys() <= weights.keys():
            others = [each() for whose, each in alive if whose is contents]
            assert all(each is None for each in others), "more than one weight at once"
            reads.append(name)
            alive.append((contents, weakref.ref(made)))
        return made

    monkeypatch.setattr(_Contents, "_value", read)
    with InferenceSession(model, weights, threads=1, tune=False) as session:
        for size in (6, 7, 9):
            inputs = inputs_of(model.build(size))
            expected = interpret(model.build(size), {**weights, **inputs})
            found = session.run(inputs)
            assert_near(found, expected, 2e-5)
            assert len(reads) == 4, reads


def test_threads_may_share_a_session() -> None:
    graph = residual_network(1).graph
    weights = weights_of(graph)
    images = [inputs_of(graph, seed)["image"] for seed in range(8)]
    expected = [interpret(graph, {**weights, "image": image}) for image in images]
    wrong: list[int] = []
    with InferenceSession(graph, weights) as session:

        def serve(offset: int) -> None:
            for index in range(offset, len(images), 2):
                for _ in range(20):
                    found = session.run(images[index])
                    for name, value in found.items():
                        if not np.allclose(value, expected[index][name], atol=2e-5):
                            wrong.append(index)

        workers = [threading.Thread(target=serve, args=(i,)) for i in range(2)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
    assert not wrong


def test_predict_without_compiling_equals_predict_after() -> None:
    model = residual_network(4)
    images = np.random.default_rng(0).standard_normal((10, 3, 12, 12))  # float64: cast
    before = model.predict(images)
    assert isinstance(before, np.ndarray) and before.shape == (10, 5)
    model.compile("sgd", loss="mse", cpus=1)
    with model:
        after = model.predict(images.astype(np.float32))
        np.testing.assert_allclose(before, after, atol=1e-5)
        values = {name: value * 0 for name, value in model.weights().items() if value.ndim}
        model.set_weights(values)
        with model.inference(threads=1) as session:
            found = session.run(images[:4].astype(np.float32))[session.outputs[0]]
        np.testing.assert_allclose(found, 0.2, atol=1e-6)


_FIRST = """
import sys
import numpy as np
from soapstone import InferenceSession, Model
from soapstone.cache.changes import default_path
model = Model("small")
x = model.input("image", (1, 3, 12, 12))
x = model.max_pool2d(model.conv2d(x, 16, kernel=1, activation="relu"), 3)
model.output(model.softmax(model.dense(model.flatten(x), 5)))
with InferenceSession(model.build(1), model.weights(), tune=TUNE) as session:
    session.run(np.ones((1, 3, 12, 12), np.float32))
print("numba" in sys.modules, default_path().exists())
"""


def test_only_a_first_process_compiles_and_only_one_that_is_asked_to_measures(
    tmp_path: Path,
) -> None:
    def told(tune: str) -> str:
        done = subprocess.run(
            [sys.executable, "-c", _FIRST.replace("TUNE", tune)],
            env={**os.environ, "SOAPSTONE_CACHE": str(tmp_path), "NUMBA_CACHE_DIR": str(root())},
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    told("True")  # compiles what no process before has
    assert told("True") == "False False"
    assert told("False") == "False False"
    assert told("'now'").endswith("True")
    assert told("True") == "False True"  # goes by what was measured


_OF_A_FILE = """
import sys
import numpy as np
from soapstone import InferenceSession
with InferenceSession(sys.argv[1], threads=1) as session:
    print(session.run(np.ones((2, 3), np.float32))["y"].tolist())
loaded = {name for name in sys.modules if name.startswith("soapstone.")}
print(sorted(loaded & {f"soapstone.{name}" for name in UNNEEDED}))
"""
_UNNEEDED = ("frontend.layers", "frontend.training", "search", "mappers", "kernels.cuda")


def test_a_session_of_a_file_loads_no_layers_and_no_search(tmp_path: Path) -> None:
    from onnx import TensorProto, helper

    ends = (helper.make_tensor_value_info(x, TensorProto.FLOAT, ["n", 3]) for x in "xy")
    made = helper.make_graph([helper.make_node("Neg", ["x"], ["y"])], "g", *([e] for e in ends))
    proto = helper.make_model(made, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    (tmp_path / "neg.onnx").write_bytes(proto.SerializeToString())
    told = subprocess.run(
        [sys.executable, "-c", _OF_A_FILE.replace("UNNEEDED", repr(_UNNEEDED)), "neg.onnx"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert told.stdout.splitlines() == [str([[-1.0] * 3] * 2), "[]"], told.stderr


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"bound_shapes": 0}, "bound_shapes: 0 found, 1 or more"),
        ({"strategy": 3}, "strategy: int found"),
    ],
)
def test_options_that_mean_nothing_are_refused(options: dict[str, Any], message: str) -> None:
    model = Model("one")
    model.output(model.relu(model.input("x", (1, 2))))
    with pytest.raises(GraphError, match=message):
        model.inference(**options)
    with model.inference() as session, pytest.raises(DataError, match="out: NoneType found"):
        session.run(np.ones((1, 2), np.float32), out=None)  # type: ignore[arg-type]


def test_an_unknown_way_to_tune_is_refused() -> None:
    with pytest.raises(GraphError, match="tune: 'later' found; True, False or 'now' needed"):
        InferenceSession(residual_network(), tune="later")  # type: ignore[arg-type]


@pytest.mark.parametrize("threads", [0, -1, 100_000_000])
def test_numbers_of_threads_that_are_none_are_refused(threads: int) -> None:
    with pytest.raises(MachineError, match=f"{threads:,}(?s:.*)needed|{threads}(?s:.*)needed"):
        InferenceSession(residual_network(), threads=threads)


def test_more_threads_than_cores_are_told_of() -> None:
    with pytest.warns(UserWarning, match=r"of 999 threads found; the \d+ cores of this computer"):
        InferenceSession(residual_network(), threads=999).close()


def test_outputs_that_need_no_launch() -> None:
    builder = GraphBuilder("constant")
    x = builder.input("x", (2, 3))
    w = builder.input("w", (3,), role=Role.PARAMETER)
    double = builder.apply("add", w, w, name="double")[0]
    builder.output(x, double)
    graph = builder.build()
    with InferenceSession(graph, {"w": np.arange(3, dtype=np.float32)}) as session:
        found = session.run(np.ones((2, 3), np.float32))
    np.testing.assert_array_equal(found["x"], np.ones((2, 3)))
    np.testing.assert_array_equal(found["double"], [0, 2, 4])


@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize("shape", [(5, 4), (300, 100)])
def test_parts_of_weights_are_those_parts(shape: tuple[int, int], plain: bool) -> None:
    builder = GraphBuilder("parts")
    w = builder.input("w", shape, role=Role.PARAMETER)
    x = builder.input("x", (2,))
    for start, stop in ((1, 0), shape), ((0, 1), (3, 3)), ((2, 2), (3, 4)), ((0, 0), shape):
        part = builder.apply("slice", w, starts=start, stops=stop, steps=(1, 1))
        builder.output(*part, *builder.apply("neg", *part))
    builder.output(*builder.apply("neg", x))
    graph, inputs = builder.build(), {"x": np.ones(2, np.float32)}
    weights = weights_of(graph)
    with InferenceSession(graph, weights, plain=plain) as session:
        found = session.run(inputs)
    for name, needed in interpret(graph, {**weights, **inputs}).items():
        np.testing.assert_array_equal(found[name], needed, err_msg=name)


def test_an_output_of_weights_alone_without_dims_is_an_array() -> None:
    builder = GraphBuilder("count")
    x = builder.input("x", (2,))
    n = builder.input("n", (), "int64", role=Role.STATE)
    builder.output(x, builder.apply("add", n, n, name="twice")[0])
    with InferenceSession(builder.build(), {"n": np.array(3)}) as session:
        twice = session.run(np.ones(2, np.float32))["twice"]
    assert isinstance(twice, np.ndarray) and twice.shape == () and twice == 6


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "input 'image' is missing; image: float32"),
        ({"image": np.zeros((2, 3, 12, 12))}, r"float64\[2, 3, 12, 12\] found"),
        ({"image": np.zeros((2, 3, 12), np.float32)}, "image: float32.* needed"),
        ({"picture": np.zeros(1, np.float32)}, "unknown input 'picture'"),
    ],
)
def test_wrong_inputs_are_named(given: dict[str, Array], message: str) -> None:
    graph = residual_network().graph
    with (
        InferenceSession(graph, weights_of(graph)) as session,
        pytest.raises(DataError, match=message),
    ):
        session.run(given)


def test_a_missing_weight_is_named() -> None:
    graph = residual_network().graph
    weights = weights_of(graph)
    weights.pop("conv2d.w", None) or weights.popitem()
    with (
        InferenceSession(graph, weights) as session,
        pytest.raises(DataError, match=r"weight .* is missing"),
    ):
        session.run(inputs_of(graph))


def test_a_stack_is_written_once() -> None:
    lowered, strategy = launched(dense_block().graph)
    seen = views(lowered, strategy)
    joins = [node for node in lowered.nodes if node.operator == "concat"]
    assert len(joins) == 3
    assert {seen[name].root for node in joins for name in node.inputs} == {joins[-1].outputs[0]}


def test_joins_of_what_others_read_are_copied_in_place() -> None:
    """Flat lists as exporters write them, a part read by a convolution, a graph input, twins."""
    model = Model("joins")
    x = model.input("image", (2, 4, 6, 6))
    a = model.conv2d(x, 8, kernel=3, padding=1, activation="relu")
    b = model.conv2d(a, 8, kernel=1)
    c = model.conv2d(model.concat([a, b], axis=1), 8, kernel=1)
    d = model.concat([a, b, c], axis=1)
    e = model.concat([d, x, d], axis=1)
    model.output(e, model.concat([c, c], axis=2), c)
    graph = model.graph
    weights, given = weights_of(graph), inputs_of(graph)
    expected = interpret(graph, {**weights, **given})
    for threads in (1, 2):
        with InferenceSession(graph, weights, threads=threads) as session:
            for name, value in session.run(given).items():
                np.testing.assert_allclose(value, expected[name], atol=2e-5)
