"""Benchmarks are run by hand, so what they import of soapstone is looked for here."""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1] / "benchmarks"
FILES = sorted(FOLDER.rglob("*.py"))


@pytest.mark.parametrize("path", FILES, ids=[path.stem for path in FILES])
def test_what_a_benchmark_imports_is_there(path: Path) -> None:
    """Imports inside of functions too."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("soapstone"):
            module = importlib.import_module(str(node.module))
            for name in node.names:
                if not hasattr(module, name.name):
                    importlib.import_module(f"{node.module}.{name.name}")


def test_the_readme_says_what_was_measured_last() -> None:
    """`python benchmarks/summary.py` writes it."""
    found = importlib.util.spec_from_file_location("summary", FOLDER / "summary.py")
    assert found is not None and found.loader is not None
    summary = importlib.util.module_from_spec(found)
    found.loader.exec_module(summary)
    text = summary.README.read_text()
    assert summary.written(text) == text
