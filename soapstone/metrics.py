"""Metrics, for `Model.compile` (docs/training.md)."""

from soapstone.frontend.training.metrics import (
    AUC,
    F1,
    MAE,
    MSE,
    RMSE,
    Accuracy,
    BinaryAccuracy,
    Metric,
    MicroF1,
    OfArrays,
    OfFunction,
    Perplexity,
    Precision,
    Recall,
    TopK,
)

__all__ = [
    "AUC",
    "F1",
    "MAE",
    "MSE",
    "RMSE",
    "Accuracy",
    "BinaryAccuracy",
    "Metric",
    "MicroF1",
    "OfArrays",
    "OfFunction",
    "Perplexity",
    "Precision",
    "Recall",
    "TopK",
]
