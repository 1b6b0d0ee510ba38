"""Domains of laws and rules: what holds over the reals only is not used on other numbers."""

from __future__ import annotations

import itertools
import random
from pathlib import Path

import numpy as np
import pytest

from soapstone.frontend.optimization.optimize import optimize
from soapstone.ir.builder import GraphBuilder
from soapstone.ir.errors import GraphError
from soapstone.ir.graph import Graph
from soapstone.ir.interpret import interpret
from soapstone.ir.law import Law
from soapstone.ir.term import parse, subterms
from soapstone.rules import file_checks, foreign
from soapstone.rules.foreign_verdicts import Judge
from soapstone.rules.laws import domain
from soapstone.search.optimize import normal
from soapstone.search.optimize.egraph import ClassMatcher, EGraph
from soapstone.search.optimize.match import Matcher, places
from soapstone.search.optimize.pool import Pool
from soapstone.search.rules import language, rulefile
from soapstone.search.rules.rule import Rule, RuleError, RuleFile
from soapstone.search.rules.rulebook import Directed, directions, rulebook

ROUNDED = ("212c150c", "aa47e4bb", "2bff4ad8")  # they move a quotient through a sum
ALL = set(domain.WORDS)


@pytest.fixture(scope="module")
def shipped() -> RuleFile:
    return rulefile.load()


def known(text: str, *where: str) -> set[str]:
    return set(domain.of_law(Law("law", text, where)))


@pytest.mark.parametrize(
    "text, words",
    [
        ("add(x, y) = add(y, x)", ALL),
        ("sub(add(x, y), y) = x", ALL - {"booleans", "infinities <-"}),
        ("mul(add(x, y), z) = add(mul(x, z), mul(y, z))", ALL - {"infinities ->"}),
        ("add(div(x, z), div(y, z)) = div(add(x, y), z)", {"zeros ->", "infinities ->"}),
        ("div(div(x, y), z) = div(x, mul(y, z))", ALL - {"integers", "booleans"}),
        ("relu(add(x, x)) = add(relu(x), relu(x))", ALL - {"integers"}),
        ("mul(x, relu(x)) = mul(relu(x), relu(x))", ALL - {"infinities <-"}),
        ("rsqrt(div(ones, x)) = mul(x, rsqrt(x))", {"zeros <-", "infinities <-"}),
    ],
)
def test_the_domain_of_a_law_is_computed(text: str, words: set[str]) -> None:
    assert known(text) == words


def test_what_overflows_refutes_no_law() -> None:
    quotient = next(law for law in language.laws() if law.name == "softmax-quotient")
    assert domain.differing(quotient) is None
    wrong = Law("law", "softmax[a](x) = div(exp(x), reduce_sum[a](x))")
    assert domain.differing(wrong) is not None


def test_rings_decide_what_holds_on_integers() -> None:
    """A valid law of sums and products is one of polynomials, so of every commutative ring."""
    ring = {"add", "sub", "mul", "smul", "matmul", "reduce_sum", "concat", "transpose", "merge"}
    for law in language.laws()[::6]:
        symbols = {term.symbol for term in subterms(law.sides) if term.operands}
        if symbols <= ring:
            assert "integers" in domain.of_law(law), law
        if symbols & {"exp", "softmax", "conv2d", "layer_norm", "reduce_mean"}:
            assert not domain.of_law(law) & {"integers", "booleans"}, law


def test_booleans_decide_elementwise_laws() -> None:
    """Every law of sums and products of elements, on all booleans there are."""
    kinds = {"add": np.logical_or, "mul": np.logical_and}

    def value(term, given):  # type: ignore[no-untyped-def]
        if term.is_variable:
            return given[term.symbol]
        return kinds[term.symbol](*(value(operand, given) for operand in term.operands))

    for law in language.laws():
        names = sorted({t.symbol for t in subterms(law.sides) if t.is_variable})
        symbols = {term.symbol for term in subterms(law.sides) if term.operands}
        constants = any(not term.operands and not term.is_variable for term in subterms(law.sides))
        if not symbols or not symbols <= set(kinds) or constants:
            continue
        rows = itertools.product((False, True), repeat=len(names))
        equal = [value(law.sides[0], g) == value(law.sides[1], g) for g in _named(names, rows)]
        assert all(equal) == ("booleans" in domain.of_law(law)), law


def _named(names, rows):  # type: ignore[no-untyped-def]
    return [dict(zip(names, row)) for row in rows]


def test_a_rule_holds_over_what_the_steps_of_its_proof_do(shipped: RuleFile) -> None:
    for name in ROUNDED:
        assert not {"integers", "booleans"} & set(shipped.rule(name).domain)
    some = random.Random(0).sample(shipped.rules, 6)
    for rule in [*some, *(r for r in shipped.rules if "div(" in str(r))][:12]:
        assert rule.domain == domain.of_proof(rule.source, rule.proof)
        for word in rule.domain:
            given = (rule.source, rule.target, rule.ranks, rule.guard)
            assert not domain.refuted(*given, word), (rule, word)


def quotients(dtype: str) -> Graph:
    """Return each of the three: sums of a/c and b/c, of rows of a/c, a product of a/c and z."""
    builder = GraphBuilder("quotients")
    a, b = (builder.input(name, (8, 6), dtype) for name in "ab")
    c, z = builder.input("c", (8, 1), dtype), builder.input("z", (6, 5), dtype)
    w = builder.input("w", (8, 6), dtype)
    first = builder.apply("div", a, c)[0]
    outputs = [
        builder.apply("reduce_sum", first, axes=(1,), keepdims=True)[0],
        builder.apply("matmul", first, z)[0],
        builder.apply("add", builder.apply("div", a, w)[0], builder.apply("div", b, w)[0])[0],
    ]
    for output in outputs:
        builder.output(output)
    return builder.build()


def found_in(graph: Graph, rules: list[Directed]) -> set[str]:
    """Return the rules that match a graph, read as values and as the classes of an e-graph."""
    pool = Pool()
    _, outputs = normal.read(graph, pool, {})
    names = set()
    for rule in rules:
        if next(iter(Matcher(pool).matches(rule, places(pool, outputs))), None):
            names.add(rule.name)
    classes = EGraph(pool)
    for value in pool.order(outputs):
        classes.add(value)
    born = dict.fromkeys(classes.members, 1)
    matcher = ClassMatcher(classes, born)
    by_classes = {r.name for r in rules if next(iter(matcher.matches(r, matcher.newest)), None)}
    assert by_classes == names
    return names


def test_quotients_of_integers_are_left_where_they_are(shipped: RuleFile) -> None:
    rules = [each for name in ROUNDED for each in directions(shipped.rule(name))]
    assert len({name[:8] for name in found_in(quotients("float32"), rules)}) == 3
    assert found_in(quotients("int32"), rules) == set()
    assert found_in(quotients("int64"), rules) == set()


@pytest.mark.parametrize("dtype, method", [("int32", "saturation"), ("int64", "backtracking")])
def test_integer_graphs_compute_the_same_after_the_search(dtype: str, method: str) -> None:
    graph = quotients(dtype)
    found = optimize(graph, objective="flops", method=method, machine="v100", candidates=20)
    rng = np.random.default_rng(0)
    inputs = {
        name: rng.integers(-90, 90, graph.tensors[name].shape).astype(dtype) for name in graph.roles
    }
    inputs = {n: np.where(v == 0, 7, v).astype(dtype) for n, v in inputs.items()}
    before, after = (interpret(each, inputs) for each in (graph, found.graph))
    assert len(before) == len(after) == 3
    for one, other in zip(before.values(), after.values()):
        np.testing.assert_array_equal(one, other)


def test_what_makes_nan_of_zero_is_used_only_where_that_is_accepted(shipped: RuleFile) -> None:
    rule = shipped.rule("57c50cc8")  # 1/rsqrt(x) beside others, as x rsqrt(x)
    both = {each.name: each for each in directions(rule)}
    safe = [each.right for each in both.values() if each.keeps("zeros")]
    assert safe == [(parse("rsqrt(concat[a](x, div(ones, x)))"),)]
    assert all(each.keeps("reals") for each in both.values())
    books = {
        floats: rulebook(shipped, floats=floats) for floats in ("reals", "zeros", "infinities")
    }
    sizes = [len(book.rules) for book in books.values()]
    assert sizes == sorted(sizes, reverse=True) and sizes[0] > sizes[1] > sizes[2]
    assert set(books["zeros"].by_name) < set(books["reals"].by_name)
    with pytest.raises(GraphError, match="floats 'numbers' found; reals, zeros, infinities needed"):
        optimize(quotients("float32"), floats="numbers")  # type: ignore[arg-type]


def test_a_file_is_used_only_if_its_proofs_hold(shipped: RuleFile, tmp_path: Path) -> None:
    rule = shipped.rule("2bff4ad8")
    path = tmp_path / "rules.json"

    def written(**changes: object) -> Path:
        own = Rule(**{n: getattr(rule, n) for n in Rule.__dataclass_fields__} | changes)  # type: ignore[arg-type]
        rulefile.save(RuleFile(shipped.laws, 4, shipped.spaces, shipped.counts, (own,)), path)
        return path

    assert file_checks.trusted(written(domain=())).rules[0].domain == ()
    graph = quotients("float32")
    found = optimize(graph, objective="flops", machine="v100", rules=written(), candidates=20)
    assert set(found.substitutions) == {rule.identity}
    for changes, message in (
        ({"domain": ("integers",)}, "domain reals, integers found"),
        ({"proof": ((),)}, "the proof ends in"),
    ):
        with pytest.raises(RuleError, match=f"rule {rule.identity}: not proved: .*{message}"):
            optimize(graph, machine="v100", rules=written(**changes))


def test_foreign_rules_say_on_which_numbers(shipped: RuleFile) -> None:
    judge = Judge(shipped)

    def verdict(left: str, right: str, *words: str) -> tuple[str, tuple[str, ...]]:
        sides = (parse(left),), (parse(right),)
        found = judge.match(foreign.ForeignRule("rule", *sides, dict.fromkeys("xyz", 2), (), words))
        return found.verdict, found.domain

    quotient = "add(div(x, z), div(y, z))", "div(add(x, y), z)"
    assert verdict(*quotient) == ("in the set", ())
    assert verdict(*quotient, "integers") == ("refuted", ())
    product = "matmul(x, matmul(y, z))", "matmul(matmul(x, y), z)"
    assert verdict(*product, "integers") == ("in the set", ("integers", "booleans"))
