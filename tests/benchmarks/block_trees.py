"""Trees of block drafters in two ways, at equal nodes: corrected node by node, and from the slots' marginals.

    python tests/benchmarks/block_trees.py --artifact runs/dspark/artifact runs/dflash/artifact [--nodes 5 16 32]
        [--prompts FILE] [--limit 24] [--new-tokens 64] [--batch 1]

The likeliest N - 1 paths are drafted, by products of probabilities: of *corrected* ones, where a guess depends on the
tokens before it on its path; or of *marginals*, where only the first slot is corrected, by the root, and all nodes of a
level have the same children. Greedy, trees are EAGLE-2's; at temperature 1 also those of DySpec, whose tokens are
sampled. A chain is the corrected likeliest one, or a sampled one. Each row is decoded after a warm-up of one prompt.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from draftsmith.data import read_prompts
from draftsmith.export import load_artifact
from draftsmith.modules import (
    BlockDraft,
    DecodeSettings,
    Proposer,
    Request,
    Scores,
    Target,
    TargetConfig,
    Topology,
    decode,
)
from draftsmith.modules.drafters.block import BlockState
from draftsmith.modules.drafters.parts.feature_drafter import FeatureDrafter
from draftsmith.modules.interfaces.proposer import DraftState, Frontier
from draftsmith.modules.policies.registry import policy_named
from draftsmith.recipes.chat_settings import (
    ARTIFACT_TARGET,
    TemplateConfig,
    artifact_target,
    handwritten_prompts,
    prompt_sets,
)
from support.wrapped_drafter import Wrapped


class Marginals(Wrapped):
    """A drafter of blocks whose correction is silent after the first slot: one call scores all levels."""

    inner: BlockDraft

    def expand(self, state: DraftState, frontier: Frontier) -> Scores:
        found, drafter = self.inner.expand(state, frontier), self.inner
        if drafter.config.correction == "none" or not isinstance(state, BlockState):
            return found
        slots_RKD = state.slots_RKX[:, 1:, : drafter.hidden_size]
        with torch.no_grad(), drafter.packing.installed():
            alone_RKQ = FeatureDrafter.project(drafter, slots_RKD, 0).to(found.log_probs_BFHQ.dtype).log_softmax(-1)
        first_R1Q: Tensor = found.log_probs_BFHQ[:, 0]
        if found.candidates_BFHQ is not None:
            nowhere_R1Q = first_R1Q.new_full((len(first_R1Q), 1, drafter.vocab_size), -torch.inf)
            first_R1Q = nowhere_R1Q.scatter(-1, found.candidates_BFHQ[:, 0], first_R1Q)
        return Scores(log_probs_BFHQ=torch.cat([first_R1Q, alone_RKQ], dim=1)[:, None], token_ids_Q=drafter.token_ids)


@dataclass(frozen=True, kw_only=True)
class Row:
    """Figures of one way to draft."""

    temperature: float
    policy: str
    way: str
    accepted_length: float
    """New tokens per pass, the target's own included."""
    draft_share: float
    """Drafting seconds of a pass, over all of its seconds."""


def measured(target: Target, drafter: BlockDraft, prompts: Sequence[tuple[int, ...]], nodes: Sequence[int],
             new_tokens: int, batch: int) -> Iterator[Row]:
    """Figures of chains and trees, both ways where there is a correction."""
    plain = drafter.config.correction == "none"
    ways: dict[str, Proposer] = {"marginals": drafter} if plain else {"corrected": drafter,
                                                                      "marginals": Marginals(drafter)}
    steps = drafter.config.num_steps
    for temperature in (0.0, 1.0):
        names = [f"chain-{steps}", *(f"eagle2-{count}" for count in nodes)]
        names += [f"sampled-chain-{steps}", *(f"dyspec-{count}" for count in nodes)] if temperature else []
        for name in names:
            for way, proposer in ways.items():
                policy = policy_named(name, Topology.chain(steps), proposer)
                settings = DecodeSettings(batch_size=batch)
                decode(target, [Request(prompts[0], 0, 8, temperature)], settings, drafter=proposer, policy=policy)
                requests = [Request(prompt, row, new_tokens, temperature) for row, prompt in enumerate(prompts)]
                found = decode(target, requests, settings, drafter=proposer, policy=policy)
                stats = found.stats
                yield Row(temperature=temperature, policy=name, way=way, accepted_length=found.accepted_length,
                          draft_share=stats.draft_seconds / (stats.draft_seconds + stats.target_seconds))


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a table for each artifact."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--artifact", type=Path, nargs="+", required=True, help="folders of artifacts of the family")
    parser.add_argument("--target", default=ARTIFACT_TARGET, help="name of the target, the artifact's by default")
    parser.add_argument("--prompts", type=Path, help="JSONL file of prompts; the 80 hand-written ones without")
    parser.add_argument("--nodes", type=int, nargs="+", default=[5, 16, 32], help="nodes of trees, the root included")
    parser.add_argument("--limit", type=int, default=24, help="number of prompts, at equal distances")
    parser.add_argument("--new-tokens", type=int, default=64, help="tokens of an answer")
    parser.add_argument("--batch", type=int, default=1, help="answers written at once")
    options = parser.parse_args(arguments)
    given = handwritten_prompts() if options.prompts is None else read_prompts(options.prompts)
    for folder in options.artifact:
        target = artifact_target(folder, TargetConfig(name=options.target))
        artifact = load_artifact(folder, target)
        if not isinstance(artifact.drafter, BlockDraft):
            parser.error(f"{folder} holds a drafter of the family {artifact.drafter.family}, not of blocks")
        questions = prompt_sets(TemplateConfig().build(target), {"all": given})["all"]
        prompts = [tuple(one.prompt([])) for one in questions[:: max(1, len(questions) // options.limit)]]
        print(f"\n{folder}, {len(prompts[: options.limit])} prompts\n")
        print("| temperature | policy | guesses | accepted length | share of drafting |\n|---|---|---|---|---|")
        for row in measured(artifact.target, artifact.drafter, prompts[: options.limit], options.nodes,
                            options.new_tokens, options.batch):
            print(f"| {row.temperature:g} | {row.policy} | {row.way} | {row.accepted_length:.3f} | "
                  f"{row.draft_share:.1%} |", flush=True)


if __name__ == "__main__":
    main()
