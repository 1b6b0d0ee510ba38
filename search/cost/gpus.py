"""What a described GPU takes for the kernels that it would be given: an estimate.

Calls are bound to arrays that are only described, so variants, launches, grids and blocks are those
that a GPU of so many multiprocessors would get. Products are those of NVIDIA's
libraries where these are said to be there. A launch takes its overhead, and then as long as
its arithmetic or its memory traffic, whichever is longer, of which it reaches as much as its blocks
can: few blocks leave multiprocessors idle, the last ones of many do so at the end, and few threads
do not have enough bytes under way (Little's law). What has no CUDA kernel is copied to the host,
run there and copied back, and no step with such an operator is one CUDA graph.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from soapstone.engine.expand import NodeLaunch
from soapstone.engine.prepare import Prepared
from soapstone.ir.tensor import Arrays
from soapstone.kernels.choices import Choices
from soapstone.kernels.entry import Call
from soapstone.kernels.select import REFERENCE, select_device
from soapstone.search.cost.gpu_resources import resources
from soapstone.search.cost.launches import call, hollow, work

if TYPE_CHECKING:
    from soapstone.kernels.cuda.entry import DeviceEntry, Expected, Launch

# What is assumed of a library's product: tiles, with rows, columns, and the share of the rate that
# is reached on them, of which it takes the fastest; threads of a block, and bytes that each has
# under way in several stages; and how many terms of a sum are a part, where multiprocessors have
# no work.
LIBRARY_TILES = ((128, 128, 1.0), (64, 64, 0.5))
LIBRARY_THREADS, LIBRARY_LOADED, LIBRARY_DEPTH = 256, 192, 512
BUSY_THREADS = 256  # of a multiprocessor, whose instructions hide each other's latency
HOST = "host"
Rate = Callable[[str, str], float]


@dataclass(frozen=True)
class Host:
    """What runs operators without a CUDA kernel, and how it is reached.

    Attributes:
        flops_per_s, memory_bytes_per_s: of one thread, which runs them.
        bytes_per_s, latency_us: of a copy between page-locked memory and the GPU's.
    """

    flops_per_s: float
    memory_bytes_per_s: float
    bytes_per_s: float
    latency_us: float

    def us(self, flops: float, nbytes: float, copied: Sequence[int]) -> float:
        """Return what an operator takes. copied: bytes of each operand that comes or goes."""
        copies = sum(self.latency_us + 1e6 * each / self.bytes_per_s for each in copied)
        return copies + 1e6 * max(flops / self.flops_per_s, nbytes / self.memory_bytes_per_s)


@dataclass(frozen=True)
class Gpu:
    """What occupancy depends on.

    Attributes:
        multiprocessors: how many there are.
        threads, blocks, registers, shared_bytes: that one of them holds at once.
        latency_us: of a load from memory.
        untraced_us: what the host takes to enqueue a launch that is no node of a CUDA graph.
    """

    multiprocessors: int = field(metadata={"least": 1})
    threads: int = field(metadata={"least": 1})
    blocks: int = field(metadata={"least": 1})
    registers: int = field(metadata={"least": 1})
    shared_bytes: int = field(metadata={"least": 1})
    latency_us: float
    untraced_us: float
    host: Host

    def resident(self, threads: int, registers: int, shared: int) -> int:
        """Return how many blocks a multiprocessor holds at once, of a kernel that can run: one at
        least.

        threads: of a block; registers: of a thread; shared: bytes of a block.
        """
        limits = (
            *(self.blocks, self.threads // max(threads, 1)),
            self.registers // max(registers * threads, 1),
            self.shared_bytes // max(shared, 1),
        )
        return max(1, min(limits))

    def shares(
        self, blocks: int, threads: int, resident: int, memory: float, loaded: int
    ) -> tuple[float, float]:
        """Return the shares of arithmetic and of memory that a launch's blocks reach.

        Args:
            resident: see `resident`. memory: bytes a second that kernels reach where all are busy.
            loaded: bytes that a thread has under way.
        """
        most = math.ceil(blocks / self.multiprocessors)  # that one of them runs, after one another
        balance = blocks / (most * self.multiprocessors)
        awake = min(most, resident) * threads
        at_once = min(blocks, resident * self.multiprocessors) * threads
        under_way = at_once * loaded / (self.latency_us * 1e-6)
        return balance * min(1.0, awake / BUSY_THREADS), min(1.0, under_way / memory)


@dataclass(frozen=True)
class Priced:
    """A launch and its price.

    Attributes:
        kernel: the kernel's name, a library's where it has the product, `host` where the host runs
            an operator. grid, block: empty for these two.
        busy_us: what it takes once it has begun. bound: what that is: arithmetic, memory or host.
    """

    operator: str
    variant: str
    kernel: str
    grid: tuple[int, ...]
    block: tuple[int, ...]
    flops: float
    nbytes: float
    busy_us: float
    bound: str


def priced(
    gpu: Gpu,
    rate: Rate,
    memory: float,
    libraries: bool,
    prepared: Prepared,
    launch: NodeLaunch,
    constants: Arrays,
) -> tuple[Priced, ...]:
    """Return the launches of a node on a GPU, or its run on the host.

    Args:
        rate: gives the operations a second that a kernel reaches on a type; "" is a library's.
        memory: bytes a second that they reach.
        libraries: whether NVIDIA's are there, which are asked for products first.
        constants: contents of constants of whole numbers.
    """
    from soapstone.kernels.cuda.entry import Expected, Launch
    from soapstone.kernels.cuda.libraries.device import expecting
    from soapstone.kernels.cuda.substrate.target import cut_for

    node = launch.node
    flops, nbytes = work(prepared.graph, node)
    made = call(prepared, launch, 1, hollow, constants)
    with cut_for(gpu.multiprocessors), expecting(libraries):
        variant, entry = bound(made)
    if entry is None:
        return (_on_host(gpu.host, made, flops, nbytes),)
    launches = [each for each in entry.launches if isinstance(each, Launch | Expected)]
    return launched(gpu, rate, memory, made, variant, launches, flops, nbytes)


def launched(
    gpu: Gpu,
    rate: Rate,
    memory: float,
    made: Call,
    variant: str,
    launches: Sequence[Launch | Expected],
    flops: float,
    nbytes: float,
) -> tuple[Priced, ...]:
    """Return what a call's launches take by a variant; arguments: see `priced`."""
    from soapstone.kernels.cuda.entry import Expected

    wide = any(each.dtype == np.float64 for each in (*made.inputs, *made.outputs))
    own = any(each.flops for each in launches)
    # Of a library's product that is several calls, each has its part of the operations.
    counted = [each for each in launches if isinstance(each, Expected)] or launches[:1]
    found = []
    for each in launches:
        mine = each.flops if own else flops / len(counted) if each in counted else 0.0
        moved = float(touched(each)) if len(launches) > 1 else nbytes
        about = gpu, rate, memory, made.operator, variant
        if isinstance(each, Expected):
            found.append(_by_library(*about, each, mine, moved))
        else:
            found.append(_by_kernel(*about, wide, each, mine, moved))
    return tuple(found)


def bound(made: Call) -> tuple[str, DeviceEntry | None]:
    """Return the variant and entry of a call on the host's arrays as a GPU would have it.

    What it is bound to is only described, and cannot run. The entry is None where the host runs it.
    """
    from soapstone.kernels.cuda.substrate.arrays import Described

    inputs: Any = tuple(map(Described.like, made.inputs))
    outputs: Any = tuple(map(Described.like, made.outputs))
    try:
        with Choices(tune=False).current():
            return select_device(replace(made, inputs=inputs, outputs=outputs))
    except ValueError:
        return REFERENCE, None


def _by_kernel(
    gpu: Gpu,
    rate: Rate,
    memory: float,
    operator: str,
    variant: str,
    wide: bool,
    launch: Launch,
    flops: float,
    nbytes: float,
) -> Priced:
    blocks, threads, name = math.prod(launch.grid), math.prod(launch.block), launch.kernel.name
    needed = resources(name)
    kind = "float64" if wide else "float16" if needed.tensor else "float32"
    resident = gpu.resident(threads, needed.registers, needed.shared + launch.shared)
    arithmetic, traffic = gpu.shares(blocks, threads, resident, memory, needed.loaded)
    us, longest = _longest(flops, rate(kind, name) * arithmetic, nbytes, memory * traffic)
    return Priced(operator, variant, name, launch.grid, launch.block, flops, nbytes, us, longest)


def _by_library(
    gpu: Gpu,
    rate: Rate,
    memory: float,
    operator: str,
    variant: str,
    of: Expected,
    flops: float,
    nbytes: float,
) -> Priced:
    """Return a library's product, as it is on the tiles that make it the fastest."""
    batch, rows, columns, depth = of.extents
    ways = []
    for high, wide, share in LIBRARY_TILES:
        tiles = batch * -(-rows // high) * -(-columns // wide)
        parts = max(1, min(depth // LIBRARY_DEPTH, gpu.multiprocessors // max(tiles, 1)))
        sums = 8.0 * batch * rows * columns * parts if parts > 1 else 0.0  # written and read
        given = tiles * parts, LIBRARY_THREADS, 1, memory, LIBRARY_LOADED
        arithmetic, traffic = gpu.shares(*given)
        reached = rate(of.dtype, "") * share * arithmetic
        ways.append(_longest(flops, reached, nbytes + sums, memory * traffic))
    us, longest = min(ways)
    return Priced(operator, variant, of.library, (), (), flops, nbytes, us, longest)


def _longest(flops: float, rate: float, nbytes: float, memory: float) -> tuple[float, str]:
    """Return the microseconds of arithmetic or of memory traffic, and which of them it is."""
    return max((1e6 * flops / rate, "arithmetic"), (1e6 * nbytes / memory, "memory"))


def _on_host(host: Host, made: Call, flops: float, nbytes: float) -> Priced:
    moving = [each for i, each in enumerate(made.inputs) if i not in made.constants]
    copied = [each.nbytes for each in (*moving, *made.outputs)]
    us = host.us(flops, nbytes, copied)
    return Priced(made.operator, REFERENCE, HOST, (), (), flops, nbytes, us, HOST)


def touched(launch: Launch | Expected) -> int:
    """Return the bytes that a launch reads and writes, by default of all its arrays, each once."""
    from soapstone.kernels.cuda.entry import Launch

    if isinstance(launch, Launch) and launch.nbytes:
        return launch.nbytes
    arrays = {id(each): each for each in launch.arguments if hasattr(each, "dtype")}
    return sum(each.size * each.dtype.itemsize for each in arrays.values())
