"""Trials of an exported draft: its answers, accepted length and speed in vLLM next to this project's own chain, and
the cost of weights of fewer bits."""

import json
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from ...modules import DecodeSettings, Request, UserError, decode
from ...modules.decoding.recorders import PassRecorder
from ..artifact import Artifact
from ..engine_process import EngineProcess
from ..layouts.parts.export_format import Served
from ..layouts.parts.gguf_file import FLOAT32
from ..layouts.registry import format_named, formats_of

TOLERANCE = 0.1  # Largest difference of the accepted lengths, as a share of this project's
NEAR_TIES = 1
"""Most answers of a run in float32 that may differ with drafts: rounding decides between two tokens in one of some
10,000, and a run has some hundred."""
BATCH_SIZES = (1, 8)  # Requests at once


@dataclass(frozen=True, kw_only=True)
class TrialSettings:
    """Size of a trial."""

    draft_tokens: int = 3  # Tokens of a draft
    max_new_tokens: int = 64  # Tokens of an answer
    dtypes: tuple[str, ...] = (FLOAT32, "auto")
    """Number formats of vLLM's passes: in float32 the answers must be equal but for `NEAR_TIES`, in the one that vLLM
    chooses for this machine where none is given it is counted."""


@dataclass(frozen=True, kw_only=True)
class BatchTrial:
    """The same prompts with and without the draft, so many at once."""

    dtype: str  # Number format of vLLM's passes
    batch_size: int
    plain_speed: float  # Tokens per second without the draft
    draft_speed: float  # Tokens per second with it
    equal: int  # Answers that are those without the draft
    accepted_length: float  # Tokens of a target pass, the target's own included


@dataclass(frozen=True, kw_only=True)
class Trial:
    """An exported draft in vLLM."""

    engine: str  # Name and version
    answers: int  # Number of prompts
    own_length: float  # Accepted length of this project's own chain of as many tokens, on the same prompts
    batches: tuple[BatchTrial, ...]

    @property
    def fault(self) -> str:
        """The first fault, in a sentence; empty where all is as it must be."""
        for one in (one for one in self.batches if one.dtype == FLOAT32):
            if one.equal < self.answers - NEAR_TIES:
                return (f"with drafts {self.engine} gives {self.answers - one.equal} of {self.answers} other answers "
                        f"than without, at batch {one.batch_size}")
            if abs(one.accepted_length / self.own_length - 1) > TOLERANCE:
                return (f"{self.engine} accepts {one.accepted_length:.2f} tokens per pass at batch {one.batch_size}, "
                        f"this project's own chain {self.own_length:.2f}: it does not read the draft as it was trained")
        return ""

    @property
    def note(self) -> str:
        """A sentence on the answers that rounding changes; empty where it changes none."""
        rounded = ", ".join(f"{self.answers - one.equal} of {self.answers} in {one.dtype} at batch {one.batch_size}"
                            for one in self.batches if one.equal < self.answers)
        return rounded and (
            f"answers that differ with the draft: {rounded}; a pass over several tokens rounds otherwise than a pass "
            f"over one, least with --dtype {FLOAT32}")

    def table(self) -> str:
        """The trial in Markdown."""
        lines = ["| number format | batch | tokens/s without | with the draft | ratio | equal answers | accepted "
                 "length | of this project |", "|---|---|---|---|---|---|---|---|"]
        lines += [f"| {one.dtype} | {one.batch_size} | {one.plain_speed:.1f} | {one.draft_speed:.1f} | "
                  f"{one.draft_speed / one.plain_speed:.2f} | {one.equal} of {self.answers} | "
                  f"{one.accepted_length:.2f} | {self.own_length:.2f} |" for one in self.batches]
        return "\n".join(lines)


@dataclass(frozen=True)
class VllmProcess:
    """vLLM as it is started for each folder."""

    python: Path  # Interpreter of the environment
    folder: Path  # Current folder of the process: folders of models are named from here
    context: int  # Largest context, in tokens

    def run(self, model: str, speculative: dict[str, Any] | None, prompts: Sequence[Sequence[int]], *,
            max_tokens: int, batch_sizes: Sequence[int] = (8,), loader: dict[str, Any] | None = None,
            dtype: str = FLOAT32) -> dict[str, Any]:
        """The result of `engine_jobs.py` for the folder of a model and vLLM's configuration of drafts, None for none;
        all prompts (token ids) are answered for each batch size. Raises UserError as `EngineProcess.run` does."""
        job = {"model": model, "speculative": speculative, "dtype": dtype, "loader": loader or {},
               "max_tokens": max_tokens, "prompts": [list(prompt) for prompt in prompts],
               "batch_sizes": list(batch_sizes), "context": self.context}
        process = EngineProcess(engine="vLLM", python=self.python, folder=self.folder)
        return process.run(job, f"drafts {json.dumps(speculative)}")


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
    """Serve an exported draft with its target, greedy, with the draft and without, and compare.

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
    # Engines draft a chain, whatever tree the artifact has.
    own = chain_length(artifact, prompts, settings)
    with tempfile.TemporaryDirectory() as scratch:
        with artifact.target.native() as model:
            model.save_pretrained(Path(scratch, "target"))
        # Room for the last draft, which may go beyond the answer.
        context = max(map(len, prompts)) + settings.max_new_tokens + tokens + 1
        # Each run is a process of its own: vLLM gives no memory back.
        engine = VllmProcess(python, Path(scratch), context)
        drafts = {**how.method, "model": str(folder.absolute()), "num_speculative_tokens": tokens}
        runs = [[engine.run("target", method, prompts, max_tokens=settings.max_new_tokens, dtype=dtype,
                            batch_sizes=BATCH_SIZES, loader=loader)
                 for method, loader in ((None, {}), (drafts, how.loader))] for dtype in settings.dtypes]
    batches = tuple(
        BatchTrial(dtype=without["dtype"], batch_size=plain["batch_size"],
                   plain_speed=plain["tokens"] / plain["seconds"], draft_speed=drafted["tokens"] / drafted["seconds"],
                   equal=sum(map(list.__eq__, plain["answers"], drafted["answers"])),
                   # The engine counts accepted guesses; a pass emits the target's own token too.
                   accepted_length=1 + drafted["accepted"] / max(1, drafted["drafts"]))
        for without, with_draft in runs
        for plain, drafted in zip(without["runs"], with_draft["runs"], strict=True))
    return Trial(engine=runs[0][1]["engine"], answers=len(prompts), own_length=own, batches=batches)


def chain_length(artifact: Artifact, prompts: Sequence[Sequence[int]], settings: TrialSettings) -> float:
    """The accepted length of this project's chain of so many tokens, end tokens ignored as in the trial."""
    recorder = PassRecorder()
    drafter, policy = artifact.drafting(f"chain-{settings.draft_tokens}")
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
