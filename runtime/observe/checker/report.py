"""What the checker says of a log."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

KEPT = 50  # violations that are described


@dataclass(frozen=True)
class Violation:
    """One thing that the run did wrong.

    kind: "launch" (a point that did not run once, on its tile), "dependence" (a conflict that
    nothing orders), "order" (one that was run in the wrong order), "value" (a read of something
    else than the last value written); of several ranks also "program" (theirs are not the same) and
    "message" (one that does not go from one rank to another, whole).
    """

    kind: str
    text: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.text}"


@dataclass
class Report:
    """What was checked, and the first violations. `wrong` counts all of them.

    nested: those of the operations that tasks launched. ranks: of processes.
    """

    launches: int = 0
    operations: int = 0
    replays: int = 0
    conflicts: int = 0
    reads: int = 0
    nested: int = 0
    messages: int = 0
    ranks: int = 1
    wrong: int = 0
    violations: list[Violation] = field(default_factory=list)

    @property
    def accepted(self) -> bool:
        """Whether no violation was found."""
        return not self.wrong

    def add(self, kind: str, text: str) -> None:
        """Record a violation; the texts of the first `KEPT` are kept, all are counted."""
        self.wrong += 1
        if len(self.violations) < KEPT:
            self.violations.append(Violation(kind, text))

    def as_dict(self) -> dict[str, Any]:
        """The counts and violations as JSON-ready data."""
        return {"accepted": self.accepted, **asdict(self)}

    def __str__(self) -> str:
        said = (
            f"{self.launches} launches, {self.operations} operations, {self.replays} replays: "
            f"{self.conflicts} conflicts and {self.reads} reads checked"
        )
        if self.nested:
            said += f"; {self.nested} of the operations inside tasks"
        if self.ranks > 1:
            said += f"; {self.messages} messages between {self.ranks} ranks"
        if self.accepted:
            return f"accepted: {said}"
        shown = "\n".join(f"  {violation}" for violation in self.violations)
        more = self.wrong - len(self.violations)
        rest = f"\n  and {more} more" if more else ""
        return f"refused, {self.wrong} violations: {said}\n{shown}{rest}"
