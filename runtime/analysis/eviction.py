"""Eviction: which instances leave a full memory, and what is copied back first.

A memory may be smaller than what a program uses if the mapper names a backing memory for it. Its
bytes are one arena, which untraced launches and traces use in turn. If a new instance finds no gap,
the mapper chooses an instance to evict; contents that are valid nowhere else are copied to the
backing memory, and the instance is forgotten. The region's next use makes a new instance and copies
the contents in again. Nothing waits for an eviction: operations that write to reused bytes depend
on those that used them before.

A mapper may know all this in advance, from a plan. It then says where an instance begins (`arrive`)
and which ones leave after each launch (`leave`).

All processes of a run decide alike: room is counted from the instances that the analysis knows, and
with several processes no region is forgotten before its instances have left (`holder`).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from soapstone.runtime.analysis.instance import Instance, Storage, minus
from soapstone.runtime.errors import MemoryExhausted
from soapstone.runtime.model.launch import Launch
from soapstone.runtime.model.region import Region

if TYPE_CHECKING:
    from soapstone.runtime.analysis.coherence import Coherence


def place(analysis: Coherence, region: Region, storage: Storage) -> None:
    """Give a storage an offset in a memory that has a backing one, evicting others until it fits.

    Raises: MemoryExhausted when no instance may leave; MapperError.
    """
    space, policy = analysis.spaces[storage.memory], analysis.policy
    at = policy.arrive(analysis.launching, region, storage.memory, storage.nbytes)
    found = space.take(storage.nbytes, at)
    if at is not None:
        if found is None:
            raise policy.misplaced(analysis.launching, region, storage.memory, storage.nbytes, at)
        storage.chosen = True
    while found is None:
        _evict(analysis, storage)
        found = space.take(storage.nbytes)
    storage.offset, storage.after = found


def holder(analysis: Coherence, region: Region) -> Callable[[], Region | None]:
    """The reference by which the analysis holds the region of an evictable instance.

    A region dies when the operations that use it have ended, which each process reaches in its own
    time. With several processes, all therefore keep the region until the instance leaves; otherwise
    they would find different gaps and evict different instances.
    """
    return weakref.ref(region) if analysis.world.size == 1 else lambda: region


def _there(analysis: Coherence, memory: int) -> tuple[list[tuple[Region, Instance]], bool]:
    """The instances in a memory, least recently used first; the bytes of dead regions are released.

    A region may die at any moment, when the last operation that uses it ends in another thread, so
    each is looked up once and kept alive here, or released here.

    Returns the instances, and whether any bytes were released.
    """
    kept, there = [], []
    for holder, instance in analysis.placed:
        region = holder()
        if region is None:
            release(analysis, instance)
            continue
        kept.append((holder, instance))
        if instance.storage.memory == memory:
            there.append((region, instance))
    freed = len(kept) < len(analysis.placed)
    analysis.placed = kept
    return sorted(there, key=lambda item: item[1].used), freed


def _evict(analysis: Coherence, storage: Storage) -> None:
    """Make room for a storage: release dead regions, else evict what the mapper names."""
    memory = storage.memory
    there, freed = _there(analysis, memory)
    if freed:
        return
    found = [item for item in there if id(item[1].storage) not in analysis.pinned]
    if not found:
        name, launch = analysis.machine.memories[memory].name, analysis.launching
        who = "" if launch is None else f" for task {launch.name!r}"
        raise MemoryExhausted(
            f"memory {name!r}: region {storage.name!r}{who} needs {storage.nbytes} bytes "
            f"of {analysis.spaces[memory].capacity_bytes}, and nothing more can leave: all that a "
            "launch uses is there at once"
        )
    held = tuple(analysis.policy.held(*item) for item in found)
    drop(analysis, *found[analysis.policy.evict(analysis.launching, memory, storage.nbytes, held)])
    analysis.statistics.evictions += 1


def after(analysis: Coherence, launch: Launch) -> None:
    """Evict the instances that the mapper no longer needs after a launch.

    Raises: MapperError.
    """
    if not analysis.policy.asks_leave:
        return
    for memory in analysis.spaces:
        found, _ = _there(analysis, memory)
        held = tuple(analysis.policy.held(*item) for item in found)
        for chosen in analysis.policy.leave(launch, memory, held):
            drop(analysis, *found[chosen])
            analysis.statistics.evictions += 1


def drop(analysis: Coherence, region: Region, instance: Instance) -> None:
    """Forget an instance, after copying what is valid nowhere else to its backing memory."""
    state = analysis.state(region)
    only = minus(instance.valid, state.elsewhere(instance))
    if only is not False:
        analysis.complete(region, home(analysis, region, instance.storage.memory), only)
    del state.by_key[next(key for key, other in state.by_key.items() if other is instance)]
    analysis.placed = [item for item in analysis.placed if item[1] is not instance]
    release(analysis, instance)


def release(analysis: Coherence, instance: Instance) -> None:
    """Release the bytes of an instance that nothing will use any more.

    A writer of an instance depends on all earlier users of its bytes, so with a writer those need
    not be kept.
    """
    storage = instance.storage
    users = [user.ids for user in (*instance.readers, *instance.writers)]
    before = [] if any(user.ids.size for user in instance.writers) else [storage.after]
    analysis.spaces[storage.memory].give(
        storage.offset or 0,
        storage.nbytes,
        np.concatenate([np.zeros(0, dtype=np.int64), *before, *users]),
    )


def home(analysis: Coherence, region: Region, memory: int) -> Instance:
    """The whole instance of a region in the backing memory of another, made if absent."""
    backing = analysis.policy.backing[memory]
    return analysis.instance(region, memory if backing is None else backing)


def leave_all(analysis: Coherence) -> bool:
    """Evict all instances from memories with a backing one, so that their room is contiguous.

    Returns whether there was any.
    """
    analysis.pinned.clear()
    any_there = False
    for memory in analysis.spaces:
        found, freed = _there(analysis, memory)
        any_there |= freed or bool(found)
        for item in found:
            drop(analysis, *item)
    return any_there
