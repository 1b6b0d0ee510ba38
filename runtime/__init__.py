"""The runtime core: regions, partitions, tasks with privileges, mappers, traces (after Legion).

Usable alone: it knows neither operators nor kernels. Importing it imports no compiler; Numba is
imported when a trace is compiled.
"""

from __future__ import annotations

from .core import Recording, Runtime
from .dependent import (
    by_field,
    difference,
    image,
    image_ranges,
    intersection,
    preimage,
    union,
)
from .errors import (
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
from .fields import FieldRegion, FieldViews
from .future import Future, FutureMap
from .launch import Launch
from .machine import Link, Machine, Memory, Processor
from .mapper import DefaultMapper, Held, Layout, Mapper
from .nested import Scope
from .partition import Partition
from .profile import Profile, estimate_offset
from .region import Region
from .sparse import IndexPartition
from .statistics import Statistics
from .task import (
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
from .trace import Trace
from .view import View

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
