"""Machine code of kernels: object files on disk, loaded without Numba; it is asked for what is not.

A kernel is one function of C, and its object file holds all that it calls (`linked.object_code`).
So a process in which every kernel is found only places them in memory (`loader`).

Object files are kept in the user's cache, for one environment. A package may come with others
(`engine.ahead_of_time`), for a level of x86-64's instructions: they are of these sources or are not
found, and are not used where settings of Numba ask for other code.
"""

from __future__ import annotations

import os
import platform
from collections import Counter
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from soapstone.cache import environment, kept as files
from soapstone.cache.answers import PACKAGED
from soapstone.cache.deferred import Late
from soapstone.cache.environment import digest
from soapstone.cache.loader import DEFINED, load
from soapstone.locks import Lock

SUFFIX = ".o"
_V3 = ("avx", "avx2", "bmi", "bmi2", "f16c", "fma", "lzcnt", "movbe")
_V4 = ("avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl")
LEVELS = {  # by what each needs, best first; what LLVM's name of one does not say follows it
    "x86-64-v4+avx512vnni": (*_V3, *_V4, "avx512vnni"),
    "x86-64-v4": _V3 + _V4,
    "x86-64-v3": _V3,
    "x86-64": (),
}
_linked, _binding = Late("soapstone.cache.linked"), Late("llvmlite.binding")
_places, _sources = Late("soapstone.cache.places"), Late("soapstone.cache.sources")
LOADED: dict[int, tuple[str, str]] = {}  # by address: the file, and the symbol
FOUND: Counter[str] = (
    Counter()
)  # kernels of this process: of the "package", the "cache", "compiled"
SHARED: list[Callable[[str], object]] = []  # the last is told what is missing: module and symbol
_LOADING = Lock()  # LLVM's loader has one user at a time; so has Numba


def address(function: Callable[..., Any], signature: str) -> int:
    """Return the address of a function's machine code: found on disk, or made now and kept.

    signature: as Numba writes it, such as "int32(voidptr)".
    """
    with _LOADING:
        name = symbol(function, signature)
        for folder in _packaged():
            found = _loaded(folder / (name + SUFFIX), name)
            if found is not None:
                FOUND["package"] += 1
                return found
        for share in (None, *SHARED[-1:]):
            if share is not None:
                share(f"{function.__module__}:{name}")  # another process may compile it
            found = _loaded(_places.found_of(function) / (name + SUFFIX), name)
            if found is not None:
                FOUND["cache"] += 1
                return found
        FOUND["compiled"] += 1
        code = _linked.object_code(function, signature, name)
        place = _places.place_of(function)
        made = _load(code, name)
        if place is not None:
            files.write(place / (name + SUFFIX), code)
            LOADED[made] = str(place / (name + SUFFIX)), name
        return made


def kept(function: Callable[..., Any], signature: str) -> bool:
    """Return whether a function's machine code is on disk; see `address`."""
    name = symbol(function, signature) + SUFFIX
    folders = *_packaged(), _places.found_of(function)
    return any((folder / name).is_file() for folder in folders)


def again(path: str, name: str) -> int:
    """Return the address of a function of an object file that another process had in `LOADED`.

    Raises:
        FileNotFoundError: there is none that is whole.
    """
    with _LOADING:
        found = _loaded(Path(path), name)
    if found is None:
        raise FileNotFoundError(path)
    return found


def _loaded(path: Path, name: str) -> int | None:
    """Return the address of a function of an object file, or None where there is none."""
    code = files.read(path)
    if code is None:
        return None
    found = _load(code, name)
    LOADED[found] = str(path), name
    return found


def package(function: Callable[..., Any], signature: str, folder: Path) -> None:
    """Write a function's object file into a folder of a package, for the processor Numba is told.

    Raises:
        OSError: it cannot be written.
    """
    name = symbol(function, signature)
    code = _linked.object_code(function, signature, name)
    (folder / (name + SUFFIX)).write_bytes(files.marked(code))


def packaged(level: str, within: Path = PACKAGED) -> Path:
    """Return the folder of a package's object files for a level, on this system."""
    return within / f"{platform.system().lower()}-{level}"


def features() -> frozenset[str]:
    """Return what kernels may use: what this processor has, or what settings of Numba ask for.

    Of a processor that these name beside features, those alone: what it implies, only LLVM knows.
    """
    name, told = (os.environ.get(f"NUMBA_CPU_{each}", "") for each in ("NAME", "FEATURES"))
    has = set(LEVELS.get(name, ()))
    if name not in LEVELS and name.lower() != "generic" and not told:
        has.update(environment.features())
    for each in told.split(","):
        (has.add if each.startswith("+") else has.discard)(each[1:])
    return frozenset(has)


def arm() -> bool:
    """Return whether this is a 64-bit ARM processor."""
    return platform.machine().lower() in ("aarch64", "arm64")


@cache
def held() -> int:
    """Return how many vectors of 16 numbers of float32 the registers hold: 32, 8 or 4.

    A block of more sums goes to memory and back at each step.
    """
    has = features()
    return 32 if {"avx512f", "avx512vl"} <= has else 8 if "avx" in has or arm() else 4


def levels() -> tuple[str, ...]:
    """Return the levels of instructions that this processor has, the best one first."""
    has = environment.features()
    return tuple(level for level, needed in LEVELS.items() if has >= set(needed))


@cache
def _packaged() -> tuple[Path, ...]:
    """Return the folders of object files that this processor runs, the best ones first."""
    if any(name.startswith("NUMBA_") for name in environment.settings()) or not PACKAGED.is_dir():
        return ()
    return tuple(packaged(level) for level in levels() if packaged(level).is_dir())


def symbol(function: Callable[..., Any], signature: str) -> str:
    """Return a symbol that no other function has, nor this one with other sources or blocks.

    Packed weights fit blocks, which fit the registers: code for fewer of them is another function.
    """
    place = (function.__module__, function.__qualname__, str(function.__code__.co_firstlineno))
    sources = _sources.stamp(*sorted(_sources.modules_of(function)), compiled=True)
    closure = _places.closed_over(function)
    return f"{function.__name__}_{digest(*place, signature, closure, sources, str(held()))}"


def _load(code: bytes, name: str) -> int:
    """Return the address of a function of an object file, which stays loaded."""
    placed = load(code, name)
    if placed is not None:
        return placed
    engine = _engine()
    for symbol, place in DEFINED.items():
        _binding.add_symbol(symbol, place)
    engine.add_object_file(_binding.ObjectFileRef.from_data(code))
    engine.finalize_object()
    return int(engine.get_function_address(name))


@cache
def _engine() -> Any:
    """Return LLVM's loader."""
    _binding.initialize_native_target()
    _binding.initialize_native_asmprinter()
    machine = _binding.Target.from_default_triple().create_target_machine()
    return _binding.create_mcjit_compiler(_binding.parse_assembly(""), machine)
