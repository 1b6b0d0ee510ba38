"""TensorOpt's figures 6 to 8 on described V100s, and what its section 5.1 says of them.

    python benchmarks/strategies/frontier_figures.py [--only 6,7,8] [--models rnn] [--draw]

| figure | frontiers |
|---|---|
| 6 | of three models on 16 devices (2 x 8), with baselines |
| 7 | of the Transformer: by hidden size, by the network, and on 8 devices by links inside |
| 8 | of two models on 4, 8 and 16 devices: the shortest steps, and what fits |

Each frontier is kept in `results/frontier_runs.json` as soon as it is there. `--draw` looks for
none: it draws those that are kept, and tells what they say. Updates are by plain gradient descent:
the paper counts parameters and activations, no states.
"""

from __future__ import annotations

import argparse
import json
import sys
import tomllib
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1]))

import frontier_claims
from harness import HERE, provenance, tabulate

from soapstone import SGD
from soapstone.apps.sequences import transformer
from soapstone.frontend.app import load_app
from soapstone.frontend.strategies.plot import (
    BASELINES,
    COLOURS,
    FRONTIER_AXES,
    beside,
    chart,
    devices_curve,
    frontier_curve,
    frontier_curves,
)
from soapstone.frontend.training.step_graph import training_graph
from soapstone.ir.graph import Graph
from soapstone.runtime import Machine
from soapstone.runtime.machines import cluster
from soapstone.search.parallel import ParallelError
from soapstone.search.parallel.exact.optcnn import optcnn
from soapstone.search.parallel.frontier.points import CostFrontier, FrontierPoint, cost_frontier
from soapstone.search.parallel.problem.prepare import prepare

BATCH = 256
STORE = HERE / "results" / "frontier_runs.json"
PICTURES = HERE.parent / "docs" / "pictures"
LARGE = dict(transformer.TENSOROPT)
MODELS: dict[str, tuple[str, dict[str, Any]]] = {  # of as many bytes as Table 1 says
    "rnn": ("rnnlm", {"hidden": 40_448}),
    "transformer": ("transformer", LARGE),
    "wide_resnet": ("wide_resnet", {}),
}
HIDDEN = LARGE["hidden"]
DEVICES = (4, 8, 16)
SIZES = (HIDDEN // 2, SMALLER := HIDDEN * 3 // 4, HIDDEN)
NETWORKS = {"v100@0.5": "no RDMA: half", "v100": "RDMA", "v100@4": "4x RDMA"}
INSIDE = {"v100": "NVLink", "v100-pcie": "PCIe"}
COLUMNS = ("memory_bytes", "time_us", "network_us", "compute_us")
COLUMNS += ("simulated_us", "simulated_bytes", "missing_bytes", "copied")


@dataclass(frozen=True)
class Run:
    """A frontier that figures need.

    Attributes:
        hidden: of a Transformer; 0: the model has its own. saving: by what memory may be saved.
    """

    model: str
    devices: int = 16
    machine: str = "v100"
    hidden: int = 0
    saving: str = ""

    @property
    def name(self) -> str:
        size = f" {self.hidden}" if self.hidden else ""
        saving = f" {self.saving}" if self.saving else ""
        return f"{self.model}{size} {self.machine} {self.devices}{saving}"

    def graph(self) -> Graph:
        """Return the training step."""
        app, sizes = MODELS[self.model]
        if self.hidden:
            sizes = sizes | {"hidden": self.hidden, "inner": 4 * self.hidden}
        found = load_app(app)
        with found.build(BATCH, **sizes) as model:
            forward = model.build(training=True)
            return training_graph(forward, found.options["loss"], SGD(0.1), ("accuracy",))

    def on(self) -> Machine:
        """Return the machine; of v100@4 all on the way between nodes is 4 times as fast."""
        name, _, rate = self.machine.partition("@")
        description = tomllib.loads((Path(cluster.__file__).parent / f"{name}.toml").read_text())
        way = [each for each in description["links"] if "nic" in chain(*each["ends"])]
        for each in (*way, description["network"]):
            each["bytes_per_s"] *= float(rate or 1)
        return cluster.cluster(description, self.devices)


def runs(figures: list[str], models: list[str], devices: list[int]) -> list[Run]:
    """Return what figures need, each once."""
    found: list[Run] = []
    if "6" in figures:
        found += [*(Run(model) for model in MODELS), Run("rnn", saving="copies")]
    if "7" in figures:
        found += [_sized(hidden) for hidden in SIZES]
        found += [Run("transformer", 16, machine, SMALLER) for machine in NETWORKS]
        found += [Run("transformer", 8, machine) for machine in INSIDE]
    if "8" in figures:
        found += [Run(model, n) for model in ("transformer", "wide_resnet") for n in devices]
    return [each for each in dict.fromkeys(found) if not models or each.model in models]


def _sized(hidden: int) -> Run:
    return Run("transformer", hidden=0 if hidden == HIDDEN else hidden)


# Frontiers that are kept


def kept(run: Run, found: CostFrontier) -> dict[str, Any]:
    """Return what is kept of a frontier: points as columns, and the degrees of some strategies."""
    fastest = found.fastest()
    for each in found.baselines.values():
        each.simulation  # noqa: B018  what it holds is asked for
    points = list(found.points)
    record: dict[str, Any] = asdict(run) | {
        "commit": provenance()["commit"],
        "operators": found.operators,
        "configurations": found.configurations,
        "error": round(found.error, 4),
        "tables_s": round(found.tables_s, 1),
        "seconds": round(found.seconds, 1),
        "turning_point": points.index(found.turning_point),
        "points": _columns(points),
        "mesh": _columns(found.mesh),
        "baselines": {name: _columns([each]) for name, each in found.baselines.items()},
        "fastest": None if fastest is None else _columns([fastest]),
    }
    turning = found.turning_point.strategy.configurations
    record["degrees"] = {name: str(dict(each.degrees)) for name, each in turning.items()}
    return record


def _columns(points: Iterable[FrontierPoint]) -> dict[str, list[int | None]]:
    """Return figures by name; those of a simulated step where it is known."""
    rows = [each.as_dict() for each in points]
    return {
        name: [None if row[name] is None else round(row[name]) for row in rows] for name in COLUMNS
    }


def _points(columns: dict[str, list[int]]) -> list[dict[str, Any]]:
    return [dict(zip(columns, row)) for row in zip(*columns.values())]


def stored() -> dict[str, dict[str, Any]]:
    """Return the frontiers that are kept, by their runs' names, points as `as_dict` says them."""
    found = json.loads(STORE.read_text()) if STORE.exists() else {}
    for each in found.values():
        each["points"], each["mesh"] = _points(each["points"]), _points(each["mesh"])
        each["baselines"] = {name: _points(b)[0] for name, b in each["baselines"].items()}
        each["fastest"] = each["fastest"] and _points(each["fastest"])[0]
    return found


def search(wanted: list[Run], eps: float) -> None:
    """Find frontiers and keep them."""
    for run in wanted:
        graph = run.graph()
        saving = [run.saving] if run.saving else []
        found = cost_frontier(graph, run.on(), eps=eps, saving=saving)
        print(run.name, found, sep="\n", flush=True)
        every = json.loads(STORE.read_text()) if STORE.exists() else {}
        every[run.name] = kept(run, found)
        if run in [Run(model) for model in MODELS]:
            with suppress(ParallelError):  # the graph is not linear enough for it
                every[run.name]["optcnn_us"] = optcnn(prepare(graph, run.on())).cost_us
        lines = [f"{json.dumps(name)}: {json.dumps(each)}" for name, each in every.items()]
        STORE.write_text("{\n" + ",\n".join(lines) + "\n}\n")


# Figures


def figure_6(have: dict[str, Any]) -> Iterator[str]:
    """Yield a chart a model."""
    for model in MODELS:
        found = have.get(Run(model).name)
        if found:
            yield chart(f"{model}, 16 devices", *FRONTIER_AXES, frontier_curves(found))


def figure_7(have: dict[str, Any]) -> Iterator[str]:
    """Yield three charts: sizes, networks, links inside."""
    panels: dict[str, dict[str, Run]] = {
        "Transformer by hidden size, 16 devices": {f"hidden {n}": _sized(n) for n in SIZES},
        f"Transformer of hidden {SMALLER} by network, 16 devices": {
            name: Run("transformer", 16, machine, SMALLER) for machine, name in NETWORKS.items()
        },
        "Transformer by links inside, 8 devices": {
            name: Run("transformer", 8, machine) for machine, name in INSIDE.items()
        },
    }
    for title, members in panels.items():
        curves = []
        for (name, run), colour in zip(members.items(), COLOURS):
            found = have.get(run.name)
            if found:
                curves.append(frontier_curve(name, colour, found["points"]))
                turning = found["points"][found["turning_point"]]
                curves.append(frontier_curve("", colour, [turning], "none"))
        if curves:
            yield chart(f"{title}; turning points", *FRONTIER_AXES, curves)


def figure_8(have: dict[str, Any]) -> Iterator[str]:
    """Yield a chart a model: times on each number of devices, and what fits of them."""
    for model in ("transformer", "wide_resnet"):
        found = {n: have[Run(model, n).name] for n in DEVICES if Run(model, n).name in have}
        if not found:
            continue
        shortest = {n: each["points"][-1] for n, each in found.items()}
        points = {"OptCNN (shortest)": shortest}
        points |= {
            name: {n: each["baselines"][key] for n, each in found.items()}
            for key, name in BASELINES.items()
        }
        curves = []
        for (name, each), colour in zip(points.items(), COLOURS):
            curves.append(devices_curve(name, colour, each, "time_us"))
            curves.append(devices_curve("its network", colour, each, "network_us", "dotted"))
        best = {}
        for n, each in found.items():
            saved = have.get(Run(model, n, saving="recompute").name, each)
            point = frontier_claims.fitting(each) or frontier_claims.fitting(saved)
            if point:
                best[n] = point
        fits = "fits 16 GiB" if best else "nothing fits 16 GiB"
        curves.append(devices_curve(fits, COLOURS[4], best, "time_us", "none"))
        yield chart(f"{model} by number of devices", "devices", FRONTIER_AXES[1], curves)


def draw() -> None:
    """Draw what is kept."""
    have = stored()
    for number, figure in (("6", figure_6), ("7", figure_7), ("8", figure_8)):
        charts = list(figure(have))
        if charts:
            PICTURES.mkdir(exist_ok=True)
            (PICTURES / f"frontier-{number}.svg").write_text(beside(charts))


def rows(have: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield a row a frontier: ends, turning point and baselines, by sums."""
    for name, found in have.items():
        points = found["points"]
        row: dict[str, Any] = {"frontier": name, "commit": found["commit"]}
        row |= {"points": len(points), "error": found["error"]}
        row |= {"tables s": found["tables_s"], "frontier s": found["seconds"]}
        ends = {"least": points[0], "turning": points[found["turning_point"]]}
        ends |= {"shortest": points[-1]} | found["baselines"]
        for which, each in ends.items():
            row[f"{which} GB"] = round(each["memory_bytes"] / 1e9, 2)
            row[f"{which} ms"] = round(each["time_us"] / 1e3, 1)
            row[f"{which} network ms"] = round(each["network_us"] / 1e3, 1)
        best = found["fastest"]
        row["fits ms"] = round(best["simulated_us"] / 1e3, 1) if best else "nothing fits"
        yield row


def main() -> None:
    """Find frontiers, draw them, and tell what they say."""
    parser = argparse.ArgumentParser(description="Figures 6 to 8 of TensorOpt")
    parser.add_argument("--only", default="6,7,8", help="figures whose frontiers are looked for")
    parser.add_argument("--models", default="", help="of these alone")
    parser.add_argument("--devices", default=",".join(map(str, DEVICES)), help="of figure 8")
    parser.add_argument("--eps", type=float, default=0.01, help="share above the exact frontier")
    parser.add_argument("--draw", action="store_true", help="look for no frontier")
    given = parser.parse_args()
    models = [name for name in given.models.split(",") if name]
    devices = [int(n) for n in given.devices.split(",")]
    if not given.draw:
        search(runs(given.only.split(","), models, devices), given.eps)
    draw()
    command = "python benchmarks/strategies/frontier_figures.py"
    have = stored()
    tabulate("frontier_figures", "Cost frontiers of figures 6 to 8, V100s", command, rows(have))
    said = frontier_claims.claims(have)
    tabulate("frontier_claims", "Section 5.1, asked of these frontiers", command, said)


if __name__ == "__main__":
    main()
