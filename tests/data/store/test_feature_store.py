"""States stored with their shard: those of the second pass, and the same bytes after every kill. Their
size is predicted, and refused where the disk cannot hold them."""

import itertools
import json
import shutil
import time
from collections import namedtuple
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from draftsmith.data import (
    ChatTemplate,
    DistillConfig,
    Manifest,
    Prompt,
    PromptConfig,
    TokenShard,
    WantedStates,
    Writer,
    distill,
)
from draftsmith.data.answers import distill as distilling
from draftsmith.data.answers.answering import Answerer, states_of
from draftsmith.data.answers.shard_queue import LOCKS, clear_queue
from draftsmith.data.store import feature_store, token_store
from draftsmith.data.store.feature_shards import open_features
from draftsmith.data.store.feature_store import Encoding, in_words, require_room
from draftsmith.modules import DecodeSettings, Medusa, MedusaConfig, Target, TargetConfig, UserError
from draftsmith.modules.files.folders import remove_leftovers
from draftsmith.modules.target.loading.loading import sketch_target
from draftsmith.modules.target.loading.tiny_model import tiny_model, tiny_tokenizer
from draftsmith.recipes.__main__ import main
from draftsmith.recipes.commands.pipeline import COMMANDS
from draftsmith.recipes.recipe import dry_run
from support.data.chat_templates import THINKING
from support.data.data_folders import WORDS, answered, contents, conversations, encode, many, write_prompts
from support.processes import Killed, ended, killed_after, start

SMALL = DistillConfig(shard_prompts=4, slots=3, max_new_tokens=8, temperatures=(0.0, 1.0), validation_prompts=2,
                      test_prompts=1)
BOTH = (WantedStates(taps=(1,)), WantedStates(taps=(0,)))  # Two trainings that read different layers


def run(target: Target, prompts: PromptConfig, config: DistillConfig, out: Path, states: Sequence[WantedStates] = BOTH,
        writer: Writer | None = None) -> Manifest:
    template = ChatTemplate(target.tokenizer)
    return distill(target, prompts, config, template, out, states=states, writer=writer, progress=False)


def gap(target: Target, folder: Path, taps: tuple[int, ...] = (0, 1)) -> float:
    """The largest difference between the states in a folder and those that a second pass stores in a copy of it."""
    other = Path(shutil.copytree(folder, folder.with_name(f"{folder.name}-again")))
    for file in (other / "features.json", *other.glob("final-*"), *other.glob("tap_*")):
        file.unlink()
    records = Manifest.load(folder).shards
    assert Encoding(target, folder, taps).tokens == 0
    Encoding(target, other, taps).run(progress=False)
    found = 0.0
    for record, *pair in zip(records, *(open_features(one, records, taps) for one in (folder, other)), strict=True):
        slices = [one.slices(0, record.tokens) for one in pair]
        mine, theirs = ({kind: one.states() for kind, one in ((-1, final), *taps.items())} for final, taps in slices)
        assert {states.shape for states in (*mine.values(), *theirs.values())} == {(record.tokens, target.hidden_size)}
        found = max([found, *(float((mine[kind].double() - theirs[kind].double()).abs().max()) for kind in mine)])
    return found


def draft(target: Target) -> Writer:
    torch.manual_seed(3)
    return Writer.of(Medusa.create(MedusaConfig(num_heads=3), target).to(target.dtype).eval(), "d1")


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Number of rows of each shard that were read once more while it was made."""
    counts: list[int] = []
    original = feature_store.read_rows

    def counted(target: Target, shard: TokenShard, rows: Sequence[int], *rest: Any) -> Any:
        counts.append(len(rows))
        return original(target, shard, rows, *rest)

    monkeypatch.setattr(feature_store, "read_rows", counted)
    return counts


def test_decoded_rows_have_the_states_of_the_second_pass(tmp_path: Path, tiny_target_f64: Target,
                                                         read: list[int]) -> None:
    target = tiny_target_f64
    run(target, write_prompts(tmp_path, many(12)), SMALL, tmp_path / "file")
    run(target, PromptConfig(), replace(SMALL, budget_tokens=24), tmp_path / "own")
    assert set(read) == {0}, "every token was decoded"
    for name in ("file", "own"):
        assert gap(target, tmp_path / name) < 1e-9


def test_states_in_float32_differ_by_rounding(tmp_path: Path, tiny_target: Target) -> None:
    run(tiny_target, write_prompts(tmp_path, many(12)), SMALL, tmp_path / "out")
    assert gap(tiny_target, tmp_path / "out") < 1e-4


def test_turns_and_documents_have_the_states_of_the_second_pass(tmp_path: Path, tiny_target_f64: Target,
                                                                read: list[int]) -> None:
    turns = [{"turns": [f"{word} one", f"{word} two", f"{word} three"]} for word in WORDS]
    run(tiny_target_f64, write_prompts(tmp_path / "a", turns), replace(SMALL, test_prompts=0), tmp_path / "turns")
    # Of validation, both kinds, and of two shards; none of train of the documents below.
    assert read == [0, 0, 0]
    assert gap(tiny_target_f64, tmp_path / "turns") < 1e-9
    read.clear()
    texts = write_prompts(tmp_path / "b", [{"text": f"{' '.join(WORDS)} {number}"} for number in range(5)])
    config = replace(SMALL, answered_by="text", test_prompts=0)
    run(tiny_target_f64, texts, config, tmp_path / "texts")
    assert read == [0]
    held = {file.name for file in (tmp_path / "texts").glob("final-*")}
    assert held == {"final-validation-00000.safetensors"}, "nothing of given text was decoded: encode reads it"
    assert Encoding(tiny_target_f64, tmp_path / "texts").tokens == Manifest.load(tmp_path / "texts").total(
        "train", "tokens")


def test_rewritten_turns_have_a_row_and_states_each(tiny_target_f64: Target) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = THINKING.replace("split('</think>')", "split('e')")
    answerer = Answerer(tiny_target_f64, ChatTemplate(tokenizer), DecodeSettings(batch_size=2), 40, lambda _: None)
    prompts = [(n, Prompt.from_turns(word, "go on", id=str(n))) for n, word in enumerate(WORDS)]
    conversations = answerer.answer(prompts, (1.0,), taps=(0,))
    assert {len(one.rows) for one in conversations} == {1, 2}
    for one in conversations:
        assert [states.tokens for states in one.states] == [row.tokens for row in one.rows]
        assert all(states is not None for states in states_of([one]))


def test_states_of_other_tokens_are_never_taken(tiny_target: Target) -> None:
    answerer = Answerer(tiny_target, ChatTemplate(tiny_target.tokenizer), DecodeSettings(), 8, lambda _: None)
    [one] = answerer.answer([(0, Prompt.from_turns("a", id="0"))], (0.0,), taps=())
    [row] = one.rows
    assert states_of([one])[0] is one.states[0]
    changed = (*row.tokens[:-1], row.tokens[-1] ^ 1)
    for tokens in (changed, row.tokens[:-1], (*row.tokens, 5)):
        one.rows = [replace(row, tokens=tokens)]
        assert states_of([one]) == [None]


@pytest.mark.parametrize("taps", [(), (0,)])
def test_rows_of_a_mix_are_read_where_they_were_not_recorded(taps: tuple[int, ...], tmp_path: Path,
                                                             tiny_target_f64: Target, read: list[int]) -> None:
    """Medusa taps no layer: where one is wanted, the rows that it wrote are read once more, as given text always is."""
    config = replace(SMALL, shard_prompts=8, answered_by={"target": 0.5, "text": 0.25, "draft": 0.25},
                     draft="some/folder")
    manifest = run(tiny_target_f64, write_prompts(tmp_path, answered(16)), config, tmp_path / "out",
                   [WantedStates(taps=taps)], draft(tiny_target_f64))
    assert manifest.total("train", "by_draft") > 0 < manifest.total("train", "by_text")
    assert sum(read) == manifest.total("train", "by_text") + (manifest.total("train", "by_draft") if taps else 0)
    assert gap(tiny_target_f64, tmp_path / "out", taps) < 1e-9


def test_nothing_is_kept_that_nobody_wants(tmp_path: Path, tiny_target: Target) -> None:
    run(tiny_target, write_prompts(tmp_path, many(15)), SMALL, tmp_path / "none", states=())
    assert not list((tmp_path / "none").glob("final-*"))
    assert not (tmp_path / "none" / "features.json").exists()


@pytest.mark.long
@pytest.mark.parametrize("source", ["mix", "target"])
def test_a_run_killed_at_any_write_ends_in_the_same_bytes(source: str, tmp_path: Path) -> None:
    target, prompts = Target(tiny_model(), tiny_tokenizer(), name="tiny-random"), write_prompts(tmp_path, answered(9))
    config, writer = replace(SMALL, shard_prompts=3, max_new_tokens=4), None
    if source == "mix":
        shares = {"target": 0.5, "draft": 0.5}
        config = replace(config, shard_prompts=6, answered_by=shares, draft="some/folder")
        writer = draft(target)
    run(target, prompts, config, tmp_path / "whole", writer=writer)
    expected = contents(tmp_path / "whole")
    for last in itertools.count():
        out = tmp_path / f"killed-{last}"
        with suppress(Killed), killed_after(last):
            run(target, prompts, config, out, writer=writer)
            break
        if (out / "manifest.json").is_file():
            records = Manifest.load(out).shards
            assert len(open_features(out, records, (0, 1))) == len(records), "states come before the manifest"
        run(target, prompts, config, out, writer=writer)
        assert contents(out) == expected, f"killed before write {last}"
    assert last >= 12
    assert contents(tmp_path / f"killed-{last}") == expected


def test_finished_shards_keep_their_states_when_others_are_wanted(tmp_path: Path, tiny_target: Target) -> None:
    """A run that was stopped goes on for another training: what is missing is left to encode."""
    prompts, out = write_prompts(tmp_path, many(12)), tmp_path / "out"
    whole = run(tiny_target, prompts, SMALL, out, states=())
    replace(whole, shards=whole.shards[:-1], candidates=11, complete=False).save(out)
    assert run(tiny_target, prompts, SMALL, out) == whole
    assert {file.name for file in out.glob("final-*")} == {f"final-{whole.shards[-1].file}"}
    assert Encoding(tiny_target, out, (0,)).tokens == sum(record.tokens for record in whole.shards[:-1])
    before = (out / f"tap_1-{whole.shards[-1].file}").read_bytes()
    Encoding(tiny_target, out, (0, 1)).run(progress=False)
    assert (out / f"tap_1-{whole.shards[-1].file}").read_bytes() == before


def test_a_damaged_list_of_states_is_named_before_anything_is_decoded(
    tmp_path: Path, tiny_target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "features.json").write_text("{")
    monkeypatch.setattr(distilling, "set_aside", lambda *_given: pytest.fail("decoded"))
    with pytest.raises(UserError, match=r"features.json cannot be read as JSON"):
        run(tiny_target, write_prompts(tmp_path, many(8)), SMALL, out)


def test_the_time_of_states_is_noted(tmp_path: Path, tiny_target: Target) -> None:
    run(tiny_target, write_prompts(tmp_path, many(8)), SMALL, tmp_path / "out")
    stats = json.loads((tmp_path / "out" / "stats.json").read_text())
    assert 0 < stats["states_seconds"] < stats["seconds"]


ONE_TAP = (0,)


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


def test_two_recipes_that_store_states_of_the_same_data_at_once_keep_each_others(
    tokens: Path, tiny_target: Target
) -> None:
    # Both have read the list before either adds to it.
    first, second = Encoding(tiny_target, tokens, ()), Encoding(tiny_target, tokens, ONE_TAP)
    second.run(progress=False)
    first.run(progress=False)
    assert not Encoding(tiny_target, tokens, ONE_TAP).missing


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


Disk = namedtuple("Disk", "total used free")


def free(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    """Let every disk have so many free bytes."""
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Disk(2**50, 0, count))


def test_bytes_are_said_in_words() -> None:
    assert [in_words(count) for count in (1024, 3 * 2**20, 5 * 2**30 + 2**29, 38 * 2**40)] == [
        "1.0 KiB", "3.0 MiB", "5.5 GiB", "38.0 TiB"]


def test_a_disk_without_room_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    free(monkeypatch, 2**20)
    folder = tmp_path / "not" / "there"
    assert require_room(folder, 2**20, "the states") == "the states take 1.0 MiB, 1.0 MiB are free"
    with pytest.raises(UserError, match=r"the states take 1.5 MiB, and the disk of \S+there has 1.0 MiB free; make"):
        require_room(folder, 3 * 2**19, "the states")


def test_answers_are_not_written_for_which_the_states_have_no_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    free(monkeypatch, 1000)
    assert main(["distill", "--config", "tiny", "--out", str(tmp_path), "--distill.budget_tokens", "1200"]) == 2
    # The tiny target is 32 wide, in float32, and Medusa reads final states alone.
    assert f"the states of 1,200 answer tokens take {in_words(1200 * 32 * 4)}, and the disk" in capsys.readouterr().err
    assert not (tmp_path / "data").exists()


def test_data_do_not_grow_for_which_the_states_have_no_room(copied_run: Path, monkeypatch: pytest.MonkeyPatch,
                                                            capsys: pytest.CaptureFixture[str]) -> None:
    shutil.rmtree(copied_run / "train")
    before = Manifest.load(copied_run / "data")
    missing = 1600 - before.total("train", "supervised")
    free(monkeypatch, 1000)
    assert main(["distill", "--config", "tiny", "--out", str(copied_run), "--distill.budget_tokens", "1600"]) == 2
    said = capsys.readouterr().err
    assert f"the states of {missing:,} answer tokens take {in_words(missing * 32 * 4)}, and the disk" in said
    assert Manifest.load(copied_run / "data") == before


def test_a_second_pass_says_what_it_writes_and_is_refused_without_room(
    copied_run: Path, tiny_target: Target, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    data, tokens = copied_run / "data", sum(record.tokens for record in Manifest.load(copied_run / "data").shards)
    assert Encoding(tiny_target, data).bytes == 0
    assert Encoding(tiny_target, data, (0, 1)).bytes == tokens * 2 * 32 * 4
    with monkeypatch.context() as patch:
        free(patch, 1000)
        assert encode(tiny_target, data), "nothing is to be written"
        with pytest.raises(UserError, match=rf"the states of {tokens:,} tokens take .* has 1.0 KiB free; make room"):
            encode(tiny_target, data, (0, 1))
    assert not list(data.glob("tap_*"))
    words = ["distill", "--config", "tiny", "--out", str(copied_run), "--family", "eagle3"]
    assert main(words) == 0
    assert f"the states of {tokens:,} tokens take " in capsys.readouterr().out


def test_each_kind_of_state_takes_its_bytes(tiny_target: Target) -> None:
    assert WantedStates(taps=(0, 1)).bytes(10, tiny_target) == 10 * 3 * tiny_target.hidden_size * 4
    assert WantedStates(taps=(0, 1), form="int8").bytes(10, tiny_target) == 10 * 3 * (tiny_target.hidden_size + 4)
