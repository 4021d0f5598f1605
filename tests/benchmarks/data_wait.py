"""Share of training that waits for data, with stored states by number format, and milliseconds of making a batch.

    python tests/benchmarks/data_wait.py [--shape NAME] [--recipe NAME] [--steps N] [--conversations N]
        [--formats bfloat16 int8 fp8 ...] [--ahead 0 2 ...] [--device cpu|cuda] [--out DIR]

Conversations of random tokens and random states of the shape are written into a folder as a run would leave them, in
one format after the other, and a drafter with random weights is trained on them by Lightning as a run does, without
validation. Before each training the files leave the system's memory, so that the first pass comes from the disk. The
settings of batches read ahead take turns, twice, and the smaller wait counts: others may use the machine. *Make* is the
median time in which one batch is read from the system's memory and packed, *decode* that in which its states become
numbers of the target's format on the device. On a GPU the host may wait while the device still works.
"""

import argparse
import gc
import logging
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import lightning
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from draftsmith.data import Manifest, ShardRecord, TokenShard
from draftsmith.data.batches import datamodule
from draftsmith.data.batches.datamodule import BatchConfig, DraftDataModule
from draftsmith.data.store.feature_shards import state_names
from draftsmith.data.store.feature_store import StateStore
from draftsmith.data.store.state_formats import FORMATS
from draftsmith.data.store.token_store import Row, hash_file
from draftsmith.modules import Target
from draftsmith.trainers import DraftModule
from support.model_shapes import SHAPES, shaped_target
from support.shaped_modules import RECIPES, shaped_module, shaped_recipe

ROWS_OF_SHARD = 64
"""Conversations of a shard."""
ROUNDS = 2
"""Trainings with each setting."""
BATCHES = 8
"""Batches by which making is timed."""
LOGGERS = ("lightning.pytorch", "lightning.pytorch.utilities.rank_zero", "lightning.fabric.utilities.rank_zero")
"""Lightning's, which say the same at every training."""


@dataclass(frozen=True)
class Waited:
    """One training."""

    steps_per_second: float
    share: float
    """Share of its time that went by waiting for data."""


def write_data(folder: Path, target: Target, count: int, longest: int) -> Manifest:
    """Conversations of random tokens with a median of 300, whose last two thirds are answers, in shards."""
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randn(count, generator=generator).mul(0.8).add(5.7).exp().tolist()
    rows = []
    for number, length in enumerate(max(8, min(longest, int(one))) for one in drawn):
        tokens = torch.randint(target.vocab_size, (length,), generator=generator).tolist()
        rows.append(Row(tokens=tuple(tokens), supervised=tuple(at >= length // 3 for at in range(length)),
                        prompt=number))
    records = []
    for number in range(0, count, ROWS_OF_SHARD):
        here = rows[number : number + ROWS_OF_SHARD]
        shard = TokenShard.from_rows(here, [row.prompt for row in here])
        file = folder / f"train-{number // ROWS_OF_SHARD:05d}.safetensors"
        file.write_bytes(shard.to_bytes())
        counts = dict.fromkeys(("candidates", "prompts", "rows", "by_target", "answers"), len(here))
        records.append(ShardRecord(file=file.name, split="train", sha256=hash_file(file), by_text=0, by_draft=0,
                                   tokens=len(shard.tokens_T), supervised=int(shard.supervised_T.sum()), truncated=0,
                                   full=0, **counts))
    manifest = Manifest(target=target.identity, template_hash="", recipe={"prompts": {}, "distill": {}}, versions={},
                        shards=tuple(records), complete=True)
    manifest.save(folder)
    return manifest


def write_states(folder: Path, target: Target, manifest: Manifest, taps: Sequence[int], name: str) -> None:
    """Random states of every token in a number format, in place of any others."""
    store = StateStore(folder, target, FORMATS[name])
    generator = torch.Generator().manual_seed(1)
    for record in manifest.shards:
        states = torch.randn(record.tokens, target.hidden_size, generator=generator).to(store.dtype)
        store.add(store.write(record, state_names(taps), [dict.fromkeys(state_names(taps), states)]))


def forget(folder: Path) -> None:
    """Let the files of a folder leave the system's memory, once the maps of a former training are gone."""
    gc.collect()
    for file in folder.glob("*.safetensors"):
        with file.open("rb") as opened:
            os.fsync(opened.fileno())
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def train(module: DraftModule, data: DraftDataModule, steps: int) -> Waited:
    """Steps of a training without validation; the module is trained on."""
    trainer = lightning.Trainer(max_steps=steps, max_epochs=-1, accelerator=module.target.device.type, devices=1,
                                logger=False, enable_progress_bar=False, enable_checkpointing=False,
                                enable_model_summary=False, use_distributed_sampler=False, precision="32-true")
    module.clock.before, module.wait.before, module.seconds = 0.0, 0.0, 0.0
    trainer.fit(module, datamodule=data)
    return Waited(steps / module.seconds, module.data_wait)


def making(data: DraftDataModule, device: torch.device) -> tuple[float, float]:
    """Median seconds of (reading and packing a batch, decoding its states on the device)."""
    batches = [data.packed_batch(number) for number in range(BATCHES)]
    moved = [states.moved(lambda tensor: tensor.to(device)) for batch in batches
             for states in [batch.final, *batch.taps.values()] if states is not None]
    made = median(_seconds(lambda number=number: data.packed_batch(number), device) for number in range(BATCHES))
    return made, sum(_seconds(states.states, device) for states in moved) / BATCHES


def _seconds(work: Callable[[], Any], device: torch.device) -> float:
    started = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - started


def measure(module: DraftModule, folder: Path, config: BatchConfig, aheads: Sequence[int], steps: int
            ) -> tuple[dict[int, Waited], tuple[float, float]]:
    """(the training that waited least for each number of batches ahead, seconds to make and to decode a batch)."""
    taps, found = module.drafter.taps, dict[int, Waited]()
    for _ in range(ROUNDS):
        for ahead in aheads:
            datamodule.AHEAD = ahead
            data = DraftDataModule(folder, config, taps)
            forget(folder)
            waited = train(module, data, steps)
            del data
            found[ahead] = min(found.get(ahead, waited), waited, key=lambda one: one.share)
    return found, making(DraftDataModule(folder, config, taps), module.target.device)


def main(words: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--shape", choices=list(SHAPES), default="smollm2-135m", help="the target")
    parser.add_argument("--recipe", choices=RECIPES, default="medusa", help="shipped recipe of the drafter")
    parser.add_argument("--formats", nargs="+", choices=list(FORMATS), default=["float32", "int8", "fp8"])
    parser.add_argument("--ahead", nargs="+", type=int, default=[0, 2], help="batches read ahead")
    parser.add_argument("--steps", type=int, default=12, help="optimizer steps of a training")
    parser.add_argument("--conversations", type=int, default=192)
    parser.add_argument("--row-length", type=int, default=512, help="tokens of a packed row")
    parser.add_argument("--rows", type=int, default=4, help="packed rows of a batch")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--out", type=Path, help="existing folder on the disk to be measured")
    options = parser.parse_args(words)
    if min(options.steps, options.conversations, options.rows) < 1 or options.row_length < 32:
        parser.error("--steps, --conversations and --rows must be at least 1 and --row-length at least 32, got "
                     f"{options.steps}, {options.conversations}, {options.rows} and {options.row_length}")
    for name in LOGGERS:
        logging.getLogger(name).setLevel(logging.ERROR)
    target = shaped_target(options.shape, options.device)
    module = shaped_module(shaped_recipe(options.recipe, options.shape), target, options.shape)
    print(f"{options.recipe} on {options.shape}, {target.device}, {torch.get_num_threads()} threads; "
          f"{options.rows * options.row_length} tokens a step\n\n| states | MiB a batch | make, ms | decode, ms | "
          "batches ahead | steps/s | waiting, % |\n|---|--:|--:|--:|--:|--:|--:|")
    with tempfile.TemporaryDirectory(dir=options.out) as name, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        folder = Path(name)
        manifest = write_data(folder, target, options.conversations, options.row_length)
        for form in ("computed", *options.formats):
            config = BatchConfig(row_length=options.row_length, rows_per_batch=options.rows, states="computed")
            if form != "computed":
                write_states(folder, target, manifest, module.drafter.taps, form)
                config = replace(config, states="stored", states_format=form)
            found, (made, decoded) = measure(module, folder, config, options.ahead, options.steps)
            kinds = 0 if form == "computed" else len(state_names(module.drafter.taps))
            size = kinds and kinds * options.rows * options.row_length * FORMATS[form].token_bytes(target.hidden_size)
            for ahead, waited in found.items():
                print(f"| {form} | {size / 2**20:.1f} | {1000 * made:.1f} | {1000 * decoded:.1f} | {ahead} | "
                      f"{waited.steps_per_second:.2f} | {100 * waited.share:.2f} |", flush=True)


if __name__ == "__main__":
    main()
