"""Batching of requests: those of many callers become runs of one session.

One run of several samples takes less time than as many runs of one. A thread of the batcher takes
the request that has waited longest, waits until enough samples are there or its delay has passed,
runs them together, and gives each request its rows. There are as many threads as the session runs
requests at once.
"""

from __future__ import annotations

import _thread
import threading
import time
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from soapstone.errors import DataError
from soapstone.frontend.inference.exit_hooks import at_exit
from soapstone.frontend.inference.futures import Answer
from soapstone.frontend.inference.session import InferenceSession, interrupts
from soapstone.frontend.inference.sources import Field
from soapstone.ir.tensor import Array
from soapstone.runtime import StoppedError
from soapstone.runtime.forks import FORKED, tell

Outputs = dict[str, Array]
_KEYS = 1024  # of which it is kept whether samples meet


@dataclass(frozen=True)
class BatcherStatistics:
    """The counts of a batcher.

    Attributes:
        requests: those that were answered, with outputs or an error. runs: of the session for them.
        samples: in those requests. padding: samples that were added to fill up runs.
    """

    requests: int = 0
    runs: int = 0
    samples: int = 0
    padding: int = 0


@dataclass(eq=False)
class _Request:
    """One request. key: requests with equal keys may be joined."""

    given: Mapping[str, Array]
    samples: int
    key: tuple[Any, ...]
    caller: int
    until_s: float
    answer: Answer[Outputs]


class Batcher:
    """A session that joins requests, for many small requests from several threads at once.

    A sample is a row: the first dim of all inputs is the same symbolic extent. Requests are joined
    if their inputs have equal shapes but for that dim, and the graph shows that each row of the
    outputs depends only on its row of the inputs. Otherwise each runs by itself, and `apart` says
    why. The requests of one thread are answered in the order in which it made them. With a session
    for several `requests`, as many runs go on at once. Its threads end with `close`, or once nobody
    has it and all requests are answered.

    Args:
        session: runs the requests; it may be used directly too, and stays open after `close`.
        most: the largest number of samples of a run. A larger request runs by itself.
        delay_ms: the longest time that a request waits for others before its run.
        pad: whether runs are filled up to 1, 2, 4, 8, … samples by repeating the last one, so that
            the session compiles few shapes.

    Raises:
        DataError: arguments or inputs of the session that do not fit.

    Example:
        >>> with Batcher(InferenceSession("model.onnx"), most=16, delay_ms=2) as batcher:
        ...     future = batcher.run_async({"image": image})  # from any thread
        ...     logits = future.result()["logits"]
    """

    def __init__(
        self,
        session: InferenceSession,
        *,
        most: int = 16,
        delay_ms: float = 2.0,
        pad: bool = True,
    ) -> None:
        if isinstance(most, bool) or not isinstance(most, int) or most < 1:
            raise DataError(f"most: {most!r} found; a number of samples, 1 or more, needed")
        if not 0 <= delay_ms < float("inf"):
            raise DataError(f"delay_ms: {delay_ms!r} found; 0 or more needed")
        _check(session)
        self._session = session
        self._joiner = _Joiner(session, most, delay_ms / 1e3, pad)
        # Garbage may be collected anywhere, also where locks are held: a thread waits for them.
        refuse = partial(_thread.start_new_thread, self._joiner.refuse, ())
        self._end = weakref.finalize(self, refuse)
        self._end.atexit = False  # the joiner itself is closed then

    @property
    def inputs(self) -> tuple[Field, ...]:
        """The inputs of the session."""
        return self._session.inputs

    @property
    def outputs(self) -> tuple[str, ...]:
        """The names of the outputs of the session."""
        return self._session.outputs

    @property
    def statistics(self) -> BatcherStatistics:
        """The counts so far."""
        return self._joiner.statistics

    @property
    def apart(self) -> tuple[str, ...]:
        """Why requests of the last shapes are not joined: where samples meet in their graphs."""
        return tuple(dict.fromkeys(filter(None, self._joiner.meeting.values())))

    def run(self, inputs: Mapping[str, Any] | Any) -> Outputs:
        """Return the outputs by name, as `InferenceSession.run`; waits for them.

        inputs: as of `InferenceSession.run`.

        Raises:
            As `InferenceSession.run`; StoppedError: the batcher was closed.
        """
        return self.run_async(inputs).result()

    def run_async(self, inputs: Mapping[str, Any] | Any) -> Future[Outputs]:
        """Return a future of `run`, which may be cancelled until it runs.

        inputs: as of `InferenceSession.run`; they must not change until the future is done.

        Raises:
            DataError: inputs that do not fit, at once.
            StoppedError: the batcher was closed.
        """
        given = self._session.checked(inputs)
        sizes = {name: array.shape[0] for name, array in given.items()}
        if len(set(sizes.values())) > 1:
            raise DataError(
                f"model {self._session.name!r}: {sizes} samples found; one number needed"
            )
        samples = next(iter(sizes.values()))
        return self._joiner.ask(given, samples)

    def close(self) -> None:
        """Refuse further requests, answer those that wait without delay, and stop.

        A process that ends by itself closes its batchers; where an exception ends it, those that
        wait are cancelled.
        An interrupt meanwhile, or one that `with batcher:` is left by, cancels those that wait.
        """
        self._end.detach()
        self._joiner.close(cancel=False)

    def __enter__(self) -> Batcher:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._end.detach()
        self._joiner.close(cancel=interrupts(kind))


class _Joiner:
    """The threads of a batcher, and what waits for them; see `Batcher`.

    Attributes:
        statistics: the counts so far. meeting: where samples meet, of each key of requests.
    """

    def __init__(self, session: InferenceSession, most: int, delay_s: float, pad: bool) -> None:
        self._session = session
        self._most, self._delay_s, self._pad = most, delay_s, pad
        self._waiting: deque[_Request] = deque()
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._closing = self._gone = False
        self.statistics = BatcherStatistics()
        self.meeting: OrderedDict[tuple[Any, ...], str] = OrderedDict()
        self._begun = self._given = 0  # runs that were begun, and whose answers were given
        self._done: dict[int, Callable[[], None]] = {}  # gives answers, by the number of the run
        self._giving = False  # whether a thread gives answers
        self._meets = threading.Lock()
        self._sizes = {self._size(samples) for samples in range(2, most + 1)}  # of joined requests
        self._threads = [
            threading.Thread(target=self._serve, name=f"batcher {number}", daemon=True)
            for number in range(session.requests)
        ]
        for thread in self._threads:
            thread.start()
        tell(self)
        at_exit(self, _Joiner.close)

    def forked(self) -> None:
        """In a child process there is no thread to run requests, so they are refused."""
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._gone = True

    def ask(self, given: dict[str, Array], samples: int) -> Answer[Outputs]:
        """Return the future of a request.

        given: inputs as `InferenceSession.checked` returns them. samples: of them.

        Raises:
            StoppedError: this was closed, or belongs to another process.
        """
        key = tuple(array.shape[1:] for array in given.values())
        until_s = time.monotonic() + self._delay_s
        request = _Request(given, samples, key, threading.get_ident(), until_s, Answer())
        with self._lock:
            if self._gone:
                raise StoppedError(FORKED)
            if self._closing:
                raise StoppedError(f"batcher of model {self._session.name!r}: it was closed")
            self._waiting.append(request)
            self._changed.notify_all()
        return request.answer

    def refuse(self) -> None:
        """Refuse further requests; the threads end once those that wait are answered."""
        with self._lock:
            self._closing = True
            self._changed.notify_all()

    def close(self, cancel: bool) -> None:
        """Refuse further requests, answer those that wait, and stop. cancel: but cancel those."""
        with self._lock:
            self.refuse()
            dropped = list(self._waiting) if cancel else []
            if cancel:
                self._waiting.clear()  # so that no thread takes some of them meanwhile
        for each in dropped:  # with no lock: what is called back may ask, or close
            if each.answer.cancel():
                each.answer.set_running_or_notify_cancel()  # tells who waits for several
        try:
            for thread in self._threads:
                if not self._gone and thread is not threading.current_thread():
                    thread.join()
        except BaseException:  # an interrupt
            if not cancel:
                self.close(cancel=True)
            raise

    def _serve(self) -> None:
        while taken := self._next():
            number, group = taken
            group = [each for each in group if each.answer.set_running_or_notify_cancel()]
            give = self._answered(group) if group else _nothing
            self._give(number, give)

    def _give(self, number: int, give: Callable[[], None]) -> None:
        """Deliver the answers of a run after those of runs that began before it."""
        with self._lock:
            self._done[number] = give
            if self._giving:
                return
            self._giving = True
        while True:
            with self._lock:
                ready = self._done.pop(self._given, None)
                if ready is None:
                    self._giving = False
                    return
                self._given += 1
            ready()  # with no lock: what is called back may ask, or close

    def _next(self) -> tuple[int, list[_Request]] | None:
        """Return the number and requests of the next run, waiting for them; None after `close`."""
        with self._lock:
            while True:
                if not self._waiting:
                    if self._closing:
                        return None
                    self._changed.wait()
                    continue
                group = self._joined()
                left_s = self._waiting[0].until_s - time.monotonic()
                full = sum(each.samples for each in group) >= self._most
                if full or left_s <= 0 or self._closing:
                    taken = set(group)
                    self._waiting = deque(each for each in self._waiting if each not in taken)
                    self._begun += 1
                    return self._begun - 1, group
                self._changed.wait(left_s)

    def _joined(self) -> list[_Request]:
        """Return the first request and those that may be run with it, in their order.

        A later request of a caller is not answered before an earlier one that is left out.
        """
        first = self._waiting[0]
        group, samples = [first], first.samples
        behind: set[int] = set()
        for each in list(self._waiting)[1:]:
            if samples >= self._most:
                break
            fits = each.key == first.key and samples + each.samples <= self._most
            if fits and each.caller not in behind:
                group.append(each)
                samples += each.samples
            else:
                behind.add(each.caller)
        return group

    def _answered(self, group: list[_Request]) -> Callable[[], None]:
        """Run requests together, or each by itself if that fails; return functions that answer."""
        samples = sum(each.samples for each in group)
        size = self._size(samples)
        answers: list[Outputs | BaseException] = []
        runs = 1
        try:
            if (len(group) == 1 and size == samples) or not self._meet(group, size):
                answers += self._run(group, samples, size)
        except Exception:  # of one of them, or of what is joined: each gets its own
            runs += len(group)
        if not answers:
            size, runs = samples, max(runs, len(group))
            answers += [self._alone(each) for each in group]

        def give() -> None:
            before = self.statistics
            self.statistics = BatcherStatistics(
                before.requests + len(group),
                before.runs + runs,
                before.samples + samples,
                before.padding + size - samples,
            )
            for each, answer in zip(group, answers):
                if isinstance(answer, BaseException):
                    each.answer.set_exception(answer)
                else:
                    each.answer.set_result(answer)

        return give

    def _alone(self, request: _Request) -> Outputs | BaseException:
        try:
            return self._session.run(request.given)
        except Exception as error:
            return error

    def _meet(self, group: list[_Request], size: int) -> str:
        """Return where the samples of requests meet; computed once for each key."""
        key = group[0].key
        if size < 2:
            return ""
        with self._meets:
            if key not in self.meeting:
                some = next(each for each in group if each.samples)
                given = {n: np.repeat(a[:1], 2, axis=0) for n, a in some.given.items()}
                self.meeting[key] = self._session.meeting_samples(given, self._sizes)
                if len(self.meeting) > _KEYS:
                    self.meeting.popitem(last=False)
            return self.meeting[key]

    def _size(self, samples: int) -> int:
        """Return how many samples a run for so many has: 1, 2, 4, …, most where it is filled up."""
        if not self._pad or samples >= self._most or samples == 0:
            return samples
        return min(1 << (samples - 1).bit_length(), self._most)

    def _run(self, group: list[_Request], samples: int, size: int) -> list[Outputs]:
        if len(group) == 1 and size == samples:
            return [self._session.run(group[0].given)]
        given = {}
        for name, array in group[0].given.items():
            parts = [each.given[name] for each in group]
            if size > samples:
                last = next(part for part in reversed(parts) if part.shape[0])[-1:]
                parts += [last] * (size - samples)
            given[name] = np.concatenate(parts, dtype=array.dtype)
        found = self._session.run(given)
        answers, begin = [], 0
        for each in group:
            end = begin + each.samples
            # Rows of their own: one caller may write to them, another keep them.
            answers.append({name: array[begin:end].copy() for name, array in found.items()})
            begin = end
        return answers


def _nothing() -> None:
    """Deliver no answer: all requests were cancelled."""


def _check(session: InferenceSession) -> None:
    """Check that all inputs of a session have samples as rows.

    Raises:
        DataError: an input has not; names it.
    """
    label = f"model {session.name!r}"
    if not session.inputs:
        raise DataError(f"{label}: no inputs found; one needed, to join requests")
    firsts = {}
    for field in session.inputs:
        if not field.shape or isinstance(field.shape[0], int):
            raise DataError(
                f"{label}: input {field}: a symbolic first dim needed, to join requests along it"
            )
        firsts[field.name] = field.shape[0]
    if len(set(firsts.values())) > 1:
        raise DataError(
            f"{label}: first dims {firsts} found; one symbolic dim needed of all inputs"
        )
