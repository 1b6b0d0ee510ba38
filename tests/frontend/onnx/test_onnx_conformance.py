"""ONNX's own backend tests: what passes stays passing, what fails is on record with its reason."""

from __future__ import annotations

import pytest
from programs.onnx_conformance import (
    BOUND,
    KINDS,
    PASSES,
    cases,
    expected,
    failures,
    outcome,
    outcomes,
)

LEAST = {"node": 1500, "pytorch-converted": 82, "pytorch-operator": 35, "simple": 15}


@pytest.mark.parametrize("kind", KINDS)
def test_outcomes_are_those_on_record(kind: str) -> None:
    found = outcomes(kind)
    passing = sum(reason in (PASSES, BOUND) for reason in found.values())
    assert passing >= LEAST[kind]
    assert failures(found) == expected()[kind]


@pytest.mark.parametrize("kind", KINDS)
def test_the_runtime_gives_the_same_numbers(kind: str) -> None:
    """What the references pass, the runtime and its kernels pass as well."""
    record, wrong = expected()[kind], []
    for case in cases(kind):
        if record.get(case.name, PASSES) in (PASSES, BOUND):
            try:
                passes = outcome(case, runtime=True) in (PASSES, BOUND)
            except (ValueError, RuntimeError):  # the runtime's own errors
                passes = False
            if not passes:
                wrong.append(case.name)
    assert wrong == []
