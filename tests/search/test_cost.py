"""The cost of graphs: metrics and objectives, the database, and launches priced as they run."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from soapstone.cache.store import Store
from soapstone.deadline import Deadline
from soapstone.frontend.inference.session import InferenceSession
from soapstone.ir.builder import GraphBuilder
from soapstone.ir.graph import Graph
from soapstone.ir.tensor import Array, Role, TensorSpec
from soapstone.kernels.entry import Call
from soapstone.native.memory import CHECKED, run
from soapstone.search.cost import Cost, ExecutorCost, Objective, ObjectiveError, Weights, executor
from soapstone.search.cost.database import interleaved, robust
from soapstone.search.cost.launches import filled, hollow
from soapstone.search.cost.measure import Measured, Yardstick, measure, sweep, timed
from soapstone.system import cache_bytes

LAST = (0, 2, 3, 1)


# ------------------------------------------------------------------ costs and objectives
def test_costs_add_up() -> None:
    a = Cost(10.0, 100.0, 8.0, 2, 50)
    b = Cost(5.0, 1.0, 2.0, 1, 70, estimated=True)
    assert a + b == Cost(15.0, 101.0, 10.0, 3, 70, estimated=True)
    assert sum([a, a], Cost()) == Cost(20.0, 200.0, 16.0, 4, 50)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("time", 10.0),
        ("memory", 50.0),
        ("flops", 100.0),
        ("launches", 2.0),
        ("bytes", 8.0),
        ("time+0.1*memory", 15.0),
        ("time + memory*0.1 + 2*launches", 19.0),
        ("1e+1*time", 100.0),
        ("time subject to memory<51", 10.0),
        ("time subject to memory<50", math.inf),
        ("time subject to memory<=50, launches<=1", math.inf),
        ("time subject to memory<=50 and launches<=2", 10.0),
    ],
)
def test_objectives(text: str, expected: float) -> None:
    objective = Objective.parse(text)
    assert objective.value(Cost(10.0, 100.0, 8.0, 2, 50)) == pytest.approx(expected)
    assert Objective.parse(str(objective)) == objective


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("", "''"),
        ("speed", "speed"),
        ("time-memory", "time-memory"),
        ("2*time*3", "2*time*3"),
        ("time subject to", "''"),
        ("time subject to memory>5", "memory>5"),
        ("time subject to speed<5", "speed"),
    ],
)
def test_what_is_no_objective_is_named(text: str, named: str) -> None:
    with pytest.raises(ObjectiveError, match="needed") as error:
        Objective.parse(text)
    assert named in str(error.value)


def test_a_relative_objective_is_the_sum_of_its_weights_at_the_base() -> None:
    base = Cost(10.0, 100.0, 8.0, 2, 50)
    objective = Objective.parse("time+0.5*memory").relative(base)
    assert objective.value(base) == pytest.approx(1.5)
    assert objective.value(Cost(5.0, 100.0, 8.0, 2, 50)) == pytest.approx(1.0)


# ------------------------------------------------------------------ samples
def test_disturbed_samples_are_rejected() -> None:
    assert robust([100.0, 101.0, 102.0, 4000.0, 8000.0, 160.0]) == 101.0
    assert robust([60.0, 100.0, 101.0, 102.0, 300.0, 300.0, 300.0]) == 101.0  # 60 is no group
    assert robust([5.0]) == 5.0


def test_runs_are_taken_in_turns_until_the_lowest_agree() -> None:
    order: list[str] = []

    def source(name: str, values: Iterator[float]) -> Callable[[], float]:
        def run() -> float:
            order.append(name)
            return next(values)

        return run

    quiet = iter([10.0] * 50)
    noisy = iter([-70.0, 40.0, 10.0, 30.0, -10.0, 10.1, 20.0, 10.2, *[11.0] * 50])
    a, b = interleaved([source("a", quiet), source("b", noisy)], rounds=3)
    assert (a.us, a.settled) == (10.0, True)
    assert b.settled and 10.0 <= b.us <= 10.5
    assert order[:6] == ["a", "b"] * 3
    assert order.count("a") == 3 < order.count("b") == 8
    (never,) = interleaved([source("c", iter(-1.0 * np.arange(10, 100)))], rounds=2)
    assert not never.settled and 10.0 <= never.us < 22.0


# ------------------------------------------------------------------ the executor's cost
def network(channels: int = 8) -> tuple[Graph, dict[str, Array]]:
    """Return a block of two branches with batch norm, concatenation and a classifier."""
    rng = np.random.default_rng(1)
    builder = GraphBuilder("block")
    weights: dict[str, Array] = {}

    def weight(name: str, *shape: int) -> str:
        weights[name] = rng.random(shape, np.float32) + np.float32(0.1)
        return builder.input(name, shape, role=Role.PARAMETER)

    def conv(x: str, name: str, outputs: int, extent: int, stride: int = 1) -> str:
        channels = builder.spec(x).shape[1]
        w = weight(f"{name}.w", outputs, channels, extent, extent)
        pad = (extent // 2,) * 4
        window = {"stride": (stride, stride), "padding": pad, "dilation": (1, 1)}
        y = builder.apply("conv2d", x, w, name=name, bias=False, groups=1, **window)[0]
        names = ("gamma", "beta", "mean", "var")
        norm = [weight(f"{name}.{part}", outputs) for part in names]
        y = builder.apply("batch_norm_inference", y, *norm, epsilon=1e-5)[0]
        return builder.apply("relu", y)[0]

    x = builder.input("x", (1, 3, 16, 16))
    stem = conv(x, "stem", channels, 3, stride=2)
    branches = [conv(stem, "left", channels, 1), conv(stem, "right", 2 * channels, 3)]
    joined = builder.apply("concat", *branches, axis=1)[0]
    mean = builder.apply("reduce_mean", joined, axes=(2, 3), keepdims=False)[0]
    fc = weight("fc.w", 3 * channels, 10)
    builder.output(builder.apply("matmul", mean, fc, name="y")[0])
    return builder.build(), weights


@pytest.fixture
def model(tmp_path: Path) -> ExecutorCost:
    return ExecutorCost(2, database=Store("cost", tmp_path / "costs.sqlite"))


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Replace measuring by one microsecond a launch; returns the operators asked for."""
    asked: list[str] = []

    def measure(
        calls: list[executor.Call], weights: Weights, yardstick: Yardstick, deadline: Deadline
    ) -> list[Measured]:
        asked.extend(call.operator for call in calls)
        return [Measured(1.0, True, "fake") for _ in calls]

    monkeypatch.setattr(executor, "measure", measure)
    return asked


@pytest.mark.long
def test_a_graph_costs_the_launches_that_a_session_runs(model: ExecutorCost) -> None:
    graph, weights = network()
    cost = model.cost(graph, weights)
    priced = model.prepared(graph, weights).nodes
    with InferenceSession(graph, weights, threads=2) as session:
        session.run(np.ones((1, 3, 16, 16), np.float32))
        (bound,) = session.serial.bounds.held.values()
        assert {node.name for node in priced} == bound.variants.keys()
        assert cost.launches == len(priced) == len(bound.program.launches)
        assert cost.peak_bytes == pytest.approx(session.peak_bytes, abs=64 * cost.launches)
    assert cost.time_us > 0
    assert not cost.estimated


def test_work_counts_what_launches_do(model: ExecutorCost, fake: list[str]) -> None:
    graph, weights = network()
    cost = model.cost(graph, weights)
    products = 2 * 64 * (8 * 27 + 8 * 8 + 16 * 72) + 2 * 24 * 10
    maps = 64 * (8 + 8 + 16)  # relu, and the mean
    assert products + maps <= cost.flops <= products + 2 * maps + 100
    moved = 4 * (3 * 256 + 8 * 64) + 4 * (8 * 64 + 24 * 64 + 8 * 64) + 4 * (24 * 64 + 24) + 4 * 34
    held = 4 * (8 * 28 + 8 * 9 + 16 * 73 + 240)  # weights, with the biases that norms became
    assert cost.bytes == moved + held


def test_each_launch_is_measured_once(tmp_path: Path, fake: list[str]) -> None:
    graph, weights = network()
    database = Store("cost", tmp_path / "costs.sqlite")
    first = ExecutorCost(2, database=database)
    cost = first.cost(graph, weights)
    asked = len(fake)
    assert asked == first.measured == cost.launches
    assert first.cost(graph, weights) == cost
    again = ExecutorCost(2, database=Store("cost", tmp_path / "costs.sqlite"))
    assert again.cost(graph, weights) == cost
    assert (len(fake), again.measured) == (asked, 0)
    ExecutorCost(1, database=database).cost(graph, weights)
    assert len(fake) == 2 * asked  # another thread count is another launch
    cached = ExecutorCost(2, database=database, weights=Weights.CACHED)
    cached.cost(graph, weights)
    assert cached.measured == cost.launches - 1  # the mean has no weights


def test_times_of_a_busy_machine_are_taken_again_when_it_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph, weights = network()
    state = {"us": 9.0, "settled": False, "slow": True}

    def measure(
        calls: list[executor.Call], weights: Weights, yardstick: Yardstick, deadline: Deadline
    ) -> list[Measured]:
        return [Measured(float(state["us"]), bool(state["settled"]), "fake") for _ in calls]

    monkeypatch.setattr(executor, "measure", measure)
    monkeypatch.setattr(Yardstick, "mostly_slow", lambda self: state["slow"])

    def fresh() -> ExecutorCost:
        return ExecutorCost(2, database=Store("cost", tmp_path / "costs.sqlite"))

    model = fresh()
    cost = model.cost(graph, weights)
    assert cost.time_us == 9.0 * cost.launches and model.unsettled == cost.launches
    model = fresh()
    assert model.cost(graph, weights) == cost and model.measured == 0
    state.update(us=5.0, settled=True, slow=False)
    model = fresh()
    assert model.cost(graph, weights).time_us == 5.0 * cost.launches
    state.update(us=7.0, slow=True)
    model = fresh()
    assert model.cost(graph, weights).time_us == 5.0 * cost.launches and model.measured == 0


def test_names_and_contents_do_not_matter(model: ExecutorCost, fake: list[str]) -> None:
    graph, weights = network()
    cost = model.cost(graph, weights)
    measured = model.measured
    assert model.cost(graph, {name: array + 1 for name, array in weights.items()}) == cost
    assert model.measured == measured
    wider, others = network(16)
    model.cost(wider, others)
    assert model.measured > measured


def test_equal_operands_are_not_two_operands(model: ExecutorCost, fake: list[str]) -> None:
    builder = GraphBuilder()
    a, b = builder.input("a", (64, 64)), builder.input("b", (64, 64))
    flags = {"transpose_a": False, "transpose_b": False}
    square = builder.apply("matmul", a, a, **flags)[0]
    builder.output(square, builder.apply("matmul", a, b, **flags)[0])
    model.cost(builder.build(), {})
    assert fake == ["matmul", "matmul"]


def test_layouts_at_the_boundary_decide_the_strides(
    model: ExecutorCost, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[tuple[int, ...], ...]] = []

    def measure(
        calls: list[executor.Call], weights: Weights, yardstick: Yardstick, deadline: Deadline
    ) -> list[Measured]:
        for call in calls:
            seen.append((call.inputs[0].strides, call.outputs[0].strides))
        return [Measured(1.0, True, "fake") for _ in calls]

    monkeypatch.setattr(executor, "measure", measure)
    builder = GraphBuilder()
    x = builder.input("x", (1, 4, 5, 6))
    first = builder.apply("tanh", x, name="t")[0]
    builder.output(builder.apply("max_pool2d", first, name="y", kernel=(2, 2), stride=(1, 1))[0])
    graph = builder.build()
    plain, last = (480, 120, 24, 4), (480, 4, 96, 16)
    model.cost(graph, {})
    assert seen == [(plain, last), (last, (320, 80, 20, 4))]
    seen.clear()
    model.cost(graph, {}, {"x": LAST, "y": LAST})
    assert seen == [(last, last), (last, (320, 4, 80, 16))]


def test_training_graphs_keep_their_updates(model: ExecutorCost, fake: list[str]) -> None:
    builder = GraphBuilder()
    x = builder.input("x", (4, 8))
    w = builder.input("w", (8, 8), role=Role.PARAMETER)
    flags = {"transpose_a": False, "transpose_b": False}
    y = builder.apply("matmul", x, w, **flags)[0]
    builder.output(y)
    builder.update(w, builder.apply("affine", w, scale=0.9, shift=0.0)[0])
    graph = builder.build()
    training = ExecutorCost(2, database=model.database, training=True)
    assert training.cost(graph, {}).launches == 3  # the copy of the next value too
    assert model.cost(graph, {}).launches == 1


def test_scratch_arrays_have_the_strides_of_hollow_ones() -> None:
    spec = GraphBuilder("g")
    name = spec.input("x", (2, 3, 4, 5))
    for order in ((0, 1, 2, 3), LAST, (3, 1, 0, 2)):
        full, empty = filled(spec.spec(name), order), hollow(spec.spec(name), order)
        assert full.strides == empty.strides and full.shape == empty.shape
        assert full.ctypes.data % 64 == 0 and full.min() >= 0.1 and full.max() < 1.1


@pytest.mark.skipif(CHECKED, reason="checked mode runs entries on copies of their arrays")
def test_a_sweep_reads_memory_of_its_own() -> None:
    """Pages that were never written are all one page, and to read them replaces nothing."""
    entry = sweep(cache_bytes(2), 2)
    result, store = sorted(entry.arguments.arrays, key=lambda array: array.nbytes)[-2:]
    assert store.nbytes == pytest.approx(cache_bytes(2), rel=0.01)
    assert run(entry) == 0
    assert store.min() == result.min() == 1


@pytest.mark.parametrize("shape", [(), (0, 3), (4,)])
@pytest.mark.parametrize(
    ("name", "count", "attributes"),
    [("reduce_prod", 1, {"axes": (), "keepdims": False}), ("div", 2, {}), ("mod", 2, {"fmod": 0})],
)
def test_what_only_a_reference_serves_has_a_price(
    name: str, count: int, attributes: dict[str, object], shape: tuple[int, ...]
) -> None:
    """Whole numbers have no kernel that prepares their operands, and are zeros when measured."""
    builder = GraphBuilder("integers")
    names = [builder.input(f"in{i}", shape, "int64") for i in range(count)]
    builder.output(*builder.apply(name, *names, **attributes))
    arrays = [filled(TensorSpec(shape, "int64"), tuple(range(len(shape)))) for _ in range(count)]
    made = np.zeros(shape, np.int64)
    call = Call(name, builder.build().nodes[0].attributes, tuple(arrays), (made,))
    (found,) = measure([call], Weights.CACHED, Yardstick(1), rounds=2)
    assert found.variant == "reference"
    assert found.us > 0


def test_constants_of_one_element_are_measured_on_memory_of_their_own() -> None:
    """The twin of a call has other constants: half of a 0-d array is a scalar, not an array."""
    y = np.zeros((64, 3), np.float32)
    chosen = np.zeros((64, 3), bool)
    one, two = np.array(1, np.float32), np.array(2, np.float32)
    call = Call("where", {}, (chosen, one, two), (y,), 1, frozenset({1, 2}))
    ready = timed(call, Weights.CACHED)
    assert abs(ready.run()) > 0
    assert (y == 2).all()


def test_a_scalar_is_no_operand() -> None:
    """An entry would be bound to the memory of something that is gone at once."""
    x = np.zeros(3, np.float32)
    with pytest.raises(TypeError, match=r"add: inputs\[1\] is float32 .*, an array needed"):
        Call("add", {}, (x, np.float32(1)), (x,))  # type: ignore[arg-type]
