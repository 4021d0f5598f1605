"""The command trim: a finished draft with fewer entries in its draft vocabulary (VocabTrim, arXiv:2506.22694).

A draft proposes the target's commonest tokens nearly always, and reads the rows of all others in every step. Nothing is
trained: the rows that stay are those of the draft, so that what it accepts is known from held-out answers.

Shapes: V entries of the target's vocabulary, P of the draft's, Q of the trimmed one's."""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from ...data.datamodule import BatchConfig, HeldOutRows
from ...data.store.token_store import Manifest, count_labels, coverage
from ...export import (
    EvaluateConfig,
    busy_warning,
    read_description,
    save_artifact,
    save_tuning,
    use_free_processors,
)
from ...export.measured_files import chain_measurements
from ...export.page import Block, Cell, Figure, Heading, Table, Text, as_html, as_text
from ...export.report.plots import trimmed_lengths
from ...export.stored_drafter import load_drafter
from ...modules import Counted, Drafter, TargetConfig, UserError, answered_anew, load_target, measure_cost
from ...modules.features import ReadRows
from ...modules.files.atomic_files import write_file
from ...modules.files.folders import sole_writer
from ...modules.target.draft_vocabulary import choose
from ...modules.target.loading.loading import sketch_target
from ...modules.target.loading.model_parts import TargetIdentity
from ...modules.tuning.step_timing import SIZES
from ...modules.tuning.tree_search import ranked_text, search_tree
from ...modules.tuning.trials import MOST_ANSWERS, SIZING_TEMPERATURE, walked_sizes
from ..chat_settings import named_target, own_target
from ..reading.command_line import Command, Parsed
from ..recipe import TreeConfig
from ..stages.finished_draft import searched, sizes_in_words, tuned
from ..stages.records import STAGES_FILE
from ..terminal import say

SMALLEST = 2048  # Entries of the smallest vocabulary that is tried unasked; an eighth of one that has fewer
TIMING = 5.0  # Seconds after which no further round of timing starts, for each size


@dataclass(frozen=True, kw_only=True)
class TrimArguments:
    """Arguments of `draftsmith trim`."""

    artifact: Path
    """Folder of the artifact, which stays as it is."""
    out: Path
    """New or empty folder for the smaller artifact, `artifact`, and the table with its plot, trim.html."""
    entries: int | None = None
    """Entries of the draft vocabulary that stay: the tokens that are most frequent in the target's answers, its end
    tokens always; null takes the number that is predicted to be fastest on this machine."""
    data: Path | None = None
    """Folder of distilled data, whose answers are counted, the held-out ones drafted; None takes `data` next to the
    artifact."""
    target: TargetConfig = field(default_factory=own_target)
    """The target; the one that the artifact names by default."""
    trust: bool = False
    """Import the class that the artifact names where its family is none of this package's, which runs its code."""


@dataclass(frozen=True, kw_only=True)
class Size:
    """A number of entries with what held-out answers and this machine say of it."""

    entries: int  # Entries of the draft vocabulary
    covered: float  # Share of the tokens of held-out answers that it holds
    length: Counted  # Tokens per pass with the whole tree, which was searched on other answers
    seconds: float  # Seconds of drafting the whole tree
    speedup: float  # Predicted speed-up with the fastest part of it

    @property
    def cells(self) -> tuple[str | Cell, ...]:
        """The cells of a table's row."""
        low, high = self.length.interval or (self.length.accepted_length,) * 2
        return (f"{self.entries:,}", f"{self.covered:.1%}",
                Cell(f"{self.length.accepted_length:.3f}", f"{low:.2f} to {high:.2f}"), f"{1000 * self.seconds:.1f}",
                f"{self.speedup:.2f}")


class Trimming:
    """A draft that is to be trimmed, with its target and the answers by which it is judged. Raises UserError before the
    target's weights are read if the draft, the data and the arguments do not go together."""

    def __init__(self, given: TrimArguments) -> None:
        if given.out.exists() and (not given.out.is_dir() or any(given.out.iterdir())):
            raise UserError(f"{given.out} is not a new or empty folder; choose another --out")
        named = named_target(given.artifact, given.target)
        sketch = sketch_target(named)
        config = load_drafter(given.artifact, sketch, trust=given.trust).drafter.config
        try:
            replace(config, vocabulary_size=1)
        except UserError as error:
            raise UserError(f"this draft needs its whole vocabulary ({str(error).partition(';')[0]}); trim another"
                            ) from error
        self.entries, least = config.vocabulary_size or sketch.vocab_size, max(1, len(set(sketch.eos_ids)))
        smallest = min(SMALLEST, self.entries // 8)
        self.ladder = [1 << place for place in range(self.entries.bit_length(), 0, -1)
                       if smallest <= 1 << place < self.entries]
        if given.entries is not None and not least <= given.entries < self.entries:
            raise UserError(f"entries must lie between {least} (the target's end tokens) and {self.entries - 1:,}, one "
                            f"less than the draft has, got {given.entries}; choose one of these, or leave it out for "
                            "the fastest")
        if sketch.placement.slow:
            raise UserError("sizes are timed, which says nothing of drafts where the target's layers are on disk; trim "
                            "on a machine that holds the target")
        self.data = given.data or given.artifact.parent / "data"
        self.identity = TargetIdentity.from_dict(read_description(given.artifact)["target"])
        Manifest.load(self.data).target.require_same(self.identity)
        self.rows = HeldOutRows(self.data, BatchConfig(states="computed"))
        if not self.rows.greedy:
            raise UserError(f"the data in {self.data} hold out no answer, and no size could be judged; give --data "
                            "with distill.validation_prompts above 0")
        self.target = load_target(named)
        self.stored = load_drafter(given.artifact, self.target, trust=given.trust)
        adapter, ids_P = self.stored.adapter, self.stored.drafter.token_ids_Q
        self.decoder = self.target if adapter is None else self.target.adapted(adapter)
        self.ids_P = torch.arange(self.entries) if ids_P is None else ids_P.cpu()
        self.counts_P = count_labels(self.data)[self.ids_P]
        self.nodes = max(2, len(self.stored.config["tree"]["parents"]))
        self.held_out = self.read(self.rows.up_to_repetitions())
        # Read for each size, so that they stay in memory.
        self.shown = list(self.held_out[:MOST_ANSWERS])

    def read(self, rows: ReadRows, temperature: float = 0.0) -> ReadRows:
        """Held-out rows with answers and states of the target that decodes; one that the artifact changes gives other
        answers than the stored ones."""
        if self.decoder is not self.target:
            return answered_anew(self.decoder, rows, temperature=temperature)
        target, taps = self.target, self.stored.drafter.taps
        return rows.mapped(lambda row: target.encode(row.to(target.device), taps))

    def draft(self, entries: int) -> tuple[Drafter, float]:
        """(the draft with so many entries, the commonest and the end tokens that it can propose, the share of held-out
        answers that they hold); the rows that stay are its own."""
        ends = torch.isin(self.ids_P, torch.tensor(self.target.eos_ids)).nonzero()[:, 0].tolist()
        ids_Q, drafter = self.ids_P[choose(self.counts_P, entries, always=ends)], self.stored.drafter
        covered = coverage(self.data, ids_Q)
        if entries == self.entries:
            return drafter, covered
        config: Any = replace(drafter.config, vocabulary_size=entries)
        # A candidate head finds no more entries than there are.
        if getattr(config, "candidates", 0) > entries:
            config = replace(config, candidates=entries)
        made = type(drafter).create(config, self.decoder, ids_Q.to(self.target.device), start=drafter)
        return made.to(dtype=next(drafter.parameters()).dtype), covered

    def measured(self, entries: int) -> Size:
        """Figures of so many entries: their tokens per pass on held-out answers, and seconds of steps here."""
        drafter, covered = self.draft(entries)
        draft = searched(drafter, self.decoder, self.shown, self.nodes)
        nodes = sorted({*(size for size in SIZES if size < draft.topology.size), draft.topology.size})
        # Half of the answers choose the tree, and the other half reports.
        with self.decoder.reproducible():
            lengths = walked_sizes(draft.drafter, self.shown[0::2], search_tree(draft.tables[-1], self.nodes)[0], nodes)
        cost = measure_cost(self.decoder, draft.drafter, draft.topology, seconds=TIMING)
        return Size(entries=entries, covered=covered, length=list(lengths.values())[-1],
                    seconds=cost.draft_seconds(nodes[-1]),
                    speedup=max(cost.predict(one.accepted_length, one.nodes) for one in lengths.values()))

    def write(self, folder: Path, entries: int) -> None:
        """The artifact of the draft with so many entries, with its own tree and the sizes of it that pay here."""
        (trained, covered), former = self.draft(entries), self.stored.config
        draft = searched(trained, self.decoder, self.held_out, self.nodes)
        unread = self.read(self.rows.unread()[: (len(self.held_out) + 1) // 2])
        with self.decoder.reproducible():
            unseen = ranked_text(draft.drafter, unread)
        # What was counted with more guesses is not true of this draft.
        kept = {name: fact for name, fact in former["provenance"].items() if name not in ("acceptance", "loops")}
        facts = {**kept, "trimmed": {"weights_sha256": former["weights_sha256"], "entries": self.entries},
                 "draft_vocabulary": {"tokens": entries, "held_out_coverage": covered},
                 "expected_accepted_length": list(draft.expected)}
        save_artifact(folder, trained, self.identity, facts, draft.topology, self.stored.adapter,
                      chain_measurements(unseen))
        drawn = self.read(self.rows.whole(SIZING_TEMPERATURE), SIZING_TEMPERATURE)
        tuning = tuned(draft, self.decoder, self.held_out, unread, drawn, TreeConfig(searched_nodes=self.nodes),
                       EvaluateConfig().max_new_tokens)
        save_tuning(folder, tuning)
        say("\n".join(sizes_in_words(tuning, draft.topology)))


def trim(parsed: Parsed[TrimArguments]) -> None:
    """Cut the output layer of a finished draft to the target's commonest tokens, without training."""
    given = parsed.values
    trimming = Trimming(given)
    if warning := busy_warning():
        say(f"warning: {warning}")
    use_free_processors()
    asked = {trimming.entries, *trimming.ladder, *([given.entries] if given.entries else [])}
    sizes = [trimming.measured(entries) for entries in sorted(asked, reverse=True)]
    whole, chosen = sizes[0], max(sizes, key=lambda one: one.speedup)
    if given.entries is not None:
        chosen = next(one for one in sizes if one.entries == given.entries)
    lost = 1 - chosen.length.accepted_length / whole.length.accepted_length
    advice = (f"{chosen.entries:,} of {whole.entries:,} entries hold {chosen.covered:.1%} of the tokens of held-out "
              f"answers; a pass accepts {lost:.1%} less" if chosen is not whole else
              f"no smaller number than {whole.entries:,} entries is predicted to be faster here, and no artifact is "
              "written; give --entries to trim all the same")
    page: list[Block] = [
        Heading(f"{given.artifact.name} with fewer entries"), Text(advice),
        Table(("entries", "coverage", "tokens/pass", "draft ms", "speed-up"), [one.cells for one in sizes]), Text(NOTE),
        Figure(lambda: trimmed_lengths([(one.entries, one.length.accepted_length, one.covered) for one in sizes]),
               "Tokens per pass, and the share of the tokens of held-out answers that the entries hold.")]
    # The artifact first: what draws the plot may not be installed.
    with sole_writer(given.out / STAGES_FILE, wait=False):
        if chosen is not whole:
            trimming.write(given.out / "artifact", chosen.entries)
        say(as_text(page).rstrip())
        write_file(given.out / "trim.html", as_html(page))
    say(f"{given.out / 'trim.html'} shows it with a plot")


NOTE = ("Tokens per pass are those of held-out greedy answers with the whole tree, in trim.html with 90 % intervals "
        "over answers; draft ms is the time to draft it on this machine, and the speed-up, over this project's loop "
        "without drafts, is that of the fastest part of it.")
COMMANDS: dict[str, Command[Any]] = {"trim": Command(name="trim", arguments=TrimArguments, run=trim)}
