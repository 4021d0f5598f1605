"""Held-out states after training: the memory that they take does not depend on how much text is held out."""


import pytest
from draftsmith.data.batches.datamodule import HeldOutRows
from draftsmith.modules.features import ReadRows
from draftsmith.recipes.commands.pipeline import COMMANDS, artifact_stage, perform_stages
from draftsmith.recipes.counted_work import CountedStorages
from draftsmith.recipes.stages.workspace import Workspace
from support.wide_model import wide_model

TIMES = 6
"""Factor by which the text is held out more often."""


@pytest.fixture(scope="module", params=["stored", "computed"])
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    """A run up to the end of training, of a target with wide states."""
    folder = tmp_path_factory.mktemp(f"wide-{request.param}")
    parsed = COMMANDS["run"].parse([
        "--config", "tiny", "--target.name", str(wide_model(folder / "target")), "--out", str(folder / "out"),
        "--drafter.num_heads", "2", "--train.max_steps", "2", "--distill.validation_prompts", "12",
        "--batch.states", request.param, "--tree.searched_nodes", "8"])
    workspace = Workspace(parsed)
    perform_stages(workspace, ["distill", "encode", "train"])
    return workspace


@pytest.mark.long
@pytest.mark.slow
def test_sizing_the_tree_takes_no_more_memory_for_more_held_out_text(
    trained: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    originals = {name: getattr(HeldOutRows, name) for name in ("up_to_repetitions", "whole", "repeating")}
    tokens = sum(row.tokens_BL.numel() for row in HeldOutRows(trained.data, trained.recipe.batch).whole())
    peaks = []
    for times in (1, TIMES):
        for name, original in originals.items():
            monkeypatch.setattr(HeldOutRows, name, lambda *given, original=original, times=times: ReadRows(
                original(*given).read * times))
        with CountedStorages() as count:
            artifact_stage(trained)
        peaks.append(count.peak)
    states = (TIMES - 1) * tokens * trained.target.hidden_size * 4
    assert peaks[1] - peaks[0] < states / 4, "tables of proposed tokens may grow, states may not"
