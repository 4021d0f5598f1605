"""Tokens per second of the prompts and answers that a target writes, and seconds until its states are stored.

    python tests/benchmarks/distillation.py [--help]

Each repeat distils the same small folder in four ways that take turns: with a sampler that sorts the whole vocabulary
and adds up all of it; with the sampling of this package; with that, while the states are kept; and so again, with
prompts and answers in bfloat16. After the first two, a second pass computes the states. Medians are printed, and the
medians of the ratios within a repeat, which other work on the machine affects least.
"""

import argparse
import json
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from statistics import median
from unittest.mock import patch

import torch
from draftsmith.data import ChatTemplate, DistillConfig, Manifest, PromptConfig, WantedStates, distill
from draftsmith.modules import DEFAULT_NAME, Sampling, Target, TargetConfig, load_target
from draftsmith.modules.decoding import verifier
from draftsmith.modules.verification import acceptance_rules
from support.data.data_folders import encode
from torch import Tensor

WAYS = ("sorted", "ours", "kept", "half")
TEMPERATURES = (0.0, 0.0, 0.8)  # Of the answers, as in the recipes for the embedded target


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
    with patch.object(verifier, "choose", choose_sorted), patch.object(acceptance_rules, "choose", choose_sorted):
        yield


def measured(target: Target, config: DistillConfig, prompts: PromptConfig, folder: Path, taps: tuple[int, ...], *,
             kept: bool, half: Target | None = None) -> dict[str, float]:
    """Tokens per second of passes over answers, and over prompts that the target writes, where they are ours, and of
    answers with their prompts' passes (`written`); seconds of the answers with their states, and of the second pass for
    a thousand tokens."""
    states = [WantedStates(taps=taps)] if kept else []
    config = replace(config, train_dtype="own" if half is None else "bfloat16")
    distill(target, prompts, config, ChatTemplate(target.tokenizer), folder, train_target=half, states=states,
            progress=False)
    stats = json.loads((folder / "stats.json").read_text())
    started = time.perf_counter()
    encode(target, folder, taps)
    seconds = time.perf_counter() - started
    speeds = {part: stats[f"{part}_busy_slots"] / stats[f"{part}_seconds"] for part in ("prompts", "answers")
              if stats.get(f"{part}_seconds")}
    manifest = Manifest.load(folder)
    written = manifest.total("train", "supervised") / stats["answers_seconds"]
    return {**speeds, "written": written, "both": stats["answers_seconds"] + stats["states_seconds"] + seconds,
            "states": 1000 * seconds / sum(record.tokens for record in manifest.shards)}


def line(title: str, part: str, found: dict[str, list[dict[str, float]]], pair: tuple[str, str], digits: int) -> str:
    """A row of a table: a part in two ways, and the second over the first."""
    before, after = ([one[part] for one in found[way]] for way in pair)
    ratio = median(new / old for old, new in zip(before, after, strict=True))
    return f"| {title} | {median(before):.{digits}f} | {median(after):.{digits}f} | {ratio:.2f} |"


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--target", default=DEFAULT_NAME, help="hub id, folder, GGUF file or name")
    parser.add_argument("--answers", type=int, default=40, help="prompts that the target writes")
    parser.add_argument("--slots", type=int, default=40, help="rows decoded at once")
    parser.add_argument("--new-tokens", type=int, default=32, help="longest answer, in tokens")
    parser.add_argument("--taps", type=int, nargs="*", default=(), help="layers whose states are stored too")
    parser.add_argument("--repeats", type=int, default=3, help="runs of each way")
    options = parser.parse_args()
    target, half = (load_target(TargetConfig(name=options.target, device="cpu", dtype=dtype))
                    for dtype in ("float32", "bfloat16"))
    config = DistillConfig(shard_prompts=options.answers, slots=options.slots, max_new_tokens=options.new_tokens,
                           temperatures=TEMPERATURES, validation_prompts=0)
    prompts = PromptConfig(origin="own", limit=options.answers)
    found: dict[str, list[dict[str, float]]] = defaultdict(list)
    for _ in range(options.repeats):
        for way in WAYS:
            with tempfile.TemporaryDirectory() as folder, sorting() if way == "sorted" else nullcontext():
                found[way].append(measured(target, config, prompts, Path(folder), tuple(options.taps),
                                           kept=way in ("kept", "half"), half=half if way == "half" else None))
    print(f"{options.target}, {options.slots} slots, {torch.get_num_threads()} threads, torch {torch.__version__}")
    print("| part | whole vocabulary sorted | ours | ratio |\n|---|---|---|---|")
    for part in ("prompts", "answers"):
        print(line(f"{part}, tokens/s", part, found, ("sorted", "ours"), 0))
    second = median(one["states"] for way in ("sorted", "ours") for one in found[way])
    print(f"| second pass, s per 1,000 tokens | | {second:.2f} | |")
    print("\n| part | states by a second pass | states kept | ratio |\n|---|---|---|---|")
    print(line("answers, tokens/s", "answers", found, ("ours", "kept"), 0))
    print(line("answers and states, s", "both", found, ("ours", "kept"), 1))
    print("\n| part | float32 | bfloat16 | ratio |\n|---|---|---|---|")
    for part in ("prompts", "answers"):
        print(line(f"{part}, tokens/s", part, found, ("kept", "half"), 0))


if __name__ == "__main__":
    main()
