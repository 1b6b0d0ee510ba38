"""What a fit calls as it goes, for `Model.fit(callbacks=…)` (docs/training.md)."""

from soapstone.frontend.training.callbacks import (
    Callback,
    Checkpoint,
    CSVLogger,
    EarlyStopping,
    History,
    Monitored,
    ProfileSteps,
    ProgressBar,
    ReduceOnPlateau,
    TensorBoard,
    TrainingState,
)

__all__ = [
    "CSVLogger",
    "Callback",
    "Checkpoint",
    "EarlyStopping",
    "History",
    "Monitored",
    "ProfileSteps",
    "ProgressBar",
    "ReduceOnPlateau",
    "TensorBoard",
    "TrainingState",
]
