"""Recipes tried on the target's shape alone."""

from pathlib import Path

import pytest
from draftsmith.modules import TargetConfig, UserError
from draftsmith.modules.target.loading.loading import sketch_target
from draftsmith.recipes.commands.pipeline import COMMANDS
from draftsmith.recipes.planning.dry_run import dry_run

TINY = Path(__file__).resolve().parents[3] / "recipes" / "tiny.yaml"


def tried(*words: str) -> None:
    recipe = COMMANDS["run"].parse(["--config", str(TINY), "--out", "unused", *words]).values
    dry_run(recipe, sketch_target(TargetConfig(name="tiny-random")))


@pytest.mark.parametrize("policies", ["fastest", "[fastest,static]", "[static+lookup,chain-2]"])
def test_policies_that_an_evaluation_takes_are_accepted(policies: str) -> None:
    tried("--evaluate.policies", policies)


def test_a_policy_that_asks_for_too_much_is_refused() -> None:
    with pytest.raises(UserError, match="a tree of 99 nodes was asked for"):
        tried("--evaluate.policies", "[fastest,static-99]")
