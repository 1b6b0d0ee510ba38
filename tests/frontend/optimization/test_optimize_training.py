"""Training graphs in the optimiser: what is found, how it is checked, and training with it."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.optimizing import VIEWS, Launches
from typer.testing import CliRunner

import soapstone
from soapstone import SGD, Adam, Model
from soapstone.cli.main import app
from soapstone.engine.measuring import drawn
from soapstone.frontend.graphs.adjacency import Adjacency
from soapstone.frontend.optimization import optimize as optimiser
from soapstone.frontend.optimization.result import OptimizeResult
from soapstone.frontend.optimization.training import Ground, StepRunner, verified_step
from soapstone.frontend.strategies import finding
from soapstone.frontend.training.optimizers import Optimizer
from soapstone.frontend.training.state import TrainingState
from soapstone.frontend.training.step_graph import training_graph
from soapstone.ir.builder import GraphBuilder
from soapstone.ir.errors import GraphError
from soapstone.ir.graph import Graph
from soapstone.ir.interpret import interpret
from soapstone.ir.tensor import Array, Role
from soapstone.ir.training.autodiff import gradients
from soapstone.ir.training.precision import mixed
from soapstone.search.optimize.gradient_forms import in_forms, in_order_of, restored
from soapstone.search.optimize.search import Options
from soapstone.search.optimize.steps import search_step, taken_apart
from soapstone.search.rules.rulebook import Rulebook

BATCH = 6
COSTS = Launches(10.0, free=(*VIEWS, "transpose"))


@pytest.fixture
def cheap(monkeypatch: pytest.MonkeyPatch) -> None:
    """Price by counting: the search then takes no measurements."""
    monkeypatch.setattr(optimiser, "cost_model", lambda *given: COSTS)


def branched(batch: int = BATCH) -> Model:
    """Four branches of convolutions that rules join to one with groups."""
    model = Model("branched", seed=2)
    x = model.input("x", (batch, 12, 6, 5))
    parts = model.split(x, (3,) * 4, axis=1)
    made = [
        model.conv2d(part, 2, kernel=3, padding=1, bias=False, name=f"conv{i}")
        for i, part in enumerate(parts)
    ]
    x = model.relu(model.concat(made, axis=1))
    model.output(model.dense(model.flatten(x), 5, name="classes"))
    return model


def projected(batch: int = BATCH) -> Model:
    """Three products of one value, a product that is computed again in backward, and a sum."""
    model = Model("projected", seed=4)
    x = model.input("x", (batch, 12))
    a, b, c = (model.dense(x, 8, name=name) for name in "abc")
    y = model.dense(model.tanh(a) * b + c, 12, activation="gelu", name="wide")
    model.output(model.dense(model.layer_norm(y + x, name="norm"), 5, name="classes"))
    return model


def recurrent(batch: int = BATCH) -> Model:
    """Four steps that share their weights."""
    model = Model("recurrent", seed=5)
    x = model.input("x", (batch, 32))
    w, u = model.parameter("w", (8, 16)), model.parameter("u", (16, 16))
    steps = model.split(x, (8,) * 4, axis=1)
    state = model.tanh(steps[0] @ w)
    for step in steps[1:]:
        state = model.tanh(step @ w + state @ u)
    model.output(model.dense(state, 5, name="classes"))
    return model


def normalised(batch: int = BATCH) -> Model:
    """Batch norm, whose statistics are states, behind a bias that has no gradient."""
    model = Model("normalised", seed=6)
    x = model.input("x", (batch, 3, 6, 6))
    y = model.relu(model.batch_norm(model.conv2d(x, 4, kernel=3, padding=1, name="conv")))
    y = model.dropout(model.concat([y, x], axis=1), 0.3, name="drop")
    model.output(model.dense(model.flatten(y), 5, name="classes"))
    return model


def neighbouring(batch: int = BATCH) -> Model:
    """Three products that rules join, of sums over the neighbours of a graph, which is constant."""
    model = Model("neighbouring", seed=7)
    edges = Adjacency.from_edges(np.arange(batch), np.roll(np.arange(batch), 1), batch)
    x = model.gcn_conv(model.input("x", (batch, 12)), edges.normalised(), 10, activation="relu")
    a, b, c = (model.dense(x, 8, name=name) for name in "abc")
    y = model.aggregate(model.tanh(a) * b + c, edges, "max")
    model.output(model.dense(y, 5, name="classes"))
    return model


MODELS = (branched, projected, recurrent, normalised)
OPTIMIZERS = (SGD(0.05, momentum=0.9), Adam(1e-3))


def graph_of(model: Model, chosen: Optimizer = OPTIMIZERS[0], halves: bool = False) -> Graph:
    forward = model.build(BATCH, training=True)
    forward = mixed(forward) if halves else forward
    return training_graph(forward, "cross_entropy", chosen, ("accuracy",), scaled=halves)


def optimised(graph: Graph, book: Rulebook, candidates: int = 8) -> Graph:
    options = Options(candidates=candidates, whole=candidates)
    return search_step(graph, book, COSTS, options=options).graph


def respelled(graph: Graph) -> Graph:
    """Return a graph that went the way of all graphs that are searched, without any rule."""
    return restored(in_forms(graph), graph)


def operators(graph: Graph) -> Counter[str]:
    return Counter(node.operator for node in graph.nodes)


def samples(model: Model, steps: int = 1) -> tuple[Array, Array]:
    random = np.random.default_rng(1)
    shape = model.build().tensors["x"].shape[1:]
    x = random.standard_normal((steps * BATCH, *shape)).astype(np.float32)
    return x, random.integers(0, 5, len(x)).astype(np.int32)


def trained(model: Model, steps: int, **options: Any) -> tuple[list[float], dict[str, Array]]:
    """Return the losses of some steps, and parameters and states after them."""
    with model:
        model.compile(metrics=["accuracy"], **options)
        x, y = samples(model, steps)
        losses = []
        state = TrainingState(model=model)
        for number in range(steps):
            part = slice(number * BATCH, (number + 1) * BATCH)
            model.trainer.step({"x": x[part]}, y[part], state)
            losses.append(float(state.loss))
        return losses, model.trainer.session.state()


class TestTakingApart:
    @pytest.mark.parametrize("make", MODELS, ids=lambda make: make.__name__)
    @pytest.mark.parametrize("chosen", OPTIMIZERS, ids=lambda each: type(each).__name__)
    def test_a_step_is_a_forward_graph_and_its_gradient(
        self, make: Callable[[], Model], chosen: Optimizer
    ) -> None:
        graph = graph_of(make(), chosen)
        step = taken_apart(graph)
        assert step is not None
        assert not any("grad" in node.operator for node in step.forward.nodes)
        assert {update.operator for update in step.updates} <= {"sgd", "adam"}
        assert step.of(step.forward).updates.keys() == graph.updates.keys()

    def test_another_gradient_is_left_alone(self, book: Rulebook) -> None:
        """Gradients that are changed before the update are not those of the forward graph."""
        builder = GraphBuilder("clipped")
        x = builder.input("x", (4, 3))
        w = builder.input("w", (3, 3), role=Role.PARAMETER)
        loss = builder.apply("reduce_sum", builder.apply("matmul", x, w)[0], axes=(0, 1))[0]
        ok = builder.apply("is_finite", loss)[0]
        rate = builder.input("learning_rate", (), role=Role.SCALAR)
        grad = builder.apply("tanh", gradients(builder, loss, [w])[w])[0]
        builder.update(w, builder.apply("sgd", w, grad, rate, ok)[0])
        builder.output(loss, ok)
        graph = builder.build()
        assert taken_apart(graph) is None
        assert verified_step(graph, optimised(graph, book)) < 1e-4

    @pytest.mark.parametrize("make", MODELS, ids=lambda make: make.__name__)
    def test_spelling_and_putting_together_change_no_value(self, make: Callable[[], Model]) -> None:
        graph = graph_of(make())
        values = {name: drawn(graph, name) for name in graph.roles}
        expected = interpret(graph, values)
        for new in (in_forms(graph), respelled(graph)):
            assert new.outputs == graph.outputs
            assert new.roles == graph.roles
            found = interpret(new, values)
            for name in graph.outputs:
                np.testing.assert_allclose(found[name], expected[name], rtol=1e-4, atol=1e-5)
            for name, value in graph.updates.items():
                after = found[new.updates[name]]
                np.testing.assert_allclose(after, expected[value], rtol=1e-3, atol=1e-4)
        assert operators(new)["transpose"] <= operators(graph)["transpose"]


class TestSearch:
    def test_branches_become_one_in_forward_and_backward(self, book: Rulebook) -> None:
        graph = graph_of(branched())
        new = optimised(graph, book)
        before, after = operators(graph), operators(new)
        for name in ("conv2d", "conv2d_grad_weight"):
            assert before[name] == 4 and after[name] == 1
        (convolution,) = [node for node in new.nodes if node.operator == "conv2d"]
        assert convolution.attributes["groups"] == 4
        assert verified_step(graph, new) < 1e-4

    def test_products_of_shared_weights_have_one_gradient(self, book: Rulebook) -> None:
        """The sum of products over the steps is one product of what is joined over them."""
        graph = graph_of(recurrent())
        new = optimised(graph, book, 40)
        products = ("matmul", "linear", "linear_grad_weight", "linear_grad_input")
        before, after = operators(graph), operators(new)
        assert sum(after[name] for name in products) <= sum(before[name] for name in products) - 5
        assert verified_step(graph, new) < 1e-4

    def test_what_is_made_twice_is_made_once(self) -> None:
        """The gradient of gelu needs the value before it, which the fused product does not keep."""
        builder = GraphBuilder("wide")
        x = builder.input("x", (BATCH, 3))
        w = builder.input("w", (3, 5), role=Role.PARAMETER)
        b = builder.input("b", (5,), role=Role.PARAMETER)
        builder.output(builder.apply("linear", x, w, b, activation="gelu")[0])
        graph = training_graph(builder.build(), "cross_entropy", SGD(), ())
        assert operators(graph)["linear"] == 2
        new = respelled(graph)
        assert operators(new)["linear"] == operators(new)["linear_grad_weight"] == 1
        assert verified_step(graph, new) < 1e-4

    def test_operators_run_in_the_order_of_the_original(self) -> None:
        """What reads one weight, its product's gradient and its update, stays together."""
        graph = graph_of(recurrent())
        new = in_order_of(respelled(graph), graph)
        at = {node.name: number for number, node in enumerate(graph.nodes)}
        same = [at[node.name] for node in new.nodes if node.name in at]
        assert same == sorted(same)
        assert verified_step(graph, new) < 1e-4

    @pytest.mark.parametrize("make", MODELS, ids=lambda make: make.__name__)
    @pytest.mark.parametrize("chosen", OPTIMIZERS, ids=lambda each: type(each).__name__)
    def test_several_steps_train_alike(
        self, make: Callable[[], Model], chosen: Optimizer, book: Rulebook
    ) -> None:
        new = optimised(graph_of(make(), chosen), book)
        losses, state = trained(make(), 5, optimizer=chosen)
        other_losses, other = trained(make(), 5, optimizer=chosen, step=new)
        np.testing.assert_allclose(other_losses, losses, rtol=1e-4)
        assert other.keys() == state.keys()
        rounding = {name for name in state if name.startswith("conv.bias")}
        for name in state.keys() - (rounding if make is normalised else set()):
            np.testing.assert_allclose(other[name], state[name], rtol=2e-3, atol=2e-4, err_msg=name)

    def test_a_rewritten_step_of_mixed_precision_is_skipped_where_it_overflows(
        self, book: Rulebook
    ) -> None:
        step = optimised(graph_of(recurrent(), halves=True), book, 40)
        with recurrent() as model:
            model.compile(OPTIMIZERS[0], metrics="accuracy", precision="mixed_float16", step=step)
            given = model.trainer.steps.given
            assert given is not None and operators(given) == operators(step)  # guarded as it is
            x, y = samples(model)
            model.train_on_batch(x, y)
            model.set_weights({"loss_scale": np.float32(2**30)})
            before = model.trainer.state()
            assert np.isfinite(model.train_on_batch(x, y)["loss"])
            after = model.trainer.state()
        assert after.pop("loss_scale") == 2**29 and after.pop("loss_scale.good_steps") == 0
        for name, value in after.items():
            np.testing.assert_array_equal(value, before[name], err_msg=name)

    @pytest.mark.long
    @pytest.mark.parametrize("make", MODELS, ids=lambda make: make.__name__)
    def test_several_steps_of_mixed_precision_train_alike(
        self, make: Callable[[], Model], book: Rulebook
    ) -> None:
        """Rules rewrite products of halves between their casts, which stay."""
        graph = graph_of(make(), halves=True)
        new = optimised(graph, book, 40)
        before, after = operators(graph), operators(new)
        assert before["cast"] == after["cast"]
        assert (before != after) is (make is recurrent)
        losses, state = trained(make(), 5, optimizer=OPTIMIZERS[0], precision="mixed_float16")
        for how in ({"step": new}, {"step": graph}):
            model = make()
            found, other = trained(
                model, 5, optimizer=OPTIMIZERS[0], precision="mixed_float16", **how
            )
            np.testing.assert_allclose(found, losses, rtol=2e-3)
            assert other["loss_scale"] == state["loss_scale"] == 2**15
            for name, value in state.items():
                np.testing.assert_allclose(other[name], value, rtol=2e-2, atol=2e-3, err_msg=name)


@pytest.mark.usefixtures("cheap")
class TestOptimize:
    @pytest.mark.usefixtures("cheap")
    def test_steps_are_measured_and_the_faster_is_kept(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        graph = graph_of(branched())
        result = soapstone.optimize(graph, candidates=8)
        report = result.as_dict()
        assert report["measured_before_us"] and report["measured_after_us"], result.reason
        assert report["speedup"] == report["measured_before_us"] / report["measured_after_us"]
        assert report["kept"] == (report["speedup"] >= 1 / 0.98)
        assert report["max_abs_error"] < 1e-4 and report["substitutions"]

        def refuse(*given: object, **more: object) -> None:
            raise OSError("no more processes")

        monkeypatch.setattr("subprocess.Popen", refuse)  # so that both sides run here
        for times, kept in (((2.0, 1.0), True), ((1.0, 2.0), False)):
            trial = "soapstone.frontend.optimization.trial.in_turns"
            monkeypatch.setattr(trial, lambda *given, t=times: t)
            result = soapstone.optimize(graph, candidates=2)
            assert result.kept is kept
            assert (result.graph is graph) is not kept

    @pytest.mark.long
    def test_steps_over_a_graph_are_compared_and_timed_on_its_edges(self, tmp_path: Path) -> None:
        """In processes of their own, at training, and where the step is of a file."""
        model = neighbouring()
        result = soapstone.optimize(graph_of(model), model.constants, candidates=8)
        assert result.max_abs_error < 1e-4 and result.measured_after_us, result.reason
        assert result.substitutions and not result.weights
        losses, state = trained(neighbouring(), 3, optimizer=OPTIMIZERS[0])
        soapstone.save_graph(respelled(graph_of(model)), tmp_path / "step.json")
        for how in ({"optimize": True}, {"step": tmp_path / "step.json"}):
            found, other = trained(neighbouring(), 3, optimizer=OPTIMIZERS[0], **how)
            np.testing.assert_allclose(found, losses, rtol=1e-4)
            for name, value in state.items():
                np.testing.assert_allclose(other[name], value, rtol=2e-3, atol=2e-4)

    def test_measuring_runs_both_steps(self) -> None:
        graph = graph_of(projected())
        for each in (graph, respelled(graph)):
            with closing(StepRunner(each, Ground.local(1))) as runner:
                assert runner.round() > 0

    def test_a_wrong_step_is_noticed(self) -> None:
        graph = graph_of(projected(), SGD(0.1, momentum=0.9))
        other = graph_of(projected(), SGD(0.1, momentum=0.8))
        with pytest.raises(GraphError, match=r"next value of .*differs by"):
            verified_step(graph, other)

    @pytest.mark.long
    def test_a_search_in_mixed_precision_trains_as_without(self) -> None:
        how: dict[str, Any] = {"optimizer": OPTIMIZERS[0], "precision": "mixed_float16"}
        losses, _ = trained(recurrent(), 3, **how)
        found, _ = trained(recurrent(), 3, optimize=True, **how)
        np.testing.assert_allclose(found, losses, rtol=2e-3)
        result = soapstone.optimize(graph_of(recurrent(), halves=True), candidates=40)
        assert result.substitutions and result.max_abs_error < 1e-2

    @pytest.mark.usefixtures("cheap")
    def test_a_step_is_searched_once_in_a_process_and_leaves_the_model_as_it_was(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        searched = []
        real = soapstone.optimize

        def counted(graph: Graph, **given: Any) -> OptimizeResult:
            searched.append(graph.name)
            return real(graph, **given)

        monkeypatch.setattr(optimiser, "optimize", counted)
        histories = []
        for optimize in (True, True, False):
            with branched() as model:
                model.name = "searched once"
                before = {name: array.copy() for name, array in model.weights().items()}
                program = str(model.build(BATCH, training=True))
                model.compile(SGD(0.1), metrics=["accuracy"], optimize=optimize)
                expected = graph_of(branched(), SGD(0.1))
                assert model.training_graph.roles.keys() == expected.roles.keys()
                assert str(model.build(BATCH, training=True)) == program
                for name, array in model.weights().items():
                    np.testing.assert_array_equal(before[name], array)
                x, y = samples(model, 4)
                result = model.fit(x[:-2], y[:-2], epochs=2, progress=False)
                histories.append(result.epochs)
        assert searched == ["searched once"]  # the last batch is smaller: it runs as it is
        assert capsys.readouterr().err == ""
        assert histories[0] == histories[1]
        for one, other in zip(histories[0], histories[2], strict=True):
            assert one["loss"] == pytest.approx(other["loss"], rel=1e-4)
            assert one["accuracy"] == other["accuracy"]


def renamed(data: dict[str, Any], old: str, new: str) -> dict[str, Any]:
    changed: dict[str, Any] = json.loads(json.dumps(data).replace(f'"{old}"', f'"{new}"'))
    return changed


def with_role(data: dict[str, Any], name: str, role: str) -> dict[str, Any]:
    for item in data["inputs"]:
        if item["name"] == name:
            item["role"] = role
    return data


HOSTILE: dict[str, tuple[Callable[[dict[str, Any]], dict[str, Any]], str]] = {
    "a parameter is called otherwise": (
        lambda data: renamed(data, "wide.weight", "narrow.weight"),
        "parameter 'wide.weight' is missing",
    ),
    "a state is called otherwise": (
        lambda data: renamed(data, "wide.weight.momentum", "wide.weight.speed"),
        "state 'wide.weight.momentum' is missing",
    ),
    "an input is called otherwise": (
        lambda data: renamed(data, "x", "z"),
        "input 'x' is missing",
    ),
    "a parameter is a state": (
        lambda data: with_role(data, "wide.weight", "state"),
        "state 'wide.weight' found, parameter 'wide.weight' needed",
    ),
    "outputs in another order": (
        lambda data: {**data, "outputs": data["outputs"][::-1]},
        "outputs",
    ),
    "a parameter that is never trained": (
        lambda data: {
            **data,
            "updates": {k: v for k, v in data["updates"].items() if k != "wide.bias"},
        },
        "the next value of 'wide.bias' is missing",
    ),
    "no updates": (lambda data: {**data, "updates": {}}, "no updates found"),
    "no graph": (lambda data: {"format": "soapstone-graph"}, "version"),
}


class TestFiles:
    @pytest.fixture
    def step(self, tmp_path: Path) -> Path:
        path = tmp_path / "step.json"
        soapstone.save_graph(respelled(graph_of(projected())), path)
        return path

    def compiled(self, step: Path | Graph, chosen: Optimizer = OPTIMIZERS[0]) -> Model:
        model = projected()
        model.compile(chosen, metrics=["accuracy"], step=step)
        return model

    def test_a_saved_step_trains(self, step: Path) -> None:
        losses, state = trained(projected(), 3, optimizer=OPTIMIZERS[0])
        others, found = trained(projected(), 3, optimizer=OPTIMIZERS[0], step=step)
        np.testing.assert_allclose(others, losses, rtol=1e-4)
        for name, array in state.items():
            np.testing.assert_allclose(found[name], array, rtol=1e-3, atol=1e-4)

    @pytest.mark.parametrize("case", HOSTILE)
    def test_a_step_that_does_not_fit_is_refused(self, step: Path, case: str) -> None:
        change, message = HOSTILE[case]
        data = json.loads(step.read_text())
        del data["checksum"]
        step.write_text(json.dumps(change(data)))
        with pytest.raises(GraphError, match=message) as caught:
            self.compiled(step)
        assert "step.json" in str(caught.value)

    def test_shapes_and_types_are_checked(self) -> None:
        graph = graph_of(projected())
        wider = Model("projected")
        x = wider.input("x", (BATCH, 12))
        wider.output(wider.dense(x, 5, name="classes"))
        with pytest.raises(GraphError, match=r"parameter '.*' is missing"):
            self.compiled(graph_of(wider))
        spec = replace(graph.tensors["wide.bias"], dtype="float64")
        other = replace(graph, tensors={**graph.tensors, "wide.bias": spec})
        with pytest.raises(GraphError, match=r"parameter 'wide\.bias': float64\[12\] found"):
            self.compiled(other)

    def test_a_step_of_another_optimizer_is_refused_when_it_is_to_run(self) -> None:
        other = graph_of(projected(), SGD(0.05, momentum=0.5))
        with self.compiled(other) as model:
            x, y = samples(model)
            with pytest.raises(GraphError, match=r"step 'projected': .* differs by"):
                model.fit(x, y, progress=False)

    def test_batches_of_another_size_are_refused(self, step: Path) -> None:
        with self.compiled(step) as model:
            x, y = samples(model, 2)
            with pytest.raises(GraphError, match=f"it is for batches of {BATCH}; 4 found"):
                model.fit(x, y, batch_size=4, progress=False)

    def test_a_search_with_a_step_or_a_strategy_is_refused(self, step: Path) -> None:
        model = projected()
        with pytest.raises(GraphError, match="optimize: found with a step"):
            model.compile("sgd", optimize=True, step=step)
        with projected() as other:
            other.compile("sgd")
            strategy = other.strategy
        with pytest.raises(GraphError, match="optimize: found with a strategy"):
            model.compile("sgd", optimize=True, strategy=strategy)


@pytest.mark.usefixtures("cheap")
class TestCommandLine:
    def test_the_digits_are_learnt_as_well_with_an_optimised_step(self, tmp_path: Path) -> None:
        found, path = str(tmp_path / "found.json"), str(tmp_path / "step.json")
        arguments = ["optimize", "digits", "--training", "-o", found, "--candidates", "2"]
        done = CliRunner().invoke(app, [*arguments, "--json"])
        assert done.exit_code == 0, done.output
        soapstone.save_graph(respelled(finding.graph_of("digits")), path)
        reports = []
        for more in ([], ["--step", found], ["--step", path], ["--optimize"]):
            done = CliRunner().invoke(app, ["train", "digits", "--epochs", "1", "--json", *more])
            assert done.exit_code == 0, done.output
            reports.append(json.loads(done.stdout.strip().splitlines()[-1]))
        for report in reports[1:]:
            assert report["loss"] == pytest.approx(reports[0]["loss"], rel=1e-2)
            assert report["test_accuracy"] == pytest.approx(reports[0]["test_accuracy"], abs=0.01)

    def test_a_step_of_another_app_is_refused(self, tmp_path: Path) -> None:
        path = tmp_path / "step.json"
        soapstone.save_graph(graph_of(projected()), path)
        done = CliRunner().invoke(app, ["train", "digits", "--epochs", "1", "--step", str(path)])
        assert done.exit_code == 1
        assert "step.json" in done.output and "input 'image' is missing" in done.output
