"""What strategies are said to hold is what executors hold: on workers of a process, over ranks."""

from __future__ import annotations

import ast
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from helpers.processes import PROGRAMS, mpiexec, ranks
from programs import required_memory as program
from programs.replicated_training import in_copies

from soapstone import SGD, Model
from soapstone.engine.measuring import running
from soapstone.frontend.strategies.finding import graph_of
from soapstone.ir.strategy.configuration import Keep
from soapstone.ir.tensor import Role
from soapstone.runtime import Machine
from soapstone.runtime.machines.machine import Link, Memory, Processor
from soapstone.search.cost.tasks import MeasuredMachine
from soapstone.search.parallel import Simulator
from soapstone.search.parallel.exact.tables import Pair, edges_of
from soapstone.search.parallel.frontier.meshes import configurations_of
from soapstone.search.parallel.frontier.points import cost_frontier
from soapstone.search.parallel.mcmc.initial import data_parallel, randomly
from soapstone.search.parallel.problem.choice import Settled, as_strategy
from soapstone.search.parallel.problem.prepare import prepare


@pytest.fixture(scope="module")
def strategies(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Files of data parallelism, with copies too, random strategies, and one that recomputes."""
    folder, files = tmp_path_factory.mktemp("strategies"), []
    for name in program.APPS:
        graph = program.graph_named(name)
        model = prepare(graph, computer(2))
        ways = {"data": data_parallel(model)}
        ways |= {f"random {seed}": randomly(model, seed) for seed in range(2)}
        settled, made = Settled(model), {}
        for way, found in ways.items():
            settled.set(found)
            made[way] = as_strategy(graph, model, settled.configurations(), {})
        inner = [
            value
            for item in model.operators
            for node in item.ahead[:-1]
            for value in node.outputs
            if value not in node.overwrites
        ]
        made["copies"] = in_copies(graph, made["data"])
        kept = dict.fromkeys(inner, Keep.RECOMPUTE)
        made["recomputed"] = replace(made["data"], tensors=kept)
        for way, strategy in made.items():
            files.append(folder / f"{name} {way}.json")
            replace(strategy, machine={}).save(files[-1])
    return files


@pytest.mark.long
def test_workers_hold_what_is_planned(strategies: list[Path]) -> None:
    for name, planned, held in program.rows(strategies, "local"):
        assert planned == held, name


@pytest.mark.long
@pytest.mark.skipif(mpiexec() is None, reason="there is no mpiexec")
def test_ranks_hold_what_is_planned(strategies: list[Path]) -> None:
    pytest.importorskip("mpi4py", reason="mpi4py is not installed (pip install soapstone[mpi])")
    done = ranks(2, PROGRAMS / "required_memory.py", *strategies, timeout_s=60)
    assert done.returncode == 0, done.stderr
    rows = [line.split("\t") for line in done.stdout.splitlines()]
    assert [name for name, _, _ in rows] == [file.stem for file in strategies]
    for name, planned, held in rows:
        assert ast.literal_eval(planned) == ast.literal_eval(held), name


def computer(cpus: int) -> MeasuredMachine:
    """This computer, as if it had been measured."""
    found = Machine.local(cpus=cpus)
    processors = tuple(replace(each, flops=50e9) for each in found.processors)
    memories = tuple(replace(each, bytes_per_s=10e9) for each in found.memories)
    return MeasuredMachine(found.name, processors, memories)


@pytest.mark.parametrize("cpus", [1, 2])
def test_points_of_a_frontier_hold_what_they_say(cpus: int) -> None:
    """Those that keep everything, and those that recompute."""
    batch, sizes = program.APPS["transformer"]
    graph, machine = graph_of("transformer", batch, sizes=sizes), computer(cpus)
    points = cost_frontier(graph, machine, saving=("recompute",), eps=0.05).points
    assert any(each.recomputed for each in points)
    for point in points[:: max(1, len(points) // 4)]:
        with running(graph, machine, point.strategy) as (session, _):
            assert session.peak_bytes == point.simulated_bytes
            assert set(session.peak_bytes_per_device.values()) == {point.simulated_bytes}


def over_ranks() -> MeasuredMachine:
    """Two ranks of one computer, as if they had been measured."""
    names = ("rank0", "rank1")
    return MeasuredMachine(
        "ranks",
        tuple(Processor(f"{name}.cpu0", "cpu", 1, name, 50e9, node="node0") for name in names),
        tuple(Memory(name, 1 << 34, 10e9) for name in names),
        tuple(Link(*ends, 3e-6, 5e9) for ends in (names, names[::-1])),
    )


@pytest.mark.long
def test_sums_of_ranks_are_what_they_hold() -> None:
    """What is sent is not held longer than until it has been received, and copies count."""
    sizes = {"layers": 2, "hidden": 64, "heads": 4, "inner": 256, "vocabulary": 50, "length": 32}
    graph, machine = graph_of("transformer", 8, sizes=sizes), over_ranks()
    points = cost_frontier(graph, machine, saving=("recompute",), eps=0.02).points
    some = points[:: max(1, len(points) // 6)]
    assert any(each.recomputed for each in some)
    for point in some:
        assert point.simulated_bytes == pytest.approx(point.memory_bytes, rel=0.15)


def test_messages_between_operators_cost_ranks_time() -> None:
    model = prepare(graph_of("mlp", 64), over_ranks())
    choices = configurations_of(model)
    for ends in edges_of(model):
        assert Pair(model, ends).moving(*(choices[op] for op in ends)).any()


def test_devices_of_one_memory_hold_together() -> None:
    """On described machines by liveness: a parameter that both read is there once."""
    graph = graph_of("mlp", 64)
    ends = ("m0", "m1"), ("m1", "m0")
    apart = Machine(
        "apart",
        tuple(Processor(f"p{i}", memory=f"m{i}", flops=1e12) for i in range(2)),
        tuple(Memory(f"m{i}", 1 << 30, 1e10) for i in range(2)),
        tuple(Link(*each, 1e-6, 1e10) for each in ends),
    )
    one = tuple(replace(each, memory="m0") for each in apart.processors)
    held = []
    for machine in (apart, replace(apart, processors=one)):
        simulator = Simulator(prepare(graph, machine))
        held.append(simulator.simulate(data_parallel(simulator.model)).peak_bytes_per_device)
    alone, shared = held
    assert shared[0] == shared[1]
    parameters = sum(graph.tensors[name].nbytes for name in graph.inputs(Role.PARAMETER))
    assert max(alone) < shared[0] <= sum(alone) - parameters


def test_ranks_keep_no_more_of_a_value_than_they_use() -> None:
    """Of samples that are split over two memories each has its half."""
    model = Model("net", seed=0)
    x = model.input("x", (512, 64))
    for layer in range(6):
        x = model.tanh(model.dense(x, 64, name=f"fc{layer}"), name=f"tanh{layer}")
    model.output(model.dense(x, 4, name="last"))
    arenas = []
    for memories in (1, 2):
        with model:
            machine = Machine.local(cpus=2, memories=memories)
            model.compile(SGD(0.1), machine=machine, mapper="data_parallel")
            model.fit(np.zeros((512, 64), np.float32), np.zeros(512, np.int64), progress=False)
            (bound, *_) = model.trainer.session._bounds
            arenas.append([plan.peak_bytes for plan in bound.trace.layout.plans])
    (whole,), halves = arenas
    assert max(halves) <= 0.6 * whole
