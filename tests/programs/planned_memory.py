"""What sessions hold beside what is planned: `python -m programs.planned_memory [NAMES]`.

Under mpiexec all ranks' memories are looked at; the first rank prints a line a strategy: the
model, the strategy, planned and held bytes of each memory.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
from programs.replicated_training import in_copies

from soapstone.engine.measuring import running
from soapstone.engine.peers import Peers
from soapstone.engine.session import planned_memory
from soapstone.frontend.strategies.finding import graph_of
from soapstone.ir.graph import Graph
from soapstone.ir.strategy import Strategy
from soapstone.ir.strategy.configuration import Keep
from soapstone.runtime.machines.start import default_executor, machine_of, rank_of
from soapstone.search.parallel.mcmc.initial import data_parallel, randomly
from soapstone.search.parallel.problem.choice import Settled, as_strategy
from soapstone.search.parallel.problem.prepare import Model, prepare

SMALL = {"layers": 1, "hidden": 32, "heads": 4, "inner": 64, "vocabulary": 50}
APPS = {
    "mlp": (16, {}),
    "transformer": (4, SMALL),
    "resnet": (2, {"depth": 18, "image_size": 32, "classes": 10, "width": 8}),
    "rnnlm": (4, {"unrolled": True, "hidden": 32, "length": 3, "vocabulary": 50}),
}
SEEDS = 2


def strategies(graph: Graph, model: Model) -> Iterator[tuple[str, Strategy]]:
    """Yield data parallelism, with copies too, random strategies, and one that recomputes."""

    def made(found: object) -> Strategy:
        settled = Settled(model)
        settled.set(found)
        return as_strategy(graph, model, settled.configurations(), {})

    data = made(data_parallel(model))
    yield "data", data
    yield "copies", in_copies(graph, data)
    for seed in range(SEEDS):
        yield f"random {seed}", made(randomly(model, seed))
    inner = [
        name
        for item in model.operators
        for node in item.ahead[:-1]
        for name in node.outputs
        if name not in node.overwrites
    ]
    yield "recomputed", replace(data, tensors=dict.fromkeys(inner, Keep.RECOMPUTE))


def main() -> None:
    """Print what is planned and held."""
    executor = default_executor()
    peers = Peers(executor)
    machine = machine_of(executor, 1 if executor == "mpi" else 2)
    rated = replace(
        machine,
        processors=tuple(replace(each, flops=1e11) for each in machine.processors),
        memories=tuple(replace(each, bytes_per_s=1e10) for each in machine.memories),
    )
    for name in sys.argv[1:] or APPS:
        batch, sizes = APPS[name]
        graph = graph_of(name, batch, sizes=sizes)
        for label, strategy in strategies(graph, prepare(graph, rated)):
            planned = planned_memory(graph, strategy, machine)
            with running(graph, machine, strategy, executor=executor) as (session, _):
                held = peers.all(np.array(session.used_bytes)).sum(0).astype(int).tolist()
            if rank_of(executor) == 0:
                print(name, label.replace(" ", "-"), list(planned), held, sep="\t")


if __name__ == "__main__":
    main()
