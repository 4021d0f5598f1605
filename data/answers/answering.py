"""Answered conversations: the target or a draft answers each turn, or the given text is used."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from ...modules import (
    DecodeResult,
    DecodeSettings,
    DecodeStats,
    Generation,
    Request,
    Target,
    UserError,
    decode,
    repeats_itself,
)
from ...modules.decoding.loop import Observer
from ...modules.decoding.state_recorder import RecordedStates, StateRecorder
from ..prompts.chat import ChatTemplate, Turn, join_turns
from ..prompts.sources import Prompt
from ..store.token_store import Row, SourceName
from .writers import Writer

DOCUMENT_OPENING = 32
"""Tokens of a held-out document that the target continues; of a shorter document half."""
TURNS = 1 << 10
"""Random streams reserved for the turns of one prompt."""
log = logging.getLogger(__name__)


@dataclass(kw_only=True)
class Conversation:
    """A prompt with the answers it has so far."""

    number: int
    """Number of the prompt in its source."""
    prompt: Prompt
    source: SourceName = "target"
    """Writer of its answers."""
    temperature: float = 0.0
    """Sampling temperature of its answers; 0 is greedy."""
    turns: list[Turn] = field(default_factory=list)
    """Each answer, with the tokens before it."""
    texts: list[str] = field(default_factory=list)
    """Each answer as text."""
    truncated: int = 0
    """Answers cut by the length limit."""
    rows: list[Row] = field(default_factory=list)
    """Its training rows; filled when it is complete."""
    states: list[RecordedStates] = field(default_factory=list)
    """The target's states at its prompts and answers, where they were recorded."""

    @property
    def repetitive(self) -> int:
        """Answers with more than 30 % repeated 4-grams."""
        return sum(repeats_itself(turn.answer) for turn in self.turns)

    def take(self, prompt: list[int], generation: Generation, text: str, states: RecordedStates | None = None) -> None:
        """Add one answer. A cut one has no end token, and none is added."""
        self.turns.append(Turn(prompt=prompt, answer=list(generation.tokens)))
        self.texts.append(text)
        self.truncated += generation.finish == "length"
        if states is not None:
            # A prompt that goes on from an earlier answer was read with all of it.
            self.states = [one for one in self.states if states.tokens[: len(one.tokens)] != one.tokens] + [states]

    def states_of(self, row: Row) -> RecordedStates | None:
        """The states recorded at exactly the tokens of a row; None where there are none."""
        return next((one for one in self.states if one.tokens == row.tokens), None)

    def lay_out(self, rows: Sequence[tuple[Sequence[int], Sequence[bool]]]) -> None:
        """Complete the conversation with its (tokens, supervised) rows."""
        self.rows = [
            Row(
                tokens=tuple(tokens),
                supervised=tuple(supervised),
                prompt=self.number,
                temperature=self.temperature,
                truncated=self.truncated > 0,
                source=self.source,
            )
            for tokens, supervised in rows
        ]


class Answerer:
    """Generates answers with the target, or with a draft.

    A held-out document is continued from its first tokens.

    Args:
        target: answers.
        template: of its tokenizer.
        settings: slots, sampling filters and seed.
        max_new_tokens: longest answer.
        on_tokens: called with the number of new tokens of each answer in a pass.
        writer: answers instead of the target; None lets the target answer.
        on_slots: called with the number of slots that hold an unfinished answer in a pass, and that of all slots.
    """

    def __init__(
        self,
        target: Target,
        template: ChatTemplate,
        settings: DecodeSettings,
        max_new_tokens: int,
        on_tokens: Callable[[int], None],
        writer: Writer | None = None,
        on_slots: Callable[[int, int], None] | None = None,
    ) -> None:
        self.target, self.template, self.settings, self.limit = target, template, settings, max_new_tokens
        self.on_tokens, self.on_slots, self.writer = on_tokens, on_slots, writer
        self.source: SourceName = "target" if writer is None else "draft"
        self.stats = DecodeStats()

    def answer(
        self,
        prompts: Sequence[tuple[int, Prompt]],
        temperatures: Sequence[float],
        deadline: float | None = None,
        taps: tuple[int, ...] | None = None,
    ) -> list[Conversation]:
        """Answer every turn of numbered prompts, in order; prompt n gets temperatures[n % len(temperatures)].

        Args:
            prompts: with their numbers, which key their random streams.
            temperatures: given to the prompts in turn.
            deadline: value of `time.monotonic()` after which no answer is started.
            taps: layers whose states are recorded with the final ones, unless a writer does not tap them; None records
                nothing.

        Returns:
            The conversations with at least one answer. One ends early where its history outgrows the target's context.
        """
        conversations = [
            Conversation(
                number=number,
                prompt=prompt,
                source=self.source,
                temperature=temperatures[number % len(temperatures)],
            )
            for number, prompt in prompts
        ]
        for turn in range(max((_asked(prompt) for _, prompt in prompts), default=0)):
            here = [one for one in conversations if _asked(one.prompt) > turn == len(one.turns)]
            self._answer_turn(here, deadline, self._recorder(taps))
        answered = [one for one in conversations if one.turns]
        for one in answered:
            one.lay_out(join_turns(one.turns))
        return answered

    def _recorder(self, taps: tuple[int, ...] | None) -> StateRecorder | None:
        if taps is None or (self.writer is not None and not set(taps) <= set(self.writer.drafter.taps)):
            return None
        return StateRecorder(taps, self.target.dtype)

    def _answer_turn(
        self, conversations: Sequence[Conversation], deadline: float | None, recorder: StateRecorder | None
    ) -> None:
        """Add the next answer to each conversation that still fits the context."""
        asked: dict[int, Conversation] = {}
        requests: list[Request] = []
        for one in conversations:
            tokens = self._before(one)
            room = min(self.limit, self.target.context_length - len(tokens))
            if room > 0:
                index = one.number * TURNS + len(one.turns)
                asked[index] = one
                requests.append(Request(tuple(tokens), index, room, one.temperature))
        result = self._decode(requests, deadline, recorder)
        self.stats.add(result.stats)
        states = {} if recorder is None else recorder.states(result.generations)
        for generation in result.generations:
            request = generation.request
            text = self._text(generation.tokens)
            asked[request.index].take(list(request.tokens), generation, text, states.get(request.index))

    def _decode(self, requests: Sequence[Request], deadline: float | None,
                recorder: StateRecorder | None) -> DecodeResult:
        """The answers to requests, as `decode` gives them."""
        # The cache has room for a whole chunk in every slot, so a chunk is no longer than the longest prompt.
        longest = max((len(request.tokens) for request in requests), default=1)
        settings = replace(self.settings, prefill_chunk=min(self.settings.prefill_chunk, longest))
        drafter, policy = None, None
        if self.writer is not None:
            drafter, policy, settings = self.writer.drafter, self.writer.policy, self.writer.settings(settings)
        return decode(
            self.target,
            requests,
            settings,
            drafter=drafter,
            policy=policy,
            on_tokens=self._count,
            deadline=deadline,
            observer=self._observer(min(settings.batch_size, len(requests))),
            recorder=recorder,
        )

    def _observer(self, slots: int) -> Observer | None:
        """Counts the busy slots of every pass for whoever asked for them."""
        on_slots = self.on_slots
        if on_slots is None:
            return None
        return lambda _tree, _accepted, rows: on_slots(sum(not row.complete for row in rows), slots)

    def _before(self, one: Conversation) -> list[int]:
        """Tokens before the next answer."""
        if one.prompt.document is None:
            return self.template.prompt(one.prompt.messages(one.texts))
        tokens, _ = self.template.document(one.prompt.document)
        return tokens[: max(1, min(DOCUMENT_OPENING, len(tokens) // 2))]

    def _count(self, _generation: Generation, tokens: list[int], _done: bool) -> None:
        self.on_tokens(len(tokens))

    def _text(self, tokens: Sequence[int]) -> str:
        return str(self.target.tokenizer.decode(list(tokens), skip_special_tokens=True))


def _asked(prompt: Prompt) -> int:
    """Number of answers that a prompt asks for."""
    return len(prompt.turns) if prompt.document is None else 1


def take_given(
    prompts: Sequence[tuple[int, Prompt]], template: ChatTemplate, context_length: int, document_tokens: int
) -> tuple[list[Conversation], list[UserError]]:
    """Use the source's own answers, cutting conversations at the target's context, and plain documents in pieces.

    Conversations whose mask cannot be had exactly are left out with a warning, and returned as errors.

    Raises:
        UserError: if a prompt has no answer.
    """
    found, refused = [], []
    for number, prompt in prompts:
        if prompt.document is not None:
            found.append(_pieces(number, prompt, prompt.document, template, min(document_tokens, context_length)))
            continue
        if not prompt.answers:
            raise UserError(
                f"prompt {prompt.id} has no answer of its own; give messages with assistant turns, or set "
                "distill.answered_by: target"
            )
        try:
            found.append(_given(number, prompt, prompt.answers, template, context_length))
        except UserError as error:
            refused.append(error)
    if refused:
        log.warning("%d of %d conversations left out; the first because %s", len(refused), len(prompts), refused[0])
    return found, refused


def _given(
    number: int, prompt: Prompt, answers: tuple[str, ...], template: ChatTemplate, context_length: int
) -> Conversation:
    rows = template.rows(prompt.messages(answers))
    cut = sum(len(tokens) > context_length for tokens, _ in rows)
    one = Conversation(number=number, prompt=prompt, source="text", texts=list(answers), truncated=cut)
    one.turns = [Turn(prompt=[], answer=written) for tokens, flags in rows for written in _runs(tokens, flags)]
    one.lay_out([(tokens[:context_length], flags[:context_length]) for tokens, flags in rows])
    return one


def _pieces(number: int, prompt: Prompt, text: str, template: ChatTemplate, length: int) -> Conversation:
    """A document, cut into rows of at most `length` tokens; a last token alone holds no label."""
    tokens, flags = template.document(text)
    cuts = [slice(start, start + length) for start in range(0, max(1, len(tokens) - 1), length)]
    one = Conversation(number=number, prompt=prompt, source="text", texts=[text])
    one.turns = [Turn(prompt=[], answer=tokens)]
    one.lay_out([(tokens[cut], flags[cut]) for cut in cuts])
    return one


def _runs(tokens: Sequence[int], flags: Sequence[bool]) -> list[list[int]]:
    """The unbroken runs of flagged tokens."""
    runs: list[list[int]] = []
    for place, flag in enumerate(flags):
        if flag and place and flags[place - 1]:
            runs[-1].append(tokens[place])
        elif flag:
            runs.append([tokens[place]])
    return runs
