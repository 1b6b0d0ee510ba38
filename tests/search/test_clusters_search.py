"""What crosses between computers, and searches with a device for each of them."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest

from soapstone.frontend.strategies.finding import graph_of
from soapstone.ir.graph import Graph
from soapstone.runtime import Machine
from soapstone.runtime.machines.cluster import load_machine
from soapstone.search.parallel import NAMED, Options, Simulator, search
from soapstone.search.parallel.bounds.cuts import Product, groups_of, product_of
from soapstone.search.parallel.bounds.step import lower_bound
from soapstone.search.parallel.computers import Computers
from soapstone.search.parallel.mcmc.initial import Parallel, randomly
from soapstone.search.parallel.problem.prepare import prepare

CUBE = (2, 2, 3)
PAIRS = ((0, 1), (1, 2), (0, 2))  # dims of x, w and y


def layers() -> Graph:
    return graph_of("candle_uno", 4096)


def slow(devices: int) -> Machine:
    """Return a cluster whose network is a thousand times slower."""
    machine = load_machine("p100", devices)
    links = tuple(
        replace(link, bytes_per_s=link.bytes_per_s / 1e3)
        if "network" in (link.source, link.target)
        else link
        for link in machine.links
    )
    return replace(machine, links=links)


@pytest.mark.parametrize("nbytes", [(1.0, 1.0, 1.0), (0.0, 2.0, 1.0), (1.0, 5.0, 0.5)])
def test_no_division_of_a_product_needs_less(nbytes: tuple[float, ...]) -> None:
    """Every way to divide a small index space between two groups, against the curve."""
    points = np.array(list(itertools.product(*map(range, CUBE))))
    indices = tuple(float(CUBE[a] * CUBE[b]) for a, b in PAIRS)
    hull = Product(indices, nbytes).crossing()
    whole = sum(n * each for n, each in zip(indices, nbytes))
    least = np.inf
    for number in range(2 ** len(points)):
        mine = np.array([number >> i & 1 for i in range(len(points))], bool)
        shares = np.array([mine.mean(), 1.0 - mine.mean()])
        needed = sum(
            each * len({tuple(point) for point in points[side][:, pair]})
            for side in (mine, ~mine)
            for pair, each in zip(PAIRS, nbytes)
        )
        curve = np.interp((shares**2).sum(), hull[:, 0], hull[:, 1])
        assert needed - whole >= curve - 1e-9
        if shares[0] == 0.5:
            least = min(least, needed - whole)
    if len(set(nbytes)) == 1:
        assert np.interp(0.5, hull[:, 0], hull[:, 1]) > 0.4 * least > 0


def test_groups_are_computers_and_devices() -> None:
    computers, devices = groups_of(load_machine("p100", 8))
    assert (computers.count, computers.devices, devices.count, devices.devices) == (2, 4, 8, 1)
    assert computers.bytes_per_ns == pytest.approx(2 * 12.5, rel=0.1)
    assert devices.bytes_per_ns > computers.bytes_per_ns
    assert groups_of(Machine.local(4)) == []


@pytest.mark.long
def test_no_strategy_passes_what_must_cross() -> None:
    graph, machine = layers(), slow(32)
    model = prepare(graph, machine)
    bound = lower_bound(model)
    assert bound.cut_us > 1.5 * max(bound.path_us, bound.work_us)
    simulator = Simulator(model)
    found = [NAMED[name](model) for name in NAMED] + [randomly(model, seed) for seed in range(40)]
    assert all(simulator.step_ns(each) >= 1e3 * bound.cut_us for each in found)
    best = search(graph, machine, Options(seconds=None, proposals=500))
    assert bound.cut_us == best.simulation.lower_bound_us <= best.simulation.step_us
    alone = best.initial_us["computer"]  # the others wait for the network
    others = [best.initial_us[name] for name in NAMED if name != "computer"]
    assert best.simulation.step_us <= alone < min(others) / 10


def test_products_are_what_two_operands_share() -> None:
    graph = layers()
    made = [product_of(graph, node) for node in graph.nodes if node.operator == "linear"]
    first = made[0]
    assert first is not None
    assert first.nbytes == (0.0, 8.0, 8.0)  # of an input no element crosses
    assert made[1] is not None
    assert made[1].nbytes == (8.0, 8.0, 8.0)
    softmax = [product_of(graph, node) for node in graph.nodes if len(node.inputs) == 1]
    assert not any(softmax)


@pytest.mark.parametrize("inside", [Parallel.SAMPLE, Parallel.PARAMETER])
@pytest.mark.parametrize("seed", range(3))
def test_parts_of_a_computer_are_cut_over_its_devices(inside: Parallel, seed: int) -> None:
    """Every part of the small machine's strategy is the parts of its computer's devices."""
    graph = layers()
    full = prepare(graph, load_machine("p100", 16))
    computers = Computers(full)
    small = computers.model
    assert small is not None
    assert len(small.machine.processors) == 4
    coarse = randomly(small, seed)
    fine = computers.spread(coarse, inside)
    cut = 0
    for item in small.operators:
        if item.name not in coarse:
            continue
        signature = graph.signature(item.node)
        boxes = []
        for found in (coarse[item.name], fine[item.name]):
            signature.check(found.degrees)
            _, lo, hi = signature.points(found.degrees, found.cuts)
            volumes = np.prod([hi[name] - lo[name] for name in lo], axis=0)
            boxes.append((lo, hi, volumes, found.devices))
        (lo, hi, _, homes), (low, high, volumes, devices) = boxes
        cut += len(devices) > len(homes)
        if len(devices) == len(homes):
            continue
        for place, home in enumerate(homes):
            own = [
                point
                for point in range(len(devices))
                if all(lo[d][place] <= low[d][point] < hi[d][place] for d in lo)
            ]
            assert {devices[point] for point in own} == set(computers.members[home])
            assert all(high[d][point] <= hi[d][place] for d in lo for point in own)
            whole = np.prod([hi[d][place] - lo[d][place] for d in lo])
            assert sum(volumes[point] for point in own) == whole
    assert cut > 2


def test_one_computer_or_one_device_each_is_not_searched_twice() -> None:
    graph = layers()
    assert Computers(prepare(graph, load_machine("p100", 4))).model is None
    assert Computers(prepare(graph, load_machine("p100", 6))).model is None
    found = search(graph, load_machine("p100", 8), Options(seconds=None, proposals=400))
    assert {"computers, samples", "computers, parameters"} < set(found.initial_us)
    assert found.proposals <= 420
