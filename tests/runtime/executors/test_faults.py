"""Faults: whatever goes wrong ends in one error that names the place, and nothing is corrupted."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.process_faults import killed
from helpers.runtime.faults import KINDS, inject


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("kind", KINDS)
def test_a_fault_ends_in_one_error_and_the_runtime_goes_on(kind: str, seed: int) -> None:
    inject(kind, seed)


@pytest.mark.parametrize("seed", range(3))
def test_a_killed_writer_leaves_a_checkpoint_to_go_on_from(seed: int, tmp_path: Path) -> None:
    killed(seed, tmp_path)
