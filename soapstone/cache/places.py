"""Where compiled code is kept: a folder for each module and stamp of its sources and environment.

What a function inlines or calls is compiled into it, wherever it is written, and constants are too.
So the folder of what is made of a module is named by the stamp of all sources the module imports
(`sources.stamp`), and by the environment: other sources are another folder.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

from soapstone.cache.environment import CacheWarning, digest, environment, folder, key
from soapstone.cache.sources import edited, modules_of, stamp
from soapstone.errors import warn

ABOUT = "modules.json"  # in the folder of a module: whose sources the stamps are of
_STAMPS = 8  # folders of one module that are kept, the last used ones: Pythons, settings, edits
_TOLD: set[Path] = set()


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


def place_of(function: Callable[..., Any]) -> Path | None:
    """Return the folder of what is compiled of a function's module, or None where none can be."""
    return place_for(tuple(sorted(modules_of(function))), function.__module__)


def found_of(function: Callable[..., Any]) -> Path:
    """Return the folder in which earlier processes left what they compiled of the same sources."""
    return _found_for(tuple(sorted(modules_of(function))), function.__module__)


@cache
def _found_for(modules: tuple[str, ...], module: str) -> Path:
    place = _place(modules, module)
    with contextlib.suppress(OSError):  # there is none yet
        os.utime(place)
    return place


def _place(modules: tuple[str, ...], module: str) -> Path:
    more = f"+{digest(*modules)[:8]}" if modules != (module,) else ""
    return root() / f"{module}{more}" / stamped(*modules)


def closed_over(function: Callable[..., Any]) -> str:
    """Return a name of what a function closes over, the same in every process, or "".

    Numba's key of a closure is how it is pickled, and what it compiles has a random name in that.
    Each closure has a folder, where its index says nothing of others.
    """
    if not getattr(function, "__closure__", None):
        return ""
    return digest(repr(_told(function, set())))


def _told(thing: Any, seen: set[int]) -> object:
    """Return what a function is made of, or a thing in its closure, as every process tells it."""
    for attribute in ("py_func", "_defn", "function"):  # of a dispatcher, an intrinsic, deferred
        inner = getattr(thing, attribute, None)
        if inner is not None:
            break
    else:
        inner = thing
    if isinstance(inner, FunctionType):
        name = f"{inner.__module__}.{inner.__qualname__}"
        if id(inner) in seen:  # it calls itself
            return name
        seen.add(id(inner))
        cells = [_told(cell.cell_contents, seen) for cell in inner.__closure__ or ()]
        given = [_told(each, seen) for each in inner.__defaults__ or ()]
        options = str(getattr(thing, "targetoptions", getattr(thing, "options", "")))
        return name, _written(inner.__code__), options, cells, given
    if isinstance(thing, tuple | list):
        return [_told(each, seen) for each in thing]
    if any(each.__module__.startswith("numba.") for each in type(thing).__mro__):
        return str(thing)  # a type, which has other bytes each time
    return pickle.dumps(thing)


def _written(code: CodeType) -> object:
    """Return what tells code from other code of its module; `marshal` has other bytes each time."""
    inner = [_written(c) if isinstance(c, CodeType) else repr(c) for c in code.co_consts]
    return code.co_firstlineno, code.co_code, code.co_names, inner


@cache
def place_for(modules: tuple[str, ...], module: str) -> Path | None:
    """Return the folder of what is compiled of modules, or None where none can be written.

    module: the one whose name the folder has.
    """
    if edited(*modules, compiled=True):
        return None
    place = _place(modules, module)
    try:
        new = not place.exists()
        place.mkdir(parents=True, exist_ok=True)
        os.utime(place)
        if new:
            (place.parent / ABOUT).write_text(json.dumps(modules))
            _prune(place.parent)
    except OSError as error:
        say(f"{error}; compiled code is not kept")
        return None
    return place


def _prune(family: Path) -> None:
    """Remove the folders of older sources, but for the ones used last."""
    from shutil import rmtree  # which takes long

    with contextlib.suppress(OSError):
        folders = [path for path in family.iterdir() if path.is_dir()]
        for path in sorted(folders, key=lambda p: p.stat().st_mtime)[:-_STAMPS]:
            rmtree(path, ignore_errors=True)


def say(why: str) -> None:
    """Say what is wrong with the folder of compiled functions, once."""
    if root() not in _TOLD:
        _TOLD.add(root())
        warn(f"cache {str(root())!r}: {why}", CacheWarning)
