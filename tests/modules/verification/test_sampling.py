"""Acceptance rules: the walk against a plain twin, the distribution by enumeration, and wrong rules that must fail."""

import itertools

import pytest
import torch
from draftsmith.modules import Sampling, TokenTree, Topology, choose, follow
from draftsmith.modules.verification.sampling import argmax, draw, probabilities
from references.walk import walk

P = torch.tensor([0.4, 0.25, 0.2, 0.1, 0.05], dtype=torch.float64)


def greedy(batch: int) -> Sampling:
    return Sampling(temperature_B=torch.zeros(batch))


def test_follow_equals_the_plain_walk_on_random_trees() -> None:
    generator = torch.Generator().manual_seed(0)
    for _ in range(300):
        size, batch = int(torch.randint(1, 12, (), generator=generator)), 3
        parents = torch.stack(
            [
                torch.tensor([-1] + [int(torch.randint(0, n, (), generator=generator)) for n in range(1, size)])
                for _ in range(batch)
            ]
        )
        tokens = torch.randint(0, 3, (batch, size), generator=generator)
        real = torch.rand(batch, size, generator=generator) > 0.1
        real[:, 0] = True
        table = torch.randint(0, 3, (1000,), generator=generator)
        # A target's choice depends on the tokens of the path alone: duplicate siblings get the same one.
        choices = torch.zeros_like(tokens)
        keys = torch.zeros_like(tokens)
        for node in range(size):
            above = keys[torch.arange(batch), parents[:, node]] if node else torch.zeros(batch, dtype=torch.long)
            keys[:, node] = (above * 4 + tokens[:, node] + 1) % 997
            choices[:, node] = table[keys[:, node]]
        tree = TokenTree.from_parents(tokens, parents, real)
        accepted = follow(tree, choices)
        for row in range(batch):
            path = accepted.path_BK[row, : int(accepted.counts_B[row])].tolist()
            emitted = [int(tokens[row, node]) for node in path[1:]] + [int(accepted.bonus_B[row])]
            assert emitted == walk(
                tokens[row].tolist(), parents[row].tolist(), real[row].tolist(), choices[row].tolist()
            )
            beyond = accepted.path_BK[row, int(accepted.counts_B[row]) :].tolist()
            assert beyond == list(range(int(accepted.counts_B[row]), accepted.path_BK.shape[1]))


def test_filler_tokens_beyond_a_short_path_are_never_accepted() -> None:
    tokens = torch.tensor([[5, 1, 0, 0]])
    tree = TokenTree.from_parents(tokens, torch.tensor([[-1, 0, 1, 2]]), torch.tensor([[True, True, False, False]]))
    # The target's choice is the filler id everywhere behind node 1.
    accepted = follow(tree, torch.tensor([[1, 0, 0, 0]]))
    assert accepted.counts_B.tolist() == [2]
    assert accepted.bonus_B.tolist() == [0]


@pytest.mark.parametrize("width", [1, 2, 3, 4])
def test_equality_verification_has_the_targets_distribution(width: int) -> None:
    """Two levels deep, by enumeration over a fine grid of uniforms: the emitted pair has the target's law."""
    second = torch.stack([P.roll(shift) for shift in range(5)])
    parents, ranks = [-1], [0]
    for rank in range(width):
        parents.append(0)
        ranks.append(rank)
    for child, rank in itertools.product(range(1, width + 1), range(2)):
        parents.append(child)
        ranks.append(rank)
    topology = Topology(tuple(parents), tuple(ranks))
    tokens = torch.tensor([0, *range(width), *[1, 3] * width])
    grid = (torch.arange(40, dtype=torch.float64) + 0.5) / 40
    pairs = torch.cartesian_prod(grid, grid)
    logits = torch.stack([P, *[second[token] for token in range(width)], *[P] * (2 * width)]).log()
    tree = topology.plant(tokens.expand(len(pairs), -1))
    places = torch.tensor(topology.depths).clamp(max=1)
    choices = choose(
        logits.expand(len(pairs), -1, -1),
        pairs[:, places],
        Sampling(temperature_B=torch.ones(len(pairs)), hot_rows=tuple(range(len(pairs)))),
    )
    accepted = follow(tree, choices)
    counts = torch.zeros(5, 5, dtype=torch.float64)
    for row, (_u0, u1) in enumerate(pairs):
        path = accepted.path_BK[row, : int(accepted.counts_B[row])].tolist()
        emitted = [int(tokens[node]) for node in path[1:]] + [int(accepted.bonus_B[row])]
        if len(emitted) == 1:
            emitted.append(int(draw(second[emitted[0]], u1)))
        counts[emitted[0], emitted[1]] += 1 / len(pairs)
    torch.testing.assert_close(counts, P[:, None] * second, atol=1e-9, rtol=0)


def test_probabilities_follow_transformers_processors() -> None:
    from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    logits = torch.cat([torch.randn(5, 700, dtype=torch.float64), 6 * torch.randn(4, 700, dtype=torch.float64)])
    for temperature, top_k, top_p in itertools.product((0.5, 1.0, 1.7), (0, 1, 7, 60), (1.0, 0.9, 0.3)):
        expected = TemperatureLogitsWarper(temperature)(None, logits)
        if top_k:
            expected = TopKLogitsWarper(top_k)(None, expected)
        if top_p < 1:
            expected = TopPLogitsWarper(top_p)(None, expected)
        found = probabilities(logits, torch.tensor([[temperature]], dtype=torch.float64), top_k, top_p)
        torch.testing.assert_close(found, expected.softmax(-1))


def test_draw_never_takes_an_impossible_token() -> None:
    probs = torch.tensor([0.0, 0.5, 0.0, 0.5, 0.0])
    uniforms = torch.tensor([0.0, 0.49999, 0.5, 0.99999999, 1 - 2**-53], dtype=torch.float64)
    assert draw(probs.expand(5, -1), uniforms).tolist() == [1, 1, 3, 3, 3]


def test_greedy_and_sampled_rows_share_a_batch() -> None:
    logits = torch.log(P).expand(2, 1, -1)
    chosen = choose(
        logits,
        torch.full((2, 1), 0.99, dtype=torch.float64),
        Sampling(temperature_B=torch.tensor([0.0, 1.0]), hot_rows=(1,)),
    )
    assert chosen.tolist() == [[0], [4]]
    assert choose(logits, torch.zeros(2, 1), greedy(2)).tolist() == [[0], [0]]


@pytest.mark.parametrize("entries", [1, 100, 256, 1280, 1283])
def test_the_quick_argmax_is_torchs(entries: int) -> None:
    """Few levels make ties, which the first entry wins; a NaN counts as the largest, and nothing but -inf is a tie."""
    logits = torch.randint(0, 3, (2, 50, entries), generator=torch.Generator().manual_seed(0)).float()
    assert torch.equal(argmax(logits), logits.argmax(-1))
    logits[0, :20, entries // 2] = float("nan")
    logits[1, 3] = -torch.inf
    assert torch.equal(argmax(logits), logits.argmax(-1))
