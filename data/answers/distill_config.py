"""Settings of distillation and their checks."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from ...modules import UserError
from ...modules.config_checks import (
    MOST_TOKENS,
    CheckedSettings,
    Positive,
    Processes,
    Rows,
    RowsOrNone,
    Seed,
    Share,
    Whole,
)
from ...modules.verification.sampling import Temperatures
from ..prompts.sources import PromptConfig, ReadPrompts
from ..store.token_store import SOURCES, SourceName
from .answer_server import check_address

AUTO = "auto"  # Workers: as many as GPUs or threads, as long as prompts and memory last
LIMITS = ("budget_tokens", "budget_minutes")  # Settings that end the answers and change none of them; None is no limit
TrainFormat = Literal["own", "fastest", "float32", "bfloat16"]
"""Number formats for train prompts. A target in float16 has another hash of its weights than in float32."""


@dataclass(frozen=True, kw_only=True)
class DistillConfig(CheckedSettings):
    """Number, length and sampling of the answers, and their writers."""

    section: ClassVar[str] = "distill"

    shard_prompts: Rows = 128
    """Prompts of one shard, which a killed run makes again, and which the target writes before it answers the first:
    with prompts of its own, no more than slots. States that are to be stored are in memory until then."""
    slots: Rows = 32
    """Answers generated at once; a finished one makes room for the next prompt of its shard."""
    max_new_tokens: Annotated[int, Field(ge=1, le=MOST_TOKENS)] = 192
    """Longest answer, in tokens; longer ones are cut and marked."""
    temperatures: Temperatures = (0.0,)
    """Sampling temperatures of the answers, given to the prompts in turn; 0 is greedy."""
    top_k: Annotated[int, Field(ge=0, le=MOST_TOKENS)] = 0
    """Sample among this many best tokens; 0 is all of them."""
    top_p: Share = 1.0
    """Sample within this share of the probability."""
    budget_tokens: Whole | None = None
    """Stop after the shard that reaches this many answer tokens; None stops when the prompts are used up. A larger
    number adds answers to a folder that is complete."""
    budget_minutes: Positive | None = None
    """End all answers after this many minutes, interrupted runs included; the first batch of train prompts and a few
    held-out ones still get the first 32 tokens of theirs. Not repeatable; tokens are."""
    validation_prompts: RowsOrNone = 32
    """Prompts held out: answered greedily to choose checkpoints and the tree by, and once more at temperature 1, by
    which trees for sampled answers are sized. Where minutes are short 12 of them are answered, where none is left 4;
    more minutes answer the rest."""
    test_prompts: RowsOrNone = 0
    """Prompts held out for evaluation, written to test.jsonl."""
    seed: Seed = 0
    """Seed of the prompts that the target writes and of sampled answers."""
    answered_by: SourceName | dict[SourceName, Share] = "target"
    """Writer of the training rows. target: the target answers; text: answers and plain documents of the prompts are
    taken as they are; draft: an artifact's draft answers, for objectives that learn from the target's distribution.
    A mapping gives several their shares of the train prompts, such as {target: 0.5, draft: 0.5}; they sum to 1.
    Held-out prompts are always answered by the target."""
    draft: str | None = None
    """Folder of the artifact whose draft answers."""
    train_dtype: TrainFormat = "own"
    """Number format in which the target writes prompts and answers those of the training split: own is that of the
    target; fastest is bfloat16 where it was measured to decode `slots` rows faster on this processor, which the run's
    folder keeps. Held-out prompts are always answered in the target's own format."""
    engine: str = "own"
    """Writer of the target's answers to train prompts. own: this project's decoding loop; an address: an inference
    server of the same model, which must return token ids, http://host:port/v1 of vLLM or another OpenAI-style server
    with `return_token_ids`, or http://host:port/generate of SGLang. Its key, where it asks for one, is the
    environment's DRAFTSMITH_SERVER_KEY. Its answers are compared with the target's first, and may differ from one run
    to the next; finished shards do not. Held-out prompts and drafts' rows are always decoded here."""
    states_from: str | None = None
    """Engine that gives the target's states in place of its own passes, for a target beyond one machine: the address
    http://host:port/v1 of vLLM with `extract_hidden_states`, or a folder in which an engine takes requests, such as
    /dev/shm/states. They are compared with the target's own states at a few rows first. null: the target's own."""
    workers: Processes | Literal["auto"] | None = None
    """Processes that are started here to answer train prompts together, each with one thread of the processor (all of
    them where one shard is all there is), or on a GPU of its own; no more than there are GPUs, or shards of prompts
    where their number is known. null: one process with all threads. auto: one for each GPU, or for each thread of torch
    (OMP_NUM_THREADS), at most eight and as many as memory holds copies of the target. The same command on another
    machine with the same disk joins in. Their number and their ends change no byte of the data, as long as one kind of
    machine answers with one number of threads."""

    def __post_init__(self) -> None:
        super().__post_init__()
        # What shares leave open would all go to the last writer.
        if isinstance(given := self.answered_by, dict):
            total = sum(given.values())
            if not math.isclose(total, 1, abs_tol=1e-6):
                shown = ", ".join(f"{name}: {share}" for name, share in given.items())
                raise UserError(f"the shares of distill.answered_by must sum to 1, got {total:g} ({shown})")
        if ("draft" in self.shares) != (self.draft is not None):
            raise UserError(
                f"distill.draft is {self.draft}, but a draft writes {self.shares.get('draft', 0.0):.0%} of the train "
                "rows; name an artifact's folder where a draft writes, and only there")
        self._check_engine()

    def _check_engine(self) -> None:
        if self.states_from is not None and "://" in self.states_from:
            check_address(self.states_from, "distill.states_from must be a folder or")
        if self.server is not None:
            check_address(self.server)
        # Drafts' rows and held-out ones are decoded here whatever the engine: without a share it would have no work.
        if self.engine != "own" and "target" not in self.shares:
            raise UserError(f"distill.engine is {self.engine}, which answers for the target, and distill.answered_by "
                            f"is {self.answered_by}; set a share of the target, or distill.engine: own")
        if self.server is not None and self.train_dtype != "own":
            raise UserError(f"a server answers in its own number format, but distill.train_dtype is "
                            f"{self.train_dtype}; set train_dtype: own, or distill.engine: own")

    @property
    def server(self) -> str | None:
        """Address of the server that answers; None where none does."""
        return None if self.engine == "own" else self.engine

    @property
    def shares(self) -> dict[SourceName, float]:
        """Share of each writer among the training prompts."""
        given = {self.answered_by: 1.0} if isinstance(self.answered_by, str) else self.answered_by
        return {name: given[name] for name in SOURCES if name in given}


def require_enough(prompts: PromptConfig, config: DistillConfig) -> None:
    """Refuse a file whose prompts cannot be read, or would all be held out, before the target is loaded: UserError as
    that of `ReadPrompts.skipped`, or with the numbers of prompts."""
    if prompts.origin != "file":
        return
    source, held = ReadPrompts(prompts, config.seed), config.validation_prompts + config.test_prompts
    there = (source.total or 0) - len(source.skipped())
    if there <= held:
        raise UserError(
            f"{prompts.path} gives {there} prompts, and {held} are to be held out (distill.validation_prompts "
            f"{config.validation_prompts}, distill.test_prompts {config.test_prompts}), which leaves none to train on; "
            "give more prompts, or lower these numbers")


def raised_limits(former: Mapping[str, Any], wanted: Mapping[str, Any]) -> dict[str, Any]:
    """Limits of answer tokens and minutes that are higher in `wanted` than in `former`, by name; both are settings of
    the answers, as a manifest's recipe has them."""
    return {limit: wanted[limit] for limit in LIMITS if former.get(limit) is not None
            and (wanted[limit] is None or wanted[limit] > former[limit])}
