"""Learning rates as functions of the step, for optimizers (docs/training.md)."""

from soapstone.frontend.training.schedules import (
    Constant,
    Cosine,
    ExponentialDecay,
    LinearWarmup,
    Schedule,
    StepDecay,
    cosine,
)

__all__ = [
    "Constant",
    "Cosine",
    "ExponentialDecay",
    "LinearWarmup",
    "Schedule",
    "StepDecay",
    "cosine",
]
