"""Terms: the language in which laws and rules of operators are written.

`concat[-1](matmul(x, y), matmul(x, z))` is a tree of symbols with parameters in brackets. A single
letter, possibly followed by digits, is a variable (of a tensor, or among parameters of a value);
anything longer is a symbol, or a value such as `same`. Axes count from the end, so that a term
speaks of tensors of any rank. A graph is a tuple of terms, one an output; equal terms are one
operator, and `split0` and `split1` of the same tensor are the two outputs of one.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, TypeAlias

from soapstone.ir.errors import GraphError
from soapstone.records import dataclass

Value: TypeAlias = "int | str"  # of a parameter: a number, a word, a variable, or a sum `g+h`
_VARIABLE = re.compile(r"[a-z][0-9]*\Z")
_TOKEN = re.compile(r"\s*(?:([A-Za-z_][A-Za-z0-9_]*)|([\[\](),])|(-?\d+x\d+|-?\d+)|(\+))")
_KINDS = ("", "word", "mark", "number", "plus")  # of the token's groups
SPLITS = ("split0", "split1")


def is_variable(word: object) -> bool:
    """Return whether a word is a variable: one letter, then digits."""
    return isinstance(word, str) and _VARIABLE.match(word) is not None


@dataclass(frozen=True)
class Term:
    """A variable, a constant, or a symbol with parameters applied to operands."""

    symbol: str
    parameters: tuple[Value, ...] = ()
    operands: tuple[Term, ...] = ()

    def __hash__(self) -> int:
        kept = self.__dict__  # `cached_property` takes a lock, which would be most of the time
        if "_hash" not in kept:
            kept["_hash"] = hash((self.symbol, self.parameters, self.operands))
        found: int = kept["_hash"]
        return found

    def __reduce__(self) -> tuple[type[Term], tuple[Any, ...]]:
        """What it is made of, without its hash: that of a text is another in every process."""
        return Term, (self.symbol, self.parameters, self.operands)

    @property
    def is_variable(self) -> bool:
        """Whether it is a variable: a leaf that stands for any tensor."""
        return not self.operands and is_variable(self.symbol)

    @cached_property
    def _text(self) -> str:
        text = self.symbol
        if self.parameters:
            text += f"[{','.join(map(str, self.parameters))}]"
        if self.operands:
            text += f"({', '.join(map(str, self.operands))})"
        return text

    def __str__(self) -> str:
        return self._text

    def subterms(self) -> Iterator[Term]:
        """Yield every subterm, operands before what is made of them, each once."""
        return subterms((self,))

    def at(self, path: Sequence[int]) -> Term:
        """Return the subterm that is reached by these operand positions, from the root."""
        term = self
        for position in path:
            term = term.operands[position]
        return term

    def replaced(self, path: Sequence[int], new: Term) -> Term:
        """Return the term with the subterm at a path replaced."""
        if not path:
            return new
        first, rest = path[0], path[1:]
        operands = list(self.operands)
        operands[first] = operands[first].replaced(rest, new)
        return Term(self.symbol, self.parameters, tuple(operands))


def subterms(terms: Iterable[Term]) -> Iterator[Term]:
    """Yield every subterm of several terms, each once, operands first."""
    seen: dict[Term, None] = {}

    def walk(some: Iterable[Term]) -> None:
        for term in some:
            if term not in seen:
                walk(term.operands)
                seen[term] = None

    walk(terms)
    return iter(seen)


def variables(terms: Iterable[Term]) -> tuple[str, ...]:
    """Return the tensor variables of terms, by first occurrence."""
    return tuple(term.symbol for term in subterms(terms) if term.is_variable)


def parameter_variables(terms: Iterable[Term]) -> tuple[str, ...]:
    """Return the variables among the parameters of terms, those of operands first."""
    words = (w for t in subterms(terms) for v in t.parameters for w in words_of(v))
    return tuple(dict.fromkeys(filter(is_variable, words)))


def words_of(value: Value) -> list[str]:
    """Return the words of a parameter's value: of a sum, its summands."""
    return value.split("+") if isinstance(value, str) else []


def size(terms: Iterable[Term]) -> int:
    """Return how many operators a graph has: constants and variables are none."""
    operators = set()
    for term in subterms(terms):
        if term.operands:
            name = "split" if term.symbol in SPLITS else term.symbol
            operators.add((name, term.parameters, term.operands))
    return len(operators)


def parse(text: str) -> Term:
    """Return the term that a text says.

    Raises:
        GraphError: the text is none; says where.
    """
    tokens: list[tuple[str, str]] = []
    position = 0
    for found in _TOKEN.finditer(text):
        if found.start() != position:
            break
        kind = found.lastindex or 1
        tokens.append((_KINDS[kind], found[kind]))
        position = found.end()
    if position < len(text.rstrip()):
        raise GraphError(f"term {text!r}: {text[position]!r} found at {position}")
    tokens.append(("end", "the end"))
    where = 0

    def fail(needed: str) -> GraphError:
        return GraphError(f"term {text!r}: {tokens[where][1]!r} found, {needed} needed")

    def take(kind: str, needed: str, *texts: str) -> str:
        nonlocal where
        if tokens[where][0] != kind or (texts and tokens[where][1] not in texts):
            raise fail(needed)
        where += 1
        return tokens[where - 1][1]

    def value() -> Value:
        nonlocal where
        kind, word = tokens[where]
        if kind == "number":
            where += 1
            return word if "x" in word else int(word)
        words = [take("word", "a value")]
        while tokens[where][0] == "plus":
            where += 1
            words.append(take("word", "a variable"))
        return "+".join(words)

    def term(depth: int) -> Term:
        nonlocal where
        if depth > 100:
            raise GraphError(f"term of {len(text)} characters: nested more than 100 deep")
        symbol = take("word", "a symbol")
        parameters: list[Value] = []
        operands: list[Term] = []
        if tokens[where][1] == "[":
            where += 1
            parameters.append(value())
            while take("mark", "',' or ']'", ",", "]") == ",":
                parameters.append(value())
        if tokens[where][1] == "(":
            where += 1
            operands.append(term(depth + 1))
            while take("mark", "',' or ')'", ",", ")") == ",":
                operands.append(term(depth + 1))
        return Term(symbol, tuple(parameters), tuple(operands))

    result = term(0)
    if tokens[where][0] != "end":
        raise fail("the end")
    return result


Bindings: TypeAlias = "dict[str, Term | Value]"


def match(pattern: Term, term: Term, bindings: Mapping[str, Term | Value]) -> Bindings | None:
    """Return the bindings under which the pattern is the term, extending those given, or None.

    A sum among the pattern's parameters matches only a value that its bound variables add up to.
    """
    result: Bindings = dict(bindings)
    if pattern.is_variable:
        if result.setdefault(pattern.symbol, term) != term:
            return None
        return result
    if (
        pattern.symbol != term.symbol
        or len(pattern.operands) != len(term.operands)
        or len(pattern.parameters) != len(term.parameters)
    ):
        return None
    for wanted, found in zip(pattern.parameters, term.parameters):
        if is_variable(wanted):
            if result.setdefault(str(wanted), found) != found:
                return None
        elif instantiate_value(wanted, result) != found:
            return None
    for wanted_operand, operand in zip(pattern.operands, term.operands):
        extended = match(wanted_operand, operand, result)
        if extended is None:
            return None
        result = extended
    return result


def instantiate_value(value: Value, bindings: Mapping[str, Term | Value]) -> Value | None:
    """Return a parameter's value under bindings; None where a variable of a sum is not bound.

    A sum of numbers is a number; otherwise it stays a sum, its variables in order.
    """
    if not isinstance(value, str):
        return value
    if "+" not in value:
        found = bindings.get(value, value) if is_variable(value) else value
        return found if isinstance(found, int | str) else None
    words = [bindings.get(word, word) for word in value.split("+")]
    if all(isinstance(word, int) for word in words):
        return sum(word for word in words if isinstance(word, int))
    flat = sorted(part for word in words for part in str(word).split("+"))
    return "+".join(flat) if all(is_variable(part) or part.isdigit() for part in flat) else None


def instantiate(pattern: Term, bindings: Mapping[str, Term | Value]) -> Term:
    """Return the pattern with its variables replaced.

    Raises:
        GraphError: a variable has no binding, or a sum has no value; names it.
    """
    if pattern.is_variable:
        found = bindings.get(pattern.symbol)
        if not isinstance(found, Term):
            raise GraphError(f"variable {pattern.symbol!r} has no tensor")
        return found
    values = []
    for wanted in pattern.parameters:
        value = instantiate_value(wanted, bindings)
        if value is None or (is_variable(wanted) and wanted not in bindings):
            raise GraphError(f"parameter {wanted!r} of {pattern.symbol} has no value")
        values.append(value)
    operands = tuple(instantiate(operand, bindings) for operand in pattern.operands)
    return Term(pattern.symbol, tuple(values), operands)
