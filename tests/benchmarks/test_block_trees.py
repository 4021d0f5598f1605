"""Trees of block drafters from marginals: their scores by the plain drafter's, equal answers, a table."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks import block_trees
from benchmarks.block_trees import Marginals
from draftsmith.export import save_artifact
from draftsmith.modules import (
    BlockDraft,
    BlockDraftConfig,
    DecodeSettings,
    Features,
    Frontier,
    Observation,
    Request,
    Target,
    Topology,
    decode,
    policy_named,
)
from support.families import randomised


@pytest.mark.parametrize("correction", ["markov", "selector"])
def test_marginals_ignore_the_correction_after_the_first_slot(correction: Any, tiny_target: Target) -> None:
    config = BlockDraftConfig(block_size=3, num_layers=1, correction=correction, rank=4)
    drafter = randomised(BlockDraft.create(config, tiny_target))
    plain = BlockDraft.create(replace(config, correction="none"), tiny_target).eval()
    plain.load_state_dict({name: weight for name, weight in drafter.state_dict().items() if name in plain.state_dict()})
    features = tiny_target.encode(Features.from_rows([(list(range(20, 27)), [True] * 7)]), drafter.taps)
    found = {}
    for name, one in {"corrected": drafter, "plain": plain, "marginals": Marginals(drafter)}.items():
        state = one.start(1, 32)
        one.observe(state, torch.tensor([0]), Observation(
            tokens_BN=features.tokens_BL, counts_B=torch.tensor([7]), final_BND=features.final(), taps=features.taps,
            roots_B=torch.tensor([27])))
        found[name] = one.expand(state, Frontier(nodes_BF=torch.tensor([[0]]), tokens_BF=torch.tensor([[27]]),
                                                 parents_BF=torch.tensor([[-1]])))
    marginals = found["marginals"].log_probs_BFHQ[0, 0]
    torch.testing.assert_close(marginals[1:], found["plain"].log_probs_BFHQ[0, 0, 1:])
    best = marginals[0].topk(5)
    torch.testing.assert_close(best.values, found["corrected"].log_probs_BFHQ[0, 0, 0].topk(5).values)
    assert best.indices.tolist() == found["corrected"].best(5).tokens_BFHR[0, 0, 0].tolist()
    requests = [Request((5 + row, 9, 30), row, 12) for row in range(2)]
    expected = decode(tiny_target, requests, DecodeSettings(ignore_eos=True)).generations
    for name in ("eagle2-9", "chain-3"):
        policy = policy_named(name, Topology.chain(3), Marginals(drafter))
        drafted = decode(tiny_target, requests, DecodeSettings(ignore_eos=True), drafter=Marginals(drafter),
                         policy=policy).generations
        assert [one.tokens for one in drafted] == [one.tokens for one in expected]


@pytest.mark.long
def test_the_table_has_both_ways_where_there_is_a_correction(
    tiny_target: Target, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, config in {"state": BlockDraftConfig(block_size=2, num_layers=1, correction="state", rank=4),
                         "none": BlockDraftConfig(block_size=2, num_layers=1)}.items():
        save_artifact(tmp_path / name, randomised(BlockDraft.create(config, tiny_target)), tiny_target.identity, {},
                      Topology.chain(2))
    block_trees.main(["--artifact", str(tmp_path / "state"), str(tmp_path / "none"), "--nodes", "4", "--limit", "1",
                      "--new-tokens", "4"])
    rows = [line.split(" | ") for line in capsys.readouterr().out.splitlines() if "| chain" in line or "-4 |" in line]
    policies = ["chain-2", "eagle2-4", "chain-2", "eagle2-4", "dyspec-4"]
    assert [(row[1], row[2]) for row in rows] == [
        *((policy, way) for policy in policies for way in ("corrected", "marginals")),
        *((policy, "marginals") for policy in policies)]
    assert all(1 <= float(row[3]) <= 3 for row in rows)
