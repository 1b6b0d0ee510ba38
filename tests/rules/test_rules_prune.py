"""Pruning loses nothing: what all pairs of equal graphs reach, those that are kept reach."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import pytest
from helpers.rule_rewriting import Rewriting, Terms, normal

from soapstone.ir.term import Term, parse, size, variables
from soapstone.rules.algebra.canonical import (
    canonical,
    canonical_candidate,
    canonical_form,
    identity,
    rename,
    subsumes,
)
from soapstone.rules.enumeration import engine, prune
from soapstone.rules.enumeration.exact import ExactEvaluator
from soapstone.rules.enumeration.pairs import fill as lay_out, key, new_scratch, new_view
from soapstone.rules.enumeration.recheck import Recheck
from soapstone.rules.enumeration.reduce import Reducer, ways
from soapstone.rules.enumeration.space import OperatorUse, Space, inputs
from soapstone.rules.enumeration.spanning import CUT_BIT, span
from soapstone.search.rules.language import commutative
from soapstone.search.rules.proof import Candidate, equation

MATRICES = (
    "x1 x2 x3 matrix 2x3; w1 w2 matrix 3x4; v matrix 4x5; s scalar;"
    "identity_matrix matrix 3x3; ones matrix 2x3"
)
IMAGES = "x1 x2 image 2x3x4x5; k1 k2 kernel 4x3x3x3; s scalar; pool_kernel[3x3] kernel 3x1x3x3"
ELEMENTWISE = "add mul smul transpose matmul relu"
JOINS = "concat[-2] concat[-1] split[-2] split[-1]"
CONVOLUTIONS = (
    "add mul smul relu concat[-3] concat[-4] split[-3] conv2d[1,1,same,none] conv2d[1,1,same,relu]"
    " conv2d[depthwise,1,same,none] avg_pool2d[3x3,1,same,all]"
)


def rule(text: str) -> tuple[Terms, Terms]:
    left, right = text.split(" = ")
    return tuple(map(parse, left.split("; "))), tuple(map(parse, right.split("; ")))


@lru_cache(maxsize=8)
def pruned(tensors: str, operators: str, most: int) -> tuple[Any, list[Candidate], Any]:
    uses = [parse(word) for word in operators.split()]
    space = Space(
        "small", inputs(tensors), tuple(OperatorUse(u.symbol, u.parameters) for u in uses), most
    )
    enumeration = engine.enumerate_space(space, ExactEvaluator())
    return enumeration, *prune.candidates(enumeration)


def every_pair(enumeration: Any) -> list[tuple[Terms, Terms]]:
    """All rules of an enumeration, unpruned, in each direction in which they are usable."""
    everything = np.arange(len(enumeration.graphs))
    terms = prune.outputs_by_value(enumeration, prune.nodes_of(enumeration), everything)
    found = [((term,), (part,)) for term, part in enumeration.collapses]
    for begin, end in zip(enumeration.starts[:-1], enumeration.starts[1:]):
        found += [
            (terms[i], terms[j])
            for i in range(begin, end)
            for j in range(begin, end)
            if i != j and set(variables(terms[j])) <= set(variables(terms[i]))
        ]
    return found


def shuffled(sides: tuple[Terms, Terms], rng: random.Random) -> tuple[Terms, Terms]:
    """The same rule in other names, operands, order of outputs and direction."""
    names = list(variables(sides[0] + sides[1]))
    new = dict(zip(names, rng.sample([f"m{i}" for i in range(9)], len(names))))

    def flip(term: Term) -> Term:
        operands = tuple(map(flip, term.operands))
        swap = term.symbol in commutative() and rng.random() < 0.5
        return Term(term.symbol, term.parameters, operands[::-1] if swap else operands)

    order = rng.sample(range(len(sides[0])), len(sides[0]))
    source, target = (tuple(map(flip, rename(side, new))) for side in sides)
    found = tuple(source[i] for i in order), tuple(target[i] for i in order)
    return found if rng.random() < 0.5 else found[::-1]


RULES = [
    "matmul(add(c, a), b) = add(matmul(a, b), matmul(c, b))",
    "matmul(x, y); matmul(x, z) = split0[-1](matmul(x, concat[-1](y, z)));"
    " split1[-1](matmul(x, concat[-1](y, z)))",
    "concat[a](add(x, y), add(z, w)) = add(concat[a](x, z), concat[a](y, w))",
    "add(add(x, y), add(z, w)) = add(add(x, z), add(y, w))",
    "add(mul(x, y), mul(z, w)); mul(x, z) = add(mul(z, w), mul(x, y)); mul(z, x)",
    "conv2d[g,s,p,c](x, smul(y, w)) = conv2d[g,s,p,c](smul(x, w), y)",
    "conv2d[g+h,s,p,c](x, y) = conv2d[h+g,s,p,c](relu(x), y)",
]


def test_canonical_is_one_text() -> None:
    rng = random.Random(0)
    names = set()
    for text in RULES:
        sides = rule(text)
        names.add(identity(*sides))
        for _ in range(40):
            other = shuffled(sides, rng)
            assert identity(*other) == identity(*sides), equation(*other)
            assert subsumes(sides, other) and subsumes(other, sides)
        form = canonical_form(*sides)
        assert canonical(form.source, form.target) == (form.source, form.target)
        assert {form.names[name] for name in form.names} >= set(variables(form.source))
    assert len(names) == len(RULES)


def test_canonical_keeps_direction_and_types() -> None:
    forward = rule("relu(transpose(x)) = transpose(relu(x))")
    assert canonical(*forward) != canonical(*forward[::-1])
    one = Candidate(*rule("add(b, a) = add(add(a, b), b)"), {"a": (2, 3), "b": (3,)}, "s")
    other = Candidate(*rule("add(c, d) = add(add(d, c), c)"), {"d": (2, 3), "c": (3,)}, "s")
    assert canonical_candidate(one) == canonical_candidate(other)
    symmetric = [
        Candidate(*rule(f"relu(add({p}, {q})) = relu(add({p}, {q}))"), {p: (2, 3), q: (3,)}, "s")
        for p, q in ("ab", "ba")
    ]
    assert canonical_candidate(symmetric[0]) == canonical_candidate(symmetric[1])


def test_subsumes_is_one_way() -> None:
    general = rule("matmul(x, matmul(y, z)) = matmul(matmul(x, y), z)")
    special = rule("matmul(matmul(a, b), a) = matmul(a, matmul(b, a))")
    assert subsumes(general, special) and not subsumes(special, general)
    assert not subsumes(general, rule("matmul(x, matmul(y, z)) = matmul(matmul(z, y), x)"))
    strided = rule("conv2d[g,s,p,c](x, y) = conv2d[g,s,p,c](relu(x), y)")
    fixed = rule("conv2d[1,2,same,c](x, y) = conv2d[1,2,same,c](relu(x), y)")
    assert subsumes(strided, fixed, values=True) and not subsumes(strided, fixed)


@pytest.mark.long
def test_key_is_identity() -> None:
    enumeration, *_ = pruned(MATRICES, f"{ELEMENTWISE} {JOINS}", 2)
    nodes = prune.nodes_of(enumeration)
    terms = prune.outputs_by_value(enumeration, nodes, np.arange(len(enumeration.graphs)))
    rank = {str(each.term): len(each.shape) for each in enumeration.space.inputs}
    most = enumeration.graphs.shape[1]
    view, scratch = new_view(2, most), new_scratch(enumeration.terms.inputs, most)
    by_key: dict[int, set[str]] = {}
    by_name: dict[str, set[int]] = {}
    for begin, end in zip(enumeration.starts[:-1], enumeration.starts[1:]):
        for left in range(begin, end):
            for right in range(left + 1, end):
                lay_out(enumeration.graphs, np.array([left, right]), view, nodes)
                fresh = np.zeros(2, np.uint64)
                found = int(key(0, 1, -1, -1, nodes.loose, fresh, view, scratch))
                sides = terms[left], terms[right]
                ranks = [
                    canonical_form(*way, {name: rank[name] for name in variables(way[0] + way[1])})
                    for way in (sides, sides[::-1])
                ]
                least = min(ranks, key=str)
                kinds = sorted((new, rank[old]) for old, new in least.names.items())
                name = f"{identity(*sides)} {kinds}"
                by_key.setdefault(found, set()).add(name)
                by_name.setdefault(name, set()).add(found)
    assert len(by_key) > 30
    assert all(len(names) == 1 for names in by_key.values())
    assert all(len(keys) == 1 for keys in by_name.values())


ASSOCIATIVE = "matmul(x, matmul(y, z)) = matmul(matmul(x, y), z)"
FIGURE_2_4 = {
    "a": "matmul(x, matmul(y, x)) = matmul(matmul(x, y), x)",
    "b": "matmul(x, matmul(y, add(x, z))) = matmul(matmul(x, y), add(x, z))",
    "c": "matmul(matmul(x, matmul(y, z)), x) = matmul(matmul(matmul(x, y), z), x)",
}


def test_figure_2_4_is_pruned() -> None:
    enumeration, candidates, _ = pruned("x1 x2 x3 matrix 3x3", "add matmul", 3)
    found = {identity(*sides) for sides in every_pair(enumeration)}
    kept = {identity(each.source, each.target) for each in candidates}
    assert identity(*rule(ASSOCIATIVE)) in kept
    for figure, equal in FIGURE_2_4.items():
        redundant = identity(*rule(equal))
        assert redundant in found, f"figure {figure}: the space has the pair"
        assert redundant not in kept, figure


@pytest.mark.parametrize(
    ("tensors", "operators"),
    [(MATRICES, f"{ELEMENTWISE} {JOINS}"), (IMAGES, CONVOLUTIONS)],
    ids=["matrices", "images"],
)
def test_every_pair_is_reached(tensors: str, operators: str) -> None:
    enumeration, candidates, _ = pruned(tensors, operators, 2)
    recheck = Recheck({each.term: each.shape for each in enumeration.space.inputs})
    rewriting = Rewriting([(each.source, each.target) for each in candidates], recheck, 3)
    pairs = every_pair(enumeration)
    assert len(pairs) > 50
    for source, target in pairs:
        assert rewriting.reaches(source, target, 300), equation(source, target)


@pytest.mark.parametrize(
    ("tensors", "operators"),
    [(MATRICES, f"{ELEMENTWISE} {JOINS}"), (IMAGES, CONVOLUTIONS)],
    ids=["matrices", "images"],
)
def test_random_graphs_reach_the_same(tensors: str, operators: str) -> None:
    enumeration, candidates, _ = pruned(tensors, operators, 3)
    recheck = Recheck({each.term: each.shape for each in enumeration.space.inputs})
    rewriting = Rewriting([(each.source, each.target) for each in candidates], recheck, 4)
    pairs = every_pair(enumeration)
    assert len(pairs) > 20 * len(candidates)
    for source, target in random.Random(1).sample(pairs, 40):
        assert rewriting.reaches(source, target, 400), equation(source, target)


def test_a_missing_rule_is_noticed() -> None:
    enumeration, candidates, _ = pruned(MATRICES, f"{ELEMENTWISE} {JOINS}", 2)
    recheck = Recheck({each.term: each.shape for each in enumeration.space.inputs})
    lost = identity(*rule("relu(transpose(x)) = transpose(relu(x))"))
    kept = [(each.source, each.target) for each in candidates]
    fewer = [sides for sides in kept if identity(*sides) != lost]
    assert len(fewer) == len(kept) - 1
    source, target = rule("relu(transpose(x1)) = transpose(relu(x1))")
    assert Rewriting(kept, recheck, 3).reaches(source, target, 300)
    assert not Rewriting(fewer, recheck, 3).reaches(source, target, 300)


def test_candidates_hold_and_are_distinct() -> None:
    """Over the integers they hold; with a relu they need not over the reals: `x * (x + 1)`."""
    _, candidates, counts = pruned(MATRICES, f"{ELEMENTWISE} {JOINS}", 3)
    integers_only = 0
    for each in candidates:
        recheck = Recheck({parse(name): shape for name, shape in each.types.items()}, seed=5)
        if not all(recheck.equal(a, b) for a, b in zip(each.source, each.target)):
            assert "relu" in str(each)
            integers_only += 1
        assert ways((each.source, each.target)) & 1, f"{each} brings a new variable"
        assert each.space == "small"
    assert integers_only < len(candidates) / 100
    names = [(identity(c.source, c.target), str(c.types)) for c in candidates]
    assert len(set(names)) == len(names)
    assert counts.initial > counts.after_renaming > counts.after_common_subgraph > len(candidates)
    texts = {str(each) for each in candidates}
    assert "relu(relu(x)) = relu(x)" in texts
    assert "split0[-1](concat[-1](x, y)) = x" in texts
    merged = rule(RULES[1])
    assert identity(*merged) in {name for name, _ in names}


def test_a_rule_of_more_variables_than_the_space_has() -> None:
    """Two images make no associativity, but a common subgraph stands for the third."""
    _, candidates, _ = pruned("x1 x2 image 2x3x4x5", "mul relu", 3)
    wanted = rule("mul(x, mul(y, z)) = mul(mul(x, y), z)")
    assert identity(*wanted) in {identity(each.source, each.target) for each in candidates}


def reached(count: int, edges: Sequence[tuple[int, int]]) -> Any:
    """Transitive closure of directed edges."""
    found = np.eye(count, dtype=bool)
    for _ in range(count):
        for a, b in edges:
            found[:, b] |= found[:, a]
    return found


def test_forests_preserve_every_direction() -> None:
    rng = np.random.default_rng(3)
    for _ in range(200):
        count = int(rng.integers(2, 8))
        masks = rng.choice([1, 3, 5, 7], count)
        pairs = []
        for x in range(count):
            for y in range(x + 1, count):
                way = (masks[y] & ~masks[x] == 0) + 2 * (masks[x] & ~masks[y] == 0)
                if way:
                    weight = 2 * int(rng.integers(1, 20)) + int(rng.random() < 0.4)
                    pairs.append((weight, x, y, int(way)))
        pairs.sort()
        columns = [np.array(column, np.int64) for column in zip(*pairs)] or [np.zeros(0, int)] * 4
        weight, left, right, way = columns
        keep = np.zeros(len(pairs), np.bool_)
        span(np.array([0, count]), left.astype(np.int32), right, way, weight, keep)
        assert not (keep & (weight & CUT_BIT == 1)).any()
        for number, (own, x, y, directions) in enumerate(pairs):
            if own & CUT_BIT or keep[number]:
                continue
            edges = []  # what is kept, and what is known to follow before this pair
            for other, (other_weight, a, b, also) in enumerate(pairs):
                if keep[other] or (other_weight & CUT_BIT and other_weight < own):
                    edges += [(a, b)] if also & 1 else []
                    edges += [(b, a)] if also & 2 else []
            found = reached(count, edges)
            assert not directions & 1 or found[x, y]
            assert not directions & 2 or found[y, x]


def test_forest_is_smallest_where_all_have_the_same_variables() -> None:
    left, right = np.triu_indices(6, 1)
    weight = np.full(len(left), 10, np.int64)
    keep = np.zeros(len(left), np.bool_)
    order = np.lexsort((left, weight))
    span(
        *(np.array([0, 6]), left[order].astype(np.int32), right[order]),
        *(np.full(len(left), 3), weight, keep),
    )
    assert keep.sum() == 5


def test_reduction_finds_the_general_pair() -> None:
    space = Space("s", inputs(MATRICES), (), 3)
    reducer = Reducer(space)

    def general(text: str, needed: int = 3) -> set[str]:
        return {identity(*sides) for sides in reducer.reduced(rule(text), needed)}

    assert general("matmul(add(x1, x2), matmul(w1, v)) = matmul(matmul(add(x1, x2), w1), v)") == {
        identity(*rule(ASSOCIATIVE))
    }
    assert general("add(relu(x1), transpose(transpose(x2))) = add(relu(x1), x2)") == {
        identity(*rule("transpose(transpose(x)) = x"))
    }
    assert general("split0[-1](concat[-1](x1, relu(ones))) = x1", needed=1) == {
        identity(*rule("split0[-1](concat[-1](x, y)) = x"))
    }
    # A variable in place of the constant would make these wrong.
    for special in ("relu(ones) = ones", "relu(matmul(ones, w1)) = matmul(ones, w1)"):
        assert not reducer.equal(rule(special.replace("ones", "x1")))
    assert general("mul(x1, ones) = x1", needed=1) == {identity(*rule("mul(x, ones) = x"))}


def test_recheck_agrees_with_the_references() -> None:
    from soapstone.rules.algebra.evaluate import evaluate
    from soapstone.search.rules.shapes import tensor_type

    shapes = {
        "x": (2, 4, 5, 6),
        "k": (4, 2, 3, 3),
        "d": (4, 1, 3, 3),
        "a": (2, 3),
        "b": (3, 4),
        "w": (3,),
        "s": (),
    }
    terms = [
        "conv2d[2,2,same,relu](relu(x), k)",
        "conv2d[depthwise,1,valid,none](x, d)",
        "avg_pool2d[3x3,1,same,inside](x)",
        "max_pool2d[3x3,2,same](x)",
        "split1[-1](matmul(a, concat[-1](b, smul(b, s))))",
        "layer_norm(a, w, w)",
        "softmax[-1](div(a, exp(a)))",
        "reduce_sum[-2](sub(a, w))",
    ]
    recheck = Recheck({parse(name): shape for name, shape in shapes.items()})
    for term in map(parse, terms):
        found = recheck.value(term)
        assert found is not None
        for seed in range(len(found.elements)):
            arrays = {}
            for name, shape in shapes.items():
                leaf = recheck.value(parse(name))
                assert leaf is not None
                arrays[parse(name)] = leaf.elements[seed].reshape(shape)
            types = {parse(name): tensor_type(shape) for name, shape in shapes.items()}
            expected = evaluate([term], arrays, types)
            assert expected is not None
            np.testing.assert_allclose(found.elements[seed], expected[0].ravel(), 1e-12, 1e-12)
    assert recheck.value(parse("matmul(a, a)")) is None
    assert not recheck.equal(parse("add(a, a)"), parse("mul(a, a)"))


def test_normal_form_of_the_rewriting_is_commutative() -> None:
    assert normal([parse("add(y, x)")]) == normal([parse("add(x, y)")])
    assert size(normal([parse("add(relu(y), relu(x))")])) == 3
