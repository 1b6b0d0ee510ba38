"""Found graphs on trial: what is drawn, what counts as equal, and what a budget ends."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from helpers.clock import Clock
from helpers.optimizing import Launches, branches, siblings, symbolic, verified

import soapstone
from soapstone.deadline import Deadline
from soapstone.frontend.optimization import optimize as optimiser, trial as trials
from soapstone.frontend.optimization.check import Draw, agree, difference, draws
from soapstone.frontend.optimization.runners import Side
from soapstone.frontend.optimization.trial import Outcome, in_turns, trial
from soapstone.ir.builder import GraphBuilder
from soapstone.ir.errors import GraphError
from soapstone.ir.graph import Graph
from soapstone.ir.tensor import Array, Role
from soapstone.search.cost import ExecutorCost
from soapstone.search.cost.database import database


def chain(*operators: str, dtype: str = "float32", shape: tuple[int, ...] = (8, 16)) -> Graph:
    """Return a graph of operators of one operand."""
    builder = GraphBuilder("chain")
    value = builder.input("x", shape, dtype)
    for operator in operators:
        value = builder.apply(operator, value)[0]
    builder.output(value if operators else builder.apply("reshape", value, shape=(128,))[0])
    return builder.build()


def divided(dtype: str, together: bool) -> Graph:
    """Return a/c + b/c, or (a + b)/c: the same for real numbers alone."""
    builder = GraphBuilder("divided")
    a, b, c = (builder.input(name, (16, 16), dtype) for name in "abc")
    if together:
        made = builder.apply("div", builder.apply("add", a, b)[0], c)[0]
    else:
        parts = [builder.apply("div", value, c)[0] for value in (a, b)]
        made = builder.apply("add", *parts)[0]
    builder.output(builder.apply("relu", made, name="y")[0] if dtype == "float32" else made)
    return builder.build()


class TestDraws:
    @pytest.mark.parametrize("dtype", ["int8", "int32", "int64", "uint8"])
    def test_integers_reach_the_ends_of_their_type(self, dtype: str) -> None:
        found = {draw.name: draw.inputs["x"] for draw in draws(chain(dtype=dtype))}
        limits = np.iinfo(dtype)
        assert {limits.min, limits.max, 0} <= set(found["wide"].ravel().tolist())
        assert len(set(found["wide"].ravel().tolist())) > 20
        small = set(found["small"].ravel().tolist())
        assert {0, 1, 5} <= small and (-1 in small) is (limits.min < 0) and max(small) < 10

    def test_floats_are_large_tiny_and_zero_of_both_signs(self) -> None:
        for draw in draws(chain("abs")):
            x = draw.inputs["x"]
            assert np.isfinite(x).all()
            if draw.name == "extreme":
                assert np.abs(x).max() > 1e11 and 0 < np.abs(x[x != 0]).min() < 1e-11
            if draw.name != "plain":
                assert (np.signbit(x) & (x == 0)).any() and (~np.signbit(x) & (x == 0)).any()

    @pytest.mark.parametrize("dtype", ["float16", "bool"])
    def test_other_types_are_drawn(self, dtype: str) -> None:
        for draw in draws(chain(dtype=dtype)):
            assert draw.inputs["x"].dtype == dtype


class TestDifference:
    def test_nan_and_infinities_are_compared_by_position(self) -> None:
        a = np.array([1, np.nan, np.inf, -np.inf], np.float32)
        assert difference(a, a.copy()).ok
        for position, other in ((0, np.nan), (1, 0.0), (2, -np.inf), (3, np.nan)):
            b = a.copy()
            b[position] = other
            assert difference(a, b).elsewhere == 1
            assert difference(a, b, wide=True).ok is (position > 1)

    def test_numbers_may_differ_by_rounding(self) -> None:
        a = np.linspace(-1, 1, 100, dtype=np.float32)
        assert difference(a, a + np.float32(1e-6)).ok
        assert not difference(a, a + np.float32(0.1)).ok
        shaken = a + np.float32(0.05)  # of inputs changed by rounding: the original is as unsure
        assert difference(a, a + np.float32(0.1), perturbed=shaken).ok

    def test_integers_are_equal_where_rounding_does_not_reach(self) -> None:
        a = np.array([1, 2, 3], np.int64)
        b = np.array([1, 2, 4], np.int64)
        assert not difference(a, b).ok and difference(a, b, perturbed=b).ok
        assert not difference(a, b, perturbed=np.array([0, 2, 3], np.int64)).ok


class TestAgree:
    @pytest.mark.parametrize("operators", [("log",), ("sqrt", "neg"), ("exp", "exp")])
    def test_a_graph_that_makes_nan_and_infinity_agrees_with_itself(
        self, operators: tuple[str, ...]
    ) -> None:
        graph = chain(*operators)
        verified(graph, {}, graph, {})

    def test_laws_of_real_numbers_are_refused_for_integers(self) -> None:
        outputs = divided("int32", False), divided("int32", True)
        with pytest.raises(GraphError, match="differs by"):
            verified(outputs[0], {}, replace_outputs(outputs[1], outputs[0]), {})

    def test_inputs_that_the_original_refuses_tell_nothing(self) -> None:
        graph = chain("abs")

        def run(given: Mapping[str, Array]) -> Mapping[str, Array] | None:
            return None if np.abs(given["x"]).max() > 100 else {"y": given["x"]}

        assert agree(("y",), draws(graph), run, run) == 0.0
        with pytest.raises(GraphError, match="refused"):
            agree(("y",), draws(graph), run, lambda given: None)
        with pytest.raises(GraphError, match="no inputs"):
            agree(("y",), iter([Draw("plain", {})]), lambda given: None, run)


def replace_outputs(graph: Graph, other: Graph) -> Graph:
    """Return a graph with the output names of another."""
    from soapstone.engine.lower.rebuild import called

    return called(graph, other.outputs)[0]


class Timed:
    """A side whose rounds take what it is told, on a clock of the test's."""

    def __init__(self, clock: Clock, *us: float) -> None:
        self.clock, self.us, self.rounds = clock, us, 0

    def round(self) -> float:
        self.clock.now += 1.0
        self.rounds += 1
        return self.us[(self.rounds - 1) % len(self.us)]


class TestTurns:
    @pytest.fixture(autouse=True)
    def without_rest(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(trials, "_REST_S", 0.0)

    def test_the_second_is_told_from_ratios_of_rounds(self) -> None:
        clock = Clock()
        first, second = Timed(clock, 100.0, 400.0), Timed(clock, 50.0, 200.0)
        before, after = in_turns(first, second, Deadline(clock=clock))  # type: ignore[arg-type]
        assert before is not None and after == before / 2
        assert first.rounds == second.rounds == trials.ROUNDS

    def test_no_round_is_begun_after_the_deadline(self) -> None:
        clock = Clock()
        first, second = Timed(clock, 100.0), Timed(clock, 90.0)
        found = in_turns(first, second, Deadline(5.0, clock=clock))  # type: ignore[arg-type]
        assert found == (100.0, 90.0) and first.rounds == second.rounds == 3
        over = Deadline(-1.0, clock=clock)
        assert in_turns(first, second, over) == (None, None)  # type: ignore[arg-type]
        assert first.rounds == 3


class TestTrial:
    def test_sides_run_in_processes_of_their_own(self) -> None:
        graph, weights = siblings()
        side = Side(graph, weights, threads=1)
        found = trial(side, side, True, Deadline())
        assert found.error == 0.0 and not found.problem
        assert found.before_us is not None and found.before_us > 0

    def test_training_steps_are_tried(self) -> None:
        from soapstone.frontend.optimization.training import Ground
        from soapstone.frontend.strategies.finding import graph_of

        graph = graph_of("mlp", 4)
        side = Side(graph, {}, ground=Ground.local(1))
        found = trial(side, side, True, Deadline())
        assert not found.problem and found.error is not None and found.error < 1e-6
        assert found.after_us is not None and found.after_us > 0

    def test_other_numbers_are_a_problem(self) -> None:
        graph, weights = siblings()
        other = {name: array + 1 for name, array in weights.items()}
        found = trial(Side(graph, weights), Side(graph, other), False, Deadline())
        assert "differs by" in found.problem and found.error is None

    def test_nothing_is_started_after_the_deadline(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def refuse(*given: object, **more: object) -> None:
            raise AssertionError("a process was started")

        monkeypatch.setattr("subprocess.Popen", refuse)
        side = Side(*siblings())
        found = trial(side, side, True, Deadline(-1.0))
        assert "budget ended before what was found was checked" in found.problem

    def test_without_processes_it_runs_here(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def refuse(*given: object, **more: object) -> None:
            raise OSError("no more processes")

        monkeypatch.setattr("subprocess.Popen", refuse)
        side = Side(*siblings(), threads=1)
        found = trial(side, side, True, Deadline())
        assert found.error == 0.0 and found.after_us is not None and found.after_us > 0


class TestBudget:
    def test_no_launch_is_measured_after_the_deadline(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The clock moves at each launch that is got ready: none follows the one at the end."""
        from soapstone.search.cost import measure

        clock, ready, timed = Clock(), [], measure.timed

        def counted(call, weights):  # type: ignore[no-untyped-def]
            ready.append(call.operator)
            clock.now += 1.0
            return timed(call, weights)

        monkeypatch.setattr(measure, "timed", counted)
        graph, weights = branches()
        for seconds, count in ((0.0, 0), (2.0, 2)):
            ready.clear()
            store = database(tmp_path / f"{seconds}.sqlite")
            pricing = ExecutorCost(1, database=store)
            monkeypatch.setattr(optimiser, "cost_model", lambda *given, p=pricing: p)
            deadline = Deadline(seconds / 0.6, clock=clock)
            result = soapstone.optimize(graph, weights, deadline=deadline)
            assert len(ready) == count and len(store) <= 1  # the yardstick
            assert result.graph is graph and not result.kept
            assert "by its budget or an interrupt, before the model was priced" in result.reason
            assert result.as_dict()["cost_before_us"] is None and str(result)

    def test_reading_rules_takes_nothing_of_the_budget(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A busy computer reads them for longer than a short budget is."""
        clock, rules = Clock(), optimiser._rules

        def slow(*given):  # type: ignore[no-untyped-def]
            clock.now += 60.0
            return rules(*given)

        monkeypatch.setattr(optimiser, "_rules", slow)
        monkeypatch.setattr(optimiser, "Deadline", lambda seconds: Deadline(seconds, clock=clock))
        result = soapstone.optimize(*branches(), machine="a100", seconds=10.0, candidates=2)
        assert result.as_dict()["cost_before_us"] is not None

    def test_what_cannot_be_checked_in_time_is_not_kept(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The search takes all there is: what it found is cheaper, and was not compared."""
        clock, tried = Clock(), optimiser.trial

        def late(*given: Any) -> Outcome:
            clock.now += 12.0
            return tried(*given)

        monkeypatch.setattr(optimiser, "cost_model", lambda *given: Launches())
        monkeypatch.setattr(optimiser, "trial", late)
        graph, weights = branches()
        result = soapstone.optimize(graph, weights, deadline=Deadline(12.0, clock=clock))
        assert result.after.time_us < result.before.time_us
        assert not result.kept and result.graph is graph
        assert "before what was found was checked" in result.reason


class TestWritten:
    def test_outputs_that_become_one_value_stay_two(self, tmp_path: Path) -> None:
        """Both are transposed back; rules make both the input's relu, and the third a constant."""
        builder = GraphBuilder("twins")
        x = builder.input("x", (4, 8))
        weight = builder.input("w", (4, 8), role=Role.PARAMETER)
        order = {"permutation": (1, 0)}
        back = builder.apply("transpose", builder.apply("transpose", x, **order)[0], **order)[0]
        outputs = [builder.apply("relu", value, name=n)[0] for value, n in ((back, "y"), (x, "z"))]
        outputs.append(builder.apply("abs", weight, name="fixed")[0])
        builder.output(*outputs)
        graph = builder.build()
        weights = {"w": np.linspace(-1, 1, 32, dtype=np.float32).reshape(4, 8)}
        one = replace(graph, outputs=("z", "z", "w"))
        new, held = optimiser.settled(replace_outputs(one, graph), weights)
        assert new.outputs == graph.outputs
        assert len(new.by_name) == len(new.nodes)
        assert new.structural_hash != graph.structural_hash
        path = tmp_path / "out.onnx"
        soapstone.to_onnx(new, held, path)
        found = soapstone.InferenceSession(path).run(given := {"x": np.ones((4, 8), np.float32)})
        needed = soapstone.InferenceSession(graph, weights).run(given)
        for name in ("y", "z"):
            np.testing.assert_array_equal(found[name], needed[name])
        np.testing.assert_array_equal(found["fixed"], weights["w"])

    def test_export_of_inputs_and_of_one_output_twice(self, tmp_path: Path) -> None:
        graph = chain("relu")
        (y,) = graph.outputs
        path = tmp_path / "out.onnx"
        soapstone.to_onnx(replace(graph, outputs=(y, y, "x")), {}, path)
        x = np.linspace(-1, 1, 128, dtype=np.float32).reshape(8, 16)
        found = soapstone.InferenceSession(path).run({"x": x})
        assert list(found) == [y, f"{y}.output", "x.output"]
        np.testing.assert_array_equal(found["x.output"], x)
        np.testing.assert_array_equal(found[f"{y}.output"], np.maximum(x, 0))

    def test_what_cannot_be_written_gives_the_original(self, tmp_path: Path) -> None:
        graph = chain("relu")
        builder = GraphBuilder("other")
        x, g = (builder.input(name, (8, 16)) for name in "xg")
        builder.output(builder.apply("relu_grad", g, x)[0])
        result = soapstone.optimize(graph, machine="v100")
        path = tmp_path / "out.onnx"
        assert result.save(path) == ""
        path.unlink()
        assert "cannot be written" in replace(result, graph=builder.build()).save(path)
        assert [node.op_type for node in onnx.load(path).graph.node] == ["Relu"]

    def test_biases_are_not_stored_spread(self) -> None:
        """Rules see a bias as wide as what it is added to; files and sessions do not."""
        builder = GraphBuilder("wide")
        x = builder.input("x", (4, 3, 16, 16))
        bias = builder.input("b", (3,), role=Role.PARAMETER)
        column = builder.apply("reshape", bias, shape=(1, 3, 1, 1))[0]
        wide = builder.apply("broadcast", column, shape=(4, 3, 16, 16))[0]
        builder.output(builder.apply("add", builder.apply("relu", x)[0], wide, name="y")[0])
        graph, weights = builder.build(), {"b": np.arange(3, dtype=np.float32)}
        new, held = optimiser.settled(graph, weights)
        assert max(array.size for array in held.values()) == 3
        assert verified(graph, weights, new, held) < 1e-6


class TestSymbolic:
    def test_the_size_of_a_symbolic_batch_is_said(self, tmp_path: Path) -> None:
        path = symbolic(tmp_path / "m.onnx", ("b", 3))
        result = soapstone.optimize(path, machine="v100", batch_size=5)
        assert result.dims == {"b": 5} and "b = 5" in str(result)
        assert result.graph.tensors["x"].shape == (5, 3)

    def test_an_original_that_is_kept_keeps_its_symbolic_batch(self, tmp_path: Path) -> None:
        path = symbolic(tmp_path / "m.onnx", ("b", 3))
        result = soapstone.optimize(path, machine="v100", batch_size=5)
        assert not result.kept and "searched for b = 5 alone" in str(result)
        assert result.save(tmp_path / "same.onnx") == ""
        assert (tmp_path / "same.onnx").read_bytes() == path.read_bytes()

    def test_another_dim_needs_an_extent(self, tmp_path: Path) -> None:
        path = symbolic(tmp_path / "m.onnx", ("b", "t"))
        with pytest.raises(ValueError, match="axis 1 is t"):
            soapstone.optimize(path, machine="v100")
        with pytest.raises(ValueError, match="dims: 's' found; symbolic dims are b, t"):
            soapstone.optimize(path, machine="v100", dims={"t": 7, "s": 1})
        result = soapstone.optimize(path, machine="v100", dims={"t": 7})
        assert result.dims == {"b": 1, "t": 7}
