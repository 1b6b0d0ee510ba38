"""Python's collector of cycles, kept from looking where nothing is dropped.

While modules are imported and graphs bound, every few hundred new objects have all younger ones
looked through, and at its end a process has all of them looked through three times: together a
fifth of the time of a first answer, and next to none of them is garbage.
"""

from __future__ import annotations

import atexit
import gc
import os
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import chain

_off = False  # whether the collector is, by a thread that is in `paused`
_left = False  # whether others froze objects; to count them takes time for each


@contextmanager
def paused() -> Iterator[None]:
    """Do without collections inside; of several threads, the first to leave ends it for all.

    What is there afterwards counts as old, so that only whole collections look through it, unless
    others have frozen objects: these stay so.
    """
    global _off, _left
    if not gc.isenabled():
        yield
        return
    try:
        _off = True
        gc.disable()
        yield
        _left = _left or gc.get_freeze_count() > 0
        if not _left:
            gc.freeze()
            gc.unfreeze()
    finally:
        gc.enable()
        _off = False


def _forked() -> None:
    """Go on collecting in a child process, where a thread that would is not there."""
    if _off:
        gc.enable()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)


@atexit.register
def _leave() -> None:
    """Let a process end without collections, where nothing that is left has to be told of its end.

    What no cycle holds is dropped all the same. Kernels' handles need not be.
    """
    with suppress(Exception):  # of others' objects, which are then collected as ever
        # In one call of C: between two, another thread may go on with a tuple that it is making,
        # which Python refuses of one that a list of all objects holds too.
        every = chain.from_iterable(map(gc.get_objects, (None,)))
        kinds = list(map(type, every))  # to count in a list takes no hash of each
        told = {kind for kind in set(kinds) if hasattr(kind, "__del__")}
        told = {kind for kind in told if not kind.__module__.startswith("soapstone.kernels.")}
        streams = [each for each in (sys.__stdin__, sys.__stdout__, sys.__stderr__) if each]
        parts = [*streams, *(each.buffer for each in streams)]
        parts += [raw for each in parts if (raw := getattr(each, "raw", None))]
        standard = Counter(map(type, parts))
        if all(kinds.count(kind) <= standard[kind] for kind in told):
            gc.freeze()
