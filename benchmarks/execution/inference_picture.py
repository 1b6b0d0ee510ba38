"""Draws the newest tables of `inference.py` as docs/pictures/inference.svg.

    python benchmarks/execution/inference_picture.py

Needs `pip install -e ".[bench]"`. Each model has a row, each peer a dot: soapstone's time over the
peer's.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import matplotlib

sys.path.append(str(Path(__file__).resolve().parents[1]))

from harness import HERE, geometric_means

PEERS = {"onnxruntime": ("ONNX Runtime", "#1f6f8b"), "openvino": ("OpenVINO", "#c2571a")}
PICTURE = HERE.parent / "docs" / "pictures" / "inference.svg"


def record(name: str) -> dict[str, Any]:
    """Return what a benchmark measured last."""
    found: dict[str, Any] = json.loads((HERE / "results" / f"{name}.json").read_text())
    return found


def main() -> None:
    matplotlib.use("svg")
    # Texts stay texts, and the same figures give the same file.
    matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "inference"})
    from matplotlib import pyplot

    records = record("inference"), record("inference_newer")
    rows = [row for each in records for row in each["rows"] if "soapstone ms" in row]
    figure, axes = pyplot.subplots(figsize=(7, 0.26 * len(rows) + 1.1), layout="constrained")
    for peer, (label, colour) in PEERS.items():
        ratios = [row[f"/ {peer}"] for row in rows]
        (mean,) = geometric_means(rows, [f"/ {peer}"]).values()
        axes.plot(ratios, range(len(rows)), "o", color=colour, label=f"{label} (mean {mean:.2f})")
    axes.axvline(1, color="black", linewidth=0.8)
    axes.set_yticks(range(len(rows)), [row["model"].replace("_", " ") for row in rows])
    axes.invert_yaxis()
    axes.grid(axis="x", linewidth=0.4)
    axes.set_xlabel("soapstone's time over the peer's: left of the line, soapstone is faster")
    axes.legend(loc="lower left", fontsize="small")
    where = records[0]["machine"].split(", Python")[0]
    figure.suptitle(f"Inference at batch 1, float32, on {where}", fontsize="small")
    figure.savefig(PICTURE, metadata={"Date": None})


if __name__ == "__main__":
    main()
