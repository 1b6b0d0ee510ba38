"""What is measured of GPUs, end to end: on devices, or in Numba's simulator, without a clock.

    NUMBA_ENABLE_CUDASIM=1 python -m programs.gpu_measured FOLDER

Prints a line of JSON. folder: for the cost database and the machine file.
"""

from __future__ import annotations

import json
import math
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
from helpers.unserved import without_cuda
from numba import cuda

from soapstone import Model, optimize
from soapstone.frontend.strategies.finding import forward_of
from soapstone.ir.builder import GraphBuilder
from soapstone.ir.tensor import Role
from soapstone.kernels import measure, select
from soapstone.kernels.entry import Call
from soapstone.kernels.fallback import FallbackWarning
from soapstone.kernels.registry import variants
from soapstone.kernels.select import select_device
from soapstone.native.cuda.device import device_count
from soapstone.runtime import Machine
from soapstone.runtime.machines.machine import CUDA
from soapstone.search.cost.cost import Cost
from soapstone.search.cost.database import database
from soapstone.search.cost.gpu_executor import GpuCost
from soapstone.search.cost.profile import measured_machine


def network(hosted: bool) -> Model:
    """Return a small network; hosted: one of its operators has no CUDA kernel."""
    model = Model("small", seed=2)
    x = model.softmax(model.dense(model.input("x", (4, 6)), 5, activation="tanh"))
    model.output(model.dense(model.cumsum(x, axis=1) if hosted else x, 3))
    return model


def priced(hosted: bool, path: Path) -> tuple[Cost, int, float]:
    """Return the cost of a network, how many launches were measured, and what enqueuing one takes.

    path: of the database.
    """
    with network(hosted) as model:
        model.compile("sgd", cpus=1)
        price = GpuCost(database=database(path))
        cost = price.cost(*forward_of(model))
        return cost, price.measured, price.untraced_us() if hosted else 0.0


def tuned() -> dict[str, Any]:
    """Return what measuring the variants of a call gave, and which one is chosen by what is kept.

    The record is changed, so that the later variant wins.
    """
    x, y = (cuda.to_device(np.ones((3, 40), np.float32)) for _ in range(2))
    call = Call("softmax", {"axis": 1}, (x,), (y,))
    candidates, of = variants("softmax", CUDA), f"cuda {measure.form(call)}"
    times = measure.measured(call, of, candidates)
    kept = measure.known(of, candidates)
    expected, _ = select_device(call)
    question = measure._question(of, candidates)
    measure.store().replace({question: {each.name: 9.0 - n for n, each in enumerate(candidates)}})
    select._rests_on = lambda tune, processor: tune  # as on a device
    chosen, entry = select_device(call)
    names = [each.name for each in candidates]
    return {
        "times": [times[name] for name in names],
        "equal": kept == times,
        "chosen": [names.index(expected), names.index(chosen)],
        "launches": len(entry.launches),
        "mark": measure.known(of.removeprefix("cuda "), candidates),
    }


def optimized() -> dict[str, Any]:
    """Return what a search with measured launches says of products of one matrix."""
    builder = GraphBuilder("products")
    x = builder.input("x", (2, 3))
    random, weights, made = np.random.default_rng(0), {}, []
    for name in "ab":
        builder.input(name, (3, 2), role=Role.PARAMETER)
        weights[name] = random.random((3, 2), np.float32)
        made += builder.apply("matmul", x, name)
    builder.output(*made)
    found = optimize(
        builder.build(), weights, machine="gpu", candidates=2, seconds=120, objective="launches"
    )
    return {
        "launches": [found.before.launches, found.after.launches],
        "estimated": found.before.estimated or found.after.estimated,
        "us": [found.before.time_us, found.after.time_us],
    }


def main(folder: Path) -> None:
    """Measure twice, and say what came of it."""
    outcome = {}
    for hosted in (False, True):
        found = [priced(hosted, folder / "costs.sqlite") for _ in range(2)]
        outcome["hosted" if hosted else "traced"] = {
            "equal": found[0][0] == found[1][0],
            "measured": [measured for _, measured, _ in found],
            "launches": found[0][0].launches,
            "estimated": found[0][0].estimated,
            "enough": found[0][0].time_us >= found[0][0].launches * found[0][2],
        }
    machine = measured_machine(gpus=min(2, device_count()))
    machine.save(folder / "machine.json")
    loaded = Machine.load(folder / "machine.json")
    outcome["machine"] = {
        "memories": [memory.name for memory in loaded.memories],
        "links": [[link.source, link.target] for link in loaded.links],
        "finite": all(
            0 < value < math.inf
            for value in (
                *(link.latency_s for link in loaded.links),
                *(link.bytes_per_s for link in loaded.links),
                *(each.flops for each in loaded.workers),
                *(each.bytes_per_s for each in loaded.memories[1:]),
            )
        ),
        "assumed": sorted({link.bytes_per_s for link in loaded.links} & {25e9, 200e9}),
    }
    outcome["optimized"] = optimized()
    outcome["tuned"] = tuned()
    print(json.dumps(outcome))


if __name__ == "__main__":
    without_cuda("cumsum")
    warnings.simplefilter("ignore", FallbackWarning)
    main(Path(sys.argv[1]))
