"""Equality saturation: e-graphs, what is taken out of them, and the steps that lead there."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pytest
from helpers.optimizing import (
    MERGED,
    Launches,
    Pooled,
    Values,
    assert_same,
    branches,
    chain,
    named,
    siblings,
)
from typer.testing import CliRunner

import soapstone
from soapstone.cli.main import app
from soapstone.deadline import Deadline
from soapstone.frontend.optimization.optimize import settled
from soapstone.ir.builder import GraphBuilder
from soapstone.ir.graph import Graph
from soapstone.ir.tensor import Array, Role, TensorSpec
from soapstone.ir.term import subterms
from soapstone.search.optimize import normal
from soapstone.search.optimize.backtracking import Budget, Cheapest, backtrack, replayed
from soapstone.search.optimize.derivation import Derivation
from soapstone.search.optimize.egraph import EGraph
from soapstone.search.optimize.extraction import Extraction, NodePrices
from soapstone.search.optimize.pool import Pool
from soapstone.search.optimize.saturation import Limits, explored, saturate
from soapstone.search.optimize.search import Options, search
from soapstone.search.rules.rulebook import Rulebook


class Launched(Pooled):
    """A graph as values, with what it costs by the launches that it has."""

    def __init__(self, graph: Graph, weights: Mapping[str, Array]) -> None:
        super().__init__(graph, weights)
        self.nodes = NodePrices(self.pool, self.part)

    def price(self, values: Values) -> float:
        return Launches().cost(self.written(values).graph, self.weights).time_us

    def part(self, values: Values) -> float:
        written = normal.piece(self.pool, values)
        fixed = {n: np.zeros(()) for n, v in written.values.items() if self.pool.fixed[v]}
        return Launches().cost(written.graph, fixed).time_us

    def saturated(
        self,
        book: Rulebook,
        price: Callable[[Values], float] | None = None,
        budget: Budget | None = None,
        limits: Limits | None = None,
        alpha: float = 1.05,
    ) -> Cheapest:
        return saturate(
            *(self.pool, self.outputs, book, price or self.price, self.nodes),
            alpha=alpha,
            budget=budget or Budget(200),
            limits=limits,
        )


def fused(count: int) -> tuple[Graph, dict[str, Array]]:
    graph = chain(count, "relu", "relu")
    return graph, {n: np.ones((3, 3), np.float32) for n in graph.inputs(Role.PARAMETER)}


def products(count: int) -> tuple[Graph, dict[str, Array]]:
    """Products of one matrix with several, each an output."""
    builder = GraphBuilder("products")
    random = np.random.default_rng(2)
    x = builder.input("x", (2, 4))
    weights: dict[str, Array] = {}
    for number in range(count):
        w = builder.input(f"w{number}", (4, 3), role=Role.PARAMETER)
        weights[w] = random.standard_normal((4, 3)).astype(np.float32)
        builder.output(builder.apply("matmul", x, w, name=f"y{number}")[0])
    return builder.build(), weights


def small(book: Rulebook, size: int = 3) -> Rulebook:
    return Rulebook(tuple(rule for rule in book.rules if rule.rule.size <= size))


GRAPHS = {
    "branches": lambda: branches(3, bias=False),
    "siblings": siblings,
    "chain": lambda: fused(3),
    "products": lambda: products(3),
}


class TestEGraph:
    def pool(self) -> tuple[Pool, int, int]:
        pool = Pool()
        spec = TensorSpec((2, 2), "float32")
        return pool, *(pool.leaf(name, spec, Role.INPUT) for name in "xy")

    def test_what_is_made_of_equal_values_is_equal(self) -> None:
        pool, x, y = self.pool()
        (one,), (other,) = (pool.apply("tanh", (value,), {}) for value in (x, y))
        (above,), (beside,) = (pool.apply("relu", (value,), {}) for value in (one, other))
        graph = EGraph(pool, (above, beside))
        assert graph.find(above) != graph.find(beside)
        size = len(graph)
        assert graph.merge(x, y)
        assert graph.find(above) == graph.find(beside)
        assert graph.find(one) == graph.find(other) != graph.find(above)
        assert len(graph) == size - 2  # tanh and relu are one node each
        assert graph.node(other) == graph.node(one)

    def test_operands_that_change_places_make_no_new_node(self) -> None:
        pool, x, y = self.pool()
        (z,) = pool.apply("tanh", (x,), {})
        (one,), (other,) = pool.apply("add", (y, z), {}), pool.apply("add", (x, y), {})
        graph = EGraph(pool, (one, other))
        graph.merge(z, x)
        assert graph.find(one) == graph.find(other)

    def test_a_class_that_needs_itself_is_not_extracted(self) -> None:
        pool, x, _ = self.pool()
        (one,) = pool.apply("relu", (x,), {})
        (two,) = pool.apply("relu", (one,), {})
        graph = EGraph(pool, (two,))
        graph.merge(one, two)  # a class of relu of x and relu of itself
        assert graph.members[graph.find(two)] == [one, two]
        prices = NodePrices(pool, lambda values: float(len(pool.order(values))))
        extraction = Extraction(graph, (), (two,), prices)
        group = graph.find(two)
        assert extraction.order(extraction.cheapest) == [x, one]
        circle = {**extraction.cheapest, group: two}
        assert extraction.order(circle) is None
        assert extraction.cost(circle) == float("inf")
        assert extraction.values(extraction.cheapest) == (one,)


class TestSaturation:
    @pytest.mark.parametrize("name", GRAPHS)
    def test_it_finds_what_exhaustion_finds(self, book: Rulebook, name: str) -> None:
        case = Launched(*GRAPHS[name]())
        rules = small(book)
        every = backtrack(
            case.pool, case.outputs, rules, case.price, alpha=1e9, budget=Budget(3000)
        )
        found = case.saturated(rules)
        assert found.cost == case.price(found.outputs) == every.cost < case.price(case.outputs)
        assert found.candidates < every.candidates
        assert replayed(case.pool, case.outputs, rules, found.steps) == found.outputs
        written = case.written(found.outputs)
        assert_same(
            (case.graph, case.weights), (written.graph, {**case.weights, **written.contents})
        )

    def test_rules_of_several_outputs_merge_what_was_merged(self, book: Rulebook) -> None:
        """Eight products are one after three iterations; seven substitutions lead there."""
        case = Launched(*products(8))
        rules = Rulebook(tuple(r for r in small(book, 3).rules if len(r.left) > 1))
        found = case.saturated(rules, limits=Limits(nodes=200, iterations=3))
        operators = [node.operator for node in case.written(found.outputs).graph.nodes]
        assert operators.count("matmul") == 1
        assert len(found.steps) == 7 and all(step.match is not None for step in found.steps)
        assert replayed(case.pool, case.outputs, rules, found.steps) == found.outputs

    def test_what_gains_nothing_by_halves_is_found_whole(self, book: Rulebook) -> None:
        case = Launched(*siblings())

        def price(values: Values) -> float:
            cost = Launches().cost(case.written(values).graph, case.weights)
            return {3: 3.0, 2: 9.0, 1: 1.0}[cost.launches]

        rules = Rulebook((book.by_name[named(book, MERGED)],))
        assert case.saturated(rules, price, alpha=1.0).cost == 1.0

    def test_the_true_price_decides(self, book: Rulebook) -> None:
        """What is cheapest by its nodes may not be so as a graph."""
        case = Launched(*siblings())

        def price(values: Values) -> float:
            cost = Launches().cost(case.written(values).graph, case.weights)
            return {3: 3.0, 2: 2.0, 1: 4.0}[cost.launches]

        rules = Rulebook((book.by_name[named(book, MERGED)],))
        found = case.saturated(rules, price, alpha=2.0)
        assert found.cost == price(found.outputs) == 2.0
        assert len(found.steps) == 1

    def test_nothing_worse_than_the_given_graph_is_returned(self, book: Rulebook) -> None:
        case = Launched(*siblings())

        def price(values: Values) -> float:
            return 1.0 if values == case.outputs else 2.0

        found = case.saturated(book, price)
        assert found.outputs == case.outputs and found.cost == 1.0 and not found.steps

    def test_what_depends_on_each_other_is_not_merged(self, book: Rulebook) -> None:
        """Two products, one made of the other, cannot be parts of one (TASO, Figure 2.6)."""
        builder = GraphBuilder("cycle")
        x = builder.input("x", (3, 3))
        w = builder.input("w", (3, 3), role=Role.PARAMETER)
        first = builder.apply("matmul", x, w)[0]
        builder.output(builder.apply("matmul", first, w)[0])
        graph, weights = builder.build(), {"w": np.eye(3, k=1, dtype=np.float32) + 1}
        case = Launched(graph, weights)
        rules = Rulebook(tuple(rule for rule in book.rules if len(rule.left) > 1))
        done = explored(case.pool, case.outputs, rules, Limits(60), lambda: False)
        extraction = Extraction(done.graph, done.unions, case.outputs, case.nodes)
        assert done.unions
        given = {**extraction.cheapest, **extraction.given}
        moved = [extraction.order(given, move) for move in extraction.moves]
        assert None in moved and any(moved)
        found = case.saturated(rules, limits=Limits(60))
        assert_same((graph, weights), (case.written(found.outputs).graph, weights))

    def test_weights_cost_nothing(self) -> None:
        case = Launched(*products(2))
        pool = case.pool
        (x,) = (v for v in pool.order(case.outputs) if not pool.fixed[v] and not pool.operands(v))
        weights = [v for v in pool.order(case.outputs) if pool.fixed[v]]
        (merged,) = pool.apply("tanh", weights[:1], {})
        (product,) = pool.apply("matmul", (x, merged), {})
        assert case.nodes(merged) == 0.0
        assert case.nodes(product) == case.nodes(case.outputs[0]) > 0.0

    def test_a_node_costs_what_it_adds_to_its_operands(self) -> None:
        """A view of a product is priced with it, not as if it stood alone."""
        case = Launched(*products(1))

        def price(values: Values) -> float:  # a tanh alone is 5, over a product nothing
            made = [case.pool.makers[value] for value in case.pool.order(values)]
            names = [getattr(maker, "operator", "") for maker in made]
            return 7.0 if "matmul" in names else 5.0 * names.count("tanh")

        nodes = NodePrices(case.pool, price)
        (over,) = case.pool.apply("tanh", case.outputs, {})
        (x,) = (v for v in case.pool.order(case.outputs) if case.frame.inputs["x"] == v)
        (alone,) = case.pool.apply("tanh", (x,), {})
        assert nodes(case.outputs[0]) == 7.0
        assert nodes(over) == 0.0
        assert nodes(alone) == 5.0


class TestLimits:
    def test_nodes_and_iterations(self, book: Rulebook) -> None:
        case = Launched(*branches(4))
        before = len(EGraph(case.pool, case.outputs))
        sizes = {}
        for limits in (Limits(nodes=30), Limits(iterations=1), Limits(iterations=2)):
            done = explored(case.pool, case.outputs, book, limits, lambda: False)
            assert not done.complete
            sizes[limits] = len(done.graph) - before
        few, one, two = sizes.values()
        assert 30 <= few < 50  # a match adds what its right side has
        assert 0 < one < two

    def test_what_is_complete_grows_no_more(self, book: Rulebook) -> None:
        case = Launched(*fused(3))
        done = explored(case.pool, case.outputs, book, Limits(), lambda: False)
        again = explored(case.pool, case.outputs, book, Limits(nodes=10**6), lambda: False)
        assert done.complete and len(done.graph) == len(again.graph)

    def test_time(self, book: Rulebook) -> None:
        case = Launched(*branches(4))
        found = case.saturated(book, budget=Budget(200, Deadline(-1.0)))
        assert found.outputs == case.outputs and not found.complete

    def test_candidates(self, book: Rulebook) -> None:
        case = Launched(*branches(4))
        asked = []

        def price(values: Values) -> float:
            asked.append(values)
            return case.price(values)

        found = case.saturated(book, price, Budget(2))
        assert len(asked) == found.candidates <= 2 and not found.complete

    def test_an_interrupt_keeps_the_best(self, book: Rulebook) -> None:
        case = Launched(*siblings())
        asked = []

        def price(values: Values) -> float:
            asked.append(values)
            if len(asked) == 3:
                raise KeyboardInterrupt
            return case.price(values)

        budget = Budget(200)
        found = case.saturated(book, price, budget)
        assert budget.deadline.stopped and not found.complete and len(asked) == 3
        assert found.cost == case.price(found.outputs) < case.price(case.outputs)
        assert replayed(case.pool, case.outputs, book, found.steps) == found.outputs

    def test_an_interrupt_before_anything_was_found(
        self, book: Rulebook, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def interrupted(*_: object) -> None:
            raise KeyboardInterrupt

        monkeypatch.setattr(EGraph, "merge", interrupted)
        case = Launched(*siblings())
        budget = Budget(200)
        found = case.saturated(book, budget=budget)
        assert budget.deadline.stopped and found.outputs == case.outputs and not found.steps


class TestDerivation:
    def test_it_ends_where_nothing_leads_further(self, book: Rulebook) -> None:
        case = Launched(*fused(2))
        done = explored(case.pool, case.outputs, book, Limits(), lambda: False)
        derivation = Derivation(case.pool, book, done.graph, done.unions)
        assert derivation.toward(case.outputs, case.outputs) == (case.outputs, ())
        assert derivation.toward(case.outputs, (case.frame.inputs["x"],)) == (case.outputs, ())

    def test_only_what_steps_lead_to_is_returned(
        self, book: Rulebook, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Where the second of two merges is not reached, the graph after the first is priced."""
        case = Launched(*siblings())
        toward = Derivation.toward

        def half(self: Derivation, outputs: Values, wanted: Values) -> object:
            _, steps = toward(self, outputs, wanted)
            return replayed(case.pool, outputs, book, steps[:1]), steps[:1]

        assert len(case.saturated(book).steps) == 2
        monkeypatch.setattr(Derivation, "toward", half)
        found = case.saturated(book)
        assert len(found.steps) == 1
        assert replayed(case.pool, case.outputs, book, found.steps) == found.outputs
        assert found.cost == case.price(found.outputs) < case.price(case.outputs)
        monkeypatch.setattr(Derivation, "toward", lambda self, outputs, _: (outputs, ()))
        assert case.saturated(book).outputs == case.outputs

    def test_a_step_is_done_after_what_it_needs(self, book: Rulebook) -> None:
        """Biases are joined before the convolutions are: the last rule needs the first ones."""
        case = Launched(*branches(4))
        found = case.saturated(book, limits=Limits(nodes=600))
        assert found.cost < case.price(case.outputs)
        rules = [book.by_name[step.rule] for step in found.steps]
        made = [{term.symbol for term in subterms(rule.right)} for rule in rules]
        first = next(n for n, symbols in enumerate(made) if "conv2d" in symbols)
        assert any("add" in symbols for symbols in made[:first])
        assert replayed(case.pool, case.outputs, book, found.steps) == found.outputs


class TestMethod:
    @pytest.mark.parametrize("make", [branches, siblings], ids=lambda make: make.__name__)
    def test_the_search_uses_it(self, book: Rulebook, make) -> None:  # type: ignore[no-untyped-def]
        graph, weights = make()
        options = Options(candidates=60, method="saturation")
        found = search(graph, weights, book, Launches(), options=options)
        assert found.after.launches < found.before.launches
        assert sum(found.substitutions.values()) == sum(
            solved.times * step.count for solved in found.solved for step in solved.cheapest.steps
        )
        back, held = settled(found.graph, found.constants)
        assert_same((graph, weights), (back, held))

    def test_models_become_faster(self) -> None:
        graph, weights = siblings()
        result = soapstone.optimize(
            graph, weights, machine="v100", method="saturation", candidates=20, seconds=60
        )
        assert result.after.time_us < result.before.time_us
        assert result.substitutions and result.max_abs_error < 1e-4

    def test_command_line(self, tmp_path: Path) -> None:
        graph, weights = siblings()
        soapstone.save_graph(graph, tmp_path / "model.json", weights)
        arguments = ["optimize", str(tmp_path / "model.json"), "--machine", "v100", "--json"]
        done = CliRunner().invoke(app, [*arguments, "--method", "saturation", "--explain"])
        assert done.exit_code == 0, done.output
        report = json.loads(done.stdout.strip().splitlines()[-1])
        assert report["cost_after_us"] < report["cost_before_us"] and report["substitutions"]
        assert "    by " in done.output  # the laws that prove a step

    def test_another_method_is_refused(self, tmp_path: Path) -> None:
        graph, weights = siblings()
        soapstone.save_graph(graph, tmp_path / "model.json", weights)
        done = CliRunner().invoke(
            app, ["optimize", str(tmp_path / "model.json"), "--method", "annealing"]
        )
        assert done.exit_code == 1
        assert "'annealing'" in done.output and "saturation" in done.output
