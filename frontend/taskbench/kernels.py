"""What a task of Task Bench does: check its inputs, run a kernel, write its output.

An output is rows of pairs of 64-bit integers, each pair (step, point) of the task that wrote it. A
task finds the pairs of every predecessor in its inputs, or it fails. The same compiled functions
serve native entries, Python bodies that call them without the interpreter lock, and peers.
"""

from __future__ import annotations

from typing import Any

from soapstone.cache.compiled import njit
from soapstone.ir.tensor import Array
from soapstone.kernels.entry import Entry
from soapstone.native.entries import helper, native
from soapstone.native.intrinsics import f64p, i64p, stack, words
from soapstone.native.memory import pack

EMPTY, COMPUTE, MEMORY = 0, 1, 2
LANES = 64  # elements of the compute kernel, each multiplied and added once an iteration
CHUNK = 512  # doubles that an iteration of the memory kernel reads and writes
COMPUTE_FLOPS = 2 * LANES  # of one iteration
MEMORY_BYTES = 2 * 8 * CHUNK

# Words of an entry's block; the inputs follow: address, first point and rows of each.
_STEP, _POINT, _KERNEL, _FACTOR, _ITERATIONS, _OUTPUT, _PAIRS = range(7)
_SCRATCH, _CHUNKS, _RESULT, _INPUTS, _HEAD = range(7, 12)
_MOST_INPUTS = 256
STATUSES = {
    1 + number: f"input {number} is not what its predecessors in the step before wrote"
    for number in range(_MOST_INPUTS)
}


@helper
def _matches(address: Any, step: Any, first: Any, rows: Any, pairs: Any) -> bool:
    """Whether rows of pairs are the outputs of the points from `first` at a step."""
    found = i64p(address)
    at = 0
    for row in range(rows):
        for _ in range(pairs):
            if found[at] != step or found[at + 1] != first + row:
                return False
            at += 2
    return True


@helper
def _stamp(address: Any, step: Any, point: Any, pairs: Any) -> None:
    """Write the output of a task."""
    out = i64p(address)
    for pair in range(pairs):
        out[2 * pair] = step
        out[2 * pair + 1] = point


@helper
def _compute(iterations: Any) -> float:
    """Multiply and add `LANES` numbers in each iteration; they stay bounded."""
    lanes = f64p(stack(512))  # LANES doubles; Numba wants a literal
    for i in range(LANES):
        lanes[i] = 0.25 + 0.001 * i
    for _ in range(iterations):
        for i in range(LANES):
            lanes[i] = lanes[i] * lanes[i] - 0.5
    total = 0.0
    for i in range(LANES):
        total += lanes[i]
    return total


@helper
def _stream(scratch: Any, chunks: Any, iterations: Any, step: Any) -> float:
    """Read and write one chunk of the scratch memory in each iteration, each in its turn."""
    place = (step * iterations) % chunks
    for _ in range(iterations):
        chunk = f64p(scratch + place * 8 * CHUNK)
        for i in range(CHUNK):
            chunk[i] += 1.0
        place += 1
        if place == chunks:
            place = 0
    return 0.0


@helper
def _kernel(kernel: Any, iterations: Any, scratch: Any, chunks: Any, step: Any) -> float:
    if kernel == COMPUTE:
        return _compute(iterations)
    if kernel == MEMORY:
        return _stream(scratch, chunks, iterations, step)
    return 0.0


@native()
def task_entry(block: Any) -> int:
    """Run one task; the status is 0, or 1 and the number of the input that is wrong."""
    w = words(block)
    step = w[_STEP]
    for number in range(w[_INPUTS]):
        at = _HEAD + 3 * number
        if not _matches(w[at], step - 1, w[at + 1], w[at + 2], w[_PAIRS]):
            return 1 + min(number, _MOST_INPUTS - 1)
    iterations = int(f64p(block)[_FACTOR] * i64p(w[_ITERATIONS])[0] + 0.5)
    f64p(block)[_RESULT] = _kernel(w[_KERNEL], iterations, w[_SCRATCH], w[_CHUNKS], step)
    _stamp(w[_OUTPUT], step, w[_POINT], w[_PAIRS])
    return 0


@njit()
def check(found: Any, step: int, first: int) -> bool:
    """Whether an array (rows, words) holds the outputs of the points from `first` at a step."""
    return bool(_matches(found.ctypes.data, step, first, found.shape[0], found.shape[1] // 2))


@njit(nogil=True)
def perform(
    out: Any, step: int, point: int, kernel: int, iterations: Any, factor: float, scratch: Any
) -> float:
    """Run a kernel and write the output (1, words), without the interpreter lock.

    iterations: int64 (1,), to be multiplied by `factor`.
    """
    count = int(factor * iterations[0] + 0.5)
    chunks = scratch.size // CHUNK
    result = _kernel(kernel, count, scratch.ctypes.data, chunks, step)
    _stamp(out.ctypes.data, step, point, out.shape[1] // 2)
    return float(result)


@njit(nogil=True)
def perform_after(
    found: Any,
    first: int,
    out: Any,
    step: int,
    point: int,
    kernel: int,
    iterations: Any,
    factor: float,
    scratch: Any,
) -> bool:
    """As `perform`, if the only input holds the outputs of the points from `first`; else False."""
    if not _matches(found.ctypes.data, step - 1, first, found.shape[0], found.shape[1] // 2):
        return False
    perform(out, step, point, kernel, iterations, factor, scratch)
    return True


def compute_in_python(iterations: int) -> float:
    """The compute kernel in pure Python: it holds the interpreter lock."""
    value = 0.25
    for _ in range(iterations * LANES):
        value = value * value - 0.5
    return value


def entry(
    step: int,
    point: int,
    kernel: int,
    factor: float,
    iterations: Array,
    output: Array,
    scratch: Array | None,
    inputs: list[tuple[Array, int]],
) -> Entry:
    """The native entry of one task. inputs: arrays (rows, words), and the point of the first row.

    iterations: int64 (1,), read at each run and multiplied by `factor`.
    """
    head: list[Any] = [0] * _HEAD
    head[_STEP], head[_POINT], head[_KERNEL], head[_FACTOR] = step, point, kernel, float(factor)
    head[_ITERATIONS], head[_OUTPUT], head[_PAIRS] = iterations, output, output.shape[1] // 2
    if scratch is not None:
        head[_SCRATCH], head[_CHUNKS] = scratch, scratch.size // CHUNK
    head[_INPUTS] = len(inputs)
    given = [(array, first, array.shape[0]) for array, first in inputs]
    return Entry(task_entry.address, pack(head, given), STATUSES)
