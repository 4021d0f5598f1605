"""Conversations whose turns the target or a draft answers, and the shards that they make."""

import hashlib
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace

from ...modules import DecodeResult, DecodeSettings, DecodeStats, Drafter, Generation, Request, Target, decode
from ...modules.decoding.recorders import RecordedStates, StateRecorder
from ...modules.policies.base import Policy
from ...modules.policies.trees import SampledTree
from ...modules.token_tree import Topology
from ...modules.verification.acceptance_rules import AcceptAll
from ...modules.verification.sampling import uniform_stream
from ..prompts.chat import ChatTemplate
from ..prompts.given_answers import Turn, join_turns
from ..prompts.prompt import Message, Prompt
from ..store.token_store import SOURCES, Row, ShardRecord, SourceName, SplitName, TokenShard, hash_bytes, shard_file

DRAFT_TOKENS = 4  # Written in a row; one of the target's follows, which gives the draft new states to read


@dataclass(frozen=True, kw_only=True)
class Writer:
    """A draft that writes answers."""

    drafter: Drafter  # Bound to the target
    policy: Policy  # A chain, sampled from the draft in rows with a temperature
    digest: str  # Hash of the artifact that it was loaded from

    @classmethod
    def of(cls, drafter: Drafter, digest: str) -> "Writer":
        """A draft that writes DRAFT_TOKENS tokens between two of the target's, or as many as its family reaches."""
        length = DRAFT_TOKENS if drafter.reach is None else min(DRAFT_TOKENS, drafter.reach)
        return cls(drafter=drafter, policy=SampledTree(Topology.chain(length)), digest=digest)


def source_of(number: int, shares: Mapping[SourceName, float], seed: int) -> SourceName:
    """Writer of the answers to prompt `number`: drawn by the shares, whatever came before it."""
    # A stream of its own: prompts and answers are drawn from this seed too.
    digest = hashlib.sha256(f"sources {seed}".encode()).digest()
    place = float(uniform_stream(int.from_bytes(digest[:8], "little"), number, 1)[0])
    names = [name for name in SOURCES if name in shares]
    for name in names:
        place -= shares[name]
        if place < 0:
            return name
    return names[-1]


DOCUMENT_OPENING = 32  # Tokens of a held-out document that the target continues; of a shorter document half
LEAST_TOKENS = 32  # Tokens that the first answers of the data, and those to held-out prompts, get whatever the time
TURNS = 1 << 10  # Random streams reserved for the turns of one prompt
GREEDY = 1 << 62  # Index of the first greedy answer, which draws nothing: a prompt may have both kinds in one run


@dataclass(kw_only=True)
class Conversation:
    """A prompt with the answers it has so far."""

    number: int  # Number of the prompt in its source
    prompt: Prompt
    source: SourceName = "target"  # Writer of its answers
    temperature: float = 0.0  # Sampling temperature of its answers; 0 is greedy
    turns: list[Turn] = field(default_factory=list)  # Each answer, with the tokens before it
    thinking: bool | None = None  # Mode of the chat template; None leaves it to the template
    said: list[Message] = field(default_factory=list)  # Each answer as the message that a server would make of it
    truncated: int = 0  # Answers cut by the length limit
    full: bool = False  # True if it ends early because the target's context does
    rows: list[Row] = field(default_factory=list)  # Its training rows; filled when it is complete
    states: list[RecordedStates] = field(default_factory=list)  # The target's at its prompts and answers, if recorded

    def take(self, prompt: list[int], generation: Generation, said: Message,
             states: RecordedStates | None = None) -> None:
        """Add one answer. A cut one has no end token, and none is added."""
        self.turns.append(Turn(prompt=prompt, answer=list(generation.tokens)))
        self.said.append(said)
        self.truncated += generation.finish == "length"
        if states is not None:
            # A prompt that goes on from an earlier answer was read with all of it.
            self.states = [one for one in self.states if states.tokens[: len(one.tokens)] != one.tokens] + [states]

    def lay_out(self, rows: Sequence[tuple[Sequence[int], Sequence[bool]]]) -> None:
        """Complete the conversation with its (tokens, supervised) rows."""
        self.rows = [Row(tokens=tuple(tokens), supervised=tuple(supervised), prompt=self.number,
                         temperature=self.temperature, source=self.source) for tokens, supervised in rows]


class Answerer:
    """Generates answers with the target, or with a draft, the `writer`. A held-out document is continued from its first
    tokens. In each pass `on_tokens` gets the number of new tokens of each answer, and `on_slots` that of slots with an
    unfinished answer, and of all slots."""

    records = True  # True where the target's states can be recorded while it answers

    def __init__(self, target: Target, template: ChatTemplate, settings: DecodeSettings, max_new_tokens: int,
                 on_tokens: Callable[[int], None], writer: Writer | None = None,
                 on_slots: Callable[[int, int], None] | None = None) -> None:
        self.target, self.template, self.settings, self.limit = target, template, settings, max_new_tokens
        self.on_tokens, self.on_slots, self.writer = on_tokens, on_slots, writer
        self.source: SourceName = "target" if writer is None else "draft"
        self.stats = DecodeStats()

    def answer(self, prompts: Sequence[tuple[int, Prompt]], temperatures: Sequence[float],
               deadline: float | None = None, taps: tuple[int, ...] | None = None, *,
               assured: Set[int] = frozenset(), every: bool = False) -> list[Conversation]:
        """Answer every turn of numbered prompts, in order; prompt n, whose random stream is that number's, gets
        temperatures[n % len(temperatures)], or with `every` all of them together, in their order.

        After `deadline`, of `time.monotonic()`, no answer is started, and those that are decoded end, but the first
        answers of `assured` prompts get some tokens. The final states and the layers `taps` are recorded unless a
        writer does not tap them; None records nothing. A conversation ends early where its history outgrows the
        target's context; those without an answer are left out."""
        turns = 1 if every else len(temperatures)
        conversations = [
            # Each mode comes with each temperature.
            Conversation(number=number, prompt=prompt, source=self.source, temperature=temperature,
                         thinking=self.template.mode(prompt, number // turns))
            for place, temperature in enumerate(temperatures)
            for number, prompt in prompts if every or number % turns == place
        ]
        if not every:
            conversations.sort(key=lambda one: one.number)
        # The passes after a draft's chains give the layers that this draft taps, and no others.
        if not self.records or (self.writer is not None and not set(taps or ()) <= set(self.writer.drafter.taps)):
            taps = None
        # A document has no turns, and is continued once.
        asked = {number: len(prompt.asked) or 1 for number, prompt in prompts}
        # A second answer needs the first; all conversations together fill the slots in every turn.
        for turn in range(max(asked.values(), default=0)):
            here = [one for one in conversations if asked[one.number] > turn == len(one.turns)]
            recorder = None if taps is None else StateRecorder(taps, self.target.dtype)
            self._answer_turn(here, deadline, recorder, frozenset() if turn else assured)
        answered = [one for one in conversations if one.turns]
        for one in answered:
            one.lay_out(join_turns(one.turns))
        return answered

    def _answer_turn(self, conversations: Sequence[Conversation], deadline: float | None,
                     recorder: StateRecorder | None, assured: Set[int]) -> None:
        """Add the next answer to each conversation that still fits the context."""
        asked: dict[int, Conversation] = {}
        requests: list[Request] = []
        for one in conversations:
            if one.prompt.document is None:
                tokens = self.template.prompt(one.prompt.history(one.said), tools=one.prompt.tools,
                                              thinking=one.thinking)
            else:
                tokens, _ = self.template.document(one.prompt.document)
                tokens = tokens[: max(1, min(DOCUMENT_OPENING, len(tokens) // 2))]
            # A long conversation ends early where its history fills the context.
            room = min(self.limit, self.target.context_length - len(tokens))
            one.full = room <= 0
            if room > 0:
                index = one.number * TURNS + len(one.turns) + (0 if one.temperature else GREEDY)
                asked[index] = one
                least = LEAST_TOKENS if one.number in assured else 0
                requests.append(Request(tuple(tokens), index, room, one.temperature, least))
        result = self.decoded(requests, deadline, recorder)
        self.stats.add(result.stats)
        states = {} if recorder is None else recorder.states(result.generations)
        for generation in result.generations:
            request = generation.request
            one = asked[request.index]
            filled = len(request.tokens) + len(generation.tokens) == self.target.context_length
            one.full = generation.finish == "length" and filled and len(generation.tokens) < self.limit
            one.take(list(request.tokens), generation, self.template.said(generation.tokens, one.thinking),
                     states.get(request.index))

    def decoded(self, requests: Sequence[Request], deadline: float | None, recorder: StateRecorder | None
                ) -> DecodeResult:
        """The answers to requests, as `decode` gives them."""
        # The cache has room for a whole chunk in every slot, so a chunk is no longer than the longest prompt.
        longest = max((len(request.tokens) for request in requests), default=1)
        settings = replace(self.settings, prefill_chunk=min(self.settings.prefill_chunk, longest))
        drafter, policy, slots = None, None, min(settings.batch_size, len(requests))
        if self.writer is not None:
            # Every token of a draft is accepted, and the target adds one to each chain.
            drafter, policy, settings = self.writer.drafter, self.writer.policy, replace(settings, lossy=AcceptAll())

        def observe(_tree: object, _accepted: object, rows: Sequence[Generation]) -> None:
            if self.on_slots is not None:
                self.on_slots(sum(not row.complete for row in rows), slots)

        return decode(self.target, requests, settings, drafter=drafter, policy=policy, deadline=deadline,
                      on_tokens=lambda _generation, tokens, _done: self.on_tokens(len(tokens)),
                      observer=None if self.on_slots is None else observe, recorder=recorder)


def shard_of(split: SplitName, number: int, conversations: Sequence[Conversation], keys: Sequence[int], candidates: int
             ) -> tuple[TokenShard, ShardRecord, bytes]:
    """(the shard of complete conversations, its entry in the manifest, the content of its file). `keys` are hashes of
    its prompts; `candidates` were read or written for it."""
    rows = [row for one in conversations for row in one.rows]
    shard = TokenShard.from_rows(rows, keys)
    data, sources = shard.to_bytes(), [row.source for row in rows]
    turns = [turn for one in conversations for turn in one.turns]
    record = ShardRecord(
        file=shard_file(split, number), split=split, sha256=hash_bytes(data), candidates=candidates,
        prompts=len({one.number for one in conversations}), rows=len(rows), tokens=len(shard.tokens_T),
        by_target=sources.count("target"), by_text=sources.count("text"), by_draft=sources.count("draft"),
        supervised=int(shard.supervised_T.sum()), answers=len(turns),
        truncated=sum(one.truncated for one in conversations), full=sum(one.full for one in conversations))
    return shard, record, data


def states_of(conversations: Sequence[Conversation]) -> list[RecordedStates | None]:
    """The states recorded at exactly the tokens of each row of a shard; None where there are none."""
    return [next((states for states in one.states if states.tokens == row.tokens), None)
            for one in conversations for row in one.rows]
