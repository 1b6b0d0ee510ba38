"""The graph optimiser: models before and after, on soapstone's executor and in ONNX Runtime.

    python benchmarks/optimization/optimize.py [--models nasrnn,resnet50] [--target soapstone]

Each model is optimised by the command line, then the original (all lowering, and plain), the
optimised one and ONNX Runtime on the original run in processes of their own, in turns.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1]))

from arguments import FOLDER, common
from harness import in_turns, median, ratio, rounds_of, serve, tabulate
from models import arrays, export

from soapstone.system import usable_cores

MODELS = (
    *("resnet50", "resnext50_branches", "nasnet_a", "nasrnn", "bert_12", "squeezenet"),
    *("inception_v3", "rnntc", "nmt_step"),
)
PEERS = {
    "soapstone": ("onnxruntime", "plain", "original", "optimized"),
    "onnxruntime": ("onnxruntime", "optimized in it"),
}
ORDER = {"soapstone": ("original", "optimized"), "onnxruntime": ("onnxruntime", "optimized in it")}
RATIOS = {  # new columns: (what it is, time of, over that of)
    "soapstone": (
        ("speedup", "original", "optimized"),
        ("over plain", "plain", "optimized"),
        ("over onnxruntime", "onnxruntime", "optimized"),
    ),
    "onnxruntime": (("speedup", "onnxruntime", "optimized in it"),),
}


def peer(kind: str, name: str, folder: Path, threads: int) -> None:
    """Be one way to run a model."""
    given = arrays(name)
    path = folder / f"{name}{'.optimized' if kind.startswith('optimized') else ''}.onnx"
    if kind.startswith("onnxruntime") or kind.endswith("in it"):
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        served = onnxruntime.InferenceSession(
            str(path), options, providers=["CPUExecutionProvider"]
        )
        serve(rounds_of(lambda: served.run(None, given)))
    else:
        from soapstone import InferenceSession

        session = InferenceSession(path, threads=threads, plain=kind == "plain", tune="now")
        serve(rounds_of(lambda: session.run(given)))


def optimized(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Return the report of optimising a model."""
    source = export(name, options.folder)
    target = options.folder / f"{name}.optimized.onnx"
    command = [sys.executable, "-m", "soapstone.cli.main", "optimize"]
    command += [str(source), "-o", str(target)]
    command += ["--target", options.target, "--threads", str(options.threads), "--json"]
    command += ["--method", options.method]
    start = time.perf_counter()
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    report: dict[str, Any] = json.loads(done.stdout)
    whole = time.perf_counter() - start
    return {**report, "whole": whole, "warm": whole - report["measuring_seconds"]}


def row_of(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Return the row of a model: optimised first, then run in turns with its peers."""
    report = optimized(name, options)
    command = [sys.executable, __file__, "--models", name, "--folder", str(options.folder)]
    command += ["--threads", str(options.threads)]
    commands = {kind: [*command, "--peer", kind] for kind in PEERS[options.target]}
    measured = in_turns(commands, options.rounds)
    ms = {kind: median(found, "ms") for kind, found in measured.items()}
    row: dict[str, Any] = {"model": name, **{f"{kind} ms": ms[kind] for kind in ms}}
    row |= {
        what: ratio(measured[one], measured[other]) for what, one, other in RATIOS[options.target]
    }
    old, new = ORDER[options.target]
    row |= {
        "predicted / measured": report["cost_before_us"] / 1e3 / ms[old],
        "after": report["cost_after_us"] / 1e3 / ms[new],
        "GFLOP/s": report["flops_after"] / 1e6 / ms[new],
        "GB/s": report["bytes_after"] / 1e6 / ms[new],
        "launches": f"{report['launches_before']} -> {report['launches_after']}",
        "kept": report["kept"],
        "s": report["whole"],
        "without measuring costs, s": report["warm"],
        "complete": report["complete"],
        "rules": ", ".join(f"{k[:6]} x{n}" for k, n in report["substitutions"].items()),
    }
    return row


def main() -> None:
    parser = common(__doc__, models=MODELS, rounds=9, threads=usable_cores(), folder=FOLDER)
    parser.add_argument("--target", choices=list(PEERS), default="soapstone")
    parser.add_argument("--method", default="backtracking", help="backtracking or saturation")
    parser.add_argument("--peer", help="be this way to run the one model")
    options = parser.parse_args()
    names = options.models.split(",")
    if options.peer:
        peer(options.peer, names[0], options.folder, options.threads)
        return
    command_text = f"python benchmarks/optimization/optimize.py --target {options.target}"
    title = f"Optimised graphs, target {options.target}, batch 1"
    table = f"optimize_{options.target}"
    if options.method != "backtracking":
        command_text += f" --method {options.method}"
        title += f", {options.method}"
        table += f"_{options.method}"
    rows = (row_of(name, options) for name in names)
    ratios = [what for what, _, _ in RATIOS[options.target]]
    tabulate(table, title, command_text, rows, ratios, not options.no_write)


if __name__ == "__main__":
    main()
