"""Simulated training steps beside measured ones, on a GPU.

    python benchmarks/strategies/gpu_fidelity.py [--models resnet,bert] [--no-write]

"simulated" is by times of tasks in a step of their own, as `strategy_fidelity.py` takes them of
CPUs, each by the GPU's events; "launches" is the sum of what launches take that are measured alone
(`GpuCost`), which is what graphs are optimised by. The step that is measured is replayed as in
training, from one CUDA graph, without a timeline. Wanted are both within 10 %.
"""

from __future__ import annotations

import statistics
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path += [str(Path(__file__).resolve().parents[1]), str(Path(__file__).resolve().parent)]

from gpu_figures import TINY, table_of

from soapstone.frontend.strategies.finding import with_constants
from soapstone.frontend.strategies.step_times import Run
from soapstone.frontend.strategies.task_times import Cover, configured, record, strategy_of
from soapstone.search.cost.gpu_executor import GpuCost
from soapstone.search.cost.profile import measured_machine
from soapstone.search.cost.tasks import TaskTimes
from soapstone.search.parallel import simulate
from soapstone.search.parallel.mcmc.initial import data_parallel
from soapstone.search.parallel.problem.prepare import prepare

MODELS = {"resnet": 64, "bert": 16, "dlrm": 256}
STEPS = 15


def row(name: str, tiny: bool) -> dict[str, Any]:
    """Return a model's row."""
    batch = 2 if tiny else MODELS[name]
    graph, constants = with_constants(name, batch, sizes=TINY[name] if tiny else {})
    whole = measured_machine(gpus=1)
    machine = replace(whole, processors=whole.workers, times=TaskTimes())  # no task is a copier's
    model = prepare(graph, machine)
    configurations = data_parallel(model)
    strategy = strategy_of(model, configurations)
    taken = {}
    for timeline in (False, True):
        run = Run(replace(model, machine=whole), strategy, tasks=timeline, constants=constants)
        taken[timeline] = [run.step() for _ in range(4 if tiny else STEPS)][2:]  # some compile
        run.close()
    cover = Cover(configurations, configured(model, configurations))
    record(model, machine, [(cover, taken[True])])
    found = simulate(graph, machine, strategy)
    alone = GpuCost(training=True).cost(graph, constants)
    us = statistics.median(step.us for step in taken[False])
    return {
        "batch": batch,
        "measured ms": us / 1e3,
        "simulated ms": found.step_us / 1e3,
        "simulated / measured": found.step_us / us,
        "launches ms": alone.time_us / 1e3,
        "launches / measured": alone.time_us / us,
        "launches": alone.launches,
        "estimated": found.estimated,
    }


if __name__ == "__main__":
    title = "Simulated and measured training steps on a GPU"
    sys.exit(table_of(__file__, __doc__, title, list(MODELS), row))
