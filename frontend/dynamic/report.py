"""What a dynamic session did: a table of its cells, and where its time went."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class CellReport:
    """What was recorded and run of one cell.

    Attributes:
        name: the cell's name; of a layer outside of cells, its operator.
        operators: how many operators one call has.
        calls: how often it was called.
        runs: how many forward runs computed these calls.
        graphs: how many graphs were bound for it: forward, backward and for sums of gradients.
    """

    name: str
    operators: int
    calls: int
    runs: int
    graphs: int


@dataclass(frozen=True)
class Report:
    """What a session has recorded and run since it began.

    Attributes:
        reuse: the session's `reuse`.
        updates: how many training steps it has done.
        cells: a report for each cell, in the order of their first calls.
        seconds: the time that each stage took.
    """

    reuse: str
    updates: int
    cells: tuple[CellReport, ...]
    seconds: Mapping[str, float]

    def as_dict(self) -> dict[str, Any]:
        """Return the fields as JSON can say them."""
        return asdict(self)

    def __str__(self) -> str:
        lines = [f"{self.updates} steps, reuse {self.reuse}"]
        lines.append(f"{'cell':20} operators     calls      runs  calls a run  graphs")
        for cell in self.cells:
            mean = cell.calls / max(cell.runs, 1)
            lines.append(
                f"{cell.name:20} {cell.operators:9} {cell.calls:9} {cell.runs:9} {mean:12.1f}"
                f" {cell.graphs:7}"
            )
        steps = max(self.updates, 1)
        lines += [
            f"{stage + ':':12} {seconds:9.2f} s  {1000 * seconds / steps:8.2f} ms a step"
            for stage, seconds in self.seconds.items()
        ]
        return "\n".join(lines)
