"""A program for two GPUs that are not there, in which each call of the driver fails once.

    python -m programs.cuda_faults [FIRST [STEP]]     # with libcuda_dry.c as the driver

Whichever it is, the program has to end: with an error that names the call, or of a launch its task,
or with what it computes where none fails. Nothing may be left over, and the next run goes on where
it failed. Prints as JSON how many calls failed, how many of these were survived, by name, and what
is wrong.
"""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import json
import sys
import traceback
import warnings
from collections import Counter
from collections.abc import Sequence
from typing import Any
from unittest.mock import patch

import numpy as np
from numba import cuda
from programs.cuda_dry import _driver as driver, cleared
from programs.gpu_checks import machine

from soapstone.kernels.cuda.entry import DeviceEntry
from soapstone.native.cuda import timing
from soapstone.native.cuda.arrays import uploaded
from soapstone.native.cuda.copies import copied
from soapstone.native.cuda.device import Device, Lane
from soapstone.native.cuda.timing import Repeated
from soapstone.native.memory import Array
from soapstone.runtime import (
    Partition,
    PointContext,
    Read,
    ReadWrite,
    Reduce,
    Region,
    Runtime,
    Task,
    Write,
    task,
)
from soapstone.runtime.machines.machine import CUDA

HUNG_S = 200
VALUES = np.arange(24, dtype=np.float32).reshape(4, 6)


def bind(context: PointContext, arrays: Sequence[Array]) -> DeviceEntry | None:
    """Return the entry that copies, with a status that it never sets."""
    if context.processor.kind != CUDA:
        return None
    x, y = arrays
    return DeviceEntry((copied(y, x),), cuda.to_device(np.zeros(1, np.int32)))


@task
def larger(x: ReadWrite) -> None:
    x += 1


def lanes() -> Any:
    """Run operations of GPUs and of the host, untraced and in replays; return what they compute."""
    copy = Task("copy", (Read, Write), None, bind)
    add = Task("add", (Read, Reduce("sum")), None, bind)
    x, y = Region(VALUES.shape, np.float32, "x"), Region(VALUES.shape, np.float32, "y")
    total = Region((2, 6), np.float32, "total")
    rows = Partition.tiled(x, (2, 1)), Partition.tiled(y, (2, 1))

    def step() -> None:
        runtime.launch(copy, *rows)
        runtime.launch(add, rows[1], Partition.whole(total, (2, 1)), initialise=True)

    with Runtime(machine(2)) as runtime:
        runtime.write(x, VALUES.T.copy().T)
        runtime.launch(larger, Partition.tiled(x, (1, 2)))
        step()
        found = [runtime.read(total)]
        trace = runtime.capture(step)
        for replay in range(4):
            runtime.write(x, VALUES + replay)
            trace.replay(profile=replay == 3)
            found.append(runtime.read(total))
    return np.stack(found)


def timed() -> Any:
    """Time a copy, many times over in one graph."""
    device = Device(0)
    lane = Lane(device)
    with device:
        x, y = uploaded(VALUES), uploaded(VALUES)
        work = copied(y, x)
    with patch.object(timing, "MOST", 3):
        assert Repeated(lane, [work]).us() >= 0
    return VALUES


def causes(error: BaseException | None) -> str:
    """Return what an error says, and what it was caused by."""
    said = []
    while error is not None:
        said.append(f"{type(error).__name__}: {error}")
        error = error.__cause__ or error.__context__
    return "\n".join(said)


def outcome(program: Any, wanted: Any, nth: int) -> tuple[bool, str | None]:
    """Run a program whose nth call fails; return whether it computes what is wanted, and errors.

    nth: 0 where none fails.
    """
    said, error, survived = len(driver.dry_said()), None, False
    faulthandler.dump_traceback_later(HUNG_S, exit=True)
    before = cleared()
    driver.dry_fail(nth)
    try:
        survived = np.array_equal(program(), wanted)
        error = None if survived else "computed something else"
    except Exception as raised:
        name = driver.dry_failed().decode().partition("_v2")[0]
        text = causes(raised)
        if not name or not (name in text or (name == "cuLaunchKernel" and "task '" in text)):
            error = f"{name} is not named: {traceback.format_exc()}"
        raised = None  # whose frames hold what it had
    driver.dry_stop()
    after = cleared()
    left = {name: after[name] - before[name] for name in after if after[name] > before[name]}
    faulthandler.cancel_dump_traceback_later()
    if error is None and left:
        error = f"not given back: {left}"
    return survived, error or driver.dry_said().decode()[said:] or None


def main(first: int = 1, step: int = 1) -> None:
    """Fail every step-th call from the first on, of each program, and print what became of it."""
    warnings.simplefilter("ignore")
    driver.dry_failed.restype = ctypes.c_char_p
    wrong: list[Any] = []
    failed, survived = 0, Counter[str]()
    for program in (lanes, timed):
        wanted = program()
        program()  # what is made once in a process is there
        gc.freeze()
        nth = first
        while True:
            right, error = outcome(program, wanted, nth)
            name = driver.dry_failed().decode()
            if not name:
                break  # the program has no more, and has run once more
            failed += 1
            survived[name] += right
            if error:
                print(program.__name__, nth, name, error, file=sys.stderr, flush=True)
                wrong.append([program.__name__, nth, name, error])
            nth += step
    print(json.dumps({"failed": failed, "survived": +survived, "wrong": wrong}))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
