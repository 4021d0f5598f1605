"""Train prompts answered in another number format than held-out ones."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from draftsmith.data import ChatTemplate, DistillConfig, WantedStates, distill
from draftsmith.data.store.feature_shards import read_features
from draftsmith.modules import Target, UserError
from draftsmith.modules.target.loading.tiny_model import tiny_model, tiny_tokenizer
from safetensors.torch import load_file
from support.data.data_folders import contents, many, write_prompts

SMALL = DistillConfig(shard_prompts=8, slots=4, max_new_tokens=24, temperatures=(0.0, 1.0), validation_prompts=2)
HALF = replace(SMALL, train_dtype="bfloat16")


def tiny(dtype: torch.dtype) -> Target:
    return Target(tiny_model().to(dtype), tiny_tokenizer(), name="tiny-random")


def distilled(out: Path, target: Target, config: DistillConfig, train_target: Target | None = None) -> dict[str, bytes]:
    prompts = write_prompts(out, many(18))
    distill(target, prompts, config, ChatTemplate(target.tokenizer), out / "data", train_target=train_target,
            states=[WantedStates()], progress=False)
    return contents(out / "data")


def test_train_rows_are_those_of_the_other_format_and_held_out_rows_those_of_the_targets_own(tmp_path: Path) -> None:
    full, half = tiny(torch.float32), tiny(torch.bfloat16)
    own = distilled(tmp_path / "own", full, SMALL)
    other = distilled(tmp_path / "other", half, SMALL)
    mixed = distilled(tmp_path / "mixed", full, HALF, half)

    shards = [name for name in own if name.startswith("train-")]
    assert any(own[name] != other[name] for name in shards), "the formats write different answers"
    assert [mixed[name] for name in shards] == [other[name] for name in shards]
    assert own["validation-00000.safetensors"] != other["validation-00000.safetensors"]
    assert mixed["validation-00000.safetensors"] == own["validation-00000.safetensors"]


def test_states_are_stored_in_the_targets_own_format(tmp_path: Path) -> None:
    distilled(tmp_path, tiny(torch.float32), HALF, tiny(torch.bfloat16))
    assert read_features(tmp_path / "data")["dtype"] == "float32"
    kept = load_file(tmp_path / "data" / "final-train-00000.safetensors")
    assert all(torch.equal(states, states.bfloat16().float()) for states in kept.values()), "recorded, not read again"


def test_a_target_in_another_format_than_the_setting_is_refused(tmp_path: Path) -> None:
    full, half = tiny(torch.float32), tiny(torch.bfloat16)
    for config, given in ((SMALL, half), (HALF, None), (HALF, full), (replace(SMALL, train_dtype="fastest"), half)):
        with pytest.raises(ValueError, match=r"^train_target is in"):
            distilled(tmp_path, full, config, given)
    with pytest.raises(UserError, match="must be one of own, fastest, float32, bfloat16, got 'int8'"):
        replace(SMALL, train_dtype="int8")  # type: ignore[arg-type]
