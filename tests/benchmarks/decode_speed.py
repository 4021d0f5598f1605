"""Tokens per second of decoding by method and batch, with drafters of stated acceptance, on random weights of a shape.

    python tests/benchmarks/decode_speed.py [--artifact FOLDER] [--help]

With an artifact, `paid` is compared with no drafts and with fixed sizes instead, each in turn, with drafts and prompts
as they are: answers of equal length, and a batch of answers of all lengths, which empties.

Compared are the plain loop, `generate` of transformers with its growing and its static cache, and every family of
drafters with a chain and a tree: on a GPU with CUDA graphs and without, elsewhere also with layers that torch.compile
has compiled. The drafters have random weights and do all their work, but their guesses are replaced: the guess of rank
r after a node is right with chance a (1 - a)^r, by the target's answers, which the shape determines
(`parts/shapes.py`). So a figure is the speed that a drafter of this acceptance would have. Each method decodes twice;
the second time counts, prompts included. What no time is left for is named. `last_halves` measures passes alone,
without prompts, recording and first rounds.
"""

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, product
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.parts.shapes import RECIPES, SHAPES, Oracle, shaped_module, shaped_prompt, shaped_recipe, shaped_target
from draftsmith.export import Artifact, load_artifact
from draftsmith.modules import (
    Chain,
    DecodeSettings,
    LayerDraft,
    Policy,
    Proposer,
    Request,
    StaticTree,
    Target,
    Topology,
    decode,
)
from draftsmith.modules.baselines.memories import recycling_tree
from draftsmith.modules.target import partial_passes
from draftsmith.modules.target.attention.two_parts import FEWEST_SLOTS
from draftsmith.recipes.chat_settings import TemplateConfig, artifact_target, handwritten_prompts, own_target
from support.policies import paths

CHAIN, TREE, WIDEST = 3, 32, 4
"""Tokens of the drafted chains; nodes of the drafted trees, and the most guesses after a node."""
PAID_SIZES, MOST_NODES = (2, 4, 8, 16, 32), 256  # Fixed sizes, with no more nodes of all rows of a batch than this
TEMPERATURE = 0.8  # Temperature of the method that samples
FORMS = {"graphs": {"graphs": True}, "no graphs": {"graphs": False},
         "graphs, compiled": {"graphs": True, "compile": True}}
"""Forms in which passes alone are measured, in the order of what they decide."""


@dataclass(frozen=True)
class Speed:
    """Figures of one method with one batch."""

    method: str
    batch: int
    tokens_per_second: float = 0.0
    accepted_length: float = 0.0  # New tokens of a row per pass of the target
    draft_share: float = 0.0  # Share of the seconds that the drafter took
    equal: int = 0  # Answers that are those of the plain loop
    of: int = 0  # Answers that were compared
    left_out: str = ""  # Why nothing was measured; empty where it was
    graph_refusal: str = ""  # Why passes were not replayed as CUDA graphs where they were to be
    compile_refusal: str = ""  # Why layers were not compiled where they were to be

    @classmethod
    def measured(cls, method: str, batch: int, outcomes: list["Outcome"], reference: list[list[int]]) -> "Speed":
        """The figures of some batches, whose answers are compared with those of the plain loop."""
        answers = [answer for outcome in outcomes for answer in outcome.answers]
        seconds, count = sum(one.seconds for one in outcomes), sum(map(len, answers))
        return cls(method, batch, count / seconds, count / sum(one.passes * len(one.answers) for one in outcomes),
                   sum(one.draft_seconds for one in outcomes) / seconds, sum(map(list.__eq__, answers, reference)),
                   len(answers), graph_refusal=outcomes[0].graph_refusal, compile_refusal=outcomes[0].compile_refusal)


@dataclass
class Outcome:
    """Answers of a batch, with passes and seconds."""

    answers: list[list[int]]
    passes: int
    seconds: float
    draft_seconds: float = 0.0
    graph_refusal: str = ""
    compile_refusal: str = ""
    recorded: int = 0  # Rounds that were recorded as CUDA graphs
    passes_at: list[tuple[float, int]] = field(default_factory=list)
    """Of a batch of one: when the host had the tokens of each pass, and their number."""


Method = Callable[[Sequence[tuple[int, ...]]], Outcome]


def own(target: Target, new_tokens: int, drafter: Proposer | None = None, policy: Policy | None = None,
        temperature: float = 0.0, **settings: Any) -> Method:
    """Decode with this project's loop."""

    def run(prompts: Sequence[tuple[int, ...]]) -> Outcome:
        requests = [Request(prompt, row, new_tokens, temperature) for row, prompt in enumerate(prompts)]
        given = DecodeSettings(batch_size=len(prompts), ignore_eos=True, **settings)
        seen = list[tuple[float, int]]()
        result = decode(target, requests, given, drafter=drafter, policy=policy,
                        on_tokens=lambda _answer, tokens, _done: seen.append((time.perf_counter(), len(tokens))))
        stats = result.stats
        return Outcome([generation.tokens for generation in result.generations],
                       stats.target_calls + stats.prefill_calls, stats.seconds, stats.draft_seconds,
                       stats.graph_refusal, stats.compile_refusal, stats.recorded_rounds, seen)

    return run


@dataclass(frozen=True)
class Late:
    """Passes in the last half of an answer, without its prompt, recording and the first rounds."""

    method: str
    seconds: float = 0.0  # Of a pass
    tokens: float = 0.0  # Of a pass
    calls: tuple[float, ...] = ()  # Tokens per second of each whole call
    recorded: tuple[int, ...] = ()  # Rounds that each call recorded: a second one of the same shape needs none
    equal: bool = False  # Whether the answer is the one that the shape determines
    left_out: str = "no time was left"  # Why nothing was measured; empty where it was
    refusal: str = ""  # Why passes were not replayed or compiled that were to be

    @classmethod
    def measured(cls, method: str, outcomes: Sequence[Outcome], reference: list[list[int]]) -> "Late":
        """The figures of equal calls, one after the other; passes are those of the last one."""
        last = outcomes[-1]
        ends = list(accumulate(count for _, count in last.passes_at))
        middle = next(number for number, end in enumerate(ends) if 2 * end >= ends[-1])
        # The tokens of the last pass were cut.
        until = max(len(ends) - 2, middle + 1)
        passes, (began, _), (ended, _) = until - middle, last.passes_at[middle], last.passes_at[until]
        return cls(method, (ended - began) / passes, (ends[until] - ends[middle]) / passes,
                   tuple(ends[-1] / one.seconds for one in outcomes), tuple(one.recorded for one in outcomes),
                   last.answers == reference, "", last.graph_refusal or last.compile_refusal)


def forms(target: Target, brief: bool, drafted: bool = False) -> dict[str, dict[str, bool]]:
    """Settings of the loop that are compared, by what a method's name says of them."""
    if target.device.type == "cuda":
        compiled = {} if brief else {", compiled": FORMS["graphs, compiled"]}
        return {"": FORMS["graphs"], ", no graphs": FORMS["no graphs"], **compiled}
    found: dict[str, dict[str, bool]] = {"": {}} if drafted else {"": {}, ", graphs": {"graphs": True}}
    return found | ({", compiled": {"compile": True}} if not brief and target.linears.packed is None else {})


def peer(target: Target, new_tokens: int, **options: Any) -> Method:
    """Decode with transformers."""
    return lambda prompts: Outcome(*generated(target, prompts, new_tokens, **options))


def generated(target: Target, prompts: Sequence[tuple[int, ...]], new_tokens: int,
              **options: Any) -> tuple[list[list[int]], int, float]:
    """(answers of a batch, passes of the target, seconds) of transformers' `generate`, prompts padded on the left."""
    width, calls = max(map(len, prompts)), list[None]()
    rows = [([0] * (width - len(prompt)), prompt) for prompt in prompts]
    tokens = torch.tensor([[*padding, *prompt] for padding, prompt in rows], device=target.device)
    mask = torch.tensor([[*padding, *[1] * len(prompt)] for padding, prompt in rows], device=target.device)
    handle = target.layers[-1].register_forward_hook(lambda *_: calls.append(None))
    try:
        with target.native() as model, torch.no_grad():
            started = now(target)
            found = model.generate(tokens, attention_mask=mask, max_new_tokens=new_tokens, do_sample=False,
                                   eos_token_id=None, pad_token_id=0, use_cache=True, **options)
            seconds = now(target) - started
        return found[:, width:].tolist(), len(calls), seconds
    finally:
        handle.remove()


def now(target: Target) -> float:
    """Seconds, after the device has finished its work."""
    if target.device.type == "cuda":
        torch.cuda.synchronize(target.device)
    return time.perf_counter()


def without_drafter(target: Target, new_tokens: int, brief: bool) -> Iterator[tuple[str, Method]]:
    """(name, method) of each method that drafts nothing or with the target's layers."""
    for form, settings in forms(target, brief).items():
        yield f"plain loop{form}", own(target, new_tokens, **settings)
    yield "generate", peer(target, new_tokens)
    if brief:
        return
    yield "plain loop, sampled", own(target, new_tokens, temperature=TEMPERATURE)
    yield "generate, static cache", peer(target, new_tokens, cache_implementation="static", disable_compile=True)
    if target.device.type == "cuda":
        yield "generate, static cache, compiled", peer(target, new_tokens, cache_implementation="static")
    first = range(max(1, target.num_layers // 4))
    yield "first layers, chain", own(target, new_tokens, LayerDraft(target, first), Chain(CHAIN))


def shapes(drafter: Proposer) -> dict[str, Policy]:
    """A chain and a tree no deeper than the drafter reaches."""
    deepest = drafter.reach or CHAIN + 1
    tree = recycling_tree(TREE, WIDEST)
    kept = Topology.from_paths(path for path in paths(tree) if 0 < len(path) <= deepest)
    return {"chain": Chain(min(CHAIN, deepest)), "tree": StaticTree(kept)}


@dataclass
class Bench:
    """A target of a shape with its prompts and the answers that it determines."""

    shape: str
    target: Target
    context: int
    new_tokens: int
    acceptance: float
    brief: bool = False

    def prompts(self, batch: int) -> list[tuple[int, ...]]:
        """The prompts of a batch."""
        return [shaped_prompt(self.shape, row, self.context) for row in range(batch)]

    def texts_ST(self, batch: int) -> Tensor:
        """Prompts with their answers."""
        rows = [shaped_prompt(self.shape, row, self.context + self.new_tokens) for row in range(batch)]
        return torch.tensor(rows, device=self.target.device)

    def oracle(self, recipe: str, batch: int) -> Oracle:
        """The drafter of a recipe, of the stated acceptance."""
        module = shaped_module(shaped_recipe(recipe, self.shape), self.target, self.shape)
        drafter = module.drafter.to(device=self.target.device, dtype=self.target.dtype).eval()
        return Oracle(drafter, self.texts_ST(batch), self.target.vocab_size, self.acceptance)

    def late(self, name: str, method: Method, calls: int) -> Late:
        """Passes of the last of some calls of a method with one row."""
        try:
            outcomes = [method(self.prompts(1)) for _ in range(calls)]
        except RuntimeError as error:
            torch.cuda.empty_cache()
            return Late(name, left_out=f"failed: {str(error).splitlines()[0][:100]}")
        found = Late.measured(name, outcomes, self.texts_ST(1)[:, self.context :].tolist())
        print(f"{name}: {1000 * found.seconds:.2f} ms a pass", file=sys.stderr, flush=True)
        return found

    def timed(self, name: str, batch: int, method: Method, deadline: float) -> Speed:
        """The second of two runs of a method."""
        if time.monotonic() > deadline:
            return Speed(name, batch, left_out="no time was left")
        prompts = self.prompts(batch)
        reference = self.texts_ST(batch)[:, self.context :].tolist()
        try:
            method(prompts)
            found = method(prompts)
        except RuntimeError as error:
            # Too little memory, or what torch cannot compile here: the other methods are measured nevertheless.
            torch.cuda.empty_cache()
            return Speed(name, batch, left_out=f"failed: {str(error).splitlines()[0][:100]}")
        speed = Speed.measured(name, batch, [found], reference)
        # Told at once: a machine may be lent for less time than the whole table takes.
        print(f"{name}, {batch} rows: {speed.tokens_per_second:.1f} tokens/s", file=sys.stderr, flush=True)
        return speed

    def drafted(self, recipe: str, batches: Sequence[int], deadline: float) -> Iterator[Speed]:
        """The speeds of a family with chain and tree."""
        for batch in batches:
            oracle = self.oracle(recipe, batch)
            for form, policy in shapes(oracle).items():
                for added, settings in self.forms(recipe).items():
                    method = own(self.target, self.new_tokens, oracle, policy, **settings)
                    yield self.timed(f"{recipe}, {form}{added}", batch, method, deadline)

    def forms(self, recipe: str) -> dict[str, dict[str, bool]]:
        """The settings that are compared with a family; of all families on a CPU one is compiled, to try it out."""
        found = forms(self.target, self.brief, drafted=True)
        return found if self.target.device.type == "cuda" or recipe == RECIPES[0] else {"": {}}


def measure(bench: Bench, batches: Sequence[int], recipes: Sequence[str], deadline: float) -> Iterator[list[Speed]]:
    """The speeds of all methods so far, after each; those without drafters come first."""
    found = list[Speed]()
    for name, method in without_drafter(bench.target, bench.new_tokens, bench.brief):
        found += [bench.timed(name, batch, method, deadline) for batch in batches]
        yield found
    for recipe in recipes:
        # A drafter of this size takes seconds to make.
        late = time.monotonic() > deadline
        for speed in ([Speed(recipe, batch, left_out="no time was left") for batch in batches] if late else
                      bench.drafted(recipe, batches, deadline)):
            found.append(speed)
            yield found


def last_halves(bench: Bench, named: Sequence[str], deadline: float) -> Iterator[list[Late]]:
    """Passes of plain decoding, a chain and a tree with one row, in the named `FORMS` in turn: the rows of all after
    each. Where passes are recorded, a second call shows what is left to record."""
    policies = {"plain": None, f"chain of {CHAIN}": Chain(CHAIN),
                f"tree of {TREE}": StaticTree(recycling_tree(TREE, WIDEST))}
    found = {(form, kind): Late(f"{kind}, {form}") for form in named for kind in policies}
    oracle = None
    yield [*found.values()]
    for (form, kind), row in found.items():
        if time.monotonic() > deadline:
            return
        # In case that this process is stopped meanwhile.
        found[form, kind] = replace(row, left_out="did not end in time")
        yield [*found.values()]
        if (policy := policies[kind]) is not None and oracle is None:
            oracle = bench.oracle("eagle3", 1)
        method = own(bench.target, bench.new_tokens, None if policy is None else oracle, policy, **FORMS[form])
        found[form, kind] = bench.late(row.method, method, 2 if FORMS[form]["graphs"] else 1)
        yield [*found.values()]


def late_table(rows: Sequence[Late]) -> list[str]:
    """The lines of the table of passes in the last halves of answers."""
    lines = ["| method | ms a pass | tokens a pass | tokens/s | of each whole call | rounds recorded | equal answer |",
             "|---|--:|--:|--:|--:|--:|--:|"]
    for row in rows:
        if row.left_out:
            lines.append(f"| {row.method} | {row.left_out} | | | | | |")
            continue
        refused = f" ({row.refusal})" if row.refusal else ""
        lines.append(f"| {row.method}{refused} | {1000 * row.seconds:.2f} | {row.tokens:.2f} | "
                     f"{row.tokens / row.seconds:.1f} | {', '.join(f'{speed:.1f}' for speed in row.calls)} | "
                     f"{', '.join(map(str, row.recorded))} | {'yes' if row.equal else 'no'} |")
    return lines


def table(speeds: Sequence[Speed]) -> list[str]:
    """The lines of the table, ratios to the plain loop of the same batch."""
    plain = {speed.batch: speed.tokens_per_second for speed in speeds if speed.method == "plain loop"}
    lines = ["| method | batch | tokens/s | over the plain loop | tokens per pass | drafting, % | equal answers |",
             "|---|--:|--:|--:|--:|--:|--:|"]
    for speed in speeds:
        if speed.left_out:
            lines.append(f"| {speed.method} | {speed.batch} | {speed.left_out} | | | | |")
            continue
        ratio = speed.tokens_per_second / plain[speed.batch] if plain.get(speed.batch) else 0.0
        refused = f" (not replayed: {speed.graph_refusal})" if speed.graph_refusal else ""
        refused += f" (not compiled: {speed.compile_refusal})" if speed.compile_refusal else ""
        lines.append(f"| {speed.method}{refused} | {speed.batch} | {speed.tokens_per_second:.1f} | {ratio:.2f} | "
                     f"{speed.accepted_length:.2f} | {100 * speed.draft_share:.0f} | {speed.equal} of {speed.of} |")
    return lines


def paid_table(artifact: Artifact, batches: Sequence[int], new_tokens: int, turns: int,
               deadline: float) -> Iterator[str]:
    """The lines of a table of an artifact's policies. A policy keeps what it has learned from turn to turn; of each the
    fastest turn counts, since other programs only add to its seconds."""
    target, fixed = artifact.target, [f"static-{size}" for size in PAID_SIZES if size <= artifact.topology.size]
    names, template = ["none", *fixed, "fastest", "paid"], TemplateConfig().build(target)
    asked = [template.prompt(one.history()) for one in handwritten_prompts()]
    yield f"| answers | T | batch | {' | '.join(names)} | paid over none | over the best fixed | over fastest | equal |"
    yield "|---|--:|--:|" + "--:|" * (len(names) + 4)
    for empties, temperature, batch in product((False, True), (0.0, 1.0), batches):
        # Row r of a batch that empties ends after a share of the tokens.
        requests = [Request(tuple(asked[row % len(asked)]), row, max(
            8, new_tokens * (row + 1) // batch if empties else new_tokens), temperature) for row in range(batch)]
        used = [name for name in names if name not in fixed or batch * int(name.split("-")[1]) <= MOST_NODES]
        drafting = {name: artifact.drafting(name, batch_size=batch, temperature=temperature) for name in used}
        seconds, answers = dict.fromkeys(names, float("inf")), dict[str, list[list[int]]]()
        for _, name in product(range(turns), used):
            if time.monotonic() > deadline:
                return
            drafter, policy = (None, None) if name == "none" else drafting[name]
            found = decode(target, requests, DecodeSettings(batch_size=batch, ignore_eos=True), drafter=drafter,
                           policy=policy)
            seconds[name] = min(seconds[name], found.stats.seconds)
            answers[name] = [one.tokens for one in found.generations]
        tokens = sum(one.max_new_tokens for one in requests)
        best = min(seconds[name] for name in ("none", *fixed))
        over = (f"{one / seconds['paid']:.3f}" for one in (seconds["none"], best, seconds["fastest"]))
        equal = sum(map(list.__eq__, answers["paid"], answers["none"]))
        yield (f"| {'empties' if empties else 'equal'} | {temperature:g} | {batch} | "
               f"{' | '.join(f'{tokens / seconds[name]:.1f}' for name in names)} | {' | '.join(over)} | "
               f"{equal} of {batch} |")


def main(words: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--shape", choices=list(SHAPES), default="smollm2-135m", help="the target")
    parser.add_argument("--acceptance", type=float, default=0.7, help="chance that a guess is right")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4], help="rows decoded at once")
    parser.add_argument("--new-tokens", type=int, default=64, help="length of each answer")
    parser.add_argument("--context", type=int, default=64, help="tokens of each prompt")
    parser.add_argument("--recipes", nargs="*", default=list(RECIPES), help="drafters by their recipes")
    parser.add_argument("--minutes", type=float, default=9, help="measure nothing further after this time")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--parts-from", type=int, default=FEWEST_SLOTS,
                        help="fewest cache slots from which attention on CUDA is in two parts")
    parser.add_argument("--artifact", type=Path, help="compare policies of this one")
    parser.add_argument("--turns", type=int, default=3, help="turns of each of its policies")
    options = parser.parse_args(words)
    if options.artifact is not None:
        target = artifact_target(options.artifact, own_target())
        for line in paid_table(load_artifact(options.artifact, target), options.batches, options.new_tokens,
                               options.turns, time.monotonic() + 60 * options.minutes):
            print(line, flush=True)
        return
    partial_passes.FEWEST_SLOTS = options.parts_from
    if not 0 < options.acceptance < 1 or min(options.batches) < 1:
        parser.error("--acceptance must lie between 0 and 1 and --batches be at least 1, got "
                     f"{options.acceptance} and {options.batches}")
    transformers.logging.set_verbosity_error()
    bench = Bench(options.shape, shaped_target(options.shape, options.device), options.context, options.new_tokens,
                  options.acceptance)
    print(f"{options.shape}, {bench.target.device}, {torch.get_num_threads()} threads, torch {torch.__version__}; "
          f"acceptance {options.acceptance}, context {options.context}, {options.new_tokens} new tokens\n")
    deadline = time.monotonic() + 60 * options.minutes
    *_, found = measure(bench, options.batches, options.recipes, deadline)
    print("\n".join(table(found)))


if __name__ == "__main__":
    main()
