"""The runtime core: regions, partitions, tasks with privileges, mappers, traces (after Legion).

Usable alone: it knows neither operators nor kernels. Importing it imports no compiler; Numba is
imported when a trace is compiled.
"""

from __future__ import annotations

from .core import Recording, Runtime
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
    TaskError,
    UnwrittenError,
)
from .launch import Launch
from .machine import Link, Machine, Memory, Processor
from .mapper import DefaultMapper, Held, Layout, Mapper
from .partition import Partition
from .profile import Profile, estimate_offset
from .region import Region
from .statistics import Statistics
from .task import PointContext, Privilege, Read, ReadWrite, Reduce, Task, Write, task
from .trace import Trace
from .view import View

__all__ = [
    "BoundsError",
    "DefaultMapper",
    "Held",
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
    "Runtime",
    "RuntimeCoreError",
    "Statistics",
    "StoppedError",
    "Task",
    "TaskError",
    "Trace",
    "UnwrittenError",
    "View",
    "Write",
    "estimate_offset",
    "task",
]
