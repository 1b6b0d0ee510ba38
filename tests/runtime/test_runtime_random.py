"""Random task programs: any placement, memory, layout and mode gives the sequential result."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from helpers.runtime.programs import Program, ShuffledMapper, random_program
from helpers.runtime.scenarios import Fill, Loop, Scenario, execute, scenario, shrink

from soapstone.runtime import Machine, Region, Runtime


def _start(program: Program, seed: int) -> dict[Region, np.ndarray]:
    rng = np.random.default_rng(seed + 1000)
    return {r: rng.integers(0, 100, size=r.shape).astype(r.dtype) for r in program.persistent}


def _same(runtime: Runtime, arrays: dict[Region, np.ndarray], program: Program) -> None:
    for region in program.persistent:
        np.testing.assert_array_equal(runtime.read(region), arrays[region], err_msg=region.name)


@pytest.mark.parametrize("seed", range(16))
def test_random_program_equals_sequential_numpy(seed: int) -> None:
    program = random_program(seed)
    cpus, memories = 1 + seed % 3, 1 + seed // 3 % 3
    mapper = ShuffledMapper(seed, tiles=seed % 2 == 0, memories=seed % 5 > 0)
    with Runtime(Machine.local(cpus, memories=memories), mapper) as runtime:
        arrays = _start(program, seed)
        for region, array in arrays.items():
            runtime.write(region, array)
        for _ in range(2):
            program.launch(runtime)
            program.run(arrays)
        _same(runtime, arrays, program)
        trace = runtime.capture(lambda: program.launch(runtime))
        _same(runtime, arrays, program)
        for round_ in range(4):
            trace.replay()
            program.run(arrays)
            if round_ != 1:
                _same(runtime, arrays, program)
            if round_ == 2:
                for step in program.steps:
                    used = step.regions
                    if not any(region.transient for region in used):
                        step.launch(runtime)
                        step.run(arrays)
                changed = program.persistent[seed % 4]
                arrays[changed] = np.asarray(arrays[changed] + 1, dtype=changed.dtype)
                runtime.write(changed, arrays[changed])
        _same(runtime, arrays, program)


@pytest.mark.parametrize("seed", range(30))
def test_random_scenario_equals_sequential_numpy(seed: int) -> None:
    execute(scenario(seed))


def test_random_scenario_in_processes_equals_sequential_numpy() -> None:
    execute(scenario(13, "processes"))


def test_nothing_is_copied_when_an_instance_without_elements_leaves(tmp_path: Path) -> None:
    """The log says which bytes a copy uses, and the checker whether the instance has them."""
    execute(scenario(3077, "local"), tmp_path / "run.log")


def test_a_scenario_follows_from_its_seed() -> None:
    assert str(scenario(3)) == str(scenario(3)) != str(scenario(4))


def test_a_failing_scenario_is_made_smaller() -> None:
    def guilty(action: object) -> bool:
        if isinstance(action, Loop):
            return any(guilty(inside) for inside in action.body)
        return isinstance(action, Fill)

    def fails(given: Scenario) -> bool:
        return any(guilty(action) for action in given.actions)

    seed = next(seed for seed in range(50) if fails(scenario(seed)))
    small, _ = shrink(scenario(seed), fails)
    assert fails(small) and str(small).count("\n") <= 7
