"""The checker of proofs: right ones replay, wrong ones name the step, and guards are found."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
from helpers.rules_proofs import GROUPED, LAWS, R2, R4, guards, random_term, step, terms

from soapstone.ir.term import Term, instantiate, match, parameter_variables, subterms, variables
from soapstone.rules.proving.check import CheckError, missing_guards, replay
from soapstone.search.rules.proof import Step
from soapstone.search.rules.sample import sample_types
from soapstone.search.rules.shapes import Type, infer

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
    places: list[tuple[int, ...]] = [()]
    for place in places:
        places += [(*place, n) for n in range(len(term.at(place).operands))]
    law, forward, path = rng.choice(list(LAWS.values())), rng.random() < 0.5, rng.choice(places)
    matched, made = law.sides if forward else law.sides[::-1]
    found = match(matched, term.at(path), {})
    if found is None or "conv2d" in law.text or "reduce" in law.text:
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
    accepted = refused = 0
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
        accepted += 1
        for _, types in sample_types((source,), (term,), ranks, guard, numbers, 4):
            arrays = {leaf: numbers.integers(-4, 5, type_.shape) for leaf, type_ in types.items()}
            one, other = (evaluate(side, types, arrays) for side in (source, term))
            assert one.shape == other.shape and (one == other).all(), (source, term, types)
    assert refused > 50


def test_a_guard_that_allows_broadcasting_says_enough() -> None:
    """Once `x` is known to have one column, `y` may have several, which the proof forbids."""
    source, target = "reduce_sum[-1](add(x, y))", "add(reduce_sum[-1](x), reduce_sum[-1](y))"
    chain = (
        step("sum-of-one"),
        step("sum-of-one", 0, back=True, a=-1),
        step("sum-of-one", 1, back=True, a=-1),
    )
    assert guards(source, target, R2, chain) == ("dim(x,-1) = 1", "dim(y,-1) = 1")
