"""Automatic tracing: sequences of launches that repeat are recognised, and replayed.

Source: Yadav et al., "Automatic Tracing in Task-Based Runtime Systems", ASPLOS 2025 (Apophenia).
Every launch is a token. Windows of the last tokens are searched for repeats at growing scales
(section 4.3); launches that may be part of a repeat are held back until it is complete and
replayed, or until the stream departs from it and they run untraced, in order (section 4.4).

Deviations. A repeat that is a power keeps its root: matching counts repetitions, and traces are
made of powers of two of them. What matches longest wins, without the paper's decay. The search is
synchronous, and driven by the launches that ran untraced: every decision follows from the stream
alone, so that processes which each run the program decide alike, and replays cost no search.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Hashable
from dataclasses import field
from typing import TYPE_CHECKING, Any

from soapstone.dtypes import code_of
from soapstone.records import dataclass
from soapstone.runtime.errors import RuntimeCoreError, StoppedError, TaskError
from soapstone.runtime.model.scalar import exact
from soapstone.runtime.model.task import Task
from soapstone.runtime.tracing.repeats import period, repeats, rotation
from soapstone.runtime.tracing.step import Fill, Request

if TYPE_CHECKING:
    from soapstone.runtime.core import Runtime
    from soapstone.runtime.tracing.trace import Trace

LOOK_EVERY = 64  # untraced launches between two searches; each fourth looks four times as far
WINDOW = 4096  # tokens looked at, at most
FEWEST_POINTS = 4  # point tasks worth a trace
ENOUGH_POINTS = 64  # point tasks after which unrolling a loop further gains nothing
_COVERED = 16  # a sequence is kept when it makes up this part of what was looked at
_SEQUENCES = 32  # sequences kept, with their traces
_TOKENS = 1 << 14  # launches told apart


@dataclass(frozen=True, eq=False, slots=True)
class Held:
    """A launch as it was asked for (None for a fill), its token, and what to run."""

    token: int
    asked: tuple[Any, ...] | None
    request: Request


@dataclass(eq=False, slots=True)
class Sequence:
    """A launch sequence that repeats; `most` repetitions in a row make its longest trace.

    traces: by number of repetitions, None where capturing failed. used: when it last ran. seen:
    how often it was met without a trace.
    """

    tokens: tuple[int, ...]
    points: int
    most: int
    used: int
    seen: int = 0
    traces: dict[int, Trace | None] = field(default_factory=dict)


@dataclass(eq=False, slots=True)
class _Match:
    """Held launches from `start` that follow a sequence: whole repetitions, and a place in one."""

    start: int
    sequence: Sequence
    times: int = 0
    place: int = 0

    @property
    def done(self) -> int:
        """The number of launches in whole repetitions so far."""
        return self.times * len(self.sequence.tokens)

    @property
    def possible(self) -> int:
        """The largest number of launches that the match can grow to."""
        return self.sequence.most * len(self.sequence.tokens)


class Automatic:
    """The automatic tracer of one runtime: it gets every launch and fill, in order."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._tokens: dict[Hashable, int] = {}
        self._points: dict[int, int] = {}
        self._next_token = 0
        self._barrier = 0  # tokens of what must never repeat count down
        self._history: deque[int] = deque(maxlen=WINDOW)
        self._untraced = 0
        self._next_look = LOOK_EVERY
        self._looks = 0
        self._clock = 0
        self._sequences: list[Sequence] = []
        self._starts: dict[int, list[Sequence]] = {}  # by first token
        self._held: list[Held] = []
        self._growing: list[_Match] = []
        self._ended: list[_Match] = []
        self._last = 0
        self._inside: set[int] = set()  # the tokens of all sequences
        self._follower: dict[int, Held] = {}  # of those: what followed last time
        self._running: Request | None = None
        self._busy = False
        if runtime.executor.world.size == 1:  # else all processes must do it together
            runtime.memory.on_pressure(self.release)

    # -- launches

    def follow(self, asked: tuple[Any, ...]) -> bool:
        """Take a launch asked for in the very objects that followed the last launch before.

        Returns whether it was that one; then there is nothing left to check or to analyse.

        Raises: what running held-back launches raises.
        """
        found = self._follower.get(self._last)
        if found is None or found.asked is None or len(found.asked) != len(asked):
            return False
        for mine, theirs in zip(asked, found.asked):
            if mine is not theirs:
                return False
        self._take(found)
        return True

    def launch(self, request: Request, asked: tuple[Any, ...] | None) -> None:
        """Run a launch now, or hold it back as part of a sequence that may repeat.

        asked: the arguments as they were given, for `follow`.

        Raises: what running held-back launches raises.
        """
        held = self._identify(request, asked)
        if held is not None:
            self._take(held)
            return
        try:
            self._flush()
            self._bar()
            self._run([request])
        except BaseException as error:
            self._stop(error, request)
            raise

    def _take(self, held: Held) -> None:
        try:
            self._last = held.token
            self._history.append(held.token)
            if not self._held and held.token not in self._starts:
                self._run([held.request])
            else:
                self._held.append(held)
                self._advance(held.token)
                self._settle()
            if self._untraced >= self._next_look:
                self._look()
        except BaseException as error:
            self._stop(error, held.request)
            raise

    def flush(self) -> None:
        """Run everything held back: the host, or something untraceable, comes next.

        Raises: what running held-back launches raises.
        """
        if self._busy:
            return
        try:
            self._flush()
            self._bar()
        except BaseException as error:
            self._stop(error, None)
            raise

    def drop(self) -> None:
        """Forget what is held back, after an error."""
        self._held.clear()
        self._growing.clear()
        self._ended.clear()
        self._busy = False

    def _stop(self, error: BaseException, current: Request | None) -> None:
        """Stop the runtime, unless the error is that of the current launch, and just that.

        What was held back is lost with the error of an earlier launch, or an interrupt, so nothing
        may run as if it had been done.
        """
        self.drop()
        mine = isinstance(error, RuntimeCoreError) and self._running is current is not None
        executor = self._runtime.executor
        if executor.fault is None and not mine:
            reason = f"{type(error).__name__} while running held-back launches: {error}"
            executor._fail(StoppedError(reason))
            executor.told = True

    # -- tokens

    def _identify(self, request: Request, asked: tuple[Any, ...] | None) -> Held | None:
        """The launch with its token, or None when it cannot be part of a trace."""
        key = _key(request)
        if key is None:
            return None
        token = self._tokens.get(key)
        if token is None:
            if len(self._tokens) >= _TOKENS:
                self._forget_tokens()
            self._next_token += 1
            token = self._next_token
            self._tokens[key] = token
            self._points[token] = 1 if isinstance(request, Fill) else request.points
        held = Held(token, asked, request)
        if token in self._inside and self._last in self._inside:
            if asked is not None and not _lasting(asked, request):
                held = Held(token, None, request)
            self._follower[self._last] = held
        return held

    def _forget_tokens(self) -> None:
        kept = self._inside
        self._tokens = {key: token for key, token in self._tokens.items() if token in kept}
        self._points = {token: self._points[token] for token in kept}

    def _bar(self) -> None:
        """Note in the history that no sequence runs across this point."""
        if self._history and self._history[-1] > 0:
            self._barrier -= 1
            self._history.append(self._barrier)

    # -- matching

    def _advance(self, token: int) -> None:
        """Extend the matches that go on with a token; end the others; begin new ones."""
        here = len(self._held) - 1
        growing = []
        for match in self._growing:
            sequence = match.sequence
            if sequence.tokens[match.place] != token:
                if match.times:
                    self._ended.append(match)
                continue
            match.place += 1
            if match.place == len(sequence.tokens):
                match.place = 0
                match.times += 1
                if match.times == sequence.most:
                    self._ended.append(match)
                    continue
            growing.append(match)
        for sequence in self._starts.get(token, ()):
            # A match of the same sequence that is as far will do.
            times, place = divmod(1, len(sequence.tokens))
            if not any(m.sequence is sequence and m.place == place for m in growing):
                growing.append(_Match(here, sequence, times, place))
        self._growing = growing

    def _settle(self) -> None:
        """Run whatever no match can change any more."""
        while self._held:
            if not self._ended:
                cut = min((m.start for m in self._growing), default=len(self._held))
                self._untrace(cut)
                return
            best = max(self._ended, key=_merit)
            end = best.start + best.done
            if any(m.start < end and m.possible > best.done for m in self._growing):
                return
            self._replay_up_to(best)

    def _flush(self) -> None:
        self._ended += [match for match in self._growing if match.times]
        self._growing = []
        while self._held:
            if not self._ended:
                self._untrace(len(self._held))
                return
            self._replay_up_to(max(self._ended, key=_merit))

    def _replay_up_to(self, best: _Match) -> None:
        """Replay a match, after what is held back before it."""
        while best.start:
            before = [m for m in self._ended if m.start + m.done <= best.start]
            if before:
                self._replay_up_to(max(before, key=_merit))
            else:
                self._untrace(best.start)
        held = self._held[: best.done]
        self._remove(best.done)
        self._replay(best.sequence, best.times, held)

    def _remove(self, count: int) -> None:
        """Take the first held-back launches out; matches that need them end."""
        del self._held[:count]
        for matches in (self._growing, self._ended):
            matches[:] = [match for match in matches if match.start >= count]
            for match in matches:
                match.start -= count

    # -- running

    def _untrace(self, count: int) -> None:
        if not count:
            return
        requests = [held.request for held in self._held[:count]]
        self._remove(count)
        self._run(requests)

    def _run(self, requests: list[Request]) -> None:
        """Run launches untraced."""
        self._untraced += len(requests)
        for request in requests:
            self._running = request
            self._runtime.issue(request)
        self._running = None

    def _replay(self, sequence: Sequence, times: int, held: list[Held]) -> None:
        """Replay repetitions of a sequence as the powers of two that make up their number."""
        self._clock += 1
        sequence.used = self._clock
        part = sequence.most
        while held:
            while part > times:
                part //= 2
            times -= part
            count = part * len(sequence.tokens)
            requests = [one.request for one in held[:count]]
            del held[:count]
            trace = None
            if part * sequence.points >= FEWEST_POINTS:
                trace = self._trace(sequence, part, requests)
            if trace is None:
                self._run(requests)
            elif self._quiet():
                self._replay_trace(trace)
                self._runtime.statistics.launches_traced += count

    def _trace(self, sequence: Sequence, times: int, requests: list[Request]) -> Trace | None:
        """The trace of some repetitions, captured when it is not there or no longer fits."""
        found = sequence.traces.get(times)
        if found is not None and found.fits():
            return found
        if times in sequence.traces and found is None:
            return None
        sequence.seen += found is None
        if not self._runtime.analysis.policy.trace(requests, sequence.seen):
            return None
        sequence.traces[times] = None
        if not self._quiet():
            return None
        name = f"repeat of {len(requests)} launches"
        self._busy = True
        try:
            trace = self._runtime.capture_requests(name, requests)
        except (RuntimeCoreError, MemoryError):
            if self._runtime.executor.fault is not None:
                raise
            return None  # untraced, the error shows if it is one there
        finally:
            self._busy = False
        sequence.traces[times] = trace
        return trace

    def _quiet(self) -> bool:
        """Wait for what runs; whether nothing has failed (the error comes out as it would have)."""
        executor = self._runtime.executor
        told = executor.told
        try:
            executor.wait()
        except (TaskError, StoppedError):
            executor.told = told
            return False
        return executor.fault is None

    def _replay_trace(self, trace: Trace) -> None:
        executor = self._runtime.executor
        self._busy = True
        try:
            trace.replay(profile=self._runtime.profiling)
        except TaskError as error:
            executor._fail(error)  # and comes out of `wait`, as for any launch
        finally:
            self._busy = False

    def release(self) -> None:
        """Give up all traces, and with them their memory; they are captured again when needed."""
        for sequence in self._sequences:
            sequence.traces.clear()
        self._follower.clear()

    # -- finding

    def _look(self) -> None:
        """Search a window of the history for sequences; each fourth search looks further."""
        self._next_look = self._untraced + LOOK_EVERY
        self._looks += 1
        reach, look = LOOK_EVERY, self._looks
        while look % 4 == 0 and reach < WINDOW:
            reach *= 4
            look //= 4
        window = list(self._history)[-reach:]
        for text, count in repeats(window, 1):
            if len(text) * count * _COVERED >= len(window):
                self._add(text[: period(text)], sum(self._points.get(t, 0) for t in text))

    def _add(self, root: tuple[int, ...], found: int) -> None:
        """Keep a sequence found in a repeat of some points, unless a rotation of it is in use."""
        points = sum(self._points.get(token, 0) for token in root)
        if found < FEWEST_POINTS or not points:
            return
        most = 1
        while most * points < ENOUGH_POINTS:
            most *= 2
        same = rotation(root)
        for other in self._sequences:
            if len(other.tokens) == len(root) and rotation(other.tokens) == same:
                if other.tokens == root or other.used > self._clock - _SEQUENCES:
                    return
                self._discard(other)
                break
        if len(self._sequences) >= _SEQUENCES:
            self._discard(min(self._sequences, key=lambda sequence: sequence.used))
        self._sequences.append(Sequence(root, points, most, self._clock))
        self._index()

    def _discard(self, sequence: Sequence) -> None:
        self._sequences.remove(sequence)
        self._growing = [match for match in self._growing if match.sequence is not sequence]
        self._ended = [match for match in self._ended if match.sequence is not sequence]

    def _index(self) -> None:
        self._starts = {}
        for sequence in self._sequences:
            self._starts.setdefault(sequence.tokens[0], []).append(sequence)
        self._inside = {token for sequence in self._sequences for token in sequence.tokens}
        self._follower = {
            token: held
            for token, held in self._follower.items()
            if token in self._inside and held.token in self._inside
        }


def _merit(match: _Match) -> tuple[int, int]:
    """The longest match first, then the one that began first."""
    return (match.done, -match.start)


def _lasting(asked: tuple[Any, ...], request: Request) -> bool:
    """Whether the objects of a launch say what it is, whenever they are seen again.

    Not where a scalar had to be copied: the program may change it.
    """
    if isinstance(request, Fill):
        return True
    given = asked[len(asked) - len(request.layout) :]
    scalars = [one for one, region in zip(given, request.layout) if not region]
    return all(one is taken for one, taken in zip(scalars, request.scalars))


def _key(request: Request) -> Hashable | None:
    """What makes two launches the same one, holding neither regions nor tasks alive.

    Tilings are held: one that is made anew must be known again, and not only as long as something
    else happens to keep it, which is not the same in all processes. None for what must not be
    traced: transient regions, which live in one step, and scalars that may change behind their
    backs.
    """
    try:
        if isinstance(request, Fill):
            if request.region.transient:
                return None
            value = request.value
            return (weakref.ref(request.region), code_of(value.dtype), value.tobytes())
        parts: list[Hashable] = []
        for partition in request.partitions:
            region = partition.region
            if region.transient:
                return None
            parts += (weakref.ref(region), partition.tiling)
        parts += map(exact, request.scalars)
        task: Task = request.task
        key = (
            weakref.ref(task),
            *parts,
            request.grid,
            request.layout,
            request.name,
            type(request.tag),
            request.tag,
            request.initialise,
        )
        hash(key)
        return key
    except TypeError:
        return None
