"""Exact arithmetic on functions of tensor elements, in which both sides of a law are compared.

Where two elements are not the same node, both are brought to quotients of polynomials whose
atoms are inputs, `exp` of a monomial (so that exp(a + b) is a product), `sqrt` of a polynomial (its
square is reduced) and functions that are not interpreted. Two elements are equal where their
difference is zero and both are defined at the same real inputs: no denominator that may be zero,
and no sign under a root, is lost.

What is found equal is equal; what is not found equal may still be, and needs a counterexample.
"""

from __future__ import annotations

from fractions import Fraction
from typing import Any, TypeAlias

from soapstone.rules.laws.element import Element, Number, Undecided, number

Monomial: TypeAlias = "tuple[tuple[int, Number], ...]"  # (atom, exponent), atoms ascending
Polynomial: TypeAlias = "dict[Monomial, Number]"
Denominator: TypeAlias = "tuple[tuple[int, int], ...]"  # (factor, power)
Quotient: TypeAlias = "tuple[Polynomial, Denominator]"
Condition: TypeAlias = "tuple[Any, ...]"
ONE: Monomial = ()
_MOST_TERMS = 300_000  # of one product of polynomials


class Field:
    """The elements over one set of inputs, and their normal forms."""

    def __init__(self) -> None:
        self._nodes: dict[tuple[Any, ...], Element] = {}
        self._forms: dict[int, Quotient] = {}
        self._domains: dict[int, frozenset[Condition]] = {}
        self._atoms: dict[Any, int] = {}
        self._described: list[tuple[Any, ...]] = []  # of each atom: its kind, and what it is of
        self._factors: dict[frozenset[tuple[Monomial, Number]], int] = {}
        self._polynomials: list[Polynomial] = []
        self._arguments: dict[str, list[tuple[int, Quotient]]] = {}

    # Expressions

    def _make(self, key: tuple[Any, ...], *arguments: Any) -> Element:
        """Return the node of a key, which names an operation and what it is of, by index."""
        element = self._nodes.get(key)
        if element is None:
            element = self._nodes[key] = Element(self, len(self._nodes), key[0], arguments)
        return element

    def number(self, value: Any) -> Element:
        """Return a number as an element."""
        exact = number(value)
        return self._make(("number", exact), exact)

    def input(self, name: str) -> Element:
        """Return the input element of a name."""
        return self._make(("input", name), name)

    def function(self, name: str, argument: Element) -> Element:
        """Return a function, known by its name only, of an element."""
        return self._make(("function", name, argument.index), name, argument)

    def node(self, operation: str, *arguments: Element) -> Element:
        """Return `exp`, `sqrt` or `max` of elements."""
        return self._make((operation, *[argument.index for argument in arguments]), *arguments)

    def binary(self, operation: str, left: Any, right: Any) -> Element:
        """Return the sum, difference, product or quotient of elements or numbers."""
        a = left if isinstance(left, Element) else self.number(left)
        b = right if isinstance(right, Element) else self.number(right)
        neutral = operation in ("mul", "div")
        if b.operation == "number" and b.arguments[0] == neutral:
            return a
        if operation in ("add", "mul"):
            if a.operation == "number" and a.arguments[0] == neutral:
                return b
            if b.index < a.index:
                a, b = b, a
        key = operation, a.index, b.index
        known = self._nodes.get(key)
        return self._make(key, a, b) if known is None else known

    def text(self, element: Element) -> str:
        """Return an element as mathematics."""
        operation, arguments = element.operation, element.arguments
        if operation in ("number", "input"):
            return str(arguments[0])
        if operation == "function":
            return f"{arguments[0]}({arguments[1]})"
        signs = {"add": " + ", "sub": " - ", "mul": " * ", "div": " / "}
        if operation in signs:
            return f"({signs[operation].join(map(repr, arguments))})"
        return f"{operation}({', '.join(map(repr, arguments))})"

    # Comparison

    def equal(self, left: Element, right: Element) -> bool:
        """Return whether both are found to be one function, defined at the same inputs.

        Raises:
            Undecided: their forms are too large.
        """
        if left is right:
            return True
        if self.domain(left) != self.domain(right):
            return False
        return self._same(self.form(left), self.form(right))

    def _same(self, left: Quotient, right: Quotient) -> bool:
        (a, a_den), (b, b_den) = left, right
        if a_den == b_den:
            return a == b
        a_more, b_more, _ = self._common(a_den, b_den)
        return self._times(a, a_more) == self._times(b, b_more)

    # Normal forms

    def form(self, element: Element) -> Quotient:
        """Return the element as a quotient of a polynomial and a product of factors."""
        quotient = self._forms.get(element.index)
        if quotient is None:
            quotient = self._forms[element.index] = self._expand(element)
        return quotient

    def _expand(self, element: Element) -> Quotient:
        operation, arguments = element.operation, element.arguments
        match operation:
            case "number":
                return ({ONE: arguments[0]} if arguments[0] else {}), ()
            case "input":
                return {((self._atom("input", arguments[0]), 1),): 1}, ()
            case "function":
                return {((self._applied(arguments[0], self.form(arguments[1])), 1),): 1}, ()
            case "max":
                forms = frozenset(self._key(self.form(argument)) for argument in arguments)
                return {((self._atom("max", forms), 1),): 1}, ()
            case "exp":
                return self._exp(self.form(arguments[0])), ()
            case "sqrt":
                return self._sqrt(self.form(arguments[0]))
        left, right = (self.form(argument) for argument in arguments)
        if operation in ("add", "sub"):
            return self._sum(left, right, 1 if operation == "add" else -1)
        return self._product(left, right if operation == "mul" else self._inverse(right))

    def _atom(self, kind: str, of: Any) -> int:
        index = self._atoms.setdefault((kind, of), len(self._described))
        if index == len(self._described):
            self._described.append((kind, of))
        return index

    @staticmethod
    def _key(form: Quotient) -> Any:
        return frozenset(form[0].items()), form[1]

    def _applied(self, name: str, form: Quotient) -> int:
        """Return the atom of a function of a form; equal forms are one argument."""
        key = ("function", (name, self._key(form)))
        if key not in self._atoms and form[1]:
            known = self._arguments.setdefault(name, [])
            for atom, other in known[-32:]:
                if self._same(form, other):
                    return self._atoms.setdefault(key, atom)
            known.append((len(self._described), form))
        return self._atom(*key)

    def _exp(self, form: Quotient) -> Polynomial:
        """Return exp of a sum: the product of the exp of its monomials, each an atom's power."""
        numerator, denominator = form
        powers = {self._atom("exp", (term, denominator)): c for term, c in numerator.items()}
        return {tuple(sorted(powers.items())): 1}

    def _sqrt(self, form: Quotient) -> Quotient:
        """Return a root: of x^(2n + 1) it is sqrt(x) x^n, since x is not negative there."""
        numerator, denominator = form
        if denominator:
            return {((self._applied("sqrt", form), 1),): 1}, ()
        odd = self._odd(numerator)
        below: Polynomial = {ONE: 1}
        if odd is not None:
            atom, power, coefficient = odd
            numerator = {((atom, 1),): coefficient}
            below = {((atom, (power - 1) // 2),): 1} if power != 1 else below
        root = self._atom("sqrt", frozenset(numerator.items()))
        return self._times({((root, 1),): 1}, below), ()

    def _odd(self, polynomial: Polynomial) -> tuple[int, int, Number] | None:
        """Return atom, power and coefficient where it is a positive multiple of an odd power."""
        if len(polynomial) != 1:
            return None
        ((term, coefficient),) = polynomial.items()
        if len(term) != 1 or coefficient < 0:
            return None
        ((atom, power),) = term
        plain = self._described[atom][0] not in ("exp", "sqrt")
        return (
            (atom, power, coefficient) if plain and isinstance(power, int) and power % 2 else None
        )

    def _root(self, atom: int) -> Polynomial | None:
        """Return what an atom is the square root of, if it is one."""
        kind, of = self._described[atom]
        return dict(of) if kind == "sqrt" else None

    # Polynomials

    def _times(self, left: Polynomial, right: Polynomial) -> Polynomial:
        if len(left) * len(right) > _MOST_TERMS:
            raise Undecided(f"a product of {len(left)} and {len(right)} terms is too large")
        result: Polynomial = {}
        for a, p in left.items():
            for b, q in right.items():
                term, square = self._monomials(a, b)
                if square is None:
                    result[term] = result.get(term, 0) + p * q
                else:
                    for more, r in self._times({term: p * q}, square).items():
                        result[more] = result.get(more, 0) + r
        return {term: c for term, c in result.items() if c}

    def _monomials(self, a: Monomial, b: Monomial) -> tuple[Monomial, Polynomial | None]:
        """Return the product of monomials, and what squares of roots among it are."""
        if not a or not b:
            return a or b, None
        powers = dict(a)
        square: Polynomial | None = None
        for atom, power in b:
            total = powers.get(atom, 0) + power
            root = self._root(atom) if atom in powers else None
            if root is not None:
                # A root has the power 1 in every normal form, so the total is 2.
                square = root if square is None else self._times(square, root)
                total = 0
            powers[atom] = total
        return tuple(sorted(item for item in powers.items() if item[1])), square

    def _factored(self, polynomial: Polynomial) -> tuple[Monomial, Number, int]:
        """Return a polynomial's common monomial (no roots), content and remaining factor."""
        terms = list(polynomial)
        least = dict(terms[0])
        for term in terms[1:]:
            powers = dict(term)
            for atom in set(least) | set(powers):
                least[atom] = min(least.get(atom, 0), powers.get(atom, 0))
        common = tuple(
            sorted((a, e) for a, e in least.items() if e and self._described[a][0] != "sqrt")
        )
        opposite = tuple((atom, -power) for atom, power in common)
        rest = {self._monomials(term, opposite)[0]: c for term, c in polynomial.items()}
        content = rest[min(rest)]
        monic = {term: number(Fraction(c) / content) for term, c in rest.items()}
        key = frozenset(monic.items())
        index = self._factors.setdefault(key, len(self._polynomials))
        if index == len(self._polynomials):
            self._polynomials.append(monic)
        return common, content, index

    # Quotients

    def _common(self, a: Denominator, b: Denominator) -> tuple[Polynomial, Polynomial, Denominator]:
        """Return what two numerators are multiplied by over the common denominator, and this."""
        left, right = dict(a), dict(b)
        whole = {f: max(left.get(f, 0), right.get(f, 0)) for f in {**left, **right}}
        return (
            self._power({f: e - left.get(f, 0) for f, e in whole.items()}),
            self._power({f: e - right.get(f, 0) for f, e in whole.items()}),
            tuple(sorted(whole.items())),
        )

    def _power(self, powers: dict[int, int]) -> Polynomial:
        result: Polynomial = {ONE: 1}
        for factor, power in powers.items():
            for _ in range(power):
                result = self._times(result, self._polynomials[factor])
        return result

    def _sum(self, left: Quotient, right: Quotient, sign: int) -> Quotient:
        (a, a_den), (b, b_den) = left, right
        denominator = a_den
        if a_den != b_den:
            a_more, b_more, denominator = self._common(a_den, b_den)
            a, b = self._times(a, a_more), self._times(b, b_more)
        result = dict(a)
        for term, c in b.items():
            total = result.get(term, 0) + sign * c
            if total:
                result[term] = total
            else:
                del result[term]
        return result, denominator if result else ()

    def _product(self, left: Quotient, right: Quotient) -> Quotient:
        powers = dict(left[1])
        for factor, power in right[1]:
            powers[factor] = powers.get(factor, 0) + power
        numerator = self._times(left[0], right[0])
        return numerator, tuple(sorted(powers.items())) if numerator else ()

    def _inverse(self, form: Quotient) -> Quotient:
        numerator, denominator = form
        if not numerator:
            raise Undecided("division by zero")
        above = self._power(dict(denominator))
        if len(numerator) > 1:
            common, content, factor = self._factored(numerator)
            scale = number(1 / Fraction(content))
            opposite = tuple((atom, -power) for atom, power in common)
            return self._times(above, {opposite: scale}), ((factor, 1),)
        ((term, c),) = numerator.items()
        plain = [(atom, -power) for atom, power in term if self._root(atom) is None]
        result: Quotient = self._times(above, {tuple(plain): number(1 / Fraction(c))}), ()
        for atom, _ in term:
            root = self._root(atom)
            if root is not None:  # 1/s is s over what s is the root of
                result = self._product(result, ({((atom, 1),): 1}, ()))
                result = self._product(result, self._inverse((root, ())))
        return result

    # Where elements are defined

    def domain(self, element: Element) -> frozenset[Condition]:
        """Return the conditions on the inputs under which the element is a real number."""
        conditions = self._domains.get(element.index)
        if conditions is None:
            parts = (a for a in element.arguments if isinstance(a, Element))
            conditions = frozenset[Condition]().union(*(self.domain(part) for part in parts))
            if element.operation == "div":
                conditions |= self._nonzero(self.form(element.arguments[1])[0])
            elif element.operation == "sqrt":
                conditions |= self._not_negative(self.form(element.arguments[0]))
            self._domains[element.index] = conditions
        return conditions

    def _nonzero(self, polynomial: Polynomial) -> frozenset[Condition]:
        if not polynomial:
            return frozenset({("never",)})
        if self._sign(polynomial) == 2:
            return frozenset()
        if len(polynomial) > 1:
            common, _, factor = self._factored(polynomial)
            return self._nonzero({common: 1}) | {("nonzero", "factor", factor)}
        conditions: set[Condition] = set()
        for atom, _ in next(iter(polynomial)):
            root = self._root(atom)
            if root is not None:
                conditions |= self._nonzero(root)
            elif self._described[atom][0] != "exp":
                conditions.add(("nonzero", "atom", atom))
        return frozenset(conditions)

    def _not_negative(self, form: Quotient) -> frozenset[Condition]:
        numerator, denominator = form
        if self._sign(numerator) and all(
            self._sign(self._polynomials[factor]) == 2 for factor, _ in denominator
        ):
            return frozenset()
        odd = None if denominator else self._odd(numerator)
        if odd is not None:  # its sign is that of its atom
            return frozenset({("not negative", *self._key(({((odd[0], 1),): 1}, ())))})
        return frozenset({("not negative", *self._key(form))})

    def _sign(self, polynomial: Polynomial) -> int:
        """Return 2 if it is surely positive, 1 if surely not negative, else 0."""
        signs = [self._sign_of_term(term, c) for term, c in polynomial.items()]
        return 0 if 0 in signs else max(signs, default=1)

    def _sign_of_term(self, term: Monomial, coefficient: Number) -> int:
        kinds = [(self._described[atom][0], power) for atom, power in term]
        if coefficient < 0 or not all(k in ("exp", "sqrt") or p % 2 == 0 for k, p in kinds):
            return 0
        return 2 if all(kind == "exp" for kind, _ in kinds) else 1
