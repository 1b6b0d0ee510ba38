"""This computer as a machine: arithmetic and memory rates, measured with the executor's kernels.

Among ranks of MPI it is the machine of all of them, with the links between them.
"""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np

from soapstone.engine.peers import Peers
from soapstone.ir.builder import GraphBuilder
from soapstone.runtime import Machine
from soapstone.runtime.machines.exchanges import links_of
from soapstone.runtime.machines.machine import Link, Memory
from soapstone.runtime.machines.start import machine_of
from soapstone.search.cost.executor import ExecutorCost
from soapstone.search.cost.messages import MessageTimes, profiled
from soapstone.search.cost.tasks import MeasuredMachine

_ROWS = 1024  # of the matrices whose product measures arithmetic
_ELEMENTS = 1 << 24  # of the vectors whose sum measures memory, 64 MiB each
_SIZES = (1 << 12, 1 << 26)  # bytes of copies: a short one for latency, a long one for bandwidth


def measured_machine(
    cpus: int | None = None,
    threads: int = 1,
    executor: str = "local",
) -> MeasuredMachine:
    """Return the machine an executor finds, with the rates of processors, memories and links.

    Arithmetic is that of a float32 product of 1024 x 1024 matrices on one processor, memory that of
    the sum of two long vectors; copies are timed at 4 KiB and 64 MiB, messages among ranks for each
    size 2^i (`messages.profiled`). Every rank must call it, and all get the same; the rates of
    processors and memories are those of the first.
    """
    machine = machine_of(executor, cpus, threads)
    messages = profiled(machine) if executor == "mpi" else MessageTimes()
    model = ExecutorCost(threads)
    builder = GraphBuilder("product")
    x, y = builder.input("x", (_ROWS, _ROWS)), builder.input("y", (_ROWS, _ROWS))
    builder.output(*builder.apply("matmul", x, y))
    product = model.cost(builder.build(), {})
    builder = GraphBuilder("sum")
    x, y = builder.input("x", (_ELEMENTS,)), builder.input("y", (_ELEMENTS,))
    builder.output(*builder.apply("add", x, y))
    total = model.cost(builder.build(), {})
    rates = np.array([product.flops / product.time_us, total.bytes / total.time_us]) * 1e6
    flops, bytes_per_s = Peers(executor).first(rates).tolist()
    return MeasuredMachine(
        machine.name,
        processors=tuple(replace(p, flops=flops) for p in machine.processors),
        memories=tuple(Memory(m.name, m.capacity_bytes, bytes_per_s) for m in machine.memories),
        links=_links(machine, messages),
        switches=machine.switches,
        messages=messages,
    )


def _links(machine: Machine, messages: MessageTimes) -> tuple[Link, ...]:
    """Return a machine's links as measured: messages between ranks, else copies in memory."""
    if messages.measured:
        return links_of(machine, messages.measured)
    short, rate = copies()
    return tuple(Link(link.source, link.target, short, rate) for link in machine.links)


def copies() -> tuple[float, float]:
    """Return what a short copy in memory takes, in seconds, and bytes a second of a long one."""
    short, long = (_copy_s(size) for size in _SIZES)
    return short, (_SIZES[1] - _SIZES[0]) / max(long - short, 1e-9)


def _copy_s(nbytes: int) -> float:
    """Return the median time of a copy within memory."""
    source = np.ones(nbytes, np.uint8)
    target = np.empty_like(source)
    times = []
    for _ in range(9):
        start = time.perf_counter()
        np.copyto(target, source)
        times.append(time.perf_counter() - start)
    return float(np.median(times))
