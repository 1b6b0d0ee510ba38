"""A file's bytes, mapped: they are others, or gone, once somebody writes to that file.

Whoever reads a page that a file no longer has is ended by the system (SIGBUS), so what is read asks
before whether the file is what it was.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import threading
from pathlib import Path

from soapstone.system import drop_pages

_PIECE = 1 << 22  # bytes that are hashed at once


class MappedFile(mmap.mmap):
    """The bytes of a file that is not empty, to be read where they lie.

    path: where the file was opened. state: which it is, and what changes when it is written to.
    read_in_runs: whether kernels read it in each run, and not only when they are bound.
    """

    path: str
    state: tuple[int, ...]
    read_in_runs = False

    @staticmethod
    def of(path: str | Path) -> MappedFile:
        """Return the bytes of a file.

        Raises:
            OSError: it cannot be read.
            ValueError: it is empty.
        """
        with open(path, "rb") as file:
            made = MappedFile(file.fileno(), 0, access=mmap.ACCESS_READ)
            made.path, made.state = os.path.abspath(path), file_state(os.fstat(file.fileno()))
        return made

    def digest(self, threads: int) -> str:
        """Return a hash of the bytes: that of the hashes of pieces, which threads find at once."""
        pieces = range(0, len(self), _PIECE)
        found = [b""] * len(pieces)

        def work(first: int) -> None:
            for number in range(first, len(pieces), threads):
                place = pieces[number]
                with memoryview(self)[place : place + _PIECE] as piece:
                    found[number] = hashlib.sha256(piece).digest()
                    nbytes = len(piece)
                drop_pages(self, place, nbytes)

        others = []
        for number in range(1, min(threads, len(pieces))):
            other = threading.Thread(target=work, args=(number,))
            try:
                other.start()
            except RuntimeError:  # no more threads
                work(number)
            else:
                others.append(other)
        work(0)
        for other in others:
            other.join()
        return hashlib.sha256(b"".join(found)).hexdigest()

    def check(self, error: type[ValueError]) -> None:
        """Raise the error if the file was written to; another may stand in its place."""
        try:
            now = file_state(os.stat(self.path))
        except OSError:
            return  # it is gone from there, and stays where it is mapped
        if now != self.state and now[:2] == self.state[:2]:
            raise error(
                f"file {self.path!r}: it was written to after it was opened, and weights are read"
                " from it; a new session needed"
            )


def file_state(found: os.stat_result) -> tuple[int, ...]:
    """Return which file it is, and what changes when it is written to; the time of it is last."""
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns
