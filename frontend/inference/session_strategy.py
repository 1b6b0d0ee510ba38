"""The strategy of a session: the machine that it needs, and its form for each graph."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from soapstone.engine.lower import boundary_orders, channels_last, stored
from soapstone.frontend.inference.sources import Source
from soapstone.frontend.onnx.texts import blank
from soapstone.ir.errors import GraphError, StrategyError
from soapstone.ir.files.layouts import Layouts
from soapstone.ir.graph import Graph
from soapstone.ir.strategy import DEFAULT, Configuration, Strategy
from soapstone.ir.strategy.transfer import to_rewritten
from soapstone.runtime import Machine
from soapstone.runtime.machines.start import warn_of_turns
from soapstone.system import usable_cores


class SessionStrategy:
    """The strategy under which the graphs of a model run: a given one, or data parallelism.

    Args:
        strategy: a strategy, the path of its file, or None for data parallelism.
        source: the model.
        machine: what the graphs run on; by default this computer, with the processors that the
            strategy was made for, or as `cpus`, `threads` and `gpus` say.
        cpus, threads: the number of processors, and of threads of each.
        gpus: the number of GPUs, which are used instead of processors where it is not 0.
        requests: the number of such machines that work at once.

    Raises:
        StrategyError: the strategy is of another graph or machine. A strategy of a graph that is
            only known when inputs come is checked by `of`.
        GraphError: a count that is less than 1, or counts that contradict each other.
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
        if isinstance(strategy, str | Path):
            strategy = Strategy.load(Path(strategy))
        if not isinstance(strategy, Strategy | None):
            kind = type(strategy).__name__
            raise StrategyError(f"strategy: {kind} found; a strategy or the path of one needed")
        self.given: Strategy | None = strategy
        self._source = source
        self._made_for: Graph | None = None
        for name, number in (("requests", requests), ("cpus", 1 if cpus is None else cpus)):
            if isinstance(number, bool) or not isinstance(number, int) or number < 1:
                raise GraphError(f"{name}: {number!r} found; 1 or more needed")
        if machine is not None and (cpus, threads, gpus) != (None, None, 0):
            raise GraphError("machine: found with cpus, threads or gpus; either needed")
        if gpus and requests > 1:
            raise GraphError(f"requests: {requests} found with a GPU; 1 needed")
        self.machine = machine or self._here(cpus, threads, gpus, requests)
        if strategy is None:
            return
        arrays = {}
        for each in source.inputs:
            told = strategy.inputs.get(each.name, each.shape)
            axes = each.axes(len(told))
            whole = told if len(told) == len(axes) else axes
            mixed = [a if isinstance(a, int) else b for a, b in zip(axes, whole)]
            extents = [extent for extent in mixed if isinstance(extent, int)]
            if len(extents) < len(mixed):
                return  # the graph is known when it first runs
            arrays[each.name] = blank(extents, each.dtype)
        self._check(source.graph(arrays)[0])

    def _here(self, cpus: int | None, threads: int | None, gpus: int, requests: int) -> Machine:
        if gpus:
            return Machine.local(gpus=gpus)
        known: list[Mapping[str, Any]] = []
        if self.given is not None and self.given.machine.get("name") == "local":
            known = [p for p in self.given.machine.get("processors", ()) if isinstance(p, Mapping)]
        if cpus is None:
            cpus = len(known) or 1
        told = threads is not None
        if threads is None:
            shared = max(1, usable_cores() // (cpus * requests))
            threads = known[0].get("threads", shared) if known else shared
        machine = Machine.local(cpus=cpus, threads=threads)
        if cpus * requests > 1 or told:
            warn_of_turns(cpus * requests, threads)
        return machine

    def of(self, graph: Graph, rewritten: Graph, layouts: Layouts | None) -> Strategy:
        """Return the strategy of a rewritten graph.

        Args:
            graph: of the model, for some shapes of inputs.
            rewritten: what passes have made of it.
            layouts: axis orders of values, which replace those of the strategy.

        Raises:
            StrategyError: the strategy is of another graph or machine.
        """
        if self.given is None:
            items = {DEFAULT: Configuration()}
            if len(self.machine.workers) > 1:
                from soapstone.mappers.plugins import DataParallelMapper

                items |= DataParallelMapper().configure(rewritten, self.machine)
            strategy = Strategy(items, layouts=channels_last(rewritten))
        else:
            if self._made_for is None:
                self._check(graph)
            assert self._made_for is not None
            fitted = self.given
            if graph.structural_hash != self._made_for.structural_hash:
                fitted = fitted.fitted(self._made_for, graph)
            strategy = to_rewritten(fitted, graph, rewritten)
            if not strategy.layouts:
                strategy = replace(strategy, layouts=channels_last(rewritten))
        if layouts is None:
            return strategy
        outlive = stored(rewritten)
        free = {name: order for name, order in layouts.items() if name not in outlive}
        return replace(strategy, layouts=boundary_orders(rewritten, free))

    def _check(self, graph: Graph) -> None:
        """Check the strategy against its graph and the machine, and keep the graph."""
        assert self.given is not None
        self.given.check(graph, self.machine.describe())
        self._made_for = replace(graph, updates={})
