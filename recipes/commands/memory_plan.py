"""The command `plan`: peak memory and hours of each stage of a recipe, from shapes; no weight is read."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from ...data.store.disk_room import in_words
from ...data.store.state_formats import format_named
from ...modules.target.loading.loading import sketch_target
from ...trainers import families
from ...trainers.fitting import precision_of
from ..planning.device_rates import Rates, on_device
from ..planning.dry_run import choose_states, dry_run
from ..planning.stage_plans import StagePlan, StagePlans, held_weights, parameters_of
from ..planning.worker_count import resident_bytes
from ..reading.parsing import Command, Parsed
from ..recipe import Recipe
from ..terminal.terminal_text import say


@dataclass(frozen=True, kw_only=True)
class PlanArguments(Recipe):
    """A recipe, and the device that it is planned for."""

    flops: float | None = None
    """Floating-point operations that a GPU which is not here reaches in a second, in the number format of the target;
    with `bandwidth`, that GPU is planned for. None measures the device here for a second."""
    bandwidth: float | None = None
    """Bytes that it reads from its memory in a second."""


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
    rates: Rates
    """Rates of the device."""
    stages: tuple[StagePlan, ...]
    """The stages, in order."""


def plan_recipe(recipe: Recipe, stated: Rates | None = None) -> Plan:
    """Count parameters, bytes and seconds.

    Args:
        recipe: the recipe.
        stated: rates of a GPU that is not here; None plans for the device here.

    Raises:
        UserError: if the target, the family or its settings do not fit.
    """
    reason = ""
    if stated is not None:
        # On a GPU elsewhere `auto` is bfloat16; here, its shapes are counted on the processor.
        dtype: Any = "bfloat16" if recipe.target.dtype in ("auto", "fastest") else recipe.target.dtype
        recipe = replace(recipe, target=replace(recipe.target, dtype=dtype, device="cpu"),
                         train=replace(recipe.train, accelerator="cpu"))
    target = sketch_target(recipe.target)
    module = dry_run(recipe, target)
    if recipe.batch.states == "auto":
        choice, reason = choose_states(recipe, module, recipe.data or recipe.out / "data")
        recipe = replace(recipe, batch=replace(recipe.batch, states=choice))
    process = resident_bytes()
    device = on_device(recipe.target.device)
    accelerator = stated is not None or device.type == "cuda"
    rates = stated or Rates.measured(target.dtype, device)
    tokens = 0 if recipe.batch.states == "computed" else recipe.distill.budget_tokens or 0
    form, kinds = format_named(recipe.batch.states_format, target.dtype), 1 + len(module.drafter.taps)
    facts = {"target_parameters": parameters_of(target.model), "target": held_weights(target, recipe),
             "stored_states": tokens * kinds * form.token_bytes(target.hidden_size)}
    plans = StagePlans(recipe, target, module, rates, accelerator=accelerator, process=0 if accelerator else process,
                       mixed=stated is not None or precision_of(recipe.train) == "bf16-mixed")
    return Plan(drafter_parameters=plans.trained, reason=reason, accelerator=accelerator, rates=rates,
                stages=tuple(plans.all()), **facts)


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
        hours = "hours not limited by the recipe" if stage.seconds is None else f"{stage.seconds / 3600:.2g} h"
        yield f"{stage.name:<10}{in_words(stage.peak):>10} {each}, {hours}: {parts}"
        for name, size in stage.host.items():
            if size:
                yield f"{'':<10}{in_words(size):>10} of the machine's memory: {name}"
    yield ""
    yield (f"Memory is counted from shapes, for prompts and answers as long as the recipe lets them be. Hours are "
           f"rougher: {plan.rates.flops / 1e12:.3g} TFLOP/s and {plan.rates.bandwidth / 1e9:.3g} GB/s, "
           f"{plan.rates.origin}; validation, loading and what waits for the host are left out.")


def plan(parsed: Parsed[PlanArguments]) -> None:
    """Peak memory and hours of each stage of a recipe, without reading a weight or running a stage."""
    recipe = parsed.values
    stated = Rates.stated(recipe.flops, recipe.bandwidth)
    for line in lines(plan_recipe(recipe, stated), recipe):
        say(line)


COMMANDS: dict[str, Command[Any]] = {"plan": Command(name="plan", arguments=PlanArguments, run=plan, families=families)}
