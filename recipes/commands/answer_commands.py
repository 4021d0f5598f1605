"""The commands that answer with an artifact: generate, chat. They need none of the training extras."""

import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from signal import SIGINT
from typing import Any

from ...data import Message
from ...export import load_artifact, use_free_processors
from ...modules import (
    FASTEST,
    NONE,
    DecodeSettings,
    DecodeStats,
    Request,
    Target,
    TargetConfig,
    UserError,
    parse_joined,
    stream,
)
from ...modules.config_checks import CheckedSettings, Natural, Whole
from ...modules.decoding.constraints import Grammar, ThinkingBudget
from ...modules.decoding.recorders import GuessedPass, PassRecorder, WrittenToken
from ...modules.decoding.requests import TokenText, visible
from ...modules.target.loading.generation_defaults import TokenBiases
from ...modules.verification.acceptance_rules import lossy_rule
from ...modules.verification.sampling import Temperature
from ..chat_settings import TemplateConfig, artifact_target, own_target
from ..reading.command_line import Command, Parsed
from ..reading.recipe_files import check_plain
from ..terminal import Stopped, one_sentence, say, stopped_by_signals

ANEW = "/new"  # The message that starts another conversation
MOST_CHARACTERS = 2**20  # Longest line that is read as a message


@dataclass(frozen=True, kw_only=True)
class Marks:
    """Texts before and after accepted and rejected guesses of the draft, and their explanation."""

    guessed: tuple[str, str]
    rejected: tuple[str, str] | None  # None leaves these out
    legend: str


RESET = "\x1b[0m"
COLOURS = Marks(
    guessed=("\x1b[32m", RESET), rejected=("\x1b[2;9m", RESET),
    legend=f"\x1b[32mgreen{RESET}: guessed by the draft and accepted · uncoloured: written by the target itself · "
           f"\x1b[2;9mstruck through{RESET}: guessed and rejected",
)
"""Green for accepted guesses; rejected ones dim and struck through."""
BRACKETS = Marks(guessed=("[", "]"), rejected=("~", "~"),
                 legend="[ ]: guessed by the draft and accepted · unmarked: written by the target itself · "
                        "~ ~: guessed and rejected")
"""The same for files, pipes and terminals without colours."""


def marks_for(terminal: bool, environment: Mapping[str, str]) -> Marks:
    """Colours on a terminal unless NO_COLOR is set, and anywhere where FORCE_COLOR is; brackets otherwise. An empty
    variable of the environment counts as not set."""
    able = environment.get("FORCE_COLOR") or (terminal and environment.get("TERM") != "dumb")
    return COLOURS if able and not environment.get("NO_COLOR") else BRACKETS


@dataclass
class MarkedAnswer:
    """The answer to one prompt as marked text, and the counts of its tokens."""

    tokenizer: Any
    marks: Marks
    recorder: PassRecorder  # The observer of the decoding loop
    index: int = 0  # The request's
    tokens: int = 0  # Tokens so far
    guessed: int = 0  # Accepted guesses among them

    def text(self, passes: Iterable[list[int]]) -> Iterator[str]:
        """The marked text of each pass, as it comes; the prompt's pass is the first."""
        pieces = TokenText(self.tokenizer)
        for place, tokens in enumerate(passes):
            found = self.recorder.passes[self.index][place - 1] if place else GuessedPass()
            yield "".join(self._marked(one, pieces) for one in found.written(tokens))
        yield visible(pieces.rest())

    def summary(self) -> str:
        """The legend and the counts, in two lines."""
        return f"{self.marks.legend}\n{self.guessed} of {self.tokens} tokens were guessed"

    def _marked(self, written: WrittenToken, pieces: TokenText) -> str:
        """One token; before a token of the target's own, the first guess that was rejected for its place."""
        self.tokens += 1
        self.guessed += written.guessed
        # The guess is read before the token is taken.
        rejected = pieces.guess(written.rejected[0]) if written.rejected and self.marks.rejected else ""
        piece = visible(pieces.add(written.token))
        before = visible(rejected, breaks=False).join(self.marks.rejected or ("", "")) if rejected else ""
        return before + (piece.join(self.marks.guessed) if written.guessed and piece else piece)


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
    """Most tokens of thinking: after them its end is forced; null leaves it to the target."""
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
            try:
                return Grammar(name, value.read_text(encoding="utf-8") if isinstance(value, Path) else value)
            except (OSError, UnicodeDecodeError) as error:
                raise UserError(f"{name} {value} cannot be read ({error}); give a file of text") from error
        return None

    def biases(self, target: Target) -> TokenBiases:
        """The target's own biases and those asked for. Raises UserError as `TokenBiases.of` does."""
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
    show_drafts: bool = False
    """Mark who wrote each token: accepted guesses of the draft are green, rejected ones dim and struck through, the
    rest is the target's own. Without colours ([accepted], ~rejected~) where the output is no terminal or NO_COLOR is
    set; FORCE_COLOR asks for colours in files and pipes too."""


@dataclass(frozen=True, kw_only=True)
class ChatArguments(AnswerArguments):
    """Arguments of `draftsmith chat`."""

    show_drafts: bool = True
    """On a terminal, colour the accepted guesses of the draft; answers to a pipe are never marked."""


class Answers:
    """The answers of an artifact, printed as they grow, with guesses set off by marks if there are any."""

    def __init__(self, given: AnswerArguments, marks: Marks | None) -> None:
        self.given, self.marks = given, marks
        use_free_processors()
        target = artifact_target(given.artifact, given.target)
        self.artifact = load_artifact(given.artifact, target, trust=given.trust)
        self.template = given.template.build(target)
        self.drafting = self.artifact.drafting(given.policy, temperature=given.temperature)
        self.settings = replace(given.decode_settings(), biases=given.biases(target))
        if self.settings.lossy is not None:
            self.settings.lossy.check(self.drafting.policy)
        self.artifact.target.compiler.watch, self.compiling = self.watch, False

    def watch(self, busy: bool) -> None:
        """Say once that the compiler is at work."""
        if busy and not self.compiling:
            self.compiling = True
            say("compiling the layers: minutes at the first use on a machine", file=sys.stderr)

    def print(self, request: Request, passes: list[list[int]]) -> tuple[DecodeStats, MarkedAnswer | None]:
        """Print an answer; returns its counts. `passes` gets the tokens of each pass, also until an interruption."""
        target, stats, recorder = self.artifact.target, DecodeStats(), PassRecorder() if self.marks else None

        def drafted() -> Iterator[list[int]]:
            for tokens in stream(target, request, self.settings, drafter=self.drafting.drafter,
                                 observer=recorder, policy=self.drafting.policy, stats=stats):
                passes.append(tokens)
                yield tokens

        marked = None
        if self.marks is not None and recorder is not None:
            marked = MarkedAnswer(target.tokenizer, self.marks, recorder, request.index)
        escaped = marked is None and sys.stdout.isatty()
        for text in readable(target, drafted()) if marked is None else marked.text(drafted()):
            print(visible(text) if escaped else text, end="", flush=True)
        print(flush=True)
        return stats, marked

    def count(self, request: Request, passes: list[list[int]], stats: DecodeStats, limit: str = "") -> None:
        """Say how many tokens each pass of an answer gave, and where a limit cut it off: max_new_tokens, or `limit`."""
        total, more = sum(map(len, passes)), len(passes) - 1
        drafted = total - len(passes[0])
        say(f"{total} tokens: the first by the prompt's pass, {drafted} by {more} more, {drafted / max(1, more):.2f} "
            f"tokens per pass; {total / stats.seconds:.1f} tokens/s", file=sys.stderr)
        if total == request.max_new_tokens and passes[-1][-1] not in self.artifact.target.eos_ids:
            say(f"the answer was cut off: {limit or f'--max-new-tokens is {total}'}", file=sys.stderr)

    def explain(self, stats: DecodeStats) -> None:
        """Say what was asked for and could not be done."""
        given = self.given
        if stats.graph_refusal:
            say(f"not replayed as CUDA graphs: {stats.graph_refusal}", file=sys.stderr)
        if given.lossy:
            say(f"lossy {given.lossy}: this is NOT the target's own answer; draftsmith evaluate --lossy {given.lossy} "
                "measures how many answers differ", file=sys.stderr)
        if given.compile:
            say(f"not compiled: {stats.compile_refusal}" if stats.compile_refusal else
                f"layers compiled in {stats.compile_seconds:.1f} s", file=sys.stderr)
        if self.drafting.policy.max_size == 1 and given.policy != NONE:
            where = f" at temperature {given.temperature:g}" if given.temperature else ""
            say(f"nothing was drafted, because on this machine no tree makes decoding faster{where}; --policy "
                f"static-{self.artifact.topology.size} drafts all the same", file=sys.stderr)


def generate(parsed: Parsed[GenerateArguments]) -> None:
    """Stream the answer to a prompt, drafted and verified: the same words as the target alone, sooner."""
    given, passes = parsed.values, list[list[int]]()
    answers = Answers(given, marks_for(sys.stdout.isatty(), os.environ) if given.show_drafts else None)
    tokens = answers.template.prompt([{"role": "user", "content": given.prompt}])
    request = given.request(answers.artifact.target, tokens, 0, given.max_new_tokens)
    stats, marked = answers.print(request, passes)
    if marked is not None:
        print(f"\n{marked.summary()}", flush=True)
    answers.count(request, passes, stats)
    answers.explain(stats)


def chat(parsed: Parsed[ChatArguments]) -> None:
    """Answer one message after another in one conversation, with the model loaded once: drafted and verified, the same
    words as the target alone. On a terminal an empty line or Ctrl-D ends it, Ctrl-C stops an answer, and a line with
    /new starts another conversation. From a pipe each line is a message, and an empty line follows each answer."""
    given, said = parsed.values, list[Message]()
    terminal = sys.stdin is not None and sys.stdin.isatty() and sys.stdout.isatty()
    marks = marks_for(True, os.environ)
    # Rejected guesses between the words would make a conversation hard to read.
    marks = replace(marks, rejected=None, legend=marks.legend.partition(" · ")[0])
    answers = Answers(given, marks if terminal and given.show_drafts else None)
    context = answers.artifact.target.context_length
    if terminal:
        say(f"Ctrl-C stops an answer, {ANEW} starts another conversation, an empty line ends.")
    if answers.marks is not None:
        print(answers.marks.legend)
    for place, text in enumerate(messages(terminal)):
        if text == ANEW:
            said.clear()
            continue
        asked, passes = [*said, {"role": "user", "content": text}], list[list[int]]()
        try:
            check_plain(text, "the message")
            tokens = answers.template.prompt(asked)
            full = (f"the target's context holds {context} tokens, and this conversation has {len(tokens)} before an "
                    f"answer; write {ANEW} to start another, or a shorter message")
            # Less than a whole answer is still an answer: only a conversation without any room is refused.
            if (room := min(given.max_new_tokens, context - len(tokens))) < 1:
                raise UserError(full)
            request = given.request(answers.artifact.target, tokens, place, room)
            with stopped_by_signals():
                stats, _ = answers.print(request, passes)
            answers.count(request, passes, stats, full if room < given.max_new_tokens else "")
            if not said:
                answers.explain(stats)
        except UserError as error:
            # In a pipe the answers would no longer stand in the order of the lines.
            if not terminal:
                raise
            say(one_sentence(str(error)), file=sys.stderr)
            continue
        except Stopped as stop:
            if stop.number != SIGINT or not terminal:
                raise
            say("\nstopped; the conversation goes on with what was written", file=sys.stderr)
        written = [token for one in passes for token in one]
        said = [*asked, answers.template.said(written)]
        say("")


def messages(terminal: bool) -> Iterator[str]:
    """The lines of the input that are not empty; on a terminal an empty one ends them."""
    if terminal:
        # With it, the line can be edited, and the arrow keys bring back earlier ones.
        with suppress(ImportError):
            import readline  # noqa: F401
    while sys.stdin is not None:
        try:
            line = f"{input('> ')}\n" if terminal else sys.stdin.readline(MOST_CHARACTERS + 1)
        except EOFError:
            line = ""
        if len(line) > MOST_CHARACTERS:
            raise UserError(f"a line of the input has more than {MOST_CHARACTERS:,} characters; give one message "
                            "a line")
        if not line or (terminal and not line.strip()):
            return
        if line.strip():
            yield line.strip()


def readable(target: Target, passes: Iterator[list[int]]) -> Iterator[str]:
    """New text after each pass. A character whose bytes are not all there yet waits for the rest."""
    pieces = TokenText(target.tokenizer)
    for tokens in passes:
        yield "".join(map(pieces.add, tokens))
    yield pieces.rest()


COMMANDS: dict[str, Command[Any]] = {
    "generate": Command(name="generate", arguments=GenerateArguments, run=generate),
    "chat": Command(name="chat", arguments=ChatArguments, run=chat),
}
