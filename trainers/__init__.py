"""Training of drafters: losses, schedules, checkpoints chosen by decoded acceptance."""

from .base import DraftModule
from .drafters.block import BlockModule, BlockTrainConfig
from .drafters.draft_lm import DraftLMModule, DraftLMTrainConfig
from .drafters.eagle import EagleModule, EagleTrainConfig
from .drafters.eagle3 import Eagle3Module, Eagle3TrainConfig
from .drafters.falcon import FalconModule, FalconTrainConfig
from .drafters.hydra import HydraModule, HydraTrainConfig
from .drafters.kangaroo import KangarooModule, KangarooTrainConfig
from .drafters.medusa import MedusaModule, MedusaTrainConfig
from .drafters.medusa2 import Medusa2Module, Medusa2TrainConfig
from .fitting import FitResult, fit
from .train_config import Precision, TrainConfig

__all__ = ["BlockModule", "BlockTrainConfig", "DraftLMModule", "DraftLMTrainConfig", "DraftModule", "Eagle3Module",
           "Eagle3TrainConfig", "EagleModule", "EagleTrainConfig", "FalconModule", "FalconTrainConfig", "FitResult",
           "HydraModule", "HydraTrainConfig", "KangarooModule", "KangarooTrainConfig", "Medusa2Module",
           "Medusa2TrainConfig", "MedusaModule", "MedusaTrainConfig", "Precision", "TrainConfig", "fit"]
