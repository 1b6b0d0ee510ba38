"""The native entry, the calling convention of every kernel, and the call it is bound to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]


class Declined(Exception):
    """A kernel library cannot do what a variant asks of it, so the variant serves no such call."""


NO_STATUSES: Mapping[int, str] = MappingProxyType({})


class Entry(NamedTuple):
    """A kernel bound to concrete arrays: `int32 fn(void *block)`, where 0 means success.

    `keep` holds whatever the block points to; `statuses` explains the kernel's non-zero codes.
    """

    address: int
    block: int
    keep: object
    statuses: Mapping[int, str] = NO_STATUSES


@dataclass(frozen=True)
class Call:
    """One execution of an operator on concrete arrays, at the addresses it will always use.

    `attributes` are those of the point's tile; `threads` is the processor's thread count. The
    contents of the inputs numbered in `constants` are there already and never change.

    Raises:
        TypeError: an operand is no array: a NumPy scalar has no memory that an entry could use.
    """

    operator: str
    attributes: Mapping[str, Any]
    inputs: tuple[Array, ...]
    outputs: tuple[Array, ...]
    threads: int = 1
    constants: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        for side in ("inputs", "outputs"):
            for number, operand in enumerate(getattr(self, side)):
                if not isinstance(operand, np.ndarray):
                    raise TypeError(
                        f"{self.operator}: {side}[{number}] is {type(operand).__name__} "
                        f"{operand!r}, an array needed"
                    )
