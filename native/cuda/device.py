"""Devices and their streams, through Numba CUDA; in Numba's simulator by the same code.

The simulator (`NUMBA_ENABLE_CUDASIM=1`) stands in for any number of devices. It runs what is
enqueued at once, in the calling thread, one kernel at a time.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from functools import cache
from importlib.util import find_spec
from types import TracebackType
from typing import Any, Protocol

from soapstone.locks import Lock
from soapstone.system import physical_bytes

SIMULATED_DEVICES = 64  # as many as anybody asks for
_HELD_BACK = 0.05  # of a device's free memory: for code, and for what libraries need
CLOCK_NS = 50_000  # by which a device's times, as the host's clock counts, may be wrong
_TURN = Lock()  # of whoever enqueues
_USED: dict[int, None] = {}  # numbers of devices of which there is an object, the first one first
_GIVING_BACK = Lock()


class NoDevice(RuntimeError):
    """There is no GPU, or no Numba CUDA to use it by: says what was found and what to install."""


class Enqueued(Protocol):
    """Work of a device, on arrays that are known: a kernel, a copy, or several of them."""

    def enqueue(self, stream: Any) -> None:
        """Have it done after all that is on the stream. stream: of a device that is current."""


@cache
def numba_cuda() -> Any:
    """Return `numba.cuda`.

    Raises:
        NoDevice: the package numba-cuda is not installed. Numba has an older `numba.cuda` of its
            own, which is not what kernels are written for.
    """
    try:
        import numba.cuda as found
        import numba_cuda  # noqa: F401
        from numba.cuda import gpus  # noqa: F401

        if "NUMBA_CUDA_LOW_OCCUPANCY_WARNINGS" not in os.environ:  # small calls have small grids
            found.config.CUDA_LOW_OCCUPANCY_WARNINGS = 0
    except ImportError as error:
        raise NoDevice(
            f"numba-cuda found missing ({error}); needed for GPUs: pip install 'soapstone[cuda]'"
        ) from error
    return found


def simulated() -> bool:
    """Return whether Numba's simulator stands in for devices."""
    return bool(numba_cuda().config.ENABLE_CUDASIM)


@cache
def libraries_installed() -> bool:
    """Return whether NVIDIA's libraries (extra `cuda-libs`) are asked for products here first."""
    if any(find_spec(name) is None for name in ("numba_cuda", "nvmath", "cudnn")):
        return False
    return not simulated()


@cache
def device_count() -> int:
    """Return how many devices there are.

    Raises:
        NoDevice: none; says why.
    """
    cuda = numba_cuda()
    if simulated():
        return SIMULATED_DEVICES
    try:
        found = len(cuda.gpus)
    except Exception as error:  # whatever a driver that does not fit does
        said = " ".join(str(error).split()).strip(" :.") or type(error).__name__
        raise NoDevice(
            f"no NVIDIA GPU found ({said}); a GPU and NVIDIA's driver needed, or"
            " NUMBA_ENABLE_CUDASIM=1 for Numba's simulator"
        ) from error
    if not found:
        raise NoDevice("no NVIDIA GPU found: the driver sees none (CUDA_VISIBLE_DEVICES?)")
    _fits(cuda.cudadrv.driver.driver.get_version())
    return found


def _fits(driver: tuple[int, int]) -> None:
    """Look whether there are NVIDIA's compilers, whose code a driver of a version of CUDA loads.

    Raises:
        NoDevice: there are none, or those of a later CUDA.
    """
    try:
        from cuda.bindings import nvjitlink

        compilers = nvjitlink.version()
    except Exception as error:  # no module, or no library, whose error is a class of that module
        said = " ".join(str(error).split())
        raise NoDevice(
            f"NVIDIA's compilers found missing ({said}); needed: pip install 'soapstone[cuda]'"
        ) from error
    if compilers[0] > driver[0]:
        had, given = (".".join(map(str, version)) for version in (driver, compilers))
        raise NoDevice(
            f"a driver of CUDA {had} found beside compilers of CUDA {given}; a driver of CUDA"
            f" {compilers[0]} needed, or numba-cuda[cu{driver[0]}] in a new environment"
        )


class Device:
    """One device; a context manager in which it is current, for one thread at a time.

    Enqueuing takes microseconds, so threads take turns at it, as Numba's simulator needs.

    Args:
        number: among those that the driver shows.

    Attributes:
        current: a context manager in which it is current without a turn, to wait for what it does.
    """

    def __init__(self, number: int) -> None:
        count = device_count()
        if not 0 <= number < count:
            raise NoDevice(f"GPU {number} found; the driver has {count}, from 0 on")
        self.number = number
        _USED.setdefault(number)
        self.current: Any = numba_cuda().gpus[0 if simulated() else number]  # without a turn
        _prepared(number)

    def __enter__(self) -> Device:
        _TURN.acquire()
        try:
            self.current.__enter__()
        except BaseException:
            _TURN.release()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            self.current.__exit__(kind, error, traceback)
        finally:
            _TURN.release()

    @property
    def name(self) -> str:
        """What the device is called."""
        if simulated():
            return "Numba's simulator"
        found = self.current.name
        return found.decode() if isinstance(found, bytes) else str(found)

    @property
    def free_bytes(self) -> int:
        """Bytes of its memory to work in: what is free, but for a little that is held back.

        Of a simulated device, which uses the computer's memory, a quarter of that.
        """
        if simulated():
            return physical_bytes() // 4
        with self:
            free = numba_cuda().current_context().get_memory_info().free
        return int(free * (1 - _HELD_BACK))


def any_device() -> Device:
    """Return a device that this process uses: of another it would take memory, or be refused it."""
    return Device(next(iter(_USED), 0))


@cache
def connect(one: int, other: int) -> None:
    """Let the kernels of a device read and write another's memory, at its addresses.

    one, other: their numbers.

    Raises:
        NoDevice: the computer does not connect them.
    """
    if simulated():
        return
    cuda = numba_cuda()
    with Device(other):
        theirs = cuda.current_context()
    with Device(one):
        mine = cuda.current_context()
        if not mine.can_access_peer(other):
            raise NoDevice(f"GPU {one} cannot reach the memory of GPU {other}; peers needed")
        try:
            mine.enable_peer_access(theirs.handle)
        except cuda.cudadrv.driver.CudaAPIError as error:
            if error.code.name != "CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED":  # by another library
                raise


@cache
def _prepared(number: int) -> None:
    """Have a device current whenever Numba gives something of it back, and its code be its own.

    Numba gives memory, streams and events back some at a time, in whatever thread drops the last of
    them, and at the end of the process; a driver refuses that where no context is current. It loads
    code once for all devices, and would give it back once for each.
    """
    if simulated():
        return
    from cuda.core import ObjectCode

    cuda = numba_cuda()
    context, driver = cuda.gpus[number].get_primary_context(), cuda.cudadrv.driver.driver
    load = context.create_module_image

    def within(clear: Callable[[], None]) -> Callable[[], None]:
        def cleared() -> None:
            with _GIVING_BACK:
                driver.cuCtxPushCurrent(context.handle)
                try:
                    clear()
                finally:
                    driver.cuCtxPopCurrent()

        return cleared

    for pending in (context.deallocations, context.memory_manager.deallocations):
        pending.clear = within(pending.clear)
    context.create_module_image = lambda image, *more: load(
        ObjectCode.from_cubin(bytes(image.code)), *more
    )


class _Clock:
    """What the host's clock says of a device's events: by one that the host has seen occur."""

    def __init__(self) -> None:
        self._stream, spread = numba_cuda().stream(), None
        for _ in range(32):  # who is interrupted between the two looks knows little of the event
            before = time.perf_counter_ns()
            event = self._now()
            after = time.perf_counter_ns()
            if spread is None or after - before < spread:
                spread, self._known = after - before, (event, (before + after) // 2)
            if spread < CLOCK_NS // 2:
                break

    def _now(self) -> Any:
        event = numba_cuda().event()
        event.record(self._stream)
        event.synchronize()
        return event

    def ns(self, event: Any) -> int:
        """Return when an event occurred. Its device is current."""
        known, ns = self._known
        if time.perf_counter_ns() - ns > 1_000_000_000:  # milliseconds are of single precision
            later = self._now()
            known, ns = self._known = later, ns + int(known.elapsed_time(later) * 1e6)
        return ns + int(known.elapsed_time(event) * 1e6)


_CLOCKS: dict[int, _Clock] = {}  # of devices


class Lane:
    """A stream of a device: what is enqueued on it is done in order, beside all other lanes.

    `after` makes it wait for what other lanes had been given when they were marked; the host waits
    only where it synchronises with a mark.
    """

    def __init__(self, device: Device) -> None:
        self.device = device
        with device:
            self.stream = numba_cuda().stream()
            if not simulated() and device.number not in _CLOCKS:  # now, while nobody is in the way
                _CLOCKS[device.number] = _Clock()

    def enqueue(self, work: Enqueued) -> None:
        """Have work done after all that the lane was given before."""
        with self.device:
            work.enqueue(self.stream)

    def event(self) -> Any:
        """Return a new event of the lane's device."""
        with self.device:
            return numba_cuda().event()

    def mark(self, event: Any = None) -> Any:
        """Return an event that occurs once all that was enqueued so far is done.

        event: one to use again.
        """
        with self.device:
            found = numba_cuda().event() if event is None else event
            found.record(self.stream)
        return found

    def after(self, marks: Iterable[Any]) -> None:
        """Let what is enqueued from now on wait for marks of other lanes."""
        with self.device:
            for mark in marks:
                mark.wait(self.stream)

    def between_us(self, begun: Any, ended: Any) -> float:
        """Return the microseconds between two marks of the lane that have occurred."""
        with self.device.current:
            return float(begun.elapsed_time(ended)) * 1e3

    def times_ns(self, *marks: Any) -> tuple[int, ...]:
        """Return when marks of the lane occurred, by the host's clock; see `CLOCK_NS`."""
        with self.device.current:
            return tuple(_CLOCKS[self.device.number].ns(mark) for mark in marks)

    def wait(self, mark: Any = None) -> None:
        """Wait, in the host, until a mark occurs, or until all that was enqueued is done."""
        with self.device.current:
            (self.stream if mark is None else mark).synchronize()
