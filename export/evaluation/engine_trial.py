"""Trials of an exported draft: its answers, accepted length and speed in vLLM next to this project's own chain, with a
few numbers of tokens and of requests at once, and the cost of weights of fewer bits."""

import json
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from ...modules import BlockDraft, DecodeSettings, Drafter, Request, UserError, decode
from ...modules.decoding.recorders import PassRecorder
from ..artifact import Artifact
from ..engine_process import run_job
from ..engine_settings import DraftSettings, in_words, ranges_of
from ..layouts.parts.export_format import Served
from ..layouts.parts.gguf_file import FLOAT32
from ..layouts.registry import format_named, formats_of

TOLERANCE = 0.1  # Largest difference of the accepted lengths, as a share of this project's
NEAR_TIES = 1
"""Most answers of a run in float32 that may differ with drafts: rounding decides between two tokens in one of some
10,000, and a run has some hundred."""
BATCH_SIZES = (1, 4, 8)  # Requests at once


@dataclass(frozen=True, kw_only=True)
class TrialSettings:
    """Size of a trial."""

    draft_tokens: tuple[int, ...] = (3,)
    """Tokens of the drafts that are tried: all in the last number format, the first in each."""
    max_new_tokens: int = 64  # Tokens of an answer
    dtypes: tuple[str, ...] = (FLOAT32, "auto")
    """Number formats of vLLM's passes: in float32 the answers must be equal but for `NEAR_TIES`, in the one that vLLM
    chooses for this machine where none is given it is counted."""


@dataclass(frozen=True, kw_only=True)
class BatchTrial:
    """Figures of one trial: the same prompts with so many drafted tokens and so many requests at once."""

    dtype: str  # Number format of vLLM's passes
    tokens: int  # Tokens of a draft; 0 without
    batch_size: int
    speed: float  # Tokens per second
    first_token: float  # Mean seconds to the first token
    equal: int  # Answers that are those without the draft
    accepted_length: float  # Tokens of a target pass, the target's own included


@dataclass(frozen=True, kw_only=True)
class Trial:
    """An exported draft in vLLM."""

    engine: str  # Name and version
    answers: int  # Number of prompts
    own_length: float  # Accepted length of this project's own chain of `tokens`, on the same prompts
    tokens: int  # The first number of tokens that was tried
    varies: bool  # Whether vLLM drafts fewer tokens where a table by requests at once says so
    batches: tuple[BatchTrial, ...]

    @property
    def fault(self) -> str:
        """The first fault, in a sentence; empty where all is as it must be."""
        for one in (one for one in self.batches if one.dtype == FLOAT32 and one.tokens):
            if one.equal < self.answers - NEAR_TIES:
                return (f"with drafts {self.engine} gives {self.answers - one.equal} of {self.answers} other answers "
                        f"than without, at batch {one.batch_size}")
            if one.tokens == self.tokens and abs(one.accepted_length / self.own_length - 1) > TOLERANCE:
                return (f"{self.engine} accepts {one.accepted_length:.2f} tokens per pass at batch {one.batch_size}, "
                        f"this project's own chain {self.own_length:.2f}: it does not read the draft as it was trained")
        return ""

    @property
    def note(self) -> str:
        """A sentence on the answers that rounding changes; empty where it changes none."""
        rounded = ", ".join(f"{self.answers - one.equal} of {self.answers} in {one.dtype} at batch {one.batch_size} "
                            f"with {one.tokens} tokens" for one in self.batches if one.equal < self.answers)
        return rounded and (
            f"answers that differ with the draft: {rounded}; a pass over several tokens rounds otherwise than a pass "
            f"over one, least with --dtype {FLOAT32}")

    @property
    def advice(self) -> str:
        """The settings of vLLM that were fastest in the last number format, in a sentence."""
        dtype, best = self.batches[-1].dtype, dict[int, BatchTrial]()
        for one in (one for one in self.batches if one.dtype == dtype):
            best[one.batch_size] = max(best.get(one.batch_size, one), one, key=lambda row: row.speed)
        ranges = ranges_of({size: one.tokens for size, one in sorted(best.items())})
        settings = DraftSettings(ranges=ranges, varies=self.varies)
        return f"the fastest tokens of a draft in {dtype}, by requests at once: {in_words(ranges)}; " + (
            f"set {json.dumps(settings.vllm(settings.tokens))[1:-1]} in --speculative-config" if settings.tokens else
            "serve the target alone on this machine")

    def table(self) -> str:
        """The trial in Markdown."""
        lines = ["| number format | draft tokens | requests at once | tokens/s | first token, s | equal answers | "
                 "accepted length | of this project |", "|---" * 8 + "|"]
        lines += [f"| {one.dtype} | {one.tokens or 'none'} | {one.batch_size} | {one.speed:.1f} | "
                  f"{one.first_token:.3f} | {one.equal} of {self.answers} | {one.accepted_length:.2f} | "
                  f"{f'{self.own_length:.2f}' if one.tokens == self.tokens else ''} |" for one in self.batches]
        return "\n".join(lines)


def vllm_answers(python: Path, folder: Path, model: str, speculative: dict[str, Any] | None,
                 prompts: Sequence[Sequence[int]], **settings: Any) -> dict[str, Any]:
    """The result of `run_vllm` in `engine_jobs.py`, by default with eight requests at once in float32, for the folder
    of a model, named from the current one of the process, and vLLM's configuration of drafts, None for none. Raises
    UserError as `run_job` does."""
    job = {"engine": "vLLM", "model": model, "speculative": speculative, "batch_sizes": [8], "loader": {},
           "prompts": [list(prompt) for prompt in prompts], "dtype": FLOAT32, **settings}
    return run_job(job, python, folder, f"drafts {json.dumps(speculative)}")


def served(artifact: Artifact, layout: str) -> Served:
    """The configuration with which vLLM drafts with an export. Raises UserError if vLLM reads no such export."""
    if artifact.adapter is not None:
        raise UserError("this artifact changes its target, and a trial in vLLM compares with an unchanged one; leave "
                        "try_with out")
    chosen = format_named(layout)
    settings = chosen.vllm(artifact.drafter) if isinstance(artifact.drafter, chosen.families) else None
    if settings is None:
        able = ", ".join(one.name for one in formats_of(artifact) if one.vllm(artifact.drafter))
        raise UserError(f"vLLM, which tries an export, reads no {layout}; leave try_with out"
                        + (f", or choose --format {able}" if able else ""))
    return settings


def try_export(artifact: Artifact, layout: str, folder: Path, python: Path, prompts: Sequence[Sequence[int]],
               settings: TrialSettings) -> Trial:
    """Serve an exported draft in a folder with its target, greedy, with the draft and without, by the vLLM of an
    interpreter, and compare. Raises UserError if vLLM reads no such export, or ends with an error."""
    how = served(artifact, layout)
    # Engines draft a chain, whatever tree the artifact has.
    own = chain_length(artifact, prompts, settings)
    # Room for the last draft, which may go beyond the answer.
    context = max(map(len, prompts)) + settings.max_new_tokens + max(settings.draft_tokens) + 1
    context = min(context, artifact.target.context_length)
    with tempfile.TemporaryDirectory() as scratch:
        with artifact.target.native() as model:
            model.save_pretrained(Path(scratch, "target"))
        drafts, batches = {**how.method, "model": str(folder.absolute())}, list[BatchTrial]()
        for dtype in settings.dtypes:
            plain = None
            for tokens in (0, *settings.draft_tokens[: None if dtype == settings.dtypes[-1] else 1]):
                run = vllm_answers(
                    python, Path(scratch), "target", {**drafts, "num_speculative_tokens": tokens} if tokens else None,
                    prompts, context=context, max_tokens=settings.max_new_tokens, dtype=dtype,
                    batch_sizes=BATCH_SIZES, loader=how.loader if tokens else {})
                plain = plain or run
                batches += [BatchTrial(
                    dtype=run["dtype"], tokens=tokens, batch_size=one["batch_size"],
                    speed=one["tokens"] / one["seconds"], first_token=one["first_token"],
                    equal=sum(map(list.__eq__, without["answers"], one["answers"])),
                    # The engine counts accepted guesses; a pass emits the target's own token too.
                    accepted_length=1 + one["accepted"] / max(1, one["drafts"]))
                    for without, one in zip(plain["runs"], run["runs"], strict=True)]
    return Trial(engine=run["engine"], answers=len(prompts), own_length=own, tokens=settings.draft_tokens[0],
                 varies=artifact.drafter.reach is None, batches=tuple(batches))


def tried_tokens(drafter: Drafter[Any], first: int) -> tuple[int, ...]:
    """The number of tokens that is recommended, then a smaller and a larger one that the draft answers."""
    most = drafter.reach or first + 2
    # The slots of a block read each other: a shorter one is no part of it.
    others = () if isinstance(drafter, BlockDraft) else (max(1, first - 2), min(most, first + 2))
    return tuple(dict.fromkeys((first, *others)))


def chain_length(artifact: Artifact, prompts: Sequence[Sequence[int]], settings: TrialSettings) -> float:
    """The accepted length of this project's chain of so many tokens, end tokens ignored as in the trial."""
    recorder = PassRecorder()
    drafter, policy = artifact.drafting(f"chain-{settings.draft_tokens[0]}")
    requests = [Request(tuple(prompt), index, settings.max_new_tokens) for index, prompt in enumerate(prompts)]
    decode(artifact.target, requests, DecodeSettings(batch_size=max(BATCH_SIZES), ignore_eos=True), drafter=drafter,
           policy=policy, observer=recorder)
    accepted = [one.accepted for passes in recorder.passes.values() for one in passes]
    return 1 + sum(accepted) / max(1, len(accepted))


def rounded_artifact(artifact: Artifact, rounded: Callable[[Tensor, bool], Tensor]) -> Artifact:
    """A copy whose drafter has the weights that an engine reads from a file: `rounded` gives each as it is read, the
    matrix of a linear layer that is no embedding too, or another one."""
    drafter = artifact.drafter
    # A matrix that is an embedding too is read as an embedding.
    embeddings = {id(module.weight) for module in drafter.modules() if isinstance(module, nn.Embedding)}
    linear = {f"{name}.weight" for name, module in drafter.named_modules()
              if isinstance(module, nn.Linear) and id(module.weight) not in embeddings}
    copy = type(drafter).rebuild(drafter.describe(), artifact.identity)
    copy.load_state_dict({name: rounded(tensor, name in linear).to(tensor)
                          for name, tensor in drafter.state_dict().items()})
    copy.to(artifact.target.device)
    copy.bind(artifact.target)
    return replace(artifact, drafter=copy.eval())
