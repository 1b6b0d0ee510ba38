"""The blocks of pages that are read from top to bottom run so, as one program."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

DOCS = Path(__file__).resolve().parents[2] / "docs"


@pytest.mark.parametrize("page", ["training.md", "layers.md", "data.md", "sequences.md"])
def test_every_block_runs(page: str, tmp_path: Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", (DOCS / page).read_text("utf-8"), re.S)
    assert len(blocks) >= 2
    program = tmp_path / "page.py"
    program.write_text("\n".join(blocks), "utf-8")
    command = [sys.executable, program]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
