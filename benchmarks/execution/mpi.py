"""Two ranks against one: training steps beside torch's DDP, and messages beside raw mpi4py.

    python benchmarks/execution/mpi.py [--only steps,transfers] [--models alexnet,dlrm]

Needs `pip install -e ".[bench,mpi]"`. Every rank has one thread. Steps are those of
training_step.py: one rank and two ranks of soapstone, one process and two processes (DDP over
gloo) of torch. Transfers are medians of exchanges in a row: in one trace here, in one Python loop
of buffer calls there.
"""

from __future__ import annotations

import argparse
import os
import shutil
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

sys.path.append(str(Path(__file__).resolve().parents[1]))

from arguments import common
from harness import in_turns, median, ratio, serve, tabulate
from training_step import BUDGET_S, MODELS, RATE, batch

SIZES = tuple(1 << exponent for exponent in range(10, 27, 2))
REPEATS_BYTES = 1 << 25  # of one round of exchanges


def mpiexec(count: int) -> list[str]:
    """Return the start of a command on so many ranks."""
    beside = Path(sys.executable).with_name("mpiexec")
    return [str(beside if beside.exists() else shutil.which("mpiexec")), "-n", str(count)]


# -- peers of several processes


def serve_together(
    rank: int, agree: Callable[[int], int], work: Callable[[int], float], repeats: int = 1
) -> None:
    """Serve rounds in step: the first process reads the requests, and says how often to work.

    agree: gives every process the number of the first one. work: does it so often, and returns the
    seconds of one, in which what is measured is done `repeats` times.
    """
    once = work(1)
    once = min(once, work(1))

    def do_round() -> Mapping[str, Any]:
        count = agree(max(3, int(BUDGET_S / once)))
        return {"ms": work(count) / repeats * 1e3}

    if rank == 0:
        serve(do_round)
        agree(0)
    else:
        while (count := agree(0)) > 0:
            work(count)


def timed(step: Callable[[], object]) -> Callable[[int], float]:
    """Return what takes so many steps and returns the median of their seconds."""

    def work(count: int) -> float:
        times = []
        for _ in range(count):
            start = time.perf_counter()
            step()
            times.append(time.perf_counter() - start)
        return statistics.median(times)

    return work


def step_peer(model: str, executor: str) -> None:
    """One rank of soapstone."""
    from soapstone import SGD
    from soapstone.frontend.training.state import TrainingState

    built = MODELS[model].ours()
    built.compile(SGD(RATE), loss=MODELS[model].loss, executor=executor, cpus=1)
    inputs, labels = batch(MODELS[model])
    named = dict(zip(built.build().inputs(), inputs))
    state = TrainingState(model=built)
    work = timed(lambda: built.trainer.step(named, labels, state))
    if executor == "local":
        serve_together(0, lambda count: count, work)
        return
    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    serve_together(comm.rank, lambda count: int(comm.bcast(count)), work)
    built.close()


def torch_peer(model: str, processes: int, port: int) -> None:
    """The first process of torch, which starts the others."""
    import torch
    from torch import distributed
    from torch.nn import functional

    torch.set_num_threads(1)
    rank = int(os.environ.get("RANK", "0"))
    others = []
    if rank == 0:
        for other in range(1, processes):
            environment = {**os.environ, "RANK": str(other)}
            others.append(subprocess.Popen([sys.executable, *sys.argv], env=environment))
    net: Any = MODELS[model].theirs()
    arrays, labels = batch(MODELS[model])
    size = len(labels) // processes
    mine = slice(rank * size, (rank + 1) * size)
    inputs = [torch.from_numpy(array[mine]) for array in arrays]
    target = torch.from_numpy(labels[mine])
    losses = {
        "cross_entropy": functional.cross_entropy,
        "mse": functional.mse_loss,
        "bce_with_logits": functional.binary_cross_entropy_with_logits,
    }
    loss_of = losses[MODELS[model].loss]
    target = target.long() if MODELS[model].loss == "cross_entropy" else target
    if processes > 1:
        distributed.init_process_group(
            "gloo", init_method=f"tcp://localhost:{port}", rank=rank, world_size=processes
        )
        net = torch.nn.parallel.DistributedDataParallel(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=RATE)

    def step() -> None:
        optimizer.zero_grad()
        loss = loss_of(net(*inputs), target)
        loss.backward()
        optimizer.step()

    def agree(count: int) -> int:
        if processes == 1:
            return count
        number = torch.tensor([count])
        distributed.broadcast(number, 0)
        return int(number)

    step()
    serve_together(rank, agree, timed(step))
    for other in others:
        other.wait()


def exchange_peer(kind: str, library: str, nbytes: int) -> None:
    """One rank that exchanges halves of a region, or reduces a region that all have."""
    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    repeats = max(4, min(200, REPEATS_BYTES // nbytes))
    if library == "mpi4py":
        mine, theirs = np.ones(nbytes // 4, np.float32), np.zeros(nbytes // 4, np.float32)
        other = 1 - comm.rank

        def exchange() -> None:
            requests = [comm.Irecv(theirs, other), comm.Isend(mine, other)]
            MPI.Request.Waitall(requests)

        once = exchange if kind == "halo" else lambda: comm.Allreduce(mine, theirs)

        def run() -> None:
            for _ in range(repeats):
                once()

    else:
        run = exchanges(kind, nbytes, repeats)
    work = timed(run)
    serve_together(comm.rank, lambda count: int(comm.bcast(count)), work, repeats)


def exchanges(kind: str, nbytes: int, repeats: int) -> Callable[[], object]:
    """Return the replay of a trace of so many exchanges between tasks that do nothing."""
    from soapstone.native.entries import noop
    from soapstone.native.memory import Entry
    from soapstone.runtime import DefaultMapper, Partition, Read, Reduce, Region, Task, Write
    from soapstone.runtime.machines.start import machine_of, start

    def bind(context: object, arrays: object) -> Entry:
        return noop()

    runtime = start("mpi", machine_of("mpi", 1), DefaultMapper())
    count = nbytes // 4
    if kind == "halo":
        region = Region((2, count), np.float32, "halves")
        mine = Partition.tiled(region, (2, 1))
        theirs = Partition.of(region, mine.lo[::-1], mine.hi[::-1], mine.grid)
        tasks = [
            (Task("write", (Write,), bind=bind), mine),
            (Task("read", (Read,), bind=bind), theirs),
        ]
    else:
        region = Region((count,), np.float32, "all")
        whole = Partition.whole(region, (2,))
        tasks = [
            (Task("add", (Reduce("sum"),), bind=bind), whole),
            (Task("read", (Read,), bind=bind), whole),
        ]

    def step() -> None:
        for _ in range(repeats):
            for task, partition in tasks:
                runtime.launch(task, partition, initialise=True)

    runtime.fill(region, 0)
    trace = runtime.capture(step)
    return trace.replay


# -- tables


def steps(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield a row for each model."""
    for model in options.models.split(","):
        with socket.socket() as found:
            found.bind(("localhost", 0))
            port = found.getsockname()[1]
        peer = [__file__, "--peer", "step", model]
        commands = {
            "one": [sys.executable, *peer, "local"],
            "two": [*mpiexec(2), sys.executable, *peer, "mpi"],
            "torch": [sys.executable, __file__, "--peer", "torch", model, "1", str(port)],
            "ddp": [sys.executable, __file__, "--peer", "torch", model, "2", str(port)],
        }
        measured = in_turns(commands, options.rounds)
        yield {
            "model": model,
            "1 rank ms": median(measured["one"], "ms"),
            "2 ranks ms": median(measured["two"], "ms"),
            "speedup": ratio(measured["one"], measured["two"]),
            "torch 1 process ms": median(measured["torch"], "ms"),
            "torch DDP ms": median(measured["ddp"], "ms"),
            "DDP speedup": ratio(measured["torch"], measured["ddp"]),
            "2 ranks / DDP": ratio(measured["two"], measured["ddp"]),
        }


def transfers(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield a row for each pattern and size."""
    for kind in ("halo", "allreduce"):
        for nbytes in map(int, options.sizes.split(",")):
            commands = {
                library: [
                    *(*mpiexec(2), sys.executable, __file__),
                    *("--peer", "exchange", kind, library, str(nbytes)),
                ]
                for library in ("soapstone", "mpi4py")
            }
            measured = in_turns(commands, options.rounds)
            yield {
                "pattern": kind,
                "bytes": nbytes,
                "soapstone us": median(measured["soapstone"], "ms") * 1e3,
                "mpi4py us": median(measured["mpi4py"], "ms") * 1e3,
                "ratio": ratio(measured["soapstone"], measured["mpi4py"]),
            }


def main() -> None:
    parser = common(
        __doc__, only="steps,transfers", models="alexnet,transformer_block,dlrm", rounds=7
    )
    parser.add_argument("--sizes", default=",".join(map(str, SIZES)))
    parser.add_argument("--peer", nargs="+", metavar="WHAT")
    options = parser.parse_args()
    if options.peer:
        what, *rest = options.peer
        if what == "step":
            step_peer(*rest)
        elif what == "torch":
            torch_peer(rest[0], int(rest[1]), int(rest[2]))
        else:
            exchange_peer(rest[0], rest[1], int(rest[2]))
        return
    command = "python benchmarks/execution/mpi.py --only"
    if "steps" in options.only:
        tabulate(
            "mpi_steps",
            "Training steps on two ranks",
            f"{command} steps",
            steps(options),
            ("speedup", "DDP speedup", "2 ranks / DDP"),
            save=not options.no_write,
        )
    if "transfers" in options.only:
        tabulate(
            "mpi_transfers",
            "Messages beside raw mpi4py",
            f"{command} transfers",
            transfers(options),
            ("ratio",),
            save=not options.no_write,
        )


if __name__ == "__main__":
    main()
