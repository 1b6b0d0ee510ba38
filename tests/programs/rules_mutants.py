"""Laws changed in one place: operands exchanged, another operator, axis, word, a condition less.

`python tests/programs/rules_mutants.py [--count N]` changes all laws (or N of the mutants, evenly)
and says what becomes of them: refuted by numbers alone, refuted by validation, equal after all, or
said of no operands.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

from soapstone.ir.errors import GraphError
from soapstone.ir.law import Law
from soapstone.ir.term import Term, is_variable, subterms
from soapstone.rules.laws.domain import differing
from soapstone.rules.laws.validate import validate
from soapstone.search.rules import language
from soapstone.search.rules.language import kinds

OTHER = {
    **dict.fromkeys(("add", "sub", "mul", "div"), ("add", "sub", "mul", "div")),
    **dict.fromkeys(("exp", "sqrt", "rsqrt", "sigmoid", "tanh", "relu"), ("exp", "sqrt", "relu")),
    **dict.fromkeys(("reduce_sum", "reduce_mean", "softmax"), ("reduce_sum", "reduce_mean")),
    **dict.fromkeys(("split0", "split1"), ("split0", "split1")),
}
WORDS = (("same", "valid"), ("none", "relu"), ("all", "inside"), (-1, -2), (-3, -4), (1, 2))


def places(term: Term, path: tuple[int, ...] = ()) -> Iterator[tuple[tuple[int, ...], Term]]:
    yield path, term
    for position, operand in enumerate(term.operands):
        yield from places(operand, (*path, position))


def changed(term: Term) -> Iterator[tuple[str, Term]]:
    """Yield a term with its topmost operator changed, and how."""
    symmetric = term.symbol in language.commutative()
    if len(term.operands) == 2 and term.operands[0] != term.operands[1] and not symmetric:
        yield "operands", replace(term, operands=term.operands[::-1])
    for symbol in OTHER.get(term.symbol, ()):
        if symbol != term.symbol and term.operands:
            yield "operator", replace(term, symbol=symbol)
    for position, value in enumerate(term.parameters):
        for pair in WORDS:
            if value in pair:
                other = pair[1 - pair.index(value)]
                now = (*term.parameters[:position], other, *term.parameters[position + 1 :])
                yield "word", replace(term, parameters=now)
        if is_variable(value) and kinds(term.symbol)[position] == "axis":
            now = (*term.parameters[:position], -1, *term.parameters[position + 1 :])
            yield "axis", replace(term, parameters=now)


def mutants(law: Law) -> Iterator[tuple[str, Law]]:
    """Yield the law with one change, where that is a law of the language at all."""
    for position in range(len(law.where)):
        yield "condition", replace(law, where=law.where[:position] + law.where[position + 1 :])
    for side in (0, 1):
        for path, term in places(law.sides[side]):
            for kind, other in changed(term) if term.operands else ():
                sides = list(law.sides)
                sides[side] = sides[side].replaced(path, other)
                if sides[0] == sides[1] or sides == [*law.sides][::-1]:
                    continue
                one = replace(law, text=f"{sides[0]} = {sides[1]}")
                if {t for t in subterms(one.sides) if not t.operands} != {
                    t for t in subterms(law.sides) if not t.operands
                }:
                    continue
                yield kind, one


def fate(law: Law) -> str:
    """Return what becomes of a law."""
    try:
        if differing(law) is not None:
            return "refuted by numbers"
        found = validate(law, limit=3)
    except GraphError as error:
        return f"no law: {type(error).__name__}"
    if found.holds:
        return "equal"
    return "refuted by validation" if found.obligations else "of no operands"


def every() -> list[tuple[str, Law]]:
    """Return all mutants of all laws, each once."""
    found: dict[tuple[str, tuple[str, ...]], tuple[str, Law]] = {}
    known = {(law.text, law.where) for law in language.laws()}
    for law in language.laws():
        for kind, mutant in mutants(law):
            if (mutant.text, mutant.where) not in known:
                found.setdefault((mutant.text, mutant.where), (kind, mutant))
    return list(found.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=None)
    parser.add_argument("--show", default=None, help="Print the laws of this fate.")
    arguments = parser.parse_args()
    all_of_them = every()
    step = max(1, len(all_of_them) // (arguments.count or len(all_of_them)))
    counts: Counter[tuple[str, str]] = Counter()
    for kind, mutant in all_of_them[::step]:
        became = fate(mutant)
        counts[kind, became] += 1
        if arguments.show and became.startswith(arguments.show):
            print(kind, mutant.name, mutant, mutant.ranks)
    totals: Counter[str] = Counter()
    for (kind, became), count in sorted(counts.items()):
        totals[became] += count
        print(f"{kind:<10} {became:<24} {count:>6}")
    print(f"{len(all_of_them[::step])} mutants: {dict(totals)}")


if __name__ == "__main__":
    main()
