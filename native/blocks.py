"""Argument blocks whose words have names, for who packs them and for compiled code alike."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cached_property
from typing import Any

import numpy as np

from soapstone.cache.deferred import Late, intrinsic, numba, types
from soapstone.native.memory import Block, Entry, pack

ir = Late("llvmlite.ir")
_NAME = re.compile(r"(\w+)(?:\(([\w ]+)\))?")
_Groups = dict[str, tuple[str, ...]]  # of each name, the words that it stands for


def _groups(names: str) -> _Groups:
    """Return the words of "count step(n h)": count, and step_n and step_h of one value step."""
    return {
        name: tuple(f"{name}_{part}" for part in parts.split()) if parts else (name,)
        for name, parts in _NAME.findall(names)
    }


class Fields:
    """The named words that a block begins with; a table of any length may follow them.

    _ROWS = Fields("source target count step(n h)", reals="scale")
        _ROWS.pack(source=x, target=y, count=x.size, step=x.strides, scale=0.5)  # a Block
        w = rows(block); w.source, w.step_h, w.scale       # compiled, with rows = _ROWS.at
        t = table(block); t[0]                              # what follows, table = _ROWS.table

    names: of int64 words, addresses among them; reals: of float64 words, which come after those.
    """

    def __init__(self, names: str, *, reals: str = "") -> None:
        integers, floats = _groups(names), _groups(reals)
        self.groups: _Groups = integers | floats
        self.reals = [word for group in floats.values() for word in group]
        self._counts = [
            (name, 0 if group == (name,) else len(group)) for name, group in self.groups.items()
        ]
        self.names = tuple(word for group in self.groups.values() for word in group)
        self.words = len(self.names)

    @cached_property
    def dtype(self) -> np.dtype[Any]:
        """The words as NumPy and Numba see them."""
        whole = len(self.names) - len(self.reals)
        kinds = [(word, np.int64) for word in self.names[:whole]]
        return np.dtype([*kinds, *((word, np.float64) for word in self.names[whole:])])

    def pack(self, *table: Any, keep: Any = (), **values: Any) -> Block:
        """Return the block of the values, and of what follows them; see `memory.pack`.

        Raises: TypeError for values that are not just those of the fields.
        """
        return pack(self.row(**values), table, keep=keep)

    def row(self, **values: Any) -> tuple[Any, ...]:
        """Return the values in the order of the words, as part of a block.

        Raises: TypeError for values that are not just those of the fields.
        """
        if values.keys() != self.groups.keys():
            raise TypeError(f"block: fields {sorted(values)} found, {sorted(self.groups)} needed")
        row: list[Any] = []
        for name, count in self._counts:
            value = values[name]
            if count == 0:  # a number, an address, an array
                row.append(value)
                fits = not isinstance(value, (tuple, list))
            elif isinstance(value, Entry):  # its function and block
                row.append(value)
                fits = count == 2
            else:
                row += value
                fits = len(value) == count
            if not fits:
                needed = " ".join(self.groups[name])
                raise TypeError(f"block: {name} is {value!r}, words {needed} needed")
        first = len(row) - len(self.reals)
        return *row[:first], *map(float, row[first:])

    @cached_property
    def at(self) -> Any:
        """What compiled code sees the words by: a function of a block or of an address."""
        return _seen(lambda: numba.from_dtype(self.dtype), 0)

    @cached_property
    def table(self) -> Any:
        """What compiled code sees what follows the words by, as int64: of a block or an address."""
        return _seen(lambda: types.CPointer(types.int64), 8 * self.words)


def _seen(kind: Callable[[], Any], offset: int) -> Any:
    """Return the intrinsic of what lies so many bytes after a block or an address."""

    @intrinsic
    def seen(typing: Any, place: Any) -> Any:
        def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            first, bytes_ = args[0], ir.IntType(8).as_pointer()
            if not first.type.is_pointer:
                first = builder.inttoptr(first, bytes_)
            first = builder.bitcast(first, bytes_)
            first = builder.gep(first, [ir.Constant(ir.IntType(64), offset)])
            return builder.bitcast(first, context.get_value_type(signature.return_type))

        return kind()(place), emit

    return seen
