"""Models, and walkers over their strategies, for tests of what searches for strategies."""

from __future__ import annotations

from soapstone.frontend.strategies.finding import graph_of
from soapstone.ir.builder import GraphBuilder
from soapstone.ir.graph import Graph
from soapstone.ir.tensor import Role
from soapstone.search.parallel.mcmc import proposals
from soapstone.search.parallel.mcmc.walker import Walker
from soapstone.search.parallel.problem.prepare import Model as Prepared


def lenet(samples: int = 16) -> Graph:
    return graph_of("lenet", samples)


def language_model(samples: int = 16) -> Graph:
    sizes = {"unrolled": True, "length": 2, "hidden": 16, "vocabulary": 40}
    return graph_of("rnnlm", samples, sizes=sizes)


GRAPHS = {"lenet": lenet, "rnnlm": language_model}


def walker_of(model: Prepared, seed: int, delta: bool = True, **moves: float) -> Walker:
    """A walker whose moves are those named, or the informed ones, at a high temperature."""
    shares = {getattr(proposals, name): share for name, share in moves.items()}
    return Walker(model, shares or proposals.INFORMED, 2.0, delta, seed)


def product(rows: int, inner: int, columns: int) -> Graph:
    """Two products one after the other: x w, then v."""
    builder = GraphBuilder("two")
    x = builder.input("x", (rows, inner))
    w = builder.input("w", (inner, inner), role=Role.PARAMETER)
    v = builder.input("v", (inner, columns), role=Role.PARAMETER)
    (y,) = builder.apply("matmul", x, w, name="first")
    builder.output(*builder.apply("matmul", y, v, name="second"))
    return builder.build()
