"""The runtime core: regions, partitions, tasks with privileges, mappers, traces (after Legion).

Usable alone: it knows neither operators nor kernels. Importing it imports no compiler; Numba is
imported when a trace is compiled.
"""

from __future__ import annotations

from soapstone.runtime.analysis.nested import Scope
from soapstone.runtime.core import Runtime
from soapstone.runtime.errors import (
    BoundsError,
    LaunchError,
    MachineError,
    MapperError,
    MemoryExhausted,
    PrivilegeError,
    ProfileError,
    RuntimeCoreError,
    StoppedError,
    SubtaskError,
    TaskError,
    UnwrittenError,
)
from soapstone.runtime.machines.machine import Link, Machine, Memory, Processor
from soapstone.runtime.model.dependent import (
    by_field,
    difference,
    image,
    image_ranges,
    intersection,
    preimage,
    union,
)
from soapstone.runtime.model.future import Future, FutureMap
from soapstone.runtime.model.launch import Launch
from soapstone.runtime.model.mapper import DefaultMapper, Held, Layout, Mapper
from soapstone.runtime.model.partition import Partition
from soapstone.runtime.model.region import Region
from soapstone.runtime.model.region_fields import FieldRegion, FieldViews
from soapstone.runtime.model.sparse import IndexPartition
from soapstone.runtime.model.task import (
    Fields,
    PointContext,
    Privilege,
    Read,
    ReadWrite,
    Reduce,
    Returns,
    Task,
    Write,
    task,
)
from soapstone.runtime.observe.profile import Profile, estimate_offset
from soapstone.runtime.observe.statistics import Statistics
from soapstone.runtime.observe.view import View
from soapstone.runtime.tracing.capture import Recording
from soapstone.runtime.tracing.trace import Trace

__all__ = [
    "BoundsError",
    "DefaultMapper",
    "FieldRegion",
    "FieldViews",
    "Fields",
    "Future",
    "FutureMap",
    "Held",
    "IndexPartition",
    "Launch",
    "LaunchError",
    "Layout",
    "Link",
    "Machine",
    "MachineError",
    "Mapper",
    "MapperError",
    "Memory",
    "MemoryExhausted",
    "Partition",
    "PointContext",
    "Privilege",
    "PrivilegeError",
    "Processor",
    "Profile",
    "ProfileError",
    "Read",
    "ReadWrite",
    "Recording",
    "Reduce",
    "Region",
    "Returns",
    "Runtime",
    "RuntimeCoreError",
    "Scope",
    "Statistics",
    "StoppedError",
    "SubtaskError",
    "Task",
    "TaskError",
    "Trace",
    "UnwrittenError",
    "View",
    "Write",
    "by_field",
    "difference",
    "estimate_offset",
    "image",
    "image_ranges",
    "intersection",
    "preimage",
    "task",
    "union",
]
