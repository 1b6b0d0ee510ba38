"""ONNX tensors and types as NumPy arrays and specs, with every size checked before it is used."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from soapstone.frontend.onnx.errors import OnnxError, UnsupportedError
from soapstone.frontend.onnx.texts import TEXT, is_text
from soapstone.ir.tensor import Array
from soapstone.limits import check_bytes

if TYPE_CHECKING:
    import onnx

ONNX_OF = {  # the codes of `TensorProto.DataType`
    "float32": 1,
    "float64": 11,
    "float16": 10,
    "int8": 3,
    "int16": 5,
    "int32": 6,
    "int64": 7,
    "uint8": 2,
    "uint16": 4,
    "uint32": 12,
    "uint64": 13,
    "bool": 9,
    TEXT: 8,
}
_EXTERNAL = 1  # of `TensorProto.DataLocation`
# Where elements are that are no raw data, and as what: int32_data where nothing else is said.
_STORED = {
    "float32": ("float_data", "float32"),
    "float64": ("double_data", "float64"),
    "int64": ("int64_data", "int64"),
    "uint32": ("uint64_data", "uint64"),
    "uint64": ("uint64_data", "uint64"),
    "float16": ("int32_data", "uint16"),  # its bits
}
_DTYPE_OF = {code: name for name, code in ONNX_OF.items()}
TYPE_STRINGS = {
    name: f"tensor({ {'float32': 'float', 'float64': 'double'}.get(name, name) })"
    for name in ONNX_OF
}


def dtype_of(code: int, where: str) -> str:
    """Return the element type of an ONNX type code.

    Raises:
        UnsupportedError: soapstone has no such type.
    """
    try:
        return _DTYPE_OF[code]
    except KeyError:
        from onnx import TensorProto

        known = {value: name for name, value in TensorProto.DataType.items()}
        found = known.get(code, str(code)).lower()
        raise UnsupportedError(f"{where}: type {found} is not supported") from None


def shape_of(dims: Any, where: str, dtype: str = "uint8") -> tuple[int, ...]:
    """Return the extents of a tensor.

    Raises:
        OnnxError: an extent is negative, or the tensor would take too many bytes.
    """
    shape = tuple(int(extent) for extent in dims)
    if len(shape) > 64:
        raise OnnxError(f"{where}: {len(shape)} axes found, at most 64 are supported")
    if any(extent < 0 for extent in shape):
        raise OnnxError(f"{where}: shape {shape} found; extents of 0 or more needed")
    width = np.dtype("object" if dtype == TEXT else dtype).itemsize
    check_bytes(math.prod(shape) * width, f"{where}: {shape}", OnnxError)
    return shape


class Files:
    """The external-data files of a model, each mapped once.

    Raises:
        OnnxError: a location outside the model's folder, or that is no regular file.
    """

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder.resolve() if folder is not None else None
        self._mapped: dict[str, Array] = {}

    def read(self, tensor: onnx.TensorProto, shape: tuple[int, ...], dtype: str) -> Array:
        """Return the view of a tensor's bytes."""
        where = f"initializer {tensor.name!r}"
        entries = {entry.key: entry.value for entry in tensor.external_data}
        data = self._open(entries.get("location", ""), where)
        offset = _number(entries.get("offset", "0"), f"{where}: external data: offset")
        need = math.prod(shape) * np.dtype(dtype).itemsize
        length = _number(entries.get("length", str(need)), f"{where}: external data: length")
        if length != need:
            raise OnnxError(f"{where}: external data: length {length} found, {need} needed")
        if offset + length > data.size:
            raise OnnxError(
                f"{where}: external data: bytes {offset} to {offset + length} needed, the file has"
                f" {data.size}"
            )
        return view(data[offset : offset + length], shape, dtype)

    def _open(self, location: str, where: str) -> Array:
        if self._folder is None:
            raise OnnxError(f"{where}: external data found; give the model's path, not its bytes")
        known = self._mapped.get(location)
        if known is not None:
            return known
        found = f"{where}: external data: location {location!r} found"
        relative = Path(location)
        if not location or "\0" in location or relative.is_absolute() or ".." in relative.parts:
            raise OnnxError(f"{found}; a path inside the model's folder needed")
        path = (self._folder / relative).resolve()
        if not path.is_relative_to(self._folder) or not path.is_file():
            raise OnnxError(f"{found}; a file inside the model's folder needed")
        self._mapped[location] = mapped(path)
        return self._mapped[location]


def _number(text: str, where: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 19):
        raise OnnxError(f"{where}: {text!r} found, a number of bytes needed")
    return int(text)


def mapped(path: Path) -> Array:
    """Return a file's bytes, read-only and mapped."""
    if path.stat().st_size == 0:
        return np.empty(0, np.uint8)
    return np.asarray(np.memmap(path, np.uint8, "r"))


def view(data: Array, shape: tuple[int, ...], dtype: str) -> Array:
    """Return bytes as a read-only array, without a copy; it need not be aligned."""
    result = np.frombuffer(data.data, np.dtype(dtype).newbyteorder("<")).reshape(shape)
    result.flags.writeable = False
    return result


def array_of(tensor: onnx.TensorProto, files: Files | None = None) -> Array:
    """Return a tensor's contents as a read-only array.

    Raises:
        OnnxError: an unsupported type, or contents that do not fit the shape.
    """
    where = f"tensor {tensor.name!r}" if tensor.name else "a constant"
    dtype = dtype_of(tensor.data_type, where)
    shape = shape_of(tensor.dims, where, dtype)
    if tensor.HasField("segment"):
        raise UnsupportedError(f"{where}: segments are not supported")
    if dtype == TEXT:
        return _texts_of(tensor, shape, where)
    if tensor.data_location == _EXTERNAL:
        if files is None:
            raise UnsupportedError(f"{where}: external data is supported of initializers only")
        return files.read(tensor, shape, dtype)
    if tensor.HasField("raw_data"):
        data = np.frombuffer(tensor.raw_data, np.uint8)
        need = math.prod(shape) * np.dtype(dtype).itemsize
        if data.size != need:
            raise OnnxError(f"{where}: {data.size} bytes found, {need} needed of {dtype}{shape}")
        return view(data, shape, dtype)
    try:
        field, kept = _STORED.get(dtype, ("int32_data", "int32"))
        found = np.asarray(getattr(tensor, field), kept)
        result = (found.view if dtype == "float16" else found.astype)(dtype).reshape(shape)
    except (ValueError, TypeError, OverflowError) as error:
        raise OnnxError(f"{where}: its contents do not fit {dtype}{shape}: {error}") from None
    result.flags.writeable = False
    return result


def _texts_of(tensor: onnx.TensorProto, shape: tuple[int, ...], where: str) -> Array:
    found = np.empty(len(tensor.string_data), object)
    try:
        found[:] = [bytes(each).decode() for each in tensor.string_data]
        result = found.reshape(shape)
    except ValueError as error:
        raise OnnxError(f"{where}: its contents do not fit {TEXT}{shape}: {error}") from None
    result.flags.writeable = False
    return result


def as_tensor(array: Array, name: str = "") -> onnx.TensorProto:
    """Return an array as an ONNX tensor."""
    from onnx import numpy_helper

    return numpy_helper.from_array(np.ascontiguousarray(array).reshape(array.shape), name)


def frozen(array: Any, dtype: str | None = None) -> Array:
    """Return a read-only array that nothing else can write to."""
    made = np.asarray(array)
    result = np.array(made, object if is_text(made) or dtype == TEXT else dtype)
    result.flags.writeable = False
    return result


def merged(*maps: Mapping[str, Array]) -> dict[str, Array]:
    """Return all entries, of which the first of a name counts."""
    return {name: array for entries in reversed(maps) for name, array in entries.items()}
