"""ONNX tensors and types as NumPy arrays and specs, with every size checked before it is used."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from soapstone.dtypes import BITS, learn, name_of
from soapstone.frontend.onnx.errors import OnnxError, UnsupportedError
from soapstone.frontend.onnx.texts import TEXT, is_text
from soapstone.ir.tensor import Array
from soapstone.limits import check_bytes
from soapstone.native.files import MappedFile

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
    "bfloat16": 16,
    "float8_e4m3fn": 17,
    "float8_e4m3fnuz": 18,
    "float8_e5m2": 19,
    "float8_e5m2fnuz": 20,
    "float8_e8m0fnu": 24,
    "float4_e2m1fn": 23,
    "int4": 22,
    "uint4": 21,
    "int2": 26,
    "uint2": 25,
}
# The first opset that has a type, of those that came after the oldest that is written.
SINCE = {
    **dict.fromkeys(("int4", "uint4"), 21),
    "float4_e2m1fn": 23,
    "float8_e8m0fnu": 24,
    **dict.fromkeys(("int2", "uint2"), 25),
}
_EXTERNAL = 1  # of `TensorProto.DataLocation`
# Where elements are that are no raw data, and as what: int32_data where nothing else is said,
# of halves and narrower types as their bits.
_STORED = {
    "float32": ("float_data", "float32"),
    "float64": ("double_data", "float64"),
    "int64": ("int64_data", "int64"),
    "uint32": ("uint64_data", "uint64"),
    "uint64": ("uint64_data", "uint64"),
}
_DTYPE_OF = {code: name for name, code in ONNX_OF.items()}
_WORDS = {
    "float32": "float",
    "float64": "double",
    "float8_e8m0fnu": "float8e8m0",
    "float4_e2m1fn": "float4e2m1",
}
TYPE_STRINGS = {name: f"tensor({_WORDS.get(name, name.replace('_', ''))})" for name in ONNX_OF}


def dtype_of(code: int, where: str) -> str:
    """Return the element type of an ONNX type code.

    Raises:
        UnsupportedError: soapstone has no such type.
    """
    try:
        return learn(_DTYPE_OF[code])
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


def _packed_bytes(shape: tuple[int, ...], dtype: str) -> int:
    """Return how many bytes a file has of a tensor; it has several elements of few bits in one."""
    bits = BITS.get(dtype, 8 * np.dtype(dtype).itemsize)
    return -(-math.prod(shape) * bits // 8)


class Files:
    """The files of a model, its own and those of external data, each mapped once.

    Raises:
        OnnxError: a location outside the model's folder, or that is no regular file.
    """

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder.resolve() if folder is not None else None
        self._mapped: dict[str, Array] = {}
        self._files: list[MappedFile] = []

    def map(self, path: Path) -> Array:
        """Return a file's bytes, read-only and mapped."""
        if path.stat().st_size == 0:
            return np.empty(0, np.uint8)
        return self.add(MappedFile.of(path))

    def add(self, file: MappedFile) -> Array:
        """Return the bytes of a file that has been mapped, to be checked with the others."""
        self._files.append(file)
        return np.frombuffer(file, np.uint8)

    def check(self, *, running: bool = False) -> None:
        """Check that no file was written to since it was mapped; others may stand in its place.

        running: of those alone that kernels read in each run.

        Raises:
            OnnxError: one was.
        """
        for file in self._files:
            if file.read_in_runs or not running:
                file.check(OnnxError)

    @property
    def opened(self) -> bool:
        """Whether something has been read of one."""
        return bool(self._mapped)

    def read(self, tensor: onnx.TensorProto, shape: tuple[int, ...], dtype: str) -> Array:
        """Return the view of a tensor's bytes."""
        where = f"initializer {tensor.name!r}"
        entries = {entry.key: entry.value for entry in tensor.external_data}
        data = self._open(entries.get("location", ""), where)
        offset = _number(entries.get("offset", "0"), f"{where}: external data: offset")
        need = _packed_bytes(shape, dtype)
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
        if not path.exists():
            raise OnnxError(f"{where}: external data: no file {location!r} beside the model")
        if not path.is_relative_to(self._folder) or not path.is_file():
            raise OnnxError(f"{found}; a file inside the model's folder needed")
        self._mapped[location] = self.map(path)
        return self._mapped[location]


def _number(text: str, where: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 19):
        raise OnnxError(f"{where}: {text!r} found, a number of bytes needed")
    return int(text)


def view(data: Array, shape: tuple[int, ...], dtype: str) -> Array:
    """Return bytes as a read-only array, which need not be aligned.

    It is no copy, but of several elements a byte: those become one a byte.
    """
    bits = BITS.get(dtype, 8)
    if bits < 8:
        return _unpacked(data, shape, dtype, bits)
    result = data.view(np.dtype(dtype).newbyteorder("<")).reshape(shape)
    result.flags.writeable = False
    return result


def stored(array: Array) -> Array:
    """Return the bytes that a file has of an array; of few bits, several elements in one."""
    whole = np.ascontiguousarray(array, array.dtype.newbyteorder("<")).reshape(-1).view(np.uint8)
    bits = BITS.get(name_of(array.dtype), 8)
    if bits >= 8:
        return whole
    places = np.arange(0, 8, bits, dtype=np.uint8)
    parts = np.zeros((-(-whole.size * bits // 8), places.size), np.uint8)
    parts.reshape(-1)[: whole.size] = whole & np.uint8((1 << bits) - 1)
    return np.asarray(np.bitwise_or.reduce(parts << places, axis=1), np.uint8)


def _unpacked(data: Array, shape: tuple[int, ...], dtype: str, bits: int) -> Array:
    """Return the elements of bits that bytes hold, the first of each byte in its lowest bits."""
    places = np.arange(0, 8, bits, dtype=np.uint8)
    apart = (data[:, np.newaxis] >> places) & np.uint8((1 << bits) - 1)
    result = apart.reshape(-1)[: math.prod(shape)].view(dtype).reshape(shape)
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
        need = _packed_bytes(shape, dtype)
        if data.size != need:
            raise OnnxError(f"{where}: {data.size} bytes found, {need} needed of {dtype}{shape}")
        return view(data, shape, dtype)
    try:
        bits = dtype == "float16" or dtype in BITS
        known = f"uint{8 * np.dtype(dtype).itemsize}" if bits else "int32"
        field, kept = _STORED.get(dtype, ("int32_data", known))
        found = np.asarray(getattr(tensor, field), kept)
        if BITS.get(dtype, 8) < 8:
            return view(found, shape, dtype)
        result = (found.view if bits else found.astype)(dtype).reshape(shape)
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
    """Return a read-only array that nothing else can write to.

    Raises:
        OnnxError: numbers where the type is text, or text where it is not.
    """
    made = np.asarray(array)
    if dtype is not None and is_text(made) != (dtype == TEXT):
        raise OnnxError(f"{TEXT if is_text(made) else made.dtype} found, {dtype} needed")
    result = np.array(made, object if is_text(made) else dtype)
    result.flags.writeable = False
    return result
