"""A tiny script that commands train."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.commands import TINY


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.py"
    path.write_text(TINY)
    return path
