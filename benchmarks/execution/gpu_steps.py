"""Training steps and inference of apps on this computer's GPU, and what they were priced at.

    python benchmarks/execution/gpu_steps.py [--models resnet,bert] [--machine h100] [--no-write]

An app at its own size in single precision, in TF32, and trained in mixed float16. "step ms" is the
median of training steps, "answer ms" that of a session's answers of the same batch, copies of
inputs and results included; "estimated" is what `--machine` prices the launches of each at.

Each figure is found in a process of its own, in `--seconds` at most, and kept in --rows
(`gpu_figures.py`). The exit code is 1 where one failed.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

sys.path.append(str(Path(__file__).resolve().parents[1]))

import gpu_figures
from arguments import common
from gpu_figures import SECONDS, batch_of, kept_at, run, stepping
from harness import write

from soapstone import InferenceSession
from soapstone.frontend.app import load_app
from soapstone.frontend.strategies.finding import forward_of, graph_of
from soapstone.kernels.fallback import FallbackWarning
from soapstone.native.cuda.device import Device
from soapstone.native.cuda.timing import identity
from soapstone.search.cost.machine import RooflineCost

MODELS = {"lenet": 256, "resnet": 64, "bert": 16, "transformer": 32, "dlrm": 256, "rnntc": 64}
PRECISIONS = {
    "answer ms": ("float32", "tf32"),  # halves are what a graph says
    "step ms": ("float32", "tf32", "mixed_float16"),
    "estimated answer ms": ("float32",),
    "estimated step ms": ("float32",),
}
STEPS, ANSWERS = 12, 20
COLUMNS = ("model", "batch", "precision", "step ms", "estimated step ms")
COLUMNS += ("answer ms", "estimated answer ms")


class Figure(NamedTuple):
    """What is to be found of a model in a precision; what: a column."""

    model: str
    precision: str
    what: str


def step_ms(name: str, batch: int, precision: str) -> float:
    """Return the median milliseconds of a training step; the first ones compile and capture."""
    with stepping(name, batch, {}, gpus=1, precision=precision) as (_, step):
        return statistics.median([step() for _ in range(STEPS)][4:])


def answer_ms(name: str, batch: int, precision: str) -> float:
    """Return the median milliseconds of a session's answer."""
    times = []
    with load_app(name).build(batch) as model:
        x = batch_of(model.graph)
        with InferenceSession(model, gpus=1, precision=precision) as session:
            for _ in range(ANSWERS):
                start = time.perf_counter()
                session.run(x)
                times.append(time.perf_counter() - start)
    return statistics.median(times[4:]) * 1e3


def found(figure: Figure, machine: str) -> float:
    """Return a figure in milliseconds. machine: whose prices are asked for."""
    name, precision, what = figure
    batch = MODELS[name]
    if what == "step ms":
        return step_ms(name, batch, precision)
    if what == "answer ms":
        return answer_ms(name, batch, precision)
    if what == "estimated step ms":
        cost = RooflineCost(machine, training=True).cost(graph_of(name, batch), {})
    else:
        cost = RooflineCost(machine).cost(*forward_of(name, batch))
    return cost.time_us / 1e3


def in_process(figure: Figure, machine: str, seconds: float) -> dict[str, Any]:
    """Return {what: milliseconds} of a figure by a process of its own, or its error."""
    one = [sys.executable, "-W", "ignore", __file__, "--machine", machine, "--one", *figure]
    return gpu_figures.in_process(one, seconds)


def figures(models: Sequence[str]) -> list[Figure]:
    """Return the figures of models: those of a kind of all models before those of the next."""
    return [Figure(m, p, what) for what, of in PRECISIONS.items() for m in models for p in of]


def table(records: Mapping[Figure, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return a row for each model and precision, of the figures that there are."""
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    for (model, precision, what), record in records.items():
        row = {"model": model, "batch": MODELS[model], "precision": precision}
        row = rows.setdefault((model, precision), row)
        row[what] = record.get(what, record.get("error"))
    return list(rows.values())


def main() -> int:
    """Find what is missing, write the table, and return the exit code."""
    parser = common(__doc__, models=MODELS)
    parser.add_argument("--machine", default="h100", help="whose prices stand beside")
    parser.add_argument("--rows", type=Path, help="where figures are kept, a line each")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="that a figure may take")
    parser.add_argument("--one", nargs=3, metavar=("MODEL", "PRECISION", "WHAT"))
    taken = parser.parse_args()
    if taken.one:
        if "tf32" in taken.one:  # which only NVIDIA's libraries have
            warnings.simplefilter("error", FallbackWarning)
        print(json.dumps({taken.one[2]: found(Figure(*taken.one), taken.machine)}))
        return 0
    about = identity(Device(0))
    file = kept_at(taken.rows, "gpu_steps")
    wanted = figures(taken.models.split(","))
    records = run(wanted, file, about, lambda one: in_process(one, taken.machine, taken.seconds))
    failed = [figure for figure in wanted if "error" in records[figure]]
    print(f"{len(wanted)} figures, {len(failed)} of them failed")
    if not taken.no_write:
        command = f"python benchmarks/execution/gpu_steps.py --machine {taken.machine}"
        title = "Steps and answers on a GPU, and their prices"
        write("gpu_steps", title, f"{command}, on {about}", COLUMNS, table(records))
    return min(len(failed), 1)


if __name__ == "__main__":
    sys.exit(main())
