"""npz files of samples: their headers are checked before any of their arrays is read."""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import numpy as np
from numpy.lib import format as npy

from soapstone.ir.tensor import Array

LABELS = "y"
Header = tuple[tuple[int, ...], np.dtype[np.generic]]


class DataError(ValueError):
    """Data that cannot be used; names the file or field, what was found and what was needed."""


def _header(stream: IO[bytes]) -> Header:
    version = npy.read_magic(stream)
    read = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
    shape, _, dtype = read(stream)
    return tuple(shape), dtype


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
        fields: dict[str, Header] = {}
        try:
            with zipfile.ZipFile(path) as archive:
                for member in archive.namelist():
                    name = member.removesuffix(".npy")
                    with archive.open(member) as stream:
                        try:
                            fields[name] = _header(stream)
                        except ValueError as error:
                            raise DataError(f"{label}: field {name!r}: {error}") from None
        except (zipfile.BadZipFile, zlib.error, EOFError, OSError) as error:
            raise DataError(f"{label}: {error}; an npz file needed") from None
        result = cls(path, fields)
        result._check(label)
        return result

    def _check(self, label: str) -> None:
        inputs = [name for name in self.fields if name != LABELS]
        if not inputs:
            have = ", ".join(self.fields) or "none"
            raise DataError(f"{label}: fields {have} found, an input such as 'x' needed")
        for name, (shape, dtype) in self.fields.items():
            if dtype.kind not in "biuf":
                raise DataError(
                    f"{label}: field {name!r}: element type {dtype} found, numbers needed"
                )
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
        try:
            with np.load(self.path, allow_pickle=False) as archive:
                return {name: archive[name] for name in self.fields}
        except (ValueError, OSError, EOFError, zipfile.BadZipFile, zlib.error) as error:
            raise DataError(f"file {str(self.path)!r}: {error}") from None
