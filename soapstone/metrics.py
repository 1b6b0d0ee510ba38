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
    MicroF1,
    OfFunction,
    Perplexity,
    Precision,
    Recall,
    TopK,
)
from soapstone.frontend.training.metrics_of_arrays import AUC, OfArrays

__all__ = [
    "AUC",
    "F1",
    "MAE",
    "MSE",
    "RMSE",
    "Accuracy",
    "BinaryAccuracy",
    "ErrorRate",
    "Metric",
    "MicroF1",
    "OfArrays",
    "OfFunction",
    "Perplexity",
    "Precision",
    "Recall",
    "TopK",
]
