"""A drafter in training whose weights are split among processes, and the whole one that decodes.

Each process holds a part of every weight, of its gradient and of its optimizer state. A training step gathers the
weights, those of `GathersApart.layers` for the moment in which each of these parts runs; the gradients are
summed over the processes and split. What decodes in validation is a whole copy that holds the same weights.
"""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from lightning.pytorch.strategies import Strategy
from torch import Tensor, nn

from ...modules.interfaces.drafter import Drafter
from ...modules.interfaces.optional_parts import GathersApart
from ...modules.target.devices.split_weights import whole
from ...modules.target.model import Target


class SplitDrafter:
    """Keeper of a drafter whose weights are split, and of its whole copy.

    Args:
        drafter: whole yet, and bound; its weights are to be split in place.
    """

    def __init__(self, drafter: Drafter) -> None:
        self.drafter = drafter
        self.copy = copy.deepcopy(drafter).to("cpu")
        """Whole; on the CPU while it is not used."""

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


def shard_fully(module: nn.Module, drafter: Drafter, mesh: Any) -> None:
    """Split a drafter's weights in place (FSDP2).

    Args:
        module: the training module, a child of which is the drafter; it is the root whose `training_step` gathers.
        drafter: whole yet.
        mesh: the processes, of one dimension.
    """
    from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method

    # From the inside out: a part that is split already is left out of the one around it.
    for part in drafter.layers if isinstance(drafter, GathersApart) else ():
        fully_shard(part, mesh=mesh)
    fully_shard(module, mesh=mesh)
    for part in module.modules():
        if isinstance(part, FSDPModule):
            # Gloo knows sums alone; the mean that follows is undone by the training step.
            part.set_force_sum_reduction_for_comms(True)
    register_fsdp_forward_method(module, "training_step")


def whole_state(module: nn.Module) -> dict[str, Tensor]:
    """The weights and buffers of a module, each whole; the processes that split them must call it together."""
    return {name: whole(tensor) for name, tensor in module.state_dict(keep_vars=True).items()}


def like(tensor: Tensor, held: Tensor) -> Tensor:
    """This process's part of a whole tensor, split as the one that it holds; the tensor itself where that is whole."""
    from torch.distributed.tensor import DTensor, distribute_tensor

    if not isinstance(held, DTensor):
        return tensor
    # Every process has the whole tensor: none sends its own.
    return distribute_tensor(tensor.to(held.device), held.device_mesh, held.placements, src_data_rank=None)


def made_whole(value: Any) -> Any:
    """A nested state with whole tensors on the CPU; the processes that split them must call it together."""
    if isinstance(value, Tensor):
        return whole(value).cpu()
    if isinstance(value, dict):
        return {name: made_whole(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(made_whole(one) for one in value)
    return value
