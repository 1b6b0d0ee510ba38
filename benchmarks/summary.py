"""Writes what README.md says of the results, and draws how inference stands beside its peers.

    python benchmarks/summary.py

Needs `pip install -e ".[bench]"`. All is read from `results/`, so it says what was measured last.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import geometric_mean
from typing import Any

HERE = Path(__file__).resolve().parent
README = HERE.parent / "README.md"
PICTURE = HERE.parent / "docs" / "pictures" / "inference.svg"
BEGIN, END = "<!-- measured -->\n", "<!-- /measured -->\n"
PEERS = {"onnxruntime": ("ONNX Runtime", "#1f6f8b"), "openvino": ("OpenVINO", "#c2571a")}
INFERENCE = ("inference", "inference_newer")


def rows_of(*names: str) -> list[dict[str, Any]]:
    """Return the rows that benchmarks measured last, without means."""
    records = [json.loads((HERE / "results" / f"{name}.json").read_text()) for name in names]
    rows = [row for record in records for row in record["rows"]]
    return [row for row in rows if "geometric mean" not in row.values()]


def processor(name: str) -> str:
    """Return what a benchmark ran on last."""
    record = json.loads((HERE / "results" / f"{name}.json").read_text())
    return str(record["machine"].split(",")[0])


def mean(rows: Sequence[dict[str, Any]], key: str) -> str:
    """Return the geometric mean of a figure."""
    return f"{geometric_mean(row[key] for row in rows):.2f}"


def lines() -> Iterator[tuple[str, str, str, str]]:
    """Yield what was run, the peer, soapstone's time over the peer's, and on what processor."""
    models = rows_of(*INFERENCE)
    for peer, (name, _) in PEERS.items():
        what = f"inference at batch 1 in float32, {len(models)} models"
        yield what, name, mean(models, f"/ {peer}"), processor(INFERENCE[0])
    bytes_ = rows_of("quantized")
    for peer, (name, _) in PEERS.items():
        what = f"inference in eight bits, {len(bytes_)} files"
        yield what, name, mean(bytes_, f"/ {peer}"), processor("quantized")
    halves = rows_of("bfloat16")
    what = f"inference in bfloat16, {len(halves)} models"
    yield what, PEERS["openvino"][0], mean(halves, "/ openvino"), processor("bfloat16")
    lengths = rows_of("random_lengths")
    what = f"requests of random lengths in float32, {len(lengths)} models of tokens"
    yield what, "ONNX Runtime", mean(lengths, "ratio"), processor("random_lengths")
    tokens = {row["model"]: row for row in rows_of("decoding")}
    for model, what in (("float32", "in float32"), ("4bit", "in four bits")):
        share = f"{tokens[model]['/ onnxruntime']:.2f}"
        said = f"a token of a decoder of 125 million parameters {what}"
        yield said, "ONNX Runtime", share, processor("decoding")
    steps = rows_of("training_step")
    what = f"a training step, {len(steps)} models"
    yield what, "torch, eager", mean(steps, "ratio (threads)"), processor("training_step")
    ranks = rows_of("mpi_steps")
    what = f"a training step on two ranks, {len(ranks)} models"
    yield what, "torch, DDP", mean(ranks, "2 ranks / DDP"), processor("mpi_steps")
    graph = rows_of("graph_reddit")
    what = "an epoch of a GCN over a graph of Reddit's shape"
    yield what, "DGL", mean(graph, "ratio"), processor("graph_reddit")
    trees = {row["by"]: row for row in rows_of("dynamic")}
    what = "a step of a Tree-LSTM, whose graph changes with each sentence"
    share = f"{trees['reuse all']['of dynet']:.2f}"
    yield what, "DyNet", share, processor("dynamic")
    tasks = {row["system"]: row["METG(50 %) us"] for row in rows_of("task_bench")}
    what = "the smallest task that keeps half of the speed (Task Bench)"
    share = f"{tasks['soapstone, traced'] / tasks['OpenMP tasks']:.2f}"
    yield what, "OpenMP tasks", share, processor("task_bench")


def section() -> str:
    """Return the part of README.md."""
    slowed = rows_of("inference_beside")
    own, *others = (mean(slowed, f"{p} slow-down") for p in ("soapstone", *PEERS))
    peers = ", ".join(f"{share} with {name}" for (name, _), share in zip(PEERS.values(), others))
    table = [
        "| on two cores | peer | time over the peer's | processor |",
        "| --- | --- | --- | --- |",
    ]
    table += [f"| {' | '.join(line)} |" for line in lines()]
    return "\n".join(
        [
            *table,
            "",
            "Beside a process that computes on one of the two cores, inference takes"
            f" {own} times as long ({peers}).",
            "",
            "![Inference at batch 1 beside ONNX Runtime and OpenVINO](docs/pictures/inference.svg)",
            "",
        ]
    )


def written(text: str) -> str:
    """Return README.md's text with that part as it is to be."""
    before, _, rest = text.partition(BEGIN)
    return before + BEGIN + section() + END + rest.partition(END)[2]


def draw() -> None:
    """Draw the ratios of all models' times: each has a row, each peer a dot."""
    import matplotlib

    matplotlib.use("svg")
    # Texts stay texts, and the same figures give the same file.
    matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "inference"})
    from matplotlib import pyplot

    rows = rows_of(*INFERENCE)
    figure, axes = pyplot.subplots(figsize=(7, 0.26 * len(rows) + 1.1), layout="constrained")
    for peer, (name, colour) in PEERS.items():
        ratios = [row[f"/ {peer}"] for row in rows]
        label = f"{name} (mean {mean(rows, f'/ {peer}')})"
        axes.plot(ratios, range(len(rows)), "o", color=colour, label=label)
    axes.axvline(1, color="black", linewidth=0.8)
    axes.set_yticks(range(len(rows)), [row["model"].replace("_", " ") for row in rows])
    axes.invert_yaxis()
    axes.grid(axis="x", linewidth=0.4)
    axes.set_xlabel("soapstone's time over the peer's: left of the line, soapstone is faster")
    axes.legend(loc="lower left", fontsize="small")
    where = processor(INFERENCE[0])
    figure.suptitle(f"Inference at batch 1, float32, two threads of {where}", fontsize="small")
    figure.savefig(PICTURE, metadata={"Date": None})


def main() -> None:
    README.write_text(written(README.read_text()))
    draw()


if __name__ == "__main__":
    main()
