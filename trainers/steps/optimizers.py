"""The optimizer of a training: AdamW, or Muon for the matrices of a drafter's layers and AdamW for the rest."""

from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import nn
from torch.optim import AdamW, Muon, Optimizer

from ...modules.interfaces.drafter import Drafter

OptimizerName = Literal["adamw", "muon"]
"""Names of the optimizers."""
BETAS = (0.9, 0.999)
"""Decay of AdamW's averages of the gradient and of its square. The EAGLE papers have 0.9 and 0.95."""
MUON_RATE = 10.0
"""Muon's learning rate, as a multiple of AdamW's."""
MOMENTUM = 0.95
"""Muon's decay of the averaged gradient."""


class Together(Optimizer):
    """Several optimizers, each of other weights, that step as one.

    Args:
        parts: them, none of which has a weight of another.
    """

    def __init__(self, parts: Sequence[Optimizer]) -> None:
        self.parts = tuple(parts)
        # Torch's own constructor wants weights; the groups are then replaced by those of the parts.
        super().__init__([weight for part in parts for group in part.param_groups for weight in group["params"]], {})
        # The parts' own groups, whose learning rates a scheduler sets.
        self.param_groups = [group for part in self.parts for group in part.param_groups]

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step of each; returns what the closure returns."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for part in self.parts:
            part.step()
        return loss

    def state_dict(self) -> dict[str, Any]:
        """The parts' states, in order."""
        return {"parts": [part.state_dict() for part in self.parts]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Put back what `state_dict` returned."""
        for part, state in zip(self.parts, state_dict["parts"], strict=True):
            part.load_state_dict(state)
        # Loading has given each part new groups.
        self.param_groups = [group for part in self.parts for group in part.param_groups]


def optimizer_for(drafter: Drafter, name: OptimizerName, *, lr: float, weight_decay: float) -> Optimizer:
    """The optimizer of a drafter's trained weights; vectors have no weight decay.

    With Muon the matrices inside the layers are orthogonalised (Newton-Schulz) with the update's size of AdamW
    (arXiv:2502.16982, equation 4) at MUON_RATE times its learning rate; output layers, embeddings and vectors have
    AdamW.
    """
    trained = [weight for weight in drafter.parameters() if weight.requires_grad]
    vectors = [weight for weight in trained if weight.ndim <= 1]
    matrices = [weight for weight in trained if weight.ndim > 1]
    muon: list[nn.Parameter] = []
    if name == "muon":
        # The matrices that map states to states: no output layer and no table of embeddings.
        outer = {id(weight) for step in range(drafter.trained_steps) for weight in drafter.output_parameters(step)}
        outer |= {id(module.weight) for module in drafter.modules() if isinstance(module, nn.Embedding)}
        muon = [weight for weight in matrices if weight.ndim == 2 and id(weight) not in outer]
    taken = {id(weight) for weight in muon}
    groups = [{"params": [weight for weight in matrices if id(weight) not in taken], "weight_decay": weight_decay},
              {"params": vectors, "weight_decay": 0.0}]
    parts: list[Optimizer] = []
    if kept := [group for group in groups if group["params"]]:
        # Fused: one pass over the weights in place of one for each operation.
        parts.append(AdamW(kept, lr=lr, betas=BETAS, fused=True))
    if muon:
        parts.append(Muon(muon, lr=MUON_RATE * lr, momentum=MOMENTUM, weight_decay=weight_decay,
                          adjust_lr_fn="match_rms_adamw"))
    return parts[0] if len(parts) == 1 else Together(parts)
