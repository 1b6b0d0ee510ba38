"""What `test_legate` runs under Legate, in a process of its own: `python legate_checks.py NAME ...`

Each check is a function; its outcome is a line of JSON: its name, and its error or null.
"""

from __future__ import annotations

import importlib
import json
import sys
import tempfile
import threading
import time
import traceback
from typing import Any

import numpy as np
from helpers.runtime.scenarios import execute, scenario
from programs import executor_apps, strategy_training

from soapstone.frontend.training.state import TrainingState
from soapstone.mappers.bounded import BoundedMemoryMapper
from soapstone.runtime import (
    DefaultMapper,
    IndexPartition,
    LaunchError,
    Machine,
    MemoryExhausted,
    Partition,
    Read,
    ReadWrite,
    Reduce,
    Region,
    Runtime,
    StoppedError,
    TaskError,
    UnwrittenError,
    Write,
    task,
)
from soapstone.runtime.executors.legate.executor import agreed
from soapstone.runtime.executors.legate.lanes import Faults
from soapstone.runtime.executors.legate.runtime import LegateRuntime
from soapstone.runtime.executors.legate.start import legate_machine, start_legate
from soapstone.runtime.machines.start import start
from soapstone.runtime.observe.checker import check_log

SHAPE = (13, 10)
KEPT: list[Any] = []  # until the process ends


@task
def stencil(h: Read, y: Write) -> None:
    y[...] = h.sum() + np.arange(y.size).reshape(y.shape)


@task
def grow(y: ReadWrite) -> None:
    y *= 2
    y += 1


@task
def partial(x: Read, total: Reduce("sum")) -> None:  # type: ignore[valid-type]
    total[...] = x.sum(axis=0)


@task
def fail(y: ReadWrite) -> None:
    if y.flat[0] == 0:
        raise ValueError("boom")


class Permuted(DefaultMapper):
    """The last axis outermost, and points dealt out in turn."""

    def order(self, region: Region) -> tuple[int, ...] | None:
        return tuple(reversed(range(region.rank)))

    def place(self, launch: Any, point: int) -> int:
        return point % len(self.machine.processors)


def slices(partition: Partition, point: int) -> tuple[slice, ...]:
    return tuple(slice(int(a), int(b)) for a, b in zip(partition.lo[point], partition.hi[point]))


def check_tilings() -> None:
    """Regular, unequal, overlapping, permuted and incomplete tiles, launched and traced."""
    x, y = Region(SHAPE, np.float64, "x"), Region(SHAPE, np.float64, "y")
    cuts = [[0, 2, 9, 13], [0, 7, 10]]
    unequal = Partition.ranges(y, cuts)
    order = [3, 0, 5, 1, 4, 2]
    shuffled = Partition.of(y, unequal.lo[order], unequal.hi[order])
    some = Partition.of(y, [[1, 1], [5, 2]], [[3, 9], [11, 4]])
    cases = [
        (Partition.halo(Partition.tiled(x, (3, 2)), 1, 2), Partition.tiled(y, (3, 2))),
        (Partition.whole(x, (4, 1)), Partition.tiled(y, (4, 1))),
        (Partition.halo(Partition.ranges(x, cuts), 1, 1), unequal),
        (Partition.of(x, unequal.lo, unequal.hi, (6,)), shuffled),
        (Partition.of(x, [[0, 0], [4, 4]], [[6, 6], [13, 10]]), some),
    ]
    start = np.arange(130.0).reshape(SHAPE)
    for mapper in (None, Permuted()):
        with LegateRuntime(legate_machine(2), mapper) as runtime:
            for read, written in cases:
                runtime.write(x, start)
                runtime.fill(y, 3.0)
                expected = np.full(SHAPE, 3.0)

                def step(read: Partition = read, written: Partition = written) -> None:
                    runtime.launch(stencil, read, written)
                    runtime.launch(grow, written)
                    runtime.launch(grow, Partition.of(y, [[2, 2]], [[6, 6]]))

                trace = runtime.capture(step)
                for run in (step, trace.replay):
                    run()
                    for point in range(written.points):
                        tile = expected[slices(written, point)]
                        total = start[slices(read, point)].sum()
                        tile[...] = (total + np.arange(tile.size).reshape(tile.shape)) * 2 + 1
                    expected[2:6, 2:6] = expected[2:6, 2:6] * 2 + 1
                    np.testing.assert_array_equal(runtime.read(y), expected)


def check_aliases() -> None:
    """One region twice in a launch: boxes that do not overlap, one read and one written."""
    x = Region((12,), np.int64, "x")

    @task
    def shift(a: Read, b: Write) -> None:
        b[...] = a + 100

    with LegateRuntime(legate_machine(2)) as runtime:
        low = Partition.of(x, [[0], [3]], [[3], [6]])
        high = Partition.of(x, [[9], [6]], [[12], [9]])
        runtime.write(x, np.arange(12))
        runtime.launch(shift, low, high)
        trace = runtime.capture(lambda: (runtime.launch(shift, low, high), None)[1])
        expected = np.array([*range(6), 103, 104, 105, 100, 101, 102])
        np.testing.assert_array_equal(runtime.read(x), expected)
        trace.replay()
        np.testing.assert_array_equal(runtime.read(x), expected)


def check_reductions() -> None:
    """Folds give the bits of the local executor, whatever runs the points."""
    given = np.random.default_rng(1).normal(size=(64, 5)).astype(np.float32)

    def run(runtime: Runtime) -> list[np.ndarray]:
        x, total = Region((64, 5), np.float32, "x"), Region((5,), np.float32, "total")
        with runtime:
            runtime.write(x, given)
            tiles, out = Partition.tiled(x, (7, 1)), Partition.whole(total, (7, 1))
            runtime.launch(partial, tiles, out, initialise=True)
            first = runtime.read(total)
            trace = runtime.capture(lambda: runtime.launch(partial, tiles, out))
            trace.replay()
            return [first, runtime.read(total)]

    for mapper in (None, Permuted()):
        local = run(Runtime(Machine.local(2), mapper))
        for mine, theirs in zip(run(LegateRuntime(legate_machine(2), mapper)), local):
            np.testing.assert_array_equal(mine, theirs)


def check_placement() -> None:
    """Each processor is one thread of Legate, whatever the map from points to processors."""
    where: dict[int, set[int]] = {}

    @task
    def look(number: int, y: Write) -> None:
        where.setdefault(number, set()).add(threading.get_ident())
        y[...] = number
        time.sleep(0.002)

    y = Region((8,), np.int64, "y")
    for blocks, processors in ((True, [0] * 4 + [1] * 4), (False, [0, 1] * 4)):
        mapper = Given(processors)
        with LegateRuntime(legate_machine(2), mapper) as runtime:
            runtime.launch(look, blocks, Partition.tiled(y, (8,)))
            for point, processor in enumerate(processors):
                mapper.processors = [processor]
                part = Partition.of(y, [[point]], [[point + 1]])
                runtime.launch(look, 10 + processor, part)
            runtime.wait()
    assert len(where[10]) == len(where[11]) == 1 and where[10] != where[11]
    assert where[True] == where[False] == where[10] | where[11]


class Given(DefaultMapper):
    """Points where the program says."""

    def __init__(self, processors: list[int]) -> None:
        self.processors = processors

    def place_all(self, launch: Any) -> Any:
        return np.resize(self.processors, launch.points)


def _raises(kind: type[BaseException], words: str, function: Any) -> BaseException:
    try:
        function()
    except kind as error:
        assert words in str(error), error
        return error
    raise AssertionError(f"{kind.__name__} expected: {words}")


def check_errors() -> None:
    """Errors of tasks come out as on the local executor, and the runtime goes on."""
    y = Region((4,), np.float64, "y")
    tiles = Partition.tiled(y, (2,))
    with LegateRuntime(legate_machine(2)) as runtime:
        runtime.write(y, np.array([0.0, 0.0, 1.0, 1.0]))
        runtime.launch(fail, tiles)
        found = _raises(TaskError, "task 'fail', point 0, on processor 'cpu0'", runtime.wait)
        assert isinstance(found.__cause__, ValueError)
        _raises(StoppedError, "stopped by an error", lambda: runtime.launch(grow, tiles))
        runtime.reset()
        trace = runtime.capture(lambda: runtime.launch(fail, tiles))
        for _ in range(2):
            _raises(TaskError, "boom", trace.replay)
        runtime.launch(grow, tiles)
        np.testing.assert_array_equal(runtime.read(y), [1, 1, 3, 3])
        trace.replay()
        inside = Region((4,), np.float64, "t", transient=True)
        _raises(UnwrittenError, "'t'", lambda: runtime.launch(grow, inside))
        _raises(LaunchError, "rank 7", lambda: runtime.fill(Region((1,) * 7, "f4", "deep"), 0))
        _raises(LaunchError, "dtype", lambda: runtime.fill(Region((2,), ">f4", "other"), 0))
        too_many = lambda: LegateRuntime(legate_machine(64))  # noqa: E731
        _raises(ValueError, "64 cpus needed", too_many)


def check_memory() -> None:
    """What Legate's memory cannot hold is an error, and Legate goes on."""
    legate = start_legate(2)
    with LegateRuntime(legate_machine(2)) as runtime:
        kept = []

        def fill() -> None:
            for number in range(100):
                region = Region((legate.sysmem_bytes // 80,), np.float64, f"r{number}")
                runtime.fill(region, float(number))
                assert runtime.read(region)[-1] == number
                kept.append(region)

        _raises(MemoryExhausted, "memory 'system': region 'r", fill)
        assert len(kept) >= 8  # Legate holds each of them once
        size = len(kept)
        kept.clear()
        _raises(MemoryExhausted, "memory 'system': region 'r", fill)
        assert len(kept) == size


def check_arrays() -> None:
    """Arrays of the host: what it writes is read, what tasks write is there, also in traces."""
    x, y = Region((6,), np.float32, "x"), Region((6,), np.float32, "y")
    with LegateRuntime(legate_machine(2)) as runtime:
        given, made = runtime.array(x), runtime.array(y)

        @task
        def double(a: Read, b: Write) -> None:
            b[...] = 2 * a

        def step() -> None:
            runtime.launch(double, Partition.tiled(x, (2,)), Partition.tiled(y, (2,)))
            runtime.launch(grow, Partition.tiled(y, (3,)))

        given[...] = np.arange(6)
        step()
        runtime.wait()
        np.testing.assert_array_equal(made, 4 * np.arange(6) + 1)
        trace = runtime.capture(step)
        given[...] = 5
        trace.replay()
        np.testing.assert_array_equal(made, np.full(6, 21))
        made[...] = 1
        runtime.launch(grow, Partition.tiled(y, (2,)))
        runtime.wait()
        np.testing.assert_array_equal(made, np.full(6, 3))
        timeline = trace.replay(profile=True)
        assert timeline is not None
        assert {event.processor for event in timeline.events} == {0, 1}
        # A launch that stays apart, as the boxes that two processors write in y overlap.
        apart = Partition.of(y, [[0], [4], [2], [5]], [[2], [5], [4], [6]])
        trace = runtime.capture(
            lambda: runtime.launch(stencil, Partition.whole(x, (4,)), apart, name="apart")
        )
        assert 4 in [tasks["lanes"] for tasks in trace.describe()["tasks"]]
        low = np.array([0, 1, 0, 1, 0, 0])
        for number in range(3):
            given[...] = number
            trace.replay()
            np.testing.assert_array_equal(made, 6 * number + low)
            runtime.view(x)
            given = runtime.array(x)  # another array


def check_futures() -> None:
    """The future of a captured launch is what the last replay returned."""

    @task
    def total(x: Read) -> float:
        return float(x.sum())

    x = Region((4,), np.float64, "x")
    with LegateRuntime(legate_machine(2)) as runtime:
        with runtime.capture() as recording:
            runtime.launch(grow, x)
            found = runtime.launch(total, x)
        values = []
        for _ in range(3):
            recording.trace.replay()
            values.append(found.get())
    assert values == [4, 12, 28]


class Foreign:
    """Another library's array: the protocol, a shape and a dtype."""

    def __init__(self, store: Any, shape: tuple[int, ...], dtype: Any) -> None:
        self.store, self.shape, self.dtype = store, shape, np.dtype(dtype)

    @property
    def __legate_data_interface__(self) -> Any:
        return self.store.__legate_data_interface__


def check_interchange() -> None:
    """Stores of other libraries are a region's, and a region's are theirs, without a copy."""
    legate = start_legate(2)
    x, y = Region((8, 3), np.float32, "x"), Region((8, 3), np.float32, "y")
    store = legate.runtime.create_store(legate.core.float32, (16, 3))
    store.fill(2.0)

    @task
    def double(a: Read, b: Write) -> None:
        b[...] = 2 * a

    with LegateRuntime(legate_machine(2), Permuted()) as runtime:
        runtime.adopt(x, Foreign(store[8:16], (8, 3), "f4"))
        step = lambda: runtime.launch(  # noqa: E731
            double, Partition.tiled(x, (2, 1)), Partition.tiled(y, (2, 1))
        )
        step()
        view = runtime.view(y)
        np.testing.assert_array_equal(np.asarray(view), np.full((8, 3), 4.0))
        ((_, theirs),) = view.__legate_data_interface__["data"].items()
        theirs.data.fill(7.0)  # the other library writes, the region has it
        np.testing.assert_array_equal(runtime.read(y), np.full((8, 3), 7.0))
        trace = runtime.capture(step)
        store.fill(3.0)
        trace.replay()
        np.testing.assert_array_equal(np.asarray(view), np.full((8, 3), 6.0))
        other = legate.runtime.create_store(legate.core.float32, (8, 3))
        other.fill(10.0)
        runtime.adopt(x, Foreign(other, (8, 3), "f4"))
        trace.replay()
        np.testing.assert_array_equal(runtime.read(y), np.full((8, 3), 20.0))
        runtime.launch(grow, Partition.tiled(x, (2, 1)))
        runtime.wait()
        np.testing.assert_array_equal(np.array(other.get_physical_store()), np.full((8, 3), 21.0))
        wrong = Foreign(store, (16, 3), "f4")
        _raises(LaunchError, "float32 (16, 3) found", lambda: runtime.adopt(x, wrong))
        _raises(LaunchError, "ndarray found", lambda: runtime.adopt(x, np.ones((8, 3))))
        runtime.offload(y)
        np.testing.assert_array_equal(runtime.read(y), np.full((8, 3), 20.0))
        if not legate.gpus:
            _raises(LaunchError, "without a GPU", lambda: runtime.offload(y, "FBMEM"))


def check_agreement() -> None:
    """What several nodes do to agree on an error, as one node."""
    legate, machine = start_legate(2), legate_machine(2)
    assert agreed(legate, machine, Faults(), nodes=2) is None
    faults = Faults()
    faults.add(3, TaskError("late", 1, "cpu1", "x"))
    faults.add(1, TaskError("early", 0, "cpu0", "x"))
    assert agreed(legate, machine, faults, nodes=2) is faults.first
    assert getattr(faults.first, "task", "") == "early"


def check_scenarios() -> None:
    """Random programs, with traces of every kind and a host in between."""
    for seed in range(8):
        execute(scenario(seed, "legate"))


def check_end() -> None:
    """What is alive when the process ends, as in a script's names, does no harm: see `test_legate`.

    The native entries of index sets hold their arrays, and a lane forgets entries while it runs.
    """
    x, y = Region((40,), np.float64, "x"), Region((40,), np.float64, "y")
    rows = np.random.default_rng(0).permutation(40)
    some = IndexPartition.of(x, [rows[:11], rows[5:20]])
    all_of_it = IndexPartition.of(y, [rows[::2], rows[1::2]])
    legate, runtime = start_legate(2), LegateRuntime(legate_machine(2))

    @task
    def gather(a: Read, b: ReadWrite) -> None:
        b += a.sum()

    trace = runtime.capture(lambda: (runtime.launch(gather, some, all_of_it), None)[1])
    expected = np.zeros(40)
    for number in range(8):  # other addresses each time
        store = legate.runtime.create_store(legate.core.float64, (40,))
        store.fill(float(number))
        runtime.adopt(x, Foreign(store, (40,), "f8"))
        trace.replay()
        expected[rows[::2]] += 11 * number
        expected[rows[1::2]] += 15 * number
    np.testing.assert_array_equal(runtime.read(y), expected)
    runtime.fill(y, 0.0)
    runtime.launch(fail, Partition.tiled(y, (2,)))
    error = _raises(TaskError, "boom", runtime.wait)  # with the frames it came through
    KEPT.append((runtime, trace, error))


def check_apps() -> None:
    """Training gives the local executor's bits."""
    for name in ("mlp", "lenet", "dlrm"):
        for cpus in (1, 2):
            local = executor_apps.train(name, "local", cpus)
            found = executor_apps.train(name, "legate", cpus)
            assert executor_apps.difference(local, found) == 0.0, (name, cpus)
            assert found.launches == 1 or cpus == 2, name


def check_strategies() -> None:
    """A strategy trains to the numbers of a run without one."""
    for seed in range(2):
        strategy_training.compare(strategy_training.strategy_of(seed), "legate", cpus=2)


def check_inputs() -> None:
    """A model takes data of Legate as inputs, and gives its parameters as such."""
    legate = start_legate(2)
    app = importlib.import_module("soapstone.apps.images.mlp")
    x, y = executor_apps.samples("mlp", 8)
    expected = executor_apps.train("mlp", "legate", 2)
    with app.build(4) as model:
        from soapstone import SGD

        model.compile(
            SGD(0.01, momentum=0.9), loss="cross_entropy", executor="legate", cpus=2, seed=0
        )
        trainer = model.trainer
        bound = trainer.bound("train", 4)
        store = legate.runtime.create_store(legate.core.float32, (8, 784))
        np.asarray(store.get_physical_store())[...] = x
        state = TrainingState(epochs=1, steps_per_epoch=2, model=model)
        for low in (0, 4):
            rows = Foreign(store[low : low + 4], (4, 784), "f4")
            trainer.step({"sample": rows}, y[low : low + 4], state)
        for name, array in model.shared_weights().items():
            np.testing.assert_allclose(np.asarray(array), expected.weights[name], atol=1e-5)
        trainer.session.feed(bound, "sample", x[:4])  # and the host's arrays again
        trainer.session.run(bound)


def check_plans() -> None:
    """A step in a bounded memory copies what is planned, and trains to the bits of one without."""
    for cpus in (1, 2):
        local = executor_apps.train("lenet", "local", cpus)
        found = executor_apps.train("lenet", "legate", cpus, fast_memory=700_000)
        assert executor_apps.difference(local, found) == 0.0, cpus
        planned, copied = found.moved_bytes or (0, 0)
        assert planned == copied > 0, (planned, copied)
    machine = legate_machine(2).bounded(64)
    y, z = (Region((4,), np.float64, name) for name in "yz")
    tiles = [Partition.tiled(region, (2,)) for region in (y, z)]

    def step() -> None:
        for part in (*tiles, *tiles):
            runtime.launch(grow, part)

    runtime = start("legate", machine, BoundedMemoryMapper())
    runtime.write(y, np.array([0.0, 0.0, 1.0, 1.0]))
    runtime.launch(fail, tiles[0])  # untraced, as what a trace needs to begin with
    _raises(TaskError, "task 'fail', point 0, on processor 'cpu0'", runtime.wait)
    runtime.reset()
    with tempfile.TemporaryDirectory() as folder:
        with runtime.log(f"{folder}/log"):
            step()
            trace = runtime.capture(step)
            trace.replay()
        assert check_log(f"{folder}/log").accepted
    np.testing.assert_array_equal(runtime.read(y), [15, 15, 31, 31])
    np.testing.assert_array_equal(runtime.read(z), [15, 15, 15, 15])
    assert runtime.statistics.evictions > 0
    failing = runtime.capture(lambda: runtime.launch(fail, tiles[0]))
    runtime.write(y, np.zeros(4))
    for _ in range(2):
        _raises(TaskError, "boom", failing.replay)
    KEPT.append((runtime, trace))


def main() -> None:
    for name in sys.argv[1:]:
        error = None
        try:
            globals()[f"check_{name}"]()
        except BaseException:
            error = traceback.format_exc()
        print(json.dumps({"check": name, "error": error}), flush=True)


if __name__ == "__main__":
    main()
