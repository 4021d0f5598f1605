"""Settings of training that all families share, with their bounds."""

import math
from dataclasses import dataclass, field
from typing import Any, Literal

from ..modules.config_checks import MOST_PROCESSES, MOST_ROWS, MOST_SEED, MOST_STEPS, check_bounds
from ..modules.errors import UserError
from ..modules.interfaces.drafter import DrafterConfig
from .losses.objectives import OBJECTIVES, ObjectiveName
from .steps.optimizers import OptimizerName

Precision = Literal["auto", "32-true", "bf16-mixed"]  # Lightning's names of precisions, and `auto`
ACCELERATORS = ("auto", "cpu", "gpu", "cuda", "mps")  # Lightning's names of the device kinds that train here
UNDECISIVE = ("activation_checkpointing",)  # Decide no weight but by rounding: a run may be resumed with others
DIVISION = ("accumulate", "devices", "num_nodes")  # Their product, the micro-batches of a step, alone decides
MOST_LR = 100.0  # Largest learning rate: beyond it no optimizer here learns, and float32 overflows
ZERO_STAGES = {f"deepspeed_stage_{stage}": stage for stage in (1, 2, 3)}
"""Lightning's names of DeepSpeed's strategies, and the stage of ZeRO (arXiv:1910.02054, section 5)."""
STRATEGIES = ("auto", "ddp", *ZERO_STAGES)  # Names of the strategies of several processes


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Training settings of every family."""

    max_steps: int | None = 300
    """Optimizer steps of the whole run, unless `max_minutes` ends it before; None for no limit but that."""
    max_minutes: float | None = None
    """Minutes of training, without validation and checkpoints, after which the run ends at its current step, the fourth
    at least; None for no limit. A run goes on if they are raised. The learning rate follows the steps, until the time
    is ahead of them by a twentieth of the run: a run that its steps end can be repeated to the byte."""
    optimizer: OptimizerName = "adamw"
    """`adamw`, or `muon` for the matrices inside the layers, at ten times the learning rate, and AdamW for output
    layers, embeddings and vectors."""
    lr: float = 2e-3
    """Peak learning rate of AdamW."""
    warmup_steps: int = 20
    """Optimizer steps over which the learning rate rises from zero; it falls along a cosine afterwards."""
    weight_decay: float = 0.0
    """Decoupled weight decay; biases and other vectors are exempt."""
    clip: float = 1.0
    """Largest norm of the whole gradient; 0 turns clipping off."""
    accumulate: int = 1
    """Micro-batches of an optimizer step, which equals that of one batch with all of them, but for choices among
    candidates: these weigh as much as the other guesses in each batch."""
    objective: ObjectiveName = "hard"
    """Loss of the draft's distribution. `hard`: cross entropy with the next token; the others compare it with the
    target's whole distribution: `argmax` (cross entropy with its most probable token), `soft` (cross entropy, forward
    KL), `reverse_kl`, `jsd`, `tvd` (total variation), `hard_tvd` (DSpark's mixture), `lk_alpha` (-log acceptance),
    `lk_hybrid` (from KL to acceptance as that grows)."""
    step_weights: float | Literal["d_pace", "e2e"] | None = None
    """Weights of the draft steps after a token in the loss. A number: step k has its k-th power; null takes the
    family's. `d_pace`: a step counts as far as the draft itself, by its probabilities of the text, gets to it;
    `e2e`: as far as acceptance gets, so that `tvd` learns the accepted length. Both compute the logits twice."""
    feature_weight: float = 0.0
    """Weight, relative to the objective's 1, of a smooth L1 loss between draft states and the target states that they
    estimate, for families that estimate them. EAGLE's 1.0 with 0.1 is 10 here (arXiv:2401.15077, section 4.1)."""
    validate_every: int = 50
    """Optimizer steps between two measurements of the accepted length on held-out text."""
    validation_nodes: int = 16
    """Largest number of nodes, root included, of the draft tree in validation."""
    checkpoint_every: int = 25
    """Optimizer steps between two checkpoints: the most that an interrupted run loses."""
    precision: Precision = "auto"
    """Precision of the drafter's arithmetic in training; its weights stay float32. `auto` is bf16-mixed on CUDA and on
    CPUs with instructions for it (AVX512-BF16, AMX), 32-true elsewhere."""
    activation_checkpointing: bool = False
    """Compute states inside of the drafter's layers again in the backward pass, in place of keeping them: less memory
    of a step, more time. For families with MLPs or whole layers of their own."""
    accelerator: str = "auto"
    """Lightning's name of the device kind: auto, cpu, gpu."""
    devices: int = 1
    """Devices (processes) on each machine."""
    num_nodes: int = 1
    """Machines that train together; more than one are started with torchrun."""
    strategy: str = "auto"
    """Distribution of the drafter. auto: whole in every process; ddp: the same, by Lightning's name;
    deepspeed_stage_1, _2 and _3: DeepSpeed's ZeRO, which splits the optimizer states among the processes, then the
    gradients too, then the weights too. Wherever the target is."""
    seed: int = 0
    """Seed of all random numbers of training."""
    start: str | None = None
    """Folder of an artifact of this family and target (with `retarget` of another target) whose drafter is trained
    further: it has the start's weights, and the start's settings where the recipe leaves the family's default. The
    optimizer starts anew, after a quarter of `warmup_steps`."""
    drafter: DrafterConfig = field(default_factory=DrafterConfig)
    """Shape of the drafter; each family has its own settings."""

    def __post_init__(self) -> None:
        check_bounds(self, max_steps=(1, MOST_STEPS), accumulate=(1, MOST_ROWS), validate_every=(1, MOST_STEPS),
                     checkpoint_every=(1, MOST_STEPS), devices=(1, MOST_PROCESSES), num_nodes=(1, MOST_PROCESSES),
                     seed=(0, MOST_SEED))
        if self.strategy not in STRATEGIES:
            # Others of Lightning's learn something else: their gradients, clipping and checkpoints differ.
            raise UserError(f"train.strategy must be one of {', '.join(STRATEGIES)}, got {self.strategy!r}")
        if self.max_steps is None and self.max_minutes is None:
            raise UserError("max_steps and max_minutes are both null, and training would never end; set one of them")
        if self.validation_nodes < 2:
            raise UserError(f"validation_nodes must be at least 2 (a root and one draft), got {self.validation_nodes}")
        for name in ("warmup_steps", "weight_decay", "clip", "seed", "feature_weight"):
            if (value := getattr(self, name)) < 0:
                raise UserError(f"{name} must not be negative, got {value}")
        if not 0 < self.lr <= MOST_LR:
            raise UserError(f"lr must be above 0 and at most {MOST_LR:g}, got {self.lr}")
        if self.max_minutes is not None and not self.max_minutes > 0:
            raise UserError(f"max_minutes must be above 0, got {self.max_minutes}; leave it out to end by max_steps")
        if not (self.step_weights in (None, "d_pace", "e2e") or (
                isinstance(self.step_weights, float | int) and 0 < self.step_weights <= 1)):
            raise UserError("step_weights must be a number above 0 and at most 1, 'd_pace', 'e2e' or null, got "
                            f"{self.step_weights!r}")
        if self.accelerator not in ACCELERATORS:
            raise UserError(f"accelerator must be one of {', '.join(ACCELERATORS)}, got {self.accelerator!r}")
        if self.objective not in OBJECTIVES:
            raise UserError(f"objective must be one of {', '.join(OBJECTIVES)}, got {self.objective!r}")

    @property
    def world(self) -> int:
        """Number of processes that train together."""
        return self.devices * self.num_nodes

    def share_of_steps(self, step: int) -> float:
        """Share of `max_steps` that is done after `step` optimizer steps; 0 without a limit."""
        return 0.0 if self.max_steps is None else step / self.max_steps


def decisive_settings(settings: dict[str, Any]) -> dict[str, Any]:
    """The settings of training that must be equal to resume a run, from all of them by name: neither the strategy nor
    the number of processes, but the number of micro-batches of a step."""
    apart = (*UNDECISIVE, *DIVISION, "strategy")
    found = {name: value for name, value in settings.items() if name not in apart}
    return {**found, " * ".join(DIVISION): math.prod(settings[name] for name in DIVISION)}
