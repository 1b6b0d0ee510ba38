"""Steps that trace themselves: the first run of a launch sequence is captured, later ones replayed.

A step is known by its launches: tasks, partitions, scalars, names and tags. A block that launches
the same sequence again replays; one that launches another sequence is captured as one more trace.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Hashable
from typing import TYPE_CHECKING, Any

import numpy as np

from soapstone.dtypes import code_of
from soapstone.records import dataclass
from soapstone.runtime.errors import LaunchError
from soapstone.runtime.model.launch import Launch
from soapstone.runtime.model.region import Region
from soapstone.runtime.model.region_fields import FieldRegion
from soapstone.runtime.model.scalar import exact

if TYPE_CHECKING:
    from soapstone.runtime.analysis.dependence import Analysis
    from soapstone.runtime.analysis.desugar import Step
    from soapstone.runtime.tracing.trace import Trace

_LIMIT = 8  # traces kept for one step


@dataclass(frozen=True)
class Fill:
    """A fill that was asked for inside a step."""

    region: Region
    value: Any


Request = Launch | Fill


def fills(region: Region, value: Any) -> list[Fill]:
    """The fills of a region, in all its fields, with a scalar that their dtypes can hold.

    Raises: LaunchError for a value that is no scalar or does not fit.
    """
    if isinstance(region, FieldRegion):
        return [fill for each in region.fields.values() for fill in fills(each, value)]
    try:
        held = np.asarray(value)
        if held.ndim or not np.can_cast(held.dtype, region.dtype, casting="same_kind"):
            found = np.asarray(value, dtype=region.dtype)
            if held.ndim or found != held:
                raise ValueError("not a scalar of that kind")
        return [Fill(region, held.astype(region.dtype)[()])]
    except (TypeError, ValueError, OverflowError) as error:
        raise LaunchError(
            f"fill of region {region.name!r}: found {value!r}, "
            f"needed a scalar that fits {region.dtype}"
        ) from error


def _known(scalar: Any) -> Hashable:
    try:
        return exact(scalar)
    except TypeError:
        return (type(scalar), scalar)


def signature(requests: list[Request], own: Collection[Region] = ()) -> Hashable:
    """What makes two launch sequences the same step.

    own: regions that are this run's alone (the values of its futures), as transient regions are:
    another run has others in their place. They are known by the order of their first use.

    Raises: TypeError when a scalar or tag cannot be hashed.
    """
    mine = set(own)
    numbers: dict[Region, Hashable] = {}

    def known(region: Region) -> Hashable:
        if not region.transient and region not in mine:
            return region
        found = numbers.get(region)
        if found is None:
            kind = code_of(region.dtype)
            found = (len(numbers), region.shape, kind, region.name, region.transient)
            numbers[region] = found
        return found

    found: list[Hashable] = []
    for request in requests:
        if isinstance(request, Fill):
            value = request.value
            found.append((known(request.region), code_of(value.dtype), value.tobytes()))
        else:
            tiles = tuple((known(p.region), p.tiling.uid, p.grid) for p in request.partitions)
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
        self._traces: OrderedDict[Hashable, tuple[Trace, Step]] = OrderedDict()

    def get(self, key: Hashable) -> tuple[Trace, Step] | None:
        """The trace of a launch sequence and the run it was captured from, if it is known."""
        found = self._traces.get(key)
        if found is not None:
            self._traces.move_to_end(key)
        return found

    def put(self, key: Hashable, trace: Trace, first: Step) -> None:
        """Keep a trace and the run it is of; the least recently used one makes room."""
        self._traces[key] = (trace, first)
        while len(self._traces) > _LIMIT:
            self._traces.popitem(last=False)
