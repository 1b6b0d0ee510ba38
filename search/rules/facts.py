"""What is known of symbolic extents: equations in solved form, parities, bounds.

All atoms are positive integers. An equation in which an atom occurs once, with coefficient 1 or -1,
defines that atom; other equations reduce what they divide. Entailment is sound and incomplete: what
does not follow here is a guard, or an error.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from soapstone.ir.term import is_variable
from soapstone.search.rules.condition import Condition, IllTyped, holds
from soapstone.search.rules.extents import (
    Applied,
    Dim,
    Poly,
    all_atoms,
    atom,
    bounded_below,
    primitive,
    quotient,
    reduced,
    substitute,
)


class Missing(IllTyped):
    """A condition that does not follow from what is known."""

    def __init__(self, condition: Condition) -> None:
        super().__init__(f"{condition} does not follow")


class Facts:
    """A judge of symbolic extents (`shapes.Judge`).

    What is required and not known is assumed (mode `assume`), assumed and kept in `missing` (mode
    `collect`), or refused (mode `derive`). What is known to be false is always refused. `stated`
    has all that was assumed. Atoms in `free` are extents still to be chosen: an equation that is
    needed chooses them.
    """

    def __init__(self) -> None:
        self.mode: Literal["assume", "collect", "derive"] = "assume"
        self.stated: list[Condition] = []
        self.missing: list[Condition] = []
        self.free: set[str] = set()
        self.solved: dict[str, Dim] = {}
        self._equations: list[Poly] = []
        self._others: set[Condition] = set()
        self._parities: list[frozenset[frozenset[str]]] | None = None
        self._normal: dict[Dim, Dim] = {}

    def normal(self, value: Dim) -> Dim:
        """Return the value over the atoms that no equation defines."""
        if isinstance(value, int):
            return value
        found = self._normal.get(value)
        if found is None:
            found = self._normal[value] = substitute(value, self.solved) if self.solved else value
        return found

    def equal(self, left: Dim, right: Dim) -> bool:
        """Return whether two extents are known to be equal."""
        if left == right:
            return True
        if isinstance(left, int) and isinstance(right, int):
            return False
        return self._zero(self.normal(left) - self.normal(right))

    def require(self, condition: Condition) -> None:
        """Take note that a condition is needed.

        Raises:
            Missing: it does not follow, and nothing is assumed.
            IllTyped: it is false.
        """
        if self.check(condition):
            return
        if self.mode != "assume":
            if condition.kind == "equal" and self._choose(condition):
                return
            if self.mode == "derive":
                raise Missing(condition)
            self.missing.append(condition)
        self.assume(condition)

    def check(self, condition: Condition) -> bool:
        """Return whether a condition that is needed is known.

        Raises:
            IllTyped: it is false.
        """
        known = self.known(condition)
        if not known and self._false(condition):
            raise IllTyped(f"{condition} is needed, and is false")
        return known

    def known(self, condition: Condition) -> bool:
        """Return whether a condition follows from what was assumed."""
        kind, of = condition
        if kind == "word":
            return of[0] == of[1] or condition in self._others
        if kind == "fits":
            extent, size, padding = self._extent(of[0]), self._extent(of[1]), of[2]
            if size == 1:
                return True
            if padding in ("same", "valid"):
                return self.known(_placing(extent, size, padding))
            return Condition("fits", (extent, size, padding)) in self._normal_others()
        values = tuple(self._extent(value) for value in of)
        if all(isinstance(value, int) for value in values):
            return holds(Condition(kind, values))
        if kind == "equal":
            return self._zero(values[0] - values[1])
        if kind == "at_least":
            difference = values[0] - values[1]
            return bounded_below(difference) or any(
                bounded_below(difference - (known[0] - known[1])) for known in self._bounds()
            )
        if kind == "odd":
            return not self._reduced_parity(_parity(values[0] + 1))
        assert kind == "divides", kind
        if Condition(kind, values) in self._normal_others():
            return True
        times = (quotient(value, values[0]) for value in self._forms(values[1]))
        return any(found is not None and bounded_below(found - 1) for found in times)

    def assume(self, condition: Condition) -> None:
        """Add a condition to what is known.

        Raises:
            IllTyped: it contradicts what is known.
        """
        self.stated.append(condition)
        kind, of = condition
        if kind == "equal":
            self._equate(self._extent(of[0]) - self._extent(of[1]))
        elif kind == "divides":
            divisor, value = self._extent(of[0]), self._extent(of[1])
            self._others.add(condition)
            self._equate(value - divisor * atom(f"({value})/({divisor})"))
        elif kind == "fits" and of[2] in ("same", "valid"):
            placing = _placing(self._extent(of[0]), self._extent(of[1]), of[2])
            self._others.add(placing)
        else:
            self._others.add(condition)
        self._parities = None

    def _extent(self, value: Dim | str) -> Dim:
        assert not isinstance(value, str)
        return self.normal(value)

    def _false(self, condition: Condition) -> bool:
        kind, of = condition
        if kind == "word":
            return not is_variable(of[0]) and not is_variable(of[1])
        if kind == "fits" and of[2] in ("same", "valid"):
            return self._false(_placing(self._extent(of[0]), self._extent(of[1]), of[2]))
        values = [self._extent(value) for value in of if not isinstance(value, str)]
        if kind == "equal":
            difference = values[0] - values[1]
            return isinstance(difference, int) or _one_sign(difference)
        return kind != "fits" and all(isinstance(value, int) for value in values)

    def _zero(self, difference: Dim) -> bool:
        if isinstance(difference, int):
            return difference == 0
        if not self._equations:
            return False
        for equation in self._equations:
            difference = reduced(difference, equation)[1]
            if isinstance(difference, int):
                return difference == 0
            difference = primitive(difference)
        return False

    def _forms(self, value: Dim) -> Iterator[Dim]:
        """Yield the value, and what equations reduce it to."""
        yield value
        for equation in self._equations:
            value = reduced(value, equation)[1]
            yield value

    def _equate(self, difference: Dim) -> None:
        pending = [difference]
        while pending:
            equation = self.normal(pending.pop())
            if isinstance(equation, int):
                if equation:
                    raise IllTyped(f"{equation} = 0 would follow")
                continue
            if _one_sign(equation):
                raise IllTyped(f"{equation} = 0 would follow")
            equation = primitive(equation)
            name = _solvable(equation, None)
            if name is None:
                if equation not in self._equations:
                    self._equations.append(equation)
                continue
            pending += self._define(name, equation)

    def _choose(self, condition: Condition) -> bool:
        """Let an equation define an extent that is still to be chosen; return whether it did."""
        if not self.free:
            return False
        difference = self._extent(condition.of[0]) - self._extent(condition.of[1])
        if isinstance(difference, int):
            return False
        difference = primitive(difference)
        name = _solvable(difference, self.free)
        if name is None:
            return False
        for equation in self._define(name, difference):
            self._equate(equation)
        return True

    def _define(self, name: str, equation: Poly) -> list[Dim]:
        """Solve an equation for an atom; return the equations that must be looked at again."""
        sign = next(found for monomial, found in equation.terms if monomial == (name,))
        value = atom(name) - equation * sign
        again: list[Dim] = list(self._equations)
        self._equations = []
        given = {name: value}
        for key, old in list(self.solved.items()):
            if isinstance(key, Applied) and name in all_atoms(atom(key)):
                del self.solved[key]
                again.append(substitute(atom(key), given) - old)
            elif name in all_atoms(old):
                self.solved[key] = substitute(old, given)
        self.solved[name] = value
        self._normal = {}
        self._parities = None
        return again

    def _normal_others(self) -> set[Condition]:
        return {
            Condition(
                kind, tuple(value if isinstance(value, str) else self.normal(value) for value in of)
            )
            for kind, of in self._others
        }

    def _bounds(self) -> list[tuple[Dim, Dim]]:
        return [
            (self._extent(of[0]), self._extent(of[1]))
            for kind, of in self._others
            if kind == "at_least"
        ]

    def _reduced_parity(self, value: frozenset[frozenset[str]]) -> frozenset[frozenset[str]]:
        if self._parities is None:
            self._parities = []
            for kind, of in sorted(self._others, key=str):
                if kind == "odd":
                    row = self._eliminated(_parity(self._extent(of[0]) + 1))
                    if row:
                        self._parities.append(row)
        return self._eliminated(value)

    def _eliminated(self, value: frozenset[frozenset[str]]) -> frozenset[frozenset[str]]:
        for row in self._parities or ():
            if _pivot(row) in value:
                value ^= row
        return value


def _placing(extent: Dim, size: Dim, padding: Dim | str) -> Condition:
    if padding == "same":
        return Condition("odd", (size,))
    return Condition("at_least", (extent, size))


def _one_sign(value: Dim) -> bool:
    return isinstance(value, Poly) and len({found > 0 for _, found in value.terms}) == 1


def _parity(value: Dim) -> frozenset[frozenset[str]]:
    """Return the monomials of odd coefficient, in which powers are as good as the first."""
    result: frozenset[frozenset[str]] = frozenset()
    terms = value.terms if isinstance(value, Poly) else (((), value),)
    for monomial, coefficient in terms:
        if coefficient % 2:
            result ^= {frozenset(monomial)}
    return result


def _pivot(row: frozenset[frozenset[str]]) -> frozenset[str]:
    return max(row, key=lambda monomial: (len(monomial), sorted(monomial)))


def _solvable(equation: Poly, among: set[str] | None) -> str | None:
    """Return the atom that the equation defines: extents rather than parameters."""
    best: tuple[int, str] | None = None
    for monomial, coefficient in equation.terms:
        if len(monomial) != 1 or abs(coefficient) != 1:
            continue
        (name,) = monomial
        if among is not None and name not in among:
            continue
        rest = equation - atom(name) * coefficient
        if name in all_atoms(rest):
            continue
        order = 2 if isinstance(name, Applied) else 0 if name.startswith("dim(") else 1
        if is_variable(name) or name.endswith((".h", ".w")):
            order = 3
        if best is None or (order, name) < best:
            best = order, name
    return None if best is None else best[1]
