"""`soapstone predict --benchmark`: how long runs take when nothing is new to the session."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from soapstone.errors import DataError, hint
from soapstone.frontend.inference import InferenceSession
from soapstone.frontend.predict import source_of
from soapstone.ir.tensor import Array

if TYPE_CHECKING:
    from soapstone.kernels.choices import Tune

WARM, LEAST, MOST, SECONDS = 5, 20, 10_000, 3.0  # runs that are not counted, that are; how long
PERCENTILES = (50, 90, 99)


@dataclass(frozen=True)
class Latency:
    """What was run and how long runs took, one after the other.

    Attributes:
        inputs: their types and shapes, by name. threads: that computed.
        seconds: of each run that was counted. warm: how many ran before.
        bind_seconds: of reading, compiling and binding. samples: in a run, where inputs agree.
    """

    model: str
    inputs: Mapping[str, str]
    threads: int
    seconds: tuple[float, ...]
    warm: int
    bind_seconds: float
    samples: int | None

    @property
    def percentiles_ms(self) -> dict[int, float]:
        """The time in which so many of 100 runs ended, in ms."""
        found = np.percentile(self.seconds, PERCENTILES) * 1e3
        return dict(zip(PERCENTILES, found.tolist()))

    @property
    def runs_per_s(self) -> float:
        """How many runs ended in a second."""
        return len(self.seconds) / sum(self.seconds)

    def as_dict(self) -> dict[str, Any]:
        """Return the result for JSON."""
        return {
            "model": self.model,
            "inputs": dict(self.inputs),
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
        shown = ", ".join(f"{name}: {each}" for name, each in self.inputs.items())
        times = ", ".join(f"p{p} {ms:.3f} ms" for p, ms in self.percentiles_ms.items())
        rate = f"{self.runs_per_s:,.1f} runs/s"
        if self.samples is not None:
            rate += f", {self.samples * self.runs_per_s:,.1f} samples/s"
        runs = f"{len(self.seconds):,} runs one after the other, {self.warm} more before"
        return "\n".join(
            [
                f"{self.model}: {shown}; threads: {self.threads}",
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
    threads: int | None = None,
    plain: bool = False,
    runs: int | None = None,
    tune: Tune = True,
) -> Latency:
    """Return how long runs of a model take.

    Args:
        model: the path of an `.onnx` file, or an app's name, whose weights may be initial ones.
        arrays: the inputs, by name; by default drawn: normal numbers, integers of 0.
        dims: extents of symbolic dims of inputs that are drawn, 1 where not given.
        checkpoint: the weights of an app. runs: how many to count; by default those of 3 s.
        threads, plain, tune: see `InferenceSession`.

    Raises:
        DataError, GraphError: a model, arrays or dims that do not fit.
    """
    started = time.perf_counter()
    source = source_of(model, checkpoint, initial=True)
    with InferenceSession(source, threads=threads, plain=plain, tune=tune) as session:
        if arrays is not None and dims:
            raise DataError("dims found with inputs, which have theirs; one of both needed")
        given = session.checked(_drawn(session, dims or {}) if arrays is None else arrays)
        session.run(given)
        bound = time.perf_counter()
        for _ in range(WARM):
            session.run(given)
        seconds: list[float] = []
        end = time.perf_counter() + SECONDS
        while len(seconds) < (runs or LEAST) or (
            runs is None and len(seconds) < MOST and time.perf_counter() < end
        ):
            start = time.perf_counter()
            session.run(given)
            seconds.append(time.perf_counter() - start)
        firsts = {array.shape[0] if array.ndim else None for array in given.values()}
        return Latency(
            model,
            {name: f"{a.dtype.name}{list(a.shape)}" for name, a in given.items()},
            session.threads,
            tuple(seconds),
            WARM + 1,
            bound - started,
            firsts.pop() if len(firsts) == 1 else None,
        )


def _drawn(session: InferenceSession, dims: Mapping[str, int]) -> dict[str, Array]:
    """Return arrays for the inputs of a session."""
    symbolic = {d for field in session.inputs for d in field.shape if isinstance(d, str)}
    for name in dims:
        if name not in symbolic:
            have = ", ".join(sorted(symbolic)) or "none"
            raise DataError(f"dim {name!r} found{hint(name, symbolic)}; symbolic dims are {have}")
    random = np.random.default_rng(0)
    made: dict[str, Array] = {}
    for field in session.inputs:
        shape = [d if isinstance(d, int) else dims.get(d or "", 1) for d in field.shape]
        drawn = np.dtype(field.dtype).kind == "f"
        values = random.standard_normal(shape) if drawn else np.zeros(shape)
        made[field.name] = values.astype(field.dtype)
    return made


__all__ = ["Latency", "measure"]
