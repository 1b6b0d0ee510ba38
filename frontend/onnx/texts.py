"""Texts, which no graph holds: it computes with numbers that stand for them.

Texts that are known while a graph is built (labels, categories) are a table, and the graph computes
places in it; texts that a run is given are read between pieces (`pieces.py`). So what moves or
compares texts is the operator that does it with numbers.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from soapstone.ir.tensor import Array, TensorSpec, spec_of
from soapstone.records import dataclass

TEXT = "string"  # the element type, as ONNX calls it
PLACE = "int64"  # that of places in a table


@dataclass(frozen=True, slots=True)
class TextSpec(TensorSpec):
    """The shape of a tensor of texts; in memory they are an array of Python's objects."""

    dtype: str = TEXT

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", tuple(int(extent) for extent in self.shape))

    @property
    def nbytes(self) -> int:
        """The bytes of references to them."""
        return 8 * self.size


def is_text(array: Array) -> bool:
    """Return whether an array is of texts."""
    return array.dtype.kind in "OUT"


def described(array: Array) -> TensorSpec:
    """Return the spec of an array of numbers or texts."""
    return TextSpec(array.shape) if is_text(array) else spec_of(array)


def spec_as(shape: Sequence[int], dtype: str) -> TensorSpec:
    """Return the spec of a tensor of a type, which may be texts."""
    return TextSpec(tuple(shape)) if dtype == TEXT else TensorSpec(tuple(shape), dtype)


def blank(shape: Sequence[int], dtype: str) -> Array:
    """Return zeros, or empty texts, of which only shape and type are to be looked at."""
    one = np.array("", object) if dtype == TEXT else np.zeros((), dtype)
    return np.broadcast_to(one, shape)


def contents_of(array: Array) -> bytes:
    """Return bytes that tell the contents of an array from any other's of its shape and type."""
    if not is_text(array):
        return array.tobytes()
    parts = [str(each).encode("utf-8", "surrogatepass") for each in array.flat]
    return b"".join(len(part).to_bytes(8, "little") + part for part in parts)


def tabled(parts: Sequence[Array]) -> tuple[Array, list[Array]]:
    """Return the different texts of some arrays, sorted, and the places of each array's in them."""
    flat = [part.reshape(-1) for part in parts]
    table, places = np.unique(np.concatenate(flat), return_inverse=True)
    ends = np.cumsum([part.size for part in flat])[:-1]
    split = np.split(places.reshape(-1).astype(PLACE), ends)
    return table, [each.reshape(part.shape) for each, part in zip(split, parts)]


def places_of(texts: Array, values: Array) -> Array:
    """Return where each value stands first among some texts; one that is not there, behind them."""
    found = {text: place for place, text in reversed(list(enumerate(texts.flat)))}
    places = [found.get(value, texts.size) for value in values.flat]
    return np.asarray(places, PLACE).reshape(values.shape)
