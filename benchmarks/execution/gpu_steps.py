"""Training steps and inference of apps on this computer's GPU, and what they were priced at.

    python benchmarks/execution/gpu_steps.py [--models resnet,bert] [--machine h100] [--no-write]

An app at its own size in single precision, in TF32, and trained in mixed float16. "step ms" is the
median of training steps, "answer ms" that of a session's answers of the same batch, copies of
inputs and results included; "estimated" is what `--machine` prices the launches of each at.

Each figure has a process of its own, so that none of them suffers from the error of another, and
at most `--seconds`. It is a line of --rows as soon as it is there, and is not found again: a run
that was stopped goes on. What failed is told, and tried again by the next run, after all others.
The exit code is 1 where a figure failed.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

sys.path.append(str(Path(__file__).resolve().parents[1]))

from arguments import common
from harness import show, write

from soapstone import InferenceSession
from soapstone.frontend.app import load_app
from soapstone.frontend.strategies.finding import forward_of, graph_of
from soapstone.ir.graph import Graph
from soapstone.ir.tensor import Role
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
SECONDS = 180.0  # of a figure, most of which kernels take that are compiled for the first time


class Figure(NamedTuple):
    """What is to be found of a model in a precision; what: a column."""

    model: str
    precision: str
    what: str


def batch_of(graph: Graph, count: int) -> dict[str, np.ndarray[Any, Any]]:
    """Return numbers for the inputs of a forward graph, `count` batches of them."""
    rng, made = np.random.default_rng(5), {}
    for name in graph.inputs(Role.INPUT):
        spec = graph.tensors[name]
        shape = (count * spec.shape[0], *spec.shape[1:])
        whole = rng.integers(0, 2, shape).astype(spec.dtype)
        made[name] = rng.standard_normal(shape).astype(spec.dtype) if spec.is_float else whole
    return made


def step_ms(name: str, batch: int, precision: str) -> float:
    """Return the median milliseconds of a training step; the first ones compile and capture."""
    app, times = load_app(name), []
    with app.build(batch) as model:
        options = {k: app.options[k] for k in ("optimizer", "loss")}
        model.compile(**options, gpus=1, precision=precision)
        graph = model.training_graph
        (labels,) = [n for n in graph.inputs(Role.INPUT) if n not in model.graph.tensors]
        spec = graph.tensors[labels]
        x = batch_of(model.graph, 1)
        y = np.zeros(spec.shape, spec.dtype)
        given = x if len(x) > 1 else next(iter(x.values()))
        for _ in range(STEPS):
            start = time.perf_counter()
            model.fit(given, y, batch_size=batch, epochs=1, progress=False)
            times.append(time.perf_counter() - start)
    return statistics.median(times[4:]) * 1e3


def answer_ms(name: str, batch: int, precision: str) -> float:
    """Return the median milliseconds of a session's answer."""
    times = []
    with load_app(name).build(batch) as model:
        x: Mapping[str, np.ndarray[Any, Any]] = batch_of(model.graph, 1)
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
    try:
        done = subprocess.run(one, capture_output=True, text=True, timeout=seconds)
    except subprocess.TimeoutExpired:
        return {"error": f"not there after {seconds:g} s"}
    if done.returncode:
        said = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        return {"error": said[-1][:300]}
    return {figure.what: float(done.stdout.split()[-1])}


def figures(models: Sequence[str]) -> list[Figure]:
    """Return the figures of models: those of a kind of all models before those of the next."""
    return [Figure(m, p, what) for what, of in PRECISIONS.items() for m in models for p in of]


def run(
    wanted: Sequence[Figure], file: Path, gpu: str, find: Callable[[Figure], Mapping[str, Any]]
) -> dict[Figure, dict[str, Any]]:
    """Return all records of this GPU: those kept in a file, and those of figures it lacks.

    What failed is found again, after what was not tried.
    """
    lines = file.read_text().splitlines() if file.exists() else []
    records = [each for each in map(json.loads, lines) if each["gpu"] == gpu]
    kept = {
        Figure(*(each.pop(key) for key in ("model", "precision", "what"))): each for each in records
    }
    left = [each for each in wanted if each not in kept]
    left += [each for each in wanted if "error" in kept.get(each, ())]
    for figure in left:
        kept[figure] = {**find(figure), "gpu": gpu}
        line = {**figure._asdict(), **kept[figure]}
        with file.open("a") as out:
            out.write(json.dumps(line) + "\n")
        show(line)
    return kept


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
        print(found(Figure(*taken.one), taken.machine))
        return 0
    about = identity(Device(0))
    file = taken.rows or Path(tempfile.gettempdir()) / "soapstone" / "gpu_steps.jsonl"
    file.parent.mkdir(parents=True, exist_ok=True)
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
