"""What a thread makes while others answer: one at a time, each taken over by who asks next."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

from soapstone.runtime.forks import wait_for

T = TypeVar("T")
Key = tuple[object, ...]
_REFUSED = 256  # keys that are remembered as such of which nothing was made


class Meanwhile(Generic[T]):
    """Things that are made so, by key. All but the making is done by one thread at a time."""

    def __init__(self) -> None:
        self._made: deque[tuple[Key, T]] = deque()
        self._refused: set[Key] = set()
        self._thread: threading.Thread | None = None
        self._closed = False
        wait_for(self)

    def begin(self, key: Key, make: Callable[[], T]) -> bool:
        """Let something be made, unless another thing is; return False where it was not to be made.

        key: under which it is taken. make: returns it; what it raises, who makes it himself sees.
        """
        if key in self._refused:
            return False
        if (self._thread is None or not self._thread.is_alive()) and not self._made:

            def work() -> None:
                try:
                    made = make()
                except Exception:
                    if len(self._refused) >= _REFUSED:
                        self._refused.clear()  # to be tried once more
                    self._refused.add(key)
                    return
                if not self._closed:
                    self._made.append((key, made))

            self._thread = threading.Thread(target=work, name="soapstone-meanwhile", daemon=True)
            self._thread.start()
        return True

    def take(self) -> tuple[Key, T] | None:
        """Return what was made, with its key, once; None where nothing is there."""
        return self._made.popleft() if self._made else None

    def wait(self) -> None:
        """Wait until nothing is being made."""
        if self._thread is not None:
            self._thread.join()

    def close(self) -> None:
        """Keep nothing that is made from now on."""
        self._closed = True
        self._made.clear()


__all__ = ["Meanwhile"]
