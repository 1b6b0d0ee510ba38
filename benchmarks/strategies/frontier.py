"""How long cost frontiers take: models' shapes, eliminations alone, and growth with operators.

    python benchmarks/strategies/frontier.py          all of these
    python benchmarks/strategies/frontier.py models   exact and to 1 %, on 16 described devices
    python benchmarks/strategies/frontier.py growth   to 500 operators, to 1,024 configurations each
    python benchmarks/strategies/frontier.py brute    500 random problems, against trying all

Seconds are of processors, which other work on a machine changes little, and of the
clock. Compiled code is warm.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[2] / "tests"))
sys.path.append(str(Path(__file__).resolve().parents[1]))

from harness import tabulate
from helpers.frontier_models import resnet, rnn, transformer
from helpers.frontier_problems import brute, checked, small

from soapstone.search.parallel.frontier.tables import Problem
from soapstone.search.parallel.frontier.tracking import track

Row = dict[str, Any]
EPS = 0.01


def timed(name: str, problem: Problem, **options: Any) -> Row:
    """Return a row: how long a frontier took, and what was found."""
    before = time.process_time()
    result = track(problem, **options)
    seconds = time.process_time() - before
    return {
        "model": name,
        "operators": len(problem.operators),
        "K": max(len(item.costs) for item in problem.operators),
        "how": ", ".join(f"{key} {value}" for key, value in options.items()) or "exact",
        "s of processors": round(seconds, 2),
        "s": round(result.seconds, 2),
        "points": len(result),
        "error": round(result.error, 4),
        **result.eliminations,
    }


def warm() -> None:
    """Compile all that is timed."""
    for options in ({}, {"eps": EPS}, {"prune": False}, {"prune": False, "eps": EPS}):
        track(rnn(1, 2), **options)  # type: ignore[arg-type]


def models() -> Iterator[Row]:
    """Yield what the shapes of models take."""
    made = {"wide-resnet": resnet(), "rnn 2 x 10": rnn(), "transformer 6 + 6": transformer()}
    for name, problem in made.items():
        yield timed(name, problem, eps=EPS)
    for name in ("wide-resnet", "rnn 2 x 10"):
        yield timed(name, made[name])
    linear = timed("wide-resnet 4", resnet(4), prune=False)
    yield linear
    alone = timed("wide-resnet 4", resnet(4), prune=False, method="elimination")
    yield alone | {"over linear": alone["s of processors"] / linear["s of processors"]}


def growth() -> Iterator[Row]:
    """Yield what more operators and more configurations of each change."""
    for blocks in (8, 16, 31, 62, 125):
        yield timed(f"wide-resnet {blocks}", resnet(blocks), eps=EPS)
    for blocks in (4, 8, 16):
        yield timed(f"wide-resnet {blocks}", resnet(blocks))
    for dims in (2, 3, 4, 5):
        yield timed(f"wide-resnet on {2**dims}", resnet(dims=dims), eps=EPS)
    for dims in (2, 3, 4):
        yield timed(f"wide-resnet on {2**dims}", resnet(dims=dims))


def against_brute_force(count: int = 500) -> Iterator[Row]:
    """Yield whether random problems have the frontier that trying everything gives."""
    for options in ({}, {"prune": False}, {"method": "elimination", "prune": False}):
        row: Row = {"how": ", ".join(f"{k} {v}" for k, v in options.items()) or "exact"}
        row |= {"problems": count, "equal": 0}
        for seed in range(count):
            problem = small(seed)
            result = track(problem, **options)  # type: ignore[arg-type]
            row["equal"] += checked(problem, list(result)) == brute(problem)
            for kind, many in result.eliminations.items():
                row[kind] = row.get(kind, 0) + many
        yield row


PARTS = {
    "models": (models, "How long frontiers take, by models' shapes on 16 devices"),
    "growth": (growth, "How long frontiers take, by operators and configurations of each"),
    "brute": (against_brute_force, "Frontiers against all combinations of random problems"),
}

if __name__ == "__main__":
    warm()
    for part in sys.argv[1:] or PARTS:
        rows, title = PARTS[part]
        tabulate(f"tracking_{part}", title, f"frontier.py {part}", rows(), ())
