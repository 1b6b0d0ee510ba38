"""Training steps and inference of apps on this computer's GPU, and what they were priced at.

    python benchmarks/execution/gpu_steps.py [--models resnet,bert] [--machine h100] [--no-write]

An app at its own size in single precision, in float16 and in TF32. "step ms" is the median of
training steps, "answer ms" that of a session's answers of the same batch, copies of inputs and
results included; "estimated" is what `--machine` prices the launches of each at. Each row is kept
in --rows as soon as it is there, and is not measured again: a run that was stopped goes on.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

sys.path.append(str(Path(__file__).resolve().parents[1]))

from arguments import common
from harness import show, write

from soapstone import InferenceSession
from soapstone.frontend.app import load_app
from soapstone.frontend.strategies.finding import forward_of, graph_of
from soapstone.ir.graph import Graph
from soapstone.ir.tensor import Role
from soapstone.native.cuda.device import Device
from soapstone.native.cuda.timing import identity
from soapstone.search.cost.machine import RooflineCost

MODELS = {"lenet": 256, "resnet": 64, "bert": 16, "transformer": 32, "dlrm": 256, "rnntc": 64}
PRECISIONS = ("float32", "tf32", "float16")
STEPS, ANSWERS = 12, 20
COLUMNS = ("model", "batch", "precision", "step ms", "estimated step ms")
COLUMNS += ("answer ms", "estimated answer ms")


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


def row(name: str, batch: int, precision: str, machine: str) -> dict[str, Any]:
    """Return what an app takes, or what failed."""
    made: dict[str, Any] = {"model": name, "batch": batch, "precision": precision}
    for key, measured in (("step ms", step_ms), ("answer ms", answer_ms)):
        if key == "answer ms" and precision == "float16":
            continue  # halves are what a graph says
        try:
            made[key] = measured(name, batch, precision)
        except Exception as error:  # the next ones are told all the same
            made[f"{key} error"] = f"{type(error).__name__}: {error}"[:300]
    if precision == "float32":
        step = RooflineCost(machine, training=True).cost(graph_of(name, batch), {})
        answer = RooflineCost(machine).cost(*forward_of(name, batch))
        made["estimated step ms"], made["estimated answer ms"] = (
            each.time_us / 1e3 for each in (step, answer)
        )
    return made


def main() -> None:
    """Measure what is not yet, and write the table."""
    parser = common(__doc__, models=MODELS)
    parser.add_argument("--machine", default="h100", help="whose prices stand beside")
    parser.add_argument("--rows", type=Path, help="where rows are kept, a line each")
    taken = parser.parse_args()
    about = identity(Device(0))
    file = taken.rows or Path(tempfile.gettempdir()) / "soapstone" / "gpu_steps.jsonl"
    file.parent.mkdir(parents=True, exist_ok=True)
    lines = file.read_text().splitlines() if file.exists() else []
    kept = [each for each in map(json.loads, lines) if each["gpu"] == about]
    known = {(each["model"], each["precision"]) for each in kept}
    for name in taken.models.split(","):
        for precision in PRECISIONS:
            if (name, precision) in known:
                continue
            new = {**row(name, MODELS[name], precision, taken.machine), "gpu": about}
            with file.open("a") as out:
                out.write(json.dumps(new) + "\n")
            show(new)
            kept.append(new)
    if not taken.no_write and kept:
        command = f"python benchmarks/execution/gpu_steps.py --machine {taken.machine}"
        title = "Steps and answers on a GPU, and their prices"
        write("gpu_steps", title, f"{command}, on {about}", COLUMNS, kept)


if __name__ == "__main__":
    main()
