"""G-tests of what one pass emits against the target's distribution."""

import torch
from draftsmith.modules import Accepted, Drafter, Policy, Rule, Sampling, TokenTree
from draftsmith.modules.verification.acceptance_rules import Chances, exact_rule
from draftsmith.modules.verification.sampling import draw
from support.tables import draws_for
from torch import Tensor


def g_statistic(tree: TokenTree, accepted: Accepted, exact: Tensor, generator: torch.Generator) -> tuple[float, int]:
    """(G of the first two emitted tokens, cells); a row that emitted one goes on with the target's own next token."""
    path, counts, bonus = accepted.path_BK, accepted.counts_B, accepted.bonus_B
    child = torch.nn.functional.pad(tree.tokens_BN.gather(1, path[:, 1:]), (0, 2))
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


def pass_statistic(policy: Policy, drafter: Drafter, exact_VV: Tensor, temperature: float, *, rows: int,
                   rule: Rule | None = None) -> tuple[float, int]:
    """G of the first two tokens of one pass, and its cells.

    The target's logits are such that its distribution after any token is a row of `exact_VV` at every temperature, so
    that a low temperature does not make the test blind."""
    draws = draws_for(rows, temperature)
    tree = policy.grow(drafter, drafter.start(rows, 64), torch.full((rows,), len(exact_VV) - 1), draws)
    # Tests make the target's distribution once, before there is a device.
    exact_VV = exact_VV.to(tree.tokens_BN.device)
    generator = torch.Generator().manual_seed(5)
    choices = torch.rand(rows, tree.size, dtype=torch.float64, generator=generator)
    accepted = (rule or exact_rule(tree)).accept(
        tree, temperature * exact_VV.log()[tree.tokens_BN],
        Sampling(temperature_B=draws.temperature_B, sampling_rows=tuple(range(rows))),
        Chances(choices_BN=choices, tests_BN=draws.tests(tree.size)))
    return g_statistic(tree, accepted, exact_VV, generator)


def chi2_bound(cells: int, chance: float = 1e-3) -> float:
    """Value that G exceeds by chance with this probability."""
    from scipy.stats import chi2

    return float(chi2.isf(chance, cells - 1))
