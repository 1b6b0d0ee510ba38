"""Sessions in which a step is bound to be timed or compared, with random inputs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import numpy as np

from soapstone.engine.mapper import GraphMapper
from soapstone.engine.session import Bound, Session
from soapstone.ir.analysis.indices import index_range
from soapstone.ir.graph import Graph
from soapstone.ir.strategy import Strategy
from soapstone.ir.tensor import NOTHING, Array, Role
from soapstone.ir.training.guard import LEARNING_RATE
from soapstone.runtime import Machine


@contextmanager
def running(
    graph: Graph,
    machine: Machine,
    strategy: Strategy,
    mapper: GraphMapper | None = None,
    executor: str = "local",
    constants: Mapping[str, Array] = NOTHING,
) -> Iterator[tuple[Session, Bound]]:
    """Yield a session, and in it a graph bound under a strategy and fed with random inputs.

    Scalars, such as the learning rate and the number of the step, are 1.

    mapper: places what the strategy leaves open; by default blocks of points. constants: contents,
    by name.
    """
    session = Session(machine, mapper or GraphMapper(), seed=0, executor=executor)
    try:
        bound = session.bind(graph, strategy, constants)
        for name, feed in bound.feeds.items():
            feed[...] = drawn(graph, name) if graph.roles[name] is Role.INPUT else 1
        yield session, bound
    finally:
        session.close()


def hold(bound: Bound) -> None:
    """Set the learning rate to zero, so that parameters keep their values in every step."""
    if LEARNING_RATE in bound.feeds:
        bound.feeds[LEARNING_RATE][...] = 0


def drawn(graph: Graph, name: str) -> Array:
    """Return seeded random contents of an input: around 0, or 0 and 1 for integers.

    For an index into a single element it is 0.
    """
    spec = graph.tensors[name]
    random = np.random.default_rng([*name.encode(), spec.size])
    if spec.is_float:
        drawn = random.standard_normal(spec.shape)
        return (np.abs(drawn) if graph.roles[name] is Role.STATE else drawn).astype(spec.dtype)
    known = index_range(graph, name, parts=True)
    most = 2 if known is None else min(2, max(known[0].stop, 1))
    return random.integers(0, most, spec.shape).astype(spec.dtype)
