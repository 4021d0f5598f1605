"""Acceptance rules: the walk against a plain twin, the distribution by enumeration, and wrong rules that must fail."""

import itertools

import pytest
import torch
from draftsmith.modules import Sampling, TokenTree, Topology, choose
from draftsmith.modules.target.loading.tiny_model import tiny_model
from draftsmith.modules.verification import sampling as sampling_module
from draftsmith.modules.verification.acceptance_rules import follow
from draftsmith.modules.verification.sampling import argmax, draw, probabilities
from references import sampling as plain
from references.walk import walk
from support.policies import random_parents
from support.tiers import others_long
from transformers import GenerationConfig
from transformers.generation import LogitsProcessorList

pytestmark = pytest.mark.usefixtures("on_device")

P = torch.tensor([0.4, 0.25, 0.2, 0.1, 0.05], dtype=torch.float64)


def greedy(batch: int) -> Sampling:
    return Sampling(temperature_B=torch.zeros(batch))


def test_follow_equals_the_plain_walk_on_random_trees() -> None:
    generator = torch.Generator().manual_seed(0)
    for _ in range(300):
        size, batch = int(torch.randint(1, 12, (), generator=generator)), 3
        parents = random_parents(batch, size, generator)
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
            assert emitted == walk(tokens[row].tolist(), parents[row].tolist(), real[row].tolist(),
                                   choices[row].tolist())
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
    first = torch.tensor(P.tolist(), dtype=P.dtype)
    second = torch.stack([first.roll(shift) for shift in range(5)])
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
    logits = torch.stack([first, *[second[token] for token in range(width)], *[first] * (2 * width)]).log()
    tree = topology.plant(tokens.expand(len(pairs), -1))
    places = torch.tensor(topology.depths).clamp(max=1)
    choices = choose(logits.expand(len(pairs), -1, -1), pairs[:, places],
                     Sampling(temperature_B=torch.ones(len(pairs)), sampling_rows=tuple(range(len(pairs)))))
    accepted = follow(tree, choices)
    counts = torch.zeros(5, 5, dtype=torch.float64)
    for row, (_u0, u1) in enumerate(pairs):
        path = accepted.path_BK[row, : int(accepted.counts_B[row])].tolist()
        emitted = [int(tokens[node]) for node in path[1:]] + [int(accepted.bonus_B[row])]
        if len(emitted) == 1:
            emitted.append(int(draw(second[emitted[0]], u1)))
        counts[emitted[0], emitted[1]] += 1 / len(pairs)
    torch.testing.assert_close(counts, first[:, None] * second, atol=1e-9, rtol=0)


def processors(temperature: float, top_k: int, top_p: float, min_p: float) -> LogitsProcessorList:
    """The processors that `generate` applies for these settings, in its own order."""
    settings = GenerationConfig(do_sample=True, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p or None)
    return tiny_model()._get_logits_processor(settings)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("min_p", [0.0, 0.05, 0.4, 1.0])
@pytest.mark.parametrize("top_p", others_long([1.0, 1 - 1e-9, 0.9, 0.3, 1e-9], kept=(1.0, 0.9)))
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
    for temperature in (sampling_module.LEAST_TEMPERATURE, 0.1, 1.0, sampling_module.GREATEST_TEMPERATURE):
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


def spread_logits(entries: int, dtype: torch.dtype) -> torch.Tensor:
    """Rows whose nuclei hold from a few tokens to nearly all, rows with few levels, where many are equal, and in
    float32 equal ones alone, of which rounding would decide in float64."""
    generator = torch.Generator().manual_seed(0)
    random = torch.randn(10, entries, generator=generator, dtype=torch.float64)
    scaled = random * torch.tensor([0.1, 1, 1.5, 2, 3, 4, 8, 2, 2, dtype == torch.float64])[:, None]
    scaled[7:9] = scaled[7:9].round()
    scaled[8, ::2] = -torch.inf
    return scaled.to(dtype)


@pytest.mark.parametrize("host", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("entries", "sums"), [(5, (1e-9, 0.1, 0.6, 0.95, 1 - 1e-9)), (600, (0.1, 0.95, 1 - 1e-9)),
                                               (49152, (0.9,))])
def test_the_nucleus_is_the_plain_one(entries: int, sums: tuple[float, ...], dtype: torch.dtype, host: bool,
                                      monkeypatch: pytest.MonkeyPatch) -> None:
    """Sorted for and searched for bit by bit; token for token, for what is kept is a matter of which tokens."""
    if not host:
        monkeypatch.setattr(sampling_module, "on_host", lambda _values: False)
    logits = spread_logits(entries, dtype)[:: 4 if entries > 600 else 1]
    unreadable = torch.cat([logits, torch.full_like(logits[:2], torch.nan)])
    unreadable[-1, 1:] = 0
    for top_p, temperature in itertools.product(sums, (1.0,) if entries > 600 else (1.0, 0.001, 1000.0)):
        found = probabilities(unreadable, torch.full((1, 1), temperature, dtype=dtype), top_p=top_p)
        assert bool(found[-2:].isnan().all())
        for row, probs in enumerate((logits / temperature).softmax(-1).double()):
            expected = torch.tensor(plain.nucleus(probs.tolist(), top_p), dtype=torch.float64)
            assert torch.equal(found[row] > 0, expected > 0), row
            torch.testing.assert_close(found[row].double(), expected, atol=1e-9, rtol=2e-6)


@pytest.mark.parametrize("entries", [5, 600, 1280, 49152])
def test_a_draw_is_the_plain_one(entries: int) -> None:
    generator = torch.Generator().manual_seed(0)
    probs = torch.randn(8, entries, generator=generator).exp()
    probs[4:] *= torch.rand(4, entries, generator=generator) > 0.9
    probs[4:, entries // 2] = 0.5
    probs[3] = torch.nn.functional.one_hot(torch.tensor(entries // 2), entries)
    for uniform in (0.0, 1e-12, *torch.rand(20, generator=generator, dtype=torch.float64).tolist(), 1 - 2**-53):
        expected = [plain.draw(row, uniform) for row in probs.double().tolist()]
        assert draw(probs, torch.full((8,), uniform, dtype=torch.float64)).tolist() == expected


def test_every_token_of_a_large_vocabulary_is_drawn_as_often_as_it_should() -> None:
    """Over a fine grid of uniforms: the share of each token is its probability, across the borders of blocks too."""
    entries, places = 1280, 200_000
    probs = torch.randn(entries, generator=torch.Generator().manual_seed(0)).exp().double()
    probs[::3] = 0
    grid = (torch.arange(places, dtype=torch.float64) + 0.5) / places
    drawn = torch.cat([draw(probs.expand(len(part), -1), part) for part in grid.split(4096)])
    counts = drawn.bincount(minlength=entries)
    assert float((counts / places - probs / probs.sum()).abs().max()) <= 1 / places


def test_a_distribution_without_mass_harms_no_other_row() -> None:
    probs = torch.zeros(3, 1280)
    probs[0] = torch.nan
    probs[2, 700] = 1.0
    assert draw(probs, torch.full((3,), 0.4, dtype=torch.float64))[2] == 700


def test_rows_are_chosen_alike_alone_and_together() -> None:
    """Greedy and sampled ones in turn, more than a CPU takes at a time."""
    logits = spread_logits(49152, torch.float32).repeat(4, 1)[:, None].expand(-1, 2, -1)
    uniforms = torch.rand(36, 2, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    for top_p, top_k in ((1.0, 0), (0.95, 0), (1.0, 50)):
        rows = tuple(row for row in range(36) if row % 3)
        temperature_B = torch.tensor([0.8 if row in rows else 0.0 for row in range(36)])
        together = choose(logits, uniforms, Sampling(temperature_B=temperature_B, top_p=top_p, top_k=top_k,
                                                     sampling_rows=rows))
        for row in range(36):
            here = slice(row, row + 1)
            alone = Sampling(temperature_B=temperature_B[here], top_p=top_p, top_k=top_k,
                             sampling_rows=(0,) if row in rows else ())
            assert torch.equal(choose(logits[here], uniforms[here], alone)[0], together[row])


def test_draw_never_takes_an_impossible_token() -> None:
    probs = torch.tensor([0.0, 0.5, 0.0, 0.5, 0.0])
    uniforms = torch.tensor([0.0, 0.49999, 0.5, 0.99999999, 1 - 2**-53], dtype=torch.float64)
    assert draw(probs.expand(5, -1), uniforms).tolist() == [1, 1, 3, 3, 3]


def test_draw_takes_no_impossible_token_at_the_border_of_a_block() -> None:
    """Uniforms next to the share of every block, where the order of additions decides which side they are on."""
    probs = torch.rand(200, 1280, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    probs.view(200, 10, 128)[..., 90:] = 0
    ends = probs.view(200, 10, 128).sum(-1, dtype=torch.float64).cumsum(-1)
    for steps in (-2, -1, 0, 1):
        for block in range(10):
            uniforms = (ends[:, block] / ends[:, -1] * (1 + steps * 2**-53)).clamp(max=1 - 2**-53)
            assert bool((probs.gather(1, draw(probs, uniforms)[:, None]) > 0).all())


def test_greedy_and_sampled_rows_share_a_batch() -> None:
    logits = torch.log(P).expand(2, 1, -1)
    chosen = choose(logits, torch.full((2, 1), 0.99, dtype=torch.float64),
                    Sampling(temperature_B=torch.tensor([0.0, 1.0]), sampling_rows=(1,)))
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
