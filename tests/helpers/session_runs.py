"""Graphs, and models, run in sessions of their own."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from soapstone import InferenceSession
from soapstone.engine.mapper import GraphMapper
from soapstone.engine.session import Session
from soapstone.frontend.onnx import OnnxModel
from soapstone.ir.graph import Graph
from soapstone.ir.strategy import Strategy
from soapstone.ir.tensor import Array
from soapstone.mappers import load
from soapstone.runtime import Machine


def ran(
    graph: Graph,
    values: Mapping[str, Array],
    strategy: Strategy | None = None,
    machine: Machine | None = None,
    mapper: str | GraphMapper = "sequential",
    runs: int = 1,
) -> tuple[dict[str, Array], dict[str, Array]]:
    """Return a graph's outputs, and its parameters and states afterwards, by name.

    Args:
        strategy: by default what the mapper says.
        machine: by default one processor.
        runs: how often, each time on the same inputs: a second finds what the first left behind.
    """
    machine, chosen = machine or Machine.local(cpus=1), load(mapper)
    chosen.attach(machine)
    session = Session(machine, chosen, seed=0)
    try:
        bound = session.bind(graph, strategy or chosen.strategy(graph, machine))
        session.load_state({n: array for n, array in values.items() if n not in bound.feeds})
        for _ in range(runs):
            for name, feed in bound.feeds.items():
                feed[...] = values[name]
            session.run(bound)
        return {name: np.array(array) for name, array in bound.results.items()}, session.state()
    finally:
        session.close()


def assert_near(
    found: Mapping[str, Array], expected: Mapping[str, Array], tolerance: float, least: float = 0.0
) -> None:
    """Compare values by name, each relative to its largest element, or to `least`."""
    for name, value in found.items():
        scale = max(float(np.abs(expected[name]).max(initial=0.0)), least)
        np.testing.assert_allclose(value, expected[name], atol=tolerance * scale, rtol=0)


def fresh_answers(model: OnnxModel, feeds: Mapping[str, Array]) -> dict[str, Array]:
    """Return the outputs of a session that has met no other shape, and prepares for none."""
    with InferenceSession(model, threads=1, tune=False) as fresh:
        fresh.serial.binder.packed.warmup.close()
        return fresh.run(feeds)
