"""Tokens per second and accepted lengths of transformers' assisted generation and of this project's loop.

    python tests/benchmarks/against_transformers.py [--help]

The same prompts, the same draft model (the target's first layers), the same number of drafted tokens, one row, greedy.
All methods take turns prompt by prompt in one process, so that contention affects them alike; each method's
first prompt is decoded once before, untimed. After `--minutes` no further prompt is started: the table then says how
many there were. The accepted length is new tokens per pass of the target, the prompt's pass included, for both:
transformers drafts before it reads the prompt, so that its prompt pass verifies as well. Ranges are 95 % bootstrap
intervals over prompts, both loops drawn together.
"""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
import transformers

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.decode_speed import Method, Outcome, assisted, own, peer
from draftsmith.export.evaluation.contention import ContentionProbe
from draftsmith.export.evaluation.summary import CONFIDENCE, Floats
from draftsmith.modules import (
    DEFAULT_NAME,
    Chain,
    LayerDraft,
    PromptLookup,
    PromptLookupConfig,
    Target,
    TargetConfig,
    load_target,
)
from draftsmith.modules.target.linear_forms import Pack
from draftsmith.modules.tuning.trials import Drawn, interval

PROMPTS = Path(__file__).resolve().parents[2] / "recipes" / "handwritten.jsonl"
PAIRS = {"plain": "transformers, plain", "prompt lookup": "transformers, prompt_lookup",
         "first layers": "transformers, assistant_model"}
"""Our methods, each with its counterpart in transformers."""
AIM = 1.3  # Speed that this loop should reach, as a multiple of transformers'


@dataclass
class Tally:
    """The answers of one method, prompt by prompt."""

    outcomes: list[Outcome] = field(default_factory=list)

    @property
    def answers(self) -> list[list[int]]:
        """Tokens of the answers."""
        return [answer for outcome in self.outcomes for answer in outcome.answers]

    def rate(self, amount: str) -> float:
        """New tokens per second, or per pass of the target."""
        return sum(map(len, self.answers)) / sum(getattr(outcome, amount) for outcome in self.outcomes)


def chat_prompts(target: Target, count: int, longest: int) -> list[tuple[int, ...]]:
    """The first turns of the handwritten prompts under the target's chat template, one of each category in turn."""
    rows = [json.loads(line) for line in PROMPTS.read_text(encoding="utf-8").splitlines()]
    found = []
    for row in rows[:: max(1, len(rows) // count)]:
        text = target.tokenizer.apply_chat_template([{"role": "user", "content": row["turns"][0]}], tokenize=False,
                                                    add_generation_prompt=True)
        tokens = tuple(target.tokenizer(text, add_special_tokens=False)["input_ids"])
        if len(tokens) <= longest:
            found.append(tokens)
    return found[:count]


def ways(target: Target, options: argparse.Namespace) -> dict[str, Method]:
    """All methods by name."""
    lookup = PromptLookup(PromptLookupConfig(shortest=1, longest=options.ngram, copied=options.copied), target.device)
    count = options.new_tokens
    return {
        "plain": own(target, count),
        "transformers, plain": peer(target, count),
        "first layers": own(target, count, LayerDraft(target, range(options.layers)), Chain(options.draft_tokens)),
        "transformers, assistant_model": assisted(target, count, options.layers, options.draft_tokens),
        "prompt lookup": own(target, count, lookup, Chain(options.copied)),
        "transformers, prompt_lookup": peer(target, count, prompt_lookup_num_tokens=options.copied,
                                            max_matching_ngram_size=options.ngram),
    }


def measure(target: Target, named: dict[str, Method], prompts: Sequence[tuple[int, ...]],
            minutes: float) -> tuple[dict[str, Tally], ContentionProbe]:
    """Decode every prompt by every method, each time another one first, and probe the machine for contention."""
    tallies, names = {name: Tally() for name in named}, list(named)
    for name in names:
        named[name]([prompts[0]])
    probe, started = ContentionProbe(target), time.monotonic()
    for turn, prompt in enumerate(prompts):
        if turn > 1 and time.monotonic() - started > 60 * minutes:
            break
        probe.sample()
        for name in (*names[turn % len(names) :], *names[: turn % len(names)]):
            tallies[name].outcomes.append(named[name]([prompt]))
        print(f"prompt {turn + 1} of {len(prompts)}, {time.monotonic() - started:.0f} s", file=sys.stderr, flush=True)
    probe.sample()
    return tallies, probe


def ratio(ours: Tally, theirs: Tally) -> tuple[float, tuple[float, float] | None]:
    """Our tokens per second over theirs, with its interval."""
    tokens_NW, seconds_NW = (np.array([[amount(one) for one in pair]
                                       for pair in zip(ours.outcomes, theirs.outcomes, strict=True)])
                             for amount in (lambda one: len(one.answers[0]), lambda one: one.seconds))

    def figure(drawn_RN: Drawn) -> Floats:
        speeds_RW = tokens_NW[drawn_RN].sum(1) / seconds_NW[drawn_RN].sum(1)
        return np.asarray(speeds_RW[:, 0] / speeds_RW[:, 1])

    count = len(ours.outcomes)
    return float(figure(np.arange(count)[None])[0]), interval(count, figure, CONFIDENCE)


def show(tallies: dict[str, Tally], probe: ContentionProbe) -> None:
    """Print the table, whether every ratio reaches the aim, and whether the machine was quiet."""
    print("| drafts | this loop, tokens/s | transformers, tokens/s | ratio (95 %) | accepted length here / there | "
          "answers like transformers' plain, here / there |")
    print("|---|---|---|---|---|---|")
    reference = tallies["transformers, plain"].answers
    ratios = {}
    for name, other in PAIRS.items():
        ours, theirs = tallies[name], tallies[other]
        ratios[name], ends = ratio(ours, theirs)
        shown = "" if ends is None else f" ({ends[0]:.2f}–{ends[1]:.2f})"
        equal = " / ".join(str(sum(map(list.__eq__, tally.answers, reference))) for tally in (ours, theirs))
        print(f"| {name} | {ours.rate('seconds'):.1f} | {theirs.rate('seconds'):.1f} | {ratios[name]:.2f}{shown} | "
              f"{ours.rate('passes'):.2f} / {theirs.rate('passes'):.2f} | {equal} of {len(reference)} |")
    below = [f"{name} {value:.2f}" for name, value in ratios.items() if value < AIM]
    print(f"below the aim of {AIM} times transformers: {', '.join(below)}" if below else
          f"every ratio reaches the aim of {AIM} times transformers")
    seen = ", ".join(f"{excess:.0%} for {size} tokens" for size, excess in probe.excess.items())
    print(f"{'contended' if probe.contended else 'quiet'}: repeated passes left their best by up to {seen}")


def main(words: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--target", default=DEFAULT_NAME, help="hub id, folder, GGUF file or name")
    parser.add_argument("--device", default="auto", help="cpu, cuda or auto")
    parser.add_argument("--minutes", type=float, default=8, help="start no further prompt after this time")
    parser.add_argument("--prompts", type=int, default=16, help="handwritten prompts used")
    parser.add_argument("--new-tokens", type=int, default=96, help="length of each answer")
    parser.add_argument("--layers", type=int, help="layers of the draft model; a quarter of the target's by default")
    parser.add_argument("--draft-tokens", type=int, default=3, help="tokens that the draft model guesses a pass")
    parser.add_argument("--copied", type=int, default=7, help="tokens that prompt lookup guesses a pass")
    parser.add_argument("--ngram", type=int, default=3, help="longest suffix that prompt lookup compares")
    parser.add_argument("--plain-linears", action="store_true", help="do not pack linear layers for oneDNN")
    options = parser.parse_args(words)
    if options.prompts < 1 or options.new_tokens < 1:
        parser.error(f"--prompts and --new-tokens must be at least 1, got {options.prompts} and {options.new_tokens}")
    transformers.logging.set_verbosity_error()
    pack: Pack = 0 if options.plain_linears else "auto"
    target = load_target(TargetConfig(name=options.target, device=options.device, pack=pack))
    options.layers = options.layers or max(1, target.num_layers // 4)
    prompts = chat_prompts(target, options.prompts, target.context_length - options.new_tokens - options.copied - 1)
    print(f"{options.target}, {str(target.dtype).removeprefix('torch.')} on {target.device}, {torch.get_num_threads()} "
          f"threads, torch {torch.__version__}, transformers {transformers.__version__}; {len(prompts)} prompts, "
          f"{options.new_tokens} new tokens; draft model: first {options.layers} of {target.num_layers} layers, "
          f"{options.draft_tokens} tokens; lookup: {options.copied} tokens; "
          f"own {target.linears.packing.in_words}")
    show(*measure(target, ways(target, options), prompts, options.minutes))


if __name__ == "__main__":
    main()
