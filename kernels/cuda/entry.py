"""What a CUDA kernel is bound to: launches in order, on arrays at their final addresses.

The contract between kernels and whoever runs them:

- a variant is bound once, in the context of the GPU that its call's arrays are on, and allocates
  there whatever scratch memory it needs; an entry holds all that its launches touch.
- `enqueue` puts the launches on a stream and returns: nothing is allocated, nothing is copied,
  nobody waits, so entries can be captured into a CUDA graph. Numbers that change from step to step
  (learning rate, step number) are contents of device arrays. Launches follow one another on one
  stream; entries on different streams are ordered by their caller's events.
- the first enqueue of a kernel compiles it for the GPU, so it must not be inside a capture.
- what a kernel finds wrong (a label out of range) it writes to `status`, one int32 in device memory
  that is 0 before and stays as it is once it is not. Whoever waits for a step reads it, and raises
  with the text of `explain`.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from soapstone.native.memory import NO_STATUSES, Statuses

DeviceArray = Any  # of numba.cuda, or of its simulator


class Work(Protocol):
    """A launch of a kernel, or a call of a library that launches its own."""

    def enqueue(self, stream: Any = 0) -> None:
        """Put it on a stream of Numba's, by default the device's own, and return."""


@dataclass(frozen=True)
class Launch:
    """One launch of a kernel.

    Attributes:
        kernel: what `numba.cuda.jit` makes of a function.
        grid, block: blocks, and threads a block, by axis.
        arguments: the kernel's; arrays are kept alive by being here.
        shared: bytes of dynamic shared memory a block.
        flops: operations of it and of those after it that have none, where an entry's launches are
            of several operators.
        nbytes: that it reads and writes; 0 where these are all of its arrays.
    """

    kernel: Any
    grid: tuple[int, ...]
    block: tuple[int, ...]
    arguments: tuple[Any, ...]
    shared: int = 0
    flops: float = 0.0
    nbytes: int = 0

    def enqueue(self, stream: Any = 0) -> None:
        """Put the launch on a stream of Numba's, by default the device's own, and return."""
        self.kernel[self.grid, self.block, stream, self.shared](*self.arguments)


@dataclass(frozen=True)
class Expected:
    """A call that a library would be given, where arrays are only described: it cannot run.

    Attributes:
        library: its name.
        extents: of the products that it computes: how many, rows, columns, and terms of a sum.
        dtype: the element type of operands.
        arguments: the arrays that it reads and writes. flops: see `Launch`.
    """

    library: str
    extents: tuple[int, int, int, int]
    dtype: str
    arguments: tuple[Any, ...]
    flops: float = 0.0

    def enqueue(self, stream: Any = 0) -> None:
        """Refuse to run.

        Raises:
            RuntimeError: always.
        """
        raise RuntimeError(f"{self.library}: a call of arrays that are only described cannot run")


@dataclass(frozen=True)
class DeviceEntry:
    """Launches bound to concrete device arrays, run one after the other.

    Attributes:
        launches: in order; none where there is nothing to compute.
        status: int32 (1,) in device memory, or None where nothing can go wrong.
        statuses: what the codes mean that may be found there.
    """

    launches: tuple[Work, ...]
    status: DeviceArray | None = None
    statuses: Statuses = field(default_factory=lambda: NO_STATUSES)

    def enqueue(self, stream: Any = 0) -> None:
        """Put all launches on a stream of Numba's, by default the device's own, and return."""
        for launch in self.launches:
            launch.enqueue(stream)

    def counted(self, flops: float) -> DeviceEntry:
        """Return the entry with a first launch that says its operations; what runs by a library
        says none."""
        if not self.launches or not isinstance(self.launches[0], Launch | Expected):
            return self
        return replace(self, launches=(replace(self.launches[0], flops=flops), *self.launches[1:]))

    def explain(self, code: int) -> str:
        """Return what a code found in `status` means."""
        text = self.statuses.get(code, f"status {code}")
        return text if isinstance(text, str) else text()


def sequence(entries: tuple[DeviceEntry, ...]) -> DeviceEntry:
    """Return one entry that runs the entries in order, at most one of which has a status.

    Raises:
        ValueError: two have one.
    """
    checked = [entry for entry in entries if entry.status is not None]
    if len(checked) > 1:
        raise ValueError(f"{len(checked)} entries with a status found, one at most needed")
    launches = tuple(launch for entry in entries for launch in entry.launches)
    if not checked:
        return DeviceEntry(launches)
    return DeviceEntry(launches, checked[0].status, checked[0].statuses)
