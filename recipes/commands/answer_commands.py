"""The commands that answer with an artifact: generate, chat. They need none of the training extras."""

import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from signal import SIGINT
from typing import Any

from ...data import Message
from ...export import load_artifact, use_free_processors
from ...modules import (
    NONE,
    DecodeStats,
    Request,
    Target,
    UserError,
    stream,
)
from ...modules.baselines.registry import with_reference
from ...modules.decoding.recorders import GuessedPass, PassRecorder, WrittenToken
from ...modules.decoding.requests import TokenText, visible
from ..chat_settings import artifact_target
from ..reading.command_line import Command, Parsed
from ..reading.recipe_files import check_plain
from ..terminal import Stopped, one_sentence, say, stopped_by_signals
from .answer_arguments import AnswerArguments, ChatArguments, GenerateArguments, text_of

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
    given, passes, reference = parsed.values, list[list[int]](), ""
    if given.reference is not None:
        reference = text_of("reference", given.reference)
        given = replace(given, policy=with_reference(given.policy))
    answers = Answers(given, marks_for(sys.stdout.isatty(), os.environ) if given.show_drafts else None)
    tokens, draft_tokens = ([] if text is None else answers.template.prompt([{"role": "user", "content": text}])
                            for text in (given.prompt, given.draft_prompt))
    request = replace(given.request(answers.artifact.target, tokens, 0, given.max_new_tokens),
                      draft_tokens=tuple(draft_tokens),
                      reference=tuple(answers.template.tokenizer.encode(reference, add_special_tokens=False)))
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
