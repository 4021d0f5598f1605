"""A drafter in training whose weights are split among processes, and the whole one that decodes.

Each process holds a part of what ZeRO's stage divides: optimizer states, gradients, weights. What decodes in validation
is a whole copy that holds the same weights.
"""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from lightning.pytorch.strategies import Strategy
from torch import Tensor, nn

from ...modules.interfaces.drafter import Drafter
from ...modules.target.devices.split_weights import whole
from ...modules.target.model import Target


class SplitDrafter:
    """Keeper of a drafter, whole yet, and bound, whose weights are to be split in place, and of its whole copy."""

    def __init__(self, drafter: Drafter) -> None:
        self.drafter = drafter
        self.copy = copy.deepcopy(drafter).to("cpu")  # Whole; on the CPU while it is not used

    @contextmanager
    def decoding(self, target: Target) -> Iterator[Drafter]:
        """A block with the whole copy, its weights those of now, on the target's device and in evaluation mode. All
        processes must enter it."""
        self.copy.load_state_dict(whole_state(self.drafter))
        self.copy.to(target.device).bind(target)
        yield self.copy.eval()
        self.copy.train().to("cpu")


class WholeCheckpoints:
    """A strategy whose checkpoints hold whole weights and optimizer states under the names that one process gives them,
    so that any other strategy and number of processes resumes them."""

    lightning_module: Any
    checkpoint_io: Any

    # Optimizer states are read from the checkpoint as those of one process are.
    lightning_restore_optimizer = True
    # Strategies that split weights read a folder of parts; here every process reads one whole file.
    load_checkpoint = Strategy.load_checkpoint

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The whole weights; all processes must call it."""
        return {name: tensor.cpu() for name, tensor in whole_state(self.lightning_module).items()}


def whole_state(module: nn.Module) -> dict[str, Tensor]:
    """The weights and buffers of a module, each whole; the processes that split them must call it together."""
    return {name: whole(tensor) for name, tensor in module.state_dict(keep_vars=True).items()}
