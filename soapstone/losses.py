"""Losses with their settings, for `Model.compile` (docs/training.md)."""

from soapstone.frontend.training.formula import FunctionLoss
from soapstone.frontend.training.losses import (
    BCE,
    MAE,
    MSE,
    CrossEntropy,
    DenseCrossEntropy,
    Focal,
    Huber,
    Loss,
    MaskedBCE,
    MaskedCrossEntropy,
)
from soapstone.frontend.training.sequence_losses import CTC

__all__ = [
    "BCE",
    "CTC",
    "MAE",
    "MSE",
    "CrossEntropy",
    "DenseCrossEntropy",
    "Focal",
    "FunctionLoss",
    "Huber",
    "Loss",
    "MaskedBCE",
    "MaskedCrossEntropy",
]
