"""Settings of a recipe compared at equal seconds, or steps, of training: accepted lengths on two kinds of prompts.

    python tests/benchmarks/recipe_trials.py --recipe eagle3 --data runs/families/data --out runs/trials \\
        --seconds 240 --seeds 0 1 --trial 'recipe:' --trial 'muon: train.optimizer=muon train.lr=1e-3'

A trial is a name and overrides of family, drafter, train, batch and retarget of a recipe. It is trained by the stages
of `draftsmith train`, on the same finished data and for as many seconds, by the clock of `train.max_minutes`, which
leaves validation and checkpoints out. With --steps each takes as many optimizer steps instead, however long they take:
what a setting learns from the same batches, whatever the machine and its load. With --processor the seconds are this
process's on the processor, which other work hardly changes; run it with one thread. Trials take turns: all of the
first seed, then all of the second in reverse order, so that a machine that grows busier does not favour one. An
interrupted training is resumed, a finished trial skipped.

Each draft is measured with a tree of 64 nodes that is searched on held-out answers to own prompts. *own* is counted
along the same answers, of two halves each with the tree searched on the other; *own, before loops* along these answers
as far as they do not repeat themselves; *hand-written* along the target's greedy answers to the hand-written prompts,
which are made once and kept in --out. All are exact counts of tokens per pass. With --decoded N the answers to so many
hand-written prompts are decoded too, with the first 16 nodes of that tree, and must be the target's. A drafter that
trials continue (`train.start`) is measured as it is before the first of them. The first row is the one that others are
compared with.
"""

import argparse
import copy
import hashlib
import json
import shlex
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from draftsmith.data import Prompt
from draftsmith.data.answers.answering import Answerer
from draftsmith.data.store.token_store import TokenShard, write_bytes
from draftsmith.export import busy_warning
from draftsmith.modules import (
    DecodeSettings,
    Drafter,
    Features,
    Request,
    StaticTree,
    Target,
    Topology,
    UserError,
    decode,
)
from draftsmith.modules.config_checks import MOST_STEPS
from draftsmith.modules.files.atomic_files import write_file
from draftsmith.modules.files.json_records import read_json, record_of
from draftsmith.modules.progress import ProgressLine
from draftsmith.modules.tuning.tree_search import RankedText, ranked_text, search_tree
from draftsmith.recipes.chat_settings import handwritten_prompts
from draftsmith.recipes.commands.pipeline import COMMANDS, encoded, held_out_rows, perform_stages
from draftsmith.recipes.stages.training_folder import read_result
from draftsmith.recipes.stages.workspace import Workspace
from draftsmith.trainers import DraftModule, checkpoints
from safetensors.torch import load_file

SECTIONS = ("family", "drafter", "train", "batch", "retarget")
"""Keys of a recipe that a trial may change: the others decide the data, or how a draft is measured."""
GIVEN = ("train.max_minutes", "train.max_steps", "train.seed")  # Keys that every trial is given by the script
NODES, DECODED_NODES = 64, 16  # Nodes of the trees that measure a draft and decode with it, root included
BEFORE = "start"  # Name of the outcome of a drafter that trials continue
TEXTS = ("own", "before_loops", "handwritten")  # Measured texts, by their fields in an outcome
RESULTS, TABLE = "trials.json", "trials.md"


@dataclass(frozen=True, kw_only=True)
class Trial:
    """Settings to be tried."""

    name: str  # Its name, also that of its folder
    overrides: tuple[str, ...]  # Keys of the recipe with their values, KEY=VALUE

    @classmethod
    def of(cls, text: str) -> "Trial":
        """The trial of a word of the command line, 'NAME: KEY=VALUE ...'."""
        name, colon, rest = text.partition(":")
        name = name.strip()
        if not colon or not name or Path(name).name != name or name.startswith("."):
            raise UserError(f"a trial must be 'NAME: KEY=VALUE ...' with the name of a folder, got {text!r}; 'recipe:' "
                            "is the recipe as it is")
        overrides = tuple(shlex.split(rest))
        for word in overrides:
            key, equals, _ = word.partition("=")
            if not equals or key.partition(".")[0] not in SECTIONS or key in GIVEN:
                raise UserError(f"the trial {name} changes {word!r}; give KEY=VALUE with a key of the sections "
                                f"{', '.join(SECTIONS)} other than {', '.join(GIVEN)}")
        return cls(name=name, overrides=overrides)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """A trained and measured trial of one seed."""

    trial: str  # Name of the trial
    seed: int  # Seed of its training and of the order of its batches
    key: str  # Hash of its settings and of the data
    steps: int  # Optimizer steps
    seconds: float  # Seconds of training, validation and checkpoints excluded
    parameters: int  # Number of trained weights
    precision: str  # Precision of the training
    own: float  # Tokens per pass along held-out answers to own prompts
    before_loops: float  # The same, each answer only as far as its loop
    handwritten: float  # Tokens per pass along the answers to the hand-written prompts
    decoded: float | None = None
    """Tokens per pass of the decoded answers to some of these prompts; None where none was decoded."""


class Trials:
    """The trials of one recipe in one folder."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.out = options, Path(options.out)
        self.trials = [Trial.of(text) for text in options.trial]
        names = [trial.name for trial in self.trials]
        if len(set(names)) < len(names):
            raise UserError(f"two trials have one name among {', '.join(names)}; name each differently")
        if not options.seconds > 0:
            raise UserError(f"--seconds must be above 0, got {options.seconds}")
        if options.steps is not None and options.steps < 1:
            raise UserError(f"--steps must be at least 1, got {options.steps}")
        if options.processor:
            checkpoints.time = SimpleNamespace(perf_counter=time.process_time)
        self.turns = [(trial, seed) for number, seed in enumerate(options.seeds)
                      for trial in (self.trials[::-1] if number % 2 else self.trials)]
        self.workspaces = {turn: self._workspace(*turn) for turn in self.turns}
        for workspace in self.workspaces.values():
            workspace.check()
        first = next(iter(self.workspaces.values()))
        self.target: Target = first.target
        for workspace in self.workspaces.values():
            # One copy of the frozen target for all trainings of this process.
            vars(workspace)["target"] = self.target
        self.template = first.template
        self.answered: dict[tuple[int, ...], list[Features]] = {}
        """Answers to the hand-written prompts with the target's states, by taps."""

    def _workspace(self, trial: Trial, seed: int) -> Workspace:
        steps, minutes = self.options.steps, self.options.seconds / 60
        given = {"out": self.out / trial.name / f"seed-{seed}", "data": self.options.data, "train.seed": seed,
                 "train.max_steps": "null" if steps is None else steps,
                 "train.max_minutes": minutes if steps is None else "null"}
        # The draft of the last step is measured: choosing among several would take other seconds for each trial.
        words = [f"--train.validate_every={MOST_STEPS}", *(f"--{word}" for word in trial.overrides),
                 *(f"--{key}={value}" for key, value in given.items())]
        return Workspace(COMMANDS["run"].parse(["--config", self.options.recipe, *words]))

    def run(self) -> None:
        """Train and measure what is not finished yet, and write the tables after each trial."""
        finished = read_outcomes(self.out / RESULTS)
        for number, turn in enumerate(self.turns, 1):
            (trial, seed), workspace = turn, self.workspaces[turn]
            label = f"[{number}/{len(self.turns)}] {trial.name}, seed {seed}"
            key = self._key(workspace)
            if any((one.trial, one.seed, one.key) == (trial.name, seed, key) for one in finished):
                print(f"{label}: already finished, skipped", flush=True)
                continue
            print(f"{label}: {' '.join(trial.overrides) or 'the recipe as it is'}", flush=True)
            perform_stages(workspace, ["encode"])
            if workspace.recipe.train.start is not None and not any(one.trial == BEFORE for one in finished):
                finished.append(self._measured(BEFORE, seed, key, workspace, workspace.module()))
                self._write(finished)
            perform_stages(workspace, ["train"])
            finished = [one for one in finished if (one.trial, one.seed) != (trial.name, seed)]
            module = workspace.module()
            module.restore(load_file(read_result(workspace.training).checkpoint))
            finished.append(self._measured(trial.name, seed, key, workspace, module))
            self._write(finished)
        print(f"\n{self._table(finished)}")

    def _key(self, workspace: Workspace) -> str:
        sections = {name: workspace.decisive[name] for name in SECTIONS}
        words = json.dumps([sections, workspace.data_identity()], sort_keys=True)
        return hashlib.sha256(words.encode()).hexdigest()

    def _write(self, finished: Sequence[Outcome]) -> None:
        write_file(self.out / RESULTS, json.dumps([asdict(one) for one in finished], indent=2) + "\n")
        write_file(self.out / TABLE, self._table(finished))

    def _measured(self, trial: str, seed: int, key: str, workspace: Workspace, module: DraftModule) -> Outcome:
        with self.target.reproducible(), torch.no_grad():
            held_out = held_out_rows(workspace, module)
            target, rows = module.verifier(encoded(workspace, module, held_out.whole()))
            _, asked = module.verifier(self._answers(module.drafter.taps))
            drafter = copy.deepcopy(module.drafter).to(device=target.device, dtype=target.dtype)
            drafter.bind(target)
            drafter.eval()
            own, handwritten, tree = accepted_lengths(drafter, rows, asked)
            _, cut = module.verifier(encoded(workspace, module, held_out.up_to_repetitions()))
            before_loops, *_ = accepted_lengths(drafter, cut, asked[:1])
            decoded = self._decoded(target, drafter, tree, lossless=target is self.target)
        known: dict[str, Any] = {"steps": 0, "seconds": 0.0, "precision": "",
                                 "parameters": sum(weight.numel() for weight in drafter.parameters())}
        if trial != BEFORE:
            result = read_result(workspace.training)
            known = {name: getattr(result, name) for name in known}
        return Outcome(trial=trial, seed=seed, key=key, own=own, before_loops=before_loops, handwritten=handwritten,
                       decoded=decoded, **known)

    def _decoded(self, target: Target, drafter: Drafter, tree: Topology, *, lossless: bool) -> float | None:
        """Tokens per pass of decoded answers, which must be those that the target alone has written."""
        shard, requests, expected = self._reference_answers(), list[Request](), list[tuple[int, ...]]()
        for row in range(min(self.options.decoded, shard.num_rows)):
            span = slice(*shard.span(row))
            tokens, answered = shard.tokens_T[span], shard.supervised_T[span]
            expected.append(tuple(tokens[answered].tolist()))
            requests.append(Request(tuple(tokens[~answered].tolist()), row, len(expected[-1])))
        if not requests:
            return None
        policy = StaticTree(tree.prefix(min(DECODED_NODES, tree.size)))
        found = decode(target, requests, DecodeSettings(batch_size=8), drafter=drafter, policy=policy).generations
        differing = [one.request.index for one, answer in zip(found, expected, strict=True)
                     if tuple(one.tokens) != answer]
        if lossless and differing:
            print(f"     answers that differ from the target's: {differing}", flush=True)
        return sum(len(one.tokens) for one in found) / sum(one.passes for one in found)

    def _answers(self, taps: tuple[int, ...]) -> list[Features]:
        """The target's greedy answers to the hand-written prompts, with its states."""
        if taps not in self.answered:
            shard = self._reference_answers()
            spans = [slice(*shard.span(row)) for row in range(shard.num_rows)]
            rows = [(shard.tokens_T[span].tolist(), shard.supervised_T[span].tolist()) for span in spans]
            self.answered[taps] = [self.target.encode(Features.from_rows([row]), taps) for row in rows]
        return self.answered[taps]

    def _reference_answers(self) -> TokenShard:
        """The same as tokens, from the file that keeps them, or decoded now."""
        prompts = handwritten_prompts()[: self.options.prompts]
        decisive = [self.target.identity.weights_hash, str(self.target.dtype), self.template.hash, self.options.longest,
                    [prompt.row for prompt in prompts]]
        digest = hashlib.sha256(json.dumps(decisive).encode()).hexdigest()
        file = self.out / f"handwritten-{digest[:16]}.safetensors"
        if not file.is_file():
            write_bytes(file, self._answer(prompts).to_bytes())
        return TokenShard.read(file)

    def _answer(self, prompts: Sequence[Prompt]) -> TokenShard:
        with ProgressLine("answers to hand-written prompts", None, "tok") as line:
            answerer = Answerer(self.target, self.template, DecodeSettings(batch_size=16), self.options.longest,
                                line.advance)
            answered = answerer.answer(list(enumerate(prompts)), (0.0,))
        return TokenShard.from_rows([row for one in answered for row in one.rows], range(len(prompts)))

    def _table(self, finished: Sequence[Outcome]) -> str:
        wanted = {(trial.name, seed) for trial, seed in self.turns}
        before = [one for one in finished if one.trial == BEFORE]
        rows = [Trial(name=BEFORE, overrides=()) for _ in before[:1]] + self.trials
        return table(rows, [*before, *(one for one in finished if (one.trial, one.seed) in wanted)])


def accepted_lengths(drafter: Drafter, own: Sequence[Features],
                     others: Sequence[Features]) -> tuple[float, float, Topology]:
    """Tokens per greedy pass on two texts, with trees of NODES nodes searched on the first, and the tree of all of it.
    """
    halves = [ranked_text(drafter, own[start::2]) for start in (0, 1)]
    crossed = [passes for here, there in (halves, halves[::-1]) for passes in there.walk(best_tree([here]))[1]]
    tree = best_tree(halves)
    return statistics.mean(crossed), statistics.mean(ranked_text(drafter, others).walk(tree)[1]), tree


def best_tree(texts: Sequence[RankedText]) -> Topology:
    """The best tree on these texts; a chain of one token where no guess was right."""
    tree, _ = search_tree(torch.cat([text.ranks_PK for text in texts]), NODES)
    return tree if tree.size > 1 else Topology.chain(1)


def read_outcomes(file: Path) -> list[Outcome]:
    """The finished trials in a file; none where there is no file."""
    if not file.is_file():
        return []
    remedy = "delete it, finished trainings are measured again"
    return record_of(list[Outcome], read_json(file, remedy), str(file), remedy)


def table(trials: Sequence[Trial], finished: Sequence[Outcome]) -> str:
    """Trials as a Markdown table: means over the seeds, with their range, and ratios to the first trial's means."""
    head = ("| trial | settings | seeds | steps | seconds | own | own, before loops | hand-written | decoded | "
            "own, ratio | own, before loops, ratio | hand-written, ratio |\n"
            "|---|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|\n")
    found = {trial.name: [one for one in finished if one.trial == trial.name] for trial in trials}
    return head + "".join(_line(trial, found[trial.name], found[trials[0].name]) for trial in trials)


def _line(trial: Trial, rows: Sequence[Outcome], base: Sequence[Outcome]) -> str:
    settings = " ".join(f"`{word}`" for word in trial.overrides) or "as in the recipe"
    if not rows:
        return f"| {trial.name} | {settings} | 0 | | | | | | | | | |\n"
    cells = [str(len(rows)), f"{_mean(rows, 'steps'):.0f}", f"{_mean(rows, 'seconds'):.0f}"]
    cells += [_range([getattr(row, text) for row in rows]) for text in TEXTS]
    cells += [_range(decoded) if (decoded := [row.decoded for row in rows if row.decoded is not None]) else ""]
    cells += [_ratio(rows, base, text) for text in TEXTS]
    return f"| {trial.name} | {settings} | {' | '.join(cells)} |\n"


def _mean(rows: Sequence[Outcome], field: str) -> float:
    return statistics.mean(float(getattr(row, field)) for row in rows)


def _range(values: Sequence[float]) -> str:
    mean = f"{statistics.mean(values):.3f}"
    return mean if len(values) == 1 else f"{mean} ({min(values):.3f} to {max(values):.3f})"


def _ratio(rows: Sequence[Outcome], base: Sequence[Outcome], field: str) -> str:
    """The ratio of the means over the seeds that both have finished; empty where there is none."""
    shared = {row.seed for row in rows} & {row.seed for row in base}
    if not shared:
        return ""
    here, there = ([row for row in part if row.seed in shared] for part in (rows, base))
    return f"{_mean(here, field) / _mean(there, field):.3f}"


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the trials and print their table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--recipe", required=True, help="shipped recipe by name, or a YAML file")
    parser.add_argument("--data", required=True, help="folder of finished data; missing states are added to it")
    parser.add_argument("--out", required=True, help="folder of the trials")
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--seconds", type=float, default=240, help="training time of each trial")
    length.add_argument("--steps", type=int, help="optimizer steps of each trial instead")
    parser.add_argument("--processor", action="store_true", help="count --seconds on the processor, not on the clock")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1], help="seeds of training and batches")
    parser.add_argument("--trial", action="append", required=True, metavar="'NAME: KEY=VALUE ...'",
                        help="a trial; the first one is what others are compared with")
    parser.add_argument("--prompts", type=int, default=None, help="hand-written prompts; all by default")
    parser.add_argument("--decoded", type=int, default=0, help="of these, prompts whose answers are decoded too")
    parser.add_argument("--longest", type=int, default=96, help="tokens of their longest answers")
    try:
        if (warning := busy_warning()) is not None:
            print(f"warning: {warning}", file=sys.stderr)
        Trials(parser.parse_args(arguments)).run()
    except UserError as error:
        raise SystemExit(f"error: {error}") from error


if __name__ == "__main__":
    main()
