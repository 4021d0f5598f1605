"""Arguments of the commands that answer with an artifact, and what they ask of an answer."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...modules import FASTEST, NONE, DecodeSettings, Request, Target, TargetConfig, UserError, parse_joined
from ...modules.config_checks import CheckedSettings, Natural, Whole
from ...modules.decoding.constraints import Grammar, ThinkingBudget
from ...modules.files.json_records import bounded_json, read_bounded_text
from ...modules.target.loading.generation_defaults import TokenBiases
from ...modules.verification.acceptance_rules import lossy_rule
from ...modules.verification.sampling import Temperature
from ..chat_settings import TemplateConfig, own_target


def text_of(name: str, file: Path) -> str:
    """The text of a file, which is a setting's. Raises UserError if it holds none."""
    try:
        text = read_bounded_text(file)
    except OSError as error:
        raise UserError(f"cannot read the {name} {file}: {error.strerror or error}; check the path") from error
    except UnicodeDecodeError as error:
        raise UserError(f"the {name} {file} is no text in UTF-8 ({error.reason} at byte {error.start}); save it as "
                        "UTF-8") from error
    if not text.strip() or "\0" in text:
        raise UserError(f"the {name} {file} holds no text; write it, or leave --{name} out")
    return text


@dataclass(frozen=True, kw_only=True)
class AnswerArguments(CheckedSettings):
    """Arguments of the commands that answer."""

    artifact: Path
    """Folder of the artifact."""
    max_new_tokens: Whole = 256
    """Longest answer, in tokens."""
    temperature: Temperature = 0.0
    """0 is greedy."""
    top_k: int = 0
    """Sample among this many best tokens; 0 is all of them."""
    top_p: float = 1.0
    """Sample within this share of the probability."""
    min_p: float = 0.0
    """Sample among the tokens with at least this share of the best token's probability; 0 is all of them."""
    repetition_penalty: float = 1.0
    """Divide the logits of tokens that occurred by this, as transformers does; 1 changes nothing."""
    seed: int = 0
    """Seed of the sampled answer."""
    stop: tuple[str, ...] = ()
    """Texts that end the answer."""
    json_schema: Path | None = None
    """File with a JSON schema that answers follow; what it forces is copied for free. Takes draftsmith[structured]."""
    regex: str = ""
    """Regular expression that answers match."""
    grammar: Path | None = None
    """File with a grammar that answers follow, in the EBNF of llama.cpp with the rule root."""
    thinking_tokens: Natural | None = None
    """Most tokens of each stretch of thinking: after them its end is forced; null leaves it to the target."""
    min_new_tokens: Natural = 0
    """Tokens of an answer before which it does not end; 0 leaves it to the target."""
    no_repeat_ngram_size: Natural = 0
    """Let no sequence of this many tokens come twice, the prompt included; 0 lets all."""
    bad_words: tuple[str, ...] = ()
    """Texts that answers do not hold, at the start of a word and inside."""
    sequence_bias: dict[str, float] = field(default_factory=dict)
    """Texts and what is added to the logit of their last token where the rest stands before it, as in {' cat': -2.5}.
    """
    suppress_tokens: tuple[Natural, ...] = ()
    """Tokens, by their ids, that answers do not hold."""
    forced_end: bool = False
    """Make an end token the last one of an answer of full length."""
    lossy: str = ""
    """Accept more guesses than the target would write, so that answers are NOT its own, above temperature 0: typical
    (likely enough guesses), or kl and a number, kl-0.5 (guesses where draft and target differ by fewer nats; takes a
    policy that samples). Empty is exact."""
    graphs: bool | None = None
    """Replay whole rounds as CUDA graphs; null does so on a CUDA device. A last line says what could not be."""
    compile: bool = False
    """Compile the layers of target and draft with torch.compile, which takes minutes before the first words and pays in
    long answers; a last line says where it fails."""
    policy: str = FASTEST
    """Draft policy: fastest (static or static+lookup, by the artifact's measurements), static (the tree tuned on the
    machine that trained it), paid (what pays of the tree, or none, anew before each pass), chain, eagle2, dyspec, sure,
    ...; with a number of nodes or tokens where you like, static-16, chain-3; static+lookup also copies from the text;
    none drafts nothing."""
    target: TargetConfig = field(default_factory=own_target)
    """The target; the one that the artifact names by default."""
    template: TemplateConfig = field(default_factory=TemplateConfig)
    """Settings of its chat template."""
    trust: bool = False
    """Import the class that the artifact names where its family is none of this package's, which runs its code."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.policy != FASTEST:
            parse_joined(self.policy)
        self.decode_settings()
        self.form()
        if self.lossy and (self.temperature == 0 or self.policy == NONE):
            raise UserError(f"lossy {self.lossy} accepts more of what was drafted above temperature 0, and "
                            f"temperature {self.temperature:g} with policy {self.policy} is exact; give both a "
                            "--temperature and a draft, or leave --lossy out")

    def decode_settings(self) -> DecodeSettings:
        """The decoding loop's settings, but for biases. Raises UserError when a number is out of its range."""
        return DecodeSettings(top_k=self.top_k, top_p=self.top_p, min_p=self.min_p, seed=self.seed,
                              repetition_penalty=self.repetition_penalty, stop=self.stop, graphs=self.graphs,
                              compile=self.compile, lossy=lossy_rule(self.lossy) if self.lossy else None)

    def form(self) -> Grammar | None:
        """The form of the answers. Raises UserError if there are two, or one that cannot be read or compiled."""
        given: dict[Any, Any] = {"json_schema": self.json_schema, "regex": self.regex, "grammar": self.grammar}
        asked = {name: value for name, value in given.items() if value}
        if len(asked) > 1:
            raise UserError(f"an answer follows one form, got {' and '.join(asked)}; leave one out")
        for name, value in asked.items():
            text = text_of(name, value) if isinstance(value, Path) else value
            try:
                # The library takes minutes and gigabytes for schemas of hundreds of levels.
                if name == "json_schema":
                    bounded_json(text)
            except ValueError as error:
                raise UserError(f"json_schema {value} is no JSON that can be compiled: {error}; change it") from error
            return Grammar(name, text)
        return None

    def biases(self, target: Target) -> TokenBiases:
        """The target's own biases and those asked for. Raises UserError as `TokenBiases.of` does."""
        for name in ("bad_words", "sequence_bias"):
            if any(not text.strip() for text in getattr(self, name)):
                raise UserError(f"{name} holds a text without a word; leave it out")

        def tokens(text: str) -> list[list[int]]:
            # A word has another token after a space.
            found = [target.tokenizer.encode(one, add_special_tokens=False) for one in (text, f" {text.lstrip()}")]
            return [one for place, one in enumerate(found) if one and one not in found[:place]]

        own, more = target.biases.of_generate(), self.sequence_bias.items()
        asked = {"bad_words_ids": [one for text in self.bad_words for one in tokens(text)],
                 "sequence_bias": [*own.get("sequence_bias", {}).items(),
                                   *((one, value) for text, value in more for one in tokens(text))],
                 "suppress_tokens": self.suppress_tokens, "min_new_tokens": self.min_new_tokens,
                 "no_repeat_ngram_size": self.no_repeat_ngram_size,
                 "forced_eos_token_id": target.eos_ids if self.forced_end else None}
        given = {name: value for name, value in asked.items() if value}
        return TokenBiases.of({**own, **given}, target.eos_ids, target.vocab_size)

    def request(self, target: Target, tokens: list[int], index: int, room: int) -> Request:
        """The request for an answer of at most `room` tokens."""
        budget = () if self.thinking_tokens is None else (
            ThinkingBudget.of(target.tokenizer, self.thinking_tokens, len(tokens)),)
        return Request(tuple(tokens), index, room, self.temperature, processors=budget, grammar=self.form())


@dataclass(frozen=True, kw_only=True)
class GenerateArguments(AnswerArguments):
    """Arguments of `draftsmith generate`."""

    prompt: str
    """Text of the user's message."""
    reference: Path | None = None
    """File of a text that the answer may resemble, such as one to be corrected or a former answer: the draft copies
    from it. The policy is then static+reference, or one that you name with reference after its plus."""
    draft_prompt: str | None = None
    """Text of a message that the draft reads in place of `prompt`, such as the passages of it that matter; for drafts
    that read text alone: draft language models, and the policies that join layers of the target."""
    show_drafts: bool = False
    """Mark who wrote each token: accepted guesses of the draft are green, rejected ones dim and struck through, the
    rest is the target's own. Without colours ([accepted], ~rejected~) where the output is no terminal or NO_COLOR is
    set; FORCE_COLOR asks for colours in files and pipes too."""


@dataclass(frozen=True, kw_only=True)
class ChatArguments(AnswerArguments):
    """Arguments of `draftsmith chat`."""

    show_drafts: bool = True
    """On a terminal, colour the accepted guesses of the draft; answers to a pipe are never marked."""
