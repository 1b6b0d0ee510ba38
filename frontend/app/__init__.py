"""Apps: scripts that define a model, its data and how it is trained; found, loaded and trained."""

from soapstone.frontend.app.load import App, AppError, app_module, app_names, load_app
from soapstone.frontend.app.result import TrainResult
from soapstone.frontend.app.train import train_app

__all__ = ["App", "AppError", "TrainResult", "app_module", "app_names", "load_app", "train_app"]
