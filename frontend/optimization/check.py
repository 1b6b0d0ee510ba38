"""Optimised graphs beside their originals: the same outputs for inputs of every kind.

Inputs are drawn four times: plain numbers; small ones with signs, zeros and negative zeros; wide
ones, up to the ends of integers' types; and extreme ones, at which floating-point numbers overflow.
What the original refuses, such as an index out of range, tells nothing and is left out.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from soapstone.deadline import TimeUpError
from soapstone.dtypes import floats, integers, kind_of
from soapstone.engine.measuring import drawn
from soapstone.ir.errors import GraphError
from soapstone.ir.graph import Graph
from soapstone.ir.tensor import Array, Role

_TOLERANCE = 1e-3  # of the largest magnitude; sums in another order differ by rounding
_ULPS = 8.0  # by which inputs are changed, to see how far rounding reaches
_ROUND_S, _RUNS = 0.2, 200  # of a round of timed runs: about so long, at most so often
_NOISE = 16.0  # times what that changes in the original's outputs is rounding too
Arrays = Mapping[str, Array]
Run = Callable[[Arrays], Arrays | None]
"""Returns the outputs of a graph for inputs; None where it refuses them."""


@dataclass(frozen=True)
class Draw:
    """Inputs of one kind; those of a `wide` one may overflow inside a graph."""

    name: str
    inputs: Arrays
    wide: bool = False


def draws(graph: Graph) -> Iterator[Draw]:
    """Yield seeded random inputs of every kind for a graph."""
    yield Draw("plain", inputs_of(graph))
    for name, large, wide in (("small", 9.0, False), ("wide", 1e3, True), ("extreme", 1e12, True)):
        yield Draw(name, {n: _mixed(graph, n, large) for n in graph.inputs(Role.INPUT)}, wide)


def inputs_of(graph: Graph) -> dict[str, Array]:
    """Return seeded random inputs: numbers around 0, and 0 or 1 where whole numbers are taken."""
    return {name: drawn(graph, name) for name in graph.inputs(Role.INPUT)}


def _mixed(graph: Graph, name: str, large: float) -> Array:
    """Return contents of an input that mix numbers of a magnitude with those that are special.

    `large`: below 10, whole numbers with signs; above, integers reach the ends of their type.
    """
    spec = graph.tensors[name]
    random = np.random.default_rng([*f"{name} {large}".encode(), spec.size])
    if spec.dtype == "bool":
        return random.integers(0, 2, spec.shape).astype(bool)
    if spec.is_float:
        most = min(large, math.sqrt(floats(spec.dtype).max))
        normal = random.standard_normal(spec.shape)
        kinds = [normal, normal, normal * most, normal / most, np.zeros(spec.shape)]
        chosen = np.choose(random.integers(0, 6, spec.shape), [*kinds, -kinds[-1]])
        return np.asarray(chosen).astype(spec.dtype)
    low, high = int(integers(spec.dtype).min), int(integers(spec.dtype).max)
    small = random.integers(max(low, -9), 10, spec.shape).astype(spec.dtype)
    if large < 10:
        return small
    anywhere = random.integers(low, high, spec.shape, spec.dtype, endpoint=True)
    ends = random.choice(np.array([low, high, 0], spec.dtype), spec.shape)
    chosen = np.choose(random.integers(0, 3, spec.shape), [small, anywhere, ends])
    return np.asarray(chosen, spec.dtype)


def agree(outputs: Sequence[str], given: Iterator[Draw], run: Run, optimised: Run) -> float:
    """Return the largest difference of outputs for plain inputs, after comparing them for all.

    Raises:
        GraphError: an output differs, the second refuses what the first takes, or the first takes
            nothing; names it.
    """
    worst: float | None = None
    for draw in given:
        needed = run(draw.inputs)
        if needed is None:
            continue
        made = optimised(draw.inputs)
        if made is None:
            raise GraphError(f"{draw.name} inputs that the original takes are refused")

        def other(draw: Draw = draw) -> Arrays | None:
            return run(_changed(draw.inputs))

        errors = [_error(name, needed[name], made[name], draw, other) for name in outputs]
        worst = max(errors, default=0.0) if worst is None else worst
    if worst is None:
        raise GraphError("no inputs were found that the original takes")
    return worst


def _error(
    name: str, needed: Array, made: Array, draw: Draw, other: Callable[[], Arrays | None]
) -> float:
    """Return how much an output differs; more than rounding raises a `GraphError`."""
    if needed.shape != made.shape or needed.dtype != made.dtype:
        raise GraphError(
            f"output {name!r}: {made.dtype}{made.shape} found, {needed.dtype}{needed.shape} needed"
        )
    error = difference(needed, made, draw.wide)
    if error.ok:
        return error.largest
    perturbed = other()
    if perturbed is not None and difference(needed, made, draw.wide, perturbed[name]).ok:
        return error.largest
    raise GraphError(f"output {name!r} differs by {error} for {draw.name} inputs")


@dataclass(frozen=True)
class Difference:
    """How two arrays differ: where numbers are none, and the largest difference of numbers."""

    elsewhere: int
    largest: float
    allowed: float

    @property
    def ok(self) -> bool:
        """Whether no element differs by more than is allowed."""
        return not self.elsewhere and self.largest <= self.allowed

    def __str__(self) -> str:
        return (
            f"NaN or infinity at {self.elsewhere} places"
            if self.elsewhere
            else (f"{self.largest:.3g}")
        )


def difference(
    needed: Array, made: Array, wide: bool = False, perturbed: Array | None = None
) -> Difference:
    """Return how two arrays differ; NaN and infinities must be at the same places.

    Args:
        wide: what overflows may become NaN or either infinity.
        perturbed: the first for inputs changed by rounding. What changes there with a number's kind
            is not compared, nor are integers that change; what numbers change by is allowed for.
    """
    if kind_of(needed.dtype) in "biu":
        differ = needed != made
        if perturbed is not None:
            differ &= needed == perturbed
        apart = np.abs(needed.astype(np.float64) - made.astype(np.float64))[differ]
        return Difference(0, float(apart.max(initial=0.0)), 0.0)
    one, two = needed.astype(np.float64), made.astype(np.float64)
    steady = np.ones(one.shape, bool)
    noise = 0.0
    with np.errstate(all="ignore"):
        if perturbed is not None:
            other = perturbed.astype(np.float64)
            steady = _kinds(one, wide) == _kinds(other, wide)
            both = np.isfinite(one) & np.isfinite(other)
            noise = float(np.abs(one - other)[both].max(initial=0.0))
        elsewhere = steady & (_kinds(one, wide) != _kinds(two, wide))
        finite = np.isfinite(one) & np.isfinite(two)
        largest = float(np.abs(one - two)[finite].max(initial=0.0))
        scale = max(1e-6, float(np.abs(one)[finite].max(initial=0.0)))
        share = max(_TOLERANCE, _ULPS * float(floats(needed.dtype.name).eps))
    return Difference(int(elsewhere.sum()), largest, share * scale + _NOISE * noise)


def _kinds(array: Array, wide: bool) -> Array:
    """Return for each element 0 for a number, and others for NaN and the infinities."""
    if wide:
        return np.asarray(~np.isfinite(array), np.int8)
    signs = np.where(np.isinf(array), np.sign(array), 0)
    return np.asarray(np.where(np.isnan(array), 2, signs), np.int8)


def _changed(inputs: Arrays) -> Arrays:
    """Return inputs whose floating-point numbers are changed by a few roundings."""
    random = np.random.default_rng(0)
    found = {}
    for name, array in inputs.items():
        found[name] = array
        if kind_of(array.dtype) not in "biu":
            step = _ULPS * float(floats(array.dtype.name).eps)
            factor = 1 + step * random.choice([-1.0, 1.0], array.shape)
            found[name] = (array.astype(np.float64) * factor).astype(array.dtype)
    return found


def check_outputs(graph: Graph, new: Graph) -> None:
    """Check that a graph has the outputs of another.

    Raises:
        GraphError: names differ.
    """
    if new.outputs != graph.outputs:
        raise GraphError(f"outputs {new.outputs} found after the search; {graph.outputs} needed")


def taking(run: Callable[[Arrays], Arrays]) -> Run:
    """Return a way to run that says None of inputs which it refuses."""

    def taken(given: Arrays) -> Arrays | None:
        try:
            return run(given)
        except TimeUpError:
            raise
        except (ValueError, RuntimeError, ArithmeticError, LookupError):
            return None

    return taken


def median_us(run: Callable[[], object]) -> float:
    """Return the median time of a run, once it is warm, in microseconds."""
    begin = time.perf_counter()
    run()
    run()
    spent = (time.perf_counter() - begin) / 2
    times = []
    for _ in range(max(1, min(_RUNS, int(_ROUND_S / spent)))):
        start = time.perf_counter()
        run()
        times.append((time.perf_counter() - start) * 1e6)
    return statistics.median(times)
