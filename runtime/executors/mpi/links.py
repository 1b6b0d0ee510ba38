"""What messages between ranks take in a trace: copies and collectives, by who takes part and size.

A rank has just written what it sends, and the receiver's time counts from when it can take a
message until it has: so a time here is one of a step.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence

import numpy as np

from soapstone.native.memory import Array
from soapstone.runtime.core import Runtime
from soapstone.runtime.executors.mpi.executor import MpiExecutor, connect
from soapstone.runtime.machines.exchanges import COPY, SCATTER, SUM, Exchange
from soapstone.runtime.machines.machine import Machine
from soapstone.runtime.model.launch import Launch
from soapstone.runtime.model.mapper import DefaultMapper
from soapstone.runtime.model.partition import Partition
from soapstone.runtime.model.region import Region
from soapstone.runtime.model.task import Read, Reduce, Task, Write
from soapstone.runtime.observe.profile import received

SIZES = tuple(1 << exponent for exponent in range(3, 26))  # bytes of a whole value
_ROUNDS_BYTES, _ROUNDS = 1 << 24, 16  # of what is moved in one trace
_REPLAYS = 5


class _Tagged(DefaultMapper):
    """Points run on the processors that a launch's tag names."""

    def place_all(self, launch: Launch) -> Array:
        return np.array(launch.tag, dtype=np.int64)


def exchange_ns(
    machine: Machine, asked: Iterable[Exchange], sizes: Sequence[int] = SIZES
) -> dict[Exchange, dict[int, float]]:
    """Nanoseconds that the busiest member spends on messages, by exchange and bytes of the value.

    None takes longer than a larger one: if it seems to, it was disturbed. Every rank must call it
    with the same; all get the same.
    """
    comm, found = connect(), {}
    with Runtime(machine, _Tagged(), MpiExecutor) as runtime:
        for each in asked:
            known = np.array([_busiest_ns(runtime, each, n) for n in sizes])
            known = np.minimum.accumulate(comm.bcast(known)[::-1])[::-1]
            found[each] = dict(zip(sizes, known.tolist()))
    return found


def _busiest_ns(runtime: Runtime, exchange: Exchange, nbytes: int) -> float:
    """What an exchange takes of its busiest member; 0 in all ranks but the first."""
    rounds = max(2, min(_ROUNDS, _ROUNDS_BYTES // nbytes))
    homes = [processor.memory for processor in runtime.machine.processors]
    members = [homes.index(runtime.machine.memories[member].name) for member in exchange.members]
    launch = _sums if exchange.kind in (SCATTER, SUM) else _copies
    with runtime.capture() as recording:
        launch(runtime, exchange.kind, tuple(members), nbytes, rounds)
    taken: dict[int, list[float]] = {}  # of each round, by member
    for _ in range(_REPLAYS):
        mine = recording.trace.replay(profile=True)
        assert mine is not None
        timeline = runtime.executor.gathered(mine)
        spent: dict[int, list[int]] = {}
        for event, ns in received(timeline.events if timeline else ()):
            spent.setdefault(event.processor, []).append(ns)
        for member, each in spent.items():
            taken.setdefault(member, []).extend(map(sum, np.array_split(each, rounds)))
    return max(map(statistics.median, taken.values()), default=1.0)


Processors = tuple[int, ...]


def _copies(runtime: Runtime, kind: str, members: Processors, nbytes: int, rounds: int) -> None:
    """Launch rounds in which one writes a value and others read it; of two, each in its turn."""
    value = Region((nbytes,), np.uint8, "value", transient=True)
    first, *others = members
    turns = [(first, others)]
    if kind == COPY:
        turns.append((others[0], [first]))
    for _ in range(rounds):
        for source, targets in turns:
            runtime.launch(_PUT, Partition.whole(value), tag=(source,))
            runtime.launch(_TAKE, Partition.whole(value, len(targets)), tag=tuple(targets))


def _sums(runtime: Runtime, kind: str, members: Processors, nbytes: int, rounds: int) -> None:
    """Launch rounds in which all add to a value, and each reads its part of the sum, or all.

    A round waits for the one before it: each reads of that what it adds.
    """
    count, shape = len(members), (max(nbytes // 4, len(members)),)
    before = Region(shape, np.float32, "value", transient=True)
    runtime.launch(_PUT, Partition.tiled(before, count), tag=members)
    for _ in range(rounds):
        value = Region(shape, np.float32, "value", transient=True)
        given = Partition.whole(value, count), Partition.tiled(before, count)
        runtime.launch(_ADD, *given, tag=members, initialise=True)
        taken = Partition.whole(value, count)
        if kind == SCATTER:
            taken = Partition.tiled(value, count)
        runtime.launch(_TAKE, taken, tag=members)
        before = value


def _put(value: Array) -> None:
    value[...] = 1


def _take(value: Array) -> None:
    """It is there."""


def _add(value: Array, before: Array) -> None:
    value[...] = before.flat[0]


_PUT, _TAKE = Task("put", (Write,), body=_put), Task("take", (Read,), body=_take)
_ADD = Task("add", (Reduce("sum"), Read), body=_add)
