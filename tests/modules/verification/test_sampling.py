"""Acceptance rules: the walk against a plain twin, the distribution by enumeration, and wrong rules that must fail."""

import itertools

import pytest
import torch
from draftsmith.modules import Sampling, TokenTree, Topology, choose, follow
from draftsmith.modules.target.tiny_model import tiny_model
from draftsmith.modules.verification.sampling import (
    GREATEST_TEMPERATURE,
    LEAST_TEMPERATURE,
    argmax,
    draw,
    probabilities,
)
from references.walk import walk
from transformers import GenerationConfig
from transformers.generation import LogitsProcessorList

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
    # The target's choice is the filler id everywhere after node 1.
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
        Sampling(temperature_B=torch.ones(len(pairs)), sampling_rows=tuple(range(len(pairs)))),
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


def processors(temperature: float, top_k: int, top_p: float, min_p: float) -> LogitsProcessorList:
    """The processors that `generate` applies for these settings, in its own order."""
    settings = GenerationConfig(do_sample=True, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p or None)
    return tiny_model()._get_logits_processor(settings)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("min_p", [0.0, 0.05, 0.4, 1.0])
@pytest.mark.parametrize("top_p", [1.0, 1 - 1e-9, 0.9, 0.3, 1e-9])
def test_probabilities_follow_the_processors_of_generate(top_p: float, min_p: float, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    logits = torch.cat([torch.randn(5, 700, dtype=dtype), 6 * torch.randn(4, 700, dtype=dtype)])
    for temperature, top_k in itertools.product((0.01, 0.5, 1.0, 1.7), (0, 1, 7, 60, 700, 9999)):
        expected = processors(temperature, top_k, top_p, min_p)(None, logits.clone()).softmax(-1)  # type: ignore[arg-type]
        found = probabilities(logits, torch.tensor([[temperature]], dtype=dtype), top_k, top_p, min_p)
        torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("entries", [9, 700])
def test_equally_likely_tokens_are_cut_as_in_transformers(entries: int) -> None:
    """Logits in half precision are often equal; the set must not depend on other rows. Transformers leaves it to its
    sort which of equal tokens stays, the last ones in small vocabularies; where a sum of hundreds of equal numbers
    meets the bound exactly, rounding decides about one of them."""
    torch.manual_seed(0)
    logits = torch.randint(0, 3, (30, entries)).double()
    for top_p, top_k in itertools.product((0.05, 0.3, 0.7, 0.95), (0, 3)):
        expected = processors(1.0, top_k, top_p, 0.0)(None, logits.clone()).softmax(-1)  # type: ignore[arg-type]
        found = probabilities(logits, torch.ones(1, 1, dtype=torch.float64), top_k, top_p)
        assert int(((found > 0).sum(-1) - (expected > 0).sum(-1)).abs().max()) <= (entries == 700)
        if entries == 9:
            torch.testing.assert_close(found, expected)
        for row in range(30):
            assert torch.equal(probabilities(logits[row : row + 1], torch.ones(1, 1).double(), top_k, top_p)[0],
                               found[row])


def test_min_p_reaches_the_choice_and_the_distribution() -> None:
    logits, temperature_B = P.log().expand(1, 3, -1), torch.ones(1)
    uniforms_BN = torch.full((1, 3), 0.999, dtype=torch.float64)
    for min_p, last in ((0.0, 4), (0.2, 3), (0.3, 2), (0.6, 1), (1.0, 0)):
        sampling = Sampling(temperature_B=temperature_B, min_p=min_p, sampling_rows=(0,))
        assert choose(logits, uniforms_BN, sampling).tolist() == [[last] * 3]
        expected = torch.where(min_p * P[0] <= P, P, 0)
        torch.testing.assert_close(sampling.distribution(logits)[0, 0], expected / expected.sum())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_temperatures_at_the_ends_of_the_range(dtype: torch.dtype) -> None:
    """Finite and normalised with the largest logits that models have; and why the range ends where it does."""
    torch.manual_seed(0)
    logits = 30 * torch.randn(1, 1, 500).to(dtype)
    logits[..., 400:] = torch.finfo(dtype).min
    for temperature in (LEAST_TEMPERATURE, 0.1, 1.0, GREATEST_TEMPERATURE):
        sampling = Sampling(temperature_B=torch.tensor([temperature]), top_p=0.99, min_p=0.001, sampling_rows=(0,))
        probs = sampling.distribution(logits)[0, 0]
        expected = (logits.double()[0, 0] / temperature).softmax(-1)
        assert bool(probs.isfinite().all())
        assert float(probs.sum()) == pytest.approx(1.0, abs=1e-5)
        assert float(probs.argmax()) == float(logits.argmax())
        assert float((probs - expected).abs().max()) < 0.02
        assert float(probs[400:].sum()) == 0
    # 1e-39 is no normal number of float32: logits divided by it are infinite, and the distribution is NaN.
    beyond = Sampling(temperature_B=torch.tensor([1e-39]), sampling_rows=(0,)).distribution(logits.float())
    assert not bool(beyond.isfinite().all())


def test_draw_never_takes_an_impossible_token() -> None:
    probs = torch.tensor([0.0, 0.5, 0.0, 0.5, 0.0])
    uniforms = torch.tensor([0.0, 0.49999, 0.5, 0.99999999, 1 - 2**-53], dtype=torch.float64)
    assert draw(probs.expand(5, -1), uniforms).tolist() == [1, 1, 3, 3, 3]


def test_greedy_and_sampled_rows_share_a_batch() -> None:
    logits = torch.log(P).expand(2, 1, -1)
    chosen = choose(
        logits,
        torch.full((2, 1), 0.99, dtype=torch.float64),
        Sampling(temperature_B=torch.tensor([0.0, 1.0]), sampling_rows=(1,)),
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
