"""What memory this process may still use: physical memory, what is free of it, control groups.

A region's pages come into being when they are touched, long after its allocation has succeeded;
by then the operating system can only end a process. So claims are compared beforehand with what
is really there. Numbers of a kernel without `/proc` are unknown, and limit nothing.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

_PAGE = os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 4096
# (files of a control group's limit, use, statistics), the statistic of pages it can give back
_VERSIONS = {
    2: ("memory.max", "memory.current", "inactive_file"),
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}


@dataclass(frozen=True)
class GroupLimit:
    """The limit of a control group this process is in, and how much of it is used, in bytes."""

    limit: int
    used: int


def physical_bytes() -> int:
    """The bytes this process could have at most: physical memory, or its control group's limit."""
    total = _PAGE * os.sysconf("SC_PHYS_PAGES")
    return min([total, *(group.limit for group in group_limits())])


def available_bytes() -> int | None:
    """The bytes this process can still use before something must be killed; None when unknown."""
    free = _meminfo("MemAvailable")
    room = [max(0, group.limit - group.used) for group in group_limits()]
    found = room if free is None else [free, *room]
    return min(found) if found else None


def resident_bytes() -> int:
    """The bytes of this process that are in memory now (0 when unknown)."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * _PAGE
    except (OSError, ValueError, IndexError):
        return 0


def group_limits(
    root: Path = Path("/sys/fs/cgroup"), membership: Path = Path("/proc/self/cgroup")
) -> list[GroupLimit]:
    """The memory limits of the control groups of this process, of both versions of the interface.

    A group obeys the limits of all groups above it. Inside a container its own group may appear
    as the root.
    """
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" and not controllers:
            version, top = 2, root
        elif "memory" in controllers.split(","):
            version, top = 1, root / "memory"
        else:
            continue
        group = PurePosixPath(path.lstrip("/"))
        for place in (group, *group.parents):
            limit = _limit(top / place, version)
            if limit is not None:
                found.append(limit)
    return found


def _limit(group: Path, version: int) -> GroupLimit | None:
    limit_file, used_file, reclaimable = _VERSIONS[version]
    try:
        limit = int((group / limit_file).read_text())  # "max": no limit
        used = int((group / used_file).read_text())
        statistics = (group / "memory.stat").read_text().splitlines()
    except (OSError, ValueError):
        return None
    pairs = dict(line.split() for line in statistics if len(line.split()) == 2)
    return GroupLimit(limit, max(0, used - int(pairs.get(reclaimable, 0))))


def _meminfo(field: str) -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        name, _, rest = line.partition(":")
        if name == field:
            return int(rest.split()[0]) * 1024
    return None
