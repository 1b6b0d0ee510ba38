"""Graphs optimised for a GPU, answered there at batch 1 beside those that are not.

    python benchmarks/optimization/gpu_optimize.py [--models nasrnn] [--no-write]

Launches are measured on the GPU while a graph is optimised; what is measured is kept, so a run that
was stopped needs less. Both graphs then answer in turns, in sessions of one process. MetaFlow and
TASO report 1.3 to 2.8 times over their own starting point on these three models.
"""

from __future__ import annotations

import statistics
import sys
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1]))

from gpu_figures import TINY, batch_of, table_of
from harness import rounds_of

from soapstone import InferenceSession, optimize
from soapstone.frontend.strategies.finding import forward_of

MODELS: dict[str, dict[str, Any]] = {"resnext": {"branches": True}, "nasnet": {}, "nasrnn": {}}
SEARCH_S, ROUNDS = 150.0, 7


def row(name: str, tiny: bool) -> dict[str, Any]:
    """Return a model's row."""
    sizes = {**MODELS[name], **(TINY[name] if tiny else {})}
    graph, weights = forward_of(name, 1, sizes=sizes)
    few = {"candidates": 2} if tiny else {}
    found = optimize(graph, weights, machine="gpu", seconds=SEARCH_S, **few)
    given = batch_of(graph)
    sides = {"original": (graph, weights), "optimized": (found.graph, found.weights)}
    rounds, ms = {}, {which: list[float]() for which in sides}
    for which, (each, held) in sides.items():
        session = InferenceSession(each, held, gpus=1)
        rounds[which] = rounds_of(lambda session=session: session.run(given))
    for _ in range(1 if tiny else ROUNDS):
        for which, one in rounds.items():
            ms[which].append(one()["ms"])
    before, after = found.before, found.after
    return {
        **{f"{which} ms": statistics.median(times) for which, times in ms.items()},
        "speedup": statistics.median(a / b for a, b in zip(*ms.values())),
        "speedup of prices": before.time_us / after.time_us,
        "launches": f"{before.launches} -> {after.launches}",
        "kept": found.kept,
        "reason": found.reason,
        "s": found.seconds,
        "complete": found.complete,
    }


if __name__ == "__main__":
    sys.exit(table_of(__file__, __doc__, "Optimised graphs on a GPU, batch 1", list(MODELS), row))
