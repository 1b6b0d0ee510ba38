"""Routes: which links a copy between two memories takes, the fastest for a copy of 1 MiB."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from soapstone.native.memory import Array
from soapstone.runtime.errors import MachineError
from soapstone.runtime.machines.machine import Machine

_NBYTES = 1 << 20


@dataclass(frozen=True)
class Routes:
    """The way between the memories of any two processors of a machine.

    Attributes:
        channels: what is busy during a copy: a link, or the bus that several links share.
        route_ptr, route: int32, the channels from processor a to b are
            `route[route_ptr[a * n + b] : route_ptr[a * n + b + 1]]`; none within a memory.
        latency_s, s_per_byte: float64 (n, n), summed and at the narrowest place.
    """

    channels: tuple[str, ...]
    route_ptr: Array
    route: Array
    latency_s: Array
    s_per_byte: Array


def routes(machine: Machine) -> Routes:
    """Return the routes between all processors of a machine.

    Raises: MachineError for two memories without a way between them.
    """
    places = [*(memory.name for memory in machine.memories), *machine.switches]
    number = {name: i for i, name in enumerate(places)}
    channel_of: dict[str, int] = {}
    links: dict[tuple[int, int], tuple[int, float, float]] = {}
    size = len(places)
    cost = np.full((size, size), np.inf)
    np.fill_diagonal(cost, 0.0)
    for link in machine.links:
        name = link.bus or f"{link.source} -> {link.target}"
        channel = channel_of.setdefault(name, len(channel_of))
        pair = number[link.source], number[link.target]
        links[pair] = channel, link.latency_s, 1.0 / link.bytes_per_s
        cost[pair] = link.latency_s + _NBYTES / link.bytes_per_s
    via = _shortest(cost)
    homes = [number[processor.memory] for processor in machine.processors]
    ways: dict[tuple[int, int], tuple[list[int], float, float]] = {}
    for a in dict.fromkeys(homes):
        for b in dict.fromkeys(homes):
            if a != b:
                if not np.isfinite(cost[a, b]):
                    raise MachineError(
                        f"machine {machine.name!r}: no way over links from memory {places[a]!r}"
                        f" to {places[b]!r}; one needed"
                    )
                ways[a, b] = _way(a, b, via, links)
    count = len(homes)
    ptr, flat = np.zeros(count * count + 1, np.int32), []
    latency, per_byte = np.zeros((count, count)), np.zeros((count, count))
    for i, a in enumerate(homes):
        for j, b in enumerate(homes):
            if a != b:
                channels, latency[i, j], per_byte[i, j] = ways[a, b]
                flat += channels
            ptr[i * count + j + 1] = len(flat)
    return Routes(tuple(channel_of), ptr, np.array(flat, np.int32), latency, per_byte)


def _shortest(cost: Array) -> Array:
    """Make `cost` that of the cheapest ways (Floyd 1962); return the place before each end."""
    size = len(cost)
    before = np.where(np.isfinite(cost), np.arange(size)[:, None], -1)
    for middle in range(size):
        through = cost[:, middle, None] + cost[None, middle, :]
        better = through < cost - 1e-15
        cost[better] = through[better]
        before[better] = np.broadcast_to(before[middle], (size, size))[better]
    return before


def _way(
    a: int, b: int, before: Array, links: dict[tuple[int, int], tuple[int, float, float]]
) -> tuple[list[int], float, float]:
    channels, latency, per_byte = [], 0.0, 0.0
    while b != a:
        last = int(before[a, b])
        channel, extra, slow = links[last, b]
        if channel not in channels:
            channels.append(channel)
        latency += extra
        per_byte = max(per_byte, slow)
        b = last
    return channels, latency, per_byte
