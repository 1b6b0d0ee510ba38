"""The links between ranks, measured: how long a message of each size takes one way in a trace."""

from __future__ import annotations

import time

import numpy as np

from soapstone.native.entries import noop
from soapstone.native.memory import Entry
from soapstone.runtime.core import Runtime
from soapstone.runtime.executors.mpi.executor import MpiExecutor, connect
from soapstone.runtime.machines.machine import Link, Machine
from soapstone.runtime.model.launch import Launch
from soapstone.runtime.model.mapper import Array, DefaultMapper
from soapstone.runtime.model.partition import Partition
from soapstone.runtime.model.region import Region
from soapstone.runtime.model.task import Privilege, Read, Task, Write

SIZES = tuple(1 << exponent for exponent in (3, 10, 14, 18, 20, 22, 24, 26))
_LONG = 1 << 20  # bytes from which on bandwidth counts more than latency
_TRIPS_BYTES, _TRIPS = 1 << 26, 50  # of the round trips in one trace
_REPLAYS = 7


class _Tagged(DefaultMapper):
    """Every launch runs on the processor that its tag names."""

    def place_all(self, launch: Launch) -> Array:
        return np.full(launch.points, launch.tag, dtype=np.int64)


def measured_links(machine: Machine) -> tuple[tuple[Link, ...], dict[int, float]]:
    """The links of a machine's memories, one a rank, and seconds by message size of the slowest.

    Latency is the time of 8 bytes, bandwidth that of what long messages take beyond it. Every rank
    must call it; all get the same.
    """
    comm = connect()
    size = comm.Get_size()
    homes = [processor.memory for processor in machine.processors]
    at = [homes.index(memory.name) for memory in machine.memories]
    found: dict[tuple[int, int], dict[int, float]] = {}
    with Runtime(machine, _Tagged(), MpiExecutor) as runtime:
        for one in range(size):
            for two in range(one + 1, size):
                times = {n: _one_way_s(runtime, at[one], at[two], n) for n in SIZES}
                found[one, two] = comm.bcast(times, root=one)
    links = []
    for (one, two), times in found.items():
        latency = times[SIZES[0]]
        rates = [n / max(times[n] - latency, 1e-9) for n in SIZES if n >= _LONG]
        here, there = machine.memories[one].name, machine.memories[two].name
        rate = float(np.median(rates))
        links += [Link(here, there, latency, rate), Link(there, here, latency, rate)]
    slowest = {n: max(times[n] for times in found.values()) for n in SIZES} if found else {}
    return tuple(links), slowest


def _one_way_s(runtime: Runtime, one: int, two: int, nbytes: int) -> float:
    """Seconds of a message from one processor to another, at best: half of a round trip."""
    trips = max(2, min(_TRIPS, _TRIPS_BYTES // nbytes))
    data = Region((nbytes,), np.uint8, "message")
    everything = Partition.whole(data)
    put, take = (_nothing(name, privilege) for name, privilege in (("put", Write), ("take", Read)))
    with runtime.capture() as recording:
        for _ in range(trips):
            for here, there in ((one, two), (two, one)):
                runtime.launch(put, everything, tag=here)
                runtime.launch(take, everything, tag=there)
    times = []
    for _ in range(_REPLAYS):
        start = time.perf_counter()
        recording.trace.replay()
        times.append(time.perf_counter() - start)
    return min(times) / (2 * trips)


def _nothing(name: str, privilege: Privilege) -> Task:
    """A task that takes no time."""

    def bind(context: object, arrays: object) -> Entry:
        return noop()

    return Task(name, (privilege,), bind=bind)
