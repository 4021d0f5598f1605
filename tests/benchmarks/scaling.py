"""Seconds and peak memory of a training step against tokens, row length, vocabulary and draft steps.

    python tests/benchmarks/scaling.py [--family NAME] [--width N] [--longest N] [--vocabulary N]
        [--steps N] [--anchors N] [--only TABLE ...]

Every case runs in a process of its own, since a peak of resident memory never falls: a random target of two layers, one
step on a short row, then one step whose memory is counted beyond what the process had before. Seconds are CPU seconds
of one thread, the target's pass included. `step` is what forward, loss and gradients have alive at once on given
states of the target; `loss`, what of it the loss over the vocabulary has beyond states and gradients, which grow with
the tokens. Padding and the wait for data are those of the batches of a training: conversations of log-normal
length, packed in the order of an epoch. Kangaroo has one draft step in every case.
"""

import argparse
import json
import resource
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from draftsmith.data.datamodule import BatchConfig, BatchPlan
from draftsmith.data.store.feature_shards import Piece, packed
from draftsmith.modules import BlockDraftConfig, Eagle3Config, HydraConfig, KangarooConfig, MedusaConfig, Target
from draftsmith.modules.target.loading.tiny_model import tiny_tokenizer
from draftsmith.recipes.counted_work import CountedStorages
from draftsmith.trainers.families import family_configs, family_module
from transformers import LlamaConfig, LlamaForCausalLM

FAMILIES = ("eagle3", "medusa", "hydra", "kangaroo", "dflash", "dspark")
TABLES = ("tokens", "length", "vocabulary", "steps")
"""What the tables vary: rows, rows of one conversation, vocabulary, draft steps."""


@dataclass(frozen=True)
class Case:
    """One training step."""

    family: str = "eagle3"
    rows: int = 1
    length: int = 2048
    segment: int = 512  # Tokens of each conversation of a row
    vocabulary: int = 8192
    steps: int = 3  # Draft steps
    width: int = 64
    anchors: int | None = None  # Places of a row after which a drafter of blocks is trained; None for every token


def cases(base: Case, longest: int) -> dict[str, list[Case]]:
    """The cases of each table by what they vary; rows have at most `longest` tokens."""
    lengths = (*(length for length in (1024, 2048, 4096, 8192) if length < longest), longest)
    return {
        "tokens": [replace(base, rows=rows) for rows in (1, 2, 4, 8)],
        "length": [replace(base, length=length, segment=length) for length in lengths],
        "vocabulary": [replace(base, vocabulary=size) for size in (2048, 8192, 32768, 131072)],
        "steps": [replace(base, steps=steps) for steps in (1, 2, 4, 7)],
    }


# One process ----------------------------------------------------------------------------------------------------------


def measure(case: Case) -> dict[str, float]:
    """Seconds and MiB of one case, in this process."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    module = made(case)
    step(module, batch(replace(case, rows=1, length=64, segment=64)))
    before, started = peak(), time.process_time()
    step(module, batch(case))
    seconds, grown = time.process_time() - started, peak() - before
    features = module.encoded(batch(case))
    drafts = module.drafter(features)
    with CountedStorages() as tally:
        module.vocabulary_loss(drafts, features, module.weights(len(drafts.offsets)))
    states = 2 * drafts.hidden_BLKD.nbytes
    del drafts
    module.zero_grad()
    with CountedStorages() as whole:
        module.loss(features).total.backward()
    owned = sum(parameter.nbytes for parameter in dict.fromkeys(module.drafter.output_parameters(0)))
    return {"seconds": seconds, "MiB": grown, "step MiB": whole.peak / 2**20,
            "loss MiB": max(0.0, (tally.peak - states - owned) / 2**20)}


def made(case: Case) -> Any:
    """The training module of a case."""
    model = LlamaForCausalLM(LlamaConfig(
        vocab_size=case.vocabulary, hidden_size=case.width, intermediate_size=3 * case.width, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=1 << 20, pad_token_id=0, bos_token_id=1,
        eos_token_id=2))
    shape = {"eagle3": lambda: Eagle3Config(steps=case.steps), "medusa": lambda: MedusaConfig(num_heads=case.steps),
             "hydra": lambda: HydraConfig(num_heads=case.steps, prefix=True), "kangaroo": KangarooConfig,
            "dflash": lambda: BlockDraftConfig(block_size=case.steps + 1, aligned="same", causal=False,
                                               anchors=case.anchors),
            "dspark": lambda: BlockDraftConfig(block_size=case.steps, correction="markov", anchors=case.anchors),
            }[case.family]()
    target = Target(model, tiny_tokenizer(), name="tiny-scaling", pack=0)
    family = "block" if case.family in ("dflash", "dspark") else case.family
    module = family_module(family)(target, family_configs(family).train(drafter=shape))
    module.configure_model()
    torch.manual_seed(1)
    return module.train()


def batch(case: Case) -> Any:
    """Rows of conversations with labels everywhere."""
    size = min(case.segment, case.length)
    piece = Piece(tokens_N=torch.randint(4, case.vocabulary, (size,)), supervised_N=torch.ones(size, dtype=torch.bool))
    return packed([[piece] * (case.length // size)] * case.rows).to("cpu")


def step(module: Any, features: Any) -> None:
    """Loss and gradients of a micro-batch."""
    module.zero_grad()
    module.loss(features).total.backward()


def peak() -> float:
    """Largest resident memory of this process so far, MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


# Batches --------------------------------------------------------------------------------------------------------------


def batches(lengths: list[int], row_length: int, rows: int) -> tuple[float, float]:
    """(share of padding in the batches of an epoch, seconds to make one of them)."""
    plan = BatchPlan(lengths, BatchConfig(row_length=row_length, rows_per_batch=rows, states="computed"))
    plan.batch(0)
    count = plan.ends[0]
    whole = [plan.batch(number) for number in range(count)]
    places = sum(len(rows_of) * row_length for rows_of in whole)
    pieces = [Piece(tokens_N=torch.zeros(length, dtype=torch.int64), supervised_N=torch.ones(length, dtype=torch.bool))
              for length in lengths]
    started = time.perf_counter()
    for rows_of in whole:
        packed([[pieces[piece] for piece in row] for row in rows_of], row_length).to("cpu")
    return 1 - sum(lengths) / places, (time.perf_counter() - started) / count


def conversations(count: int, longest: int) -> list[int]:
    """Lengths of conversations in tokens: log-normal with a median of 300, cut at the longest."""
    drawn = torch.randn(count, generator=torch.Generator().manual_seed(0)).mul(0.8).add(5.7).exp()
    return [max(8, min(longest, int(length))) for length in drawn.tolist()]


# The tables -----------------------------------------------------------------------------------------------------------


def run(case: Case) -> dict[str, float]:
    """The figures of a case."""
    command = [sys.executable, __file__, "--case", json.dumps(asdict(case))]
    answer = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
    found: dict[str, float] = json.loads(answer.splitlines()[-1])
    return found


def main(words: Sequence[str] | None = None) -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--family", default="eagle3", choices=FAMILIES)
    parser.add_argument("--width", type=int, default=64, help="hidden size of the target")
    parser.add_argument("--longest", type=int, default=32768, help="tokens of the longest row")
    parser.add_argument("--vocabulary", type=int, default=8192, help="tokens of the target's vocabulary")
    parser.add_argument("--steps", type=int, default=3, help="draft steps")
    parser.add_argument("--anchors", type=int, help="places of a row after which blocks are trained; all without it")
    parser.add_argument("--only", nargs="+", choices=TABLES, default=TABLES, help="tables to be printed")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    options = parser.parse_args(words)
    if options.case:
        print(json.dumps(measure(Case(**json.loads(options.case)))))
        return
    base = Case(family=options.family, width=options.width, vocabulary=options.vocabulary, steps=options.steps,
                anchors=options.anchors)
    print("| varied | rows | row length | conversation | vocabulary | draft steps | s | MiB | KiB a token | step MiB "
          "| loss MiB |\n|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|")
    cost = 0.0
    for name, several in cases(base, options.longest).items():
        for case in several if name in options.only else []:
            found, tokens = run(case), case.rows * case.length
            cost = cost or found["seconds"] / tokens
            print(f"| {name} | {case.rows} | {case.length} | {case.segment} | {case.vocabulary} | {case.steps} | "
                  f"{found['seconds']:.2f} | {found['MiB']:.0f} | {1024 * found['MiB'] / tokens:.1f} | "
                  f"{found['step MiB']:.1f} | {found['loss MiB']:.1f} |", flush=True)
    print("\n| row length | rows | padding | seconds to make a batch | share of the step |\n|--:|--:|--:|--:|--:|")
    for row_length, rows in ((2048, 4), (8192, 1), (32768, 1)):
        waste, seconds = batches(conversations(4000, row_length), row_length, rows)
        share = seconds / (cost * row_length * rows) if cost else 0.0
        print(f"| {row_length} | {rows} | {waste:.2%} | {seconds:.4f} | {share:.2%} |", flush=True)


if __name__ == "__main__":
    main()
