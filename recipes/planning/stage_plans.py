"""Peak memory of each stage of a recipe, from shapes."""

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch.optim import AdamW, Optimizer

from ...data.batches.datamodule import AHEAD
from ...export.evaluation.schedule import UNTIMED_ROWS
from ...modules import Target
from ...modules.interfaces.proposer import virtual_nodes
from ...modules.target.devices.placement import Zero3
from ...modules.target.linear_forms import has_packed_product, linear_layers
from ...modules.tuning.step_timing import timed_slots
from ...modules.tuning.trials import MOST_ANSWERS
from ...trainers import DraftModule
from ...trainers.steps.optimizers import Together
from ...trainers.train_config import ZERO_STAGES
from ...trainers.zero_drafter import BUCKET
from ..recipe import Recipe
from .dry_run import gpus_of, worker_count
from .planned_work import PlannedWork, opening

FLOAT32 = 4  # Bytes of a number of a drafter in training


@dataclass(frozen=True, kw_only=True)
class StagePlan:
    """The greatest memory that a stage takes, by purpose."""

    name: str  # The stage
    parts: dict[str, int]  # Bytes by purpose, on each device, or in each process on a CPU; alive together
    host: dict[str, int] = field(default_factory=dict)  # Bytes by purpose in the machine's memory, next to a GPU's
    processes: int = 1  # Processes of this stage on one machine, each with these parts; 1 where training decides

    @property
    def peak(self) -> int:
        """Sum of the parts."""
        return sum(self.parts.values())


class StagePlans:
    """The plans of all stages: of `module`, by `dry_run`, and a target all on the meta device. `process` is the bytes
    of a process before it loads a model, 0 on an accelerator; the drafter computes in bfloat16 if `mixed`."""

    def __init__(self, recipe: Recipe, target: Target, module: DraftModule, *, accelerator: bool, process: int,
                 mixed: bool) -> None:
        self.recipe, self.target, self.module = recipe, target, module
        self.accelerator, self.mixed = accelerator, mixed
        self.width = target.hidden_size * target.dtype.itemsize
        self.kinds = 1 + len(module.drafter.taps)
        self.stores = recipe.batch.states != "computed" and module.needs_states
        offloaded = isinstance(target.placement, Zero3) and target.placement.offload
        self.offloaded = parameters_of(target.layers) * target.dtype.itemsize if offloaded else 0
        """Bytes of the target's weights that all processes together keep in the machine's memory."""
        self.weights = held_weights(target, recipe) + (0 if accelerator else self.offloaded // recipe.train.world)
        self.base = {"process": process, "target": self.weights,
                     "packed": 0 if accelerator else packed_bytes(target)}
        self.trained = sum(weight.numel() for weight in module.parameters() if weight.requires_grad)
        self.drafter = FLOAT32 * sum(weight.numel() for weight in module.parameters())
        self.work = PlannedWork(recipe, target, module, accelerator=accelerator)
        self.answering = worker_count(recipe, (gpus_of(recipe.target) or None) if accelerator else 0)
        """Processes that answer prompts on one machine, as far as its memory holds them."""
        self.moments = moments(module)
        self.zero = ZERO_STAGES.get(recipe.train.strategy, 0)
        self.split = recipe.train.world if self.zero == 3 else 1  # Processes that divide the drafter's weights, moments
        self.gathered = FLOAT32 * parameters_of(module) if self.split > 1 else 0  # Of weights that a step has whole
        self.longest = min(target.context_length, opening(recipe) + recipe.distill.max_new_tokens)
        self.held_out = self.work.held_out()

    def all(self) -> Iterator[StagePlan]:
        """The stages, in order."""
        yield self.answers()
        yield self.states()
        yield self.training()
        yield self.tree()
        yield self.evaluation()

    # Answers ---------------------------------------------------------------------------------------------------------

    def answers(self) -> StagePlan:
        """`distill`: the target answers prompts in all slots at once, in each of the processes that answer."""
        config, processes = self.recipe.distill, self.answering
        prompt, rows = opening(self.recipe), min(config.slots, config.shard_prompts)
        # One row more holds the start that all prompts share.
        work = self.work.decoding(rows + 1, prompt, config.max_new_tokens, 1)
        kept = config.shard_prompts * self.longest * self.kinds * self.width if self.stores else 0
        # Its pieces are sorted one kind after the other, and one kind is written at a time.
        kept += 2 * kept // self.kinds
        parts = {**self.base, "cache and passes": self._shared(work)}
        if config.train_dtype != "own" and not self.accelerator:
            parts["second number format"] = (self.base["target"] + self.base["packed"]) // 2
        if not self.accelerator:
            parts["kept states"] = kept
        host = {"kept states, of all processes": processes * kept} if self.accelerator else {}
        return StagePlan(name="distill", parts=parts, host=host, processes=processes)

    # States ----------------------------------------------------------------------------------------------------------

    def states(self) -> StagePlan:
        """`encode`: the target reads what it has not written itself, a shard at a time."""
        config = self.recipe.distill
        reads = self.stores and set(config.shares) == {"text"}
        kept = config.shard_prompts * self.longest * self.kinds * self.width if reads else 0
        parts = dict(self.base)
        if reads:
            parts["passes"] = self._shared(self.held_out)
        if not self.accelerator:
            parts["kept states"] = kept + 2 * kept // self.kinds
        return StagePlan(name="encode", parts=parts, host={"kept states": kept} if self.accelerator else {})

    # Training --------------------------------------------------------------------------------------------------------

    def training(self) -> StagePlan:
        """`train`: the drafter with its optimizer, a step on a micro-batch, the held-out states."""
        step = self.work.step(self.mixed)
        former = self._part(step.gradients) if self.zero != 2 else step.gradients // self.recipe.train.world
        computed = self.recipe.batch.states != "stored"
        # The former step's gradients live until its backward pass, and over all micro-batches of a step.
        forward = former + max(step.forward + step.states, step.target if computed else 0)
        backward = step.states + step.whole
        if self.split > 1:
            # Of gradients too, no more is whole at once than of weights.
            backward += former - (self.drafter - self.gathered)
        buckets = step.gradients if self.recipe.train.world > 1 == self.split else 0
        if self.zero:
            buckets = FLOAT32 * min(BUCKET, self.trained)
        # DeepSpeed steps a copy of the weights, and divides it with the moments.
        optimizer = (-(-(self.moments + FLOAT32 * self.trained) // self.recipe.train.world) if self.zero
                     else self._part(self.moments))
        # The states of this process's share of the held-out rows stay for the whole training.
        held_out = self.recipe.distill.validation_prompts
        rows = -(-min(held_out, self.module.validation_rows or held_out) // self.recipe.train.world)
        parts = {**self.base, "drafter": self._part(self.drafter) + self.gathered + self.work.borrowed,
                 "optimizer": optimizer, "step": max(forward, backward) + buckets,
                 "held-out states": rows * self.longest * self.kinds * self.width}
        # One more than asked for: the training loop fetches a batch before it hands out the last one.
        ahead = (AHEAD + 1) * step.states if self.stores else 0
        if not self.accelerator:
            # A checkpoint is written from memory, in which what a step has freed stays with the process.
            parts |= {"checkpoint": self._part(self.drafter + self.moments), "batches read ahead": ahead}
            return StagePlan(name="train", parts=parts)
        host = {"batches read ahead": ahead, "the target's layers, of all processes": self.offloaded}
        return StagePlan(name="train", parts=parts, host=host)

    def _part(self, size: int) -> int:
        """This process's part of what the processes divide."""
        return -(-size // self.split)

    # Tree and evaluation ---------------------------------------------------------------------------------------------

    def tree(self) -> StagePlan:
        """`artifact`: held-out text is proposed along row by row, and passes of several batches are timed, all rows at
        once."""
        nodes = self.recipe.tree.searched_nodes
        timed = timed_slots(nodes, virtual_nodes(self.module.drafter)) * cache_bytes(self.target)
        parts = {**self.base, "drafter": 2 * self.drafter + self.work.borrowed, "timed passes": self._shared(timed),
                 "replayed answers": MOST_ANSWERS * self.longest * self.kinds * self.width,
                 "proposals": self._shared(self.held_out)}
        return StagePlan(name="artifact", parts=parts)

    def evaluation(self) -> StagePlan:
        """`evaluate`: trees of the largest size in every row, next to the drafter in the target's number format."""
        config, rows = self.recipe.evaluate, max(UNTIMED_ROWS, *self.recipe.evaluate.batches)
        nodes = self.recipe.tree.used_nodes or self.recipe.tree.searched_nodes
        prompt = opening(self.recipe)
        work = self.work.decoding(rows, prompt, config.max_new_tokens, nodes)
        parts = {**self.base, "drafter": self.drafter // FLOAT32 * self.target.dtype.itemsize + self.work.borrowed,
                 "cache and passes": self._shared(work)}
        return StagePlan(name="evaluate", parts=parts)

    def _shared(self, count: int) -> int:
        """Bytes of passes on one of the devices that share the target's layers in decoding."""
        return count // sharing(self.target, self.recipe)


def sharing(target: Target, recipe: Recipe) -> int:
    """Devices that hold one target together: processes that train, or the devices of one process that decodes;
    UserError if as many cannot."""
    if target.placement.name == "layers":
        return max(1, torch.accelerator.device_count())
    return target.placement.size(recipe.train.world)


def held_weights(target: Target, recipe: Recipe) -> int:
    """Bytes of the target's weights on one device: its share of the layers, and all of the rest."""
    every, layers = parameters_of(target.model), parameters_of(target.layers)
    if target.placement.slow:
        return (every - layers + layers // target.num_layers) * target.dtype.itemsize
    if isinstance(target.placement, Zero3):
        # The layer that runs and the next one are whole.
        held = 2 * layers // target.num_layers + (0 if target.placement.offload else -(-layers // recipe.train.world))
        return (every - layers + held) * target.dtype.itemsize
    return (every - layers + -(-layers // sharing(target, recipe))) * target.dtype.itemsize


def packed_bytes(target: Target) -> int:
    """Bytes of the linear layers packed for oneDNN, next to the plain ones, on a CPU."""
    if target.placement.spread or not has_packed_product(target.dtype):
        return 0
    return sum(layer.weight.numel() for layer in linear_layers(target.model)) * target.dtype.itemsize


def parameters_of(module: torch.nn.Module) -> int:
    """Number of a module's parameters."""
    return sum(parameter.numel() for parameter in module.parameters())


def cache_bytes(target: Target) -> int:
    """Bytes of keys and values that one token takes in the target."""
    given, heads = target.config.to_dict(), int(target.config.num_attention_heads)
    width = int(given.get("head_dim") or target.hidden_size // heads)
    each = 2 * int(given.get("num_key_value_heads") or heads) * width
    if rank := given.get("kv_lora_rank"):
        # Latent attention keeps what the keys and values of all heads are made of, and one rotated key.
        each = int(rank) + int(given["qk_rope_head_dim"])
    return each * target.num_layers * target.dtype.itemsize


def moments(module: DraftModule) -> int:
    """Bytes of the optimizer's averages: two numbers of a weight with AdamW, one with Muon."""
    made = module.configure_optimizers()["optimizer"]
    parts: tuple[Optimizer, ...] = made.parts if isinstance(made, Together) else (made,)
    return sum((2 if isinstance(part, AdamW) else 1) * FLOAT32 * weight.numel()
               for part in parts for group in part.param_groups for weight in group["params"])
