"""The optimizer of a training (AdamW, or Muon for the matrices of a drafter's layers and AdamW for the rest) and the
schedules of its learning rate."""

import math
import time
from collections.abc import Callable
from functools import cache
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from ..modules import Drafter
from ..modules.processes import Processes

LEAD = 0.05
"""Share by which a run's time must be ahead of its steps to take over from them. The first steps are slow, and a run
that its steps end must not depend on the clock."""


def time_leads(max_steps: int | None, step: int, time_spent: float) -> bool:
    """True where the progress of a run that may end by steps or by time is that of its time. `max_steps` is None for a
    run that ends by time alone; `time_spent`, the elapsed share, is 0 in one that ends by steps alone."""
    return max_steps is None or time_spent > step / max_steps + LEAD


def warmup_cosine(warmup_steps: int, max_steps: int | None, time_spent: Callable[[], float] = lambda: 0.0, *,
                  linear: bool = False) -> Callable[[int], float]:
    """Factor of the peak learning rate for the optimizer step after `step` finished ones: it rises linearly over the
    first `warmup_steps`, from above 0 at the first to 1 at the last of them, and falls along a half cosine, or a line,
    towards zero, which it would reach just after the last step. In runs that may end by time the fall follows the steps
    until the elapsed share `time_spent` is clearly ahead of them, see `time_leads`."""

    def factor(step: int) -> float:
        rise = (step + 1) / warmup_steps if step < warmup_steps else 1.0
        by_steps = 0.0 if max_steps is None else max(0.0, (step - warmup_steps) / max(1, max_steps - warmup_steps))
        # Read once: the clock of a run goes on between two looks.
        spent = time_spent()
        progress = min(1.0, max(by_steps, spent) if time_leads(max_steps, step, spent) else by_steps)
        return rise * (1.0 - progress if linear else 0.5 * (1.0 + math.cos(math.pi * progress)))

    return factor


def stage_factor(progress: float, start: float, end: float, *, rise: float, step: float) -> float:
    """Factor of the peak learning rate in one stage of a run: a linear `rise` and a half cosine that reaches zero at
    `end`; 0 outside the stage, above 0 in its first step. All are progress from 0 to 1: `step` that of one optimizer
    step, `progress` that before it."""
    if not start <= progress < end:
        return 0.0
    risen = min(1.0, (progress - start + step) / rise) if rise else 1.0
    return risen * 0.5 * (1.0 + math.cos(math.pi * (progress - start) / (end - start)))


OptimizerName = Literal["adamw", "muon"]  # Names of the optimizers
BETAS = (0.9, 0.999)  # Decay of AdamW's averages of the gradient and of its square. The EAGLE papers have 0.9 and 0.95.
MUON_RATE = 10.0  # Muon's learning rate, as a multiple of AdamW's
MOMENTUM = 0.95  # Muon's decay of the averaged gradient
NEWTON_SCHULZ, ROUNDS = (3.4445, -4.7750, 2.0315), 5
"""Factors of Muon's polynomial, and how often it is applied (kellerjordan.github.io/posts/muon)."""
MATRIX = (512, 1024)  # Matrix whose products are timed in both number formats: about a small drafter's layers


class Muon(AdamW):
    """AdamW, but Muon for the groups that name the number format of their `products`: with Nesterov's momentum, the
    update's size of AdamW (arXiv:2502.16982, equation 4) and decoupled decay. Torch's orthogonalises in bfloat16 alone:
    a CPU without instructions for that takes 12 to 26 times as long. The format is part of the state, and thus that of
    a resumed training too."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step; returns what the closure returns."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        every = self.param_groups
        self.param_groups = [group for group in every if "products" not in group]
        super().step()
        self.param_groups = every
        for group in (one for one in every if "products" in one):
            for weight in (one for one in group["params"] if one.grad is not None):
                if not (state := self.state[weight]):
                    # AdamW's loading looks for a number of steps.
                    state |= {"momentum_buffer": torch.zeros_like(weight.grad), "step": torch.zeros(())}
                average = state["momentum_buffer"].lerp_(weight.grad, 1 - MOMENTUM)
                update = orthogonal(weight.grad.lerp(average, MOMENTUM), getattr(torch, group["products"]))
                weight.mul_(1 - group["lr"] * group["weight_decay"])
                weight.add_(update, alpha=-0.2 * math.sqrt(max(weight.shape)) * group["lr"])
        return loss


def orthogonal(matrix: Tensor, dtype: torch.dtype) -> Tensor:
    """The matrix with singular values near 1, by Newton and Schulz's iteration in a number format."""
    wide = matrix.shape[0] <= matrix.shape[1]
    found = matrix.to(dtype) if wide else matrix.to(dtype).T
    # The iteration converges for singular values of at most 1.
    found = found / found.norm().clamp(min=1e-7)
    a, b, c = NEWTON_SCHULZ
    for _ in range(ROUNDS):
        gram = found @ found.T
        found = torch.addmm(found, torch.addmm(gram, gram, gram, beta=b, alpha=c), found, beta=a)
    return found if wide else found.T


def products_for(device: torch.device) -> str:
    """Number format of Muon's products on a device: bfloat16, or float32 on a CPU where that is faster. Of several
    processes, whose weights must stay the same, the first decides."""
    found = measured_products() if device.type == "cpu" else "bfloat16"
    return Processes.grouped().gather(found)[0]


@cache
def measured_products() -> str:
    """The number format, bfloat16 or float32, in which this processor multiplies matrices faster; measured once."""
    matrices = {name: torch.ones(MATRIX, dtype=getattr(torch, name)) for name in ("bfloat16", "float32")}
    least = dict.fromkeys(matrices, math.inf)
    # In turns, and the fastest of each: other programs disturb both alike. The first turn is slower.
    for _ in range(4):
        for name, matrix in matrices.items():
            started = time.perf_counter()
            matrix @ matrix.T
            least[name] = min(least[name], time.perf_counter() - started)
    return min(least, key=lambda name: least[name])


def optimizer_for(drafter: Drafter, name: OptimizerName, *, lr: float, weight_decay: float) -> Optimizer:
    """The optimizer of a drafter's trained weights; vectors have no weight decay. With Muon the matrices inside the
    layers are orthogonalised at MUON_RATE times AdamW's learning rate; output layers, embeddings and vectors have
    AdamW."""
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
    groups: list[dict[str, Any]] = [
        {"params": [weight for weight in matrices if id(weight) not in taken], "weight_decay": weight_decay},
        {"params": vectors, "weight_decay": 0.0}]
    if muon:
        groups.append({"params": muon, "lr": MUON_RATE * lr, "weight_decay": weight_decay,
                       "products": products_for(muon[0].device)})
    # Fused: one pass over the weights in place of one for each operation.
    return (Muon if muon else AdamW)([group for group in groups if group["params"]], lr=lr, betas=BETAS, fused=True)
