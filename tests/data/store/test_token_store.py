"""Shards and manifests are read back byte for byte, or refused by name."""

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from draftsmith.data import Manifest, TokenShard
from draftsmith.data.batches.datamodule import BatchConfig, Split
from draftsmith.data.batches.learned_tokens import LearnedTokens
from draftsmith.data.store.collate import pad
from draftsmith.data.store.feature_shards import FEATURES, open_features
from draftsmith.data.store.token_store import (
    MANIFEST,
    HeldOut,
    Row,
    ShardRecord,
    _json,
    hash_bytes,
    hash_file,
    write_bytes,
    write_tensors,
)
from draftsmith.modules import Target, UserError
from draftsmith.modules.target.loading.tiny_model import tiny_model, tiny_tokenizer
from support.data.data_folders import conversations, encode

ROWS = [
    Row(tokens=(5, 6, 7), supervised=(False, True, True), prompt=3, temperature=0.7),
    Row(tokens=(8, 9), supervised=(False, True), prompt=-1),
]


def record(**fields: object) -> ShardRecord:
    counts = dict.fromkeys(("candidates", "prompts", "rows", "by_target", "by_text", "by_draft", "tokens", "supervised",
                            "answers", "truncated", "full"), 2)
    return replace(ShardRecord(file="train-00000.safetensors", split="train", sha256="0", **counts), **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["train-last.safetensors", "train-1.safetensors", "validation-00000.safetensors",
                                  "train-00000", "a/train-00000.safetensors"])
def test_a_shard_of_another_name_is_refused_where_the_manifest_is_read(distilled: Path, name: str) -> None:
    file = distilled / MANIFEST
    content = json.loads(file.read_text())
    del content["sha256"]
    train = next(shard for shard in content["shards"] if shard["split"] == "train")
    train["file"] = name
    file.write_text(json.dumps({**content, "sha256": hash_bytes(_json(content))}))
    with pytest.raises(UserError, match=r"manifest.json is damaged: file must be .* train-00000.safetensors or one "
                                        r"with another number, got .*; delete the folder .* and distil again"):
        Manifest.load(distilled)


@pytest.fixture
def distilled(tmp_path: Path, tiny_target: Target) -> Path:
    """Two train shards and one of validation."""
    return conversations(tmp_path, tiny_target, 8, shard_prompts=3, slots=2, max_new_tokens=6, validation_prompts=2)


def test_a_shard_is_read_back_row_by_row(tmp_path: Path) -> None:
    shard = TokenShard.from_rows(ROWS, [11, -12])
    write_bytes(tmp_path / "shard", shard.to_bytes())
    found = TokenShard.read(tmp_path / "shard", hash_file(tmp_path / "shard"))
    assert found.num_rows == 2
    for number, row in enumerate(ROWS):
        start, stop = found.span(number)
        assert tuple(found.tokens_T[start:stop].tolist()) == row.tokens
        assert tuple(found.supervised_T[start:stop].tolist()) == row.supervised
    assert found.prompts_R.tolist() == [3, -1]
    assert found.keys_P.tolist() == [11, -12]
    torch.testing.assert_close(found.temperatures_R, torch.tensor([0.7, 0.0]))
    assert found.to_bytes() == shard.to_bytes()


def test_an_empty_shard_is_a_shard(tmp_path: Path) -> None:
    write_bytes(tmp_path / "shard", TokenShard.from_rows([], []).to_bytes())
    assert TokenShard.read(tmp_path / "shard").num_rows == 0


@pytest.mark.parametrize("damage",
                         [lambda data: data[:-1], lambda data: data[:-1] + bytes([data[-1] ^ 1]), lambda _: b""])
def test_a_damaged_shard_is_named(tmp_path: Path, damage: object) -> None:
    data = TokenShard.from_rows(ROWS, [1]).to_bytes()
    file = tmp_path / "train-00000.safetensors"
    write_bytes(file, data)
    sha256 = hash_file(file)
    file.write_bytes(damage(data))  # type: ignore[operator]
    with pytest.raises(UserError, match=r"train-00000.safetensors is corrupted .*; delete the folder .* distil again"):
        TokenShard.read(file, sha256)


def test_a_manifest_is_read_back_and_its_bytes_are_its_content(tmp_path: Path, tiny_target: Target) -> None:
    manifest = Manifest(target=tiny_target.identity, template_hash="t",
                        recipe={"prompts": {"origin": "own"}, "distill": {"seed": 0}}, versions={"torch": "2"},
                        candidates=4,
                        shards=(record(), record(split="validation", file="validation-00000.safetensors")),
                        held_out=HeldOut(file="test.jsonl", sha256="1", prompts=2), complete=True)
    manifest.save(tmp_path)
    assert Manifest.load(tmp_path) == manifest
    assert Manifest.load(tmp_path).hash == manifest.hash != replace(manifest, template_hash="u").hash
    assert manifest.total("train", "supervised") == 2
    assert [shard.split for shard in manifest.split("validation")] == ["validation"]


def test_missing_damaged_and_foreign_manifests(tmp_path: Path, tiny_target: Target) -> None:
    with pytest.raises(UserError, match=r"holds no manifest.json; make the data with draftsmith distill"):
        Manifest.load(tmp_path)
    file = tmp_path / "manifest.json"
    file.write_text('{"format_version": 1')
    with pytest.raises(UserError, match=r"manifest.json cannot be read as JSON .*; delete the folder .* distil again"):
        Manifest.load(tmp_path)
    # Data of the version before hold no drawn answers.
    file.write_text('{"format_version": 3, "target": {}}')
    with pytest.raises(UserError, match=r"format version 3, this version reads 7; delete the folder .* distil again"):
        Manifest.load(tmp_path)
    file.write_text('{"format_version": 7, "target": {}}')
    with pytest.raises(UserError, match=r"manifest\.json is damaged: its content lacks candidates, complete"):
        Manifest.load(tmp_path)
    file.write_text('{"format_version": 99}')
    with pytest.raises(UserError, match=r"format version 99, this version reads 7; delete the folder .* and distil"):
        Manifest.load(tmp_path)


def test_a_failed_write_leaves_the_old_file_and_no_rest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "file"
    write_bytes(file, b"old")

    def full(_handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(UserError, match=r"cannot write .*file: No space left on device; make room or choose another"):
        write_bytes(file, b"new")
    with pytest.raises(UserError, match="No space left on device"):
        write_tensors(file, {"a": torch.zeros(2)})
    assert file.read_bytes() == b"old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"cannot write .*Not a directory|cannot write .*File exists"):
        write_bytes(tmp_path / "file" / "manifest.json", b"")


# States --------------------------------------------------------------------------------------------------------------


def test_stored_states_are_those_of_each_conversation_alone(distilled: Path, tiny_target: Target) -> None:
    encode(tiny_target, distilled, (0, 1))
    split = Split(distilled, Manifest.load(distilled), "train", BatchConfig(), (0, 1), LearnedTokens())
    windows = split.windows(1024)
    assert len(windows) == 6
    for window in windows:
        piece = split.piece(window)
        alone = tiny_target.encode(pad([piece]), (0, 1))
        assert piece.final is not None
        torch.testing.assert_close(piece.final.states(), alone.final()[0], rtol=0, atol=1e-4)
        for layer in (0, 1):
            torch.testing.assert_close(piece.taps[layer].states(), alone.taps[layer][0], rtol=0, atol=1e-4)


def test_complete_states_are_skipped_and_others_replaced(distilled: Path, tiny_target: Target) -> None:
    encode(tiny_target, distilled)
    files = sorted(distilled.glob("final-*.safetensors"))
    assert len(files) == 3
    times = {file: file.stat().st_mtime_ns for file in files}
    lost, changed = files[0], files[1]
    lost.unlink()
    changed.write_bytes(changed.read_bytes()[:-4] + b"\0\0\0\1")
    encode(tiny_target, distilled)
    assert files[2].stat().st_mtime_ns == times[files[2]]
    assert changed.stat().st_mtime_ns != times[changed]
    open_features(distilled, Manifest.load(distilled).shards, ())
    encode(tiny_target, distilled, (1,), form="float16")
    final, _ = open_features(distilled, Manifest.load(distilled).shards, (1,))[0].slices(0, 2)
    assert final.states().dtype == torch.float16


def test_drafters_with_other_taps_share_what_they_have_in_common(distilled: Path, tiny_target: Target) -> None:
    first = encode(tiny_target, distilled, (1,))
    times = {file: file.stat().st_mtime_ns for file in first}
    second = encode(tiny_target, distilled, (0,))
    assert {file.name.split("-")[0] for file in second} == {"final", "tap_0"}
    assert {file: file.stat().st_mtime_ns for file in first} == times
    _, both = open_features(distilled, Manifest.load(distilled).shards, (1, 0))[0].slices(0, 3)
    _, alone = open_features(distilled, Manifest.load(distilled).shards, (1,))[0].slices(0, 3)
    assert torch.equal(both[1].states(), alone[1].states())
    assert not torch.equal(both[0].states(), both[1].states())


def test_missing_and_damaged_states_are_named(distilled: Path, tiny_target: Target) -> None:
    records = Manifest.load(distilled).shards
    with pytest.raises(UserError, match=r"no states final for validation-00000.safetensors; run draftsmith distill"):
        open_features(distilled, records, ())
    encode(tiny_target, distilled)
    with pytest.raises(UserError, match=r"no states tap_1 for validation-00000.safetensors"):
        open_features(distilled, records, (1,))
    (distilled / "final-train-00001.safetensors").write_bytes(b"")
    with pytest.raises(UserError, match=r"final-train-00001.safetensors is corrupted"):
        open_features(distilled, records, ())
    (distilled / FEATURES).write_text("{")
    with pytest.raises(UserError, match=r"features.json cannot be read as JSON"):
        encode(tiny_target, distilled)


def test_another_target_and_an_unknown_type_are_refused(distilled: Path, tiny_target: Target) -> None:
    other = Target(tiny_model(seed=1), tiny_tokenizer(), name="other")
    with pytest.raises(UserError, match="weights_hash"):
        encode(other, distilled)
    with pytest.raises(UserError, match=r"states_format must be null or one of .* got 'int4'"):
        encode(tiny_target, distilled, form="int4")
