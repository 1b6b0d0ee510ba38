"""Threads that run what a session is asked for by `run_async`, in order of the calls.

Those of `concurrent.futures` keep a process until all that was asked is done, even if Ctrl-C ends
it. These complete what was asked when a process ends by itself, and cancel what has not begun when
an exception ends it.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any

from soapstone.frontend.inference.exit_hooks import at_exit
from soapstone.frontend.inference.futures import Answer

_Task = tuple["Future[Any]", Callable[..., Any], tuple[Any, ...]]


class ThreadPool:
    """A number of threads that run functions in order; they end when nobody has this any more.

    Args:
        threads: how many. name: begins their names.
    """

    def __init__(self, threads: int, name: str) -> None:
        self._asked: SimpleQueue[_Task | None] = SimpleQueue()
        self._threads = tuple(
            threading.Thread(target=_run, args=(self._asked,), name=f"{name} {at}", daemon=True)
            for at in range(threads)
        )
        for thread in self._threads:
            thread.start()
        weakref.finalize(self, _stop, self._asked, threads).atexit = False
        at_exit(self, ThreadPool.close)

    def submit(self, function: Callable[..., Any], *given: Any) -> Future[Any]:
        """Return the future of a call."""
        future = Answer[Any]()
        self._asked.put((future, function, given))
        return future

    def close(self, cancel: bool = False) -> None:
        """End the threads, after what was asked. cancel: but not what has not begun."""
        while cancel and not self._asked.empty():
            asked = self._asked.get()
            if asked is not None and asked[0].cancel():
                asked[0].set_running_or_notify_cancel()  # tells who waits for several
        _stop(self._asked, len(self._threads))
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join()


def _run(asked: SimpleQueue[_Task | None]) -> None:
    while (item := asked.get()) is not None:
        future, function, given = item
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(function(*given))
            except BaseException as error:  # whatever it is, who asked gets it
                future.set_exception(error)
        del item, future, function, given  # nothing of it is kept while the thread waits


def _stop(asked: SimpleQueue[_Task | None], threads: int) -> None:
    for _ in range(threads):
        asked.put(None)
