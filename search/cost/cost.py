"""What a graph costs on a target, and the objective that a search minimises.

MetaFlow, section 3: "the cost model considers metrics such as FLOPs, memory, kernel launches,
execution time, and any combination of them"; limits keep a metric below a number.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Protocol

from soapstone.deadline import Deadline
from soapstone.ir.errors import GraphError
from soapstone.ir.files.layouts import Layouts
from soapstone.ir.graph import Graph
from soapstone.ir.tensor import Arrays

NO_LAYOUTS: Layouts = MappingProxyType({})
METRICS = {
    "time": "time_us",
    "flops": "flops",
    "bytes": "bytes",
    "launches": "launches",
    "memory": "peak_bytes",
}


class PricingError(GraphError):
    """A graph has no cost, since its target cannot run it."""


class ObjectiveError(ValueError):
    """The text of an objective has a syntax error or an unknown metric."""


@dataclass(frozen=True)
class Cost:
    """What one execution of a graph costs on a target.

    Attributes:
        time_us: sum of the times of its launches.
        flops: arithmetic operations; bytes: what launches read and write.
        peak_bytes: most bytes of values alive at once, constants left out.
        estimated: whether some time comes from a model of a machine, not from a measurement.
    """

    time_us: float = 0.0
    flops: float = 0.0
    bytes: float = 0.0
    launches: int = 0
    peak_bytes: int = 0
    estimated: bool = False

    def __add__(self, other: Cost) -> Cost:
        """Return the cost of running one after the other: sums, and the larger peak."""
        return Cost(
            self.time_us + other.time_us,
            self.flops + other.flops,
            self.bytes + other.bytes,
            self.launches + other.launches,
            max(self.peak_bytes, other.peak_bytes),
            self.estimated or other.estimated,
        )

    def metric(self, name: str) -> float:
        """Return the value of a metric, by its name in `METRICS`."""
        return float(getattr(self, METRICS[name]))

    def __str__(self) -> str:
        return (
            f"{self.time_us:,.1f} us{' (estimated)' if self.estimated else ''},"
            f" {self.flops / 1e6:,.1f} MFLOP, {self.bytes / 1e6:,.2f} MB moved,"
            f" {self.launches} launches, {self.peak_bytes / 1e6:,.2f} MB at most"
        )


UNKNOWN = Cost(math.nan, math.nan, math.nan)


@dataclass(frozen=True)
class Limit:
    """A constraint on a metric: less than `bound` if `strict`, else at most `bound`."""

    metric: str
    bound: float
    strict: bool = True

    def broken(self, cost: Cost) -> bool:
        """Return whether a cost violates the constraint."""
        found = cost.metric(self.metric)
        return found >= self.bound if self.strict else found > self.bound

    def __str__(self) -> str:
        return f"{self.metric}{'<' if self.strict else '<='}{self.bound:g}"


_NUMBER = r"\d+(?:\.\d*)?(?:[eE][+-]?\d+)?|\.\d+(?:[eE][+-]?\d+)?"
_NAME = r"[a-z_]+"
_TERM = re.compile(rf"(?:({_NUMBER})\s*\*\s*)?({_NAME})(?:\s*\*\s*({_NUMBER}))?")
_LIMIT = re.compile(rf"({_NAME})\s*(<=?)\s*({_NUMBER})")


@dataclass(frozen=True)
class Objective:
    """A weighted sum of metrics to be minimised, and limits on metrics.

    Example:
        >>> Objective.parse("time + 1e-4*memory subject to launches<=100")
    """

    weights: Mapping[str, float] = field(default_factory=lambda: {"time": 1.0})
    limits: tuple[Limit, ...] = ()

    def __post_init__(self) -> None:
        for name in (*self.weights, *(limit.metric for limit in self.limits)):
            if name not in METRICS:
                raise ObjectiveError(f"metric {name!r} found; {', '.join(METRICS)} needed")
        object.__setattr__(self, "weights", MappingProxyType(dict(self.weights)))

    @staticmethod
    def parse(text: str) -> Objective:
        """Return the objective written as `time`, `time+0.1*memory` or `time subject to flops<1e9`.

        Metrics are `time` (us), `flops`, `bytes`, `launches` and `memory` (bytes at the peak);
        several limits are joined by `,` or `and`.

        Raises:
            ObjectiveError: something else was found.
        """
        left, _, right = text.strip().partition("subject to")
        weights: dict[str, float] = {}
        for part in re.split(r"(?<![\d.][eE])\+", left):
            found = _TERM.fullmatch(part.strip())
            if found is None or (found[1] and found[3]):
                raise ObjectiveError(
                    f"objective {text!r}: {part.strip()!r} found;"
                    f" a sum of number*metric needed, metrics are {', '.join(METRICS)}"
                )
            weights[found[2]] = weights.get(found[2], 0.0) + float(found[1] or found[3] or 1)
        limits = []
        for part in re.split(r",|\band\b", right) if "subject to" in text else ():
            found = _LIMIT.fullmatch(part.strip())
            if found is None:
                raise ObjectiveError(
                    f"objective {text!r}: {part.strip()!r} found; a limit such as memory<2e8 needed"
                )
            limits.append(Limit(found[1], float(found[3]), found[2] == "<"))
        return Objective(weights, tuple(limits))

    def value(self, cost: Cost) -> float:
        """Return the weighted sum of the cost's metrics; infinite where a limit is broken."""
        if any(limit.broken(cost) for limit in self.limits):
            return math.inf
        return self.weighted(cost)

    def weighted(self, cost: Cost) -> float:
        """Return the weighted sum without a look at the limits, for a part of a graph."""
        return sum(weight * cost.metric(name) for name, weight in self.weights.items())

    def relative(self, base: Cost) -> Objective:
        """Return the objective in which every metric counts as a share of that of `base`."""
        weights = {n: w / (base.metric(n) or 1.0) for n, w in self.weights.items()}
        return replace(self, weights=weights)

    def __str__(self) -> str:
        terms = [n if w == 1 else f"{w:g}*{n}" for n, w in self.weights.items()]
        limits = f" subject to {', '.join(map(str, self.limits))}" if self.limits else ""
        return "+".join(terms) + limits


class CostModel(Protocol):
    """What prices graphs for one target.

    Attributes:
        target: what it prices for.
        noise: the share of a cost that one measurement may be off; 0 where nothing is measured.
        measuring_s: seconds of measuring so far.
        deadline: after which nothing is measured any more.
    """

    target: str
    noise: float = 0.0
    measuring_s: float = 0.0
    deadline: Deadline = Deadline()

    def cost(self, graph: Graph, constants: Arrays, layouts: Layouts = NO_LAYOUTS) -> Cost:
        """Return what one execution of the graph costs.

        Args:
            constants: weights by name, whose contents never change; none in a training graph.
            layouts: axis orders of values at the graph's boundary; the rest are plain.

        Raises:
            TimeUpError: something has to be measured for it, and the deadline is over.
        """


class Wrapped(CostModel):
    """A cost model that asks another, of graphs in another form."""

    def __init__(self, model: CostModel) -> None:
        self.target = model.target
        self.noise = model.noise
        self._model = model

    @property
    def measuring_s(self) -> float:  # type: ignore[override]
        """Seconds of measuring so far."""
        return self._model.measuring_s

    @property
    def deadline(self) -> Deadline:
        """After which nothing is measured any more."""
        return self._model.deadline

    @deadline.setter
    def deadline(self, deadline: Deadline) -> None:
        self._model.deadline = deadline
