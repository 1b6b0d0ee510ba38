"""What a kernel is bound to: one execution of an operator on concrete arrays."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from soapstone.native.memory import Array, Entry
from soapstone.records import dataclass


def is_device_array(operand: object) -> bool:
    """Return whether a value is an array of Numba CUDA, or of its simulator; imports neither."""
    return bool(getattr(type(operand), "__cuda_ndarray__", False))


class Declined(Exception):
    """A kernel library cannot do what a variant asks of it, so the variant serves no such call."""


BFLOAT16, TF32 = "bfloat16", "tf32"


@dataclass(frozen=True)
class Call:
    """One execution of an operator on concrete arrays, at the addresses it will always use.

    `attributes` are those of the point's tile; `threads` is the processor's thread count. The
    contents of the inputs numbered in `constants` are there already and never change. The arrays
    are NumPy's, or Numba's device arrays where the variants are those of a GPU. `precision` is what
    products may round their float32 operands to: BFLOAT16, of products with constant weights; TF32,
    of all that libraries of GPUs compute; or not at all.

    Raises:
        TypeError: an operand is no array: a NumPy scalar has no memory that an entry could use.
    """

    operator: str
    attributes: Mapping[str, Any]
    inputs: tuple[Array, ...]
    outputs: tuple[Array, ...]
    threads: int = 1
    constants: frozenset[int] = frozenset()
    precision: str = "float32"

    def __post_init__(self) -> None:
        for side in ("inputs", "outputs"):
            for number, operand in enumerate(getattr(self, side)):
                if not (isinstance(operand, np.ndarray) or is_device_array(operand)):
                    raise TypeError(
                        f"{self.operator}: {side}[{number}] is {type(operand).__name__} "
                        f"{operand!r}, an array needed"
                    )


__all__ = ["BFLOAT16", "TF32", "Array", "Call", "Declined", "Entry", "is_device_array"]
