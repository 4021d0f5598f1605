"""Hand-written observations for tests of drafters without a target."""

import torch
from draftsmith.modules import Frontier, Observation, Proposer, Verified
from draftsmith.modules.interfaces.proposer import DraftState
from torch import Tensor

ROOT = Frontier(nodes_BF=torch.tensor([[0]]), parents_BF=torch.tensor([[-1]]), tokens_BF=torch.tensor([[0]]))


def observation(texts: list[list[int]], verified: Verified | None = None) -> Observation:
    """The rows' new tokens, each row's last one its new root; shorter rows are padded with token 0."""
    width = max(map(len, texts)) - 1
    return Observation(
        tokens_BN=torch.tensor([[*text[:-1], *([0] * (width - len(text) + 1))] for text in texts], dtype=torch.long),
        counts_B=torch.tensor([len(text) - 1 for text in texts]), final_BND=torch.zeros(len(texts), width, 1), taps={},
        roots_B=torch.tensor([text[-1] for text in texts]), verified=verified)


def observe(drafter: Proposer, state: DraftState, rows: list[int], texts: list[list[int]]) -> None:
    drafter.observe(state, torch.tensor(rows), observation(texts))


def frontier(nodes: list[int], parents: list[int], tokens: list[list[int]]) -> Frontier:
    """A frontier with the same nodes in every row."""
    rows = len(tokens)
    return Frontier(nodes_BF=torch.tensor([nodes] * rows), parents_BF=torch.tensor([parents] * rows),
                    tokens_BF=torch.tensor(tokens))


def logits_of(successors: list[list[int]], vocab_size: int) -> Tensor:
    """Logits [1, M, V] whose most probable tokens at each node are the given ones, in order."""
    logits = torch.full((1, len(successors), vocab_size), -20.0)
    for node, tokens in enumerate(successors):
        for rank, token in enumerate(tokens):
            logits[0, node, token] = float(len(tokens) - rank)
    return logits
