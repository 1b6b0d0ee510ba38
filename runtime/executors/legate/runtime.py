"""The runtime under Legate: launches become Legate tasks, regions become Legate stores.

Every launch is placed and cut as on the local executor (`legate_analysis`), so reductions fold in
the order of points and numbers are the same. A placed launch is then one manual task of Legate
over its partitions, where they are regular tilings and its points are placed as Legate would; else
one task a point, on slices of the stores, in the scope of its processor (`legate_tasks`). Legate
finds what depends on what, and copies. Captured steps are fused first (`bundles`).

Arrays that the host holds (`array`) are its own memory: contents go to the store when a launch
needs them, and come back in `wait`.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from soapstone.native.memory import Array
from soapstone.runtime.analysis.instance import WRITE
from soapstone.runtime.core import Runtime
from soapstone.runtime.errors import LaunchError, MemoryExhausted
from soapstone.runtime.executors.legate.analysis import LegateAnalysis
from soapstone.runtime.executors.legate.bundles import Work, of_points
from soapstone.runtime.executors.legate.executor import LegateExecutor
from soapstone.runtime.executors.legate.start import legate_machine
from soapstone.runtime.executors.legate.stores import (
    FEED,
    Held,
    LegateView,
    feed,
    interface_store,
    publish,
)
from soapstone.runtime.executors.legate.tasks import Running
from soapstone.runtime.executors.legate.trace import LegateTrace
from soapstone.runtime.machines.machine import Machine
from soapstone.runtime.model.launch import Launch
from soapstone.runtime.model.mapper import Mapper
from soapstone.runtime.model.region import Region
from soapstone.runtime.observe.statistics import Statistics
from soapstone.runtime.tracing.analysis_cache import AnalysisCache
from soapstone.runtime.tracing.capture import Recording


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
        if work.launch.task is not FEED:
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
        with self.turn, self._guard:
            self._outside_capture("wait")
            self.flush()
            self.settle()

    def settle(self) -> None:
        """Wait, and bring what launches wrote to the host's arrays."""
        with self.turn, self._guard:
            self._settle()

    def _settle(self) -> None:
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

    def _read(self, region: Region) -> Array:
        with self.turn, self._guard:
            held = self.held(region)
            if held.host is not None and held.at_host:
                return held.host.copy()
            return held.fetch()

    def _write(self, region: Region, given: Array) -> None:
        with self.turn, self._guard:
            held = self.held(region)
            if held.host is not None and held.at_host:
                np.copyto(held.host, given)
                return
            self._feed(region, given)
            self.issuer.wait()

    def _array(self, region: Region) -> Array:
        with self.turn, self._guard:
            held = self.held(region)
            if held.host is None:
                self.claim(held, region.nbytes)
                held.host = held.fetch()
            elif not held.at_host:
                np.copyto(held.host, held.fetch())
            held.at_host, held.adopted = True, False
            self._hosted.add(region)
            return held.host

    borrows = False  # regions are stores

    # -- other libraries of Legate

    def adopt(self, region: Region, data: Any) -> None:
        """Make the store of a cuPyNumeric array (or any Legate data) a region's, without a copy.

        What launches write to the region is written to the data. Arrays of the host are no longer
        the region's until `array` is asked again.

        Raises: LaunchError for data of another shape or dtype, or that is none of Legate's.
        """
        store = interface_store(data, region)
        with self.turn, self._guard:
            self._ready("adopt")
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
        with self.turn, self._guard:
            self._ready("view")
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
        with self.turn, self._guard:
            self._ready("offload")
            if region.size:
                self.held(region).logical().offload_to(targets[target])

    # -- captures

    @contextmanager
    def _capturing(self, name: str, analyses: AnalysisCache | None = None) -> Iterator[Recording]:
        with self.turn, self._guard:
            self.quiet("capture")
            works: list[Work] = []
            analysis = LegateAnalysis(
                self.machine, self.mapper, self.statistics, works.append, self.executor
            )
            self._capture = analysis
            self._desugarer.steady = False
            recording = Recording(name)
            try:
                yield recording
            finally:
                self._capture = None
                self._desugarer.steady = True
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
