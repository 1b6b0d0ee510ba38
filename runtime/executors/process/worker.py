"""What runs in a worker process: it maps segments, finds bodies, calls them, and answers.

Messages are a byte for the kind and eight for the length, then the content. The parent is the only
one who writes to the socket, so what is unpickled here is its own.
"""

from __future__ import annotations

import contextlib
import importlib
import mmap
import os
import pickle
import runpy
import signal
import socket
import struct
import sys
import threading
import traceback
from types import FunctionType
from typing import Any

import numpy as np

from soapstone.runtime.machines.shared import Place, view
from soapstone.runtime.model.task import Task

START, MAP, UNMAP, CALL, ANSWER = range(5)
_HEAD = struct.Struct("=bq")
_MAIN = "__soapstone_main__"
_memory: dict[int, mmap.mmap] = {}
_main: tuple[str, str] | None = None


# -- messages, of both sides


def send(connection: socket.socket, kind: int, content: bytes, descriptor: int = -1) -> None:
    """Send one message, with a file descriptor if there is one.

    Raises: OSError when the other side has ended.
    """
    head = _HEAD.pack(kind, len(content))
    sent = 0
    if descriptor >= 0:
        sent = socket.send_fds(connection, [head], [descriptor])
    connection.sendall(head[sent:] + content)


def receive(connection: socket.socket) -> tuple[int, bytes, int] | None:
    """The next message: kind, content, and a file descriptor or -1; None when there is no more.

    Raises: OSError.
    """
    head, descriptors, _, _ = socket.recv_fds(connection, _HEAD.size, 1)
    if not head:
        return None
    head += _rest(connection, _HEAD.size - len(head))
    kind, length = _HEAD.unpack(head)
    content = _rest(connection, length)
    return kind, content, descriptors[0] if descriptors else -1


def _rest(connection: socket.socket, length: int) -> bytes:
    parts = []
    while length:
        part = connection.recv(min(length, 1 << 20))
        if not part:
            raise ConnectionResetError("the other side ended within a message")
        parts.append(part)
        length -= len(part)
    return b"".join(parts)


# -- functions, by module and name


def main_module() -> tuple[str, str] | None:
    """How another process finds the main program: ("module", name) or ("file", path), or None."""
    main = sys.modules["__main__"]
    spec = getattr(main, "__spec__", None)
    if spec is not None and spec.name:
        return ("module", spec.name)
    path = getattr(main, "__file__", None)
    return ("file", os.path.abspath(path)) if path and os.path.exists(path) else None


def reference(function: FunctionType) -> tuple[str, str]:
    """The module and the name under which another process finds a function.

    Raises: PicklingError when it would find none, or another.
    """
    module, name = function.__module__, function.__qualname__
    if "<" in name:
        raise pickle.PicklingError(f"function {name!r} of module {module!r} is defined in another")
    if module == "__main__" and main_module() is None:
        raise pickle.PicklingError(f"function {name!r} was typed in, and is in no file")
    try:
        found = _look_up(sys.modules[module], name)
    except (KeyError, AttributeError):
        found = None
    if found is not function:
        raise pickle.PicklingError(f"module {module!r} has another {name!r} than this function")
    return module, name


def function_of(module: str, name: str) -> Any:
    """The function with a reference, here."""
    if module == "__main__":
        return _look_up(_main_here(), name)
    return _look_up(importlib.import_module(module), name)


def _look_up(module: Any, name: str) -> Any:
    found = module
    for part in name.split("."):
        found = getattr(found, part) if not isinstance(found, dict) else found[part]
    return found.body if isinstance(found, Task) else found


def _main_here() -> Any:
    """The main program of the parent, run here under another name."""
    if _main is None:
        raise ImportError("the main program is in no file")
    kind, where = _main
    if kind == "module":
        return importlib.import_module(where)
    if _MAIN not in _kept:
        _kept[_MAIN] = runpy.run_path(where, run_name=_MAIN)
    return _kept[_MAIN]


_kept: dict[str, Any] = {}


def view_of(place: Place) -> Any:
    """The array at a place, here."""
    return view(_memory[place.segment], place)


def nothing(shape: tuple[int, ...], dtype: Any, writeable: bool) -> Any:
    """An array without elements, which lies nowhere."""
    found = np.empty(shape, dtype)
    found.flags.writeable = writeable
    return found


# -- the process


def serve(connection: socket.socket) -> None:
    """Do what messages say until there are no more."""
    global _main
    while True:
        message = receive(connection)
        if message is None:
            return
        kind, content, descriptor = message
        if kind == START:
            _main = pickle.loads(content)
        elif kind == MAP:
            number, nbytes = struct.unpack("qq", content)
            _memory[number] = mmap.mmap(descriptor, nbytes)
            os.close(descriptor)
        elif kind == UNMAP:
            _memory.pop(struct.unpack("q", content)[0], None)
        else:
            send(connection, ANSWER, _call(content))


def _call(content: bytes) -> bytes:
    """Call a body; returns nothing, or the reason it failed and its traceback, pickled."""
    try:
        body, given = pickle.loads(content)
        body(*given)
    except BaseException as error:
        trace = "".join(traceback.format_exception(error))
        return pickle.dumps((f"{type(error).__name__}: {error}", trace))
    return b""


def _end_with(lifeline: int) -> None:
    """End this process when its parent has ended or wants it to, even within a body."""
    os.read(lifeline, 1)
    os._exit(0)


def main() -> None:
    """Serve the parent. Arguments: the descriptors of its socket and of its lifeline."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent says what an interrupt means
    connection = socket.socket(fileno=int(sys.argv[1]))
    threading.Thread(target=_end_with, args=(int(sys.argv[2]),), daemon=True).start()
    with contextlib.suppress(ConnectionError):
        serve(connection)
