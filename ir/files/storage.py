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

from soapstone.dtypes import BITS, code_of, learn
from soapstone.ir.tensor import Array

_SEAL = re.compile(r',\s*"checksum": "sha256:([0-9a-f]{64})"(\s*\}\s*)\Z')
_SAFE = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "float8_e8m0fnu": "F8_E8M0",
    "bool": "BOOL",
    **{f"int{bits}": f"I{bits}" for bits in (8, 16, 32, 64)},
    **{f"uint{bits}": f"U{bits}" for bits in (8, 16, 32, 64)},
}


_NARROW = {code: name for name, code in _SAFE.items() if name in BITS}


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
    hashed = hashlib.sha256(f"{code_of(dense.dtype)}{dense.shape}".encode())
    hashed.update(dense.reshape(-1).view(np.uint8).data)
    return hashed.hexdigest()[:32]


def holds(dtype: str) -> bool:
    """Return whether safetensors has an element type."""
    return dtype in _SAFE


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
            arrays = {
                name: _narrow(Path(path), name)
                if file.get_slice(name).get_dtype() in _NARROW
                else file.get_tensor(name)
                for name in file.keys()  # noqa: SIM118
            }
            return dict(file.metadata() or {}), arrays
    except (SafetensorError, OSError, TypeError, AttributeError, ValueError) as fault:
        raise error(f"{where}: truncated or no safetensors file: {fault}") from None


def _narrow(path: Path, name: str) -> Array:
    """Return an array of a type that NumPy lacks from a safetensors file known to be sound."""
    with path.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        field = json.loads(stream.read(length))[name]
        start, end = field["data_offsets"]
        stream.seek(start, 1)
        found = np.frombuffer(stream.read(end - start), learn(_NARROW[field["dtype"]]))
        return found.reshape(field["shape"]).copy()
