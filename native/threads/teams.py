"""Teams of threads that share out parallel regions as they are worked on (`native.threads.openmp`).

A region is one function that is run for some parts. GNU's library gives each part to one thread, so
that a region takes as long as its slowest one: where another process computes on one of two cores,
twice as long as alone. Here a part is for whoever takes it first, and there are three rules more.

- The leader, which began the region, runs all parts that no member has taken when it is ready.
- Members run on other cores than their leader. Left to itself, the operating system puts them on
  the leader's where another process has the next one, and both take turns.
- A member that another process has displaced in the midst of a part goes on, on the leader's core,
  while the leader sleeps; otherwise all would wait for it for some milliseconds. The leader looks
  for one such member at a time, each time after twice as long.

So beside another process, work is slower by the share of the cores that this one takes. A thread
that has nothing to do looks for work for 0.08 ms and then sleeps.

All parts are run at once, each in a thread of its own, if they wait for each other, as in an
OpenMP barrier: a part ends before the leader takes another, and there are as many threads as parts.
Where the system does not let the process have those, it says so and ends.

Each thread that begins regions leads a team of its own, which ends when it does. They need Linux.
"""

from __future__ import annotations

import ctypes
import os
import platform
import sys
from functools import cache
from typing import Any

import numpy as np

from soapstone import system
from soapstone.cache import loader
from soapstone.native.arrays import start
from soapstone.native.entries import helper, native, routine
from soapstone.native.intrinsics import (
    INT,
    POINTER,
    VOID,
    WORD,
    calling,
    clock_ns,
    compare_exchange,
    external,
    fetch_add,
    i64p,
    load_acquire,
    pause,
    rest,
    stack,
    store_release,
    symbol,
    thread_clock_ns,
)
from soapstone.native.memory import LINE

# ------------------------------------------------------------------------------- words in memory
# What different threads write lies in different cache lines, of 8 words each.
_LINE_WORDS = LINE // 8
_MASK_WORDS = 16  # of a set of cores, of 1,024 (cpu_set_t)
_MASK_BYTES = 8 * _MASK_WORDS

# Of the process
_KEY, _THREADS, _AWAKE, _WORK, _FUTEX, _GETTID, _COMPLAINT, _COMPLAINT_BYTES = range(8)
_NAME = "soapstone_teams"  # by which compiled code knows them
_STATE = np.zeros(_LINE_WORDS, np.int64)
system.keep(_STATE)
loader.define(_NAME, start(_STATE))
_NO_THREADS = np.frombuffer(
    b"soapstone: a region needs more threads than the system lets this process have; "
    b"OMP_NUM_THREADS says how many regions have\n",
    np.uint8,
)
system.keep(_NO_THREADS)

# Of a thread: which part it runs of how many, and how deep in regions it is; how many threads it
# asks for; the team it leads, and that in whose region it is; and the loop it has begun.
PART, PARTS, DEPTH, _OUTER_PART, OUTER_PARTS, ASKED, _LEADS, _WITHIN = range(8)
LOOP = 8  # the first of the words that are the loop's (`openmp`)
_THREAD_BYTES = 128

# Of a team
_CLAIM = 0  # the region's number, the first part that nobody has taken, and how many there are
_EPOCH, _SLEEPERS = 8, 9
_FUNCTION, _DATA, _BEGAN, _CORE, _PLACED = range(16, 21)  # whether cores are known
_DONE, _ASLEEP = 24, 25  # parts that have been run; whether the leader sleeps until all are
_ARRIVED, _PHASE = 32, 33  # of a barrier
_MEMBERS, _USERS, _ENDING = 40, 41, 42
_OTHERS = 48  # cores that are not the leader's
_FIRST_MEMBER = _OTHERS + _MASK_WORDS

# Of a member
_TEAM, _BUSY, _ID, _MOVED, _USED = range(5)

_PART_BITS = 0xFFFF
_ONE_PART = 1 << 16
_PATIENCE_NS = 20_000  # for which a leader waits awake, beside a quarter of its own time
_LOOK_NS = 5_000  # in which a thread that runs is seen to have run
_LOOKS = 16  # between two readings of the clock
_NAP_NS, _LONGEST_NAP_NS = 1 << 20, 1 << 28  # of a leader, between looks for displaced members
_TRIES = 10_000  # to make a thread, over half a second: others may be ending
POLICY = "OMP_WAIT_POLICY"  # by which users say how long threads wait awake
_AWAKE_NS = {"passive": 0, "active": 10_000_000}

# -------------------------------------------------------------------------------- functions of C
_get_specific = external("pthread_getspecific", WORD, INT)
_set_specific = external("pthread_setspecific", INT, INT, WORD)
_create = external("pthread_create", INT, WORD, WORD, WORD, WORD)
_detach = external("pthread_detach", INT, WORD)
_allocate = external("aligned_alloc", WORD, WORD, WORD)
_free = external("free", VOID, WORD)
_core = external("sched_getcpu", INT)
_get_cores = external("sched_getaffinity", INT, INT, WORD, WORD)
_set_cores = external("sched_setaffinity", INT, INT, WORD, WORD)
_system_call = external("syscall", *[WORD] * 8)
_write = external("write", WORD, INT, WORD, WORD)
_abort = external("abort", VOID)
_NEEDED = (
    *("pthread_getspecific", "pthread_setspecific", "pthread_create", "pthread_detach"),
    *("aligned_alloc", "sched_getcpu", "syscall", "pthread_key_create"),
)
_SYSTEM_CALLS = {"x86_64": (202, 186), "aarch64": (98, 178)}  # futex and gettid, by machine
_WAIT, _WAKE = 128, 129  # FUTEX_WAIT_PRIVATE, FUTEX_WAKE_PRIVATE
_call = calling(VOID, POINTER)
_state = symbol(_NAME)


@helper
def _wait(word: int, value: int, timeout: int = 0) -> None:
    """Sleep until woken while the low half of a word is the value's.

    timeout: the address of seconds and nanoseconds, after which to wake anyway.
    """
    futex = i64p(_state())[_FUTEX]
    _system_call(futex, word, _WAIT, value & 0xFFFFFFFF, timeout, 0, 0)


@helper
def _wake(word: int, count: int) -> None:
    _system_call(i64p(_state())[_FUTEX], word, _WAKE, count, 0, 0, 0)


@helper
def _at(base: int, index: int) -> Any:
    """The address of a word."""
    return base + 8 * index


@routine
def _zeros(nbytes: int) -> Any:
    """The address of new memory, in whole cache lines."""
    place = _allocate(LINE, nbytes)
    for i in range(nbytes // 8):
        i64p(place)[i] = 0
    return place


@routine
def this_thread() -> Any:
    """The words of the calling thread."""
    key = np.int32(i64p(_state())[_KEY])
    found = _get_specific(key)
    if found == 0:
        found = _zeros(_THREAD_BYTES)
        i64p(found)[PARTS] = 1
        _set_specific(key, found)
    return found


# ------------------------------------------------------------------------------ parts of a region
@routine
def _run_part(team: int, member: int, thread: int) -> Any:
    """Run a part that nobody has taken: 1; 2 if it woke the leader; 0 if there was none.

    member: its address, or 0 for the leader.
    """
    while True:
        claim = load_acquire(team, _CLAIM)
        part, parts = (claim >> 16) & _PART_BITS, claim & _PART_BITS
        if part >= parts:
            return 0
        if compare_exchange(team, _CLAIM, claim, claim + _ONE_PART):
            break
    t, r = i64p(team), i64p(thread)
    if member != 0:
        store_release(member, _BUSY, 1)
    r[PART], r[PARTS], r[DEPTH], r[_WITHIN] = part, parts, 1, team
    _call(t[_FUNCTION], t[_DATA])
    r[PART], r[PARTS], r[DEPTH] = 0, 1, 0
    if member != 0:
        store_release(member, _BUSY, 0)
    if fetch_add(team, _DONE, 1) + 1 == parts and load_acquire(team, _ASLEEP) != 0:
        _wake(_at(team, _DONE), 1)
        return 2
    return 1


@native("int64(int64)")
def _work(member: int) -> Any:
    team = i64p(member)[_TEAM]
    thread = this_thread()
    store_release(member, _ID, _system_call(i64p(_state())[_GETTID], 0, 0, 0, 0, 0, 0))
    _set_cores(np.int32(0), _MASK_BYTES, _at(team, _OTHERS))
    awake = i64p(_state())[_AWAKE]
    while True:
        epoch = load_acquire(team, _EPOCH)
        if load_acquire(team, _ENDING) != 0:
            break
        found = looking = 1
        while found != 0:
            found = _run_part(team, member, thread)
            if found == 2:  # the leader needs this core, perhaps
                looking = 0
        since = clock_ns()
        while looking != 0 and load_acquire(team, _EPOCH) == epoch:
            looks = 0
            while looks < _LOOKS and load_acquire(team, _EPOCH) == epoch:
                pause()
                looks += 1
            if clock_ns() - since > awake:
                looking = 0
        if looking == 0:
            fetch_add(team, _SLEEPERS, 1)
            _wait(_at(team, _EPOCH), epoch)
            fetch_add(team, _SLEEPERS, -1)
    _leave(team)
    return 0


# ------------------------------------------------------------------------------------- the leader
@routine
def _leave(team: int) -> None:
    """Be no longer one of the threads that have a team; the last of them frees it."""
    if fetch_add(team, _USERS, -1) == 1:
        _free(team)


@routine
def _end(team: int) -> None:
    """End the members of a team, once they have nothing to run."""
    store_release(team, _ENDING, 1)
    fetch_add(team, _EPOCH, 1)
    _wake(_at(team, _EPOCH), i64p(team)[_MEMBERS])
    _leave(team)


@helper
def _member(team: int, number: int) -> Any:
    return _at(team, _FIRST_MEMBER + number * _LINE_WORDS)


@routine
def _place(team: int, core: Any) -> None:
    """Keep the members off the leader's core, where it may run on others too."""
    t, others = i64p(team), _at(team, _OTHERS)
    t[_CORE], t[_PLACED] = core + 1, 0
    if core < 0 or core >= 64 * _MASK_WORDS or _get_cores(np.int32(0), _MASK_BYTES, others) != 0:
        return
    t[_PLACED] = 1
    t[_OTHERS + core // 64] &= ~(1 << (core % 64))
    any_ = 0
    for i in range(_MASK_WORDS):
        any_ |= t[_OTHERS + i]
    if any_ == 0:
        t[_OTHERS + core // 64] = 1 << (core % 64)
    for number in range(t[_MEMBERS]):
        identifier = load_acquire(_member(team, number), _ID)
        if identifier != 0:
            _set_cores(np.int32(identifier), _MASK_BYTES, others)


@routine
def _make(thread: int, parts: Any) -> Any:
    """Make the team of the calling thread, in place of a smaller one it may have."""
    r = i64p(thread)
    if r[_LEADS] != 0:
        _end(r[_LEADS])
    members = parts - 1
    team = _zeros(8 * (_FIRST_MEMBER + members * _LINE_WORDS))
    t = i64p(team)
    t[_USERS] = 1
    _place(team, np.int64(_core()))
    place = stack(8)
    for number in range(members):
        member = _member(team, number)
        i64p(member)[_TEAM] = team
        fetch_add(team, _USERS, 1)
        tries = 0
        while _create(place, 0, i64p(_state())[_WORK], member) != 0:
            tries += 1
            if tries == _TRIES:  # parts that wait for each other would do so for ever
                _write(np.int32(2), i64p(_state())[_COMPLAINT], i64p(_state())[_COMPLAINT_BYTES])
                _abort()
            rest()
        _detach(i64p(place)[0])
    t[_MEMBERS] = members
    r[_LEADS] = team
    return team


@routine
def _begin(thread: int, function: int, data: int, parts: Any) -> None:
    """Give a region to the team of the calling thread, which runs its first part itself."""
    team = i64p(thread)[_LEADS]
    if team == 0 or i64p(team)[_MEMBERS] < parts - 1:
        team = _make(thread, parts)
    t = i64p(team)
    core = np.int64(_core())
    if t[_CORE] != core + 1:
        _place(team, core)
    i64p(thread)[_WITHIN] = team
    t[_FUNCTION], t[_DATA], t[_BEGAN] = function, data, clock_ns()
    store_release(team, _ASLEEP, 0)
    store_release(team, _DONE, 0)
    region = (load_acquire(team, _CLAIM) >> 32) + 1
    store_release(team, _CLAIM, (region << 32) | _ONE_PART | parts)
    fetch_add(team, _EPOCH, 1)
    if load_acquire(team, _SLEEPERS) != 0:
        _wake(_at(team, _EPOCH), parts - 1)


@routine
def _finish(thread: int, parts: Any) -> None:
    """Run what is left of a region, and wait for what others run."""
    team = i64p(thread)[_LEADS]
    t = i64p(team)
    done = fetch_add(team, _DONE, 1) + 1
    while done < parts and _run_part(team, 0, thread) != 0:
        done = load_acquire(team, _DONE)
    now = clock_ns()
    until = now + _PATIENCE_NS + (now - t[_BEGAN]) // 4
    moved = 0
    timeout = stack(16)  # seconds and nanoseconds
    nap = i64p(timeout)
    nap[0], nap[1] = 0, _NAP_NS
    while load_acquire(team, _DONE) < parts:
        looks = 0
        while looks < _LOOKS and load_acquire(team, _DONE) < parts:
            pause()
            looks += 1
        if looks == _LOOKS and clock_ns() > until:
            moved |= _fetch(team, parts)
            fetch_add(team, _ASLEEP, 1)
            done = load_acquire(team, _DONE)
            if done < parts:
                _wait(_at(team, _DONE), done, timeout)
                nap[1] = min(2 * nap[1], _LONGEST_NAP_NS)
    if moved != 0:
        for number in range(t[_MEMBERS]):
            member = i64p(_member(team, number))
            if member[_MOVED] != 0:
                member[_MOVED] = 0
                _set_cores(np.int32(member[_ID]), _MASK_BYTES, _at(team, _OTHERS))


@routine
def _fetch(team: int, parts: Any) -> Any:
    """Let a member that does not run, but has a part to, go on where the leader is; 1 if there is.

    One alone: several would take turns there. A thread runs if it has used time of a processor
    since a moment ago.
    """
    t = i64p(team)
    core = np.int64(_core())
    if core < 0 or core >= 64 * _MASK_WORDS or t[_PLACED] == 0:
        return 0
    for number in range(t[_MEMBERS]):
        member = _member(team, number)
        waits = load_acquire(member, _BUSY) != 0 and i64p(member)[_MOVED] == 0
        i64p(member)[_USED] = thread_clock_ns(np.int32(i64p(member)[_ID])) if waits else -1
    since = clock_ns()
    while clock_ns() - since < _LOOK_NS and load_acquire(team, _DONE) < parts:
        pause()
    for number in range(t[_MEMBERS]):
        member = _member(team, number)
        m = i64p(member)
        if m[_USED] < 0 or load_acquire(member, _BUSY) == 0:
            continue
        if thread_clock_ns(np.int32(m[_ID])) == m[_USED] and load_acquire(member, _BUSY) != 0:
            cores = stack(_MASK_BYTES)
            for i in range(_MASK_WORDS):
                i64p(cores)[i] = 0
            i64p(cores)[core // 64] = 1 << (core % 64)
            m[_MOVED] = 1
            _set_cores(np.int32(m[_ID]), _MASK_BYTES, cores)
            return 1
    return 0


@routine
def start_region(function: int, data: int, threads: int) -> None:
    thread = this_thread()
    r = i64p(thread)
    r[DEPTH] += 1
    if r[DEPTH] == 2:  # a region within a part is one part
        r[_OUTER_PART], r[OUTER_PARTS] = r[PART], r[PARTS]
        r[PART], r[PARTS] = 0, 1
    if r[DEPTH] > 1:
        return
    parts: Any = np.int64(threads)
    if parts <= 0:
        parts = most_threads(thread)
    parts = min(parts, _PART_BITS)
    r[PART], r[PARTS] = 0, parts
    if parts > 1:
        _begin(thread, function, data, parts)


@routine
def end_region() -> None:
    thread = this_thread()
    r = i64p(thread)
    r[DEPTH] -= 1
    if r[DEPTH] == 1:
        r[PART], r[PARTS] = r[_OUTER_PART], r[OUTER_PARTS]
    if r[DEPTH] == 0:
        parts = r[PARTS]
        r[PART], r[PARTS] = 0, 1
        if parts > 1:
            _finish(thread, parts)


@routine
def most_threads(thread: int) -> Any:
    """How many threads a region of the thread has that does not say so."""
    asked = i64p(thread)[ASKED]
    return asked if asked > 0 else i64p(_state())[_THREADS]


@routine
def meet() -> None:
    """Wait until all parts of the calling thread's region have come here."""
    r = i64p(this_thread())
    team, parts = r[_WITHIN], r[PARTS]
    if parts < 2:
        return
    phase = load_acquire(team, _PHASE)
    if fetch_add(team, _ARRIVED, 1) + 1 == parts:
        store_release(team, _ARRIVED, 0)
        fetch_add(team, _PHASE, 1)
        _wake(_at(team, _PHASE), parts)
        return
    since = clock_ns()
    while load_acquire(team, _PHASE) == phase:
        pause()
        if clock_ns() - since > _PATIENCE_NS:
            _wait(_at(team, _PHASE), phase)


@native("void(int64)")
def _forget(thread: int) -> None:
    """End what a thread leads, when it ends."""
    team = i64p(thread)[_LEADS]
    if team != 0:
        _end(team)
    _free(thread)


# ------------------------------------------------------------------------------------ in Python
@cache
def supported() -> bool:
    """Return whether there are teams here, not the system's OpenMP alone."""
    if sys.platform != "linux" or platform.machine() not in _SYSTEM_CALLS:
        return False
    return system.core_numbers() is not None and all(
        hasattr(ctypes.pythonapi, name) for name in _NEEDED
    )


def prepare() -> None:
    """Fill in what all teams of the process share."""
    asked = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    _STATE[_THREADS] = int(asked) if asked.isdigit() and int(asked) else system.usable_cores()
    _STATE[_AWAKE] = awake_ns()
    _STATE[_COMPLAINT], _STATE[_COMPLAINT_BYTES] = start(_NO_THREADS), _NO_THREADS.nbytes
    _STATE[_FUTEX], _STATE[_GETTID] = _SYSTEM_CALLS[platform.machine()]
    key = ctypes.c_uint()
    _made(ctypes.pythonapi.pthread_key_create, ctypes.byref(key), _forget.address)
    _STATE[_KEY] = key.value
    _STATE[_WORK] = _work.address
    os.register_at_fork(after_in_child=_forked)


def _forked() -> None:
    """Forget the calling thread's team: its members are not in this process."""
    place = ctypes.pythonapi.pthread_getspecific
    place.argtypes, place.restype = (ctypes.c_uint,), ctypes.c_void_p
    thread = place(int(_STATE[_KEY]))
    if thread:
        ctypes.memset(thread + 8 * _LEADS, 0, 8)


def _made(create: Any, key: Any, end: int) -> None:
    status = create(key, ctypes.c_void_p(end))
    if status:
        raise OSError(status, "pthread_key_create: no key for threads' teams")


def awake_ns() -> int:
    """Return how long a thread without work looks for some before it sleeps."""
    return _AWAKE_NS.get(os.environ.get(POLICY, "").lower(), 80_000)
