"""What the host may do with regions: read and write them, and hold live arrays of them.

Every process of a run has a host memory of its own. What the host writes, the host of each process
writes alike; what it reads is brought to all of them.
"""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterable
from threading import get_ident
from types import TracebackType
from typing import Any

import numpy as np

from soapstone.locks import Lock
from soapstone.native.memory import Array, address
from soapstone.runtime.analysis.dependence import Analysis
from soapstone.runtime.analysis.instance import Instance, Storage
from soapstone.runtime.errors import LaunchError, RuntimeCoreError, StoppedError
from soapstone.runtime.executors.local import LocalExecutor
from soapstone.runtime.machines.machine import PROCESS
from soapstone.runtime.model.region import Region
from soapstone.runtime.model.region_fields import FieldRegion
from soapstone.runtime.model.tiling import Box
from soapstone.runtime.tracing.arena import ALIGNMENT

_INSIDE = (
    "the body of a task used the runtime that runs it, which may be waiting for the task; launch "
    "from a nested task (docs/runtime.md), or return a value"
)


class Guard:
    """Stops the runtime of whose analysis the block's code is stopped half-way.

    Around it is the runtime's turn, which is a lock: that an interrupt cannot come between.
    """

    def __init__(self, runtime: Host) -> None:
        self._runtime = weakref.ref(runtime)

    def __enter__(self) -> None:
        pass

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is not None and (not isinstance(error, RuntimeCoreError) or error.halfway):
            runtime = self._runtime()
            if runtime is not None:
                runtime.interrupted(error)


class Host(ABC):
    """The host's side of a runtime."""

    def __init__(self, analysis: Analysis, executor: LocalExecutor) -> None:
        self.analysis = analysis
        self.executor = executor
        self.agreement = executor.agreement  # None: nobody to agree with, or nobody asked to
        analysis.policy.agreement = self.agreement
        self._turn = Lock()
        self._guard = Guard(self)
        self._live: weakref.WeakValueDictionary[int, Region] = weakref.WeakValueDictionary()
        self._settled = True  # nothing was launched since the host could touch its arrays

    @property
    def turn(self) -> Lock:
        """The turn of one thread at a runtime: others launch, replay, read and write after it.

        Raises: StoppedError within a task, for which whoever has the turn may be waiting.
        """
        if get_ident() in self.executor.workers:
            raise StoppedError(_INSIDE)
        return self._turn

    @abstractmethod
    def flush(self) -> None:
        """Issue the launches that are held back."""

    @abstractmethod
    def interrupted(self, error: BaseException) -> None:
        """Stop, since an error left the analysis half-way."""

    @abstractmethod
    def _outside_capture(self, what: str) -> None:
        """Refuse what cannot be done while launches are captured."""

    def quiet(self, what: str) -> None:
        """Wait until nothing runs any more, with the turn taken: nothing is launched meanwhile.

        what: who asks, as errors name it.

        Raises: TaskError when a task failed; StoppedError inside a capture, or when closed.
        """
        self._ready(what)
        self.settle()

    def _ready(self, what: str) -> None:
        """Issue what is held back, before the host does something itself."""
        self._outside_capture(what)
        self.executor.check()
        self.flush()

    def settle(self) -> None:
        """Wait until nothing that was issued runs any more.

        Raises: TaskError when a task failed; StoppedError.
        """
        self.executor.wait()

    def read(self, region: Region) -> Array:
        """A copy of a region's contents, in C order, once all launches have ended.

        A region with several fields gives a structured array. What other threads launch meanwhile
        is done before or after all of it.

        Raises: TaskError when a task failed; StoppedError.
        """
        if isinstance(region, FieldRegion):
            with self.turn:
                return region.join({name: self.read(each) for name, each in region.fields.items()})
        with self.turn:
            self.quiet("read")
            return self._read(region)

    def _read(self, region: Region) -> Array:
        with self.turn, self._guard:
            if self.agreement is not None:
                self.agreement.host("read", region)
            self._settled = True
            self.claim_live()
            devices = self.analysis.machine.devices
            if self.executor.world.size > 1 or devices:
                self._publish(region)
                self.executor.wait()
            found = np.zeros(region.shape, dtype=region.dtype)
            state = self.analysis.state(region)
            seen: list[tuple[Storage, Box]] = []
            for instance in state:
                storage = instance.storage
                if instance.valid is False or storage.array is None or storage.memory in devices:
                    continue
                if instance.valid is True:
                    np.copyto(found, storage.view((tuple([0] * region.rank), region.shape)))
                    seen = [(storage, storage.box)]
                    break
                cells = state.cells(instance.valid).copy()
                for low, high in list(state.boxes(cells, (0,) * cells.ndim)):
                    box = tuple(slice(a, b) for a, b in zip(low, high))
                    found[box] = storage.view((low, high))
                    seen.append((storage, (low, high)))
            if self.analysis.log is not None:
                self.analysis.log.host("read", region, seen)
            return found

    def write(self, region: Region, array: Any) -> None:
        """Replace a region's contents. array: of the region's shape and dtype.

        A region with several fields takes a structured array, or a mapping from names to arrays.

        Raises: LaunchError for another shape or dtype; MemoryExhausted; StoppedError.
        """
        if isinstance(region, FieldRegion):
            with self.turn:
                for name, part in region.split(array).items():
                    self.write(region[name], part)
            return
        with self.turn:
            self._outside_capture("write")
            self.executor.check()
            given = _written(region, array)
            self.quiet("write")
            self._write(region, given)

    def _write(self, region: Region, given: Array) -> None:
        with self.turn, self._guard:
            if self.agreement is not None:
                self.agreement.host("write", region, given)
            self._settled = True
            state = self.analysis.state(region)
            targets = [instance for key, instance in state.by_key.items() if key[1] is None][:1]
            apart = self.executor.world.size > 1 or bool(self.analysis.machine.devices)
            if state.live or not targets or apart:
                targets = self.analysis.host_instances(region)
            for target in targets:
                if target.storage.array is not None:
                    np.copyto(target.storage.view((tuple([0] * region.rank), region.shape)), given)
            for instance in state:
                instance.valid = instance in targets
            self._tell("write", region, targets)

    def array(self, region: Region) -> Array:
        """The live NumPy view of a region's instance in the host memory.

        It holds the region's contents after `wait` and after each replay, and what the host
        writes to it then is what the next launches and replays read. While tasks run, it must not
        be touched. With several memories, ask before capturing: the trace then has the copies.
        Each process of a run has an array of its own, and all must write the same.

        Raises: LaunchError for a transient region, or one with several fields (each of them has an
        array of its own); MemoryExhausted; StoppedError.
        """
        if isinstance(region, FieldRegion):
            raise LaunchError(f"region {region.name!r} has several fields: ask for one of them")
        if region.transient:
            raise LaunchError(
                f"region {region.name!r} is transient: its contents live only within a step"
            )
        with self.turn:
            self.quiet("array")
            return self._array(region)

    def _array(self, region: Region) -> Array:
        with self.turn, self._guard:
            instance = self.analysis.host_instance(region)
            self.analysis.state(region).live = True
            if self.many_instances:
                self._live.setdefault(id(region), region)
                self.publish_live()
            found: Array = instance.storage.view((tuple([0] * region.rank), region.shape))
            return found

    def lend(self, region: Region, array: Array) -> bool:
        """Let an array be the host's memory of a region; return whether it is.

        It is not where the region has been used before, where tasks need memory of another kind (on
        GPUs, in worker processes), or where the array lies otherwise than the region would.

        array: of the region's shape and dtype.
        """
        with self.turn:
            self._outside_capture("lend")
            analysis = self.analysis
            fits = array.flags.c_contiguous and address(array) % ALIGNMENT == 0
            if not (fits and self.borrows) or analysis.policy.order(region) is not None:
                return False
            if analysis.state(region).by_key:
                return False
            analysis.lent[region] = array
            return True

    @property
    def borrows(self) -> bool:
        """Whether tasks may use arrays wherever they are in this process' memory."""
        machine = self.analysis.machine
        return not machine.devices and all(each.kind != PROCESS for each in machine.processors)

    @property
    def many_instances(self) -> bool:
        """Whether a region may have more than one instance."""
        return self.analysis.policy.many_instances

    def publish_live(self) -> None:
        """Bring the contents of regions the host has arrays of to the host memory."""
        with self.turn, self._guard:
            for region in list(self._live.values()):
                self._publish(region)
            self.executor.wait()
            self._settled = True
            self.claim_live()

    def _publish(self, region: Region) -> None:
        """Issue the copies that bring a region's contents to every host memory."""
        for host in self.analysis.host_instances(region):
            if host.valid is not True:
                self.analysis.complete(region, host, True)

    def claim_live(self) -> None:
        """Make the host's arrays the only valid instances: the host may have written them."""
        for region in list(self._live.values()):
            hosts = self.analysis.host_instances(region)
            if all(host.valid is True for host in hosts):
                for instance in self.analysis.state(region):
                    if instance not in hosts:
                        instance.valid = False
                if self.agreement is not None:
                    held = [host.storage.array for host in hosts]
                    here = next(array for array in held if array is not None)
                    self.agreement.host("array", region, here)
                self._tell("claim", region, hosts)

    def _unsettle(self) -> None:
        """Before the first launch since the host could write its arrays: take what it wrote.

        That is known from the program alone, never from what happens to be running: every process
        of a run must decide alike.
        """
        if self._settled:
            self._settled = False
            self.claim_live()

    def _tell(self, action: str, region: Region, instances: Iterable[Instance]) -> None:
        """Tell the log what Python did to whole instances of a region."""
        if self.analysis.log is not None:
            seen = [(instance.storage, instance.storage.box) for instance in instances]
            self.analysis.log.host(action, region, seen)


def _written(region: Region, array: Any) -> Array:
    """What is to be written to a region.

    Raises: LaunchError for another shape or dtype.
    """
    given = np.asarray(array)
    if given.shape != region.shape or given.dtype != region.dtype:
        raise LaunchError(
            f"write of region {region.name!r}: found {given.dtype} {given.shape}, "
            f"needed {region.dtype} {region.shape}"
        )
    return given
