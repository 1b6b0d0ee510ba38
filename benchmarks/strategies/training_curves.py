"""Losses of training under different strategies, run here (a table of `strategies.py`)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from soapstone import SGD
from soapstone.apps.images import lenet
from soapstone.engine.lower import channels_last
from soapstone.frontend.data.sets import images
from soapstone.frontend.training.state import Callback, TrainingState
from soapstone.ir.graph import Graph
from soapstone.ir.strategy import Strategy
from soapstone.runtime.machines.cluster import load_machine
from soapstone.search.parallel import NAMED, Options, search
from soapstone.search.parallel.mcmc.initial import randomly
from soapstone.search.parallel.problem.choice import Settled, as_strategy
from soapstone.search.parallel.problem.prepare import prepare

Row = dict[str, Any]


class Losses(Callback):
    """Keeps the loss of every step."""

    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_step_end(self, state: TrainingState) -> None:
        self.losses.append(float(state.loss))


def curves(seed: int) -> Iterator[Row]:
    """Yield a row a strategy, each trained on the local executor."""
    data = images("lenet", (1, 28, 28), 10, 2048, seed)
    losses: dict[str, list[float]] = {}
    for way in ("sequential", *NAMED, "random", "found"):
        model = lenet.build(64)
        compiled = {"optimizer": SGD(0.01, momentum=0.9), "loss": "cross_entropy", "cpus": 2}
        strategy = None
        if way != "sequential":
            model.compile(**compiled)
            strategy = chosen(way, model.training_graph)
        model.compile(**compiled, strategy=strategy)
        curve = Losses()
        with model:
            model.fit(
                data.train_x,
                data.train_y,
                epochs=2,
                callbacks=[curve],
                shuffle=False,
                progress=False,
            )
        losses[way] = curve.losses
        apart = np.abs(np.subtract(curve.losses, losses["sequential"]))
        yield {
            "model": "lenet",
            "strategy": way,
            "first loss": curve.losses[0],
            "last loss": curve.losses[-1],
            "steps": len(curve.losses),
            "most apart from sequential": float(apart.max()),
        }


def chosen(way: str, graph: Graph) -> Strategy:
    """Return the strategy of a name for two described devices."""
    machine = load_machine("p100", 2)
    prepared = prepare(graph, machine)
    if way == "found":
        found = search(graph, machine, Options(seconds=5.0)).strategy.configurations
    else:
        start = randomly(prepared, 0) if way == "random" else NAMED[way](prepared)
        settled = Settled(prepared)
        settled.set(start)
        found = as_strategy(graph, prepared, settled.configurations(), {}).configurations
    return Strategy(configurations=found, layouts=channels_last(graph))
