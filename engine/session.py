"""Sessions: graphs bound to a runtime, each as one trace, over parameters that outlive a step."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import ExitStack, contextmanager
from dataclasses import field
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from soapstone.engine.expand import Program
from soapstone.engine.images import Images, imaged
from soapstone.engine.initial import materialise
from soapstone.engine.lower import in_place
from soapstone.engine.lower.readers import inner
from soapstone.engine.lower.verify import check_graph, check_views
from soapstone.engine.mapper import GraphMapper
from soapstone.engine.parallel_compilation import ParallelCompilation
from soapstone.engine.prepare import Prepared, prepare
from soapstone.errors import DataError
from soapstone.ir.errors import GraphError
from soapstone.ir.graph import Graph
from soapstone.ir.strategy import Strategy
from soapstone.ir.tensor import NOTHING, Array, Role
from soapstone.kernels.choices import Choices
from soapstone.limits import check_bytes
from soapstone.native.memory import CHECKED
from soapstone.records import dataclass
from soapstone.runtime import Machine, Profile, ProfileError, Region, Runtime, Trace
from soapstone.runtime.machines.machine import CUDA
from soapstone.runtime.machines.memory import Arena
from soapstone.runtime.machines.start import start
from soapstone.runtime.tracing.analysis_cache import AnalysisCache

if TYPE_CHECKING:
    from soapstone.ir.plan import MemoryPlan

_AGREEING = 3  # times a graph is bound at most until all processes have made the same choices
T = TypeVar("T")
CARRIED = (Role.PARAMETER, Role.STATE)


@dataclass(frozen=True)
class Bound:
    """A graph bound to regions and compiled to a trace.

    Attributes:
        graph, prepared: the graph that was given, and its lowered form that is launched.
        program, trace: its launches, and the trace that replays them.
        feeds, results: the live arrays of the step's inputs, by their names, and of its outputs.
        inputs: the regions of the inputs.
        plans: the memory plans that the trace follows, by memory; only of memories in which
            processors of this process work.
        lent: the inputs whose arrays belong to the caller and are read in place.
        shared: the memory of results that lie where those of other graphs do.
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
    shared: Sequence[Arena] = ()

    @cached_property
    def batch(self) -> tuple[str, ...]:
        """The names of the inputs that are fed with each batch."""
        return self.graph.inputs(Role.INPUT)

    @property
    def moved_bytes(self) -> tuple[int, int] | None:
        """The bytes that a run copies between this process' memories: as planned, and as compiled.

        None where no memory plan is followed.
        """
        planned = sum(plan.moved_bytes for plan in self.plans.values())
        return (planned, self.trace.copied_bytes) if self.plans else None

    @property
    def variants(self) -> Mapping[str, str]:
        """Which kernel variant serves each launched node."""
        return self.program.variants


class Session:
    """A runtime, the parameters and states of a model in it, and the graphs bound to it.

    Args:
        machine, mapper: what graphs run on, and the policies of the runtime.
        seed: of initial parameters.
        executor: "local", "mpi" or "legate".
        choices: the kernel variants chosen so far, to which binding adds.
        values: initial contents of parameters and states by name, in place of those that the graph
            declares. An entry is removed once its value is in a region.
        precision: what products may round their operands to (`kernels.entry.Call`).
        runtime: a runtime on this machine with this mapper; by default a new one.
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
        self.runtime.mends = True  # all that is launched is captured, and lost with its capture
        self.lock = threading.RLock()  # held for a step, or for a look at what it carries
        self._values = {} if values is None else values  # first contents, of which each is taken
        self._carried: dict[str, Region] = {}
        self._bounds: list[Bound] = []
        self._analyses = AnalysisCache()
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
        """Return the graph compiled under a strategy; parameters that are new get a region.

        Args:
            constants: the contents of inputs that never change, by name; they get no region.
            names: names for the results, in place of the graph's outputs.
            fuse: whether one launch may run several operators.
            lent: arrays that runs read in place, by input, where the executor can; such an input is
                not fed.

        Raises:
            StrategyError: the strategy is not legal for the graph.
            MemoryExhausted: the working set exceeds a memory; names what was needed.
            GraphError: the mapper's memory plan is of another graph.
        """
        with self.lock:
            prepared = self.prepared(graph, strategy, constants.keys(), fuse=fuse)
            return self.bind_prepared(graph, prepared, constants, names=names, lent=lent)

    def prepared(
        self, graph: Graph, strategy: Strategy, constants: Set[str], *, fuse: bool = True
    ) -> Prepared:
        """Return a graph lowered for this machine; the arguments are those of `bind`."""
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
        """Bind a graph that is lowered already; see `bind`.

        graph: the graph whose inputs and outputs the bound graph has. prepared: its lowered form.
        in_turn: results lie where those of all graphs that are bound so do; each run overwrites
        them.
        """
        if CHECKED:
            check_graph(prepared.graph)
            check_views(prepared.graph, prepared.strategy, prepared.seen)
        with self.lock:
            lowered = prepared.graph
            regions: dict[str, Region] = {}
            self._check_carried(graph)
            for name, role in graph.roles.items():
                if name not in constants:
                    carried = role in CARRIED
                    regions[name] = self._carry(graph, name) if carried else region_of(graph, name)
            for name in lowered.outputs:
                if name not in constants and name not in regions:
                    regions[name] = region_of(lowered, name)
            shared: list[Arena] = []
            if in_turn and self.runtime.borrows and not self.runtime.many_instances:
                shared = self._share_results(lowered, regions)
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
                alone = self.runtime.executor.world.size == 1
                operators = [inner(node).name for node in lowered.nodes if alone]
                with (
                    ParallelCompilation(operators),
                    self.runtime.capture(graph.name, self._analyses) as recording,
                ):
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
            ends = feeds, results, inputs
            bound = Bound(graph, prepared, program, trace, *ends, plans, lent, shared)
            self._bounds.append(bound)
            return bound

    def _share_results(self, graph: Graph, regions: Mapping[str, Region]) -> list[Arena]:
        """Let what a graph makes as its outputs lie in memory that other graphs use too.

        That memory is returned, and is counted as used while anybody has it.
        """
        memory, found = self.runtime.analysis.world.home, list[Arena]()
        for number, name in enumerate(dict.fromkeys(graph.outputs)):
            spec = graph.tensors[name]
            if name in graph.producers and spec.nbytes:
                what = f"output {name!r}"
                arena = self.runtime.memory.arena(memory, spec.nbytes, what, ("output", number))
                found.append(arena)
                array = arena.buffer[: spec.nbytes].view(spec.dtype).reshape(spec.shape)
                self.runtime.lend(regions[name], array)
        return found

    def forget(self, bound: Bound | None = None) -> None:
        """Release a bound graph, or all of them; parameters and states stay."""
        self._bounds = [each for each in self._bounds if bound is not None and each is not bound]

    def _check_carried(self, graph: Graph) -> None:
        """Refuse parameters and states that no memory has room for, before any is made."""
        new = [n for n, role in graph.roles.items() if role in CARRIED and n not in self._carried]
        largest = max(new, key=lambda name: graph.tensors[name].nbytes, default=None)
        if largest is not None:
            what = f"graph {graph.name!r}: its parameters and states, the largest of which is"
            total = sum(graph.tensors[name].nbytes for name in new)
            check_bytes(total, f"{what} {largest!r}, {graph.tensors[largest]},", DataError)

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
        """Set an input for the next run.

        The array is copied, except data of Legate of the same dtype, which is adopted without a
        copy, and arrays that are `lent`, which are read in place.

        value: an array of the input's shape.
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
        """Return all parameters and states under Legate by name, without a copy, for its libraries.

        Raises:
            GraphError: the executor is not Legate, or works in a fast memory.
        """
        view = getattr(self.runtime, "view", None)
        if view is None:
            raise GraphError("shared parameters: executor 'legate' without a fast memory needed")
        return {name: view(region) for name, region in self._carried.items()}

    def run(self, bound: Bound) -> None:
        """Run a bound graph once on the present contents of its feeds."""
        bound.trace.replay(profile=self._timeline)

    def entries(self, bound: Bound) -> tuple[Array, Array] | None:
        """Return the native entries that make up a run, or None; see `Trace.entries`."""
        return None if self._timeline is not None else bound.trace.entries

    def together(self, run: Callable[[], T], steps: int) -> T:
        """Call a function that runs entries itself, while nothing else runs; return its result.

        steps: the number of runs of bound graphs that the function makes up, for the statistics.
        """
        with self.runtime.turn:
            self.runtime.quiet("replay")
            self.runtime.statistics.steps_replayed += steps
            return run()

    def state(self) -> dict[str, Array]:
        """Return copies of all parameters and states by name, taken between the same two steps."""
        with self.lock:
            return {name: self.runtime.read(region) for name, region in self._carried.items()}

    @property
    def waiting(self) -> dict[str, Array]:
        """What is given or loaded that no bound graph has yet, by name; it may be changed."""
        return self._values

    def load_state(self, values: Mapping[str, Array]) -> None:
        """Replace parameters and states; values that no bound graph has yet become initial values.

        Raises:
            GraphError: a shape differs; then nothing is replaced.
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
        """Bytes of everything allocated: parameters, states, feeds, results and arenas."""
        return sum(self.used_bytes)

    @property
    def used_bytes(self) -> tuple[int, ...]:
        """`peak_bytes` of each memory of the machine; 0 for those of other processes."""
        return tuple(self.runtime.memory.used(i) for i in range(len(self.machine.memories)))

    @property
    def peak_bytes_per_device(self) -> dict[str, int]:
        """`peak_bytes` of the memory of each processor of this process, by the processor's name."""
        used = dict(zip((memory.name for memory in self.machine.memories), self.used_bytes))
        mine = (self.machine.processors[i] for i in self.runtime.executor.processors)
        return {processor.name: used[processor.memory] for processor in mine}

    @contextmanager
    def timed(self) -> Iterator[Profile]:
        """Time every task that runs inside; yields the timeline of this process.

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
        """Time every task that runs inside, and write a trace-event timeline of all processes."""
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
        self.runtime.close()


def region_of(graph: Graph, name: str) -> Region:
    """Return a region of the shape and dtype of a value."""
    spec = graph.tensors[name]
    return Region(spec.shape, spec.dtype, name)


def program_of(
    prepared: Prepared,
    persistent: Mapping[str, Region],
    constants: Mapping[str, Array],
    choices: Choices,
    images: Images | None = None,
    plans: Mapping[str, MemoryPlan] = MappingProxyType({}),
    precision: str = "float32",
) -> Program:
    """Return the launches of a lowered graph, with a region for each value.

    persistent: regions that outlive a step, by value: those of inputs and outputs. images: the
    launches of a graph in which some gather from images. plans: memory plans, whose order the
    launches take; by default they have the order of the graph.
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
        launches = tuple(by_name[name] for name in plan.runs)
    return Program(launches, regions, known, choices=choices, precision=precision)
