"""Search of the target's layers that a draft language model copies, by removing blocks of layers.

    python tests/benchmarks/layer_search.py --data runs/fastdraft/data --keep 2 [--fixed 0,29] [--tokens N] [--block N]

Of all blocks of neighbouring layers, the one without which the rest predicts the target's held-out answers best is
removed, until as many layers are left as are kept; no weight is trained. The table has the loss of each choice, also of
the fixed one, and the last line the words with which a recipe copies the layers that were found.
"""

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from draftsmith.data import Manifest
from draftsmith.data.store.token_store import TokenShard
from draftsmith.modules import DEFAULT_NAME, Features, Target, TargetConfig, UserError, load_target
from draftsmith.modules.target.partial_passes import skipping
from draftsmith.recipes.doctor.draft_checks import greedy_rows

Score = Callable[[tuple[int, ...]], float]


def held_out(folder: Path, most: int) -> list[Features]:
    """Rows of held-out greedy answers with at least so many labels together, if there are as many."""
    found, count = list[Features](), 0
    for record in Manifest.load(folder).split("validation"):
        shard = TokenShard.read(folder / record.file, record.sha256)
        for row in greedy_rows(shard, shard.num_rows):
            if count < most:
                found.append(row)
                count += int(row.labels(1)[1].sum())
    if not found:
        raise UserError(f"{folder} holds no held-out answer; finish it with draftsmith distill")
    return found


@torch.no_grad()
def excerpt_loss(target: Target, rows: Sequence[Features], kept: Sequence[int]) -> float:
    """Mean cross entropy, in nats, with the labels of these rows, of the target with these layers alone."""
    total, count = 0.0, 0
    with skipping(target.layers, kept):
        for row in rows:
            labels_BL, valid_BL = row.labels(1)
            logits_NV = target.logits(target.encode(row).final()[valid_BL])
            total += float(torch.nn.functional.cross_entropy(logits_NV.float(), labels_BL[valid_BL], reduction="sum"))
            count += int(valid_BL.sum())
    return total / count


def search(score: Score, layers: int, keep: int, block: int, say: Callable[[str], None] = print) -> tuple[int, ...]:
    """The layers that are left when blocks of at most `block` neighbours are removed, the least missed one first."""
    if not 1 <= keep <= layers:
        raise UserError(f"keep must lie between 1 and {layers}, the layers of the target, got {keep}")
    kept = tuple(range(layers))
    while len(kept) > keep:
        size = min(block, len(kept) - keep)
        losses = {left: score(left) for first in range(len(kept) - size + 1)
                  if (left := kept[:first] + kept[first + size :])}
        kept = min(losses, key=lambda left: losses[left])
        say(f"{len(kept):6} {losses[kept]:8.3f}  {list(kept)}")
    return kept


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--data", type=Path, required=True, help="folder of distilled data")
    parser.add_argument("--keep", type=int, default=2, help="layers of the draft")
    parser.add_argument("--fixed", default="", help="layers of a choice to compare with, such as 0,29")
    parser.add_argument("--tokens", type=int, default=2000, help="labels of held-out answers")
    parser.add_argument("--block", type=int, help="most layers of a block; a quarter of those to remove by default")
    parser.add_argument("--target", default=DEFAULT_NAME, help="hub id, folder, GGUF file or name")
    options = parser.parse_args()
    target, rows = load_target(TargetConfig(name=options.target)), held_out(options.data, options.tokens)
    count, scored = target.num_layers, dict[tuple[int, ...], float]()

    def score(kept: tuple[int, ...]) -> float:
        if kept not in scored:
            scored[kept] = excerpt_loss(target, rows, kept)
        return scored[kept]

    print("layers  loss (nats)")
    print(f"{count:6} {score(tuple(range(count))):8.3f}  all")
    found = search(score, count, options.keep, options.block or -(-(count - options.keep) // 4))
    if options.fixed:
        fixed = tuple(int(layer) for layer in options.fixed.split(","))
        print(f"{len(fixed):6} {score(fixed):8.3f}  {list(fixed)}, the fixed choice")
    print(f"--drafter.layers '{list(found)}'")


if __name__ == "__main__":
    main()
