"""Optimizers, for `Model.compile` (docs/training.md)."""

from soapstone.frontend.training.composed import (
    Adadelta,
    Adagrad,
    Adamax,
    Composed,
    Lion,
    NAdam,
    RMSprop,
    Update,
)
from soapstone.frontend.training.optimizers import SGD, Adam, AdamW, Optimizer

__all__ = [
    "SGD",
    "Adadelta",
    "Adagrad",
    "Adam",
    "AdamW",
    "Adamax",
    "Composed",
    "Lion",
    "NAdam",
    "Optimizer",
    "RMSprop",
    "Update",
]
