"""ONNX's own backend tests: what passes stays passing, what fails is on record with its reason."""

from __future__ import annotations

import pytest
from programs.onnx_conformance import BOUND, KINDS, PASSES, PIECES, expected, failures, outcomes

LEAST = {"node": 1500, "pytorch-converted": 82, "pytorch-operator": 35, "simple": 15}


@pytest.mark.parametrize("kind", KINDS)
def test_outcomes_are_those_on_record_and_the_runtimes(kind: str) -> None:
    """What the references pass, the runtime and its kernels pass as well."""
    wrong: list[str] = []
    found = outcomes(kind, wrong)
    passing = sum(reason in (PASSES, BOUND, PIECES) for reason in found.values())
    assert passing >= LEAST[kind]
    assert failures(found) == expected()[kind]
    assert wrong == []
