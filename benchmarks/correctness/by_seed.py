"""Campaigns of models that follow from their seeds: what differs from the oracle is printed."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))
sys.path.append(str(Path(__file__).resolve().parents[2] / "tests"))

from harness import write


def campaign(
    name: str,
    title: str,
    command: str,
    counted: str,
    seeds: range,
    differences: Callable[[int], tuple[int, list[str]]],
) -> None:
    """Run a campaign, and leave the process with a status of 1 where something differs.

    Args:
        name, title: of the table. command: the arguments that repeat it. counted: what a model is
            compared by. differences: returns how many of these a seed's model had, and those that
            differ, as texts.
    """
    began, wrong, compared = time.perf_counter(), 0, 0
    for done, seed in enumerate(seeds, 1):
        count, found = differences(seed)
        for text in found:
            print(text, flush=True)
        wrong, compared = wrong + len(found), compared + count
        print(f"{done} of {len(seeds)} models, {wrong} differences", flush=True)
        row = {
            counted: compared,
            "models": done,
            "differences": wrong,
            "seconds": time.perf_counter() - began,
        }
        # After each model: a run that is ended leaves what it did.
        write(name, title, f"python benchmarks/correctness/{name}.py {command}", list(row), [row])
    sys.exit(1 if wrong else 0)
