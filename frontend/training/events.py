"""Event files of TensorBoard: numbers by name and step, in records with checksums.

Source: TensorFlow: event.proto, summary.proto, and the records of core/lib/io/record_writer.
"""

from __future__ import annotations

import os
import struct
import time
from collections.abc import Mapping
from pathlib import Path

_POLYNOMIAL = 0x82F63B78  # of CRC-32C, reflected


def _table() -> tuple[int, ...]:
    rows = []
    for row in range(256):
        for _ in range(8):
            row = row >> 1 ^ (_POLYNOMIAL if row & 1 else 0)
        rows.append(row)
    return tuple(rows)


_TABLE = _table()


def crc32c(data: bytes) -> int:
    """Return the CRC-32C (Castagnoli) of data."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = _TABLE[(crc ^ byte) & 0xFF] ^ crc >> 8
    return crc ^ 0xFFFFFFFF


def _masked(data: bytes) -> bytes:
    crc = crc32c(data)
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)


def _varint(value: int) -> bytes:
    parts = bytearray()
    while value > 0x7F:
        parts.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes((*parts, value))


def _field(number: int, data: bytes) -> bytes:
    return _varint(number << 3 | 2) + _varint(len(data)) + data


class Events:
    """A file of events in a folder, which is made where it is not there.

    Raises:
        OSError: it cannot be written.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        name = f"events.out.tfevents.{time.time_ns() // 1000:016d}.{os.getpid()}.soapstone"
        self.path = folder / name
        self._append(0, _field(3, b"brain.Event:2"))

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Write numbers of a step, by name."""
        parts = b""
        for name, value in values.items():
            tag = _field(1, name.encode())
            parts += _field(1, tag + b"\x15" + struct.pack("<f", value))
        self._append(step, _field(5, parts))

    def _append(self, step: int, data: bytes) -> None:
        event = b"\x09" + struct.pack("<d", time.time()) + b"\x10" + _varint(step) + data
        length = struct.pack("<Q", len(event))
        with self.path.open("ab") as stream:
            stream.write(length + _masked(length) + event + _masked(event))
