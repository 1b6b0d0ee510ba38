"""Tables of text."""

from __future__ import annotations

from collections.abc import Sequence


def lines_of(
    rows: Sequence[Sequence[str]], texts: int | None = None, rule: bool = False
) -> list[str]:
    """Return the rows of a table as lines of equally wide columns.

    Args:
        rows: of cells, the heading first.
        texts: how many columns, the first ones, are aligned left; the others are aligned right. By
            default all.
        rule: whether there is a line below the heading.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    left = len(widths) if texts is None else texts
    lines = [
        "  ".join(
            cell.ljust(width) if column < left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths))
        ).rstrip()
        for row in rows
    ]
    if rule:
        lines.insert(1, "  ".join("-" * width for width in widths))
    return lines
