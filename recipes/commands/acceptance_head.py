"""The command specdec: acceptance heads for the drafter of a finished artifact (SpecDec++, arXiv:2405.19715)."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from ...data import Manifest
from ...data.store.token_store import TokenShard
from ...export import load_artifact, save_head
from ...export.acceptance_heads import check_rule
from ...modules import AcceptanceHeadConfig, Examples, SamplingSetting, TargetConfig, UserError, rollouts
from ...modules.config_checks import CheckedSettings, Size
from ...modules.files.folders import sole_writer
from ...modules.policies.registry import MOST
from ...modules.verification.sampling import Temperatures
from ...trainers.acceptance_head import HELD_OUT, HeadFitConfig, fit_head
from ..chat_settings import artifact_target, own_target
from ..reading.command_line import Command, Parsed
from ..stages.records import STAGES_FILE
from ..terminal import say


@dataclass(frozen=True, kw_only=True)
class LabelConfig(CheckedSettings):
    """Examples of drafted tokens: whole drafts while the target answers the data's prompts.

    The prompts that the data hold out come first: a drafter knows the answers that it was trained on, its drafts for
    those are accepted more often than others, and a head fitted to them promises too much."""

    temperatures: Temperatures = (0.0, 1.0)
    """A head is trained for each of these temperatures; it decides for answers at this one alone."""
    length: Annotated[int, Field(ge=1, le=MOST)] = 8
    """Tokens of a rolled-out draft, and most tokens of a draft that the heads end."""
    examples: Size = 24000
    """Drafted tokens for each head, held-out ones included; fewer where the data end before."""
    max_new_tokens: Size = 128
    """Longest answer that is drafted for, in tokens."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(set(self.temperatures)) < len(self.temperatures):
            raise UserError(f"labels.temperatures must be different from each other, got {list(self.temperatures)}; "
                            "leave out those that stand there twice")


@dataclass(frozen=True, kw_only=True)
class RuleConfig(CheckedSettings):
    """The stopping rule that a head decides; `specdec-0.5` in place of `specdec` takes another risk."""

    threshold: float = 0.7
    """Risk of a rejection above which a draft ends; larger ones make longer drafts."""
    least: Size = 2
    """Tokens that are drafted whatever the risk."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_rule(self.threshold, self.least, self.least)


@dataclass(frozen=True, kw_only=True)
class SpecdecArguments:
    """Arguments of `draftsmith specdec`."""

    artifact: Path
    """Folder of the artifact; the heads are written into it."""
    data: Path | None = None
    """Folder of distilled data whose prompts are answered; None takes `data` next to the artifact."""
    target: TargetConfig = field(default_factory=own_target)
    """The target; the one that the artifact names by default."""
    labels: LabelConfig = field(default_factory=LabelConfig)
    """Examples of drafted tokens, and the temperatures that the heads are calibrated for."""
    head: AcceptanceHeadConfig = field(default_factory=AcceptanceHeadConfig)
    """Shape of an acceptance head."""
    fit: HeadFitConfig = field(default_factory=HeadFitConfig)
    """Fitting of a head to the examples."""
    rule: RuleConfig = field(default_factory=RuleConfig)
    """The stopping rule that a head decides."""

    def __post_init__(self) -> None:
        if self.rule.least > self.labels.length:
            raise UserError(f"rule.least must be at most labels.length {self.labels.length}, got {self.rule.least}: "
                            "the head would decide nothing in the drafts that it learns from; lower it, or raise "
                            "labels.length")


def specdec(parsed: Parsed[SpecdecArguments]) -> None:
    """Train acceptance heads for an artifact's drafter: its drafts then end where a rejection is likely."""
    given = parsed.values
    artifact = load_artifact(given.artifact, artifact_target(given.artifact, given.target))
    folder = given.data or given.artifact.parent / "data"
    manifest = Manifest.load(folder)
    manifest.target.require_same(artifact.identity)
    prompts = [prompt for name in ("validation", "train") for prompt in opened(folder, manifest, name)]
    settings = [SamplingSetting(temperature=one) for one in given.labels.temperatures]
    # In the folder of its run, which would replace the artifact.
    with sole_writer(given.artifact.absolute().parent / STAGES_FILE, wait=False), artifact.target.reproducible():
        for number, setting in enumerate(settings, 1):
            say(f"[{number}/{len(settings)}] acceptance head for {setting}")
            examples = rollouts(artifact.target, artifact.drafter, prompts, setting, length=given.labels.length,
                                max_new_tokens=given.labels.max_new_tokens,
                                most=-(-given.labels.examples // given.labels.length))
            # The first come from prompts that the drafter was not trained on.
            first = max(1, round(HELD_OUT * len(examples.chances_E)))
            held_out, learned = (Examples(states_ED=examples.states_ED[part], chances_E=examples.chances_E[part])
                                 for part in (slice(first), slice(first, None)))
            fitted = fit_head(learned, held_out, given.head, given.fit, artifact.target.device)
            facts = {"examples": len(examples.chances_E), "epoch": fitted.epoch, "loss": fitted.loss}
            provenance = {name: parsed.settings[name] for name in ("labels", "fit")}
            save_head(given.artifact, fitted.head, setting=setting, **asdict(given.rule), most=given.labels.length,
                      provenance={**provenance, "data_manifest": manifest.hash, "fitted": facts})
            say(f"     fitted to {len(learned.chances_E)} drafted tokens; its loss is {fitted.loss:.3f} nats on "
                f"{len(held_out.chances_E)} others, of which the target accepts {float(held_out.chances_E.mean()):.1%}")
    say(f"{given.artifact} holds the heads; draft with --policy specdec (or specdec-{given.rule.threshold:g})")


def opened(folder: Path, manifest: Manifest, name: str) -> Iterator[list[int]]:
    """The prompt of each row of a split with an answer, in the order of the shards."""
    for record in manifest.split(name):
        shard = TokenShard.read(folder / record.file, record.sha256)
        # A held-out prompt is there twice: with its greedy answer, and with a drawn one.
        for row in shard.answered_at(0.0 if name == "validation" else None):
            start, stop = shard.span(row)
            supervised = shard.supervised_T[start:stop].tolist()
            if True in supervised[1:]:
                yield shard.tokens_T[start : start + max(1, supervised.index(True))].tolist()


COMMANDS: dict[str, Command[Any]] = {
    "specdec": Command(name="specdec", arguments=SpecdecArguments, run=specdec, home="labels"),
}
