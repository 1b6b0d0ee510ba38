"""Cost frontiers of models: on described clusters, and against steps that run (TensorOpt, 5).

    python benchmarks/frontier_models.py [--only apps,fidelity] [--devices 16] [--samples 6]

| | |
|---|---|
| `apps` | points, ends, turning point and seconds on described V100s (Figure 6, Table 3) |
| `fidelity` | points with recomputation, on one processor here: what a step takes and holds |
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
from harness import tabulate

from soapstone.apps import resnet, transformer
from soapstone.frontend.strategies.finding import graph_of, machine_of, measure_tasks
from soapstone.ir.tensor import Role
from soapstone.search.parallel.frontier.points import FrontierPoint, cost_frontier

Row = dict[str, Any]
EPS = 0.01
STEPS = 8  # timed, of each point

APPS: dict[str, tuple[str, dict[str, Any], int]] = {
    "rnnlm": ("rnnlm", {}, 256),
    "transformer": ("transformer", dict(transformer.TENSOROPT), 256),
    "wide_resnet": ("wide_resnet", {}, 256),
}
HERE: dict[str, tuple[Any, dict[str, Any], int]] = {
    "transformer": (
        transformer,
        {"layers": 3, "hidden": 256, "heads": 4, "inner": 1024, "vocabulary": 1000},
        16,
    ),
    "resnet": (resnet, {"depth": 50, "image_size": 64, "classes": 10}, 8),
}


def apps(devices: int, only: list[str]) -> Iterator[Row]:
    """Yield a row a model, with recomputation and without."""
    for name in only or APPS:
        app, sizes, batch = APPS[name]
        graph, machine = graph_of(app, batch, sizes=sizes), machine_of("v100", devices)
        for recompute in (False, True):
            found = cost_frontier(graph, machine, eps=EPS, recompute=recompute)
            row: Row = {"model": name, "recomputation": "yes" if recompute else "no"}
            row |= {"operators": found.operators, "configurations": found.configurations}
            row |= {"points": len(found.points), "error": round(found.error, 4)}
            row |= {"tables s": round(found.tables_s, 1), "frontier s": round(found.seconds, 1)}
            ends = {"least": found.points[0], "turning": found.turning_point}
            ends |= {"shortest": found.points[-1], "data": found.baselines["data"]}
            for which, point in ends.items():
                row[f"{which} GB"] = round(point.memory_bytes / 1e9, 3)
                row[f"{which} ms"] = round(point.time_us / 1e3, 2)
            yield row


def fidelity(samples: int, only: list[str]) -> Iterator[Row]:
    """Yield a row a sampled point: sums, simulation, and a step that runs."""
    for name in only or HERE:
        app, sizes, batch = HERE[name]
        graph, machine = graph_of(name, batch, sizes=sizes), machine_of("local", 1)
        measure_tasks(graph, machine)
        points = cost_frontier(graph, machine, eps=EPS, recompute=True).points
        lasting = sum(graph.tensors[value].nbytes for value in graph.inputs(Role.PARAMETER))
        for at in np.linspace(0, len(points) - 1, min(samples, len(points))).astype(int):
            point = points[at]
            step_us, peak = run(app, sizes, batch, graph, point)
            yield {
                "model": name,
                "operators recomputed": point.recomputed,
                "MB by sums": round(point.memory_bytes / 1e6, 1),
                "MB simulated": round(point.simulated_bytes / 1e6, 1),
                "MB measured": round(peak / 1e6, 1),
                "MB of parameters": round(lasting / 1e6, 1),
                "memory ratio": round(point.simulated_bytes / peak, 3),
                "ms simulated": round(point.simulated_us / 1e3, 2),
                "ms measured": round(step_us / 1e3, 2),
                "time ratio": round(point.simulated_us / step_us, 3),
            }


def run(
    app: Any, sizes: dict[str, Any], batch: int, graph: Any, point: FrontierPoint
) -> tuple[float, int]:
    """Return the median time of a step, and the most bytes it holds."""
    random, options = np.random.default_rng(0), app.OPTIONS
    with app.build(batch, **sizes) as model:
        model.compile(
            options["optimizer"],
            loss=options["loss"],
            metrics=options["metrics"],
            cpus=1,
            strategy=point.strategy,
        )
        x = {
            name: random.integers(0, 10, graph.tensors[name].shape).astype(
                graph.tensors[name].dtype
            )
            for name in model.graph.inputs(Role.INPUT)
        }
        y = np.zeros(graph.tensors["labels"].shape, np.int32)
        model.fit(x, y, progress=False)
        took = []
        for _ in range(STEPS):
            began = time.perf_counter()
            model.fit(x, y, progress=False)
            took.append((time.perf_counter() - began) * 1e6)
        return statistics.median(took), int(model.statistics["peak_bytes"])


def main() -> None:
    """Write the tables that are asked for."""
    parser = argparse.ArgumentParser(description="Cost frontiers of models")
    parser.add_argument("--only", default="apps,fidelity")
    parser.add_argument("--models", default="")
    parser.add_argument("--devices", type=int, default=16)
    parser.add_argument("--samples", type=int, default=6)
    parser.add_argument("--no-write", action="store_true")
    given = parser.parse_args()
    only = [name for name in given.models.split(",") if name]
    made = {
        "apps": (apps, given.devices, "Cost frontiers on described V100s", ()),
        "fidelity": (
            *(fidelity, given.samples, "Points of frontiers against steps that run"),
            ("memory ratio", "time ratio"),
        ),
    }
    for name in given.only.split(","):
        rows, count, title, ratios = made[name]
        command = f"frontier_models.py --only {name}"
        save = not given.no_write
        tabulate(f"frontier_{name}", title, command, rows(count, only), ratios, save)


if __name__ == "__main__":
    main()
