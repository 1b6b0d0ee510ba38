"""Kernels that are compiled ahead: all that there are, for a processor that is known."""

from __future__ import annotations

import pytest

from soapstone.engine.ahead import kernels, ship


def test_kernels_of_modules_that_are_imported_late_are_compiled_ahead_too() -> None:
    names = {f"{each.function.__module__}.{each.function.__name__}" for each in kernels()}
    assert {
        "soapstone.kernels.cpu.onednn.steps.primitive",
        "soapstone.runtime.tracing.program._run",
        "soapstone.kernels.cpu.elementwise.lane_loops.instruction_relu",
        "soapstone.kernels.cpu.recurrent.gates.gates_lstm",
        "soapstone.kernels.cpu.recurrent.gates.gates_lstm_within",
    } <= names


def test_an_unknown_level_is_refused() -> None:
    with pytest.raises(ValueError, match="level: 'x86-64-v9' found; one of x86-64-v4"):
        ship("x86-64-v9")
