"""The model behind a snapshot, which a thread opens once the snapshot has answered some times.

A snapshot answers inputs of one shape. Whoever asks for another one waits until the model is read,
what binds it is imported, and its graph is bound: most of a second. A process that asks for one
shape again and again lives on, and may ask for others, unless the model declares none.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING

from soapstone.ir.errors import GraphError
from soapstone.ir.tensor import Array
from soapstone.locks import wait_for

if TYPE_CHECKING:
    from soapstone.frontend.inference.serial_session import SerialSession


class Opening:
    """A model that is opened when it is called, or before by a thread.

    opened: opens the model, and returns what serves its runs.
    """

    def __init__(self, opened: Callable[[], tuple[SerialSession, ...]]) -> None:
        self._opened = opened
        self._made: tuple[SerialSession, ...] | None = None
        self._told = threading.Event()  # once it is made, or is not to be
        self._thread: threading.Thread | None = None
        self._stopped = False

    def __call__(self) -> tuple[SerialSession, ...]:
        """Return what serves the runs of the model."""
        if self._thread is not None:
            self._told.wait()
        made, self._made = self._made, None
        return made or self._opened()

    def begin(self, given: Mapping[str, Array], apart: bool, then: Callable[[], object]) -> None:
        """Let a thread open the model, unless one does.

        given: inputs whose graph is bound. apart: whether its rows are known to be apart. then:
        called once it is bound.
        """
        if self._thread is not None:
            return

        def work() -> None:
            try:
                made = self._made = self._opened()
                first = made[0]
                with first.lock, suppress(GraphError):
                    if not self._stopped:
                        first.bounds.of(given)
                        if apart and (rows := first.bounds.rows) is not None:
                            rows.note_apart(given)
                        first.bounds.answered()
            except Exception:  # whoever asks for it meets the error
                return
            finally:
                self._told.set()
            with suppress(Exception):  # it was closed meanwhile
                then()

        self._thread = threading.Thread(target=work, name="soapstone-opening", daemon=True)
        wait_for(self)
        with suppress(RuntimeError):  # no more threads, or the interpreter ends
            self._thread.start()
            return
        self._told.set()

    def wait(self) -> None:
        """Wait until the thread is done."""
        thread = self._thread
        if thread is not None and thread.ident and thread is not threading.current_thread():
            thread.join()

    def close(self) -> None:
        """Close what was opened, if nobody has it."""
        self._stopped = True
        self.wait()
        made, self._made = self._made, None
        for each in made or ():
            each.close()


__all__ = ["Opening"]
