"""Every law holds on random tensors: unequal, grouped, strided, broadcast, split."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping

import pytest
from helpers.rules_wrong import WRONG, law

from soapstone.ir.law import Law
from soapstone.ir.term import Term, Value, instantiate, is_variable, subterms
from soapstone.rules.algebra.evaluate import compare, constant
from soapstone.search.rules import condition, language
from soapstone.search.rules.shapes import Tree, Type, extents, infer, tensor_type


def law_parameters(law: Law) -> dict[str, tuple[Value, ...]]:
    """Return the values of each parameter variable: those that all its places allow."""
    found: dict[str, tuple[Value, ...]] = {}
    for term in subterms(law.sides):
        declared: Mapping[str, tuple[Value, ...]] = {}
        if term.symbol in language.forms():
            declared = language.forms()[term.symbol].form.parameters
        elif term.symbol in language.constants():
            declared = language.constants()[term.symbol].parameters
        for value, choices in zip(term.parameters, declared.values()):
            words = str(value).split("+")
            numbers = tuple(c for c in choices if isinstance(c, int) or len(words) == 1)
            for word in filter(is_variable, words):
                found[word] = tuple(c for c in found.get(word, numbers) if c in numbers)
    return found


def extents_of_axes(rng: random.Random) -> list[list[int]]:
    """Return the extents to choose from at each of four axes: mostly one, so that operands fit."""
    axes = []
    for _ in range(4):
        extent = rng.randint(1, 4)
        others = rng.choice(([2 * extent], [3 * extent], [1], [rng.randint(1, 6) for _ in "ab"]))
        axes.append([extent, *others] if rng.random() < 0.4 else [extent])
    return axes


def random_shape(
    term: Term, rank: int, axes: list[list[int]], rng: random.Random
) -> tuple[int, ...]:
    shape = [rng.choice(extents) for extents in axes[4 - rank :]]
    if term.symbol.endswith("_kernel"):
        shape[2:] = [int(extent) for extent in str(term.parameters[0]).split("x")]
    if term.symbol == "pool_kernel":
        shape[1] = 1
    if term.symbol.startswith("identity"):
        shape[1] = shape[0]
    return tuple(shape)


def random_type(shape: tuple[int, ...], rng: random.Random) -> Type:
    trees = [
        Tree(None, None, rng.randint(1, extent - 1)) if extent > 1 and rng.random() < 0.4 else None
        for extent in shape
    ]
    return Type(shape, tuple(trees))


Instance = tuple[Term, Term, dict[Term, Type], Type, Type]


def instances(law: Law, count: int, tries: int, rng: random.Random) -> Iterator[Instance]:
    """Yield instances of a law that are typed, of one shape, and where its conditions hold."""
    parameters = law_parameters(law)
    leaves = [term for term in subterms(law.sides) if not term.operands]
    for _ in range(tries):
        chosen = {name: rng.choice(values) for name, values in parameters.items()}
        same = rng.randint(1, 4)
        ranks = dict(p.split("=") for p in rng.choice(law.ranks or ("",)).split())
        axes = extents_of_axes(rng)
        bindings: dict[str, Term | Value] = {**chosen}
        types = {}
        for leaf in leaves:
            fixed = language.constants()[leaf.symbol].rank if not leaf.is_variable else None
            term = leaf if leaf.is_variable else instantiate(leaf, bindings)
            rank = fixed or int(ranks.get(leaf.symbol, same))
            shape = random_shape(term, rank, axes, rng)
            types[term] = random_type(shape, rng) if leaf.is_variable else tensor_type(shape)
            bindings[leaf.symbol] = term
        left, right = (instantiate(side, bindings) for side in law.sides)
        found = infer(left, types), infer(right, types)
        if found[0] is None or found[1] is None or found[0].shape != found[1].shape:
            continue
        if all(
            constant(t, extents(s)) is not None for t, s in types.items() if not t.is_variable
        ) and (conditions_hold(law, bindings, chosen, types)):
            yield left, right, types, found[0], found[1]
            count -= 1
            if not count:
                return


def conditions_hold(
    law: Law,
    bindings: Mapping[str, Term | Value],
    chosen: Mapping[str, Value],
    types: Mapping[Term, Type],
) -> bool:
    def extent(term: Term, axis: int) -> int:
        type_ = infer(instantiate(term, bindings), types)
        if type_ is None or not -type_.rank <= axis < 0:
            raise condition.IllTyped("no such axis")
        return extents(type_)[axis]

    try:
        return all(
            condition.holds(each)
            for text in law.where
            for each in condition.read(text, extent, lambda name: chosen.get(name, name))
        )
    except condition.IllTyped:
        return False


def agree(left: Tree | None, right: Tree | None) -> bool:
    """Return whether two split trees part an axis alike, as far as both know."""
    if left is None or right is None:
        return True
    return left.at == right.at and agree(left.left, right.left) and agree(left.right, right.right)


@pytest.mark.parametrize("law", language.laws(), ids=lambda law: law.name)
def test_laws_hold(law: Law) -> None:
    """On unequal, grouped, strided, broadcast tensors; and both sides split alike."""
    rng = random.Random(law.name)
    tested = 0
    for left, right, types, *both in instances(law, 6, 8000, rng):
        tested += 1
        assert compare([left], [right], types, seed=tested) is None, (left, right, types)
        assert all(map(agree, both[0].trees, both[1].trees)), (left, right, types)
    assert tested >= 2


UNEQUAL_HISTORIES = {  # equal as numbers, where a split of them differs; or never of one shape
    "concat-associative": law("concat[a](concat[a](x, y), z) = concat[a](x, concat[a](y, z))"),
    "oblong-windows": law("transpose(max_pool2d[k,s,p](x)) = max_pool2d[k,s,p](transpose(x))"),
}


# Their sides are never of one shape: validation says so, and there are no numbers to compare.
UNTYPED = {"concat-is-associative-across-axes", "enlarge-under-valid"}


@pytest.mark.parametrize(
    "name", [name for name in WRONG | UNEQUAL_HISTORIES if name not in UNTYPED]
)
def test_wrong_laws_are_refuted(name: str) -> None:
    """The sampler is strong enough to find what is wrong with the traps."""
    law = (WRONG | UNEQUAL_HISTORIES)[name]
    rng = random.Random(name)
    found = (
        compare([left], [right], types) is not None
        or not all(map(agree, *(each.trees for each in both)))
        for left, right, types, *both in instances(law, 400, 20000, rng)
    )
    assert any(found)
