"""Progress on standard error: a bar on a terminal, a line an epoch or a stage elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TextIO

from soapstone.frontend.training.state import Callback, TrainingState

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

_LINE_S = 5.0
_SHORT_S = 2.0  # what takes less is not worth a line
_hushed = False
_REFRESH_S = 0.1  # drawing costs a millisecond: not after every step


@contextmanager
def hushed() -> Iterator[None]:
    """Show no progress as long as the block runs."""
    global _hushed
    before, _hushed = _hushed, True
    try:
        yield
    finally:
        _hushed = before


def is_hushed() -> bool:
    """Return whether no progress is shown."""
    return _hushed


class ProgressBar(Callback):
    """Shows epoch, loss, metrics, throughput and the time left.

    Args:
        stream: where to write; standard error by default.
        plain: write one line an epoch; by default where the stream is no terminal.
    """

    def __init__(self, stream: TextIO | None = None, *, plain: bool | None = None) -> None:
        self._out = stream or sys.stderr
        self._plain = plain
        self._quiet = False
        self._progress: Progress | None = None
        self._task: TaskID | None = None
        self._drawn = 0.0
        self._done = 0
        self._samples = 0.0  # of this epoch so far, and the time their steps took
        self._busy_s = 0.0

    def on_train_begin(self, state: TrainingState) -> None:
        """Show a bar, where the stream is a terminal."""
        plain = not self._out.isatty() if self._plain is None else self._plain
        self._quiet = _hushed
        if not plain and not _hushed:
            self._progress = _bar(self._out)
            self._progress.start()

    def on_epoch_begin(self, state: TrainingState) -> None:
        """Begin the bar of an epoch."""
        self._done, self._samples, self._busy_s = 0, 0.0, 0.0
        if self._progress is not None:
            self._task = self._progress.add_task(
                f"epoch {state.epoch + 1}/{state.epochs}", total=state.steps_per_epoch, figures=""
            )

    def on_step_end(self, state: TrainingState) -> None:
        """Draw how far the epoch is, where the last drawing is long enough ago."""
        self._done += 1
        self._busy_s += state.step_us / 1e6
        self._samples += state.samples_per_s * state.step_us / 1e6
        now = time.perf_counter()
        if self._progress is not None and now - self._drawn >= _REFRESH_S:
            self._draw(state)
            self._drawn = now

    def on_epoch_end(self, state: TrainingState) -> None:
        """Draw the whole epoch, or write its line: loss, metrics and throughput."""
        if self._progress is not None:
            self._draw(state)
            return
        if self._quiet:
            return
        width = len(str(state.epochs))
        line = f"epoch {state.epoch + 1:>{width}}/{state.epochs}  {self._figures(state)}"
        print(f"{line}  {self._busy_s:.1f} s", file=self._out, flush=True)

    def on_train_end(self, state: TrainingState) -> None:
        """Take the bar away."""
        if self._progress is not None:
            self._progress.stop()
            self._progress = None

    def _figures(self, state: TrainingState) -> str:
        """Return loss, metrics and the throughput of the epoch's steps so far."""
        parts = [f"loss {state.loss:.4f}"]
        parts += [f"{name} {value:.4f}" for name, value in state.metrics.items()]
        if self._busy_s:
            parts.append(f"{self._samples / self._busy_s:,.0f} samples/s")
        return "  ".join(parts)

    def _draw(self, state: TrainingState) -> None:
        if self._progress is not None and self._task is not None:
            figures = self._figures(state)
            self._progress.update(self._task, completed=self._completed(state), figures=figures)
            self._progress.refresh()

    def _completed(self, state: TrainingState) -> int:
        """Return the steps of this epoch, those before a resumed run began among them."""
        if state.steps_per_epoch is None:
            return self._done
        return max(state.step - state.epoch * state.steps_per_epoch, self._done)


class Stages:
    """The progress of stages on standard error: a bar on a terminal, a line a stage elsewhere.

    Args:
        least_s: seconds that a stage takes to be worth a line.
    """

    def __init__(self, least_s: float = 0.0) -> None:
        self._bar: Progress | None = None
        self._task: TaskID | None = None
        self._stage = ""
        self._start = 0.0
        self._least_s = least_s
        if sys.stderr.isatty() and not _hushed:
            self._bar = _bar(sys.stderr)
            self._bar.start()

    def __call__(self, stage: str, done: int, total: int | None) -> None:
        if stage != self._stage:
            self._finish()
            self._stage, self._start = stage, time.perf_counter()
            if self._bar is not None:
                self._task = self._bar.add_task(stage, total=total, figures="")
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=done, total=total)
            self._bar.refresh()

    def close(self) -> None:
        """End the line of the last stage."""
        self._finish()
        if self._bar is not None:
            self._bar.stop()

    def _finish(self) -> None:
        seconds = time.perf_counter() - self._start
        if self._stage and self._bar is None and not _hushed and seconds >= self._least_s:
            print(f"{self._stage}  {seconds:.1f} s", file=sys.stderr, flush=True)
        self._stage = ""


@contextmanager
def staged(least_s: float = 0.0) -> Iterator[Stages]:
    """Show the progress of stages as long as the block runs.

    least_s: as of `Stages`.
    """
    stages = Stages(least_s)
    try:
        yield stages
    finally:
        stages.close()


@contextmanager
def compiling(runtime: Any) -> Iterator[None]:
    """Show how many kernels of the steps that a runtime compiles in the block are ready."""
    with staged(_SHORT_S) as stages:
        ready: list[int] = []  # a list grows whole, whichever thread asks

        def tell(total: int) -> None:
            ready.append(1)
            stages("compiling and measuring kernels", len(ready), max(total, len(ready)))

        runtime.binding = tell
        try:
            yield
        finally:
            runtime.binding = None


@contextmanager
def searching() -> Iterator[Callable[[float, int, float], None]]:
    """Show how far a search for a strategy is."""
    with _line() as say:
        yield lambda seconds, proposals, best_us: say(
            f"{seconds:6.1f} s  {proposals:,} proposals  best {best_us:,.1f} us"
        )


@contextmanager
def planning() -> Iterator[Callable[[int, int, int], None]]:
    """Show how far a search for a memory plan is."""
    with _line() as say:
        yield lambda decided, count, nbytes: say(
            f"{decided:,} of {count:,} decisions  best {nbytes:,} bytes"
        )


@contextmanager
def _line() -> Iterator[Callable[[str], None]]:
    """Show a line that changes, or where there is no terminal one every few seconds."""
    out, alive = sys.stderr, sys.stderr.isatty()
    last = [0.0]

    def show(text: str) -> None:
        if _hushed:
            return
        now = time.perf_counter()
        if now - last[0] < (_REFRESH_S if alive else _LINE_S):
            return
        last[0] = now
        print(f"\r{text}\x1b[K" if alive else text, end="" if alive else "\n", file=out, flush=True)

    try:
        yield show
    finally:
        if alive and last[0]:
            print(file=out, flush=True)


def _bar(stream: TextIO) -> Progress:
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    return Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=20),
        MofNCompleteColumn(),
        TextColumn("{task.fields[figures]}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=Console(file=stream),
        auto_refresh=False,
    )
