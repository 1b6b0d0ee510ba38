"""What keeps proofs and checks short: limits of saturation and of Z3, and inputs drawn once."""

import numpy as np
import pytest

from soapstone.ir.term import Term, parse
from soapstone.rules.algebra import evaluate
from soapstone.rules.laws import consistency
from soapstone.rules.proving.egraph import EGraph
from soapstone.rules.proving.prove import ROUNDS, system_of
from soapstone.rules.proving.saturate import Problem, Saturation
from soapstone.search.rules import language
from soapstone.search.rules.shapes import tensor_type

ONES, X = parse("ones"), parse("x")
HOPELESS = (
    ("reduce_sum[-2](div(reduce_mean[-2](x), ones))", "reduce_sum[-2](x)"),
    ("div(div(x, div(ones, x)), x)", "div(x, ones)"),
)


def saturated(left: str, right: str, budget) -> EGraph:
    graph = EGraph()
    for leaf, shape in ((ONES, (2, 3, 1)), (X, (2, 3, 4))):
        graph.leaf(leaf, tensor_type(shape))
    goal = (graph.add(parse(left)), graph.add(parse(right)))
    run = Saturation(graph, system_of(language.laws()), [goal], Problem.of(graph))
    assert not run.run(budget)
    return graph


@pytest.mark.parametrize("left, right", HOPELESS)
def test_what_matches_at_one_node_does_not_outgrow_the_budget(left: str, right: str) -> None:
    # Once ones are divided by ones, one node of the first has matches for more than 100,000 nodes.
    for budget in ROUNDS[2:]:
        assert len(saturated(left, right, budget)) < 2 * budget.nodes + 20


def test_z3_gives_up_where_it_does_not_look_at_the_clock() -> None:
    by_name = {law.name: law for law in language.laws()}
    others = [law for law in language.laws() if law.name != "mul-ones-joined"]
    assert not consistency._by_z3(by_name["mul-ones-joined"], others, 0.5)


def test_processes_find_the_same_laws_redundant() -> None:
    laws = [law for law in language.laws() if law.name.startswith(("rsqrt", "transpose"))]
    laws += [law for law in language.laws() if law.name in ("div-merge", "sqrt-merge")]
    alone = consistency.redundant(laws, 0)
    assert alone and alone == consistency.redundant(laws, 0, processes=2)


def test_a_law_is_derived_where_extents_are_not_one() -> None:
    # With an axis of one element, a sum over it is no sum, and much follows that is not so.
    laws = {law.name: law for law in language.laws()}
    others = [laws[name] for name in ("reduce_sum-of-one", "add-commutative", "mul-add")]
    assert consistency.derivation(laws["reduce_sum-sum"], others) is None


def test_inputs_are_those_of_a_new_generator() -> None:
    for seed, draw in ((0, 0), (3, 7), (0, 0)):
        found = evaluate._generator(seed, draw).uniform(-1, 1, 5)
        np.testing.assert_array_equal(found, np.random.default_rng((seed, draw)).uniform(-1, 1, 5))


def test_a_plan_is_run_on_several_inputs() -> None:
    term = parse("matmul(x, add(y, ones))")
    x, y, ones = (Term(name) for name in ("x", "y", "ones"))
    types = {x: tensor_type((2, 3)), y: tensor_type((3, 4)), ones: tensor_type((3, 4))}
    plan = evaluate.Plan.of([term, x], types)
    assert plan is not None
    rng = np.random.default_rng(0)
    for _ in range(2):
        arrays = {x: rng.uniform(-1, 1, (2, 3)), y: rng.uniform(-1, 1, (3, 4))}
        product, same = plan.run(arrays)
        np.testing.assert_allclose(product, arrays[x] @ (arrays[y] + 1), rtol=1e-12)
        np.testing.assert_array_equal(same, arrays[x])
    assert evaluate.Plan.of([term], {**types, y: tensor_type((2, 4))}) is None


def test_differences_without_a_number_are_found() -> None:
    x = {X: tensor_type((2,))}
    assert evaluate.compare([parse("div(x, sub(x, x))")], [parse("x")], x) is not None
    assert evaluate.compare([parse("sqrt(x)")], [parse("sqrt(x)")], x) is None
