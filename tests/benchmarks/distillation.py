"""Tokens per second of the prompts and answers that a target writes, and seconds of storing its states.

    python tests/benchmarks/distillation.py [--target NAME] [--answers N] [--slots N] [--new-tokens N] [--repeats N]

Each repeat distils the same small folder in two ways that take turns: with the sampling of this package, and with one
that sorts the whole vocabulary and adds up all of it. The states are stored after each. Medians are printed, and the
median of the ratios within the pairs, which other work on the machine affects least.
"""

import argparse
import json
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from statistics import median
from unittest.mock import patch

import torch
from draftsmith.data import ChatTemplate, DistillConfig, Manifest, PromptConfig, distill, encode
from draftsmith.modules import DEFAULT_NAME, Sampling, Target, TargetConfig, load_target
from draftsmith.modules.decoding import batch_verifier
from draftsmith.modules.verification import acceptance_rules
from torch import Tensor

WAYS = ("sorted", "ours")
TEMPERATURES = (0.0, 0.0, 0.8)
"""Of the answers, as in the recipes for the embedded target."""


def choose_sorted(logits_BNV: Tensor, uniforms_BN: Tensor, sampling: Sampling) -> Tensor:
    """`choose` for temperature and top-p, over the whole vocabulary in the order of the probabilities."""
    temperature_B11 = torch.where(sampling.temperature_B > 0, sampling.temperature_B, 1.0)[:, None, None]
    probs_BNV, order_BNV = (logits_BNV / temperature_B11).softmax(-1).double().sort(dim=-1, descending=True)
    ends_BNV = probs_BNV.masked_fill(probs_BNV.cumsum(-1) - probs_BNV >= sampling.top_p, 0.0).cumsum(-1)
    places_BN1 = torch.searchsorted(ends_BNV, uniforms_BN[..., None] * ends_BNV[..., -1:], right=True)
    drawn_BN = order_BNV.gather(-1, places_BN1.clamp(max=logits_BNV.shape[-1] - 1))[..., 0]
    return torch.where(sampling.temperature_B[:, None] > 0, drawn_BN, logits_BNV.argmax(-1))


@contextmanager
def sorting() -> Iterator[None]:
    """Decoding that samples by `choose_sorted`."""
    with patch.object(batch_verifier, "choose", choose_sorted), patch.object(acceptance_rules, "choose", choose_sorted):
        yield


def measured(target: Target, config: DistillConfig, answers: int, folder: Path) -> dict[str, float]:
    """Tokens per second of prompts and answers, and seconds for the states of a thousand tokens."""
    prompts = PromptConfig(origin="own", limit=answers)
    distill(target, prompts, config, ChatTemplate(target.tokenizer), folder, progress=False)
    stats = json.loads((folder / "stats.json").read_text())
    started = time.perf_counter()
    encode(target, folder, progress=False)
    seconds = time.perf_counter() - started
    speeds = {part: stats[f"{part}_busy_slots"] / stats[f"{part}_seconds"] for part in ("prompts", "answers")}
    return {**speeds, "states": 1000 * seconds / sum(record.tokens for record in Manifest.load(folder).shards)}


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--target", default=DEFAULT_NAME, help="hub id, folder, GGUF file or name")
    parser.add_argument("--answers", type=int, default=40, help="prompts that the target writes")
    parser.add_argument("--slots", type=int, default=40, help="rows decoded at once")
    parser.add_argument("--new-tokens", type=int, default=32, help="longest answer, in tokens")
    parser.add_argument("--repeats", type=int, default=3, help="runs of each way")
    options = parser.parse_args()
    target = load_target(TargetConfig(name=options.target, device="cpu", dtype="float32"))
    config = DistillConfig(shard_prompts=options.answers, slots=options.slots, max_new_tokens=options.new_tokens,
                           temperatures=TEMPERATURES, validation_prompts=0)
    found: dict[str, list[dict[str, float]]] = defaultdict(list)
    for _ in range(options.repeats):
        for way in WAYS:
            with tempfile.TemporaryDirectory() as folder, sorting() if way == "sorted" else nullcontext():
                found[way].append(measured(target, config, options.answers, Path(folder)))
    print(f"{options.target}, {options.slots} slots, {torch.get_num_threads()} threads, torch {torch.__version__}")
    print("| part | whole vocabulary sorted | ours | ratio |\n|---|---|---|---|")
    for part, title in (("prompts", "prompts, tokens/s"), ("answers", "answers, tokens/s")):
        before, after = ([one[part] for one in found[way]] for way in WAYS)
        ratio = median(new / old for old, new in zip(before, after, strict=True))
        print(f"| {title} | {median(before):.0f} | {median(after):.0f} | {ratio:.2f} |")
    print(f"| states, s per 1,000 tokens | | {median(one['states'] for way in WAYS for one in found[way]):.2f} | |")


if __name__ == "__main__":
    main()
