"""Settings of distillation: their checks, and their record in the manifest."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal, get_args

import torch

from ...modules import Target, UserError
from ...modules.config_checks import MOST_ROWS, MOST_TOKENS, check_bounds
from ...modules.verification.sampling import TEMPERATURES, is_temperature
from ..prompts.sources import PromptConfig, read_prompts
from ..store.token_store import SOURCES, SourceName, hash_file
from .answer_server import check_address
from .writers import Writer, check_shares

MOST_WORKERS = 1024
"""Most processes that one command starts."""
AUTO = "auto"
"""Workers: as many as GPUs or threads, as long as prompts and memory last."""
LIMITS = ("budget_tokens", "budget_minutes")
"""Settings that end the answers and change none of them; None is no limit."""
ONE_QUEUE = "one queue"
"""Record of any number of workers."""
Engine = Literal["own", "transformers", "server"]
"""Writers of the target's answers."""
TrainFormat = Literal["own", "fastest", "float32", "bfloat16"]
"""Number formats for train prompts. A target in float16 has another hash of its weights than in float32."""


@dataclass(frozen=True, kw_only=True)
class DistillConfig:
    """Number, length and sampling of the answers, and their writers."""

    shard_prompts: int = 128
    """Prompts of one shard, which a killed run makes again. States that are to be stored are in memory until then."""
    slots: int = 32
    """Answers generated at once; a finished one makes room for the next prompt of its shard."""
    max_new_tokens: int = 192
    """Longest answer, in tokens; longer ones are cut and marked."""
    temperatures: tuple[float, ...] = (0.0,)
    """Sampling temperatures of the answers, given to the prompts in turn; 0 is greedy."""
    top_k: int = 0
    """Sample among this many best tokens; 0 is all of them."""
    top_p: float = 1.0
    """Sample within this share of the probability."""
    budget_tokens: int | None = None
    """Stop after the shard that reaches this many answer tokens; None stops when the prompts are used up. A larger
    number adds answers to a folder that is complete."""
    budget_minutes: float | None = None
    """Start no answer after this many minutes, interrupted runs included. Not repeatable; tokens are."""
    validation_prompts: int = 32
    """Prompts held out: answered greedily to choose checkpoints and the tree by, and once more at temperature 1, by
    which trees for sampled answers are sized."""
    test_prompts: int = 0
    """Prompts held out for evaluation, written to test.jsonl."""
    seed: int = 0
    """Seed of the prompts that the target writes and of sampled answers."""
    answered_by: Literal["target", "text", "draft", "mix"] = "target"
    """Writer of the training rows. target: the target answers; text: answers and plain documents of the prompts are
    taken as they are; draft: an artifact's draft answers, for objectives that learn from the target's distribution;
    mix: several, by `mix`. Held-out prompts are always answered by the target."""
    mix: dict[str, float] | None = None
    """Shares of target, text and draft among the train prompts, for answered_by mix; they sum to 1."""
    draft: str | None = None
    """Folder of the artifact whose draft answers."""
    draft_tokens: int = 4
    """Tokens that the draft writes in a row; one of the target's follows, which gives the draft new states to read."""
    train_dtype: TrainFormat = "own"
    """Number format in which the target writes prompts and answers those of the training split: own is that of the
    target; fastest is bfloat16 where it was measured to decode `slots` rows faster on this processor, which the run's
    folder keeps. Held-out prompts are always answered in the target's own format."""
    document_tokens: int = 512
    """Longest piece of a plain document, in tokens; each piece is a row of its own."""
    engine: Engine = "own"
    """Writer of the target's answers to train prompts. own: this project's decoding loop; transformers: its continuous
    batching, for a target that is whole on one GPU; server: an inference server of the same model, which must return
    token ids. The answers of the last two are compared with the target's first, and may differ from one run to the
    next; finished shards do not. Held-out prompts and drafts' rows are always decoded here."""
    server: str | None = None
    """Address of that server: http://host:port/v1 of vLLM or another OpenAI-style server with `return_token_ids`, or
    http://host:port/generate of SGLang. Its key, where it asks for one, is the environment's DRAFTSMITH_SERVER_KEY."""
    workers: int | Literal["auto"] | None = None
    """Processes that are started here to answer train prompts from one queue, each with one thread of the processor
    (all of them where one shard is all there is), or on a GPU of its own; no more than there are GPUs, or shards of
    prompts where their number is known. auto: one for each GPU, or for each thread of torch (OMP_NUM_THREADS), at most
    eight and as many as memory holds copies of the target. The same command on another machine with the same disk joins
    in. Their number and their ends change no byte of the data, as long as one kind of machine answers. All shards then
    have `shard_prompts` prompts, where null, one process without a queue and with all threads, makes the last ones
    smaller."""

    def __post_init__(self) -> None:
        check_bounds(self, "distill.", shard_prompts=(1, MOST_ROWS), slots=(1, MOST_ROWS),
                     max_new_tokens=(1, MOST_TOKENS), validation_prompts=(0, MOST_ROWS), test_prompts=(0, MOST_ROWS),
                     top_k=(0, MOST_TOKENS), draft_tokens=(1, MOST_ROWS), document_tokens=(2, MOST_TOKENS))
        if self.workers != AUTO:
            check_bounds(self, "distill.", workers=(1, MOST_WORKERS))
        if not self.temperatures or not all(map(is_temperature, self.temperatures)):
            raise UserError(f"distill.temperatures must be one or more numbers, each {TEMPERATURES}, got "
                            f"{list(self.temperatures)}")
        for name in ("budget_tokens", "budget_minutes"):
            if getattr(self, name) is not None and not getattr(self, name) > 0:
                raise UserError(f"distill.{name} must be above 0, got {getattr(self, name)}")
        if not 0 < self.top_p <= 1:
            raise UserError(f"distill.top_p must lie in (0, 1], got {self.top_p}")
        if self.answered_by not in (*SOURCES, "mix"):
            raise UserError(f"distill.answered_by must be one of {', '.join(SOURCES)}, mix, got {self.answered_by!r}")
        if self.train_dtype not in get_args(TrainFormat):
            raise UserError(f"distill.train_dtype must be one of {', '.join(get_args(TrainFormat))}, got "
                            f"{self.train_dtype!r}")
        self._check_shares()
        self._check_engine()

    def require_format(self, target: Target, train_target: Target) -> None:
        """Refuse a train target in another number format than `train_dtype` names, or of another model.

        Raises:
            ValueError: if it is.
        """
        wanted = target.dtype if self.train_dtype == "own" else getattr(torch, self.train_dtype, None)
        if train_target.dtype is not wanted:
            raise ValueError(f"train_target is in {train_target.dtype}, and distill.train_dtype is {self.train_dtype}; "
                             "fastest is measured by draftsmith.recipes")
        train_target.identity.require_same(target.identity)

    def _check_engine(self) -> None:
        if self.engine not in get_args(Engine):
            raise UserError(f"distill.engine must be one of {', '.join(get_args(Engine))}, got {self.engine!r}")
        if (self.engine == "server") != (self.server is not None):
            raise UserError(f"distill.engine is {self.engine} and distill.server is {self.server}; give an address "
                            "with engine server, and only with it")
        if self.engine != "own" and "target" not in self.shares:
            raise UserError(f"distill.engine is {self.engine}, which answers for the target, and distill.answered_by "
                            f"is {self.answered_by}; set a share of the target, or distill.engine: own")
        if self.server is None:
            return
        check_address(self.server)
        if self.train_dtype != "own":
            raise UserError(f"a server answers in its own number format, but distill.train_dtype is "
                            f"{self.train_dtype}; set train_dtype: own, or distill.engine: own")

    def _check_shares(self) -> None:
        if (self.answered_by == "mix") != (self.mix is not None):
            raise UserError(
                f"distill.answered_by is {self.answered_by} and distill.mix is {self.mix}; give shares with "
                "answered_by mix, and only with it"
            )
        if self.mix is not None:
            check_shares(self.mix)
        if ("draft" in self.shares) != (self.draft is not None):
            raise UserError(
                f"distill.draft is {self.draft}, but a draft writes {self.shares.get('draft', 0.0):.0%} of the train "
                "rows; name an artifact's folder where a draft writes, and only there"
            )

    @property
    def shares(self) -> dict[SourceName, float]:
        """Share of each writer among the training prompts."""
        if self.mix is None:
            return {name: 1.0 for name in SOURCES if name == self.answered_by}
        return {name: self.mix[name] for name in SOURCES if name in self.mix}


def check_recipe(prompts: PromptConfig, config: DistillConfig, context: int) -> None:
    """Refuse settings that cannot work together in a context of so many tokens. Raises UserError with the remedy."""
    endless = config.budget_tokens is None and config.budget_minutes is None and prompts.limit is None
    if prompts.origin == "own" and endless:
        raise UserError(
            "prompts of the target have no limit; set distill.budget_tokens, distill.budget_minutes or prompts.limit"
        )
    if prompts.origin == "own" and "text" in config.shares:
        raise UserError("prompts.origin own has no ready-made answers; set distill.answered_by: target")
    if config.max_new_tokens >= context:
        raise UserError(
            f"distill.max_new_tokens {config.max_new_tokens} leaves no room for a prompt in the target's context of "
            f"{context} tokens; lower it"
        )
    if prompts.max_prompt_tokens is not None and prompts.max_prompt_tokens + config.max_new_tokens > context:
        raise UserError(
            f"prompts.max_prompt_tokens {prompts.max_prompt_tokens} and distill.max_new_tokens {config.max_new_tokens} "
            f"exceed the target's context of {context} tokens; lower one"
        )


def require_enough(prompts: PromptConfig, config: DistillConfig) -> None:
    """Refuse a file whose prompts cannot be read, or would all be held out, before the target is loaded.

    Raises:
        UserError: as `read_prompts` does, or with the numbers of prompts.
    """
    if prompts.origin != "file":
        return
    found = read_prompts(prompts.path or "", column=prompts.column, skip_malformed=prompts.skip_malformed)
    there, held = min(len(found), prompts.limit or len(found)), config.validation_prompts + config.test_prompts
    if there <= held:
        raise UserError(
            f"{prompts.path} gives {there} prompts, and {held} are to be held out (distill.validation_prompts "
            f"{config.validation_prompts}, distill.test_prompts {config.test_prompts}), which leaves none to train on; "
            "give more prompts, or lower these numbers"
        )


def describe_recipe(prompts: PromptConfig, config: DistillConfig, writer: Writer | None) -> dict[str, Any]:
    """The settings as JSON gives them back; files by their content instead of their path, since folders may move."""
    source = asdict(prompts)
    for key in ("path", "name"):
        if source[key] is not None and Path(source[key]).exists():
            source[key] = Path(source[key]).name
    if prompts.origin == "file":
        source["sha256"] = hash_file(Path(str(prompts.path)))
    answers = {**asdict(config), "draft": None if writer is None else writer.digest}
    del answers["server"]
    if config.engine == "own":
        del answers["engine"]
    if answers.pop("workers") is not None:
        # Their number decides nothing, the sizes of a queue's shards do.
        answers["workers"] = ONE_QUEUE
    recipe: dict[str, Any] = json.loads(json.dumps({"prompts": source, "distill": answers}))
    return recipe


def raised_limits(former: Mapping[str, Any], wanted: Mapping[str, Any]) -> dict[str, Any]:
    """Limits of answer tokens and minutes that are higher in `wanted` than in `former`, by name.

    Args:
        former: settings of the answers, as a manifest's recipe has them.
        wanted: the same of another recipe.
    """
    return {limit: wanted[limit] for limit in LIMITS if former.get(limit) is not None
            and (wanted[limit] is None or wanted[limit] > former[limit])}


def package_versions() -> dict[str, str]:
    """Versions of the packages that decide the bytes of a shard."""
    return {name: version(name) for name in ("draftsmith", "safetensors", "tokenizers", "torch", "transformers")}
