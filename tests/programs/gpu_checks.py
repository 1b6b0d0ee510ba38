"""Checks of GPUs as processors, each run in this process: on devices, or in Numba's simulator.

    NUMBA_ENABLE_CUDASIM=1 python -m programs.gpu_checks [--executor legate] random training ...

Prints the outcomes as JSON: by check, None or the error. In the simulator lanes are late
(`helpers/runtime/late_lanes.py`), so that an order that nothing enforces shows.
"""

from __future__ import annotations

import json
import sys
import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from helpers.runtime.late_lanes import LateLane
from helpers.runtime.programs import ShuffledMapper, random_program
from helpers.training_runs import compare, data, train
from numba import cuda

from soapstone import InferenceSession, Model
from soapstone.engine.mapper import strategy_of
from soapstone.ir.builder import GraphBuilder
from soapstone.ir.graph import Graph
from soapstone.ir.interpret import interpret
from soapstone.ir.tensor import Array, Role
from soapstone.kernels.cuda.entry import DeviceEntry, Launch
from soapstone.kernels.fallback import FallbackWarning
from soapstone.mappers import load
from soapstone.native.cuda.arrays import launchable
from soapstone.native.cuda.device import Device, device_count, simulated
from soapstone.runtime import (
    DefaultMapper,
    Machine,
    MemoryExhausted,
    Partition,
    PointContext,
    Processor,
    Read,
    ReadWrite,
    Reduce,
    Region,
    Runtime,
    Scope,
    Task,
    TaskError,
    Write,
    task,
)
from soapstone.runtime.analysis.policy import attach
from soapstone.runtime.devices import executor
from soapstone.runtime.devices.pool import DevicePool
from soapstone.runtime.machines.machine import CUDA
from soapstone.runtime.machines.start import machine_of, start
from soapstone.runtime.model import launch as launches
from soapstone.runtime.observe.checker import check_log

MOST = min(2, device_count())  # GPUs in one machine
EXECUTOR = sys.argv[2] if sys.argv[1:2] == ["--executor"] else "local"


def machine(gpus: int, cpus: int = 0) -> Machine:
    """Return a machine of GPUs, and of processors of the host beside them."""
    found = machine_of(EXECUTOR, gpus=min(gpus, MOST))
    hosted = (Processor(f"cpu{number}") for number in range(cpus))
    return replace(found, processors=(*hosted, *found.processors))


class Shuffled(ShuffledMapper):
    """Any worker, and for a GPU any memory: the host's, or another GPU's."""

    def place(self, launch: launches.Launch, point: int) -> int:
        return self._draw("place", launch.name, point) % len(self.machine.workers)

    def memory(self, launch: launches.Launch, argument: int, processor: Processor) -> str:
        if processor.kind != CUDA:
            return processor.memory
        return super().memory(launch, argument, processor)

    def slices(self, launch: launches.Launch) -> None:
        return None


def random() -> None:
    """Random programs equal sequential NumPy, untraced and replayed, beside processors of CPUs.

    The offline checker accepts their logs.
    """
    with TemporaryDirectory() as folder:
        compared(range(4), Path(folder))


def compared(seeds: Sequence[int], folder: Path) -> None:
    """Compare the programs of seeds; folder: for their logs."""
    for seed in seeds:
        program = random_program(seed)
        mapper = Shuffled(seed, tiles=seed % 2 == 0, memories=seed % 5 > 0)
        on, log = machine(1 + seed % 2, cpus=seed % 3 // 2), folder / f"{seed}.log"
        with start(EXECUTOR, on, mapper) as runtime, runtime.log(log):
            program.compare(runtime, seed)
        report = check_log(log)
        assert not report.violations, report.violations[0]


@task
def partial_sums(x: Read, out: Reduce("sum")) -> None:
    out += x.sum(axis=0)


@task
def largest(x: Read, out: Reduce("max")) -> None:
    out[...] = x.max(axis=0)


def folds() -> None:
    """Partial results of several GPUs fold to the bits of the host's folds."""
    x = Region((12, 40), np.float32, "x")
    values = np.random.default_rng(0).standard_normal(x.shape).astype(np.float32)
    values[3, 4] = np.nan
    found = []
    for on in (machine(2), Machine.local(cpus=2)):
        sums, most = Region((40,), np.float32, "sums"), Region((40,), np.float32, "most")
        with Runtime(on) as runtime:
            runtime.write(x, values)
            for which, out in ((partial_sums, sums), (largest, most)):
                parts = Partition.tiled(x, (6, 1)), Partition.whole(out, (6, 1))
                runtime.launch(which, *parts, initialise=True)
            found.append((runtime.read(sums), runtime.read(most)))
    for mine, theirs in zip(*found):
        np.testing.assert_array_equal(mine, theirs)


@task
def fail(x: Write) -> None:
    raise ValueError("on purpose")


@task
def add(x: Read, y: ReadWrite) -> None:
    y += x


@task
def nest(scope: Scope, x: Write) -> None:
    scope.launch(fail, scope.region("x"))


def errors() -> None:
    """A body that raises stops the run with its name, as on the host, and the run goes on."""
    x, y = Region((4, 6), np.float32, "x"), Region((4, 6), np.float32, "y")
    with start(EXECUTOR, machine(1), DefaultMapper()) as runtime:
        runtime.fill(x, 2)
        runtime.fill(y, 1)
        runtime.launch(fail, x)
        try:
            runtime.wait()
            raise AssertionError("an error was lost")
        except TaskError as error:
            assert "task 'fail', point 0" in str(error), error
            assert "ValueError: on purpose" in str(error), error
        runtime.reset()
        runtime.launch(nest, x)
        try:
            runtime.wait()
            raise AssertionError("a task of a GPU launched tasks")
        except TaskError as error:
            assert "placed on a GPU; a processor of the host needed" in str(error), error
        runtime.reset()
        runtime.fill(x, 2)
        columns = Partition.tiled(x, (1, 3)), Partition.tiled(y, (1, 3))
        with runtime.capture("step") as recording:
            runtime.launch(add, *columns)
            runtime.launch(fail, x)
        try:
            recording.trace.replay()
            raise AssertionError("an error of a replay was lost")
        except TaskError as error:
            assert "task 'fail', point 0" in str(error), error
        timeline = runtime.capture(lambda: runtime.launch(add, *columns)).replay(profile=True)
        assert timeline is not None
        tasks = [event for event in timeline.events if event.category == "task"]
        assert len(tasks) == 3 and all(e.end_ns > e.start_ns > 0 for e in tasks), tasks


@cuda.jit
def root(x: Any, y: Any, status: Any) -> None:
    for i in range(cuda.grid(1), x.shape[0], cuda.gridsize(1)):
        if x[i] < 0:
            status[0] = 7
        else:
            y[i] = x[i] ** 0.5


def bind_root(context: PointContext, arrays: Sequence[Array]) -> DeviceEntry | None:
    if context.processor.kind != CUDA:
        return None
    x, y = map(launchable, arrays)
    status = cuda.to_device(np.zeros(1, np.int32))
    launch = Launch(root, (1,), (4,), (x, y, status))
    return DeviceEntry((launch,), status, {7: "a number below 0"})


def kernels() -> None:
    """What `bind` gives for a GPU is enqueued, and what its status says is an error of the step."""
    roots = Task("roots", (Read, Write), lambda x, y: np.sqrt(x, out=y), bind_root)
    x, y = Region((6,), np.float64, "x"), Region((6,), np.float64, "y")
    good, bad = np.arange(6.0), np.arange(-3.0, 3.0)
    worse = np.where(np.arange(6) % 3, good, -1.0)  # of both GPUs
    halves = Partition.tiled(x, 2), Partition.tiled(y, 2)
    with start(EXECUTOR, machine(2), DefaultMapper()) as runtime:
        runtime.write(x, good)
        runtime.launch(roots, *halves)
        np.testing.assert_allclose(runtime.read(y), np.sqrt(good))
        trace = runtime.capture(lambda: runtime.launch(roots, *halves))
        for untraced in (False, True, False):
            runtime.write(x, bad if untraced else worse)
            try:
                if untraced:
                    runtime.launch(roots, *halves)
                    runtime.wait()
                else:
                    trace.replay()
                raise AssertionError("a status was lost")
            except TaskError as error:
                on = runtime.machine.processors[0].name
                said = f"task 'roots', point 0, on processor {on!r}: a number below 0"
                assert said in str(error), error
            runtime.reset()
            runtime.write(x, good)
            trace.replay()
            np.testing.assert_allclose(runtime.read(y), np.sqrt(good))


def memory() -> None:
    """Small instances share slabs, whose bytes are used again; a full framebuffer says so."""
    pool = DevicePool(Device(0))
    first, second = pool.take(1000, True), pool.take(1000, False)
    place = first.ctypes.data
    assert second.ctypes.data - place == 1024
    del first
    again = pool.take(500, True)
    assert again.ctypes.data == place
    try:
        again += 1
        raise AssertionError("the host touched a device's memory")
    except TypeError as error:
        assert "in a GPU's memory" in str(error), error
    x = Region((1 << 20,), np.float32, "x")
    with Runtime(Machine.local(gpus=1, memory_bytes=1 << 20)) as runtime:
        try:
            runtime.launch(fail, x)
            raise AssertionError("a framebuffer held more than it can")
        except MemoryExhausted as error:
            assert "0.framebuffer': region 'x' needs 4194304 bytes" in str(error), error


def small() -> Model:
    """Return a network of few elements, each of which is a thread of Python's in the simulator."""
    model = Model("small", seed=2)
    x = model.dense(model.input("x", (4, 6)), 8, activation="tanh", name="fc1")
    x = model.dropout(model.layer_norm(x, name="norm"), 0.2, name="drop")
    model.output(model.dense(x, 5, name="fc2"))
    return model


def small_images() -> Model:
    """Return a convolutional network of as few."""
    model = Model("small_images", seed=2)
    x = model.conv2d(model.input("x", (4, 1, 4, 4)), 2, kernel=3, activation="relu", name="conv")
    x = model.max_pool2d(x, 2, name="pool")
    model.output(model.dense(model.flatten(x), 5, name="fc"))
    return model


def training() -> None:
    """Steps on one GPU and on two equal the sequential run of the same graph."""
    for build, gpus in ((small, 1), (small, 2), (small_images, 2)):
        with build() as model:
            model.compile("sgd", executor=EXECUTOR, gpus=min(gpus, MOST))
            compare(model, steps=2)


def mappers() -> None:
    """Other mappers and a strategy's file work alike, and so does a framebuffer of few bytes."""
    with small() as model, TemporaryDirectory() as folder:
        model.compile("adam", executor=EXECUTOR, gpus=MOST, mapper="round_robin")
        compare(model, steps=2)
        mapper, on = load("data_parallel"), Machine.local(gpus=MOST)
        attach(mapper, on)
        path = Path(folder) / "strategy.json"
        strategy_of(mapper, model.training_graph, on).save(path)
        with small() as other:
            other.compile("adam", gpus=MOST, strategy=path)
            compare(other, steps=2)
    with small() as model:
        model.compile("sgd", executor=EXECUTOR, gpus=1, fast_memory=2 << 10)
        x, y = data(model)
        losses, _ = train(model, x, y, 2)
        planned, copied = model.trainer.moved_bytes
        assert 0 < planned == copied, (planned, copied)
        with small() as host:
            host.compile("sgd", cpus=1)
            np.testing.assert_allclose(losses, train(host, x, y, 2)[0], rtol=1e-5)


def inference() -> None:
    """An inference session on a GPU gives what one on the host gives."""
    with small_images() as model:
        model.compile("sgd", cpus=1)
        x, _ = data(model)
        with InferenceSession(model, gpus=1) as mine, InferenceSession(model) as theirs:
            for _ in range(2):
                for name, wanted in theirs.run({"x": x}).items():
                    np.testing.assert_allclose(mine.run({"x": x})[name], wanted, 1e-4, 1e-5)


def narrow_graph(kind: str) -> tuple[Graph, dict[str, Array]]:
    """Return a product of an element type that NumPy lacks, transposed, and its operands."""
    builder = GraphBuilder("narrow")
    x = builder.input("x", (4, 6), kind)
    (y,) = builder.apply("matmul", x, builder.input("w", (6, 5), kind, Role.PARAMETER))
    builder.output(*builder.apply("transpose", y, permutation=(1, 0)))
    graph, random = builder.build(), np.random.default_rng(0)
    given = {name: random.uniform(-1, 1, graph.tensors[name].shape) for name in ("x", "w")}
    return graph, {name: array.astype(kind) for name, array in given.items()}


def narrow() -> None:
    """bfloat16 has kernels; what none knows is computed by the host, and moved all the same."""
    for kind in ("bfloat16", "float8_e4m3fn"):
        graph, given = narrow_graph(kind)
        (wanted,) = interpret(graph, given).values()
        with InferenceSession(graph, {"w": given["w"]}, gpus=1) as session:
            (found,) = session.run({"x": given["x"]}).values()
        assert found.dtype == wanted.dtype
        np.testing.assert_array_equal(found.astype(np.float32), wanted.astype(np.float32))


CHECKS: dict[str, Callable[[], None]] = {
    check.__name__: check
    for check in (random, folds, errors, kernels, memory, training, mappers, inference, narrow)
}


def main() -> None:
    """Run the checks that are named, and print what became of each."""
    if simulated():
        executor.Lane = LateLane
    warnings.simplefilter("ignore", FallbackWarning)
    outcomes: dict[str, str | None] = {}
    for name in sys.argv[1 if EXECUTOR == "local" else 3 :]:
        try:
            CHECKS[name]()
            outcomes[name] = None
        except Exception:
            outcomes[name] = traceback.format_exc()
    print(json.dumps(outcomes))


if __name__ == "__main__":
    main()
