"""Cost frontiers of models on described clusters (TensorOpt, section 5).

    python benchmarks/strategies/frontier_models.py [--only apps] [--devices 16]

| | |
|---|---|
| `apps` | points, ends, turning point and seconds on described V100s (Figure 6, Table 3) |

Points against steps that run here: `frontier_fidelity.py`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1]))

from arguments import common
from harness import tabulate

from soapstone.apps.sequences import transformer
from soapstone.frontend.strategies.finding import graph_of, machine_of
from soapstone.search.parallel.frontier.points import cost_frontier

Row = dict[str, Any]
EPS = 0.01

APPS: dict[str, tuple[str, dict[str, Any], int]] = {
    "rnnlm": ("rnnlm", {}, 256),
    "transformer": ("transformer", dict(transformer.TENSOROPT), 256),
    "wide_resnet": ("wide_resnet", {}, 256),
}


def apps(devices: int, only: list[str]) -> Iterator[Row]:
    """Yield a row a model, with recomputation and without."""
    for name in only or APPS:
        app, sizes, batch = APPS[name]
        graph, machine = graph_of(app, batch, sizes=sizes), machine_of("v100", devices)
        for recompute in (False, True):
            found = cost_frontier(
                graph, machine, eps=EPS, saving=("recompute",) if recompute else ()
            )
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


def main() -> None:
    """Write the tables that are asked for."""
    parser = common("Cost frontiers of models", only="apps", models="")
    parser.add_argument("--devices", type=int, default=16)
    given = parser.parse_args()
    only = [name for name in given.models.split(",") if name]
    made = {
        "apps": (apps, given.devices, "Cost frontiers on described V100s", ()),
    }
    for name in given.only.split(","):
        rows, count, title, ratios = made[name]
        command = f"frontier_models.py --only {name}"
        save = not given.no_write
        tabulate(f"frontier_{name}", title, command, rows(count, only), ratios, save)


if __name__ == "__main__":
    main()
