"""The machine of this computer's GPUs: each a processor with its own memory and two copiers."""

from __future__ import annotations

from soapstone.native.cuda.device import Device, NoDevice, simulated
from soapstone.runtime.errors import MachineError
from soapstone.runtime.machines.machine import COPIER, CUDA, Link, Machine, Memory, Processor
from soapstone.system import physical_bytes

# What a machine is described with before it is measured: links as of PCIe 4 and of NVLink 3.
HOST_LINK_BYTES_PER_S, PEER_LINK_BYTES_PER_S, LATENCY_S = 25e9, 200e9, 1e-5


def gpu_machine(gpus: int, memory_bytes: int | None = None) -> Machine:
    """The machine of the first `gpus` GPUs of this computer; the host's memory is the first.

    memory_bytes: of each GPU's memory to use; by default what is free of it.

    Raises: MachineError where there are not as many, or Numba CUDA is not installed.
    """
    try:
        free = [Device(number).free_bytes for number in range(gpus)]
    except NoDevice as error:
        raise MachineError(f"gpus: {gpus} asked for: {error}") from error
    kind = "simulated" if simulated() else "gpu"  # so timelines say of which they are
    names = [f"{kind}{number}" for number in range(gpus)]
    memories = [f"{name}.framebuffer" for name in names]
    sizes = [nbytes if memory_bytes is None else min(nbytes, memory_bytes) for nbytes in free]
    ways = [(a, b) for a in ("system", *memories) for b in ("system", *memories) if a != b]
    return Machine(
        name="local",
        processors=(
            *(Processor(name, CUDA, memory=memory) for name, memory in zip(names, memories)),
            *(
                Processor(f"{name}.{way}", COPIER, memory=memory)
                for name, memory in zip(names, memories)
                for way in ("in", "out")
            ),
        ),
        memories=(Memory("system", physical_bytes()), *map(Memory, memories, sizes)),
        links=tuple(
            Link(
                *ends,
                latency_s=LATENCY_S,
                bytes_per_s=HOST_LINK_BYTES_PER_S if "system" in ends else PEER_LINK_BYTES_PER_S,
            )
            for ends in ways
        ),
    )
