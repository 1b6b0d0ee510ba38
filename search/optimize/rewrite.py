"""Application of matches: replaces the left side of a rule in a graph by the right side.

Readers of the match's outputs read the new values; everything else is shared with the old graph. A
match whose outputs depend on each other through other operators would close a cycle (TASO, Figure
2.6) and is not applied.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from soapstone.search.optimize.match import Match, Matcher, bound, build, places
from soapstone.search.optimize.pool import Leaf, Pool
from soapstone.search.rules.rulebook import Directed

Values = tuple[int, ...]
_MOST_SITES = 1024


def applied(pool: Pool, outputs: Values, matches: Sequence[Match]) -> Values | None:
    """Return the outputs of a graph with matches rewritten; None if that closes a cycle.

    matches: no two have a root in common.
    """
    positions = {
        root: (match, position) for match in matches for position, root in enumerate(match.roots)
    }
    renewed: dict[int, int] = {}
    made: dict[int, Values] = {}
    pending: set[int] = set()
    ordered = pool.order(outputs)
    touched = set(positions)
    for value in ordered:
        if value not in touched and touched.isdisjoint(pool.operands(value)):
            renewed[value] = value
        else:
            touched.add(value)

    def operands(value: int) -> Sequence[int]:
        found = positions.get(value)
        return pool.operands(value) if found is None else tuple(found[0].values.values())

    stack = [(value, False) for value in outputs]
    while stack:
        value, ready = stack.pop()
        if value in renewed:
            continue
        if not ready:
            if value in pending:
                return None  # it needs itself
            pending.add(value)
            stack.append((value, True))
            stack += [(operand, False) for operand in operands(value) if operand not in renewed]
            continue
        pending.discard(value)
        new = _renewed(pool, value, renewed, positions.get(value), made)
        if new is None:
            return None
        renewed[value] = new
    found = tuple(renewed[value] for value in outputs)
    same = all(pool.specs[new] == pool.specs[old] for new, old in zip(found, outputs))
    return found if same else None


def _renewed(
    pool: Pool,
    value: int,
    renewed: Mapping[int, int],
    root: tuple[Match, int] | None,
    made: dict[int, Values],
) -> int | None:
    """Return the replacement of a value whose operands are replaced."""
    if root is None:
        return _with_operands(pool, value, [renewed[operand] for operand in pool.operands(value)])
    match, position = root
    if id(match) not in made:
        _, right = bound(match.rule, tuple(sorted(match.parameters.items())))
        values = {name: renewed[old] for name, old in match.values.items()}
        found = build(pool, right, replace(match, values=values))
        if found is None:
            return None
        made[id(match)] = found
    return made[id(match)][position]


def everywhere(pool: Pool, matcher: Matcher, outputs: Values, rule: Directed) -> tuple[Values, int]:
    """Return a graph with a rule applied until it no longer matches, and how often it was.

    All matches without a common root are rewritten at once, then the graph is matched again. A rule
    that does not terminate is stopped.
    """
    count = 0
    seen = {outputs}
    while count < _MOST_SITES:
        taken: set[int] = set()
        chosen = []
        for match in matcher.matches(rule, places(pool, outputs)):
            if taken.isdisjoint(match.roots) and _acyclic(pool, match):
                taken.update(match.roots)
                chosen.append(match)
        new, applications = _together(pool, outputs, chosen[: _MOST_SITES - count])
        if not applications or new in seen:
            break
        outputs = new
        seen.add(new)
        count += applications
    return outputs, count


def _together(pool: Pool, outputs: Values, matches: Sequence[Match]) -> tuple[Values, int]:
    """Return a graph with as many of the matches rewritten as close no cycle, and their number."""
    found = applied(pool, outputs, matches) if matches else None
    if found is not None:
        return found, len(matches)
    if len(matches) <= 1:
        return outputs, 0
    half = len(matches) // 2
    outputs, count = _together(pool, outputs, matches[:half])
    there = set(pool.order(outputs))
    rest = [match for match in matches[half:] if there.issuperset(match.roots)]
    outputs, more = _together(pool, outputs, rest)
    return outputs, count + more


def _acyclic(pool: Pool, match: Match) -> bool:
    """Return whether no operand of a match depends on one of its outputs."""
    if len(match.roots) == 1:
        return True
    behind = pool.order(match.values.values())
    return set(behind).isdisjoint(match.roots)


def _with_operands(pool: Pool, value: int, operands: Sequence[int]) -> int:
    maker = pool.makers[value]
    if isinstance(maker, Leaf) or maker.inputs == tuple(operands):
        return value
    made = pool.apply_normal(maker.operator, maker.items, tuple(operands), maker.name)
    return made[maker.outputs.index(value)]
