"""Overhead of the decoding loop: milliseconds of a pass by part, and the pass over a bare transformers forward.

    python tests/benchmarks/decode_overhead.py [--target NAME] [--context TOKENS] [--passes N] [--batch-size N]

Plain decoding, chains and trees are drafted by a one-shot drafter (Medusa's shape, untrained) and by a recurrent one
(the target's first layer). The pass without drafting is compared with a forward of the same model over as many tokens
after a `DynamicCache` of the same length, once with the linear layers that our target uses (packed for oneDNN on a
CPU), so that only the loop's own work is left, and once untouched. All methods take turns pass by pass in one process;
medians are printed. A repeated probe reports contention.
"""

import argparse
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch
from draftsmith.export.evaluation.contention import ContentionProbe, clock, machine
from draftsmith.modules import (
    DEFAULT_NAME,
    Chain,
    DecodeSettings,
    LayerDraft,
    Loop,
    Medusa,
    MedusaConfig,
    Policy,
    Proposer,
    Request,
    StaticTree,
    Target,
    TargetConfig,
    load_target,
)
from draftsmith.modules.baselines.token_recycling import recycling_tree
from transformers import DynamicCache

PARTS = ("target", "draft", "accept", "commit", "rest")
"""Parts of a pass; growing the tree and observing the pass are both drafting."""
AIM = 1.05
"""Largest ratio that a pass should have to a bare forward with the same linear layers."""
HEADS, ENTRIES = 7, 2048
"""Heads of the one-shot drafter, and the size of its vocabulary."""
WARM_UP = 3
"""Passes of each method that are not counted."""


@dataclass
class Watch:
    """Seconds of each part of the running pass, and of all passes so far."""

    target: Target
    now: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PARTS, 0.0))
    passes: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))

    def timed(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """A function that adds its seconds to a part."""

        def run(*args: Any, **options: Any) -> Any:
            started = clock(self.target)
            answer = function(*args, **options)
            self.now[part] += clock(self.target) - started
            return answer

        return run

    def step(self, passes: Iterator[Any]) -> None:
        """Make one pass and note its parts."""
        self.now = dict.fromkeys(PARTS, 0.0)
        started = clock(self.target)
        next(passes)
        self.now["rest"] = clock(self.target) - started - sum(self.now.values())
        for part, seconds in self.now.items():
            self.passes[part].append(seconds)


def prompt(target: Target, row: int, length: int) -> tuple[int, ...]:
    """Tokens of a row, none of which repeats."""
    return tuple((10 + row + place) % target.vocab_size for place in range(length))


class Drafted:
    """The loop with one drafter and policy, its parts timed."""

    def __init__(self, target: Target, context: int, passes: int, batch: int, drafter: Proposer | None,
                 policy: Policy | None) -> None:
        self.size = policy.max_size if policy is not None else 1
        answer = min((passes + 1) * self.size, target.context_length - context)
        rows = [Request(prompt(target, row, context), row, answer) for row in range(batch)]
        self.loop = Loop(target, rows, DecodeSettings(batch_size=batch, ignore_eos=True), drafter=drafter,
                         policy=policy)
        self.watch, self.batch = Watch(target), batch
        self.steps = self.loop.run()
        for _ in range(batch):
            next(self.steps)
        self._wire(drafter, policy)

    def _wire(self, drafter: Proposer | None, policy: Policy | None) -> None:
        timed, loop = self.watch.timed, self.loop
        loop.rows.run = timed("target", loop.rows.run)  # type: ignore[method-assign]
        loop.rows.commit = timed("commit", loop.rows.commit)  # type: ignore[method-assign]
        loop.batch_verifier.verify = timed("accept", loop.batch_verifier.verify)  # type: ignore[method-assign]
        if drafter is not None and policy is not None:
            policy.grow = timed("draft", policy.grow)  # type: ignore[method-assign]
            drafter.observe = timed("draft", drafter.observe)  # type: ignore[method-assign]

    def step(self) -> None:
        """One pass of all rows."""
        self.watch.step(_every(self.steps, self.batch))


def _every(passes: Iterator[Any], rows: int) -> Iterator[Any]:
    """One item for each pass: the loop yields one for each row."""
    while True:
        for _ in range(rows):
            item = next(passes)
        yield item


class Bare:
    """The model itself over `size` tokens after a cache of its own, which is cropped again."""

    def __init__(self, target: Target, context: int, size: int, batch: int) -> None:
        self.target, self.seconds = target, list[float]()
        self.cache = DynamicCache(config=target.config)
        self.tokens = torch.full((batch, size), 7, device=target.device)
        prompts = torch.tensor([prompt(target, row, context) for row in range(batch)], device=target.device)
        with target.native() as model, torch.no_grad():
            model(input_ids=prompts, past_key_values=self.cache, use_cache=True)

    @torch.no_grad()
    def step(self) -> None:
        """One forward."""
        started = clock(self.target)
        self.target.model(input_ids=self.tokens, past_key_values=self.cache, use_cache=True)
        self.seconds.append(clock(self.target) - started)
        self.cache.crop(-self.tokens.shape[1])


@contextmanager
def native_attention(target: Target) -> Iterator[None]:
    """transformers' own attention over our linear layers."""
    with target.native():
        if target.linears.packed is not None:
            target.linears.packed.install()
        yield


Pairs = dict[str, tuple[Proposer | None, Policy | None]]


def ways(target: Target) -> Pairs:
    """Drafters and policies by name; each has its own, since each has its own timers."""
    chosen: Pairs = {"plain": (None, None)}
    shapes: dict[str, Callable[[], Policy]] = {
        "chain of 3": lambda: Chain(3),
        "chain of 7": lambda: Chain(7),
        **{f"tree of {size}": (lambda size=size: StaticTree(recycling_tree(size))) for size in (8, 16, 64)},
    }
    ids = torch.arange(min(ENTRIES, target.vocab_size))
    config = MedusaConfig(num_heads=HEADS, vocabulary_size=len(ids))
    for name, shape in shapes.items():
        chosen[f"{name}, one-shot"] = Medusa.create(config, target, ids).eval(), shape()
        chosen[f"{name}, recurrent"] = LayerDraft(target, range(1)), shape()
    return chosen


@dataclass(frozen=True)
class Row:
    """Medians of one method, in seconds."""

    name: str
    size: int
    parts: dict[str, float]
    bare: dict[str, float]

    @property
    def verified(self) -> float:
        """Seconds of a pass without its draft."""
        return sum(seconds for part, seconds in self.parts.items() if part != "draft")

    def over(self, kind: str) -> float:
        """Ratio of a pass without its draft to a bare forward."""
        return self.verified / self.bare[kind]


def measure(target: Target, options: argparse.Namespace, probe: ContentionProbe) -> list[Row]:
    """Time all methods in turn."""
    total = options.passes + WARM_UP
    drafted = {name: Drafted(target, options.context, total, options.batch_size, *pair)
               for name, pair in ways(target).items()}
    sizes = sorted({way.size for way in drafted.values()})
    # The context grows while the loop is measured; the bare forward gets the middle length.
    middle = options.context + total // 2
    bare = {kind: {size: Bare(target, middle, size, options.batch_size) for size in sizes}
            for kind in ("same layers", "untouched")}
    for turn in range(total):
        for way in drafted.values():
            way.step()
        with native_attention(target):
            for size in sizes:
                bare["same layers"][size].step()
        with target.native():
            for size in sizes:
                bare["untouched"][size].step()
        if turn % 4 == 0:
            probe.sample()
    return [Row(name=name, size=way.size,
                parts={part: median(seconds[WARM_UP:]) for part, seconds in way.watch.passes.items()},
                bare={kind: median(forwards[way.size].seconds[WARM_UP:]) for kind, forwards in bare.items()})
            for name, way in drafted.items()]


def show(rows: list[Row]) -> None:
    """Print the table."""
    print(f"| way | {' ms | '.join(PARTS)} ms | bare, same layers ms | bare, untouched ms | pass without draft / same "
          "layers | / untouched |")
    print("|" + "---|" * (len(PARTS) + 5))
    for row in rows:
        times = [row.parts[part] for part in PARTS] + [row.bare["same layers"], row.bare["untouched"]]
        cells = " | ".join(f"{1e3 * seconds:.2f}" for seconds in times)
        print(f"| {row.name} | {cells} | {row.over('same layers'):.3f} | {row.over('untouched'):.3f} |")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--target", default=DEFAULT_NAME, help="hub id, folder, GGUF file or name")
    parser.add_argument("--device", default="auto", help="cpu, cuda or auto")
    parser.add_argument("--context", type=int, default=128, help="tokens before the first pass")
    parser.add_argument("--passes", type=int, default=25, help="passes of each method")
    parser.add_argument("--batch-size", type=int, default=1, help="rows")
    options = parser.parse_args()
    target = load_target(TargetConfig(name=options.target, device=options.device))
    probe = ContentionProbe(target)
    started = time.monotonic()
    rows = measure(target, options, probe)
    where = machine(target)
    print(f"{options.target}, {where['dtype']}, {where['machine']['processor']}, {where['machine']['device']}, "
          f"{where['threads']} threads, torch {torch.__version__}; context {options.context}, batch "
          f"{options.batch_size}, {options.passes} passes each, {time.monotonic() - started:.0f} s")
    show(rows)
    busy = ", ".join(f"{size} tokens +{share:.0%}" for size, share in probe.excess.items())
    print(f"probe: {busy}: {'contended' if probe.contended else 'quiet'}; aim: {AIM} over a bare forward with the same "
          "layers")


if __name__ == "__main__":
    main()
