"""Task Bench on other systems: stencil_1d, written as each of them would have it written.

Every peer runs the same compiled kernel and checks its inputs; `make` returns a function that runs
all tasks with a number of iterations and returns seconds. Python peers' bodies release the
interpreter lock in the kernel. The peers are imported on first use; an absent one raises
ImportError (or, for a compiler, OSError).
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from soapstone.frontend.taskbench import Program, TaskGraph, kernels
from soapstone.runtime import Machine, Runtime

Array = np.ndarray[Any, np.dtype[Any]]
Run = Callable[[int], float]
_NONE = np.zeros(0)
_OPENMP = """
#include <stdint.h>
typedef int32_t (*entry)(void *);
int run(long steps, long width, entry fn, void **blocks, char *cells) {
  int failed = 0;
  #pragma omp parallel num_threads(THREADS)
  #pragma omp single
  for (long t = 0; t < steps; t++)
    for (long i = 0; i < width; i++) {
      char *before = cells + (t + 1) % 2 * width, *after = cells + t % 2 * width;
      char *l = before + (i > 0 ? i - 1 : 0), *c = before + i, *o = after + i;
      char *r = before + (i + 1 < width ? i + 1 : i);
      void *block = blocks[t * width + i];
      #pragma omp task depend(in: *l, *c, *r) depend(out: *o) firstprivate(block)
      if (fn(block)) {
        #pragma omp atomic write
        failed = 1;
      }
    }
  return failed;
}
"""


def _perform(out: Array, step: int, point: int, iterations: int) -> None:
    size = np.array([iterations])
    kernels.perform(out, step, point, kernels.COMPUTE, size, 1.0, _NONE)


def body(step: int, point: int, iterations: int, low: int, *inputs: Array) -> Array:
    """One task of a Python peer: check the inputs, run the kernel, return the output."""
    for number, found in enumerate(inputs):
        if not kernels.check(found, step - 1, low + number):
            raise ValueError(f"input {number} of task {step}, {point} is wrong")
    out = np.empty((1, 2), dtype=np.int64)
    _perform(out, step, point, iterations)
    return out


def soapstone_run(graph: TaskGraph, kind: str, traced: bool, workers: int) -> Run:
    """This runtime. kind: native or python bodies."""
    runtime = Runtime(Machine.local(workers))
    return Program(runtime, [graph], "compute", kind, traced=traced).run  # type: ignore[arg-type]


def _in_order(graph: TaskGraph, submit: Callable[..., Any], wait: Callable[[Any], Any]) -> Run:
    """Tasks submitted with what they read as arguments; waits for those of the last step."""

    def run(iterations: int) -> float:
        start = time.perf_counter()
        before: list[Any] = []
        for step in range(graph.steps):
            now = []
            for point in range(graph.width):
                low, high = next(iter(graph.ranges(step, point)), (0, 0))
                now.append(submit(body, step, point, iterations, low, *before[low:high]))
            before = now
        for one in before:
            wait(one)
        return time.perf_counter() - start

    return run


def futures_run(graph: TaskGraph, processes: bool, workers: int) -> Run:
    """concurrent.futures: nothing depends on a future, so the program waits for the inputs."""
    from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor

    pool: Executor
    pool = ProcessPoolExecutor(workers) if processes else ThreadPoolExecutor(workers)

    def submit(function: Any, *arguments: Any) -> Any:
        numbers, inputs = arguments[:4], arguments[4:]
        return pool.submit(function, *numbers, *[one.result() for one in inputs])

    return _in_order(graph, submit, lambda one: one.result())


def dask_run(graph: TaskGraph, workers: int) -> Run:
    """Dask's distributed scheduler, with threads in one process: no arrays are moved."""
    import dask
    from distributed import Client, LocalCluster

    dask.config.set({"distributed.worker.memory.terminate": False})
    cluster = LocalCluster(
        n_workers=1, threads_per_worker=workers, processes=False, dashboard_address=None
    )
    client = Client(cluster)

    def submit(*arguments: Any) -> Any:
        return client.submit(*arguments, pure=False)

    return _in_order(graph, submit, lambda one: one.result())


def ray_run(graph: TaskGraph, workers: int) -> Run:
    """Ray, with a process for each worker."""
    import ray

    ray.init(
        num_cpus=workers, include_dashboard=False, log_to_driver=False, object_store_memory=1 << 28
    )
    remote = ray.remote(body)

    def submit(function: Any, *arguments: Any) -> Any:
        return remote.remote(*arguments)

    return _in_order(graph, submit, ray.get)


def legate_run(graph: TaskGraph, workers: int) -> Run:
    """Legate from Python: a manual task over the tiles at each step, as wide as three at most."""
    if graph.width > 3:
        raise ValueError("this peer reads whole stores: a width of at most 3 needed")
    os.environ.setdefault("LEGATE_AUTO_CONFIG", "0")
    os.environ.setdefault("LEGATE_CONFIG", f"--cpus {workers} --gpus 0 --omps 0 --sysmem 256")
    from legate.core import Scalar, get_legate_runtime, types as ty
    from legate.core.task import InputStore, OutputStore, task

    def start_out(out: Any, step: int, iterations: int) -> None:
        point = out.domain.lo[0]
        _perform(np.asarray(out), step, point, iterations)

    def later_out(before: Any, out: Any, step: int, iterations: int) -> None:
        point = out.domain.lo[0]
        found = np.asarray(before)
        low = max(0, point - 1)
        if not kernels.check(found[low : point + 2], step - 1, low):
            raise ValueError(f"the input of task {step}, {point} is wrong")
        _perform(np.asarray(out), step, point, iterations)

    scalars = {"step": int, "iterations": int, "return": None}  # annotations, not their text
    start_out.__annotations__ = {"out": OutputStore, **scalars}
    later_out.__annotations__ = {"before": InputStore, "out": OutputStore, **scalars}
    first, later = task(start_out), task(later_out)
    runtime = get_legate_runtime()
    stores = [runtime.create_store(ty.int64, (graph.width, 2)) for _ in range(2)]
    tiles = [store.partition_by_tiling((1, 2)) for store in stores]

    def run(iterations: int) -> float:
        start = time.perf_counter()
        for step in range(graph.steps):
            kind = later if step else first
            launch = runtime.create_manual_task(kind.library, kind.task_id, (graph.width, 1))
            if step:
                launch.add_input(stores[(step - 1) % 2])
            launch.add_output(tiles[step % 2])
            launch.add_scalar_arg(Scalar(step, ty.int64))
            launch.add_scalar_arg(Scalar(iterations, ty.int64))
            launch.execute()
        runtime.issue_execution_fence(block=True)
        return time.perf_counter() - start

    return run


def openmp_run(graph: TaskGraph, workers: int) -> Run:
    """OpenMP tasks with `depend` clauses, in C: the native entries of this runtime's tasks."""
    folder = Path(tempfile.mkdtemp())
    source, library = folder / "tasks.c", folder / "tasks.so"
    source.write_text(_OPENMP)
    flags = ["-O3", "-fopenmp", "-shared", "-fPIC", f"-DTHREADS={workers}"]
    subprocess.run(["gcc", *flags, str(source), "-o", str(library)], check=True)
    loaded = ctypes.CDLL(str(library))
    size = np.zeros(1, dtype=np.int64)
    cells = np.zeros((2, graph.width, 2), dtype=np.int64)
    entries = []
    for step in range(graph.steps):
        for point in range(graph.width):
            before, out = cells[(step + 1) % 2], cells[step % 2, point : point + 1]
            inputs = [(before[low:high], low) for low, high in graph.ranges(step, point)]
            entries.append(
                kernels.entry(step, point, kernels.COMPUTE, 1.0, size, out, None, inputs)
            )
    blocks = np.array([entry.block for entry in entries], dtype=np.int64)
    words = np.zeros(2 * graph.width, dtype=np.int8)
    address = ctypes.c_void_p

    def run(iterations: int) -> float:
        size[0] = iterations
        start = time.perf_counter()
        failed = loaded.run(
            ctypes.c_long(graph.steps),
            ctypes.c_long(graph.width),
            address(entries[0].address),
            address(blocks.ctypes.data),
            address(words.ctypes.data),
        )
        if failed:
            raise ValueError("a task found a wrong input")
        return time.perf_counter() - start

    return run


def mpi_run(graph: TaskGraph, workers: int) -> Run:
    """mpi4py, one column a rank: neighbours exchange outputs without waiting, then all compute."""
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    rank, size = world.rank, world.size
    if size != graph.width:
        raise ValueError(f"{size} ranks found, {graph.width} needed")
    sides = [other for other in (rank - 1, rank + 1) if 0 <= other < size]
    low = max(0, rank - 1)
    mine = np.zeros((1, 2), dtype=np.int64)
    around = np.zeros((len(sides) + 1, 2), dtype=np.int64)
    places = {other: around[other - low : other - low + 1] for other in sides}

    def run(iterations: int) -> float:
        world.Barrier()
        start = time.perf_counter()
        for step in range(graph.steps):
            if step:
                requests = [world.Irecv(places[other], other) for other in sides]
                requests += [world.Isend(mine, other) for other in sides]
                MPI.Request.Waitall(requests)
                around[rank - low] = mine[0]
                if not kernels.check(around, step - 1, low):
                    raise ValueError(f"the input of task {step}, {rank} is wrong")
            _perform(mine, step, rank, iterations)
        world.Barrier()
        return world.bcast(time.perf_counter() - start)  # all ranks decide alike from it

    return run
