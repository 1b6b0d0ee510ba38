"""What benchmarks of GPUs share: figures in processes of their own, kept as they come.

Each figure has a process of its own, so that none of them suffers from the error of another, and so
many seconds at most. It is a line of a file as soon as it is there, and is not found again: a run
that was stopped goes on. What failed is told, and tried again by the next run, after all others.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
from arguments import common
from harness import show, write

from soapstone.frontend.app import load_app
from soapstone.frontend.model import Model
from soapstone.ir.graph import Graph
from soapstone.ir.tensor import Array, Role
from soapstone.native.cuda.device import Device
from soapstone.native.cuda.timing import identity

SECONDS = 600.0  # of a figure, most of which kernels take that are compiled for the first time
TINY = {  # sizes of apps at which a GPU that is simulated ends
    "resnet": {"depth": 18, "width": 8, "classes": 4, "image_size": 32},
    "bert": {
        "layers": 1,
        "hidden": 32,
        "heads": 4,
        "length": 8,
        "vocabulary": 60,
        "positions": 16,
    },
    "dlrm": {"vocabularies": (3, 50, 70), "width": 8, "bottom": (16, 8), "top": (16, 1)},
    "resnext": {
        "width": 16,
        "groups": 4,
        "group_width": 4,
        "classes": 4,
        "image_size": 32,
        "blocks": (1, 1),
    },
    "nasnet": {"cells": 1, "channels": 96, "stem": 8, "classes": 4, "image_size": 32},
    "nasrnn": {"hidden": 16, "length": 2},
}


class Row(NamedTuple):
    """A figure that is all of a model; model: its name, after a colon a precision."""

    model: str


Figure = TypeVar("Figure", bound=Any)  # a NamedTuple of texts


def in_process(command: Sequence[str], seconds: float) -> dict[str, Any]:
    """Return what a command prints as JSON in its last line, or its error."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds)
    except subprocess.TimeoutExpired:
        return {"error": f"not there after {seconds:g} s"}
    if done.returncode:
        print(done.stderr[-4000:], flush=True)
        said = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        return {"error": said[-1][:300]}
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def run(
    wanted: Sequence[Figure], file: Path, gpu: str, find: Callable[[Figure], Mapping[str, Any]]
) -> dict[Figure, dict[str, Any]]:
    """Return all records of this GPU: those kept in a file, and those of figures it lacks.

    What failed is found again, after what was not tried.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    lines = file.read_text().splitlines() if file.exists() else []
    records = [each for each in map(json.loads, lines) if each["gpu"] == gpu]
    kind = type(wanted[0])
    kept = {kind(*(each.pop(key) for key in kind._fields)): each for each in records}
    left = [each for each in wanted if each not in kept]
    left += [each for each in wanted if "error" in kept.get(each, ())]
    for figure in left:
        kept[figure] = {**find(figure), "gpu": gpu}
        line = {**figure._asdict(), **kept[figure]}
        with file.open("a") as out:
            out.write(json.dumps(line) + "\n")
        show(line)
    return kept


def kept_at(rows: Path | None, table: str) -> Path:
    """Return the file in which the figures of a table are kept."""
    return rows or Path(tempfile.gettempdir()) / "soapstone" / f"{table}.jsonl"


def table_of(
    script: str,
    about: str,
    title: str,
    models: Sequence[str],
    find: Callable[[str, bool], Mapping[str, Any]],
) -> int:
    """Be the command that finds a row for each model; return its exit code, 1 where one failed.

    Args:
        script: its file, whose name is the table's. about: what it measures.
        find: returns the row of a model; the second argument: at tiny sizes.
    """
    parser = common(about, models=models)
    parser.add_argument("--rows", type=Path, help="where figures are kept, a line each")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="that a row may take")
    parser.add_argument("--tiny", action="store_true", help="sizes that only try the script")
    parser.add_argument("--one", help="find the row of this model, and print it")
    taken = parser.parse_args()
    if taken.one:
        print(json.dumps(find(taken.one, taken.tiny)))
        return 0
    path = Path(script)
    command = [sys.executable, "-W", "ignore", script, *["--tiny"] * taken.tiny, "--one"]
    gpu = identity(Device(0)) + ", tiny" * taken.tiny
    wanted = [Row(name) for name in taken.models.split(",")]
    records = run(
        *(wanted, kept_at(taken.rows, path.stem), gpu),
        lambda row: in_process([*command, row.model], taken.seconds),
    )
    failed = [row.model for row in wanted if "error" in records[row]]
    print(f"{len(wanted)} rows, {len(failed)} of them failed")
    if not (taken.no_write or taken.tiny):
        rows = [{**row._asdict(), **found} for row, found in records.items()]
        columns = [key for key in dict.fromkeys(key for row in rows for key in row) if key != "gpu"]
        where = path.relative_to(Path(__file__).parents[1])
        write(path.stem, title, f"python {where}, on {gpu}", columns, rows)
    return min(len(failed), 1)


def batch_of(graph: Graph) -> dict[str, Array]:
    """Return numbers for the inputs of a forward graph; integers are 0 and 1."""
    rng, made = np.random.default_rng(5), {}
    for name in graph.inputs(Role.INPUT):
        spec = graph.tensors[name]
        whole = rng.integers(0, 2, spec.shape).astype(spec.dtype)
        made[name] = rng.standard_normal(spec.shape).astype(spec.dtype) if spec.is_float else whole
    return made


@contextmanager
def stepping(
    name: str, batch: int, sizes: Mapping[str, Any], **options: Any
) -> Iterator[tuple[Model, Callable[[], float]]]:
    """Yield an app that is trained on one batch, and what takes a step and returns its ms.

    sizes: of the app. options: of `Model.compile`.
    """
    app = load_app(name)
    with app.build(batch, **sizes) as model:
        model.compile(**{k: app.options[k] for k in ("optimizer", "loss", "metrics")}, **options)
        graph = model.training_graph
        (labels,) = [n for n in graph.inputs(Role.INPUT) if n not in model.graph.tensors]
        spec = graph.tensors[labels]
        x, y = batch_of(model.graph), np.zeros(spec.shape, spec.dtype)
        given = x if len(x) > 1 else next(iter(x.values()))

        def step() -> float:
            start = time.perf_counter()
            model.fit(given, y, batch_size=batch, epochs=1, progress=False)
            return (time.perf_counter() - start) * 1e3

        yield model, step
