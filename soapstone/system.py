"""All that depends on the operating system, each with what stands in for it where it is missing.

Nothing else in the package asks for cores, memory, processes, shared memory or foreign libraries by
a call that is not on Linux, macOS and Windows alike; `tests/native/test_platforms.py` looks for
such calls in the whole tree. What is unknown is None or 0, and limits nothing. But for `records`,
only the standard library is imported.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import math
import mmap
import os
import platform
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path, PurePosixPath
from typing import IO, Any

from soapstone.records import dataclass

WINDOWS = sys.platform == "win32"
_DEPTH, _CALL_BYTES = 100_000, 1 << 10  # of recursion; of the stack of C that one call may take
_THREAD_BYTES = 1 << 20  # of stack that threads have, at least
# Of control groups: where they are, those of this process, and the files of their shares of time.
_GROUPS, _MEMBERSHIP = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
_SHARES = {2: ("cpu.max",), 1: ("cpu.cfs_quota_us", "cpu.cfs_period_us")}
READ, WRITE, EXECUTE = 1, 2, 4  # PROT_READ and so on, which POSIX systems number alike

# -------------------------------------------------------------------------------------- processors


def usable_cores() -> int:
    """Return how many cores this process may use, at least 1.

    They are those that it may run on, or fewer where a control group limits the time on them, as of
    a container: more threads than that would all be stopped for the rest of each period.
    """
    cores = core_numbers()
    count = len(cores) if cores is not None else os.cpu_count() or 1
    return max(1, math.ceil(min(count, _own_share())))


@cache
def _own_share() -> float:
    return group_share()


def group_share(root: Path = _GROUPS, membership: Path = _MEMBERSHIP) -> float:
    """Return how many cores' time the control groups of this process have; infinite: no limit."""
    found = math.inf
    for group, version in _groups("cpu", root, membership):
        with contextlib.suppress(OSError, ValueError):  # "max": no limit
            texts = [(group / name).read_text() for name in _SHARES[version]]
            quota, period = map(int, " ".join(texts).split())
            if quota > 0 and period > 0:  # -1: no limit
                found = min(found, quota / period)
    return found


def core_numbers() -> list[int] | None:
    """Return the numbers of the cores this process may run on; None when the system tells none."""
    try:
        return sorted(os.sched_getaffinity(0))
    except (AttributeError, OSError):
        return None


def pin(core: int) -> None:
    """Keep the calling thread on a core, where the system can."""
    with contextlib.suppress(AttributeError, OSError):
        os.sched_setaffinity(0, {core})


def unpin() -> None:
    """Let the calling thread run where the process's first one may."""
    with contextlib.suppress(AttributeError, OSError):
        os.sched_setaffinity(0, os.sched_getaffinity(os.getpid()))


@cache
def processor_name() -> str:
    """Return the processor's name as its maker gives it, or its architecture."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


@cache
def processor_identity() -> str:
    """Return what tells the first processor from another model or stepping, "" if unknown."""
    told = ("vendor_id", "cpu family", "model", "stepping", "microcode", "flags")
    with contextlib.suppress(OSError), Path("/proc/cpuinfo").open() as stream:
        first = itertools.takewhile(str.strip, stream)
        lines = [line for line in first if line.partition(":")[0].strip() in told]
        return "".join(lines) if any(line.startswith("flags") for line in lines) else ""
    return ""


@cache
def cache_bytes(level: int) -> int:
    """Return the bytes of a data cache at a level, as one core sees it; a usual size if unknown."""
    for index in sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*")):
        with contextlib.suppress(OSError, ValueError, KeyError):
            kind = (index / "type").read_text().strip()
            if int((index / "level").read_text()) == level and kind != "Instruction":
                text = (index / "size").read_text().strip()
                return int(text[:-1]) * {"K": 1 << 10, "M": 1 << 20}[text[-1]]
    return {1: 32 << 10, 2: 1 << 20}.get(level, 32 << 20)


def memory_nodes() -> int | None:
    """Return how many memories the processors have (NUMA nodes); None when unknown."""
    return len(list(Path("/sys/devices/system/node").glob("node[0-9]*"))) or None


# ------------------------------------------------------------------------------------------- clock
# What `time.perf_counter_ns` reads, for native code: an identifier of `clock_gettime` (on macOS
# that of mach_absolute_time). None on Windows, where it is QueryPerformanceCounter.
CLOCK = "QueryPerformanceCounter" if WINDOWS else "clock_gettime"
CLOCK_ID: int | None = getattr(time, "CLOCK_UPTIME_RAW", getattr(time, "CLOCK_MONOTONIC", None))
YIELD = "SwitchToThread" if WINDOWS else "sched_yield"  # C function that lets other threads run
REST = "Sleep" if WINDOWS else "usleep"  # C function that sleeps for a number of ms, or us


def performance_frequency() -> int:
    """Return the ticks a second of Windows' QueryPerformanceCounter."""
    ticks = ctypes.c_int64()
    getattr(ctypes, "windll").kernel32.QueryPerformanceFrequency(ctypes.byref(ticks))  # noqa: B009
    return ticks.value


# ------------------------------------------------------------------------------------------ memory
# A region's pages come into being when they are touched, long after its allocation has succeeded;
# by then the operating system can only end a process. So claims are compared beforehand with what
# is really there.
PAGE = os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else mmap.PAGESIZE
_UNKNOWN_BYTES = 4 << 30  # of physical memory, where the system does not tell
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
    try:
        total = PAGE * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):
        total = _windows_memory("total") or _UNKNOWN_BYTES
    return min([total, *(group.limit for group in group_limits())])


def available_bytes() -> int | None:
    """The bytes this process can still use before something must be killed; None when unknown."""
    free = _kilobytes("/proc/meminfo", "MemAvailable") or _windows_memory("available")
    room = [max(0, group.limit - group.used) for group in group_limits()]
    found = room if free is None else [free, *room]
    return min(found) if found else None


def resident_bytes() -> int:
    """The bytes of this process that are in memory now (0 when unknown)."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE
    except (OSError, ValueError, IndexError):
        return 0


def group_limits(root: Path = _GROUPS, membership: Path = _MEMBERSHIP) -> list[GroupLimit]:
    """The memory limits of the control groups of this process."""
    found = (_limit(group, version) for group, version in _groups("memory", root, membership))
    return [limit for limit in found if limit is not None]


def _groups(controller: str, root: Path, membership: Path) -> Iterator[tuple[Path, int]]:
    """Yield the folders of this process's control groups, each with the interface's version.

    A group obeys the limits of all groups above it. Inside a container its own group may appear
    as the root.
    """
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" and not controllers:
            version, top = 2, root
        elif controller in controllers.split(","):
            version, top = 1, root / controller
        else:
            continue
        group = PurePosixPath(path.lstrip("/"))
        for place in (group, *group.parents):
            yield top / place, version


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


def _kilobytes(file: str, field: str) -> int | None:
    try:
        lines = Path(file).read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        name, _, rest = line.partition(":")
        if name == field:
            return int(rest.split()[0]) * 1024
    return None


class _MemoryStatus(ctypes.Structure):
    """Windows' MEMORYSTATUSEX."""

    _fields_ = (
        ("length", ctypes.c_uint32),
        ("load", ctypes.c_uint32),
        ("total", ctypes.c_uint64),
        ("available", ctypes.c_uint64),
        ("rest", ctypes.c_uint64 * 5),
    )


def _windows_memory(field: str) -> int | None:
    if not WINDOWS:
        return None
    status = _MemoryStatus(length=ctypes.sizeof(_MemoryStatus))
    kernel: Any = getattr(ctypes, "windll").kernel32  # noqa: B009
    found = kernel.GlobalMemoryStatusEx(ctypes.byref(status))
    return int(getattr(status, field)) if found else None


def peak_bytes(*, children: bool = False) -> int:
    """Return the most bytes this process, or one of its ended children, has had (0: unknown)."""
    own = None if children else _kilobytes("/proc/self/status", "VmHWM")
    if own is not None:  # what the call below gives begins at what the parent had
        return own
    try:
        import resource
    except ImportError:
        return 0
    who = resource.RUSAGE_CHILDREN if children else resource.RUSAGE_SELF
    return resource.getrusage(who).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def preemptions() -> int:
    """Return how often threads of this process lost their processor to others (0 when unknown)."""
    try:
        import resource
    except ImportError:
        return 0
    return resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw


@contextlib.contextmanager
def deep_recursion() -> Iterator[None]:
    """Let calls nest 100,000 deep, or as deep as the stack of C allows: some need `_CALL_BYTES`.

    The main thread of Linux gets the stack for it; elsewhere the limit stays where a deeper call
    is a RecursionError and does not end the process.
    """
    depth, room, before = sys.getrecursionlimit(), 0, None
    with contextlib.suppress(ImportError, OSError, ValueError):
        import resource

        unlimited, wanted = resource.RLIM_INFINITY, _DEPTH * _CALL_BYTES
        soft, hard = resource.getrlimit(resource.RLIMIT_STACK)
        room = wanted if soft == unlimited else soft
        if threading.current_thread() is not threading.main_thread():
            room = min(room, _THREAD_BYTES)
        elif sys.platform == "linux" and room < wanted:
            most = wanted if hard == unlimited else min(wanted, hard)
            resource.setrlimit(resource.RLIMIT_STACK, (most, hard))
            room, before = most, (soft, hard)
    sys.setrecursionlimit(max(depth, min(_DEPTH, room // _CALL_BYTES)))
    try:
        yield
    finally:
        sys.setrecursionlimit(depth)
        if before is not None:
            resource.setrlimit(resource.RLIMIT_STACK, before)


def use_large_pages(memory: mmap.mmap, first: int = 0, nbytes: int | None = None) -> None:
    """Ask for large pages under a mapping or a part of it, where the system has them."""
    with contextlib.suppress(AttributeError, OSError):
        memory.madvise(mmap.MADV_HUGEPAGE, first, len(memory) - first if nbytes is None else nbytes)


def drop_pages(memory: mmap.mmap, first: int, nbytes: int) -> None:
    """Say that the pages of a mapped file will not be read again, where the system listens."""
    with contextlib.suppress(AttributeError, OSError):
        memory.madvise(mmap.MADV_DONTNEED, first, nbytes)


def give_back_freed() -> None:
    """Give memory that was freed back to the system, where C's library keeps it (glibc)."""
    with contextlib.suppress(AttributeError, OSError, TypeError):  # Windows has no CDLL(None)
        ctypes.CDLL(None).malloc_trim(0)


# ------------------------------------------------------------------------------ files and processes


def allocate(descriptor: int, nbytes: int) -> None:
    """Give a new file its size, and room on the disk, which takes longer as it is written.

    Raises: OSError when there is no room left.
    """
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(descriptor, 0, nbytes)
    else:
        os.ftruncate(descriptor, nbytes)


def write_at(descriptor: int, parts: Sequence[Any], offset: int) -> None:
    """Write parts into a file, one behind another: at most 1,000, of 1 GB together.

    Raises: OSError when there is no room left.
    """
    if hasattr(os, "pwritev"):
        nbytes = os.pwritev(descriptor, parts, offset)
    else:
        os.lseek(descriptor, offset, os.SEEK_SET)
        nbytes = os.write(descriptor, b"".join(parts))
    if nbytes != sum(map(len, parts)):
        raise OSError(f"{nbytes} bytes were written; there is no room for more")


def private_copy(descriptor: int) -> mmap.mmap:
    """Return the bytes of a file that is not empty; what is written there is this process's alone.

    Raises: OSError when it cannot be mapped.
    """
    return mmap.mmap(descriptor, 0, access=mmap.ACCESS_COPY)


def anonymous_file(nbytes: int) -> int:
    """Return the descriptor of a file of zeros that has no name.

    Raises: OSError when there is no descriptor or no room left.
    """
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("soapstone")
    else:
        import tempfile  # which takes long

        with tempfile.TemporaryFile() as file:
            descriptor = os.dup(file.fileno())
    try:
        os.ftruncate(descriptor, nbytes)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def open_of_process(process: int, descriptor: int) -> int:
    """Return a descriptor of a file that another process has open under a number.

    Raises: OSError when there is no such file, or the system lets none be had.
    """
    return os.open(f"/proc/{process}/fd/{descriptor}", os.O_RDWR)


def is_alive(process: int) -> bool:
    """Return whether a process of this computer runs: it exists, and is no zombie."""
    try:
        with open(f"/proc/{process}/stat", "rb") as stream:
            state = stream.read().rpartition(b")")[2].split()[0]
    except FileNotFoundError:
        return not os.path.isdir("/proc/self")
    except OSError:
        return True
    return state not in (b"Z", b"X")


def shared_memory_files(prefix: str) -> set[str]:
    """Return the files of shared memory that this process has mapped and whose names so begin."""
    try:
        with open("/proc/self/maps", errors="surrogateescape") as stream:
            return {line.split()[-1] for line in stream if f"/dev/shm/{prefix}" in line}
    except OSError:
        return set()


_LOCK_S = 0.02  # between looks at whether another process still has a lock


@contextlib.contextmanager
def locked(path: Path, waiting: Callable[[], None] | None = None) -> Iterator[None]:
    """Hold a file's lock, which one process has at a time; hold nothing where there is no lock.

    waiting: called again and again while another process has it; what it raises ends the waiting.
    """
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(ImportError, OSError):
            file: IO[str] = stack.enter_context(open(path, "w"))
            import fcntl

            while True:
                try:
                    rest = 0 if waiting is None else fcntl.LOCK_NB
                    fcntl.flock(file, fcntl.LOCK_EX | rest)  # let go when the file is closed
                    break
                except BlockingIOError:
                    assert waiting is not None
                    waiting()
                    time.sleep(_LOCK_S)
        yield


# --------------------------------------------------------------------------------------- libraries


@cache
def openmp() -> ctypes.CDLL | None:
    """Return the system's OpenMP library, GNU's or one that has its functions, or None."""
    names = ["libgomp.so.1"]
    if sys.platform != "linux":
        from ctypes.util import find_library

        names += [found for name in ("gomp", "omp") if (found := find_library(name))]
    for name in names:
        with contextlib.suppress(OSError, AttributeError):
            library = ctypes.CDLL(name)
            _ = library.GOMP_parallel, library.omp_get_thread_num, library.omp_set_num_threads
            return library
    return None


def writable(nbytes: int) -> mmap.mmap:
    """Return pages of zeros, which no file has."""
    return mmap.mmap(-1, max(nbytes, 1))


def private_pages(nbytes: int) -> mmap.mmap:
    """Return pages of zeros that this process has alone; a child has them as they were."""
    flags = getattr(mmap, "MAP_PRIVATE", 0) | getattr(mmap, "MAP_ANONYMOUS", 0)
    return mmap.mmap(-1, nbytes, flags) if flags else mmap.mmap(-1, nbytes)


def mapped() -> list[tuple[int, int]]:
    """Return the addresses of all memory of this process, from and to, in order; [] if unknown."""
    found: list[tuple[int, int]] = []
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/maps").read_bytes().split(b"\n")[:-1]:  # names in any encoding
            low, high = (int(each, 16) for each in line.split(None, 1)[0].split(b"-"))
            if high >> 63:  # the system's own
                continue
            if found and found[-1][1] == low:
                low = found.pop()[0]
            found.append((low, high))
    return found


def keep(thing: object) -> None:
    """Let an object stay as long as the process: threads may use it while the interpreter ends."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))


def start(memory: mmap.mmap) -> int:
    """Return the address of pages, which then stay as long as the process."""
    view = ctypes.c_char.from_buffer(memory)
    keep(view)
    return int(ctypes.cast(ctypes.byref(view), ctypes.c_void_p).value or 0)


def make_executable(memory: mmap.mmap) -> bool:
    """Let pages be executed and no more be written to; return whether the system does so."""
    return protect(start(memory), len(memory), READ | EXECUTE)


def protect(place: int, nbytes: int, rights: int) -> bool:
    """Let the pages of some memory be used so alone; return whether the system does so."""
    try:
        change = ctypes.CDLL(None, use_errno=True).mprotect
    except (AttributeError, OSError, TypeError):  # no such function; no such library on Windows
        return False
    change.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    first = place // PAGE * PAGE
    return bool(change(first, place + nbytes - first, rights) == 0)


def address(function: Any) -> int:
    """Return the address of a C function."""
    return int(ctypes.cast(function, ctypes.c_void_p).value or 0)
