"""Kernels that a graph may need, compiled by other processes while this one binds it.

A process without machine code compiles a kernel when it binds it, one after another. So once the
first one is missing, others compile what the variants of the graph's operators are made of, those
of the commonest first. What one of them is compiling this process waits for; what none has begun it
compiles itself. Whatever is still being compiled when the graph is bound is given up.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections import Counter
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from types import CodeType, FunctionType
from typing import IO, TYPE_CHECKING

from soapstone.cache import objects
from soapstone.native.entries import Native
from soapstone.system import unpin, usable_cores

if TYPE_CHECKING:
    import subprocess

_PACKAGE = __name__.partition(".")[0] + "."
_FEW = 6  # kernels that are not worth the start of a process


def command(*arguments: str) -> list[str]:
    """Return the command of a process that compiles kernels (`engine.ahead_of_time`).

    It imports nothing from the folder that it begins in, where others may have the same names.
    """
    return [sys.executable, "-P", "-m", "soapstone.engine.ahead_of_time", *arguments]


def _used(kernel: object) -> dict[Native, bool]:
    """Return the compiled kernels that a function names, or one of the package that it calls.

    And whether they are in a table, of which a call takes one.
    """
    found: dict[Native, bool] = {}
    waiting, seen = [(kernel, False)], set[int]()
    while waiting:
        each, one_of = waiting.pop()
        if id(each) in seen:
            continue
        seen.add(id(each))
        more: list[object] = []
        if isinstance(each, Native):
            found[each] = one_of
        elif isinstance(each, partial):
            more += (each.func, *each.args, *each.keywords.values())
        elif isinstance(each, tuple | list | dict):
            more += each.values() if isinstance(each, dict) else each
            one_of = True
        elif isinstance(each, staticmethod | classmethod):
            more.append(each.__func__)
        elif isinstance(each, type) and each.__module__.startswith(_PACKAGE):
            more += vars(each).values()
        elif isinstance(each, FunctionType) and each.__globals__["__name__"].startswith(_PACKAGE):
            more += (cell.cell_contents for cell in each.__closure__ or ())
            more += (each.__globals__.get(name) for name in _names(each.__code__))
        waiting += ((other, one_of) for other in more)
    return found


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for each in code.co_consts:
        if isinstance(each, CodeType):
            yield from _names(each)


class ParallelCompilation:
    """As long as the block runs, others compile kernels of operators if one is missing.

    operators: the name of each node's.
    """

    def __init__(self, operators: Iterable[str]) -> None:
        self._operators = [operator for operator, _ in Counter(operators).most_common()]
        self._lock = threading.Lock()
        self._asked: set[str] = set()  # by this process
        self._waiting: list[str] = []  # what is likeliest needed last, which is taken first
        self._running: dict[str, threading.Event] = {}
        self._processes: list[subprocess.Popen[str]] = []
        self._began = self._closed = False

    def __enter__(self) -> ParallelCompilation:
        if self._operators and usable_cores() > 1:
            objects.SHARED.append(self.asked)
        return self

    def __exit__(self, *error: object) -> None:
        with contextlib.suppress(ValueError):
            objects.SHARED.remove(self.asked)
        with self._lock:
            self._closed = True
            for process in self._processes:
                process.kill()
        for process in self._processes:
            process.wait()

    def asked(self, name: str) -> None:
        """Wait for a kernel that another process is compiling, or let no other one compile it.

        name: of the kernel (`Native.name`).
        """
        with self._lock:
            self._asked.add(name)
            if name in self._waiting:
                self._waiting.remove(name)
            running = self._running.get(name)
            if not self._began:
                self._began = True
                threading.Thread(target=self._begin, daemon=True).start()
        if running is not None:
            running.wait()

    def _begin(self) -> None:
        """Start processes if there is enough for them to do."""
        unpin()  # who asked may be kept on a core, and so would be what is begun here
        # A program that Python is embedded in starts none by its own name.
        if not Path(sys.executable or "").name.startswith("python"):
            return
        found = [name for name in self._kernels() if name not in self._asked]
        with self._lock:
            self._waiting = [name for name in reversed(found) if name not in self._asked]
            for _ in range(min(usable_cores() - 1, len(self._waiting) // _FEW)):
                if not self._closed:
                    with contextlib.suppress(OSError):
                        self._start()

    def _kernels(self) -> list[str]:
        """Return kernels of variants of the operators that no process has compiled yet."""
        from soapstone.kernels.registry import variants

        found: dict[str, bool] = {}
        for operator in self._operators:
            for variant in variants(operator):
                for each, one_of in _used(variant.kernel).items():
                    if not each.kept:
                        found.setdefault(each.name, one_of)
        return sorted(found, key=found.__getitem__)

    def _start(self) -> None:
        import subprocess  # only where something is compiled

        process = subprocess.Popen(
            command("named"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
        )
        self._processes.append(process)
        threading.Thread(target=self._serve, args=(process,), daemon=True).start()

    def _serve(self, process: subprocess.Popen[str]) -> None:
        """Give a process one kernel after another."""
        assert process.stdin is not None and process.stdout is not None
        with contextlib.suppress(OSError), process.stdin as asked, process.stdout as answers:
            self._give(asked, answers)

    def _give(self, asked: IO[str], answers: IO[str]) -> None:
        while True:
            with self._lock:
                if self._closed or not self._waiting:
                    return
                name = self._waiting.pop()
                ready = self._running[name] = threading.Event()
            try:
                print(name, file=asked, flush=True)
                ended = not answers.readline()
            except OSError:
                ended = True
            with self._lock:
                del self._running[name]
            ready.set()
            if ended:
                return


__all__ = ["ParallelCompilation", "command"]
