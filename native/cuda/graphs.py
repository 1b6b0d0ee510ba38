"""CUDA graphs: what lanes are given, captured once and launched as one from then on.

Numba has no call for this, so it is asked of the driver through NVIDIA's bindings, which Numba CUDA
brings along. This is the one file with such calls; it has not run on a device yet.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from soapstone.errors import warn
from soapstone.native.cuda.device import Lane, numba_cuda


class Graph:
    """A captured sequence of work, ready to be launched on a lane."""

    def __init__(self, lane: Lane, enqueue: Callable[[], None]) -> None:
        """Capture what a function enqueues on a lane, and on others that it makes wait for it.

        All of these have to be waited for by the lane at the end. Nothing may run for the first
        time, since kernels are compiled and loaded then, which a capture does not allow.

        Raises:
            RuntimeError: the driver refuses; names the call. Or what the function raises.
        """
        from cuda.bindings import driver

        self._lane, self._driver = lane, driver
        with lane.device, ExitStack() as meanwhile:
            for gpu in numba_cuda().gpus:  # nothing may be freed, on any device that has lanes
                if gpu.primary_context is not None:
                    meanwhile.enter_context(gpu.primary_context.defer_cleanup())
            with self._capture(int(lane.stream), enqueue) as graph:
                self._graph = _done("cuGraphInstantiate", driver.cuGraphInstantiate(graph, 0))
        weakref.finalize(self, driver.cuGraphExecDestroy, self._graph).atexit = False

    @contextmanager
    def _capture(self, stream: int, enqueue: Callable[[], None]) -> Iterator[Any]:
        """Yield the driver's graph of what is enqueued, which is given back however that ends."""
        driver = self._driver
        mode = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
        _done("cuStreamBeginCapture", driver.cuStreamBeginCapture(stream, mode))
        graph = None
        try:
            try:
                enqueue()
            finally:  # which ends the capture of other streams too
                status, graph = driver.cuStreamEndCapture(stream)
            _done("cuStreamEndCapture", (status,))
            yield graph
        finally:
            if graph is not None and int(graph):
                driver.cuGraphDestroy(graph)

    def launch(self) -> None:
        """Enqueue all of it on the lane.

        Raises:
            RuntimeError: the driver refuses; names the call.
        """
        with self._lane.device:
            launched = self._driver.cuGraphLaunch(self._graph, int(self._lane.stream))
            _done("cuGraphLaunch", launched)


def captured(lane: Lane, enqueue: Callable[[], None]) -> Graph | None:
    """Return the graph of what a function enqueues on a lane, or None where there can be none.

    That is said as a warning: what it enqueues then runs as it is enqueued, only more slowly. What
    is wrong with the work itself shows there, and names it. See `Graph`.
    """
    try:
        return Graph(lane, enqueue)
    except Exception as error:
        warn(f"no CUDA graph ({error}): what would be one launch is many", RuntimeWarning)
        return None


def _done(call: str, answer: tuple[Any, ...]) -> Any:
    """Return what a call of the driver gave.

    Raises:
        RuntimeError: its status is an error.
    """
    status, *found = answer
    if int(status):
        raise RuntimeError(f"CUDA driver: {call}: {status.name}")
    return found[0] if found else None
