"""Mappers of the runtime core: legal answers change no result, illegal ones are refused."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from runtime_programs import ContraryMapper, Program, random_program

from soapstone.mappers.bounded import BoundedMemoryMapper
from soapstone.runtime import (
    Machine,
    Mapper,
    MemoryExhausted,
    Partition,
    Read,
    ReadWrite,
    Region,
    Runtime,
    Write,
    task,
)


@task
def double(x: Read, y: Write) -> None:
    y[...] = 2 * x


@task
def bump(x: ReadWrite) -> None:
    x += 1


def _run(program: Program, seed: int, machine: Machine, mapper: Mapper) -> Runtime:
    """Run a program untraced, traced and mixed, and compare with its sequential meaning."""
    rng = np.random.default_rng(seed)
    arrays = {r: rng.integers(0, 9, size=r.shape).astype(r.dtype) for r in program.persistent}
    with Runtime(machine, mapper) as runtime:

        def same(when: str) -> None:
            for region in program.persistent:
                found, wanted = runtime.read(region), arrays[region]
                np.testing.assert_array_equal(found, wanted, err_msg=f"{region.name} {when}")

        for region, array in arrays.items():
            runtime.write(region, array)
        for _ in range(2):
            program.launch(runtime)
            program.run(arrays)
        same("untraced")
        trace = runtime.capture(lambda: program.launch(runtime))
        for _ in range(2):
            trace.replay()
            program.run(arrays)
            same("replayed")
        program.launch(runtime)
        program.run(arrays)
        same("untraced again")
        trace.replay()
        program.run(arrays)
        same("replayed again")
    return runtime


def _largest_launch(program: Program) -> int:
    """More than the bytes that any launch of a program uses at once, with its partial results."""
    return max(
        sum(p.region.nbytes + 256 for p in (*step.inputs, *(o.partition for o in step.outputs)))
        + sum(o.partition.points * (o.partition.region.nbytes + 64) for o in step.outputs)
        for step in program.steps
    )


@pytest.mark.parametrize("seed", range(16))
def test_layouts_and_sources_of_every_argument_change_no_result(seed: int) -> None:
    machine = Machine.local(1 + seed % 3, memories=1 + seed // 3 % 3)
    _run(random_program(seed), seed, machine, ContraryMapper(seed))


@pytest.mark.parametrize("seed", range(16))
def test_programs_larger_than_their_memory(seed: int) -> None:
    program = random_program(seed)
    machine = Machine.local(1 + seed % 3).bounded(2 * _largest_launch(program))
    runtime = _run(program, seed, machine, BoundedMemoryMapper())
    total = sum(region.nbytes for region in (*program.persistent, *program.transient))
    if total > machine.memories[-1].capacity_bytes:
        assert runtime.statistics.evictions > 0


@pytest.mark.parametrize("seed", range(8))
def test_programs_larger_than_their_memory_under_contrary_answers(seed: int) -> None:
    program = random_program(seed)
    machine = Machine.local(1 + seed % 3).bounded(8 * _largest_launch(program))
    _run(program, seed, machine, ContraryMapper(seed))


def _chain(runtime: Runtime, regions: list[Region]) -> None:
    for before, after in itertools.pairwise(regions):
        tiles = [Partition.tiled(region, (2,)) for region in (before, after)]
        runtime.launch(double, *tiles, name=f"double {after.name}")


def test_least_recently_used_leaves_first_and_unread_values_are_not_copied_back() -> None:
    nbytes = 1 << 12
    machine = Machine.local(cpus=2).bounded(3 * nbytes)
    first, *middle, last = [
        Region((nbytes // 8,), np.float64, f"r{i}", transient=0 < i < 7) for i in range(8)
    ]
    with Runtime(machine, BoundedMemoryMapper()) as runtime:
        runtime.write(first, np.arange(nbytes // 8, dtype=np.float64))
        trace = runtime.capture(lambda: _chain(runtime, [first, *middle, last]))
        # Of eight values three fit; all but the last are dead when they leave. The two tiles of the
        # first are copied in, and the last is copied back.
        assert runtime.statistics.evictions >= 5
        assert trace.describe()["operations"] == {"task": 14, "copy": 3}
        trace.replay()
        np.testing.assert_array_equal(runtime.read(last), 128.0 * np.arange(nbytes // 8))
        assert trace.describe()["memories"]["system.bounded"]["peak_bytes"] <= 3 * nbytes


def test_a_launch_larger_than_its_memory_is_an_error_that_names_it() -> None:
    machine = Machine.local(cpus=1).bounded(3 << 10)
    x, y = (Region((256,), np.float64, name) for name in "xy")
    with Runtime(machine, BoundedMemoryMapper()) as runtime:
        with pytest.raises(MemoryExhausted, match=r"region 'y' for task 'double' needs 2048 bytes"):
            runtime.launch(double, x, y)
        small = Region((16,), np.float64, "small")
        runtime.launch(bump, small)
        np.testing.assert_array_equal(runtime.read(small), np.ones(16))


def test_dead_regions_make_room() -> None:
    machine = Machine.local(cpus=1).bounded(4 << 10)
    with Runtime(machine, BoundedMemoryMapper()) as runtime:
        for _ in range(20):
            runtime.launch(bump, Region((384,), np.float64))
            runtime.wait()
        assert runtime.statistics.bytes_copied <= 20 * 384 * 8
        assert runtime.statistics.evictions == 0
