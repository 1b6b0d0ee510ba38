"""OpenBLAS: found, loaded and checked on first use. It is there where oneDNN is not.

The wheel `scipy-openblas32` carries it for every platform; one of the system serves too. Products
are cut over our own threads, so the library is told to use one; where there is no OpenMP to have
threads of (`native.threads.openmp`), it uses its own.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
from functools import cache
from pathlib import Path
from typing import NamedTuple

from soapstone import system
from soapstone.native.threads import openmp

VARIABLE = "SOAPSTONE_OPENBLAS"
OFF = "off"
_WHEEL = "scipy_openblas32"
_PREFIXES = ("scipy_", "")  # of the names of functions, in the wheel and elsewhere


class OpenBlas(NamedTuple):
    """A loaded library: its file, its own account of itself, and addresses of its products."""

    path: str
    config: str
    sgemm: int
    dgemm: int


def candidates() -> tuple[str, ...]:
    """Return the names to load OpenBLAS by, in the order they are tried.

    The environment variable SOAPSTONE_OPENBLAS, where set, is the only one; "off" is none.
    """
    named = os.environ.get(VARIABLE)
    if named:
        return () if named == OFF else (named,)
    found = []
    spec = importlib.util.find_spec(_WHEEL)
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        files = sorted((Path(folder) / "lib").glob("*scipy_openblas*"))
        found += [str(file) for file in files if file.suffix in (".so", ".dylib", ".dll")]
    from ctypes.util import find_library

    in_system = find_library("openblas")
    return (*found, *((in_system,) if in_system else ()))


def _load(name: str) -> OpenBlas | str:
    """Return the library, or why it cannot be used."""
    try:
        library = ctypes.CDLL(name)
    except OSError as error:
        return f"{name}: {error}"
    for prefix in _PREFIXES:
        if hasattr(library, f"{prefix}cblas_sgemm"):
            break
    else:
        return f"{name}: no function cblas_sgemm with 32-bit integers"
    try:
        config = getattr(library, f"{prefix}openblas_get_config")
        threads = getattr(library, f"{prefix}openblas_set_num_threads")
        dgemm = getattr(library, f"{prefix}cblas_dgemm")
    except AttributeError as error:
        return f"{name}: {error}"
    config.restype = ctypes.c_char_p
    text = config().decode()
    if "USE64BITINT" in text:
        return f"{name}: built for 64-bit integers, but 32-bit ones are needed"
    threads(ctypes.c_int(1 if openmp.available() else system.usable_cores()))
    sgemm = getattr(library, f"{prefix}cblas_sgemm")
    return OpenBlas(name, text.strip(), system.address(sgemm), system.address(dgemm))


@cache
def attempt() -> tuple[OpenBlas | None, str]:
    """Return the library and "", or None and why no candidate serves."""
    reasons = []
    for name in candidates():
        found = _load(name)
        if isinstance(found, OpenBlas):
            return found, ""
        reasons.append(found)
    return None, "; ".join(reasons) or "no wheel scipy-openblas32 and no library of the system's"


def available() -> bool:
    """Return whether a usable OpenBLAS is installed (loads it)."""
    return attempt()[0] is not None
