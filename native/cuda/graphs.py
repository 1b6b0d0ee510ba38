"""CUDA graphs: what lanes are given, captured once and launched as one from then on.

Numba has no call for this, so it is asked of the driver through NVIDIA's bindings, which Numba CUDA
brings along. This is the one file with such calls; it has not run on a device yet.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from soapstone.native.cuda.device import Lane, numba_cuda


class Graph:
    """A captured sequence of work, ready to be launched on a lane."""

    def __init__(self, lane: Lane, enqueue: Callable[[], None]) -> None:
        """Capture what a function enqueues on a lane, and on others that it makes wait for it.

        All of these have to be waited for by the lane at the end. Nothing may run for the first
        time, since kernels are compiled and loaded then, which a capture does not allow.

        Raises:
            RuntimeError: the driver refuses; names the call.
        """
        from cuda.bindings import driver

        self._lane, self._driver, stream = lane, driver, int(lane.stream)
        mode = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
        with lane.device, ExitStack() as meanwhile:
            for gpu in numba_cuda().gpus:  # nothing may be freed, on any device that has lanes
                if gpu.primary_context is not None:
                    meanwhile.enter_context(gpu.primary_context.defer_cleanup())
            _done(driver.cuStreamBeginCapture(stream, mode))
            try:
                enqueue()
            finally:
                ended = driver.cuStreamEndCapture(stream)
            graph = _done(ended)
            self._graph = _done(driver.cuGraphInstantiate(graph, 0))
            _done(driver.cuGraphDestroy(graph))
        weakref.finalize(self, driver.cuGraphExecDestroy, self._graph).atexit = False

    def launch(self) -> None:
        """Enqueue all of it on the lane."""
        with self._lane.device:
            _done(self._driver.cuGraphLaunch(self._graph, int(self._lane.stream)))


def _done(answer: tuple[Any, ...]) -> Any:
    """Return what a call of the driver gave.

    Raises:
        RuntimeError: its status is an error.
    """
    status, *found = answer
    if int(status):
        raise RuntimeError(f"CUDA driver: {status.name}")
    return found[0] if found else None
