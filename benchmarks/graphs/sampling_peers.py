"""Peers of `figures.py`: training on samples of a graph, in torch.

Batches of 512 vertices. `graphsage` draws 25 and 10 neighbours of a vertex and takes the mean of
them and itself (the paper's GCN aggregator); `fastgcn` draws 400 vertices a layer by their columns'
squared norms, and weighs what they give by that. Sampling is vectorised NumPy, products are
torch's; between epochs, outside of the time, accuracy over all neighbours is taken.

Sources: Hamilton, Ying and Leskovec, NeurIPS 2017; Chen, Ma and Xiao, FastGCN, ICLR 2018.
"""

from __future__ import annotations

import json
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

warnings.filterwarnings("ignore", "Sparse")
BATCH, FANOUT, DRAWN = 512, (25, 10), 400
Draw = Callable[[np.ndarray], list[Any]]


class Graph:
    """The normalised edges of a file, with features, labels and who is to train and to test on."""

    def __init__(self, path: str) -> None:
        with np.load(path) as found:
            self.indptr, self.indices = found["indptr"], found["indices"].astype(np.int64)
            self.weights = found["weights"]
            self.x = torch.from_numpy(found["features"])
            self.labels = torch.from_numpy(found["labels"].astype(np.int64))
            self.train, self.test = found["train"], found["test"]
        self.degrees = np.diff(self.indptr)

    def matrix(self, values: np.ndarray) -> Any:
        offsets, size = torch.from_numpy(self.indptr.astype(np.int64)), (len(self.x),) * 2
        columns = torch.from_numpy(self.indices)
        return torch.sparse_csr_tensor(offsets, columns, torch.from_numpy(values), size)

    def rows(self, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the places of all edges into some vertices, and the position of each's vertex."""
        counts = self.degrees[ids]
        ends = np.cumsum(counts)
        places = np.arange(ends[-1]) + np.repeat(self.indptr[ids] - (ends - counts), counts)
        return places, np.repeat(np.arange(len(ids)), counts)


def graphsage(graph: Graph, random: np.random.Generator) -> tuple[Draw, Any]:
    """Return what draws the layers of a batch, from the last to the first, and all edges."""

    def draw(batch: np.ndarray) -> list[Any]:
        made, targets = [], batch
        for fanout in FANOUT:
            picks = (random.random((len(targets), fanout)) * graph.degrees[targets, None]).astype(
                np.int64
            )
            near = graph.indices[graph.indptr[targets, None] + picks]
            near = np.concatenate([targets[:, None], near], axis=1)
            sources, place = np.unique(near, return_inverse=True)
            offsets = torch.arange(0, near.size + 1, near.shape[1])
            share = torch.full((near.size,), 1 / near.shape[1])
            size = (len(targets), len(sources))
            made.append(
                torch.sparse_csr_tensor(offsets, torch.from_numpy(place.ravel()), share, size)
            )
            targets = sources
        return [targets, *made]

    degrees = np.repeat(1 / graph.degrees, graph.degrees).astype(np.float32)
    return draw, graph.matrix(degrees)


def fastgcn(graph: Graph, random: np.random.Generator) -> tuple[Draw, Any]:
    """Return what draws the layers of a batch, from the last to the first, and all edges."""
    norms = np.bincount(graph.indices, graph.weights.astype(np.float64) ** 2, len(graph.x))
    chance = norms / norms.sum()

    def draw(batch: np.ndarray) -> list[Any]:
        made, targets = [], batch
        for _ in range(2):
            sources = np.unique(random.choice(len(chance), DRAWN, p=chance))
            position = np.full(len(chance), -1)
            position[sources] = np.arange(len(sources))
            places, rows = graph.rows(targets)
            columns = position[graph.indices[places]]
            kept = columns >= 0
            places, rows, columns = places[kept], rows[kept], columns[kept]
            drawn = 1 - (1 - chance[sources]) ** DRAWN  # how likely a vertex is among them
            values = (graph.weights[places] / drawn[columns]).astype(np.float32)
            ends = np.cumsum(np.bincount(rows, minlength=len(targets)))
            offsets, size = np.concatenate([[0], ends]), (len(targets), len(sources))
            parts = map(torch.from_numpy, (offsets, columns, values))
            made.append(torch.sparse_csr_tensor(*parts, size))
            targets = sources
        return [targets, *made]

    return draw, graph.matrix(graph.weights)


def main() -> None:
    case = json.loads(sys.argv[1])
    torch.set_num_threads(case["threads"])
    torch.manual_seed(case["seed"])
    random = np.random.default_rng(case["seed"])
    graph = Graph(case["graph"])
    draw, whole = {"graphsage": graphsage, "fastgcn": fastgcn}[case["how"]](graph, random)
    classes = int(graph.labels.max()) + 1
    first = torch.nn.Linear(graph.x.shape[1], case["hidden"])
    last = torch.nn.Linear(case["hidden"], classes)
    optimizer = torch.optim.Adam([*first.parameters(), *last.parameters()], lr=0.01)
    spent = 0.0
    for epoch in range(1, case["epochs"] + 1):
        begin = time.perf_counter()
        order = random.permutation(graph.train)
        for start in range(0, len(order), BATCH):
            batch = order[start : start + BATCH]
            sources, outer, inner = draw(batch)
            hidden = (inner @ first(graph.x[sources])).relu()
            logits = outer @ last(hidden)
            loss = torch.nn.functional.cross_entropy(logits, graph.labels[batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        spent += time.perf_counter() - begin
        with torch.no_grad():
            found = (whole @ last((whole @ first(graph.x)).relu())).argmax(1)
            right = (found == graph.labels)[graph.test].float().mean()
        print(json.dumps({"epoch": epoch, "s": spent, "accuracy": float(right)}), flush=True)


if __name__ == "__main__":
    main()
