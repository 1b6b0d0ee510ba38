"""Instances that leave a memory to make room: who goes, and what is copied back first.

A memory may be smaller than what a program uses if the mapper names a backing memory for it. Its
bytes are then one arena, which untraced launches and traces use in turn. Where a new instance finds
no gap the mapper chooses which one leaves; what is valid nowhere else is copied to the backing
memory, and the instance is forgotten. Its next use makes a new one and copies the contents in
again. Nothing waits for that: whoever writes to reused bytes first follows those who used them.

All processes of a run decide alike: room is counted from the instances that the analysis knows, and
where there are several processes no region is forgotten before its instances have left (`holder`).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from soapstone.runtime.analysis.instance import Cells, Instance, InstanceKey, Storage, minus, union
from soapstone.runtime.errors import MemoryExhausted
from soapstone.runtime.model.region import Region

if TYPE_CHECKING:
    from soapstone.runtime.analysis.coherence import Coherence


def place(analysis: Coherence, storage: Storage) -> None:
    """Give a storage an offset in a memory with a backing one; others leave until it fits.

    Raises: MemoryExhausted when none may leave; MapperError.
    """
    space = analysis.spaces[storage.memory]
    found = space.take(storage.nbytes)
    if found is None:
        _forget_dead(analysis)
    while (found := found or space.take(storage.nbytes)) is None:
        _evict(analysis, storage)
    storage.offset, storage.after = found


def holder(analysis: Coherence, region: Region) -> Callable[[], Region | None]:
    """How the analysis knows the region of an instance in a memory with a backing one.

    When a region is no more depends on when the operations that use it have ended, and those of
    each process end in their own time. So where there are several they all keep it, until the
    instance leaves: else each would find other room, and let other instances leave.
    """
    return weakref.ref(region) if analysis.world.size == 1 else lambda: region


def _forget_dead(analysis: Coherence) -> None:
    """Give back the bytes of regions that are no more."""
    kept = []
    for region, instance in analysis.placed:
        if region() is None:
            release(analysis, instance)
        else:
            kept.append((region, instance))
    analysis.placed = kept


def _evict(analysis: Coherence, storage: Storage) -> None:
    memory = storage.memory
    found = _candidates(analysis, memory)
    if not found:
        name, launch = analysis.machine.memories[memory].name, analysis.launching
        who = "" if launch is None else f" for task {launch.name!r}"
        raise MemoryExhausted(
            f"memory {name!r}: region {storage.name!r}{who} needs {storage.nbytes} bytes "
            f"of {analysis.spaces[memory].capacity_bytes}, and nothing more can leave: all that a "
            "launch uses is there at once"
        )
    held = tuple(analysis.policy.held(region, instance) for region, _, instance in found)
    chosen = analysis.policy.evict(analysis.launching, memory, storage.nbytes, held)
    region, key, _ = found[chosen]
    drop(analysis, region, key)
    analysis.statistics.evictions += 1


def _candidates(analysis: Coherence, memory: int) -> list[tuple[Region, InstanceKey, Instance]]:
    """The instances the launch being analysed does not use, least recently used first."""
    found = [
        (region, key, instance)
        for region, state in list(analysis.regions.items())
        for key, instance in state.by_key.items()
        if key[0] == memory and id(instance.storage) not in analysis.pinned
    ]
    return sorted(found, key=lambda item: item[2].used)


def drop(analysis: Coherence, region: Region, key: InstanceKey) -> None:
    """Forget an instance, after copying what is valid nowhere else to its backing memory."""
    state = analysis.state(region)
    instance = state.by_key[key]
    others: Cells = False
    for other in state:
        if other is not instance:
            others = union(others, other.valid)
    only = minus(instance.valid, others)
    if only is not False:
        analysis.complete(region, home(analysis, region, instance.storage.memory), only)
    del state.by_key[key]
    analysis.placed = [item for item in analysis.placed if item[1] is not instance]
    release(analysis, instance)


def release(analysis: Coherence, instance: Instance) -> None:
    """Give back the bytes of an instance that nothing will use any more."""
    storage = instance.storage
    users = [user.ids for user in (*instance.readers, *instance.writers)]
    analysis.spaces[storage.memory].give(
        storage.offset or 0, storage.nbytes, np.concatenate([storage.after, *users])
    )


def home(analysis: Coherence, region: Region, memory: int) -> Instance:
    """The whole instance of a region in the backing memory of another, made if absent."""
    backing = analysis.policy.backing[memory]
    return analysis.instance(region, memory if backing is None else backing)


def leave_all(analysis: Coherence) -> bool:
    """Let every instance leave the memories that have a backing one, so that all is in one piece.

    Returns whether any was there.
    """
    analysis.pinned.clear()
    found = [item for memory in analysis.spaces for item in _candidates(analysis, memory)]
    for region, key, _ in found:
        drop(analysis, region, key)
    return bool(found)
