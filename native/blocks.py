"""Argument blocks whose words have names, for who packs them and for compiled code alike."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import from_dtype
from numba.extending import intrinsic

from soapstone.native.memory import Block, pack


class Fields:
    """The named words that a block begins with; a table of any length may follow them.

    _ROWS = Fields("source target count", reals="scale")
        _ROWS.pack(source=x, target=y, count=x.size, scale=0.5)     # in Python: a Block
        w = rows(block); w.source, w.scale                          # compiled, with rows = _ROWS.at

    names: of int64 words, addresses among them; reals: of float64 words, which come after those.
    """

    def __init__(self, names: str, *, reals: str = "") -> None:
        self.names = (*names.split(), *reals.split())
        self.words = len(self.names)
        kinds = [(name, np.int64) for name in names.split()]
        self.dtype = np.dtype([*kinds, *((name, np.float64) for name in reals.split())])

    def pack(self, *table: Any, keep: tuple[Any, ...] = (), **values: Any) -> Block:
        """Return the block of the values, and of what follows them; see `memory.pack`.

        Raises: TypeError for values that are not just those of the fields.
        """
        return pack(self.row(**values), table, keep=keep)

    def row(self, **values: Any) -> tuple[Any, ...]:
        """Return the values in the order of the words, as part of a block.

        Raises: TypeError for values that are not just those of the fields.
        """
        if values.keys() != set(self.names):
            raise TypeError(f"block: fields {sorted(values)} found, {sorted(self.names)} needed")
        return tuple(values[name] for name in self.names)

    @property
    def at(self) -> Any:
        """What compiled code sees the words by: a function of a block or of an address."""
        kind = from_dtype(self.dtype)

        @intrinsic  # type: ignore[untyped-decorator, unused-ignore]
        def fields(typing: Any, place: Any) -> Any:
            def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
                target = context.get_value_type(signature.return_type)
                if args[0].type.is_pointer:
                    return builder.bitcast(args[0], target)
                return builder.inttoptr(args[0], target)

            return kind(place), emit

        return fields
