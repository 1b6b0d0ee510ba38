"""The links of a machine of GPUs, measured: copies by the devices' copy engines, one at a time."""

from __future__ import annotations

from dataclasses import replace

from soapstone.native.cuda.arrays import device_bytes, pinned_bytes
from soapstone.native.cuda.copies import copied
from soapstone.native.cuda.device import Device, Lane, connect, simulated
from soapstone.native.cuda.timing import Repeated
from soapstone.native.memory import Array
from soapstone.runtime.machines.machine import Link, Machine
from soapstone.search.cost.database import ROUNDS, interleaved


def measured_links(machine: Machine, sizes: tuple[int, int]) -> tuple[Link, ...]:
    """Return the links between the host's memory and those of GPUs, as measured.

    The host's end is page-locked memory. A link's latency is what a short copy takes, its rate that
    of what a long one takes more; each way is measured by itself.

    sizes: bytes of the short and of the long one.
    """
    devices = {machine.memories[memory].name: gpu for memory, gpu in machine.devices.items()}
    return tuple(
        _measured(link, devices.get(link.source), devices.get(link.target), sizes)
        for link in machine.links
    )


def _measured(link: Link, source: int | None, target: int | None, sizes: tuple[int, int]) -> Link:
    """Return a link as measured. source, target: numbers of GPUs; None: the host."""
    ends = [gpu for gpu in (target, source) if gpu is not None]
    if len(ends) == 2:
        connect(*ends)
        connect(*ends[::-1])
    lane = Lane(Device(ends[0]))
    works = []
    for nbytes in sizes:
        to, x = _bytes(target, nbytes), _bytes(source, nbytes)
        with lane.device:
            works.append(Repeated(lane, [copied(to, x)]))
    rounds = 1 if simulated() else ROUNDS
    short, long = (1e-6 * each.us for each in interleaved([work.us for work in works], rounds))
    rate = (sizes[1] - sizes[0]) / max(long - short, 1e-9)
    return replace(link, latency_s=short, bytes_per_s=rate)


def _bytes(gpu: int | None, nbytes: int) -> Array:
    return pinned_bytes(nbytes, zero=True) if gpu is None else device_bytes(Device(gpu), nbytes)
