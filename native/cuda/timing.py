"""What enqueued work takes on a device: by its events, many times over in one CUDA graph.

Numba's simulator has no clock and no graphs: there the same code runs once at a time, by the host's
clock, and says what simulating takes.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from soapstone.native.cuda.device import Device, Enqueued, Lane, numba_cuda, simulated
from soapstone.native.cuda.graphs import Graph, captured

SPAN_US = 2000.0  # that repetitions take together, so that events' resolution does not matter
MOST = 200  # of them in a graph


class Repeated:
    """Work that is repeated on a lane, ready to be timed.

    works: equal work on operands of its own; the repetitions take turns at it, so that what one
    reads is not in a cache because the one before has read it.
    """

    def __init__(self, lane: Lane, works: Sequence[Enqueued]) -> None:
        self._lane, self._works = lane, works
        for work in works:  # compiles kernels, which no capture may
            lane.enqueue(work)
        lane.wait()
        self.count = 1
        self._graph: Graph | None = None
        if not simulated():
            once = self.us()
            self.count = max(len(works), min(MOST, int(SPAN_US / max(once, 1.0))))
            self._graph = captured(lane, self._enqueue)
            self.us()  # the first launch of a graph uploads it

    def us(self) -> float:
        """Return the microseconds of one repetition, of so many that ran one after the other."""
        start, begun = time.perf_counter_ns(), self._lane.mark()
        if self._graph is not None:
            self._graph.launch()
        else:
            self._enqueue()
        ended = self._lane.mark()
        self._lane.wait(ended)
        if simulated():
            return (time.perf_counter_ns() - start) / 1e3 / self.count
        return self._lane.between_us(begun, ended) / self.count

    def _enqueue(self) -> None:
        for number in range(self.count):
            self._lane.enqueue(self._works[number % len(self._works)])


def identity(device: Device) -> str:
    """Return what times of a device are of: its name, capability and the driver's version."""
    if simulated():
        return device.name
    cuda = numba_cuda()
    major, minor = device.current.compute_capability
    version = ".".join(map(str, cuda.cudadrv.driver.driver.get_version()))
    return f"{device.name} sm_{major}{minor} {version}"


def cache_bytes(device: Device) -> int:
    """Return the bytes of a device's last cache; none in the simulator, which has no cache."""
    return 0 if simulated() else int(device.current.L2_CACHE_SIZE)
