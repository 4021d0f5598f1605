"""The commands that answer with an artifact: generate, chat. They need none of the training extras."""

import os
import sys
from collections.abc import Callable, Iterator
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
from ...modules.config_checks import CheckedSettings, Whole
from ...modules.decoding.recorders import PassRecorder
from ...modules.decoding.token_text import TokenText, visible
from ...modules.verification.sampling import Temperature
from ..chat_settings import TemplateConfig, artifact_target
from ..reading.parsing import Command, Parsed
from ..reading.recipe_files import check_plain
from ..terminal.draft_colours import MarkedAnswer, Marks, marks_for
from ..terminal.interruption import Stopped, stopped_by_signals
from ..terminal.terminal_text import one_sentence, say
from .artifact_commands import own_target

ANEW = "/new"
"""The message that starts another conversation."""
MOST_CHARACTERS = 2**20
"""Longest line that is read as a message."""


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
    graphs: bool = False
    """On a CUDA device, replay drafting, verification and commit as CUDA graphs; a last line says what could not be."""
    compile: bool = False
    """Compile the layers of target and draft with torch.compile, which takes minutes before the first words and pays in
    long answers; a last line says where it fails."""
    policy: str = FASTEST
    """Draft policy: fastest (static or static+lookup, by the artifact's measurements), static (the tree tuned on the
    machine that trained it), chain, eagle2, dyspec, sure, ...; with a number of nodes or tokens where you like,
    static-16, chain-3; static+lookup also copies from the text; none drafts nothing."""
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

    def decode_settings(self) -> DecodeSettings:
        """The decoding loop's settings. Raises UserError when a number is out of its range."""
        return DecodeSettings(top_k=self.top_k, top_p=self.top_p, min_p=self.min_p, seed=self.seed,
                              repetition_penalty=self.repetition_penalty, stop=self.stop, graphs=self.graphs,
                              compile=self.compile)


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
    """The answers of an artifact, printed as they grow.

    Args:
        given: the arguments.
        marks: how guesses are set off; None leaves them unmarked.
    """

    def __init__(self, given: AnswerArguments, marks: Marks | None) -> None:
        self.given, self.marks = given, marks
        use_free_processors()
        target = artifact_target(given.artifact, given.target)
        self.artifact = load_artifact(given.artifact, target, trust=given.trust)
        self.template = given.template.build(target)
        self.drafting = self.artifact.drafting(given.policy, temperature=given.temperature)
        self.artifact.target.compiler.watch = compile_notice()

    def print(self, request: Request, passes: list[list[int]]) -> tuple[DecodeStats, MarkedAnswer | None]:
        """Print an answer; returns its counts.

        Args:
            request: what is answered.
            passes: gets the tokens of each pass, also of an answer that is interrupted.
        """
        target, stats, recorder = self.artifact.target, DecodeStats(), PassRecorder() if self.marks else None
        drafted = kept_in(passes, stream(target, request, self.given.decode_settings(), drafter=self.drafting.drafter,
                                         observer=recorder, policy=self.drafting.policy, stats=stats))
        marked = None
        if self.marks is not None and recorder is not None:
            marked = MarkedAnswer(target.tokenizer, self.marks, recorder, request.index)
        escaped = marked is None and sys.stdout.isatty()
        for text in readable(target, drafted) if marked is None else marked.text(drafted):
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
    request = Request(tuple(tokens), 0, given.max_new_tokens, given.temperature)
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
            request = Request(tuple(tokens), place, room, given.temperature)
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
    """The lines of the input that are not empty; on a terminal an empty one ends them.

    Raises:
        UserError: if a line is longer than any message.
    """
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


def compile_notice() -> Callable[[bool], None]:
    """A watcher of a compiler that says once that it is at work."""
    said = False

    def watch(busy: bool) -> None:
        nonlocal said
        if busy and not said:
            said = True
            say("compiling the layers: minutes at the first use on a machine", file=sys.stderr)

    return watch


def kept_in(passes: list[list[int]], drafted: Iterator[list[int]]) -> Iterator[list[int]]:
    """Pass the tokens of each pass on, and keep them."""
    for tokens in drafted:
        passes.append(tokens)
        yield tokens


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
