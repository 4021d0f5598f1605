"""Distribution strategies of the drafter by name: whole in every process, or split among them."""

from collections.abc import Mapping
from typing import Any

from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.strategies import ModelParallelStrategy, Strategy
from torch import Tensor, nn
from torch.optim import Optimizer

from ...modules.errors import UserError
from ..steps.optimizers import Together
from ..train_config import FSDP2, ZERO_STAGES, TrainConfig
from .split_drafter import WholeCheckpoints, like, made_whole
from .zero_strategy import ZeroDrafter


class FullyShardedDrafter(WholeCheckpoints, ModelParallelStrategy):
    """FSDP2 over all processes.

    Optimizer states are saved by name: Lightning's own saves ids in the order of the module's weights and reads those
    of one process in that order too, which is not the order of the optimizer's groups.
    """

    strategy_name = FSDP2

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """The whole state of the optimizer; all processes must call it."""
        plain = optimizer._optimizer if isinstance(optimizer, LightningOptimizer) else optimizer
        state: dict[str, Any] = made_whole(plain.state_dict())
        return state

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Keep this process's part of each weight."""
        module: nn.Module = self.lightning_module
        own = module.state_dict()
        module.load_state_dict({name: like(tensor, own[name]) if name in own else tensor
                                for name, tensor in checkpoint["state_dict"].items()})

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Keep this process's part of each state."""
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            optimizer.load_state_dict(state)
            for part in optimizer.parts if isinstance(optimizer, Together) else (optimizer,):
                for weight, held in part.state.items():
                    for name, value in held.items():
                        # Counters of steps have another shape and are whole everywhere.
                        if isinstance(value, Tensor) and value.shape == weight.shape:
                            held[name] = like(value, weight)


def strategy_for(config: TrainConfig) -> str | Strategy:
    """Lightning's strategy, or its name. Raises UserError for one under which a training would learn something else."""
    if config.strategy == FSDP2:
        return FullyShardedDrafter(data_parallel_size=config.world, tensor_parallel_size=1,
                                   save_distributed_checkpoint=False)
    if config.strategy in ZERO_STAGES:
        if config.optimizer == "muon":
            raise UserError(f"train.optimizer muon orthogonalises whole matrices, and train.strategy {config.strategy} "
                            "steps pieces of the joined weights; set train.optimizer: adamw, or train.strategy: "
                            f"{FSDP2}")
        return ZeroDrafter(ZERO_STAGES[config.strategy], clip=config.clip, on_cpu=config.accelerator == "cpu")
    return config.strategy
