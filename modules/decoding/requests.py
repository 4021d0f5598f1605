"""Requests, settings and results of the decoding loop."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Self

import numpy as np

from ..errors import UserError
from ..target.loading.generation_defaults import GenerationDefaults, TokenBiases
from ..verification.acceptance_rules import Rule
from ..verification.sampling import TEMPERATURES, is_temperature

REPEATED_SHARE = 0.3  # A text with a larger share of repeated 4-grams repeats itself
LARGEST_INDEX = 2**63 - 1  # Indices are int64 on the device
Finish = Literal["eos", "length", "stop", "error"]


@dataclass(frozen=True)
class Request:
    """One prompt to be continued. Decoding checks it, so that a wrong one does not keep others from being answered."""

    tokens: tuple[int, ...]  # The prompt's token ids
    index: int  # Names the request in results and keys its random numbers: 0 to 2^63 - 1, each once in a run
    max_new_tokens: int  # Most tokens to emit
    temperature: float = 0.0  # 0 is greedy; else from 0.001 to 1000, where float32 keeps what it stands for
    least: int = 0  # Tokens that it gets whatever a deadline says

    def fault(self, context_length: int, vocab_size: int) -> str:
        """The error of this request, in a sentence that names it; empty for a sound one."""
        total = len(self.tokens) + self.max_new_tokens
        if not 0 <= self.index <= LARGEST_INDEX:
            return f"prompt {self.index}: an index must be from 0 to 2^63 - 1; number the requests from 0"
        if not self.tokens:
            return f"prompt {self.index} is empty; give at least one token"
        if self.max_new_tokens < 1:
            return f"prompt {self.index}: max_new_tokens must be at least 1, got {self.max_new_tokens}"
        if not is_temperature(self.temperature):
            return f"prompt {self.index}: temperature must be {TEMPERATURES}, got {self.temperature}"
        if not 0 <= min(self.tokens) <= max(self.tokens) < vocab_size:
            outside = next(token for token in self.tokens if not 0 <= token < vocab_size)
            return f"prompt {self.index} has token {outside}; the target's ids are 0 to {vocab_size - 1}"
        if total > context_length:
            return (f"prompt {self.index} has {len(self.tokens)} tokens and asks for {self.max_new_tokens} more, but "
                    f"the target's context holds {context_length}; shorten the prompt or lower max_new_tokens")
        return ""


@dataclass(frozen=True, kw_only=True)
class DecodeSettings:
    """Settings shared by all requests of a run; logits are processed in the order of transformers' `generate`.

    Raises:
        UserError: if a number is out of its range.
    """

    batch_size: int = 1
    """Sequences decoded at the same time; a finished one makes room for the next at once."""
    top_k: int = 0
    """A sampled token is one of the k likeliest; 0 is all."""
    top_p: float = 1.0
    """A sampled token is one of the likeliest whose probabilities reach this sum."""
    min_p: float = 0.0
    """A sampled token has at least this share of the likeliest one's probability; 0 is all."""
    seed: int = 0
    """Together with a request's index, the key of its random numbers."""
    stop: tuple[str, ...] = ()
    """Texts that end an answer; the token that completes one is the last."""
    stop_from_prompt: bool = False
    """A stop text may begin in the prompt, as in transformers' `generate`."""
    eos_ids: tuple[int, ...] | None = None
    """Tokens that end an answer; None takes the target's."""
    biases: TokenBiases | None = None
    """Biases of single tokens; None takes the target's, which its generation config asks for."""
    ignore_eos: bool = False
    """Go on after an end token, up to `max_new_tokens`."""
    logprobs: bool = False
    """Give the log-probability of each token of an answer: `Generation.logprobs`."""
    prefill_chunk: int = 512
    """Most prompt tokens of a row in one pass."""
    repetition_penalty: float = 1.0
    """Divide positive logits of tokens that occurred, prompt included, by this and multiply negative ones, as
    transformers does; 1.0 changes nothing."""
    lossy: Rule | None = None
    """Accept by this rule, which changes the distribution of sampled answers; None verifies exactly."""
    graphs: bool = False
    """Replay drafting, verification and commit as CUDA graphs, for each of a few numbers of rows and cache slots, which
    spares the host the launch of each kernel. What cannot be replayed is computed as without graphs, and
    `DecodeStats.graph_refusal` says why."""
    compile: bool = False
    """Compile the layers of target and drafter with torch.compile: their small operations become a few kernels. The
    first passes take minutes. Where that fails the layers run as they are; `DecodeStats.compile_refusal` says why."""

    def __post_init__(self) -> None:
        for name in ("batch_size", "prefill_chunk"):
            if getattr(self, name) < 1:
                raise UserError(f"{name} must be at least 1, got {getattr(self, name)}")
        if "" in self.stop:
            raise UserError("stop must not hold an empty text, which would end every answer at once; leave it out")
        if self.top_k < 0:
            raise UserError(f"top_k must be at least 0, got {self.top_k}")
        if not 0 < self.top_p <= 1:
            raise UserError(f"top_p must be above 0 and at most 1, got {self.top_p}")
        if not 0 <= self.min_p <= 1:
            raise UserError(f"min_p must be from 0 to 1, got {self.min_p}")
        if not 0 < self.repetition_penalty < float("inf"):
            raise UserError(f"repetition_penalty must be above 0 and finite, got {self.repetition_penalty}")

    @classmethod
    def as_generate(cls, defaults: GenerationDefaults, **others: Any) -> Self:
        """The filters that transformers' `generate` applies unasked to a target's answers (`Target.defaults`, whose
        temperature belongs to the requests), with other settings."""
        return cls(top_k=defaults.top_k, top_p=defaults.top_p, min_p=defaults.min_p,
                   repetition_penalty=defaults.repetition_penalty, **others)


@dataclass
class Generation:
    """The continuation of one request.

    The first token comes from the prompt's own pass; `emitted` says how many each later pass added, the bonus included.
    """

    request: Request
    tokens: list[int] = field(default_factory=list)  # New tokens, the end token included
    emitted: list[int] = field(default_factory=list)  # Tokens added by each pass after the prompt's, until the end
    logprobs: list[float] = field(default_factory=list)
    """With `DecodeSettings.logprobs`, the target's own log-probability of each token after those before it, of the
    softmax of its logits: before penalty, temperature and filters, as OpenAI's API and vLLM give it, however the token
    was drafted, chosen or accepted. Empty otherwise."""
    finish: Finish = "length"  # Its end: an end token, the length limit, a stop text, or an error
    error: str = ""  # The error, in a sentence that names the request; empty unless `finish` is "error"

    @property
    def complete(self) -> bool:
        """True once it has ended; one that is still growing has not."""
        return self.finish != "length" or len(self.tokens) >= self.request.max_new_tokens

    @property
    def passes(self) -> int:
        """Target passes after the prompt's."""
        return len(self.emitted)


@dataclass
class DecodeStats:
    """Counts and times of a run."""

    target_calls: int = 0  # Verifying passes of the whole batch
    prefill_calls: int = 0  # Passes over prompts
    seconds: float = 0.0  # Wall-clock time of the run
    target_seconds: float = 0.0  # Of it, in verifying passes
    prefill_seconds: float = 0.0  # Of it, in passes over prompts
    draft_seconds: float = 0.0
    """Of it, growing trees and observing passes: on CUDA the device's time between the first launch of a piece and the
    end of its work."""
    busy_slots: int = 0  # Sum over passes of the rows that were decoding
    total_slots: int = 0  # Passes times the batch size
    lossless: bool = True  # True if every pass was verified exactly; False under a `lossy` setting
    graph_refusal: str = ""
    """Reason why some work was not replayed as CUDA graphs although `DecodeSettings.graphs` asks for it; empty where
    all was, or none was to be."""
    compile_seconds: float = 0.0  # Seconds of all that torch.compile took to make graphs
    compile_refusal: str = ""
    """Reason why some layers were not compiled although `DecodeSettings.compile` asks for it; empty where all were, or
    none was to be."""

    def amounts(self) -> dict[str, float]:
        """All counts and times of decoding by name."""
        apart = ("lossless", "graph_refusal", "compile_seconds", "compile_refusal")
        return {name: value for name, value in vars(self).items() if name not in apart}

    def add(self, more: "DecodeStats") -> None:
        """Take in another run: counts and times add up, and both must have been lossless for the sum to be."""
        for name, value in more.amounts().items():
            setattr(self, name, getattr(self, name) + value)
        self.lossless = self.lossless and more.lossless
        # Runs of one evaluation are refused for the same reason: the first one stands for all.
        self.graph_refusal = self.graph_refusal or more.graph_refusal
        self.compile_seconds += more.compile_seconds
        self.compile_refusal = self.compile_refusal or more.compile_refusal


@dataclass
class DecodeResult:
    """The generations in the order of the requests (those not started before a deadline are absent), and the counts."""

    generations: list[Generation]
    stats: DecodeStats

    @property
    def accepted_length(self) -> float:
        """Tokens emitted per pass and row, the bonus included, over all passes after the prompts'."""
        passes = sum(generation.passes for generation in self.generations)
        return sum(sum(generation.emitted) for generation in self.generations) / passes if passes else 0.0


def uniform_stream(seed: int, index: int, count: int) -> Any:
    """`count` uniform numbers in [0, 1) for one request, float64; the same whatever the batch and the drafter."""
    # An array of whole numbers: a list with an entry from 2^63 becomes float64 in numpy, which loses its low digits.
    key = np.array([seed % 2**64, index % 2**64], dtype=np.uint64)
    return np.random.Generator(np.random.Philox(key=key)).random(count)


def repeats_itself(tokens: Sequence[int]) -> bool:
    """True where over 30 % of the 4-grams of a text occurred earlier in it."""
    grams = list(zip(tokens, tokens[1:], tokens[2:], tokens[3:], strict=False))
    return len(grams) - len(set(grams)) > REPEATED_SHARE * len(grams)
