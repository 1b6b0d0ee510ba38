"""Arrays from elsewhere: whatever has elements in the CPU's memory is read where it is."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import numpy as np

from soapstone.dtypes import BITS, learn, name_of
from soapstone.errors import DataError
from soapstone.frontend.arguments import unmasked
from soapstone.frontend.onnx.texts import described
from soapstone.ir.tensor import Array


def as_array(value: Any, where: str) -> Array:
    """Return a value as an array: of DLPack (torch, JAX, CuPy, …) the same memory, without a copy.

    Args:
        value: an array, what has `__dlpack__`, or what `numpy.asarray` takes.
        where: what the value is, for errors.

    Raises:
        DataError: elements are masked, its memory cannot be read from here, such as that of a GPU
            or of a tensor that records gradients, or NumPy has no such elements; names both.
    """
    if isinstance(value, np.ndarray):
        return value if type(value) is np.ndarray else unmasked(where, value)
    if getattr(value, "is_neg", bool)():  # PyTorch exports such elements without their sign
        made = as_array(value.resolve_neg(), where)
        made.flags.writeable = False  # what is written to a copy would be lost
        return made
    dtype = _narrow_type(value)
    if dtype:
        torch = sys.modules["torch"]
        bits = value.view(torch.int16 if BITS[dtype] == 16 else torch.uint8)
        return as_array(bits, where).view(learn(dtype))
    kind = f"{type(value).__module__}.{type(value).__name__}"
    try:
        return np.from_dlpack(value) if hasattr(value, "__dlpack__") else np.asarray(value)
    except (BufferError, RuntimeError, TypeError, ValueError) as error:
        said = " ".join(str(error).split())
        raise DataError(
            f"{where}: {kind} found, elements of a type of NumPy in the CPU's memory needed: {said}"
        ) from error


def as_texts(values: Any, where: str) -> Array:
    """Return texts as an array of Python's objects, as sessions take and give them.

    Raises:
        DataError: something else is among them.
    """
    array = values if isinstance(values, np.ndarray) else np.asarray(values, object)
    if array.dtype.kind == "S":
        array = np.char.decode(array, "utf-8")
    made = np.asarray(array, object)
    if array.dtype.kind not in "UT":
        wrong = {type(each).__name__ for each in made.flat if not isinstance(each, str)}
        if wrong:
            raise DataError(f"{where}: {sorted(wrong)[0]} found among texts; str needed")
    return made


def _narrow_type(value: Any) -> str:
    """Return the type of a tensor of PyTorch's that NumPy lacks, or nothing; DLPack has no way."""
    kind, _, dtype = str(getattr(value, "dtype", "")).partition(".")
    return dtype if kind == "torch" and BITS.get(dtype, 0) >= 8 else ""


def as_tensor(array: Array) -> Any:
    """Return an array as a tensor of PyTorch's over the same memory."""
    import torch

    dtype = name_of(array.dtype)
    if dtype not in BITS:
        return torch.from_numpy(array)
    return torch.from_numpy(array.view(f"int{BITS[dtype]}")).view(getattr(torch, dtype))


def targets(model: str, out: Mapping[str, Any], results: Mapping[str, Array]) -> dict[str, Array]:
    """Return the arrays that outputs are to be written to, by name.

    Args:
        model: its name. out: arrays or tensors. results: the outputs, by name.

    Raises:
        DataError: no arrays by name, no such output, another type or shape, or one that cannot be
            written to.
    """
    if not isinstance(out, Mapping):
        kind = type(out).__name__
        raise DataError(f"model {model!r}: out: {kind} found, arrays by name of output needed")
    found = {}
    for name, given in out.items():
        where = f"model {model!r}: out {name!r}"
        if name not in results:
            raise DataError(f"{where}: no such output; outputs are {', '.join(results)}")
        if not isinstance(results[name], np.ndarray):
            raise DataError(f"{where}: it is no array, and is not written to one")
        array = found[name] = as_array(given, where)
        have, needed = described(array), described(results[name])
        if have != needed:
            raise DataError(f"{where}: {have} found, {needed} needed")
        if not array.flags.writeable:
            raise DataError(f"{where}: a read-only array found, one to write to needed")
    return found
