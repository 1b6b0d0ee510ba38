"""Files of compiled code: each holds its hash before it, and is written whole or not at all."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from soapstone.cache.deferred import Late

_places = Late("soapstone.cache.places")
DEVICE_SUFFIX = ".cubin"  # of code for GPUs
_MARK = 32  # bytes before the code: its hash


def read(path: Path) -> bytes | None:
    """Return what a file holds, or None where there is none that is whole, and say why."""
    try:
        held = path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        _places.say(f"{error}; functions are compiled anew")
        return None
    mark, code = held[:_MARK], held[_MARK:]
    if mark != hashlib.sha256(code).digest():
        _places.say(f"{path.name}: cut short, or changed; functions are compiled anew")
        return None
    return code


def marked(code: bytes) -> bytes:
    """Return code as a file holds it."""
    return hashlib.sha256(code).digest() + code


def write(path: Path, code: bytes) -> None:
    """Write a file whole or not at all; where it cannot be, say so."""
    partial = path.with_suffix(f".{os.getpid()}")
    try:
        partial.write_bytes(marked(code))
        os.replace(partial, path)
    except OSError as error:
        _places.say(f"{error}; compiled code is not kept")
        partial.unlink(missing_ok=True)
