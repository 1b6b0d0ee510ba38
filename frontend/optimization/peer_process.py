"""Peers: long-lived processes that are asked in turns, so that what is measured runs as users do.

A peer prints a line of JSON when it is ready, and one for each line that it is sent.
"""

from __future__ import annotations

import json
import math
import queue
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import IO, Any

from soapstone.deadline import Deadline, TimeUpError

_CLOSING_S = 60.0


class PeerEndedError(RuntimeError):
    """A peer ended, or could not be started."""


class Peer:
    """A peer process, once it is ready.

    Args:
        command: what starts it.
        environment: variables beside those of this process.
        deadline: after which it is killed rather than waited for.
        apart: whether an interrupt from the terminal leaves it alone, and its errors unseen.

    Raises:
        PeerEndedError: it could not be started.
        TimeUpError: it was not ready by the deadline.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        deadline: Deadline | None = None,
        apart: bool = False,
    ) -> None:
        self._deadline = deadline or Deadline()
        self._deadline.check()
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        try:
            self._process = subprocess.Popen(
                list(command),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL if apart else None,
                text=True,
                start_new_session=apart,
            )
        except OSError as error:
            raise PeerEndedError(f"peer {command[0]!r} cannot be started: {error}") from None
        assert self._process.stdin is not None and self._process.stdout is not None
        self._input: IO[str] = self._process.stdin
        reading = threading.Thread(target=self._read, args=(self._process.stdout,), daemon=True)
        reading.start()
        try:
            self._answer()
        except BaseException:
            self.kill()
            raise

    def _read(self, lines: IO[str]) -> None:
        for line in lines:
            self._lines.put(line)
        self._lines.put("")

    def _answer(self) -> dict[str, Any]:
        left = self._deadline.left
        try:
            line = self._lines.get(timeout=None if math.isinf(left) else left)
        except queue.Empty:
            self.kill()
            raise TimeUpError("a peer did not answer in time") from None
        if not line:
            raise PeerEndedError(f"peer ended with {self._process.wait()}")
        result: dict[str, Any] = json.loads(line)
        return result

    def ask(self, line: str = "") -> dict[str, Any]:
        """Send a line and return the answer; without one a peer does a round.

        Raises:
            PeerEndedError: the peer ended. TimeUpError: it did not answer by the deadline.
        """
        try:
            self._input.write(f"{line}\n")
            self._input.flush()
        except OSError:
            raise PeerEndedError(f"peer ended with {self._process.wait()}") from None
        return self._answer()

    def close(self) -> None:
        """Let the peer end by itself."""
        self._input.close()
        self._process.wait(timeout=_CLOSING_S)

    def kill(self) -> None:
        """End the peer now."""
        self._process.kill()
        self._process.wait()


def serve(answer: Callable[[str], Mapping[str, Any]]) -> None:
    """Be a peer: answer each line on standard input."""
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        print(json.dumps(answer(line.rstrip("\n"))), flush=True)
