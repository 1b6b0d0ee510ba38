"""What sessions hold beside what is planned: `mpiexec -n 2 python required_memory.py FILE...`.

Each file is a strategy, named by model and way. All ranks' memories are looked at; the first rank
prints a line a file: its name, planned and held bytes of each memory.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

import numpy as np

from soapstone.engine.measuring import running
from soapstone.engine.peers import Peers
from soapstone.engine.required_memory import required_memory
from soapstone.frontend.strategies.finding import graph_of
from soapstone.ir.graph import Graph
from soapstone.ir.strategy import Strategy
from soapstone.runtime.machines.start import machine_of, rank_of

SMALL = {"layers": 1, "hidden": 32, "heads": 4, "inner": 64, "vocabulary": 50}
APPS = {
    "mlp": (16, {}),
    "transformer": (4, SMALL),
    "resnet": (2, {"depth": 18, "blocks": (1, 1), "image_size": 32, "classes": 10, "width": 8}),
    "rnnlm": (4, {"unrolled": True, "hidden": 32, "length": 3, "vocabulary": 50}),
}


@cache
def graph_named(name: str) -> Graph:
    """Return the training graph of an app."""
    batch, sizes = APPS[name]
    return graph_of(name, batch, sizes=sizes)


def rows(files: Sequence[Path], executor: str) -> Iterator[tuple[str, list[int], list[int]]]:
    """Yield the name of each strategy, and the bytes of each memory, planned and held."""
    peers = Peers(executor)
    machine = machine_of(executor, 1 if executor == "mpi" else 2)
    for file in files:
        graph, strategy = graph_named(file.stem.split()[0]), Strategy.load(file)
        planned = required_memory(graph, strategy, machine)
        with running(graph, machine, strategy, executor=executor) as (session, _):
            held = peers.all(np.array(session.used_bytes)).sum(0).astype(int).tolist()
        yield file.stem, list(planned), held


def main() -> None:
    """Print what is planned and held."""
    for row in rows([Path(name) for name in sys.argv[1:]], "mpi"):
        if rank_of("mpi") == 0:
            print(*row, sep="\t")


if __name__ == "__main__":
    main()
