"""Native entries written in Python: compiled lazily by Numba, cached on disk, run without Python.

A kernel is a plain function decorated with `@native`. It reads its arguments from a block of 64-bit
words, allocates nothing, raises nothing and returns a status (0: success). Compilation is put off
to the first use of `.address`, so importing a module of kernels costs nothing. Addresses are always
read from the block, never baked into the code: that is what makes the compiled code cacheable.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar
from weakref import WeakSet

import numpy as np

from soapstone import system
from soapstone.cache.deferred import linked
from soapstone.cache.objects import address, package
from soapstone.native.blocks import Fields
from soapstone.native.intrinsics import (
    INT,
    POINTER,
    VOID,
    address_of,
    call_body,
    call_entry,
    calling,
    i32p,
    i64p,
    u8p,
)
from soapstone.native.memory import NO_ARGUMENTS, NO_STATUSES, Block, Entry, Statuses, pack

Kind = Literal["entry", "body", "team"]
F = TypeVar("F", bound=Callable[..., Any])

_SIGNATURES: dict[Kind, str] = {
    "entry": "int32(voidptr)",
    "body": "int32(voidptr, int64, int64)",
    "team": "void(voidptr)",
}
_COMPILING = threading.Lock()


MADE: WeakSet[Native] = WeakSet()  # all kernels of this process


class Native:
    """A kernel that is compiled, or loaded from disk, when its address is first asked."""

    def __init__(self, function: Callable[..., Any], kind: Kind) -> None:
        self.function = function
        self.kind: Kind = kind
        self._address = 0
        MADE.add(self)

    @property
    def address(self) -> int:
        """The address of the compiled C function."""
        if not self._address:
            with _COMPILING:
                self._address = self._address or address(self.function, _SIGNATURES[self.kind])
        return self._address

    def package(self, folder: Path) -> None:
        """Write its object file into a folder of a package; see `cache.objects`."""
        package(self.function, _SIGNATURES[self.kind], folder)

    def __repr__(self) -> str:
        state = "compiled" if self._address else "not compiled"
        return f"Native({self.function.__name__}, {self.kind}, {state})"


def native(kind: Kind = "entry") -> Callable[[Callable[..., Any]], Native]:
    """Return a decorator that makes a module-level function a lazily compiled native kernel.

    "entry": `f(block) -> status`. "body": `f(block, begin, end) -> status`, one part of a
    `parallel_for`. The block is an untyped pointer, whose words `Fields.at` names.
    """

    def wrap(function: Callable[..., Any]) -> Native:
        return Native(function, kind)

    return wrap


def helper(function: F) -> F:
    """Return the function compiled to be inlined into the kernels that call it."""
    compiled: F = linked(forceinline=True, error_model="numpy")(function)
    return compiled


def routine(function: F) -> F:
    """Return the function compiled to be called by kernels, inlined only where LLVM sees fit."""
    compiled: F = linked(error_model="numpy")(function)
    return compiled


# ------------------------------------------------------------------------------- argument blocks
def bind(kernel: Native, *values: Any, statuses: Statuses = NO_STATUSES) -> Entry:
    """Return the entry of a kernel on the packed values, or on the one block that is given."""
    if len(values) == 1 and isinstance(values[0], Block):
        return Entry(kernel.address, values[0], statuses)
    return Entry(kernel.address, pack(*values, keep=(kernel,)), statuses)


# ------------------------------------------------------------------------ entries made of entries
@routine
def run_entries(table: int, count: int) -> Any:
    """The first status that is not 0 of entries (function and block each) at an address, or 0."""
    w = i64p(table)
    for i in range(count):
        status = call_entry(w[2 * i], w[2 * i + 1])
        if status != 0:
            return status
    return np.int32(0)


_SEQUENCE = Fields("entries count")
_CHOICE = Fields("flag first(function block) second(function block)")
_WHOLE = Fields("body block items")
_sequence_of, _choice_of, _whole_of = _SEQUENCE.at, _CHOICE.at, _WHOLE.at


@native()
def _nothing(block: Any) -> int:
    return 0


@native()
def _in_order(block: Any) -> Any:
    w = _sequence_of(block)
    return run_entries(w.entries, w.count)


@native()
def _either(block: Any) -> Any:
    w = _choice_of(block)
    if u8p(w.flag)[0] != 0:
        return call_entry(w.first_function, w.first_block)
    return call_entry(w.second_function, w.second_block)


@native()
def _whole(block: Any) -> Any:
    w = _whole_of(block)
    return call_body(w.body, w.block, 0, w.items)


# A team's statuses, one of each part, lie apart: its members write them.
_TEAM = Fields("parallel member thread_num num_threads parts items body block statuses")
_team_of = _TEAM.at
_call_parallel = calling(VOID, POINTER, POINTER, INT, INT)  # GOMP_parallel
_call_number = calling(INT)  # omp_get_thread_num, omp_get_num_threads


@native("team")
def _member(block: Any) -> None:
    # Parts are cut by the requested count, not by the team's, so that results do not depend on how
    # many threads libgomp grants.
    w = _team_of(block)
    part = np.int64(_call_number(w.thread_num))
    step = np.int64(_call_number(w.num_threads))
    while part < w.parts:
        begin, end = part * w.items // w.parts, (part + 1) * w.items // w.parts
        i32p(w.statuses)[part] = call_body(w.body, w.block, begin, end)
        part += step


@native()
def _team(block: Any) -> Any:
    w = _team_of(block)
    _call_parallel(w.parallel, w.member, address_of(block), w.parts, 0)
    for part in range(w.parts):
        if i32p(w.statuses)[part] != 0:
            return i32p(w.statuses)[part]
    return 0


def noop() -> Entry:
    """Return the entry that does nothing and succeeds."""
    return Entry(_nothing.address, NO_ARGUMENTS)


def sequence(entries: Sequence[Entry]) -> Entry:
    """Return one entry that runs the entries in order and stops at the first non-zero status."""
    if len(entries) == 1:
        return entries[0]
    statuses = {code: text for entry in entries for code, text in entry.statuses.items()}
    block = _SEQUENCE.pack(entries=pack(list(entries)), count=len(entries))
    return bind(_in_order, block, statuses=statuses)


def either(flag: np.ndarray[Any, Any], first: Entry, second: Entry) -> Entry:
    """Return one entry that runs the first where the flag, a bool scalar, is true when it runs."""
    statuses = {**second.statuses, **first.statuses}
    block = _CHOICE.pack(flag=flag, first=first, second=second)
    return bind(_either, block, statuses=statuses)


class OpenMP(NamedTuple):
    """Addresses of the functions of libgomp that `parallel_for` calls."""

    parallel: int
    thread_num: int
    num_threads: int


@lru_cache(maxsize=1)
def openmp() -> OpenMP | None:
    """Return libgomp's entry points, or None where it is absent (everything is then serial).

    It is the pool oneDNN uses: two pools would fight over the cores.
    """
    library = system.openmp()
    if library is None:
        return None
    names = ("GOMP_parallel", "omp_get_thread_num", "omp_get_num_threads")
    return OpenMP(*(system.address(getattr(library, name)) for name in names))


def parallel_for(
    body: Native,
    block: Block,
    items: int,
    threads: int,
    statuses: Statuses = NO_STATUSES,
) -> Entry:
    """Return an entry that runs `body(block, begin, end)` over `items`, cut over the threads.

    The cut depends on `items` and `threads` only. With one thread, or where libgomp is absent, the
    body runs on the calling thread. The status is that of the first part that failed.
    """
    parts = min(threads, items)
    team = openmp()
    if parts <= 1 or team is None:
        whole = _WHOLE.pack(body=body.address, block=block, items=items, keep=(body,))
        return Entry(_whole.address, whole, statuses)
    packed = _TEAM.pack(
        parallel=team.parallel,
        member=_member.address,
        thread_num=team.thread_num,
        num_threads=team.num_threads,
        parts=parts,
        items=items,
        body=body.address,
        block=block,
        statuses=np.zeros(parts, np.int32),
        keep=(body,),
    )
    return Entry(_team.address, packed, statuses)


def useful_threads(threads: int, nbytes: int) -> int:
    """Return how many of the threads pay for work that touches `nbytes` of memory.

    A parallel region costs a few microseconds, in which one core moves some tens of kilobytes.
    """
    return max(1, min(threads, nbytes // 32768))
