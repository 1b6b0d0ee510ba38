"""Objects that a background thread makes while others answer, one at a time."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

from soapstone.locks import wait_for

T = TypeVar("T")
Key = tuple[object, ...]
_REFUSED = 256  # keys that are remembered because making their object failed


class Background(Generic[T]):
    """A background thread that makes objects, and those that wait to be taken, each by its key.

    The methods may be called by one thread at a time.
    """

    def __init__(self) -> None:
        self._made: deque[tuple[Key, T]] = deque()
        self._refused: set[Key] = set()
        self._thread: threading.Thread | None = None
        self._closed = False
        wait_for(self)

    def begin(self, key: Key, make: Callable[[], T]) -> bool:
        """Begin to make an object, unless one is being made or waits to be taken.

        Args:
            key: under which `take` returns it.
            make: returns the object. An exception of it is dropped and the key is refused from
                then on, so the caller meets the error when it makes the object itself.

        Returns:
            False if the key is refused.
        """
        if key in self._refused:
            return False
        if (self._thread is None or not self._thread.is_alive()) and not self._made:

            def work() -> None:
                try:
                    made = make()
                except Exception:
                    if len(self._refused) >= _REFUSED:
                        self._refused.clear()  # each may be tried once more
                    self._refused.add(key)
                    return
                if not self._closed:
                    self._made.append((key, made))

            self._thread = threading.Thread(target=work, name="soapstone-background", daemon=True)
            self._thread.start()
        return True

    def take(self) -> tuple[Key, T] | None:
        """Return an object that was made, with its key, and forget it; None if there is none."""
        return self._made.popleft() if self._made else None

    def wait(self) -> None:
        """Wait until the thread is done."""
        if self._thread is not None:
            self._thread.join()

    def close(self) -> None:
        """Drop what was made, and what is being made."""
        self._closed = True
        self._made.clear()


__all__ = ["Background"]
