"""`dataclass` as the standard library has it, made in a tenth of the time.

The standard library compiles each method of each class by itself, a millisecond a class: what the
modules of a first answer declare would take longer than its model. Here fields are its own, what
compares, hashes and shows them is shared code, and `__init__` is compiled when it is first asked
for. Options that are not here (slots, order) are left to it.

Source: https://docs.python.org/3/library/dataclasses.html
"""

from __future__ import annotations

import dataclasses
from operator import attrgetter
from reprlib import recursive_repr
from typing import TYPE_CHECKING, Any, TypeVar

T = TypeVar("T")

if TYPE_CHECKING:
    from dataclasses import dataclass
else:

    def dataclass(cls=None, /, *, init=True, repr=True, eq=True, frozen=False, **others):
        """Return a class with methods made of its fields; see `dataclasses.dataclass`."""

        def made(cls):
            if others or "__slots__" in cls.__dict__:
                standard = dataclasses.dataclass(
                    init=init, repr=repr, eq=eq, frozen=frozen, **others
                )
                return standard(cls)
            return _made(cls, init, repr, eq, frozen)

        return made if cls is None else made(cls)


_COPIED: dict[type, dict[str, None]] = {}  # classes whose instances are their fields, and these


def replace(instance: T, /, **changes: Any) -> T:
    """Return a copy of an instance with other fields; see `dataclasses.replace`, which takes three
    times as long for a class that checks nothing when it is made.
    """
    kind = type(instance)
    names = _COPIED.get(kind)
    if names is None or not changes.keys() <= names.keys():
        found: T = dataclasses.replace(instance, **changes)  # type: ignore[type-var]
        return found
    made = kind.__new__(kind)
    held = made.__dict__
    held.update(instance.__dict__, **changes)
    if len(held) > len(names):
        for name in held.keys() - names.keys():  # what a cached property has found
            del held[name]
    return made


_PARAMS = "__dataclass_params__"  # what a class was made with


def _made(cls: Any, init: bool, shown: bool, eq: bool, frozen: bool) -> Any:
    told = cls.__doc__
    cls.__doc__ = told or " "  # which would be made of a signature
    own = dict(cls.__dict__)
    bases = [vars(base)[_PARAMS] for base in cls.__mro__[1:] if _PARAMS in vars(base)]
    if any(base.frozen != frozen for base in bases):
        raise TypeError(f"{cls.__qualname__}: it and its bases must be frozen, or none of them")
    for base in bases:  # or the standard library would compile what keeps them from changes
        base.frozen = False
    try:
        dataclasses.dataclass(init=False, repr=False, eq=False)(cls)
    finally:
        for base in (*bases, vars(cls).get(_PARAMS)):
            if base is not None:
                base.frozen = frozen
    cls.__doc__ = told
    fields = dataclasses.fields(cls)
    if init and "__init__" not in own:
        cls.__init__ = _Init(cls, fields, frozen)
        if not hasattr(cls, "__post_init__") and all(field.init for field in fields):
            _COPIED[cls] = dict.fromkeys(field.name for field in fields)
    if shown and "__repr__" not in own:
        cls.__repr__ = _shown(tuple(field.name for field in fields if field.repr))
    if eq:
        if "__eq__" not in own:
            cls.__eq__ = _compared(_values(field.name for field in fields if field.compare))
        if own.get("__hash__") is None:  # not written, or None since __eq__ is
            hashed = (f.name for f in fields if (f.compare if f.hash is None else f.hash))
            cls.__hash__ = _hashed(_values(hashed)) if frozen else None
    if frozen:
        if not {"__setattr__", "__delattr__"}.isdisjoint(own):
            raise TypeError(f"{cls.__qualname__}: a frozen class has __setattr__ of its own")
        _freeze(cls, frozenset(field.name for field in fields))
    return cls


class _Init:
    """The place of an `__init__` that is compiled when it is asked for."""

    def __init__(self, cls: Any, fields: tuple[Any, ...], frozen: bool) -> None:
        self.cls, self.fields, self.frozen = cls, fields, frozen

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        made = _init(self.cls, self.fields, self.frozen)
        self.cls.__init__ = made
        return made if instance is None else made.__get__(instance, owner)


def _init(cls: Any, fields: tuple[Any, ...], frozen: bool) -> Any:
    """Return the function that sets the fields of an instance."""
    missing = dataclasses.MISSING
    known: dict[str, Any] = {"__name__": cls.__module__, "_missing": missing}
    arguments: dict[bool, list[str]] = {False: [], True: []}  # by whether by name alone
    values = dict[str, str]()
    for number, field in enumerate(fields):
        name, default, value = field.name, f"_{number}", field.name
        known[default] = field.default
        if field.default_factory is not missing:
            known[default] = field.default_factory
            value = f"{default}()"
            if field.init:
                value += f" if {name} is _missing else {name}"
        if field.init:
            given = "=_missing" if value != name else ""
            given = f"={default}" if field.default is not missing else given
            arguments[bool(field.kw_only)].append(name + given)
        elif value == name:
            continue
        values[name] = value
    if frozen:  # and so without a call of `__setattr__` for each
        lines = [f"_held[{name!r}] = {value}" for name, value in values.items()]
        lines[:0] = ["_held = self.__dict__"] if lines else []
    else:
        lines = [f"self.{name} = {value}" for name, value in values.items()]
    if hasattr(cls, "__post_init__"):
        lines.append("self.__post_init__()")
    listed = ["self", *arguments[False], *(["*", *arguments[True]] if arguments[True] else ())]
    exec(f"def __init__({', '.join(listed)}):\n " + "\n ".join(lines or ["pass"]), known)
    made = known["__init__"]
    made.__module__, made.__qualname__ = cls.__module__, f"{cls.__qualname__}.__init__"
    made.__annotations__ = {f.name: f.type for f in fields if f.init} | {"return": None}
    return made


def _values(names: Any) -> Any:
    """Return a function of an instance that returns the tuple of some of its fields."""
    names = tuple(names)
    if len(names) > 1:
        return attrgetter(*names)
    if not names:
        return lambda instance: ()
    one = attrgetter(*names)
    return lambda instance: (one(instance),)


def _shown(names: tuple[str, ...]) -> Any:
    @recursive_repr()
    def __repr__(self: Any) -> str:
        told = ", ".join(f"{name}={getattr(self, name)!r}" for name in names)
        return f"{self.__class__.__qualname__}({told})"

    return __repr__


def _compared(values: Any) -> Any:
    def __eq__(self: Any, other: Any) -> Any:
        if other.__class__ is self.__class__:
            return values(self) == values(other)
        return NotImplemented

    return __eq__


def _hashed(values: Any) -> Any:
    def __hash__(self: Any) -> int:
        return hash(values(self))

    return __hash__


def _freeze(cls: Any, names: frozenset[str]) -> None:
    def __setattr__(self: Any, name: str, value: Any) -> None:
        if type(self) is cls or name in names:
            raise dataclasses.FrozenInstanceError(f"cannot assign to field {name!r}")
        super(cls, self).__setattr__(name, value)

    def __delattr__(self: Any, name: str) -> None:
        if type(self) is cls or name in names:
            raise dataclasses.FrozenInstanceError(f"cannot delete field {name!r}")
        super(cls, self).__delattr__(name)

    cls.__setattr__, cls.__delattr__ = __setattr__, __delattr__


__all__ = ["dataclass"]
