"""Extents, conditions, facts and the typing of terms, against brute force."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import numpy as np
import pytest
from helpers.rules_proofs import random_term

from soapstone.ir.law import Form
from soapstone.ir.ops.forms import AXES, kernel_size, window_of
from soapstone.ir.spec import operators
from soapstone.ir.term import Term, parse
from soapstone.search.rules import language, shapes
from soapstone.search.rules.condition import Condition, IllTyped, holds, read
from soapstone.search.rules.extents import Dim, Poly, atom, quotient, strided, substitute, window
from soapstone.search.rules.facts import Facts
from soapstone.search.rules.infer import Typing, typed
from soapstone.search.rules.sample import applies, sample_types
from soapstone.search.rules.shapes import infer, tensor_type


def random_poly(rng: random.Random) -> Dim:
    total: Dim = rng.randint(-2, 3)
    for _ in range(rng.randint(1, 3)):
        product: Dim = rng.choice((-1, 1, 1, 2))
        for _ in range(rng.randint(1, 2)):
            product = product * atom(rng.choice("abcd"))
        total = total + product
    return total


def test_polynomials_compute_as_numbers_do() -> None:
    rng = random.Random(0)
    for _ in range(300):
        p, q = random_poly(rng), random_poly(rng)
        given: dict[str, Dim] = {name: rng.randint(1, 9) for name in "abcd"}
        for made, wanted in (
            (p + q, lambda a, b: a + b),
            (p - q, lambda a, b: a - b),
            (p * q, lambda a, b: a * b),
        ):
            assert substitute(made, given) == wanted(substitute(p, given), substitute(q, given))
        assert p + q == q + p and p * q == q * p and (p + q) - q == p
        if q != 0:
            assert quotient(p * q, q) == p


def test_windows_count_what_numpy_slides() -> None:
    for extent, size, stride in itertools.product(range(1, 9), (1, 2, 3, 5), (1, 2, 3)):
        given: dict[str, Dim] = {"e": extent, "k": size, "s": stride}
        if size <= extent:
            wanted = len(range(0, extent - size + 1, stride))
            symbolic = window(atom("e"), atom("k"), atom("s"), "valid")
            assert substitute(symbolic, given) == window(extent, size, stride, "valid") == wanted
        if size % 2:
            wanted = len(range(0, extent + size - 1 - size + 1, stride))
            assert window(extent, size, stride, "same") == wanted
            assert substitute(strided(atom("e"), atom("s")), given) == wanted
    e, k, m, s, t = map(atom, "ekmst")
    assert strided(strided(e, s), t) == strided(e, t * s)
    for padding in ("valid", "same", "p"):
        one = window(window(e, k, 1, padding), m, s, padding)
        assert one == window(window(e, m, 1, padding), k, s, padding)
    for extent, first, second in itertools.product(range(1, 12), (1, 2, 3), (1, 2, 3)):
        assert strided(strided(extent, first), second) == strided(extent, first * second)
    assert window(atom("e"), 3, 1, "same") == atom("e")
    assert window(atom("e"), 1, atom("s"), "valid") == strided(atom("e"), atom("s"))


def test_conditions_are_read_as_they_print() -> None:
    typing = Typing(
        {"x": 2, "y": 4},
    )
    for text in (
        "dim(x,-1) = 2*dim(y,-4)",
        "dim(x,-2) >= dim(y,-1)",
        "divides(g, dim(y,-4))",
        "odd(k.h)",
        "p = same",
        "fits(strided(dim(y,-2),s), k.h, p)",
        "dim(x,-1) = window(dim(y,-2),k.w,s,p)",
    ):
        (found,) = typing.conditions(text, {})
        assert str(found) == text
        assert typing.conditions(str(found), {}) == (found,)
    assert [str(found) for found in typing.conditions("odd(k)", {})] == ["odd(k.h)", "odd(k.w)"]
    numbers = read(
        "(dim(x,a) - 1)*h = g", lambda term, axis: 10 + axis, {"a": -1, "g": 16, "h": 2}.__getitem__
    )
    assert holds(numbers[0])
    for wrong in ("dim(x,-1)", "dim(x,-1) == 3", "even(k)", "foo(x) = 1"):
        with pytest.raises(ValueError, match="condition"):
            typing.conditions(wrong, {})


def test_what_facts_entail_holds_for_all_numbers() -> None:
    """Brute force: whatever is said to follow is true wherever the facts are."""
    rng = random.Random(1)
    proved = impossible = 0
    everywhere = list(itertools.product(range(1, 5), repeat=4))

    def condition() -> Condition:
        kind = rng.choice(("equal", "equal", "equal", "odd", "at_least", "divides", "fits"))
        if kind == "fits":
            return Condition(
                kind, (atom("a"), atom(rng.choice("bc")), rng.choice(("same", "valid")))
            )
        if kind == "divides":
            return Condition(kind, (atom(rng.choice("ab")), random_poly(rng)))
        return Condition(kind, tuple(random_poly(rng) for _ in range(1 if kind == "odd" else 2)))

    def true(asked: Condition, given: dict[str, Dim]) -> bool:
        return holds(
            asked._replace(
                of=tuple(v if isinstance(v, str) else substitute(v, given) for v in asked.of)
            )
        )

    def solutions(facts: list[Condition]) -> list[dict[str, Dim]]:
        drawn = (dict[str, Dim](zip("abcd", numbers)) for numbers in everywhere)
        return [given for given in drawn if all(true(fact, given) for fact in facts)]

    for _ in range(250):
        facts = Facts()
        asked = [condition() for _ in range(rng.randint(1, 3))]
        try:
            for number, fact in enumerate(asked):  # noqa: B007
                facts.require(fact)
        except IllTyped:
            impossible += 1
            assert not solutions(asked[: number + 1]), asked
            continue
        where = solutions(asked)
        for other in [condition() for _ in range(8)] + asked:
            if facts.known(other):
                proved += 1
                assert all(true(other, given) for given in where), (asked, other)
    assert proved > 300 and impossible > 15


def test_facts_find_equal_channels_per_group() -> None:
    facts = Facts()
    g, h, o, u = map(atom, "ghou")
    facts.require(Condition("divides", (g, o)))
    facts.require(Condition("divides", (h, u)))
    whole = Condition("divides", (g + h, o + u))
    assert not facts.known(whole)
    facts.require(Condition("equal", (o * h, u * g)))
    assert facts.known(whole)
    with pytest.raises(IllTyped, match="false"):
        facts.require(Condition("equal", (o, o + u)))


def within(
    symbolic: shapes.Tree | None, concrete: shapes.Tree | None, given: dict[str, Dim]
) -> bool:
    """Return whether one split tree is another's upper part."""
    if symbolic is None:
        return True
    return (
        concrete is not None
        and substitute(symbolic.at, given) == concrete.at
        and within(symbolic.left, concrete.left, given)
        and within(symbolic.right, concrete.right, given)
    )


def test_symbolic_typing_agrees_with_concrete_typing() -> None:
    rng = random.Random(2)
    leaves = {"x": 2, "y": 2, "z": 2, "r": 1, "x4": 4, "y4": 4, "k4": 4, "l4": 4}
    both = refused = with_trees = 0
    for _ in range(900):
        term = random_term(rng, rng.choice((2, 2, 4)), rng.randint(1, 3))
        try:
            typing = typed((term,), (), leaves)
        except IllTyped:
            typing = None
        sampled = [
            types
            for _, types in sample_types((term,), (term,), leaves, (), np.random.default_rng(3), 2)
        ]
        drawn = [
            {
                Term(name): tensor_type(
                    [rng.choice((2, 3, 4) if rank < 4 else (2, 3)) for _ in range(rank)]
                )
                for name, rank in leaves.items()
            }
            for _ in range(3)
        ]
        for types in sampled + drawn:
            concrete = infer(term, types)
            given: dict[str, Dim] = {
                f"dim({leaf},{axis})": type_.shape[axis]
                for leaf, type_ in types.items()
                for axis in range(-type_.rank, 0)
            }
            said = typing is not None and applies((term,), (term,), leaves, (), {}, types)
            if said:
                assert typing is not None and concrete is not None, (term, types)
                symbolic = typing(term)
                assert tuple(substitute(e, given) for e in symbolic.shape) == concrete.shape
                assert all(map(within, symbolic.trees, concrete.trees, [given] * 4)), term
                both += 1
                with_trees += any(symbolic.trees)
            elif types not in sampled and not any(
                t.symbol.startswith("split") for t in term.subterms()
            ):
                assert concrete is None or 1 in {
                    e for t in term.subterms() for e in (infer(t, types) or tensor_type(())).shape
                }, (term, types)
                refused += 1
    assert both > 500 and refused > 300 and with_trees > 120


def test_typing_of_grouped_and_enlarged_convolutions() -> None:
    types = {
        Term("x"): tensor_type((1, 4, 7, 6)),
        Term("y"): tensor_type((6, 2, 3, 3)),
        Term("z"): tensor_type((4, 1, 3, 1)),
        Term("w"): tensor_type((2, 4, 2, 2)),
    }

    def shape(text: str) -> tuple[Dim, ...] | None:
        found = infer(parse(text), types)
        return None if found is None else found.shape

    assert shape("conv2d[2,1,same,none](x, y)") == (1, 6, 7, 6)
    assert shape("conv2d[2,2,valid,relu](x, y)") == (1, 6, 3, 2)
    assert shape("conv2d[1,1,same,none](x, y)") is None  # 4 channels, 2 in the kernel
    assert shape("conv2d[4,1,same,none](x, y)") is None
    assert shape("conv2d[depthwise,1,same,none](x, enlarge[3x5](z))") == (1, 4, 7, 6)
    assert shape("enlarge[4x3](z)") is None  # a difference of 1
    assert shape("enlarge[1x3](z)") is None  # smaller
    assert shape("conv2d[1,1,same,none](x, w)") is None  # an even kernel
    assert shape("conv2d[1,1,valid,none](x, w)") == (1, 2, 6, 5)
    assert shape("split0[-3](x)") is None


def test_trees_keep_what_histories_have_in_common() -> None:
    types = {Term(name): tensor_type((2, extent)) for name, extent in zip("xyzw", (3, 4, 5, 9))}
    nested = infer(parse("add(concat[-1](x, concat[-1](y, z)), concat[-1](x, w))"), types)
    assert nested is not None and nested.trees[1] == shapes.Tree(None, None, 3)
    assert infer(parse("split0[-1](add(concat[-1](x, y), concat[-1](y, x)))"), types) is None
    found = infer(parse("split1[-2](transpose(concat[-1](x, y)))"), types)
    assert found is not None and found.shape == (4, 2)


def test_polynomials_are_values() -> None:
    a, b = atom("a"), atom("b")
    one, other = (a + b) * (a + b), a * a + 2 * (a * b) + b * b
    assert one == other and hash(one) == hash(other) and str(one) == "a*a + 2*a*b + b*b"
    assert isinstance(one, Poly) and one - other == 0


def test_forms_of_other_operators_are_typed_by_their_signatures(monkeypatch) -> None:  # type: ignore[no-untyped-def]
    """A windowed, a normalising and two reducing forms, at any extents: no rule names them."""

    def pooled(parameters, *specs):  # type: ignore[no-untyped-def]
        kernel = kernel_size(parameters[0])
        window = kernel and window_of(parameters[1], parameters[2], kernel)
        return None if window is None else {**window, "kernel": kernel, "p": 4}

    def folded(keepdims):  # type: ignore[no-untyped-def]
        return lambda parameters, x: {"axes": (x.rank + parameters[0],), "keepdims": keepdims}

    pool = {"k": ("3x3", "1x2"), "s": (1, 2), "p": ("same", "valid")}
    given = {
        "lp_pool": (Form("l4_pool", 1, pool, pooled),),
        "reduce_l2": (
            Form("length", 1, {"a": AXES}, folded(True)),
            Form("norm", 1, {"a": AXES}, folded(False)),
        ),
        "rms_norm": (Form("rms", 2, {}, lambda parameters, *specs: {}),),
    }
    every = language.language(
        replace(spec, forms=spec.forms + given.get(spec.name, ())) for spec in operators()
    )
    monkeypatch.setattr(language, "_declared", lambda: every)
    language.kinds.cache_clear()
    typing = Typing({"x": 4, "y": 4, "g": 1})
    joined = "concat[-3](x, y)"
    for text, shape, axes in (
        (
            f"l4_pool[k,s,p]({joined})",
            "(dim(x,-4), dim(x,-3) + dim(y,-3), window(dim(x,-2),k.h,s,p),"
            " window(dim(x,-1),k.w,s,p))",
            {1},
        ),
        (f"l4_pool[3x3,1,same]({joined})", f"{typing(parse(joined))}", {1}),
        (f"length[-1]({joined})", "(dim(x,-4), dim(x,-3) + dim(y,-3), dim(x,-2), 1)", {1}),
        (f"norm[-4]({joined})", "(dim(x,-3) + dim(y,-3), dim(x,-2), dim(x,-1))", {0}),
        (f"rms({joined}, g)", f"{typing(parse(joined))}", {1}),
    ):
        found = typing(parse(text))
        assert str(found) == shape
        assert {axis for axis, tree in enumerate(found.trees) if tree} == axes
    stated = [str(condition) for condition in typing.facts.stated]
    assert "dim(g,-1) = dim(x,-1)" in stated and "fits(dim(x,-2), k.h, p)" in stated
    with pytest.raises(IllTyped, match="axis -4 found in a tensor of rank 1"):
        typing(parse("length[-4](g)"))
