"""Engine settings: how many tokens an engine should draft, by the acceptance that was measured of a draft and the
seconds of passes.

A pass over a chain of k drafted tokens emits E(k) = 1 + a_1 + ... + a_k tokens, where a_i is the chance that the first
i are all accepted; were all chances one a, this would be (1 - a^(k + 1)) / (1 - a) (Leviathan, Kalman and Matias 2023,
arXiv:2211.17192, eq. 1). A request gets E(k) tokens in the seconds of drafting k and of a pass over k + 1 (their
theorem 3.8 with measured seconds). The k with the largest speed is looked for among all, 0 included."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from ..modules import STATIC, BlockDraft, CostTable, Drafter, Topology, UserError
from ..modules.files.json_records import read_record
from ..modules.tuning.step_timing import along
from ..modules.tuning.trials import MOST_BEYOND
from .artifact import Artifact
from .stored_drafter import ACCEPTANCE, AGAIN

TABLE = "num_speculative_tokens_per_batch_size"  # vLLM's key of [first, last batch size, tokens]
Ranges = tuple[tuple[int, int, int], ...]  # (first, last, tokens): tokens to draft for so many requests at once


@dataclass(frozen=True, kw_only=True)
class DraftSettings:
    """Numbers of tokens that engines should draft; without ranges the defaults of the commands."""

    ranges: Ranges = ()  # Tokens of a chain; 0 where none pays
    varies: bool = False  # Whether the draft takes a step for each token, of which engines may leave some out
    tree: Topology | None = None  # A tree that is faster for one request than any chain
    least: float | None = None  # Chance that a drafted token must have to pay for one request
    costs: CostTable | None = None  # Seconds that were given
    said: str = "The numbers of tokens to draft are defaults: nothing was measured."

    @property
    def tokens(self) -> int:
        """Tokens for one request, or for the fewest for which drafts pay; 0 where none do, or nothing is known."""
        return next((one for _, _, one in self.ranges if one), 0)

    def chain(self, drafter: Drafter[Any]) -> int:
        """Tokens of a chain to serve with: those, or all that a draft answers in one pass, or three."""
        return self.tokens or drafter.reach or 3

    def vllm(self, chain: int) -> dict[str, Any]:
        """vLLM's numbers of tokens, for a chain of so many. Beyond the last range it drafts as in that."""
        if not self.varies or len(self.ranges) < 2:
            return {"num_speculative_tokens": chain}
        return {"num_speculative_tokens": max(tokens for _, _, tokens in self.ranges),
                TABLE: [list(one) for one in self.ranges]}

    def sglang(self, steps: int, topk: int, tokens: int) -> dict[str, int]:
        """SGLang's numbers for EAGLE's drafts, these by default: the depth of the tree, the candidates of a step, and
        the tokens of a pass, the target's own included."""
        if self.tree is not None:
            steps, topk = max(self.tree.depths), max(self.tree.ranks) + 1
            # It goes on with as many branches as a step has candidates.
            tokens = min(self.tree.size, 1 + topk + (steps - 1) * topk ** 2)
        elif self.tokens:
            steps, topk, tokens = self.tokens, 1, self.tokens + 1
        return {"num_steps": steps, "eagle_topk": topk, "num_draft_tokens": tokens}

    def tensorrt(self, chain: int) -> str:
        """TensorRT-LLM's numbers of tokens in YAML, for a chain of so many. Its schedule names the last batch size of
        each range, starts with the longest draft, and drafts nothing beyond."""
        first = self.ranges[0][2] if self.varies and len(self.ranges) > 1 else 0
        schedule = ", ".join(f"{last}: {min(first, tokens)}" for _, last, tokens in self.ranges)
        return f"max_draft_len: {first or chain}" + (f", draft_len_schedule: {{{schedule}}}" if first else "")


def draft_settings(artifact: Artifact, costs: CostTable | None = None) -> DraftSettings:
    """The numbers with which engines are predicted to be fastest, by an artifact's acceptance on greedy answers and the
    seconds of chains that are given, or else those of this project's loop; defaults where one of both is missing."""
    drafter, tuning, lengths = artifact.drafter, artifact.tuning, chain_lengths(artifact.acceptance, artifact.drafter)
    cost = costs or (chain_costs(tuning.cost, drafter, artifact.topology) if tuning is not None else None)
    if cost is None or not lengths:
        missing = "no seconds were measured, give your engine's with --engine_costs" if lengths else \
            "no acceptance of such chains was counted"
        return DraftSettings(costs=costs, said=f"The numbers of tokens to draft are defaults: {missing}.")
    ranges = ranges_of({curve.batch: best_tokens(lengths, cost, curve.batch) for curve in cost.curves})
    chain, tree, plain = ranges[0][2], None, cost.pass_seconds(1)
    speed = fastest = cost.predict(lengths[chain], 1 + chain) if chain else 1.0
    # A tree takes a step for each level, as a chain of so many tokens does.
    for trial in tuning.trials(0.0, STATIC) if tuning is not None and drafter.reach is None else ():
        grown = artifact.topology.prefix(min(trial.nodes, artifact.topology.size))
        seconds = cost.pass_seconds(grown.size) + cost.draft_seconds(1 + max(grown.depths))
        found = (trial.reported or trial.chosen).accepted_length * plain / seconds
        if found > fastest and max(grown.ranks) > 0 and trial.judged(cost):
            fastest, tree = found, grown
    # One more token takes these seconds, in which the others emit so much: it pays where its chance is larger.
    least = (cost.pass_seconds(1 + chain) - plain) / chain * speed / plain if chain else None
    whose = "the seconds of your engine" if tuning is None or costs else (
        f"the seconds of {tuning.device}, on which other programs ran" if cost.contended else
        f"the seconds of {tuning.device}; for another machine give your engine's with --engine_costs")
    said = ". ".join(filter(None, (
        "The numbers of tokens to draft follow from the acceptance that was counted and " + whose,
        f"By requests at once: {in_words(ranges)}", "" if chain else "Serve the target alone where it says none",
        f"For one request the speed is predicted at {speed:.2f} of that without drafts" if chain else "",
        f"SGLang's tree of {tree.size} tokens is predicted at {fastest:.2f}" if tree else ""))) + "."
    return DraftSettings(ranges=ranges, varies=drafter.reach is None, tree=tree, costs=costs, said=said,
                         least=None if least is None else round(min(0.95, max(0.0, least)), 2))


def read_costs(file: Path) -> CostTable:
    """The seconds of an engine from a JSON file. Raises UserError if they are damaged or too few."""
    remedy = "write it as recipes/guides/serve-vllm.md shows"
    found = read_record(CostTable, file, remedy)
    if (batches := [one.batch for one in found.curves]) != sorted({*batches}):
        raise UserError(f"{file} has curves for {batches} requests at once, which must ascend; {remedy}")
    if few := next((one.batch for one in found.curves if len(one.sizes) < 2), None):
        raise UserError(f"{file} has the seconds of a pass of 1 token alone for {few} requests at once; add those of "
                        f"more tokens: {remedy}")
    return found


def chain_lengths(acceptance: Mapping[str, Any], drafter: Drafter[Any]) -> dict[int, float]:
    """Tokens of a pass by the tokens of a chain, those that were counted or the first of a longer one, at temperature
    0, by the content of acceptance.json. Raises UserError if that is damaged."""
    try:
        rates = {int(one["num_speculative_tokens"]): [*map(float, one["synthetic_acceptance_rates"])]
                 for one in acceptance.get("vllm", ())}
    except (LookupError, TypeError, ValueError) as error:
        raise UserError(f"{ACCEPTANCE} is damaged: {error}; delete it, or {AGAIN}") from error
    longest = max(rates, default=0)
    found = {k: 1 + sum(rates.get(k, rates[longest])[:k]) for k in range(1, longest + 1)}
    # The slots of a block read each other: a shorter one is no part of it.
    return {k: length for k, length in found.items()
            if (k == drafter.reach if isinstance(drafter, BlockDraft) else k <= (drafter.reach or k))}


def chain_costs(cost: CostTable, drafter: Drafter[Any], topology: Topology) -> CostTable:
    """The seconds of chains, from those of the prefixes of a tree. A draft of steps takes one for each level: a chain
    of k tokens takes as long as a tree of k levels."""
    if drafter.reach is not None:
        return cost
    curves = []
    for curve in cost.curves:
        steps = dict[int, float]()
        for size, seconds in zip(curve.sizes, curve.draft_seconds, strict=True):
            steps.setdefault(max(topology.prefix(min(size, topology.size)).depths), seconds)
        draft = tuple(along([*steps], [*steps.values()], size - 1) for size in curve.sizes)
        curves.append(replace(curve, draft_seconds=draft))
    return replace(cost, curves=tuple(curves))


def best_tokens(lengths: Mapping[int, float], cost: CostTable, batch: int = 1) -> int:
    """The number of drafted tokens with which so many requests at once are fastest, 0 for none, by the tokens of a
    pass. The seconds of passes far larger than any that was timed are not trusted."""
    most = MOST_BEYOND * cost.curve(batch).sizes[-1] - 1
    known = {0: 1.0, **{k: length for k, length in lengths.items() if k <= most}}
    return max(known, key=lambda k: cost.predict(known[k], 1 + k, batch) if k else 1.0)


def ranges_of(best: Mapping[int, int]) -> Ranges:
    """Ranges of requests from the best tokens for some numbers of them, ascending: each holds down to the next one."""
    found = list[tuple[int, int, int]]()
    for before, last in pairwise([0, *best]):
        same = found and found[-1][2] == best[last]
        found.append((found.pop()[0] if same else before + 1, last, best[last]))
    return tuple(found)


def in_words(ranges: Sequence[tuple[int, int, int]]) -> str:
    """Numbers of tokens by requests at once, for a sentence."""
    return ", ".join(f"{tokens or 'none'} for {first}" + (f" to {last}" if last > first else "")
                     for first, last, tokens in ranges)


def scheduling(costs: CostTable, tokens: int) -> dict[str, Any]:
    """The file of costs of TensorRT-LLM's confidence scheduling (`SpsCostTable` in its `dspark_planner.py`):
    milliseconds of a step, which drafts whole blocks of so many tokens, as a part by all tokens of the pass and one by
    requests, whose sums are those measured by least squares."""
    cells = [(one.batch * size, one.batch, 1e3 * (seconds + costs.draft_seconds(1 + tokens, one.batch)))
             for one in costs.curves for size, seconds in zip(one.sizes, one.pass_seconds, strict=True)]
    counts, batches = (sorted({cell[at] for cell in cells}) for at in (0, 1))
    rows = [[float(one == cell[0]) for one in counts] + [float(one == cell[1]) for one in batches] for cell in cells]
    found = np.linalg.lstsq(np.array(rows), np.array([cell[2] for cell in cells]), rcond=None)[0]
    # Only the sums are known: the least that requests add counts to the tokens, which must take some time.
    least = found[len(counts):].min()
    return {"token_counts": counts, "step_time_ms": [max(1e-4, float(one + least)) for one in found[: len(counts)]],
            "batch_sizes": batches, "batch_overhead_ms": [float(one - least) for one in found[len(counts):]]}
