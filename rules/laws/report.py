"""What validation and checks of consistency find of the laws, as one report."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from soapstone.rules.workers import Progress
from soapstone.search.rules import language


@dataclass
class LawReport:
    """The laws, and what validation and consistency checks found.

    obligations: the sizes and parameters at which laws hold. compared: at how many of them both
    sides were compared; the others follow from these (`laws/slices.py`).
    """

    laws: list[dict[str, Any]]
    failed: dict[str, str] = field(default_factory=dict)
    validated: int = 0
    obligations: int = 0
    compared: int = 0
    consistency: Mapping[str, Any] | None = None
    seconds: float = 0.0

    def as_dict(self) -> dict[str, Any]:
        """Return the figures for JSON."""
        return asdict(self)

    def __str__(self) -> str:
        width = max((len(law["name"]) for law in self.laws), default=0)
        lines = []
        for law in self.laws:
            lines.append(f"{law['name']:<{width}}  {law['law']}")
            if law.get("covered"):
                lines.append(f"{'':<{width}}    {law['covered']}")
        lines += [f"{name}: {why}" for name, why in self.failed.items()]
        lines.append(f"{len(self.laws)} laws")
        if self.validated:
            valid = self.validated - len(self.failed)
            lines[-1] += (
                f", {valid} valid at {self.obligations:,} sizes ({self.compared:,} compared)"
            )
        if self.consistency is not None:
            extra = [
                name
                for name, found in self.consistency["redundant"].items()
                if not found["declared"]
            ]
            lines[-1] += f"; contradictions: {self.consistency['verdict']}"
            lines.append(f"follow from others, undeclared: {', '.join(extra) or 'none'}")
        lines.append(f"{self.seconds:.1f} s")
        return "\n".join(lines)


def law_report(
    *, validate: bool, consistency: bool, processes: int, progress: Progress
) -> LawReport:
    """Return the laws with what validation and consistency checks, where asked for, find."""
    start = time.perf_counter()
    report = LawReport(
        [{"name": law.name, "law": str(law), "source": law.source} for law in language.laws()]
    )

    def said(stage: str) -> Progress:
        return lambda name, done, total: progress(stage, done, total)

    if validate:
        from soapstone.rules.laws.validate import validate_all

        every = validate_all(processes=processes, progress=said("validate"))
        for at, found in enumerate(every):
            report.validated += 1
            report.obligations += found.obligations
            report.compared += found.compared
            report.laws[at]["covered"] = found.covered
            if not found.holds:
                report.failed[found.law.name] = str(found)
    if consistency:
        from soapstone.rules.laws.consistency import report as relations

        report.consistency = relations(processes=processes, progress=said("consistency"))
        for name, where in report.consistency["contradiction"].items():
            report.failed[name] = f"is false of numbers: {where}"
    report.seconds = time.perf_counter() - start
    return report
