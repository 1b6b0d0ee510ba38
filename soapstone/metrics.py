"""Metrics, for `Model.compile` (docs/training.md)."""

from soapstone.frontend.training.metrics.arrays import AUC, R2, OfArrays
from soapstone.frontend.training.metrics.counted import (
    F1,
    MAE,
    MSE,
    RMSE,
    Accuracy,
    BinaryAccuracy,
    IoU,
    MicroF1,
    OfFunction,
    OfLoss,
    Perplexity,
    Precision,
    Recall,
    TopK,
)
from soapstone.frontend.training.metrics.decoding import ErrorRate
from soapstone.frontend.training.metrics.metric import Metric

__all__ = [
    "AUC",
    "F1",
    "MAE",
    "MSE",
    "R2",
    "RMSE",
    "Accuracy",
    "BinaryAccuracy",
    "ErrorRate",
    "IoU",
    "Metric",
    "MicroF1",
    "OfArrays",
    "OfFunction",
    "OfLoss",
    "Perplexity",
    "Precision",
    "Recall",
    "TopK",
]
