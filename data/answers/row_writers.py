"""Rows of training shards: each prompt goes to the target, to a draft, or brings its answers as text."""

from collections.abc import Callable, Sequence, Set

from ...modules import DecodeSettings
from ..prompts.chat import ChatTemplate
from ..prompts.given_answers import GivenAnswers, Turn, join_turns
from ..prompts.prompt import Prompt
from ..store.token_store import SOURCES, SourceName
from .answer_server import AnswerServer, ServerAnswerer
from .answering import Answerer, Conversation
from .distill_task import DistillTask
from .writers import source_of

DOCUMENT_TOKENS = 512  # Longest piece of a plain document, in tokens; each piece is a row of its own


class RowWriters:
    """Writers of the train rows of one task; the calls are those of `Answerer`. UserError if an engine does not take
    the target."""

    def __init__(self, task: DistillTask, on_tokens: Callable[[int], None], on_slots: Callable[[int, int], None]
                 ) -> None:
        config = task.config
        settings = DecodeSettings(batch_size=config.slots, top_k=config.top_k, top_p=config.top_p, seed=config.seed)
        common = task.template, settings, config.max_new_tokens, on_tokens
        self.task = task
        self.target: Answerer  # The target, or the server that answers for it
        if config.server is not None:
            self.target = ServerAnswerer(AnswerServer(config.server), task.train_target, *common)
        else:
            self.target = Answerer(task.train_target, *common, on_slots=on_slots)
        self.draft = Answerer(task.target, *common, task.writer, on_slots=on_slots)

    def conversations(self, prompts: Sequence[tuple[int, Prompt]], deadline: float | None,
                      taps: tuple[int, ...] | None, assured: Set[int] = frozenset()) -> list[Conversation]:
        """The answered prompts in their order, each by the writer drawn for its number; the rest is that of
        `Answerer.answer`."""
        config, dealt = self.task.config, dict[SourceName, list[tuple[int, Prompt]]]()
        for number, prompt in prompts:
            dealt.setdefault(source_of(number, config.shares, config.seed), []).append((number, prompt))
        found: list[Conversation] = []
        for name in SOURCES:
            if name == "text":
                found += take_given(dealt.get(name, []), self.task.template, self.task.target.context_length)
            elif name in dealt:
                answerer = self.target if name == "target" else self.draft
                found += answerer.answer(dealt[name], config.temperatures, deadline, taps, assured=assured)
        return sorted(found, key=lambda one: one.number)


def take_given(prompts: Sequence[tuple[int, Prompt]], template: ChatTemplate, context_length: int
               ) -> list[Conversation]:
    """Use the source's own answers, cutting conversations at the target's context, and plain documents in pieces."""
    found, given = [], GivenAnswers(template)
    for number, prompt in prompts:
        one = Conversation(number=number, prompt=prompt, source="text")
        if prompt.document is not None:
            tokens, flags = template.document(prompt.document)
            length = min(DOCUMENT_TOKENS, context_length)
            # A last token alone would be a row without a label.
            cuts = [slice(start, start + length) for start in range(0, max(1, len(tokens) - 1), length)]
            one.turns = [Turn(prompt=[], answer=tokens)]
            one.lay_out([(tokens[cut], flags[cut]) for cut in cuts])
            found.append(one)
            continue
        one.turns = [given.turn(prompt.messages[:place], prompt.messages[place], prompt.tools)
                     for place in prompt.learned]
        one.full = any(len(turn.prompt) + len(turn.answer) > context_length for turn in one.turns)
        one.lay_out([(tokens[:context_length], flags[:context_length]) for tokens, flags in join_turns(one.turns)])
        found.append(one)
    return found
