"""Lifetimes of a trace's transient instances, their arenas, and the order of reused bytes.

Lifetimes are taken in the order in which workers run their operations. Where one instance reuses
bytes of another, its writers are made to depend on the users of the same bytes, so the plan holds
whatever the timing of the workers; between operations of one worker this costs nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from soapstone.native.memory import Array
from soapstone.records import dataclass
from soapstone.runtime.analysis.instance import Storage
from soapstone.runtime.analysis.operation import Operation
from soapstone.runtime.model.tiling import Box
from soapstone.runtime.tracing.arena import ArenaPlan, Block, fixed, plan


@dataclass(frozen=True, eq=False)
class ArenaLayout:
    """One arena plan a memory, where each storage lies, and the dependences reuse adds.

    edges: int64 (edges, 2) operation ids.
    """

    plans: tuple[ArenaPlan, ...]
    placed: tuple[tuple[tuple[Storage, int], ...], ...]
    edges: Array


@dataclass(eq=False)
class _Life:
    storage: Storage
    start: int
    end: int
    users: list[tuple[int, Box, bool]]  # operation, box, whether it writes


def _lives(
    operations: Sequence[Operation], order: Sequence[int], lasts: Sequence[int] | None
) -> dict[int, _Life]:
    lives: dict[int, _Life] = {}
    for position, number in enumerate(order):
        for use in operations[number].uses:
            storage = use.storage
            if storage is None or not storage.transient:
                continue
            life = lives.get(id(storage))
            if life is None:
                life = lives[id(storage)] = _Life(storage, position, position, [])
            life.end = max(life.end, position if lasts is None else lasts[number])
            life.users.append((number, use.box, use.writes))
    for life in lives.values():
        storage = life.storage
        if storage.offset is None and all(box != storage.box for _, box, _ in life.users):
            storage.fit(box for _, box, _ in life.users)  # only some tiles of a region are used
    return lives


def lay_out(
    operations: Sequence[Operation],
    order: Sequence[int],
    memories: int,
    lasts: Sequence[int] | None = None,
) -> ArenaLayout:
    """The arenas of a step's transient storages, and the dependences that make reuse safe.

    lasts: for each operation the position in the order until which it runs; by default its own.
    """
    lives = _lives(operations, order, lasts)
    single_worker = len({operation.processor for operation in operations}) < 2
    plans, placed, edges = [], [], []
    for memory in range(memories):
        mine = [life for life in lives.values() if life.storage.memory == memory]
        blocks = [Block(life.storage.nbytes, life.start, life.end) for life in mine]
        given = [life.storage.offset for life in mine if life.storage.offset is not None]
        found = fixed(blocks, given) if given else plan(blocks)
        plans.append(found)
        at = [(life.storage, int(offset)) for life, offset in zip(mine, found.offsets)]
        placed.append(tuple(at))
        if not single_worker:
            edges.append(_reuse(mine, found.offsets))
    pairs = np.concatenate([np.zeros((0, 2), dtype=np.int64), *edges])
    return ArenaLayout(tuple(plans), tuple(placed), pairs)


def _reuse(lives: Sequence[_Life], offsets: Array) -> Array:
    """The dependences between users of the same bytes of different storages.

    A writer of a new storage follows every earlier user of its bytes. Readers of the new storage
    follow its writers already, for nothing transient is read before it is written.
    Returns int64 (edges, 2).
    """
    low = np.zeros(0, dtype=np.int64)
    high = np.zeros(0, dtype=np.int64)
    who = np.zeros(0, dtype=np.int64)
    edges: list[Array] = []
    for index in sorted(range(len(lives)), key=lambda i: (lives[i].start, i)):
        life, base = lives[index], int(offsets[index])
        spans = [life.storage.span(box) for _, box, _ in life.users]
        begins = np.array([base + a for a, _ in spans], dtype=np.int64)
        ends = np.array([base + b for _, b in spans], dtype=np.int64)
        numbers = np.array([number for number, _, _ in life.users], dtype=np.int64)
        gone = np.zeros(low.size, dtype=bool)
        near = np.nonzero((low < base + life.storage.nbytes) & (high > base))[0]
        seen: set[Box] = set()
        for (number, box, writes), begin, end in zip(life.users, begins, ends):
            if not writes or box in seen or near.size == 0 or begin == end:
                continue
            seen.add(box)
            hit = near[(low[near] < end) & (high[near] > begin)]
            if hit.size:
                edges.append(np.stack([who[hit], np.full(hit.size, number)], axis=1))
                gone[hit[(low[hit] >= begin) & (high[hit] <= end)]] = True
        left = ~gone
        low = np.concatenate([low[left], begins])
        high = np.concatenate([high[left], ends])
        who = np.concatenate([who[left], numbers])
    return np.concatenate([np.zeros((0, 2), dtype=np.int64), *edges])
