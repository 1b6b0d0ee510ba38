"""The Legate executor: launches become Legate tasks, regions become Legate stores.

Every launch is placed and cut here as on the local executor (`Analysis`), so reductions fold in
the order of points and numbers are the same. A placed launch is then one manual task of Legate
over its partitions, where they are regular tilings and its points are placed as Legate would; else
one task a point, on slices of the stores, in the scope of its processor. Legate finds what depends
on what, and copies. Captured steps are fused first (`bundles`).

Arrays that the host holds (`array`) are its own memory: contents go to the store when a launch
needs them, and come back in `wait`.
"""

from __future__ import annotations

import gc
import itertools
import json
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np

from ..coherence import Group
from ..core import Recording, Runtime
from ..dependence import Analysis, _idle
from ..errors import LaunchError, MemoryExhausted, TaskError, UnwrittenError
from ..fields import FieldRegion
from ..instance import READ, WRITE, Instance, Instances, Storage
from ..launch import Launch
from ..machine import Machine
from ..mapper import Mapper
from ..memory import MemoryPool
from ..operation import Operation
from ..partition import Partition
from ..region import Region
from ..statistics import Statistics
from ..task import Read, Task, Write
from .bundles import Work, of_points
from .lanes import Faults
from .legate_start import Legate, legate_machine, start_legate
from .legate_stores import Held, LegateView, interface_store
from .legate_tasks import Running
from .local import LocalExecutor

Array = np.ndarray[Any, np.dtype[Any]]
_ERROR_BYTES = 4096  # of an error's text that other nodes learn
_numbers = itertools.count(1)  # of calls: this process has one Legate


def _copy(source: Any, target: Any) -> None:
    np.copyto(target, source)


class LegateExecutor(LocalExecutor):
    """Issues works to Legate, and waits for them. It is where errors of untraced tasks are kept."""

    logs = False

    def __init__(self, machine: Machine, memory: MemoryPool) -> None:
        super().__init__(machine, memory)
        self.legate = start_legate(len(machine.processors))
        self.faults = Faults()
        self._waiting: set[int] = set()  # numbers of calls that may still be run

    def number(self) -> int:
        """A number for a call: the same on every node, since all run the same program."""
        return next(_numbers)

    def submit(self, running: Running) -> None:
        """Issue a bundle; its call is kept until the next wait."""
        self._waiting.add(running.number)
        profile = self.profile
        if profile is not None:
            running.record = lambda operation, start, end: profile.add(operation, start, start, end)
        running.issue()

    def agreed(self, faults: Faults) -> BaseException | None:
        """The error of the first operation that failed on any node, or None."""
        return agreed(self.legate, self.machine, faults)

    @property
    def busy(self) -> bool:
        """Whether anything was issued since the last wait."""
        return bool(self._waiting)

    @property
    def lowest_live(self) -> int | None:
        """None: Legate keeps what is in flight."""
        return None

    def settle(self) -> None:
        """Wait until Legate has run everything, and forget the calls of single launches."""
        self.legate.fence()
        for number in self._waiting:
            self.legate.calls.pop(number, None)
        self._waiting.clear()
        if self.fault is None:
            self.fault = agreed(self.legate, self.machine, self.faults)

    def wait(self) -> None:
        """Wait until no task is left.

        Raises: the error of a task that failed, once; StoppedError from then on.
        """
        if self._waiting:
            self.settle()
        if self.fault is not None:
            if self.told:
                self.check()
            self.told = True
            raise self.fault

    def check(self) -> None:
        """Raise what stopped the run, or that the runtime is closed.

        Raises: StoppedError, TaskError.
        """
        if self.fault is None and self.faults and self.legate.nodes == 1:
            self.fault = self.faults.first
        super().check()

    def run_all(
        self, jobs: Mapping[int, Callable[[], None]], interrupt: Callable[[], None]
    ) -> None:
        """Run one function on each of some processors, and wait for all of them.

        Raises: what the function of the first processor that failed raised.
        """
        legate = self.legate
        errors: dict[int, BaseException] = {}
        number = self.number()

        def run(processor: int) -> None:
            try:
                jobs[processor]()
            except BaseException as error:
                errors[processor] = error

        legate.calls[number] = lambda context: partial(run, int(context.scalars[1].value()))
        legate.begin()
        for processor in jobs:
            with legate.core.Scope(machine=legate.cpus[processor]):
                task = legate.runtime.create_manual_task(legate.library, legate.task, (1,))
                task.add_scalar_arg(number, legate.core.int64)
                task.add_scalar_arg(processor, legate.core.int64)
                task.execute()
        legate.fence()
        del legate.calls[number]
        if errors:
            raise errors[min(errors)]

    def reset(self) -> None:
        """Forget the error that stopped the run."""
        self.legate.fence()
        self._waiting.clear()
        self.faults.clear()
        self.fault = None
        self.told = False

    def close(self) -> None:
        """Wait for what is running; nothing can be launched afterwards."""
        if not self._closed:
            self._closed = True
            self.settle()


def agreed(
    legate: Legate, machine: Machine, faults: Faults, nodes: int | None = None
) -> BaseException | None:
    """The error of the first operation that failed anywhere, or None; the same on every node.

    On several nodes each processor writes its node's error to a row of a store that all read.
    """
    if (legate.nodes if nodes is None else nodes) == 1:
        return faults.first
    count = len(machine.processors)
    core = legate.core
    store = legate.runtime.create_store(core.uint8, (count, _ERROR_BYTES))
    number = next(_numbers)

    def tell(context: Any) -> None:
        row = np.asarray(context.outputs[0])
        row[...] = 0
        error = faults.first
        if error is not None:
            parts = [str(getattr(error, name, "")) for name in ("task", "point", "processor")]
            text = json.dumps([*parts, str(error.__cause__ or error)[: _ERROR_BYTES // 8]])
            written = np.frombuffer(text.encode()[:_ERROR_BYTES], np.uint8)
            row[0, : written.size] = written

    legate.calls[number] = tell
    legate.begin()
    task = legate.runtime.create_manual_task(legate.library, legate.task, (count, 1))
    task.add_output(store.partition_by_tiling((1, _ERROR_BYTES)))
    task.add_scalar_arg(number, core.int64)
    task.execute()
    rows = np.array(store.get_physical_store())
    legate.fence()
    del legate.calls[number]
    if faults.first is not None:
        return faults.first
    for row in rows:
        if row[0]:
            task_name, point, processor, reason = json.loads(row.tobytes().rstrip(b"\0"))
            return TaskError(task_name, int(point or 0), processor, reason)
    return None


class LegateAnalysis(Analysis):
    """Places launches and cuts reductions as any analysis; hands works on, and makes no instance.

    Legate finds dependences; what is checked here is that a step reads no transient region before
    it has written it.
    """

    def __init__(
        self,
        machine: Machine,
        mapper: Mapper,
        statistics: Statistics,
        take: Callable[[Work], None],
        sink: LocalExecutor,
    ) -> None:
        super().__init__(machine, mapper, statistics, sink, sink.world)
        self._take = take

    def _issue(
        self,
        launch: Launch,
        processors: list[int],
        groups: list[Group],
        origin: tuple[Launch, int] | None = None,
    ) -> None:
        for group in groups:
            if group.region.transient and group.access & READ:
                self._check_written(launch, group)
        for group in groups:
            if group.region.transient and group.access & WRITE and group.region.size:
                state, instance = self._written(group.region)
                state.wrote(instance, group.tiling)
        first = self.next_id
        self.next_id += len(processors)
        priority = self.policy.priority(launch)
        variants = self.policy.variants(launch, processors)
        idle = _idle(launch) if any(p.tiling.empty for p in launch.partitions) else None
        operations = [
            Operation(
                first + point,
                launch,
                point,
                processor,
                (),
                priority,
                None if variants is None else variants[point],
                idle is not None and bool(idle[point]),
            )
            for point, processor in enumerate(processors)
        ]
        self._take(Work(launch, operations, tuple(groups)))

    def _written(self, region: Region) -> tuple[Instances, Instance]:
        """What of a transient region was written."""
        state = self.state(region)
        key = (0, None, None)
        if key not in state.by_key:
            whole = ((0,) * region.rank, region.shape)
            state.by_key[key] = Instance(Storage(region, 0, whole, None), False)
        return state, state.by_key[key]

    def _check_written(self, launch: Launch, group: Group) -> None:
        region = group.region
        if not region.size or not group.tiling.volume.any():
            return
        state, instance = self._written(region)
        if state.missing(instance, group.tiling) is False:
            return
        for low, high in group.tiling.boxes:
            box = group.tiling.subset(np.array([group.tiling.boxes.index((low, high))]))
            if state.missing(instance, box) is not False:
                raise UnwrittenError(
                    f"task {launch.name!r} reads transient region {region.name!r}, box "
                    f"{list(low)}..{list(high)}, before this step has written all of it"
                )


class LegateRuntime(Runtime):
    """A runtime whose tasks are Legate's.

    machine: default: all cpus of Legate. mapper, automatic: as for `Runtime`. Several runtimes of
    a process share its one Legate.

    Raises: MachineError when Legate is absent, cannot start, or has fewer cpus than the machine.
    """

    def __init__(
        self,
        machine: Machine | None = None,
        mapper: Mapper | str | None = None,
        *,
        automatic: bool = False,
    ) -> None:
        machine = machine if machine is not None else legate_machine()
        super().__init__(machine, mapper, LegateExecutor, automatic=automatic)
        assert isinstance(self.executor, LegateExecutor)
        self.issuer = self.executor
        self.legate = self.issuer.legate
        self.analysis = LegateAnalysis(
            self.machine, self.mapper, self.statistics, self._run, self.executor
        )
        self._held: weakref.WeakKeyDictionary[Region, Held] = weakref.WeakKeyDictionary()
        self._hosted: weakref.WeakSet[Region] = weakref.WeakSet()

    # -- stores

    def held(self, region: Region) -> Held:
        """Where a region's elements are: its store, and the host's array if there is one."""
        found = self._held.get(region)
        if found is None:
            found = Held(self.legate, region, self.analysis.policy.order(region), self.claim)
            self._held[region] = found
        return found

    def find(self, region: Region) -> Held | None:
        """Where a region's elements are, if it was ever used."""
        return self._held.get(region)

    def wrote(self, regions: Iterable[Region]) -> None:
        """Note what a trace wrote: arrays of the host have it, or get it now."""
        for region in regions:
            held = self._held.get(region)
            if held is None or held.host is None:
                continue
            if not held.at_host:
                held.host_stale = True
            elif self.legate.nodes > 1:
                np.copyto(held.host, held.fetch())

    def placed(self, launch: Launch, number: int) -> Work:
        """A launch of the runtime's own with one point, `number`, placed but not issued."""
        found: list[Work] = []
        analysis = LegateAnalysis(
            self.machine, self.mapper, Statistics(), found.append, self.executor
        )
        analysis.next_id = number
        analysis.launch(launch)
        return found[0]

    def claim(self, held: Held, nbytes: int) -> None:
        """Count bytes that Legate may come to hold for a region; where they are not free, once more
        after everything running has ended.

        Raises: MemoryExhausted, before Legate would end the process.
        """
        what = f"region {held.name!r}"
        try:
            self.memory.claim(held, 0, nbytes, what)
        except MemoryExhausted:
            self.legate.fence()
            gc.collect()
            self.memory.claim(held, 0, nbytes, what)

    def _run(self, work: Work) -> None:
        """Issue one placed launch; regions the host holds are brought to their stores first."""
        if work.launch.task is not _FEED:
            for group in work.groups:
                held = self.held(group.region)
                if held.host is not None and held.at_host:
                    self._feed(group.region, held.host)
                    held.at_host = False
                if held.host is not None and group.access & WRITE:
                    held.host_stale = True
        bundle = of_points(work)
        if bundle is not None:
            self.issuer.submit(
                Running(
                    self.issuer.number(),
                    self.legate,
                    self.machine,
                    bundle,
                    self.issuer.faults,
                    {},
                    held=self.held,
                    loops=False,
                )
            )

    def _feed(self, region: Region, array: Array) -> None:
        """Issue a copy of an array to a region's store; the array must not change until a wait."""
        if region.size:
            self.analysis.launch(feed(region, array))

    # -- the model of `Runtime`, on stores

    def wait(self) -> None:
        """Wait until everything launched has ended; arrays of the host have the contents then.

        Raises: TaskError when a task failed; StoppedError.
        """
        self._outside_capture("wait")
        self.flush()
        with self._lock:
            self.settle()

    def settle(self) -> None:
        """Wait, and bring what launches wrote to the host's arrays."""
        if self.executor.fault is None and not self.issuer.faults:
            for region in list(self._hosted):
                held = self.held(region)
                if held.host_stale and held.host is not None and self.legate.nodes == 1:
                    self.analysis.launch(publish(region, held.host))
                    held.host_stale = False
        self.issuer.wait()
        for region in list(self._hosted):
            held = self.held(region)
            if held.host_stale and held.host is not None:
                np.copyto(held.host, held.fetch())
                held.host_stale = False
            held.at_host = held.at_host or not held.adopted

    def read(self, region: Region) -> Array:
        """A copy of a region's contents, in C order, once all launches have ended.

        Raises: TaskError when a task failed; StoppedError.
        """
        if isinstance(region, FieldRegion):
            return super().read(region)
        self._outside_capture("read")
        self.executor.check()
        self.flush()
        with self._lock:
            self.settle()
            held = self.held(region)
            if held.host is not None and held.at_host:
                return held.host.copy()
            return held.fetch()

    def write(self, region: Region, array: Any) -> None:
        """Replace a region's contents. array: of the region's shape and dtype.

        Raises: LaunchError for another shape or dtype; MemoryExhausted; StoppedError.
        """
        if isinstance(region, FieldRegion):
            super().write(region, array)
            return
        given = self._written(region, array)
        with self._lock:
            self.settle()
            held = self.held(region)
            if held.host is not None and held.at_host:
                np.copyto(held.host, given)
                return
            self._feed(region, given)
            self.issuer.wait()

    def array(self, region: Region) -> Array:
        """The NumPy array through which the host sees a region.

        It holds the region's contents after `wait` and after each replay, and what the host
        writes to it then is what the next launches and replays read. While tasks run, it must not
        be touched.

        Raises: LaunchError for a transient region; MemoryExhausted; StoppedError.
        """
        self._outside_capture("array")
        self.flush()
        if region.transient or isinstance(region, FieldRegion):
            return super().array(region)  # which says why there is none
        self.executor.check()
        with self._lock:
            self.settle()
            held = self.held(region)
            if held.host is None:
                self.claim(held, region.nbytes)
                held.host = held.fetch()
            elif not held.at_host:
                np.copyto(held.host, held.fetch())
            held.at_host, held.adopted = True, False
            self._hosted.add(region)
            return held.host

    # -- other libraries of Legate

    def adopt(self, region: Region, data: Any) -> None:
        """Make the store of a cuPyNumeric array (or any Legate data) a region's, without a copy.

        What launches write to the region is written to the data. Arrays of the host are no longer
        the region's until `array` is asked again.

        Raises: LaunchError for data of another shape or dtype, or that is none of Legate's.
        """
        self._outside_capture("adopt")
        self.executor.check()
        self.flush()
        store = interface_store(data, region)
        with self._lock:
            held = self.held(region)
            if held.host is not None and (held.host_stale or not held.at_host):
                self.settle()
            held.adopt(store)

    def view(self, region: Region) -> LegateView:
        """A region's store for other libraries of Legate: `cupynumeric.asarray(runtime.view(r))`.

        The view and the region are the same elements, without a copy, until `adopt` gives the
        region another store. Legate orders what either side does.

        Raises: StoppedError.
        """
        self._outside_capture("view")
        self.executor.check()
        self.flush()
        with self._lock:
            held = self.held(region)
            if held.host is not None and held.at_host:
                self.settle()
                self._feed(region, held.host)
                self.issuer.wait()
            held.host, held.at_host, held.adopted = None, False, False
            self._hosted.discard(region)
            return LegateView(held.logical(), region, self.legate)

    def offload(self, region: Region, target: str = "SYSMEM") -> None:
        """Move a region's contents to a kind of memory and free the others, once launches allow it.

        target: a name of `legate.core.StoreTarget`: SYSMEM, FBMEM, ZCMEM, SOCKETMEM.

        Raises: LaunchError for a kind of memory this machine does not have; StoppedError.
        """
        self._outside_capture("offload")
        self.executor.check()
        self.flush()
        targets = self.legate.core.StoreTarget.__members__
        if target not in targets:
            raise LaunchError(
                f"offload of region {region.name!r}: target {target!r} found, one of "
                f"{', '.join(targets)} needed"
            )
        if target in ("FBMEM", "ZCMEM") and not self.legate.gpus:
            raise LaunchError(
                f"offload of region {region.name!r}: Legate was started without a GPU, which "
                f"{target} belongs to"
            )
        with self._lock:
            if region.size:
                self.held(region).logical().offload_to(targets[target])

    # -- captures

    @contextmanager
    def _capturing(self, name: str) -> Iterator[Recording]:
        from .legate_trace import LegateTrace

        with self._lock:
            self._outside_capture("capture")
            self.executor.check()
            self.flush()
            self.settle()
            works: list[Work] = []
            analysis = LegateAnalysis(
                self.machine, self.mapper, self.statistics, works.append, self.executor
            )
            self._capture = analysis
            recording = Recording(name)
            try:
                yield recording
            finally:
                self._capture = None
            recording._trace = LegateTrace(self, name, works)
            self.statistics.captures += 1

    def reset(self) -> None:
        """Go on after a task failed: forget the error and everything that was still queued.

        Regions keep their contents; those the failed run was writing may hold anything.
        """
        super().reset()
        for region in list(self._hosted):
            held = self.held(region)
            held.at_host, held.host_stale = not held.adopted, False


def feed(region: Region, array: Array) -> Launch:
    """The launch that copies an array of the host to a region."""
    whole = Partition.whole(region)
    return Launch(_FEED, (whole,), (array,), (False, True), (1,), f"feed {region.name}")


def publish(region: Region, array: Array) -> Launch:
    """The launch that copies a region to an array of the host."""
    whole = Partition.whole(region)
    return Launch(_PUBLISH, (whole,), (array,), (True, False), (1,), f"publish {region.name}")


_FEED = Task("feed", (Write,), body=_copy, parameters=(None, Write), kind="feed")
_PUBLISH = Task("publish", (Read,), body=_copy, parameters=(Read, None), kind="publish")
