"""The command `plan`: parameters, and peak memory of each stage of a recipe, from shapes; no weight is read."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from ...data.store.feature_shards import format_named
from ...data.store.feature_store import in_words
from ...modules import UserError
from ...modules.target.loading.loading import is_local, sketch_target
from ...trainers.fitting import precision_of
from ..planning.dry_run import choose_states, dry_run, on_gpu, resident_bytes
from ..planning.stage_plans import StagePlan, StagePlans, held_weights, parameters_of
from ..reading.parsing import Command, Parsed
from ..recipe import Recipe
from ..terminal.terminal_text import say


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Parameters of a recipe, and the plan of each stage."""

    target_parameters: int
    """Parameters of the frozen target."""
    target: int
    """Weights of the target that one device holds, in bytes, packed ones left out."""
    drafter_parameters: int
    """Trained parameters."""
    stored_states: int
    """Target states on disk, in bytes; 0 where they are computed in the step, or the budget is in minutes alone."""
    reason: str
    """Reason of the origin of states; empty where the recipe names it."""
    accelerator: bool
    """Whether a GPU is planned for."""
    stages: tuple[StagePlan, ...]
    """The stages, in order."""


def plan_recipe(recipe: Recipe) -> Plan:
    """Count parameters and bytes: for the device here, or for a GPU elsewhere where `target.device` is cuda.

    Raises:
        UserError: if the target, the family or its settings do not fit.
    """
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
    process = resident_bytes()
    tokens = 0 if recipe.batch.states == "computed" else recipe.distill.budget_tokens or 0
    form, kinds = format_named(recipe.batch.states_format, target.dtype), 1 + len(module.drafter.taps)
    facts = {"target_parameters": parameters_of(target.model), "target": held_weights(target, recipe),
             "stored_states": tokens * kinds * form.token_bytes(target.hidden_size)}
    plans = StagePlans(recipe, target, module, accelerator=accelerator, process=0 if accelerator else process,
                       mixed=elsewhere or precision_of(recipe.train) == "bf16-mixed")
    return Plan(drafter_parameters=plans.trained, reason=reason, accelerator=accelerator, stages=tuple(plans.all()),
                **facts)


def lines(plan: Plan, recipe: Recipe) -> Iterator[str]:
    """The plan in readable lines."""
    place = "" if recipe.target.placement == "replicated" else f" a device ({recipe.target.placement})"
    where = "GPU" if plan.accelerator else "process"
    yield f"target    {recipe.target.name}: {plan.target_parameters:,} parameters, {in_words(plan.target)}{place}"
    yield f"drafter   {plan.drafter_parameters:,} trained parameters"
    yield f"disk      target states: {in_words(plan.stored_states) if plan.stored_states else 'none stored'}"
    if plan.reason:
        yield f"          {plan.reason}"
    yield ""
    for stage in plan.stages:
        parts = ", ".join(f"{name} {in_words(size)}" for name, size in stage.parts.items() if size)
        each = f"a {where}" if stage.processes == 1 else f"a {where}, {stage.processes} of them at once"
        yield f"{stage.name:<10}{in_words(stage.peak):>10} {each}: {parts}"
        for name, size in stage.host.items():
            if size:
                yield f"{'':<10}{in_words(size):>10} of the machine's memory: {name}"
    yield ""
    yield "Memory is counted from shapes, for prompts and answers as long as the recipe lets them be."


def plan(parsed: Parsed[Recipe]) -> None:
    """Peak memory of each stage of a recipe, without reading a weight or running a stage; with --target.device cuda on
    GPUs that need not be here."""
    recipe = parsed.values
    for line in lines(plan_recipe(recipe), recipe):
        say(line)


COMMANDS: dict[str, Command[Any]] = {"plan": Command(name="plan", arguments=Recipe, run=plan, trains=True)}
