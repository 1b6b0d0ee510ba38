"""What training an app gave."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

SUMMARY_ROWS = (
    ("loss", "loss", "{:.4f}"),
    ("train_accuracy", "training accuracy", "{:.2%}"),
    ("test_accuracy", "test accuracy", "{:.2%}"),
    ("train_micro_f1", "training micro-F1", "{:.2%}"),
    ("test_micro_f1", "test micro-F1", "{:.2%}"),
    ("step_us", "median step", "{:,.0f} us"),
    ("samples_per_s", "samples a second", "{:,.0f}"),
    ("peak_bytes", "memory", "{:,} bytes"),
    ("planned_bytes", "planned copies", "{:,} bytes a step"),
    ("copied_bytes", "counted copies", "{:,} bytes a step"),
)


@dataclass(frozen=True)
class TrainResult:
    """What training an app gave; what was not measured is None.

    Attributes:
        loss, train_accuracy: means over the last epoch, as it was trained.
        test_accuracy: of the held-out samples, after training.
        train_micro_f1, test_micro_f1: the same where a sample has several labels.
        epochs: epochs that training has done in all, those before a resume among them.
        step_us, samples_per_s: of the median step.
        peak_bytes: parameters, states, inputs and the arena of temporary tensors.
        planned_bytes, copied_bytes: between a fast memory and the one behind it in a step.
        strategy: the file that was given; None where the mapper made it.
        cuts: where the vertices of a graph are cut into parts in the end; None where not asked for.
    """

    loss: float | None
    train_accuracy: float | None
    test_accuracy: float | None
    epochs: int
    step_us: float
    samples_per_s: float
    peak_bytes: int
    executor: str
    mapper: str
    strategy: str | None
    seed: int
    cuts: tuple[int, ...] | None = None
    train_micro_f1: float | None = None
    test_micro_f1: float | None = None
    planned_bytes: int | None = None
    copied_bytes: int | None = None

    def as_dict(self) -> dict[str, Any]:
        """Return the fields as JSON can say them; those of a fast memory where there is one."""
        found, optional = asdict(self), ("planned_bytes", "copied_bytes")
        return {k: v for k, v in found.items() if v is not None or k not in optional}

    def __str__(self) -> str:
        values = asdict(self)
        lines = [f"trained {self.epochs} epochs, mapper {self.mapper}, seed {self.seed}"]
        for name, label, form in SUMMARY_ROWS:
            if values[name] is not None:
                lines.append(f"  {label + ':':<19}{form.format(values[name])}")
        return "\n".join(lines)
