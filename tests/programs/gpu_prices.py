"""What a roofline prices for a GPU against what a step on one launches, in Numba's simulator.

    NUMBA_ENABLE_CUDASIM=1 python -m programs.gpu_prices mlp cnn ...

Prints, by network and by whether it is trained, what was priced and what was launched as JSON: the
kernel, grid and block of each launch in order, and `host` for what the host runs.
"""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

from helpers.training_runs import BUILDERS, data
from helpers.unserved import without_cuda

from soapstone import SGD, InferenceSession, Model
from soapstone.frontend.strategies.finding import forward_of
from soapstone.frontend.training.trainer import NonFiniteLoss
from soapstone.kernels.cuda.entry import Launch
from soapstone.kernels.cuda.substrate.target import processors
from soapstone.kernels.fallback import FallbackWarning
from soapstone.runtime.devices.calls import OnHost
from soapstone.search.cost.gpus import Priced
from soapstone.search.cost.machine import Device, RooflineCost

Row = list[Any]


def attention() -> Model:
    """Return a network with a composite, and with an operator that no kernel serves."""
    model = Model("attention", seed=2)
    x = model.input("x", (2, 5, 8))
    x = model.layer_norm(model.add(x, model.multi_head_attention(x, x, x, 2)))
    model.output(model.dense(model.flatten(model.cumsum(model.gelu(x), axis=1)), 5))
    return model


def recurrent() -> Model:
    """Return a network with a recurrent layer, whose steps are launches of primitives."""
    model = Model("recurrent", seed=4)
    x, _ = model.lstm(model.input("x", (3, 4, 6)), 5)
    model.output(model.dense(model.flatten(x), 5))
    return model


NETWORKS: dict[str, Callable[[], Model]] = {
    **BUILDERS,
    "attention": attention,
    "recurrent": recurrent,
}


@contextmanager
def recorded() -> Iterator[list[Row]]:
    """Note what is launched inside, in order. Kernels do not run: the simulator takes long."""
    found: list[Row] = []
    enqueue, run = Launch.enqueue, OnHost.run

    def launched(self: Launch, stream: Any = 0) -> None:
        found.append([self.kernel.name, list(self.grid), list(self.block)])

    def hosted(self: OnHost, lane: Any) -> None:
        found.append(["host", [], []])
        run(self, lane)

    Launch.enqueue, OnHost.run = launched, hosted  # type: ignore[method-assign]
    try:
        yield found
    finally:
        Launch.enqueue, OnHost.run = enqueue, run  # type: ignore[method-assign]


def device() -> Device:
    """Return a GPU with as many multiprocessors as grids are cut for here."""
    found = Device.load("h100")
    assert found.gpu is not None
    return replace(found, gpu=replace(found.gpu, multiprocessors=processors()))


def compared(name: str) -> dict[str, list[list[Row]]]:
    """Return the rows that were priced and those launched: of inference, and of a training step."""
    with NETWORKS[name]() as model:
        model.compile(SGD(0.1), "cross_entropy", gpus=1)
        x, y = data(model)
        priced = RooflineCost(device(), training=True).launches(model.training_graph, {})
        with recorded() as trained, suppress(NonFiniteLoss):  # its numbers are anything
            model.fit(x, y, epochs=1, batch_size=len(x), progress=False)
        inferred = RooflineCost(device()).launches(*forward_of(model))
        with recorded() as ran, InferenceSession(model, gpus=1) as session:
            session.run({"x": x})
    return {"training": [rows(priced), trained], "inference": [rows(inferred), ran]}


def rows(found: list[tuple[str, float, Priced]]) -> list[Row]:
    """Return priced launches as `recorded` has them."""
    return [[each.kernel, list(each.grid), list(each.block)] for _, _, each in found]


if __name__ == "__main__":
    without_cuda("cumsum")
    warnings.simplefilter("ignore", FallbackWarning)
    print(json.dumps({name: compared(name) for name in sys.argv[1:]}))
