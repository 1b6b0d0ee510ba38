"""Models three times as large as the part of a GPU's memory that they are given, in training.

    python benchmarks/memory/gpu_streams.py [--models bert] [--no-write]

A step without a bound says what memory it takes; with a third of that (`fast_memory`) values are
streamed between it and the host, by a plan that is made for the least time of a step, by the prices
of an H100, or for the fewest bytes. "copies ms" is the lower bound of the plan's transfers:
the bytes of the way that has more, over that link as it is measured here. The two ways and the
kernels can overlap, so no step of this plan takes less than the longer of "copies ms" and "whole
ms", the step without a bound; wanted is at most 1.3 times "copies ms".
"""

from __future__ import annotations

import statistics
import sys
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1]))

from gpu_figures import TINY, stepping, table_of

from soapstone.deadline import Deadline
from soapstone.frontend.memory_plans import SECONDS, Launches
from soapstone.frontend.strategies.finding import with_constants
from soapstone.ir.plan import Action
from soapstone.search.cost.profile import measured_machine
from soapstone.search.placement.find import TIME, memory_plan

MODELS = {"bert": 16, "resnet": 64}
TIMES, STEPS, PRICES = 3, 12, "h100"


def stepped(
    name: str, batch: int, sizes: Any, steps: int, **options: Any
) -> tuple[float, int, dict[Action, int]]:
    """Return the median ms of a step, the bytes that the GPU holds, and bytes copied each way."""
    with stepping(name, batch, sizes, gpus=1, **options) as (model, step):
        ms = statistics.median([step() for _ in range(steps)][steps // 3 :])
        trainer = model.trainer
        held = max(trainer.session.peak_bytes_per_device.values())
        plans = trainer.bound("train", batch).plans.values()
        done = [each for plan in plans for each in plan.steps]
        ways = (Action.FETCH, Action.EVICT)
        return ms, held, {way: sum(s.copied for s in done if s.action is way) for way in ways}


def row(name: str, tiny: bool) -> dict[str, Any]:
    """Return a model's row."""
    batch, sizes, steps = (2, TINY[name], 4) if tiny else (MODELS[name], {}, STEPS)
    whole_ms, held, _ = stepped(name, batch, sizes, steps)
    given = held // TIMES
    graph, constants = with_constants(name, batch, sizes=sizes)
    launches = Launches(graph, machine=PRICES, timed=True, contents=constants)
    footprint, times = launches(())
    deadline = Deadline(SECONDS)
    plan = memory_plan(footprint, given, deadline=deadline, minimize=TIME, times=times).plan
    fewest_ms, _, _ = stepped(name, batch, sizes, steps, fast_memory=given)
    ms, used, moved = stepped(name, batch, sizes, steps, fast_memory=given, plan=plan)
    machine = measured_machine(gpus=1)
    links = {link.source == machine.memories[0].name: link for link in machine.links}
    rates = {Action.FETCH: links[True].bytes_per_s, Action.EVICT: links[False].bytes_per_s}
    copies_ms = max(1e3 * nbytes / rates[way] for way, nbytes in moved.items())
    return {
        "batch": batch,
        "whole MB": held / 1e6,
        "given MB": given / 1e6,
        "held MB": used / 1e6,
        "whole ms": whole_ms,
        "ms": ms,
        "ms, fewest bytes": fewest_ms,
        **{f"MB {way}": nbytes / 1e6 for way, nbytes in moved.items()},
        **{f"GB/s {way}": rate / 1e9 for way, rate in rates.items()},
        "copies ms": copies_ms,
        "ms / copies": ms / copies_ms,
        "ms / longer of both": ms / max(copies_ms, whole_ms),
    }


if __name__ == "__main__":
    title = "Training steps in a third of the memory, on a GPU"
    sys.exit(table_of(__file__, __doc__, title, list(MODELS), row))
