"""Analyses of captures, reused for like launches on regions of other shapes.

Where one worker runs all in the order of the program, in one memory, what an analysis finds depends
on which launch has which region, and not on extents: it is taken over from the trace.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

from soapstone.runtime.analysis.instance import Storage, Use
from soapstone.runtime.analysis.operation import Operation
from soapstone.runtime.model.launch import Launch
from soapstone.runtime.model.region import Region
from soapstone.runtime.tracing.step import Request, issue

if TYPE_CHECKING:
    from soapstone.runtime.analysis.policy import Policy
    from soapstone.runtime.tracing.capture import CaptureAnalysis, Recorder
    from soapstone.runtime.tracing.trace import Trace


class AnalysisCache:
    """Traces of one runtime, as long as somebody has them, by what their analysis depends on."""

    def __init__(self) -> None:
        self._traces: WeakValueDictionary[Hashable, Trace] = WeakValueDictionary()

    def analyse(
        self, requests: list[Request], analysis: CaptureAnalysis, recorder: Recorder
    ) -> Hashable:
        """Analyse launches, or record what that of like ones found; return the key of both.

        None where the analysis depends on more.
        """
        key = _pattern(requests, analysis.policy) if _by_regions(analysis) else None
        trace = None if key is None else self._traces.get(key)
        if trace is None:
            issue(requests, analysis)
        else:
            _record(requests, trace, analysis, recorder)
        return key

    def note(self, key: Hashable, trace: Trace) -> None:
        """Take note of the trace of analysed launches. key: as it was returned."""
        if key is not None:
            self._traces[key] = trace


def _by_regions(analysis: CaptureAnalysis) -> bool:
    """Return whether an analysis says the same of launches on regions of other shapes."""
    policy = analysis.policy
    alone = analysis.world.size == 1 == len(analysis.machine.workers)
    told = policy.agreement is None and analysis.log is None
    return alone and told and not (analysis.spaces or policy.many_instances or policy.asks_how)


def _pattern(requests: Sequence[Request], policy: Policy) -> Hashable:
    numbers: dict[Region, int] = {}
    found: list[Hashable] = []
    for request in requests:
        if not isinstance(request, Launch) or request.points > 1 or request.scalars:
            return None
        for partition, privilege in zip(request.partitions, request.task.privileges):
            if privilege.reduction is not None or partition.tiling.empty:
                return None
            region = partition.region
            number = numbers.get(region)
            if number is None:
                number = numbers[region] = len(numbers)
                found += region.transient, policy.order(region, request)
            found += number, privilege
        found.append(request.task.kind)
    return tuple(found)


def _record(
    requests: Sequence[Request], trace: Trace, analysis: CaptureAnalysis, recorder: Recorder
) -> None:
    """Record the operations of launches, as they are in a trace of like ones."""
    storages: dict[Region, Storage] = {}
    for request, before in zip(requests, trace.operations, strict=True):
        assert isinstance(request, Launch)
        uses = []
        for partition, use in zip(request.partitions, before.uses, strict=True):
            region = partition.region
            storage = storages.get(region)
            if storage is None:
                assert use.storage is not None
                memory, order = use.storage.memory, use.storage.order
                if region.transient:
                    storage = Storage(region, memory, ((0,) * region.rank, region.shape), order)
                else:
                    storage = analysis.instance(region, memory).storage
                storages[region] = storage
            uses.append(Use(storage, partition.tiling.boxes[0], use.writes, use.squeeze))
        recorder.operations.append(
            Operation(
                *(before.id, request, before.point, before.processor, tuple(uses)),
                *(before.priority, before.variant, before.idle),
            )
        )
    recorder.emit((), *trace.edges.T)
    analysis.requests += requests
    analysis.statistics.launches += len(requests)
    analysis.statistics.points += len(requests)


__all__ = ["AnalysisCache"]
