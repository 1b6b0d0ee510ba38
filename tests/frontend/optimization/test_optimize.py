"""The graph optimiser: matching, application, search, and what a user gets."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from helpers.optimizing import (
    GROUPED,
    MERGED,
    Launches,
    assert_same,
    branches,
    chain,
    named,
    siblings,
    verified,
)
from typer.testing import CliRunner

import soapstone
from soapstone.cli.main import app
from soapstone.frontend.optimization.check import inputs_of
from soapstone.frontend.optimization.optimize import settled
from soapstone.frontend.strategies.finding import graph_of
from soapstone.ir.builder import GraphBuilder
from soapstone.ir.errors import GraphError
from soapstone.ir.tensor import Role
from soapstone.search.cost import Objective
from soapstone.search.optimize import normal
from soapstone.search.optimize.backtracking import Budget, backtrack, replayed
from soapstone.search.optimize.match import Matcher, places
from soapstone.search.optimize.pieces import pieces
from soapstone.search.optimize.pool import Pool
from soapstone.search.optimize.rewrite import applied, everywhere
from soapstone.search.optimize.search import Options, search
from soapstone.search.rules.rulebook import Rulebook


class TestNormalForm:
    @pytest.mark.parametrize("make", [branches, siblings], ids=lambda make: make.__name__)
    def test_there_and_back_is_the_same_function(self, make) -> None:  # type: ignore[no-untyped-def]
        graph, weights = make()
        pool = Pool()
        frame, outputs = normal.read(graph, pool, weights)
        written = normal.write(pool, frame, outputs)
        assert written.graph.outputs == graph.outputs
        assert all(
            len(node.inputs) == 2 for node in written.graph.nodes if node.operator == "concat"
        )
        assert not any(node.attributes.get("bias") for node in written.graph.nodes)
        assert_same((graph, weights), (written.graph, weights))

    def test_settling_puts_biases_and_joins_back(self) -> None:
        graph, weights = branches()
        pool = Pool()
        frame, outputs = normal.read(graph, pool, weights)
        back, held = settled(normal.write(pool, frame, outputs).graph, weights)
        assert [n.operator for n in back.nodes].count("concat") == 1
        assert all(n.attributes["bias"] for n in back.nodes if n.operator == "conv2d")
        assert back.outputs == graph.outputs
        assert_same((graph, weights), (back, held))

    def test_equal_applications_are_one_value(self) -> None:
        builder = GraphBuilder("twice")
        x = builder.input("x", (2, 3))
        one = builder.apply("tanh", x)[0]
        two = builder.apply("tanh", x)[0]
        builder.output(builder.apply("add", one, two)[0])
        pool = Pool()
        _, outputs = normal.read(builder.build(), pool, {})
        assert len(pool.order(outputs)) == 3

    def test_outputs_that_are_inputs_or_equal_keep_their_names(self) -> None:
        builder = GraphBuilder("same")
        x = builder.input("x", (2, 3))
        builder.output(builder.apply("tanh", x, name="a")[0], builder.apply("tanh", x, name="b")[0])
        graph = builder.build()
        pool = Pool()
        frame, outputs = normal.read(graph, pool, {})
        written = normal.write(pool, frame, outputs).graph
        assert written.outputs == ("a", "b")
        assert_same((graph, {}), (written, {}))


class TestMatching:
    def test_siblings_merge_and_split_again(self, book: Rulebook) -> None:
        graph, weights = siblings()
        pool = Pool()
        frame, outputs = normal.read(graph, pool, weights)
        rule = book.by_name[named(book, MERGED)]
        matches = list(Matcher(pool).matches(rule, places(pool, outputs)))
        assert len(matches) == 6  # ordered pairs of three
        for match in matches:
            new = applied(pool, outputs, [match])
            assert new is not None
            written = normal.write(pool, frame, new)
            assert [n.operator for n in written.graph.nodes].count("conv2d") == 2
            assert_same((graph, weights), (written.graph, weights))

    def test_branches_become_one_grouped_convolution(self, book: Rulebook) -> None:
        graph, weights = branches(8, bias=False)
        pool = Pool()
        frame, outputs = normal.read(graph, pool, weights)
        rule = book.by_name[named(book, GROUPED)]
        new, count = everywhere(pool, Matcher(pool), outputs, rule)
        assert count == 7
        back, held = settled(normal.write(pool, frame, new).graph, weights)
        (convolution,) = [node for node in back.nodes if node.operator == "conv2d"]
        assert convolution.attributes["groups"] == 8
        assert_same((graph, weights), (back, held))

    def test_groups_of_other_widths_do_not_merge(self, book: Rulebook) -> None:
        """The guard: `dim(y,-4)*h = dim(w,-4)*g`, and channels a group alike."""
        builder = GraphBuilder("unequal")
        x = builder.input("x", (1, 5, 6, 6))
        parts = builder.apply("split", x, axis=1, sizes=(2, 3))
        made = []
        for number, (part, width) in enumerate(zip(parts, (2, 3))):
            w = builder.input(f"w{number}", (4, width, 1, 1), role=Role.PARAMETER)
            made.append(builder.apply("conv2d", part, w, bias=False)[0])
        builder.output(builder.apply("concat", *made, axis=1)[0])
        pool = Pool()
        _, outputs = normal.read(builder.build(), pool, {})
        rule = book.by_name[named(book, GROUPED)]
        assert not list(Matcher(pool).matches(rule, places(pool, outputs)))

    def test_commutative_operands_match_either_way(self) -> None:
        builder = GraphBuilder("sum")
        x, y = builder.input("x", (2, 3)), builder.input("y", (2, 3))
        s = builder.apply("tanh", y)[0]
        for pair in ((x, s), (s, x)):
            builder.output(builder.apply("relu", builder.apply("add", *pair)[0])[0])
        pool = Pool()
        _, (one, other) = normal.read(builder.build(), pool, {})
        assert one == other

    def test_a_rewrite_that_closes_a_cycle_is_refused(self, book: Rulebook) -> None:
        """One product is made of the other: they cannot be parts of one (TASO, Figure 2.6)."""
        builder = GraphBuilder("cycle")
        x = builder.input("x", (3, 3))
        w = builder.input("w", (3, 3), role=Role.PARAMETER)
        first = builder.apply("matmul", x, w)[0]
        second = builder.apply("matmul", first, w)[0]
        builder.output(second)
        graph = builder.build()
        pool = Pool()
        _, outputs = normal.read(graph, pool, {"w": np.zeros((3, 3), np.float32)})
        where = places(pool, outputs)
        tried = 0
        for rule, matches in Matcher(pool).every(book, where):
            for match in matches if len(rule.left) > 1 else ():
                tried += 1
                assert applied(pool, outputs, [match]) is None
        assert tried

    def test_every_match_anywhere_is_the_same_function(self, book: Rulebook) -> None:
        graph, weights = branches(3)
        pool = Pool()
        frame, outputs = normal.read(graph, pool, weights)
        where = places(pool, outputs)
        rules = 0
        for _, matches in Matcher(pool).every(book, where):
            for match in matches[:3]:
                new = applied(pool, outputs, [match])
                if new is not None:
                    written = normal.write(pool, frame, new)
                    assert_same((graph, weights), (written.graph, weights | written.contents))
                    rules += 1
        assert rules >= 3


class TestSearch:
    def test_backtracking_finds_what_exhaustion_finds(self, book: Rulebook) -> None:
        graph, weights = branches(3, bias=False)
        pool = Pool()
        frame, outputs = normal.read(graph, pool, weights)
        small = Rulebook(tuple(rule for rule in book.rules if rule.rule.size <= 3))

        def price(values: tuple[int, ...]) -> float:
            return Launches().cost(normal.write(pool, frame, values).graph, weights).time_us

        budget = Budget(4000)
        every = backtrack(pool, outputs, small, price, alpha=1e9, budget=budget)
        found = backtrack(pool, outputs, small, price, alpha=1.05, budget=budget)
        assert found.cost == every.cost < price(outputs)
        assert found.candidates <= every.candidates
        assert replayed(pool, outputs, small, found.steps) == found.outputs

    def test_greedy_stops_where_relaxed_goes_on(self, book: Rulebook) -> None:
        graph, weights = siblings()
        pool = Pool()
        frame, outputs = normal.read(graph, pool, weights)

        def price(values: tuple[int, ...]) -> float:
            """One merged product costs more than two: only all three together cost less."""
            return {3: 3.0, 2: 3.1, 1: 1.0}[
                Launches().cost(normal.write(pool, frame, values).graph, weights).launches
            ]

        one = Rulebook((book.by_name[named(book, MERGED)],))
        greedy = backtrack(
            pool,
            outputs,
            one,
            price,
            alpha=1.0,
            budget=Budget(500),
        )
        relaxed = backtrack(pool, outputs, one, price, alpha=1.05, budget=Budget(500))
        assert relaxed.cost == 1.0
        assert greedy.cost in (3.0, 1.0)  # all at once may find it too

    def test_pieces_cover_the_graph_and_solve_equal_ones_once(self, book: Rulebook) -> None:
        graph = chain(24, "relu", "relu")
        weights = {n: np.ones((3, 3), np.float32) for n in graph.inputs(Role.PARAMETER)}
        pool = Pool()
        _, outputs = normal.read(graph, pool, weights)
        division = pieces(pool, outputs, 12, {})
        assert len(division) >= 4
        covered = set()
        for piece in division:
            inside = set(pool.order(piece.outputs, frozenset(piece.inputs)))
            covered |= inside - set(piece.inputs)
        assert covered >= set(pool.order(outputs)) - {pool.order(outputs)[0]} - {
            v for v in pool.order(outputs) if pool.fixed[v]
        }
        options = Options(whole=1, piece=12, candidates=30)
        found = search(graph, weights, book, Launches(), options=options)
        assert any(solved.times > 1 for solved in found.solved)
        assert sum(found.substitutions.values()) == 24

    @pytest.mark.parametrize("make", [branches, siblings], ids=lambda make: make.__name__)
    def test_the_found_graph_is_cheaper_and_the_same(self, book: Rulebook, make) -> None:  # type: ignore[no-untyped-def]
        graph, weights = make()
        found = search(graph, weights, book, Launches(), options=Options(candidates=60))
        assert found.after.launches < found.before.launches
        assert found.substitutions
        back, held = settled(found.graph, found.constants)
        assert back.outputs == graph.outputs
        assert_same((graph, weights), (back, held))

    def test_an_objective_with_a_limit_is_kept(self, book: Rulebook) -> None:
        graph, weights = siblings()
        before = Launches().cost(graph, weights)
        limit = Objective.parse(f"time subject to flops<{before.flops - 1}")
        found = search(graph, weights, book, Launches(), limit, Options(candidates=60))
        assert limit.value(found.after) == float("inf")  # nothing has fewer operations
        assert found.after.flops == before.flops

    def test_an_interrupt_returns_the_best_so_far(self, book: Rulebook) -> None:
        graph, weights = branches()

        def progress(what: str, done: int, total: int) -> None:
            if what == "pass 1":
                raise KeyboardInterrupt

        found = search(graph, weights, book, Launches(), progress=progress)
        assert not found.complete
        assert found.after.time_us <= found.before.time_us


class TestOptimize:
    def test_a_branched_model_becomes_faster_and_is_saved(self, tmp_path: Path) -> None:
        graph, weights = branches()
        result = soapstone.optimize(graph, weights, candidates=20, seconds=60)
        assert result.max_abs_error < 1e-4
        assert verified(graph, weights, result.graph, result.weights) < 1e-4
        assert result.after.time_us <= result.before.time_us  # how many launches: as measured
        for name in ("after.onnx", "after.json"):
            result.save(tmp_path / name)
        given = inputs_of(graph)
        expected = soapstone.InferenceSession(graph, weights).run(given)
        found = soapstone.InferenceSession(tmp_path / "after.onnx").run(given)
        np.testing.assert_allclose(found["y"], expected["y"], rtol=1e-4, atol=1e-4)
        again, held = soapstone.load_graph(tmp_path / "after.json")
        assert again.outputs == ("y",) and held.keys() == result.weights.keys()

    def test_a_described_machine_gives_estimates(self) -> None:
        graph, weights = branches()
        result = soapstone.optimize(graph, weights, machine="v100", candidates=20, seconds=60)
        assert result.before.estimated and result.measured_before_us is None
        assert result.after.time_us <= result.before.time_us
        assert "(estimated)" in str(result)

    def test_training_graphs_keep_their_updates(self) -> None:
        graph = graph_of("mlp", 4)
        result = soapstone.optimize(graph, machine="p100", candidates=5, seconds=30)
        assert result.graph.updates.keys() == graph.updates.keys()
        assert result.graph.outputs == graph.outputs

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"target": "tensorrt"}, "target 'tensorrt'"),
            ({"objective": "speed"}, "speed"),
            ({"alpha": 0.5}, "alpha 0.5"),
            ({"machine": "abacus"}, "abacus"),
        ],
    )
    def test_wrong_options_are_named(self, options: dict[str, object], message: str) -> None:
        graph, weights = siblings()
        with pytest.raises(ValueError, match=message):
            soapstone.optimize(graph, weights, **options)  # type: ignore[arg-type]

    def test_wrong_numbers_are_noticed(self) -> None:
        graph, weights = siblings()
        other = {name: array + 1 for name, array in weights.items()}
        with pytest.raises(GraphError, match="differs by"):
            verified(graph, weights, graph, other)

    def test_a_folder_that_is_not_there_is_noticed_before_the_search(self, tmp_path: Path) -> None:
        graph, weights = siblings()
        soapstone.save_graph(graph, tmp_path / "model.json", weights)
        output = tmp_path / "nowhere" / "out.onnx"
        done = CliRunner().invoke(
            app, ["optimize", str(tmp_path / "model.json"), "-o", str(output)]
        )
        assert done.exit_code == 1 and "nowhere" in done.output

    def test_command_line(self, tmp_path: Path) -> None:
        graph, weights = siblings()
        soapstone.save_graph(graph, tmp_path / "model.json", weights)
        arguments = ["optimize", str(tmp_path / "model.json"), "-o", str(tmp_path / "out.onnx")]
        done = CliRunner().invoke(
            app,
            [
                *(*arguments, "--json", "--explain", "--candidates", "20", "--budget", "30"),
                *("--report", str(tmp_path / "report.html")),
            ],
        )
        assert done.exit_code == 0, done.output
        report = json.loads(done.stdout.strip().splitlines()[-1])
        assert report["max_abs_error"] < 1e-4
        assert (tmp_path / "out.onnx").exists()
        page = (tmp_path / "report.html").read_text()
        assert page.count("<svg") >= 5 and "siblings" in page
        for field in (
            *("cost_before_us", "cost_after_us", "speedup", "launches_before", "launches_after"),
            *("bytes_before", "bytes_after", "flops_before", "flops_after", "substitutions"),
        ):
            assert field in report
