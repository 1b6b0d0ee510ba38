"""Steps that trace themselves: the first run of a launch sequence is captured, later ones replayed.

A step is known by its launches: tasks, partitions, scalars, names and tags. A block that launches
the same sequence again replays; one that launches another sequence is captured as one more trace.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .launch import Launch
from .region import Region

if TYPE_CHECKING:
    from .dependence import Analysis
    from .trace import Trace

_LIMIT = 8  # traces kept for one step


@dataclass(frozen=True)
class Fill:
    """A fill that was asked for inside a step."""

    region: Region
    value: Any


Request = Launch | Fill


def signature(requests: list[Request]) -> Hashable:
    """What makes two launch sequences the same step.

    Raises: TypeError when a scalar or tag cannot be hashed.
    """
    found: list[Hashable] = []
    for request in requests:
        if isinstance(request, Fill):
            value = request.value
            found.append((request.region, value.dtype.str, value.tobytes()))
        else:
            tiles = tuple((p.region, p.tiling.uid, p.grid) for p in request.partitions)
            plain = tuple((type(scalar), scalar) for scalar in request.scalars)
            found.append(
                (request.task, tiles, plain, request.name, request.tag, request.initialise)
            )
    key = tuple(found)
    hash(key)
    return key


def issue(requests: list[Request], analysis: Analysis) -> None:
    """Give the requests of a step to an analysis, in order."""
    for request in requests:
        if isinstance(request, Fill):
            analysis.fill(request.region, request.value)
        else:
            analysis.launch(request)


class Steps:
    """The traces of the steps of one name, the most recently used last."""

    def __init__(self) -> None:
        self._traces: OrderedDict[Hashable, Trace] = OrderedDict()

    def get(self, key: Hashable) -> Trace | None:
        """The trace of a launch sequence, if it is known."""
        found = self._traces.get(key)
        if found is not None:
            self._traces.move_to_end(key)
        return found

    def put(self, key: Hashable, trace: Trace) -> None:
        """Keep a trace; the least recently used one makes room."""
        self._traces[key] = trace
        while len(self._traces) > _LIMIT:
            self._traces.popitem(last=False)
