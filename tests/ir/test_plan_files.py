"""Memory plans: what is legal, round trips, and bad files."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from helpers.ir_examples import Data, edited

from soapstone.ir.builder import GraphBuilder
from soapstone.ir.errors import GraphError
from soapstone.ir.graph import Graph
from soapstone.ir.plan import Action, MemoryPlan, Step, Uses

A, F, T, E, R = Action.ALLOCATE, Action.FREE, Action.FETCH, Action.EVICT, Action.RUN


def chain() -> Graph:
    builder = GraphBuilder("chain")
    builder.input("x", (4,))
    builder.apply("relu", "x", name="a")
    builder.apply("exp", "a", name="b")
    builder.apply("add", "a", "b", name="c")
    builder.output("c")
    return builder.build()


PLAN = MemoryPlan(
    48,
    (
        Step(T, "x", 16, 0),
        Step(A, "a", 16, 16),
        Step(R, "a"),
        Step(F, "x", 16, 0),
        Step(A, "b", 16, 0),
        Step(R, "b"),
        Step(E, "a", 16, 16),
        Step(T, "a", 16, 32),
        Step(A, "c", 16, 16),
        Step(R, "c"),
        Step(E, "c", 16, 16),
    ),
)


def test_a_legal_plan_replays_and_round_trips(tmp_path: Path) -> None:
    PLAN.check(chain())
    assert PLAN.peak_bytes == 48
    assert PLAN.moved_bytes == 64
    path = tmp_path / "plan.json"
    PLAN.save(path)
    assert MemoryPlan.load(path) == PLAN
    assert str(PLAN).splitlines()[2].split() == ["1", "allocate", "'a'", "[16,", "32)"]
    assert MemoryPlan(0, ()).peak_bytes == 0


def changed(number: int, *steps: Step) -> MemoryPlan:
    return replace(PLAN, steps=(*PLAN.steps[:number], *steps, *PLAN.steps[number + 1 :]))


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (replace(PLAN, capacity_bytes=47), r"step 7 \(fetch 'a' \[32, 48\)\): bytes up to 48"),
        (changed(1, Step(A, "a", 16, 15)), r"step 1 .*overlaps 'x' \[0, 16\), which is live"),
        (changed(1, Step(A, "a", 12, 16)), r"step 1 .*12 bytes found, 16 needed"),
        (changed(1, Step(A, "q", 16, 16)), r"step 1 .*tensor does not exist"),
        (changed(1), r"step 1 \(run 'a'\): uses 'a', which is not resident"),
        (changed(0, Step(A, "x", 16, 0)), r"step 2 \(run 'a'\): reads 'x', which has no contents"),
        (changed(0, Step(T, "b", 16, 0)), r"step 0 .*tensor is not in the backing memory"),
        (changed(3, Step(F, "x", 16, 1)), r"step 3 .*offset 1 found, 0 needed"),
        (changed(3, Step(F, "b", 16, 0)), r"step 3 .*tensor is not resident"),
        (changed(3, Step(T, "a", 16, 32)), r"step 3 .*tensor is resident already"),
        (changed(5, Step(E, "b", 16, 0)), r"step 5 .*tensor has no contents to move"),
        (changed(6, Step(F, "a", 16, 16)), r"step 7 .*tensor is not in the backing memory"),
        (changed(5, Step(R, "q")), r"step 5 \(run 'q'\): node does not exist"),
        (replace(PLAN, steps=PLAN.steps[:9]), r"add 'c' never runs"),
    ],
)
def test_illegal_plans_name_the_step(plan: MemoryPlan, message: str) -> None:
    with pytest.raises(GraphError, match=message):
        plan.check(chain())


def test_replay_finds_every_overlap_of_random_plans() -> None:
    generator = random.Random(0)
    refused = 0
    for _ in range(300):
        sizes = {f"t{i}": generator.choice([0, 8, 16, 40]) for i in range(6)}
        live: dict[str, tuple[int, int]] = {}
        steps, legal = [], True
        for _ in range(12):
            name = generator.choice(list(sizes))
            if name in live:
                steps.append(Step(F, name, sizes[name], live.pop(name)[0]))
                continue
            low = generator.randrange(0, 80)
            high = low + sizes[name]
            legal &= high <= 100 and not any(max(low, a) < min(high, b) for a, b in live.values())
            steps.append(Step(A, name, sizes[name], low))
            live[name] = (low, high)
            if not legal:
                break
        plan = MemoryPlan(100, tuple(steps))
        if legal:
            plan.replay(sizes)
        else:
            refused += 1
            with pytest.raises(GraphError, match=f"step {len(steps) - 1} "):
                plan.replay(sizes)
    assert 50 < refused < 300


def test_replay_without_a_graph_checks_given_uses() -> None:
    plan = MemoryPlan(8, (Step(A, "t", 8, 0), Step(R, "make"), Step(E, "t", 8, 0)))
    plan.replay({"t": 8}, {"make": Uses((), ("t",))})
    with pytest.raises(GraphError, match=r"step 1 \(run 'make'\): uses 's', which is not resident"):
        plan.replay({"t": 8, "s": 8}, {"make": Uses(("s",), ("t",))})


PLAN_FAULTS: list[tuple[Callable[[Data], object], str]] = [
    (lambda d: d.pop("capacity_bytes"), r"field 'capacity_bytes' is missing"),
    (lambda d: d.update(capacity_bytes=-1), r"field 'capacity_bytes': -1 found"),
    (lambda d: d.update(note=""), r"unknown field 'note'"),
    (lambda d: d["steps"][0].update(action="lose"), r"steps\[0\]: field 'action': \"lose\" found"),
    (lambda d: d["steps"][1].update(nbytes=1.0), r"steps\[1\]: field 'nbytes': 1.0 found"),
    (lambda d: d["steps"][2].update(offset=8), r"steps\[2\]: field 'offset': 8 found, 0 for a run"),
    (lambda d: d["steps"].append(7), r"steps\[11\]: 7 found, an object needed"),
]


@pytest.mark.parametrize(("edit", "message"), PLAN_FAULTS)
def test_bad_plan_files_name_the_field(
    edit: Callable[[Data], object], message: str, tmp_path: Path
) -> None:
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(edited(PLAN.to_json(), edit)))
    with pytest.raises(GraphError, match=message):
        MemoryPlan.load(path)
