"""Shards and manifests are read back byte for byte, or refused by name. Repetitions are found where an answer repeats a
phrase to its end, and nowhere else; labels of the training text are counted exactly, and the coverage of a draft
vocabulary is that of held-out text."""

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from draftsmith.data import Manifest, TokenShard
from draftsmith.data.datamodule import BatchConfig, Split
from draftsmith.data.prompts.chat import Surroundings
from draftsmith.data.store.feature_shards import FEATURES, open_features, pad
from draftsmith.data.store.token_store import (
    LEAST_REPEATED,
    LONGEST_PERIOD,
    MANIFEST,
    HeldOut,
    Row,
    _json,
    answers,
    count_labels,
    coverage,
    hash_bytes,
    hash_file,
    learned_tokens,
    repetition_start,
    repetitions,
    write_bytes,
    write_tensors,
)
from draftsmith.modules import Target, UserError
from draftsmith.modules.target.loading.tiny_model import tiny_model, tiny_tokenizer
from support.data.data_folders import conversations, encode, shard_record

ROWS = [
    Row(tokens=(5, 6, 7), supervised=(False, True, True), prompt=3, temperature=0.7),
    Row(tokens=(8, 9), supervised=(False, True), prompt=-1),
]


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
                        shards=(shard_record(supervised=2), shard_record(split="validation")),
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
    split = Split(distilled, Manifest.load(distilled), "train", BatchConfig(), (0, 1))
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
    with pytest.raises(UserError, match=r"no states final for validation-00000.safetensors; run draftsmith distill .*"
                                        r"states: computed"):
        open_features(distilled, records, ())
    assert len(encode(tiny_target, distilled)) == len(records)
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


TEXT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8, 4, 6, 2, 6, 4, 3, 3, 8, 3, 2, 7, 9, 5]


def brute(answer: list[int]) -> int | None:
    """The same by comparing every tail with itself."""
    found = [start for end in (len(answer), len(answer) - 1) for period in range(1, LONGEST_PERIOD + 1)
             for start in range(period, end) if answer[start:end] == answer[start - period : end - period]
             and end - start >= max(LEAST_REPEATED, 2 * period)]
    return min(found, default=None)


@pytest.mark.parametrize(("answer", "kept"), [
    (TEXT, None),
    ([], None),
    ([7], None),
    (TEXT + [30] * 17, len(TEXT) + 1),
    (TEXT + [30] * 16, None),  # fifteen repetitions
    (TEXT + [30, 31, 32] * 7, len(TEXT) + 3),
    (TEXT + [30, 31, 32] * 6, None),  # fifteen repeated tokens
    (TEXT + [30, 31, 32] * 6 + [30, 31], len(TEXT) + 3),  # cut inside the phrase
    (TEXT + [30, 31, 32] * 7 + [0], len(TEXT) + 3),  # with an end token
    (TEXT + [30, 31, 32] * 7 + [0, 1], None),  # it has got out of the loop
    (list(range(100, 110)) * 3, 10),
    (list(range(100, 110)) * 2 + list(range(100, 109)), None),  # not twice repeated
    (TEXT + list(range(100, 110)) * 2 + list(range(100, 109)), None),  # nor after other text
    (list(range(64)) * 3, 64),
    (list(range(65)) * 3, None),
    ([5] * 40, 1)])
def test_a_loop_starts_after_the_phrase(answer: list[int], kept: int | None) -> None:
    assert repetition_start(answer) == kept == brute(answer)


def test_random_answers_agree_with_the_plain_search() -> None:
    generator = torch.Generator().manual_seed(0)
    found = 0
    for _ in range(200):
        period, times, before = (int(torch.randint(1, most, (1,), generator=generator)) for most in (9, 9, 12))
        phrase = torch.randint(0, 3, (period,), generator=generator).tolist()
        answer = [*torch.randint(0, 3, (before,), generator=generator).tolist(), *phrase * times]
        assert repetition_start(answer) == brute(answer)
        found += repetition_start(answer) is not None
    assert 20 < found < 180


def shard() -> TokenShard:
    """A row with a loop in the first of two answers, one without, and one all of whose answer loops."""
    prompt, loop = [40, 41, 42], [50, 51] * 12
    rows = [(prompt + loop + prompt + TEXT, [False] * 3 + [True] * 24 + [False] * 3 + [True] * len(TEXT)),
            (prompt + TEXT, [False] * 3 + [True] * len(TEXT)),
            (prompt + TEXT + loop, [False] * 3 + [True] * (len(TEXT) + 24))]
    return TokenShard.from_rows([Row(tokens=tuple(tokens), supervised=tuple(flags), prompt=number)
                                 for number, (tokens, flags) in enumerate(rows)], [0, 1, 2])


def test_every_answer_of_a_row_is_looked_at() -> None:
    text = shard()
    first, second = text.span(1)[0], text.span(2)[0]
    assert list(answers(text)) == [(0, 3, 27), (0, 30, 62), (1, first + 3, first + 35), (2, second + 3, second + 59)]
    assert list(repetitions(text)) == [(0, 5, 27), (2, second + 37, second + 59)]


def test_the_repeated_part_of_an_answer_is_not_learned() -> None:
    text = shard()
    learned_T = learned_tokens(text)
    assert [int(learned_T[slice(*text.span(row))].sum()) for row in range(3)] == [56 - 22, 32, 56 - 22]
    assert not (learned_T & ~text.supervised_T).any(), "a token that the assistant did not write is learned"
    assert learned_T[:5].tolist() == [False, False, False, True, True]
    assert learned_T[30:62].all(), "the second answer has no loop"


def test_prompts_between_their_surroundings_are_learned() -> None:
    text = shard()
    learned_T = learned_tokens(text, Surroundings(before=(40,), after=(42,)))
    assert [int(learned_T[slice(*text.span(row))].sum()) for row in range(3)] == [35, 33, 35]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory, tiny_target: Target) -> Path:
    """Twelve train and three validation conversations without states."""
    return conversations(tmp_path_factory.mktemp("data"), tiny_target, temperatures=(0.0, 1.0))


@pytest.fixture
def folder(data: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(data, tmp_path / "data"))


def test_every_label_is_counted(folder: Path) -> None:
    manifest = Manifest.load(folder)
    shards = [TokenShard.read(folder / record.file) for record in manifest.split("train")]
    labels = torch.cat([shard.tokens_T[shard.supervised_T] for shard in shards])
    counts_V = count_labels(folder)
    assert torch.equal(counts_V, torch.bincount(labels, minlength=manifest.target.vocab_size))
    assert int(counts_V.sum()) == manifest.total("train", "supervised")


def test_coverage_is_that_of_greedy_held_out_answers(folder: Path) -> None:
    record = Manifest.load(folder).split("validation")[0]
    shard = TokenShard.read(folder / record.file)
    greedy = [token for row in shard.answered_at(0.0) for token, flag in zip(
        shard.tokens_T[slice(*shard.span(row))].tolist(), shard.supervised_T[slice(*shard.span(row))].tolist(),
        strict=True) if flag]
    ids_Q = torch.tensor(sorted(set(greedy))[::2])
    assert coverage(folder, ids_Q) == sum(token in ids_Q.tolist() for token in greedy) / len(greedy)
    assert 0 < coverage(folder, ids_Q) < 1
