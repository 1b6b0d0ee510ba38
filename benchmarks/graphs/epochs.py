"""Epochs over whole graphs: two layers of GCN, GIN and GAT, inference, and the product alone.

    python benchmarks/graphs/epochs.py [--only gcn,gat] [--sizes large] [--dgl-python PYTHON]
    python benchmarks/graphs/epochs.py --only gcn --sizes reddit --phases epoch --peers dgl

Peers are torch with a precomputed transpose, PyG and DGL, each in a process of its own, in turns;
an interpreter that lacks one leaves it out. An epoch is forward, loss over all vertices, backward
and a step of Adam, without dropout. Sizes: 20,000 vertices with 128 features, 200,000 with 256;
both are block models of skewed degrees. `reddit` has the shape of Reddit's graph, and a table of
its own; all peers are in memory at once, so there is room for one at a time in 24 GB. Ratios are to
the fastest peer; `cpu` is of the cores' time in place of the clock's, which other work on the
machine stretches.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

sys.path += [str(Path(__file__).resolve().parents[1]), str(Path(__file__).resolve().parent)]

from epochs_peers import arrays_of, rounds
from harness import in_turns, median, ratio, serve, tabulate

from soapstone.frontend.graphs.adjacency import Adjacency
from soapstone.frontend.graphs.generate import Shape, block_model

HEADS, CLASSES, BUDGET_S = 8, 41, 0.5
SIZES = {  # vertices, edges that are drawn, features, and the width between layers
    "small": (20_000, 2_750_000, 128, 128),
    "large": (200_000, 21_000_000, 256, 256),
    "reddit": (232_965, 147_000_000, 602, 128),
}
MODELS = ("gcn", "gin", "gat", "spmm")
NEEDS = {"torch": "torch", "pyg": "torch_geometric", "dgl": "dgl"}  # what a peer imports
_CASE = ("graph", "size", "model", "infer", "features", "hidden", "threads")


def graph_file(size: str, folder: Path) -> Path:
    """Return a file of the edges of a size, made where there is none: each both ways, and own."""
    path = folder / f"{size}.npz"
    if not path.exists():
        vertices, edges, _, _ = SIZES[size]
        made = block_model(Shape(vertices, edges, 1, CLASSES), seed=1).adjacency.with_self_edges()
        folder.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(".part.npz")  # an interrupt leaves no file that is half there
        np.savez(part, indptr=made.indptr, indices=made.indices)
        part.rename(path)
    return path


def ours(case: dict[str, Any]) -> Callable[[], float]:
    """Return what is timed of soapstone."""
    found = arrays_of(case)
    offsets, indices, weights, x, labels = found.values()
    if case["model"] == "spmm":
        return _product(case, found)
    from soapstone import Adam, InferenceSession, Model
    from soapstone.frontend.training.state import TrainingState

    known = (weights, weights) if case["model"] == "gcn" else (None, None)
    edges = Adjacency(offsets, indices, offsets, indices, *known)
    hidden, classes, heads = case["hidden"], case["classes"], case["heads"]
    model = Model("net")
    y = model.input("x", x.shape)
    if case["model"] == "gcn":
        y = model.gcn_conv(y, edges, hidden, activation="relu")
        y = model.gcn_conv(y, edges, classes)
    elif case["model"] == "gin":
        y = model.relu(model.gin_conv(y, edges, hidden))
        y = model.gin_conv(y, edges, classes)
    else:
        y = model.gat_conv(y, edges, hidden // heads, heads, activation="elu")
        y = model.gat_conv(y, edges, classes)
    model.output(y)
    if case["infer"]:
        session = model.inference(threads=case["threads"])
        assert isinstance(session, InferenceSession)
        return lambda: float(next(iter(session.run({"x": x}).values()))[0, 0])
    where = {"gpus": 1} if "device" in case else {"cpus": 1, "threads": case["threads"]}
    model.compile(Adam(0.01), loss="cross_entropy", **where)
    state, trainer = TrainingState(model=model), model.trainer

    def epoch() -> float:
        trainer.step({"x": x}, labels, state)
        return float(state.loss)

    return epoch


def _product(case: dict[str, Any], found: dict[str, Any]) -> Callable[[], float]:
    from soapstone.kernels.entry import Call
    from soapstone.kernels.registry import variants
    from soapstone.native.memory import aligned_array, run

    offsets, indices, weights, x, _ = found.values()
    y = aligned_array(x.shape, np.float32)
    operands = (x, offsets, indices, offsets, indices, weights, weights)
    call = Call("spmm", {"reduction": "sum"}, operands, (y,), case["threads"])
    entry = next(found for each in variants("spmm") if (found := each.bind(call)) is not None)

    def product() -> float:
        assert run(entry) == 0
        return float(y[0, 0])

    return product


def triad(case: dict[str, Any]) -> Callable[[], float]:
    """Return a triad over arrays beyond the caches, by torch: its bytes are three arrays'."""
    import torch

    torch.set_num_threads(case["threads"])
    a, b, c = (torch.ones(1 << 25) for _ in range(3))
    return lambda: float(torch.add(a, b, alpha=3.0, out=c)[0])


def cases(options: argparse.Namespace, folder: Path) -> Iterator[dict[str, Any]]:
    """Yield what is measured."""
    for size in options.sizes.split(","):
        path = graph_file(size, folder)
        _, _, features, hidden = SIZES[size]
        for model in options.only.split(","):
            phases = ["epoch"] if model == "spmm" else options.phases.split(",")
            for infer in (phase == "inference" for phase in phases):
                widths = (128, 256) if model == "spmm" and size == "large" else (features,)
                for width in widths:
                    yield dict(
                        zip(
                            _CASE,
                            (str(path), size, model, infer, width, hidden, options.threads),
                            strict=True,
                        ),
                        classes=CLASSES,
                        heads=HEADS,
                        budget_s=BUDGET_S,
                    )


def _left_out(case: dict[str, Any], peer: str) -> str:
    """Return why a peer takes no part, or nothing."""
    if case["model"] == "gat" and peer == "torch":
        return "no attention over edges of its own"
    if case["model"] == "gat" and peer == "pyg" and case["size"] == "large":
        return "its messages of edges need more memory than there is"
    return "no product alone" if case["model"] == "spmm" and peer == "pyg" else ""


def _version(python: str, module: str) -> str:
    """Return the version of a module that an interpreter has; nothing where it has none."""
    text = f"import {module}; print({module}.__version__)"
    found = subprocess.run([python, "-c", text], capture_output=True, text=True)
    return "" if found.returncode else found.stdout.split()[-1]


def rows(options: argparse.Namespace, folder: Path) -> Iterator[dict[str, Any]]:
    """Yield a row a case, as it is measured."""
    pythons = {"torch": sys.executable, "pyg": options.pyg_python, "dgl": options.dgl_python}
    here = Path(__file__).resolve()
    versions = {n: _version(pythons[n], NEEDS[n]) for n in options.peers.split(",")}
    there = {name: pythons[name] for name, version in versions.items() if version}
    for case in cases(options, folder):
        text = json.dumps(case)
        commands = {"soapstone": [sys.executable, str(here), "--peer", "soapstone", text]}
        for name, python in there.items():
            if not _left_out(case, name):
                commands[name] = [python, str(here.with_name("epochs_peers.py")), name, text]
        if case["model"] == "spmm":
            commands["triad"] = [sys.executable, str(here), "--peer", "triad", text]
        measured = in_turns(commands, options.rounds)
        own = measured.pop("soapstone")
        what = "inference" if case["infer"] else "epoch"
        what = "alone" if case["model"] == "spmm" else what
        row: dict[str, Any] = {
            "case": f"{case['model']} {what}, {case['size']}, {case['features']}",
            "soapstone ms": median(own, "ms"),
        }
        stream = measured.pop("triad", None)
        row |= {f"{n} {versions[n]} ms": median(found, "ms") for n, found in measured.items()}
        for key, suffix in (("ms", ""), ("cpu_ms", " cpu")):
            row[f"best of peers{suffix}"] = min(
                measured, key=lambda n, k=key: median(measured[n], k)
            )
            row[f"ratio{suffix}"] = max(ratio(own, found, key) for found in measured.values())
        if stream is not None:
            with np.load(case["graph"]) as edges:
                count = len(edges["indices"]) + len(edges["indptr"]) - 1
            nbytes = 4.0 * count * case["features"]
            per_ms = 12.0 * (1 << 25)
            for key, suffix in (("ms", ""), ("cpu_ms", " cpu")):
                row[f"of triad{suffix}"] = (nbytes / per_ms) * ratio(stream, own, key)
        yield row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default=",".join(MODELS))
    parser.add_argument("--sizes", default="small,large")
    parser.add_argument("--phases", default="epoch,inference")
    parser.add_argument("--peers", default=",".join(NEEDS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--pyg-python", default=sys.executable, help="interpreter that has PyG")
    parser.add_argument("--dgl-python", default=sys.executable, help="interpreter that has DGL")
    parser.add_argument("--folder", type=Path, help="where the edges are kept between runs")
    parser.add_argument("--peer", nargs=2, metavar=("WHO", "CASE"))
    parser.add_argument("--no-write", action="store_true")
    options = parser.parse_args()
    if options.peer:
        who, case = options.peer[0], json.loads(options.peer[1])
        serve(rounds((triad if who == "triad" else ours)(case), case["budget_s"]))
        return
    with tempfile.TemporaryDirectory() as made:
        folder = options.folder or Path(made)
        names = ("only", "sizes", "phases", "peers", "rounds", "threads")
        chosen = [f"--{name} {getattr(options, name)}" for name in names]
        command = " ".join(["python benchmarks/graphs/epochs.py", *chosen])
        found, means = rows(options, folder), ("ratio", "ratio cpu")
        table, title = "graph_epochs", "Epochs over whole graphs"
        if options.only == "spmm":
            table, title = "graph_products", "Sums over neighbours alone"
        elif options.sizes == "reddit":
            table, title = "graph_reddit", "An epoch over a graph of Reddit's shape"
        tabulate(
            table,
            title,
            command,
            found,
            means,
            not options.no_write,
        )


if __name__ == "__main__":
    main()
