"""Simulated steps beside real ones on this computer (FlexFlow: Jia, section 3.7.3, Figure 3.11).

    python benchmarks/strategies/strategy_fidelity.py [--models lenet,mlp] [--strategies 8]
    python benchmarks/strategies/strategy_fidelity.py --inference [--models lenet,net.onnx]
    mpiexec -n 2 python benchmarks/strategies/strategy_fidelity.py [...]

Tasks are measured in steps of covering strategies, as `soapstone strategy simulate --machine local`
measures them; over ranks of MPI, messages too. With --inference, steps are of what sessions serve,
ONNX files at batch 1. Each model then runs under strategies that are
chosen so that their simulated steps are far apart: one device, data parallelism, and of many others
(named, random, partly data-parallel) always the one whose step is farthest from those chosen.
Covering and other strategies run in turns, and steps at one speed of the processors are compared
(another guest of the computer may slow them for a while).

The error is that of the simulated step. Kendall's tau says whether the order of a model's
strategies is kept: of all pairs, those in the same order less those in the other, as a share of
all. Equal steps count as neither. Of pairs whose real steps are nearer than 5 % the order changes
from run to run; `tau, 5 % apart` leaves them out. The last row pools strategies, and pairs, of all
models.
"""

from __future__ import annotations

import itertools
import math
import statistics
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

sys.path.append(str(Path(__file__).resolve().parents[1]))

from arguments import common
from harness import tabulate

from soapstone.frontend.strategies.finding import forward_of, graph_of
from soapstone.frontend.strategies.serving import FoldedGraph
from soapstone.frontend.strategies.step_times import Run, Step, Turns
from soapstone.frontend.strategies.task_times import Cover, configured, linked, record, strategy_of
from soapstone.ir.graph import Graph
from soapstone.ir.strategy import Strategy
from soapstone.ir.strategy.configuration import Configuration
from soapstone.ir.tensor import NOTHING, Array
from soapstone.runtime.machines.start import default_executor, rank_of
from soapstone.search.cost.profile import measured_machine
from soapstone.search.cost.tasks import MeasuredMachine, TaskTimes
from soapstone.search.parallel import NAMED, Simulation, Simulator, simulate
from soapstone.search.parallel.covering import covering
from soapstone.search.parallel.mcmc.initial import data_parallel, randomly
from soapstone.search.parallel.problem.prepare import Model, prepare

# An app, samples of a step, and sizes: a step takes some milliseconds.
MODELS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "mlp": ("mlp", 128, {}),
    "lenet": ("lenet", 64, {}),
    "alexnet": ("alexnet", 8, {"width": 16, "hidden": 512, "classes": 100}),
    "resnet18": ("resnet", 16, {"depth": 18, "image_size": 32, "classes": 100, "width": 32}),
    "squeezenet": ("squeezenet", 4, {"image_size": 64, "classes": 100}),
    "candle_uno": (
        "candle_uno",
        64,
        {
            "inputs": {"cell_rnaseq": 942, "drug_descriptors": 1024, "drug_fingerprints": 512},
            "bottom": (256,) * 3,
            "top": (256, 256, 256, 1),
        },
    ),
    "dlrm": ("dlrm", 128, {"vocabularies": (1000,) * 8, "top": (256, 256, 256, 1)}),
    "rnnlm": ("rnnlm", 16, {"unrolled": True, "hidden": 256, "length": 4, "vocabulary": 1000}),
    "transformer": (
        "transformer",
        8,
        {
            "layers": 1,
            "hidden": 256,
            "heads": 4,
            "inner": 1024,
            "length": 32,
            "vocabulary": 1000,
            "dropout": 0.0,
        },
    ),
}
LOOK, LEAST = 4, 15  # steps of a strategy at one speed: to choose by, to measure
CHANCES, PARTS = 24, 8  # random strategies of either kind, and partly data-parallel ones
APART = 0.05  # real steps that differ by less are in no order

Configured = Mapping[str, Configuration]


def candidates(model: Model, seed: int) -> dict[str, Configured]:
    """Return strategies to choose from: one device, named ones, partly data-parallel, by chance."""
    free = [item.name for item in model.operators if item.source is None]
    devices = len(model.machine.processors)
    found: dict[str, Configured] = {"one device": dict.fromkeys(free, Configuration({}, (0,)))}
    found |= {name: make(model) for name, make in NAMED.items()}
    data = data_parallel(model)
    for part in range(1, PARTS):
        split = free[: len(free) * part // PARTS]
        some = {name: data[name] for name in split}
        found[f"data for {part}/{PARTS}"] = {**found["one device"], **some}
    for number in range(seed, seed + CHANCES):
        chance = np.random.default_rng(number)
        found[f"random {number}"] = randomly(model, number)
        found[f"random devices {number}"] = {
            name: Configuration({}, (int(chance.integers(devices)),)) for name in free
        }
    return found


def spread(step_us: Mapping[str, float], count: int) -> list[str]:
    """Return so many names whose steps' logarithms are far apart, each the farthest from others."""
    chosen = ["one device", "data"][:count]
    while len(chosen) < min(count, len(step_us)):
        distance = {
            name: min(abs(math.log(us / step_us[other])) for other in chosen)
            for name, us in step_us.items()
            if name not in chosen
        }
        chosen.append(max(distance, key=distance.__getitem__))
    return [name for name in step_us if name in chosen]


class Fidelity:
    """One model on the machine of an executor: its covering strategies, and others, as they run."""

    def __init__(
        self,
        graph: Graph,
        machine: MeasuredMachine,
        executor: str,
        constants: Mapping[str, Array] = NOTHING,
    ) -> None:
        self.graph, self.machine, self.executor = graph, machine, executor
        self.constants = constants
        self.model = prepare(graph, machine)
        self.covers = {
            f"cover {number}": Cover(found, configured(self.model, found))
            for number, found in enumerate(covering(self.model))
        }
        self._stack = ExitStack()
        self.runs: dict[str, Run] = {}
        for name, cover in self.covers.items():
            self._start(name, strategy_of(self.model, cover.configurations), True)

    def __enter__(self) -> Fidelity:
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def _start(self, name: str, strategy: Strategy, tasks: bool) -> None:
        self.runs[name] = Run(
            self.model, strategy, tasks=tasks, executor=self.executor, constants=self.constants
        )
        self._stack.callback(self.runs[name].close)

    def look(self, seconds: float) -> MeasuredMachine:
        """Return the machine with the times of tasks from a first look."""
        turns = Turns(self.runs)
        speed = turns.take(LOOK, seconds)
        return self._measured({name: turns.at(name, speed) for name in self.covers})

    def chosen(self, count: int, seconds: float, seed: int) -> dict[str, Strategy]:
        """Return strategies far apart, by times of tasks from a first look."""
        simulator = Simulator(prepare(self.graph, self.look(seconds)))
        found = candidates(self.model, seed)
        step_us = {name: simulator.simulate(item).step_us for name, item in found.items()}
        return {name: strategy_of(self.model, found[name]) for name in spread(step_us, count)}

    def compared(
        self, strategies: Mapping[str, Strategy], seconds: float
    ) -> Iterator[tuple[dict[str, Any], Simulation, tuple[int, ...]]]:
        """Start strategies; yield a row of each, with its step as it is and as simulated.

        Beside it are the simulation, and the bytes that the memory of each device holds.
        """
        for name, strategy in strategies.items():
            self._start(name, strategy, False)
        turns = Turns(self.runs)
        speed = turns.take(LEAST, seconds)
        taken = {name: turns.at(name, speed) for name in self.runs}
        machine = self._measured(taken)
        for name, strategy in strategies.items():
            real_us = statistics.median(step.us for step in taken[name])
            found = simulate(self.graph, machine, strategy)
            row = {
                "strategy": name,
                "measured ms": real_us / 1e3,
                "simulated ms": found.step_us / 1e3,
                "simulated / measured": found.step_us / real_us,
                "estimated": found.estimated,
                "steps": len(taken[name]),
                "yardstick us": speed.us,
                "at most apart": speed.slack,
            }
            yield row, found, self.runs[name].peak_bytes_per_device

    def _measured(self, taken: Mapping[str, Sequence[Step]]) -> MeasuredMachine:
        """Return the machine with the times of tasks and messages in steps."""
        local = linked(self.machine, [taken[name] for name in self.covers])
        # Nothing that was measured before: speeds differ from day to day.
        machine = replace(local, times=TaskTimes())
        record(self.model, machine, [(cover, taken[name]) for name, cover in self.covers.items()])
        return machine


def agreement(pairs: Sequence[tuple[float, float]], apart: float = 0.0) -> tuple[int, int]:
    """Return by how many pairs of strategies more keep their order than lose it, and of how many.

    Their ratio is Kendall's tau (Kendall, A new measure of rank correlation, 1938).

    Args:
        pairs: (real, simulated). apart: the least difference of real ones, as a share.
    """
    found = [
        int(np.sign((a[0] - b[0]) * (a[1] - b[1])))
        for a, b in itertools.combinations(pairs, 2)
        if abs(a[0] - b[0]) >= apart * min(a[0], b[0])
    ]
    return sum(found), len(found)


Rows = Sequence[Mapping[str, Any]]


def summary(name: str, models: Sequence[Rows]) -> dict[str, Any]:
    """Return the errors of the rows of some models."""
    errors = [abs(row["simulated / measured"] - 1) * 100 for rows in models for row in rows]
    found: dict[str, Any] = {
        "model": name,
        "strategy": "all",
        "mean error %": statistics.mean(errors),
        "worst error %": max(errors),
    }
    for label, apart in (("tau", 0.0), ("tau, 5 % apart", APART)):
        counts = [
            agreement([(row["measured ms"], row["simulated ms"]) for row in rows], apart)
            for rows in models
        ]
        found[label] = sum(kept for kept, _ in counts) / max(1, sum(of for _, of in counts))
    return found


def rows_of(
    names: Sequence[str], count: int, seconds: float, seed: int, executor: str, inference: bool
) -> Iterator[dict[str, Any]]:
    """Yield a row a strategy, a row of errors a model, and one of all."""
    machine = measured_machine(1 if executor == "mpi" else None, executor=executor)
    everything: list[list[dict[str, Any]]] = []
    for name in names:
        app, samples, sizes = MODELS.get(name, (name, 1, {}))
        mine = []
        if inference:
            served = FoldedGraph.of(*forward_of(app, samples, sizes=sizes))
            graph, constants = served.graph, served.contents
        else:
            graph, constants = graph_of(app, samples, sizes=sizes), NOTHING
        with Fidelity(graph, machine, executor, constants) as model:
            strategies = model.chosen(count, seconds / 4, seed)
            for row, _, _ in model.compared(strategies, seconds):
                mine.append({"model": name, **row})
                yield mine[-1]
        everything.append(mine)
        yield summary(name, [mine])
    yield summary("all", everything)


def main() -> None:
    parser = common(__doc__, models=MODELS, seed=0)
    parser.add_argument("--strategies", type=int, default=8, help="of each model")
    parser.add_argument("--seconds", type=float, default=30.0, help="of a model's steps, at most")
    parser.add_argument("--inference", action="store_true")
    given = parser.parse_args()
    executor = default_executor()
    rows: Iterable[dict[str, Any]] = rows_of(
        *(given.models.split(","), given.strategies, given.seconds, given.seed),
        *(executor, given.inference),
    )
    if rank_of(executor):
        list(rows)
        return
    name, title = "strategy_fidelity", "Simulated and real steps of strategies on this computer"
    command = f"python benchmarks/strategies/strategy_fidelity.py --seconds {given.seconds:g}"
    if given.models != ",".join(MODELS):
        command += f" --models {given.models}"
    if given.inference:
        name, title = f"{name}_inference", f"{title}, of what is served"
        command += " --inference"
    if executor == "mpi":
        name, title = f"{name}_mpi", f"{title}, over two ranks"
        command = f"mpiexec -n 2 {command}"
    tabulate(name, title, command, rows, save=not given.no_write)


if __name__ == "__main__":
    main()
