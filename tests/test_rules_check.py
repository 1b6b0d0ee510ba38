"""The checker of proofs and what it stands on: extents, typing, facts, lifting and sampling."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import numpy as np
import pytest

from soapstone.ir.law import Law
from soapstone.ir.term import Term, parse, subterms, variables
from soapstone.search.substitution import shapes
from soapstone.search.substitution.check import (
    CheckError,
    missing_guards,
    replay,
)
from soapstone.search.substitution.condition import Condition, IllTyped, holds, read
from soapstone.search.substitution.dims import (
    Dim,
    Poly,
    atom,
    quotient,
    strided,
    substitute,
    window,
)
from soapstone.search.substitution.facts import Facts
from soapstone.search.substitution.infer import Typing, typed, with_parameters
from soapstone.search.substitution.lift import applies, lift, sample_types
from soapstone.search.substitution.proof import Step
from soapstone.search.substitution.shapes import Type, infer, plain

LAWS = {
    law.name: law
    for law in (
        Law("add-associative", "add(x, add(y, z)) = add(add(x, y), z)"),
        Law("add-commutative", "add(x, y) = add(y, x)"),
        Law("transpose-inverse", "transpose(transpose(x)) = x"),
        Law("transpose-add", "transpose(add(x, y)) = add(transpose(x), transpose(y))"),
        Law("transpose-matmul", "transpose(matmul(x, y)) = matmul(transpose(y), transpose(x))"),
        Law(
            "transpose-concat",
            "concat[-1](transpose(x), transpose(y)) = transpose(concat[-2](x, y))",
        ),
        Law("transpose-relu", "transpose(relu(x)) = relu(transpose(x))"),
        Law("matmul-associative", "matmul(x, matmul(y, z)) = matmul(matmul(x, y), z)"),
        Law("matmul-add", "matmul(x, add(y, z)) = add(matmul(x, y), matmul(x, z))"),
        Law(
            "matmul-concat", "concat[-1](matmul(x, y), matmul(x, z)) = matmul(x, concat[-1](y, z))"
        ),
        Law(
            "matmul-sum",
            "matmul(concat[-1](x, z), concat[-2](y, w)) = add(matmul(x, y), matmul(z, w))",
        ),
        Law("matmul-identity", "matmul(x, identity_matrix) = x"),
        Law("split0-concat", "split0[a](concat[a](x, y)) = x"),
        Law("split1-concat", "split1[a](concat[a](x, y)) = y"),
        Law("concat-splits", "concat[a](split0[a](x), split1[a](x)) = x"),
        Law(
            "concat-add", "concat[a](add(x, y), add(z, w)) = add(concat[a](x, z), concat[a](y, w))"
        ),
        Law("concat-relu", "concat[a](relu(x), relu(y)) = relu(concat[a](x, y))"),
        Law("concat-associative", "concat[a](x, concat[a](y, z)) = concat[a](concat[a](x, y), z)"),
        Law(
            "conv-kernels",
            "concat[-3](conv2d[1,s,p,c](x, y), conv2d[1,s,p,c](x, z))"
            " = conv2d[1,s,p,c](x, concat[-4](y, z))",
        ),
        Law(
            "conv-groups",
            "concat[-3](conv2d[g,s,p,c](x, y), conv2d[h,s,p,c](z, w))"
            " = conv2d[g+h,s,p,c](concat[-3](x, z), concat[-4](y, w))",
            where=("dim(y,-4)*h = dim(w,-4)*g",),
        ),
        Law(
            "conv-linear",
            "conv2d[g,s,p,none](x, add(y, z)) = "
            "add(conv2d[g,s,p,none](x, y), conv2d[g,s,p,none](x, z))",
        ),
        Law("conv-enlarge", "conv2d[g,s,same,c](x, y) = conv2d[g,s,same,c](x, enlarge[k](y))"),
        Law("conv-identity", "conv2d[1,1,same,none](x, identity_kernel[k]) = x", ranks=("x=4",)),
        Law(
            "conv-pool",
            "conv2d[depthwise,s,p,none](x, pool_kernel[k]) = avg_pool2d[k,s,p,all](x)",
            ranks=("x=4",),
        ),
    )
}
R2 = dict.fromkeys("xyzw", 2)
R4 = dict.fromkeys("xyzw", 4)


def terms(text: str) -> tuple[Term, ...]:
    return tuple(parse(part) for part in text.split("; "))


def step(law: str, *path: int, back: bool = False, **bindings: object) -> Step:
    given = {n: parse(v) if isinstance(v, str) and "(" in v else v for n, v in bindings.items()}
    return Step(law, not back, path, given)  # type: ignore[arg-type]


def guards(
    source: str, target: str, ranks: dict[str, int], *chains: tuple[Step, ...]
) -> tuple[str, ...]:
    """Return what is missing, after checking that with it the proof holds."""
    one, other = terms(source), terms(target)
    found = missing_guards(one, other, ranks, chains, laws=LAWS)
    replay(one, other, ranks, found, chains, laws=LAWS)
    return found


# Extents


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

    for _ in range(400):
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
    assert proved > 500 and impossible > 20


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


# Typing


def random_term(rng: random.Random, rank: int, depth: int) -> Term:
    """Return a term of a tensor of a rank; ranks fit, extents may not."""
    if depth == 0 or rng.random() < 0.1:
        return Term(rng.choice("xyz") if rank == 2 else rng.choice(("x4", "y4", "k4")))
    one = random_term(rng, rank, depth - 1)
    other = random_term(rng, rank, depth - 1)
    axis = -rng.randint(1, rank)
    if rank == 4:
        kernel = rng.choice(("k4", "l4", "concat[-4](k4, l4)", "enlarge[3x3](k4)", "add(k4, l4)"))
        stride, padding = rng.choice((1, 2)), rng.choice(("same", "valid"))
        groups = rng.choice((1, 2, "depthwise"))
        options = [
            Term("conv2d", (groups, stride, padding, "none"), (one, parse(kernel))),
            Term("avg_pool2d", ("3x3", stride, padding, "all"), (one,)),
            Term("max_pool2d", ("1x3", stride, padding), (one,)),
        ]
    else:
        options = [
            Term("matmul", (), (one, other)),
            Term("transpose", (), (one,)),
            Term("add", (), (one, Term("r", (), ()))),
        ]
    options += [
        Term("add", (), (one, other)),
        Term("concat", (axis,), (one, other)),
        Term("concat", (axis,), (one, other)),
        Term(rng.choice(("split0", "split1")), (axis,), (one,)),
        Term(rng.choice(("softmax", "reduce_sum")), (axis,), (one,)),
        Term("relu", (), (one,)),
    ]
    return rng.choice(options)


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
    for _ in range(1500):
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
                Term(name): plain(
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
                    e for t in term.subterms() for e in (infer(t, types) or plain(())).shape
                }, (term, types)
                refused += 1
    assert both > 800 and refused > 500 and with_trees > 200


def test_typing_of_grouped_and_enlarged_convolutions() -> None:
    types = {
        Term("x"): plain((1, 4, 7, 6)),
        Term("y"): plain((6, 2, 3, 3)),
        Term("z"): plain((4, 1, 3, 1)),
        Term("w"): plain((2, 4, 2, 2)),
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
    types = {Term(name): plain((2, extent)) for name, extent in zip("xyzw", (3, 4, 5, 9))}
    nested = infer(parse("add(concat[-1](x, concat[-1](y, z)), concat[-1](x, w))"), types)
    assert nested is not None and nested.trees[1] == shapes.Tree(None, None, 3)
    assert infer(parse("split0[-1](add(concat[-1](x, y), concat[-1](y, x)))"), types) is None
    found = infer(parse("split1[-2](transpose(concat[-1](x, y)))"), types)
    assert found is not None and found.shape == (4, 2)


# Checking


MERGE = (
    "matmul(x, y); matmul(x, z)",
    "split0[-1](matmul(x, concat[-1](y, z))); split1[-1](matmul(x, concat[-1](y, z)))",
)
MERGE_PROOF = (
    (step("split0-concat", back=True, a=-1, y="matmul(x, z)"), step("matmul-concat", 0)),
    (step("split1-concat", back=True, a=-1, x="matmul(x, y)"), step("matmul-concat", 0)),
)


def test_the_merge_of_two_products_is_checked_at_every_rank() -> None:
    for rank in (2, 3, 4):
        assert guards(*MERGE, dict.fromkeys("xyz", rank), *MERGE_PROOF) == ()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"law": "matmul-associative"},
            "output 0, step 1, matmul-associative at 0: .* no instance",
        ),
        ({"law": "matmul-magic"}, "output 0, step 1, .*no such law"),
        ({"path": (0, 0)}, "output 0, step 1, matmul-concat at 0.0: .* no instance"),
        ({"path": (1,)}, "no such place"),
        ({"forward": False}, "reverse of matmul-concat at 0: .* no instance"),
    ],
)
def test_an_edited_proof_names_its_step(change: dict[str, object], message: str) -> None:
    edited = ((MERGE_PROOF[0][0], replace(MERGE_PROOF[0][1], **change)), MERGE_PROOF[1])  # type: ignore[arg-type]
    with pytest.raises(CheckError, match=message):
        replay(*map(terms, MERGE), R2, (), edited, laws=LAWS)


def test_an_edited_rule_or_guard_fails() -> None:
    swapped = MERGE[1].replace("concat[-1](y, z)", "concat[-1](z, y)")
    with pytest.raises(CheckError, match="output 0: the proof ends in"):
        replay(terms(MERGE[0]), terms(swapped), R2, (), MERGE_PROOF, laws=LAWS)
    with pytest.raises(CheckError, match=r"2 outputs of the source.*1 chains"):
        replay(*map(terms, MERGE), R2, (), MERGE_PROOF[:1], laws=LAWS)
    with pytest.raises(CheckError, match="fit no operands"):
        replay(*map(terms, MERGE), dict.fromkeys("xyz", 1), (), MERGE_PROOF, laws=LAWS)


GROUPED = (
    "concat[-3](conv2d[g,s,p,c](x, y), conv2d[h,s,p,c](z, w))",
    "conv2d[g+h,s,p,c](concat[-3](x, z), concat[-4](y, w))",
)


def test_the_guard_of_grouped_concatenation_is_found() -> None:
    proof = (step("conv-groups"),)
    assert guards(*GROUPED, R4, proof) == ("dim(y,-4)*h = dim(w,-4)*g",)
    with pytest.raises(
        CheckError, match=r"step 0, conv-groups at root: dim\(y,-4\)\*h = .*not follow"
    ):
        replay(*map(terms, GROUPED), R4, (), (proof,), laws=LAWS)
    equal = [side.replace("h,", "g,").replace("+h", "+g") for side in GROUPED]
    assert guards(*equal, R4, (step("conv-groups", h="g", g="g"),)) == (
        "dim(y,-4)*g = dim(w,-4)*g",
    )
    replay(*map(terms, equal), R4, ("dim(y,-4) = dim(w,-4)",), (proof,), laws=LAWS)


def test_split_points_must_survive() -> None:
    """Concatenation is associative, but not below a split: the most recent one differs."""
    source, target = "concat[a](x, concat[a](y, z))", "concat[a](concat[a](x, y), z)"
    assert guards(source, target, R2, (step("concat-associative"),)) == ()
    with pytest.raises(
        CheckError, match=r"concat-associative at 0.0, a = -1: dim\(x,-1\) = .*false"
    ):
        sums = [f"reduce_sum[a](split0[a]({side}))" for side in (source, target)]
        guards(*sums, R2, (step("concat-associative", 0, 0),))


def test_a_chain_through_terms_that_do_not_fit_is_refused() -> None:
    """`x` is the first part of any concatenation that fits, and of no other."""
    there = step("split0-concat", back=True, a=-1, y="transpose(x)")
    assert guards("x", "x", {"x": 2}, (there, step("split0-concat"))) == ("dim(x,-2) = dim(x,-1)",)
    smaller = (step("conv-enlarge", k="1x1"), step("conv-enlarge", back=True))
    source = "conv2d[1,1,same,none](x, enlarge[3x3](y))"
    with pytest.raises(CheckError, match=r"step 0, conv-enlarge at root.*false"):
        guards(source, source, R4, smaller)
    larger = tuple(replace(move, bindings={"k": "5x5"} if move.forward else {}) for move in smaller)
    assert guards(source, source, R4, larger) == ()
    side = "conv2d[1,1,same,none](x, y)"
    assert guards(side, side, R4, larger) == ("5 >= dim(y,-2)", "5 >= dim(y,-1)")


def test_laws_hold_for_the_ranks_they_are_said_for() -> None:
    with pytest.raises(CheckError, match="not said for ranks x=2 y=1"):
        guards("add(x, y)", "add(y, x)", {"x": 2, "y": 1}, (step("add-commutative"),))
    with pytest.raises(CheckError, match="fit no operands"):
        guards(
            "conv2d[1,1,same,none](x, identity_kernel[3x3])",
            "x",
            {"x": 3, "identity_kernel[3x3]": 4},
            (step("conv-identity"),),
        )


def test_a_constant_of_the_proof_alone_takes_the_shape_it_needs() -> None:
    there_and_back = (step("matmul-identity", back=True), step("matmul-identity"))
    assert guards("x", "x", {"x": 2}, there_and_back) == ()
    both = (step("matmul-identity", back=True), step("matmul-identity", 0, back=True))
    nested = "matmul(matmul(x, identity_matrix), identity_matrix)"
    assert guards("x", nested, {"x": 2, "identity_matrix": 2}, both) == ()


def test_extents_that_are_one_by_chance_are_not_broadcast() -> None:
    rule = (terms("add(x, y)"), terms("add(y, x)"), {"x": 2, "y": 2})
    row = {Term("x"): plain((3, 4)), Term("y"): plain((1, 4))}
    same = {Term("x"): plain((1, 4)), Term("y"): plain((1, 4))}
    assert not applies(*rule, (), {}, row) and applies(*rule, (), {}, same)
    assert applies(*rule, ("dim(y,-2) = 1",), {}, row)


def evaluate(term: Term, types: dict[Term, Type], arrays: dict[Term, np.ndarray]) -> np.ndarray:  # type: ignore[type-arg]
    """Return the value of a term of matrices; an oracle of its own."""
    parts = [evaluate(operand, types, arrays) for operand in term.operands]
    axis = term.parameters[0] if term.parameters else 0
    match term.symbol:
        case "add":
            return parts[0] + parts[1]
        case "matmul":
            return parts[0] @ parts[1]
        case "transpose":
            return parts[0].T
        case "relu":
            return np.maximum(parts[0], 0)
        case "concat":
            return np.concatenate(parts, axis)
        case "identity_matrix":
            return np.eye(types[term].shape[0])  # type: ignore[arg-type]
        case "split0" | "split1":
            whole = infer(term.operands[0], types)
            assert whole is not None and whole.trees[axis] is not None
            return np.split(parts[0], [whole.trees[axis].at], axis)[term.symbol == "split1"]
    return arrays[term]


def random_step(rng: random.Random, term: Term, pool: list[Term]) -> tuple[Step, Term] | None:
    """Return a step that applies to a term, typed or not, and what it makes."""
    from soapstone.ir.term import instantiate, match, parameter_variables

    places: list[tuple[int, ...]] = [()]
    for place in places:
        places += [(*place, n) for n in range(len(term.at(place).operands))]
    law, forward, path = rng.choice(list(LAWS.values())), rng.random() < 0.5, rng.choice(places)
    matched, made = law.sides if forward else law.sides[::-1]
    found = match(matched, term.at(path), {})
    if found is None or "conv2d" in law.text:
        return None
    given = {name: rng.choice(pool) for name in variables((made,)) if name not in found}
    given |= {
        name: -rng.randint(1, 2) for name in parameter_variables((made,)) if name not in found
    }
    new = term.replaced(path, instantiate(made, {**found, **given}))
    return Step(law.name, forward, path, given), new


def test_what_is_accepted_computes_the_same() -> None:
    """Random chains of laws: whatever the checker accepts holds in numbers, splits included."""
    rng, numbers = random.Random(4), np.random.default_rng(4)
    accepted = refused = guarded = 0
    while accepted < 250:
        source = term = random_term(rng, 2, rng.randint(1, 3))
        pool = [t for t in term.subterms() if len(str(t)) < 40 and t != Term("r")]
        if any(t.symbol in ("reduce_sum", "softmax", "r") for t in term.subterms()) or not pool:
            continue
        chain: list[Step] = []
        for _ in range(60):
            made = random_step(rng, term, pool)
            if made is not None and len(str(made[1])) < 150:
                chain.append(made[0])
                term = made[1]
            if len(chain) == 4:
                break
        if not chain or term == source:
            continue
        ranks = {str(leaf): 2 for leaf in subterms((source, term)) if not leaf.operands}
        proof = (tuple(chain),)
        try:
            guard = missing_guards((source,), (term,), ranks, proof, laws=LAWS)
        except CheckError:
            refused += 1
            continue
        replay((source,), (term,), ranks, guard, proof, laws=LAWS)
        guarded += bool(guard)
        accepted += 1
        for _, types in sample_types((source,), (term,), ranks, guard, numbers, 4):
            arrays = {leaf: numbers.integers(-4, 5, type_.shape) for leaf, type_ in types.items()}
            one, other = (evaluate(side, types, arrays) for side in (source, term))
            assert one.shape == other.shape and (one == other).all(), (source, term, types)
    assert refused > 50 and guarded > 2


# Lifting and sampling


def lifted(source: str, target: str, types: dict[str, tuple[int, ...]], *chains: tuple[Step, ...]):  # type: ignore[no-untyped-def]
    ranks = {name: len(shape) for name, shape in types.items()}
    found = lift(terms(source), terms(target), chains, ranks, types=types, laws=LAWS)
    replay(found.source, found.target, found.ranks, found.guard, found.proof, laws=LAWS)
    return "; ".join(map(str, found.source)), "; ".join(map(str, found.target)), found.guard


def test_the_merge_of_two_convolutions_is_lifted() -> None:
    one, two = "conv2d[1,1,same,none](x, y)", "conv2d[1,1,same,none](x, z)"
    merged = "conv2d[1,1,same,none](x, concat[-4](y, z))"
    types = {"x": (1, 4, 6, 5), "y": (2, 4, 3, 3), "z": (3, 4, 3, 3)}
    proof = (
        (step("split0-concat", back=True, a=-3, y=two), step("conv-kernels", 0)),
        (step("split1-concat", back=True, a=-3, x=one), step("conv-kernels", 0)),
    )
    source, target, guard = lifted(
        f"{one}; {two}", f"split0[-3]({merged}); split1[-3]({merged})", types, *proof
    )
    assert source == "conv2d[1,s,p,c](x, y); conv2d[1,s,p,c](x, z)"
    merged = "conv2d[1,s,p,c](x, concat[-4](y, z))"
    assert target == f"split0[-3]({merged}); split1[-3]({merged})"
    assert guard == ()


def test_groups_add_up_when_lifted() -> None:
    types = {"x": (1, 4, 6, 5), "y": (3, 4, 3, 3), "z": (1, 4, 6, 5), "w": (3, 4, 3, 3)}
    found = lifted(
        "concat[-3](conv2d[1,1,same,none](x, y), conv2d[1,1,same,none](z, w))",
        "conv2d[2,1,same,none](concat[-3](x, z), concat[-4](y, w))",
        types,
        (step("conv-groups", g=1, h=1),),
    )
    assert found == (*GROUPED, ("dim(y,-4)*h = dim(w,-4)*g",))


def test_kernel_sizes_paddings_and_depthwise_are_lifted() -> None:
    x = (1, 4, 6, 5)
    assert lifted(
        "conv2d[1,1,same,none](x, y)",
        "conv2d[1,1,same,none](x, enlarge[3x3](y))",
        {"x": x, "y": (3, 4, 1, 1)},
        (step("conv-enlarge", k="3x3"),),
    ) == ("conv2d[g,s,same,c](x, y)", "conv2d[g,s,same,c](x, enlarge[k](y))", ())
    assert lifted(
        "avg_pool2d[3x3,1,same,all](x)",
        "conv2d[depthwise,1,same,none](x, pool_kernel[3x3])",
        {"x": x, "pool_kernel[3x3]": (4, 1, 3, 3)},
        (step("conv-pool", back=True),),
    ) == ("avg_pool2d[k,s,p,all](x)", "conv2d[depthwise,s,p,none](x, pool_kernel[k])", ())
    sum_of = "add(conv2d[{0},none](x, y), conv2d[{0},none](x, z))"
    assert lifted(
        "conv2d[depthwise,1,same,none](x, add(y, z))",
        sum_of.format("depthwise,1,same"),
        {"x": x, "y": (4, 1, 3, 3), "z": (4, 1, 3, 3)},
        (step("conv-linear"),),
    ) == ("conv2d[g,s,p,none](x, add(y, z))", sum_of.format("g,s,p"), ())


def test_an_axis_stays_where_others_need_a_guard() -> None:
    types = {"x": (2, 3), "y": (2, 4), "z": (2, 5)}
    source, _, guard = lifted(
        "concat[-1](x, concat[-1](y, z))",
        "concat[-1](concat[-1](x, y), z)",
        types,
        (step("concat-associative"),),
    )
    assert (source, guard) == ("concat[a](x, concat[a](y, z))", ())
    axis_bound = lifted(
        "x",
        "x",
        {"x": (3, 3)},
        (step("split0-concat", back=True, a=-1, y="transpose(x)"), step("split0-concat")),
    )
    assert axis_bound == ("x", "x", ("dim(x,-2) = dim(x,-1)",))


def test_variables_come_apart_where_the_proof_allows() -> None:
    found = lifted(
        "add(add(x, x), x)", "add(x, add(x, x))", {"x": (2, 3)}, (step("add-commutative"),)
    )
    assert found == ("add(add(x, y), z)", "add(z, add(x, y))", ())
    shared = (step("split0-concat", back=True, a=-1, y="relu(x)"),)
    source, target, _ = lifted(
        "add(x, x)", "split0[-1](concat[-1](add(x, x), relu(x)))", {"x": (2, 3)}, shared
    )
    assert set(variables(terms(target))) <= set(variables(terms(source)))


def test_broadcast_operands_are_said_in_the_guard() -> None:
    types = {"x": (2, 3), "y": (1, 3), "z": (2, 4), "w": (1, 4)}
    source, _, guard = lifted(
        "concat[-1](add(x, y), add(z, w))",
        "add(concat[-1](x, z), concat[-1](y, w))",
        types,
        (step("concat-add"),),
    )
    assert guard == ("dim(y,-2) = 1", "dim(w,-2) = 1") and source.startswith("concat[a]")


def test_samples_fit_and_vary() -> None:
    source, target = map(terms, GROUPED)
    guard = ("dim(y,-4)*h = dim(w,-4)*g",)
    drawn = list(sample_types(source, target, R4, guard, np.random.default_rng(0), 60))
    assert len(drawn) == 60
    unequal = 0
    for values, types in drawn:
        one, other = (
            infer(with_parameters(term, values), types) for term in (source[0], target[0])
        )
        assert one is not None and other is not None and one.shape == other.shape
        y, w = types[Term("y")].shape[0], types[Term("w")].shape[0]
        assert y * values["h"] == w * values["g"]
        assert applies(source, target, R4, guard, values, types)
        unequal += values["g"] != values["h"] and y != w
    assert unequal > 10
    for name, wanted in {"s": {1, 2}, "p": {"same", "valid"}, "c": {"none", "relu"}}.items():
        assert {values[name] for values, _ in drawn} == wanted
    assert not list(
        sample_types(
            terms("matmul(x, y)"), terms("x"), {"x": 2, "y": 3}, (), np.random.default_rng(0), 3
        )
    )


def test_polynomials_are_values() -> None:
    a, b = atom("a"), atom("b")
    one, other = (a + b) * (a + b), a * a + 2 * (a * b) + b * b
    assert one == other and hash(one) == hash(other) and str(one) == "a*a + 2*a*b + b*b"
    assert isinstance(one, Poly) and one - other == 0
