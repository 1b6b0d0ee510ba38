"""Conditions on extents and parameters, and what follows from those that are known.

A condition is written `dim(y,-4)*h = dim(w,-4)*g`, `odd(k)` or `dim(x,-2) >= 3`. Laws carry them
as side conditions, rules as guards, and typing a term states them.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple, TypeAlias

from soapstone.ir.errors import GraphError
from soapstone.ir.term import Term, Value, is_variable, parse
from soapstone.search.rules.extents import Dim, applied, atom


class IllTyped(Exception):
    """A term that does not fit; says what was found and what is needed."""


class Condition(NamedTuple):
    """A statement: of equality, `at_least`, `odd`, `divides`, `fits`, or `word` equality.

    `divides` has a divisor and a positive multiple of it. `fits` has an extent, a window's size and
    a padding: the window can be placed.
    """

    kind: str
    of: tuple[Dim | str, ...]

    def __str__(self) -> str:
        if self.kind in _MARKS:
            return f"{self.of[0]} {_MARKS[self.kind]} {self.of[1]}"
        return f"{self.kind}({', '.join(map(str, self.of))})"


_MARKS = {"equal": "=", "word": "=", "at_least": ">="}


def holds(condition: Condition) -> bool:
    """Return whether a condition over integers is true.

    Raises:
        IllTyped: a parameter has no value.
    """
    kind, of = condition
    if kind == "equal" or kind == "word":
        return of[0] == of[1]
    if kind == "fits":
        extent, size, padding = of
        if padding == "same":
            return _int(size) % 2 == 1
        if padding == "valid":
            return _int(extent) >= _int(size)
        raise IllTyped(f"padding {padding!r} found, same or valid needed")
    if kind == "at_least":
        return _int(of[0]) >= _int(of[1])
    if kind == "odd":
        return _int(of[0]) % 2 == 1
    assert kind == "divides", kind
    return _int(of[0]) > 0 and _int(of[1]) > 0 and _int(of[1]) % _int(of[0]) == 0


def _int(value: Dim | str) -> int:
    if not isinstance(value, int):
        raise IllTyped(f"{value} has no value")
    return value


def number(value: Value) -> Dim:
    """Return a parameter as an extent: a number, a variable, or a sum of them.

    Raises:
        IllTyped: it is a word.
    """
    if isinstance(value, int):
        return value
    total: Dim = 0
    for word in value.split("+"):
        if not (is_variable(word) or word.isdigit()):
            raise IllTyped(f"{value!r} is no number")
        total = total + (int(word) if word.isdigit() else atom(word))
    return total


def window_size(value: Value) -> tuple[Dim, Dim]:
    """Return height and width of a kernel size such as `3x1`, or of a variable: `k.h`, `k.w`."""
    if is_variable(value):
        return atom(f"{value}.h"), atom(f"{value}.w")
    height, mark, width = str(value).partition("x")
    if not (mark and height.isdigit() and width.isdigit()):
        raise IllTyped(f"{value!r} found, a kernel size such as 3x3 needed")
    return int(height), int(width)


Extent: TypeAlias = "Callable[[Term, int], Dim]"
Parameter: TypeAlias = "Callable[[str], Value]"


def read(text: str, extent: Extent, parameter: Parameter) -> tuple[Condition, ...]:
    """Return what a text says, where `extent(term, axis)` and `parameter(name)` are these.

    Raises:
        GraphError: the text is no condition; says what was found.
        IllTyped: a word stands where a number is needed.
    """
    kind, parts = _statement(text)

    def value(tree: _Tree) -> Dim:
        match tree:
            case int():
                return tree
            case str():
                if tree.endswith((".h", ".w")):
                    return window_size(parameter(tree[:-2]))[tree.endswith("w")]
                return number(parameter(tree))
            case ("dim", Term() as term, axis):
                place = axis if isinstance(axis, int) else parameter(str(axis))
                if not isinstance(place, int):
                    raise IllTyped(f"axis {place!r} found, a number needed")
                return extent(term, place)
            case ("+", left, right):
                return value(left) + value(right)
            case ("-", left, right):
                return value(left) - value(right)
            case ("*", left, right):
                return value(left) * value(right)
            case (function, *arguments):
                return applied(
                    str(function),
                    *(
                        str(parameter(argument))
                        if function == "window" and place == 3 and isinstance(argument, str)
                        else value(argument)
                        for place, argument in enumerate(arguments)
                    ),
                )
        raise AssertionError(tree)

    if kind == "odd" and is_variable(parts[0]):
        name = str(parts[0])
        if "x" in str(parameter(name)) or is_variable(parameter(name)):
            return tuple(Condition("odd", (size,)) for size in window_size(parameter(name)))
    if kind == "word":
        return (Condition("word", (str(parameter(str(parts[0]))), str(parts[1]))),)
    if kind == "fits":
        padding = str(parameter(str(parts[2])))
        return (Condition("fits", (value(parts[0]), value(parts[1]), padding)),)
    return (Condition(kind, tuple(value(part) for part in parts)),)


_Tree: TypeAlias = "int | str | Term | tuple[_Tree, ...]"
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*(\.[hw])?\Z")
_WORD = re.compile(r"[A-Za-z_]{2}[A-Za-z0-9_]*\Z|\d+x\d+\Z")


@lru_cache(maxsize=4096)
def _statement(text: str) -> tuple[str, tuple[_Tree, ...]]:
    for mark in (">=", "<=", "="):
        parts = _parted(text, mark)
        if len(parts) == 2:
            left, right = (part.strip() for part in parts)
            if mark == "=" and _WORD.match(right):
                return "word", (left, right)
            trees = _expression(left), _expression(right)
            if mark == "<=":
                trees = trees[1], trees[0]
            return ("equal" if mark == "=" else "at_least"), trees
    found = re.match(r"\s*(odd|divides|fits)\((.*)\)\s*\Z", text)
    if found is not None:
        arguments = tuple(_expression(part) for part in _parted(found.group(2), ","))
        if len(arguments) == {"odd": 1, "divides": 2, "fits": 3}[found.group(1)]:
            return found.group(1), arguments
    raise GraphError(f"condition {text!r}: an equation, `>=`, odd, divides or fits needed")


def _parted(text: str, mark: str) -> list[str]:
    """Return the parts of a text between marks that no bracket encloses."""
    parts, depth, start = [], 0, 0
    for place, letter in enumerate(text):
        depth += (letter in "([") - (letter in ")]")
        if not depth and place >= start and text.startswith(mark, place):
            parts.append(text[start:place])
            start = place + len(mark)
    return [*parts, text[start:]]


def _expression(text: str) -> _Tree:
    text = text.strip()
    sums = _parted(text, "+")
    if len(sums) > 1:
        return ("+", _expression("+".join(sums[:-1])), _expression(sums[-1]))
    differences = _parted(text, "-")
    if len(differences) > 1:
        first = "-".join(differences[:-1])
        return ("-", _expression(first) if first.strip() else 0, _expression(differences[-1]))
    factors = _parted(text, "*")
    if len(factors) > 1:
        return ("*", _expression("*".join(factors[:-1])), _expression(factors[-1]))
    if text.isdigit():
        return int(text)
    if _NAME.match(text):
        return text
    if text.startswith("(") and text.endswith(")"):
        return _expression(text[1:-1])
    function, _, rest = text.partition("(")
    if not (rest.endswith(")") and function in ("dim", "strided", "window")):
        raise GraphError(f"condition: {text!r} found, an expression over extents needed")
    arguments = _parted(rest[:-1], ",")
    if function == "dim":
        axis = arguments[-1].strip()
        return ("dim", parse(",".join(arguments[:-1])), axis if is_variable(axis) else int(axis))
    return (function, *(_expression(argument) for argument in arguments))
