"""Every policy, trees by the ranks of their nodes or by chance, and G-tests of what one pass emits."""

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from draftsmith.modules import (
    Accepted,
    BeamTree,
    Drafter,
    DySpecTree,
    Eagle2Tree,
    Generation,
    Medusa,
    MedusaConfig,
    PathProbability,
    Policy,
    Rule,
    SampledChain,
    SampledTree,
    Sampling,
    StaticTree,
    StoppedChain,
    Target,
    TargetRows,
    TokenTree,
    Topology,
)
from draftsmith.modules.policies.paid import PaidTree
from draftsmith.modules.policies.stopping_chains import Drafted, StoppingRule
from draftsmith.modules.verification.acceptance_rules import Chances, exact_rule
from draftsmith.modules.verification.sampling import draw
from support.drafters import draws_for
from torch import Tensor


def branching(*widths: int, temperature: float | None = None) -> SampledTree:
    """The tree in which every node of depth d has `widths[d]` children."""
    paths: list[tuple[int, ...]] = [()]
    for depth, width in enumerate(widths):
        paths += [(*path, rank) for path in paths if len(path) == depth for rank in range(width)]
    return SampledTree(Topology.from_paths(paths), temperature)


def paths(topology: Topology) -> tuple[tuple[int, ...], ...]:
    """The ranks that lead from the root to each node; empty for the root."""
    found: list[tuple[int, ...]] = [()]
    for parent, rank in zip(topology.parents[1:], topology.ranks[1:], strict=True):
        found.append((*found[parent], rank))
    return tuple(found)


def random_parents(rows: int, size: int, generator: torch.Generator) -> Tensor:
    """Parents of the nodes of random trees, [rows, size]."""
    return torch.tensor([[-1] + [int(torch.randint(0, node, (), generator=generator)) for node in range(1, size)]
                         for _ in range(rows)])


def random_trees(rows: int, size: int, generator: torch.Generator) -> TokenTree:
    """Random trees of tokens that are no special ones."""
    parents = random_parents(rows, size, generator)
    return TokenTree.from_parents(torch.randint(3, 100, (rows, size), generator=generator), parents)


def commit_path(rows: TargetRows, tree: TokenTree, ends: list[int]) -> list[list[int]]:
    """Commit the path to one node of each row; returns its tokens."""
    paths = [tree.ancestors_BNN[row, end].nonzero()[:, 0].tolist() for row, end in enumerate(ends)]
    counts, longest = [len(path) for path in paths], max(map(len, paths))
    padded = torch.tensor([path + list(range(len(path), longest)) for path in paths])
    rows.commit(padded, torch.tensor(counts), counts)
    return [tree.tokens_BN[row, path].tolist() for row, path in enumerate(paths)]


def medusa(target: Target) -> Medusa:
    heads = Medusa.create(MedusaConfig(num_heads=3), target)
    with torch.no_grad():
        for parameter in heads.parameters():
            parameter.normal_(std=0.5)
    return heads


class Turns(PaidTree):
    """Sizes by chance, whatever pays: no drafts for some passes, then drafts again."""

    def __init__(self, topology: Topology) -> None:
        super().__init__(topology)
        self.chance = random.Random(0)

    def plan(self, rows: int) -> None:
        self.size = self.chance.choice((1, 2, self.sizes[-1]))


class FirstGuesses:
    """An observer that keeps the first guess of each pass by the request's index and the tokens that were accepted
    before: it depends on what the drafter has observed, not on the size of the tree."""

    def __init__(self) -> None:
        self.found: dict[tuple[int, int], int] = {}
        self._before: dict[int, int] = {}

    def __call__(self, tree: TokenTree, accepted: Accepted, generations: Sequence[Generation]) -> None:
        for row, one in enumerate(generations):
            index = one.request.index
            before = self._before.get(index, 0)
            if tree.size > 1 and bool(tree.real_BN[row, 1].cpu()):
                self.found[index, before] = int(tree.tokens_BN[row, 1].cpu())
            self._before[index] = before + int(accepted.counts_B[row].cpu())

    def agree(self, other: "FirstGuesses", least: int) -> bool:
        """True if there are so many common places, and all have equal guesses."""
        common = self.found.keys() & other.found.keys()
        return len(common) >= least and all(self.found[one] == other.found[one] for one in common)


EVERY: list[Policy] = [StaticTree(Topology((-1, 0, 0, 1, 3), (0, 0, 1, 0, 1))), Eagle2Tree(9, 6, 4),
                       DySpecTree(9, 6, 4), branching(2, 2, 1), BeamTree(3, 3),
                       StoppedChain(5, PathProbability(0.02), check_every=0), SampledChain(
                           5, PathProbability(0.02), check_every=0)]


@dataclass(frozen=True)
class FixedLength(StoppingRule):
    """Drafts so many tokens, whatever they are."""

    length: int

    def before(self, drafted: Drafted, peak_B: Tensor) -> Tensor:
        return torch.full_like(peak_B, drafted.length >= self.length, dtype=torch.bool)


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
