"""Futures of runs, whose callbacks cannot end the thread that answers."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any, TypeVar

T = TypeVar("T")


class Answer(Future[T]):
    """The future of a run.

    A callback that raises SystemExit in a thread of a session is reported as one that raises any
    other error: the thread goes on, and calls those that come after it.
    """

    def add_done_callback(self, fn: Callable[[Future[T]], object]) -> None:
        """Call a function once the run is done or cancelled; see `Future.add_done_callback`."""
        super().add_done_callback(partial(_called, fn))


def _called(function: Callable[[Future[Any]], object], future: Future[Any]) -> None:
    try:
        function(future)
    except Exception:
        raise
    except BaseException as error:
        if threading.current_thread() is threading.main_thread():
            raise  # whoever asks there to end may
        raise RuntimeError(f"a callback raised {type(error).__name__}") from error


__all__ = ["Answer"]
