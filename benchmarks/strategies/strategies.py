"""Strategies found by simulation on described clusters (FlexFlow: Jia, chapter 3).

    python benchmarks/strategies/strategies.py --only times,... [--models alexnet,nmt]

| | |
|---|---|
| `times` | seconds of search with the paper's stop rule (Table 3.4), and ten times as many |
| `rates` | proposals a second in searches that begin anew, by chains |
| `delta` | proposals a second: delta, full (derived where changed), rebuilt (messages anew) |
| `clusters` | found strategies against data parallelism and experts' (Figures 3.6, 3.8) |
| `transfers` | bytes moved and computation of one step by strategy (Figure 3.7) |
| `claims` | what section 3.7.6 says of the strategies found |
| `placement` | against a search that places whole operators only, ColocRL's space (Figure 3.9) |
| `progress` | best strategy by seconds, this search and the paper's algorithm (Figure 3.13) |
| `exact` | optimum with certificate, and when Markov chains reach it (section 3.8.4) |
| `curves` | losses of training under different strategies, run here |
| `scale` | 512 devices, a Transformer of 48 layers |

All but `curves` is simulated, on a roofline of the devices; nothing is measured on a cluster.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1]))

from arguments import common
from harness import tabulate
from training_curves import curves

from soapstone.frontend.strategies.finding import graph_of
from soapstone.ir.graph import Graph
from soapstone.ir.strategy.configuration import Configuration
from soapstone.runtime.machines.cluster import load_machine
from soapstone.search.parallel import NAMED, Options, Simulator, StrategyResult, search
from soapstone.search.parallel.mcmc import proposals
from soapstone.search.parallel.methods import method_named
from soapstone.search.parallel.problem.prepare import prepare
from soapstone.system import peak_bytes

Row = dict[str, Any]

# An app, its sizes, samples a device, and the paper's seconds (full, delta) at 4 to 64 GPUs.
MODELS: dict[str, tuple[str, dict[str, Any], int]] = {
    "alexnet": ("alexnet", {}, 256),
    "resnet101": ("resnet", {"depth": 101}, 64),
    "inception_v3": ("inception", {}, 64),
    "rnntc": ("rnntc", {"unrolled": True}, 64),
    "rnnlm": ("rnnlm", {"unrolled": True}, 64),
    "nmt": ("nmt", {"unrolled": True}, 64),
    "dlrm": ("dlrm", {}, 256),
    "candle_uno": ("candle_uno", {}, 64),
}
PAPER_DELTA_S = {  # Table 3.4, at 4, 8, 16, 32 and 64 devices
    "alexnet": (0.04, 0.13, 0.48, 1.8, 5.9),
    "resnet101": (0.4, 1.4, 7.3, 33, 158),
    "inception_v3": (4.1, 17, 77, 298, 1278),
    "rnntc": (7.5, 39, 170, 516, 1489),
    "rnnlm": (9.2, 31, 121, 342, 969),
    "nmt": (16, 65, 328, 701, 2190),
}
PAPER_OVER_DATA = {  # section 3.7.2, which gives a range, and section 3.7.3
    "resnet101": "about 1",
    **dict.fromkeys(("alexnet", "inception_v3", "rnntc", "rnnlm", "nmt"), "1.3 to 3.3"),
    "dlrm": "up to 10",
    "candle_uno": "up to 7.8",
}
SIX = tuple(PAPER_DELTA_S)
DEVICES = (4, 8, 16, 32, 64)
CLUSTERS = (("p100", 16), ("k80", 64))
SUMMIT = (("dlrm", 96), ("candle_uno", 96))
PAPERS = Options(
    moves=proposals.PLAIN, initial=("data",), blocks=False, computers=False, descent=False
)
PLACEMENT = Options(
    moves={proposals.DEVICES: 1.0},
    initial=("model",),
    random=0,
    blocks=False,
    computers=False,
    descent=False,
)
PAIRS = 3  # of runs with delta and with full simulation, in turns
MOMENTS = (0.5, 1, 2, 5, 10, 20, 30, 60, 120)


def model_of(name: str, devices: int) -> Graph:
    app, sizes, each = MODELS[name]
    return graph_of(app, each * devices, sizes=sizes)


class Tables:
    """The tables, each a function that yields its rows."""

    def __init__(self, given: argparse.Namespace) -> None:
        self.given = given
        self.devices = tuple(map(int, given.devices.split(","))) if given.devices else ()

    def names(self, default: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(self.given.models.split(",")) if self.given.models else default

    def search(self, graph: Graph, machine: str, devices: int, **given: Any) -> StrategyResult:
        where = load_machine(machine, devices)
        options = Options(**{"seconds": self.given.seconds, "seed": self.given.seed, **given})
        return search(graph, where, options)

    def times(self) -> Iterator[Row]:
        self.search(model_of("alexnet", 4), "p100", 4, seconds=1.0)  # compiled code is loaded
        for name in self.names(SIX):
            for devices in self.devices or DEVICES:
                graph = model_of(name, devices)
                found = self.search(graph, "p100", devices)
                most = min(10 * found.seconds, self.given.longer)
                long = {"seconds": most, "patience": 1.0, "seed": self.given.seed + 1}
                longer = self.search(graph, "p100", devices, **long)
                paper = PAPER_DELTA_S[name][DEVICES.index(devices)]
                step, best = found.simulation.step_us, longer.simulation.step_us
                yield {
                    "model": name,
                    "devices": devices,
                    "search s": found.seconds,
                    "paper's s": paper,
                    "best found after s": found.history[-1][0],
                    "proposals": found.proposals,
                    "proposals/s": found.proposals / found.seconds,
                    "step ms": step / 1e3,
                    "longer search s": longer.seconds,
                    "its step ms": best / 1e3,
                    "missed": step / best - 1.0,
                    "above bound": found.simulation.gap,
                    "over data": found.speedup_over_data_parallel,
                }

    def rates(self) -> Iterator[Row]:
        for name in self.names(("nmt",)):
            for devices in self.devices or (4, 64):
                graph = model_of(name, devices)
                for chains in (1, 2):
                    found = self.search(graph, "p100", devices, chains=chains, patience=1.0)
                    yield {
                        "model": name,
                        "devices": devices,
                        "chains": chains,
                        "seconds": found.seconds,
                        "proposals": found.proposals,
                        "proposals/s": found.proposals / found.seconds,
                        "in 60 s": 60 * found.proposals / found.seconds,
                        "step ms": found.simulation.step_us / 1e3,
                    }

    def delta(self) -> Iterator[Row]:
        for name in self.names(SIX):
            for devices in self.devices or (4, 16, 64):
                graph = model_of(name, devices)
                given = {"seconds": None, "proposals": 400 if devices > 16 else 2000}
                plain = {
                    **given,
                    "blocks": False,
                    "computers": False,
                    "descent": False,
                    "patience": 1.0,
                }
                self.search(graph, "p100", devices, **{**plain, "proposals": 10})
                runs: dict[str, list[StrategyResult]] = {"delta": [], "full": []}
                for _ in range(PAIRS):
                    for mode, made in runs.items():
                        made.append(self.search(graph, "p100", devices, simulation=mode, **plain))
                rate = {
                    mode: statistics.median(each.proposals / each.seconds for each in made)
                    for mode, made in runs.items()
                }
                rebuilt = self.rebuilt(graph, devices)
                assert runs["delta"][0].simulation == runs["full"][0].simulation
                yield {
                    "model": name,
                    "devices": devices,
                    "delta, proposals/s": rate["delta"],
                    "full, proposals/s": rate["full"],
                    "rebuilt, proposals/s": rebuilt,
                    "delta over full": rate["delta"] / rate["full"],
                    "delta over rebuilt": rate["delta"] / rebuilt,
                    "tasks skipped": runs["delta"][0].skipped,
                }

    def rebuilt(self, graph: Graph, devices: int) -> float:
        """Return how many strategies a second are simulated with all messages made anew."""
        simulator = Simulator(prepare(graph, load_machine("p100", devices)))
        simulator.step_ns(NAMED["data"](simulator.model))
        begin, count = time.perf_counter(), 0
        while time.perf_counter() - begin < 3.0:
            simulator.settled.settle()
            simulator.settled_ns()
            count += 1
        return count / (time.perf_counter() - begin)

    def clusters(self) -> Iterator[Row]:
        jobs = [(name, *where) for where in CLUSTERS for name in self.names(SIX)]
        if not self.given.models:
            jobs += [(name, "summit", devices) for name, devices in SUMMIT]
        for name, machine, devices in jobs:
            graph = model_of(name, devices)
            found = self.search(graph, machine, devices, patience=1.0)
            data = self.simulated(graph, machine, devices, "data")
            expert = self.simulated(graph, machine, devices, "expert")
            step = found.simulation.step_us
            yield {
                "model": name,
                "machine": f"{machine}, {devices}",
                "step ms": step / 1e3,
                "over data": data.step_us / step,
                "paper's": PAPER_OVER_DATA[name],
                "at most": data.step_us / found.simulation.lower_bound_us,
                "data fits": not data.missing_bytes,
                "over expert": expert.step_us / step,
                "above bound": found.simulation.gap,
                "MB moved": found.simulation.bytes_moved / 1e6,
                "less moved than data": data.bytes_moved / max(1, found.simulation.bytes_moved),
                "less moved than expert": expert.bytes_moved / max(1, found.simulation.bytes_moved),
                "search s": found.seconds,
            }

    def simulated(self, graph: Graph, machine: str, devices: int, name: str) -> Any:
        simulator = Simulator(prepare(graph, load_machine(machine, devices)))
        return simulator.simulate(NAMED[name](simulator.model))

    def transfers(self) -> Iterator[Row]:
        for name in self.names(("nmt",)):
            for machine, devices in CLUSTERS:
                graph = model_of(name, devices)
                found = {
                    kind: self.simulated(graph, machine, devices, kind)
                    for kind in ("data", "expert")
                }
                best = self.search(graph, machine, devices, patience=1.0)
                found["found"] = best.simulation
                for kind, each in found.items():
                    yield {
                        "model": name,
                        "machine": f"{machine}, {devices}",
                        "strategy": kind,
                        "step ms": each.step_us / 1e3,
                        "MB moved": each.bytes_moved / 1e6,
                        "MB of parameters": each.bytes_synchronized / 1e6,
                        "computation ms, all devices": each.compute_us / 1e3,
                        "busy": each.compute_us / each.step_us / devices,
                    }

    def claims(self) -> Iterator[Row]:
        """What section 3.7.6 says of the strategies it found, asked of those found here."""
        app, sizes, each = MODELS["inception_v3"]
        graph = graph_of(app, 4 * each, sizes=sizes)
        data = self.simulated(graph, "p100", 4, "data")
        found = self.search(graph, "p100", 4, patience=1.0).simulation
        less = 1.0 - found.bytes_synchronized / data.bytes_synchronized
        faster = 1.0 - found.step_us / data.step_us
        about = {"model": "inception_v3", "machine": "p100, 4"}
        said = "parameters synchronized by 75 % less than by data parallelism"
        yield {**about, "claim": said, "here": f"{less:.0%}", "true": less > 0.5}
        yield {
            **about,
            "claim": "a step 12 % shorter",
            "here": f"{faster:.0%}",
            "true": faster > 0.1,
        }
        share = self.adjacent(self.search(graph, "k80", 4, patience=1.0), graph)
        yield {
            "model": "inception_v3",
            "machine": "k80, 4",
            "claim": "adjacent devices preferred: more than a third of what is copied goes there",
            "here": f"{share:.0%}",
            "true": share > 1 / 3,
        }
        app, sizes, each = MODELS["nmt"]
        graph = graph_of(app, 4 * each, sizes=sizes)
        chosen = self.search(graph, "p100", 4, patience=1.0).strategy.configurations
        kinds: dict[str, list[tuple[str, Configuration]]] = {}
        for node in graph.nodes:
            if node.origin is None and node.name in chosen:
                item = chosen[node.name]
                kinds.setdefault(node.operator, []).append((node.name, item))
        about = {"model": "nmt", "machine": "p100, 4"}
        embeds = [len(set(item.devices)) for _, item in kinds.get("embedding", [])]
        yield {
            **about,
            "claim": "embeddings on one device",
            "here": f"on {embeds} devices",
            "true": bool(embeds) and max(embeds) == 1,
        }
        outputs = [item for name, item in kinds.get("linear", []) if name.startswith("output")]
        split = sum(item.degrees.get("n", 1) > 1 for item in outputs)
        yield {
            **about,
            "claim": "softmax layers split over parameters",
            "here": f"{split} of {len(outputs)} steps, e.g. {outputs[0] if outputs else ''}",
            "true": split > len(outputs) / 2,
        }
        cells = [item for _, item in kinds.get("lstm_cell", [])]
        alone = sum(len(set(item.devices)) < 4 for item in cells)
        yield {
            **about,
            "claim": "recurrent layers run beside each other, on parts of the devices",
            "here": f"{alone} of {len(cells)} cells on fewer than 4",
            "true": alone > len(cells) / 2,
        }

    def adjacent(self, found: StrategyResult, graph: Graph) -> float:
        """Return the share of copied bytes that goes between devices next to each other."""
        simulator = Simulator(prepare(graph, load_machine("k80", 4)))
        simulator.step_ns(found.strategy.configurations)
        p, c = simulator.problem, simulator.settled.choice
        rows = c.live[(c.live["source"] >= 0) & (c.live["source"] != c.live["target"])]
        pairs = rows["source"] * 4 + rows["target"]
        hops = (p.route_ptr[1:] - p.route_ptr[:-1])[pairs]
        near = rows["moved"][hops == hops.min(initial=99)].sum()
        return float(near / max(1, rows["moved"].sum()))

    def placement(self) -> Iterator[Row]:
        for name in self.names(("inception_v3", "nmt")):
            for devices in self.devices or (4,):
                app, sizes, each = MODELS[name]
                graph = graph_of(app, each, sizes=sizes)
                where = load_machine("k80", devices)
                whole = replace(PLACEMENT, seconds=self.given.seconds, seed=self.given.seed)
                only = search(graph, where, whole)
                found = self.search(graph, "k80", devices)
                yield {
                    "model": name,
                    "machine": f"k80, {devices}",
                    "operators placed, ms": only.simulation.step_us / 1e3,
                    "all dims, ms": found.simulation.step_us / 1e3,
                    "speedup": only.simulation.step_us / found.simulation.step_us,
                    "proposals": f"{only.proposals} and {found.proposals}",
                }

    def progress(self) -> Iterator[Row]:
        for name in self.names(SIX):
            for devices in self.devices or (16,):
                graph = model_of(name, devices)
                common = {"seconds": self.given.seconds, "patience": 1.0, "seed": self.given.seed}
                ways = {
                    "this search": Options(**common),
                    "the paper's, delta": replace(PAPERS, **common),
                    "the paper's, full": replace(PAPERS, simulation="full", **common),
                }
                for way, options in ways.items():
                    found = search(graph, load_machine("p100", devices), options)
                    row: Row = {"model": name, "devices": devices, "way": way}
                    for moment in MOMENTS:
                        if moment <= self.given.seconds:
                            costs = [us for s, us in found.history if s <= moment]
                            row[f"ms at {moment} s"] = min(costs, default=float("nan")) / 1e3
                    row["proposals/s"] = found.proposals / found.seconds
                    yield row

    def exact(self) -> Iterator[Row]:
        steps = {"unrolled": True, "length": 2}
        jobs = [  # the paper's hours are those of 4 devices
            ("lenet", graph_of("lenet", 64), 2, ""),
            ("rnnlm, 2 steps", graph_of("rnnlm", 64, sizes=steps), 2, ""),
            ("lenet", graph_of("lenet", 64), 4, 0.8 * 3600),
            ("rnnlm, 2 steps", graph_of("rnnlm", 64, sizes=steps), 4, 18 * 3600),
        ]
        for name, graph, devices, paper in jobs:
            where = load_machine("p100", devices)
            chains = search(graph, where, Options(seconds=5.0, patience=1.0))
            for method in ("optimum", "exhaustive"):
                found = method_named(method)(graph, where, Options(seconds=self.given.seconds))
                reached = [s for s, us in chains.history if us <= found.simulation.step_us]
                said = found.certificate
                assert said is not None
                yield {
                    "model": name,
                    "devices": devices,
                    "strategies": said.space,
                    "method": method,
                    "seconds": said.seconds,
                    "of them tables": said.prepared,
                    "paper's s": paper,
                    "proved": said.complete,
                    "best us": found.simulation.step_us,
                    "of equal parts of results": said.inside,
                    "bound us": said.bound_ns / 1e3,
                    "gap": found.simulation.gap,
                    "begun": said.visited,
                    "simulated": said.simulated,
                    "chains reach it after s": reached[0] if reached else "",
                    "chains' best us": chains.simulation.step_us,
                }

    def curves(self) -> Iterator[Row]:
        return curves(self.given.seed)

    def scale(self) -> Iterator[Row]:
        devices = self.devices[0] if self.devices else 512
        sizes = {"layers": 24, "hidden": 1024, "heads": 16, "inner": 4096, "dropout": 0.0}
        graph = graph_of("transformer", 8 * devices, sizes=sizes)  # 24 encode, 24 decode
        where = load_machine("v100", devices)
        begin = time.perf_counter()
        found = search(graph, where, Options(seconds=self.given.seconds, seed=self.given.seed))
        best = min(found.initial_us[name] for name in NAMED if name in found.initial_us)
        yield {
            "model": "transformer, 48 layers",
            "devices": devices,
            "seconds": time.perf_counter() - begin,
            "peak MB": peak_bytes() / 1e6,
            "step ms": found.simulation.step_us / 1e3,
            **{f"{name} ms": us / 1e3 for name, us in found.initial_us.items()},
            "over the best of them": best / found.simulation.step_us,
            "above bound": found.simulation.gap,
            "proposals": found.proposals,
        }


TITLES = {
    "times": "Seconds of search for strategies, described P100 cluster",
    "rates": "Proposals a second, described P100 cluster",
    "delta": "Delta and full simulation, described P100 cluster",
    "clusters": "Strategies found against data parallelism and experts, described clusters",
    "transfers": "What one step moves and computes, by strategy, described clusters",
    "claims": "Section 3.7.6, asked of the strategies found here",
    "placement": "Whole operators placed, and all dims searched, described K80 node",
    "progress": "Best strategy by seconds of search, described P100 cluster",
    "exact": "Optimal strategies with certificate, described P100 node",
    "curves": "Training curves under different strategies, run here",
    "scale": "A strategy for 512 described V100",
}
MEANS = {"clusters": ["over data", "over expert"], "placement": ["speedup"]}


def main() -> None:
    parser = common(__doc__, only=TITLES, models="", seed=0)
    parser.add_argument("--devices", default="", help="numbers of devices, where a table has them")
    parser.add_argument("--seconds", type=float, default=60.0, help="of one search, at most")
    parser.add_argument("--longer", type=float, default=600.0, help="most of ten times as long")
    given = parser.parse_args()
    tables = Tables(given)
    for only in given.only.split(","):
        command = (
            f"python benchmarks/strategies/strategies.py --only {only} --seconds {given.seconds:g}"
        )
        if only == "times":
            command += f" --longer {given.longer:g}"
        rows = getattr(tables, only)()
        save = not given.no_write
        tabulate(f"strategies_{only}", TITLES[only], command, rows, MEANS.get(only, ()), save)


if __name__ == "__main__":
    main()
