"""Times of the operators of a model as ONNX Runtime's profiler tells them, on a machine in use.

A model that is measured holds a *witness*, a small matrix product whose best time is known. A run
in which the witness was slow had to share the machine, and does not count as long as there are
enough others.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from soapstone.deadline import Deadline
from soapstone.ir.builder import GraphBuilder
from soapstone.ir.tensor import Array, Role
from soapstone.search.cost.database import ROUNDS, robust

CONTEXT = "context."  # names of the nodes of a model that are not what is measured
WITNESS = f"{CONTEXT}witness"
_WITNESS_SHAPE = (96, 192, 192)
_SLOW = 1.12  # of the witness's best time: the run shared the machine
_ENOUGH = 4
_ATTEMPTS = 5
_REST_S = 0.02
_SECONDS = 1.0  # no further runs in an attempt after that; nor attempts after thrice that
_WARM_UP = 2
_HALF_US = 0.5  # the profiler drops fractions of microseconds
_TIMED = "_kernel_time"  # how the profiler's events of operators are named
_BEST: dict[int, float] = {}  # the witness's best time so far by threads


@dataclass
class Profile:
    """A model as ONNX Runtime optimised it, with what its profiler said of each operator."""

    model: onnx.ModelProto = field(default_factory=onnx.ModelProto)
    samples: dict[str, list[float]] = field(default_factory=dict)  # microseconds by name and run
    nbytes: dict[str, float] = field(default_factory=dict)  # of what changes from run to run

    def us(self, name: str) -> float:
        """Return the time of an operator, from the runs that had the machine to themselves."""
        return robust(self.samples[name])


def witness(builder: GraphBuilder, weights: dict[str, Array], seed: str) -> str:
    """Add the witness to a graph and return its value; it runs after `seed` is there."""
    m, k, n = _WITNESS_SHAPE
    rows = builder.input(f"{WITNESS}.x", (m, k))
    weights[f"{WITNESS}.w"] = np.full((k, n), 0.01, np.float32)
    fixed = builder.input(f"{WITNESS}.w", (k, n), role=Role.PARAMETER)
    rows = builder.apply("add", rows, seed, name=f"{CONTEXT}rows")[0]
    return builder.apply("matmul", rows, fixed, name=WITNESS)[0]


def witness_feed() -> dict[str, Array]:
    """Return the input that the witness needs."""
    return {f"{WITNESS}.x": np.ones(_WITNESS_SHAPE[:2], np.float32)}


def profile(model: bytes, feeds: Mapping[str, Array], threads: int, deadline: Deadline) -> Profile:
    """Return the times of a model's operators; each attempt is a session of several runs."""
    found = Profile()
    runs: list[dict[str, float]] = []
    began = time.perf_counter()
    for attempt in range(_ATTEMPTS):
        if attempt:
            time.sleep(_REST_S)
        runs += _attempt(model, feeds, threads, found)
        speed = [_speed(run) for run in runs]
        best = _BEST[threads] = min(_BEST.get(threads, speed[0]), *speed)
        quick = [run for run, us in zip(runs, speed) if us <= _SLOW * best]
        late = deadline.over or time.perf_counter() - began > 3 * _SECONDS
        if len(quick) >= _ENOUGH or late:
            break
    if len(quick) < _ENOUGH:
        quick = sorted(runs, key=_speed)[:ROUNDS]
    found.samples = {name: [run[name] for run in quick] for name in runs[0]}
    return found


def _speed(run: Mapping[str, float]) -> float:
    return next((us for name, us in run.items() if name.startswith(WITNESS)), 1.0)


def _attempt(
    model: bytes, feeds: Mapping[str, Array], threads: int, into: Profile
) -> list[dict[str, float]]:
    """Return the times of a session's runs, the first ones left out."""
    import onnxruntime

    with tempfile.TemporaryDirectory(prefix="soapstone-cost-") as folder:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        options.log_severity_level = 3
        options.enable_profiling = True
        options.profile_file_prefix = str(Path(folder) / "profile")
        path = Path(folder) / "optimised.onnx"
        if not into.nbytes:
            options.optimized_model_filepath = str(path)
        session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
        began = time.perf_counter()
        for turn in range(ROUNDS + _WARM_UP):
            session.run(None, dict(feeds))
            if turn > _WARM_UP and time.perf_counter() - began > _SECONDS:
                break
        events: list[dict[str, Any]] = json.loads(Path(session.end_profiling()).read_text())
        if not into.nbytes:
            into.model = onnx.load(str(path), load_external_data=False)
    times: dict[str, list[float]] = {}
    for event in events:
        name = event["name"].removesuffix(_TIMED)
        if event.get("cat") == "Node" and name != event["name"]:
            times.setdefault(name, []).append(event["dur"] + _HALF_US)
            sizes = [event["args"].get(size, 0) for size in ("output_size", "activation_size")]
            into.nbytes[name] = float(sum(map(int, sizes)))
    count = min(len(mine) for mine in times.values())
    return [{name: mine[run] for name, mine in times.items()} for run in range(_WARM_UP, count)]
