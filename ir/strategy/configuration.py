"""Configurations: how one operator is split and placed, and how its configuration is taken over.

A configuration gives the degree of each dim of one operator (the SOAP space with reduced dims; Jia,
section 3.3) and the processor of each point task. Gradients and lowered primitives follow the node
they come from, dim by dim.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import field
from enum import StrEnum
from itertools import pairwise
from types import MappingProxyType

import numpy as np

from soapstone.ir.dims import Signature
from soapstone.ir.errors import StrategyError
from soapstone.ir.graph import Graph, Node
from soapstone.records import dataclass

COLLECTIVES = (
    "local_slice",
    "all_gather",
    "all_to_all",
    "reduce_scatter",
    "all_reduce",
    "permute",
)


class Keep(StrEnum):
    """What becomes of a value between its uses."""

    KEEP = "keep"
    RECOMPUTE = "recompute"
    OFFLOAD = "offload"


@dataclass(frozen=True)
class Configuration:
    """How one operator is split and placed.

    Attributes:
        degrees: tiles along each dim; dims left out are whole.
        devices: the processor of each point, row-major over the signature's dims; empty: the mapper
            places blocks of points.
        cuts: the boundaries of uneven tiles along a dim, from 0 to its extent.
        replicated: of the dims that are split, those of which each point computes all: results are
            there once for each index of their grid, and readers take the copy that is nearest. What
            follows the operator (its gradients) is split along them.
    """

    degrees: Mapping[str, int] = field(default_factory=dict, metadata={"least": 1})
    devices: tuple[int, ...] = ()
    cuts: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    replicated: tuple[str, ...] = field(default=(), metadata={"optional": True})

    def __post_init__(self) -> None:
        cuts = {name: tuple(int(bound) for bound in cut) for name, cut in self.cuts.items()}
        object.__setattr__(self, "degrees", MappingProxyType(dict(self.degrees)))
        object.__setattr__(self, "devices", tuple(int(device) for device in self.devices))
        object.__setattr__(self, "cuts", MappingProxyType(cuts))
        object.__setattr__(self, "replicated", tuple(self.replicated))

    @property
    def parts(self) -> Mapping[str, int]:
        """The degrees into which what the operator computes is cut: without replicated dims."""
        if not self.replicated:
            return self.degrees
        return {name: n for name, n in self.degrees.items() if name not in self.replicated}

    @property
    def cutting(self) -> tuple[Mapping[str, int], Mapping[str, tuple[int, ...]], tuple[str, ...]]:
        """What `Signature.points` is given."""
        return self.degrees, self.cuts, self.replicated

    @property
    def copies(self) -> int:
        """How many times each part is computed."""
        return math.prod(self.degrees.get(name, 1) for name in self.replicated)

    @property
    def points(self) -> int:
        """Number of point tasks."""
        return math.prod(self.degrees.values())

    def __str__(self) -> str:
        split = " ".join(
            f"{name}={degree}{'*' * (name in self.replicated)}"
            for name, degree in self.degrees.items()
            if degree > 1
        )
        return split or "whole"


@dataclass(frozen=True)
class Step:
    """One step of a resharding path: a collective, and the layout of the value that it ends in.

    Attributes:
        collective: one of `COLLECTIVES`.
        layout: degrees of the value's axes d0, d1, ..., devices and cuts, as of an operator that
            copies the value. None: what the consumer reads of it, which only a last step can end
            in; tiles of it may overlap, as where every device gets the whole value.
    """

    collective: str
    layout: Configuration | None = None

    def __str__(self) -> str:
        if self.layout is None:
            return self.collective
        devices = ",".join(map(str, self.layout.devices))
        return f"{self.collective} ({self.layout}{f' on {devices}' if devices else ''})"


class Copies(StrEnum):
    """Which copies of a value stay for the backward pass: those at which ends of its path.

    What does not stay is made anew from the other, by the path or by the way back (TensorOpt,
    section 4.2, tensor reuse).
    """

    BEFORE = "before"
    AFTER = "after"
    BOTH = "both"


@dataclass(frozen=True)
class Reshard:
    """How a value gets from its producer's tiles to one consumer's, and which copies stay.

    Attributes:
        path: steps, or names of collectives, whose layouts are not known.
        kept: which ends of the path the backward pass still has.
    """

    path: tuple[Step, ...]
    kept: Copies = Copies.BEFORE

    def __post_init__(self) -> None:
        steps = (Step(step) if isinstance(step, str) else step for step in self.path)
        object.__setattr__(self, "path", tuple(steps))

    @property
    def layouts(self) -> tuple[Configuration, ...]:
        """The layouts that the value is copied to on its way."""
        return tuple(step.layout for step in self.path if step.layout is not None)


def inherited(
    node: Node, signature: Signature, degrees: Mapping[str, int], rename: Mapping[str, str]
) -> dict[str, int]:
    """Return the degrees that a node can take over, by its own dim names."""
    lowers = node.spec.lower is not None
    taken: dict[str, int] = {}
    used = set()
    for dim in signature.dims:
        source = rename.get(dim.name, dim.name)
        degree = min(degrees.get(source, 1), max(dim.extent, 1))
        if degree == 1 or source in used:
            continue
        if signature.allows(taken | {dim.name: degree}, lowers):
            taken[dim.name] = degree
            used.add(source)
    return taken


def resolved(
    node: Node,
    signature: Signature,
    source: Configuration,
    degrees: Mapping[str, int],
    rename: Mapping[str, str],
    order: Sequence[str],
) -> Configuration:
    """Return a configuration with the given degrees whose points keep the source's processors.

    `order` names the source's dims in the order of its points.
    """
    split = [dim.name for dim in signature.dims if degrees.get(dim.name, 1) > 1]
    cuts = {}
    for name in split:
        cut = source.cuts.get(rename.get(name, name))
        if cut and len(cut) == degrees[name] + 1 and cut[-1] == signature.by_name[name].extent:
            cuts[name] = cut
    devices: tuple[int, ...] = ()
    if source.devices:
        if len(source.devices) != source.points:
            raise StrategyError(
                f"{node.label}: {len(source.devices)} devices found, {source.points} needed"
            )
        count = math.prod(degrees[name] for name in split)
        grid = tuple(degrees[name] for name in split)
        index = np.unravel_index(np.arange(count), grid) if grid else ()
        at = {rename.get(name, name): position for name, position in zip(split, index)}
        point = np.zeros(count, np.int64)
        for name in order:
            degree = source.degrees.get(name, 1)
            point = point * degree + at.get(name, 0)
        devices = tuple(source.devices[i] for i in point)
    return Configuration({name: degrees[name] for name in split}, devices, cuts)


def check_configuration(node: Node, signature: Signature, item: Configuration) -> None:
    """Raise StrategyError, naming the dim, unless an operator can run as configured."""
    signature.check(item.degrees, node.spec.lower is not None)
    for name, cut in item.cuts.items():
        signature.check({name: 1})
        extent, degree = signature.by_name[name].extent, item.degrees.get(name, 1)
        if len(cut) != degree + 1:
            raise StrategyError(f"dim {name}: {len(cut)} cuts found, {degree + 1} needed")
        if cut[0] != 0 or cut[-1] != extent or any(a > b for a, b in pairwise(cut)):
            needed = f"ascending from 0 to {extent}"
            raise StrategyError(f"dim {name}: cuts {cut} found, {needed} needed")
    for product in signature.products:
        for position, name in enumerate(product.dims):
            inner = [d for d in product.dims[position + 1 :] if item.degrees.get(d, 1) > 1]
            unit = tuple(range(signature.by_name[name].extent + 1))
            if inner and item.cuts.get(name, unit) != unit:
                raise StrategyError(
                    f"dim {name}: cuts {item.cuts[name]} found, single indices needed because"
                    f" dim {inner[0]} is split inside it"
                )
    split = [name for name, degree in item.degrees.items() if degree > 1]
    order = [dim.name for dim in signature.dims if dim.name in split]
    if item.devices and split != order:
        raise StrategyError(
            f"degrees are listed as {', '.join(split)}; {', '.join(order)} needed, the order of"
            " the dims, which devices follow"
        )


def once(graph: Graph, node: Node) -> str:
    """Return why a node's results cannot be computed in copies, or nothing."""
    if node.origin in graph.by_name:
        return f"it follows {node.origin!r}"
    if node.overwrites:
        return "it writes over what it reads"
    left = sorted(graph.results.intersection(node.outputs))
    if left:
        return f"{left[0]!r} is left of a run"
    scalar = [name for name in node.outputs if not graph.tensors[name].rank]
    return f"{scalar[0]!r} is a scalar" if scalar else ""


def check_replicated(graph: Graph, node: Node, item: Configuration) -> None:
    """Raise StrategyError unless what an operator computes may be there in copies.

    Each copy must be complete by itself: parts of sums are not summed once a copy.
    """
    if not item.replicated:
        return
    signature, names = graph.signature(node), ", ".join(item.replicated)
    why = once(graph, node)
    if why:
        raise StrategyError(f"replicated {names} found, nothing needed because {why}")
    for name in item.replicated:
        if item.degrees.get(name, 1) == 1 or item.replicated.count(name) > 1:
            raise StrategyError(f"replicated {names} found: dim {name} split, and once, needed")
    if not item.devices:
        raise StrategyError(f"replicated {names} found, devices of the points needed")
    parts = item.parts
    signature.check(parts, node.spec.lower is not None)
    partial = any(signature.monoid(i, parts) for i in range(len(node.outputs)))
    if partial or signature.lowers(parts):
        split = " ".join(f"{name}={n}" for name, n in parts.items() if n > 1)
        raise StrategyError(
            f"replicated {names} found where {split} leaves parts of results; final results needed"
        )
