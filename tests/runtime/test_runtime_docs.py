"""The examples of docs/runtime.md run, and print what they say."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "runtime.md"


def test_the_examples_print_what_they_say(capsys: pytest.CaptureFixture[str]) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), flags=re.S | re.M)
    assert blocks
    names: dict[str, Any] = {"__name__": "examples"}
    for block in blocks:
        exec(compile(block, str(PAGE), "exec"), names)
        printed = capsys.readouterr().out.splitlines()
        wanted = re.findall(r"^\s*print\(.*\)  # (.*)$", block, flags=re.M)
        assert [" ".join(line.split()) for line in printed] == [
            " ".join(line.split()) for line in wanted
        ]
