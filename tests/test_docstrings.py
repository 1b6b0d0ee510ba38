"""What users import has docstrings, which name every parameter.

A function's docstring says what it returns, and each parameter by name; a class's says its fields
or what it is made of, so that its constructor needs no docstring of its own.
"""

from __future__ import annotations

import dataclasses
import enum
import importlib
import inspect
import re
from collections.abc import Iterator
from functools import cached_property
from typing import Any

from soapstone import apps, runtime
from soapstone.frontend.app import app_module, app_names
from soapstone.runtime import DefaultMapper

MODULES = (
    "soapstone",
    "soapstone.cache",
    "soapstone.callbacks",
    "soapstone.engine.mapper",
    "soapstone.frontend.onnx",
    "soapstone.frontend.taskbench",
    "soapstone.frontend.training.callbacks",
    "soapstone.frontend.training.optimizers",
    "soapstone.frontend.training.schedules",
    "soapstone.frontend.training.trainer",
    "soapstone.ir.builder",
    "soapstone.ir.files.graphs",
    "soapstone.ir.graph",
    "soapstone.ir.spec",
    "soapstone.ir.strategy",
    "soapstone.ir.tensor",
    "soapstone.kernels.registry",
    "soapstone.data",
    "soapstone.decoding",
    "soapstone.losses",
    "soapstone.mappers",
    "soapstone.mappers.plugins",
    "soapstone.metrics",
    "soapstone.onnxruntime",
    "soapstone.runtime",
    "soapstone.schedules",
    "soapstone.search.parallel",
    *(app_module(name).__name__ for name in app_names()),
)
NAMES = (
    ("soapstone.frontend.inference.sources", "Field"),
    ("soapstone.frontend.strategies.finding", "graph_of"),
    ("soapstone.frontend.strategies.finding", "machine_of"),
    ("soapstone.frontend.strategies.finding", "measure_tasks"),
    ("soapstone.frontend.strategies.picture", "save_picture"),
    ("soapstone.ir.interpret", "interpret"),
    ("soapstone.search.placement.baselines", "least_recently_used"),
    ("soapstone.search.placement.baselines", "stream"),
    ("soapstone.search.placement.find", "memory_plan"),
)
# What every layer has is said where layers are described, and files are files by any name.
UNDERSTOOD = {"self", "cls", "name"}
ALSO = {"path": "file"}


def public_names(module: Any) -> list[str]:
    """Return the names that a module offers: those it lists, or those defined in it."""
    if hasattr(module, "__all__"):
        return list(module.__all__)
    names = (name for name in vars(module) if not name.startswith("_"))
    return [n for n in names if getattr(getattr(module, n), "__module__", "") == module.__name__]


def described() -> dict[str, Any]:
    """Return every public function and class, by how users write it."""
    places = [
        (module, name)
        for module in MODULES
        for name in public_names(importlib.import_module(module))
    ]
    found: dict[int, tuple[str, Any]] = {}
    for module, name in (*places, *NAMES):
        thing = getattr(importlib.import_module(module), name)
        if callable(thing) and getattr(thing, "__module__", "").startswith("soapstone"):
            found.setdefault(id(thing), (f"{module}.{name}", thing))
    return dict(found.values())


def bases(owner: type) -> tuple[type, ...]:
    """Return a class, its bases, and the protocol whose questions it answers."""
    return (*owner.__mro__, *((runtime.Mapper,) if issubclass(owner, DefaultMapper) else ()))


def definitions(owner: type, name: str) -> list[Any]:
    """Return what a class and its bases in the package define under a name, the class's first."""
    found = [vars(base).get(name) for base in bases(owner) if base.__module__[:9] == "soapstone"]
    plain = [getattr(each, "__func__", each) for each in found if each is not None]
    kinds = (property, cached_property)
    return [each for each in plain if inspect.isfunction(each) or isinstance(each, kinds)]


def unnamed(function: Any, text: str, shared: str = "") -> list[str]:
    """Return the parameters that a text does not name, nor the plural of.

    shared: a text that describes some of them for all its functions: `state: where training is`.
    """
    if re.search(r"[Ss]ee `\w+\.\w+`", text):  # which has the same parameters
        return []
    names = [name for name in inspect.signature(function).parameters if name[0] != "_"]
    words = {name: f"{name}|{ALSO.get(name, name)}" for name in names if name not in UNDERSTOOD}
    return [
        name
        for name, word in words.items()
        if not re.search(rf"\b({word})s?\b", text)
        and not re.search(rf"(^|[\s,]){name}(,[\w ,]+)?:", shared)
    ]


def complaints(label: str, thing: Any) -> Iterator[str]:
    """Yield what is wrong with the docstrings of a function, or of a class and its members."""
    text = inspect.getdoc(thing) or ""
    if not text or text.startswith(f"{thing.__name__}("):  # a dataclass makes itself one
        yield f"{label} has no docstring"
    if not inspect.isclass(thing):
        shared = apps.__doc__ or "" if label.startswith(apps.__name__) else ""
        yield from (f"{label}: {name} is not described" for name in unnamed(thing, text, shared))
        return
    if not issubclass(thing, enum.Enum | BaseException) and "__init__" in dir(thing):
        if dataclasses.is_dataclass(thing):  # a field may be described beside it
            text += "".join(re.findall(r"^    \w+: .*?#.*$", inspect.getsource(thing), re.M))
        text += inspect.getdoc(thing.__init__) or ""
        made = inspect.isfunction(thing.__init__) and not getattr(thing, "_is_protocol", False)
        yield from (f"{label}: {name} is not described" for name in unnamed(thing, text) if made)
    classes = "\n".join(base.__doc__ or "" for base in bases(thing))
    for name in dir(thing):
        defined = definitions(thing, name) if name[0] != "_" else []
        if not defined:
            continue
        texts = "\n".join(inspect.getdoc(each) or "" for each in defined)
        if not texts.strip():
            yield f"{label}.{name} has no docstring"
        elif inspect.isfunction(defined[0]):
            for argument in unnamed(defined[0], texts, classes):
                yield f"{label}.{name}: {argument} is not described"


def test_what_users_import_is_described() -> None:
    known = described()
    assert len(known) > 200
    assert [each for label, thing in known.items() for each in complaints(label, thing)] == []
