"""The counter-based generator: published vectors, keys that matter, uniform and Gumbel by their moments."""

from dataclasses import replace

import pytest
import torch
from draftsmith.modules import Draws
from draftsmith.modules.verification.sampling import philox, uniform_stream
from support.drafters import draws_for


@pytest.mark.parametrize(("counter", "key", "words"), [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    ((0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0),
     (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)),
])
def test_the_vectors_of_random123(counter: tuple[int, ...], key: tuple[int, ...], words: tuple[int, ...]) -> None:
    c0, c1, c2, c3 = (torch.tensor(word) for word in counter)
    assert tuple(int(word) for word in philox((c0, c1, c2, c3), (torch.tensor(key[0]), torch.tensor(key[1])))) == words


def test_every_part_of_the_key_matters() -> None:
    draws = draws_for(3)
    nodes = torch.tensor([[0, 1], [0, 1], [0, 1]])
    noise = draws.gumbels(nodes, 9)
    assert noise.shape == (3, 2, 9)
    assert len(noise.flatten().unique()) == noise.numel()
    for other in (
        replace(draws, seed=4),
        replace(draws, seed=3 + 2**32),
        replace(draws, requests_B=draws.requests_B + 5),
        replace(draws, requests_B=draws.requests_B + 2**32),
        replace(draws, requests_B=draws.requests_B + 2**33),
        replace(draws, requests_B=-1 - draws.requests_B),
        replace(draws, places_B=draws.places_B + 1),
    ):
        assert not bool((other.gumbels(nodes, 9) == noise).any())
        assert not bool((other.tests(9) == draws.tests(9)).any())


def test_uniform_and_gumbel() -> None:
    draws = draws_for(200)
    tests, noise = draws.tests(1000), draws.gumbels(torch.zeros(200, 1, dtype=torch.long), 1000)
    assert 0 < float(tests.min()) < float(tests.max()) < 1
    assert abs(float(tests.mean()) - 0.5) < 0.003
    assert abs(float(tests.var()) - 1 / 12) < 0.001
    assert abs(float(noise.mean()) - 0.5772) < 0.01
    assert abs(float(noise.var()) - torch.pi**2 / 6) < 0.03
    assert bool(noise.isfinite().all())


SEEDS = (0, 1, -1, -2, -1000, 2**32, 2**62 + 1, 2**63, 2**63 + 1, 2**64 - 5)
INDICES = (0, 1, 5, 2**32, 2**32 + 1, 2**33, 2**53 + 1, 2**62, 2**62 + 1, 2**63 - 1)


def numbers(seed: int, index: int) -> tuple[float, ...]:
    """Some numbers of a request."""
    draws = Draws(seed=seed, requests_B=torch.tensor([index]), places_B=torch.tensor([2]), temperature_B=torch.ones(1))
    noise = draws.gumbels(torch.tensor([[1]]), 2)
    return tuple(draws.tests(2).flatten().tolist() + noise.flatten().tolist())


def test_every_seed_and_every_index_has_a_stream_of_its_own() -> None:
    keys = [(seed, index) for seed in SEEDS for index in INDICES]
    drawn = [number for key in keys for number in numbers(*key)]
    emitted = [number for key in keys for number in uniform_stream(*key, 2)]
    assert len(set(emitted)) == len(emitted)
    # 32 bits a number and 400 of them: equal ones would be a collision of keys, not chance.
    assert len(set(drawn)) == len(drawn)


def test_turns_of_one_prompt_share_no_number() -> None:
    """An evaluation numbers the turns of prompt 5 as 5, 5 + 2^32, 5 + 2^33."""
    turns = torch.tensor([5 + (turn << 32) for turn in range(20)])
    draws = Draws(seed=0, requests_B=turns, places_B=torch.ones(20, dtype=torch.long), temperature_B=torch.ones(20))
    tests = draws.tests(50)
    assert len(tests.unique()) == tests.numel()
    correlation = torch.corrcoef(tests)
    assert float((correlation - torch.eye(20)).abs().max()) < 0.6


def test_the_numbers_of_ordinary_seeds_stay() -> None:
    """Recorded before seeds and indices of more than 32 bits had numbers of their own."""
    assert uniform_stream(0, 0, 3).tolist() == [0.011546754286331562, 0.24154919656271812, 0.11142585551493822]
    assert uniform_stream(7, 5, 2).tolist() == [0.0487398305493153, 0.8109222632854719]
    assert uniform_stream(2**40 + 1, 2**33 + 5, 2).tolist() == [0.3919603071458868, 0.7121856431172376]
    assert uniform_stream(2**62 + 1, 3, 2).tolist() == [0.9830094141529118, 0.41245127220569056]
    wanted = {
        (0, 0): (0.4230903050629422, 0.8927757343044505, 1.5831685066223145, -0.2579462230205536),
        (3, 5): (0.6738856133306399, 0.15665332053322345, 1.6325747966766357, 1.3838002681732178),
        (2**40 + 1, 5): (0.6891608900623396, 0.8129610304022208, -0.1304107904434204, 0.6166346669197083),
    }
    for key, expected in wanted.items():
        assert numbers(*key) == pytest.approx(expected, abs=1e-6)
