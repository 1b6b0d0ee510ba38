"""Functions that Numba compiles and keeps on disk: valid while their sources are what they were.

Numba's own stamp covers the file of a function only. What a function inlines or calls is compiled
into it, wherever it is written, and constants are too. So the folder in which Numba keeps what it
makes of a module is named by the stamp of all sources the module imports (`sources.stamp`), and by
the environment: other sources are another folder. Numba adds processor and signature itself, and
what a function closes over, but by names that each process makes anew (`places.closed_over`).

Importing this module imports Numba: only modules that are imported on first use may do so.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numba
from numba.core import config

from soapstone.cache.linked import LinkedCompiler, QuietCompiler
from soapstone.cache.places import closed_over, place_of, say
from soapstone.locks import Lock
from soapstone.system import locked

Decorator = Callable[[Callable[..., Any]], Any]  # Numba infers types of its own
_PLACING = Lock()


def njit(**options: Any) -> Decorator:
    """Return a decorator as `numba.njit`, compiled on the first call and kept on disk.

    Numba's wrapper for C is left out: none is called, and each takes time to compile.
    """

    options = {"no_cfunc_wrapper": True, "pipeline_class": QuietCompiler, **options}

    def wrap(function: Callable[..., Any]) -> Any:
        return _kept(lambda: numba.njit(**options)(function), function)

    return wrap


def linked(**options: Any) -> Decorator:
    """Return a decorator for functions that only compiled functions call (`cache.linked`).

    They are not kept on disk: they are in what calls them.
    """
    made: Decorator = numba.njit(
        no_cpython_wrapper=True, no_cfunc_wrapper=True, pipeline_class=LinkedCompiler, **options
    )
    return made


def _kept(make: Callable[[], Any], function: Callable[..., Any]) -> Any:
    """Return what Numba makes, its compiled code kept in the folder of the function's stamp."""
    made = make()
    if not hasattr(made, "enable_caching"):  # NUMBA_DISABLE_JIT: the function itself
        return made
    place = place_of(function)
    if place is None:
        return made
    closed = closed_over(function)
    with _PLACING:
        before = config.CACHE_DIR
        config.CACHE_DIR = str(place / closed)
        try:
            made.enable_caching()
        except RuntimeError:  # the folder has gone, or is not writable
            return make()
        finally:
            config.CACHE_DIR = before
    if not _inside(made, place):
        say(f"Numba {numba.__version__} does not keep compiled code where it is told to")
        return make()
    _forgive(made._cache, place / "lock")
    if closed:
        made._cache._index_key = lambda signature, codegen: (
            signature,
            codegen.magic_tuple(),
            closed,
        )
    return made


def _forgive(store: Any, lock: Path) -> None:
    """Let functions run whose code cannot be written or read: a full disk, a file cut short.

    Numba raises then, in whatever the function was called for. And it lets two processes that write
    at once give one file to two signatures, of which one would later run the other's code.
    """
    save, load = store.save_overload, store.load_overload

    def kept(*arguments: Any) -> None:
        try:
            with locked(lock):
                save(*arguments)
        except OSError as error:
            say(f"{error}; compiled code is not kept")

    def known(*arguments: Any) -> Any:
        try:
            return load(*arguments)
        except Exception as error:  # whatever unpickling raises
            say(f"{type(error).__name__}: {error}; functions are compiled anew")
            with contextlib.suppress(OSError):
                store.flush()
            return None

    store.save_overload, store.load_overload = kept, known


def _inside(made: Any, place: Path) -> bool:
    """Return whether compiled code goes where it must, by what Numba itself says."""
    stats = getattr(made, "stats", None)
    where = getattr(stats if stats is not None else getattr(made, "_cache", None), "cache_path", "")
    return Path(where or os.sep).is_relative_to(place)
