"""The command layers: which layers of a target draft for it best while the others are skipped."""

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ...export.evaluation.schedule import spread
from ...export.stored_drafter import as_json
from ...modules import DecodeSettings, Request, TargetConfig, UserError, decode, load_target
from ...modules.config_checks import CheckedSettings, Positive, Rows, Whole
from ...modules.files.atomic_files import write_file
from ...modules.target.loading.loading import KeptLayers
from ...modules.tuning.kept_layers import measured_speeds, search
from ..chat_settings import TemplateConfig, conversations, handwritten_prompts
from ..reading.command_line import Command, Parsed
from ..terminal import say

BATCH = 8  # Answers that are written at once
TIMING = 15.0  # Most seconds in which steps of decoding are timed


@dataclass(frozen=True, kw_only=True)
class LayersArguments(CheckedSettings):
    """Arguments of `draftsmith layers`."""

    out: Path
    """File of the layers found, for `--target.kept_layers`. Where it holds those of the same target, nothing is
    searched again; delete it to search anew."""
    minutes: Positive = 5.0
    """Minutes of the search. The target's answers and the timing of its steps take some more."""
    prompts: Path | None = None
    """File of prompts; the drafts are judged by the target's answers to them. None takes hand-written ones."""
    limit: Rows = 8
    """Use at most this many prompts, spread over the file."""
    max_new_tokens: Whole = 64
    """Longest answer, in tokens."""
    target: TargetConfig = field(default_factory=TargetConfig)
    """The target."""
    template: TemplateConfig = field(default_factory=TemplateConfig)
    """Settings of its chat template."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.target.kept_layers is not None:
            raise UserError(f"target.kept_layers {self.target.kept_layers} names layers that were found, and this "
                            "command searches; leave it out")


def layers(parsed: Parsed[LayersArguments]) -> None:
    """Search for the layers of a target that draft for it best while the others are skipped, without any training. The
    policy layer_skip and the partner of that name then keep them, where `--target.kept_layers` names the file."""
    given = parsed.values
    prompts = spread(handwritten_prompts() if given.prompts is None else conversations(given.prompts), given.limit)
    target = load_target(given.target)
    if given.out.exists():
        found = KeptLayers.read(given.out, target)
        say(f"{given.out} holds the layers of this target already; delete it to search anew")
    else:
        template = given.template.build(target)
        requests = [Request(tuple(template.prompt(prompt.history())), place, given.max_new_tokens)
                    for place, prompt in enumerate(prompts)]
        made = decode(target, requests, DecodeSettings(batch_size=BATCH, graphs=False)).generations
        texts = [([*one.request.tokens, *one.tokens], len(one.request.tokens)) for one in made]
        best, judged = search(target, texts, measured_speeds(target, TIMING), 60 * given.minutes)
        say(f"{judged} choices were judged by {sum(len(one.tokens) for one in made)} tokens of answers")
        # What is no faster than plain decoding is no draft.
        found = KeptLayers(weights_hash=target.identity.weights_hash, kept=best.kept if best.speed_up > 1 else (),
                           tokens=best.tokens, speed_up=best.speed_up)
        write_file(given.out, as_json(asdict(found)))
    if not found.kept:
        say(f"none pays: the best choice is predicted to decode at {found.speed_up:.2f} of the plain speed")
        return
    say(f"{len(found.kept)} of {target.num_layers} layers draft {found.tokens} tokens, predicted speed-up "
        f"{found.speed_up:.2f}: {', '.join(map(str, found.kept))}; use them with --target.kept_layers {given.out} and "
        f"the policy none+layer_skip-{found.tokens}, or as the baseline layer_skip")


COMMANDS: dict[str, Command[Any]] = {"layers": Command(name="layers", arguments=LayersArguments, run=layers)}
