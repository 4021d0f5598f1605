"""Training of drafters: losses, schedules, checkpoints chosen by decoded acceptance."""

from .base import DraftModule
from .draft_lm import DraftLMModule, DraftLMTrainConfig
from .eagle import EagleModule, EagleTrainConfig
from .eagle3 import Eagle3Module, Eagle3TrainConfig
from .falcon import FalconModule, FalconTrainConfig
from .fitting import FitResult, fit
from .hydra import HydraModule, HydraTrainConfig
from .kangaroo import KangarooModule, KangarooTrainConfig
from .medusa import MedusaModule, MedusaTrainConfig
from .medusa2 import Medusa2Module, Medusa2TrainConfig
from .train_config import Precision, TrainConfig

__all__ = ["DraftLMModule", "DraftLMTrainConfig", "DraftModule", "Eagle3Module", "Eagle3TrainConfig", "EagleModule",
           "EagleTrainConfig", "FalconModule", "FalconTrainConfig", "FitResult", "HydraModule", "HydraTrainConfig",
           "KangarooModule", "KangarooTrainConfig", "Medusa2Module", "Medusa2TrainConfig", "MedusaModule",
           "MedusaTrainConfig", "Precision", "TrainConfig", "fit"]
