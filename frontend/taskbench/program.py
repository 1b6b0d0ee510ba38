"""Task graphs as launches: two regions a graph, written in turn, one index launch a step.

The inputs of a task are ranges of neighbouring points, one argument a range; the runtime finds
from the partitions who waits for whom.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from soapstone.frontend.taskbench import kernels
from soapstone.frontend.taskbench.graph import TaskGraph, uniform
from soapstone.ir.tensor import Array
from soapstone.runtime import (
    LaunchError,
    Partition,
    PointContext,
    Privilege,
    Read,
    ReadWrite,
    Region,
    Runtime,
    Task,
    Write,
)

Body = Literal["native", "python", "pure"]
BODIES: tuple[Body, ...] = ("native", "python", "pure")
_CODES = {
    "compute": kernels.COMPUTE,
    "memory": kernels.MEMORY,
    "empty": kernels.EMPTY,
    "imbalance": kernels.COMPUTE,
}
KERNELS = tuple(_CODES)
_NO_SCRATCH = np.zeros(0)


@dataclass(frozen=True)
class Step:
    """What the tasks of one launch know: the step, the first point, and where inputs begin.

    lows: for each task, the first point of each of its inputs. factors: for each task, what the
    iterations are multiplied by.
    """

    step: int
    first: int
    kernel: str
    lows: tuple[tuple[int, ...], ...]
    factors: tuple[float, ...]


class WrongInput(ValueError):
    """A task's input is not what its predecessors wrote."""


def _arguments(
    context: PointContext, arrays: Sequence[Array]
) -> tuple[Step, Array, Array, Array | None, list[tuple[Array, int]]]:
    """A point's step, iterations, output, scratch and inputs, each with its first point."""
    step: Step = context.scalars[0]
    iterations, output, *rest = arrays
    scratch = rest.pop(0) if step.kernel == "memory" else None
    return step, iterations, output, scratch, list(zip(rest, step.lows[context.point]))


def _bind(context: PointContext, arrays: Sequence[Array]) -> Any:
    step, iterations, output, scratch, inputs = _arguments(context, arrays)
    place = context.point
    if not all(array.flags.c_contiguous for array in arrays):
        return None
    code, factor = _CODES[step.kernel], step.factors[place]
    point = step.first + place
    return kernels.entry(step.step, point, code, factor, iterations, output, scratch, inputs)


def _python(context: PointContext, step: Step, *arrays: Array) -> None:
    """A task as a Python function whose work releases the interpreter lock."""
    place = context.point
    lows, factor = step.lows[place], step.factors[place]
    shift = 3 if step.kernel == "memory" else 2
    scratch = arrays[2] if shift == 3 else _NO_SCRATCH
    about = (arrays[1], step.step, step.first + place, _CODES[step.kernel], arrays[0], factor)
    if len(lows) == 1:
        if not kernels.perform_after(arrays[shift], lows[0], *about, scratch):
            raise WrongInput(f"input {lows[0]}.. is not what the step before wrote")
        return
    for low, found in zip(lows, arrays[shift:]):
        if not kernels.check(found, step.step - 1, low):
            raise WrongInput(f"input {low}.. is not what the step before wrote")
    kernels.perform(*about, scratch)


def _pure(context: PointContext, step: Step, *arrays: Array) -> None:
    """A task in pure Python, which holds the interpreter lock."""
    place = context.point
    shift = 3 if step.kernel == "memory" else 2
    for low, found in zip(step.lows[place], arrays[shift:]):
        rows = np.arange(low, low + found.shape[0])[:, None]
        if (found[:, 0::2] != step.step - 1).any() or (found[:, 1::2] != rows).any():
            raise WrongInput(f"input {low}.. is not what the step before wrote")
    iterations = round(int(arrays[0][0]) * step.factors[place])
    if _CODES[step.kernel] == kernels.COMPUTE:
        kernels.compute_in_python(iterations)
    elif shift == 3:
        arrays[2][...] += iterations
    arrays[1][:, 0::2] = step.step
    arrays[1][:, 1::2] = step.first + place


def _task(body: Body, inputs: int, scratch: bool) -> Task:
    privileges: list[Privilege] = [Read, Write, *([ReadWrite] if scratch else []), *[Read] * inputs]
    if body == "native":
        return Task("task_bench", tuple(privileges), _python, bind=_bind, context=True)
    function = _python if body == "python" else _pure
    return Task("task_bench", tuple(privileges), function, context=True)


class Program:
    """Task graphs on a runtime, side by side; traced once, or launched anew at each run.

    kernel: what a task does, one of `KERNELS`. body: how it is written, one of `BODIES`.
    output_bytes: of each task, rounded up to pairs of 64-bit integers. scratch_bytes: of each
    point, for the memory kernel. imbalance: of the imbalance kernel, iterations are multiplied by
    uniform numbers between 1 - imbalance / 2 and 1 + imbalance / 2.

    Raises: ValueError naming the option; what capturing raises.
    """

    def __init__(
        self,
        runtime: Runtime,
        graphs: Sequence[TaskGraph],
        kernel: str = "compute",
        body: Body = "native",
        *,
        traced: bool = True,
        output_bytes: int = 16,
        scratch_bytes: int = 1 << 22,
        imbalance: float = 1.0,
    ) -> None:
        if kernel not in KERNELS:
            raise ValueError(f"kernel {kernel!r} found; needed one of {', '.join(KERNELS)}")
        if body not in BODIES:
            raise ValueError(f"body {body!r} found; needed one of {', '.join(BODIES)}")
        if output_bytes < 0:
            raise ValueError(f"output_bytes is {output_bytes}, needed 0 or more")
        if scratch_bytes < 8 * kernels.CHUNK:
            raise ValueError(
                f"scratch_bytes is {scratch_bytes}, needed {8 * kernels.CHUNK} or more"
            )
        if not 0 <= imbalance <= 2:
            raise ValueError(f"imbalance is {imbalance}, needed between 0 and 2")
        self.runtime = runtime
        self.graphs = tuple(graphs)
        self.kernel = kernel
        self.body: Body = body
        self.imbalance = imbalance if kernel == "imbalance" else 0.0
        self.tasks = sum(graph.tasks for graph in self.graphs)
        self.prepared_s = 0.0
        words = 2 * max(1, -(-output_bytes // 16))
        doubles = scratch_bytes // (8 * kernels.CHUNK) * kernels.CHUNK
        self._iterations = Region((1,), np.int64, "iterations")
        self._regions = [
            [Region((graph.width, words), np.int64, f"graph{g}.{name}") for name in ("even", "odd")]
            for g, graph in enumerate(self.graphs)
        ]
        self._scratch = [
            Region((graph.width, doubles), np.float64, f"graph{g}.scratch")
            for g, graph in enumerate(self.graphs)
        ]
        self._tasks: dict[int, Task] = {}
        self._launches = self._prepare()
        self._trace = None
        if traced:
            start = time.perf_counter()
            runtime.write(self._iterations, np.zeros(1, dtype=np.int64))
            self._trace = runtime.capture(self._issue)
            self.prepared_s = time.perf_counter() - start

    # -- launches

    def _prepare(self) -> list[tuple[Any, ...]]:
        """The launches of all graphs, step by step: (task, step, partitions...)."""
        found = []
        made: dict[Any, Partition] = {}
        for step in range(max(graph.steps for graph in self.graphs)):
            for number, graph in enumerate(self.graphs):
                if step < graph.steps:
                    found.append(self._launch(number, graph, step, made))
        return found

    def _launch(
        self, number: int, graph: TaskGraph, step: int, made: dict[Any, Partition]
    ) -> tuple[Any, ...]:
        active = graph.active(step)
        before, after = self._regions[number][(step - 1) % 2], self._regions[number][step % 2]
        ranges = [graph.ranges(step, point) for point in active]
        inputs = max(len(each) for each in ranges)
        if inputs not in self._tasks:
            self._tasks[inputs] = _task(self.body, inputs, self.kernel == "memory")

        def rows(region: Region, wanted: list[tuple[int, int]]) -> Partition:
            key = (region, tuple(wanted))
            if key not in made:
                lo = [(low, 0) for low, _ in wanted]
                hi = [(high, region.shape[1]) for _, high in wanted]
                made[key] = Partition.of(region, lo, hi)
            return made[key]

        own = [(point, point + 1) for point in active]
        key = (self._iterations, len(active))
        if key not in made:
            made[key] = Partition.whole(self._iterations, (len(active),))
        partitions = [made[key], rows(after, own)]
        if self.kernel == "memory":
            partitions.append(rows(self._scratch[number], own))
        for slot in range(inputs):
            wanted = [each[slot] if slot < len(each) else (0, 0) for each in ranges]
            partitions.append(rows(before, wanted))
        about = Step(
            step,
            active[0],
            self.kernel,
            tuple(tuple(low for low, _ in each) for each in ranges),
            tuple(self.factor(graph, step, point) for point in active),
        )
        return (self._tasks[inputs], about, *partitions)

    def factor(self, graph: TaskGraph, step: int, point: int) -> float:
        """What the iterations of a task, of a graph at a step and a point, are multiplied by."""
        if not self.imbalance:
            return 1.0
        return 1 + (uniform(graph.index, step, point) - 0.5) * self.imbalance

    def _issue(self) -> None:
        for task, about, *partitions in self._launches:
            self.runtime.launch(task, about, *partitions)

    # -- running

    def run(self, iterations: int) -> float:
        """Run all tasks once with this many iterations of the kernel; returns seconds.

        Raises: TaskError when a task finds a wrong input.
        """
        runtime = self.runtime
        runtime.write(self._iterations, np.array([iterations], dtype=np.int64))
        start = time.perf_counter()
        if self._trace is not None:
            self._trace.replay()
        else:
            self._issue()
            runtime.wait()
        return time.perf_counter() - start

    def work(self, iterations: int) -> float:
        """The work of one run of so many iterations a task.

        Floating-point operations, bytes, or for the empty kernel tasks.
        """
        if self.kernel == "empty":
            return float(self.tasks)
        each = kernels.MEMORY_BYTES if self.kernel == "memory" else kernels.COMPUTE_FLOPS
        done = sum(sum(round(iterations * f) for f in about.factors) for about in self._steps())
        return float(done * each)

    def _steps(self) -> list[Step]:
        return [launch[1] for launch in self._launches]

    def outputs(self) -> list[Array]:
        """What the last step of each graph left in its region. Returns int64 (width, words)."""
        return [
            self.runtime.read(self._regions[number][(graph.steps - 1) % 2])
            for number, graph in enumerate(self.graphs)
        ]

    def check_outputs(self) -> None:
        """Compare the outputs of the last step with what its tasks must have written.

        Raises: LaunchError.
        """
        for graph, found in zip(self.graphs, self.outputs()):
            for point in graph.active(graph.steps - 1):
                pair = found[point].reshape(-1, 2)
                if (pair != (graph.steps - 1, point)).any():
                    raise LaunchError(
                        f"pattern {graph.pattern!r}: the output of point {point} is "
                        f"{pair[0].tolist()}, needed {[graph.steps - 1, point]}"
                    )
