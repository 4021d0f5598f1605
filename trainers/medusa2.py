"""Training Medusa heads and the target together (Medusa-2, arXiv:2401.10774, sections 2.2.2 and 2.3.2).

The adapted target shares all weights with the original but the low-rank changes of its linear layers, made by peft. Its
output layer is trained like a draft step of offset 1 whose teacher is the original target. The loss is then the shared
one with one more step: L_LM + lambda_0 * sum_k decay^k L_k, as a weighted mean.

Shapes: B rows, L positions, K heads, C columns of sums, R rank, I inputs of a layer, O its outputs."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import ClassVar, Literal, cast

import torch
from lightning.pytorch.utilities.types import OptimizerLRSchedulerConfig
from peft import LoraConfig as PeftConfig
from peft import inject_adapter_in_model
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn

from ..modules import Adapter, Drafts, Features, Medusa, MedusaConfig, Target, UserError, answered_anew
from ..modules.config_checks import CheckedSettings, Positive, Size
from ..modules.interfaces.drafter import FamilyCard
from ..modules.target.adapter import PREFIX, LowRank, choose_layers
from .base import DraftModule
from .chunked_losses import VocabularyLoss
from .objectives import COLUMNS, BatchLoss, Teacher, weighted_mean_loss
from .objectives import describe as describe_steps
from .optimizers import BETAS, stage_factor
from .train_config import Rate, Start, TrainConfig

_NAME = "default"
ALPHA = 16.0  # The changes are scaled by ALPHA / rank
DROPOUT = 0.05  # Dropout of the inputs of the low-rank changes in training


@dataclass(frozen=True, kw_only=True)
class LoraConfig(CheckedSettings):
    """Size of the low-rank changes of the target's layers, all but the output layer (arXiv:2106.09685)."""

    rank: Size = 32
    """Rank of the change of each layer."""


class LearningTarget(nn.Module):
    """The trained part of a target. Its parameters are the low-rank weights alone; the changed copy is `target`, a
    plain object that is neither saved nor wrapped.

    All other weights of the copy are the original's tensors: the original is not changed, moved or duplicated."""

    def __init__(self, original: Target, config: LoraConfig) -> None:
        super().__init__()
        chosen = choose_layers(original.model, (), without=original.head)
        model = original.copy_model()
        # An expression matches whole names; peft would match a list against the ends of names. In a module without a
        # configuration, since peft would add the experts of some models, and refuse layers of Mamba that it fears are
        # read past their modules, as they are in no pass here.
        inject_adapter_in_model(
            PeftConfig(r=config.rank, lora_alpha=ALPHA, lora_dropout=DROPOUT,  # type: ignore[arg-type]
                       target_modules="|".join(f"model.{name}".replace(".", r"\.") for name in chosen)),
            nn.ModuleDict({"model": model}))
        self.names, self.scale = tuple(chosen), ALPHA / config.rank
        self.target = Target(model, original.tokenizer, name=original.identity.name, pack=0)
        # Half precision would lose small updates: trained weights stay in float32.
        wide = torch.promote_types(original.dtype, torch.float32)
        for layer in self._layers():
            layer.lora_A[_NAME].to(wide).requires_grad_(True)
            layer.lora_B[_NAME].to(wide).requires_grad_(True)
        self.a = nn.ParameterList([layer.lora_A[_NAME].weight for layer in self._layers()])
        self.b = nn.ParameterList([layer.lora_B[_NAME].weight for layer in self._layers()])

    def _layers(self) -> list[LoraLayer]:
        return [cast(LoraLayer, self.target.model.get_submodule(name)) for name in self.names]

    def train(self, mode: bool = True) -> "LearningTarget":
        """Switch the dropout of the low-rank changes; the copied model itself stays in evaluation mode."""
        super().train(mode)
        for layer in self._layers():
            layer.lora_dropout.train(mode)
        return self

    @property
    def unchanged(self) -> bool:
        """True while the copy still equals the original: all changes are zero."""
        return not any(bool(b.any()) for b in self.b)

    def read(self) -> Adapter:
        """A copy of the current weights on the CPU."""
        layers = {name: LowRank(a_RI=a.detach().to("cpu", copy=True), b_OR=b.detach().to("cpu", copy=True))
                  for name, a, b in zip(self.names, self.a, self.b, strict=True)}
        return Adapter(layers, self.scale)

    @torch.no_grad()
    def load(self, adapter: Adapter) -> None:
        """Load an adapter's weights in place."""
        for name, a, b in zip(self.names, self.a, self.b, strict=True):
            a.copy_(adapter.layers[name].a_RI)
            b.copy_(adapter.layers[name].b_OR)


HEADS_WEIGHT = {"two_stage": 0.2, "sine": 0.01}
"""The paper's lambda_0 of each schedule: the peak weight of the heads' loss relative to the target's own."""
ALONE_UNTIL = {"two_stage": 0.5, "sine": 0.0}
"""Progress of a run of each schedule up to which the heads are trained alone."""


@dataclass(frozen=True, kw_only=True)
class Medusa2TrainConfig(TrainConfig):
    """Joint training of Medusa heads and low-rank changes of the target."""

    family = Medusa
    drafter: MedusaConfig = field(default_factory=MedusaConfig)
    """The heads."""
    lr: Rate = 5e-4
    """Peak learning rate of the target's low-rank weights."""
    heads_lr_factor: Positive = 4.0
    """Learning rate of the heads as a multiple of `lr`."""
    lora: LoraConfig = field(default_factory=LoraConfig)
    """Size of the target's low-rank changes."""
    schedule: Literal["two_stage", "sine"] = "two_stage"
    """`two_stage`: in the first half of the run the heads alone, then everything with a constant weight of the heads'
    loss. `sine`: everything from the start, the weight of the heads' loss rising as a quarter sine."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.optimizer != "adamw":
            raise UserError(f"optimizer is {self.optimizer!r}, but the target's low-rank weights and the heads have "
                            "rates of their own; set optimizer to adamw")
        if self.fall != "cosine":
            raise UserError(f"fall is {self.fall!r}, but the rates of medusa2's stages fall along cosines; "
                            "set fall to cosine")


class Medusa2Module(DraftModule):
    """Medusa heads and a copy of their target in training; the original target is not changed.

    Memory: the copy shares all weights but the low-rank ones; only these and the heads have gradients and moments. In
    its second stage a step stores the copy's activations. While the heads are trained alone a step costs as much as
    Medusa-1's."""

    card = FamilyCard(
        name="Medusa-2", papers=("2401.10774",),
        guesses="Medusa's heads and low-rank changes of the target, which KL keeps near the original",
        cost="changes the target: lossless with respect to the changed one; steps take four times as long as Medusa's")
    drafter_class = Medusa
    config: Medusa2TrainConfig
    changes_target: ClassVar[bool] = True
    validation_rows = 16  # the changed target rewrites them for each measurement

    def continue_from(self, start: Start) -> None:
        """Start as a trained drafter, and with its changes of the target where it has any."""
        super().continue_from(start)
        if start.adapter is None:
            return
        # Another version of the target may have layers of other shapes inside.
        start.adapter.require_fitting(self.target.model)
        rank, wanted = len(next(iter(start.adapter.layers.values())).a_RI), self.config.lora.rank
        if wanted not in (rank, LoraConfig().rank):
            raise UserError(f"train.lora.rank is {wanted}, and the changes of the target in train.start have rank "
                            f"{rank}; leave train.lora.rank out to keep {rank}, or train.start for a new drafter")
        self.config = replace(self.config, lora=LoraConfig(rank=rank))

    @property
    def alone_until(self) -> float:
        """Progress up to which the heads are trained alone: not at all where the start has changed the target."""
        changed = self.start is not None and self.start.adapter is not None
        return 0.0 if changed else ALONE_UNTIL[self.config.schedule]

    def configure_model(self) -> None:
        """Build the trained copy and the heads; equal seeds give equal weights."""
        if "learning" not in self._modules:
            with torch.random.fork_rng():
                torch.manual_seed(self.config.seed)
                self.learning = LearningTarget(self.target, self.config.lora)
            if self.start is not None and self.start.adapter is not None:
                self.learning.load(self.start.adapter)
        super().configure_model()

    def setup(self, stage: str) -> None:
        """Move the original and the copy, which are unknown to Lightning."""
        super().setup(stage)
        if "learning" in self._modules:
            self.learning.target.to(self.trainer.strategy.root_device)

    def configure_optimizers(self) -> OptimizerLRSchedulerConfig:
        """AdamW with two learning rates; each stage has its own warm-up and cosine."""
        config, alone = self.config, self.alone_until
        heads = list(self.drafter.parameters())
        groups = [([*self.learning.parameters()], 1.0, config.weight_decay),
                  ([weight for weight in heads if weight.ndim > 1], config.heads_lr_factor, config.weight_decay),
                  ([weight for weight in heads if weight.ndim <= 1], config.heads_lr_factor, 0.0)]
        # Vectors of the heads have no weight decay, as in the shared optimizer; the low-rank weights are all matrices.
        optimizer = torch.optim.AdamW([{"params": params, "lr": config.lr * factor, "weight_decay": decay}
                                       for params, factor, decay in groups], betas=BETAS, fused=True)
        second, both = (partial(self._rate, stages=stages) for stages in ([(alone, 1.0)], [(0.0, alone), (alone, 1.0)]))
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, [second, both, both])
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def _rate(self, step: int, stages: Sequence[tuple[float, float]]) -> float:
        """Factor of the learning rate after `step` finished steps, for weights trained in these stages."""
        progress = self.progress_at(step)
        # A run may end by time long before its last step: the finished steps show the progress of one. Before the first
        # step of a run without a limit in steps, any small share gives the first part of the rise.
        one = (progress / step if step else self.config.share_of_steps(1)) or 1e-6
        return sum(stage_factor(progress, *stage, rise=self.warmup_steps * one, step=one) for stage in stages)

    # The loss --------------------------------------------------------------------------------------------------------

    def weights(self, steps: int) -> tuple[float, ...]:
        """Weight of the target's own loss, then of each head."""
        heads = super().weights(steps - 1)
        progress = self.progress_at(self.global_step)
        if progress < self.alone_until:
            return (0.0, *heads)
        # Section 7.4 of arXiv:2401.10774; only the sine schedule lets the weight rise.
        lambda_0 = HEADS_WEIGHT[self.config.schedule]
        if self.config.schedule == "sine":
            lambda_0 *= math.sin(0.5 * math.pi * progress)
        return (1.0, *(lambda_0 * weight for weight in heads))

    def loss(self, features: Features) -> BatchLoss:
        """Summed loss of the adapted target and its heads on a batch; see the file's first lines."""
        original = self.encoded(features)
        steps = 1 + self.config.drafter.num_heads
        weights = self.weights(steps) if self._pending is None else self._pending.weights
        alone = weights[0] == 0
        # While the heads are trained alone the copy equals the original, whose states may be there already.
        with torch.autocast(self.target.device.type, enabled=False):
            states = original if alone else self.learning.target.trace(features)
        drafts = self.drafter(states)
        total, sums_KC = self.vocabulary_loss(drafts, original, weights[1:])
        if alone:
            # Every process must have a gradient for every weight: these weights have zero.
            total = total + 0.0 * sum(weight.sum() for weight in self.learning.parameters())
            sums_1C = sums_KC.new_zeros(1, len(COLUMNS))
        else:
            # The adapted target's own predictions: KL to the original's, up to a constant. Cross entropy with the text
            # would degrade a target that wrote the text itself.
            adapted = self.learning.target
            loss = VocabularyLoss(project=lambda hidden, _step: adapted.logits(hidden.to(adapted.dtype)),
                                  entries=self.target.vocab_size, weights=(1.0,), objective="soft",
                                  teacher=Teacher(self.target))
            language, sums_1C = loss(Drafts(hidden_BLKD=states.final()[:, :, None], offsets=(1,)), original)
            total = total + language
        return BatchLoss(total, torch.cat([sums_1C, sums_KC]), weights, (1, *drafts.offsets))

    def describe(self, sums_KC: Tensor, weights: tuple[float, ...], offsets: tuple[int, ...]) -> dict[str, float]:
        """The heads' figures, and those of the target's own predictions as `language/...`."""
        total, count = (float(value) for value in weighted_mean_loss(sums_KC, weights))
        own = describe_steps(sums_KC[:1], (1.0,), (1,))
        language = {f"language/{name.removeprefix('head1/')}": value for name, value in own.items()
                    if name in ("head1/loss", "head1/top1", "head1/alpha")}
        heads = describe_steps(sums_KC[1:], weights[1:], offsets[1:])
        return heads | language | ({"loss": total / count} if count else {})

    # Validation and trained weights ----------------------------------------------------------------------------------

    @property
    def adapter(self) -> Adapter:
        """The target's current low-rank changes."""
        return self.learning.read()

    def verifier(self, rows: Sequence[Features]) -> tuple[Target, Sequence[Features]]:
        """The adapted target and its own greedy answers to some of the held-out prompts. The stored answers are the
        original's; they are used as long as the target has not changed."""
        chosen = rows[: self.validation_rows]
        if self.learning.unchanged:
            return self.target, chosen
        adapted = self.target.adapted(self.adapter)
        return adapted, answered_anew(adapted, chosen)

    def trained(self) -> dict[str, Tensor]:
        """The heads and the target's low-rank changes."""
        return {**self.drafter.state_dict(), **self.adapter.tensors()}

    def restore(self, weights: dict[str, Tensor]) -> None:
        """Load the weights that `trained` returned."""
        changes = {name: tensor for name, tensor in weights.items() if name.startswith(PREFIX)}
        self.learning.load(Adapter.rebuild(self.adapter.describe(), changes))
        self.drafter.load_state_dict({name: tensor for name, tensor in weights.items() if name not in changes})
