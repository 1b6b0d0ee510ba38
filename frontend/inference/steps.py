"""Runs of any number of rows in steps: runs of numbers of rows that are bound already."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from soapstone.frontend.exchange import targets
from soapstone.ir.tensor import NOTHING, Array

MOST_STEPS = 8  # for one number; beyond, binding takes less than what larger batches gain


class Rows(NamedTuple):
    """What runs one number of rows: where it reads and writes them, and its run."""

    feeds: Mapping[str, Array]
    results: Mapping[str, Array]
    run: Callable[[], object]


def steps_of(rows: int, numbers: Iterable[int]) -> list[tuple[int, int]]:
    """Return the steps for so many rows, each a first row and a size; none if they are too many.

    The last step may begin at rows of the one before. If there are fewer rows than the smallest
    size, the only step reaches beyond them.
    """
    sizes, steps, begin = sorted(numbers, reverse=True), list[tuple[int, int]](), 0
    while sizes and begin < rows:
        number = next((n for n in sizes if n <= rows - begin), sizes[-1])
        begin = max(0, min(begin, rows - number))
        steps.append((begin, number))
        begin += number
        if len(steps) > MOST_STEPS:
            return []
    return steps


def run_in_steps(
    model: str,
    given: Mapping[str, Array],
    steps: Sequence[tuple[int, int]],
    of: Mapping[int, Rows],
    out: Mapping[str, Any] = NOTHING,
) -> dict[str, Array]:
    """Return the outputs by name for some rows, which are run in steps.

    model: its name, for errors. given, out: as of `InferenceSession.run`. of: by number of rows,
    what runs so many.
    """
    rows, some = len(next(iter(given.values()))), of[steps[0][1]].results
    whole = {
        name: np.broadcast_to(np.zeros((), array.dtype), (rows, *array.shape[1:]))
        for name, array in some.items()
    }
    into = targets(model, out, whole)
    found = {
        name: into[name] if name in into else np.empty(array.shape, array.dtype)
        for name, array in whole.items()
    }
    if any(np.may_share_memory(a, b) for a in into.values() for b in given.values()):
        given = {name: array.copy() for name, array in given.items()}
    for begin, number in steps:
        step, end = of[number], min(begin + number, rows)
        for name, feed in step.feeds.items():
            feed[: end - begin] = given[name][begin:end]
            feed[end - begin :] = given[name][-1:]
        step.run()
        for name, array in found.items():
            array[begin:end] = step.results[name][: end - begin]
    return found


__all__ = ["MOST_STEPS", "Rows", "run_in_steps", "steps_of"]
