"""Files of the project's own: written whole or not at all, and with checksums of what they hold.

A text ends with the checksum of all that is before it, so a changed character is refused; without
one (an older file, or one written by hand) it is taken as it is. Arrays have a checksum each.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import secrets
from collections.abc import Callable, Iterator, Mapping
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


def write(path: str | Path, data: bytes | Callable[[IO[bytes]], object]) -> None:
    """Write a file whole or not at all: an interrupted write leaves the old contents.

    Args:
        data: the contents, or a function that writes them to a stream.

    Raises:
        OSError: names `path`, whatever could not be done.
    """
    target = Path(path)
    partial = target.with_name(f".{target.name}.{os.getpid()}.{secrets.token_hex(4)}.partial")
    with naming(target):
        try:
            with partial.open("xb") as stream:
                if callable(data):
                    data(stream)
                else:
                    stream.write(data)
                stream.flush()
                os.fsync(stream.fileno())
            os.replace(partial, target)
        except BaseException:
            with contextlib.suppress(OSError):
                partial.unlink(missing_ok=True)
            raise
        _sync(target.parent)


def check_targets(*paths: str | Path | None) -> None:
    """Refuse files that cannot be written, before the work whose results they are for; None passes.

    Raises:
        OSError: a path is a folder, its own folder is not there or may not be written; names both.
    """
    for path in paths:
        if path is None:
            continue
        folder, label = Path(path).parent, f"file {str(path)!r}"
        if Path(path).is_dir():
            raise IsADirectoryError(f"{label}: a folder found, a file needed")
        if not folder.is_dir():
            raise FileNotFoundError(f"{label}: folder {str(folder)!r} does not exist")
        if not os.access(folder, os.W_OK):
            raise PermissionError(f"{label}: folder {str(folder)!r} may not be written")


@contextlib.contextmanager
def naming(path: str | Path) -> Iterator[None]:
    """Let errors of the system name a user's file, whichever was in the making for it."""
    try:
        yield
    except OSError as error:
        if error.errno is None:
            raise
        raise OSError(error.errno, os.strerror(error.errno), str(path)) from None


def _sync(folder: Path) -> None:
    """Make the renaming itself durable, where the system allows folders to be opened."""
    try:
        handle = os.open(folder, os.O_RDONLY)
    except OSError:
        return
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


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
    "naming",
    "read_safetensors",
    "safetensors_writer",
    "seal_of",
    "sealed",
    "write",
]
