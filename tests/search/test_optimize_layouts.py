"""Axis orders chosen beside substitutions: the choice, its use when a model runs, its files."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import onnx
import pytest
from typer.testing import CliRunner

from soapstone import InferenceSession
from soapstone.cli.main import app
from soapstone.engine import prepare
from soapstone.engine.lower import (
    CHANNELS_LAST,
    boundary_orders,
    channels_last,
    fold_weights,
    lower,
)
from soapstone.frontend.onnx import OnnxError, from_onnx, to_onnx
from soapstone.frontend.optimization.check import inputs_of
from soapstone.frontend.optimization.optimize import all_orders, optimize, settled
from soapstone.ir.builder import GraphBuilder
from soapstone.ir.errors import GraphError
from soapstone.ir.files.graphs import load_graph, load_layouts, save_graph
from soapstone.ir.files.layouts import Layouts, layouts_to_text
from soapstone.ir.graph import Graph, Node
from soapstone.ir.interpret import interpret
from soapstone.ir.strategy import Strategy
from soapstone.ir.tensor import Array, Arrays, Role
from soapstone.search.cost import Cost, CostModel
from soapstone.search.cost.cost import NO_LAYOUTS
from soapstone.search.optimize import normal
from soapstone.search.optimize.layouts import Chooser, Orders, Region, connected, regions
from soapstone.search.optimize.pool import Pool
from soapstone.search.optimize.search import Options, Searched, search
from soapstone.search.rules.rulebook import Rulebook, shipped

MERGED = (
    "conv2d[1,s,p,c](x, y); conv2d[1,s,p,c](x, z) ->"
    " split0[-3](conv2d[1,s,p,c](x, concat[-4](y, z)));"
    " split1[-3](conv2d[1,s,p,c](x, concat[-4](y, z)))"
)
NO_RULES = Rulebook(())


@pytest.fixture(scope="module")
def merging() -> Rulebook:
    """The rule that merges two convolutions of one image, and no other."""
    book = shipped()
    return Rulebook(tuple(rule for rule in book.rules if str(rule) == MERGED))


class Ordered(CostModel):
    """A cost model that needs no measuring.

    Args:
        us: the time of an operator by whether its result is in C order.
        turning: what each operand in another order than the result adds.
    """

    target = "ordered"

    def __init__(
        self,
        us: Callable[[Node, bool], float],
        turning: float = 0.1,
        rule: Callable[..., Layouts] = boundary_orders,
    ) -> None:
        self.us, self.turning, self.rule = us, turning, rule

    def cost(self, graph: Graph, constants: Arrays, layouts: Layouts = NO_LAYOUTS) -> Cost:
        orders = self.rule(graph, layouts)
        known, total = set(constants), 0.0
        for node in graph.nodes:
            if known.issuperset(node.inputs):
                known.update(node.outputs)
                continue
            order = orders.get(node.outputs[0])
            total += self.us(node, order is None)
            moved = [n for n in node.inputs if n not in known and orders.get(n) != order]
            total += self.turning * len(moved)
        return Cost(total)


def drawn(seed: int) -> Callable[[Node, bool], float]:
    """Return random times of operators, the same for the same name."""
    return lambda node, flat: random.Random(f"{seed} {node.name} {flat}").random()


def images(seed: int = 0, fork: bool = True) -> tuple[Graph, dict[str, Array]]:
    """Convolutions and pools, one after the other and side by side."""
    builder, numbers = GraphBuilder("images"), np.random.default_rng(seed)
    weights: dict[str, Array] = {}

    def conv(value: str, into: int, out: int) -> str:
        w = builder.input(f"w{len(weights)}", (out, into, 3, 3), role=Role.PARAMETER)
        weights[w] = numbers.standard_normal((out, into, 3, 3)).astype(np.float32)
        return builder.apply("conv2d", value, w, padding=(1, 1, 1, 1), bias=False)[0]

    def pool(value: str) -> str:
        return builder.apply("max_pool2d", value, kernel=(3, 3), padding=(1, 1, 1, 1))[0]

    first = builder.apply("relu", conv(builder.input("x", (2, 3, 6, 5)), 3, 4))[0]
    left = pool(first)
    right = conv(first, 4, 4) if fork else pool(first)
    joined = builder.apply("concat", left, right, axis=1)[0]
    last = conv(pool(joined), 8, 4)
    builder.output(builder.apply("reduce_mean", last, axes=(2, 3))[0])
    return builder.build(), weights


def twins() -> tuple[Graph, dict[str, Array]]:
    """Two convolutions of one image behind another, and means of what they make."""
    builder, weights = GraphBuilder("twins"), {}
    x = builder.input("x", (1, 4, 6, 6))
    for number in range(3):
        w = builder.input(f"w{number}", (4, 4, 3, 3), role=Role.PARAMETER)
        weights[w] = np.random.default_rng(number).standard_normal((4, 4, 3, 3)).astype(np.float32)
    conv = {"padding": (1, 1, 1, 1), "bias": False}
    first = builder.apply("conv2d", x, "w0", **conv)[0]
    for number in (1, 2):
        made = builder.apply("conv2d", first, f"w{number}", **conv)[0]
        builder.output(builder.apply("reduce_mean", made, axes=(2, 3))[0])
    return builder.build(), weights


def read(graph: Graph, weights: Mapping[str, Array]) -> tuple[Pool, tuple[int, ...]]:
    pool = Pool()
    return pool, normal.read(graph, pool, weights)[1]


def values_of(graph: Graph, weights: Mapping[str, Array]) -> dict[str, Array]:
    return interpret(graph, inputs_of(graph) | dict(weights))


class TestRegions:
    def test_an_order_is_passed_on_and_what_is_stored_is_not_free(self) -> None:
        graph, weights = images()
        found = regions(graph, frozenset(weights))
        assert [len(region.values) for region in found] == [2, 3, 1, 1]
        assert {region.order for region in found} == {CHANNELS_LAST[4]}
        assert not {name for region in found for name in region.values} & graph.roles.keys()

    @pytest.mark.parametrize(("rows", "orders"), [(3, [(0, 2, 1)]), (1, [])])
    def test_products_of_single_rows_have_no_other_order(
        self, rows: int, orders: list[tuple[int, ...]]
    ) -> None:
        builder = GraphBuilder("product")
        x, w = builder.input("x", (1, rows, 4)), builder.input("w", (4, 4), role=Role.PARAMETER)
        made = builder.apply("softmax", builder.apply("matmul", x, w)[0], axis=-1)[0]
        builder.output(made)
        assert [r.order for r in regions(builder.build(), frozenset("w"))] == orders

    def test_connected_sets_are_each_yielded_once_and_small_ones_first(self) -> None:
        chain = [{1}, {0, 2}, {1, 3}, {2}]
        found = list(connected(chain))
        assert [len(each) for each in found] == sorted(len(each) for each in found)
        assert len(found) == len(set(found)) == 4 + 3 + 2 + 1


def brute_force(
    written: normal.Written, found: list[Region], price: Callable[[Orders], float]
) -> float:
    """Return the least cost of all assignments of orders to regions."""
    costs = []
    for choice in itertools.product((False, True), repeat=len(found)):
        orders = {
            written.values[name]: region.order if turned else tuple(range(len(region.order)))
            for region, turned in zip(found, choice)
            for name in region.values
        }
        costs.append(price(orders))
    return min(costs)


class TestChooser:
    @pytest.mark.parametrize(
        "rule", [boundary_orders, channels_last], ids=lambda rule: rule.__name__
    )
    @pytest.mark.parametrize("fork", [False, True])
    @pytest.mark.parametrize("seed", range(12))
    def test_the_choice_is_that_of_brute_force(
        self, seed: int, fork: bool, rule: Callable[..., Layouts]
    ) -> None:
        graph, weights = images(fork=fork)
        pool, outputs = read(graph, weights)
        written = normal.piece(pool, outputs)
        model = Ordered(drawn(seed), turning=0.2, rule=rule)
        known = {name: weights[name] for name in written.graph.roles if name in weights}

        def price(written: normal.Written, orders: Orders) -> float:
            named = {n: orders[v] for n, v in written.values.items() if v in orders}
            return model.cost(written.graph, known, named).time_us

        chooser = Chooser(pool, price, rule, most=1000, gain=1.0)
        found = regions(written.graph, frozenset(known))
        least = brute_force(written, found, lambda orders: price(written, orders))
        assert len(found) >= 4
        assert chooser.least(outputs, written, {}) == pytest.approx(least)
        assert price(written, chooser.orders[outputs]) == pytest.approx(least)

    def test_what_was_tried_before_is_not_tried_again(self) -> None:
        graph, weights = images()
        pool, outputs = read(graph, weights)
        written = normal.piece(pool, outputs)
        prices: list[Orders] = []

        def price(written: normal.Written, orders: Orders) -> float:
            prices.append(orders)
            return 1.0

        chooser = Chooser(pool, price, boundary_orders)
        chooser.least(outputs, written, {})
        first = len(prices)
        chooser.least(outputs, written, {})
        assert first > 4
        assert len(prices) == first + 1


def joint_and_sequential(
    made: tuple[Graph, Mapping[str, Array]], book: Rulebook, model: Ordered
) -> tuple[Searched, Searched]:
    """Return what is found with layouts and substitutions at once, and one after the other."""
    both = search(*made, book, model, options=Options(layouts=True))
    first = search(*made, book, model)
    then = search(first.graph, first.constants, NO_RULES, model, options=Options(layouts=True))
    return both, then


class TestJointSearch:
    @pytest.mark.parametrize("seed", range(8))
    def test_joint_is_never_worse_than_sequential(self, merging: Rulebook, seed: int) -> None:
        times = drawn(seed)

        def us(node: Node, flat: bool) -> float:
            return times(node, flat) if node.operator == "conv2d" else 0.0

        both, then = joint_and_sequential(twins(), merging, Ordered(us))
        assert both.after.time_us <= then.after.time_us * 1.01
        assert both.after.time_us <= both.before.time_us

    def test_a_substitution_that_pays_only_in_another_order_is_found(
        self, merging: Rulebook
    ) -> None:
        def us(node: Node, flat: bool) -> float:
            """A merged convolution is slow in C order and fast channels-last."""
            if node.operator != "conv2d":
                return 0.0
            merged = node.spec.name == "conv2d" and "concat" in str(node.inputs)
            return (3.0 if merged else 1.0) if flat else (0.5 if merged else 0.9)

        both, then = joint_and_sequential(twins(), merging, Ordered(us))
        assert not then.substitutions
        assert sum(both.substitutions.values()) == 1
        assert both.after.time_us < then.after.time_us * 0.9
        assert CHANNELS_LAST[4] in both.layouts.values()

    def test_regions_across_the_borders_of_pieces_are_turned(self) -> None:
        def us(node: Node, flat: bool) -> float:
            return 1.0 + flat if node.operator in ("conv2d", "max_pool2d") else 0.0

        graph, weights = images()
        model = Ordered(us, turning=1.5)
        options = Options(layouts=True, piece=1)
        found = search(graph, weights, NO_RULES, model, options=options)
        every = {n: CHANNELS_LAST[4] for r in regions(graph, frozenset(weights)) for n in r.values}
        assert found.after.time_us < found.before.time_us
        assert found.after.time_us == pytest.approx(model.cost(graph, weights, every).time_us)

    def test_without_the_option_no_order_is_chosen(self, merging: Rulebook) -> None:
        found = search(*twins(), merging, Ordered(drawn(3)), options=Options())
        assert not found.layouts

    def test_what_was_found_computes_the_same(self, merging: Rulebook) -> None:
        graph, weights = twins()

        def us(node: Node, flat: bool) -> float:
            return 1.0 + flat if node.operator == "conv2d" else 0.0

        found = search(graph, weights, merging, Ordered(us), options=Options(layouts=True))
        new, held = settled(found.graph, found.constants)
        orders = all_orders(new, held, found.layouts)
        assert orders
        given, needed = inputs_of(graph), values_of(graph, weights)
        with InferenceSession(new, held, layouts=orders) as session:
            for name, array in session.run(given).items():
                np.testing.assert_allclose(array, needed[name], rtol=1e-3, atol=1e-4)


def test_a_weight_that_folding_names_like_the_output_is_no_output() -> None:
    builder = GraphBuilder("gemm")
    x = builder.input("x", (2, 3))
    weights = {"w": np.ones((4, 3), np.float32), "b": np.ones(4, np.float32)}
    w, b = (builder.input(n, a.shape, role=Role.PARAMETER) for n, a in weights.items())
    turned = builder.apply("transpose", w, permutation=(1, 0), name="y")[0]
    product = builder.apply("matmul", x, turned)[0]
    builder.output(builder.apply("add", product, b, name="sum")[0])
    graph = builder.build().renamed({"y": "y.inner", "sum": "y"})  # nodes are called as before

    class Folding(Ordered):
        def cost(self, graph: Graph, constants: Arrays, *layouts: object) -> Cost:
            folded = fold_weights(graph, constants)
            assert folded.tensors[folded.outputs[0]].shape == (2, 4)
            return Cost(1.0)

    found = search(graph, weights, NO_RULES, Folding(drawn(0)))
    assert found.graph.outputs == ("y",)


class Lowered:
    """Records the layouts of what is lowered."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.layouts: Layouts = {}

        def noted(graph: Graph, strategy: Strategy, **given: bool) -> Graph:
            self.layouts = strategy.layouts
            return lower(graph, strategy, **given)

        monkeypatch.setattr(prepare, "lower", noted)


@pytest.fixture
def lowered(monkeypatch: pytest.MonkeyPatch) -> Lowered:
    return Lowered(monkeypatch)


class TestSessions:
    def test_any_orders_give_the_same_outputs(self) -> None:
        graph, weights = images()
        given, needed = inputs_of(graph), values_of(graph, weights)
        found = regions(graph, frozenset(weights))
        for choice in itertools.product((False, True), repeat=len(found)):
            turned = [region for region, chosen in zip(found, choice) if chosen]
            layouts = {name: region.order for region in turned for name in region.values}
            with InferenceSession(graph, weights, layouts=layouts) as session:
                for name, array in session.run(given).items():
                    np.testing.assert_allclose(array, needed[name], rtol=1e-3, atol=1e-4)

    def test_the_orders_given_are_those_used(self, lowered: Lowered) -> None:
        graph, weights = images()
        name = regions(graph, frozenset(weights))[0].values[0]
        for layouts in ({}, {name: CHANNELS_LAST[4]}):
            with InferenceSession(graph, weights, layouts=layouts) as session:
                session.run(inputs_of(graph))
            assert lowered.layouts == layouts
        with InferenceSession(graph, weights) as session:
            session.run(inputs_of(graph))
        assert lowered.layouts == channels_last(graph)

    @pytest.mark.parametrize(
        ("layouts", "message"),
        [
            ({"nothing": (0, 1)}, "'nothing' does not exist"),
            ({"relu": (0, 1)}, "'relu'.*axis order"),
        ],
    )
    def test_orders_that_do_not_fit_are_errors(self, layouts: Layouts, message: str) -> None:
        graph, weights = images()
        assert "relu" in graph.tensors
        session = InferenceSession(graph, weights, layouts=layouts)
        with session, pytest.raises(GraphError, match=message):
            session.run(inputs_of(graph))


HOSTILE = [
    ("[", "not JSON"),
    ("[]", "an object needed"),
    ('{"format": "other", "version": 1, "orders": {}}', "field 'format'"),
    ('{"format": "soapstone-layouts", "version": 2, "orders": {}}', "field 'version'"),
    ('{"format": "soapstone-layouts", "version": 1}', "field 'orders' is missing"),
    ('{"format": "soapstone-layouts", "version": 1, "orders": {}, "more": 1}', "'more'"),
    ('{"format": "soapstone-layouts", "version": 1, "orders": {"relu": "0"}}', "'relu'"),
    ('{"format": "soapstone-layouts", "version": 1, "orders": {"relu": [0, 0]}}', "relu"),
    ('{"format": "soapstone-layouts", "version": 1, "orders": {"relu": [0, 9]}}', "relu"),
    ('{"format": "soapstone-layouts", "version": 1, "orders": {"relu": [-1]}}', "relu"),
    ('{"format": "soapstone-layouts", "version": 1, "orders": {"a": [0], "a": [0]}}', "'a'"),
]


class TestFiles:
    def test_orders_go_to_an_onnx_file_and_back_and_are_used(
        self, tmp_path: Path, lowered: Lowered
    ) -> None:
        graph, weights = images()
        layouts = dict.fromkeys(regions(graph, frozenset(weights))[1].values, CHANNELS_LAST[4])
        path = tmp_path / "model.onnx"
        to_onnx(graph, weights, path, layouts=layouts)
        assert from_onnx(path).layouts == layouts
        with InferenceSession(path) as session:
            found = session.run(inputs_of(graph))
        assert lowered.layouts == layouts
        needed = values_of(graph, weights)
        for name, array in found.items():
            np.testing.assert_allclose(array, needed[name], rtol=1e-3, atol=1e-4)

    def test_a_file_without_orders_has_none(self, tmp_path: Path) -> None:
        graph, weights = images()
        to_onnx(graph, weights, tmp_path / "model.onnx")
        assert from_onnx(tmp_path / "model.onnx").layouts is None

    def test_orders_go_to_a_graph_file_and_back(self, tmp_path: Path) -> None:
        graph, weights = images()
        path = tmp_path / "model.json"
        save_graph(graph, path, weights)
        assert load_layouts(path) is None
        save_graph(graph, path, weights, {"relu": CHANNELS_LAST[4]})
        assert load_layouts(path) == {"relu": CHANNELS_LAST[4]}
        assert load_graph(path)[0] == graph

    def test_orders_are_kept_when_files_are_converted(self, tmp_path: Path) -> None:
        graph, weights = images()
        first, middle, last = (tmp_path / name for name in ("a.onnx", "b.json", "c.onnx"))
        to_onnx(graph, weights, first, layouts={"relu": CHANNELS_LAST[4]})
        for command in (["import", str(first), str(middle)], ["export", str(middle), str(last)]):
            done = CliRunner().invoke(app, ["onnx", *command])
            assert done.exit_code == 0, done.output
        assert load_layouts(middle) == from_onnx(last).layouts == {"relu": CHANNELS_LAST[4]}

    @pytest.mark.parametrize(("text", "message"), HOSTILE)
    def test_wrong_metadata_is_an_error_that_names_the_field(
        self, tmp_path: Path, text: str, message: str
    ) -> None:
        graph, weights = images()
        path = tmp_path / "model.onnx"
        to_onnx(graph, weights, path)
        proto = onnx.load(path)
        proto.metadata_props.add(key="soapstone.layouts", value=text)
        onnx.save(proto, path)
        with pytest.raises(OnnxError, match=message) as caught:
            from_onnx(path)
        assert "soapstone.layouts" in str(caught.value)

    def test_metadata_of_no_value_twice_or_of_another_rank_is_an_error(
        self, tmp_path: Path
    ) -> None:
        graph, weights = images()
        path = tmp_path / "model.onnx"
        to_onnx(graph, weights, path)
        proto = onnx.load(path)
        for layouts, message in (
            ({"nothing": (0, 1)}, "orders.nothing"),
            ({"relu": (1, 0)}, "'relu'.*axis order"),
        ):
            del proto.metadata_props[:]
            text = layouts_to_text(layouts)
            proto.metadata_props.add(key="soapstone.layouts", value=text)
            with pytest.raises(GraphError, match=message):
                InferenceSession(from_onnx(proto)).run(inputs_of(graph))
        proto.metadata_props.add(key="soapstone.layouts", value=text)
        with pytest.raises(OnnxError, match="2 times"):
            from_onnx(proto)

    @pytest.mark.parametrize(("text", "message"), HOSTILE[1:-1])
    def test_wrong_orders_of_a_graph_file_are_an_error(
        self, tmp_path: Path, text: str, message: str
    ) -> None:
        path = tmp_path / "model.json"
        save_graph(images()[0], path)
        data = json.loads(path.read_text())
        del data["checksum"]
        path.write_text(json.dumps({**data, "layouts": json.loads(text)}))
        with pytest.raises(GraphError, match=message):
            load_graph(path)


class TestOptimize:
    def test_the_command_chooses_orders_and_its_file_runs(self, tmp_path: Path) -> None:
        graph, weights = images()
        source, target = tmp_path / "model.onnx", tmp_path / "faster.onnx"
        to_onnx(graph, weights, source)
        run = CliRunner()
        command = ["optimize", str(source), "-o", str(target), "--layouts", "--json"]
        done = run.invoke(app, [*command, "--candidates", "10", "--budget", "20"])
        assert done.exit_code == 0, done.output
        assert "layouts" in json.loads(done.stdout)
        np.savez(tmp_path / "x.npz", **inputs_of(graph))
        done = run.invoke(app, ["predict", str(target), "-i", str(tmp_path / "x.npz")])
        assert done.exit_code == 0, done.output

    def test_layouts_are_for_soapstones_executor(self) -> None:
        graph, weights = images()
        with pytest.raises(GraphError, match="onnxruntime"):
            optimize(graph, weights, target="onnxruntime", layouts=True)


def test_orders_hold_for_values_that_a_folded_norm_stands_behind(tmp_path: Path) -> None:
    """A value keeps its name where weights fold, so what a file says of it is followed."""
    builder = GraphBuilder("normed")
    x = builder.input("x", (1, 3, 6, 5))
    w = builder.input("w", (4, 3, 3, 3), role=Role.PARAMETER)
    norm = [builder.input(name, (4,), role=Role.PARAMETER) for name in ("g", "b", "m", "v")]
    (y,) = builder.apply("conv2d", x, w, bias=False, name="conv")
    (y,) = builder.apply("batch_norm_inference", y, *norm, name="norm")
    (y,) = builder.apply("max_pool2d", y, kernel=(2, 2), name="pool")
    builder.output(builder.apply("reduce_sum", y, axes=(2, 3), name="sum")[0])
    graph = builder.build()
    weights = {n: np.ones(graph.tensors[n].shape, np.float32) for n in graph.inputs(Role.PARAMETER)}
    assert all_orders(graph, weights, {}).keys() == {"norm", "pool"}
    orders = {"norm": CHANNELS_LAST[4], "pool": (0, 1, 2, 3)}
    save_graph(graph, tmp_path / "g.json", weights, orders)
    held, orders = load_graph(tmp_path / "g.json")[1], load_layouts(tmp_path / "g.json")
    with InferenceSession(graph, held, layouts=orders) as session:
        session.run({"x": np.ones((1, 3, 6, 5), np.float32)})
        (bound,) = session.serial.bounds.held.values()
    assert bound.prepared.strategy.layouts == {"norm": CHANNELS_LAST[4]}
