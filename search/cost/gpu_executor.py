"""The cost of a graph on a GPU of this computer: the measured times of the kernels it lowers to.

Each launch is timed by the device's events, many times over in one CUDA graph, with activations in
the last cache and weights in memory, as they are in a network. What has no CUDA kernel is what its
copies and the host's run take. In Numba's simulator the same code runs; its times mean nothing.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np

from soapstone.cache.sources import modules_of, stamp
from soapstone.cache.store import Store
from soapstone.engine.expand import NodeLaunch
from soapstone.engine.prepare import Prepared
from soapstone.ir.tensor import Array, Arrays, TensorSpec
from soapstone.kernels.entry import Call
from soapstone.kernels.registry import registered
from soapstone.kernels.select import select_device
from soapstone.native.cuda.arrays import launchable, on_device, pinned_like, uploaded
from soapstone.native.cuda.copies import copied
from soapstone.native.cuda.device import Device, Lane, simulated
from soapstone.native.cuda.timing import Repeated, cache_bytes, identity
from soapstone.native.walks import in_places, memory_order
from soapstone.runtime.machines.machine import CUDA
from soapstone.search.cost.database import ROUNDS, interleaved
from soapstone.search.cost.executor import ExecutorCost
from soapstone.search.cost.gpus import bound
from soapstone.search.cost.launches import Key, call, filled, hollow, keys
from soapstone.search.cost.measure import Weights, Yardstick, measure

_MOST_COPIES = 16  # of weights, among which repetitions take turns
_ENQUEUED = 100  # launches, to see what enqueuing one takes


class GpuCost(ExecutorCost):
    """Prices graphs for a GPU of this computer.

    Args:
        gpu: its number. The others: see `ExecutorCost`.

    Raises:
        NoDevice: there is no such GPU.
    """

    def __init__(
        self,
        gpu: int = 0,
        *,
        database: Store | None = None,
        weights: Weights = Weights.COLD,
        training: bool = False,
    ) -> None:
        super().__init__(1, database=database, weights=weights, training=training, processor=CUDA)
        self._lane = Lane(Device(gpu))
        self.target = f"soapstone, {identity(self._lane.device)}"
        self._hosted: dict[Key, bool] = {}

    @property
    def rounds(self) -> int:
        """How often a launch is timed at least; once in the simulator."""
        return 1 if simulated() else ROUNDS

    def _sources(self, operator: str) -> str:
        return gpu_sources()

    def _together(self, prepared: Prepared, times: list[float]) -> list[float]:
        """Return what launches take in one execution.

        Where the host runs one of them, there is no CUDA graph of the others: each takes what
        enqueuing it takes, if it is not longer.
        """
        wanted = keys(prepared)
        new = {key: node for key, node in zip(wanted, prepared.nodes) if key not in self._hosted}
        if new:
            by_name = {launch.node.name: launch for launch in prepared.launches}
            for key, node in new.items():
                made = call(prepared, by_name[node.name], 1, hollow, {})
                self._hosted[key] = bound(made)[1] is None
        if not any(self._hosted[key] for key in wanted):
            return times
        least = self.untraced_us()
        return [max(least, us) for us in times]

    def untraced_us(self) -> float:
        """Return what the host takes to enqueue a launch, in microseconds."""
        about = f"enqueue {self.target} {gpu_sources()}"
        return float(self._kept(about, lambda: {"us": self._enqueuing_us()})["us"])

    def _enqueuing_us(self) -> float:
        with self._lane.device:
            x = launchable(uploaded(np.ones(32, np.float32)))
            y = launchable(uploaded(np.ones(32, np.float32)))
            _, entry = select_device(Call("relu", {}, (x,), (y,)))
        count = 1 if simulated() else _ENQUEUED

        def once() -> float:
            start = time.perf_counter_ns()
            for _ in range(count):
                self._lane.enqueue(entry)
            us = (time.perf_counter_ns() - start) / 1e3 / count
            self._lane.wait()
            return us

        once()
        return interleaved([once], self.rounds)[0].us

    def _taken(
        self, prepared: Prepared, wanted: Mapping[str, NodeLaunch], constants: Arrays
    ) -> dict[str, float]:
        times = self.database.find(wanted)  # by another process, meanwhile
        for text, launch in wanted.items():
            if text not in times:
                self.deadline.check()
                us = self._us(prepared, launch, constants)
                times |= self.database.update({text: us})
                self.measured += 1
        return times

    def _us(self, prepared: Prepared, launch: NodeLaunch, constants: Arrays) -> float:
        """Return what a launch takes in microseconds, measured now."""
        made = call(prepared, launch, 1, filled, constants)
        device = self._lane.device
        if bound(made)[1] is None:
            return self._host_us(made)
        with device:
            entries = [select_device(_brought(prepared, launch, constants))[1]]
            nbytes = sum(made.inputs[number].nbytes for number in made.constants)
            if nbytes and self.weights is Weights.COLD:
                copies = min(_MOST_COPIES, math.ceil(2 * cache_bytes(device) / nbytes))
                for _ in range(1, copies):
                    entries.append(select_device(_brought(prepared, launch, constants))[1])
        work = Repeated(self._lane, entries)
        return interleaved([work.us], self.rounds)[0].us

    def _host_us(self, made: Call) -> float:
        """Return what the host's run of an operator takes, with its copies there and back."""
        moving = [each for i, each in enumerate(made.inputs) if i not in made.constants]
        ways = []
        with self._lane.device:
            for number, array in enumerate((*moving, *made.outputs)):
                here = pinned_like(array)
                order = memory_order(here.strides)
                there = in_places(uploaded(here.transpose(order)), order)
                ends = (here, there) if number < len(moving) else (there, here)
                ways.append(Repeated(self._lane, [copied(*ends)]).us)
        moved = [each.us for each in interleaved(ways, self.rounds)]
        ran = measure([made], self.weights, Yardstick(1), self.deadline, self.rounds)[0]
        return sum(moved) + ran.us


def _brought(prepared: Prepared, launch: NodeLaunch, constants: Arrays) -> Call:
    """Return a launch as a call on arrays of the device that is current."""
    made = call(prepared, launch, 1, _filled_there, constants)

    def side(arrays: tuple[Array, ...]) -> tuple[Any, ...]:
        return tuple(launchable(each if on_device(each) else uploaded(each)) for each in arrays)

    return replace(made, inputs=side(made.inputs), outputs=side(made.outputs))


def _filled_there(spec: TensorSpec, order: tuple[int, ...]) -> Array:
    """Return `filled` on the device that is current."""
    return in_places(uploaded(filled(spec, order).transpose(order)), order)


@cache
def gpu_sources() -> str:
    """Return the stamp of all kernels of GPUs, and of what measures them."""
    kernels = modules_of(*(each.kernel for each in registered(CUDA)))
    return stamp(*kernels, __name__, Repeated.__module__, compiled=True)
