"""When Python's collector of cycles looks, and that nothing is lost where it does not."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

_SPARED = """
import atexit, gc
atexit.register(lambda: print(gc.get_freeze_count() > 0))  # runs after those that come later
from soapstone import GraphError
class Holder:
    def __init__(self, file):
        self.file, self.self = file, self
"""
_WRITES = 'holder = Holder(open("text", "w")); holder.file.write("all of it")'
_TELLS = 'Holder.__del__ = lambda self: print("told"); holder = Holder(None)'
_PAUSES = """
import gc, weakref
from soapstone.garbage_collection import paused
class Cycle:
    def __init__(self):
        self.self = self
with paused():
    made = Cycle()
    print(gc.isenabled())
print(gc.isenabled(), gc.get_freeze_count())
print(any(each is made for each in gc.get_objects(generation=2)))
seen = weakref.ref(made)
del made
gc.collect()
print(seen())
"""

_FROZEN = """
import gc
from soapstone import garbage_collection
gc.freeze()
counts, count = [], gc.get_freeze_count
gc.get_freeze_count = lambda: counts.append(count()) or counts[-1]
for _ in range(3):
    with garbage_collection.paused():
        pass
print(len(counts), count() > 0)
"""
_FORKS = """
import gc, os, threading
from soapstone.garbage_collection import paused
inside, end = threading.Event(), threading.Event()
def work():
    with paused():
        inside.set()
        end.wait()
thread = threading.Thread(target=work)
thread.start()
inside.wait()
child = os.fork()
if not child:
    os._exit(0 if gc.isenabled() else 1)
print(os.waitpid(child, 0)[1], gc.isenabled())
end.set()
thread.join()
print(gc.isenabled())
"""
_DETACHED = """
import io, sys
sys.stdout = io.TextIOWrapper(sys.stdout.detach(), encoding="utf-8")
import soapstone.garbage_collection
print("written")
"""
_MAKES_TUPLES = """
import gc, sys, threading
from soapstone import garbage_collection
sys.setswitchinterval(1e-6)
ended, failed = threading.Event(), []
def work():
    try:
        while not ended.is_set():
            tuple(each for each in range(30))
    except SystemError as error:
        failed.append(error)
threads = [threading.Thread(target=work) for _ in range(2)]
for each in threads:
    each.start()
for _ in range(100):
    garbage_collection._leave()
    gc.unfreeze()
ended.set()
for each in threads:
    each.join()
print(failed)
"""


def _printed(program: str, folder: Path) -> str:
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60)
    assert not done.stderr
    return done.stdout


@pytest.mark.parametrize(
    "more, printed, written",
    [("", "True\n", ""), (_WRITES, "False\n", "all of it"), (_TELLS, "False\ntold\n", "")],
)
def test_a_process_ends_without_collections_where_nothing_is_to_be_told(
    more: str, printed: str, written: str, tmp_path: Path
) -> None:
    file = tmp_path / "text"
    file.touch()
    assert (_printed(_SPARED + more, tmp_path), file.read_text()) == (printed, written)


def test_what_is_made_while_collections_pause_is_old_and_still_collected(tmp_path: Path) -> None:
    assert _printed(_PAUSES, tmp_path).split() == ["False", "True", "0", "True", "None"]


def test_what_others_froze_stays_so_and_is_counted_once(tmp_path: Path) -> None:
    assert _printed(_FROZEN, tmp_path).split() == ["1", "True"]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the system has no fork")
def test_a_child_process_collects_whatever_threads_of_its_parent_do(tmp_path: Path) -> None:
    assert _printed(_FORKS, tmp_path).split() == ["0", "False", "True"]


def test_a_process_whose_output_was_replaced_ends_in_silence(tmp_path: Path) -> None:
    assert _printed(_DETACHED, tmp_path) == "written\n"


def test_a_process_that_ends_lets_other_threads_make_their_tuples(tmp_path: Path) -> None:
    assert _printed(_MAKES_TUPLES, tmp_path) == "[]\n"
