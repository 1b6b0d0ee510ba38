"""Native entries written in Python: compiled lazily by Numba, cached on disk, run without Python.

A kernel is a plain function decorated with `@native`. It reads its arguments from a block of 64-bit
words, allocates nothing, raises nothing and returns a status (0: success). Compilation is put off
to the first use of `.address`, so importing a module of kernels costs nothing. Addresses are always
read from the block, never baked into the code: that is what makes the compiled code cacheable.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar, overload
from weakref import WeakSet

import numpy as np

from soapstone.cache.deferred import linked
from soapstone.cache.objects import address, kept, package, symbol
from soapstone.locks import Lock
from soapstone.native.blocks import Fields
from soapstone.native.intrinsics import (
    call_entry,
    i64p,
    u8p,
)
from soapstone.native.memory import NO_ARGUMENTS, NO_STATUSES, Block, Entry, Statuses, pack

F = TypeVar("F", bound=Callable[..., Any])

_SIGNATURES = {"entry": "int32(voidptr)", "body": "int32(voidptr, int64, int64)"}
_COMPILING = Lock()


MADE: WeakSet[Native] = WeakSet()  # all kernels of this process


class Native:
    """A kernel that is compiled, or loaded from disk, when its address is first asked."""

    def __init__(self, function: Callable[..., Any], kind: str) -> None:
        self.function = function
        self.kind = kind
        self._signature = _SIGNATURES.get(kind, kind)
        self._address = 0
        MADE.add(self)

    @property
    def address(self) -> int:
        """The address of the compiled C function."""
        if not self._address:
            with _COMPILING:
                self._address = self._address or address(self.function, self._signature)
        return self._address

    @property
    def name(self) -> str:
        """What it is in all processes: its module and the symbol of its machine code."""
        return f"{self.function.__module__}:{symbol(self.function, self._signature)}"

    @property
    def kept(self) -> bool:
        """Whether its code is on disk, in the package or this user's cache."""
        return kept(self.function, self._signature)

    @property
    def placed(self) -> bool:
        """Whether its code is in memory."""
        return bool(self._address)

    def place(self, address: int) -> None:
        """Take note of where its code is in memory, unless that is known."""
        with _COMPILING:
            self._address = self._address or address

    def package(self, folder: Path) -> None:
        """Write its object file into a folder of a package; see `cache.objects`."""
        package(self.function, self._signature, folder)

    def __repr__(self) -> str:
        state = "compiled" if self._address else "not compiled"
        return f"Native({self.function.__name__}, {self.kind}, {state})"


def native(kind: str = "entry") -> Callable[[Callable[..., Any]], Native]:
    """Return a decorator that makes a module-level function a lazily compiled native kernel.

    "entry": `f(block) -> status`. "body": `f(block, begin, end) -> status`, one part of a
    `parallel_for`. The block is an untyped pointer, whose words `Fields.at` names. Any other kind
    is the signature of a function of C, as Numba writes it.
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
    compiled: F = linked(forceinline=False, error_model="numpy")(function)  # else as its caller
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
_sequence_of, _choice_of = _SEQUENCE.at, _CHOICE.at


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


def noop() -> Entry:
    """Return the entry that does nothing and succeeds."""
    return Entry(_nothing.address, NO_ARGUMENTS)


@overload
def sequence(entries: Sequence[Entry]) -> Entry: ...
@overload
def sequence(entries: Sequence[Entry | None]) -> Entry | None: ...
def sequence(entries: Sequence[Entry | None]) -> Entry | None:
    """Return one entry that runs the entries in order and stops at the first non-zero status.

    Of no entries it does nothing; where one of them is missing, so is the whole.
    """
    found = [entry for entry in entries if entry is not None]
    if len(found) < len(entries):
        return None
    if len(found) < 2:
        return found[0] if found else noop()
    statuses = {code: text for entry in found for code, text in entry.statuses.items()}
    block = _SEQUENCE.pack(entries=pack(found), count=len(found))
    return bind(_in_order, block, statuses=statuses)


def either(flag: np.ndarray[Any, Any], first: Entry, second: Entry) -> Entry:
    """Return one entry that runs the first where the flag, a bool scalar, is true when it runs."""
    statuses = {**second.statuses, **first.statuses}
    block = _CHOICE.pack(flag=flag, first=first, second=second)
    return bind(_either, block, statuses=statuses)
