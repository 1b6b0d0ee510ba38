"""Tasks that launch tasks: what they launched stays within the task, in time, bytes and privileges.

The launches of a task are a program on its arguments, and are judged as any other. Towards everyone
else the task stands for them, so what remains is that they used no more than it was given: the task
is found again as one that was running on those very bytes, with those privileges.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from soapstone.native.memory import Array
from soapstone.runtime.observe.checker.cells import empty
from soapstone.runtime.observe.checker.order import addresses
from soapstone.runtime.observe.checker.records import (
    Operation,
    Records,
    Region,
    Replay,
    Scope,
    Storage,
)
from soapstone.runtime.observe.checker.report import Report

_ANY = frozenset(["r", "w", "rw", "reduce"])
_ALLOWS = {"r": {"r"}, "w": _ANY, "rw": _ANY, "reduce": {"reduce"}}


def within(records: Records, report: Report) -> None:
    """Judge whether what tasks launched stayed within them. records: a whole log."""
    levels: dict[tuple[int, int], list[Records]] = {}
    for part in records.scopes:
        assert part.scope is not None
        levels.setdefault((part.rank, part.scope.depth), []).append(part)
    for (rank, depth), parts in levels.items():
        above = [records] if depth == 1 else levels.get((rank, depth - 1), [])
        tasks = _Tasks(above, rank)
        for part in parts:
            assert part.scope is not None
            who = f"task {part.scope.task!r}, point {part.scope.point}"
            for text in (*_granted(part), *_timely(part, part.scope), *tasks.missing(part)):
                report.add("launch", f"{who}: {text}")


def _granted(part: Records) -> Iterator[str]:
    """What was launched with privileges that the task itself does not have."""
    for launch in part.launches.values():
        for argument in launch.arguments:
            region = part.regions[argument.region]
            if region.held is not None and argument.privilege not in _ALLOWS[region.held]:
                yield (
                    f"launched {launch.name!r} with privilege {argument.privilege} on region "
                    f"{region.name!r}, on which it has {region.held}"
                )


def _timely(part: Records, scope: Scope) -> Iterator[str]:
    """What ran before the task began to launch, or after it had waited for the last."""
    for item in part.items:
        if isinstance(item, Operation):
            start, end = part.stamps[item.id]
            if not scope.begin <= start <= end <= scope.end:
                yield f"its {item.what} {item.name!r}, point {item.point}, ran outside of its time"


class _Tasks:
    """All tasks of one rank at one depth, by when they ran."""

    def __init__(self, logs: Sequence[Records], rank: int) -> None:
        self._tasks: list[tuple[Records, Operation]] = []
        runs: list[tuple[int, int]] = []

        def add(log: Records, operation: Operation, run: tuple[int, int]) -> None:
            here = log.rank if log.scope is not None else operation.rank
            if operation.what == "task" and here == rank:
                self._tasks.append((log, operation))
                runs.append(run)

        for log in logs:
            for item in log.items:
                if isinstance(item, Operation):
                    add(log, item, log.stamps[item.id])
                elif isinstance(item, Replay):
                    for operation in log.traces[item.trace].operations:
                        add(log, operation, item.runs[operation.id])
        self._runs: Array = np.array(runs, dtype=np.int64).reshape(-1, 2)

    def missing(self, part: Records) -> Iterator[str]:
        """The arguments that no task running all that time had: of each region, in words."""
        scope = part.scope
        assert scope is not None
        given = [s for s in part.storages.values() if part.regions[s.region].held is not None]
        running = (self._runs[:, 0] <= scope.begin) & (self._runs[:, 1] >= scope.end)
        candidates = [self._tasks[number] for number in np.nonzero(running)[0].tolist()]
        candidates = [pair for pair in candidates if pair[1].point == scope.point]
        lacking: list[Storage] | None = None
        for log, operation in candidates:
            some = [s for s in given if not self._has(log, operation, s, part.regions[s.region])]
            if lacking is None or len(some) < len(lacking):
                lacking = some
        if lacking is None:
            yield "it launches tasks, and no such task was running all that time"
        for storage in lacking or ():
            region = part.regions[storage.region]
            yield (
                f"tasks were launched on region {region.name!r} with {region.held}, on bytes that "
                "it did not have so"
            )

    def _has(self, log: Records, operation: Operation, storage: Storage, region: Region) -> bool:
        """Whether an operation was given the bytes of an instance with the privilege said."""
        if empty(storage.box):
            return True
        wanted = addresses(storage, storage.box)
        launch = log.launches.get(operation.launch or 0)
        for use, argument in zip(operation.uses, launch.arguments if launch else ()):
            if use.storage is None or argument.privilege != region.held:
                continue
            mine = log.storages[use.storage]
            fits = mine.itemsize == storage.itemsize and not empty(use.box)
            if fits and np.array_equal(addresses(mine, use.box), wanted):
                return True
        return False
