"""Memory and parameters of a recipe, from shapes alone: no weight is read, nothing is run.

Shapes: B rows and L tokens of a micro-batch, D hidden size, K draft steps, V vocabulary.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

from ..data.disk_room import in_words
from ..data.state_formats import format_named
from ..modules import Drafter, Target
from ..modules.target.loading import sketch_target
from ..trainers import DraftModule, families
from ..trainers.chunked_losses import CHUNK_ELEMENTS
from ..trainers.strategies import FSDP2
from .dry_run import dry_run
from .parsing import Command, Parsed
from .recipe import Recipe
from .terminal_text import say

ADAM_BYTES = 16
"""Bytes a trained parameter takes in float32: itself, its gradient, and AdamW's two moments."""
WIDE = 4
"""Bytes of a float32."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Parameters and bytes of a recipe by purpose."""

    target_parameters: int
    """Parameters of the frozen target."""
    target: int
    """Weights of the target that one process holds, in bytes; packed for oneDNN they take as much again on a CPU."""
    drafter_parameters: int
    """Trained parameters."""
    drafter: int
    """Weights, gradients and AdamW's moments that one process holds while a step runs, in bytes."""
    batch_states: int
    """The target's states of one micro-batch, in bytes on every device."""
    batch_drafts: int
    """Draft states of one micro-batch with their gradient, and the logits alive at once, in bytes on every device."""
    distill_cache: int
    """Keys and values of the answers generated at once, in bytes."""
    kept_states: int
    """States of one shard of answers, kept in memory until the shard is stored, in bytes; 0 where none are."""
    stored_states: int
    """Target states on disk, in bytes; 0 where they are computed in the step, or the budget is in minutes alone."""

    @property
    def training(self) -> int:
        """Bytes on one device while training."""
        return self.target + self.drafter + self.batch_states + self.batch_drafts


def plan_recipe(recipe: Recipe, target: Target) -> Plan:
    """Count parameters and bytes.

    Args:
        recipe: the recipe.
        target: a sketch, see `sketch_target`.

    Raises:
        UserError: if the family or its settings do not fit the target.
    """
    module, batch = dry_run(recipe, target), recipe.batch
    drafter = module.drafter
    trained = sum(parameter.numel() for parameter in module.parameters() if parameter.requires_grad)
    tokens, states = batch.rows_per_batch * batch.row_length, 1 + len(drafter.taps)
    width, form = target.hidden_size * target.dtype.itemsize, format_named(batch.states_format, target.dtype)
    target_parameters, layers = parameters_of(target.model), parameters_of(target.layers)
    processes = target.placement.size(recipe.train.world)
    held = target_parameters - layers + -(-layers // processes)
    shard, keeps = recipe.distill.shard_prompts, batch.states != "computed" and module.needs_states
    return Plan(
        target_parameters=target_parameters,
        target=held * target.dtype.itemsize,
        drafter_parameters=trained,
        drafter=drafter_bytes(module),
        batch_states=tokens * states * width,
        batch_drafts=(2 * tokens * drafter.trained_steps * drafter.state_size + 4 * _logits(target, drafter)) * WIDE,
        distill_cache=recipe.distill.slots * recipe.distill.max_new_tokens * cache_bytes(target),
        kept_states=shard * recipe.distill.max_new_tokens * states * width if keeps else 0,
        stored_states=_stored(recipe, states * form.token_bytes(target.hidden_size)),
    )


def drafter_bytes(module: DraftModule) -> int:
    """Bytes of the drafter in one process: its part of everything, and what a step gathers with its gradient."""
    trained = sum(parameter.numel() for parameter in module.parameters() if parameter.requires_grad)
    if module.config.strategy != FSDP2:
        return trained * ADAM_BYTES
    apart = [parameters_of(part) for part in module.drafter.gathered_apart()]
    gathered = parameters_of(module) - sum(apart) + max(apart, default=0)
    return -(-trained * ADAM_BYTES // module.config.world) + 2 * WIDE * gathered


def parameters_of(module: nn.Module) -> int:
    """Number of a module's parameters."""
    return sum(parameter.numel() for parameter in module.parameters())


def _stored(recipe: Recipe, width: int) -> int:
    """Bytes of stored states at `width` bytes a token."""
    every = (recipe.distill.budget_tokens or 0) * width
    room = recipe.batch.store_bytes
    if recipe.batch.states == "computed":
        return 0
    return every if room is None else min(every or room, room)


def _logits(target: Target, drafter: Drafter) -> int:
    """Logits alive at once: a chunk's, but never fewer than one row of the vocabulary."""
    ids_Q = drafter.token_ids_Q
    return max(CHUNK_ELEMENTS["cpu"], target.vocab_size if ids_Q is None else len(ids_Q))


def cache_bytes(target: Target) -> int:
    """Bytes of keys and values that one token takes in the target."""
    heads = getattr(target.config, "num_key_value_heads", None) or target.config.num_attention_heads
    width = getattr(target.config, "head_dim", None) or target.hidden_size // target.config.num_attention_heads
    return 2 * target.num_layers * int(heads) * int(width) * target.dtype.itemsize


def lines(plan: Plan, recipe: Recipe) -> Iterator[str]:
    """The plan for people."""
    disk = "none stored" if not plan.stored_states else in_words(plan.stored_states)
    place = "" if recipe.target.placement == "replicated" else f" a process ({recipe.target.placement})"
    yield f"target    {recipe.target.name}: {plan.target_parameters:,} parameters, {in_words(plan.target)}{place}"
    yield f"drafter   {plan.drafter_parameters:,} trained parameters, {in_words(plan.drafter)} with gradients and AdamW"
    yield f"step      {recipe.batch.rows_per_batch} rows of {recipe.batch.row_length} tokens: target states "\
          f"{in_words(plan.batch_states)}, draft states and logits {in_words(plan.batch_drafts)}"
    yield f"training  {in_words(plan.training)} a device, activations of the drafter's own layers not counted"
    kept = f"; states of a shard: {in_words(plan.kept_states)}" if plan.kept_states else ""
    yield f"distill   {recipe.distill.slots} answers at once: {in_words(plan.distill_cache)} of keys and values{kept}"
    yield f"disk      target states: {disk}"


def plan(parsed: Parsed[Recipe]) -> None:
    """Parameters and memory of a recipe, without reading a weight or running anything."""
    for line in lines(plan_recipe(parsed.values, sketch_target(parsed.values.target)), parsed.values):
        say(line)


COMMANDS: dict[str, Command[Any]] = {"plan": Command(name="plan", arguments=Recipe, run=plan, families=families)}
