"""Tests interrupt processes; one that a shell runs in the background would ignore that."""

from __future__ import annotations

import signal


def pytest_configure() -> None:
    """Let interrupts through to what tests start, however the tests were started themselves."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
