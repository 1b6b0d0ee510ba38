"""Exhaustive search against backtracking, with MetaFlow's substitutions (MetaFlow, Table 3).

    python benchmarks/optimization/metaflow_search.py [--models alexnet,resnet18] [--machine v100]

Both look for the cheapest graph by the same costs: measured ones of this machine, which are taken
in a first search that does not count, or those of a described device.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

sys.path.append(str(Path(__file__).resolve().parents[1]))

from arguments import common
from harness import write

from soapstone.apps.images import alexnet, inception, resnet, vgg
from soapstone.frontend.model import Model
from soapstone.frontend.optimization.optimize import cost_model
from soapstone.ir.tensor import Array, Role
from soapstone.search.optimize.search import Options, Searched, search
from soapstone.search.rules import rulefile
from soapstone.search.rules.metaflow import metaflow

MODELS = {  # how it is built, and the paper's seconds: exhaustive, backtracking
    "alexnet": (lambda: alexnet.build(1, image_size=224), 5.0, 0.1),
    "vgg16": (lambda: vgg.build(1, dropout=0.0), 2.3 * 60, 0.2),
    "inception module": (lambda: inception.module(1), 12.8 * 60, 0.29),
    "resnet18": (lambda: resnet.build(1, depth=18), 3.1 * 3600, 0.99),
}
METHODS = ("exhaustive", "backtracking")
PIECE = 14  # operators; the paper has 30, biases not counted
SAME = 0.99  # what costs less than this share is better; the search takes the rest for noise


def drawn(model: Model) -> tuple[Any, dict[str, Array]]:
    """Return the forward graph of a model, and seeded weights."""
    graph = model.build(1)
    random = np.random.default_rng(0)
    weights = {
        name: random.random(graph.tensors[name].shape, np.float32) + np.float32(0.5)
        for name, role in graph.roles.items()
        if role is not Role.INPUT
    }
    return graph, weights


def compared(name: str, machine: str | None, threads: int | None) -> dict[str, Any]:
    """Return what both methods find for a model, and how long they take."""
    build, *paper = MODELS[name]
    graph, weights = drawn(build())
    model = cost_model("soapstone", machine, weights, threads)
    book = metaflow(rulefile.load())
    found: dict[str, Searched] = {}
    seconds: dict[str, float] = {}
    for method in METHODS:
        options = Options(seconds=3600, method=method, piece=PIECE)
        for _ in range(1 if machine else 2):  # with a warm database the second time
            start = time.perf_counter()
            found[method] = search(graph, weights, book, model, options=options)
            seconds[method] = time.perf_counter() - start
    every, relaxed = (found[method] for method in METHODS)
    return {
        "model": name,
        "before us": every.before.time_us,
        "optimum us": every.after.time_us,
        "backtracking us": relaxed.after.time_us,
        "same": relaxed.after.time_us * SAME <= every.after.time_us,
        "certified": every.complete,
        "graphs": float(every.graphs),
        "priced": every.candidates,
        "exhaustive s": seconds["exhaustive"],
        "paper's s": paper[0],
        "seen by backtracking": relaxed.candidates,
        "backtracking s": seconds["backtracking"],
        "paper's s (backtracking)": paper[1],
    }


def main() -> None:
    parser = common(__doc__, models=MODELS, threads=None)
    parser.add_argument("--machine", help="a described device; its times are estimated")
    options = parser.parse_args()
    rows = []
    for name in options.models.split(","):
        rows.append(compared(name, options.machine, options.threads))
        print(rows[-1], flush=True)
    if not options.no_write:
        where = options.machine or "this machine"
        arguments = f" --machine {options.machine}" if options.machine else ""
        write(
            f"metaflow_search_{options.machine}" if options.machine else "metaflow_search",
            f"Exhaustive search and backtracking, MetaFlow's substitutions, {where}",
            f"python benchmarks/optimization/metaflow_search.py{arguments}",
            list(rows[0]),
            rows,
        )


if __name__ == "__main__":
    main()
