"""Comparison of drafted output with the target's own: greedy token by token, sampled by distribution, and fuzzed.

    PYTHONPATH=tests python tests/benchmarks/lossless_campaign.py [--minutes N] [--out FILE] [--parts NAME ...]

* greedy: every drafter and policy on tiny targets of fourteen architectures in float64, against `generate`, over batch
  sizes and chunk sizes: a million tokens.
* embedded: the embedded 135M target in float32 on the handwritten prompts against `generate`: 200,000 tokens. A
  difference counts only where the target's two best logits are not a near-tie.
* sampled: the distribution of three tokens, over several passes, for every drafter, policy, temperature and filter,
  with the draft as it is, far too sure, or without half of the vocabulary. The target's distribution is enumerated with
  transformers' own processors; G is compared with that of 999 samples of the distribution itself, so that p-values are
  uniform where nothing is wrong, however rare an outcome is. A Kolmogorov-Smirnov test looks at all of them.
* rules: rules and policies that are known to be wrong, decoded in the same way, must be seen (p at most 0.001).
* fuzz: random prompts, limits, stop texts, batches, indices and filters, each answer against plain decoding alone.

Finished cells are kept in the file, and a later call goes on with the others in the same order. A file belongs to one
state of the code and one version of torch and transformers.
"""

import argparse
import hashlib
import json
import random
import sys
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass
from functools import cache
from multiprocessing import get_context
from pathlib import Path

import torch
import transformers
from benchmarks.parts import campaign_exact, campaign_sampled
from benchmarks.parts.campaign_drafters import Outcome
from draftsmith.modules import UserError
from draftsmith.modules.files import atomic_files
from scipy.stats import kstest

PARTS: dict[str, Callable[[], dict[str, Callable[[], Outcome]]]] = {
    "greedy": campaign_exact.tiny_cells,
    "embedded": campaign_exact.embedded_cells,
    "sampled": campaign_sampled.right_cells,
    "rules": campaign_sampled.wrong_cells,
    "fuzz": campaign_exact.fuzzed_cells,
}
"""The parts and what makes their cells, by name."""
SEEN = 1e-3  # A wrong rule is seen when its p-value is at most this: G is larger than in all of 999 samples
UNIFORM = 1e-3  # Right cells are in doubt when the test of all their p-values gives less than this
HELPERS = [Path(__file__).resolve().parents[1] / name for name in ("support", "families", "benchmarks")]
CODE = Path(atomic_files.__file__).parents[1]  # The room of the decoding loop, whose state outcomes belong to


@dataclass(frozen=True)
class Cell:
    """One piece of the campaign."""

    part: str
    name: str


@cache
def runs(part: str) -> dict[str, Callable[[], Outcome]]:
    """The functions of a part's cells, by name."""
    return PARTS[part]()


def cells() -> Iterator[Cell]:
    """All of them, each part in an order that covers everything early."""
    for part in PARTS:
        names = list(runs(part))
        if part == "sampled":
            random.Random(0).shuffle(names)
        yield from (Cell(part, name) for name in names)


def run_cell(cell: Cell) -> Outcome:
    """Run one cell with random numbers of its own."""
    began = time.monotonic()
    torch.manual_seed(zlib.crc32(cell.name.encode()))
    try:
        outcome = runs(cell.part)[cell.name]()
    except UserError as error:
        outcome = Outcome(divergences=1, note=f"refused: {error}")
    outcome.seconds = time.monotonic() - began
    return outcome


def state_of_the_code() -> dict[str, str]:
    """Versions and a hash of all source that outcomes depend on."""
    files = [file for folder in (CODE, *HELPERS) for file in folder.rglob("*.py")]
    together = hashlib.sha256()
    for file in sorted(files):
        together.update(file.read_bytes())
    return {"source": together.hexdigest()[:16], "torch": torch.__version__, "transformers": transformers.__version__}


class Store:
    """Outcomes by part and name, in a JSON file."""

    def __init__(self, path: Path | None) -> None:
        self.path, self.code = path, state_of_the_code()
        self.outcomes: dict[str, dict[str, Outcome]] = {part: {} for part in PARTS}
        if path is not None and path.is_file():
            content = json.loads(path.read_text(encoding="utf-8"))
            if content["code"] != self.code:
                raise SystemExit(f"{path} was made with {content['code']}, this is {self.code}; give another --out")
            for part, found in content["outcomes"].items():
                self.outcomes[part] = {name: Outcome(**fields) for name, fields in found.items()}

    def add(self, cell: Cell, outcome: Outcome) -> None:
        """Keep the outcome of a cell, on disk too."""
        self.outcomes[cell.part][cell.name] = outcome
        if self.path is not None:
            plain = {part: {name: asdict(one) for name, one in found.items()} for part, found in self.outcomes.items()}
            atomic_files.write_file(self.path, json.dumps({"code": self.code, "outcomes": plain}, indent=0) + "\n")


def executor_of(processes: int) -> Executor:
    """The executor of cells: processes with one thread each, or a thread of this one."""
    if processes <= 1:
        return ThreadPoolExecutor(1)
    return ProcessPoolExecutor(processes, get_context("spawn"), initializer=torch.set_num_threads, initargs=(1,))


def run(store: Store, chosen: Iterable[Cell], seconds: float, processes: int = 1) -> None:
    """Run what is not in the store yet, the parts by turns, and start no further cell once the time is over."""
    waiting: dict[str, list[Cell]] = {part: [] for part in PARTS}
    for cell in chosen:
        if cell.name not in store.outcomes[cell.part]:
            waiting[cell.part].append(cell)
    end, spent = time.monotonic() + seconds, dict.fromkeys(PARTS, 0.0)
    running: dict[Future[Outcome], Cell] = {}
    with executor_of(processes) as executor:
        while running or (any(waiting.values()) and time.monotonic() < end):
            while len(running) < processes and any(waiting.values()) and time.monotonic() < end:
                busy = [cell.part for cell in running.values()]
                part = min((part for part in PARTS if waiting[part]), key=lambda name: (busy.count(name), spent[name]))
                cell = waiting[part].pop(0)
                running[executor.submit(run_cell, cell)] = cell
            done, _ = wait(running, return_when=FIRST_COMPLETED)
            for future in done:
                cell, outcome = running.pop(future), future.result()
                spent[cell.part] += outcome.seconds
                store.add(cell, outcome)
                if outcome.wrong:
                    print(f"{cell.part} {cell.name}: {outcome.note}", file=sys.stderr, flush=True)


def totals() -> dict[str, int]:
    """Cells of each part."""
    return {part: len(runs(part)) for part in PARTS}


def table(store: Store) -> Iterator[str]:
    """The Markdown table."""
    yield "| part | cells | tokens | accepted length | divergences | uniform p-values, p | wrong rules seen | seconds |"
    yield "|---|---|---|---|---|---|---|---|"
    for part, total in totals().items():
        found = list(store.outcomes[part].values())
        ps = [one.p for one in found if one.p is not None]
        uniform = f"{kstest(ps, 'uniform').pvalue:.3f} of {len(ps)}" if part == "sampled" and ps else ""
        seen = f"{sum(p <= SEEN for p in ps)} of {len(ps)}" if part == "rules" else ""
        passes = sum(one.passes for one in found)
        length = f"{sum(one.drafted for one in found) / passes:.2f}" if passes else ""
        yield (f"| {part} | {len(found)} of {total} | {sum(one.tokens for one in found):,} | {length} | "
               f"{'' if part == 'rules' else sum(one.divergences for one in found)} | {uniform} | {seen} | "
               f"{sum(one.seconds for one in found):.0f} |")


def unfinished(store: Store, parts: Iterable[str]) -> list[str]:
    """A phrase for each part with cells that have not run."""
    return [f"{len(store.outcomes[part])} of {totals()[part]} {part} cells" for part in parts
            if len(store.outcomes[part]) < totals()[part]]


def broken(store: Store) -> list[str]:
    """Sentences that say what is wrong; nothing when all that ran is well."""
    found = [f"{part} {name}: {one.note or 'differs'}" for part in PARTS if part != "rules"
             for name, one in store.outcomes[part].items() if one.wrong]
    found += [f"the wrong rule {name} was not seen (p = {one.p})" for name, one in store.outcomes["rules"].items()
              if one.p is None or one.p > SEEN]
    ps = [one.p for one in store.outcomes["sampled"].values() if one.p is not None]
    if ps and (value := kstest(ps, "uniform").pvalue) < UNIFORM:
        found.append(f"the p-values of {len(ps)} sampled cells are not uniform (p = {value:.1e})")
    return found


def main(words: Sequence[str] | None = None) -> int:
    """Run, print the table, and say what is wrong and what has not run yet."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--minutes", type=float, default=60, help="start no further cell after this time")
    parser.add_argument("--out", type=Path, default=Path("runs/lossless/campaign.json"))
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=tuple(PARTS))
    parser.add_argument("--processes", type=int, default=1, help="processes, of one thread each if more than one")
    options = parser.parse_args(words)
    transformers.logging.set_verbosity_error()
    options.out.parent.mkdir(parents=True, exist_ok=True)
    store = Store(options.out)
    run(store, (cell for cell in cells() if cell.part in options.parts), 60 * options.minutes, options.processes)
    print(", ".join(f"{name} {value}" for name, value in store.code.items()))
    for line in table(store):
        print(line)
    if left := unfinished(store, options.parts):
        print(f"NOT FINISHED: {', '.join(left)}; the same command goes on")
    for reason in (reasons := broken(store)):
        print(f"BROKEN: {reason}")
    return 1 if reasons else 0


if __name__ == "__main__":
    sys.exit(main())
