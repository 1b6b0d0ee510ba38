"""The walks of DESIGN.md go through files and names that there are."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
WALKS = re.search(r"\n## Three walks\n(.*?)\n## ", (ROOT / "DESIGN.md").read_text("utf-8"), re.S)
STEPS = re.findall(r"^\| `(.+?\.py)` \| (.+?) \|", WALKS[1] if WALKS else "", re.M)


def defined(tree: ast.AST) -> set[str]:
    """Return the names of all functions, classes and constants of a file."""
    return {
        node.id if isinstance(node, ast.Name) else node.name
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.ClassDef)
        or (isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store))
    }


def test_every_step_is_there() -> None:
    wrong = []
    for file, names in STEPS:
        known = defined(ast.parse((ROOT / file).read_text("utf-8")))
        wrong += [(file, name) for name in re.findall(r"`(\w+)`", names) if name not in known]
    assert wrong == []


def test_there_are_three_walks() -> None:
    assert WALKS is not None and WALKS[1].count("| file | who |") == 3 and len(STEPS) > 40
