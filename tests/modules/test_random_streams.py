"""The counter-based generator: published vectors, keys that matter, uniform and Gumbel by their moments."""

from dataclasses import replace

import pytest
import torch
from draftsmith.modules.random_streams import philox
from support.tables import draws_for


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
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
