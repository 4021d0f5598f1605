"""A minute of the lossless campaign: some cells of each part but the embedded one, and what it says of wrong ones."""

from pathlib import Path

import numpy as np
import pytest
import torch
from benchmarks import lossless_campaign as campaign
from benchmarks.parts.campaign_drafters import FAMILIES, GUESSERS, POLICIES, Outcome
from benchmarks.parts.campaign_sampled import FILTERS, TEMPERATURES, VOCABULARY, law, p_value
from draftsmith.modules import BASELINES, DRAFTERS
from scipy.stats import kstest
from support.families import CASES

CHOSEN = {
    ("greedy", "Llama eagle3 static"),
    ("greedy", "Llama medusa dyspec"),
    ("greedy", "Llama recycling eagle2"),
    ("greedy", "Llama hydra union"),
    ("sampled", "hydra sampled T=0.1 none "),
    ("sampled", "eagle3 dyspec T=0.3 min-p "),
    ("sampled", "medusa sampled-chain T=1.2 top-p "),
    ("rules", "no_residual"),
    ("rules", "underflowing_q"),
    ("rules", "inclusive_sums"),
    ("fuzz", "seed 0"),
    ("fuzz", "seed 1"),
    ("fuzz", "seed 2"),
}
"""Cells by part and name; a name that ends with a space is followed by the kind of draft."""


@pytest.mark.long
@pytest.mark.slow
def test_some_cells_of_each_part_hold(tmp_path: Path) -> None:
    chosen = [cell for cell in campaign.cells() for part, name in CHOSEN
              if cell.part == part and (cell.name.startswith(name) if name.endswith(" ") else cell.name == name)]
    assert len(chosen) == len(CHOSEN)
    store = campaign.Store(tmp_path / "campaign.json")
    campaign.run(store, chosen, seconds=1000)
    assert campaign.broken(store) == []
    assert sum(one.tokens for one in store.outcomes["greedy"].values()) > 2000
    again = campaign.Store(tmp_path / "campaign.json")
    assert again.outcomes == store.outcomes
    rows = [row.split(" | ")[1].split(" of ")[0] for row in list(campaign.table(again))[2:]]
    assert rows == ["4", "0", "3", "3", "3"]
    assert "embedded cells" in campaign.unfinished(again, ["embedded"])[0]


def test_a_file_of_other_code_is_refused(tmp_path: Path) -> None:
    assert (campaign.CODE / "decoding" / "loop.py").is_file()
    assert all(any(folder.rglob("*.py")) for folder in campaign.HELPERS)
    file = tmp_path / "campaign.json"
    campaign.Store(file).add(campaign.Cell("greedy", "a"), Outcome(tokens=1))
    file.write_text(file.read_text().replace(torch.__version__, "0.0.1"))
    with pytest.raises(SystemExit, match=r"was made with .*0\.0\.1.*; give another --out"):
        campaign.Store(file)


def test_every_family_and_every_case_is_in_the_campaign() -> None:
    names = [cell.name.split() for cell in campaign.cells() if cell.part == "greedy"]
    assert {drafter for _, drafter, _ in names} == {*CASES, *BASELINES}
    sampled = {tuple(cell.name.split()[:2]) for cell in campaign.cells() if cell.part == "sampled"}
    assert sampled == {(drafter, policy) for drafter in GUESSERS for policy in POLICIES}
    assert {cls.family for cls in DRAFTERS} == set(FAMILIES)


def test_what_is_wrong_is_said() -> None:
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


@pytest.mark.long
def test_p_values_are_uniform_for_samples_of_the_distribution_and_0_for_others() -> None:
    chance, right = np.random.default_rng(0), law(1.0, "none")
    found = [p_value(chance.multinomial(1000, right / right.sum()), right, seed) for seed in range(100)]
    assert kstest(found, "uniform").pvalue > 0.01
    flatter = right**0.7 / (right**0.7).sum()
    assert p_value(chance.multinomial(1000, flatter), right, 0) < 0.01
