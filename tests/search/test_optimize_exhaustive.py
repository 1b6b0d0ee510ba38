"""Exhaustive search: it finds what plain search finds, and is an oracle for backtracking."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from helpers.optimizing import Pooled, Values

import soapstone
from soapstone.apps.images import alexnet, inception, resnet, vgg
from soapstone.engine.lower import fold_weights, split_constants
from soapstone.engine.lower.passes import NAMES
from soapstone.frontend.model import Model
from soapstone.ir.builder import GraphBuilder
from soapstone.ir.graph import Graph
from soapstone.ir.tensor import Array, Role, TensorSpec
from soapstone.ir.term import parse
from soapstone.search.cost.machine import RooflineCost
from soapstone.search.elimination import cheapest
from soapstone.search.optimize.backtracking import Budget, backtrack
from soapstone.search.optimize.exhaustive import exhaust
from soapstone.search.optimize.match import Matcher, places
from soapstone.search.optimize.pool import Application, Pool
from soapstone.search.optimize.regions import Regions
from soapstone.search.optimize.rewrite import applied
from soapstone.search.rules import rulefile
from soapstone.search.rules.metaflow import SUBSTITUTIONS, metaflow
from soapstone.search.rules.rulebook import Rulebook

NOISE = 0.0102  # gains below a hundredth are not taken for gains (`Budget.gain`)
MODELS: dict[str, Callable[[], Model]] = {
    "alexnet": lambda: alexnet.build(1, width=8, hidden=16, classes=10),
    "vgg16": lambda: vgg.build(1, 32, 10, width=4, hidden=16, dropout=0.0),
    "inception module": lambda: inception.module(1, 32, narrow=16),
    "resnet18": lambda: resnet.build(1, 32, 10, depth=18, width=4, blocks=(1, 1)),
}


@pytest.fixture(scope="module")
def book() -> Rulebook:
    return metaflow(rulefile.load())


class Priced(Pooled):
    """A graph in a pool, and prices of what rules make of it."""

    def __init__(self, graph: Graph, weights: dict[str, Array], machine: str = "v100") -> None:
        folded, held = fold_weights(graph, weights), dict(weights)
        first, folded = split_constants(folded, set(weights))
        held |= {name: np.ones(first.tensors[name].shape, np.float32) for name in first.outputs}
        super().__init__(folded, held)
        self.model = RooflineCost(machine)

    def estimated(self, outputs: Values) -> float:
        """What a described device takes."""
        written = self.written(outputs)
        return self.model.cost(written.graph, self.weights | written.contents).time_us

    def invented(self, seed: int) -> Callable[[Values], float]:
        """Prices without rhyme or reason: each operator has one, by its attributes and shapes."""

        def of(value: int) -> float:
            maker = self.pool.makers[value]
            if not isinstance(maker, Application) or self.pool.fixed[value]:
                return 0.0
            operands = [self.pool.specs[i] for i in maker.inputs]
            text = f"{seed} {maker.operator} {maker.items} {operands}"
            return 1 + int(hashlib.sha256(text.encode()).hexdigest()[:6], 16) / 0x1000000

        def price(outputs: Values) -> float:
            return sum(map(of, self.pool.order(outputs)))

        return price

    def every(self, book: Rulebook) -> list[Values]:
        """All graphs, by plain breadth-first search."""
        matcher, found = Matcher(self.pool), [self.outputs]
        seen = set(found)
        for graph in found:
            where = places(self.pool, graph)
            for rule in book.rules:
                for match in matcher.matches(rule, where):
                    new = applied(self.pool, graph, [match])
                    if new is not None and new not in seen:
                        seen.add(new)
                        found.append(new)
        return found


def with_weights(model: Model) -> tuple[Graph, dict[str, Array]]:
    graph = model.build(1)
    random = np.random.default_rng(0)
    weights = {
        n: np.abs(random.standard_normal(graph.tensors[n].shape)).astype(np.float32)
        for n, role in graph.roles.items()
        if role is not Role.INPUT
    }
    return graph, weights


def drawn(seed: int, layers: int) -> tuple[Graph, dict[str, Array]]:
    """Return a random graph of convolutions, sums, rectifiers and joins, of equal images."""
    random = np.random.default_rng(seed)
    builder = GraphBuilder(f"drawn {seed}")
    values = [builder.input("x", (1, 4, 6, 6))]
    weights = {}
    for number in range(layers):
        x, y = (values[i] for i in random.integers(max(0, len(values) - 3), len(values), 2))
        kind = ("conv", "conv", "conv", "relu", "add")[random.integers(5)]
        if kind == "conv":
            size = (1, 3)[random.integers(2)]
            w = builder.input(f"w{number}", (4, 4, size, size), role=Role.PARAMETER)
            weights[w] = random.standard_normal((4, 4, size, size)).astype(np.float32)
            border = (size // 2,) * 4
            made = builder.apply("conv2d", x, w, padding=border, bias=False)
        else:
            made = builder.apply(kind, *((x, y) if kind == "add" else (x,)))
        values.append(made[0])
    readers = builder.build().consumers
    ends = [value for value in values[1:] if not readers.get(value)]
    for value in ends:
        builder.output(value)
    return builder.build().pruned(), weights


def row_and_column() -> tuple[Graph, dict[str, Array]]:
    builder = GraphBuilder("row and column")
    x = builder.input("x", (1, 4, 6, 6))
    weights, made = {}, []
    for name, (h, w) in (("row", (1, 3)), ("column", (3, 1))):
        kernel = builder.input(name, (5, 4, h, w), role=Role.PARAMETER)
        weights[kernel] = np.random.default_rng(h).random((5, 4, h, w), np.float32)
        border = (h // 2, w // 2, h // 2, w // 2)
        made += builder.apply("conv2d", x, kernel, padding=border, bias=False)
    builder.output(builder.apply("concat", *made, axis=1)[0])
    return builder.build(), weights


class TestRules:
    def test_every_substitution_is_a_rule_or_a_pass(self, book: Rulebook) -> None:
        assert len(SUBSTITUTIONS) == 14
        for each in SUBSTITUTIONS:
            assert bool(each.rules) != bool(each.lowering)
            assert not each.lowering or each.lowering in NAMES
        assert len(book.rules) == sum(len(each.rules) for each in SUBSTITUTIONS)

    @pytest.mark.parametrize("method", ["backtracking", "exhaustive"])
    def test_a_small_kernel_is_enlarged_to_merge_with_another(self, method: str) -> None:
        """MetaFlow, Figure 7: a row and a column of three become one kernel of 3x3."""
        graph, weights = row_and_column()
        found = soapstone.optimize(graph, weights, machine="v100", method=method, rules="metaflow")
        (merged,) = [node for node in found.graph.nodes if node.operator == "conv2d"]
        assert found.graph.tensors[merged.inputs[1]].shape == (10, 4, 3, 3)
        assert found.complete and found.max_abs_error < 1e-5
        assert set(found.substitutions) == {"66cbc21df6631a65", "e9ed45dc9be9a52a"}
        assert "enlarge[k](y)" in found.explanation

    def test_no_size_is_proposed_where_a_bias_would_become_channels(self, book: Rulebook) -> None:
        case = Priced(*with_weights(MODELS["alexnet"]()))
        assert case.every(book) == [case.outputs]

    def test_a_simple_recurrent_unit_multiplies_once(self, book: Rulebook) -> None:
        """MetaFlow, section 3: x*y + (1-x)*z is x*(y-z) + z, by way of more operators."""
        pool = Pool()
        spec = TensorSpec((4,))
        x, y, z = (pool.leaf(name, spec, Role.INPUT) for name in "xyz")
        one = pool.constant(parse("ones"), TensorSpec((1,)))
        assert one is not None
        rest = pool.apply("sub", (one, x), {})[0]
        parts = [pool.apply("mul", pair, {})[0] for pair in ((x, y), (rest, z))]
        outputs = pool.apply("add", parts, {})

        def operators(outputs: Values) -> float:
            return float(sum(isinstance(pool.makers[v], Application) for v in pool.order(outputs)))

        assert operators(outputs) == 4
        found = exhaust(pool, outputs, book, operators)
        assert found.complete and found.cost == 3


class TestExhaustion:
    @pytest.mark.parametrize("seed", range(8))
    def test_it_is_plain_search_on_small_graphs(self, book: Rulebook, seed: int) -> None:
        """The same number of graphs, and the cheapest of them, by two kinds of prices."""
        case = Priced(*drawn(seed, 7))
        every = case.every(book)
        for price in (case.invented(seed), case.estimated):
            found = exhaust(case.pool, case.outputs, book, price)
            assert found.complete
            assert found.graphs == len(every)
            assert found.cost == pytest.approx(min(map(price, every)))
            assert price(found.outputs) == pytest.approx(found.cost)

    @pytest.mark.parametrize("seed", range(12))
    def test_backtracking_finds_the_optimum_of_random_graphs(
        self, book: Rulebook, seed: int
    ) -> None:
        case = Priced(*drawn(100 + seed, 7))
        found = exhaust(case.pool, case.outputs, book, case.estimated)
        assert found.complete
        relaxed = backtrack(
            case.pool, case.outputs, book, case.estimated, alpha=1.05, budget=Budget(2000)
        )
        assert relaxed.cost == pytest.approx(found.cost, rel=NOISE)

    @pytest.mark.long
    @pytest.mark.parametrize("name", MODELS)
    def test_backtracking_finds_the_optimum_of_small_models(
        self, book: Rulebook, name: str
    ) -> None:
        case = Priced(*with_weights(MODELS[name]()))
        found = exhaust(case.pool, case.outputs, book, case.estimated)
        relaxed = backtrack(
            case.pool, case.outputs, book, case.estimated, alpha=1.05, budget=Budget(2000)
        )
        assert found.complete and relaxed.complete
        assert relaxed.cost == pytest.approx(found.cost, rel=NOISE)
        assert found.priced <= found.graphs

    def test_graphs_that_do_not_separate_are_all_priced(self, book: Rulebook) -> None:
        case = Priced(*drawn(3, 6))
        whole = exhaust(case.pool, case.outputs, book, case.estimated, separable=False)
        parts = exhaust(case.pool, case.outputs, book, case.estimated)
        assert whole.complete and whole.priced == whole.graphs == parts.graphs
        assert whole.cost == pytest.approx(parts.cost)

    def test_a_budget_ends_it_without_a_certificate(self, book: Rulebook) -> None:
        case = Priced(*with_weights(MODELS["inception module"]()))
        found = exhaust(case.pool, case.outputs, book, case.estimated, budget=Budget(3))
        assert not found.complete
        assert found.cost <= case.estimated(case.outputs)

    def test_equal_regions_are_explored_once(self, book: Rulebook) -> None:
        case = Priced(*with_weights(resnet.build(1, 32, 10, depth=18, width=4, blocks=(3,))))
        one, two, three = Regions(case.pool, book, Budget(1000)).of(case.outputs)
        assert one.reached is two.reached is three.reached

    @pytest.mark.parametrize("seed", range(5))
    def test_elimination_is_enumeration(self, seed: int) -> None:
        random = np.random.default_rng(seed)
        sizes = random.integers(1, 4, 5)
        pairs = [pair for pair in itertools.combinations(range(5), 2) if random.random() < 0.6]
        scopes = [(n,) for n in range(5)] + pairs
        tables = [(scope, random.random([sizes[n] for n in scope])) for scope in scopes]

        def total(choice: Any) -> float:
            return float(sum(costs[tuple(choice[n] for n in scope)] for scope, costs in tables))

        best = min(map(total, itertools.product(*map(range, sizes))))
        for few in (0, 2):
            chosen, least = cheapest(range(5), tables, few)
            assert total(chosen) == pytest.approx(least) == pytest.approx(best)
