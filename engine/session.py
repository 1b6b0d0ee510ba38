"""Bound graphs on a runtime: regions that outlive a step, and one trace for each graph."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from soapstone.engine.expand import Program, program
from soapstone.engine.initial import materialise
from soapstone.engine.lower import lower
from soapstone.engine.mapper import GraphMapper
from soapstone.ir.errors import GraphError
from soapstone.ir.graph import Graph
from soapstone.ir.strategy import Strategy
from soapstone.ir.tensor import Array, Role
from soapstone.kernels.choices import Choices
from soapstone.runtime import Machine, Profile, Region, Trace
from soapstone.runtime.machines.start import start

_AGREEING = 3  # times a graph is bound at most until all processes have made the same choices
CARRIED = (Role.PARAMETER, Role.STATE)


@dataclass(frozen=True)
class Bound:
    """A graph bound to regions and compiled to a trace.

    `feeds` and `results` are the live arrays of its step inputs and outputs; `inputs` the regions
    of the former; `batch` names the inputs that come with each batch.
    """

    graph: Graph
    strategy: Strategy
    program: Program
    trace: Trace
    feeds: Mapping[str, Array]
    results: Mapping[str, Array]
    inputs: Mapping[str, Region]
    batch: tuple[str, ...] = ()

    @property
    def variants(self) -> Mapping[str, str]:
        """Which kernel variant serves each launched node."""
        return self.program.variants


class Session:
    """A runtime, the parameters and states of a model in it, and its bound graphs.

    Args:
        values: what parameters and states begin with, by name, where it is not what the graph says;
            an entry is taken out when its value is first carried here.
    """

    def __init__(
        self,
        machine: Machine,
        mapper: GraphMapper,
        seed: int,
        executor: str = "local",
        choices: Choices | None = None,
        values: dict[str, Array] | None = None,
    ) -> None:
        self.machine = machine
        self.mapper = mapper
        self.seed = seed
        self.choices = choices or Choices()
        self.runtime = start(executor, machine, mapper)
        self.lock = threading.RLock()  # held for a step, or for a look at what it carries
        self._values = {} if values is None else values  # first contents, of which each is taken
        self._carried: dict[str, Region] = {}
        self._bounds: list[Bound] = []
        self._adopted: set[str] = set()  # inputs whose data are Legate's own
        self._timeline: Profile | None = None

    def bind(self, graph: Graph, strategy: Strategy) -> Bound:
        """Return the graph compiled under a strategy; parameters met for the first time are made.

        Raises:
            StrategyError: the strategy is not legal for the graph.
            MemoryExhausted: the working set exceeds a memory; names what was needed.
        """
        with self.lock:
            return self._bind(graph, strategy)

    def _bind(self, graph: Graph, strategy: Strategy) -> Bound:
        lowered = lower(graph, strategy)
        persistent: dict[str, Region] = {}
        for name, role in graph.roles.items():
            spec = graph.tensors[name]
            if role in CARRIED:
                persistent[name] = self._carry(graph, name)
            else:
                persistent[name] = Region(spec.shape, spec.dtype, name)
        outputs = dict(zip(graph.outputs, lowered.outputs))
        for name in outputs.values():
            spec = lowered.tensors[name]
            persistent.setdefault(name, Region(spec.shape, spec.dtype, name))
        self.mapper.adopt(strategy)
        results = {name: self.runtime.array(persistent[low]) for name, low in outputs.items()}
        fed = [name for name, role in graph.roles.items() if role not in CARRIED]
        feeds = {name: self.runtime.array(persistent[name]) for name in fed}
        for _ in range(_AGREEING):
            made = program(lowered, strategy, persistent, choices=self.choices)
            with self.runtime.capture(graph.name) as recording:
                made.launch(self.runtime)
            # Each process measures what it runs itself; one that chose otherwise binds again.
            if not self.choices.agree(self.runtime.executor.exchanged(self.choices.made)):
                break
        inputs = {name: persistent[name] for name in fed}
        batch = graph.inputs(Role.INPUT)
        bound = Bound(graph, strategy, made, recording.trace, feeds, results, inputs, batch)
        self._bounds.append(bound)
        return bound

    def forget(self) -> None:
        """Let go of all bound graphs; what they carry stays."""
        self._bounds.clear()

    def _carry(self, graph: Graph, name: str) -> Region:
        region = self._carried.get(name)
        spec = graph.tensors[name]
        if region is None:
            region = Region(spec.shape, spec.dtype, name)
            first = self._values.get(name)
            if first is None:
                first = materialise(graph.initials.get(name), spec, self.seed, name)
            elif first.shape != spec.shape:
                raise GraphError(f"{name!r}: shape {first.shape} found, {spec.shape} needed")
            self.runtime.write(region, first)
            self._carried[name] = region
            self._values.pop(name, None)
        elif region.shape != spec.shape:
            raise GraphError(
                f"parameter {name!r}: shape {spec.shape} found, {region.shape} needed as before"
            )
        return region

    def feed(self, bound: Bound, name: str, value: Any) -> None:
        """Let the next run read an array as an input: a copy, or under Legate its own data itself.

        value: of the input's shape; of its dtype, it is not copied if it is data of Legate.
        """
        target, runtime = bound.feeds[name], self.runtime
        adopt = getattr(runtime, "adopt", None)  # Legate's runtime has it
        if adopt is None or not hasattr(value, "__legate_data_interface__"):
            if name in self._adopted:
                self._adopted.discard(name)
                target = runtime.array(bound.inputs[name])
            target[...] = value
        elif value.dtype == target.dtype:
            self._adopted.add(name)
            adopt(bound.inputs[name], value)
        else:
            self.feed(bound, name, np.asarray(value))

    def shared(self) -> dict[str, Any]:
        """Return all parameters and states under Legate, by name, for its other libraries: no copy.

        Raises:
            GraphError: the executor is not Legate.
        """
        view = getattr(self.runtime, "view", None)
        if view is None:
            raise GraphError("shared parameters: executor 'legate' needed")
        return {name: view(region) for name, region in self._carried.items()}

    def run(self, bound: Bound) -> None:
        """Run a bound graph once on what its feeds hold."""
        bound.trace.replay(profile=self._timeline)

    def state(self) -> dict[str, Array]:
        """Return copies of all parameters and states that are carried, by name, of one moment."""
        with self.lock:
            return {name: self.runtime.read(region) for name, region in self._carried.items()}

    def load_state(self, values: Mapping[str, Array]) -> None:
        """Replace parameters and states; those that no bound graph has yet begin with their values.

        Raises:
            GraphError: another shape; then nothing is replaced.
        """
        with self.lock:
            for name, value in values.items():
                region = self._carried.get(name)
                if region is not None and np.shape(value) != region.shape:
                    raise GraphError(
                        f"parameter {name!r}: shape {np.shape(value)} found, {region.shape} needed"
                    )
            for name, value in values.items():
                if name in self._carried:
                    self.runtime.write(self._carried[name], np.asarray(value))
                else:
                    self._values[name] = np.array(value)

    @property
    def peak_bytes(self) -> int:
        """Bytes of everything allocated: carried regions, feeds, results and arenas."""
        return sum(self.runtime.memory.used(i) for i in range(len(self.machine.memories)))

    @contextmanager
    def profile(self, path: str | Path) -> Iterator[None]:
        """Time every task run inside and write a trace-event timeline, of all processes."""
        world = self.runtime.executor.world
        self._timeline = Profile.here(self.machine, world, "soapstone")
        try:
            yield
        finally:
            timeline, self._timeline = self._timeline, None
            whole = self.runtime.executor.gathered(timeline)
            if whole is not None:
                whole.save(path)

    def close(self) -> None:
        """Stop the workers and free the memory."""
        self._bounds.clear()
        self._carried.clear()
        self.runtime.close()
