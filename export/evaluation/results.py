"""Results of an evaluation: records of single answers and timings, measures of groups of them, and the JSON."""

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from itertools import accumulate
from typing import Any

from ...modules import MeasuredStep
from ..measured_files import Pass, Prediction, figures

OWN = "own"  # The prompt set of held-out prompts like those of the training
Interval = tuple[float, float]  # Lower and upper end of a 95 % bootstrap interval
IMPOSSIBLE_PER_TOKEN = 1 / 10_000
"""More impossible tokens than this, and than one, are a fault: at the edge of a filter rounding may let one in."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Comparison of a drafted answer with its reference."""

    divergence: int | None
    """First index at which they differ, or at which a sampled token is not the target's draw; None when there is
    none."""
    gap: float | None = None
    """Largest distance of a greedy answer's token below the target's best logit after the same text, at that index
    (where the reference's token counts too) and after it; None when equal, for sampled answers, and where the target
    rules the token out."""
    near_tie: bool = False
    """True when rounding explains every token from there on, so that the target itself is undecided."""
    slack: float | None = None
    """Largest change of the difference of two logits that rounding explains in this text; None when not needed."""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """One turn of a question answered by one method."""

    question: int  # Number of the question: the intervals resample questions, each with all its turns
    turn: int  # Its turn, from 1
    prompt_set: str  # Set of the question
    category: str  # Its category; "" for none
    tokens: tuple[int, ...]  # The answer
    emitted: tuple[int, ...]  # Tokens emitted by each target pass after the prompt's
    truncated: bool  # Whether it reached the length limit before an end token
    comparison: Comparison | None
    """Comparison with the reference; None where drafts were sampled and only the distribution is the reference's."""
    wrong_reference: bool = False
    """Whether, where drafts were sampled, the answer without drafts is no draw of the target."""
    mode: str = ""  # Mode of the chat template; "" for none
    positions: tuple[float, ...] = ()  # Positions of its tokens in the target's distribution, where drafts were sampled
    guessed_by: dict[str, int] = field(default_factory=dict)
    """Accepted guesses by the family of the drafter, where several guess together."""
    prompt_tokens: int = 0  # Tokens of its prompt

    @property
    def passes(self) -> list[Pass]:
        """The passes after that over the prompt, which emits the first token."""
        starts = accumulate(self.emitted, initial=self.prompt_tokens + 1)
        return [Pass(*one, self.category) for one in zip(self.emitted, starts, strict=False)]


@dataclass(frozen=True, kw_only=True)
class Timing:
    """Speeds of one group of questions (a single one at batch size 1) with all their turns."""

    prompt_set: str  # Set of the questions
    category: str | None  # Their category; None when they have several
    drafted: float  # Tokens per second with drafts
    plain: float  # Tokens per second of this project's loop without drafts
    generate: float  # Tokens per second of transformers' `generate`
    efficiency: float  # Tokens per target pass of the drafted run, the prompts' passes included
    seconds: float  # Seconds of the drafted run
    draft_seconds: float  # Seconds of them spent on drafting
    mode: str | None = None  # Mode of the chat template; None when they have several


@dataclass(frozen=True, kw_only=True)
class Lossless:
    """Counts of drafted answers that equal and differ from their references."""

    prompts: int  # Answers compared; none where drafts were sampled, which keeps the distribution, not the tokens
    identical: int  # Answers equal token by token
    near_tie_divergences: int  # Answers that differ only where the target itself is undecided
    max_logit_gap: float | None
    """Largest distance of a token below the target's best logit, from the first difference of an answer on; None when
    nothing differs."""
    rounding: float | None
    """Largest difference of two logits that rounding explains in these texts; None where none had to be explained."""
    wrong_references: int = 0
    """Answers without drafts that are no draws of the target, where drafts were sampled: a fault of the loop itself."""

    @property
    def different(self) -> int:
        """Answers that differ where the target is decided: drafting changed a word."""
        return self.prompts - self.identical - self.near_tie_divergences

    @classmethod
    def joined(cls, found: Iterable["Lossless"]) -> "Lossless":
        """The sum of several comparisons."""
        # Walked four times, and callers give generators.
        every = list(found)
        gaps = [one.max_logit_gap for one in every if one.max_logit_gap is not None]
        slacks = [one.rounding for one in every if one.rounding is not None]
        return cls(prompts=sum(one.prompts for one in every), identical=sum(one.identical for one in every),
                   near_tie_divergences=sum(one.near_tie_divergences for one in every),
                   max_logit_gap=max(gaps, default=None), rounding=max(slacks, default=None),
                   wrong_references=sum(one.wrong_references for one in every))


@dataclass(frozen=True, kw_only=True)
class Distribution:
    """The check of sampled tokens against the target's distribution, by a Kolmogorov-Smirnov test."""

    tokens: int  # Sampled tokens
    distance: float
    """Largest difference between the share of tokens up to some likelihood and the probability that the target gives
    them."""
    p_value: float  # Probability of a distance as large by chance
    visible: float
    """The distance that would have been taken for a fault: its p-value is 0.001 or less, and rounding does not explain
    it."""
    impossible: int  # Tokens to which the target, with these filters, gives no probability

    @property
    def differs(self) -> bool:
        """True where neither chance nor rounding explains the distance, or impossible tokens were emitted."""
        return self.distance > self.visible or self.impossible > max(1.0, self.tokens * IMPOSSIBLE_PER_TOKEN)


@dataclass(frozen=True, kw_only=True)
class Measures:
    """Measurements on a group of prompts: all of them, a set, or a category."""

    prompts: int  # Answers decoded: one for each turn of each question
    new_tokens: int  # Tokens of the answers
    target_passes: int  # Target passes after the prompts', summed over answers
    accepted_length: float  # Tokens emitted per target pass, the bonus included: a ratio of sums
    accepted_length_interval: Interval | None  # 95 % bootstrap interval over questions; None with fewer than two
    block_efficiency: float  # Tokens of whole answers per target pass, the prompts' passes included, one each
    acceptance_by_position: tuple[float, ...]
    """Share of passes whose k-th drafted token was accepted (with all before it); accepted_length is 1 + their sum."""
    tokens_per_second: float | None
    """Drafted decoding: the target passes per second, median over timed groups of questions, times `block_efficiency`.
    Seconds of a pass hardly differ between prompts, tokens of a pass do, and those are known of all prompts: a few
    timed ones are enough. None when none was timed."""
    tokens_per_second_interval: Interval | None
    """95 % bootstrap interval over timed groups and questions; None with fewer than two timed groups."""
    plain_tokens_per_second: float | None  # This project's loop without drafts
    generate_tokens_per_second: float | None  # transformers' `generate`
    speedup: float | None  # tokens_per_second over the faster of the two baselines
    speedup_interval: Interval | None
    """95 % bootstrap interval over timed groups, whose three speeds are drawn together, and questions."""
    draft_time_share: float | None  # Share of the drafted run's seconds spent on drafting
    repetition_rate: float  # Share of answers in which over 30 % of the 4-grams occurred before
    truncation_rate: float  # Share of answers cut by the length limit
    lossless: Lossless  # Identity with the reference
    distribution: Distribution | None  # Check of the answers' distribution, where drafts were sampled; None elsewhere
    guessed_by: dict[str, int] = field(default_factory=dict)
    """Accepted guesses by the family of the drafter, where several guess together; a guess that two make counts for the
    one that stands first. Empty with a single drafter."""


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Results of one method on all questions, at one temperature and batch size."""

    name: str  # The method's name
    family: str  # Its family
    target: str  # Name of the target
    batch_size: int  # Rows decoded at once where speed was measured
    temperature: float  # 0 is greedy
    lossy: str = ""  # The lossy rule by which guesses were accepted, such as typical; empty for an exact one
    nodes: int
    """Most nodes of a row that a pass verifies at this batch size, the root included; 1 when nothing is drafted."""
    tree_nodes: int
    """Nodes of them of the method's own tree or chain, the root included; fewer where partners guess next to it."""
    partners: tuple[str, ...]
    """Drafters without training that guess next to it, such as lookup, which copies; empty where none does."""
    contended: bool  # True when the machine was busy with other programs: speeds are then not reliable
    target_calls: int  # Forward calls of the target after the prompts': with a batch, fewer than the passes of its rows
    prediction: Prediction | None
    """Prediction on this machine for the method as it decodes, partners included, and prompts like the
    training's; None where nothing is."""
    overall: Measures  # All questions
    by_prompt_set: dict[str, Measures]  # Each prompt set
    by_category: dict[str, Measures]  # Each category that occurs
    by_turn: dict[str, Measures]  # Each turn, from "1", where questions have several
    by_mode: dict[str, Measures]  # Each mode of the chat template, where there are several
    acceptance: tuple[dict[str, Any], ...] = ()
    """Acceptance by position, kind of prompt and length of the context, as in acceptance.json."""

    @property
    def biased(self) -> bool:
        """True where sampled drafts changed the distribution of the answers."""
        return self.overall.distribution is not None and self.overall.distribution.differs

    @property
    def faulty(self) -> bool:
        """True where an answer or the distribution of answers is not the target's, which rounding does not explain."""
        changed = self.overall.lossless.different and not self.lossy
        return self.biased or bool(changed or self.overall.lossless.wrong_references)

    def to_dict(self) -> dict[str, Any]:
        """The JSON of one method; groups repeat the measured keys."""
        return {
            **self._facts(),
            "target_calls": self.target_calls,
            **asdict(self.overall),
            **{f"by_{name}": {key: asdict(measures) for key, measures in groups.items()}
               for name, groups in self._groups().items()},
        }

    def measurements(self) -> list[dict[str, Any]]:
        """Flat records, one a group: all questions, then each set, category, turn and mode; None stands for all."""
        # Each record has all its conditions, so that a table program can filter them without the rest of the file.
        every = dict.fromkeys(self._groups())
        records = [{**self._facts(), **every, **asdict(self.overall)}]
        records += [{**self._facts(), **every, name: key, **asdict(measures)}
                    for name, groups in self._groups().items() for key, measures in groups.items()]
        return records

    def _facts(self) -> dict[str, Any]:
        """Fields that are the same for all groups; `method` is the name in reports."""
        names = ("family", "target", "temperature", "batch_size", "nodes", "tree_nodes", "contended")
        return {"method": self.name, "partners": list(self.partners),
                **{name: getattr(self, name) for name in names}, **({"lossy": self.lossy} if self.lossy else {}),
                **figures(self.prediction, "predicted_")}

    def _groups(self) -> dict[str, dict[str, Measures]]:
        return {"prompt_set": self.by_prompt_set, "category": self.by_category, "turn": self.by_turn,
                "mode": self.by_mode}


@dataclass(frozen=True, kw_only=True)
class SampleToken:
    """One token of an answer and its author."""

    text: str  # Its text; empty for a special token, and for one that ends inside a character
    guessed: bool  # True for an accepted guess of the draft, False for a token that the target chose itself
    rejected: tuple[str, ...] = ()  # Texts of the guesses that the target rejected for the same place


@dataclass(frozen=True, kw_only=True)
class SampleAnswer:
    """One answer with the author of each token."""

    rank: str  # Its place among all answers by tokens per target pass: best, median or worst
    prompt_set: str  # Set of its question
    prompt: str  # Text of the question
    accepted_length: float  # Tokens added per target pass
    tokens: tuple[SampleToken, ...]  # The answer; the texts of its tokens together are its text


@dataclass(frozen=True, kw_only=True)
class TrainingRecord:
    """The training of the draft, by the run that has trained it."""

    time: str  # Sentence on its seconds and steps
    outcome: str  # Sentence on what its curve shows, and on what would help
    best_step: int  # The step whose weights the artifact has
    curve: tuple[MeasuredStep, ...]  # Its measured steps


@dataclass(frozen=True, kw_only=True)
class EvaluationRun:
    """Results of all methods measured in one process, which share its baselines."""

    header: dict[str, Any]  # Machine, dtype, threads, versions, settings, contention
    evaluations: tuple[Evaluation, ...]
    """One for each temperature, batch size and method, in the orders given, the methods changing fastest."""
    samples: tuple[SampleAnswer, ...] = ()  # Three answers of the first evaluation, with the author of each token
    left_out: tuple[str, ...] = ()
    """Planned work that did not fit into the given minutes, a sentence each; empty where nothing was left out."""
    training: TrainingRecord | None = None  # The draft's training; None where the run that evaluates did not train

    def to_dict(self) -> dict[str, Any]:
        """The JSON: "header", at the top level the first method at its first temperature and batch size as the main
        result, and everything as a flat list under "measurements"."""
        return {"header": self.header, **self.evaluations[0].to_dict(),
                "sample_answers": [asdict(one) for one in self.samples],
                "left_out": list(self.left_out), "differences": list(self.differences),
                "training": self.training and asdict(self.training),
                "measurements": [record for one in self.evaluations for record in one.measurements()]}

    @property
    def differences(self) -> tuple[str, ...]:
        """Distance of the first draft that is not published above each published one, a sentence for each set."""
        drafts, found = self.header.get("drafts", {}), list[str]()
        own = next((one for one in self.evaluations if one.name in drafts and not drafts[one.name]["published"]), None)
        if own is None:
            return ()
        for one in self.at(temperature=own.temperature, batch_size=own.batch_size):
            # With the policy of the own one: its name ends both.
            if drafts.get(one.name, {}).get("published") and one.name.split(", ")[1:] == own.name.split(", ")[1:]:
                for name, mine in own.by_prompt_set.items():
                    theirs = one.by_prompt_set[name].accepted_length
                    gap = mine.accepted_length - theirs
                    found.append(f"{abs(gap):.2f} {'above' if gap >= 0 else 'below'} {drafts[one.name]['name']} on "
                                 f"{name}: {mine.accepted_length:.2f} and {theirs:.2f} tokens per pass of at most "
                                 f"{own.nodes} and {one.nodes} nodes")
        return tuple(found)

    @property
    def methods(self) -> tuple[str, ...]:
        """Names of the methods."""
        return tuple(dict.fromkeys(one.name for one in self.evaluations))

    @property
    def batch_sizes(self) -> tuple[int, ...]:
        """The batch sizes."""
        return tuple(dict.fromkeys(one.batch_size for one in self.evaluations))

    @property
    def temperatures(self) -> tuple[float, ...]:
        """The temperatures."""
        return tuple(dict.fromkeys(one.temperature for one in self.evaluations))

    def at(self, *, name: str | None = None, temperature: float | None = None,
           batch_size: int | None = None) -> tuple[Evaluation, ...]:
        """The evaluations of this method, temperature and batch size; None stands for all."""
        return tuple(one for one in self.evaluations
                     if name in (None, one.name) and temperature in (None, one.temperature)
                     and batch_size in (None, one.batch_size))
