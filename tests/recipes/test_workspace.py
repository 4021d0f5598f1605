"""Recipes that cannot work are refused before a token is distilled."""

from pathlib import Path

import pytest
from draftsmith.recipes.__main__ import main

TINY = str(Path(__file__).resolve().parents[2] / "recipes" / "tiny.yaml")


@pytest.mark.parametrize(("words", "message"), [
    (["--tree.searched_nodes", "3", "--tree.used_nodes", "2"],
     "a tree of tree.searched_nodes 3 is at most 2 tokens deep, but this drafter guesses 3; raise tree"),
    (["--evaluate.policies", "[static, chain-8]"],
     "the tree is 8 tokens deep, but this medusa drafter answers 3; choose a tree of at most that depth"),
    (["--evaluate.policies", "[static-64]"], "a tree of 64 nodes was asked for; this artifact's has"),
    (["--family", "medusa2"], "batch.states is 'stored', but Medusa2Module trains the"),
    (["--family", "medusa2", "--batch.states", "computed", "--train.lora.modules",
      "[c_attn]"], "c_attn"),
    (["--family", "draft_lm", "--drafter.layers", "[0, 7]"], "7"),
    (["--drafter.vocabulary_size", "100000"], "100000"),
    (["--family", "eagle3", "--drafter.taps", "[0, 2]"],
     "tap 2 would be the state after the last norm of tiny-random, which is no layer's output; its last layer is 1"),
    (["--family", "eagle3", "--drafter.steps", "40", "--batch.row_length", "41"],
     "40 draft steps need rows of at least 42 tokens, but batch.row_length is 41; raise it, or train fewer steps"),
    (["--family", "eagle", "--drafter.vocabulary_size", "101"],
     "between 1 and 100 entries"),
    (["--family", "eagle3", "--drafter.taps", "[0, 5]"],
     "tap 5 is not a layer of tiny-random; choose from 0 to 1"),
    (["--family", "eagle3", "--drafter.vocabulary_size", "101"],
     "between 1 and 100 entries (the target's vocabulary), got 101; set vocabulary_size within these bounds"),
    (["--family", "eagle3", "--drafter.hidden_size", "24"],
     "hidden_size is 24, but the states of tiny-random are 32 wide; set target_hidden_size to 32"),
    (["--family", "eagle3", "--train.positions.offset", "600"],
     "positions.offset is 600, but the context of tiny-random ends at 512 tokens; lower it, or set it to max"),
])
def test_a_run_that_cannot_work_leaves_nothing(
    words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert main(["run", "--config", TINY, "--out", str(out), *words]) == 2
    assert message in capsys.readouterr().err
    assert not (out / "data").exists()
