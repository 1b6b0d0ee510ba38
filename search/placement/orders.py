"""Orders of a graph's nodes that may need less memory at once than the given one."""

from __future__ import annotations

from soapstone.ir.analysis.footprint import Footprint, Touches


def frees_early(footprint: Footprint) -> tuple[int, ...]:
    """Return the nodes' numbers, in an order in which nodes that free memory run early.

    Of the ready nodes, the one that leaves the fewest bytes alive runs next if that is fewer than
    now, else the first in the given order. Results of the graph count as freed, since they may
    leave at once.
    """
    sizes, given, results = footprint.sizes, footprint.given, footprint.results
    remaining: dict[str, int] = {}
    for node in footprint.nodes:
        for value in node.values:
            remaining[value] = remaining.get(value, 0) + 1
    followers: list[list[int]] = [[] for _ in footprint.nodes]
    for number, before in enumerate(footprint.after):
        for earlier in before:
            followers[earlier].append(number)
    waits = [len(before) for before in footprint.after]
    ready = {number for number, count in enumerate(waits) if not count}
    touched: set[str] = set()

    def growth(node: Touches) -> int:
        new = old = 0
        for value in node.values:
            last, known = remaining[value] == 1, value in touched
            if value in results and value not in given:
                continue
            if not known and not last and value not in given:
                new += sizes[value]
            elif known and last:
                old += sizes[value]
        return new - old

    order: list[int] = []
    while ready:
        chosen = min(ready, key=lambda n: (min(0, growth(footprint.nodes[n])), n))
        ready.remove(chosen)
        order.append(chosen)
        for value in footprint.nodes[chosen].values:
            remaining[value] -= 1
            touched.add(value)
        for follower in followers[chosen]:
            waits[follower] -= 1
            if not waits[follower]:
                ready.add(follower)
    return tuple(order)
