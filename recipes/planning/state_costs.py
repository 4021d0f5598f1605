"""The cost of storing the target's states against that of computing them in every training step, by which
`batch.states: auto` chooses."""

import math
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from ...data import Manifest, WantedStates, read_prompts
from ...data.store.disk_room import in_words, nearest
from ...data.store.feature_shards import unlisted
from ...data.store.state_formats import format_named
from ...data.store.token_store import MANIFEST
from ...modules import Target
from ...modules.target.loading.loading import sketch_target
from ...trainers import DraftModule
from ...trainers.fitting import computes_mixed
from ..recipe import Recipe
from .device_rates import DiskRates, Rates, on_device
from .dry_run import dry_run
from .planned_work import PlannedWork, opening
from .stage_plans import StagePlans

Choice = Literal["stored", "computed"]
"""Origins of states that `auto` chooses between; mixed ones need a limit that only people know."""
MOST_OF_DISK = 0.9
"""Share of the free disk that `auto` fills at most."""
PRICED_TOKENS = 10**6
"""Answer tokens by whose seconds those of a limit in minutes are counted."""
TAKES = "batch.states auto takes"
"""Start of every reason."""


@dataclass(frozen=True, kw_only=True)
class StateCosts:
    """Both costs, in seconds that training would not need if the states were there for nothing."""

    tokens: int
    """Tokens of the data, prompts included."""
    passes: float
    """Times that training reads each of them."""
    reading: float
    """Seconds in which the target reads all of them once."""
    readers: int = 1
    """Processes that read at the same time in training."""
    unread: float
    """Share of the tokens that the target reads once more if states are stored: those that it does not decode here."""
    size: int
    """Bytes of the states that would be written."""
    kept: int
    """Bytes of all states, those that are stored already included."""
    free: int
    """Bytes free on the disk."""
    disk: DiskRates
    """Rates of the disk."""

    @property
    def stored(self) -> float:
        """Seconds of writing the states, and of reading them in every pass, as if no step ran meanwhile."""
        return self.unread * self.reading + self.size / self.disk.write + self.passes * self.kept / self.disk.read

    @property
    def computed(self) -> float:
        """Seconds of the target's passes in the training steps."""
        return self.passes * self.reading / self.readers

    @property
    def choice(self) -> Choice:
        """The cheaper one of those that the disk can hold."""
        return "stored" if self.size <= MOST_OF_DISK * self.free and self.stored < self.computed else "computed"

    @property
    def sentence(self) -> str:
        """The choice and its reason, for people."""
        text = f"{self.passes:.2g} passes over {self.tokens:,} tokens"
        if self.size > MOST_OF_DISK * self.free:
            return (f"{TAKES} computed: stored states of {self.tokens:,} tokens would take "
                    f"{in_words(self.size)}, and the disk has {in_words(self.free)} free")
        return (f"{TAKES} {self.choice}: for {text} it is predicted to take {duration(self.stored)} to write "
                f"{in_words(self.size)} of states and to read them, and {duration(self.computed)} to compute them in "
                f"every step (disk: {self.disk.write / 1e6:.0f} MB/s written, {self.disk.read / 1e6:.0f} MB/s read, "
                f"{in_words(self.free)} free)")


def choose_states(recipe: Recipe, data: Path, stated: Rates | None = None) -> tuple[Choice, str]:
    """(the origin of states that costs less, the reason for people).

    Args:
        recipe: whose `batch.states` is auto.
        data: folder of the data, finished or to come.
        stated: rates of a device that is not here; None measures the one here.

    Raises:
        UserError: if the recipe does not fit the target, or the disk cannot be written.
    """
    target = sketch_target(recipe.target)
    module = dry_run(recipe, target)
    if not module.needs_states:
        return "computed", f"{TAKES} computed: training reads tokens alone"
    if module.changes_target:
        return "computed", f"{TAKES} computed: training changes the target, and its states with it"
    here = on_device(recipe.target.device)
    device = DeviceRates(stated or Rates.measured(target.dtype, here), here.type == "cuda" or stated is not None)
    found = data_amount(recipe, target, module, data, device)
    if found is None:
        return "computed", (f"{TAKES} computed: nothing limits the answers before they are written, so that the size "
                            "of their states is not known; set distill.budget_tokens, or batch.states: stored")
    costs = state_costs(recipe, target, module, found, device, nearest(data))
    return costs.choice, costs.sentence


@dataclass(frozen=True)
class DeviceRates:
    """The device that computes states."""

    rates: Rates
    accelerator: bool
    """Whether it is a GPU."""


@dataclass(frozen=True, kw_only=True)
class DataAmount:
    """Tokens of the data, and those whose states are not stored yet."""

    tokens: int
    """Prompts and answers, held-out ones included."""
    missing: int
    """Tokens without stored states."""
    unread: int
    """Those of them that the target does not decode here."""


def data_amount(recipe: Recipe, target: Target, module: DraftModule, data: Path, device: DeviceRates
                ) -> DataAmount | None:
    """The amount of finished data, or of data to come as far as the recipe limits it; None where it does not."""
    if (data / MANIFEST).is_file() and (manifest := Manifest.load(data)).complete:
        form = format_named(recipe.batch.states_format, target.dtype)
        missing = sum(record.tokens for record in unlisted(data, manifest, module.drafter.taps, form))
        return DataAmount(tokens=sum(record.tokens for record in manifest.shards), missing=missing, unread=missing)
    answers = expected_answers(recipe, device)
    if answers is None:
        return None
    config = recipe.distill
    tokens = round(answers * (1 + opening(recipe) / config.max_new_tokens))
    elsewhere = config.shares.get("text", 0.0)
    elsewhere += config.shares.get("target", 0.0) if config.engine != "own" else 0.0
    return DataAmount(tokens=tokens, missing=tokens, unread=round(elsewhere * tokens))


def expected_answers(recipe: Recipe, device: DeviceRates) -> float | None:
    """Answer tokens of a recipe, the fewest of its limits; None without any."""
    config, prompts = recipe.distill, recipe.prompts
    limits = [] if config.budget_tokens is None else [float(config.budget_tokens)]
    count = prompts.limit
    if count is None and prompts.origin == "file":
        count = len(read_prompts(prompts.path or "", column=prompts.column, skip_malformed=prompts.skip_malformed))
    if count is not None:
        limits.append(float(count * config.max_new_tokens))
    if config.budget_minutes is not None:
        priced = replace(recipe, distill=replace(config, budget_tokens=PRICED_TOKENS, budget_minutes=None))
        target = sketch_target(recipe.target)
        plans = StagePlans(priced, target, dry_run(priced, target), device.rates, accelerator=device.accelerator,
                           process=0, mixed=False)
        limits.append(60 * config.budget_minutes / (plans.answers().seconds or 1.0) * PRICED_TOKENS)
    return min(limits, default=None)


def state_costs(recipe: Recipe, target: Target, module: DraftModule, found: DataAmount, device: DeviceRates,
                folder: Path) -> StateCosts:
    """The costs for an amount of data, whose states would be written to the disk of an existing folder."""
    batch, train, rates = recipe.batch, recipe.train, device.rates
    work = PlannedWork(recipe, target, module, accelerator=device.accelerator)
    step = work.step(device.accelerator or computes_mixed(train))
    micro = batch.rows_per_batch * batch.row_length
    steps = math.inf if train.max_steps is None else float(train.max_steps)
    if train.max_minutes is not None:
        steps = min(steps, 60 * train.max_minutes / (train.accumulate * rates.seconds(step.whole.operations)))
    wanted = WantedStates(taps=module.drafter.taps, form=batch.states_format)
    return StateCosts(
        tokens=found.tokens, passes=steps * train.accumulate * train.world * micro / max(1, found.tokens),
        reading=found.tokens / micro * rates.seconds(step.target.operations), readers=train.world,
        unread=found.unread / max(1, found.tokens), size=wanted.bytes(found.missing, target),
        kept=wanted.bytes(found.tokens, target),
        free=shutil.disk_usage(folder).free, disk=DiskRates.measured(folder))


def duration(seconds: float) -> str:
    """Seconds for people."""
    for unit, length in (("h", 3600.0), ("min", 60.0)):
        if seconds >= 2 * length:
            return f"{seconds / length:.2g} {unit}"
    return f"{seconds:.2g} s"
