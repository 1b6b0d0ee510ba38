"""Strategies by preference: the shortest step, the fewest devices, or a table of both.

Cai et al., TensorOpt, section 4.1: the options of `find_strategy`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import numpy as np

from soapstone.deadline import Deadline
from soapstone.frontend.arguments import count, number
from soapstone.frontend.model import Model
from soapstone.frontend.strategies.finding import graph_of, machine_of, measure_tasks
from soapstone.ir.graph import Graph
from soapstone.ir.strategy import Strategy
from soapstone.runtime import Machine
from soapstone.search.parallel import ParallelError
from soapstone.search.parallel.frontier.points import CostFrontier, FrontierPoint, cost_frontier
from soapstone.search.parallel.frontier.saving import Saving, savings

COSTS = ("memory_bytes", "time_us", "network_us", "devices", "device_us")
Progress = Callable[[str, int, int | None], None]  # a stage, how much is done, and of how much


class Option(StrEnum):
    """The preference.

    mini-time: the shortest step on a number of devices. mini-parallelism: the fewest devices with
    enough memory, and the shortest step on them. profiling: the shortest step on each number of
    devices.
    """

    MINI_TIME = "mini-time"
    MINI_PARALLELISM = "mini-parallelism"
    PROFILING = "profiling"


@dataclass(frozen=True)
class Preferred:
    """The frontiers that were tracked, and the point that was chosen.

    Attributes:
        frontiers: by number of devices. fastest: the point of each with the shortest step that
            fits; None where none fits.
        devices: the chosen number; None if nothing fits, and for profiling.
    """

    option: Option
    frontiers: dict[int, CostFrontier]
    fastest: dict[int, FrontierPoint | None]
    devices: int | None

    @property
    def point(self) -> FrontierPoint:
        """The chosen point.

        Raises:
            ParallelError: there is none; says how much memory is missing, or that profiling chooses
                none.
        """
        point = None if self.devices is None else self.fastest[self.devices]
        if point is not None:
            return point
        if self.option is Option.PROFILING:
            raise ParallelError("profiling compares numbers of devices; mini-time chooses")
        many, frontier = list(self.frontiers.items())[-1]
        least, known = frontier.least, " known at the interrupt" * frontier.interrupted
        raise ParallelError(
            f"no strategy{known} fits on {many} devices: the one that needs least holds"
            f" {least.simulated_bytes:,} bytes on a device in a step of {least.simulated_us:,.0f}"
            f" us, {least.missing_bytes:,} bytes are missing, all devices together"
        )

    @property
    def strategy(self) -> Strategy:
        """The strategy of the chosen point; raises as `point`."""
        return self.point.strategy

    def best(self, *costs: str) -> list[FrontierPoint]:
        """Return the best trade-offs of some costs among all points on all numbers of devices.

        The price of a step is `device_us` times the price of a device.

        Args:
            costs: fields of points: memory_bytes, time_us, network_us, devices, device_us.
                network_us is exact only if it was a cost of the frontiers.

        Raises:
            ParallelError: an unknown cost.
        """
        for name in costs:
            if name not in COSTS:
                raise ParallelError(f"cost {name!r} found, one of {', '.join(COSTS)} needed")
        every = [point for each in self.frontiers.values() for point in each.points]
        rows = np.array([[getattr(point, name) for name in costs] for point in every])
        below = (rows[:, None] <= rows).all(-1) & (rows[:, None] < rows).any(-1)
        return [every[i] for i in np.flatnonzero(~below.any(0))]

    def as_dict(self) -> dict[str, Any]:
        """Return everything as JSON data."""
        found: dict[str, Any] = {"option": str(self.option), "devices": self.devices}
        found["fastest"] = [
            {"devices": many, "point": None if point is None else point.as_dict()}
            for many, point in self.fastest.items()
        ]
        last = self.devices or max(self.frontiers)
        return found | self.frontiers[last].as_dict()

    def __str__(self) -> str:
        rows = []
        for many, frontier in self.frontiers.items():
            point, data = self.fastest[many], frontier.baselines["data"]
            says = f"nothing fits; at least {frontier.least.simulated_bytes / 1e9:,.2f} GB needed"
            if point is not None:
                says = f"{point.simulated_us / 1e3:,.2f} ms, {point.simulated_bytes / 1e9:,.2f} GB"
            fits = " (does not fit)" if data.missing_bytes else ""
            rows.append(
                f"{many:>4} devices: {says}; data parallelism {data.simulated_us / 1e3:,.2f} ms,"
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
    """Return the preferred strategy, with the frontier of memory and time from which it was chosen.

    Args:
        model: a compiled model, a training graph, an app's name, a script, or a file.
        machine: a machine, or the name or file of one.
        option: mini-time, mini-parallelism or profiling.
        memory: the bytes that each device may hold; by default its capacity.
        devices: the number; for mini-parallelism and profiling the numbers that are tried, by
            default 1, 2, 4, ... up to a node, or up to the number given. A machine that is passed
            as an object has its own devices.
        eps: how much more a point may cost than that of the exact frontier, as a share; 0: exact.
        saving: ways to save memory at the cost of time: recompute, offload, copies; models with
            many configurations then take minutes.
        paths: whether values may change layout in several steps.
        replicate: whether several devices may compute the same forward operators, to save messages.
        network: whether time on the network is a further cost, besides memory and time.
        batch_size: the samples of a step of an app, on all devices together; by default the app's
            own.
        progress: called with the stage, how much of it is done, and its total.

    On this computer the graph's tasks are measured first, which takes minutes once. Ctrl-C ends the
    measuring, or a frontier with the points known by then; further numbers of devices are not
    tried.

    Raises:
        ParallelError: an argument is out of range, or the graph has nothing to split.
        MachineError, GraphError, AppError: the machine or model cannot be loaded.
    """
    try:
        option = Option(option)
    except ValueError:
        known = ", ".join(Option)
        raise ParallelError(f"option {str(option)!r} found, one of {known} needed") from None
    if memory is not None:
        memory = count(f"memory of {memory} bytes", memory, 1, ParallelError)
    eps, saving = number("eps", eps, ParallelError), savings(saving)
    devices = _devices(devices)
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
        many = len(each.processors)
        each = each if memory is None else each.limited(memory)
        measure_tasks(graph, each, progress, measuring)
        try:
            frontiers[many] = cost_frontier(
                graph,
                each,
                eps=eps,
                saving=saving,
                paths=paths,
                replicate=replicate,
                network=network,
                progress=_joins(many, progress),
            )
        except KeyboardInterrupt:
            if not frontiers:
                raise
            break
        fastest[many] = frontiers[many].fastest()
        if fastest[many] is not None and option is not Option.PROFILING:
            chosen = many
        if chosen is not None or frontiers[many].interrupted:
            break
    return Preferred(option, frontiers, fastest, chosen)


def _devices(devices: Any) -> int | list[int] | None:
    """Return a number of devices, or several, each of 1 or more.

    Raises:
        ParallelError: other values, or none.
    """
    if devices is None or isinstance(devices, str) or not isinstance(devices, Iterable):
        return None if devices is None else count("devices", devices, 1, ParallelError)
    found = [count("devices", each, 1, ParallelError) for each in devices]
    if not found:
        raise ParallelError("devices: none found, 1 or more numbers needed")
    return found


def _joins(devices: int, progress: Progress | None) -> Callable[[int, int, int], None]:
    """Return a function that reports the progress of the frontier of a number of devices."""

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
