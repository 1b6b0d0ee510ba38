"""What soapstone finds on this computer, what it lacks and what that costs, and whether it works.

Libraries are loaded as the kernels load them; packages that may end a process when they are
imported, such as Legate without a driver, are imported by a process of their own.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import textwrap
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import numpy as np

from soapstone import system
from soapstone.cache import caches
from soapstone.cache.environment import environment
from soapstone.native.threads import openmp

State = Literal["works", "missing", "off", "broken"]
_IMPORT_S = 120.0
_LIMIT = 1 << 50  # bytes from which on a control group's limit stands for none
_WITHOUT_LIBRARIES = "products on GPUs use no tensor cores: pip install 'soapstone[cuda-libs]'"
# Packages by name: what is imported, whether soapstone needs it, and what its absence costs.
_PACKAGES: tuple[tuple[str, str, bool, str], ...] = (
    ("numpy", "numpy", True, ""),
    ("numba", "numba", True, ""),
    ("llvmlite", "llvmlite", True, ""),
    ("onnx", "onnx", True, ""),
    ("z3-solver", "z3", True, ""),
    ("safetensors", "safetensors", True, ""),
    ("onnxruntime", "onnxruntime", False, "no optimising for ONNX Runtime"),
    ("mpi4py", "mpi4py.MPI", False, "no runs over ranks: pip install 'soapstone[mpi]'"),
    ("legate", "legate.core", False, "no runs under Legate: pip install 'soapstone[legate]'"),
    ("numba-cuda", "numba.cuda", False, "no runs on GPUs: pip install 'soapstone[cuda]'"),
    ("nvmath-python", "nvmath.bindings.cublasLt", False, _WITHOUT_LIBRARIES),
    ("nvidia-cudnn-frontend", "cudnn", False, _WITHOUT_LIBRARIES),
    ("torch", "torch", False, "no soapstone.torch, and nothing to compare benchmarks with"),
)


@dataclass(frozen=True)
class Library:
    """A library or package: whether it works, what it is, or what its absence costs."""

    name: str
    state: State
    version: str = ""
    path: str = ""
    problem: str = ""
    cost: str = ""


@dataclass(frozen=True)
class Processor:
    """The computer's processor and memory as this process sees them; None where unknown."""

    name: str
    architecture: str
    features: tuple[str, ...]
    cores: int
    usable_cores: int
    core_numbers: tuple[int, ...] | None
    memory_nodes: int | None
    cache_bytes: tuple[int, int, int]
    memory_bytes: int
    available_bytes: int | None
    group_limit_bytes: int | None


@dataclass(frozen=True)
class Check:
    """One operator run and compared with NumPy: by which kernel, and its relative error."""

    operator: str
    variant: str
    error: float | None
    problem: str = ""


@dataclass(frozen=True)
class Diagnosis:
    """All that `soapstone doctor` says; `problems` names what is installed and does not work.

    kernels: how many operators each kind of kernel serves; reference: operators that only NumPy
    serves, by the file that declares them; on_host: operators that the host runs for a GPU, None
    where numba-cuda is not installed.
    """

    soapstone: str
    system: str
    python: str
    libraries: tuple[Library, ...]
    processor: Processor
    caches: tuple[dict[str, Any], ...]
    kernels: Mapping[str, int]
    reference: Mapping[str, tuple[str, ...]]
    on_host: tuple[str, ...] | None
    checks: tuple[Check, ...]

    @property
    def problems(self) -> tuple[str, ...]:
        """What is broken, a line each: libraries, and operators that give wrong results."""
        broken = [f"{it.name}: {it.problem}" for it in self.libraries if it.state == "broken"]
        wrong = [f"{it.operator}: {it.problem}" for it in self.checks if it.problem]
        return (*broken, *wrong)

    def as_dict(self) -> dict[str, Any]:
        """Return it all as values that JSON has."""
        return {**asdict(self), "problems": list(self.problems)}


def diagnose() -> Diagnosis:
    """Return what is found here. Takes some seconds: packages are imported, kernels run."""
    kernels, reference = _operators()
    return Diagnosis(
        _version("soapstone"),
        f"{platform.system()} {platform.release()}",
        f"{platform.python_version()} ({sys.executable})",
        (_onednn(), _openblas(), _openmp(), *_packages()),
        _processor(),
        tuple({**asdict(one), "path": str(one.path)} for one in caches()),
        kernels,
        reference,
        _on_host(),
        (_matmul(), _convolution()),
    )


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _onednn() -> Library:
    from soapstone.kernels.cpu.onednn import library

    cost = "products and convolutions go to OpenBLAS, slower; fewer operators fuse what follows"
    if library.available():
        return Library("oneDNN", "works", library.version(), library.path())
    if library.disabled():
        return Library("oneDNN", "off", problem=f"{library.VARIABLE} is off", cost=cost)
    try:
        library.library()
    except library.OneDnnError as error:
        there = any(Path(name).exists() for name in library.candidates())
        state: State = "broken" if there or library.VARIABLE in os.environ else "missing"
        return Library("oneDNN", state, "", "", str(error), cost)
    raise AssertionError("a library that is not available was loaded")


def _openblas() -> Library:
    from soapstone.kernels.cpu.onednn import library as onednn
    from soapstone.kernels.cpu.openblas import library

    cost = "nothing: oneDNN is there" if onednn.available() else "products are NumPy's, much slower"
    found, reason = library.attempt()
    if found is not None:
        return Library("OpenBLAS", "works", found.config, found.path)
    if os.environ.get(library.VARIABLE) == library.OFF:
        return Library("OpenBLAS", "off", problem=reason, cost=cost)
    there = any(Path(name).exists() for name in library.candidates())
    return Library("OpenBLAS", "broken" if there else "missing", "", "", reason, cost)


def _openmp() -> Library:
    if openmp.available():
        return Library("OpenMP", "works", openmp.described())
    cost = "an operator's kernel runs on one thread; train with more cpus instead of threads"
    return Library("OpenMP", "missing", problem="neither GNU's nor LLVM's is there", cost=cost)


def _packages() -> Sequence[Library]:
    with ThreadPoolExecutor(4) as pool:
        return list(pool.map(lambda row: _package(*row), _PACKAGES))


def _package(name: str, module: str, needed: bool, cost: str) -> Library:
    top = module.partition(".")[0]
    found = _version(name)
    if not found or find_spec(top) is None:
        state: State = "broken" if needed else "missing"
        return Library(name, state, problem="not installed", cost=cost or "soapstone needs it")
    command = [sys.executable, "-c", f"import {module} as m; print(m.__file__)"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_IMPORT_S)
    except subprocess.TimeoutExpired:
        reason = f"its import has not ended after {_IMPORT_S:g} s"
        return Library(name, "broken", found, "", reason, cost)
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"its import ends with {done.returncode}"]
        return Library(name, "broken", found, "", lines[-1], cost)
    return Library(name, "works", found, done.stdout.strip().splitlines()[-1])


def _processor() -> Processor:
    cores = system.core_numbers()
    limits = [group.limit for group in system.group_limits() if group.limit < _LIMIT]
    return Processor(
        name=system.processor_name(),
        architecture=platform.machine(),
        features=tuple(environment()["features"].split()),
        cores=os.cpu_count() or 1,
        usable_cores=system.usable_cores(),
        core_numbers=None if cores is None else tuple(cores),
        memory_nodes=system.memory_nodes(),
        cache_bytes=(system.cache_bytes(1), system.cache_bytes(2), system.cache_bytes(3)),
        memory_bytes=system.physical_bytes(),
        available_bytes=system.available_bytes(),
        group_limit_bytes=min(limits) if limits else None,
    )


def _operators() -> tuple[dict[str, int], dict[str, tuple[str, ...]]]:
    """Return how many operators each kind of kernel serves, and those that none does by file."""
    from soapstone.ir.spec import operators
    from soapstone.kernels.registry import variants

    kernels: dict[str, int] = {}
    reference: dict[str, list[str]] = {}
    for spec in operators():
        names = [variant.name for variant in variants(spec.name)]
        kinds = {name if name == "two_passes" else name.partition("_")[0] for name in names}
        for kind in kinds:
            kernels[kind] = kernels.get(kind, 0) + 1
        if not kinds:
            reference.setdefault(_family(spec.reference), []).append(spec.name)
    return (
        dict(sorted(kernels.items(), key=lambda item: -item[1])),
        {family: tuple(names) for family, names in sorted(reference.items())},
    )


def _on_host() -> tuple[str, ...] | None:
    """Return the operators without a kernel for GPUs; None where there cannot be any."""
    from soapstone.kernels.select import unserved
    from soapstone.native.cuda.device import NoDevice, numba_cuda

    try:
        numba_cuda()
    except NoDevice:
        return None
    return unserved("cuda")


def _family(function: Any) -> str:
    while hasattr(function, "func"):  # a partial
        function = function.func
    return str(function.__module__).rpartition(".")[2]


def _matmul() -> Check:
    generator = np.random.default_rng(0)
    a, b = (generator.standard_normal((96, 96), np.float32) for _ in range(2))
    return _check("matmul", {}, (a, b), a.astype(np.float64) @ b)


def _convolution() -> Check:
    generator = np.random.default_rng(1)
    x = generator.standard_normal((1, 8, 12, 12), np.float32)
    w = generator.standard_normal((16, 8, 3, 3), np.float32)
    windows = np.lib.stride_tricks.sliding_window_view(x.astype(np.float64), (3, 3), axis=(2, 3))
    expected = np.einsum("nchwij,ocij->nohw", windows, w)
    return _check("conv2d", {"bias": False}, (x, w), expected)


def _check(name: str, given: Mapping[str, Any], inputs: tuple[Any, ...], expected: Any) -> Check:
    from soapstone.ir.spec import operator
    from soapstone.kernels.entry import Call
    from soapstone.kernels.select import run_reference, select
    from soapstone.native import memory

    y = np.zeros(expected.shape, np.float32)
    variant = "none"
    try:
        attributes = operator(name).normalise(given)
        call = Call(name, attributes, inputs, (y,), system.usable_cores())
        variant, entry = select(call)
        if entry is None:
            run_reference(call)
        elif status := memory.run(entry):
            return Check(name, variant, None, f"{variant} ended with status {status}")
    except Exception as error:  # whatever a library that does not fit does
        return Check(name, variant, None, f"{variant}: {type(error).__name__}: {error}")
    worst = float(np.abs(y - expected).max() / np.abs(expected).max())
    return Check(name, variant, worst, "" if worst < 1e-4 else f"{variant} is off by {worst:.1g}")


def report(diagnosis: Diagnosis) -> str:
    """Return the diagnosis as a person reads it."""
    it = diagnosis.processor
    lines = [
        f"soapstone {diagnosis.soapstone}, {diagnosis.system}, Python {diagnosis.python}",
        "",
        "Libraries",
    ]
    width = max(len(library.name) for library in diagnosis.libraries)
    for library in diagnosis.libraries:
        if library.state == "works":
            rest = " ".join(filter(None, (library.version, library.path)))
        else:
            rest = "; ".join(filter(None, (f"{library.state}: {library.problem}", library.cost)))
        lines.append(f"  {library.name:<{width}}  {rest}")
    numbers = "all" if it.core_numbers is None else ", ".join(map(str, it.core_numbers))
    available = "unknown" if it.available_bytes is None else _size(it.available_bytes)
    limit = "" if it.group_limit_bytes is None else f", limited to {_size(it.group_limit_bytes)}"
    lines += [
        "",
        "Processor",
        f"  {it.name} ({it.architecture}), {it.usable_cores} of {it.cores} cores usable: {numbers}",
        f"  features: {' '.join(it.features) or 'unknown'}",
        f"  caches: {', '.join(map(_size, it.cache_bytes))}; NUMA nodes: {it.memory_nodes or '?'}",
        f"  memory: {_size(it.memory_bytes)}, {available} available{limit}",
        "",
        "Kept on disk",
        *(
            f"  {one['name']}: {sum(one['entries'].values())} entries, {one['stale']} stale, "
            f"{_size(one['nbytes'])}, {one['path']}{' ' * bool(one['problem'])}{one['problem']}"
            for one in diagnosis.caches
        ),
        "",
        "Operators",
        "  served by " + ", ".join(f"{kind} {count}" for kind, count in diagnosis.kernels.items()),
        f"  by NumPy alone, slowly: {sum(map(len, diagnosis.reference.values()))}",
        *(f"    {family}: {', '.join(names)}" for family, names in diagnosis.reference.items()),
        *_hosted(diagnosis.on_host),
        "",
        "Self-test",
        *(
            f"  {check.operator} by {check.variant}: "
            + (check.problem or f"right within {check.error:.1g}")
            for check in diagnosis.checks
        ),
    ]
    if diagnosis.problems:
        lines += [
            "",
            "Installed, but does not work:",
            *(f"  {text}" for text in diagnosis.problems),
        ]
    return "\n".join(lines)


def _hosted(operators: tuple[str, ...] | None) -> list[str]:
    """Return the lines of operators that the host runs for a GPU."""
    if not operators:
        return []
    return [
        f"  of a GPU, by the host, on copies: {len(operators)}",
        *textwrap.wrap(", ".join(operators), 96, initial_indent=" " * 4, subsequent_indent=" " * 4),
    ]


def _size(nbytes: int) -> str:
    value, unit = float(nbytes), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if value < 1024:
            break
        value, unit = value / 1024, larger
    return f"{value:.3g} {unit}" if value < 1000 else f"{value:.0f} {unit}"
