"""Learning rates as functions of the step, for optimizers (docs/training.md)."""

from soapstone.frontend.training.schedules import (
    Constant,
    Cosine,
    CosineRestarts,
    ExponentialDecay,
    InverseRoot,
    LinearWarmup,
    OneCycle,
    Piecewise,
    Polynomial,
    Schedule,
    StepDecay,
    cosine,
)

__all__ = [
    "Constant",
    "Cosine",
    "CosineRestarts",
    "ExponentialDecay",
    "InverseRoot",
    "LinearWarmup",
    "OneCycle",
    "Piecewise",
    "Polynomial",
    "Schedule",
    "StepDecay",
    "cosine",
]
