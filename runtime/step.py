"""Steps that trace themselves: the first run of a launch sequence is captured, later ones replayed.

A step is known by its launches: tasks, partitions, scalars, names and tags. A block that launches
the same sequence again replays; one that launches another sequence is captured as one more trace.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

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

_PLAIN = (int, bool, str, bytes, type(None), type)


def exact(scalar: object) -> Hashable:
    """A key equal for scalars that are the same to the last bit, unlike `==` (0.0, -0.0, 1, True).

    Raises: TypeError for what may change without notice: anything but numbers, text, None, types,
    and tuples of them.
    """
    kind = type(scalar)
    if kind in _PLAIN:
        return (kind, scalar)
    if isinstance(scalar, np.generic):
        return (scalar.dtype.str, scalar.tobytes())
    if isinstance(scalar, float) and kind is float:
        return (kind, scalar.hex())
    if isinstance(scalar, complex) and kind is complex:
        return (kind, scalar.real.hex(), scalar.imag.hex())
    if isinstance(scalar, tuple) and kind is tuple:
        return (kind, *[exact(item) for item in scalar])
    if isinstance(scalar, np.dtype):
        return (np.dtype, scalar)
    raise TypeError(f"{kind.__name__} is no number, text or tuple of them")


def _known(scalar: Any) -> Hashable:
    try:
        return exact(scalar)
    except TypeError:
        return (type(scalar), scalar)


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
            plain = tuple(_known(scalar) for scalar in request.scalars)
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
