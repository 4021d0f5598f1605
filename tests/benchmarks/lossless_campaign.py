"""Comparison of drafted output with the target's own: greedy token by token, sampled by distribution, and fuzzed.

    PYTHONPATH=tests python tests/benchmarks/lossless_campaign.py [--minutes N] [--out FILE] [--parts NAME ...]

* greedy: every drafter and policy on tiny targets of fourteen architectures in float64, against `generate`, over batch
  sizes and chunk sizes: a million tokens.
* embedded: the embedded 135M target in float32 on the handwritten prompts against `generate`: 200,000 tokens. A
  difference counts only where the target's two best logits are not a near-tie.
* sampled: the distribution of three tokens, over several passes, for every drafter, policy, temperature and filter,
  each with the drafter as it is and with one that is far too sure. The target's distribution is enumerated with
  transformers' own processors; G is compared with that of 999 samples of the distribution itself, so that p-values are
  uniform where nothing is wrong, however rare an outcome is. A Kolmogorov-Smirnov test looks at all of them.
* rules: rules and policies that are known to be wrong, decoded in the same way, must be seen (p at most 0.001).
* fuzz: random prompts, limits, stop texts, batches, indices and filters, each answer against plain decoding alone.

Finished cells are kept in the file, and a later call goes on with the others in the same order.
"""

import argparse
import json
import random
import sys
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import transformers
from draftsmith.modules.atomic_files import write_file
from scipy.stats import kstest
from support import campaign_fuzz, campaign_greedy, campaign_sampled
from support.campaign_outcome import Outcome

PARTS = ("greedy", "embedded", "sampled", "rules", "fuzz")
SEEN = 1e-3
"""A wrong rule is seen when its p-value is at most this: G is larger than in all of 999 samples."""
UNIFORM = 1e-3
"""Right cells are in doubt when the test of all their p-values gives less than this."""


@dataclass(frozen=True)
class Cell:
    """One piece of the campaign."""

    part: str
    name: str
    run: Callable[[], Outcome]


def cells(fuzzed: int) -> Iterator[Cell]:
    """All of them, each part in an order that covers everything early."""
    parts: dict[str, dict[str, Callable[[], Outcome]]] = {
        "greedy": campaign_greedy.tiny_cells(),
        "embedded": campaign_greedy.embedded_cells(),
        "sampled": campaign_sampled.right_cells(),
        "rules": campaign_sampled.wrong_cells(),
        "fuzz": campaign_fuzz.cells(fuzzed),
    }
    for part, runs in parts.items():
        names = list(runs)
        if part == "sampled":
            random.Random(0).shuffle(names)
        for name in names:
            yield Cell(part, name, runs[name])


class Store:
    """Outcomes by part and name, in a JSON file."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.outcomes: dict[str, dict[str, Outcome]] = {part: {} for part in PARTS}
        if path is not None and path.is_file():
            for part, found in json.loads(path.read_text(encoding="utf-8")).items():
                self.outcomes[part] = {name: Outcome(**fields) for name, fields in found.items()}

    def add(self, cell: Cell, outcome: Outcome) -> None:
        """Keep the outcome of a cell, on disk too."""
        self.outcomes[cell.part][cell.name] = outcome
        if self.path is not None:
            plain = {part: {name: asdict(one) for name, one in found.items()} for part, found in self.outcomes.items()}
            write_file(self.path, json.dumps(plain, indent=0) + "\n")


def run(store: Store, chosen: Sequence[Cell], seconds: float) -> None:
    """Run what is not in the store yet, the parts by turns, until the time is over."""
    waiting = {
        part: [cell for cell in chosen if cell.part == part and cell.name not in store.outcomes[part]]
        for part in PARTS
    }
    end = time.monotonic() + seconds
    spent = dict.fromkeys(PARTS, 0.0)
    while any(waiting.values()) and time.monotonic() < end:
        part = min((part for part in PARTS if waiting[part]), key=lambda name: spent[name])
        cell, began = waiting[part].pop(0), time.monotonic()
        torch.manual_seed(zlib.crc32(cell.name.encode()))
        outcome = cell.run()
        outcome.seconds = time.monotonic() - began
        spent[part] += outcome.seconds
        store.add(cell, outcome)
        if outcome.wrong:
            print(f"{cell.part} {cell.name}: {outcome.note}", file=sys.stderr, flush=True)


def table(store: Store, totals: dict[str, int]) -> Iterator[str]:
    """The Markdown table."""
    yield "| part | cells | tokens | accepted length | divergences | uniform p-values, p | wrong rules seen | seconds |"
    yield "|---|---|---|---|---|---|---|---|"
    for part in PARTS:
        found = list(store.outcomes[part].values())
        ps = [one.p for one in found if one.p is not None]
        uniform = f"{kstest(ps, 'uniform').pvalue:.3f} of {len(ps)}" if part == "sampled" and ps else ""
        seen = f"{sum(p <= SEEN for p in ps)} of {len(ps)}" if part == "rules" else ""
        passes = sum(one.passes for one in found)
        length = f"{sum(one.drafted for one in found) / passes:.2f}" if passes else ""
        yield (f"| {part} | {len(found)} of {totals[part]} | {sum(one.tokens for one in found):,} | {length} | "
               f"{'' if part == 'rules' else sum(one.divergences for one in found)} | {uniform} | {seen} | "
               f"{sum(one.seconds for one in found):.0f} |")


def broken(store: Store) -> list[str]:
    """Sentences that say what is wrong; nothing when all is well."""
    found = [f"{part} {name}: {one.note or 'differs'}" for part in PARTS if part != "rules"
             for name, one in store.outcomes[part].items() if one.wrong]
    found += [f"the wrong rule {name} was not seen (p = {one.p})" for name, one in store.outcomes["rules"].items()
              if one.p is None or one.p > SEEN]
    ps = [one.p for one in store.outcomes["sampled"].values() if one.p is not None]
    if ps and (value := kstest(ps, "uniform").pvalue) < UNIFORM:
        found.append(f"the p-values of {len(ps)} sampled cells are not uniform (p = {value:.1e})")
    return found


def main(words: Sequence[str] | None = None) -> int:
    """Run, print the table, and say what is wrong."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--minutes", type=float, default=60, help="start no further cell after this time")
    parser.add_argument("--out", type=Path, default=Path("runs/lossless/campaign.json"))
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--fuzzed", type=int, default=1000, help="fuzzed cases")
    options = parser.parse_args(words)
    transformers.logging.set_verbosity_error()
    options.out.parent.mkdir(parents=True, exist_ok=True)
    store, everything = Store(options.out), list(cells(options.fuzzed))
    run(store, [cell for cell in everything if cell.part in options.parts], 60 * options.minutes)
    print(f"torch {torch.__version__}, transformers {transformers.__version__}, {torch.get_num_threads()} threads")
    for line in table(store, {part: sum(cell.part == part for cell in everything) for part in PARTS}):
        print(line)
    for reason in (reasons := broken(store)):
        print(f"BROKEN: {reason}")
    return 1 if reasons else 0


if __name__ == "__main__":
    sys.exit(main())
