"""What a fit calls as it goes, for `Model.fit(callbacks=…)` (docs/training.md)."""

from soapstone.frontend.progress import ProgressBar
from soapstone.frontend.training.callbacks import (
    Checkpoint,
    CSVLogger,
    EarlyStopping,
    History,
    Monitored,
    ProfileSteps,
    ReduceOnPlateau,
    TensorBoard,
)
from soapstone.frontend.training.state import Callback, TrainingState

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
