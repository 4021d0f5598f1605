"""The G-test of observed counts against an expected distribution."""

import torch
from draftsmith.modules import (
    TokenTree,
)
from draftsmith.modules.verification.sampling import draw
from torch import Tensor


def g_statistic(tree: TokenTree, accepted: object, exact: Tensor, generator: torch.Generator) -> tuple[float, int]:
    """(G of the first two emitted tokens, cells); a row that emitted one goes on with the target's own next token."""
    path, counts, bonus = accepted.path_BK, accepted.counts_B, accepted.bonus_B  # type: ignore[attr-defined]
    child = tree.tokens_BN.gather(1, path[:, 1:])
    first = torch.where(counts > 1, child[:, 0], bonus)
    own = draw(exact[first], torch.rand(len(first), dtype=torch.float64, generator=generator))
    second = torch.where(counts > 2, child[:, 1], torch.where(counts == 2, bonus, own))
    size = len(exact)
    seen = torch.bincount(first * size + second, minlength=size * size).double()
    wanted = (exact[tree.tokens_BN[0, 0]][:, None] * exact).flatten() * len(first)
    rare = wanted < 5
    seen = torch.cat([seen[~rare], seen[rare].sum()[None]])
    wanted = torch.cat([wanted[~rare], wanted[rare].sum()[None]])
    cells = int((wanted > 0).sum())
    return float(2 * torch.special.xlogy(seen, seen / wanted.clamp(min=1e-9)).sum()), cells


def chi2_bound(cells: int) -> float:
    """Value that G exceeds by chance once in a thousand times."""
    from scipy.stats import chi2

    return float(chi2.isf(1e-3, cells - 1))
