"""Terms of extents: each number in graphs of one model as an expression of their inputs' extents.

A number is an extent met earlier, a multiple or a fraction of one or of a product of some, or a
multiple plus a constant. Which of these it is follows from its values in several graphs.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import combinations, combinations_with_replacement

from soapstone.ir.errors import GraphError

Ints = tuple[int, ...]
_MULTIPLIED = 24  # numbers of which products are looked at

Way = tuple[int, int, int, Ints]  # a rest, parts, a whole, and which numbers are multiplied


class Term:
    """A number in each graph of a family as (rest + parts * product) / whole, in all possible ways.

    ways: each of which gives the same number in all known graphs.
    """

    def __init__(self, ways: Sequence[Way]) -> None:
        self._ways = ways
        alone = len(ways) == 1 and ways[0][:3] == (0, 1, 1) and len(ways[0][3]) == 1
        self._place = ways[0][3][0] if alone else -1  # of the number that it is
        self._last: tuple[Sequence[int], int] = ((), 0)  # numbers, and its value for them

    def within(self, most: int) -> bool:
        """Return whether it depends on the first `most` numbers alone."""
        return all(place < most for *_, of in self._ways for place in of)

    def at(self, numbers: Sequence[int]) -> int:
        """Return its value for other numbers.

        Raises:
            GraphError: it is no whole number, or the ways disagree.
        """
        if self._place >= 0:
            return numbers[self._place]
        last, value = self._last
        if last is numbers:  # to which others were added since, at most
            return value
        found = set[int]()
        for rest, parts, whole, of in self._ways:
            value, over = divmod(parts * math.prod([numbers[each] for each in of]), whole)
            if over:
                raise GraphError("no whole extent found")
            found.add(rest + value)
        if len(found) != 1:
            raise GraphError(f"extents {sorted(found)} found; one needed")
        value = found.pop()
        self._last = numbers, value
        return value


class Numbers:
    """The extents that differ between graphs of a family, each a column of its values in them."""

    def __init__(self) -> None:
        self.columns: list[Ints] = []
        self._places: dict[Ints, int] = {}
        self._terms: dict[tuple[Ints, int], Term] = {}

    def add(self, column: Ints) -> int:
        """Return the index of a number, which is added unless it is known."""
        if column not in self._places:
            if min(column) < 2:  # what repeats is written otherwise
                raise GraphError("extents of less than 2 found")
            self._places[column] = len(self.columns)
            self.columns.append(column)
        return self._places[column]

    @property
    def proportional(self) -> bool:
        """Whether two numbers are in one ratio: then a sum of both looks like a multiple of one."""
        return any(
            all(a * other[0] == b * one[0] for a, b in zip(one, other))
            for one, other in combinations(self.columns, 2)
        )

    def term(self, column: Ints) -> Term:
        """Return the expression of a column by these numbers.

        Raises:
            GraphError: there is none.
        """
        key = column, len(self.columns)
        if key not in self._terms:
            self._terms[key] = self._find(column)
        return self._terms[key]

    def _find(self, column: Ints) -> Term:
        if len(set(column)) == 1:
            return Term([(column[0], 0, 1, ())])
        few = range(min(len(self.columns), _MULTIPLIED))
        products: list[list[Ints]] = [
            list(combinations_with_replacement(few, count)) for count in (2, 3)
        ]
        one: list[Ints] = [(place,) for place in range(len(self.columns))]
        # Two numbers may be equal, or on a line, by chance, so all that one of them gives is a way.
        lines = list(self._whole(column, one, True))
        ways = [
            *self._whole(column, one, False),
            *(way for way in lines if self._shown(column, way)),
        ]
        ways += [way for way in self._parts(column, one) if way[2] > 1]
        ways = ways or list(self._whole(column, products[0], False)) or lines
        for of, rests in ((products[1], False), (products[0], True)):
            ways = ways or list(self._whole(column, of, rests))
        ways = ways or [way for of in products for way in self._parts(column, of)]
        if not ways:
            raise GraphError(f"extents {column} found, which others do not determine")
        return Term(ways)

    def _shown(self, column: Ints, line: Way) -> bool:
        """Return whether a line is likely: of three points or more, or what is longer by a rest."""
        _, times, _, (place,) = line
        return times == 1 or len({*zip(column, self.columns[place])}) > 2

    def _whole(self, column: Ints, products: Iterable[Ints], rests: bool) -> Iterator[Way]:
        """Yield the ways in which a column is a multiple of products, perhaps plus a rest."""
        a, b = column[0], next(each for each in column if each != column[0])
        at = column.index(b)
        for of in products:
            sides = [math.prod(each) for each in zip(*(self.columns[place] for place in of))]
            if sides[at] == sides[0]:
                continue
            times, over = divmod(b - a, sides[at] - sides[0])
            rest = a - times * sides[0]
            fits = not over and bool(rest) == rests
            if fits and all(rest + times * y == x for x, y in zip(column, sides)):
                yield rest, times, 1, of

    def _parts(self, column: Ints, products: Iterable[Ints]) -> Iterator[Way]:
        """Yield the ways in which a column is a fraction of products."""
        for of in products:
            sides = [math.prod(each) for each in zip(*(self.columns[place] for place in of))]
            part = math.gcd(column[0], sides[0])
            parts, whole = column[0] // part, sides[0] // part
            if parts and all(parts * y == whole * x for x, y in zip(column, sides)):
                yield 0, parts, whole, of
