"""Processors that are processes: bodies by name, arrays in shared memory, ends of all kinds."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from soapstone.native.memory import Array
from soapstone.runtime import (
    DefaultMapper,
    Launch,
    Machine,
    Partition,
    PointContext,
    Processor,
    Read,
    ReadWrite,
    Reduce,
    Region,
    Runtime,
    Task,
    TaskError,
    Write,
    task,
)


@task
def saxpy(a: float, x: Read, y: ReadWrite) -> None:
    y += a * x


@task
def total(x: Read, out: Reduce("sum")) -> None:
    out += x.sum()


@task
def who(out: Write) -> None:
    out[...] = os.getpid()


@task
def norm(x: Read) -> float:
    return float(np.sqrt((x * x).sum()))


@task
def scaled(factor: float, x: ReadWrite) -> None:
    x *= factor


@task
def scaled_all(x: ReadWrite, y: ReadWrite, z: ReadWrite) -> None:
    for array in (x, y, z):
        array *= 2


@task
def refuse(x: ReadWrite) -> None:
    raise ValueError(f"no {x.shape[0]} of these")


@task
def overwrite(x: Read) -> None:
    x[...] = 1


@task
def frozen(x: Read, y: ReadWrite) -> None:
    assert not x.flags.writeable
    y += 1 + x.size


@task
def die(x: ReadWrite) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@task
def forever(x: ReadWrite) -> None:
    x[...] = os.getpid()
    while True:
        pass


def _points(context: PointContext, x: Array) -> None:
    x[...] = context.index[0] * 10 + context.grid[0]


POINTS = Task("points", (Write,), _points, context=True)


def _children() -> set[int]:
    found = set()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[1]) == os.getpid():
            found.add(int(stat.parent.name))
    return found


@pytest.fixture
def runtime() -> Any:
    children = _children()
    with Runtime(Machine.local(2, processes=True)) as made:
        yield made
    assert _children() <= children  # neither running nor zombies


def test_nothing_is_left_of_a_runtime() -> None:
    def use(regions: int) -> None:
        with Runtime(Machine.local(1, processes=True)) as runtime:
            for number in range(regions):
                x = Region((100_000,), "i8", f"x{number}")
                runtime.launch(who, Partition.tiled(x, 2))
            assert runtime.read(x)[0] in _children()

    use(1)  # whatever is opened once and for all
    gc.collect()
    children, files = _children(), sorted(os.listdir("/proc/self/fd"))
    use(20)
    gc.collect()
    assert _children() == children
    assert sorted(os.listdir("/proc/self/fd")) == files


def test_what_runs_for_a_runtime_ends_once_nobody_has_it() -> None:
    machine = Machine.local(1)
    mixed = Machine("mixed", (*machine.processors, Processor("p", "process")), machine.memories)

    def use() -> int:
        runtime, pids = Runtime(mixed), Region((2,), "i8", "pids")
        runtime.launch(who, Partition.tiled(pids, 2))
        return int(runtime.read(pids)[1])

    use()  # whatever is opened once and for all
    gc.collect()
    files, threads = sorted(os.listdir("/proc/self/fd")), threading.active_count()
    ending = {use() for _ in range(3)}
    gc.collect()
    deadline = time.monotonic() + 20
    while ending & _children() or threading.active_count() > threads:
        subprocess._cleanup()  # as whoever starts another process does
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert sorted(os.listdir("/proc/self/fd")) == files


def test_many_small_regions_share_few_descriptors(runtime: Runtime) -> None:
    before = len(os.listdir("/proc/self/fd"))
    regions = [Region((16,), "i8", f"r{number}") for number in range(400)]
    for number, region in enumerate(regions):
        runtime.fill(region, number)
    runtime.launch(scaled_all, *regions[:3])
    assert [int(runtime.read(region)[5]) for region in regions[:4]] == [0, 2, 4, 3]
    assert len(os.listdir("/proc/self/fd")) < before + 20


def test_bodies_run_in_processes_on_the_arrays_of_the_regions(runtime: Runtime) -> None:
    x, y, sum_ = (Region((n,), "f8", name) for n, name in ((100, "x"), (100, "y"), (1, "sum")))
    pids = Region((2,), "i8", "pids")
    runtime.write(x, np.arange(100.0))
    runtime.fill(y, 1.0)
    for _ in range(3):
        runtime.launch(saxpy, 2.0, Partition.tiled(x, 4), Partition.tiled(y, 4))
    runtime.launch(total, Partition.tiled(y, 4), Partition.whole(sum_, 4), initialise=True)
    runtime.launch(who, Partition.tiled(pids, 2))
    np.testing.assert_array_equal(runtime.read(y), 1 + 6 * np.arange(100.0))
    assert runtime.read(sum_)[0] == runtime.read(y).sum()
    found = set(runtime.read(pids).tolist())
    assert len(found) == 2 and os.getpid() not in found


def test_a_trace_replays_bodies_in_processes(runtime: Runtime) -> None:
    x, y = Region((64,), "f4", "x"), Region((64,), "f4", "y")
    between = Region((64,), "f4", "between", transient=True)
    runtime.write(x, np.arange(64, dtype="f4"))
    runtime.fill(y, 0)
    tiles = [Partition.tiled(region, 4) for region in (x, y, between)]

    def step() -> None:
        runtime.fill(between, 1)
        runtime.launch(saxpy, 2.0, tiles[0], tiles[2])
        runtime.launch(saxpy, 1.0, tiles[2], tiles[1])

    trace = runtime.capture(step)
    for _ in range(3):
        trace.replay()
    np.testing.assert_array_equal(runtime.read(y), 3 * (1 + 2 * np.arange(64, dtype="f4")))


def test_contexts_futures_and_fields_reach_the_process(runtime: Runtime) -> None:
    x = Region((6,), "i8", "x")
    runtime.launch(POINTS, Partition.tiled(x, 3))
    assert runtime.read(x).tolist() == [3, 3, 13, 13, 23, 23]
    y = Region((2,), "f8", "y")
    runtime.write(y, np.array([3.0, 4.0]))
    length = runtime.launch(norm, y)
    runtime.launch(scaled, length, y)
    assert runtime.read(y).tolist() == [15.0, 20.0]


class Apart(DefaultMapper):
    """All that is written lies in the memory that no processor has."""

    def memory(self, launch: Launch, argument: int, processor: Processor) -> str:
        return "memory1" if launch.task.privileges[argument].writes else processor.memory


def test_scalar_regions_empty_tiles_and_any_memory_reach_the_process() -> None:
    with Runtime(Machine.local(1, memories=2, processes=True), Apart()) as runtime:
        x, y = Region((), "f8", "x"), Region((4,), "f8", "y")
        runtime.fill(x, 1)
        runtime.fill(y, 1)
        runtime.launch(saxpy, 2.0, x, y)
        runtime.launch(scaled, 2.0, x)
        runtime.launch(frozen, Partition.of(y, [[1]], [[1]]), x)
        assert runtime.read(y).tolist() == [3.0] * 4
        assert runtime.read(x) == 3


def test_what_a_body_raises_comes_back(runtime: Runtime) -> None:
    x = Region((8,), "f8", "x")
    runtime.launch(refuse, Partition.tiled(x, 2))
    with pytest.raises(TaskError, match=r"'refuse', point .*: ValueError: no 4 of these") as at:
        runtime.wait()
    assert "raise ValueError" in str(at.value.__cause__)  # the process' traceback
    runtime.reset()
    runtime.launch(overwrite, x)
    with pytest.raises(TaskError, match="read-only"):
        runtime.wait()
    runtime.reset()
    runtime.fill(x, 2)
    runtime.launch(scaled, 4.0, x)
    assert runtime.read(x).tolist() == [8.0] * 8


def test_a_killed_process_is_named_and_the_next_body_has_a_new_one(runtime: Runtime) -> None:
    x = Region((2,), "i8", "x")
    runtime.launch(die, Partition.tiled(x, 1))
    with pytest.raises(TaskError, match=r"worker process \d+ of processor 'cpu0'.*SIGKILL"):
        runtime.wait()
    runtime.reset()
    runtime.launch(who, Partition.tiled(x, 1))
    assert runtime.read(x)[0] in _children()


def test_a_process_killed_from_outside_is_noticed(runtime: Runtime) -> None:
    x = Region((1,), "i8", "x")
    runtime.fill(x, 0)
    seen = runtime.array(x)
    runtime.launch(forever, x)

    def kill() -> None:
        while not seen[0]:
            time.sleep(0.01)
        os.kill(int(seen[0]), signal.SIGKILL)

    threading.Thread(target=kill).start()
    with pytest.raises(TaskError, match=r"worker process \d+ .*SIGKILL"):
        runtime.wait()


def test_a_runtime_that_closes_ends_a_body_that_never_returns() -> None:
    with pytest.raises(KeyError), Runtime(Machine.local(1, processes=True)) as runtime:
        x = Region((1,), "i8", "x")
        runtime.fill(x, 0)
        seen = runtime.array(x)
        runtime.launch(forever, x)
        while not seen[0]:
            time.sleep(0.01)
        raise KeyError
    assert int(seen[0]) not in _children()


def _outer(local: int) -> Any:
    def inner(x: Array) -> None:
        x[...] = local

    return inner


@pytest.mark.parametrize("body", [_outer(1), lambda x: None], ids=["closure", "lambda"])
@pytest.mark.parametrize("traced", [False, True])
def test_a_body_no_process_can_find_is_refused(runtime: Runtime, body: Any, traced: bool) -> None:
    x = Region((1,), "i8", "x")
    found = Task("hidden", (Write,), body)
    with pytest.raises(TaskError, match=r"task 'hidden' cannot be sent .*top level of a module"):
        if traced:
            runtime.capture(lambda: runtime.launch(found, x))
        else:
            runtime.launch(found, x)
            runtime.wait()


def test_threads_and_processes_share_one_machine() -> None:
    machine = Machine.local(2)
    mixed = Machine(
        "mixed", (machine.processors[0], Processor("other", "process")), machine.memories
    )
    pids, x = Region((2,), "i8", "pids"), Region((4,), "f8", "x")
    with Runtime(mixed) as runtime:
        runtime.launch(who, Partition.tiled(pids, 2))
        runtime.fill(x, 3.0)
        runtime.launch(scaled, 2.0, Partition.tiled(x, 2))
        here, there = runtime.read(pids).tolist()
        assert here == os.getpid() != there
        assert runtime.read(x).tolist() == [6.0] * 4


def test_a_script_is_found_by_its_file_and_leaves_nothing_when_it_is_killed(
    tmp_path: Path,
) -> None:
    script = tmp_path / "main.py"
    script.write_text(
        """
import os, sys, time
from soapstone.runtime import Machine, ReadWrite, Region, Runtime, task

@task
def body(x: ReadWrite) -> None:
    x[...] = os.getpid()
    if sys.stdin is None or "wait" in open(__file__ + ".how").read():
        time.sleep(600)

if __name__ == "__main__":
    with Runtime(Machine.local(1, processes=True)) as runtime:
        x = Region((1,), "i8", "x")
        runtime.fill(x, 0)
        seen = runtime.array(x)
        runtime.launch(body, x)
        while not seen[0]:
            time.sleep(0.01)
        print(int(seen[0]), flush=True)
"""
    )
    how = tmp_path / "main.py.how"
    how.write_text("return")
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True)
    assert done.returncode == 0 and int(done.stdout) > 0, done.stderr
    how.write_text("wait")
    with subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        parent.kill()
    deadline = time.monotonic() + 20
    while Path(f"/proc/{child}").exists() and time.monotonic() < deadline:
        state = Path(f"/proc/{child}/stat")
        if state.exists() and " Z " in state.read_text():
            break  # ended; whoever adopted it has not looked yet
        time.sleep(0.02)
    else:
        assert not Path(f"/proc/{child}").exists()
