"""This computer as a machine: arithmetic and memory rates, measured with the executor's kernels.

Its GPUs are measured with theirs, and the links between memories by copies. Among ranks of MPI it
is the machine of all of them, with the links between them.
"""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np

from soapstone.engine.peers import Peers
from soapstone.ir.builder import GraphBuilder
from soapstone.runtime import Machine
from soapstone.runtime.machines.exchanges import links_of
from soapstone.runtime.machines.machine import CUDA, Link, Memory
from soapstone.runtime.machines.start import machine_of
from soapstone.search.cost.executor import ExecutorCost
from soapstone.search.cost.messages import MessageTimes, profiled
from soapstone.search.cost.tasks import MeasuredMachine

_ROWS, _GPU_ROWS = 1024, 4096  # of the matrices whose product measures arithmetic
_ELEMENTS, _GPU_ELEMENTS = 1 << 24, 1 << 26  # of the vectors whose sum measures memory
_SIZES = (1 << 12, 1 << 26)  # bytes of copies: a short one for latency, a long one for bandwidth


def measured_machine(
    cpus: int | None = None,
    threads: int = 1,
    executor: str = "local",
    gpus: int = 0,
) -> MeasuredMachine:
    """Return the machine an executor finds, with the rates of processors, memories and links.

    Arithmetic is that of a float32 product of 1024 x 1024 matrices on one processor, memory that of
    the sum of two long vectors; copies are timed at 4 KiB and 64 MiB, messages among ranks for each
    size 2^i (`messages.profiled`). Every rank must call it, and all get the same; the rates of
    processors and memories are those of the first.

    gpus: measure so many GPUs of this computer instead, and the links between their memories and
    the host's; the product is of 4096 x 4096 then.
    """
    machine = machine_of(executor, cpus, threads, gpus)
    if gpus:
        return _of_gpus(machine)
    messages = profiled(machine) if executor == "mpi" else MessageTimes()
    rates = np.array(_rates(ExecutorCost(threads), _ROWS, _ELEMENTS))
    flops, bytes_per_s = Peers(executor).first(rates).tolist()
    return MeasuredMachine(
        machine.name,
        processors=tuple(replace(p, flops=flops) for p in machine.processors),
        memories=tuple(Memory(m.name, m.capacity_bytes, bytes_per_s) for m in machine.memories),
        links=_links(machine, messages),
        switches=machine.switches,
        messages=messages,
    )


def _rates(model: ExecutorCost, rows: int, elements: int) -> tuple[float, float]:
    """Return operations and bytes a second: of a product of matrices, and of a sum of vectors."""
    builder = GraphBuilder("product")
    x, y = builder.input("x", (rows, rows)), builder.input("y", (rows, rows))
    builder.output(*builder.apply("matmul", x, y))
    product = model.cost(builder.build(), {})
    builder = GraphBuilder("sum")
    x, y = builder.input("x", (elements,)), builder.input("y", (elements,))
    builder.output(*builder.apply("add", x, y))
    total = model.cost(builder.build(), {})
    return 1e6 * product.flops / product.time_us, 1e6 * total.bytes / total.time_us


def _of_gpus(machine: Machine) -> MeasuredMachine:
    """Return a machine of this computer's GPUs as measured; the simulator gets small operands."""
    from soapstone.native.cuda.device import simulated
    from soapstone.search.cost.gpu_executor import GpuCost
    from soapstone.search.cost.gpu_links import measured_links

    rows, elements = (8, 64) if simulated() else (_GPU_ROWS, _GPU_ELEMENTS)
    rates = {
        machine.memories[memory].name: _rates(GpuCost(gpu), rows, elements)
        for memory, gpu in machine.devices.items()
    }
    return MeasuredMachine(
        machine.name,
        processors=tuple(
            replace(p, flops=rates[p.memory][0]) if p.kind == CUDA else p
            for p in machine.processors
        ),
        memories=tuple(
            replace(m, bytes_per_s=rates[m.name][1]) if m.name in rates else m
            for m in machine.memories
        ),
        links=measured_links(machine, (64, 4096) if simulated() else _SIZES),
        switches=machine.switches,
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
