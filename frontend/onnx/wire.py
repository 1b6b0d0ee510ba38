"""The bytes of an ONNX file without its big tensors, and where those lie in the file.

A model is one Protocol Buffers message whose bulk is `raw_data` of initializers. This scanner walks
only the way there (ModelProto.graph, GraphProto.initializer, TensorProto.raw_data), so a file is
parsed without its weights, which become views of the mapped file.

Source: https://protobuf.dev/programming-guides/encoding/
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from soapstone.frontend.onnx.errors import OnnxError

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_GRAPH, _INITIALIZER, _RAW_DATA = 7, 5, 9  # field numbers of onnx.proto
SMALL = 1024  # raw data below this many bytes is left in the message
_MOST_FIELDS = 1000  # of a tensor; more are its elements, one by one, which have no place to view


@dataclass(frozen=True)
class Skeleton:
    """A model's message without big raw data, which `ranges` finds: initializer to (lo, hi)."""

    message: bytes
    ranges: dict[int, tuple[int, int]]


def skeleton(data: memoryview) -> Skeleton:
    """Return a model's message without the big raw data of its initializers.

    Raises:
        OnnxError: a field ends past its message; gives the place.
    """
    ranges: dict[int, tuple[int, int]] = {}
    count = 0
    parts: list[bytes] = []
    for field, kind, start, lo, hi in _fields(data, 0, len(data)):
        if field != _GRAPH or kind != _BYTES:
            parts.append(bytes(data[start:hi]))
            continue
        graph: list[bytes] = []
        for inner, inner_kind, begin, low, high in _fields(data, lo, hi):
            if inner != _INITIALIZER or inner_kind != _BYTES:
                graph.append(bytes(data[begin:high]))
                continue
            tensor, found = _tensor(data, low, high)
            if found is not None:
                ranges[count] = found
            graph.append(_message(_INITIALIZER, tensor))
            count += 1
        parts.append(_message(_GRAPH, b"".join(graph)))
    return Skeleton(b"".join(parts), ranges)


def _tensor(data: memoryview, lo: int, hi: int) -> tuple[bytes, tuple[int, int] | None]:
    if hi - lo < SMALL:
        return bytes(data[lo:hi]), None
    found = None
    parts = []
    for field, kind, start, low, high in _fields(data, lo, hi):
        if field == _RAW_DATA and kind == _BYTES and high - low >= SMALL:
            found = (low, high)
        else:
            if field == _RAW_DATA:
                found = None  # of a field that stands twice, the last counts
            parts.append(bytes(data[start:high]))
        if len(parts) > _MOST_FIELDS:
            return bytes(data[lo:hi]), None
    return b"".join(parts), found


def _fields(data: memoryview, lo: int, hi: int) -> Iterator[tuple[int, int, int, int, int]]:
    """Yield (field, wire type, start, start of the contents, end) of every field of a message."""
    at = lo
    while at < hi:
        start = at
        tag, at = _varint(data, at, hi)
        kind = tag & 7
        if kind == _BYTES:
            length, at = _varint(data, at, hi)
            end = at + length
        elif kind == _VARINT:
            _, end = _varint(data, at, hi)
        elif kind == _FIXED64:
            end = at + 8
        elif kind == _FIXED32:
            end = at + 4
        else:
            raise OnnxError(f"wire type {kind} found at byte {start}; it is no ONNX model")
        if end > hi:
            raise OnnxError(
                f"the field at byte {start} needs {end - at} bytes, {hi - at} found; the"
                " file is truncated or no ONNX model"
            )
        yield tag >> 3, kind, start, at, end
        at = end


def _varint(data: memoryview, at: int, hi: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        if at >= hi:
            raise OnnxError(f"truncated at byte {at}")
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
    raise OnnxError(f"no number at byte {at}; it is no ONNX model")


def _message(field: int, contents: bytes) -> bytes:
    return _encoded(field << 3 | _BYTES) + _encoded(len(contents)) + contents


def _encoded(value: int) -> bytes:
    parts = bytearray()
    while value > 0x7F:
        parts.append(value & 0x7F | 0x80)
        value >>= 7
    parts.append(value)
    return bytes(parts)
