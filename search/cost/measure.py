"""Times of launches as they are inside a whole network: weights cold, activations and code warm.

A kernel that is run again and again finds its weights in the cache, where a network's weights would
have been replaced by those of all the other operators. So before each timed run the caches are
swept; the kernel runs once on other weights, as it does for other operators of the network; and the
operands that another operator would just have made are touched by all threads.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cache, partial

import numpy as np

from soapstone.deadline import Deadline
from soapstone.dtypes import kind_of
from soapstone.ir.tensor import Arrays
from soapstone.kernels.entry import Array, Call, Entry
from soapstone.kernels.select import run_reference, select
from soapstone.native import memory
from soapstone.native.entries import noop
from soapstone.runtime.tracing.program import NativeProgram, assemble
from soapstone.search.cost.database import ROUNDS, interleaved
from soapstone.system import cache_bytes, preemptions

_SIDE, _SLOW, _LOOKS = 192, 1.3, 9
_REST_S = 0.002  # a process that has slept is not preempted at once


class Weights(StrEnum):
    """In which level of the memory hierarchy constant operands are when a launch begins.

    Alone, a launch would find its weights in the nearest cache, where a network's never all are.
    """

    COLD = "cold"  # in memory: the weights of the network exceed the last cache
    CACHED = "cached"  # in the last cache, not nearer

    @staticmethod
    def of(constants: Arrays) -> Weights:
        """Return where a network's weights are: do they fit three quarters of the last cache?"""
        nbytes = sum(array.nbytes for array in constants.values())
        return Weights.CACHED if nbytes <= cache_bytes(3) * 3 // 4 else Weights.COLD


@dataclass(frozen=True)
class Measured:
    """The time of a launch, whether its best runs agree on it, and the kernel variant that ran."""

    us: float
    settled: bool
    variant: str


@dataclass(frozen=True)
class Timed:
    """A launch on scratch operands, ready to be timed.

    Attributes:
        before: brings caches into the state that the launch would find in a network.
        program: the launch itself; None for the reference, which Python runs.
        keep: entries whose memory both use.
    """

    call: Call
    variant: str
    before: NativeProgram
    program: NativeProgram | None
    keep: Sequence[Entry]

    def run(self) -> float:
        """Return the microseconds of one execution; negative where the process was preempted."""
        self.before.run(0)
        lost = preemptions()
        if self.program is None:
            start = time.perf_counter_ns()
            run_reference(self.call)
            us = (time.perf_counter_ns() - start) / 1e3
        else:
            stamps = np.zeros((1, 3), np.int64)
            self.program.run(0, stamps)
            us = float(stamps[0, 2] - stamps[0, 1]) / 1e3
        if preemptions() == lost:
            return us
        time.sleep(_REST_S)
        return -us


def timed(call: Call, weights: Weights) -> Timed:
    """Return a call on scratch operands, bound to the variant that the executor would choose.

    In checked mode it has run once on fenced operands; what is timed is not fenced.
    """
    if not memory.CHECKED:
        return _timed(call, weights)
    from soapstone.native import checked

    _, entry = select(call)
    if entry is not None:
        checked.try_out(entry)
    with checked.unfenced():
        return _timed(call, weights)


def _timed(call: Call, weights: Weights) -> Timed:
    variant, entry = select(call)
    moving = [a for i, a in enumerate(call.inputs) if i not in call.constants]
    touch_inputs = [step for a in moving if (step := _touch(a, call.threads))]
    before = [step for a in call.outputs if (step := _touch(a, call.threads))] + touch_inputs
    if call.constants:
        # Twice: caches keep what was read again from what is read once.
        before = [sweep(_span(weights), call.threads)] * 2 + before
    twin = _twin(call, variant)
    if twin is not None:
        before += [twin, *touch_inputs]
    program = _program([entry]) if entry is not None else None
    return Timed(call, variant, _program(before), program, (*before, *([entry] if entry else [])))


def _twin(call: Call, variant: str) -> Entry | None:
    """Return the entry of the same kernel with other constants: its code is in the cache then.

    Their contents differ too, since kernels may share what they pack of equal weights.
    """

    def other(array: Array) -> Array:
        made = np.array(array)
        if kind_of(made.dtype) == "f":
            made *= made.dtype.type(0.5)  # in place: of one element, a product is no array
        return made

    inputs = tuple(other(a) if i in call.constants else a for i, a in enumerate(call.inputs))
    return select(replace(call, inputs=inputs), variant=variant)[1]


def _program(entries: Sequence[Entry]) -> NativeProgram:
    """Return the entries as a native program of one worker; without any, it does nothing."""
    blocks = [(entry.address, entry.block) for entry in entries] or [(noop().address, 0)]
    count = len(blocks)
    functions, words = ([pair[side] for pair in blocks] for side in (0, 1))
    return assemble(range(count), [0] * count, [()] * count, functions, words)


class Yardstick:
    """A fixed matrix product that is timed beside launches, to detect when the machine is slow.

    On a virtual machine other guests of the same processor can slow all down for minutes, which no
    counter of this system shows. Times that were taken meanwhile are marked.

    Attributes:
        best_us: the least time of the product so far, in microseconds.
    """

    def __init__(self, threads: int, best_us: float = math.inf) -> None:
        self.best_us = best_us
        rng = np.random.default_rng(0)
        a, b = (rng.random((_SIDE, _SIDE), np.float32) for _ in range(2))
        flags = {"transpose_a": False, "transpose_b": False}
        call = Call("matmul", flags, (a, b), (np.zeros_like(a),), threads)
        self._entry = select(call)[1]

    def slow(self) -> bool:
        """Return whether the product takes more than `_SLOW` times its best time now."""
        return self.us() > _SLOW * self.best_us

    def us(self) -> float:
        """Return what the product takes now in the calling thread, in microseconds."""
        from soapstone.native.memory import run

        if self._entry is None:
            return 0.0
        run(self._entry)  # brings its operands into the cache
        start = time.perf_counter_ns()
        run(self._entry)
        us = (time.perf_counter_ns() - start) / 1e3
        self.best_us = min(self.best_us, us)
        return us

    def mostly_slow(self) -> bool:
        """Return whether the machine was slow in most of `_LOOKS` tests in a row."""
        return sum(self.slow() for _ in range(_LOOKS)) > _LOOKS // 2


def measure(
    calls: Sequence[Call],
    weights: Weights,
    yardstick: Yardstick,
    deadline: Deadline | None = None,
    rounds: int = ROUNDS,
) -> list[Measured]:
    """Return the times of calls on scratch operands, taken in turns on the calling thread.

    Raises:
        TimeUpError: the deadline was over first.
    """
    deadline = deadline or Deadline()
    ready = []
    for call in calls:
        deadline.check()
        ready.append(timed(call, weights))

    def run(each: Timed) -> float:
        deadline.check()
        slow = yardstick.slow()
        us = each.run()
        return -abs(us) if slow else us

    for each in ready:
        deadline.check()
        each.run()
    times = interleaved([partial(run, each) for each in ready], rounds)
    return [Measured(*time, each.variant) for time, each in zip(times, ready)]


def _span(weights: Weights) -> int:
    """Return how many other bytes are read before a launch, to evict constants from near caches."""
    if weights is Weights.COLD:
        return cache_bytes(3)
    return 2 * cache_bytes(2)


@cache
def sweep(nbytes: int, threads: int) -> Entry:
    """Return an entry in which the threads read `nbytes` bytes, a part each."""
    rows = max(threads, 1) * 16
    store = np.ones((rows, nbytes // (4 * rows)), np.float32)  # of zeros there would be one page
    result = np.zeros(rows, np.float32)
    attributes = {"axes": (1,), "keepdims": False}
    _, entry = select(Call("reduce_max", attributes, (store,), (result,), threads))
    assert entry is not None
    return entry


def _touch(array: Array, threads: int) -> Entry | None:
    """Return an entry that rewrites an array as the operator that makes it would, or None."""
    if array.dtype != np.float32 or array.size == 0:
        return None
    call = Call("affine", {"scale": 1.0, "shift": 0.0}, (array,), (array,), threads)
    try:
        return select(call, variant="numba")[1]
    except ValueError:  # memory that the kernel does not take
        return None
