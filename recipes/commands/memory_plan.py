"""The command `plan`: parameters, and peak memory of each stage of a recipe, from shapes; no weight is read.

Shapes: B rows, L positions, N nodes of a tree, C tokens of a prompt."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from transformers.integrations import moe

from ...data.datamodule import AHEAD
from ...data.store.feature_shards import format_named
from ...data.store.feature_store import in_words
from ...data.store.token_store import prompts_learnable
from ...export.evaluation.schedule import UNTIMED_ROWS
from ...modules import Features, Target, TokenTree, Topology, UserError
from ...modules.target.devices.placement import Zero3
from ...modules.target.kv_cache import FIRST_SLOTS
from ...modules.target.linear_forms import has_packed_product, linear_layers
from ...modules.target.loading.loading import is_local, sketch_target
from ...modules.tuning.step_timing import timed_slots
from ...modules.tuning.tree_search import ranked_text
from ...modules.tuning.trials import MOST_ANSWERS
from ...trainers import DraftModule
from ...trainers.chunked_losses import CHUNK_ELEMENTS
from ...trainers.fitting import precision_of
from ...trainers.loggers import require_logger
from ...trainers.train_config import ZERO_STAGES
from ...trainers.zero_drafter import BUCKET
from ..counted_work import CountedWork, blank_tensors
from ..reading.command_line import Command, Parsed
from ..recipe import Recipe, choose_states, dry_run, opening
from ..stages.answer_workers import gpus_of, on_gpu, resident_bytes, worker_count
from ..terminal import say

FLOAT32 = 4  # Bytes of a number of a drafter in training
ROW_CONVERSATIONS = 16  # Most conversations of a planned row: they cost the time of planning, but no memory


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


class Plan:
    """Parameters of a recipe, and the memory of its stages, counted with a module of `dry_run` and a target of
    `sketch_target`, whose tensors are replaced by ones without values. An accelerator is counted as a CPU in its number
    formats, with its chunks of the loss; the drafter computes in bfloat16 if `mixed`."""

    def __init__(self, recipe: Recipe, target: Target, module: DraftModule, *, accelerator: bool, mixed: bool,
                 reason: str) -> None:
        self.recipe, self.target, self.module = recipe, target, module
        self.accelerator = accelerator  # Whether a GPU is planned for
        self.reason = reason  # Of the origin of states; empty where the recipe names it
        # Before what is counted below takes memory of this process too.
        process = 0 if accelerator else resident_bytes()
        self.target_parameters = parameters_of(target.model)
        self.held = held_weights(target, recipe)  # Weights of the target on one device, packed ones left out
        self.width, self.kinds = target.hidden_size * target.dtype.itemsize, 1 + len(module.drafter.taps)
        self.stores = recipe.batch.states != "computed" and module.needs_states
        form = format_named(recipe.batch.states_format, target.dtype)
        tokens = 0 if recipe.batch.states == "computed" else recipe.distill.budget_tokens or 0
        # On disk; 0 where they are computed in the step, or the budget is in minutes alone.
        self.stored_states = tokens * self.kinds * form.token_bytes(target.hidden_size)
        offloaded = isinstance(target.placement, Zero3) and target.placement.offload
        # Of the target's weights, what all processes together keep in the machine's memory.
        self.offloaded = parameters_of(target.layers) * target.dtype.itemsize if offloaded else 0
        self.sharing = sharing(target, recipe)  # Devices that share the target's layers, and the bytes of its passes
        # On a CPU, linear layers packed for oneDNN stand next to the plain ones.
        packs = not (accelerator or target.placement.spread) and has_packed_product(target.dtype)
        packed = [layer.weight.numel() for layer in linear_layers(target.model)] if packs else []
        self.base = {"process": process, "packed": sum(packed) * target.dtype.itemsize,
                     "target": self.held + (0 if accelerator else self.offloaded // recipe.train.world)}
        self.drafter_parameters = sum(weight.numel() for weight in module.parameters() if weight.requires_grad)
        self.drafter = FLOAT32 * parameters_of(module)
        module.chunk_elements = CHUNK_ELEMENTS["cuda" if accelerator else "cpu"]
        # Families that train in stages take most in the last one.
        vars(module)["progress_at"] = lambda _step: 1.0
        self.count, made = CountedWork(), dict[int, Tensor]()
        learning = getattr(module, "learning", None)
        for model in (target.model, module, *([] if learning is None else [learning.target.model])):
            blank_tensors(model, self.count, made)
        with self.count:
            module.drafter.bind(target)
        self.borrowed = self.count.live  # Bytes of the target's output rows that a reduced draft vocabulary selects
        # Two averages of a weight with AdamW, one with Muon.
        self.moments = sum((1 if "products" in group else 2) * FLOAT32 * weight.numel() for group in
                           module.configure_optimizers()["optimizer"].param_groups for weight in group["params"])
        self.zero = ZERO_STAGES.get(recipe.train.strategy, 0)
        self.split = recipe.train.world if self.zero == 3 else 1  # Processes that divide the drafter's weights, moments
        self.gathered = self.drafter if self.split > 1 else 0  # Of weights that a step has whole
        self.longest = min(target.context_length, opening(recipe) + recipe.distill.max_new_tokens)
        self.held_out = self.proposals()
        self.stages = (self.answers(), self.states(), self.training(mixed), self.tree(), self.evaluation())

    def answers(self) -> StagePlan:
        """`distill`: the target answers prompts in all slots at once, in each of the processes that answer."""
        config = self.recipe.distill
        processes = worker_count(self.recipe, (gpus_of(self.recipe.target) or None) if self.accelerator else 0)
        prompt, rows = opening(self.recipe), min(config.slots, config.shard_prompts)
        # One row more holds the start that all prompts share.
        work = self.decoding(rows + 1, prompt, config.max_new_tokens, 1)
        kept = config.shard_prompts * self.longest * self.kinds * self.width if self.stores else 0
        # Its pieces are sorted one kind after the other, and one kind is written at a time.
        kept += 2 * kept // self.kinds
        parts = {**self.base, "cache and passes": work // self.sharing}
        if config.train_dtype != "own" and not self.accelerator:
            parts["second number format"] = (self.base["target"] + self.base["packed"]) // 2
        if not self.accelerator:
            parts["kept states"] = kept
        host = {"kept states, of all processes": processes * kept} if self.accelerator else {}
        return StagePlan(name="distill", parts=parts, host=host, processes=processes)

    def states(self) -> StagePlan:
        """`encode`: the target reads what it has not written itself, a shard at a time."""
        config = self.recipe.distill
        reads = self.stores and set(config.shares) == {"text"}
        kept = config.shard_prompts * self.longest * self.kinds * self.width if reads else 0
        parts = dict(self.base)
        if reads:
            parts["passes"] = self.held_out // self.sharing
        if not self.accelerator:
            parts["kept states"] = kept + 2 * kept // self.kinds
        return StagePlan(name="encode", parts=parts, host={"kept states": kept} if self.accelerator else {})

    def training(self, mixed: bool) -> StagePlan:
        """`train`: the drafter with its optimizer, a step on a micro-batch, the held-out states."""
        module, batch, before, target = self.module.train(), self.batch(), self.count.live, 0
        with self._counting():
            if module.needs_states:
                batch = self.target.encode(batch, module.drafter.taps)
                target = self.count.peak - before
            states, start = self.count.live - before, self.count.live
            self.count.restart()
            with torch.autocast("cpu", torch.bfloat16, enabled=mixed):
                learned = module.loss(batch)
            forward = self.count.peak - start
            learned.total.backward()  # type: ignore[no-untyped-call]
            backward = states + self.count.peak - start
        gradients = sum(weight.grad.nbytes for weight in module.parameters() if weight.grad is not None)
        module.zero_grad()
        former = self._part(gradients) if self.zero != 2 else gradients // self.recipe.train.world
        computed = self.recipe.batch.states != "stored"
        # The former step's gradients live until its backward pass, and over all micro-batches of a step.
        forward = former + max(forward + states, target if computed else 0)
        if self.split > 1:
            # Of gradients too, no more is whole at once than of weights.
            backward += former - (self.drafter - self.gathered)
        buckets = gradients if self.recipe.train.world > 1 == self.split else 0
        if self.zero:
            buckets = FLOAT32 * min(BUCKET, self.drafter_parameters)
        # DeepSpeed steps a copy of the weights, and divides it with the moments.
        optimizer = (-(-(self.moments + FLOAT32 * self.drafter_parameters) // self.recipe.train.world) if self.zero
                     else self._part(self.moments))
        # The states of this process's share of the held-out rows stay for the whole training.
        held_out = self.recipe.distill.validation_prompts
        rows = -(-min(held_out, module.validation_rows or held_out) // self.recipe.train.world)
        parts = {**self.base, "drafter": self._part(self.drafter) + self.gathered + self.borrowed,
                 "optimizer": optimizer, "step": max(forward, backward) + buckets,
                 "held-out states": rows * self.longest * self.kinds * self.width}
        # One more than asked for: the training loop fetches a batch before it hands out the last one.
        ahead = (AHEAD + 1) * states if self.stores else 0
        if not self.accelerator:
            # A checkpoint is written from memory, in which what a step has freed stays with the process.
            parts |= {"checkpoint": self._part(self.drafter + self.moments), "batches read ahead": ahead}
            return StagePlan(name="train", parts=parts)
        host = {"batches read ahead": ahead, "the target's layers, of all processes": self.offloaded}
        return StagePlan(name="train", parts=parts, host=host)

    def batch(self) -> Features:
        """A micro-batch of packed conversations, as long as the recipe lets them be, whose answers are learned."""
        recipe, ids_Q = self.recipe, self.module.drafter.token_ids_Q
        rows, length = recipe.batch.rows_per_batch, recipe.batch.row_length
        each = min(length, max(opening(recipe) + recipe.distill.max_new_tokens, -(-length // ROW_CONVERSATIONS)))
        learns_prompts = recipe.batch.own_prompts and prompts_learnable(vars(recipe.prompts))
        learns_all = learns_prompts or "text" in recipe.distill.shares
        order_L = torch.arange(length)
        first = 1 if learns_all else min(opening(recipe), each - 1)
        return Features(tokens_BL=torch.full((rows, length), 0 if ids_Q is None else int(ids_Q[0])),
                        supervised_BL=(order_L % each >= first).repeat(rows, 1),
                        segments_BL=(order_L // each).repeat(rows, 1), positions_BL=(order_L % each).repeat(rows, 1))

    def _part(self, size: int) -> int:
        """This process's part of what the processes divide."""
        return -(-size // self.split)

    def tree(self) -> StagePlan:
        """`artifact`: proposals along held-out text, row by row, and timed passes of several batches, with all rows."""
        nodes = self.recipe.tree.searched_nodes
        timed = timed_slots(nodes, self.module.drafter.virtual_nodes) * cache_bytes(self.target)
        parts = {**self.base, "drafter": 2 * self.drafter + self.borrowed, "timed passes": timed // self.sharing,
                 "replayed answers": MOST_ANSWERS * self.longest * self.kinds * self.width,
                 "proposals": self.held_out // self.sharing}
        return StagePlan(name="artifact", parts=parts)

    def proposals(self) -> int:
        """A held-out conversation: the target's pass over it, and the drafter's proposals along it."""
        zeros_BL, order_BL = torch.zeros(1, self.longest, dtype=torch.int64), torch.arange(self.longest)[None]
        row = Features(tokens_BL=zeros_BL, supervised_BL=order_BL > 0, segments_BL=zeros_BL, positions_BL=order_BL)
        self.module.eval()
        before = self.count.live
        with self._counting(), torch.no_grad():
            encoded = self.target.encode(row, self.module.drafter.taps)
            ranked_text(self.module.drafter, [encoded])
            return self.count.peak - before

    def evaluation(self) -> StagePlan:
        """`evaluate`: trees of the largest size in every row, next to the drafter in the target's number format."""
        config, rows = self.recipe.evaluate, max(UNTIMED_ROWS, *self.recipe.evaluate.batches)
        nodes = self.recipe.tree.used_nodes or self.recipe.tree.searched_nodes
        work = self.decoding(rows, opening(self.recipe), config.max_new_tokens, nodes)
        parts = {**self.base, "drafter": self.drafter // FLOAT32 * self.target.dtype.itemsize + self.borrowed,
                 "cache and passes": work // self.sharing}
        return StagePlan(name="evaluate", parts=parts)

    def decoding(self, rows: int, prompt: int, answer: int, nodes: int) -> int:
        """Decoding of a batch from its prompts to its longest answers. The cache grows as it does in decoding: in the
        last growth, which takes most, the old slots and the new ones of a few layers are alive together."""
        before, longest = self.count.live, prompt + answer + nodes
        widths, grown = [longest], min(longest, max(prompt, FIRST_SLOTS))
        while grown < longest:
            # See `RowCache`; only its last growth counts.
            widths, grown = [grown + 1, longest], min(longest, max(grown + 1, grown + grown // 2))
        tree = Topology.chain(nodes - 1).plant(torch.zeros(rows, nodes, dtype=torch.int64))
        with self._counting(), torch.no_grad():
            held = self.target.start(rows, longest)
            prompts = TokenTree.prompts(torch.zeros(rows, prompt, dtype=torch.int64), torch.full((rows,), prompt))
            read = held.run(prompts, select_BM=torch.full((rows, 1), prompt - 1))
            del read, prompts
            for width in widths:
                held.cache.assume(width - nodes)
                logits_BNV = held.run(tree).logits_BMV
                chosen_BN = logits_BNV.float().softmax(-1).argmax(-1)
                del logits_BNV, chosen_BN
            del held
            return self.count.peak - before

    @contextmanager
    def _counting(self) -> Iterator[None]:
        """A block that is counted from zero."""
        # The products of tokens sorted by expert, as if all had the first one: as many, and as large.
        products = patch.object(moe, "_grouped_mm", lambda input, weight, offs: input.to(weight.dtype) @ weight[0])
        with products, self.count:
            self.count.restart()
            yield


def sharing(target: Target, recipe: Recipe) -> int:
    """Devices that hold one target: processes that train, or those of one that decodes; UserError if as many cannot."""
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


def plan_recipe(recipe: Recipe) -> Plan:
    """Count parameters and bytes: for the device here, or for a GPU elsewhere where `target.device` is cuda. Raises
    UserError if the target, the family or its settings do not fit."""
    reason, accelerator = "", on_gpu(recipe.target)
    elsewhere = accelerator and not torch.cuda.is_available()
    if elsewhere:
        # On a GPU elsewhere `auto` is bfloat16; here, its shapes are counted on the processor.
        dtype: Any = "bfloat16" if recipe.target.dtype in ("auto", "fastest") else recipe.target.dtype
        recipe = replace(recipe, target=replace(recipe.target, dtype=dtype, device="cpu"),
                         train=replace(recipe.train, accelerator="cpu"))
    try:
        target = sketch_target(recipe.target)
    except UserError as error:
        # Where the Hub cannot be reached, transformers raises an OSError.
        if is_local(recipe.target.name) or not isinstance(error.__cause__, OSError):
            raise
        raise UserError(f"{error}; plan reads no weights, so that a folder with the model's config.json alone will "
                        "do: --target.name FOLDER") from error
    module = dry_run(recipe, target)
    if recipe.batch.states == "auto":
        choice, reason = choose_states(recipe, module, recipe.data or recipe.out / "data")
        recipe = replace(recipe, batch=replace(recipe.batch, states=choice))
    return Plan(recipe, target, module, accelerator=accelerator, reason=reason,
                mixed=elsewhere or precision_of(recipe.train) == "bf16-mixed")


def plan(parsed: Parsed[Recipe]) -> None:
    """Peak memory of each stage of a recipe, without reading a weight or running a stage; with --target.device cuda on
    GPUs that need not be here."""
    require_logger(parsed.values.train.logger)
    target, found = parsed.values.target, plan_recipe(parsed.values)
    place = "" if target.placement == "replicated" else f" a device ({target.placement})"
    where = "GPU" if found.accelerator else "process"
    say(f"target    {target.name}: {found.target_parameters:,} parameters, {in_words(found.held)}{place}")
    say(f"drafter   {found.drafter_parameters:,} trained parameters")
    say(f"disk      target states: {in_words(found.stored_states) if found.stored_states else 'none stored'}")
    if found.reason:
        say(f"          {found.reason}")
    say("")
    for stage in found.stages:
        parts = ", ".join(f"{name} {in_words(size)}" for name, size in stage.parts.items() if size)
        each = f"a {where}" if stage.processes == 1 else f"a {where}, {stage.processes} of them at once"
        say(f"{stage.name:<10}{in_words(stage.peak):>10} {each}: {parts}")
        for name, size in stage.host.items():
            if size:
                say(f"{'':<10}{in_words(size):>10} of the machine's memory: {name}")
    say("\nMemory is counted from shapes, for prompts and answers as long as the recipe lets them be.")


COMMANDS: dict[str, Command[Any]] = {"plan": Command(name="plan", arguments=Recipe, run=plan, trains=True)}
