"""Interrupts at every point at which Python raises one: in turn, and so without chance."""

from __future__ import annotations

import dis
import sys
import threading
from collections.abc import Callable
from itertools import pairwise
from types import CodeType, FrameType
from typing import Any

_LOOKS = ("CALL", "JUMP_BACKWARD")  # after these, and where functions begin, Python looks for one
_AFTER: dict[CodeType, set[int]] = {}


class Interrupt(KeyboardInterrupt):
    """The interrupt, which is no other one."""


def _after(code: CodeType) -> set[int]:
    """Return where code goes on after it has looked for an interrupt.

    What is raised there is handled as what is raised where it looks; other places are left out.
    """
    if code not in _AFTER:
        handlers = dis.Bytecode(code).exception_entries  # type: ignore[attr-defined]

        def handler(offset: int) -> int:
            return next((h.target for h in handlers if h.start <= offset < h.end), -1)

        steps = list(dis.get_instructions(code))
        _AFTER[code] = {
            later.offset
            for before, later in pairwise(steps)
            if before.opname.startswith(_LOOKS) and handler(before.offset) == handler(later.offset)
        }
    return _AFTER[code]


def answers(ask: Callable[[], object], within_s: float = 60.0) -> bool:
    """Return whether another thread is answered: nothing that it needs is held for good."""
    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(within_s)
    return not thread.is_alive()


def interrupted(run: Callable[[], object], point: int, within: str = "soapstone") -> bool:
    """Call a function and interrupt it at a point; return whether it came as far.

    point: the number of the point, among those in modules of a package.
    """
    left = point

    def at_point() -> None:
        nonlocal left
        left -= 1
        if left < 0:
            sys.settrace(None)
            raise Interrupt

    def look(frame: FrameType, event: str, _: Any) -> Any:
        if event == "opcode" and frame.f_lasti in _after(frame.f_code):
            at_point()
        return look

    def begin(frame: FrameType, event: str, _: Any) -> Any:
        if not str(frame.f_globals.get("__name__", "")).startswith(within):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        at_point()
        return look

    sys.settrace(begin)
    try:
        run()
    except Interrupt:
        return True
    finally:
        sys.settrace(None)
    return left < 0  # it may have been taken for an error, and dealt with
