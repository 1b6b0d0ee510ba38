"""Kernels whose work is cut over threads: a body that runs a range, and the entry that runs all."""

from __future__ import annotations

from typing import Any

import numpy as np

from soapstone.native.blocks import Fields
from soapstone.native.entries import Native, native
from soapstone.native.intrinsics import (
    INT,
    POINTER,
    VOID,
    address_of,
    call_body,
    calling,
    i32p,
)
from soapstone.native.memory import NO_STATUSES, Block, Entry, Statuses
from soapstone.native.threads.openmp import functions

_WHOLE = Fields("body block items")
_whole_of = _WHOLE.at

# A team's statuses, one of each part, lie apart: its members write them.
_TEAM = Fields("parallel member thread_num num_threads parts items body block statuses")
_team_of = _TEAM.at
_call_parallel = calling(VOID, POINTER, POINTER, INT, INT)  # GOMP_parallel
_call_number = calling(INT)  # omp_get_thread_num, omp_get_num_threads


@native("void(voidptr)")
def _member(block: Any) -> None:
    # Parts are cut by the requested count, not by the team's, so that results do not depend on how
    # many threads are granted.
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


@native()
def _whole(block: Any) -> Any:
    w = _whole_of(block)
    return call_body(w.body, w.block, 0, w.items)


def parallel_for(
    body: Native,
    block: Block,
    items: int,
    threads: int,
    statuses: Statuses = NO_STATUSES,
) -> Entry:
    """Return an entry that runs `body(block, begin, end)` over `items`, cut over the threads.

    The cut depends on `items` and `threads` only. With one thread, or where there is no OpenMP, the
    body runs on the calling thread. The status is that of the first part that failed.
    """
    parts = min(threads, items)
    team = functions() if parts > 1 else None
    if team is None:
        whole = _WHOLE.pack(body=body.address, block=block, items=items, keep=(body,))
        return Entry(_whole.address, whole, statuses)
    packed = _TEAM.pack(
        parallel=team["GOMP_parallel"],
        member=_member.address,
        thread_num=team["omp_get_thread_num"],
        num_threads=team["omp_get_num_threads"],
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
