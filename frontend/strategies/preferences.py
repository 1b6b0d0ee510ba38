"""A strategy by what its user prefers: the shortest step, the fewest devices, or a table of both.

Cai et al., TensorOpt, section 4.1: the options of `find_strategy`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import numpy as np

from soapstone.deadline import Deadline
from soapstone.frontend.model import Model
from soapstone.frontend.strategies.finding import graph_of, machine_of, measure_tasks
from soapstone.ir.graph import Graph
from soapstone.ir.strategy import Strategy
from soapstone.runtime import Machine
from soapstone.search.parallel import ParallelError
from soapstone.search.parallel.frontier.points import CostFrontier, FrontierPoint, cost_frontier
from soapstone.search.parallel.frontier.ways import Saving, savings

COSTS = ("memory_bytes", "time_us", "network_us", "devices", "device_us")
Progress = Callable[[str, int, int | None], None]  # a stage, how much is done, and of how much


class Option(StrEnum):
    """What is looked for.

    mini-time: the shortest step on so many devices; mini-parallelism: the fewest devices whose
    memory is enough, and the shortest step on them; profiling: the shortest step on each number.
    """

    MINI_TIME = "mini-time"
    MINI_PARALLELISM = "mini-parallelism"
    PROFILING = "profiling"


@dataclass(frozen=True)
class Preferred:
    """The frontiers that were tracked, and what was chosen of them.

    Attributes:
        frontiers: by number of devices. fastest: the point of each with the shortest step that
            fits, None where none does.
        devices: the number that was chosen; None where nothing fits, and for profiling.
    """

    option: Option
    frontiers: dict[int, CostFrontier]
    fastest: dict[int, FrontierPoint | None]
    devices: int | None

    @property
    def point(self) -> FrontierPoint:
        """The point that was chosen.

        Raises:
            ParallelError: there is none; says how much memory is missing, or who chooses.
        """
        point = None if self.devices is None else self.fastest[self.devices]
        if point is not None:
            return point
        if self.option is Option.PROFILING:
            raise ParallelError("profiling compares numbers of devices; mini-time chooses")
        count, frontier = list(self.frontiers.items())[-1]
        least = frontier.least
        raise ParallelError(
            f"no strategy fits on {count} devices: the one that needs least holds"
            f" {least.simulated_bytes:,} bytes on a device in a step of {least.simulated_us:,.0f}"
            f" us, {least.missing_bytes:,} bytes are missing, all devices together"
        )

    @property
    def strategy(self) -> Strategy:
        """The strategy of the point that was chosen; raises as `point` does."""
        return self.point.strategy

    def best(self, *costs: str) -> list[FrontierPoint]:
        """Return the best trade-offs of some costs among all points on all numbers of devices.

        What a step costs in money is `device_us` times the price of a device.

        Args:
            costs: fields of points: memory_bytes, time_us, network_us, devices, device_us.
                network_us is exact only if it was a cost of the frontiers.

        Raises:
            ParallelError: one is no cost of points.
        """
        for name in costs:
            if name not in COSTS:
                raise ParallelError(f"cost {name!r} found, one of {', '.join(COSTS)} needed")
        every = [point for each in self.frontiers.values() for point in each.points]
        rows = np.array([[getattr(point, name) for name in costs] for point in every])
        below = (rows[:, None] <= rows).all(-1) & (rows[:, None] < rows).any(-1)
        return [every[i] for i in np.flatnonzero(~below.any(0))]

    def as_dict(self) -> dict[str, Any]:
        """Return all as JSON can say it."""
        found: dict[str, Any] = {"option": str(self.option), "devices": self.devices}
        found["fastest"] = [
            {"devices": count, "point": None if point is None else point.as_dict()}
            for count, point in self.fastest.items()
        ]
        last = self.devices or max(self.frontiers)
        return found | self.frontiers[last].as_dict()

    def __str__(self) -> str:
        rows = []
        for count, frontier in self.frontiers.items():
            point, data = self.fastest[count], frontier.baselines["data"]
            says = f"nothing fits; at least {frontier.least.simulated_bytes / 1e9:,.2f} GB needed"
            if point is not None:
                says = f"{point.simulated_us / 1e3:,.2f} ms, {point.simulated_bytes / 1e9:,.2f} GB"
            fits = " (does not fit)" if data.missing_bytes else ""
            rows.append(
                f"{count:>4} devices: {says}; data parallelism {data.simulated_us / 1e3:,.2f} ms,"
                f" {data.simulated_bytes / 1e9:,.2f} GB{fits}"
            )
        chosen = self.devices or max(self.frontiers)
        return "\n".join([*rows, str(self.frontiers[chosen])])


def find_strategy(
    model: Graph | Model | str | Path,
    machine: Machine | str | Path = "local",
    option: Option | str = Option.MINI_TIME,
    *,
    memory: int | None = None,
    devices: int | Sequence[int] | None = None,
    eps: float = 0.01,
    saving: Collection[Saving | str] = (),
    paths: bool = False,
    replicate: bool = False,
    network: bool = False,
    batch_size: int | None = None,
    progress: Progress | None = None,
) -> Preferred:
    """Return the strategy that suits, with the frontier of memory and time it was chosen from.

    Args:
        model: a compiled model, a training graph, or what commands take: an app's name, a script, a
            file.
        machine: a machine, or the name or file of one.
        option: mini-time, mini-parallelism or profiling.
        memory: bytes that each device may hold at most; default: what the machine says.
        devices: how many; for mini-parallelism and profiling those that are tried: by default 1,
            2, 4, ... up to a node, or up to the number that is given. A machine that was given as
            such has the devices that it has.
        eps: how much more a point may cost than the exact frontier's, as a share; 0: exact.
        saving: what memory may be saved by, at the cost of time: recompute, offload, copies; models
            of many configurations take minutes then.
        paths: whether values may be moved from layout to layout in several steps.
        replicate: whether several devices may compute the same forward, to save messages.
        network: whether time on the network is a cost of its own, besides memory and time.
        batch_size: samples of a step of an app, all devices together; default: the app's own.
        progress: called with the stage, how much of it is done, and of how much.

    On this computer the graph's tasks are measured first, which takes minutes once. Ctrl-C ends the
    measuring, or a frontier with the points that are known by then; a profile has the numbers of
    devices whose frontiers were done.

    Raises:
        ParallelError: an argument is out of range, or the graph has nothing to split.
        MachineError, GraphError, AppError: machine or model cannot be had.
    """
    try:
        option = Option(option)
    except ValueError:
        known = ", ".join(Option)
        raise ParallelError(f"option {str(option)!r} found, one of {known} needed") from None
    if memory is not None and memory < 1:
        raise ParallelError(f"memory of {memory} bytes found, at least 1 needed")
    saving = savings(saving)
    if isinstance(model, str | Path):
        graph = graph_of(model, batch_size)
    else:
        if batch_size is not None:
            raise ParallelError(f"batch size {batch_size} found; {model.name!r} has its own")
        graph = model if isinstance(model, Graph) else model.training_graph
    frontiers: dict[int, CostFrontier] = {}
    fastest: dict[int, FrontierPoint | None] = {}
    chosen, measuring = None, Deadline()
    for each in _machines(machine, option, devices):
        count = len(each.processors)
        each = each if memory is None else each.limited(memory)
        measure_tasks(graph, each, progress, measuring)
        try:
            frontiers[count] = cost_frontier(
                graph,
                each,
                eps=eps,
                saving=saving,
                paths=paths,
                replicate=replicate,
                network=network,
                progress=_joins(count, progress),
            )
        except KeyboardInterrupt:
            if not frontiers:
                raise
            break
        fastest[count] = frontiers[count].fastest()
        if fastest[count] is not None and option is not Option.PROFILING:
            chosen = count
            break
    return Preferred(option, frontiers, fastest, chosen)


def _joins(devices: int, progress: Progress | None) -> Callable[[int, int, int], None]:
    """Return what says how far the frontier of so many devices is."""

    def say(done: int, total: int, _points: int) -> None:
        if progress is not None:
            progress(f"frontier of {devices} devices", done, total)

    return say


def _machines(
    machine: Machine | str | Path, option: Option, devices: int | Sequence[int] | None
) -> list[Machine]:
    """Return the machines to try, the smallest first."""
    if isinstance(machine, Machine):
        if devices not in (None, len(machine.processors)):
            raise ParallelError(
                f"machine {machine.name!r} has {len(machine.processors)} devices, {devices} found;"
                " give its name or file to have other numbers"
            )
        return [machine]
    if option is Option.MINI_TIME:
        if devices is not None and not isinstance(devices, int):
            raise ParallelError(f"devices {list(devices)} found, one number needed for mini-time")
        return [machine_of(machine, devices)]
    if devices is None or isinstance(devices, int):
        most = devices or len(machine_of(machine).processors)
        devices = [n for n in (2**power for power in range(most.bit_length())) if n < most] + [most]
    return [machine_of(machine, count) for count in sorted(set(devices))]
