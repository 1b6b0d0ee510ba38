"""Metrics, for `Model.compile` (docs/training.md)."""

from soapstone.frontend.training.decoding import ErrorRate
from soapstone.frontend.training.metric import Metric
from soapstone.frontend.training.metrics import (
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
from soapstone.frontend.training.metrics_of_arrays import AUC, R2, OfArrays

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
