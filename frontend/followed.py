"""The strategy that a session follows: which machine it needs, and what it says of each graph."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from soapstone.engine.lower import boundary_orders, channels_last, stored
from soapstone.frontend.sources import Source
from soapstone.ir.errors import GraphError
from soapstone.ir.files.layouts import Layouts
from soapstone.ir.graph import Graph
from soapstone.ir.strategy import DEFAULT, Configuration, Strategy
from soapstone.ir.strategy.following import followed
from soapstone.runtime import Machine
from soapstone.runtime.machines.start import warn_of_turns
from soapstone.system import usable_cores


class Followed:
    """What the graphs of a model run under: a given strategy, or data parallelism.

    Args:
        strategy: a given one, or its file. source: whose graphs they are.
        machine: what they run on; by default this computer, with processors as the strategy was
            made for, or as the numbers say.
        cpus, threads: how many processors, of how many threads each. gpus: GPUs instead.
        requests: how many such machines work at once.

    Raises:
        StrategyError: it is of another graph or machine; found here where the graph is known.
        GraphError: numbers that do not fit.
    """

    def __init__(
        self,
        strategy: Strategy | str | Path | None,
        source: Source,
        machine: Machine | None,
        cpus: int | None,
        threads: int | None,
        gpus: int,
        requests: int,
    ) -> None:
        if strategy is not None and not isinstance(strategy, Strategy):
            strategy = Strategy.load(Path(strategy))
        self.given: Strategy | None = strategy
        self._source = source
        self._made_for: Graph | None = None
        for name, number in (("requests", requests), ("cpus", 1 if cpus is None else cpus)):
            if isinstance(number, bool) or not isinstance(number, int) or number < 1:
                raise GraphError(f"{name}: {number!r} found; 1 or more needed")
        if gpus and requests > 1:
            raise GraphError(f"requests: {requests} found with a GPU; 1 needed")
        self.machine = machine or self._here(cpus, threads, gpus, requests)
        if strategy is None:
            return
        shapes = {each.name: each.shape for each in source.inputs}
        if strategy.inputs.keys() == shapes.keys():
            shapes = dict(strategy.inputs)
        arrays = {}
        for each in source.inputs:
            extents = [extent for extent in shapes[each.name] if isinstance(extent, int)]
            if len(extents) == len(shapes[each.name]):
                arrays[each.name] = np.broadcast_to(np.zeros((), each.dtype), extents)
        if len(arrays) == len(shapes):
            self._check(source.graph(arrays)[0])

    def _here(self, cpus: int | None, threads: int | None, gpus: int, requests: int) -> Machine:
        if gpus:
            return Machine.local(gpus=gpus)
        known: list[dict[str, Any]] = []
        if self.given is not None and self.given.machine.get("name") == "local":
            known = list(self.given.machine["processors"])
        if cpus is None:
            cpus = len(known) or 1
        if threads is None:
            threads = known[0]["threads"] if known else usable_cores() // (cpus * requests)
        threads = max(1, threads)
        if cpus * requests > 1:
            warn_of_turns(cpus * requests, threads, 5)
        return Machine.local(cpus=cpus, threads=threads)

    def of(self, graph: Graph, served: Graph, layouts: Layouts | None) -> Strategy:
        """Return the strategy of what is served of a graph.

        Args:
            graph: of the model, for some shapes of inputs.
            served: what passes have made of it.
            layouts: axis orders of values that it is to have, whatever the strategy says.

        Raises:
            StrategyError: the strategy is of another graph or machine.
        """
        if self.given is None:
            items = {DEFAULT: Configuration()}
            if len(self.machine.workers) > 1:
                from soapstone.mappers.plugins import DataParallelMapper

                items |= DataParallelMapper().configure(served, self.machine)
            strategy = Strategy(items, layouts=channels_last(served))
        else:
            if self._made_for is None:
                self._check(graph)
            assert self._made_for is not None
            fitted = self.given
            if graph.structural_hash != self._made_for.structural_hash:
                fitted = fitted.fitted(self._made_for, graph)
            strategy = followed(fitted, graph, served)
            if not strategy.layouts:
                strategy = replace(strategy, layouts=channels_last(served))
        if layouts is None:
            return strategy
        outlive = stored(served)
        free = {name: order for name, order in layouts.items() if name not in outlive}
        return replace(strategy, layouts=boundary_orders(served, free))

    def _check(self, graph: Graph) -> None:
        """Take note of the graph that the strategy is of."""
        assert self.given is not None
        self.given.check(graph, self.machine.describe())
        self._made_for = replace(graph, updates={})


__all__ = ["Followed"]
