"""The steps of a program as a table that compiled code runs, in the machine and after products."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from soapstone.kernels.cpu.elementwise.lane_loops import FRAME, instruction
from soapstone.kernels.cpu.elementwise.programs import Program
from soapstone.native.blocks import Fields
from soapstone.native.entries import helper
from soapstone.native.intrinsics import call_entry

# A step of a program: its instruction and the numbers of its places.
_STEP = Fields("instruction to a b c", reals="p q")
_frame_of, _step_of = FRAME.at, _STEP.at
_STEP_BYTES = 8 * _STEP.words


def step_rows(program: Program, place: Callable[[int], int]) -> list[tuple[Any, ...]]:
    """Return a program's steps as part of a block; place: the number of a place in `run_steps`."""
    return [
        _STEP.row(
            instruction=instruction(step.name).address,
            to=place(step.to),
            a=place(step.a),
            b=place(step.b),
            c=place(step.c),
            p=step.p,
            q=step.q,
        )
        for step in program.steps
    ]


@helper
def run_steps(steps: int, count: int, frame: int, places: Any, turns: Any, n: int) -> None:
    """Run steps on n floats of places, whose addresses and turns are given; frame: room for one."""
    f = _frame_of(frame)
    f.n = n
    for k in range(count):
        s = _step_of(steps + k * _STEP_BYTES)
        f.to = places[s.to]
        f.a, f.turn_a = places[s.a], turns[s.a]
        f.b, f.turn_b = places[s.b], turns[s.b]
        f.c, f.turn_c = places[s.c], turns[s.c]
        f.p, f.q = s.p, s.q
        call_entry(s.instruction, frame)
