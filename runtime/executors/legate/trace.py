"""Traces under Legate: a captured step's launches, fused into few tasks, and issued again.

Legate cannot replay from Python what it analysed. So everything on this side is decided once (the
bundles, their native entries, how stores are cut), and a replay only launches the bundles.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from soapstone.native.memory import Array
from soapstone.runtime.analysis.instance import READ, WRITE
from soapstone.runtime.analysis.operation import Operation
from soapstone.runtime.executors.legate.bundles import Work, fuse
from soapstone.runtime.executors.legate.lanes import Faults
from soapstone.runtime.executors.legate.start import Legate
from soapstone.runtime.executors.legate.stores import feed, publish
from soapstone.runtime.executors.legate.tasks import Running
from soapstone.runtime.model.launch import Launch
from soapstone.runtime.model.region import Region
from soapstone.runtime.observe.profile import Profile
from soapstone.runtime.tracing.trace import Trace

if TYPE_CHECKING:
    from soapstone.runtime.executors.legate.runtime import LegateRuntime


class _Compiled:
    """The running bundles of a step, for the arrays in which the host holds some regions."""

    def __init__(self, running: list[Running], hosted: dict[Region, Array], legate: Legate) -> None:
        self.running = running
        self.hosted = hosted
        weakref.finalize(self, legate.forget, [item.number for item in running])


def _by_processor(
    stamps: list[tuple[Operation, int, int]],
) -> list[tuple[list[Operation], Array]]:
    """What each processor ran, in order, with the times: when next, started, ended."""
    found: dict[int, list[tuple[Operation, int, int]]] = {}
    for stamp in sorted(stamps, key=lambda stamp: stamp[1]):
        found.setdefault(stamp[0].processor, []).append(stamp)
    return [
        ([stamp[0] for stamp in mine], np.array([(s, s, e) for _, s, e in mine], np.int64))
        for _, mine in sorted(found.items())
    ]


class LegateTrace(Trace):
    """A captured step of a runtime under Legate.

    operations: everything a replay runs, by id. Legate finds their dependences, so there are none
    in `edges`.
    """

    def __init__(self, runtime: LegateRuntime, name: str, works: list[Work]) -> None:
        self.name = name
        self.operations: list[Operation] = [o for work in works for o in work.operations]
        self.order = [operation.id for operation in self.operations]
        self.edges: Array = np.zeros((0, 2), np.int64)
        self._legate_runtime = runtime
        self._works = works
        self._faults = Faults()
        self._reads: set[Region] = set()  # what it needs from before
        self._writes: set[Region] = set()
        for work in works:
            for group in work.groups:
                whole = group.tiling.complete and not group.access & READ
                if group.region not in self._writes and not whole:
                    self._reads.add(group.region)
                if group.access & WRITE:
                    self._writes.add(group.region)
        self._compiled: dict[frozenset[Region], _Compiled] = {}
        self._compile()

    def _compile(self) -> _Compiled:
        """The bundles for the arrays that the host has now; the private buffers are claimed."""
        runtime = self._legate_runtime
        legate = runtime.legate
        hosted = {
            region: held.host
            for region in self._reads | self._writes
            if (held := runtime.find(region)) is not None and held.host is not None and held.at_host
        }
        key = frozenset(hosted)
        found = self._compiled.get(key)
        if found is not None and all(hosted[region] is found.hosted[region] for region in hosted):
            return found
        shared = {region: array for region, array in hosted.items() if region not in self._writes}
        front, back = [], []
        number = len(self.operations)
        for region, array in hosted.items():
            if region in shared or not region.size:
                continue
            if region in self._reads:
                front.append(runtime.placed(feed(region, array), number))
            if legate.nodes == 1:
                back.append(runtime.placed(publish(region, array), number + 1))
            number += 2
        bundles = fuse([*front, *self._works, *back], shared, runtime.analysis.policy.order)
        running = [
            Running(
                legate,
                runtime.machine,
                bundle,
                self._faults,
                shared,
                held=runtime.held,
                loops=True,
            )
            for bundle in bundles
        ]
        found = _Compiled(running, hosted, legate)
        nbytes = sum(bundle.private_bytes for bundle in bundles)
        if nbytes:
            runtime.memory.claim(found, 0, nbytes, f"the buffers of trace {self.name!r}")
        self._compiled[key] = found
        return found

    def replay(
        self, profile: bool | Profile | None = False, *, here: bool = False
    ) -> Profile | None:
        """Run the step once.

        profile: True for a timeline of this replay, or a timeline to add it to. Returns it.

        Raises: TaskError when an operation fails (the trace can be replayed again); StoppedError
        when the runtime is closed or stopped; MemoryExhausted.
        """
        runtime = self._legate_runtime
        with runtime.turn:
            runtime.quiet("replay")
            compiled = self._compile()
            if profile is True:
                profile = Profile(runtime.machine, self.name)
            timeline = profile or None
            self._faults.clear()
            stamps: list[tuple[Operation, int, int]] = []
            observer = runtime.observed(timeline)
            record = None if observer is None else lambda *found: stamps.append(found)
            for item in compiled.running:
                item.record = record
                item.issue()
            runtime.legate.fence()
            error = runtime.issuer.agreed(self._faults)
            runtime.wrote(self._writes)
            if error is not None:
                raise error
            if observer is not None:
                observer.add_replay(self, _by_processor(stamps))
            runtime.statistics.steps_replayed += 1
            return timeline

    def fits(self) -> bool:
        """True: stores are looked up by each replay."""
        return True

    @property
    def launches(self) -> Sequence[Launch]:
        """What was captured, in order, with the folds and fills of its reductions."""
        return [work.launch for work in self._works]

    @property
    def peak_bytes(self) -> int:
        """The bytes of the buffers that live within one task of Legate."""
        return max(
            sum(item.bundle.private_bytes for item in compiled.running)
            for compiled in self._compiled.values()
        )

    def describe(self) -> dict[str, Any]:
        """What the trace holds: operations by kind, and the tasks Legate gets for them."""
        compiled = next(reversed(self._compiled.values()))
        return {
            "name": self.name,
            "operations": dict(Counter(operation.kind for operation in self.operations)),
            "tasks": [
                {
                    "lanes": len(item.bundle.lanes),
                    "operations": len(item.bundle.operations),
                    "arguments": len(item.bundle.arguments),
                    "index_launch": item.forms is not None,
                }
                for item in compiled.running
            ],
            "peak_bytes": self.peak_bytes,
        }

    def __repr__(self) -> str:
        compiled = next(reversed(self._compiled.values()))
        return (
            f"Trace({self.name!r}: {len(self.operations)} operations in "
            f"{len(compiled.running)} Legate launches)"
        )
