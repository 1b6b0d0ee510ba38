"""What compiled code calls by a name, made when code that calls it is compiled, and not before.

Numba takes long to import, and longer to make a thousand small functions known to itself. A process
that finds all its machine code on disk needs neither. So kernels are written with these decorators,
whose results say what they are to Numba when it asks for their type.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import cached_property, update_wrapper
from typing import Any


class Late:
    """A module that is imported when something of it is asked for.

    Where it is one with sources, these are part of the stamps of who names it here (`sources`).
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        return getattr(importlib.import_module(self._name), name)


numba, types, cgutils = Late("numba"), Late("numba.types"), Late("numba.core.cgutils")
_compiled = Late("soapstone.cache.compiled")


class Deferred:
    """A function that only compiled code calls.

    function: as it is written. options: how it is compiled. make: what makes it known to Numba;
    returns what must live as long as it, and its type.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        make: Callable[[Callable[..., Any], dict[str, Any]], tuple[Any, Any]],
        **options: Any,
    ) -> None:
        update_wrapper(self, function)
        self.function, self.options, self._make = function, options, make

    @cached_property
    def made(self) -> tuple[Any, Any]:
        """What Numba knows it by, and its type there."""
        return self._make(self.function, self.options)

    @property
    def _numba_type_(self) -> Any:
        return self.made[1]

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        """Raise: Python calls none of them.

        Raises:
            TypeError: at each call.
        """
        raise TypeError(
            f"{self.function.__qualname__}: called from Python; compiled code alone may"
        )


def linked(**options: Any) -> Callable[[Callable[..., Any]], Any]:
    """Return a decorator for functions that are compiled into what calls them (`cache.linked`)."""

    def make(function: Callable[..., Any], options: dict[str, Any]) -> tuple[Any, Any]:
        made = _compiled.linked(**options)(function)
        return made, made._numba_type_

    return lambda function: Deferred(function, make, **options)


def intrinsic(function: Callable[..., Any], prepare: Callable[[], object] = lambda: None) -> Any:
    """Return an intrinsic of compiled code, as `numba.extending.intrinsic`.

    prepare: is called before Numba sees the function.
    """

    def make(function: Callable[..., Any], options: dict[str, Any]) -> tuple[Any, Any]:
        prepare()
        template = numba.core.typing.templates.make_intrinsic_template
        return function, types.Function(template(function, function, function.__name__))

    return Deferred(function, make)
