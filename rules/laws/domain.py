"""Over which numbers laws hold, and rules by their proofs: not only over the real ones.

Validation (`validate.py`) shows a law over the reals, wherever both sides are defined. Tensors are
also of integers, whose sums wrap around and whose quotients are truncated, and of booleans; and
where an element is 0, a quotient is infinite or NaN. Nobody declares which laws hold there: each is
computed by the operators' own references on such numbers, and a domain is left out where the sides
differ. A rule holds over what all steps of its proof hold over.

=============== ==================================================================================
word            says
=============== ==================================================================================
`integers`      both sides are equal on integers of any width, signed or not
`booleans`      both sides are equal on booleans
`zeros ->`      of finite numbers, 0 among them: where the left side is no NaN, the right is equal
`infinities ->` the same of any numbers, infinities and NaN among them
`zeros <-`, `infinities <-`: the same from right to left
=============== ==================================================================================
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import TypeAlias

import numpy as np

from soapstone.ir.errors import GraphError
from soapstone.ir.law import Law
from soapstone.ir.tensor import Array, TensorSpec
from soapstone.ir.term import Term, subterms
from soapstone.rules.algebra.evaluate import Plan, compare
from soapstone.rules.laws.sizes import parameter_values, rank_choices, sizes
from soapstone.rules.proving.prove import Instance, replay
from soapstone.search.rules import language
from soapstone.search.rules.infer import Ranks, Terms, at_parameters
from soapstone.search.rules.proof import Proof, equation
from soapstone.search.rules.sample import sample_types
from soapstone.search.rules.shapes import Type, extents

Draw: TypeAlias = "Callable[[tuple[int, ...], np.random.Generator], Array]"

EXACT = ("integers", "booleans")
WAYS = ("->", "<-")
_FINITE = np.array([0, 0, 0, 1, -1, 2, -2, 4, 0.5, -0.5])  # of which quotients are exact
_INFINITE = np.array([np.inf, -np.inf, np.nan])
_FLOATS = ("zeros", "infinities")
WORDS = (*EXACT, *(f"{word} {way}" for word in _FLOATS for way in WAYS))
RING = frozenset(
    ("add", "sub", "mul", "smul", "matmul", "reduce_sum", "concat", "transpose", "merge", "enlarge")
)
DTYPES = {"integers": ("int8", "uint8", "int64"), "booleans": ("bool",)}
_SAMPLES, _DRAWS, _EXACT_DRAWS = 16, 10, 4  # of sizes, and of numbers at each
_EXTENT = 3  # the largest of sizes that are not drawn but listed
_ROUNDING = 1e-9
_LARGEST = 100.0  # of real numbers: quotients and products of their exponentials are finite too


@dataclass(frozen=True)
class Sample:
    """An equation of graphs at some parameters and sizes, ready to be computed."""

    sides: tuple[Terms, Terms]
    types: Mapping[Term, Type]  # of the variables and constants
    plan: Plan

    @classmethod
    def of(cls, source: Terms, target: Terms, types: Mapping[Term, Type]) -> Sample:
        """Return two graphs at some types of their leaves."""
        plan = Plan.of((*source, *target), types)
        if plan is None:
            text = "; ".join(map(str, (*source, *target)))
            raise GraphError(f"{text} fits no operands of types {dict(types)}")
        return cls((source, target), types, plan)

    def shape(self, leaf: Term) -> tuple[int, ...]:
        """Return the shape of a variable or constant."""
        return extents(self.types[leaf])

    def run(self, draw: Draw, dtype: str = "float64") -> Iterator[tuple[Array, Array]]:
        """Yield each pair of outputs that should be equal, for several draws of the variables."""
        for seed in range(_DRAWS if dtype == "float64" else _EXACT_DRAWS):
            rng = np.random.default_rng(seed)
            leaves = (term for term, array in self.plan.leaves if array is None)
            results = self.plan.run({term: draw(self.shape(term), rng) for term in leaves}, dtype)
            half = len(results) // 2
            yield from zip(results[:half], results[half:])


def ordered(words: Iterable[str]) -> tuple[str, ...]:
    """Return words of domains in the order in which they are said."""
    known = set(words)
    return tuple(word for word in WORDS if word in known)


def turned(words: Iterable[str]) -> frozenset[str]:
    """Return the domain of an equation whose sides are exchanged."""
    other = {"->": "<-", "<-": "->"}
    return frozenset(word[:-2] + other.get(word[-2:], word[-2:]) for word in words)


@lru_cache(maxsize=1 << 12)
def of_law(law: Law) -> frozenset[str]:
    """Return the domain of a law: the numbers on which its sides were not found to differ."""
    samples = samples_of(law)
    total = all(_total(_alone(term)) for term in subterms(law.sides) if term.operands)
    # Of total operators both sides are finite, and equal, as the law is valid over the reals.
    given = {word for word in WORDS if total and word.startswith("zeros")}
    asked = [word for word in WORDS if samples and word not in given]
    return frozenset(given | {w for w in asked if all(_holds(sample, w) for sample in samples)})


def samples_of(law: Law) -> tuple[Sample, ...]:
    """Return a law at some parameters and sizes; none where its sides are never typed alike."""
    left, right = law.sides
    found = tuple(_samples((left,), (right,), list(rank_choices(law)), law.where))
    return found or tuple(_listed(law))


def differing(law: Law) -> str | None:
    """Return where a law is false of numbers, None if that was not found.

    Real numbers decide most; where sides are sums and products only, so do integers that wrap
    around, without rounding: what is true of all polynomials is true in their ring.
    """
    for sample in samples_of(law):
        found = compare(*sample.sides, sample.types, thorough=True, largest=_LARGEST)
        if found is not None:
            return f"{'; '.join(map(str, sample.sides[0]))}: {found}"
    symbols = {term.symbol for term in subterms(law.sides) if term.operands}
    if symbols <= RING and "integers" not in of_law(law):
        return "its sides differ on integers"
    return None


def refuted(
    source: Terms, target: Terms, typings: Sequence[Ranks], guard: Sequence[str], word: str
) -> bool:
    """Return whether two graphs were found to differ on numbers of a domain that they take."""
    ranks = [{Term(name): rank for name, rank in typing.items()} for typing in typings]
    taken = (each for each in _samples(source, target, ranks, guard) if _takes(each, word))
    return not all(_holds(sample, word) for sample in taken)


def of_proof(
    source: Terms, proof: Proof, known: Mapping[str, frozenset[str]] | None = None
) -> tuple[str, ...]:
    """Return the domain of a rule: that of every step of its proof.

    A step whose law is used on what operators make finite of finite numbers sees finite numbers;
    on a quotient or a root, its law must keep infinities too.

    Args:
        known: the domains of laws by name, where they are known already.

    Raises:
        ValueError: a step of the proof does not apply.
    """
    found = set(WORDS)
    for term, chain in zip(source, proof, strict=True):
        for step, instance in zip(chain, replay(term, chain)):
            words = of_law(instance.law) if known is None else known[step.law]
            if not step.forward:
                words = turned(words)
            if not _sees_finite(instance):
                words -= {f"zeros {way}" for way in WAYS if f"infinities {way}" not in words}
            found &= words
    return ordered(found)


def _sees_finite(instance: Instance) -> bool:
    """Return whether what a law's variables stand for is made of finite numbers only."""
    bound = [value for value in instance.bindings.values() if isinstance(value, Term)]
    return all(_total(_alone(term)) for term in subterms(bound) if term.operands)


def _alone(term: Term) -> Term:
    """Return an operator on variables, and on the constants that it has: `div(x0, ones)`."""
    names = (Term(f"x{number}") for number in range(len(term.operands)))
    constants = language.constants()
    operands = (
        each if each.symbol in constants else name for name, each in zip(names, term.operands)
    )
    form = language.forms()[term.symbol].form
    return Term(term.symbol, tuple(form.parameters), tuple(operands))


@lru_cache(maxsize=1 << 10)
def _total(term: Term) -> bool:
    """Return whether an operator makes finite numbers of finite ones, zeros among them."""
    leaves = term.operands
    every = [dict(zip(leaves, ranks)) for ranks in itertools.product(range(5), repeat=len(leaves))]
    samples = list(_samples((term,), (term,), every, ()))
    draw = partial(_drawn, "zeros")
    return bool(samples) and all(
        np.isfinite(made).all() for s in samples for made, _ in s.run(draw)
    )


def _samples(
    source: Terms, target: Terms, typings: Sequence[Mapping[Term, int]], where: Sequence[str]
) -> Iterator[Sample]:
    """Yield an equation of graphs at some parameters and sizes, of many of its ranks."""
    rng = np.random.default_rng(zlib.crc32(equation(source, target).encode()))
    each = max(2, -(-_SAMPLES // len(typings)))
    count = 0
    for at in rng.permutation(len(typings)):
        ranks = {str(leaf): rank for leaf, rank in typings[at].items()}
        for values, types in sample_types(source, target, ranks, where, rng, each):
            count += 1
            yield Sample.of(at_parameters(source, values), at_parameters(target, values), types)
        if count >= _SAMPLES:
            return


def _listed(law: Law) -> Iterator[Sample]:
    """Yield a law at some of all small sizes: its operands must have been concatenated."""
    for bindings, row in itertools.product(parameter_values(law), rank_choices(law)):
        found = sizes(law, bindings, row, _EXTENT)
        if found is not None and len(found):
            for at in range(0, len(found), -(-len(found) // _SAMPLES)):
                left, right = found.sides
                yield Sample.of((left,), (right,), found.at(at))


def _holds(sample: Sample, word: str) -> bool:
    """Return whether an equation was not found to differ on the numbers of a domain."""
    if word in EXACT:
        return _takes(sample, word) and all(
            np.array_equal(one, other)
            for dtype in DTYPES[word]
            for one, other in sample.run(partial(_exact, dtype), dtype)
        )
    numbers, way = word.split()
    pairs = sample.run(partial(_drawn, numbers))
    return all(_kept(*(pair if way == "->" else pair[::-1])) for pair in pairs)


def _takes(sample: Sample, word: str) -> bool:
    """Return whether every operator takes tensors of the numbers of a domain, and makes such."""
    for dtype in DTYPES.get(word, ()):
        specs = [TensorSpec(sample.shape(term), dtype) for term, _ in sample.plan.leaves]
        for spec, attributes, output, numbers in sample.plan.steps:
            try:
                made = spec.bind([specs[at] for at in numbers], attributes).output_specs[output]
            except GraphError:
                return False
            specs.append(made)
        if any(spec.dtype != dtype for spec in specs):
            return False
    return True


def _exact(dtype: str, shape: tuple[int, ...], rng: np.random.Generator) -> Array:
    """Return random integers or booleans: small, extreme or any."""
    if dtype == "bool":
        return rng.integers(0, 2, shape).astype(bool)
    info = np.iinfo(dtype)
    small = rng.integers(max(-4, info.min), 5, shape)
    extreme = rng.choice(np.array([info.min, info.min + 1, info.max, info.max - 1]), shape)
    wide = rng.integers(info.min, info.max, shape, endpoint=True)
    return np.choose(rng.integers(0, 3, shape), [small, extreme, wide]).astype(dtype)


def _drawn(word: str, shape: tuple[int, ...], rng: np.random.Generator) -> Array:
    """Return random floating-point numbers of a domain: no, few, many or only infinite ones."""
    finite = rng.choice(_FINITE, shape)
    if word == "zeros":
        return np.asarray(finite)
    share = rng.choice([0, 0.1, 0.5, 1])
    return np.where(rng.random(shape) < share, rng.choice(_INFINITE, shape), finite)


def _kept(left: Array, right: Array) -> bool:
    """Return whether the right side has every number of the left; where this is NaN, it has any."""
    with np.errstate(invalid="ignore"):
        near = np.abs(left - right) <= _ROUNDING * np.maximum(np.abs(left), 1.0)
    finite = np.isfinite(left) & np.isfinite(right)
    return bool(((left == right) | (near & finite) | np.isnan(left)).all())
