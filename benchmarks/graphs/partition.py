"""Steps of a GCN over graphs in parts: cuts that are learned, against equal vertices and edges.

    python benchmarks/graphs/partition.py [--vertices N] [--edges N] [--rounds N]

Two workers, and two ranks of MPI, are timed: the same network at each of the three cuts, in turns,
so that what else runs on the machine slows all alike. A step is as long as its slowest parts, layer
by layer, of which the least times of all turns count, since others only make tasks longer; what the
wall says stands beside it. 8 and 16 parts are simulated: two workers compute all of them, each part
by itself, and the times are those that cuts were chosen by, so no baseline can be better. Messages
count nothing there, and graphs are twice as large. Graphs that were never run are cut by what was
learned of another. Where pymetis is installed, graphs that METIS has numbered are timed as well, in
rounds of their own.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from harness import tabulate

from soapstone import Adam, Model
from soapstone.apps.graphs import gcn
from soapstone.engine.peers import Peers
from soapstone.frontend.graphs.dataset import GraphData
from soapstone.frontend.graphs.generate import Shape, block_model, rmat
from soapstone.frontend.graphs.metis import renumbered_by_metis
from soapstone.frontend.graphs.partitioned import Partitioned, layers_of, spent_ns
from soapstone.frontend.training.state import Callback, TrainingState
from soapstone.ir.tensor import Array
from soapstone.mappers.ranges import RangesMapper
from soapstone.runtime.machines.start import rank_of
from soapstone.search.partition.cuts import Cuts, equal_edges, equal_vertices
from soapstone.search.partition.partitioner import Partitioner, slowest

FEATURES, HIDDEN, CLASSES = 128, 64, 8
STEPS, EPOCHS = 10, 205  # of a turn; of learning, at most
GRAPHS = ("R-MAT", "R-MAT, shuffled", "blocks by class", "blocks, hubs first", "blocks, shuffled")
SKEWED = ("R-MAT", "blocks, hubs first")
RATIOS = ("vertex / learned", "edge / learned", "better / learned")


def graph(name: str, vertices: int, edges: int, seed: int = 0) -> GraphData:
    """Return a graph by name, with features and labels."""
    random = np.random.default_rng(seed)
    if name.startswith("R-MAT"):
        made = rmat(vertices, edges, seed=seed)
        features = random.standard_normal((vertices, FEATURES), np.float32)
        labels = random.integers(0, CLASSES, vertices).astype(np.int32)
        every = np.arange(vertices)
        data = GraphData(name, made, features, labels, {"train": every, "test": every})
        order = random.permutation(vertices) if "shuffled" in name else every
    else:
        data = block_model(Shape(vertices, edges, FEATURES, CLASSES), skew=1.8, seed=seed)
        assert data.labels is not None
        order = np.arange(vertices)
        if "class" in name:
            order = np.argsort(data.labels, kind="stable")
        elif "hubs" in name:
            order = np.argsort(-data.adjacency.in_degrees, kind="stable")
    return data.renumbered(order)


def network(data: GraphData) -> Model:
    return gcn.build(data.adjacency.vertices, data, hidden=HIDDEN)


def train(model: Model, data: GraphData, epochs: int, **how: Any) -> None:
    splits, callbacks = data.splits(), how.pop("callbacks", ())
    model.compile(Adam(0.01), "masked_cross_entropy", **how)
    given = {"epochs": epochs, "shuffle": False, "progress": False, "callbacks": callbacks}
    model.fit(splits.train_x, splits.train_y, **given)


class Settled(Callback):
    """Ends training when cuts are settled."""

    def __init__(self, partitioner: Partitioner) -> None:
        self.partitioner = partitioner

    def on_step_end(self, state: TrainingState) -> None:
        """Stop, if they are."""
        state.stop = self.partitioner.settled


def learned(data: GraphData, parts: int, executor: str, costs: str | None = None) -> Partitioner:
    """Return what is learned while a network trains: by two workers or ranks."""
    with network(data) as model:
        split = Partitioned(model, data.adjacency, parts, costs=costs)
        cpus = 1 if executor == "mpi" else 2
        how = {"mapper": split.mapper, "executor": executor, "cpus": cpus}
        train(model, data, EPOCHS, callbacks=[split, Settled(split.partitioner)], **how)
        split.save()
    return split.partitioner


def accuracy(partitioner: Partitioner) -> dict[str, Any]:
    """Return how far predictions of the parts that are kept are from what was measured."""
    measured = partitioner.measured[partitioner.cuts].sum(axis=0)
    missed = np.abs(partitioner.predicted().sum(axis=0) / measured - 1)
    return {
        "mean error": float(missed.mean()),
        "largest error": float(missed.max()),
        "partitions": len(partitioner.measured),
    }


def simulated(partitioner: Partitioner) -> dict[str, Any]:
    """Return a row of many parts, by the times that were learned from."""
    features, parts = partitioner.features, partitioner.parts
    us = {cuts: slowest(ns) / 1e3 for cuts, ns in partitioner.measured.items()}
    best = us[partitioner.cuts]
    vertex, edge = equal_vertices(features.vertices, parts), equal_edges(features.edges, parts)
    found = {"vertex / learned": us[vertex] / best, "edge / learned": us[edge] / best}
    row = {"parts": f"{parts}, simulated", "learned us": best, **found}
    return {**row, "better / learned": min(found.values()), **accuracy(partitioner)}


@dataclass
class Turns:
    """What steps at some cuts took in turns: wall milliseconds, and nanoseconds of tasks."""

    wall_ms: list[float]
    tasks_ns: list[Array]


def timed(
    data: GraphData, cuts: Mapping[str, Cuts], executor: str, rounds: int
) -> dict[str, Turns]:
    """Return what steps at each of some cuts took."""
    peers, models, parts = Peers(executor), dict[Cuts, Model](), 2
    for each in cuts.values():
        if each not in models:
            models[each] = network(data)
            cpus = 1 if executor == "mpi" else 2
            train(models[each], data, 1, mapper=RangesMapper(each), executor=executor, cpus=cpus)
    found = {each: Turns([], []) for each in models}
    for number in range(rounds):
        for each in list(models)[:: 1 if number % 2 else -1]:
            trainer, spent = models[each].trainer, list[float]()
            bound = trainer.bound("train", data.adjacency.vertices)
            layers = len(layers_of(bound.graph)[1])
            for _ in range(STEPS):
                peers.meet()
                start = time.perf_counter()
                with trainer.session.timed() as timeline:
                    trainer.session.run(bound)
                spent.append(float(peers.all(np.array(time.perf_counter() - start)).max()))
                mine = spent_ns(bound, timeline, (layers, parts))
                found[each].tasks_ns.append(peers.all(mine).sum(axis=0))
            found[each].wall_ms.append(min(spent) * 1e3)
    for model in models.values():
        model.close()
    return {name: found[each] for name, each in cuts.items()}


def steps(data: GraphData, learned_cuts: Cuts, executor: str, rounds: int) -> dict[str, Any]:
    """Return each baseline's step over that at learned cuts.

    By the slowest parts of each layer, of which the least times of all rounds count; and by the
    wall, the median over rounds.
    """
    count, indptr = data.adjacency.vertices, data.adjacency.indptr
    cuts = {"vertex": equal_vertices(count, 2), "edge": equal_edges(indptr, 2)}
    turns = timed(data, {**cuts, "learned": learned_cuts}, executor, rounds)
    us = {name: slowest(np.min(each.tasks_ns, axis=0)) / 1e3 for name, each in turns.items()}
    found = {f"{name} / learned": us[name] / us["learned"] for name in cuts}
    row = {"learned us": us["learned"], **found, "better / learned": min(found.values())}
    for name in cuts:
        pairs = zip(turns[name].wall_ms, turns["learned"].wall_ms)
        row[f"wall: {name} / learned"] = statistics.median(a / b for a, b in pairs)
    return row


def run(data: GraphData, executor: str, rounds: int) -> dict[str, Any]:
    """Return a row of what two workers or ranks did."""
    partitioner = learned(data, 2, executor)
    how = f"2 {'ranks' if executor == 'mpi' else 'workers'}"
    return {
        "parts": how,
        **steps(data, partitioner.cuts, executor, rounds),
        **accuracy(partitioner),
    }


def unseen(data: GraphData, other: GraphData, rounds: int) -> dict[str, Any]:
    """Return a row of two workers at cuts by what was learned of another graph."""
    with tempfile.TemporaryDirectory() as folder:
        costs = f"{folder}/costs.json"
        learned(data, 2, "local", costs)
        with network(other) as model:
            cuts = Partitioned(model, other.adjacency, 2, costs=costs).partitioner.cuts
    return {"parts": "2 workers, never run", **steps(other, cuts, "local", rounds)}


def by_metis(data: GraphData, executor: str, rounds: int) -> dict[str, Any]:
    """Return a row of two parts by METIS against learned cuts, each of vertices in its own order.

    Learned cuts are of the graph as it is; METIS numbers its vertices anew.
    """
    own = learned(data, 2, executor).cuts
    ordered, cuts = renumbered_by_metis(data, 2)
    us = {}
    for name, of, at in (("learned", data, own), ("METIS", ordered, cuts)):
        turns = timed(of, {name: at}, executor, rounds)[name]
        us[name] = slowest(np.min(turns.tasks_ns, axis=0)) / 1e3
    how = f"2 {'ranks' if executor == 'mpi' else 'workers'}, METIS"
    return {
        "parts": how,
        "learned us": us["learned"],
        "METIS / learned": us["METIS"] / us["learned"],
    }


def child(arguments: argparse.Namespace) -> None:
    """Print one row."""
    parts = int(arguments.child) if arguments.child.isdigit() else 2
    times = 1 if parts == 2 else 2
    data = graph(arguments.graph, times * arguments.vertices, times * arguments.edges)
    if arguments.child.startswith("metis"):
        row = by_metis(data, arguments.child.removeprefix("metis "), arguments.rounds)
    elif arguments.child == "unseen":
        sizes = arguments.vertices * 3 // 2, arguments.edges
        row = unseen(data, graph(arguments.graph, *sizes, seed=7), arguments.rounds)
    elif arguments.child.isdigit():
        row = simulated(learned(data, parts, "local"))
    else:
        row = run(data, arguments.child, arguments.rounds)
    if rank_of("mpi" if arguments.child.endswith("mpi") else "local") == 0:
        print(json.dumps(row), flush=True)


def rows(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield the rows, each of a process of its own."""
    metis = ("metis local", "metis mpi") if find_spec("pymetis") else ()
    for kind in ("local", "mpi", *metis, "unseen", "8", "16"):
        for name in GRAPHS:
            if kind in ("unseen", "16") and name not in SKEWED:
                continue
            launcher = (
                [Path(sys.executable).with_name("mpiexec"), "-n", "2"]
                if kind.endswith("mpi")
                else []
            )
            sizes = ["--vertices", arguments.vertices, "--edges", arguments.edges]
            command = [*launcher, sys.executable, __file__, *sizes, "--rounds", arguments.rounds]
            command += ["--child", kind, "--graph", name]
            done = subprocess.run(list(map(str, command)), capture_output=True, text=True)
            if done.returncode:
                raise SystemExit(done.stderr)
            yield {"graph": name, **json.loads(done.stdout.splitlines()[-1])}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--vertices", type=int, default=6_000)
    parser.add_argument("--edges", type=int, default=600_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--graph", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        child(arguments)
        return
    title = "A GCN over graphs in parts: learned cuts against equal vertices and equal edges"
    command = f"python benchmarks/graphs/partition.py --vertices {arguments.vertices}"
    command += f" --edges {arguments.edges} --rounds {arguments.rounds}"
    tabulate("partition", title, command, rows(arguments), RATIOS)


if __name__ == "__main__":
    main()
