"""Mappers on the same programs: what each decision is worth, to RESULTS.md.

Every program runs under several mappers in one process, in rounds taken in turns. `speedup` is the
median over rounds of how many times longer the default mapper took in the same round. What each
computes in its first run is compared with the default's.

    python benchmarks/runtime/mappers.py [--rounds N] [--only PROGRAM]
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

sys.path.append(str(Path(__file__).resolve().parents[1]))

from harness import tabulate

from soapstone import SGD, Model
from soapstone.engine.lower import lower
from soapstone.engine.mapper import GraphMapper
from soapstone.engine.session import Session
from soapstone.frontend.strategies.finding import graph_of, machine_of, measure_tasks
from soapstone.frontend.training.step_graph import training_graph
from soapstone.ir.graph import Graph
from soapstone.ir.tensor import Array, Role
from soapstone.mappers import load
from soapstone.mappers.bounded import BoundedMemoryMapper
from soapstone.mappers.stealing import WorkStealingMapper
from soapstone.runtime import (
    DefaultMapper,
    Machine,
    Mapper,
    Partition,
    Read,
    Region,
    Runtime,
    Write,
    task,
)
from soapstone.search.parallel import Options, search
from soapstone.search.placement.baselines import least_recently_used, stream

MB = 1 << 20
ROUND_S = 0.1  # at least: one run after another of the same mapper


@dataclass(frozen=True)
class Contender:
    """A program under one mapper: one round of it, what it computed, and bytes copied so far."""

    run: Callable[[], object]
    result: Callable[[], Array]
    bytes_copied: Callable[[], int]
    each_bytes: int | None = None  # bytes a trace copies in each replay


def contenders(
    program: str, found: Mapping[str, Contender], rounds: int
) -> Iterator[dict[str, Any]]:
    """Yield a row for each mapper; the first is the default."""
    times: dict[str, list[float]] = {name: [] for name in found}
    moved: dict[str, float] = {}
    wanted: Array | None = None
    for contender in found.values():
        contender.run()
        result = contender.result()
        wanted = result if wanted is None else wanted
        np.testing.assert_allclose(result, wanted, rtol=1e-4, atol=1e-5)
    start = time.perf_counter()
    next(iter(found.values())).run()
    runs = max(1, round(ROUND_S / (time.perf_counter() - start)))
    for index in range(rounds):
        names = list(found) if index % 2 == 0 else list(found)[::-1]
        for name in names:
            contender = found[name]
            before = contender.bytes_copied()
            start = time.perf_counter()
            for _ in range(runs):
                contender.run()
            times[name].append((time.perf_counter() - start) * 1e3 / runs)
            copied = (contender.bytes_copied() - before) / runs
            moved[name] = (copied if contender.each_bytes is None else contender.each_bytes) / MB
    first = next(iter(times.values()))
    for name, mine in times.items():
        yield {
            "program": program,
            "mapper": name,
            "ms": statistics.median(mine),
            "speedup": statistics.median(a / b for a, b in zip(first, mine)),
            "MB copied": moved[name],
        }


# An imbalanced program: where points can go elsewhere, stealing wins


@task
def sort_rows(times: Read, x: Read, y: Write) -> None:
    for _ in range(int(times[0, 0])):
        y[...] = np.sort(x, axis=1)


def imbalanced(stack: ExitStack, mapper: Mapper, traced: bool) -> Contender:
    """64 points; the first quarter has 15 times as much to do as the others."""
    points, width = 64, 20_000
    runtime = stack.enter_context(Runtime(Machine.local(cpus=2), mapper))
    times = Region((points, 1), np.int64, "times")
    x, y = (Region((points, width), np.float64, name) for name in "xy")
    runtime.write(times, np.where(np.arange(points) < points // 4, 15, 1)[:, None])
    runtime.write(x, np.random.default_rng(0).random(x.shape))
    tiles = [Partition.tiled(region, (points, 1)) for region in (times, x, y)]

    def launch() -> None:
        runtime.launch(sort_rows, *tiles)

    def untraced() -> None:
        launch()
        runtime.wait()

    run: Callable[[], object] = untraced
    if traced:
        if isinstance(mapper, WorkStealingMapper):
            with runtime.profile() as profile:
                launch()
            mapper.learn(profile)
        run = runtime.capture(launch).replay
    return Contender(run, lambda: runtime.read(y), lambda: runtime.statistics.bytes_copied)


# A pipeline over two memories: locality wins


@task
def scale(x: Read, y: Write) -> None:
    np.multiply(x, 1.5, out=y)


def pipeline(stack: ExitStack, mapper: Mapper) -> Contender:
    """Eight stages over 32 tiles of 512 KB; every stage numbers its points in another order."""
    points, width, stages = 32, 64 * 1024, 8
    runtime = stack.enter_context(Runtime(Machine.local(cpus=2, memories=2), mapper))
    regions = [Region((points, width), np.float64, name) for name in "xy"]
    runtime.write(regions[0], np.ones((points, width)))
    orders = [np.random.default_rng(stage).permutation(points) for stage in range(stages)]
    tiles = {
        (stage, region): Partition.of(region, base.lo[order], base.hi[order], (points,))
        for region in regions
        for base in [Partition.tiled(region, (points, 1))]
        for stage, order in enumerate(orders)
    }

    def run() -> None:
        for stage in range(stages):
            x, y = regions if stage % 2 == 0 else regions[::-1]
            runtime.launch(scale, tiles[stage, x], tiles[stage, y])
        runtime.wait()

    return Contender(
        run, lambda: np.sign(runtime.read(regions[0])), lambda: runtime.statistics.bytes_copied
    )


# Models


def step(stack: ExitStack, graph: Graph, machine: Machine, mapper: GraphMapper) -> Contender:
    """Training steps of a graph on random data."""
    mapper.attach(machine)
    session = Session(machine, mapper, seed=0)
    stack.callback(session.close)
    bound = session.bind(graph, mapper.strategy(graph, machine))
    random = np.random.default_rng(0)
    for name, feed in bound.feeds.items():
        if graph.roles[name] is not Role.INPUT:
            feed[...] = 0.01
        elif feed.dtype.kind == "f":
            feed[...] = random.standard_normal(feed.shape)
        else:
            feed[...] = random.integers(0, 10, feed.shape)
    copies = [o for o in bound.trace.operations if o.kind == "copy"]
    each = sum(
        int(o.launch.partitions[0].tiling.volume[0]) * o.launch.partitions[0].region.dtype.itemsize
        for o in copies
    )
    name = sorted(session.state())[0]
    return Contender(lambda: session.run(bound), lambda: session.state()[name], lambda: 0, each)


def wide(batch: int = 256) -> Graph:
    """A classifier whose activations, gradients and parameters are of similar size."""
    model = Model("wide", seed=3)
    x = model.input("x", (batch, 512))
    for number in range(8):
        x = model.dense(x, 512, activation="relu", name=f"fc{number}")
    model.output(model.dense(x, 10, name="last"))
    return training_graph(model.build(batch, training=True), "cross_entropy", SGD(0.01, 0.9), ())


def streamed(stack: ExitStack) -> dict[str, Contender]:
    """A model in a memory of two fifths of what it uses, and without a bound."""
    graph, machine = wide(), Machine.local(cpus=2)
    plain = load("data_parallel")
    unbounded = step(stack, graph, machine, plain)
    lowered = lower(graph, plain.strategy(graph, machine))
    capacity = int(0.4 * sum(spec.nbytes for spec in lowered.tensors.values()))
    bounded = machine.bounded(capacity)
    plans = {
        "none": None,
        "LRU": least_recently_used(lowered, capacity),
        "streaming": stream(lowered, capacity),
    }
    return {"data_parallel, no bound": unbounded} | {
        f"bounded_memory, plan: {name}": step(stack, graph, bounded, BoundedMemoryMapper(plan))
        for name, plan in plans.items()
    }


def searched(stack: ExitStack, app: str, batch_size: int, seconds: float) -> dict[str, Contender]:
    """A model under the mappers, and under the strategy that a search finds on measured times."""
    graph, machine = graph_of(app, batch_size), machine_of("local")
    measure_tasks(graph, machine)
    result = search(graph, machine, Options(seconds=seconds))
    mappers = {name: load(name) for name in ("data_parallel", "sequential", "work_stealing")}
    mappers["strategy, found by search"] = load("strategy", result.strategy)
    return {name: step(stack, graph, machine, mapper) for name, mapper in mappers.items()}


def rows(only: str | None, rounds: int, seconds: float) -> Iterator[dict[str, Any]]:
    """Yield the rows of all programs, or of one."""

    def named(*names: str) -> dict[str, Mapper]:
        return {"default": DefaultMapper()} | {name: load(name) for name in names}

    for traced in (False, True):
        program = f"imbalanced points, {'traced' if traced else 'untraced'}"
        if only in (None, "imbalanced"):
            with ExitStack() as stack:
                mappers = named("work_stealing", "locality")
                found = {n: imbalanced(stack, m, traced) for n, m in mappers.items()}
                yield from contenders(program, found, rounds)
    if only in (None, "pipeline"):
        with ExitStack() as stack:
            found = {n: pipeline(stack, m) for n, m in named("locality", "work_stealing").items()}
            yield from contenders("pipeline over two memories", found, rounds)
    if only in (None, "streamed"):
        with ExitStack() as stack:
            yield from contenders("model larger than its memory", streamed(stack), rounds)
    if only in (None, "searched"):
        with ExitStack() as stack:
            found = searched(stack, "lenet", 64, seconds)
            yield from contenders("LeNet, batch 64", found, rounds)


def main() -> None:
    """Parse the options and run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--seconds", type=float, default=10, help="of search for a strategy")
    parser.add_argument("--only", choices=("imbalanced", "pipeline", "streamed", "searched"))
    given = parser.parse_args()
    tabulate(
        "mappers",
        "Mappers on the same programs, two processors",
        f"python benchmarks/runtime/mappers.py --rounds {given.rounds} --seconds {given.seconds:g}",
        rows(given.only, given.rounds, given.seconds),
        save=given.only is None,
    )


if __name__ == "__main__":
    main()
