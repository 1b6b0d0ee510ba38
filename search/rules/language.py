"""The symbols, constants and laws that the operators declare, checked and by name.

Everything that rules and proofs speak of is said in `ir/ops/` (`OpSpec.forms`, `constants`,
`laws`); this module only collects it, and refuses declarations that do not fit together.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType

from soapstone.ir.errors import GraphError
from soapstone.ir.law import Constant, Form, Law
from soapstone.ir.spec import OpSpec, operators
from soapstone.ir.term import Term, Value, is_variable, subterms
from soapstone.search.rules import condition


@dataclass(frozen=True)
class Declared:
    """A symbol's form, and the operator that declares it."""

    spec: OpSpec
    form: Form


@dataclass(frozen=True)
class Language:
    """Symbols, constants and laws, each by name, in order."""

    forms: Mapping[str, Declared]
    constants: Mapping[str, Constant]
    laws: Mapping[str, Law]


def language(specs: Iterable[OpSpec]) -> Language:
    """Return what these operators declare.

    Raises:
        GraphError: a name is declared twice, or a law is no equation of declared symbols with the
            parameters and operands they have; names the operator and the law.
    """
    specs = tuple(specs)
    forms: dict[str, Declared] = {}
    constants: dict[str, Constant] = {}
    laws: dict[str, tuple[OpSpec, Law]] = {}
    for spec in specs:
        for form in spec.forms:
            _once(spec, f"symbol {form.symbol!r}", form.symbol in forms)
            forms[form.symbol] = Declared(spec, form)
        for constant in spec.constants:
            name = constant.symbol
            _once(spec, f"symbol {name!r}", name in forms or name in constants)
            constants[name] = constant
        for law in spec.laws:
            _once(spec, f"law {law.name!r}", law.name in laws)
            laws[law.name] = spec, law
    said: dict[tuple[tuple[Term, Term], tuple[str, ...]], str] = {}
    for name, (spec, law) in laws.items():
        try:
            _check(law, forms, constants)
            other = said.setdefault((law.sides, law.where), name)
            if other != name:
                raise GraphError(f"law {other!r} says the same")
        except GraphError as error:
            raise GraphError(f"operator {spec.name!r}, law {name!r}: {error}") from None
    return Language(
        MappingProxyType(dict(sorted(forms.items()))),
        MappingProxyType(dict(sorted(constants.items()))),
        MappingProxyType({name: laws[name][1] for name in sorted(laws)}),
    )


def _once(spec: OpSpec, what: str, known: bool) -> None:
    if known:
        raise GraphError(f"operator {spec.name!r}: {what} is declared twice")


def _check(law: Law, forms: Mapping[str, Declared], constants: Mapping[str, Constant]) -> None:
    """Check that a law is an equation of the language.

    Raises:
        GraphError: it is none; says what was found and what was needed.
    """
    if law.text.count(" = ") != 1:
        raise GraphError(f"{law.text!r} found, `left = right` needed")
    for term in subterms(law.sides):
        _check_term(term, forms, constants)
    for text in law.where:
        _check_condition(text, law, forms, constants)
    names = {term.symbol for term in subterms(law.sides) if not term.operands}
    free = {name for name in names if is_variable(name)}
    for text in law.ranks:
        given = dict(part.split("=", 1) for part in text.split() if "=" in part)
        ranked = {name for name in names if name in constants and constants[name].rank is None}
        if set(given) != free | ranked or not all(rank.isdigit() for rank in given.values()):
            needed = ", ".join(sorted(free | ranked))
            raise GraphError(f"ranks {text!r} found, a number for each of {needed} needed")


def _check_condition(
    text: str, law: Law, forms: Mapping[str, Declared], constants: Mapping[str, Constant]
) -> None:
    """Check that a condition can be read, with a value of each parameter."""
    values: dict[str, Value] = {}
    for term in subterms(law.sides):
        symbol = term.symbol
        declared = forms[symbol].form.parameters if symbol in forms else {}
        if symbol in constants:
            declared = constants[symbol].parameters
        for given, choices in zip(term.parameters, declared.values()):
            values.update((word, choices[0]) for word in str(given).split("+") if is_variable(word))

    def extent(term: Term, axis: int) -> int:
        if term not in subterms(law.sides):
            raise GraphError(f"condition {text!r}: {term} found, a term of the law needed")
        return 1

    def parameter(name: str) -> Value:
        if is_variable(name) and name not in values:
            raise GraphError(f"condition {text!r}: {name!r} is no parameter of the law")
        return values.get(name, name)

    try:
        condition.read(text, extent, parameter)
    except condition.IllTyped as error:
        raise GraphError(f"condition {text!r}: {error}") from None


def _check_term(
    term: Term, forms: Mapping[str, Declared], constants: Mapping[str, Constant]
) -> None:
    if term.is_variable:
        return
    if term.symbol in forms:
        form = forms[term.symbol].form
        parameters, operands = form.parameters, form.operands
    elif term.symbol in constants:
        parameters, operands = constants[term.symbol].parameters, 0
    else:
        raise GraphError(f"symbol {term.symbol!r} is not declared")
    if len(term.operands) != operands:
        raise GraphError(f"{term}: {len(term.operands)} operands found, {operands} needed")
    if len(term.parameters) != len(parameters):
        found, needed = len(term.parameters), ", ".join(parameters) or "none"
        raise GraphError(f"{term}: {found} parameters found, {len(parameters)} needed ({needed})")
    for value, (name, values) in zip(term.parameters, parameters.items()):
        if not _may_be(value, values):
            needed = ", ".join(map(str, values))
            raise GraphError(
                f"{term}: parameter {name} is {value!r}; a variable or {needed} needed"
            )


def _may_be(value: Value, values: tuple[Value, ...]) -> bool:
    """Return whether a value is a variable, one of those declared, or of their kind."""
    if is_variable(value) or value in values:
        return True
    if isinstance(value, int):
        numbers = [known for known in values if isinstance(known, int)]
        return any((known < 0) == (value < 0) for known in numbers)
    if "+" in value:
        words = value.split("+")
        return any(isinstance(known, int) for known in values) and all(map(is_variable, words))
    return "x" in value and any("x" in known for known in values if isinstance(known, str))


@lru_cache(maxsize=1)
def _declared() -> Language:
    return language(operators())


def forms() -> Mapping[str, Declared]:
    """Return the symbols of the operators, by name."""
    return _declared().forms


def constants() -> Mapping[str, Constant]:
    """Return the constants, by name."""
    return _declared().constants


# What a parameter is, by the letter that forms and constants declare it under; the letters that
# rules give to such a variable. Variables of kind `axis` are enumerated, never symbolic.
LETTERS = {
    "axis": "ab",
    "group": "gh",
    "size": "kl",
    "padding": "pq",
    "stride": "s",
    "divisor": "n",
    "activation": "c",
}
_KINDS = {letters[0]: kind for kind, letters in LETTERS.items()}


@lru_cache(maxsize=256)
def kinds(symbol: str) -> tuple[str, ...]:
    """Return what each parameter of a symbol is: `axis`, `group`, `stride`, ..., or its name."""
    declared, constant = forms().get(symbol), constants().get(symbol)
    names = declared.form.parameters if declared else constant.parameters if constant else ()
    return tuple(_KINDS.get(name, name) for name in names)


def laws() -> tuple[Law, ...]:
    """Return all laws, in order of their names."""
    return tuple(_declared().laws.values())


def laws_by_name() -> Mapping[str, Law]:
    """Return all laws, by name."""
    return _declared().laws


@lru_cache(maxsize=1024)
def said_ranks(law: Law) -> tuple[dict[str, int], ...]:
    """Return the ranks of variables, and of constants of any rank, for which a law is said."""
    rows = (dict(item.split("=") for item in text.split()) for text in law.ranks)
    return tuple({name: int(rank) for name, rank in row.items()} for row in rows)


@lru_cache(maxsize=1)
def commutative() -> frozenset[str]:
    """Return the symbols whose two operands may be exchanged, whatever they are."""
    found = set()
    for law in laws():
        left, right = law.sides
        exchanged = Term(left.symbol, left.parameters, left.operands[::-1])
        distinct = len(set(left.operands)) == len(left.operands) == 2
        if distinct and exchanged == right and _general(law) and not law.where:
            found.add(left.symbol)
    return frozenset(found)


def _general(law: Law) -> bool:
    """Return whether a law f(x, y) = f(y, x) is said of more than scalars."""
    operands = law.sides[0].operands
    scalars = law.ranks and not any(any(row.values()) for row in said_ranks(law))
    return all(term.is_variable for term in operands) and not scalars
