"""Slices of laws: the axes that operators pass through, and that sizes left out lose nothing."""

import itertools
import random

import numpy as np
import pytest

from soapstone.ir.law import Law
from soapstone.ir.term import Term, parse
from soapstone.rules.algebra import evaluate
from soapstone.rules.laws import slices, validate
from soapstone.rules.laws.sizes import parameter_values, rank_choices, sizes
from soapstone.search.rules import language
from soapstone.search.rules.shapes import extents

RANKS = {
    1: [(1,), (2,), (3,), (4,)],
    2: [(1, 1), (2, 1), (1, 2), (2, 2), (3, 2), (3, 3), (4, 2), (4, 4), (2, 0), (4, 0)],
    3: [(2, 1, 1), (3, 1, 1)],
}


def typed(symbol, parameters, ranks, count, most=3):
    """Yield shapes that an operator takes, and how a split parts its operand."""
    operands = tuple(Term(f"x{number}") for number in range(len(ranks)))
    term = Term(symbol, parameters, operands)
    found = sizes(Law("sizes", f"{term} = {term}"), {}, dict(zip(operands, ranks)), most)
    rows = range(len(found) if found is not None else 0)
    for row in random.Random(f"{symbol}{parameters}{ranks}").sample(rows, min(count, len(rows))):
        types = [found.at(row)[operand] for operand in operands]
        parts = None
        if symbol in ("split0", "split1"):
            tree, whole = types[0].trees[parameters[0]], types[0].shape[parameters[0]]
            parts = tree.at, whole - tree.at
        yield [extents(type_) for type_ in types], parts


class TestPassing:
    @pytest.mark.parametrize("symbol", sorted(language.forms()))
    def test_results_have_the_slices_that_operands_give(self, symbol: str) -> None:
        form = language.forms()[symbol].form
        rng = np.random.default_rng(0)
        choices = list(itertools.product(*form.parameters.values()))
        compared = 0
        for parameters in random.Random(0).sample(choices, min(10, len(choices))):
            for ranks in RANKS[form.operands]:
                for shapes, parts in typed(symbol, parameters, ranks, 12):
                    arrays = [rng.uniform(0.1, 1, shape) for shape in shapes]
                    whole = evaluate.apply(symbol, parameters, arrays, parts)
                    assert whole is not None
                    known = slices.passing(symbol, parameters, ranks)
                    assert all(whole.shape[axis] == 1 for axis in known.single)
                    for axis, places in known.through.items():
                        for index in range(whole.shape[axis]):
                            taken = list(arrays)
                            for number, at in places:
                                if taken[number].shape[at] > 1:
                                    taken[number] = taken[number].take([index], at)
                            got = evaluate.apply(symbol, parameters, taken, parts)
                            wanted = whole.take([index], axis)
                            np.testing.assert_allclose(got, wanted, rtol=1e-12)
                            compared += 1
        assert compared or symbol == "merge", symbol

    @pytest.mark.parametrize(
        "symbol, parameters, ranks, axes",
        [
            ("matmul", (), (3, 3), {-3, -2, -1}),
            ("matmul", (), (2, 2), {-2, -1}),
            ("transpose", (), (3,), {-3, -2, -1}),
            ("concat", (-2,), (3, 3), {-3, -1}),
            ("split1", (-1,), (2,), {-2}),
            ("softmax", (-1,), (3,), {-3, -2}),
            ("layer_norm", (), (3, 1, 1), {-3, -2}),
            ("reduce_mean", (-2,), (3,), {-3, -1}),
            ("merge", (), (3,), {-1}),
            ("enlarge", ("3x3",), (4,), {-4, -3}),
            ("max_pool2d", ("3x3", 2, "same"), (4,), {-4, -3}),
            ("conv2d", (1, 1, "same", "relu"), (4, 4), {-4, -3}),
            ("conv2d", (2, 1, "same", "none"), (4, 4), {-4}),
            ("conv2d", ("depthwise", 1, "valid", "none"), (4, 4), {-4, -3}),
        ],
    )
    def test_axes_that_operators_pass_through(self, symbol, parameters, ranks, axes) -> None:
        assert set(slices.passing(symbol, parameters, ranks).through) == axes


def groups(text: str, ranks: dict[str, int]) -> set[frozenset[str]]:
    law = Law("law", text)
    found = sizes(law, {}, {parse(name): rank for name, rank in ranks.items()}, 2)
    assert found is not None
    return {
        frozenset(f"{term}{axis}" for term, axis in group)
        for group in slices.passed(found.sides, found.at(0))
    }


class TestPassed:
    def test_axes_pass_through_both_sides_together(self) -> None:
        text = "matmul(x, add(y, z)) = add(matmul(x, y), matmul(x, z))"
        assert groups(text, {"x": 2, "y": 2, "z": 2}) == {
            frozenset({"x-2"}),
            frozenset({"y-1", "z-1"}),
        }

    def test_a_tensor_that_meets_its_transpose_is_not_sliced(self) -> None:
        assert groups("transpose(x) = x", {"x": 2}) == set()
        assert groups("matmul(x, transpose(x)) = matmul(x, transpose(x))", {"x": 2}) == set()

    def test_constants_are_sliced_where_their_slices_are_alike(self) -> None:
        assert groups("mul(x, ones) = x", {"x": 1, "ones": 1}) == {frozenset({"x-1", "ones-1"})}
        found = groups("matmul(x, identity_matrix) = x", {"x": 2, "identity_matrix": 2})
        assert found == {frozenset({"x-2"})}


TEXTS = (
    ("matmul(x, transpose(x)) = matmul(transpose(x), x)", "x=2"),
    ("transpose(x) = x", "x=2"),
    ("mul(x, transpose(x)) = mul(x, x)", "x=2"),
    ("mul(x, identity_matrix) = x", "x=2 identity_matrix=2"),
    ("matmul(x, y) = mul(x, y)", "x=2 y=2"),
    ("concat[a](x, y) = concat[a](y, x)", "x=2 y=2"),
    ("add(x, concat[a](y, z)) = concat[a](add(x, y), z)", "x=2 y=2 z=2"),
    ("mul(concat[a](x, y), z) = concat[a](mul(x, z), y)", "x=2 y=2 z=2"),
    ("reduce_sum[a](mul(x, y)) = mul(reduce_sum[a](x), reduce_sum[a](y))", "x=2 y=2"),
    ("reduce_mean[a](add(x, y)) = add(reduce_sum[a](x), y)", "x=2 y=1"),
    ("transpose(mul(x, y)) = mul(x, transpose(y))", "x=2 y=2"),
    ("split0[a](concat[a](x, y)) = y", "x=2 y=2"),
    ("relu(add(x, y)) = add(relu(x), relu(y))", "x=2 y=1"),
    ("mul(merge(x), y) = merge(mul(x, x))", "x=3 y=2"),
    ("conv2d[2,1,p,c](add(x, y), z) = conv2d[2,1,p,c](x, z)", "x=4 y=4 z=4"),
    ("conv2d[1,1,p,relu](x, add(y, z)) = conv2d[1,1,p,relu](add(x, x), y)", "x=4 y=4 z=4"),
    ("max_pool2d[k,s,p](x) = avg_pool2d[k,s,p,all](x)", "x=4"),
    ("softmax[-1](x) = softmax[-2](x)", "x=2"),
    ("softmax[a](add(x, y)) = softmax[a](x)", "x=2 y=2"),
    ("div(x, reduce_sum[a](x)) = softmax[a](x)", "x=2"),
    ("layer_norm(x, w, b) = layer_norm(x, b, w)", "x=2 w=1 b=1"),
    ("layer_norm(add(x, y), w, b) = layer_norm(x, w, b)", "x=2 w=1 b=1 y=2"),
)


class TestNeeded:
    @pytest.mark.parametrize("text, ranks", TEXTS)
    def test_a_wrong_law_is_found_with_fewer_sizes(self, text, ranks, monkeypatch) -> None:
        law = Law("law", text, (), (ranks,))
        sliced = validate.validate(law, 2)
        monkeypatch.setattr(validate, "needed", lambda found: np.arange(len(found)))
        whole = validate.validate(law, 2)
        assert sliced.obligations and not sliced.holds and not whole.holds
        assert sliced.compared <= whole.compared

    def test_every_size_has_a_slice_that_is_kept(self) -> None:
        law = Law("law", "mul(add(x, y), z) = add(mul(x, z), mul(y, z))")
        for ranks in rank_choices(law, 3):
            found = sizes(law, {}, ranks, 3)
            assert found is not None
            assert [set(found.at(row)[parse("x")].shape) for row in slices.needed(found)] == [{1}]

    def test_a_law_is_compared_at_few_of_its_sizes(self) -> None:
        text = "matmul(x, matmul(y, z)) = matmul(matmul(x, y), z)"
        found = validate.validate(Law("law", text, (), ("x=3 y=3 z=3",)), 4)
        assert found.holds and found.obligations > 1000
        assert found.compared == 16  # the inner two extents

    def test_conditions_keep_sizes_without_a_slice(self) -> None:
        law = Law("law", "relu(x) = relu(x)", ("dim(x,-1) = 2",))
        (bindings,) = parameter_values(law)
        found = sizes(law, bindings, {parse("x"): 2}, 3)
        assert found is not None and len(found) == 3
        assert [found.at(row)[parse("x")].shape for row in slices.needed(found)] == [(1, 2)]
