"""Simulated steps beside real ones on this computer (FlexFlow: Jia, section 3.7.3 and Figure 3.8).

    python benchmarks/strategy_fidelity.py [--models lenet,mlp] [--strategies 8] [--seconds 120]

Tasks are measured in steps of covering strategies, as `soapstone strategy simulate --machine local`
measures them. Each model then runs under other ones: the named strategies that differ, random ones,
and ones in which whole operators have random devices. All of these run in turns, and steps at one
speed of the processors are compared (another guest of the computer may slow them for a while).

The error is that of the simulated step. Kendall's tau says whether the order of a model's
strategies is kept; `tau, 5 % apart` leaves out pairs whose real steps are nearer than that, since
their order changes from run to run. The last row pools strategies, and pairs, of all models.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np
from harness import tabulate

from soapstone.frontend.step_times import Run, Turns
from soapstone.frontend.strategies import graph_of, machine_of
from soapstone.frontend.task_times import Cover, configured, record, strategy_of
from soapstone.ir.configuration import Configuration
from soapstone.search.cost.tasks import MeasuredMachine
from soapstone.search.parallel import NAMED, Simulator
from soapstone.search.parallel.covering import covering
from soapstone.search.parallel.initial import randomly
from soapstone.search.parallel.problem import Model, prepare

# An app, samples of a step, and sizes: a step takes some milliseconds.
MODELS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "mlp": ("mlp", 128, {}),
    "lenet": ("lenet", 64, {}),
    "alexnet": ("alexnet", 8, {"width": 16, "hidden": 512, "classes": 100}),
    "resnet18": ("resnet", 8, {"depth": 18, "image_size": 32, "classes": 100, "width": 32}),
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
LEAST = 15  # steps of a strategy at one speed
APART = 0.05  # real steps that differ by less are in no order

Strategies = Mapping[str, Mapping[str, Configuration]]


def strategies_of(model: Model, count: int, seed: int) -> Strategies:
    """Return so many different strategies: whole on a device, named ones, and by chance."""
    free = [item.name for item in model.operators if item.source is None]
    devices = len(model.machine.processors)
    found: dict[str, Mapping[str, Configuration]] = {}

    def add(name: str, strategy: Mapping[str, Configuration]) -> None:
        if len(found) < count and all(dict(strategy) != dict(other) for other in found.values()):
            found[name] = strategy

    add("one device", dict.fromkeys(free, Configuration({}, (0,))))
    for name, make in NAMED.items():
        add(name, make(model))
    number = seed
    while len(found) < count:
        chance = np.random.default_rng(number)
        placed = {name: Configuration({}, (int(chance.integers(devices)),)) for name in free}
        add(f"random {number}", randomly(model, number))
        add(f"random devices {number}", placed)
        number += 1
    return found


def measured(
    model: Model, strategies: Strategies, machine: MeasuredMachine, seconds: float
) -> tuple[dict[str, float], float]:
    """Set the machine's times of tasks; return the ms of a step under each strategy, and the speed.

    All run in turns; a median is over steps at one speed, which is a yardstick's microseconds.
    """
    covers = {
        f"cover {number}": Cover(found, configured(model, found))
        for number, found in enumerate(covering(model))
    }
    with ExitStack() as stack:
        runs = {}
        for name, cover in covers.items():
            runs[name] = Run(model, strategy_of(model, cover.configurations))
        for name, found in strategies.items():
            runs[name] = Run(model, strategy_of(model, found), tasks=False)
        for run in runs.values():
            stack.callback(run.close)
        turns = Turns(runs)
        speed = turns.take(LEAST, seconds)
    record(model, machine, [(cover, turns.at(name, speed)) for name, cover in covers.items()])
    steps = {name: turns.at(name, speed) for name in strategies}
    return {n: statistics.median(s.us for s in found) / 1e3 for n, found in steps.items()}, speed


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
    names: Sequence[str], count: int, seconds: float, seed: int
) -> Iterator[dict[str, Any]]:
    """Yield a row a strategy, a row of errors a model, and one of all."""
    local = machine_of("local")
    everything: list[list[dict[str, Any]]] = []
    for name in names:
        app, samples, sizes = MODELS[name]
        graph = graph_of(app, samples, sizes=sizes)
        # Nothing that was measured before: speeds differ from day to day.
        machine = MeasuredMachine(local.name, local.processors, local.memories, local.links)
        model = prepare(graph, machine)
        strategies = strategies_of(model, count, seed)
        real, speed = measured(model, strategies, machine, seconds)
        simulator = Simulator(graph, machine)
        mine = []
        for label, strategy in strategies.items():
            found = simulator.simulate(strategy)
            mine.append(
                {
                    "model": name,
                    "strategy": label,
                    "measured ms": real[label],
                    "simulated ms": found.step_us / 1e3,
                    "simulated / measured": found.step_us / 1e3 / real[label],
                    "estimated": found.estimated,
                    "yardstick us": speed,
                }
            )
            yield mine[-1]
        everything.append(mine)
        yield summary(name, [mine])
    yield summary("all", everything)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--strategies", type=int, default=8, help="of each model")
    parser.add_argument("--seconds", type=float, default=120.0, help="of a model's steps, at most")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-write", action="store_true")
    given = parser.parse_args()
    rows = rows_of(given.models.split(","), given.strategies, given.seconds, given.seed)
    title = "Simulated and real steps of strategies on this computer"
    command = "python benchmarks/strategy_fidelity.py"
    tabulate("strategy_fidelity", title, command, rows, save=not given.no_write)


if __name__ == "__main__":
    main()
