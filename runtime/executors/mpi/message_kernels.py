"""The native loops that await messages, compiled when a message first needs them.

A message between ranks that share memory has two words: how often it was ready, written by the
sender, and how often it was taken, written by the receiver, who copies straight from the sender's
instance. Neither needs the other to do anything meanwhile.
"""

from __future__ import annotations

from typing import Any

from soapstone.native.blocks import Fields
from soapstone.native.entries import native, routine, run_entries
from soapstone.native.intrinsics import (
    INT,
    POINTER,
    calling,
    clock_ns,
    load_acquire,
    pause,
    store_release,
    yield_processor,
)

STOPPED, SILENT = -2, -3  # statuses of an end
_SPINS = 2000  # polls before other threads may run
_LOOK = 1024  # polls between two looks at the clock

# control, fault: addresses of words that end a wait; limit_ns: how long it may last.
_LIMITS = "control fault limit_ns"
REQUEST = Fields(f"test request flag status {_LIMITS}")  # MPI_Test and its arguments
READY = Fields("rounds ready")  # how often so far, and the address of the word that says so
SHARED = Fields(f"rounds ready taken {_LIMITS} copies count")  # copies: entries, at an address
_request_of, _ready_of, _shared_of = REQUEST.at, READY.at, SHARED.at
_test = calling(INT, POINTER, POINTER, POINTER)


@routine
def _patience(w: Any, polls: int, until: int) -> Any:
    """Pass some time; a status where waiting must end, and the time by which it must (0: none)."""
    if load_acquire(w.control, 0) != 0 or load_acquire(w.fault, 0) != 0:
        return STOPPED, until
    if polls < _SPINS:
        pause()
    else:
        yield_processor()
    if polls % _LOOK == 0:
        now = clock_ns()
        if until == 0:
            until = now + w.limit_ns
        elif now > until:
            return SILENT, until
    return 0, until


@native()
def await_request(block: Any) -> Any:
    """Poll a request until it has ended."""
    w = _request_of(block)
    polls = until = 0
    while True:
        store_release(w.flag, 0, 0)
        status = int(_test(w.test, w.request, w.flag, w.status))
        if status != 0 or load_acquire(w.flag, 0) != 0:
            return status
        polls += 1
        status, until = _patience(w, polls, until)
        if status != 0:
            return status


@routine
def _until(w: Any, address: int) -> Any:
    """Poll a word until it has come to what a block counts to; a status."""
    polls = until = 0
    while load_acquire(address, 0) < w.rounds:
        polls += 1
        status, until = _patience(w, polls, until)
        if status != 0:
            return status
    return 0


@native()
def make_ready(block: Any) -> int:
    """Say that a message is ready."""
    w = _ready_of(block)
    w.rounds += 1
    store_release(w.ready, 0, w.rounds)
    return 0


@native()
def take(block: Any) -> Any:
    """Await that a message is ready, copy it, and say that it is taken."""
    w = _shared_of(block)
    w.rounds += 1
    status = _until(w, w.ready)
    if status == 0:
        status = int(run_entries(w.copies, w.count))
    if status == 0:
        store_release(w.taken, 0, w.rounds)
    return status


@native()
def await_taken(block: Any) -> Any:
    """Await that a message is taken."""
    w = _shared_of(block)
    w.rounds += 1
    return _until(w, w.taken)
