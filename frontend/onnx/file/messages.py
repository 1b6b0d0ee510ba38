"""An ONNX file's messages, read without ONNX: its package takes longer to import than most to read.

A message has the fields of `onnx.proto` by their names, and `HasField`, `WhichOneof` and `CopyFrom`
as messages of Protocol Buffers have, so that code which reads a model takes either. Big raw data
are views of the file.

Source: https://protobuf.dev/programming-guides/encoding/, and onnx/onnx.proto of ONNX
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np

from soapstone.frontend.onnx.errors import OnnxError

if TYPE_CHECKING:
    import onnx

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
SMALL = 1024  # raw data below this many bytes is copied out of the file
_MOST_DEPTH = 100  # of messages in one another, as Protocol Buffers have it
_SHARED = 64  # bytes at most of an attribute or a type that is read once for all that are the same

# number name:kind, * for a list; a kind that is no scalar is a message's. Other fields are skipped.
_MESSAGES = {
    "Model": "1 ir_version:int64 2 producer_name:text 4 domain:text 5 model_version:int64"
    " 6 doc_string:text 7 graph:Graph 8 opset_import:OperatorSetId* 14 metadata_props:Entry*"
    " 25 functions:Function*",
    "Graph": "1 node:Node* 2 name:text 5 initializer:Tensor* 10 doc_string:text 11 input:ValueInfo*"
    " 12 output:ValueInfo* 13 value_info:ValueInfo* 15 sparse_initializer:SparseTensor*",
    "Node": "1 input:text* 2 output:text* 3 name:text 4 op_type:text 5 attribute:Attribute*"
    " 6 doc_string:text 7 domain:text",
    "Attribute": "1 name:text 2 f:float 3 i:int64 4 s:bytes 5 t:Tensor 6 g:Graph 7 floats:float*"
    " 8 ints:int64* 9 strings:bytes* 10 tensors:Tensor* 11 graphs:Graph* 13 doc_string:text"
    " 14 tp:Type 15 type_protos:Type* 20 type:int32 21 ref_attr_name:text"
    " 22 sparse_tensor:SparseTensor 23 sparse_tensors:SparseTensor*",
    "Tensor": "1 dims:int64* 2 data_type:int32 3 segment:Segment 4 float_data:float*"
    " 5 int32_data:int32* 6 string_data:bytes* 7 int64_data:int64* 8 name:text 9 raw_data:view"
    " 10 double_data:double* 11 uint64_data:uint64* 13 external_data:Entry* 14 data_location:int32",
    "SparseTensor": "1 values:Tensor 2 indices:Tensor 3 dims:int64*",
    "Segment": "1 begin:int64 2 end:int64",
    "ValueInfo": "1 name:text 2 type:Type",
    "Type": "1 tensor_type:TensorType 4 sequence_type:Sequence 5 map_type:Map"
    " 8 sparse_tensor_type:TensorType 9 optional_type:Sequence 6 denotation:text",
    "TensorType": "1 elem_type:int32 2 shape:TensorShape",
    "Sequence": "1 elem_type:Type",
    "Map": "1 key_type:int32 2 value_type:Type",
    "TensorShape": "1 dim:Dimension*",
    "Dimension": "1 dim_value:int64 2 dim_param:text",
    "OperatorSetId": "1 domain:text 2 version:int64",
    "Entry": "1 key:text 2 value:text",
    "Function": "1 name:text 4 input:text* 5 output:text* 6 attribute:text* 7 node:Node*"
    " 9 opset_import:OperatorSetId* 10 domain:text 11 attribute_proto:Attribute*",
}
_ONE_OF = {  # of which the last one in a message counts
    "Type": ("tensor_type", "sequence_type", "map_type", "sparse_tensor_type", "optional_type"),
    "Dimension": ("dim_value", "dim_param"),
}
_WIRE = {
    "float": _FIXED32,
    "double": _FIXED64,
    "int64": _VARINT,
    "int32": _VARINT,
    "uint64": _VARINT,
}
_EMPTY: dict[str, Any] = {"text": "", "bytes": b"", "view": b"", "float": 0.0, "double": 0.0}
# The field of an attribute that holds what its type says.
_HOLDS = (None, "f", "i", "s", "t", "g", "floats", "ints", "strings", "tensors", "graphs")
TENSOR = _HOLDS.index("t")
_MORE = {11: "sparse_tensor", 12: "sparse_tensors", 13: "tp", 14: "type_protos"}


class Field(NamedTuple):
    """A field of a message: `wire` is how one of it is encoded, `kind` its message where it is."""

    name: str
    kind: Any
    many: bool
    wire: int


class Message:
    """A message; a field that the file leaves out has Protocol Buffers' default."""

    fields: ClassVar[dict[int, Field]]
    alternatives: ClassVar[tuple[str, ...]]

    def HasField(self, name: str) -> bool:
        """Return whether the file gives a field that is no list."""
        return name in self.__dict__

    def WhichOneof(self, group: str) -> str | None:
        """Return which of a group of fields the file gives; there is one group a message."""
        return next((name for name in self.alternatives if name in self.__dict__), None)

    def CopyFrom(self, other: Message) -> None:
        """Become the same as another message of this kind; lists are copied, their items not."""
        self.__dict__ = {
            name: list(value) if isinstance(value, list) else value
            for name, value in other.__dict__.items()
        }


def _declared() -> dict[str, Any]:
    made: dict[str, Any] = {name: type(f"{name}Proto", (Message,), {}) for name in _MESSAGES}
    for name, text in _MESSAGES.items():
        words = text.split()
        made[name].fields, made[name].alternatives = {}, _ONE_OF.get(name, ())
        for number, field in zip(words[::2], words[1::2]):
            label, _, kind = field.partition(":")
            many, kind = kind.endswith("*"), kind.rstrip("*")
            found = made.get(kind, kind)
            made[name].fields[int(number)] = Field(label, found, many, _WIRE.get(kind, _BYTES))
            one = found() if kind in made else _EMPTY.get(kind, 0)
            setattr(made[name], label, () if many else one)
    return made


_KINDS = _declared()
_ALIKE = (_KINDS["Attribute"], _KINDS["Type"])


def model_of(data: memoryview) -> Any:
    """Return the model that the bytes of a file are, as `onnx.ModelProto` has it.

    Raises:
        OnnxError: they are no such message; gives the place.
    """
    return _read(_KINDS["Model"](), data, 0, len(data), 0, {})


def function_in(data: bytes) -> Any:
    """Return the function that is encoded in some bytes, as `onnx.FunctionProto` has it."""
    return _read(_KINDS["Function"](), memoryview(data), 0, len(data), 0, {})


def attribute_value(attribute: Any) -> Any:
    """Return what an attribute holds, of this module's messages or ONNX's.

    Raises:
        ValueError: it says no type, or stands for another attribute.
    """
    kind = int(attribute.type)
    name = _HOLDS[kind] if 0 <= kind < len(_HOLDS) else _MORE.get(kind)
    if name is None or attribute.ref_attr_name:
        raise ValueError(f"attribute {attribute.name!r} of type {kind}")
    found = getattr(attribute, name)
    return list(found) if name.endswith("s") and len(name) > 1 else found


def as_onnx(message: Any, made: onnx.Message) -> Any:
    """Return `made`, an empty message of ONNX, filled with what a message of either kind holds."""
    if not isinstance(message, Message):
        made.CopyFrom(message)
        return made
    for name, value in message.__dict__.items():
        if isinstance(value, Message):
            getattr(made, name).SetInParent()
            as_onnx(value, getattr(made, name))
        elif not isinstance(value, list | np.ndarray):
            setattr(made, name, bytes(value) if isinstance(value, memoryview) else value)
        elif len(value) and isinstance(value[0], Message):
            for each in value:
                as_onnx(each, getattr(made, name).add())
        else:
            getattr(made, name).extend(value if isinstance(value, list) else value.tolist())
    return made


# Decoding


def _read(
    message: Any,
    data: memoryview,
    at: int,
    end: int,
    depth: int,
    shared: dict[tuple[Any, bytes], Any],
) -> Any:
    """Fill a message with the fields that bytes encode.

    shared: attributes and types that were read, which nobody changes: most nodes have those of
    another.
    """
    if depth > _MOST_DEPTH:
        raise OnnxError(f"messages more than {_MOST_DEPTH} deep found at byte {at}")
    fields, values, alternatives = message.fields, message.__dict__, message.alternatives
    while at < end:
        start = at
        tag = data[at]
        if tag < 0x80:
            at += 1
        else:
            tag, at = _varint(data, at, end)
        wire, number = tag & 7, 0
        if wire == _BYTES:
            if at < end and data[at] < 0x80:
                size = data[at]
                at += 1
            else:
                size, at = _varint(data, at, end)
            stop = at + size
        elif wire == _VARINT:
            if at < end and data[at] < 0x80:
                number, stop = data[at], at + 1
            else:
                number, stop = _varint(data, at, end)
        elif wire in (_FIXED64, _FIXED32):
            stop = at + (8 if wire == _FIXED64 else 4)
        else:
            raise OnnxError(f"wire type {wire} found at byte {start}; it is no ONNX model")
        if stop > end:
            raise OnnxError(
                f"the field at byte {start} needs {stop - at} bytes, {end - at} found; the"
                " file is truncated or no ONNX model"
            )
        if tag < 8:
            raise OnnxError(f"field 0 found at byte {start}; it is no ONNX model")
        field = fields.get(tag >> 3)
        if field is not None:
            name, kind, many, needed = field
            if wire == _BYTES == needed:
                if isinstance(kind, str):
                    value = _text(kind, data, at, stop)
                else:
                    old = None if many else values.get(name)
                    key = kind, b""
                    if kind in _ALIKE and stop - at <= _SHARED and old is None:
                        key = kind, bytes(data[at:stop])
                    value = shared.get(key)
                    if value is None:
                        value = kind()
                        if old is not None:  # what stands twice is merged
                            value.CopyFrom(old)
                        _read(value, data, at, stop, depth + 1, shared)
                        if key[1]:
                            shared[key] = value
                if many:
                    values.setdefault(name, []).append(value)
                else:
                    for other in alternatives:
                        values.pop(other, None)
                    values[name] = value
            elif wire == needed:
                small = wire == _VARINT and number < 0x80
                value = number if small else _number(kind, number, data, at)
                if many:
                    more, stop = _run(kind, wire, tag, data, stop, end)
                    values[name] = [*values.get(name, ()), value, *more]
                else:
                    for other in alternatives:
                        values.pop(other, None)
                    values[name] = value
            elif wire == _BYTES and many:
                packed = _packed(kind, data, at, stop)
                whole = packed if message.fields is _KINDS["Tensor"].fields else packed.tolist()
                values[name] = [*values[name], *whole] if name in values else whole
        at = stop
    return message


def _text(kind: str, data: memoryview, at: int, stop: int) -> Any:
    """Return text (what is no UTF-8 as bytes, like Protocol Buffers), bytes, or a view of many."""
    found = data[at:stop]
    if kind == "text":
        try:
            return str(found, "utf-8")
        except UnicodeDecodeError:
            return bytes(found)
    return found if kind == "view" and stop - at >= SMALL else bytes(found)


def _number(kind: str, number: int, data: memoryview, at: int) -> Any:
    if kind == "float":
        return struct.unpack_from("<f", data, at)[0]
    if kind == "double":
        return struct.unpack_from("<d", data, at)[0]
    if kind == "uint64":
        return number & 0xFFFF_FFFF_FFFF_FFFF
    bits = 32 if kind == "int32" else 64
    number &= (1 << bits) - 1
    return number - (1 << bits) if number >> (bits - 1) else number


def _packed(kind: str, data: memoryview, at: int, stop: int) -> Any:
    """Return the numbers of a packed list."""
    if kind in ("float", "double"):
        size = 4 if kind == "float" else 8
        if (stop - at) % size:
            raise OnnxError(f"{stop - at} bytes of numbers found at byte {at}, {size} a number")
        return np.frombuffer(data[at:stop], f"<f{size}")
    raw = np.frombuffer(data[at:stop], np.uint8)
    if raw.size and raw[-1] >= 0x80:
        raise OnnxError(f"truncated at byte {stop}")
    return _varints(kind, raw, at)


def _run(
    kind: str, wire: int, tag: int, data: memoryview, at: int, end: int
) -> tuple[list[Any], int]:
    """Return more numbers of a list that is not packed, each after the tag, and where they end."""
    found: list[Any] = []
    if wire == _VARINT:  # most lists are a few numbers of one byte
        while at + 1 < end and data[at] == tag < 0x80 > data[at + 1] and len(found) < 8:
            found.append(data[at + 1])
            at += 2
    if at == end:
        return found, at
    size, window = {_FIXED32: 5, _FIXED64: 9}.get(wire, 0), 256
    while at < end and data[at] == tag < 0x80:
        raw = np.frombuffer(data[at : min(at + window, end)], np.uint8)
        if size:
            rows = raw[: raw.size // size * size].reshape(-1, size)
            places = np.arange(len(rows)) * size
            stops = places + size - 1
        else:  # a tag is a number of one byte
            ends = np.flatnonzero(raw < 0x80)
            ends = ends[: ends.size // 2 * 2]
            places, stops = ends[::2], ends[1::2]
        fits = (raw[places] == tag) & (places == np.concatenate(([0], stops[:-1] + 1)))
        count = len(fits) if fits.all() else int(fits.argmin())
        if not count:  # of numbers longer than the window: not as the format has it
            return found, at
        last = int(stops[count - 1]) + 1
        bare = np.delete(raw[:last], places[:count])
        found += (bare.view(f"<f{size - 1}") if size else _varints(kind, bare, at)).tolist()
        at, window = at + last, 4 * window
        if count < len(fits):
            break
    return found, at


def _varints(kind: str, raw: Any, at: int) -> Any:
    """Return the numbers that bytes encode, all of them. at: their place, for errors."""
    if not raw.size:
        return np.empty(0, np.int64)
    ends = np.flatnonzero(raw < 0x80)
    starts = np.concatenate(([0], ends[:-1] + 1))
    counts = ends - starts + 1
    if counts.max() > 10:
        raise OnnxError(f"no number in the list at byte {at}; it is no ONNX model")
    shifts = 7 * (np.arange(raw.size) - np.repeat(starts, counts))
    parts = (raw & 0x7F).astype(np.uint64) << shifts.astype(np.uint64)
    whole = np.add.reduceat(parts, starts)
    return whole if kind == "uint64" else whole.astype(np.int32 if kind == "int32" else np.int64)


def _varint(data: memoryview, at: int, end: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        if at >= end:
            raise OnnxError(f"truncated at byte {at}")
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
    raise OnnxError(f"no number at byte {at}; it is no ONNX model")
