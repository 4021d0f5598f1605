"""States that are stored after the answers, and what is refused without them."""

import time
from pathlib import Path

import pytest
import torch
from draftsmith.data import Manifest
from draftsmith.data.answers.shard_queue import LOCKS, clear_queue
from draftsmith.data.batches.datamodule import BatchConfig, DraftDataModule
from draftsmith.data.store import token_store
from draftsmith.data.store.feature_store import Encoding
from draftsmith.modules import Target, TargetConfig, UserError
from draftsmith.modules.files.folders import remove_leftovers
from draftsmith.modules.target.loading.loading import sketch_target
from draftsmith.recipes.commands.pipeline import COMMANDS
from draftsmith.recipes.recipe import dry_run
from support.data.data_folders import conversations, encode
from support.processes import ended, start

TAPS = (0,)
STORED = BatchConfig(row_length=128, rows_per_batch=2)


@pytest.fixture
def tokens(tmp_path: Path, tiny_target: Target) -> Path:
    """Two validation and twelve train conversations in five shards, without states."""
    return conversations(tmp_path, tiny_target, 14, shard_prompts=3, validation_prompts=2)


def test_a_target_that_learns_has_no_states_to_store(tmp_path: Path) -> None:
    sketch = sketch_target(TargetConfig(name="tiny-random"))
    words = ["--config", "tiny", "--batch.states", "stored", "--out", str(tmp_path)]
    assert not dry_run(COMMANDS["run"].parse(words).values, sketch).changes_target
    with pytest.raises(UserError, match=r"states is 'stored', but Medusa2Module trains the target, .* set batch"):
        dry_run(COMMANDS["run"].parse([*words, "--family", "medusa2"]).values, sketch)


def test_an_unknown_origin_of_states_is_refused() -> None:
    with pytest.raises(UserError, match=r"batch.states must be one of stored, computed, auto, got 'both'"):
        BatchConfig(states="both")  # type: ignore[arg-type]


def test_missing_states_are_reported(tokens: Path, tiny_target: Target) -> None:
    with pytest.raises(UserError, match=r"holds no states final for .*; run draftsmith distill .*states: computed"):
        DraftDataModule(tokens, STORED, TAPS)
    encode(tiny_target, tokens, ())
    with pytest.raises(UserError, match=r"holds no states tap_0 for .*; run draftsmith distill"):
        DraftDataModule(tokens, STORED, TAPS)
    files = encode(tiny_target, tokens, TAPS)
    assert len(files) == 2 * len(Manifest.load(tokens).shards)
    assert DraftDataModule(tokens, STORED, TAPS).packed_batch(0).to("cpu").final_BLD is not None


def test_two_recipes_that_store_states_of_the_same_data_at_once_keep_each_others(
    tokens: Path, tiny_target: Target
) -> None:
    # Both have read the list before either adds to it.
    first, second = Encoding(tiny_target, tokens, ()), Encoding(tiny_target, tokens, TAPS)
    second.run(progress=False)
    first.run(progress=False)
    assert not Encoding(tiny_target, tokens, TAPS).missing


def test_states_in_work_are_no_leftovers_of_another_recipe(tokens: Path, tmp_path: Path,
                                                           monkeypatch: pytest.MonkeyPatch) -> None:
    """One process stores states of these data while another starts in their run, and while one clears their queue."""
    written, removed, save = tmp_path / "written", tmp_path / "removed", token_store.save_file

    def slow(tensors: dict[str, torch.Tensor], file: Path) -> None:
        # By the name of a file that safetensors has in work, then by that of one that is not yet in its place.
        half = file.with_name(".tmpzARN0g")
        save(tensors, half)
        written.touch()
        while not removed.exists():
            time.sleep(0.01)
        half.rename(file)

    monkeypatch.setattr(token_store, "save_file", slow)
    process = start(lambda: token_store.write_tensors(tokens / "final.safetensors", {"states": torch.ones(2)}))
    while not written.exists():
        time.sleep(0.01)
    (tmp_path / ".other.partial").touch()
    remove_leftovers(tmp_path)
    assert (tokens / LOCKS).exists()
    clear_queue(tokens)
    removed.touch()
    assert ended(process) == 0
    assert (tokens / "final.safetensors").exists()
    assert not list(tmp_path.rglob(".*partial")), "what nobody writes is removed"
