"""A minute of the lossless campaign: some cells of each part but the embedded one, and what it says of wrong ones."""

import importlib
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from support.campaign_outcome import Outcome
from support.campaign_sampled import FILTERS, TEMPERATURES, VOCABULARY, law, p_value

CHOSEN = {
    ("greedy", "Llama eagle3 static"),
    ("greedy", "Llama medusa dyspec"),
    ("greedy", "Llama recycling eagle2"),
    ("sampled", "hydra sampled T=0.1 none too sure"),
    ("sampled", "eagle3 dyspec T=0.3 min-p own"),
    ("sampled", "medusa sampled-chain T=1.2 top-p own"),
    ("rules", "no_residual"),
    ("rules", "underflowing_q"),
    ("rules", "inclusive_sums"),
    ("fuzz", "seed 0"),
    ("fuzz", "seed 1"),
    ("fuzz", "seed 2"),
}


@pytest.fixture(scope="module")
def campaign() -> ModuleType:
    return importlib.import_module("benchmarks.lossless_campaign")


@pytest.mark.slow
def test_some_cells_of_each_part_hold(campaign: ModuleType, tmp_path: Path) -> None:
    chosen = [cell for cell in campaign.cells(3) if (cell.part, cell.name) in CHOSEN]
    assert len(chosen) == len(CHOSEN)
    store = campaign.Store(tmp_path / "campaign.json")
    campaign.run(store, chosen, seconds=1000)
    assert campaign.broken(store) == []
    assert sum(one.tokens for one in store.outcomes["greedy"].values()) > 2000
    again = campaign.Store(tmp_path / "campaign.json")
    assert again.outcomes == store.outcomes
    rows = list(campaign.table(again, dict.fromkeys(campaign.PARTS, 3)))
    assert [row.split(" | ")[1] for row in rows[2:]] == ["3 of 3", "0 of 3", "3 of 3", "3 of 3", "3 of 3"]
    assert "| 3 of 3 |" in rows[5].split("|  |")[-1]


def test_what_is_wrong_is_said(campaign: ModuleType) -> None:
    store = campaign.Store(None)
    store.outcomes["greedy"]["a"] = Outcome(tokens=9, divergences=1, note="answers [3] differ")
    store.outcomes["rules"]["b"] = Outcome(p=0.2)
    store.outcomes["rules"]["c"] = Outcome(p=0.0005)
    store.outcomes["sampled"] = {str(place): Outcome(p=0.01 * place / 40) for place in range(40)}
    greedy, rule, uniform = campaign.broken(store)
    assert greedy == "greedy a: answers [3] differ"
    assert rule == "the wrong rule b was not seen (p = 0.2)"
    assert uniform.startswith("the p-values of 40 sampled cells are not uniform")


def test_the_enumerated_distribution_leaves_something_to_chance() -> None:
    for temperature in TEMPERATURES:
        for filtered in FILTERS:
            chances = law(temperature, filtered)
            assert chances.sum() == pytest.approx(1.0)
            assert (chances > 0.002).sum() > 30, (temperature, filtered)
    assert len(law(0.1, "none")) == VOCABULARY**3
    assert law(0.1, "none") == pytest.approx(law(1.2, "none"))


def test_p_values_are_uniform_for_samples_of_the_distribution_and_0_for_others() -> None:
    from scipy.stats import kstest

    chance, right = np.random.default_rng(0), law(1.0, "none")
    found = [p_value(chance.multinomial(1000, right / right.sum()), right, seed) for seed in range(100)]
    assert kstest(found, "uniform").pvalue > 0.01
    flatter = right**0.7 / (right**0.7).sum()
    assert p_value(chance.multinomial(1000, flatter), right, 0) < 0.01
