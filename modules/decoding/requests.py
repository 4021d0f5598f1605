"""Requests, settings and results of the decoding loop; the text of each token of an answer, and the stop texts that end
it."""

import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Self

from ..errors import UserError
from ..interfaces.proposer import Proposer
from ..target.loading.generation_defaults import GenerationDefaults, TokenBiases
from ..verification.acceptance_rules import Rule
from ..verification.sampling import TEMPERATURES, is_temperature
from .constraints import MOST_FORCED, Grammar, Processor, fault_of

Finish = Literal["eos", "length", "stop", "error"]


@dataclass(frozen=True)
class Request:
    """One prompt to be continued. Decoding checks it, so that a wrong one does not keep others from being answered."""

    tokens: tuple[int, ...]  # The prompt's token ids
    index: int  # Names the request in results and keys its random numbers: 0 to 2^63 - 1, each once in a run
    max_new_tokens: int  # Most tokens to emit
    temperature: float = 0.0  # 0 is greedy; else from 0.001 to 1000, where float32 keeps what it stands for
    least: int = 0  # Tokens that it gets whatever a deadline says
    processors: tuple[Processor, ...] = ()  # Applied at each node, after the repetition penalty
    grammar: Grammar | None = None  # The form of the answer; None leaves it free
    reference: tuple[int, ...] = ()  # A text that the answer may resemble: a drafter with `reads_references` copies it
    draft_tokens: tuple[int, ...] = ()
    """A text that the drafter reads in place of the prompt (RAPID, arXiv:2502.20754); it must have `reads_own_text`."""

    @property
    def room(self) -> int:
        """Most tokens of a text of this request: of prompt and answer, of the draft's text and the answer, or the
        reference."""
        return max(max(len(self.tokens), len(self.draft_tokens)) + self.max_new_tokens, len(self.reference))

    def fault(self, target: Any, drafter: Proposer | None = None) -> str:
        """The error of this request to a target, or stored text, in a sentence that names it; empty for a sound one."""
        context_length, vocab_size = target.context_length, target.vocab_size
        total = len(self.tokens) + self.max_new_tokens
        if not 0 <= self.index < 2**63:
            return f"prompt {self.index}: an index must be from 0 to 2^63 - 1; number the requests from 0"
        if not self.tokens:
            return f"prompt {self.index} is empty; give at least one token"
        if self.max_new_tokens < 1:
            return f"prompt {self.index}: max_new_tokens must be at least 1, got {self.max_new_tokens}"
        if not is_temperature(self.temperature):
            return f"prompt {self.index}: temperature must be {TEMPERATURES}, got {self.temperature}"
        for where, tokens in (("", self.tokens), ("in its reference the ", self.reference),
                              ("in its draft_tokens the ", self.draft_tokens)):
            if tokens and not 0 <= min(tokens) <= max(tokens) < vocab_size:
                outside = next(token for token in tokens if not 0 <= token < vocab_size)
                return f"prompt {self.index} has {where}token {outside}; the target's ids are 0 to {vocab_size - 1}"
        if total > context_length:
            return (f"prompt {self.index} has {len(self.tokens)} tokens and asks for {self.max_new_tokens} more, but "
                    f"the target's context holds {context_length}; shorten the prompt or lower max_new_tokens")
        if self.room > context_length:
            return (f"prompt {self.index} has a reference of {len(self.reference)} tokens and draft_tokens of "
                    f"{len(self.draft_tokens)} before {self.max_new_tokens} more, but the target's context holds "
                    f"{context_length}; shorten them")
        if self.draft_tokens and drafter is not None and not drafter.reads_own_text:
            return (f"prompt {self.index} has draft_tokens, but a draft of the family {drafter.family} reads the "
                    "target's states of the whole prompt; leave them out, or take a draft that reads text alone, such "
                    "as a draft language model")
        wrong = fault_of(self.processors, self.tokens, vocab_size, target.device)
        return f"prompt {self.index}: {wrong}" if wrong else ""


def room_for(requests: Iterable[Request]) -> int:
    """Nodes that the grammars of requests may add to a tree, a root of their own included."""
    return MOST_FORCED + 1 if any(request.grammar is not None for request in requests) else 0


@dataclass(frozen=True, kw_only=True)
class DecodeSettings:
    """Settings shared by all requests of a run; logits are processed in the order of transformers' `generate`. Raises
    UserError if a number is out of its range."""

    batch_size: int = 1  # Sequences decoded at the same time; a finished one makes room for the next at once
    top_k: int = 0  # A sampled token is one of the k likeliest; 0 is all
    top_p: float = 1.0  # A sampled token is one of the likeliest whose probabilities reach this sum
    min_p: float = 0.0  # A sampled token has at least this share of the likeliest one's probability; 0 is all
    seed: int = 0  # Together with a request's index, the key of its random numbers
    stop: tuple[str, ...] = ()  # Texts that end an answer; the token that completes one is the last
    stop_from_prompt: bool = False  # A stop text may begin in the prompt, as in transformers' `generate`
    eos_ids: tuple[int, ...] | None = None  # Tokens that end an answer; None takes the target's
    biases: TokenBiases | None = None  # Biases of single tokens; None takes those of the target's generation config
    ignore_eos: bool = False  # Go on after an end token, up to `max_new_tokens`
    logprobs: bool = False  # Give the log-probability of each token of an answer: `Generation.logprobs`
    prefill_chunk: int = 512  # Most prompt tokens of a row in one pass
    repetition_penalty: float = 1.0  # See `penalise`; the prompt counts, and 1.0 changes nothing
    lossy: Rule | None = None  # A rule such as `Typical`, by which sampled answers have another law; None is exact
    graphs: bool | None = None
    """Replay whole rounds as CUDA graphs, which spares the host the launch of each kernel; None does so on a CUDA
    device. The target keeps them for later calls with the same drafter and policy. What cannot be replayed is computed,
    and `DecodeStats.graph_refusal` says why."""
    compile: bool = False
    """Compile the layers of target and drafter with torch.compile. The first passes take minutes. Where that fails the
    layers run as they are, and `DecodeStats.compile_refusal` says why."""

    def __post_init__(self) -> None:
        for name, sound, bound in (
                ("batch_size", self.batch_size >= 1, "at least 1"),
                ("prefill_chunk", self.prefill_chunk >= 1, "at least 1"), ("top_k", self.top_k >= 0, "at least 0"),
                ("top_p", 0 < self.top_p <= 1, "above 0 and at most 1"), ("min_p", 0 <= self.min_p <= 1, "from 0 to 1"),
                ("repetition_penalty", 0 < self.repetition_penalty < float("inf"), "above 0 and finite")):
            if not sound:
                raise UserError(f"{name} must be {bound}, got {getattr(self, name)}")
        if "" in self.stop:
            raise UserError("stop must not hold an empty text, which would end every answer at once; leave it out")

    @classmethod
    def as_generate(cls, defaults: GenerationDefaults, **others: Any) -> Self:
        """The filters that transformers' `generate` applies unasked to a target's answers (`Target.defaults`, whose
        temperature belongs to the requests), with other settings."""
        return cls(top_k=defaults.top_k, top_p=defaults.top_p, min_p=defaults.min_p,
                   repetition_penalty=defaults.repetition_penalty, **others)


@dataclass
class Generation:
    """The continuation of one request. Its first token comes from the prompt's own pass."""

    request: Request
    tokens: list[int] = field(default_factory=list)  # New tokens, the end token included
    emitted: list[int] = field(default_factory=list)  # Tokens that each later pass added, the bonus included
    logprobs: list[float] = field(default_factory=list)
    """If asked for, the target's own log-probability of each token, before penalty, temperature and filters, as
    OpenAI's API and vLLM give it, however the token was drafted, chosen or accepted."""
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
    draft_seconds: float = 0.0  # Of it, growing trees and observing passes, on CUDA as the device measures it
    busy_slots: int = 0  # Sum over passes of the rows that were decoding
    total_slots: int = 0  # Passes times the batch size
    lossless: bool = True  # True if every pass was verified exactly; False under a `lossy` setting
    graph_refusal: str = ""  # Why some work was not replayed as CUDA graphs that was to be; empty where all was
    recorded_rounds: int = 0  # Rounds that were recorded as CUDA graphs; none where those of an earlier call would do
    compile_seconds: float = 0.0  # Seconds of all that torch.compile took to make graphs
    compile_refusal: str = ""  # Why some layers were not compiled that were to be; empty where all were

    def amounts(self) -> dict[str, float]:
        """All counts and times of decoding by name."""
        apart = ("lossless", "graph_refusal", "recorded_rounds", "compile_seconds", "compile_refusal")
        return {name: value for name, value in vars(self).items() if name not in apart}

    def add(self, more: "DecodeStats") -> None:
        """Take in another run: counts and times add up, and both must have been lossless for the sum to be."""
        for name, value in more.amounts().items():
            setattr(self, name, getattr(self, name) + value)
        self.lossless = self.lossless and more.lossless
        # Runs of one evaluation are refused for the same reason: the first one stands for all.
        self.graph_refusal = self.graph_refusal or more.graph_refusal
        self.recorded_rounds += more.recorded_rounds
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


def repeats_itself(tokens: Sequence[int]) -> bool:
    """True where over 30 % of the 4-grams of a text occurred earlier in it."""
    grams = list(zip(tokens, tokens[1:], tokens[2:], tokens[3:], strict=False))
    return len(grams) - len(set(grams)) > 0.3 * len(grams)


_SHORTEST_PREFIX = 8  # Tokens that prompts must share before it pays to keep them in a row of their own


def shared_prefix(prompts: Sequence[tuple[int, ...]], limit: int) -> tuple[int, ...]:
    """The start that all prompts share, without any prompt's last token; empty where that saves next to nothing."""
    if len(prompts) < 2:
        return ()
    # Every prompt lies between the least and the greatest, so what these two share all share.
    low, high = min(prompts), max(prompts)
    room = min(limit, min(map(len, prompts)) - 1)
    count = next((i for i, (a, b) in enumerate(zip(low, high, strict=False)) if a != b), min(len(low), len(high)))
    return low[: min(count, room)] if min(count, room) >= _SHORTEST_PREFIX else ()


_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"  # Last character of a text that ends inside a character
DIRECTIONS = {"LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI"}
"""Bidirectional classes of characters that change the order of what follows them."""
_CONTEXT = 8  # Tokens decoded ahead of those that may hold a stop text


class TokenText:
    """Splits the text of an answer among its tokens, as they come; the pieces together are the text. A token that ends
    inside a character has an empty piece, and the token that completes the character has all of it. Special tokens,
    such as the end of the text, are left out."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self._tokens: list[int] = []
        # Text up to `_read` has been given out. Decoding starts one piece earlier: whether a token's leading space is
        # text depends on a token before it.
        self._start = self._read = 0

    def add(self, token: int) -> str:
        """The piece of the next token."""
        self._tokens.append(token)
        piece = self._unread()
        if piece.endswith(_INCOMPLETE):
            return ""
        # After a special token alone, a decoder would take the next word for the first, which has no space.
        if piece:
            self._start, self._read = self._read, len(self._tokens)
        return piece

    def guess(self, token: int) -> str:
        """The piece that a token would have if it were the next one: the name of a special token, and nothing for one
        that ends inside a character."""
        if token in self.tokenizer.all_special_ids:
            return str(self.tokenizer.convert_ids_to_tokens(token))
        self._tokens.append(token)
        piece = self._unread()
        self._tokens.pop()
        return "" if piece.endswith(_INCOMPLETE) else piece

    def rest(self) -> str:
        """The piece of a character that the answer leaves incomplete; empty for any other answer."""
        piece = self._unread()
        self._start = self._read = len(self._tokens)
        return piece

    def _unread(self) -> str:
        # Both texts are decoded from the same token on, so that what the tokens before them change cancels out.
        shown, whole = (str(self.tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False))
                        for tokens in (self._tokens[self._start : self._read], self._tokens[self._start :]))
        return whole[len(shown) :]


def visible(text: str, *, breaks: bool = True) -> str:
    """The text with its control characters, which could move the cursor or change colours, as visible signs. Without
    `breaks` tabs are among them, and a line break is an arrow."""
    found = ""
    for letter in text:
        code = ord(letter)
        if breaks and letter in "\n\t":
            found += letter
        elif letter == "\n":
            found += "↵"
        elif code < 0x20:
            # Unicode has a picture of each of these, in their order.
            found += chr(0x2400 + code)
        elif code == 0x7F:
            found += "\N{SYMBOL FOR DELETE}"
        elif unicodedata.category(letter) == "Cc" or unicodedata.bidirectional(letter) in DIRECTIONS:
            found += f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"
        else:
            found += letter
    return found


def first_stop(tokenizer: Any, before: Sequence[int], new: Sequence[int], stops: Sequence[str],
               prompt: Sequence[int] = ()) -> int | None:
    """The number of new tokens of an answer that complete the first stop text, or None. A stop text may begin in
    `prompt`, where that is given, but not end there. Only the end of the answer is decoded: as many tokens as hold a
    character more than the longest stop text, and a few for those whose text depends on the token before. Where a stop
    text seems to be there, the whole answer decides."""
    longest = max(map(len, stops))
    # A character may have four tokens.
    prompt = prompt[-(_CONTEXT + 4 * longest) :]
    before = [*prompt, *before]
    window = _CONTEXT + longest
    while window < len(before):
        if len(tokenizer.decode(list(before[len(before) - window + _CONTEXT :]), skip_special_tokens=False)) > longest:
            break
        window *= 2
    window = min(window, len(before))
    for count in range(1, len(new) + 1):
        for start in (len(before) - window, 0):
            text = tokenizer.decode([*before[start:], *new[:count]], skip_special_tokens=False)
            asked = len(tokenizer.decode(list(prompt[start:]), skip_special_tokens=False).rstrip(_INCOMPLETE))
            if not any(stop in text[max(0, asked - len(stop) + 1) :] for stop in stops):
                break
        else:
            return count
    return None
