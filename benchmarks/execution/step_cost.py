"""What a training step costs more with all that users ask of it: a step with and one without.

    python benchmarks/execution/step_cost.py [--models resnet18,transformer_block] [--rounds 7]

With: weights of samples, clipping by the norm of all gradients, a second output with a loss of its
own, and a metric. Without: one loss. Models and batches are those of training_step.py.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

sys.path.append(str(Path(__file__).resolve().parents[1]))

from arguments import common
from harness import in_turns, median, ratio, serve, show, write
from training_step import BUDGET_S, MODELS, RATE, batch


def peer(model: str, full: bool) -> None:
    """Serve rounds: the median step, by the clock and of all processors."""
    from soapstone import SGD

    built = MODELS[model].ours()
    (inputs, labels), loss = batch(MODELS[model]), MODELS[model].loss
    first = built.output_names[0]
    named = dict(zip(built.build().inputs(), inputs))
    options: dict[str, Any] = {}
    if full:
        (last,) = built._outputs
        built.output(built.reduce_mean(last, axes=tuple(range(1, len(last.shape))), name="mean"))
        built.compile(
            SGD(RATE, clip_norm=1.0),
            loss={first: loss, "mean": "mse"},
            metrics={first: ["accuracy" if loss == "cross_entropy" else "mae"]},
            weighted=True,
            cpus=os.cpu_count(),
        )
        random = np.random.default_rng(1)
        options["sample_weights"] = random.uniform(0.5, 1.5, len(labels)).astype(np.float32)
        labels = {first: labels, "mean": np.zeros(len(labels), np.float32)}
    else:
        built.compile(SGD(RATE), loss=loss, cpus=os.cpu_count())

    def step() -> None:
        built.train_on_batch(named, labels, **options)

    def do_round() -> Mapping[str, Any]:
        times, begin = list[float](), time.process_time()
        while len(times) < 3 or sum(times) < BUDGET_S:
            start = time.perf_counter()
            step()
            times.append(time.perf_counter() - start)
        processors = (time.process_time() - begin) / len(times)
        return {"ms": statistics.median(times) * 1e3, "processor_ms": processors * 1e3}

    for _ in range(3):
        step()
    serve(do_round)


def main() -> None:
    """Measure both steps of each model in turns, and write the table."""
    parser = common(__doc__, models="resnet18,transformer_block", rounds=7)
    parser.add_argument("--peer", nargs=2, metavar=("MODEL", "STEP"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.peer:
        model, step = options.peer
        peer(model, step == "with")
        return
    rows = []
    for model in options.models.split(","):
        commands = {
            step: [sys.executable, __file__, "--peer", model, step] for step in ("without", "with")
        }
        found = in_turns(commands, options.rounds)
        row: dict[str, Any] = {"model": model}
        for step, measured in found.items():
            row |= {f"{step} ms": median(measured, "ms")}
        row["ratio"] = ratio(found["with"], found["without"])
        row["ratio of processor time"] = ratio(found["with"], found["without"], "processor_ms")
        rows.append(row)
        show(row)
    if not options.no_write:
        write(
            "step_cost",
            "A training step with weights, clipping, two losses and a metric, and one without",
            f"python benchmarks/execution/step_cost.py --rounds {options.rounds}",
            list(rows[0]),
            rows,
        )


if __name__ == "__main__":
    main()
