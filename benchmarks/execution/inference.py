"""Inference at batch 1: soapstone, ONNX Runtime, OpenVINO, torch eager on the same files.

    python benchmarks/execution/inference.py [--models resnet50,bert_12] [--rounds 7] [--threads 2]
    python benchmarks/execution/inference.py --beside 1 --pinned --models resnet50
    python benchmarks/execution/inference.py --models newer

Needs `pip install -e ".[bench]"`. Each library works in its own process, in turns. "peak MB" is the
peak resident memory above that of the library once it has run a model of one operator. The peer
"peak" is no library: what the operations of the file take where every core multiplies and adds in
registers without end. Nothing that computes them as they are written is faster; a convolution by
Winograd, which multiplies less often, may be. With --beside, each is measured again beside some
processes that compute without end; with --pinned, each of those has a core that it never leaves.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

sys.path.append(str(Path(__file__).resolve().parents[1]))

from arguments import FOLDER, common
from harness import geometric_means, in_turns, median, ratio, rounds_of, serve, show, write
from models import MODELS, NEWER, OPSET, arrays, export, network
from peak import flops_per_s

from soapstone.system import core_numbers, peak_bytes, resident_bytes, usable_cores

PEERS = ("soapstone", "onnxruntime", "openvino", "torch", "peak")


def smallest() -> bytes:
    """Return a model of one operator."""
    from onnx import TensorProto, helper

    x, y = (helper.make_tensor_value_info(n, TensorProto.FLOAT, [1, 16]) for n in "xy")
    graph = helper.make_graph([helper.make_node("Relu", ["x"], ["y"])], "one", [x], [y])
    opsets = [helper.make_opsetid("", OPSET)]
    return bytes(helper.make_model(graph, opset_imports=opsets, ir_version=8).SerializeToString())


def operations(name: str, path: Path) -> float:
    """Return how many additions and multiplications the file's graph has."""
    from soapstone import from_onnx
    from soapstone.search.cost.executor import ExecutorCost
    from soapstone.search.cost.launches import work

    prepared = ExecutorCost(1).prepared(*from_onnx(path).graph_for(arrays(name)))
    return sum(work(prepared.graph, node)[0] for node in prepared.nodes)


def floor(name: str, path: Path, threads: int) -> None:
    """Be the processor: the least time of the model's operations."""
    flops = operations(name, path)

    def round_() -> dict[str, Any]:
        return {"ms": 1e3 * flops / max(flops_per_s(threads) for _ in range(5))}

    serve(round_)


def peer(library: str, name: str, path: Path, threads: int) -> None:
    """Be one library on one model; after a dot, the precision of its products."""
    library, _, precision = library.partition(".")
    given = arrays(name)
    run: Callable[[], Mapping[str, np.ndarray] | list[Any]]
    if library == "soapstone":
        from soapstone import InferenceSession, from_onnx

        with InferenceSession(from_onnx(smallest())) as first:
            first.run(np.ones((1, 16), np.float32))
        baseline = resident_bytes()
        start = time.perf_counter()
        precision = precision or "float32"
        session = InferenceSession(path, threads=threads, tune="now", precision=precision)
        run = lambda: list(session.run(given).values())  # noqa: E731
    elif library == "onnxruntime":
        import onnxruntime

        providers = ["CPUExecutionProvider"]
        onnxruntime.InferenceSession(smallest(), providers=providers).run(
            None, {"x": np.ones((1, 16), np.float32)}
        )
        baseline = resident_bytes()
        start = time.perf_counter()
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_ALL
        served = onnxruntime.InferenceSession(str(path), options, providers=providers)
        run = lambda: served.run(None, given)  # noqa: E731
    elif library == "openvino":
        import openvino

        core = openvino.Core()
        hint = {"": "f32", "bfloat16": "bf16"}[precision]
        settings = {"INFERENCE_NUM_THREADS": threads, "INFERENCE_PRECISION_HINT": hint}
        core.compile_model(core.read_model(smallest()), "CPU", settings)
        baseline = resident_bytes()
        start = time.perf_counter()
        compiled = core.compile_model(core.read_model(path), "CPU", settings)
        run = lambda: list(compiled(given).values())  # noqa: E731
    else:
        import torch

        torch.set_num_threads(threads)
        torch.relu(torch.ones(1, 16))
        baseline = resident_bytes()
        start = time.perf_counter()
        module = network(name)
        tensors = [torch.from_numpy(array) for array in given.values()]

        def run() -> list[Any]:
            with torch.inference_mode():
                made = module(*tensors)
            return list(made) if isinstance(made, tuple) else [made]

    outputs = run()
    load_s = time.perf_counter() - start
    one = rounds_of(run)

    def round_() -> dict[str, Any]:
        return {
            **one(),
            "load_s": load_s,
            "peak_mb": (peak_bytes() - baseline) / 1e6,
            "digest": [float(np.abs(np.asarray(output)).mean()) for output in outputs],
        }

    serve(round_)


@contextlib.contextmanager
def beside(count: int, pinned: bool = False) -> Iterator[None]:
    """Let some processes compute without end meanwhile, each pinned to one of the last cores."""
    cores = [f"{{{core}}}" for core in (core_numbers() or [])[::-1]] if pinned else []
    busy = []
    for number in range(count):
        where = f"os.sched_setaffinity(0, {cores[number % len(cores)]})" if cores else ""
        command = f"import os\n{where}\nwhile True: pass"
        busy.append(subprocess.Popen([sys.executable, "-c", command]))
    try:
        yield
    finally:
        for process in busy:
            process.kill()
            process.wait()


def main() -> None:
    parser = common(
        __doc__, models=MODELS, rounds=7, threads=usable_cores(), folder=FOLDER, peers=PEERS
    )
    parser.add_argument("--beside", type=int, default=0, help="busy processes of a second run")
    parser.add_argument("--pinned", action="store_true", help="keep each of them on a core")
    parser.add_argument("--peer", help="be this library on the one model")
    options = parser.parse_args()
    names = list(NEWER) if options.models == "newer" else options.models.split(",")
    if options.peer:
        path = export(names[0], options.folder)
        if options.peer == "peak":
            floor(names[0], path, options.threads)
        else:
            peer(options.peer, names[0], path, options.threads)
        return
    rows = []
    for name in names:
        export(name, options.folder)
        command = [sys.executable, __file__, "--models", name, "--folder", str(options.folder)]
        command += ["--threads", str(options.threads)]
        commands = {p: [*command, "--peer", p] for p in options.peers.split(",")}
        measured = in_turns(commands, options.rounds)
        ms = {p: median(found, "ms") for p, found in measured.items()}
        row: dict[str, Any] = {"model": name}
        for p in ms:
            row[f"{p} ms"] = ms[p]
        for other in PEERS[1:]:
            if other in ms and "soapstone" in ms:
                row[f"/ {other}"] = ratio(measured["soapstone"], measured[other])
        if options.beside:
            with beside(options.beside, options.pinned):
                slowed = in_turns(commands, options.rounds)
            for p, found in slowed.items():
                row[f"{p} slow-down"] = median(found, "ms") / ms[p]
            rows.append(row)
            show(row)
            continue
        for p in (p for p in ms if p != "peak"):
            row[f"{p} peak MB"] = median(measured[p], "peak_mb")
            row[f"{p} load s"] = median(measured[p], "load_s")
        rows.append(row)
        show(row)
    compared = [key for key in rows[0] if key.startswith("/ ") or key.endswith("slow-down")]
    rows.append({"model": "geometric mean", **geometric_means(rows, compared)})
    show(rows[-1])
    if not options.no_write:
        columns = list(dict.fromkeys(key for row in rows for key in row))
        script = "python benchmarks/execution/inference.py"
        if options.beside:
            pinned = " --pinned" if options.pinned else ""
            command_text = f"{script} --beside {options.beside}{pinned} --models {options.models}"
            title = "Inference, batch 1, beside other processes that compute"
            write("inference_beside", title, command_text, columns, rows)
        elif options.models == "newer":
            title = "Inference, batch 1, newer models"
            write("inference_newer", title, f"{script} --models newer", columns, rows)
        else:
            write("inference", "Inference, batch 1", script, columns, rows)


if __name__ == "__main__":
    main()
