"""The LightningModule of all families.

The loss of an optimizer step is one weighted mean over all its micro-batches on all ranks. Its count is known only
after the last of them, so each micro-batch back-propagates its *sum*, and the gradient is divided by the reduced count
just before it is clipped. Padding, packing, accumulation and world size change nothing, but for the weight of choices
among candidates under ZeRO, which is found in each batch.

Shapes: B rows, L positions, D hidden size, K draft steps, C columns of sums, V vocabulary."""

import hashlib
import json
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any, ClassVar, get_type_hints

import lightning as L
import torch
from lightning.pytorch.utilities.types import OptimizerLRSchedulerConfig
from torch import Tensor

from ..modules import Adapter, Drafter, Drafts, Features, Target, UserError
from ..modules.files.json_records import record_of
from ..modules.interfaces.drafter import FamilyCard
from ..modules.interfaces.proposer import JudgesGuesses
from ..modules.target.draft_vocabulary import choose, draft_index
from .checkpoints import KINDS, Clock, FinishedStep, TrainingCurve, peak_memory_bytes, require_same_settings
from .chunked_losses import GatheredChoices, VocabularyLoss
from .objectives import NEEDS_MASS, BatchLoss, Teacher, describe, weighted_mean_loss
from .optimizers import optimizer_for, time_leads, warmup_cosine
from .train_config import WARMUP_SHARE, ZERO_STAGES, Start, TrainConfig, decisive_settings, train_config, with_offsets
from .zero_drafter import ZeroDrafter, whole_state

LEAST_STEPS = 4  # Optimizer steps of a run whatever its minutes: it ends with a draft that has learned something
AT_ONCE, READ_EVERY = ("cpu",), 10
"""Devices whose figures are read after each optimizer step, and the steps after which those of others are: on an
accelerator every read waits for all its work."""
PATIENCE = 8  # Optimizer steps without a supervised token that end a run: long prompts may fill one, but not eight


class DraftModule(L.LightningModule):
    """Training of a drafter for a frozen target, which stays outside the module tree.

    A family's module sets `drafter_class`, as `families.draft_module` does. The drafter defines the rest in
    `trained_as`, `Drafts`, `output_parameters` and `reads_states`, without which a training step runs no target pass. A
    family with settings of its own annotates `config` with a subclass of TrainConfig.

    `config` are training settings with the drafter's shape, a family's defaults when left out. `token_counts` is how
    often each token is a label, [V]: a reduced draft vocabulary holds the most frequent ones. UserError if that has no
    counts or a size that does not fit, settings do not fit the target, or positions would leave its context."""

    drafter_class: ClassVar[type[Drafter]]  # The family's drafter
    card: ClassVar[FamilyCard | None] = None  # Of a training variant that its drafter's own card does not describe
    drafter: Drafter
    changes_target: ClassVar[bool] = False  # Whether the target is trained too; its states then cannot be stored before
    validation_rows: int | None = None  # Held-out conversations that are measured; None for all
    chunk_elements: int | None = None  # Logits of the loss in memory at once; None for the device's own number
    start: Start | None = None  # The drafter that the training continues; None for a new one

    def __init__(self, target: Target, config: TrainConfig | None = None, *,
                 token_counts: Tensor | None = None) -> None:
        super().__init__()
        self.config: TrainConfig = self.settings()() if config is None else config
        config, training = self.config, self.drafter_class.trained_as
        if (self.changes_target or training.through_target) and target.placement.spread:
            raise UserError(f"{type(self).__name__} trains through the target's layers, which target.placement "
                            f"{target.placement.name} does not keep whole on one device; set target.placement: "
                            "replicated, or choose another family")
        if self.changes_target and config.strategy in ZERO_STAGES:
            raise UserError(f"train.strategy {config.strategy} splits the drafter's weights or their optimizer, and "
                            f"{type(self).__name__} trains weights of the target too; set train.strategy: ddp")
        self.target = target
        self.needs_teacher = config.objective != "hard" or config.step_weights in ("e2e", "cat")
        """Whether the objective reads the target's distribution."""
        self.figures, self.curve, self.clock = dict[str, float](), TrainingCurve(), Clock()
        self.seconds = 0.0  # Trained up to the newest optimizer step; equal in all processes of a run that ends by time
        self.stopped = False  # Whether the run ends after this optimizer step although it is not finished
        self.batches: list[tuple[int, Features]] = []  # Of the running step by number, without states
        self.unread: list[FinishedStep] = []  # Finished steps whose figures are still to be read, in order
        self.whole: tuple[Drafter, ...] = ()  # A copy of a drafter whose weights are split among processes
        self._pending: BatchLoss | None = None
        self.gathered: GatheredChoices | None = None  # Of the running step, where it is of several micro-batches
        self._learned, self.peak_memory_bytes = 0.0, 0
        self.token_counts = token_counts  # How often each token is a label, [V]; None where nothing was counted
        self.draft_ids_Q: Tensor | None = None  # Ids of the reduced draft vocabulary
        if (size := config.drafter.vocabulary_size) is not None:
            if token_counts is None:
                raise UserError(f"vocabulary_size is {size}, but the tokens of the training data were not counted; "
                                "pass token_counts, or leave vocabulary_size out")
            self.draft_ids_Q = choose(token_counts, size, always=target.eos_ids)
        # Before the target answers anything, which the drafter's making comes after.
        self.drafter_class.fitted(config.drafter, target)
        self._largest_offset = config.positions.limit(target)
        self.sources: dict[str, str] = {}  # Hashes of files that decided the first weights

    @classmethod
    def settings(cls) -> type[TrainConfig]:
        """The class of its settings: what `config` is annotated with, or the family's own."""
        return get_type_hints(cls).get("config") or train_config(cls.drafter_class)

    def continue_from(self, start: Start) -> None:
        """Let the drafter, which is still to be built, start as a trained one. Raises UserError if that cannot be."""
        self.config = start.continued(self.config, self.drafter_class.family, adapts=self.changes_target)
        self.start = start
        size, ids_Q = self.config.drafter.vocabulary_size, start.draft_ids_Q
        if size is not None and ids_Q is not None and len(ids_Q) <= size:
            self.draft_ids_Q = ids_Q
            if len(ids_Q) < size and self.token_counts is not None:
                # All tokens that the start has learned to guess, and the most frequent others.
                self.draft_ids_Q = choose(self.token_counts, size, always=[*ids_Q.tolist(), *self.target.eos_ids])

    def build_drafter(self) -> Drafter:
        """A new drafter, or one that starts as a trained one, bound to the target."""
        # Before they are read: a checkpoint of another model in the same folder is refused.
        self.sources = self.drafter_class.sources(self.config.drafter)
        start = {} if self.start is None else {"start": self.start.drafter}
        return self.drafter_class.create(self.config.drafter, self.target, self.draft_ids_Q, **start)

    def setup(self, stage: str) -> None:
        """Move the target, which is unknown to Lightning, and bind the drafter to it again."""
        self.target.to(self.trainer.strategy.root_device)
        if "drafter" in self._modules:
            self.drafter.bind(self.target)

    def configure_model(self) -> None:
        """Build the drafter once; called for loading a checkpoint and for fitting."""
        # Lightning calls it twice.
        if "drafter" in self._modules:
            return
        # The first weights depend on the seed alone, and the random numbers outside do not change.
        with torch.random.fork_rng():
            torch.manual_seed(self.config.seed)
            self.drafter = self.build_drafter()
        # The backward pass computes states inside the layers again from their inputs (arXiv:1604.06174): those of a
        # decoder layer's MLP, several times as wide as its input. Attention leaves keys for the draft steps after it
        # and runs once.
        if self.config.activation_checkpointing and not self.drafter.recompute_layers():
            raise UserError("activation_checkpointing computes the states inside of MLPs again, and the "
                            f"{self.drafter.family} drafter has none; set train.activation_checkpointing: false")

    def configure_optimizers(self) -> OptimizerLRSchedulerConfig:
        """The chosen optimizer with warm-up and fall of the learning rate."""
        optimizer = optimizer_for(self.drafter, self.config.optimizer, lr=self.config.lr,
                                  weight_decay=self.config.weight_decay)
        factor = warmup_cosine(self.warmup_steps, self.config.max_steps, lambda: self.time_spent,
                               linear=self.config.fall == "linear")
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    @property
    def warmup_steps(self) -> int:
        """Optimizer steps over which the learning rate rises."""
        return self.config.warmup_steps // (1 if self.start is None else WARMUP_SHARE)

    # The loss --------------------------------------------------------------------------------------------------------

    def weights(self, steps: int) -> tuple[float, ...]:
        """Weight of each draft step in the loss; called once per optimizer step, so that its micro-batches agree."""
        given = self.config.step_weights
        # Weights of each place take the place of those of each step.
        decay = self.drafter_class.trained_as.decay if given is None else 1.0 if isinstance(given, str) else given
        powers = tuple(decay**step for step in range(steps))
        return self.config.drafter.weighed(powers, self.progress_at(self.global_step))

    @property
    def needs_states(self) -> bool:
        """True if a training step reads the target's states; otherwise it runs no target pass."""
        return self.drafter.reads_states or self.needs_teacher or self.config.feature_weight > 0

    def encoded(self, features: Features) -> Features:
        """The batch with the target's states, stored ones or computed now in the target's own precision.

        Processes that share a target must call it together, with as many batches each."""
        if features.final_BLD is not None:
            return features
        # Stored states were made without autocast, and computed ones are the same numbers.
        with torch.autocast(self.target.device.type, enabled=False):
            return self.target.placement.own_states(lambda rows: self.target.encode(rows, self.drafter.taps), features)

    def loss(self, features: Features) -> BatchLoss:
        """Summed loss of a batch, see `VocabularyLoss`."""
        features = self.encoded(features) if self.needs_states else features
        drafts = self.drafter(features)
        # The first micro-batch decides for its step: weights may depend on progress, which goes on meanwhile.
        weights = self.weights(len(drafts.offsets)) if self._pending is None else self._pending.weights
        return BatchLoss(*self.vocabulary_loss(drafts, features, weights), weights, drafts.offsets)

    def vocabulary_loss(self, drafts: Drafts, features: Features, weights: tuple[float, ...]) -> tuple[Tensor, Tensor]:
        """(total, sums_KC) of drafts whose steps have these weights, see `VocabularyLoss`."""
        objective, paths, ids_Q = self.config.objective, self.config.step_weights, self.drafter.token_ids_Q
        judge = self.drafter.judge if isinstance(self.drafter, JudgesGuesses) and self.drafter.judges else None
        mass = objective in NEEDS_MASS or paths == "e2e" or judge is not None
        taught = self.needs_teacher and self.drafter.imitated is None
        teacher = Teacher(self.target, ids_Q, mass=mass) if taught else None
        loss = VocabularyLoss(
            project=self.drafter.project,
            entries=self.target.vocab_size if ids_Q is None else len(ids_Q),
            weights=weights,
            # Several draft steps may share an output layer, whose gradient is then one.
            parameters=tuple(dict.fromkeys(weight for step in range(len(weights))
                                           for weight in self.drafter.output_parameters(step))),
            chunk_elements=self.chunk_elements,
            objective=objective, teacher=teacher, feature_weight=self.config.feature_weight,
            paths=paths if isinstance(paths, str) else None, confidence=judge,
            gather=self.gathered, imitated=self.drafter.imitated)
        return loss(drafts, features, None if ids_Q is None else draft_index(ids_Q, self.target.vocab_size))

    def on_train_batch_start(self, batch: Features, batch_idx: int) -> None:
        """Seed the micro-batch by the run's seed and its number among those of all processes, so that a resumed run
        repeats it, and as many processes as one likes draw the same numbers for it."""
        # Packed rows have become features by now: Lightning moves a batch to the device by the batch's own `to`.
        # A prime above any number of micro-batches keeps runs of neighbouring seeds apart.
        torch.manual_seed(self.config.seed * 1_000_003 + batch_idx * self.trainer.world_size + self.global_rank)
        alone = self.config.accumulate * self.trainer.world_size == 1 or isinstance(self.trainer.strategy, ZeroDrafter)
        self.gathered = None if alone else self.gathered or GatheredChoices([*self.parameters()])

    def training_step(self, batch: Features, batch_idx: int) -> Tensor:
        """Back-propagate the sum of the losses of one micro-batch.

        Lightning divides by the number of micro-batches, DDP and ZeRO by that of ranks; both are undone here."""
        if self._largest_offset:
            # The target reads its true positions. The last step of the last position has the highest position id.
            highest = self.target.context_length - self.drafter.trained_steps
            batch = with_offsets(self.encoded(batch), limit=self._largest_offset, highest=highest)
        # Without states: tokens say which row it was, and states would be kept for a whole step.
        self.batches.append((batch_idx, Features(**{kind: getattr(batch, kind) for kind in KINDS})))
        learned, before = self.loss(batch), self._pending
        sums_KC = learned.sums_KC if before is None else before.sums_KC + learned.sums_KC
        # The graph of a micro-batch ends with its own backward pass; only figures are carried on.
        self._pending = learned._replace(total=learned.total.detach(), sums_KC=sums_KC)
        return learned.total * (self.config.accumulate * self.trainer.world_size)

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide the summed gradient by the count, before clipping. Raises UserError at a wrong loss."""
        if self._pending is None:
            raise RuntimeError("an optimizer step came before any micro-batch")
        # Not read here: on an accelerator the host would wait for all its work at every step.
        pending, self._pending = self._pending, None
        sums_KC = self.trainer.strategy.reduce(pending.sums_KC, reduce_op="sum")
        if self.gathered is not None:
            self.gathered.add(sums_KC, pending.weights, self.trainer.strategy)
        self.gathered = None
        self.unread.append(FinishedStep(
            number=self.global_step + 1, learned=pending._replace(sums_KC=sums_KC),
            learning_rate=optimizer.param_groups[0]["lr"], batches=tuple(self.batches)))
        self.batches.clear()
        if sums_KC.device.type in AT_ONCE or len(self.unread) >= READ_EVERY:
            self.read_figures()
        # The gradient is a sum over micro-batches and processes; DeepSpeed divides it itself just before it clips.
        count = weighted_mean_loss(sums_KC, pending.weights)[1].clamp(min=1.0)
        if isinstance(self.trainer.strategy, ZeroDrafter):
            self.trainer.strategy.deepspeed_engine.optimizer.override_loss_scale(float(count))
        else:
            for parameter in self.parameters():
                if parameter.grad is not None:
                    parameter.grad.div_(count)
        self.seconds = self.clock.seconds
        if self.config.max_minutes is not None:
            # All processes must stop at the same step: the first one's clock decides for all.
            self.seconds = self.trainer.strategy.broadcast(self.seconds)
        self.peak_memory_bytes = max(self.peak_memory_bytes, peak_memory_bytes(self.device))

    def read_figures(self) -> None:
        """Read the figures of the finished steps and log them. Raises UserError at a wrong loss, whose step may be one
        of the last few on an accelerator: no checkpoint and no measurement comes between."""
        read, self.unread = self.unread, []
        for step, sums_KC in zip(read, torch.stack([step.learned.sums_KC for step in read]).cpu() if read else (),
                                 strict=True):
            total, count = (float(value) for value in weighted_mean_loss(sums_KC, step.learned.weights))
            if not math.isfinite(loss := total / max(count, 1.0)):
                raise step.error(loss, self.trainer,
                                 f"lower lr (now {self.config.lr}) or clip (now {self.config.clip})")
            self._learned += count
            if not self._learned and step.number >= min(PATIENCE, self.config.max_steps or PATIENCE):
                reason = "no token is supervised; check the chat template and the data"
                if missed := float(sums_KC[:, 1].sum()):
                    reason = f"all {missed:.0f} labels lie outside the reduced vocabulary; raise vocabulary_size"
                raise UserError(f"nothing to learn in the first {step.number} optimizer steps: {reason}")
            self.figures = self.describe(sums_KC, step.learned.weights, step.learned.offsets) | {
                "learning_rate": step.learning_rate, "data_wait": self.data_wait}
            # Of several draft steps, the one that reads most labels is the one that reads them all.
            self.curve.add(self.figures, float(sums_KC[:, :2].sum(1).max()))
            if self.logger is not None:
                self.logger.log_metrics(self.figures, step=step.number)

    def configure_gradient_clipping(self, optimizer: torch.optim.Optimizer, gradient_clip_val: float | None = None,
                                    gradient_clip_algorithm: str | None = None) -> None:
        """Clip the norm of the whole gradient, unless DeepSpeed does. Lightning refuses to where a fused optimizer runs
        in mixed precision: it expects gradients scaled for float16, which no precision here has."""
        if gradient_clip_val and not isinstance(self.trainer.strategy, ZeroDrafter):
            torch.nn.utils.clip_grad_norm_(self.parameters(), gradient_clip_val)

    def describe(self, sums_KC: Tensor, weights: tuple[float, ...], offsets: tuple[int, ...]) -> dict[str, float]:
        """Figures of an optimizer step by name, from its sums over all processes."""
        return describe(sums_KC, weights, offsets)

    # Time ------------------------------------------------------------------------------------------------------------

    @property
    def time_spent(self) -> float:
        """Elapsed share of `max_minutes`; 0 without a limit. The first steps end no run, and their learning rate does
        not fall faster than they come."""
        if self.config.max_minutes is None:
            return 0.0
        share = self.seconds / (60 * self.config.max_minutes)
        return min(share, self.global_step / LEAST_STEPS) if self.global_step <= LEAST_STEPS else share

    @property
    def seconds_left(self) -> float:
        """Seconds until the minutes end the run; infinite without a limit."""
        return math.inf if self.config.max_minutes is None else 60 * self.config.max_minutes - self.clock.seconds

    @property
    def data_wait(self) -> float:
        """Share of the training time in which this process waited for batches; 0 where the data do not tell."""
        return self.clock.waited / self.seconds if self.seconds else 0.0

    def progress_at(self, step: int) -> float:
        """Progress of the run from 0 to 1 after `step` finished optimizer steps: by steps, or by time where that is
        clearly ahead, see `time_leads`."""
        led = time_leads(self.config.max_steps, step, self.time_spent)
        return min(1.0, self.time_spent if led else self.config.share_of_steps(step))

    @property
    def finished(self) -> bool:
        """True after the last optimizer step."""
        return max(self.config.share_of_steps(self.global_step), self.time_spent) >= 1.0

    def on_train_start(self) -> None:
        """Start the clock; stop at once if the checkpoint was that of the last step."""
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        self.stopped, self.trainer.should_stop = False, self.finished
        self.clock.watch(self.trainer.datamodule)  # type: ignore[attr-defined]
        self.clock.start()

    def on_train_batch_end(self, outputs: Any, batch: Features, batch_idx: int) -> None:
        """Stop after the last step, once the callbacks have measured and saved it."""
        self.trainer.should_stop = self.finished or self.stopped

    # Validation and trained weights ----------------------------------------------------------------------------------

    @property
    def adapter(self) -> Adapter | None:
        """Low-rank changes of the target, for families that train it too; otherwise None."""
        return None

    def verifier(self, rows: Sequence[Features]) -> tuple[Target, Sequence[Features]]:
        """The target that verifies the drafts, and its own greedy answers with its states, for held-out conversations
        with those of the original target."""
        return self.target, rows

    @contextmanager
    def decoding(self) -> Iterator[Drafter]:
        """A block with the whole drafter in evaluation mode. All processes must enter it."""
        self.read_figures()
        drafter = self.drafter
        if self.whole:
            # With the weights of now; on the CPU while it is not used.
            [drafter] = self.whole
            drafter.load_state_dict(whole_state(self.drafter))
            drafter.to(self.target.device).bind(self.target)
        yield drafter.eval()
        drafter.train()
        if self.whole:
            drafter.to("cpu")

    def trained(self) -> dict[str, Tensor]:
        """All trained weights by name, those of an artifact. All processes must call it."""
        return whole_state(self.drafter)

    def restore(self, weights: dict[str, Tensor]) -> None:
        """Load the weights that `trained` returned, after training into a drafter that no process shares any more."""
        if self.whole:
            [self.drafter], self.whole = self.whole, ()
        self.drafter.load_state_dict(weights)

    # Checkpoints -----------------------------------------------------------------------------------------------------

    def recipe(self) -> dict[str, Any]:
        """Settings that must be equal to resume a run from a checkpoint."""
        ids_Q = self.drafter.token_ids_Q
        chosen = None if ids_Q is None else hashlib.sha256(json.dumps(ids_Q.tolist()).encode()).hexdigest()[:16]
        config = {**asdict(self.config), "start": None if self.start is None else self.start.weights_sha256}
        # A run goes on with more minutes.
        config.pop("max_minutes")
        return {"config": decisive_settings(config), "family": self.drafter.family,
                "drafter": self.drafter.describe(), "draft_vocabulary": chosen,
                "target": self.target.identity.fields(), **self.sources}

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add the settings that identify the run, and its counters."""
        self.read_figures()
        checkpoint["draftsmith"] = {"recipe": self.recipe(), "learned": self._learned, "seconds": self.seconds,
                                    "waited": self.clock.waited, "peak_memory_bytes": self.peak_memory_bytes,
                                    "curve": asdict(self.curve)}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Refuse the checkpoint of another run, and count its micro-batches as so many processes read them."""
        stored, weights = checkpoint["draftsmith"], checkpoint["state_dict"]
        damage = ("the checkpoint in the folder of the training is damaged ({} is not as it was written); delete it to "
                  "start training again")
        if lost := {"recipe", "learned", "seconds", "waited", "peak_memory_bytes", "curve"} - set(stored):
            raise UserError(damage.format(min(lost)))
        require_same_settings(stored["recipe"], self.recipe())
        # Shared drafters are read part by part, and their strategy compares the parts.
        own = {} if self.whole else self.state_dict()
        if wrong := [name for name, tensor in own.items() if getattr(weights.get(name), "shape", None) != tensor.shape]:
            raise UserError(damage.format(f"its weight {wrong[0]}"))
        # Lightning counts the micro-batches of one process; another number of processes reads other numbers of them.
        progress = checkpoint["loops"]["fit_loop"]["epoch_loop.batch_progress"]
        for counts in (progress["total"], progress["current"]):
            read = checkpoint["global_step"] * self.config.accumulate - counts["ready"]
            counts.update({name: count + read for name, count in counts.items()})
        self._learned, self.peak_memory_bytes = stored["learned"], stored["peak_memory_bytes"]
        self.curve = record_of(TrainingCurve, stored["curve"], "the curve in the checkpoint of the training",
                               "delete it to start training again")
        self.seconds = self.clock.before = stored["seconds"]
        self.clock.waited_before = stored["waited"]
