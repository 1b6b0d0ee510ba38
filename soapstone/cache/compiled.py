"""Functions that Numba compiles and keeps on disk: valid while their sources are what they were.

Numba's own stamp covers the file of a function only. What a function inlines or calls is compiled
into it, wherever it is written, and constants are too. So the folder in which Numba keeps what it
makes of a module is named by the stamp of all sources the module imports (`sources.stamp`), and by
the environment: other sources are another folder. Numba adds processor and signature itself, and
what a function closes over, but by names that are other ones in each process (`_closed`).

Importing this module imports Numba: only modules that are imported on first use may do so.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import threading
import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

import numba
from numba.core import config, serialize, sigutils, types
from numba.core.ccallback import CFunc

from soapstone.cache.environment import CacheWarning, digest, environment, folder, key
from soapstone.cache.linked import LinkedCompiler
from soapstone.cache.sources import edited, modules_of, stamp
from soapstone.system import locked

Decorator = Callable[[Callable[..., Any]], Any]  # Numba infers types of its own
ABOUT = "modules.json"  # in the folder of a module: whose sources the stamps are of
_STAMPS = 8  # folders of one module that are kept, the last used ones: Pythons, settings, edits
_PLACING = threading.Lock()
_TOLD: set[Path] = set()


def njit(**options: Any) -> Decorator:
    """Return a decorator as `numba.njit`, compiled on the first call and kept on disk.

    Numba's wrapper for C is left out: none is called, and each takes time to compile.
    """

    def wrap(function: Callable[..., Any]) -> Any:
        return _kept(lambda: numba.njit(no_cfunc_wrapper=True, **options)(function), function)

    return wrap


def linked(**options: Any) -> Decorator:
    """Return a decorator for functions that only compiled functions call (`cache.linked`).

    They are not kept on disk: they are in what calls them.
    """
    made: Decorator = numba.njit(
        no_cpython_wrapper=True, no_cfunc_wrapper=True, pipeline_class=LinkedCompiler, **options
    )
    return made


def cfunc(signature: str, **options: Any) -> Decorator:
    """Return a decorator as `numba.cfunc`, compiled at once unless it is kept on disk."""

    def wrap(function: Callable[..., Any]) -> Any:
        given = sigutils.normalize_signature(signature)
        made = _kept(lambda: CFunc(function, given, {}, options), function)
        made.compile()
        return made

    return wrap


def root() -> Path:
    """Return the folder of compiled functions: Numba's own where one is named, else ours."""
    named = os.environ.get("NUMBA_CACHE_DIR")
    return Path(named) if named else folder() / "compiled"


def stamped(*modules: str) -> str:
    """Return the name of the folder of what is compiled of modules, by environment and sources.

    Checked mode is of those who call: what they call is the same.
    """
    settings = {name: at for name, at in environment().items() if name != "SOAPSTONE_CHECKED"}
    return digest(key(settings), stamp(*modules, compiled=True))


def _kept(make: Callable[[], Any], function: Callable[..., Any]) -> Any:
    """Return what Numba makes, its compiled code kept in the folder of the function's stamp."""
    made = make()
    if not hasattr(made, "enable_caching"):  # NUMBA_DISABLE_JIT: the function itself
        return made
    place = _place(tuple(sorted(modules_of(function))), function.__module__)
    if place is None:
        return made
    closed = _closed(function)
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
        _say(f"Numba {numba.__version__} does not keep compiled code where it is told to")
        return make()
    _forgive(made._cache, place / "lock")
    if closed:
        made._cache._index_key = lambda signature, codegen: (
            signature,
            codegen.magic_tuple(),
            closed,
        )
    return made


def _closed(function: Callable[..., Any]) -> str:
    """Return a name of what a function closes over, the same in every process, or "".

    Numba's key of a closure is how it is pickled, and what it compiles has a random name in that.
    Each closure has a folder, where its index says nothing of others.
    """
    if not getattr(function, "__closure__", None):
        return ""
    return digest(repr(_told(function, set())))


def _told(thing: Any, seen: set[int]) -> object:
    """Return what a function is made of, or a thing in its closure, as every process tells it."""
    inner = getattr(thing, "py_func", getattr(thing, "_defn", thing))  # of a dispatcher, intrinsic
    if isinstance(inner, FunctionType):
        name = f"{inner.__module__}.{inner.__qualname__}"
        if id(inner) in seen:  # it calls itself
            return name
        seen.add(id(inner))
        cells = [_told(cell.cell_contents, seen) for cell in inner.__closure__ or ()]
        given = [_told(each, seen) for each in inner.__defaults__ or ()]
        options = str(getattr(thing, "targetoptions", ""))
        return name, _written(inner.__code__), options, cells, given
    if isinstance(thing, tuple | list):
        return [_told(each, seen) for each in thing]
    return str(thing) if isinstance(thing, types.Type) else serialize.dumps(thing)


def _written(code: CodeType) -> object:
    """Return what tells code from other code of its module; `marshal` has other bytes each time."""
    inner = [_written(c) if isinstance(c, CodeType) else repr(c) for c in code.co_consts]
    return code.co_firstlineno, code.co_code, code.co_names, inner


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
            _say(f"{error}; compiled code is not kept")

    def known(*arguments: Any) -> Any:
        try:
            return load(*arguments)
        except Exception as error:  # whatever unpickling raises
            _say(f"{type(error).__name__}: {error}; functions are compiled anew")
            with contextlib.suppress(OSError):
                store.flush()
            return None

    store.save_overload, store.load_overload = kept, known


def _inside(made: Any, place: Path) -> bool:
    """Return whether compiled code goes where it must, by what Numba itself says."""
    stats = getattr(made, "stats", None)
    where = getattr(stats if stats is not None else getattr(made, "_cache", None), "cache_path", "")
    return Path(where or os.sep).is_relative_to(place)


@cache
def _place(modules: tuple[str, ...], module: str) -> Path | None:
    """Return the folder of what is compiled of a module, or None where none can be written."""
    if edited(*modules, compiled=True):
        return None
    more = f"+{digest(*modules)[:8]}" if modules != (module,) else ""
    family = root() / f"{module}{more}"
    place = family / stamped(*modules)
    try:
        new = not place.exists()
        place.mkdir(parents=True, exist_ok=True)
        os.utime(place)
        if new:
            (family / ABOUT).write_text(json.dumps(modules))
            _prune(family)
    except OSError as error:
        _say(f"{error}; compiled code is not kept")
        return None
    return place


def _prune(family: Path) -> None:
    """Remove the folders of older sources, but for the ones used last."""
    with contextlib.suppress(OSError):
        folders = [path for path in family.iterdir() if path.is_dir()]
        for path in sorted(folders, key=lambda p: p.stat().st_mtime)[:-_STAMPS]:
            shutil.rmtree(path, ignore_errors=True)


def _say(why: str) -> None:
    """Say what is wrong with the folder of compiled functions, once."""
    if root() not in _TOLD:
        _TOLD.add(root())
        warnings.warn(f"cache {str(root())!r}: {why}", CacheWarning, stacklevel=2)


__all__ = ["ABOUT", "cfunc", "linked", "njit", "root", "stamped"]
