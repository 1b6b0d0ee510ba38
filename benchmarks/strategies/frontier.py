"""How long cost frontiers take: models' shapes, eliminations alone, and growth with operators.

    python benchmarks/strategies/frontier.py          all but brute force
    python benchmarks/strategies/frontier.py models   exact and to 1 %, on 16 described devices
    python benchmarks/strategies/frontier.py growth   to 500 operators
    python benchmarks/strategies/frontier.py brute    500 random problems, against trying all

Seconds are of processors, which other work on a machine changes little, and of the
clock. Compiled code is warm.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[2] / "tests"))

from helpers.frontier_models import resnet, rnn, transformer
from helpers.frontier_problems import brute, checked, small

from soapstone.search.parallel.frontier.tables import Problem, Result
from soapstone.search.parallel.frontier.tracking import track

EPS = 0.01


def timed(problem: Problem, **options: Any) -> tuple[Result, float]:
    """Return a frontier and how many seconds of processors it took."""
    before = time.process_time()
    result = track(problem, **options)
    return result, time.process_time() - before


def show(name: str, problem: Problem, **options: Any) -> float:
    """Print a row, and return the seconds of processors."""
    result, seconds = timed(problem, **options)
    count, wide = len(problem.operators), max(len(item.costs) for item in problem.operators)
    kinds = " ".join(f"{kind} {many}" for kind, many in result.eliminations.items())
    how = " ".join(f"{key}={value}" for key, value in options.items()) or "exact"
    print(
        f"{name:22} {count:4} operators K {wide}  {how:28} {seconds:8.2f} s of processors"
        f" {result.seconds:8.2f} s  {len(result):6} points  error {result.error:.4f}  {kinds}",
        flush=True,
    )
    return seconds


def warm() -> None:
    """Compile all that is timed."""
    for options in ({}, {"eps": EPS}, {"prune": False}, {"prune": False, "eps": EPS}):
        track(rnn(1, 2), **options)  # type: ignore[arg-type]


def models() -> None:
    """Print what the shapes of models take."""
    made = {"wide-resnet": resnet(), "rnn 2 x 10": rnn(), "transformer 6 + 6": transformer()}
    for name, problem in made.items():
        show(name, problem, eps=EPS)
    for name in ("wide-resnet", "rnn 2 x 10"):
        show(name, made[name])
    linear = show("wide-resnet 4", resnet(4), prune=False)
    alone = show("wide-resnet 4", resnet(4), prune=False, method="elimination")
    print(f"linear dynamic programming over eliminations alone: {alone / linear:.1f} times faster")


def growth() -> None:
    """Print what more operators and fewer configurations change."""
    for blocks in (8, 16, 31, 62, 125):
        show(f"wide-resnet {blocks}", resnet(blocks), eps=EPS)
    for blocks in (4, 8, 16):
        show(f"wide-resnet {blocks}", resnet(blocks))


def against_brute_force(count: int = 500) -> None:
    """Print whether random problems have the frontier that trying everything gives."""
    counts: dict[str, int] = {}
    for seed in range(count):
        problem = small(seed)
        needed = brute(problem)
        for options in ({}, {"prune": False}, {"method": "elimination", "prune": False}):
            result = track(problem, **options)  # type: ignore[arg-type]
            if checked(problem, list(result)) != needed:
                raise SystemExit(f"problem {seed} {options}: another frontier")
            for kind, many in result.eliminations.items():
                counts[kind] = counts.get(kind, 0) + many
    print(f"{count} problems: equal sets, each point added up again; eliminations {counts}")


if __name__ == "__main__":
    parts = {"models": models, "growth": growth, "brute": against_brute_force}
    warm()
    for part in sys.argv[1:] or ("models", "growth"):
        parts[part]()
