"""Calls: executions of operators on concrete arrays, to which kernels are bound."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any

import numpy as np

from soapstone.native.memory import Array, Entry
from soapstone.records import dataclass


def is_device_array(operand: object) -> bool:
    """Return whether a value is an array of Numba CUDA or its simulator, without importing them."""
    return bool(getattr(type(operand), "__cuda_ndarray__", False))


class Declined(Exception):
    """A kernel library cannot do what a variant asks, so the variant serves no such call."""


BFLOAT16, TF32 = "bfloat16", "tf32"


@dataclass(frozen=True)
class Call:
    """One execution of an operator on concrete arrays, at the addresses that it will always use.

    Attributes:
        attributes: of the point's tile. threads: of the processor.
        constants: the numbers of inputs whose contents are available already and never change.
        inputs, outputs: arrays of NumPy, or Numba's device arrays for variants of a GPU.
        precision: the precision to which products may round float32 operands: BFLOAT16, for
            products with constant weights; TF32, for everything that GPU libraries compute; or
            none.

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

    @property
    def inner(self) -> Call:
        """The call of the operator that an epilogue follows, or one without as it is."""
        return self._wrapped if self.operator == "with_epilogue" else self

    @cached_property
    def _wrapped(self) -> Call:
        at = self.attributes
        arity = at["arity"]
        own = frozenset([number for number in self.constants if number < arity])
        given = dict(at["items"]), self.inputs[:arity], self.outputs
        return Call(at["operator"], *given, self.threads, own, self.precision)


__all__ = ["BFLOAT16", "TF32", "Array", "Call", "Declined", "Entry", "is_device_array"]
