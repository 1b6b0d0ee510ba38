"""Data layouts and substitutions: the strategies of TASO's Figure 2.12, on soapstone's executor.

    python benchmarks/optimization/optimize_layouts.py [--models squeezenet,nasnet_a] [--seconds 40]

Each model is optimised in five ways, saved with its axis orders, and run from that file in a
process of its own, in turns with the others:

    plain          the original, every value in C order
    layouts        the original, axis orders chosen
    substitutions  rules chosen by what graphs cost in C order
    sequential     the same rules, then axis orders chosen
    joint          both at once

The first run measures launches; when their times are known, searches are short, and those that
`--seconds` cuts off are told in the column `unfinished`.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1]))

from arguments import FOLDER, common
from harness import in_turns, median, rounds_of, serve, tabulate
from models import arrays, export
from optimize import MODELS

from soapstone.ir.files.layouts import Layouts
from soapstone.system import usable_cores

WAYS = ("plain", "layouts", "substitutions", "sequential", "joint")


@dataclass(frozen=True)
class Way:
    """What a strategy made of a model; values without an axis order are in C order."""

    graph: Any
    weights: Mapping[str, Any]
    layouts: Layouts
    predicted_us: float
    turned: int = 0  # values for which an order was chosen
    complete: bool = True


def ways(name: str, options: argparse.Namespace) -> dict[str, Way]:
    """Return what each strategy makes of a model."""
    from soapstone.engine.lower import boundary_orders
    from soapstone.frontend.onnx import from_onnx
    from soapstone.frontend.optimization.optimize import all_orders, settled
    from soapstone.search.cost import ExecutorCost, Weights
    from soapstone.search.optimize.search import Options, search
    from soapstone.search.rules import rulefile
    from soapstone.search.rules.rulebook import rulebook

    model = from_onnx(export(name, options.folder))
    graph, _ = model.graph_for(arrays(name))
    weights = {n: a for n, a in model.weights.items() if n in graph.roles}
    rules = rulefile.load()
    book, none = rulebook(rules), rulebook(rules, 0)
    chosen = ExecutorCost(options.threads, weights=Weights.of(weights))
    flat = ExecutorCost(options.threads, weights=Weights.of(weights), rule=boundary_orders)
    limits = {"seconds": options.seconds}

    def way(found: Any, orders: Layouts | None = None) -> Way:
        new, held = settled(found.graph, found.constants)
        orders = all_orders(new, held, found.layouts) if orders is None else orders
        return Way(new, held, orders, found.after.time_us, len(found.layouts), found.complete)

    both = Options(layouts=True, **limits)
    layouts = search(graph, weights, none, chosen, options=both)
    rules_only = search(graph, weights, book, flat, options=Options(**limits))
    then = search(rules_only.graph, rules_only.constants, none, chosen, options=both)
    joint = search(graph, weights, book, chosen, options=both)
    return {
        "plain": Way(graph, weights, {}, rules_only.before.time_us),
        "layouts": way(layouts),
        "substitutions": way(rules_only, {}),
        "sequential": way(then),
        "joint": way(joint),
    }


def peer(kind: str, name: str, folder: Path, threads: int) -> None:
    """Be one way to run a model."""
    from soapstone import InferenceSession

    session = InferenceSession(folder / f"{name}.{kind}.onnx", threads=threads, tune="now")
    given = arrays(name)
    serve(rounds_of(lambda: session.run(given)))


def row_of(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Return the predicted and measured times of a model under every strategy."""
    from soapstone.frontend.onnx import to_onnx

    found = ways(name, options)
    command = [sys.executable, __file__, "--models", name, "--threads", str(options.threads)]
    with tempfile.TemporaryDirectory() as folder:
        for kind, way in found.items():
            to_onnx(
                way.graph, way.weights, Path(folder) / f"{name}.{kind}.onnx", layouts=way.layouts
            )
        command += ["--folder", folder, "--peer"]
        measured = in_turns({kind: [*command, kind] for kind in WAYS}, options.rounds)
    ms = {kind: median(measured[kind], "ms") for kind in WAYS}
    return {
        "model": name,
        **{f"{kind} ms": ms[kind] for kind in WAYS},
        **{f"{kind} predicted": found[kind].predicted_us / 1e3 for kind in WAYS},
        **{f"joint over {kind}": ms[kind] / ms["joint"] for kind in WAYS[:-1]},
        "unfinished": " ".join(kind for kind in WAYS if not found[kind].complete),
        "turned": " / ".join(
            str(found[kind].turned) for kind in ("layouts", "sequential", "joint")
        ),
    }


def main() -> None:
    parser = common(__doc__, models=MODELS, rounds=3, threads=usable_cores(), folder=FOLDER)
    parser.add_argument("--seconds", type=float, default=40.0, help="of each search")
    parser.add_argument("--peer", help="be this way to run the one model")
    options = parser.parse_args()
    names = options.models.split(",")
    if options.peer:
        peer(options.peer, names[0], options.folder, options.threads)
        return
    tabulate(
        "optimize_layouts",
        "Layouts and substitutions, batch 1",
        "python benchmarks/optimization/optimize_layouts.py",
        (row_of(name, options) for name in names),
        [f"joint over {kind}" for kind in WAYS[:-1]],
        not options.no_write,
    )


if __name__ == "__main__":
    main()
