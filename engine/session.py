"""Bound graphs on a runtime: regions that outlive a step, and one trace for each graph."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import ExitStack, contextmanager
from dataclasses import field
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

import numpy as np

from soapstone.engine.expand import Program
from soapstone.engine.images import Images, imaged
from soapstone.engine.initial import materialise
from soapstone.engine.lower import in_place
from soapstone.engine.lower.verify import check_graph, check_views
from soapstone.engine.mapper import GraphMapper
from soapstone.engine.prepare import Prepared, prepare
from soapstone.ir.errors import GraphError
from soapstone.ir.graph import Graph
from soapstone.ir.plan import Action, MemoryPlan
from soapstone.ir.strategy import Strategy
from soapstone.ir.tensor import NOTHING, Array, Role
from soapstone.kernels.choices import Choices
from soapstone.native.memory import CHECKED
from soapstone.records import dataclass
from soapstone.runtime import Machine, Profile, ProfileError, Region, Runtime, Trace
from soapstone.runtime.machines.machine import CUDA
from soapstone.runtime.machines.memory import Arena
from soapstone.runtime.machines.start import start
from soapstone.runtime.tracing.alike import Alike
from soapstone.runtime.tracing.planned import PlannedStep

_AGREEING = 3  # times a graph is bound at most until all processes have made the same choices
T = TypeVar("T")
CARRIED = (Role.PARAMETER, Role.STATE)
_NONE = np.zeros(0)  # contents that nobody reads


@dataclass(frozen=True)
class Bound:
    """A graph bound to regions and compiled to a trace.

    `feeds` and `results` are the live arrays of its step inputs and outputs; `inputs` the regions
    of the former; `lent` those feeds that are given arrays themselves; `prepared` is the graph as
    it is launched, and `plans` the memory plans that this follows, if any, of the memories in which
    processors of this process work.
    """

    graph: Graph
    prepared: Prepared
    program: Program
    trace: Trace
    feeds: Mapping[str, Array]
    results: Mapping[str, Array]
    inputs: Mapping[str, Region]
    plans: Mapping[str, MemoryPlan] = field(default_factory=dict)
    lent: Mapping[str, Array] = field(default_factory=dict)

    @cached_property
    def batch(self) -> tuple[str, ...]:
        """The inputs that come with each batch."""
        return self.graph.inputs(Role.INPUT)

    @property
    def moved_bytes(self) -> tuple[int, int] | None:
        """What a run copies between this process' memories, by plan and as it is compiled.

        None where no plan is followed.
        """
        planned = sum(plan.moved_bytes for plan in self.plans.values())
        return (planned, self.trace.copied_bytes) if self.plans else None

    @property
    def variants(self) -> Mapping[str, str]:
        """Which kernel variant serves each launched node."""
        return self.program.variants


class Session:
    """A runtime, the parameters and states of a model in it, and its bound graphs.

    Args:
        values: what parameters and states begin with, by name, where it is not what the graph says;
            an entry is taken out when its value is first carried here.
        precision: what products may round their operands to (`kernels.entry.Call`).
        runtime: on this machine, with this mapper; by default one with threads of its own.
    """

    def __init__(
        self,
        machine: Machine,
        mapper: GraphMapper,
        seed: int,
        executor: str = "local",
        choices: Choices | None = None,
        values: dict[str, Array] | None = None,
        precision: str = "float32",
        runtime: Runtime | None = None,
    ) -> None:
        self.precision = precision
        self.machine = machine
        self.mapper = mapper
        self.seed = seed
        self.choices = choices or Choices()
        self.runtime = runtime or start(executor, machine, mapper)
        self.lock = threading.RLock()  # held for a step, or for a look at what it carries
        self._values = {} if values is None else values  # first contents, of which each is taken
        self._carried: dict[str, Region] = {}
        self._bounds: list[Bound] = []
        self._results: dict[int, Arena] = {}  # of graphs that are bound in turn, by number
        self._alike = Alike()
        self._adopted: set[str] = set()  # inputs whose data are Legate's own
        self._timeline: Profile | None = None

    def bind(
        self,
        graph: Graph,
        strategy: Strategy,
        constants: Mapping[str, Array] = NOTHING,
        *,
        names: Sequence[str] | None = None,
        fuse: bool = True,
        lent: Mapping[str, Array] = NOTHING,
    ) -> Bound:
        """Return the graph compiled under a strategy; parameters met for the first time are made.

        Args:
            constants: the contents of inputs that never change, by value: they need no region.
            names: what results are called, where not as the graph's outputs are.
            fuse: let several operators be one launch.
            lent: arrays of inputs, by name, that runs are to read where they are, if that can be:
                then nothing else can be fed.

        Raises:
            StrategyError: the strategy is not legal for the graph.
            MemoryExhausted: the working set exceeds a memory; names what was needed.
            GraphError: the mapper's memory plan is of something else.
        """
        with self.lock:
            prepared = self.prepared(graph, strategy, constants.keys(), fuse=fuse)
            return self.bind_prepared(graph, prepared, constants, names=names, lent=lent)

    def prepared(
        self, graph: Graph, strategy: Strategy, constants: Set[str], *, fuse: bool = True
    ) -> Prepared:
        """Return a graph as it is launched here; see `bind`."""
        halves = all(each.kind == CUDA for each in self.machine.processors)
        return prepare(graph, strategy, constants, fuse=fuse, halves=halves)

    def bind_prepared(
        self,
        graph: Graph,
        prepared: Prepared,
        constants: Mapping[str, Array] = NOTHING,
        *,
        names: Sequence[str] | None = None,
        lent: Mapping[str, Array] = NOTHING,
        in_turn: bool = False,
    ) -> Bound:
        """Return what `bind` does of a graph that is prepared.

        graph: that one, or another of its inputs and outputs. in_turn: results lie where those of
        all graphs that are bound so do, each run of which overwrites them.
        """
        if CHECKED:
            check_graph(prepared.graph)
            check_views(prepared.graph, prepared.strategy, prepared.seen)
        with self.lock:
            lowered = prepared.graph
            regions: dict[str, Region] = {}
            for name, role in graph.roles.items():
                if name not in constants:
                    carried = role in CARRIED
                    regions[name] = self._carry(graph, name) if carried else _region(graph, name)
            for name in lowered.outputs:
                if name not in constants and name not in regions:
                    regions[name] = _region(lowered, name)
            if in_turn and self.runtime.borrows and not self.runtime.many_instances:
                self._share_results(lowered, regions)
            self.mapper.adopt(prepared.strategy)
            results = {
                name: constants[low] if low in constants else self.runtime.array(regions[low])
                for name, low in zip(names or graph.outputs, lowered.outputs)
            }
            fed = [n for n in regions if graph.roles.get(n, Role.STATE) not in CARRIED]
            lent = {
                name: array
                for name, array in lent.items()
                if (array.shape, array.dtype) == (regions[name].shape, regions[name].dtype)
                and self.runtime.lend(regions[name], array)
            }
            feeds = {name: self.runtime.array(regions[name]) for name in fed}
            mine = self.runtime.executor.processors
            images = imaged(prepared, constants, self.machine, mine)
            plans = self.mapper.planned(prepared, images, self.runtime.executor)
            for _ in range(_AGREEING):
                program = program_of(
                    *(prepared, regions, constants, self.choices, images, plans, self.precision)
                )
                with self.runtime.capture(graph.name, self._alike) as recording:
                    program.launch(self.runtime)
                # Each process measures what it runs itself; one that chose otherwise binds again.
                executor = self.runtime.executor
                if executor.world.size == 1 or not self.choices.agree(
                    executor.exchanged(self.choices.made)
                ):
                    break
            program.release()
            inputs = {name: regions[name] for name in fed}
            trace = recording.trace
            bound = Bound(graph, prepared, program, trace, feeds, results, inputs, plans, lent)
            self._bounds.append(bound)
            return bound

    def _share_results(self, graph: Graph, regions: Mapping[str, Region]) -> None:
        """Let what a graph makes as its outputs lie in memory that other graphs use too."""
        memory = self.runtime.analysis.world.home
        for number, name in enumerate(dict.fromkeys(graph.outputs)):
            spec = graph.tensors[name]
            if name in graph.producers and spec.nbytes:
                what = f"output {name!r}"
                arena = self.runtime.memory.arena(memory, spec.nbytes, what, ("output", number))
                self._results[number] = arena
                array = arena.buffer[: spec.nbytes].view(spec.dtype).reshape(spec.shape)
                self.runtime.lend(regions[name], array)

    def forget(self, bound: Bound | None = None) -> None:
        """Let go of a bound graph, or of all; what they carry stays."""
        self._bounds = [each for each in self._bounds if bound is not None and each is not bound]

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

        value: of the input's shape; of its dtype, it is not copied if it is data of Legate. Where
            an array was lent to the bound graph, that one.
        """
        if name in bound.lent:
            return
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
            GraphError: the executor is not Legate, or works in a fast memory.
        """
        view = getattr(self.runtime, "view", None)
        if view is None:
            raise GraphError("shared parameters: executor 'legate' without a fast memory needed")
        return {name: view(region) for name, region in self._carried.items()}

    def run(self, bound: Bound) -> None:
        """Run a bound graph once on what its feeds hold."""
        bound.trace.replay(profile=self._timeline)

    def entries(self, bound: Bound) -> tuple[Array, Array] | None:
        """Return what a run of a bound graph is nothing but, or None; see `Trace.entries`."""
        return None if self._timeline is not None else bound.trace.entries

    def together(self, run: Callable[[], T], steps: int) -> T:
        """Return what a function gives that runs entries; nothing else runs meanwhile.

        steps: of how many runs of bound graphs the entries are.
        """
        with self.runtime.turn:
            self.runtime.quiet("replay")
            self.runtime.statistics.steps_replayed += steps
            return run()

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
        return sum(self.used_bytes)

    @property
    def used_bytes(self) -> tuple[int, ...]:
        """The same for each memory; 0 for those of other processes."""
        return tuple(self.runtime.memory.used(i) for i in range(len(self.machine.memories)))

    @property
    def peak_bytes_per_device(self) -> dict[str, int]:
        """The same for the memory of each processor of this process, by the processor's name."""
        used = dict(zip((memory.name for memory in self.machine.memories), self.used_bytes))
        mine = (self.machine.processors[i] for i in self.runtime.executor.processors)
        return {processor.name: used[processor.memory] for processor in mine}

    @contextmanager
    def timed(self) -> Iterator[Profile]:
        """Time every task run inside; yields the timeline of this process.

        Raises:
            ProfileError: another timeline is being taken.
        """
        if self._timeline is not None:
            raise ProfileError("profile: a timeline is already being taken, by another callback")
        self._timeline = Profile.here(self.machine, self.runtime.executor.world, "soapstone")
        try:
            yield self._timeline
        finally:
            self._timeline = None

    @contextmanager
    def profile(self, path: str | Path) -> Iterator[None]:
        """Time every task run inside and write a trace-event timeline, of all processes."""
        with ExitStack() as stack:
            timeline = stack.enter_context(self.timed())
            stack.callback(self._save, timeline, path)
            yield

    def _save(self, timeline: Profile, path: str | Path) -> None:
        whole = self.runtime.executor.gathered(timeline)
        if whole is not None:
            whole.save(path)

    def close(self) -> None:
        """Stop the workers and free the memory."""
        self._bounds.clear()
        self._carried.clear()
        self._results.clear()
        self.runtime.close()


def _region(graph: Graph, name: str) -> Region:
    spec = graph.tensors[name]
    return Region(spec.shape, spec.dtype, name)


def planned_memory(
    graph: Graph,
    strategy: Strategy,
    machine: Machine,
    contents: Mapping[str, Array] = NOTHING,
) -> tuple[int, ...]:
    """Return the bytes that each memory of a machine holds when a graph is bound on it, by plan.

    Nothing is allocated: its launches are analysed and laid out as `Session.bind` has it done, and
    `Session.used_bytes` is the same. Processors that have a node are those of ranks of MPI, which
    own as many memories each.

    contents: of constants by name, from which images follow (`engine.images`); without them, all
    of what is gathered from is counted.

    Raises:
        StrategyError: the strategy is not legal for the graph.
    """
    constants = graph.inputs(Role.CONSTANT)
    prepared, mapper = prepare(graph, strategy, set(constants)), GraphMapper()
    ranks = {processor.memory for processor in machine.processors if processor.node}
    step = PlannedStep(machine, mapper, processes=len(ranks) or 1)
    mapper.adopt(prepared.strategy)
    lowered = prepared.graph
    regions = {
        name: step.hold(_region(lowered, name), live=graph.roles.get(name) not in CARRIED)
        for name in dict.fromkeys((*graph.roles, *lowered.outputs))
        if name not in constants
    }
    known = dict.fromkeys(constants, _NONE) | dict(contents)
    images = imaged(prepared, known, machine, range(len(machine.processors)))
    program_of(prepared, regions, known, Choices(), images).launch(step)
    return step.nbytes()


def program_of(
    prepared: Prepared,
    persistent: Mapping[str, Region],
    constants: Mapping[str, Array],
    choices: Choices,
    images: Images | None = None,
    plans: Mapping[str, MemoryPlan] = MappingProxyType({}),
    precision: str = "float32",
) -> Program:
    """Return the launches of a graph with a region for each value.

    persistent: regions that outlive a step, by value: the graph's inputs and outputs. images: the
    launches where some gather from images. plans: whose order the launches have; by default
    the graph's.
    """
    graph = prepared.graph
    regions = dict(persistent)
    for value, old in in_place(graph).items():
        regions[value] = regions[old]
    for name in graph.tensors:
        if name not in regions and name not in constants and name not in prepared.seen:
            spec = prepared.region(name)
            regions[name] = Region(spec.shape, spec.dtype, name, transient=True)
    launches = prepared.launches
    known: Mapping[str, Array] = constants
    if images is not None:
        for name, spec in images.regions.items():
            regions[name] = Region(spec.shape, spec.dtype, name, transient=True)
        launches = images.launches
        if images.constants:
            known = {**constants, **images.constants}
    for plan in plans.values():  # all have one order
        by_name = {item.node.name: item for item in launches}
        launches = tuple(by_name[step.name] for step in plan.steps if step.action is Action.RUN)
    return Program(launches, regions, known, choices=choices, precision=precision)
