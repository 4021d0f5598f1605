"""Training of drafters: losses, schedules, checkpoints chosen by decoded acceptance."""

from .base import DraftModule, TrainConfig
from .draft_lm import DraftLMModule, DraftLMTrainConfig
from .eagle import EagleModule, EagleTrainConfig
from .fitting import FitResult, fit
from .hydra import HydraModule, HydraTrainConfig
from .medusa import MedusaModule, MedusaTrainConfig
from .medusa2 import Medusa2Module, Medusa2TrainConfig

__all__ = ["DraftLMModule", "DraftLMTrainConfig", "DraftModule", "EagleModule", "EagleTrainConfig", "FitResult",
           "HydraModule", "HydraTrainConfig", "Medusa2Module", "Medusa2TrainConfig", "MedusaModule",
           "MedusaTrainConfig", "TrainConfig", "fit"]
