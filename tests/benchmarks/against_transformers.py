"""Tokens per second and accepted lengths of transformers' assisted generation and of this project's loop.

    python tests/benchmarks/against_transformers.py [--target NAME] [--prompts N] [--new-tokens N] [--layers N]
        [--draft-tokens N] [--copied N] [--plain-linears]

The same prompts, the same draft model (the target's first layers), the same number of drafted tokens, one row, greedy.
All ways take turns prompt by prompt in one process, so that a busy moment of the machine hits them alike; each way's
first prompt is decoded once before, untimed. The accepted length is new tokens per pass of the target, the prompt's
pass included, for both: transformers drafts before it reads the prompt, so that its prompt pass verifies as well.
"""

import argparse
import copy
import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from draftsmith.modules import (
    DEFAULT_NAME,
    Chain,
    DecodeSettings,
    LayerDraft,
    Lookup,
    LookupConfig,
    Policy,
    Proposer,
    Request,
    Target,
    TargetConfig,
    decode,
    load_target,
)

PROMPTS = Path(__file__).resolve().parents[2] / "recipes" / "handwritten.jsonl"
PAIRS = (("first layers", "transformers, assistant_model"), ("prompt lookup", "transformers, prompt_lookup"),
         ("plain", "transformers, plain"))
"""Our ways, each beside transformers' own."""


@dataclass(frozen=True)
class Answer:
    """One decoded prompt."""

    tokens: list[int]
    passes: int
    seconds: float


@dataclass
class Tally:
    """What one way has decoded."""

    answers: list[Answer] = field(default_factory=list)

    @property
    def speed(self) -> float:
        """New tokens per second, prompts included."""
        return sum(len(answer.tokens) for answer in self.answers) / sum(answer.seconds for answer in self.answers)

    @property
    def accepted_length(self) -> float:
        """New tokens per pass of the target."""
        return sum(len(answer.tokens) for answer in self.answers) / sum(answer.passes for answer in self.answers)


Way = Callable[[tuple[int, ...]], Answer]


def chat_prompts(target: Target, count: int, longest: int) -> list[tuple[int, ...]]:
    """The first turns of the handwritten prompts under the target's chat template, one of each category in turn."""
    rows = [json.loads(line) for line in PROMPTS.read_text(encoding="utf-8").splitlines()]
    found = []
    for row in rows[:: max(1, len(rows) // count)]:
        text = target.tokenizer.apply_chat_template(
            [{"role": "user", "content": row["turns"][0]}], tokenize=False, add_generation_prompt=True
        )
        tokens = tuple(target.tokenizer(text, add_special_tokens=False)["input_ids"])
        if len(tokens) <= longest:
            found.append(tokens)
    return found[:count]


def truncated_model(target: Target, layers: int) -> Any:
    """A transformers model of the target's first layers that shares its weights."""
    config = copy.deepcopy(target.model.config)
    config.num_hidden_layers = layers
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:layers]
    config._attn_implementation = target.native_attention
    with torch.device("meta"):
        model = type(target.model)(config)
    for name, child in target.decoder.named_children():
        shared = torch.nn.ModuleList(target.layers[:layers]) if child is target.layers else child
        setattr(model.get_decoder(), name, shared)
    model.set_output_embeddings(target.head)
    model.generation_config = copy.deepcopy(target.model.generation_config)
    return model.eval()


@contextmanager
def counted(layer: torch.nn.Module) -> Iterator[list[int]]:
    """Counts the calls of a layer inside the block."""
    calls = [0]

    def count(*_: object) -> None:
        calls[0] += 1

    handle = layer.register_forward_hook(count)
    try:
        yield calls
    finally:
        handle.remove()


def peer(target: Target, new_tokens: int, **options: Any) -> Way:
    """Decode with transformers' `generate`."""

    def run(prompt: tuple[int, ...]) -> Answer:
        tokens = torch.tensor([prompt], device=target.device)
        with target.native() as model, counted(target.layers[-1]) as calls, torch.no_grad():
            began = now(target)
            found = model.generate(
                tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=new_tokens, do_sample=False,
                eos_token_id=None, pad_token_id=0, use_cache=True, **options,
            )
            seconds = now(target) - began
        return Answer(found[0, len(prompt) :].tolist(), calls[0], seconds)

    return run


def own(target: Target, new_tokens: int, drafter: Proposer | None = None, policy: Policy | None = None) -> Way:
    """Decode with this project's loop."""

    def run(prompt: tuple[int, ...]) -> Answer:
        began = now(target)
        result = decode(target, [Request(prompt, 0, new_tokens)], DecodeSettings(ignore_eos=True), drafter=drafter,
                        policy=policy)
        seconds = now(target) - began
        return Answer(result.generations[0].tokens, result.stats.target_calls + result.stats.prefill_calls, seconds)

    return run


def now(target: Target) -> float:
    """Seconds, once the device has done what it was given."""
    if target.device.type == "cuda":
        torch.cuda.synchronize(target.device)
    return time.perf_counter()


def ways(target: Target, options: argparse.Namespace) -> dict[str, Way]:
    """All ways by name."""
    assistant = truncated_model(target, options.layers)
    assistant.generation_config.num_assistant_tokens = options.draft_tokens
    assistant.generation_config.num_assistant_tokens_schedule = "constant"
    # Our chain does not stop early, so the assistant must not either.
    assistant.generation_config.assistant_confidence_threshold = 0.0
    lookup = Lookup(LookupConfig(shortest=1, longest=options.ngram, copied=options.copied), target.device)
    count = options.new_tokens
    return {
        "plain": own(target, count),
        "transformers, plain": peer(target, count),
        "first layers": own(target, count, LayerDraft(target, range(options.layers)), Chain(options.draft_tokens)),
        "transformers, assistant_model": peer(target, count, assistant_model=assistant),
        "prompt lookup": own(target, count, lookup, Chain(options.copied)),
        "transformers, prompt_lookup": peer(target, count, prompt_lookup_num_tokens=options.copied,
                                            max_matching_ngram_size=options.ngram),
    }


def measure(named: dict[str, Way], prompts: Sequence[tuple[int, ...]]) -> dict[str, Tally]:
    """Decode every prompt by every way, each time another one first."""
    tallies = {name: Tally() for name in named}
    names = list(named)
    for name in names:
        named[name](prompts[0])
    for turn, prompt in enumerate(prompts):
        for name in (*names[turn % len(names) :], *names[: turn % len(names)]):
            tallies[name].answers.append(named[name](prompt))
    return tallies


def show(tallies: dict[str, Tally]) -> None:
    """Print the table, the ratios, and whether the answers agree."""
    print("| way | tokens/s | accepted length | answers like transformers' plain |")
    print("|---|---|---|---|")
    reference = [answer.tokens for answer in tallies["transformers, plain"].answers]
    for name, tally in tallies.items():
        equal = sum(answer.tokens == wanted for answer, wanted in zip(tally.answers, reference, strict=True))
        print(f"| {name} | {tally.speed:.1f} | {tally.accepted_length:.2f} | {equal} of {len(reference)} |")
    for ours, theirs in PAIRS:
        print(f"{ours}: {tallies[ours].speed / tallies[theirs].speed:.2f} times the tokens per second of {theirs}")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--target", default=DEFAULT_NAME)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--new-tokens", type=int, default=96)
    parser.add_argument("--layers", type=int, help="layers of the draft model; a quarter of the target's by default")
    parser.add_argument("--draft-tokens", type=int, default=3)
    parser.add_argument("--copied", type=int, default=7)
    parser.add_argument("--ngram", type=int, default=3)
    parser.add_argument("--plain-linears", action="store_true", help="do not pack linear layers for oneDNN")
    options = parser.parse_args()
    transformers.logging.set_verbosity_error()
    target = load_target(TargetConfig(name=options.target, device=options.device, pack=not options.plain_linears))
    options.layers = options.layers or max(1, target.num_layers // 4)
    prompts = chat_prompts(target, options.prompts, target.context_length - options.new_tokens - options.copied - 1)
    print(f"{options.target}, {str(target.dtype).removeprefix('torch.')} on {target.device}, {torch.get_num_threads()} "
          f"threads, torch {torch.__version__}, transformers {transformers.__version__}; {len(prompts)} prompts, "
          f"{options.new_tokens} new tokens; draft model: first {options.layers} of {target.num_layers} layers, "
          f"{options.draft_tokens} tokens; lookup: {options.copied} tokens; "
          f"own linear layers {'packed' if target.packed is not None else 'plain'}")
    show(measure(ways(target, options), prompts))


if __name__ == "__main__":
    main()
