"""The runtime: launches tasks on regions, untraced or captured as a step that is replayed."""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any, overload

from soapstone.runtime.analysis.dependence import Analysis
from soapstone.runtime.analysis.desugar import Desugared, Desugarer, Options, Step, needs_desugaring
from soapstone.runtime.analysis.nested import Level
from soapstone.runtime.analysis.policy import ask, attach, name_of
from soapstone.runtime.analysis.subtasks import Nest
from soapstone.runtime.errors import RuntimeCoreError, StoppedError
from soapstone.runtime.executors.local import LocalExecutor
from soapstone.runtime.forks import tell
from soapstone.runtime.host import Host
from soapstone.runtime.machines.machine import Machine
from soapstone.runtime.machines.memory import MemoryPool
from soapstone.runtime.model import launch as launches
from soapstone.runtime.model.future import Future, FutureMap
from soapstone.runtime.model.mapper import Mapper
from soapstone.runtime.model.named import as_mapper
from soapstone.runtime.model.region import Region
from soapstone.runtime.model.task import Task
from soapstone.runtime.observe.profile import Observer, Profile
from soapstone.runtime.observe.statistics import Statistics
from soapstone.runtime.observe.view import View
from soapstone.runtime.tracing.analysis_cache import AnalysisCache
from soapstone.runtime.tracing.capture import CaptureAnalysis, Recorder, Recording
from soapstone.runtime.tracing.step import Fill, Request, Steps, fills, issue, signature

if TYPE_CHECKING:
    from soapstone.runtime.observe.log import Log
    from soapstone.runtime.tracing.automatic import Automatic
    from soapstone.runtime.tracing.trace import Trace

_FORGET_EVERY = 512  # launches between two sweeps of ended users


class Runtime(Host):
    """The regions, tasks and instances of one machine; a context manager.

    Any thread may call a runtime. A capture, a replay, and a read or write by the host are atomic
    with respect to the launches of other threads. In a child process that was forked, every call is
    an error.

    Args:
        machine: by default `Machine.local()`.
        mapper: a mapper, or the name of an installed one; by default `DefaultMapper()`.
        executor: makes what runs operations; by default threads of this process, and the GPUs of
            the machine.
        automatic: whether launch sequences that repeat are traced without being marked
            (docs/runtime.md).
        log: a file to which the whole run is logged; see `log`.

    Raises:
        MapperError: the mapper is not a mapper.
        MachineError: the machine has GPUs that this computer lacks.
    """

    def __init__(
        self,
        machine: Machine | None = None,
        mapper: Mapper | str | None = None,
        executor: Callable[[Machine, MemoryPool], LocalExecutor] | None = None,
        *,
        automatic: bool = False,
        log: str | os.PathLike[str] | None = None,
    ) -> None:
        self.machine = machine if machine is not None else Machine.local()
        self.mapper = as_mapper(mapper)
        attach(self.mapper, self.machine)
        self.statistics = Statistics()
        self.memory = MemoryPool(self.machine, self.statistics)
        runs = (executor or _executor(self.machine))(self.machine, self.memory)
        analysis = Analysis(self.machine, self.mapper, self.statistics, runs, runs.world)
        super().__init__(analysis, runs)
        self._capture: Analysis | None = None
        self._requests: list[Request] | None = None
        self._nest = Nest(self.executor, self.memory, analysis.policy.backing)
        self._desugarer = Desugarer(self, len(self.machine.workers), Level(self._nest))
        self._log: Log | None = None
        self._steps: dict[str, Steps] = {}
        self._since_forget = 0
        self._automatic: Automatic | None = None
        if automatic:
            from soapstone.runtime.tracing.automatic import Automatic

            self._automatic = Automatic(self)
        tell(self)
        ask(self.mapper, name_of(self.mapper), "observe", View(self))
        self.profiling: Profile | None = None
        self.mends = False  # whether it goes on by itself after an interrupt, as after `reset`
        self.binding: Callable[[int], None] | None = None  # told after each of so many operations
        if log is not None:
            self._begin_log(log)

    # -- launching

    def launch(
        self,
        task: Task,
        *arguments: object,
        grid: Sequence[int] | None = None,
        name: str = "",
        tag: Hashable = None,
        initialise: bool = False,
    ) -> Any:
        """Run a task at every point of its partitions' common grid; returns at once.

        Args:
            arguments: for each privilege a partition, or a Region that every point sees whole; and
                scalars or futures. Scalars are taken by value: numbers, arrays without axes, lists,
                tuples, sets and dictionaries are copied now; objects of other classes are passed as
                they are.
            grid: of the launch, where no argument has one.
            name: for errors and timelines.
            tag: any value, for the mapper to look at.
            initialise: whether reductions replace the contents of their region instead of adding to
                them.

        Returns:
            A Future for a task that returns a value, a FutureMap if it has several points, else
                None.

        An error of the task is raised by `wait`, by `read`, or by a later launch.

        Raises: LaunchError, PrivilegeError, MapperError, MemoryExhausted, UnwrittenError,
        StoppedError.
        """
        if self.agreement is not None:
            self.agreement.launch(task, name, grid, initialise, arguments)
        automatic, asked = self._automatic, None
        if automatic is not None and (grid is None or type(grid) is tuple):
            asked = (task, grid, name, tag, initialise, *arguments)
            with self.turn, self._guard:
                self.executor.check()
                if not self.capturing and automatic.follow(asked):
                    return None
        if needs_desugaring(task, arguments):
            with self.turn, self._guard:
                options = Options(grid, name, tag, initialise)
                return self._issue(self._desugarer.desugar(task, arguments, options))
        prepared = launches.prepare(
            task, arguments, grid=grid, name=name, tag=tag, initialise=initialise
        )
        self._take(prepared, asked)
        return None

    def combine(self, values: FutureMap, reduction: str) -> Future:
        """The values of a future map combined by a reduction; see `FutureMap.reduce`."""
        with self.turn, self._guard:
            found: Future = self._issue(self._desugarer.combine(values, reduction))
            return found

    def _issue(self, desugared: Desugared) -> Any:
        for number, request in enumerate(desugared.requests):
            try:
                self._take(request, None)
            except RuntimeCoreError as error:
                error.halfway = error.halfway or number > desugared.main
                raise
        return desugared.result

    def _take(self, request: Request, asked: tuple[Any, ...] | None) -> None:
        """Record, capture, trace or analyse one request. asked: the call as the user made it."""
        with self.turn, self._guard:
            self.executor.check()
            if self._requests is not None:
                self._requests.append(request)
            elif self._capture is not None:
                issue([request], self._capture)
            elif self._automatic is not None:
                self._automatic.launch(request, asked)
            else:
                self.issue(request)

    def issue(self, request: Request) -> None:
        """Analyse a request (a launch or fill) and give it to the executor, without tracing.

        Raises: MapperError, MemoryExhausted, UnwrittenError.
        """
        self._unsettle()
        if isinstance(request, Fill):
            self.analysis.fill(request.region, request.value)
            return
        self.analysis.launch(request)
        self._since_forget += 1
        if self._since_forget >= _FORGET_EVERY:
            self._forget()

    def flush(self) -> None:
        """Run the launches that automatic tracing holds back, before the host does anything else.

        Raises: the errors of those launches.
        """
        if self._automatic is not None and not self.capturing:
            with self.turn, self._guard:
                self._automatic.flush()

    def fill(self, region: Region, value: Any) -> None:
        """Set every element of a region, in all its fields. value: a scalar its dtype can hold.

        Raises: LaunchError for a value that is no scalar or does not fit; StoppedError.
        """
        with self.turn:
            for request in fills(region, value):
                if self.agreement is not None:
                    self.agreement.host("fill", request.region, request.value)
                self._take(request, None)

    def wait(self) -> None:
        """Wait until everything launched has ended.

        Raises: TaskError when a task failed; StoppedError.
        """
        with self.turn:
            self._outside_capture("wait")
            self.flush()
        self.executor.wait()
        if self.analysis.log is not None:
            self.analysis.log.wait()
        self.publish_live()

    def _forget(self) -> None:
        self._since_forget = 0
        low = self.executor.lowest_live
        self.analysis.forget(self.analysis.next_id if low is None else low)

    # -- traces

    @property
    def analysing(self) -> Analysis:
        """The analysis that receives launches: the capture in progress, else the runtime's own."""
        return self._capture or self.analysis

    @property
    def capturing(self) -> bool:
        """Whether launches are being captured."""
        return self._capture is not None or self._requests is not None

    @overload
    def capture(
        self, step: str = "step", analyses: AnalysisCache | None = None
    ) -> AbstractContextManager[Recording]: ...
    @overload
    def capture(self, step: Callable[[], object]) -> Trace: ...
    def capture(
        self, step: str | Callable[[], object] = "step", analyses: AnalysisCache | None = None
    ) -> Any:
        """Capture a step: its launches are analysed and compiled, but not run.

        With a name, this is a context manager: after `with runtime.capture("train") as recording:`
        the trace is `recording.trace`. With a function, it is called and the trace is returned.

        analyses: earlier traces of this runtime. If the launches are those of one of them but for
        extents, its analysis is reused; otherwise the new trace is added.

        Raises (when the capture ends): MemoryExhausted; TaskError when binding fails.
        """
        if callable(step):
            with self._capturing(getattr(step, "__name__", "step")) as recording:
                step()
            return recording.trace
        return self._capturing(step, analyses)

    @contextmanager
    def _capturing(self, name: str, analyses: AnalysisCache | None = None) -> Iterator[Recording]:
        from soapstone.runtime.tracing.trace import Trace

        with self.turn:
            self.quiet("capture")
            if self.many_instances:
                self.publish_live()  # what the host may write, the step reads from the host
            sink = Recorder()
            analysis = CaptureAnalysis(self.analysis, sink)
            self._capture = analysis
            self._desugarer.steady = False
            recording, key = Recording(name), None
            if analyses is not None:
                self._requests = []
            try:
                yield recording
                if analyses is not None:
                    requests, self._requests = self._requests or [], None
                    key = analyses.analyse(requests, analysis, sink)
                analysis.close()
                if self.agreement is not None:
                    self.agreement.decided(sink.operations)
            finally:
                self._capture = self._requests = None
                self._desugarer.steady = True
            recording._trace = Trace(self, name, analysis, sink)
            if analyses is not None:
                analyses.note(key, recording._trace)
            self.statistics.captures += 1

    @contextmanager
    def trace(self, name: str = "step") -> Iterator[None]:
        """Run the launches of the block as one traced step when the block ends.

        The first time that a sequence of launches occurs it is captured; then, and each time it
        occurs again, it is replayed. Scalars are part of the sequence, so a value that varies from
        step to step belongs in a region. Launches of other threads wait until the step has run.

        Raises: as `capture` and `Trace.replay`.
        """
        with self.turn, self._traced(name):
            yield

    @contextmanager
    def _traced(self, name: str) -> Iterator[None]:
        self._ready("trace")
        requests: list[Request] = []
        self._requests = requests
        step = self._desugarer.step = Step()
        try:
            yield
        finally:
            self._requests = self._desugarer.step = None
        if not requests:
            return
        steps = self._steps.setdefault(name, Steps())
        try:
            key: Hashable = signature(requests, step.regions)
        except TypeError:
            key = None
        found = steps.get(key) if key is not None else None
        if found is None:
            found = (self.capture_requests(name, requests), step)
            if key is not None:
                steps.put(key, *found)
        trace, first = found
        for request in step.bring(first):
            self._take(request, None)
        trace.replay()
        written = [self.read(inner) for inner in first.written]
        for result, values in zip(step.made, written, strict=True):
            result.settle(values)

    def capture_requests(self, name: str, requests: list[Request]) -> Trace:
        """Capture launches that were made earlier, given as requests; return their trace.

        Raises: as `capture`.
        """
        with self._capturing(name) as recording:
            issue(requests, self._capture or self.analysis)
        return recording.trace

    def _outside_capture(self, what: str) -> None:
        if self._capture is not None or self._requests is not None:
            raise StoppedError(f"{what} during a capture: nothing is executed while capturing")

    # -- the end, and errors

    @contextmanager
    def profile(self, name: str = "run") -> Iterator[Profile]:
        """Record the untraced operations that run inside the block."""
        found = Profile.here(self.machine, self.executor.world, name)
        with self.turn:
            self.flush()
            self.executor.wait()
            self._observe(found)
        try:
            yield found
            self.flush()
            self.executor.wait()
        finally:
            self._observe(None)

    @contextmanager
    def log(self, path: str | os.PathLike[str]) -> Iterator[None]:
        """Log what runs inside the block to a file, for `soapstone profile check`.

        Each rank writes a file of its own: rank 0 to `path`, rank 1 to `path.1`, and so on.

        Raises: OSError; StoppedError under Legate.
        """
        with self.turn:
            self._outside_capture("log")
            self.flush()
            self.executor.wait()
            self._begin_log(path)
        try:
            yield
        except BaseException:
            self._end_log()
            raise
        with self.turn:
            try:
                self.flush()
                self.executor.wait()
            finally:
                self._end_log()

    def _begin_log(self, path: str | os.PathLike[str]) -> None:
        from soapstone.runtime.observe.log import Log

        if self._log is not None:
            raise StoppedError("the runtime writes a log already")
        if not self.executor.logs:
            raise StoppedError(
                "log: tasks run under Legate, which makes the instances, finds the dependences and "
                "copies by itself: there is nothing of that to write down"
            )
        self.analysis.forget()
        self.analysis.log = self._nest.log = self._log = Log(self, path)
        self.analysis.sink = self._log.logged(self.executor)
        self._observe(self.profiling)

    def _end_log(self) -> None:
        log, self._log = self._log, None
        self.analysis.log = self._nest.log = None
        self.analysis.sink = self.executor
        self._observe(self.profiling)
        if log is not None:
            log.close(self.executor.fault is None and not self.executor.busy)

    def _observe(self, profile: Profile | None) -> None:
        self.profiling = profile
        self.executor.profile = self.observed(profile)

    def observed(self, profile: Profile | None) -> Observer | None:
        """The observers of operations that run: a profile, the log, or both."""
        log = self._log
        if log is None:
            return profile
        from soapstone.runtime.observe.log import Both

        return log if profile is None else Both(log, profile)

    def failed(self, name: str) -> None:
        """Record in the log that a replay, or everything that was running, failed."""
        if self._log is not None:
            self._log.failed(name)

    def interrupted(self, error: BaseException) -> None:
        """Stop the run: an analysis that was interrupted half-way cannot be continued."""
        if self.executor.fault is None:
            self.executor._fail(
                StoppedError(f"{type(error).__name__} while launches were analysed: {error}")
            )
            self.executor.told = True
            if self.mends and self.executor.world.size == 1:
                self.reset()

    def forked(self) -> None:
        """In a child process, drop the parent's log and capture."""
        self._log = self._capture = self._requests = None

    def reset(self) -> None:
        """Continue after a task failed: forget the error and the operations still queued.

        Regions keep their contents; those that the failed run was writing have undefined contents.
        """
        self.failed("run")
        self.executor.reset()
        with self.turn, self._guard:
            if self._automatic is not None:
                self._automatic.drop()
            for state in list(self.analysis.regions.values()):
                state.mend()
            self.analysis.forget()

    def close(self) -> None:
        """Wait until everything launched has ended, and stop the worker threads.

        The runtime cannot be used afterwards. Leaving a `with` block calls this; if an exception
        leaves it, operations that have not begun are dropped.

        Raises: TaskError when a task failed, unless that was raised before.
        """
        try:
            if not self.executor.closed and not self.executor.told:
                self.flush()
                self.executor.wait()
        finally:
            self._stop()

    def _stop(self) -> None:
        """Stop and join the worker threads; operations that have not begun are dropped."""
        self._end_log()
        self.executor.close()

    def __enter__(self) -> Runtime:
        return self

    def __exit__(self, kind: object, *exception: object) -> None:
        if kind is None:
            self.close()
        else:
            self._stop()


def _executor(machine: Machine) -> type[LocalExecutor]:
    """Return the executor of a machine in this process."""
    if not machine.devices:
        return LocalExecutor
    from soapstone.runtime.devices.executor import DeviceExecutor

    return DeviceExecutor
