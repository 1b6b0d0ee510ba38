"""The fewest bytes that any memory plan of a small graph moves: Dijkstra over single copies."""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from itertools import count

import numpy as np

from soapstone.ir.builder import GraphBuilder
from soapstone.ir.graph import Graph
from soapstone.search.placement.timeline import Timeline, aligned


def random_graph(seed: int, nodes: int = 6) -> Graph:
    """Return a graph of sums of one to three values whose sizes vary, some of them outputs."""
    random = np.random.default_rng(seed)
    builder = GraphBuilder(f"random{seed}")
    values = []
    for number in range(int(random.integers(1, 4))):
        builder.input(f"x{number}", (int(random.integers(1, 6)), 16))
        values.append(f"x{number}")
    made: list[str] = []
    for number in range(nodes):
        count_taken = min(len(values), int(random.integers(1, 4)))
        taken = [str(value) for value in random.choice(values, count_taken, replace=False)]
        if count_taken == 1:
            rows = int(random.integers(1, builder.spec(taken[0]).shape[0] + 1))
            bounds = {"starts": (0, 0), "stops": (rows, 16), "steps": (1, 1)}
            (value,) = builder.apply("slice", *taken, name=f"n{number}", **bounds)
        else:
            (value,) = builder.apply("concat", *taken, name=f"n{number}", axis=0)
        made.append(value)
        values.append(value)
    read = {value for node in builder.nodes for value in node.inputs}
    builder.output(*(v for v in made if v not in read or random.random() < 0.2))
    return builder.build()


def optimum(
    graph: Graph, capacity: int, workspace: Mapping[str, int] | None = None, *, any_order: bool
) -> int | None:
    """Return the fewest bytes moved, one run, fetch, copy-out or drop at a time; None: no plan.

    A state is the nodes that ran, what is in the fast memory, and what of it is nowhere else.
    """
    names, sizes = list(graph.tensors), [spec.nbytes for spec in graph.tensors.values()]
    index = {name: n for n, name in enumerate(names)}
    made = {index[v] for v in graph.producers}
    results = {index[v] for v in graph.results if v in graph.producers}
    reads = [frozenset(index[v] for v in node.inputs) for node in graph.nodes]
    writes = [frozenset(index[v] for v in node.outputs) for node in graph.nodes]
    beside = [aligned((workspace or {}).get(node.name, 0)) for node in graph.nodes]
    maker = {v: n for n, out in enumerate(writes) for v in out}
    everything = frozenset(range(len(reads)))
    none: frozenset[int] = frozenset()
    space = lambda held: sum(aligned(sizes[v]) for v in held)  # noqa: E731
    order, best, ends = count(), {}, None
    queue = [(0, next(order), none, none, none)]
    while queue:
        cost, _, ran, held, dirty = heapq.heappop(queue)
        if best.get((ran, held, dirty), 1 << 62) < cost:
            continue
        if ran == everything and not dirty & results:
            ends = cost
            break
        following = []
        for n in everything - ran:
            ready = all(maker[v] in ran for v in reads[n] if v in maker)
            if ready if any_order else n == len(ran):
                after = held | writes[n]
                if reads[n] <= held and space(after) + beside[n] <= capacity:
                    following.append((cost, ran | {n}, after, dirty | writes[n]))
        for v in range(len(names)):
            live = any(v in reads[n] for n in everything - ran)
            if v in held:
                if v in dirty:
                    if live or v in results:
                        following.append((cost + sizes[v], ran, held, dirty - {v}))
                    else:
                        following.append((cost, ran, held - {v}, dirty - {v}))
                else:
                    following.append((cost, ran, held - {v}, dirty))
            elif live and (v not in made or maker[v] in ran) and space(held | {v}) <= capacity:
                following.append((cost + sizes[v], ran, held | {v}, dirty))
        for reached in following:
            if best.get(reached[1:], 1 << 62) > reached[0]:
                best[reached[1:]] = reached[0]
                heapq.heappush(queue, (reached[0], next(order), *reached[1:]))
    return ends


def mixed_integer_bytes(known: Timeline) -> int | None:
    """Return the fewest bytes moved, by a mixed-integer program (HiGHS); None without SciPy.

    A variable says for each gap whether it is bridged, and one for each value if it is copied out.
    """
    try:
        from scipy.optimize import Bounds, LinearConstraint, milp
    except ImportError:
        return None
    gaps, prices = known.gaps, known.prices
    written = sorted({gap.value for gap in gaps if prices[gap].dirty})
    count, steps = len(gaps), len(known.order)
    if not gaps:
        return known.least_bytes
    cost = [-prices[gap].fetch for gap in gaps] + [known.nbytes[v] for v in written]
    room = np.zeros((steps, len(cost)))
    links = []
    for number, gap in enumerate(gaps):
        room[gap.first + 1 : gap.last, number] = known.padded[gap.value]
        if prices[gap].dirty:  # bridged + copied out >= 1
            links.append(np.zeros(len(cost)))
            links[-1][[number, count + written.index(gap.value)]] = 1
    limits = [LinearConstraint(room, ub=known.capacity_bytes - known.needs)]
    if links:
        limits.append(LinearConstraint(np.array(links), lb=1))
    found = milp(cost, constraints=limits, integrality=np.ones(len(cost)), bounds=Bounds(0, 1))
    return known.least_bytes + sum(prices[gap].fetch for gap in gaps) + round(found.fun)
