"""OpenMP, as oneDNN and kernels call it: by names, arguments and results of GNU's library.

On Linux its regions are of teams (`threads/teams.py`), and `adopt` puts the functions in the place
of GNU's in a library that was compiled to call these. Elsewhere OpenMP is the system's, if it has
one.

Source: GNU libgomp's manual, "The libgomp ABI"
"""

from __future__ import annotations

import ctypes
import os
from functools import cache
from typing import Any

import numpy as np

from soapstone import system
from soapstone.locks import Lock
from soapstone.native.entries import native, routine
from soapstone.native.intrinsics import POINTER, VOID, calling, i64p
from soapstone.native.threads.linking import replace
from soapstone.native.threads.teams import (
    ASKED,
    DEPTH,
    LOOP,
    OUTER_PARTS,
    PART,
    PARTS,
    POLICY,
    awake_ns,
    end_region,
    meet,
    most_threads,
    prepare,
    start_region,
    supported,
    this_thread,
)

_FIRST, _STOP, _STEP, _CHUNK, _TURN = range(LOOP, LOOP + 5)  # words of a thread's loop
_call = calling(VOID, POINTER)
_MAKING = Lock()
_EVERYWHERE = (
    *("GOMP_parallel", "omp_get_thread_num", "omp_get_num_threads"),
    *("omp_get_max_threads", "omp_set_num_threads"),
)
_GET, _SET = ctypes.CFUNCTYPE(ctypes.c_int), ctypes.CFUNCTYPE(None, ctypes.c_int)


@native("void(int64, int64, int32)")
def _parallel_start(function: int, data: int, threads: int) -> None:
    start_region(function, data, threads)


@native("void()")
def _parallel_end() -> None:
    end_region()


@native("void(int64, int64, int32, int32)")
def _parallel(function: int, data: int, threads: int, flags: int) -> None:
    start_region(function, data, threads)
    _call(function, data)
    end_region()


@native("int32()")
def _thread_num() -> Any:
    return np.int32(i64p(this_thread())[PART])


@native("int32()")
def _num_threads() -> Any:
    return np.int32(i64p(this_thread())[PARTS])


@native("int32()")
def _max_threads() -> Any:
    return np.int32(most_threads(this_thread()))


@native("int32()")
def _in_parallel() -> Any:
    r = i64p(this_thread())
    within = (r[DEPTH] > 0 and r[PARTS] > 1) or (r[DEPTH] > 1 and r[OUTER_PARTS] > 1)
    return np.int32(1 if within else 0)


@native("void(int32)")
def _set_num_threads(threads: int) -> None:
    i64p(this_thread())[ASKED] = threads


@native("void()")
def _barrier() -> None:
    meet()


@routine
def _turn(thread: int, first: int, stop: int) -> Any:
    """Write the bounds of the next iterations that are the calling thread's; 0: no more."""
    r = i64p(thread)
    step, chunk, turn = r[_STEP], r[_CHUNK], r[_TURN]
    part, parts = r[PART], r[PARTS]
    count = (r[_STOP] - r[_FIRST] + step - (1 if step > 0 else -1)) // step
    if chunk == 0:  # a block each, as even as can be
        each, more = count // parts, count % parts
        begin = part * each + min(part, more)
        end = begin + each + (1 if part < more else 0) if turn == 0 else begin
    else:
        begin = (turn * parts + part) * chunk
        end = min(begin + chunk, count)
    r[_TURN] = turn + 1
    i64p(first)[0] = r[_FIRST] + begin * step
    i64p(stop)[0] = r[_FIRST] + end * step
    return np.int32(1 if begin < end else 0)


@native("int32(int64, int64, int64, int64, int64, int64)")
def _loop_start(start: int, end: int, step: int, chunk: int, first: int, stop: int) -> Any:
    thread = this_thread()
    r = i64p(thread)
    r[_FIRST], r[_STOP], r[_STEP], r[_CHUNK], r[_TURN] = start, end, step, chunk, 0
    return _turn(thread, first, stop)


@native("int32(int64, int64)")
def _loop_next(first: int, stop: int) -> Any:
    return _turn(this_thread(), first, stop)


@native("void()")
def _nothing() -> None:
    pass


FUNCTIONS = {
    "GOMP_parallel": _parallel,
    "GOMP_parallel_start": _parallel_start,
    "GOMP_parallel_end": _parallel_end,
    "GOMP_barrier": _barrier,
    "GOMP_loop_static_start": _loop_start,
    "GOMP_loop_static_next": _loop_next,
    "GOMP_loop_end_nowait": _nothing,
    "omp_get_thread_num": _thread_num,
    "omp_get_num_threads": _num_threads,
    "omp_get_max_threads": _max_threads,
    "omp_set_num_threads": _set_num_threads,
    "omp_in_parallel": _in_parallel,
}


# ------------------------------------------------------------------------------------ in Python
def functions() -> dict[str, int] | None:
    """Return the addresses of OpenMP's functions by name, or None where there is none.

    Regions of the calling thread are of so many threads as OMP_NUM_THREADS says, or as there are
    cores, if they do not say how many. OMP_WAIT_POLICY says how threads wait for work: "passive",
    asleep; "active", awake for 10 ms.
    """
    with _MAKING:  # of several threads that ask at once, one prepares what all share
        return _functions()


@cache
def _functions() -> dict[str, int] | None:
    if supported():
        prepare()
        return {name: function.address for name, function in FUNCTIONS.items()}
    library = system.openmp()
    if library is None:
        return None
    return {name: system.address(getattr(library, name)) for name in _EVERYWHERE}


def set_threads(threads: int) -> int:
    """Set how many threads regions have that the calling thread begins; return what it was.

    Where there is no OpenMP, nothing is set.
    """
    found = functions()
    if found is None:
        return threads
    before = _GET(found["omp_get_max_threads"])()
    _SET(found["omp_set_num_threads"])(threads)
    return int(before)


def asked() -> int:
    """Return how many threads regions have that the calling thread begins; 1: without OpenMP."""
    found = functions()
    return 1 if found is None else int(_GET(found["omp_get_max_threads"])())


def adopt(library: ctypes.CDLL) -> bool:
    """Let the regions of a library that was compiled to call GNU's be teams'; whether they are.

    One that was compiled to call LLVM's has regions by other names: it is left as it is.
    """
    found = functions() if supported() else None
    return found is not None and replace(library, found, ("GOMP_", "omp_", "__kmpc_"))


def available() -> bool:
    """Return whether there is OpenMP, so that one operator's kernel can run in several threads."""
    return supported() or system.openmp() is not None


def described() -> str:
    """Return whose OpenMP there is and how its threads wait, for what is measured to say."""
    if supported():
        return f"teams awake {awake_ns()} ns"
    library = system.openmp()
    return "none" if library is None else f"{library._name} {os.environ.get(POLICY, '')}"
