"""Stamps of sources: the hash of all files that something was made from.

The files are those of a module, of what it imports, and so on. What is imported inside of functions
counts for what runs (a kernel may import what it binds), and not for what is compiled: of that only
the names of a module are part, and what a function closes over. Each file is read once a process,
and none where an earlier one has told the stamps of what soapstone computes with.

A file that was written after this process began may not be what was imported of it. What depends on
it has a stamp that no other process has, and nothing compiled of it is kept.

Files of soapstone, of one's own programs, and of the package a kernel is in are followed. Other
packages are not: those that compile and compute are part of the environment by their versions.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from soapstone.cache.answers import Answers, late, state_of
from soapstone.cache.environment import digest

_ROOT = "soapstone"
_COMPUTING = ("cache", "ir", "kernels", "native", "runtime")  # packages of all that is compiled
_TOLD = ("cache", "ir", "kernels", "native", "runtime.tracing")  # of all that a package tells
_UNTOLD = ("__pycache__", "cuda")  # folders in these of which it tells nothing
_NOT_KNOWN = os.urandom(16)  # in place of sources that were edited while this process runs
_VERSIONED = frozenset(("builtins", "numpy", "numba", "llvmlite"))  # see `environment`
_IMPORT = re.compile(  # the last: what is imported when code is compiled (`deferred`)
    rb"from ([\w.]+) import (\([^)]*\)|[^\n]*)|import ([\w.]+)|Late\(\"([\w.]+)\"\)"
)
_COMMENT = re.compile(rb"#[^\n]*")


def stamp(*modules: str, compiled: bool = False) -> str:
    """Return the hash of the sources of some modules, and of all that these import.

    compiled: of what is compiled, to which imports inside of functions are nothing.
    """
    return _stamp(frozenset(modules), compiled)


def stamp_of(name: str, home: str, modules: Callable[[], Iterable[str]]) -> str:
    """Return the stamp of modules, which are asked for where no process has told it by a name.

    home: the module that the name belongs to; only those of soapstone's own are told.
    """
    return _answer(name, modules, False) if _top(home) == _ROOT else stamp(*modules())


def modules_of(*functions: Callable[..., Any]) -> frozenset[str]:
    """Return the modules that functions are made of: their own, and those of their closures.

    A function made by another module's factory closes over helpers of the module that called it.
    """
    seen: set[int] = set()
    return frozenset(module for function in functions for module in _modules(function, seen))


def edited(*modules: str, compiled: bool = False) -> bool:
    """Return whether a source was written while this process runs: after it was imported, maybe."""
    return any(_NOT_KNOWN in _source(module) for module in closure(modules, compiled))


def closure(modules: Iterable[str], compiled: bool = False) -> frozenset[str]:
    """Return the modules that have sources, and all that they import, however far."""
    found: set[str] = set()
    waiting = [module for module in modules if _file(module) is not None]
    while waiting:
        module = waiting.pop()
        if module not in found:
            found.add(module)
            waiting += [name for name, top in _imports(module).items() if top or not compiled]
    return frozenset(found)


@cache
def _stamp(modules: frozenset[str], compiled: bool) -> str:
    return _answer(_named(modules, compiled), lambda: modules, compiled)


def _named(modules: Iterable[str], compiled: bool) -> str:
    return " ".join([*sorted(modules), str(compiled)])


def _answer(name: str, modules: Callable[[], Iterable[str]], compiled: bool) -> str:
    """Return the stamp of modules, told by a name where all are known to be as they were."""
    keep = True

    def ask() -> str:
        nonlocal keep
        given = modules()
        whole, every = hashlib.sha256(), {*given, *closure(given, compiled)}
        for module in sorted(every):
            whole.update(module.encode() + b"\0" + hashlib.sha256(_source(module)).digest())
        keep = all(map(_in_state, every))
        return whole.hexdigest()[:32]

    found: str = _answers().answer(name, ask, keep=lambda: keep)
    _answers().save()
    return found


def _in_state(module: str) -> bool:
    """Return whether the source of a module is part of what `_answers` depends on."""
    root, *inner = module.split(".")
    if root == _ROOT:
        return len(inner) < 2 or inner[0] in _COMPUTING
    return root in sys.stdlib_module_names


@cache
def _answers() -> Answers:
    """Return the stamps that processes found of the sources as they are."""

    def about() -> str:
        packages = [folder for name in _COMPUTING if (folder := _folder(f"{_ROOT}.{name}"))]
        states = [state_of(folder) for folder in packages]
        root = _folder(_ROOT)
        if root is not None:
            states.append(state_of(root, within=False))
        return digest(sys.version, *states)

    return Answers("sources", about, __file__, contents)


@cache
def contents() -> str:
    """Return the hash of all files that machine code of a package is made of, under their names:
    wherever it is installed, it is the same. With a file that is `late`, no other process has the
    same.
    """
    whole = hashlib.sha256()
    for package in (_ROOT, *(f"{_ROOT}.{name}" for name in _TOLD)):
        top = _folder(package)
        places = [] if top is None else [(package, str(top))]
        while places:
            inner, place = places.pop()
            with os.scandir(place) as found:
                for each in sorted(found, key=lambda entry: entry.name):
                    if each.name.endswith(".py"):
                        text = _text(each.path)
                        whole.update(f"{inner} {each.name} {len(text)}\0".encode() + text)
                    elif package != _ROOT and each.name not in _UNTOLD and each.is_dir():
                        places.append((f"{inner}.{each.name}", each.path))
    return whole.hexdigest()


def _text(path: str) -> bytes:
    """Return what a file holds; where it is `late`, what no other process has."""
    file = os.open(path, os.O_RDONLY | getattr(os, "O_BINARY", 0))  # `open` takes twice as long
    try:
        status = os.fstat(file)
        return _NOT_KNOWN if late(status) else os.read(file, status.st_size)
    finally:
        os.close(file)


def ship(modules: Iterable[Iterable[str]], place: Path) -> None:
    """Write stamps of what is compiled of some modules, for a package whose `machine_code` a folder
    is to be.
    """
    told = {_named(each, True): stamp(*each, compiled=True) for each in map(frozenset, modules)}
    _answers().ship(told, place)


def _modules(thing: Any, seen: set[int]) -> Iterator[str]:
    """Yield the modules of a function and of the functions and objects in its closure."""
    if id(thing) in seen:
        return
    seen.add(id(thing))
    # What wraps a function: functools.wraps, a dispatcher of Numba's, a kernel, a partial.
    for attribute in ("__wrapped__", "py_func", "function", "func"):
        inner = getattr(thing, attribute, None)
        if callable(inner):
            yield from _modules(inner, seen)
    module = getattr(thing, "__module__", None)
    if callable(thing) and isinstance(module, str) and _top(module) not in _VERSIONED:
        yield module
    for cell in getattr(thing, "__closure__", None) or ():
        try:
            held = cell.cell_contents
        except ValueError:  # not yet filled: the function itself
            continue
        for item in held if isinstance(held, tuple | list) else (held,):
            yield from _modules(item, seen)


def _top(module: str) -> str:
    return module.partition(".")[0]


@cache
def _source(module: str) -> bytes:
    """Return the source of a module, or nothing where there is no file."""
    path = _file(module)
    if path is None:
        return b""
    edited = module in sys.modules and late(path.stat())
    return path.read_bytes() + (_NOT_KNOWN if edited else b"")


@cache
def _file(module: str) -> Path | None:
    """Return the file of a module, or None if there is no such module."""
    if _top(module) != _ROOT:
        path = getattr(sys.modules.get(module), "__file__", None)
        return Path(path) if path and path.endswith(".py") else None
    parent, _, last = module.rpartition(".")
    folder = _folder(module)
    if folder is not None and (folder / "__init__.py").is_file():
        return folder / "__init__.py"
    above = _folder(parent) if parent else None
    file = above / f"{last}.py" if above is not None else None
    return file if file is not None and file.is_file() else None


@cache
def _folder(package: str) -> Path | None:
    """Return the folder of a package of soapstone, which may lie apart from its parent's."""
    parent, _, last = package.rpartition(".")
    if package == _ROOT or parent == _ROOT:
        spec = importlib.util.find_spec(package)
        places = spec.submodule_search_locations if spec is not None else None
        return Path(next(iter(places))) if places else None
    above = _folder(parent)
    return above / last if above is not None and (above / last).is_dir() else None


@cache
def _followed(module: str, importer: str) -> bool:
    """Return whether a module is a source of one that imports it."""
    path = _file(module)
    if path is None or _top(module) in _VERSIONED:
        return False
    if _top(module) in (_ROOT, _top(importer)):
        return True
    return not any(path.is_relative_to(folder) for folder in _libraries())


@cache
def _libraries() -> tuple[str, ...]:
    """Return the folders of Python's own modules and of installed packages."""
    import sysconfig  # asked of others' modules alone

    return tuple(
        {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    )


@cache
def _imports(module: str) -> Mapping[str, bool]:
    """Return the modules whose sources a text imports, and whether outside of functions."""
    path, text = _file(module), _source(module)
    package = path is not None and path.name == "__init__.py"
    inside = module if package else module.rpartition(".")[0]
    found: dict[str, bool] = {}
    for each in _IMPORT.finditer(text):
        base = _absolute((each[1] or each[3] or each[4]).decode(), inside)
        if _top(base) in sys.stdlib_module_names or _top(base) in _VERSIONED:
            continue
        line = each.start() == 0 or text[each.start() - 1 : each.start()] == b"\n"
        top = line or each[4] is not None
        names = _COMMENT.sub(b"", each[2] or b"").decode("utf-8", "replace").strip("()")
        for name in names.split(","):
            inner = f"{base}.{name.split(' as ')[0].strip()}"
            target = inner if _file(inner) is not None else base
            if _followed(target, module):
                found[target] = found.get(target, False) or top
    return found


def _absolute(name: str, package: str) -> str:
    """Return the absolute name of a module that a package's module imports by this one."""
    rest = name.lstrip(".")
    ups = len(name) - len(rest)
    if not ups:
        return name
    parts = package.split(".")
    base = ".".join(parts[: len(parts) - ups + 1])
    return f"{base}.{rest}" if rest else base
