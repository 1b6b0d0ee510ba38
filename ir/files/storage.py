"""Checksums in files of the project's own, of what they hold (`soapstone.files` writes them).

A text ends with the checksum of all that is before it, so a changed character is refused; without
one (an older file, or one written by hand) it is taken as it is. Arrays have a checksum each.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO

import numpy as np

from soapstone.ir.tensor import Array

_SEAL = re.compile(r',\s*"checksum": "sha256:([0-9a-f]{64})"(\s*\}\s*)\Z')
_SAFE = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bool": "BOOL",
    **{f"int{bits}": f"I{bits}" for bits in (8, 16, 32, 64)},
    **{f"uint{bits}": f"U{bits}" for bits in (8, 16, 32, 64)},
}


def sealed(text: str) -> str:
    """Return the text of a JSON object with the checksum of all of it as its last field."""
    body = text.rstrip().removesuffix("}").rstrip()
    comma = "" if body == "{" else ","
    return f'{body}{comma}\n"checksum": "sha256:{_hash(body)}"\n}}\n'


def seal_of(text: str) -> bool | None:
    """Return whether a sealed text is what was written; None where it has no checksum."""
    found = _SEAL.search(text)
    if found is None:
        return False if '"checksum": "sha256:' in text[-200:] else None
    return _hash(text[: found.start()]) == found[1]


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def digest(array: Array) -> str:
    """Return the checksum of an array: of its type, shape and contents."""
    dense = np.asarray(array, order="C")
    hashed = hashlib.sha256(f"{dense.dtype.str}{dense.shape}".encode())
    hashed.update(dense.reshape(-1).view(np.uint8).data)
    return hashed.hexdigest()[:32]


def safetensors_writer(
    arrays: Mapping[str, Array], metadata: Mapping[str, str]
) -> Callable[[IO[bytes]], object]:
    """Return what writes arrays and texts to a stream as a safetensors file, array by array."""
    # Rank 0 stays rank 0, which np.ascontiguousarray would raise to rank 1.
    dense = {name: np.asarray(array, order="C") for name, array in arrays.items()}
    names = sorted(dense, key=lambda name: (-dense[name].itemsize, name))
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    offset = 0
    for name in names:
        array = dense[name]
        header[name] = {
            "dtype": _SAFE[array.dtype.name],
            "shape": list(array.shape),
            "data_offsets": [offset, offset + array.nbytes],
        }
        offset += array.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)

    def write_to(stream: IO[bytes]) -> None:
        stream.write(len(text).to_bytes(8, "little") + text)
        for name in names:
            little = dense[name].astype(dense[name].dtype.newbyteorder("<"), copy=False)
            stream.write(little.reshape(-1).view(np.uint8).data)

    return write_to


def read_safetensors(
    path: str | Path, where: str, error: type[ValueError]
) -> tuple[dict[str, str], dict[str, Array]]:
    """Return the texts and the arrays of a safetensors file.

    Raises:
        error: truncated, or no such file; `where` is what it calls it.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(str(path), framework="numpy") as file:
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            return dict(file.metadata() or {}), arrays
    except (SafetensorError, OSError, TypeError, AttributeError, ValueError) as fault:
        raise error(f"{where}: truncated or no safetensors file: {fault}") from None


__all__ = [
    "digest",
    "read_safetensors",
    "safetensors_writer",
    "seal_of",
    "sealed",
]
