"""Structures against the operators' references; validation, its refutations, and consistency."""

import itertools
import math
import random

import numpy as np
import pytest
from helpers.rules_wrong import WRONG, law
from programs import rules_mutants

from soapstone.ir.law import Law
from soapstone.ir.term import Term, parse, variables
from soapstone.rules.algebra import evaluate
from soapstone.rules.algebra.structure import POLYNOMIAL, structure
from soapstone.rules.laws import bounds, consistency, counterexamples
from soapstone.rules.laws.columns import TYPES, apply, possible
from soapstone.rules.laws.sizes import parameter_values, rank_choices, sizes
from soapstone.rules.laws.validate import is_polynomial, validate, validate_all
from soapstone.search.rules import language
from soapstone.search.rules.shapes import Tree, Type, concrete, infer, tensor_type

NAMED = language.laws_by_name()


def shapes_of(rank: int, most: int) -> list[tuple[int, ...]]:
    return list(itertools.product(range(1, most + 1), repeat=rank))


def run(found, a, b):
    """Return what a structure makes of two arrays, by its definition."""
    first, second = (np.append(array.ravel(), 1.0) for array in (a, b))
    result = np.zeros(math.prod(found.shape))
    if found.kind == "max":
        result[:] = -np.inf
        np.maximum.at(result, found.out, first[found.a])
    else:
        np.add.at(
            result,
            found.out,
            found.numerator / found.denominator * first[found.a] * second[found.b],
        )
    if "relu" in found.kind:
        result = np.maximum(result, 0)
    return result.reshape(found.shape)


def calls(symbol: str):
    """Yield parameters, shapes and split sizes of one symbol: all small ones, and some larger."""
    form = language.forms()[symbol].form
    choices = list(itertools.product(*form.parameters.values()))
    draw = random.Random(symbol)
    for parameters in choices:
        if form.operands == 1:
            every = [(shape,) for rank in range(5) for shape in shapes_of(rank, 3)]
            every = [one for one in every if len(one[0]) < 4 or draw.random() < 0.2]
        elif symbol == "conv2d":
            c = parameters[0] if isinstance(parameters[0], int) else 1
            pairs = [
                ((n, i * c, h, w), (o, i, kh, kw))
                for n, i, h, w, o, kh, kw in itertools.product((1, 2), (1, 2), *[(1, 2, 3, 4)] * 5)
            ]
            every = draw.sample(pairs, 120)
            if parameters[0] == "depthwise":
                every = [((n, o, h, w), (o, 1, kh, kw)) for (n, _, h, w), (o, _, kh, kw) in every]
        else:
            ranks = [(a, b) for a in range(4) for b in range(4)] + [(4, 4), (4, 2), (2, 4)]
            every = []
            for a, b in ranks:
                pairs = list(itertools.product(shapes_of(a, 2), shapes_of(b, 2)))
                every += pairs if len(pairs) < 60 else draw.sample(pairs, 60)
        for shapes in every:
            if symbol in ("split0", "split1"):
                extent = shapes[0][parameters[0]] if len(shapes[0]) >= -parameters[0] else 1
                yield from ((parameters, shapes, left) for left in range(1, extent))
            else:
                yield parameters, shapes, None


class TestStructure:
    @pytest.mark.parametrize("symbol", sorted(POLYNOMIAL))
    def test_is_the_reference(self, symbol: str) -> None:
        rng = np.random.default_rng(0)
        fitting = 0
        for parameters, shapes, left in calls(symbol):
            found = structure(symbol, parameters, shapes, left)
            types = [tensor_type(shape) for shape in shapes]
            if left is not None:
                trees = [None] * len(shapes[0])
                trees[parameters[0]] = Tree(None, None, left)
                types = [Type(shapes[0], tuple(trees))]
            typed = concrete(symbol, parameters, tuple(types))
            assert (found is None) == (typed is None), (symbol, parameters, shapes)
            if found is None or typed is None:
                continue
            arrays = [rng.uniform(-1, 1, shape) for shape in shapes]
            halves = None if left is None else (left, shapes[0][parameters[0]] - left)
            wanted = evaluate.apply(symbol, parameters, arrays, halves)
            assert wanted is not None and found.shape == wanted.shape == typed.shape
            result = run(found, arrays[0], arrays[-1])
            np.testing.assert_allclose(result, wanted, atol=1e-12, err_msg=str((symbol, shapes)))
            assert (np.diff(found.out) >= 0).all()
            fitting += 1
        assert fitting > 3

    def test_other_symbols_and_words_have_none(self) -> None:
        assert structure("exp", (), ((2,),)) is None
        assert structure("conv2d", (1, 1, "full", "none"), ((1, 1, 3, 3), (1, 1, 3, 3))) is None
        assert structure("conv2d", (1, "s", "same", "none"), ((1, 1, 3, 3), (1, 1, 3, 3))) is None


class TestSizes:
    TEXTS = (
        "matmul(x, add(y, z)) = add(matmul(x, y), matmul(x, z))",
        "concat[a](mul(x, y), mul(z, y)) = mul(concat[a](x, z), y)",
        "split0[a](transpose(concat[b](x, y))) = transpose(x)",
        "transpose(matmul(x, y)) = matmul(transpose(y), transpose(x))",
    )

    @pytest.mark.parametrize("text", TEXTS)
    def test_are_those_that_trying_finds(self, text: str) -> None:
        one = Law("law", text)
        for bindings in parameter_values(one):
            for ranks in rank_choices(one, 2):
                found = sizes(one, bindings, ranks, 3)
                assert found is not None
                rows = {
                    tuple(found.at(row)[leaf].shape for leaf in ranks) for row in range(len(found))
                }
                tried = set()
                for shapes in itertools.product(*(shapes_of(rank, 3) for rank in ranks.values())):
                    types = {leaf: tensor_type(shape) for leaf, shape in zip(ranks, shapes)}
                    left, right = (infer(side, types) for side in found.sides)
                    if left is not None and right is not None and left.shape == right.shape:
                        tried.add(shapes)
                assert rows == tried

    def test_variables_are_given_split_trees(self) -> None:
        one = Law("law", "concat[-1](split0[-1](x), split1[-1](x)) = x")
        (bindings,) = parameter_values(one)
        found = sizes(one, bindings, {parse("x"): 1}, 3)
        assert found is not None
        at = [found.at(row)[parse("x")].trees[0].at for row in range(len(found))]
        assert len(at) > 3 and set(at) == {1, 2}

    @pytest.mark.parametrize("padding", ["same", "valid"])
    @pytest.mark.parametrize("groups", [1, 2, "depthwise"])
    def test_convolutions_are_typed_as_shapes_says(self, groups, padding) -> None:
        term = Term("conv2d", (groups, 2, padding, "none"), (parse("x"), parse("y")))
        types = TYPES[False]
        draw = random.Random(0)
        pairs = list(itertools.product(shapes_of(4, 3), repeat=2))
        for x, y in draw.sample(pairs, 800):
            columns = [np.array([types.number(tensor_type(shape))]) for shape in (x, y)]
            (result,) = apply(term, types, columns)
            wanted = concrete("conv2d", term.parameters, (tensor_type(x), tensor_type(y)))
            assert (None if result < 0 else types.all[result]) == wanted

    @pytest.mark.parametrize("symbol", ["add", "matmul", "concat"])
    def test_no_pair_is_passed_over(self, symbol: str) -> None:
        parameters = (-2,) if symbol == "concat" else ()
        term = Term(symbol, parameters, (parse("x"), parse("y")))
        types = TYPES[False]
        for a, b in ((2, 2), (3, 2), (2, 3), (3, 3)):
            for x, y in itertools.product(shapes_of(a, 3), shapes_of(b, 3)):
                if concrete(symbol, parameters, (tensor_type(x), tensor_type(y))) is not None:
                    numbers = [types.number(tensor_type(shape)) for shape in (x, y)]
                    one, other = (types.extents()[number] for number in numbers)
                    assert possible(term, one, other)

    def test_conditions_choose_sizes(self) -> None:
        one = Law("law", "mul(x, y) = mul(y, x)", ("dim(y,-1) = 1", "dim(x,-1) >= 2"))
        found = sizes(one, {}, {parse("x"): 1, parse("y"): 1}, 4)
        assert found is not None
        shapes = [[type_.shape for type_ in found.at(row).values()] for row in range(len(found))]
        assert shapes == [[(2,), (1,)], [(3,), (1,)], [(4,), (1,)]]


class TestValidate:
    @pytest.mark.parametrize("name", sorted(WRONG))
    def test_refutes(self, name: str) -> None:
        found = validate(WRONG[name], limit=3)
        assert not found.holds
        assert "is wrong: with" in str(found)
        if isinstance(found.counterexample, counterexamples.Untyped):
            assert found.obligations == 0 and "no sizes type both alike" in str(found)
            return
        counterexample = found.counterexample
        assert isinstance(counterexample, counterexamples.Counterexample) and counterexample.decided
        assert counterexample.left != counterexample.right
        # The operators' own references differ, on numbers, at those shapes.
        bound = [
            Term(side.symbol, side.parameters, side.operands)
            for side in _bound(WRONG[name], counterexample.parameters)
        ]
        types = {parse(text): tensor_type(shape) for text, shape in counterexample.shapes.items()}
        assert evaluate.compare((bound[0],), (bound[1],), types) is not None

    @pytest.mark.long
    @pytest.mark.parametrize(
        "name",
        [
            "add-commutative",
            "concat-split",
            "conv2d-identity",
            "avg_pool2d-conv2d",
            "relu-self-sum",
            "relu-avg_pool2d",
            "transpose-matmul",
            "split0-concat",
        ],
    )
    def test_laws_hold_at_all_sizes(self, name: str) -> None:
        found = validate(NAMED[name])
        assert found.holds, str(found)

    def test_the_papers_laws_hold_at_small_sizes(self) -> None:
        laws = [one for one in language.laws() if is_polynomial(one) and "2.2" in one.source]
        small = validate_all(laws, processes=1, limit=2)
        assert [str(each) for each in small if not each.holds] == []
        assert len(laws) > 30

    def test_two_processes_find_the_same(self) -> None:
        laws = [WRONG["mean-is-sum"], NAMED["transpose-inverse"], WRONG["matmul-commutes"]]
        told: list[tuple[str, int, int]] = []
        found = validate_all(laws, processes=2, progress=lambda *stage: told.append(stage), limit=2)
        assert [each.law for each in found] == laws
        assert [each.holds for each in found] == [False, True, False]
        assert [done for _, done, _ in told] == [1, 2, 3]

    def test_windows_are_compared_in_every_relation_to_an_image(self) -> None:
        sizes = [(bounds.EXTENT, bounds.KERNEL, bounds.EXTENT), (24, 11, 30), (4, 3, 2)]
        compared, every, before = (bounds.relations(*each) for each in sizes)
        assert compared == every and len(before) < len(every) / 2
        false = law("max_pool2d[k,s,same](x) = max_pool2d[k,s,valid](x)", ranks="x=4")
        assert validate(false, limit=3).holds  # of strides 1 and 2 it is true
        found = validate(false)
        assert not found.holds and "s = 3" in str(found)

    def test_a_law_says_what_was_compared(self) -> None:
        found = validate(NAMED["max_pool2d-point-padding"]).covered
        for text in (
            "s: 1 to 9",
            "2 of 4 axes of any extent",
            "all 91 relations",
        ):
            assert text in found
        assert validate(NAMED["add-commutative"], 2).covered.startswith("2 of 2 axes")

    def test_a_law_of_no_sizes_does_not_hold(self) -> None:
        found = validate(law("transpose(x) = reduce_sum[-1](x)", "dim(x,-2) = 7", ranks="x=2"))
        assert not found.holds and found.obligations == 0

    def test_averages_are_exact(self) -> None:
        # 1/9 is no binary fraction: nine of them are 1 only in exact arithmetic.
        right = Law("unit", "reduce_sum[-1](reduce_sum[-2](pool_kernel[3x3])) = ones")
        assert validate(right).obligations == 4  # channels
        wrong = Law("unit", "reduce_sum[-1](reduce_sum[-2](pool_kernel[3x3])) = pool_kernel[1x1]")
        assert validate(wrong).holds
        assert not validate(Law("unit", "reduce_mean[-1](pool_kernel[3x3]) = ones")).holds

    def test_repeated_variables_are_powers(self) -> None:
        assert validate(law("mul(mul(x, x), mul(x, x)) = mul(x, mul(x, mul(x, x)))")).holds
        assert not validate(law("mul(x, mul(x, x)) = mul(x, x)")).holds

    def test_high_powers_are_decided_without_limits(self) -> None:
        power = "x"
        for _ in range(6):
            power = f"mul({power}, {power})"
        assert validate(law(f"{power} = {power}", ranks="x=1")).holds
        assert not validate(law(f"{power} = mul({power}, x)", ranks="x=1")).holds

    def test_a_counterexample_prints_what_is_needed(self) -> None:
        text = str(validate(law("relu(add(x, y)) = add(relu(x), y)", ranks="x=1 y=1")))
        assert "x of shape (1,)" in text and "element [0] of the left side is max(0, " in text
        assert "which differ at" in text


def _bound(one: Law, parameters) -> tuple[Term, Term]:
    from soapstone.rules.laws.sizes import bound_sides

    found = bound_sides(one, parameters)
    assert found is not None
    return found


class TestMaxima:
    """The compiled normal form, against trying many points of random piecewise equations."""

    def test_equal_forms_are_equal_functions(self) -> None:
        draw = random.Random(1)

        def term(depth: int) -> str:
            if depth == 0 or draw.random() < 0.15:
                return draw.choice("xyz")
            kind = draw.choice(["relu", "relu", "add", "mul", "sub"])
            if kind == "relu":
                return f"relu({term(depth - 1)})"
            return f"{kind}({term(depth - 1)}, {term(depth - 1)})"

        rng = np.random.default_rng(0)

        def shuffled(term: Term) -> Term:
            operands = tuple(map(shuffled, term.operands))
            if term.symbol in ("add", "mul") and draw.random() < 0.5:
                operands = operands[::-1]
            found = Term(term.symbol, (), operands)
            return Term("relu", (), (found,)) if term.symbol == "relu" else found

        equal = 0
        for number in range(150):
            left = term(3)
            right = term(2) if number % 2 else str(shuffled(parse(left)))
            names = sorted(variables([parse(left), parse(right)]))
            one = law(f"{left} = {right}", ranks=" ".join(f"{name}=1" for name in names))
            arrays = {parse(name): rng.integers(-3, 4, 400).astype(float) for name in names}
            types = {leaf: tensor_type((400,)) for leaf in arrays}
            first, second = evaluate.evaluate([parse(left), parse(right)], arrays, types)
            same = np.array_equal(first, second)
            found = validate(one, limit=1)
            assert found.holds == same, str(found)
            equal += same
        assert equal > 20


class TestConsistency:
    def test_a_false_law_is_named_beside_all_others(self) -> None:
        false = law("add(x, y) = x")
        laws = [*language.laws()[::20], false, law("relu(matmul(x, y)) = matmul(relu(x), relu(y))")]
        found = consistency.consistent(laws)
        assert found.verdict == "contradictory" and set(found.refuted) == {"wrong"}
        assert "differ" in found.refuted["wrong"] or " is " in found.refuted["wrong"]
        assert consistency.consistent(laws[:-2]).verdict == "consistent"

    def test_changed_laws_are_refuted_or_equal(self) -> None:
        """Some of each kind of change; `python tests/programs/rules_mutants.py` makes all."""
        fates: dict[str, list[str]] = {}
        every = rules_mutants.every()
        assert len(every) > 1500
        for kind, mutant in random.Random(2).sample(every, 40):
            fates.setdefault(rules_mutants.fate(mutant), []).append(f"{kind}: {mutant}")
        numbers, validation = fates["refuted by numbers"], fates.get("refuted by validation", [])
        assert len(numbers) > 25 and len(validation) < len(numbers) / 5
        assert not [name for name in fates if name.startswith("no law")]

    def test_says_what_a_redundant_law_follows_from(self) -> None:
        names = ("transpose-inverse", "concat-transpose", "concat-transpose-columns", "mul-add")
        laws = [NAMED[name] for name in names]
        found = {each.law: each.follows for each in consistency.redundant(laws, timeout_s=0)}
        assert found["concat-transpose"] == ("concat-transpose-columns", "transpose-inverse")
        assert "mul-add" not in found and "transpose-inverse" not in found
