"""Work plan of an evaluation: the cost of each answer in passes of the target, and the minutes that follow.

The unit of work is a pass of the target over one token of one row. What else costs how many of them is measured: by the
cost model that was fitted on this machine when the artifact's tree was sized, else by passes of one token and of eight.
The seconds of a unit are measured right before the start, and then for each kind of work as it is done.
"""

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from ...modules import CostModel
from .methods import Method
from .schedule import Entry, Schedule, spread

REFERENCES, PLAIN, GENERATE, TIMED, UNTIMED, REPLAYS, SAMPLES = (
    "references", "plain", "generate", "timed", "untimed", "replays", "samples")
"""Works: the target's own answers; timed decoding without drafts, by this project's loop and by transformers; decoding
with drafts, timed and not; replays through other trees; the sample answers of the report."""
NUM_SAMPLES = 3
"""Sample answers of a report."""


class Kind(NamedTuple):
    """A kind of work whose units take about the same seconds."""

    work: str
    """One of the works above."""
    method: str = ""
    """Name of the method that drafts; "" without drafts."""
    rows: int = 1
    """Batch size for which the method chooses its tree, and at which it is timed."""
    temperature: float = 0.0
    """Sampling temperature; 0 is greedy."""


class Costs:
    """Costs in units of one target pass over one token.

    Args:
        model: seconds of passes and drafts, of which only the proportions count.
    """

    def __init__(self, model: CostModel) -> None:
        self.model = model

    @classmethod
    def of(cls, methods: Sequence[Method], passes: Mapping[int, float], context: int) -> "Costs":
        """The costs by the first method's cost model, or by measured passes where no method has one.

        Args:
            methods: the methods of the evaluation.
            passes: measured seconds of passes by their tokens, 1 among them.
            context: tokens that the row of these passes had read.
        """
        known = next((method.cost for method in methods if method.cost is not None), None)
        return cls(known or _straight(passes, context))

    def prompt(self, tokens: int) -> float:
        """A pass over a prompt."""
        return self.model.pass_seconds(tokens) / self.model.pass_seconds(1)

    def step(self, nodes: int, rows: int) -> float:
        """A row's share of a step with trees of so many nodes."""
        return self.model.step_seconds(nodes, rows) / rows / self.model.pass_seconds(1)

    def draft(self, nodes: int) -> float:
        """Growing a tree without a pass of the target."""
        return self.model.draft_seconds(nodes) / self.model.pass_seconds(1)


class WorkPlan:
    """The units of every piece of an evaluation; they depend on nothing that is measured while it runs.

    Args:
        schedule: what is decoded and what is timed.
        costs: what it costs.
        known: whether the target's own answer to a question at a temperature is known from other runs.
    """

    def __init__(self, schedule: Schedule, costs: Costs, known: Callable[[Entry, float], bool]) -> None:
        self.schedule, self.costs, self.config = schedule, costs, schedule.config
        self.methods = {method.name: method for method in schedule.methods}
        self.prompt_tokens = {entry.number: len(entry.question.prompt([])) for entry in schedule.entries}
        self.known = {(entry.number, temperature) for entry in schedule.entries for temperature in self.config.degrees
                      if known(entry, temperature)}
        self._units: dict[tuple[Kind, int], int] = {}
        self._kinds = {timed: self._kinds_of(timed) for timed in (False, True)}

    def kinds(self, entry: Entry) -> list[Kind]:
        """The kinds of work on each turn of a question; replays and sample answers are none of them."""
        return self._kinds[entry.number in self.schedule.timed]

    def _kinds_of(self, timed: bool) -> list[Kind]:
        found = []
        for temperature in self.config.degrees:
            found.append(Kind(REFERENCES, "", self.config.untimed_batch_size, temperature))
            if timed:
                for rows in self.schedule.groups:
                    found += [Kind(PLAIN, "", rows, temperature), Kind(GENERATE, "", rows, temperature),
                              *(Kind(TIMED, name, rows, temperature) for name in self.methods)]
            else:
                found += [Kind(UNTIMED, name, rows, temperature) for name, method in self.methods.items()
                          for rows in method.shapes(self.config.batches, temperature).values()]
        return found

    def units(self, kind: Kind, entry: Entry) -> int:
        """Units of one turn of a question, at least 1; 0 for an answer that is known from other runs."""
        if (kind, entry.number) not in self._units:
            self._units[kind, entry.number] = self._estimate(kind, entry)
        return self._units[kind, entry.number]

    def _estimate(self, kind: Kind, entry: Entry) -> int:
        tokens, prompt = self.config.max_new_tokens, self.prompt_tokens[entry.number]
        if kind.work == REFERENCES and (entry.number, kind.temperature) in self.known:
            return 0
        passes, nodes = self._passes(kind)
        if kind.work == REPLAYS:
            return _whole(self.costs.prompt(prompt + tokens) + passes * self.costs.draft(nodes))
        rows = self.config.untimed_batch_size if kind.work == UNTIMED else kind.rows
        return _whole(self.costs.prompt(prompt) + passes * self.costs.step(nodes, rows))

    def _passes(self, kind: Kind) -> tuple[float, int]:
        """(passes of an answer of full length, nodes of each); a method of which nothing is known accepts no guess."""
        method = self.methods.get(kind.method)
        if method is None:
            return self.config.max_new_tokens, 1
        length = method.expected_length(kind.rows, kind.temperature) if method.expected_length else None
        return self.config.max_new_tokens / (length or 1.0), method.nodes(kind.rows, kind.temperature)

    def of_entry(self, entry: Entry) -> Counter[Kind]:
        """Units of all turns of a question."""
        return Counter({kind: entry.question.turns * self.units(kind, entry) for kind in self.kinds(entry)})

    def of_entries(self, entries: Sequence[Entry]) -> Counter[Kind]:
        """Units of some questions."""
        return sum((self.of_entry(entry) for entry in entries), Counter())

    def replayed(self, entries: Sequence[Entry]) -> list[Entry]:
        """The questions of some whose greedy answers are replayed, each set's spread over it, the sets in turn."""
        if 0.0 not in self.config.degrees:
            return []
        sets: dict[str, list[Entry]] = {}
        for entry in sorted(entries, key=lambda one: one.number):
            sets.setdefault(entry.prompt_set, []).append(entry)
        chosen = [spread(members, self.config.tree_prompts) for members in sets.values()]
        return [members[place] for place in range(max(map(len, chosen), default=0)) for members in chosen
                if place < len(members)]

    def closing(self, entries: Sequence[Entry]) -> Counter[Kind]:
        """Units of what follows once these questions are decoded: replays and sample answers."""
        found: Counter[Kind] = Counter()
        for entry in self.replayed(entries):
            for kind in self.replays():
                found[kind] += entry.question.turns * self.units(kind, entry)
        found[self.samples] += sum(self.units(self.samples, entry) for entry in self.sampled(entries))
        return found

    def sampled(self, entries: Sequence[Entry]) -> list[Entry]:
        """Questions that stand for those of the sample answers, which are chosen when all are known."""
        return sorted(entries, key=lambda one: one.number)[:NUM_SAMPLES]

    def replays(self) -> list[Kind]:
        """The replays of each method with a tree that can be cut."""
        return [Kind(REPLAYS, name) for name, method in self.methods.items() if method.replayed]

    @property
    def samples(self) -> Kind:
        """The sample answers."""
        return Kind(SAMPLES, self.schedule.methods[0].name, self.config.batches[0], self.config.degrees[0])

    @property
    def total(self) -> Counter[Kind]:
        """Units of the whole evaluation."""
        return self.of_entries(self.schedule.entries) + self.closing(self.schedule.entries)


class Ledger:
    """Seconds and units of the work done so far, and the seconds of what is still to do.

    Args:
        pass_seconds: measured seconds of a pass of the target over one token.
        clock: seconds of a monotonic clock.
    """

    def __init__(self, pass_seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.pass_seconds, self.clock = pass_seconds, clock
        self.units: Counter[Kind] = Counter()
        self.answers: Counter[Kind] = Counter()
        self.times: dict[Kind, float] = {}
        self.started = self._last = clock()

    @property
    def elapsed(self) -> float:
        """Seconds since the start."""
        return self.clock() - self.started

    @property
    def done(self) -> int:
        """Units done."""
        return self.units.total()

    def add(self, kind: Kind, units: int) -> None:
        """Count the units of an answer; the seconds since the last call were spent on them."""
        now = self.clock()
        self.answers[kind] += 1
        self.units[kind] += units
        self.times[kind] = self.times.get(kind, 0.0) + now - self._last
        self._last = now

    def rate(self, kind: Kind) -> float:
        """Seconds of a unit: measured for this kind, else over all kinds so far, else of a pass before the start."""
        for found in (kind,), tuple(self.times):
            units = sum(self.units[one] for one in found)
            if units:
                return sum(self.times.get(one, 0.0) for one in found) / units
        return self.pass_seconds

    def seconds(self, units: Mapping[Kind, int]) -> float:
        """Predicted seconds of units that are still to do."""
        return sum(count * self.rate(kind) for kind, count in units.items())


def _straight(passes: Mapping[int, float], context: int) -> CostModel:
    """A model of free drafts, and of passes whose seconds rise evenly from one token to the most that were measured."""
    most = max(passes)
    slope = max(0.0, passes[most] - passes[1]) / max(1, most - 1)
    return CostModel(knots=(1,), pass_weights=(passes[1], slope, 0.0, 0.0), draft_weights=(), largest=most,
                     context=context, pass_error=0.0, draft_error=0.0)


def _whole(units: float) -> int:
    return max(1, round(units))
