"""Writes a snapshot (`snapshots.py`), and keeps it if it gives the answer that the session gave."""

from __future__ import annotations

import contextlib
import hashlib
import marshal
import os
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from soapstone.frontend.inference.snapshots import HASH, LENGTH, PAGE, answered, restored, sum_of
from soapstone.kernels.cpu.onednn import library as onednn
from soapstone.native import snapshot
from soapstone.native.memory import Array, spoil
from soapstone.system import allocate, private_copy, write_at

_ALL_BYTES = 2 << 30  # of all that are kept: those that were used last
_PARTS = 500  # pieces that are written by one call, of which Linux takes twice as many


def write(
    path: Path,
    header: dict[str, Any],
    pieces: snapshot.Pieces,
    lying: Array | None,
    given: Mapping[str, Array],
    answer: Mapping[str, Array],
    threads: int,
) -> None:
    """Write a snapshot, and keep it if it gives the answer that the session gave.

    pieces: its contents. It answers in the memory of the file's pages, of which it gets its own
    where it writes, and which therefore must not change.
    """
    partial = path.with_suffix(f".{os.getpid()}")
    with contextlib.suppress(OSError, onednn.OneDnnError, LookupError):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with open(partial, "w+b") as file:
                contents = _room(file, header)
                written = _beside(lambda: _write(file, pieces, header, contents))
                try:
                    made = restored(header, contents, lying, threads, written)
                finally:
                    written()
                _head(file, header)
            spoil(made.work)  # what was taken for work, but counts, is not zeros that are there
            found = answered(made, given, threads)
            if found is None or any(found[n].tobytes() != a.tobytes() for n, a in answer.items()):
                return
            snapshot.clear(header["data"]["moved"], contents)
            if sum_of(contents) == header["sum"]:
                os.replace(partial, path)
        finally:
            partial.unlink(missing_ok=True)
        _prune(path.parent)


def _room(file: BinaryIO, header: dict[str, Any]) -> Array:
    """Return memory for contents that is mapped from a new file; the header gets its place."""
    nbytes = snapshot.held_bytes(header["data"])
    header |= {"begin": 1 << 30, "sum": bytes(HASH)}
    begin = -(-(HASH + LENGTH + len(marshal.dumps(header))) // PAGE) * PAGE
    header["begin"] = begin
    allocate(file.fileno(), begin + nbytes)
    found: Array = np.frombuffer(private_copy(file.fileno()), np.uint8)[begin:]
    return found


def _write(
    file: BinaryIO, pieces: snapshot.Pieces, header: dict[str, Any], contents: Array
) -> None:
    """Write contents, in few calls: each waits for the interpreter's lock. The header gets their
    sum.

    Raises:
        OSError: there is no room.
    """
    parts: list[Any] = []
    at = past = 0
    for offset, each in pieces:
        if len(parts) >= _PARTS:
            write_at(file.fileno(), parts, header["begin"] + at)
            parts, at, past = [], offset, offset
        parts += [bytes(offset - past), each.data]
        past = offset + each.size
    write_at(file.fileno(), parts, header["begin"] + at)
    header["sum"] = sum_of(contents)


def _head(file: BinaryIO, header: dict[str, Any]) -> None:
    """Write what is before the contents, once all is known of them."""
    told = marshal.dumps(header)
    file.write(hashlib.sha256(told).digest() + len(told).to_bytes(LENGTH, "little") + told)


def _prune(place: Path) -> None:
    """Remove the snapshots used least recently if they take too many bytes."""
    total = 0
    for file in sorted(place.iterdir(), key=lambda f: -f.stat().st_mtime):
        total += file.stat().st_size
        if total > _ALL_BYTES:
            file.unlink(missing_ok=True)


def _beside(work: Callable[[], None]) -> Callable[[], None]:
    """Let a thread do something; return what waits for it, and raises what it raised."""
    raised: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run)

    def wait() -> None:
        thread.join()
        if raised:
            raise raised[0]

    try:
        thread.start()
    except RuntimeError:  # no more threads
        work()
        return lambda: None
    return wait


__all__ = ["write"]
