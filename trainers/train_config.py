"""Settings of training that all families share, with their bounds; offsets of positions; and a trained drafter that a
training continues.

Shapes: B rows, L positions."""

import math
from copy import copy
from dataclasses import dataclass, field, fields, make_dataclass, replace
from functools import cache
from typing import Annotated, Any, ClassVar, Literal, get_type_hints

import torch
from pydantic import Field
from torch import Tensor

from ..modules import Adapter, Drafter, Features, Target, UserError
from ..modules.config_checks import (
    CheckedSettings,
    Natural,
    NotNegative,
    Positive,
    Processes,
    Rows,
    Seed,
    Share,
    Steps,
    Whole,
)
from ..modules.files.json_records import shortened
from ..modules.interfaces.drafter import DrafterConfig
from .objectives import ObjectiveName
from .optimizers import OptimizerName

Rate = Annotated[float, Field(gt=0, le=100)]  # Beyond it no optimizer here learns, and float32 overflows
Precision = Literal["auto", "32-true", "bf16-mixed"]  # Lightning's names of precisions, and `auto`
UNDECISIVE = ("activation_checkpointing", "logger")  # Decide no weight, but by rounding: may differ in a resumed run
DIVISION = ("accumulate", "devices", "num_nodes")  # Their product, the micro-batches of a step, alone decides
ZERO_STAGES = {f"deepspeed_stage_{stage}": stage for stage in (1, 2, 3)}
"""Lightning's names of DeepSpeed's strategies, and the stage of ZeRO (arXiv:1910.02054, section 5)."""
ANCHORS = 4  # First tokens of a conversation without an offset; attention relies on them in long texts too
_UNKNOWN = 1 << 30  # Context length of a target whose configuration has none


@dataclass(frozen=True, kw_only=True)
class PositionConfig(CheckedSettings):
    """Offsets of the position ids that the drafter gets in training."""

    offset: Literal["max"] | Whole | None = None
    """Largest offset of the position ids; each conversation of a micro-batch draws one uniformly from 0 up. `max` is
    the largest that fits the target's context, which no offset exceeds. None adds no offsets: a drafter then never
    learns positions beyond its rows."""

    def limit(self, target: Target) -> int:
        """The largest offset for this target; UserError if it is larger than the context, or the context is unknown."""
        name, context = target.identity.name, target.context_length
        if self.offset is None:
            return 0
        if isinstance(self.offset, int):
            if self.offset >= context:
                raise UserError(f"positions.offset is {self.offset}, but the context of {name} ends at {context} "
                                "tokens; lower it, or set it to max")
            return self.offset
        if context >= _UNKNOWN:
            raise UserError(f"positions.offset is 'max', but the configuration of {name} does not say how long its "
                            "context is; give a number")
        return context


@dataclass(frozen=True, kw_only=True)
class TrainConfig(CheckedSettings):
    """Training settings of every family, with the defaults of most; `train_config` has those of each."""

    section: ClassVar[str] = "train"
    family: ClassVar[type[Drafter] | None] = None
    """The drafter whose settings these are; None where they are those of no one family."""

    max_steps: Steps | None = 300
    """Optimizer steps of the whole run, unless `max_minutes` ends it before; None for no limit but that."""
    max_minutes: Positive | None = None
    """Minutes of training, without validation and checkpoints, after which the run ends at its current step, the fourth
    at least; None for no limit. A run goes on if they are raised. The learning rate follows the steps, until the time
    is ahead of them by a twentieth of the run: a run that its steps end can be repeated to the byte."""
    optimizer: OptimizerName = "adamw"
    """`adamw`, or `muon` for the matrices inside the layers, at ten times the learning rate, and AdamW for output
    layers, embeddings and vectors."""
    lr: Rate = 2e-3
    """Peak learning rate of AdamW."""
    warmup_steps: Natural = 20
    """Optimizer steps over which the learning rate rises from zero."""
    fall: Literal["cosine", "linear"] = "cosine"
    """Curve along which the learning rate falls to zero after its rise."""
    weight_decay: NotNegative = 0.0
    """Decoupled weight decay; biases and other vectors are exempt."""
    clip: NotNegative = 1.0
    """Largest norm of the whole gradient; 0 turns clipping off."""
    accumulate: Rows = 1
    """Micro-batches of an optimizer step, which equals that of one batch with all of them, but for choices among
    candidates under ZeRO."""
    objective: ObjectiveName = "hard"
    """Loss of the draft's distribution. `hard`: cross entropy with the next token; the others compare it with the
    target's whole distribution: `argmax` (cross entropy with its most probable token), `soft` (cross entropy, forward
    KL), `reverse_kl`, `jsd`, `tvd` (total variation), `hard_tvd` (DSpark's mixture), `hard_soft` (PARD-2's),
    `lk_alpha` (-log acceptance), `lk_hybrid` (from KL to acceptance as that grows)."""
    step_weights: Share | Literal["d_pace", "e2e", "cat"] | None = None
    """Weights of the draft steps after a token in the loss. A number: step k has its k-th power; null takes the
    family's. `d_pace`: a step counts as far as the draft itself, by its probabilities of the text, gets to it;
    `e2e`: as far as acceptance gets, so that `tvd` learns the accepted length. Both compute the logits twice. `cat`:
    as far as the target's probabilities of the text get."""
    feature_weight: NotNegative = 0.0
    """Weight, relative to the objective's 1, of a smooth L1 loss between draft states and the target states that they
    estimate, for families that estimate them. EAGLE's 1.0 with 0.1 is 10 here (arXiv:2401.15077, section 4.1)."""
    validate_every: Steps = 50
    """Optimizer steps between two measurements of the accepted length on held-out text."""
    validation_nodes: Annotated[int, Field(ge=2)] = 16
    """Largest number of nodes, root included, of the draft tree in validation."""
    checkpoint_every: Steps = 25
    """Optimizer steps between two checkpoints: the most that an interrupted run loses."""
    precision: Precision = "auto"
    """Precision of the drafter's arithmetic in training; its weights stay float32. `auto` is bf16-mixed on CUDA and on
    CPUs with instructions for it (AVX512-BF16, AMX), 32-true elsewhere."""
    activation_checkpointing: bool = False
    """Compute states inside of the drafter's layers again in the backward pass, in place of keeping them: less memory
    of a step, more time. For families with MLPs or whole layers of their own."""
    accelerator: Literal["auto", "cpu", "gpu", "cuda", "mps"] = "auto"
    """Lightning's name of the device kind."""
    devices: Processes = 1
    """Devices (processes) on each machine."""
    num_nodes: Processes = 1
    """Machines that train together; more than one are started with torchrun."""
    # Others of Lightning's learn something else: their gradients, clipping and checkpoints differ.
    strategy: Literal["auto", "ddp", "deepspeed_stage_1", "deepspeed_stage_2", "deepspeed_stage_3"] = "auto"
    """Distribution of the drafter. auto: whole in every process; ddp: the same, by Lightning's name;
    deepspeed_stage_1, _2 and _3: DeepSpeed's ZeRO, which splits the optimizer states among the processes, then the
    gradients too, then the weights too. Wherever the target is."""
    seed: Seed = 0
    """Seed of all random numbers of training."""
    logger: Literal["tensorboard", "csv", "wandb", "mlflow", "trackio", "none"] = "tensorboard"
    """Logger of settings, hashes, figures and accepted lengths of the training, and of the report's plots (csv: no
    plots). `tensorboard` and `csv` are folders in `train`; `wandb`, `mlflow` and `trackio` need their own package, and
    a resumed run goes on in the same run there."""
    positions: PositionConfig = field(default_factory=PositionConfig)
    """Offsets of the position ids in training, for families with attention of their own; none by default."""
    start: str | None = None
    """Folder of an artifact of this family and target (with `retarget` of another target) whose drafter is trained
    further: it has the start's weights, and the start's settings where the recipe leaves the family's default. The
    optimizer starts anew, after a quarter of `warmup_steps`."""
    drafter: DrafterConfig = field(default_factory=DrafterConfig)
    """Shape of the drafter; each family has its own settings."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_steps is None and self.max_minutes is None:
            raise UserError("max_steps and max_minutes are both null, and training would never end; set one of them")
        if self.positions.offset is not None and self.family is not None and not self.family.trained_as.offsets:
            raise UserError(f"positions.offset is {self.positions.offset}, and the family {self.family.family} reads "
                            "positions as they are; leave positions.offset out")
        self.drafter.check_training(self)

    @property
    def world(self) -> int:
        """Number of processes that train together."""
        return self.devices * self.num_nodes

    def share_of_steps(self, step: int) -> float:
        """Share of `max_steps` that is done after `step` optimizer steps; 0 without a limit."""
        return 0.0 if self.max_steps is None else step / self.max_steps


@cache
def train_config(drafter: type[Drafter]) -> type[TrainConfig]:
    """The settings of a family that is trained as most are: its own defaults, and the shape of its drafter."""
    hints, training = get_type_hints(TrainConfig, include_extras=True), drafter.trained_as
    chosen = [(one.name, hints[one.name], value) for one in fields(TrainConfig)
              if (value := getattr(training, one.name, None)) is not None]
    return make_dataclass(
        f"{drafter.__name__}TrainConfig", [*chosen, ("drafter", drafter.config_class, field(
            default_factory=drafter.config_class))], bases=(TrainConfig,), frozen=True, kw_only=True,
        namespace={"family": drafter, "__module__": __name__})


def decisive_settings(settings: dict[str, Any]) -> dict[str, Any]:
    """The settings of training that must be equal to resume a run, from all of them by name: neither the strategy nor
    the number of processes, but the number of micro-batches of a step."""
    apart = (*UNDECISIVE, *DIVISION, "strategy")
    found = {name: value for name, value in settings.items() if name not in apart}
    return {**found, " * ".join(DIVISION): math.prod(settings[name] for name in DIVISION)}


WARMUP_SHARE = 4
"""A continued training has a warm-up this many times shorter: the rise is there for the large gradients of new weights.
A few steps of it stay, as AdamW's first ones are as long as the learning rate whatever the gradient."""


@dataclass(frozen=True, kw_only=True)
class Start:
    """A drafter in the number format of its artifact, not bound to a target."""

    drafter: Drafter  # Without values for a sketch of its target
    adapter: Adapter | None = None  # Changes of the target that belong to it; None if there are none, and for a sketch
    weights_sha256: str  # Hash of its weights

    @property
    def draft_ids_Q(self) -> Tensor | None:
        """Ids of its reduced draft vocabulary; any for a sketch, which has no values."""
        ids_Q = self.drafter.token_ids_Q
        return torch.arange(len(ids_Q)) if ids_Q is not None and ids_Q.is_meta else ids_Q

    def continued(self, config: TrainConfig, family: str, *, adapts: bool) -> TrainConfig:
        """The settings of a training that continues it; `adapts` if the target is trained too. UserError if it is of
        another family, or does not fit the settings."""
        if self.drafter.family != family:
            raise UserError(f"train.start holds a drafter of the family {self.drafter.family}, and this recipe trains "
                            f"{family}; name an artifact of {family}, or set family to {self.drafter.family}")
        if self.adapter is not None and not adapts:
            raise UserError("train.start holds a drafter that guesses for a changed target, whose changes only medusa2 "
                            f"trains; set family to medusa2, or name an artifact of {family} without changes of the "
                            "target")
        return replace(config, drafter=continued_settings(config.drafter, self.drafter.config))


def continued_settings(config: DrafterConfig, start: DrafterConfig) -> DrafterConfig:
    """The settings of a drafter that continues another one's training: those that only change training are the
    recipe's; of the others, which decide weights or what they compute, the ones that the recipe leaves at the family's
    default are the start's. UserError if the recipe sets one of these to a value to which the weights are not carried
    over."""
    usual = type(config)()
    apart = [name for one in fields(config) if (name := one.name) not in config.training_only
             and getattr(config, name) != getattr(start, name)]
    # A mixture of both may be none that the settings' own checks accept: what does not fit is refused first.
    found = copy(config)
    vars(found).update({name: getattr(start, name) for name in apart
                        if getattr(config, name) == getattr(usual, name) and config.inherits(name, start)})
    for name in apart:
        wanted, former = getattr(found, name), getattr(start, name)
        if wanted != former and not found.carries(name, start):
            said = shortened(former)
            raise UserError(f"drafter.{name} is {shortened(wanted)}, and the drafter of train.start has {said}, whose "
                            f"weights do not fit; set drafter.{name} to {said}, or leave train.start out for a new "
                            "drafter")
    return replace(found)


def with_offsets(features: Features, *, limit: int, highest: int) -> Features:
    """The batch with one offset of at most `limit` for each conversation on its position ids from ANCHORS up, to
    `highest`; positions already beyond that get none.

    Nothing else changes: order, attention and labels follow the index, and the states are the target's at its own
    positions. (LongSpec's code offsets the target's positions as well, which stored states do not allow.) A draft from
    the anchors themselves continues right after them, as at the start of a text. Offsets come from torch's generator on
    the CPU, so that the seed of a micro-batch determines them."""
    numbers_BL, positions_BL = features.segments_BL.clamp(min=0), features.positions_BL
    there_BL = positions_BL.masked_fill(features.segments_BL < 0, 0)
    last_BL = torch.zeros_like(there_BL).scatter_reduce(1, numbers_BL, there_BL, "amax").gather(1, numbers_BL)
    room_BL = (highest - last_BL).clamp(min=0, max=limit)
    # In float32 the offsets of a long context would not be equally likely.
    drawn_BL = torch.rand(positions_BL.shape, dtype=torch.float64).to(positions_BL.device).gather(1, numbers_BL)
    offsets_BL = (drawn_BL * (room_BL + 1)).long()
    stays_BL = (positions_BL < ANCHORS) | (features.segments_BL < 0)
    return replace(features, positions_BL=positions_BL + offsets_BL.masked_fill(stays_BL, 0))
