"""The comparison of stopping rules: each stops where its chain does, and tokens are read off between two points."""

from dataclasses import replace

import pytest
import torch
from benchmarks.drafted_tokens import accepted, drafted_at, rules
from draftsmith.modules import (
    EarlyExit,
    MaxProbability,
    PathProbability,
    RejectionRisk,
    Rollouts,
    SamplingSetting,
    StoppedChain,
    StoppingRule,
)
from support.tables import DepthDrafter
from torch import Tensor

PEAKS = [0.9, 0.8, 0.4, 0.95, 0.7, 0.9]
ESTIMATES = [0.9, 0.7, 0.95, 0.4, 0.9, 0.9]


class Stated(DepthDrafter):
    """The state at each token is the log of its estimated acceptance."""

    def expand(self, state, frontier):  # type: ignore[no-untyped-def]
        states = torch.tensor([1.0, *ESTIMATES[:-1]]).log()
        return replace(super().expand(state, frontier), states_BFHD=states[None, None, :, None])


def first_component(state_BD: Tensor) -> Tensor:
    return state_BD[:, 0]


def made(bound: float) -> dict[str, StoppingRule]:
    return {"max q, before": MaxProbability(bound), "max q, after": EarlyExit(bound),
            "product of q": PathProbability(bound),
            "acceptance head": RejectionRisk(first_component, SamplingSetting(), 1 - bound, 1)}


@pytest.mark.parametrize("bound", [0.02, 0.3, 0.45, 0.75, 0.85, 0.97])
def test_rules_stop_where_their_chains_stop(bound: float) -> None:
    tables = torch.stack([torch.full((8,), (1 - peak) / 7) for peak in PEAKS])
    tables[:, 3] = torch.tensor(PEAKS)
    chains = Rollouts(states_CTD=torch.zeros(1, 6, 1), chances_CT=torch.ones(1, 6),
                      log_probs_CT=torch.tensor([PEAKS]).log(), peaks_CT=torch.tensor([PEAKS]).log())
    found = rules(chains, torch.tensor([ESTIMATES]))
    drafter = Stated(tables.log())
    for name, rule in made(bound).items():
        tree = StoppedChain(6, rule).grow(drafter, drafter.start(1, 64), torch.tensor([7]))
        assert int(found[name](bound)) == int(tree.real_BN.sum()) - 1, name


def test_accepted_lengths_and_tokens_between_two_points() -> None:
    chances = torch.tensor([[1.0, 0.5, 0.5], [0.5, 0.5, 0.0]])
    assert accepted(chances, torch.tensor([3, 1])) == pytest.approx(1 + (1 + 0.5 + 0.25 + 0.5) / 2)
    assert accepted(chances, torch.tensor([0, 0])) == 1.0

    def lengths(bound: float) -> Tensor:
        return torch.full((2,), 1 if bound > 0.5 else 2)

    assert drafted_at(chances, lengths, 1.75) == pytest.approx(1.0)
    assert drafted_at(chances, lengths, 1.75 + 0.375 / 2) == pytest.approx(1.5)
    assert drafted_at(chances, lengths, 2.5) != drafted_at(chances, lengths, 2.5)
