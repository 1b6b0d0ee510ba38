"""Locks of a whole process are free in a forked child."""

from __future__ import annotations

import ast
import os
import re
import threading
from pathlib import Path
from types import FunctionType

import pytest

from soapstone.locks import Lock
from soapstone.native import pages


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("lock", [Lock(), pages._LOCK])
def test_a_child_finds_a_lock_free_that_a_thread_held(lock: Lock) -> None:
    held, done = threading.Event(), threading.Event()

    def hold() -> None:
        with lock:
            held.set()
            done.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()
    child = os.fork()
    if child == 0:
        free = lock.acquire(timeout=5)
        os._exit(0 if free and pages.piece(1 << 16).nbytes == 1 << 16 else 1)
    assert not lock.acquire(timeout=0.01)
    done.set()
    thread.join()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    with lock:
        assert lock.acquire(), "it is reentrant"
        lock.release()


def test_no_interrupt_comes_between_taking_a_lock_and_holding_it() -> None:
    """Python looks for interrupts where its functions begin, so these are none."""
    for way in (Lock.acquire, Lock.release, Lock.__enter__, Lock.__exit__):
        assert not isinstance(way, FunctionType)


def test_modules_have_no_other_locks() -> None:
    """One that is made of `threading` stays held in a child for good."""
    found = []
    for package in Path(__file__).resolve().parents[2].glob("*/__init__.py"):
        for file in package.parent.rglob("*.py"):
            text = file.read_text()
            if not re.search(r"threading\.R?Lock", text):
                continue
            for node in ast.parse(text).body:
                value = node.value if isinstance(node, ast.Assign | ast.AnnAssign) else None
                if isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute):
                    named = ast.unparse(value.func)
                    if named in ("threading.Lock", "threading.RLock"):
                        found.append(f"{file}:{node.lineno}")
    assert not found
