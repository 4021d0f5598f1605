"""Trial of an exported draft in vLLM: its answers, its accepted length next to this project's, its speed."""

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ...modules import DecodeSettings, Request, UserError, decode
from ...modules.decoding.pass_recorder import PassRecorder
from ..artifact import Artifact
from ..layouts.parts.export_format import Served
from ..layouts.registry import format_named
from .vllm_process import VllmProcess

TOLERANCE = 0.1
"""Largest difference of the accepted lengths, as a share of this project's."""
BATCH_SIZES = (1, 8)
"""Requests at once."""


@dataclass(frozen=True, kw_only=True)
class TrialSettings:
    """Size of a trial."""

    draft_tokens: int = 3
    """Tokens of a draft."""
    max_new_tokens: int = 64
    """Tokens of an answer."""


@dataclass(frozen=True, kw_only=True)
class BatchTrial:
    """The same prompts with and without the draft, so many at once."""

    batch_size: int
    plain_speed: float
    """Tokens per second without the draft."""
    draft_speed: float
    """Tokens per second with it."""
    equal: int
    """Answers that are those without the draft."""
    accepted_length: float
    """Tokens of a target pass, the target's own included."""


@dataclass(frozen=True, kw_only=True)
class Trial:
    """An exported draft in vLLM."""

    engine: str
    """Name and version."""
    answers: int
    """Number of prompts."""
    own_length: float
    """Accepted length of this project's own chain of as many tokens, on the same prompts."""
    batches: tuple[BatchTrial, ...]

    @property
    def fault(self) -> str:
        """The first fault, in a sentence; empty where all is as it must be."""
        for one in self.batches:
            if one.equal < self.answers:
                return (f"with drafts {self.engine} gives {self.answers - one.equal} of {self.answers} other answers "
                        f"than without, at batch {one.batch_size}")
            if abs(one.accepted_length / self.own_length - 1) > TOLERANCE:
                return (f"{self.engine} accepts {one.accepted_length:.2f} tokens per pass at batch {one.batch_size}, "
                        f"this project's own chain {self.own_length:.2f}: it does not read the draft as it was trained")
        return ""

    def table(self) -> str:
        """The trial in Markdown."""
        lines = ["| batch | tokens/s without | with the draft | ratio | equal answers | accepted length | of this "
                 "project |", "|---|---|---|---|---|---|---|"]
        lines += [f"| {one.batch_size} | {one.plain_speed:.1f} | {one.draft_speed:.1f} | "
                  f"{one.draft_speed / one.plain_speed:.2f} | {one.equal} of {self.answers} | "
                  f"{one.accepted_length:.2f} | {self.own_length:.2f} |" for one in self.batches]
        return "\n".join(lines)


def served(artifact: Artifact, layout: str) -> Served:
    """The configuration with which vLLM drafts with an export.

    Raises:
        UserError: if vLLM reads no such export.
    """
    if artifact.adapter is not None:
        raise UserError("this artifact changes its target, and a trial in vLLM compares with an unchanged one; leave "
                        "try_with out")
    chosen = format_named(layout)
    if chosen.vllm is None or not isinstance(artifact.drafter, chosen.families):
        raise UserError(f"vLLM, which tries an export, reads no {layout}; leave try_with out, or choose another format")
    return chosen.vllm(artifact.drafter)


def try_export(artifact: Artifact, layout: str, folder: Path, python: Path, prompts: Sequence[Sequence[int]],
               settings: TrialSettings) -> Trial:
    """Serve an exported draft with its target, greedy and in float32, and compare.

    Args:
        artifact: the one that was exported.
        layout: name of the format.
        folder: the export.
        python: interpreter of an environment with vLLM.
        prompts: token ids.
        settings: size of the trial.

    Raises:
        UserError: if vLLM reads no such export, or ends with an error.
    """
    how, tokens = served(artifact, layout), settings.draft_tokens
    own = chain_length(artifact, prompts, settings)
    with tempfile.TemporaryDirectory() as scratch:
        with artifact.target.native() as model:
            model.save_pretrained(Path(scratch, "target"))
        context = max(map(len, prompts)) + settings.max_new_tokens + tokens + 1
        engine = VllmProcess(python, Path(scratch), context)
        runs = [engine.run("target", method, prompts, max_tokens=settings.max_new_tokens, batch_sizes=BATCH_SIZES,
                           loader=loader)
                for method, loader in ((None, {}), ({**how.method, "model": str(folder.absolute()),
                                                     "num_speculative_tokens": tokens}, how.loader))]
    batches = tuple(
        BatchTrial(batch_size=plain["batch_size"], plain_speed=plain["tokens"] / plain["seconds"],
                   draft_speed=drafted["tokens"] / drafted["seconds"],
                   equal=sum(map(list.__eq__, plain["answers"], drafted["answers"])),
                   # The engine counts accepted guesses; a pass emits the target's own token too.
                   accepted_length=1 + drafted["accepted"] / max(1, drafted["drafts"]))
        for plain, drafted in zip(runs[0]["runs"], runs[1]["runs"], strict=True))
    return Trial(engine=runs[1]["engine"], answers=len(prompts), own_length=own, batches=batches)


def chain_length(artifact: Artifact, prompts: Sequence[Sequence[int]], settings: TrialSettings) -> float:
    """The accepted length of this project's chain of so many tokens, end tokens ignored as in the trial."""
    recorder = PassRecorder()
    drafter, policy = artifact.drafting(f"chain-{settings.draft_tokens}")
    requests = [Request(tuple(prompt), index, settings.max_new_tokens) for index, prompt in enumerate(prompts)]
    decode(artifact.target, requests, DecodeSettings(batch_size=max(BATCH_SIZES), ignore_eos=True), drafter=drafter,
           policy=policy, observer=recorder)
    accepted = [one.accepted for passes in recorder.passes.values() for one in passes]
    return 1 + sum(accepted) / max(1, len(accepted))
