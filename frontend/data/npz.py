"""npz files of samples: their headers are checked before any of their arrays is read."""

from __future__ import annotations

import math
import struct
import zipfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import numpy as np
from numpy.lib import format as npy

from soapstone.dtypes import kind_of
from soapstone.errors import DataError
from soapstone.ir.tensor import Array
from soapstone.limits import check_bytes

LABELS = "labels"  # what graphs call labels; those of one of several outputs are `labels.NAME`
WEIGHTS = "sample_weights"  # and weights of samples, likewise
Header = tuple[tuple[int, ...], np.dtype[np.generic]]


_MOST_MEMBERS = 1 << 13
_MOST_RATIO = 1100  # of deflate; a member that claims more bytes of its own lies
_FAULTS = (
    *(zipfile.BadZipFile, zlib.error, EOFError, OSError, ValueError, KeyError),
    *(NotImplementedError, RuntimeError, OverflowError, struct.error, UnicodeError),
)


def headers(
    path: Path, where: str, error: type[ValueError], texts: tuple[str, ...] | None = ()
) -> dict[str, Header]:
    """Return shape and element type of each array of an npz file, whose sizes are within bounds.

    Args:
        where: what errors call the file; texts: the arrays that may be strings; None: all.

    Raises:
        error: no npz file, an encrypted member or one of another compression, arrays of objects,
            or more bytes than the file can hold or `limits.most_bytes` allows.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            return _headers(archive, where, error, texts)
    except error:
        raise
    except _FAULTS as fault:
        raise error(f"{where}: {fault}; an npz file needed") from None


def _headers(
    archive: zipfile.ZipFile, where: str, error: type[ValueError], texts: tuple[str, ...] | None
) -> dict[str, Header]:
    found: dict[str, Header] = {}
    members = archive.infolist()
    if len(members) > _MOST_MEMBERS:
        raise error(f"{where}: {len(members)} members found, {_MOST_MEMBERS} at most")
    total = 0
    for member in members:
        name = member.filename.removesuffix(".npy")
        label = f"{where}: field {name!r}"
        if name in found:
            raise error(f"{label}: it appears twice; once needed")
        if member.flag_bits & 1:
            raise error(f"{label}: encrypted; plain members needed")
        if member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            raise error(f"{label}: compression {member.compress_type} found, stored or deflated")
        if member.file_size > _MOST_RATIO * member.compress_size + _MOST_RATIO:
            raise error(
                f"{label}: {member.file_size:,} bytes of {member.compress_size:,} compressed ones;"
                f" {_MOST_RATIO} times as many at most"
            )
        with archive.open(member) as stream:
            try:
                shape, dtype = _header(stream)
                start = stream.tell()
            except (ValueError, *_FAULTS) as fault:
                raise error(f"{label}: {fault}") from None
        text = kind_of(dtype) == "U" and (texts is None or name in texts)
        if kind_of(dtype) not in "biuf" and not text:
            raise error(f"{label}: element type {dtype} found, numbers needed (allow_pickle=False)")
        nbytes = math.prod(shape) * dtype.itemsize
        if nbytes != member.file_size - start:
            raise error(
                f"{label}: {dtype}{list(shape)} needs {nbytes:,} bytes;"
                f" {member.file_size - start:,} found"
            )
        total += nbytes
        found[name] = shape, dtype
    check_bytes(total, where, error)
    return found


def _header(stream: IO[bytes]) -> Header:
    version = npy.read_magic(stream)
    if version not in ((1, 0), (2, 0)):
        raise ValueError(f"npy version {version} found, (1, 0) or (2, 0) needed")
    read_header = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
    shape, _, dtype = read_header(stream)
    if any(extent < 0 for extent in shape):
        raise ValueError(f"shape {shape} found, extents of 0 or more needed")
    return tuple(shape), dtype


def read(
    path: Path, where: str, error: type[ValueError], texts: tuple[str, ...] | None = ()
) -> dict[str, Array]:
    """Return the arrays of an npz file, of which nothing is read before `headers` has seen it.

    Raises:
        error: as `headers`, or contents that are damaged.
    """
    names = headers(path, where, error, texts)
    try:
        with np.load(path, allow_pickle=False) as archive:
            return {name: archive[name] for name in names}
    except _FAULTS as fault:
        raise error(f"{where}: {fault}") from None


def label_of(field: str) -> str:
    """Return what a field of a file is called as labels or weights, or nothing for an input.

    `y` are labels and `y.NAME` those of an output; `sample_weights`, by output too, weights.
    """
    kind, dot, output = field.partition(".")
    if kind == "y":
        return f"{LABELS}{dot}{output}"
    return field if kind == WEIGHTS else ""


@dataclass(frozen=True)
class NpzFile:
    """An npz file and the shape and element type of each of its arrays."""

    path: Path
    fields: Mapping[str, Header]

    @classmethod
    def open(cls, path: Path) -> NpzFile:
        """Return the file after a look at its headers.

        Raises:
            DataError: not an npz file, no input, arrays of objects, or row counts that differ.
        """
        label = f"file {str(path)!r}"
        fields = headers(path, label, DataError)
        result = cls(path, fields)
        result._check(label)
        return result

    def _check(self, label: str) -> None:
        inputs = [name for name in self.fields if not label_of(name)]
        if not inputs:
            have = ", ".join(self.fields) or "none"
            raise DataError(f"{label}: fields {have} found, an input such as 'x' needed")
        for name, (shape, _) in self.fields.items():
            if not shape:
                raise DataError(
                    f"{label}: field {name!r}: a single number found, one row a sample needed"
                )
            rows = self.fields[inputs[0]][0][0]
            if shape[0] != rows:
                raise DataError(
                    f"{label}: field {name!r}: {shape[0]} rows found, {rows} needed as in"
                    f" {inputs[0]!r}"
                )

    @property
    def rows(self) -> int:
        """Samples in the file."""
        return next(iter(self.fields.values()))[0][0]

    def check_like(self, first: NpzFile) -> None:
        """Check that the file has the fields of another, with samples of the same shape and type.

        Raises:
            DataError: names the file, the field, what was found and what was needed.
        """
        label = f"file {str(self.path)!r}"
        as_in = f"as in {first.path.name!r}"
        for name in first.fields.keys() | self.fields.keys():
            if name not in self.fields:
                raise DataError(f"{label}: field {name!r} is missing; needed {as_in}")
            if name not in first.fields:
                raise DataError(f"{label}: field {name!r} found, but not {as_in}")
            (shape, dtype), (needed, kind) = self.fields[name], first.fields[name]
            if shape[1:] != needed[1:] or dtype != kind:
                raise DataError(
                    f"{label}: field {name!r}: samples of {dtype}{list(shape[1:])} found,"
                    f" {kind}{list(needed[1:])} needed {as_in}"
                )

    def read(self) -> dict[str, Array]:
        """Return the arrays.

        Raises:
            DataError: the contents do not match the headers.
        """
        return read(self.path, f"file {str(self.path)!r}", DataError)
