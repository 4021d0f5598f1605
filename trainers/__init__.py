"""Training of drafters: losses, schedules, checkpoints chosen by decoded acceptance."""

from .base import DraftModule, TrainConfig
from .fitting import FitResult, fit
from .hydra import HydraModule, HydraTrainConfig
from .medusa import MedusaModule, MedusaTrainConfig

__all__ = ["DraftModule", "FitResult", "HydraModule", "HydraTrainConfig", "MedusaModule", "MedusaTrainConfig",
           "TrainConfig", "fit"]
