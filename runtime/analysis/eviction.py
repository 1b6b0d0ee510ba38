"""Instances that leave a memory to make room: who goes, and what is copied back first.

A memory may be smaller than what a program uses if the mapper names a backing memory for it. Its
bytes are then one arena, which untraced launches and traces use in turn. Where a new instance finds
no gap the mapper chooses which one leaves; what is valid nowhere else is copied to the backing
memory, and the instance is forgotten. Its next use makes a new one and copies the contents in
again. Nothing waits for that: whoever writes to reused bytes first follows those who used them.

A mapper may know all this ahead, from a plan. It then says where an instance begins (`arrive`), and
after each launch which ones leave (`leave`).

All processes of a run decide alike: room is counted from the instances that the analysis knows, and
where there are several processes no region is forgotten before its instances have left (`holder`).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from soapstone.runtime.analysis.instance import Instance, InstanceKey, Storage, minus
from soapstone.runtime.errors import MemoryExhausted
from soapstone.runtime.model.launch import Launch
from soapstone.runtime.model.region import Region

if TYPE_CHECKING:
    from soapstone.runtime.analysis.coherence import Coherence


def place(analysis: Coherence, region: Region, storage: Storage) -> None:
    """Give a storage an offset in a memory with a backing one; others leave until it fits.

    Raises: MemoryExhausted when none may leave; MapperError.
    """
    space, policy = analysis.spaces[storage.memory], analysis.policy
    at = policy.arrive(analysis.launching, region, storage.memory, storage.nbytes)
    found = space.take(storage.nbytes, at)
    if at is not None:
        if found is None:
            raise policy.misplaced(analysis.launching, region, storage.memory, storage.nbytes, at)
        storage.chosen = True
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


def after(analysis: Coherence, launch: Launch) -> None:
    """Let what a mapper has done with leave, after a launch.

    Raises: MapperError.
    """
    if not analysis.policy.asks_leave:
        return
    for memory in analysis.spaces:
        found = [
            (region, key)
            for holder, instance in analysis.placed
            if instance.storage.memory == memory and (region := holder()) is not None
            for key, other in analysis.state(region).by_key.items()
            if other is instance
        ]
        states = ((region, analysis.state(region).by_key[key]) for region, key in found)
        held = tuple(analysis.policy.held(region, instance) for region, instance in states)
        for chosen in analysis.policy.leave(launch, memory, held):
            drop(analysis, *found[chosen])
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
    only = minus(instance.valid, state.elsewhere(instance))
    if only is not False:
        analysis.complete(region, home(analysis, region, instance.storage.memory), only)
    del state.by_key[key]
    analysis.placed = [item for item in analysis.placed if item[1] is not instance]
    release(analysis, instance)


def release(analysis: Coherence, instance: Instance) -> None:
    """Give back the bytes of an instance that nothing will use any more.

    Each of its writers follows all who used the bytes before: where there is one, they need not be
    known any longer.
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
    """Let every instance leave the memories that have a backing one, so that all is in one piece.

    Returns whether any was there.
    """
    analysis.pinned.clear()
    found = [item for memory in analysis.spaces for item in _candidates(analysis, memory)]
    for region, key, _ in found:
        drop(analysis, region, key)
    return bool(found)
