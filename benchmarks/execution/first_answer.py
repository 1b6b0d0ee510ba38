"""The first answer of a model's file in a new process: soapstone cold and warm, and ONNX Runtime.

    python benchmarks/execution/first_answer.py [--models resnet50,bert_12] [--rounds 3]

A process starts, imports its library, opens the file and runs it once: measured from outside, from
its start to its end ("s"), and to its answer ("answer s"). Cold: no cache of soapstone's is there.
Warm: a process before it has left one. Peers take turns, a round after another. "cpu s" is what a
process and its threads computed until its end, which a busy machine changes less than the time on
the clock.

Where soapstone comes from a wheel that `.ci/wheel` has built, cold processes find the machine code
of kernels in the package; from its tree they compile it. Warm ones compile nothing either way. So
there are two tables: what the Python that runs this has installed says which one is written.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1]))

from arguments import FOLDER, common
from models import MODELS, arrays, export

PEERS = ("cold", "warm", "onnxruntime")


def answer(library: str, name: str, path: Path, threads: int) -> None:
    """Be a process that runs a model once, and says when it has the answer."""
    given: Any = arrays(name)
    session: Any
    if library != "onnxruntime":
        from soapstone import InferenceSession

        session = InferenceSession(path, threads=threads)
        session.run(given)
    else:
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        providers = ["CPUExecutionProvider"]
        session = onnxruntime.InferenceSession(str(path), options, providers=providers)
        session.run(None, given)
    print(time.perf_counter(), flush=True)


def once(command: list[str], settings: Mapping[str, str]) -> dict[str, float]:
    """Return what a process takes, in seconds."""
    known = {**os.environ, **settings}
    known.pop("PYTHONDONTWRITEBYTECODE", None)  # installed packages have theirs
    start = time.perf_counter()
    process = subprocess.Popen(command, env=known, stdout=subprocess.PIPE)
    _, status, used = os.wait4(process.pid, 0)
    end = time.perf_counter()
    process.returncode = os.waitstatus_to_exitcode(status)  # it has been waited for
    if process.returncode or process.stdout is None:
        raise SystemExit(f"{' '.join(command)}: exit status {process.returncode}")
    with process.stdout as said:
        answered = float(said.read())  # by the same clock
    return {
        "s": end - start,
        "answer s": answered - start,
        "cpu s": used.ru_utime + used.ru_stime,
    }


def rows(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield what each model takes."""
    from harness import median

    peers = options.peers.split(",")
    for name in options.models.split(","):
        export(name, options.folder)
        command = [sys.executable, __file__, "--models", name, "--folder", str(options.folder)]
        command += ["--threads", str(options.threads), "--peer"]
        found: dict[str, list[dict[str, float]]] = {peer: [] for peer in peers}
        with tempfile.TemporaryDirectory() as cache:
            for _ in range(options.rounds):
                for peer in peers:
                    if peer == "cold":
                        shutil.rmtree(cache)
                    elif peer == "warm" and "cold" not in peers and not found[peer]:
                        once([*command, peer], {"SOAPSTONE_CACHE": cache})
                    found[peer].append(once([*command, peer], {"SOAPSTONE_CACHE": cache}))
                    Path(cache).mkdir(exist_ok=True)
        row: dict[str, Any] = {"model": name}
        for figure in ("cpu s", "s", "answer s"):
            for peer in peers:
                row[f"{peer} {figure}"] = median(found[peer], figure)
        for peer in ("cold", "warm"):
            if peer in peers and "onnxruntime" in peers:
                row[f"{peer} / onnxruntime"] = row[f"{peer} cpu s"] / row["onnxruntime cpu s"]
        yield row


def main() -> None:
    """Measure, and write the table."""
    parser = common(__doc__, models=MODELS, rounds=3, threads=None, folder=FOLDER, peers=PEERS)
    parser.add_argument("--peer", choices=PEERS, help="be this process on the one model")
    options = parser.parse_args()
    if options.peer:
        path = export(options.models, options.folder)
        answer(options.peer, options.models, path, options.threads)
        return
    from harness import tabulate

    from soapstone.cache.answers import PACKAGED
    from soapstone.system import usable_cores

    options.threads = options.threads or usable_cores()
    ratios = [f"{peer} / onnxruntime" for peer in ("cold", "warm")]
    command = "python benchmarks/execution/first_answer.py"
    name, place = "first_answer", "its tree, which compiles kernels when it is cold"
    if PACKAGED.is_dir():
        name, place = "first_answer_wheel", "a wheel that has the machine code of kernels"
    title = f"The first answer in a new process, soapstone from {place} (ratios of processor time)"
    tabulate(name, title, command, rows(options), ratios, save=not options.no_write)


if __name__ == "__main__":
    main()
