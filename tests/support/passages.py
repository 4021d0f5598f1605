"""A tiny target and drafter trained on text of two kinds: passages in which every token determines the next, and
passages of random tokens, so that drafts are accepted whole in some places and hardly ever in others."""

import torch
from draftsmith.modules import Features, Medusa, MedusaConfig, Target
from draftsmith.modules.target.loading.tiny_model import tiny_model, tiny_tokenizer
from torch import Tensor
from torch.nn.functional import cross_entropy

SURE, UNSURE = tuple(range(30, 46)), tuple(range(60, 92))
"""The cycle of the sure passages, and the tokens of the others."""
CHANGE = 1 / 12
"""Probability that a passage ends after a token."""
LENGTH, ROWS = 64, 16


def passages(number: int) -> Tensor:
    """Rows of text, [ROWS, LENGTH]."""
    generator = torch.Generator().manual_seed(number)
    sure_B = torch.rand(ROWS, generator=generator) < 0.5
    token_B, rows = torch.randint(len(SURE), (ROWS,), generator=generator), []
    for _ in range(LENGTH):
        sure_B ^= torch.rand(ROWS, generator=generator) < CHANGE
        token_B = (token_B + 1) % len(SURE)
        drawn_B = torch.randint(len(UNSURE), (ROWS,), generator=generator)
        rows.append(torch.where(sure_B, SURE[0] + token_B, UNSURE[0] + drawn_B))
    return torch.stack(rows, dim=1)


def trained_target(steps: int = 150) -> Target:
    """A target that has learnt the passages."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        model = tiny_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(steps):
        tokens_BL = passages(step)
        loss = cross_entropy(model(tokens_BL).logits[:, :-1].flatten(0, 1), tokens_BL[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return Target(model.eval().requires_grad_(False), tiny_tokenizer(), name="passages")


def trained_drafter(target: Target, steps: int = 80) -> Medusa:
    """Heads that have learnt them too."""
    drafter = Medusa.create(MedusaConfig(num_heads=3), target).train()
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=1e-2)
    for step in range(steps):
        rows = passages(1000 + step).tolist()
        batch = target.encode(Features.from_rows([(row, [True] * LENGTH) for row in rows]))
        drafts = drafter(batch)
        losses = []
        for place, offset in enumerate(drafts.offsets):
            labels_BL, valid_BL = batch.labels(offset)
            logits_NV = drafter.project(drafts.hidden_BLKD[:, :, place][valid_BL], place)
            losses.append(cross_entropy(logits_NV, labels_BL[valid_BL]))
        optimizer.zero_grad()
        torch.stack(losses).sum().backward()
        optimizer.step()
    return drafter.eval()
