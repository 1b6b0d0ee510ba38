"""`soapstone predict --benchmark`: the time of runs once a session has bound everything."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from soapstone.dtypes import kind_of
from soapstone.errors import DataError, hint
from soapstone.frontend.inference.predict import given, shown, source_of
from soapstone.frontend.inference.session import InferenceSession
from soapstone.frontend.onnx.texts import blank
from soapstone.ir.tensor import Array

WARM, LEAST, MOST, SECONDS = 5, 20, 10_000, 3.0  # runs that are not counted, that are; how long
PERCENTILES = (50, 90, 99)


@dataclass(frozen=True)
class Latency:
    """The times of runs.

    Attributes:
        inputs: their types and shapes, by name. requests: at once. cpus, threads: the processors of
            each, and the threads of those.
        seconds: of each run that was counted. wall_seconds: of all. warm: the number of runs
            before.
        bind_seconds: of reading, compiling and binding. samples: of a run, if the inputs agree.
    """

    model: str
    inputs: Mapping[str, str]
    requests: int
    cpus: int
    threads: int
    seconds: tuple[float, ...]
    wall_seconds: float
    warm: int
    bind_seconds: float
    samples: int | None

    @property
    def percentiles_ms(self) -> dict[int, float]:
        """Percentiles of the time of a run, in ms."""
        found = np.percentile(self.seconds, PERCENTILES) * 1e3
        return dict(zip(PERCENTILES, found.tolist()))

    @property
    def runs_per_s(self) -> float:
        """The number of runs that end in a second."""
        return len(self.seconds) / self.wall_seconds

    def as_dict(self) -> dict[str, Any]:
        """Return the result as JSON data."""
        return {
            "model": self.model,
            "inputs": dict(self.inputs),
            "requests": self.requests,
            "cpus": self.cpus,
            "threads": self.threads,
            "runs": len(self.seconds),
            "warm_runs": self.warm,
            "bind_ms": self.bind_seconds * 1e3,
            **{f"p{percent}_ms": value for percent, value in self.percentiles_ms.items()},
            "mean_ms": sum(self.seconds) / len(self.seconds) * 1e3,
            "runs_per_s": self.runs_per_s,
            "samples_per_s": None if self.samples is None else self.samples * self.runs_per_s,
        }

    def __str__(self) -> str:
        inputs = ", ".join(f"{name}: {each}" for name, each in self.inputs.items())
        times = ", ".join(f"p{p} {ms:.3f} ms" for p, ms in self.percentiles_ms.items())
        rate = f"{self.runs_per_s:,.1f} runs/s"
        if self.samples is not None:
            rate += f", {self.samples * self.runs_per_s:,.1f} samples/s"
        how = f"{self.requests} at once" if self.requests > 1 else "one after the other"
        runs = f"{len(self.seconds):,} runs {how}, {self.warm} more before"
        cpus = f"; processors: {self.cpus}" if self.cpus > 1 else ""
        return "\n".join(
            [
                f"{self.model}: {inputs}{cpus}; threads: {self.threads}",
                f"{times}; {rate}",
                f"{runs}; {self.bind_seconds * 1e3:.0f} ms to bind",
            ]
        )


def measure(
    model: str,
    arrays: Mapping[str, Array] | None = None,
    *,
    dims: Mapping[str, int] | None = None,
    checkpoint: Path | None = None,
    runs: int | None = None,
    **options: Any,
) -> Latency:
    """Return the times of runs of a model.

    Args:
        model: the path of an `.onnx` file, or an app's name, whose weights may be initial ones.
        arrays: the inputs, as of `predict`; by default drawn: normal numbers, integers of 0.
        dims: extents of symbolic dims of inputs that are drawn; by default 1.
        checkpoint: the weights of an app. runs: how many to count; by default those of 3 s.
        options: see `InferenceSession`; with `requests`, as many runs proceed at any time.

    Raises:
        DataError, GraphError: a model, arrays or dims that do not fit.
    """
    started = time.perf_counter()
    source = source_of(model, checkpoint, initial=True)
    with InferenceSession(source, **options) as session:
        if arrays is not None and dims:
            raise DataError("dims found with inputs, which have theirs; one of both needed")
        inputs = _drawn(session, dims or {}) if arrays is None else given(session, arrays)
        inputs = session.checked(inputs)
        try:
            session.run(inputs)
        except ValueError as error:
            left = _symbolic(session, dims or {}) - set(dims or {})
            if arrays is not None or not left:
                raise
            names = ", ".join(sorted(left))
            raise DataError(
                f"{error}; dims {names} are 1, the default: --dim gives others"
            ) from error
        bound = time.perf_counter()
        warm = WARM * session.requests  # of each request's processors
        asked(session, inputs, lambda count, spent: count >= warm)
        session.settle()

        def enough(count: int, spent: float) -> bool:
            over = runs is None and (count >= MOST or spent >= SECONDS)
            return count >= (runs or LEAST) and (runs is not None or over)

        seconds, wall = asked(session, inputs, enough)
        firsts = {getattr(each, "shape", ())[:1] for each in inputs.values()}
        return Latency(
            model,
            {name: shown(each) for name, each in inputs.items()},
            *(session.requests, session.cpus, session.threads),
            tuple(seconds),
            wall,
            warm + 1,
            bound - started,
            next(iter(firsts.pop()), None) if len(firsts) == 1 else None,
        )


def asked(
    session: InferenceSession, inputs: Mapping[str, Any], enough: Callable[[int, float], bool]
) -> tuple[list[float], float]:
    """Return the seconds of each run, and of all, with as many runs at once as the session allows.

    inputs: of each run. enough: receives the number of runs begun and the seconds since the first;
    returns whether to stop.
    """
    times: list[float] = []
    places = itertools.count()  # taken in turns, without a lock
    stopped = threading.Event()  # by an error or an interrupt: the pool waits for its threads
    began = time.perf_counter()

    def ask() -> None:
        while not (stopped.is_set() or enough(next(places), time.perf_counter() - began)):
            start = time.perf_counter()
            session.run(inputs)
            times.append(time.perf_counter() - start)

    with ThreadPoolExecutor(session.requests) as pool:
        others = [pool.submit(ask) for _ in range(session.requests - 1)]
        try:
            ask()
            for other in others:
                other.result()
        finally:
            stopped.set()
    return times, time.perf_counter() - began


def _symbolic(session: InferenceSession, dims: Mapping[str, int]) -> set[str]:
    """Return the names of the symbolic dims of a session's inputs, and of ranks to be given."""
    inputs = (*session.inputs, *(field.with_rank(dims) for field in session.inputs))
    return {d for field in inputs for d in field.symbolic}


def _drawn(session: InferenceSession, dims: Mapping[str, int]) -> dict[str, Array]:
    """Return arrays for the inputs of a session."""
    symbolic = _symbolic(session, dims)
    for name in dims:
        if name not in symbolic:
            have = ", ".join(sorted(symbolic)) or "none"
            raise DataError(f"dim {name!r} found{hint(name, symbolic)}; symbolic dims are {have}")
    random = np.random.default_rng(0)
    made: dict[str, Array] = {}
    for field in session.inputs:
        if field.holds:
            raise DataError(f"input {field} found, of which none is drawn; arrays needed")
        if field.open_rank is not None and field.open_rank not in dims:
            raise DataError(f"input {field}: its rank is needed, as --dim {field.open_rank}=N")
        axes = field.with_rank(dims).shape
        shape = [d if isinstance(d, int) else dims.get(d or "", 1) for d in axes]
        array = blank(shape, field.dtype).copy()
        if kind_of(array.dtype) == "f":
            array[...] = random.standard_normal(shape)
        made[field.name] = array
    return made
