"""The figures of Jia 2020, chapter 4, that the other benchmarks do not show, on made-up graphs.

    python benchmarks/graphs/figures.py            all of these
    python benchmarks/graphs/figures.py sampling   4.6: time to accuracy, against sampled training
    python benchmarks/graphs/figures.py deeper     4.7: accuracy by depth and width
    python benchmarks/graphs/figures.py unseen     4.9: inference of graphs that were never run

4.6: a block model of a fifteenth of Reddit's size, with its features and classes; the same GCN, all
of whose vertices are a step here, and batches of 512 in GraphSAGE and FastGCN (torch). Each is
trained in a process of its own, in turns; what accuracy costs to see is not timed. 4.7: residual
GCNs on the citation graphs that SOAPSTONE_DATA has, and on a smaller block model; no times. 4.9:
GIN is trained on 20 of 24 graphs of PPI's sizes in two parts, and infers the other four in two
parts, cut by what was learned, or by equal vertices or edges.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

sys.path += [str(Path(__file__).resolve().parents[1]), str(Path(__file__).resolve().parent)]

from harness import tabulate
from partition import Settled

from soapstone import Adam, Model
from soapstone.apps.graphs import deepgcn, gcn, gin
from soapstone.frontend.graphs.adjacency import Adjacency
from soapstone.frontend.graphs.dataset import GraphData
from soapstone.frontend.graphs.files import read_graph
from soapstone.frontend.graphs.generate import PRESETS, block_model, many_graphs
from soapstone.frontend.graphs.partitioned import Partitioned
from soapstone.search.partition.partitioner import METHODS

HIDDEN, ROUNDS, THREADS = 128, 3, 2
EPOCHS = {"whole graph": 40, "graphsage": 5, "fastgcn": 15}
REACHED = (0.8, 0.9, 0.93, 0.95)
PEERS = Path(__file__).with_name("sampling_peers.py")


def reddit(scale: float = 1 / 15, wrong: float = 0.03) -> GraphData:
    """Return a block model two thirds of which are to train on, and some of whose labels are wrong.

    wrong: the share of labels that are another's, which no model can learn.
    """
    made = block_model(PRESETS["reddit-like"].scaled(scale), homophily=0.4, signal=0.08, seed=3)
    assert made.labels is not None
    random, count = np.random.default_rng(3), made.adjacency.vertices
    other = random.integers(0, made.classes, count).astype(np.int32)
    labels = np.where(random.random(count) < wrong, other, made.labels)
    order = random.permutation(count)
    ends = count * 66 // 100, count * 76 // 100
    parts = dict(zip(("train", "val", "test"), map(np.sort, np.split(order, ends))))
    return replace(made, labels=labels, parts=parts)


def train(
    model: Model,
    data: GraphData,
    epochs: int,
    decay: float = 0.0,
    callbacks: Sequence[Any] = (),
    **how: Any,
) -> None:
    """Train on the whole graph; `how`: what `compile` is told besides."""
    loss, metric = "masked_cross_entropy", "accuracy"
    if data.several:
        loss, metric = "masked_bce", "micro_f1"
    model.compile(Adam(0.01, weight_decay=decay), loss, metrics=[metric], **how)
    fit(model, data, epochs, callbacks)


def fit(model: Model, data: GraphData, epochs: int, callbacks: Sequence[Any] = ()) -> None:
    """Train on the whole graph, further."""
    splits = data.splits()
    given: dict[str, Any] = {"shuffle": False, "progress": False, "callbacks": callbacks}
    model.fit(splits.train_x, splits.train_y, epochs=epochs, **given)


def whole(seed: int) -> None:
    """Train on all vertices at once, and print each epoch's time and accuracy."""
    data = reddit()
    splits, spent, done = data.splits(), 0.0, 0
    with gcn.build(data.adjacency.vertices, data, hidden=HIDDEN, dropout=0.0) as model:
        model.seed = seed
        train(model, data, 0, threads=THREADS, cpus=1)
        model.evaluate(splits.test_x, splits.test_y)
        while done < EPOCHS["whole graph"]:
            begin = time.perf_counter()
            fit(model, data, 1)
            spent, done = spent + time.perf_counter() - begin, done + 1
            found = model.evaluate(splits.test_x, splits.test_y)["accuracy"]
            print(json.dumps({"epoch": done, "s": spent, "accuracy": float(found)}), flush=True)


def sampling() -> Iterator[dict[str, Any]]:
    """Yield when each way reaches an accuracy, by the clock: medians over rounds."""
    data = reddit()
    edges = data.adjacency.normalised()
    runs: dict[str, list[list[dict[str, Any]]]] = {how: [] for how in EPOCHS}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "graph.npz"
        arrays = {"indptr": edges.indptr, "indices": edges.indices, "weights": edges.weights}
        arrays |= {"features": data.features, "labels": data.labels}
        np.savez(path, **arrays, train=data.parts["train"], test=data.parts["test"])
        for seed in range(ROUNDS):
            for how, epochs in EPOCHS.items():
                case = {"how": how, "graph": str(path), "hidden": HIDDEN, "threads": THREADS}
                case |= {"epochs": epochs, "seed": seed}
                command = [sys.executable, str(PEERS), json.dumps(case)]
                if how == "whole graph":
                    command = [sys.executable, __file__, "--seed", str(seed)]
                done = subprocess.run(command, capture_output=True, text=True)
                if done.returncode:
                    raise SystemExit(done.stderr)
                runs[how].append([json.loads(line) for line in done.stdout.splitlines()])
    size = f"{data.adjacency.vertices} vertices, {data.adjacency.edges} edges"
    for how, rounds in runs.items():
        best = [max(dot["accuracy"] for dot in dots) for dots in rounds]
        epoch = [dots[-1]["s"] / dots[-1]["epoch"] for dots in rounds]
        row = {"graph": size, "how": how, "s an epoch": statistics.median(epoch)}
        row["best accuracy"] = statistics.median(best)
        for goal in REACHED:
            first = [next((d for d in dots if d["accuracy"] >= goal), None) for dots in rounds]
            if all(first):
                row[f"s to {goal}"] = statistics.median(d["s"] for d in first if d)
                row[f"epochs to {goal}"] = statistics.median(d["epoch"] for d in first if d)
        yield row


def deeper() -> Iterator[dict[str, Any]]:
    """Yield accuracies on the vertices to test on, by depth and width: means over seeds."""
    sets: list[tuple[str, GraphData, int, int]] = []  # and epochs, and seeds
    for name in ("cora", "citeseer"):
        try:
            sets.append((name, read_graph(name).row_normalised(), 200, 1))
        except (OSError, ValueError) as error:
            print(f"{name}: left out: {error}", file=sys.stderr)
    sets.append(("reddit-like / 40", reddit(1 / 40), 60, 1))
    for name, data, epochs, seeds in sets:
        splits = data.splits()
        for layers in (2, 4, 8):
            row: dict[str, Any] = {"graph": name, "layers": layers}
            for hidden in (16, 128):
                found = []
                for seed in range(seeds):
                    with deepgcn.build(data.adjacency.vertices, data, hidden, layers) as model:
                        model.seed = seed
                        train(model, data, epochs, decay=5e-4)
                        found.append(model.evaluate(splits.test_x, splits.test_y)["accuracy"])
                row[f"width {hidden}"] = 100 * statistics.mean(found)
            yield row


def unseen(rounds: int = 7, scale: float = 1.0) -> Iterator[dict[str, Any]]:
    """Yield how long each graph that was never run takes to infer, by how it is cut."""
    every = many_graphs(PRESETS["ppi-like"].scaled(scale), seed=1)
    ends = np.arange(25) * every.adjacency.vertices // 24
    seen = cut_out(every, 0, ends[20])
    with tempfile.TemporaryDirectory() as folder:
        costs = Path(folder) / "costs.json"
        with gin.build(seen.adjacency.vertices, seen) as model:
            split = Partitioned(model, seen.adjacency, 2, costs=costs)
            hooks = [split, Settled(split.partitioner)]
            train(model, seen, 205, mapper=split.mapper, cpus=2, callbacks=hooks)
            split.save()
            weights = model.weights()
        for number in range(20, 24):
            other = cut_out(every, ends[number], ends[number + 1])
            times: dict[str, list[float]] = {how: [] for how in METHODS}
            models = {}
            for how in METHODS:
                models[how] = made = gin.build(other.adjacency.vertices, other)
                cut = Partitioned(made, other.adjacency, 2, how, costs=costs)
                made.compile(Adam(0.01), "masked_bce", mapper=cut.mapper, cpus=2)
                made.set_weights(weights)
                made.predict(other.features)
            for _ in range(rounds):
                for how, made in models.items():
                    spent = []
                    for _ in range(20):
                        begin = time.perf_counter()
                        made.predict(other.features)
                        spent.append(time.perf_counter() - begin)
                    times[how].append(statistics.median(spent) * 1e3)
            for made in models.values():
                made.close()
            row: dict[str, Any] = {"graph": number, "edges": other.adjacency.edges}
            row |= {f"{how} ms": statistics.median(found) for how, found in times.items()}
            for how in ("vertex", "edge"):
                pairs = zip(times[how], times["learned"])
                row[f"{how} / learned"] = statistics.median(a / b for a, b in pairs)
            yield row


def cut_out(data: GraphData, first: int, past: int) -> GraphData:
    """Return the vertices from one to another, which no edge leaves."""
    edges = data.adjacency
    begin, end = edges.indptr[first], edges.indptr[past]
    sides = (edges.indices[begin:end] - first, edges.targets[begin:end] - first)
    assert data.features is not None and data.labels is not None
    rows, every = slice(first, past), np.arange(past - first)
    return GraphData(
        f"{first} to {past} of {data.name}",
        Adjacency.from_edges(*sides, past - first),
        data.features[rows],
        data.labels[rows],
        {"train": every, "test": every},
    )


PARTS = {
    "sampling": (sampling, "Figure 4.6: time to accuracy, the whole graph against samples", ()),
    "deeper": (deeper, "Figure 4.7: accuracy of deeper and wider networks, %", ()),
    "unseen": (
        unseen,
        "Figure 4.9: inference of graphs that were never run, in two parts",
        ("vertex / learned", "edge / learned"),
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []], metavar="PART")
    parser.add_argument("--seed", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.seed is not None:
        whole(given.seed)
        return
    for part in given.parts or PARTS:
        rows, title, ratios = PARTS[part]
        command = f"python benchmarks/graphs/figures.py {part}"
        tabulate(f"graph_{part}", title, command, rows(), ratios)


if __name__ == "__main__":
    main()
