"""Kernels compiled without a GPU: to PTX by NVVM, and by ptxas, which counts registers and spills.

Calls are bound to arrays that are only described, so what is compiled is exactly what would be
launched on a GPU, types and constants included.
"""

from __future__ import annotations

import contextlib
import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from soapstone.kernels.cuda.entry import Launch
from soapstone.kernels.cuda.substrate.arrays import Described
from soapstone.kernels.cuda.substrate.target import TYPES, Kernel


@dataclass(frozen=True)
class Assembled:
    """What ptxas says of a kernel: registers a thread, bytes of spills, shared and stack memory."""

    registers: int
    spilled: int
    shared: int
    stack: int


def signature(arguments: Iterable[Any]) -> tuple[Any, ...]:
    """Return the types of a launch's arguments, as Numba takes them."""
    from numba import types

    def kind(argument: Any) -> Any:
        if isinstance(argument, Described):
            return types.Array(TYPES[argument.dtype.name], 1, "C")
        return types.float64 if isinstance(argument, float) else types.int64

    return tuple(map(kind, arguments))


def form(launch: Launch) -> tuple[Kernel, tuple[Any, ...]]:
    """Return the kernel and the types of a launch: equal ones are compiled once."""
    return launch.kernel, signature(launch.arguments)


@contextlib.contextmanager
def pretended(capability: tuple[int, int]) -> Iterator[None]:
    """Let Numba compile for a device of a compute capability, such as (9, 0), that is not there."""
    from numba.cuda import dispatcher
    from numba.cuda.cudadrv import devices

    device = SimpleNamespace(compute_capability=capability)
    before = dispatcher.get_current_device, devices.get_context
    dispatcher.get_current_device = lambda: device
    devices.get_context = lambda *number: SimpleNamespace(device=device)
    try:
        yield
    finally:
        dispatcher.get_current_device, devices.get_context = before


def ptx(kernel: Kernel, types: tuple[Any, ...], capability: tuple[int, int]) -> str:
    """Return the PTX of a kernel for argument types and a compute capability, such as (9, 0).

    Raises:
        numba.core.errors.NumbaError: it cannot be compiled.
    """
    from numba import cuda

    with pretended(capability):  # functions that kernels call are compiled for the current device
        text, _ = cuda.compile(
            kernel.function, types, cc=capability, output="ptx", device=False, abi="numba"
        )
    return str(text if isinstance(text, str) else text.decode())


def assembler() -> Path | None:
    """Return ptxas, of the package nvidia-cuda-nvcc, or None where it is not installed."""
    try:
        import nvidia  # type: ignore[import-untyped, import-not-found, unused-ignore]
    except ImportError:
        return None
    found = (path for root in nvidia.__path__ for path in Path(root).rglob("ptxas"))
    return next(found, None)


def loops(text: str, capability: tuple[int, int], ptxas: Path) -> list[dict[str, int]]:
    """Return for each loop of a kernel's machine code how often it has each instruction.

    Loops are in order of their ends, with those inside of them; the disassembler is that of the
    package nvidia-cuda-nvdisasm, beside `ptxas`.

    Raises:
        OSError: it is not there. subprocess.CalledProcessError: ptxas or it fails.
    """
    with tempfile.TemporaryDirectory() as folder:
        source, made = Path(folder) / "kernel.ptx", Path(folder) / "kernel.cubin"
        source.write_text(text)
        arch = f"-arch=sm_{capability[0]}{capability[1]}"
        subprocess.run([ptxas, arch, source, "-o", made], check=True, capture_output=True)
        shown = subprocess.run(
            [ptxas.with_name("nvdisasm"), made], check=True, capture_output=True, text=True
        ).stdout
    labels: dict[str, int] = {}
    names: list[str] = []
    found = []
    for line in shown.splitlines():
        label = re.match(r"\s*(\.L_x_\d+):", line)
        code = re.search(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+ )?([A-Z][A-Z0-9]*)(.*);", line)
        if label:
            labels[label[1]] = len(names)
        elif code:
            names.append(code[1])
            to = re.search(r"`\((\.L_x_\d+)\)", code[2])
            if to and code[1] == "BRA" and to[1] in labels:
                found.append(dict(Counter(names[labels[to[1]] :])))
    return found


def assembled(text: str, capability: tuple[int, int], ptxas: Path) -> Assembled:
    """Return what ptxas makes of PTX for a compute capability.

    Raises:
        RuntimeError: ptxas refuses it; its words.
    """
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.ptx"
        source.write_text(text)
        arch = f"-arch=sm_{capability[0]}{capability[1]}"
        done = subprocess.run(
            [ptxas, "-v", arch, source, "-o", source.with_suffix(".cubin")],
            capture_output=True,
            text=True,
        )
    if done.returncode:
        raise RuntimeError(f"ptxas: {done.stderr.strip()}")

    def number(pattern: str) -> int:
        return max(map(int, re.findall(pattern, done.stderr)), default=0)

    spills = number(r"(\d+) bytes spill stores") + number(r"(\d+) bytes spill loads")
    return Assembled(
        number(r"Used (\d+) registers"),
        spills,
        number(r"(\d+) bytes smem"),
        number(r"(\d+) bytes stack frame"),
    )
