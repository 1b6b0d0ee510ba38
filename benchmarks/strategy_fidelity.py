"""Simulated steps beside real ones on this computer (FlexFlow: Jia, section 3.7.3 and Figure 3.8).

    python benchmarks/strategy_fidelity.py [--models lenet,mlp] [--strategies 8] [--rounds 7]

Tasks are measured as `soapstone strategy simulate --machine local` measures them, in steps of
strategies of their own. Then each model runs under the named strategies that differ, under ones in
which whole operators have random devices, and under random ones, all in turns; the median over
rounds is compared with the simulated step. Kendall's tau says whether the order of a model's
strategies is kept; the last row pools the pairs of all models.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np
from harness import REST_S, tabulate

from soapstone.frontend.session import Bound, Session
from soapstone.frontend.strategies import graph_of, machine_of, measure_tasks
from soapstone.frontend.task_times import running, strategy_of
from soapstone.ir.configuration import Configuration
from soapstone.runtime import Machine
from soapstone.search.parallel import NAMED, Simulator
from soapstone.search.parallel.initial import randomly
from soapstone.search.parallel.problem import Model

# An app, samples of a step, and sizes: each step takes some milliseconds.
MODELS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "mlp": ("mlp", 128, {}),
    "lenet": ("lenet", 64, {}),
    "alexnet": ("alexnet", 16, {"hidden": 1024, "classes": 100}),
    "resnet18": ("resnet", 16, {"depth": 18, "image_size": 32, "classes": 100}),
    "squeezenet": ("squeezenet", 8, {"image_size": 64, "classes": 100}),
    "candle_uno": ("candle_uno", 64, {}),
    "dlrm": ("dlrm", 128, {"vocabularies": (1000,) * 8}),
    "rnnlm": ("rnnlm", 16, {"unrolled": True, "hidden": 256, "length": 6, "vocabulary": 1000}),
    "transformer": (
        "transformer",
        8,
        {"layers": 1, "hidden": 256, "heads": 4, "inner": 1024, "length": 32, "vocabulary": 1000},
    ),
}
ROUND_S, LEAST = 0.15, 5  # of a strategy's steps in a round

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


def measured_ms(
    model: Model, strategies: Strategies, rounds: int, machine: Machine
) -> dict[str, float]:
    """Return the median time of a step under each strategy, run in turns."""
    times: dict[str, list[float]] = {name: [] for name in strategies}
    with ExitStack() as stack:
        bound: dict[str, tuple[Session, Bound]] = {
            name: stack.enter_context(running(model.graph, machine, strategy_of(model, found)))
            for name, found in strategies.items()
        }
        for number in range(rounds):
            for name in list(bound)[:: 1 if number % 2 else -1]:
                time.sleep(REST_S / 4)
                times[name].append(_steps_ms(*bound[name]))
    return {name: statistics.median(found) for name, found in times.items()}


def _steps_ms(session: Session, bound: Bound) -> float:
    """Return the median time of a step in one round."""
    taken: list[float] = []
    for _ in range(3):
        session.run(bound)
    until = time.perf_counter() + ROUND_S
    while len(taken) < LEAST or time.perf_counter() < until:
        begin = time.perf_counter()
        session.run(bound)
        taken.append((time.perf_counter() - begin) * 1e3)
    return statistics.median(taken)


def agreement(pairs: Sequence[tuple[float, float]]) -> tuple[int, int]:
    """Return by how many pairs of strategies more keep their order than lose it, and of how many.

    Their ratio is Kendall's tau (Kendall, A new measure of rank correlation, 1938).
    """
    found = [
        int(np.sign((a[0] - b[0]) * (a[1] - b[1]))) for a, b in itertools.combinations(pairs, 2)
    ]
    return sum(found), len(found)


def summary(model: str, rows: Sequence[Mapping[str, Any]], kept: int, pairs: int) -> dict[str, Any]:
    """Return the errors of some rows."""
    errors = [abs(row["simulated / measured"] - 1) * 100 for row in rows]
    return {
        "model": model,
        "strategy": "all",
        "mean error %": statistics.mean(errors),
        "worst error %": max(errors),
        "Kendall's tau": kept / max(pairs, 1),
    }


def rows_of(names: Sequence[str], count: int, rounds: int, seed: int) -> Iterator[dict[str, Any]]:
    """Yield a row a strategy, a row of errors a model, and one of all."""
    machine = machine_of("local")
    everything: list[dict[str, Any]] = []
    kept = pairs = 0
    for name in names:
        app, samples, sizes = MODELS[name]
        graph = graph_of(app, samples, sizes=sizes)
        measure_tasks(graph, machine)
        simulator = Simulator(graph, machine)
        strategies = strategies_of(simulator.model, count, seed)
        real = measured_ms(simulator.model, strategies, rounds, machine)
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
                }
            )
            yield mine[-1]
        some, of = agreement([(row["measured ms"], row["simulated ms"]) for row in mine])
        yield summary(name, mine, some, of)
        kept, pairs = kept + some, pairs + of
        everything += mine
    yield summary("all", everything, kept, pairs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--strategies", type=int, default=8, help="of each model")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-write", action="store_true")
    given = parser.parse_args()
    rows = rows_of(given.models.split(","), given.strategies, given.rounds, given.seed)
    title = "Simulated and real steps of strategies on this computer"
    command = "python benchmarks/strategy_fidelity.py"
    tabulate("strategy_fidelity", title, command, rows, save=not given.no_write)


if __name__ == "__main__":
    main()
