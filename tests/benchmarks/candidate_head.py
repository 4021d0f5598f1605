"""EAGLE-4's candidate head against the whole output layer and a reduced vocabulary of equal cost: accepted length, and
the output layer's share of a draft step.

    draftsmith run --config eagle4_draft
    draftsmith run --config eagle4 --drafter.head_rank 32 --out runs/eagle4-32     # and 64, 128
    python tests/benchmarks/candidate_head.py --draft runs/eagle4_draft/artifact \\
        --heads runs/eagle4-32/artifact runs/eagle4-64/artifact runs/eagle4-128/artifact

Accepted lengths are exact counts along held-out answers, of two halves each with a tree of 64 nodes that is searched on
the other. The reduced vocabulary of a head has the draft's own rows of the commonest tokens, without further training,
as many as take as many products as the head: rank x (width + tokens) + candidates x width for one node. Seconds are the
fastest of --repeats draft steps of one node and of the output layer in them; all drafters take turns.
"""

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from draftsmith.export import load_artifact
from draftsmith.modules import Eagle3, Features, Target, UserError
from draftsmith.modules.target.draft_vocabulary import choose
from draftsmith.recipes.commands.pipeline import COMMANDS, encoded, held_out_rows
from draftsmith.recipes.stages.workspace import Workspace

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks.recipe_trials import accepted_lengths
from support.answers import frontier, observed


def trimmed(draft: Eagle3, head: Eagle3, target: Target, counts_V: torch.Tensor) -> Eagle3:
    """The draft over the commonest tokens, for as many products a node as the head takes."""
    width, rank = draft.block.hidden_size, head.config.head_rank or 0
    size = (rank * (width + target.vocab_size) + head.config.candidates * width) // width
    config = replace(draft.config, vocabulary_size=size)
    return Eagle3.create(config, target, choose(counts_V, size, always=target.eos_ids), draft).to(draft.dtype).eval()


class Timed:
    """A drafter with the fastest seconds of its draft steps and of its output layer."""

    def __init__(self, drafter: Eagle3, target: Target) -> None:
        self.drafter, self.step, self.output = drafter, float("inf"), float("inf")
        tokens = target.readable_tokens(16)[None]
        features = target.encode(Features.from_rows([(tokens[0].tolist(), [True] * 16)]), drafter.taps)
        self.seen = observed(features, [0], 0, [15])
        self.tokens = tokens[:, -1:]

    @torch.no_grad()
    def turn(self) -> None:
        """Time one more step: the second of a chain, which runs the layers too."""
        drafter = self.drafter
        state = drafter.start(1, 64)
        drafter.observe(state, torch.tensor([0]), self.seen)
        drafter.expand(state, frontier([0], [-1], self.tokens))
        started = time.perf_counter()
        scores = drafter.expand(state, frontier([1], [0], self.tokens))
        self.step = min(self.step, time.perf_counter() - started)
        assert scores.states_BFHD is not None
        with drafter.packing.installed():
            started = time.perf_counter()
            drafter.scored(scores.states_BFHD[:, :, 0])
            self.output = min(self.output, time.perf_counter() - started)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure all drafters and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--recipe", default="eagle4_draft", help="the draft's recipe, which names target and data")
    parser.add_argument("--data", type=Path, default=Path("runs/eagle4_draft/data"), help="folder of finished data")
    parser.add_argument("--draft", type=Path, required=True, help="artifact of the draft with its whole output layer")
    parser.add_argument("--heads", type=Path, nargs="+", required=True, help="artifacts with candidate heads for it")
    parser.add_argument("--repeats", type=int, default=40, help="draft steps of which the fastest counts")
    given = parser.parse_args(arguments)
    try:
        workspace = Workspace(COMMANDS["run"].parse(["--config", given.recipe, "--data", str(given.data)]))
        target, counts_V = workspace.target, workspace.label_weights
        found: dict[str, Eagle3] = {}
        for folder in (given.draft, *given.heads):
            drafter = load_artifact(folder, target).drafter
            if not isinstance(drafter, Eagle3) or (drafter.head is None) != (folder == given.draft):
                raise UserError(f"{folder} holds no EAGLE-3 drafter {'without' if folder == given.draft else 'with'} a "
                                "candidate head; give others")
            found["whole output layer" if drafter.head is None else
                  f"rank {drafter.config.head_rank}, {drafter.config.candidates} candidates"] = drafter
    except UserError as error:
        raise SystemExit(f"error: {error}") from error
    draft = found["whole output layer"]
    for head in list(found.values())[1:]:
        drafter = trimmed(draft, head, target, counts_V)
        found[f"{drafter.config.vocabulary_size:,} tokens, as dear as rank {head.config.head_rank}"] = drafter
    timed = {name: Timed(drafter, target) for name, drafter in found.items()}
    for _ in range(given.repeats):
        for one in timed.values():
            one.turn()
    print("| output | accepted length | ratio | step, ms | output, ms | share |\n|---|--:|--:|--:|--:|--:|")
    whole = 0.0
    for name, one in timed.items():
        with target.reproducible(), torch.no_grad():
            rows = encoded(workspace, workspace.tried, held_out_rows(workspace, workspace.tried).whole())
            length, *_ = accepted_lengths(one.drafter, rows, rows[:1])
        whole = whole or length
        print(f"| {name} | {length:.3f} | {length / whole:.3f} | {1e3 * one.step:.2f} | {1e3 * one.output:.2f} | "
              f"{one.output / one.step:.0%} |", flush=True)


if __name__ == "__main__":
    main()
