"""Task Bench: the patterns, tasks that check their inputs, and METG."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from soapstone.cli.main import app
from soapstone.frontend.taskbench import BODIES, KERNELS, PATTERNS, Program, TaskGraph, metg
from soapstone.frontend.taskbench.program import Body
from soapstone.runtime import Machine, Runtime, TaskError

EXPECTED = {  # predecessors of a point, of width 8 at a middle step, spelled out
    ("trivial", 3, 3): [],
    ("no_comm", 3, 3): [3],
    ("stencil_1d", 3, 3): [2, 3, 4],
    ("stencil_1d", 3, 7): [6, 7],
    ("stencil_1d_periodic", 3, 0): [0, 1, 7],
    ("dom", 9, 3): [2, 3],
    ("tree", 3, 7): [3],
    ("fft", 1, 3): [2, 3, 4],  # distances 1, 2, 4, 1, ...
    ("fft", 2, 3): [1, 3, 5],
    ("fft", 3, 3): [3, 7],
    ("fft", 4, 3): [2, 3, 4],
    ("all_to_all", 3, 3): list(range(8)),
    ("nearest", 3, 3): [1, 2, 3, 4, 5],
    ("nearest", 3, 0): [0, 1, 2],
    ("spread", 3, 0): [0, 1, 3, 4, 6],
    ("spread", 4, 0): [0, 2, 4, 5, 7],
}


@pytest.mark.parametrize(("pattern", "step", "point"), EXPECTED)
def test_predecessors(pattern: str, step: int, point: int) -> None:
    graph = TaskGraph(pattern, width=8, steps=20, radix=5, period=3)
    assert graph.predecessors(step, point) == EXPECTED[pattern, step, point]


@pytest.mark.parametrize("pattern", PATTERNS)
def test_ranges_are_the_predecessors_and_only_tasks_that_exist(pattern: str) -> None:
    graph = TaskGraph(pattern, width=7, steps=12, radix=4)
    total = 0
    for step in range(graph.steps):
        before = set(graph.active(step - 1)) if step else set()
        total += len(graph.active(step))
        for point in graph.active(step):
            found = [p for low, high in graph.ranges(step, point) for p in range(low, high)]
            assert found == graph.predecessors(step, point)
            assert set(found) <= before
    assert total == graph.tasks


def test_a_wave_front_has_as_many_tasks_as_a_rectangle_cut_at_two_corners() -> None:
    graph = TaskGraph("dom", width=4, steps=9)
    assert [len(graph.active(step)) for step in range(9)] == [1, 2, 3, 4, 4, 4, 3, 2, 1]
    assert list(graph.active(8)) == [3]


def test_random_choices_depend_on_the_graph_alone() -> None:
    one, two = (TaskGraph("random_nearest", 40, 9, radix=9, index=index) for index in (0, 1))
    again = TaskGraph("random_nearest", 40, 9, radix=9)
    chosen = [[g.predecessors(4, p) for p in range(40)] for g in (one, two, again)]
    assert chosen[0] == chosen[2] != chosen[1]
    assert all(point in found for point, found in enumerate(chosen[0]))
    picked = sum(len(found) - 1 for found in chosen[0]) / sum(
        len(set(range(p - 4, p + 5)) & set(range(40))) - 1 for p in range(40)
    )
    assert 0.15 < picked < 0.35  # a quarter of the others


@pytest.mark.parametrize("body", BODIES)
@pytest.mark.parametrize("traced", [True, False])
def test_every_pattern_runs_and_its_tasks_see_what_their_predecessors_wrote(
    body: Body, traced: bool
) -> None:
    graphs = [TaskGraph(p, 5, 8, radix=3, index=n) for n, p in enumerate(PATTERNS)]
    with Runtime(Machine.local(2)) as runtime:
        program = Program(runtime, graphs, "compute", body, traced=traced, output_bytes=48)
        for iterations in (1, 3):
            assert program.run(iterations) > 0
        program.check_outputs()
        assert program.outputs()[1].shape == (5, 6)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("body", BODIES)
def test_every_kernel_runs(kernel: str, body: Body) -> None:
    graph = TaskGraph("stencil_1d", 3, 4)
    with Runtime(Machine.local(2)) as runtime:
        program = Program(runtime, [graph], kernel, body, scratch_bytes=8192)
        program.run(5)
        program.check_outputs()
        if kernel == "memory" and body == "native":  # 20 chunks of 4 KB over two of them
            assert np.unique(runtime.read(program._scratch[0])).tolist() == [10.0]
        work = {"compute": 5 * 12 * 128, "memory": 5 * 12 * 8192, "empty": 12}
        if kernel in work:
            assert program.work(5) == work[kernel]


def test_imbalance_spreads_the_work_and_keeps_its_mean() -> None:
    graph = TaskGraph("no_comm", 50, 20)
    with Runtime(Machine.local(1)) as runtime:
        program = Program(runtime, [graph], "imbalance", traced=False, imbalance=1.0)
        factors = [program.factor(graph, step, point) for step in range(20) for point in range(50)]
    assert 0.5 <= min(factors) < 0.55 and 1.45 < max(factors) <= 1.5
    assert abs(sum(factors) / len(factors) - 1) < 0.03


@pytest.mark.parametrize("body", BODIES)
def test_a_wrong_input_is_found(body: Body) -> None:
    graph = TaskGraph("stencil_1d", 4, 4)
    with Runtime(Machine.local(2)) as runtime:
        program = Program(runtime, [graph], "compute", body)
        launches = program._launches
        task, about, *partitions = launches[2]
        wrong = tuple(tuple(low + 1 for low in lows) for lows in about.lows)
        launches[2] = (task, type(about)(about.step, about.first, "compute", wrong, about.factors))
        launches[2] += tuple(partitions)
        program._trace = runtime.capture(program._issue)
        with pytest.raises(TaskError, match=r"task_bench.*point.*input.*step before"):
            program.run(1)


def test_metg_is_where_efficiency_crosses_the_target() -> None:
    overhead, each = 3e-6, 1e-8  # seconds a task, and an iteration
    found = metg(
        lambda n: 100 * (overhead + each * n), lambda n: 100.0 * n, 100, 1, largest=1 << 16
    )
    # Half of the time is work where the work takes as long as the overhead: 6 us.
    assert found.metg_us == pytest.approx(6.0, rel=0.05)
    assert not found.bound
    assert found.peak_rate == pytest.approx(1e8, rel=0.01)
    rates = [sample.rate for sample in found.samples]
    assert rates == sorted(rates, reverse=True)


def test_metg_says_when_the_smallest_tasks_are_still_efficient() -> None:
    found = metg(lambda n: n * 1e-6, lambda n: float(n), 1, 1, largest=64, repeats=1)
    assert found.bound and found.metg_us == pytest.approx(1.0)


def test_an_interrupt_ends_a_sweep_with_what_was_measured() -> None:
    def run(iterations: int) -> float:
        if iterations < 16:
            raise KeyboardInterrupt
        return iterations * 1e-6

    found = metg(run, float, 1, 1, largest=64)
    assert found.interrupted and found.bound and found.metg_us == pytest.approx(16.0)
    with pytest.raises(KeyboardInterrupt):
        metg(run, float, 1, 1, largest=8)


def test_sizes_that_take_long_are_run_less_often() -> None:
    runs: list[int] = []

    def run(iterations: int) -> float:
        runs.append(iterations)
        return iterations * 1.0

    metg(run, float, 1, 1, largest=4, repeats=3, enough_s=3.0)
    assert runs == [4, 2, 2, 1, 1, 1]


def _invoke(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["bench", "tasks", *arguments])


def test_the_command_prints_a_table_and_one_object() -> None:
    common = ("--steps", "20", "--iterations", "64", "--repeats", "1", "--workers", "2")
    done = _invoke("--pattern", "fft", "--width", "4", *common)
    assert done.exit_code == 0, done.output
    assert "fft, 1 x 4 wide, 20 steps: 80 tasks" in done.output and "METG(50%)" in done.output
    done = _invoke("--kernel", "empty", "--body", "pure", "--json", *common)
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["metg_us"] is None and len(found["samples"]) == 1
    assert found["task_bench"]["tasks"] == 40
    assert math.isclose(
        found["samples"][0]["granularity_us"], found["samples"][0]["seconds"] / 20 * 1e6
    )


def test_pure_bodies_run_in_processes() -> None:
    options = ("--body", "pure", "--processes", "--workers", "2", "--steps", "6", "--no-metg")
    done = _invoke(*options, "--iterations", "2", "--repeats", "1", "--pattern", "spread")
    assert done.exit_code == 0, done.output
    assert "2 workers (processes)" in done.output


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--pattern", "ring"], "pattern 'ring' found; needed one of trivial, no_comm"),
        (["--kernel", "sleep"], "kernel 'sleep' found; needed one of compute"),
        (["--body", "c"], "body 'c' found; needed one of native"),
        (["--pattern", "dom", "--width", "9", "--steps", "3"], "width 9 has 3 steps"),
        (["--executor", "cloud"], "executor 'cloud' found"),
        (["--steps", "10000000000"], "tasks and inputs found, needed at most 16,777,216"),
        (["--graphs", "1000000000"], "1000000000 graphs of pattern 'stencil_1d'"),
        (["--width", "100000", "--pattern", "all_to_all"], "tasks and inputs found"),
        (["--radix", "1000000000", "--pattern", "nearest"], "tasks and inputs found"),
        (["--iterations", "1000000000000"], "iterations in all found, needed at most"),
        (["--repeats", "1000000000000"], "iterations in all found, needed at most"),
    ],
)
def test_wrong_options_are_named(arguments: list[str], said: str) -> None:
    done = _invoke(*arguments)
    assert done.exit_code == 1
    assert said in done.output
