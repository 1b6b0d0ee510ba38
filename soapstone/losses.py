"""Losses with their settings, for `Model.compile` (docs/training.md)."""

from soapstone.frontend.training.formula import FunctionLoss
from soapstone.frontend.training.losses.elements import (
    MAPE,
    MSLE,
    CosineSimilarity,
    Formulated,
    Hinge,
    KLDivergence,
    LogCosh,
    Poisson,
    Quantile,
    SmoothL1,
)
from soapstone.frontend.training.losses.loss import (
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
from soapstone.frontend.training.losses.sequences import CTC

__all__ = [
    "BCE",
    "CTC",
    "MAE",
    "MAPE",
    "MSE",
    "MSLE",
    "CosineSimilarity",
    "CrossEntropy",
    "DenseCrossEntropy",
    "Focal",
    "Formulated",
    "FunctionLoss",
    "Hinge",
    "Huber",
    "KLDivergence",
    "LogCosh",
    "Loss",
    "MaskedBCE",
    "MaskedCrossEntropy",
    "Poisson",
    "Quantile",
    "SmoothL1",
]
