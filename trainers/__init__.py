"""Training of drafters: losses, schedules, checkpoints chosen by decoded acceptance."""

from .base import DraftModule
from .families import draft_module
from .fitting import FitResult, fit
from .medusa2 import Medusa2Module, Medusa2TrainConfig
from .train_config import Precision, TrainConfig, train_config

__all__ = [
    "DraftModule", "FitResult", "Medusa2Module", "Medusa2TrainConfig", "Precision", "TrainConfig", "draft_module",
    "fit", "train_config",
]
