"""The links between ranks, measured: how long a message of each size takes one way."""

from __future__ import annotations

import time

import numpy as np

from ..machine import Link, Machine
from .mpi import connect, meet

SIZES = tuple(1 << exponent for exponent in (3, 10, 14, 18, 20, 22, 24, 26))
_LONG = 1 << 20  # bytes from which on bandwidth counts more than latency
_ROUNDS_S = 0.1  # of round trips of one size


def measured_links(machine: Machine) -> tuple[tuple[Link, ...], dict[int, float]]:
    """The links of a machine's memories, one a rank, and seconds by message size of the slowest.

    Latency is the time of 8 bytes, bandwidth that of what long messages take beyond it. Every rank
    must call it; all get the same.
    """
    comm = connect()
    rank, size = comm.Get_rank(), comm.Get_size()
    meet("the measurement of links")
    found: dict[tuple[int, int], dict[int, float]] = {}
    for one in range(size):
        for two in range(one + 1, size):
            times = _ping_pong(one, two) if rank in (one, two) else {}
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


def _ping_pong(one: int, two: int) -> dict[int, float]:
    """Seconds one way of each size between two ranks, at best: half of a round trip."""
    comm = connect()
    first = comm.Get_rank() == one
    other = two if first else one
    found = {}
    for nbytes in SIZES:
        data = np.ones(nbytes, dtype=np.uint8)
        rounds = np.array([3])
        best = np.inf
        for attempt in range(2):  # the first to learn how many round trips there is time for
            for _ in range(int(rounds[0])):
                start = time.perf_counter()
                if first:
                    comm.Send(data, other)
                    comm.Recv(data, other)
                else:
                    comm.Recv(data, other)
                    comm.Send(data, other)
                best = min(best, time.perf_counter() - start)
            if attempt == 0:
                rounds[0] = min(2000, max(5, int(_ROUNDS_S / best)))
                if first:
                    comm.Send(rounds, other)
                else:
                    comm.Recv(rounds, other)
        found[nbytes] = best / 2
    return found
