"""Writers of the training rows: the target, perhaps in another number format than for held-out ones, the given text, a
draft, or a mix; a kill changes no byte."""

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from draftsmith.data import ChatTemplate, DistillConfig, Manifest, PromptConfig, WantedStates, Writer, distill
from draftsmith.data.answers import distill_task
from draftsmith.data.answers.answering import source_of
from draftsmith.data.answers.shard_queue import FinishedShard, ShardQueue
from draftsmith.data.prompts.given_answers import GivenAnswers
from draftsmith.data.store.feature_shards import read_features
from draftsmith.data.store.token_store import SOURCES
from draftsmith.modules import DecodeSettings, Medusa, Request, Target, UserError, decode
from draftsmith.modules.families.medusa.drafter import MedusaConfig
from draftsmith.modules.policies.trees import Chain, StaticTree
from draftsmith.modules.target.loading.tiny_model import tiny_model, tiny_tokenizer
from draftsmith.modules.token_tree import Topology
from draftsmith.modules.verification.acceptance_rules import AcceptAll
from draftsmith.recipes.stages.answer_workers import require_teacher
from draftsmith.trainers import draft_module, train_config
from safetensors.torch import load_file
from support.data import data_folders
from support.data.data_folders import answered, contents, many, shards, write_prompts
from support.drafters import ScriptedDrafter
from support.processes import Killed

SMALL = DistillConfig(shard_prompts=6, slots=3, max_new_tokens=8, temperatures=(0.0, 1.0), validation_prompts=2)
MIX: dict[str, float] = {"target": 0.5, "text": 0.25, "draft": 0.25}
DRAFT = {"draft": "some/folder"}
SEA = "The sea is wide and the sea is deep, and nobody who sails on it knows how many fish there are below the keel. "


def draft(target: Target, digest: str = "d1", seed: int = 3) -> Writer:
    torch.manual_seed(seed)
    drafter = Medusa.create(MedusaConfig(num_heads=3), target)
    for parameter in drafter.parameters():
        parameter.data += 0.3 * torch.randn_like(parameter)
    return Writer.of(drafter.eval(), digest)


def make(target: Target, prompts: PromptConfig, config: DistillConfig, out: Path,
         writer: Writer | None = None) -> Manifest:
    return distill(target, prompts, config, ChatTemplate(target.tokenizer), out, writer=writer, progress=False)


def rows(out: Path) -> list[tuple[list[int], list[bool], int, str]]:
    """(tokens, supervised, prompt, source) of the train rows."""
    sources = [SOURCES[number] for shard in shards(out) for number in shard.sources_R.tolist()]
    return [(*row[:3], source) for row, source in zip(data_folders.rows(out), sources, strict=True)]


# Shares ---------------------------------------------------------------------------------------------------------------


def test_shares_are_kept_and_hang_on_the_prompt_alone() -> None:
    config = replace(SMALL, answered_by=MIX, **DRAFT)
    dealt = [source_of(number, config.shares, seed=5) for number in range(4000)]
    counts = Counter(dealt)
    for name, share in MIX.items():
        assert counts[name] / 4000 == pytest.approx(share, abs=0.03)
    assert dealt[1234] == source_of(1234, dict(reversed(config.shares.items())), seed=5)
    assert dealt != [source_of(number, config.shares, seed=6) for number in range(4000)]
    assert {source_of(number, {"text": 1.0}, 0) for number in range(50)} == {"text"}


# The draft's own words ------------------------------------------------------------------------------------------------


def test_the_draft_is_taken_at_its_word(tiny_target_f64: Target) -> None:
    """A draft that counts writes 3 tokens, the target the next one, and so on; the loop does not call it lossless."""
    target, prompt = tiny_target_f64, (5, 6, 7, 8)
    drafter = ScriptedDrafter(target.vocab_size, [], "oracle")
    drafter._truth = lambda known, depth: 20 + (len(known) + depth) % 7  # type: ignore[method-assign]
    settings = DecodeSettings(lossy=AcceptAll())
    result = decode(target, [Request(prompt, 0, 13)], settings, drafter=drafter, policy=Chain(3))
    assert not result.stats.lossless
    found = result.generations[0].tokens
    assert result.generations[0].emitted == [4, 4, 4]
    for place, token in enumerate(found):
        if place % 4 == 0:
            # The first token and every bonus are the target's after everything before them.
            with target.native() as model, torch.no_grad():
                logits = model(torch.tensor([[*prompt, *found[:place]]])).logits[0, -1]
            assert token == int(logits.argmax())
        else:
            assert token == 20 + (len(prompt) + place) % 7


def test_only_a_chain_is_taken_as_it_is(tiny_target: Target) -> None:
    drafter = ScriptedDrafter(tiny_target.vocab_size, [], "random")
    tree = StaticTree(Topology.from_paths([(), (0,), (1,)]))
    with pytest.raises(ValueError, match="only a chain is taken as it is, here a node has 2 children"):
        decode(tiny_target, [Request((5, 6), 0, 4)], DecodeSettings(lossy=AcceptAll()), drafter=drafter, policy=tree)


def test_a_draft_writes_the_rows_and_the_target_the_held_out_ones(tmp_path: Path, tiny_target: Target) -> None:
    prompts, config = write_prompts(tmp_path, many(14)), replace(SMALL, answered_by="draft", **DRAFT)
    manifest = make(tiny_target, prompts, config, tmp_path / "draft", draft(tiny_target))
    own = make(tiny_target, prompts, SMALL, tmp_path / "target")
    assert manifest.total("train", "by_draft") == manifest.total("train", "rows") == 12
    assert own.total("train", "by_target") == 12
    assert {source for *_, source in rows(tmp_path / "draft")} == {"draft"}
    for mine, other in zip(rows(tmp_path / "draft"), rows(tmp_path / "target"), strict=True):
        prompt = mine[1].index(True)
        assert mine[0][: prompt + 1] == other[0][: prompt + 1], "prompt and first token are the target's"
        assert mine[0] != other[0]
    held = [(tmp_path / name / "validation-00000.safetensors").read_bytes() for name in ("draft", "target")]
    assert held[0] == held[1]


def test_the_chain_is_no_longer_than_the_family_reaches(tiny_target: Target) -> None:
    assert draft(tiny_target).policy.max_size == 1 + 3


def test_a_hard_objective_is_refused_on_a_drafts_words(tiny_target: Target) -> None:
    with pytest.raises(UserError, match=r"a draft writes train rows, .* objective is hard .*; choose another"):
        require_teacher(draft_module(Medusa)(tiny_target, train_config(Medusa)(objective="hard")))
    require_teacher(draft_module(Medusa)(tiny_target, train_config(Medusa)(objective="lk_hybrid")))


# Given text -----------------------------------------------------------------------------------------------------------


def test_documents_are_learnt_whole_in_pieces(tmp_path: Path, tiny_target: Target,
                                              monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distill_task, "DOCUMENT_TOKENS", 100)
    texts = [SEA * 9 + str(number) for number in range(5)]
    prompts = write_prompts(tmp_path, [{"text": text} for text in texts])
    config = replace(SMALL, answered_by="text")
    manifest = make(tiny_target, prompts, config, tmp_path / "out")
    found, tokenizer = rows(tmp_path / "out"), tiny_target.tokenizer
    assert max(len(tokens) for tokens, *_ in found) == 100
    for number in range(2, 5):
        pieces = [one for one in found if one[2] == number]
        joined = [token for tokens, *_ in pieces for token in tokens]
        learnt = [token for tokens, flags, *_ in pieces for token, flag in zip(tokens, flags, strict=True) if flag]
        assert joined == tokenizer(texts[number])["input_ids"][: len(joined)]
        assert learnt == tokenizer(texts[number], add_special_tokens=False)["input_ids"][: len(learnt)]
        assert len(tokenizer(texts[number])["input_ids"]) - len(joined) <= 1
    assert manifest.total("train", "by_text") == len(found)


def test_of_a_held_out_document_the_target_continues_the_beginning(tmp_path: Path, tiny_target: Target) -> None:
    prompts = write_prompts(tmp_path, [{"text": SEA + str(number)} for number in range(5)])
    make(tiny_target, prompts, replace(SMALL, answered_by="text"), tmp_path / "out")
    tokens, flags, *_ = next(data_folders.rows(tmp_path / "out", "validation"))
    opening = flags.index(True)
    assert tokens[:opening] == tiny_target.tokenizer(SEA + "0")["input_ids"][:32]
    greedy = decode(tiny_target, [Request(tuple(tokens[:opening]), 0, 8)], DecodeSettings()).generations[0].tokens
    assert tokens[opening:] == greedy


@pytest.mark.parametrize(("lines", "settings", "message"), [
    ([{"text": SEA + str(number)} for number in range(6)], {}, "6 of 6 rows .* a plain document is not answered"),
    ([{"text": SEA + str(number)} for number in range(6)], {"answered_by": "text", "test_prompts": 1},
     "plain documents are no prompts .* set distill.test_prompts: 0"),
    (many(8), {"answered_by": "text"}, "has no answer of its own; .* distill.answered_by: target"),
    (many(30), {"answered_by": {"target": 0.5, "text": 0.5}}, "has no answer of its own"),
])
def test_prompts_that_do_not_fit_the_source(lines: list[dict[str, Any]], settings: dict[str, Any], message: str,
                                            tmp_path: Path, tiny_target: Target) -> None:
    with pytest.raises(UserError, match=message):
        make(tiny_target, write_prompts(tmp_path, lines), replace(SMALL, **settings), tmp_path / "out")


# Mixes ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("at", [0, 1, 2])
def test_a_killed_mix_ends_in_the_same_bytes(at: int, tmp_path: Path, tiny_target: Target,
                                             monkeypatch: pytest.MonkeyPatch) -> None:
    prompts, config = write_prompts(tmp_path, answered(26)), replace(SMALL, answered_by=MIX, **DRAFT)
    manifest = make(tiny_target, prompts, config, tmp_path / "peace", draft(tiny_target))
    found = rows(tmp_path / "peace")
    assert {source for *_, source in found} == set(SOURCES)
    assert [number for _, _, number, _ in found] == sorted(number for _, _, number, _ in found)
    for _, _, number, source in found:
        assert source == source_of(number, config.shares, config.seed)
    assert sum(manifest.total("train", f"by_{name}") for name in SOURCES) == len(found)

    publish = ShardQueue.publish

    def dies(self: ShardQueue, number: int | None, shard: FinishedShard) -> None:
        if number is not None and number >= at:
            raise Killed
        publish(self, number, shard)

    monkeypatch.setattr(ShardQueue, "publish", dies)
    with pytest.raises(Killed):
        make(tiny_target, prompts, config, tmp_path / "killed", draft(tiny_target))
    monkeypatch.undo()
    make(tiny_target, prompts, config, tmp_path / "killed", draft(tiny_target))
    assert contents(tmp_path / "killed") == contents(tmp_path / "peace")


def test_the_manifest_hangs_on_sources_shares_and_the_artifact(tmp_path: Path, tiny_target: Target) -> None:
    prompts, hashes = write_prompts(tmp_path, answered(14)), set()
    shares = {"target": 0.5, "text": 0.5}
    for number, (settings, writer) in enumerate([
        ({}, None), ({"answered_by": "text"}, None), ({"answered_by": shares}, None),
        ({"answered_by": {"target": 0.6, "text": 0.4}}, None),
        ({"answered_by": "draft", **DRAFT}, draft(tiny_target)),
        ({"answered_by": "draft", **DRAFT}, draft(tiny_target, "d2")),
    ]):
        hashes.add(make(tiny_target, prompts, replace(SMALL, **settings), tmp_path / str(number), writer).hash)
    assert len(hashes) == 6
    with pytest.raises(UserError, match=r"started with other settings: distill.draft was 'd2' and is now 'd1'"):
        make(tiny_target, prompts, replace(SMALL, answered_by="draft", **DRAFT), tmp_path / "5", draft(tiny_target))
    elsewhere = replace(SMALL, answered_by="draft", draft="elsewhere")
    moved = make(tiny_target, prompts, elsewhere, tmp_path / "4", draft(tiny_target))
    assert moved == Manifest.load(tmp_path / "4"), "the folder's name is no part of it"


def test_texts_that_are_all_refused_end_no_mix(tmp_path: Path, tiny_target: Target,
                                               monkeypatch: pytest.MonkeyPatch) -> None:
    """They are skipped like rows that cannot be read, where so many are allowed."""
    def refuse(*_given: object) -> None:
        raise UserError("this conversation cannot be rendered")

    monkeypatch.setattr(GivenAnswers, "text", refuse)
    prompts = replace(write_prompts(tmp_path, answered(26)), most_skipped=0.9)
    mixed = replace(SMALL, answered_by={"target": 0.5, "text": 0.5})
    manifest = make(tiny_target, prompts, mixed, tmp_path / "mix")
    assert manifest.total("train", "by_text") == 0
    assert manifest.total("train", "by_target") > 0
    with pytest.raises(UserError, match=r"26 of 26 rows .* cannot be rendered"):
        make(tiny_target, prompts, replace(SMALL, answered_by="text"), tmp_path / "text")


FORMATTED = DistillConfig(shard_prompts=8, slots=4, max_new_tokens=24, temperatures=(0.0, 1.0), validation_prompts=2)
HALF = replace(FORMATTED, train_dtype="bfloat16")


def tiny(dtype: torch.dtype) -> Target:
    return Target(tiny_model().to(dtype), tiny_tokenizer(), name="tiny-random")


def distilled(out: Path, target: Target, config: DistillConfig, train_target: Target | None = None) -> dict[str, bytes]:
    prompts = write_prompts(out, many(18))
    distill(target, prompts, config, ChatTemplate(target.tokenizer), out / "data", train_target=train_target,
            states=[WantedStates()], progress=False)
    return contents(out / "data")


def test_train_rows_are_those_of_the_other_format_and_held_out_rows_those_of_the_targets_own(tmp_path: Path) -> None:
    full, half = tiny(torch.float32), tiny(torch.bfloat16)
    own = distilled(tmp_path / "own", full, FORMATTED)
    other = distilled(tmp_path / "other", half, FORMATTED)
    mixed = distilled(tmp_path / "mixed", full, HALF, half)

    shards = [name for name in own if name.startswith("train-")]
    assert any(own[name] != other[name] for name in shards), "the formats write different answers"
    assert [mixed[name] for name in shards] == [other[name] for name in shards]
    assert own["validation-00000.safetensors"] != other["validation-00000.safetensors"]
    assert mixed["validation-00000.safetensors"] == own["validation-00000.safetensors"]


def test_states_are_stored_in_the_targets_own_format(tmp_path: Path) -> None:
    distilled(tmp_path, tiny(torch.float32), HALF, tiny(torch.bfloat16))
    assert read_features(tmp_path / "data").dtype == "float32"
    kept = load_file(tmp_path / "data" / "final-train-00000.safetensors")
    assert all(torch.equal(states, states.bfloat16().float()) for states in kept.values()), "recorded, not read again"


def test_a_target_in_another_format_than_the_setting_is_refused(tmp_path: Path) -> None:
    full, half = tiny(torch.float32), tiny(torch.bfloat16)
    fastest = replace(FORMATTED, train_dtype="fastest")
    for config, given in ((FORMATTED, half), (HALF, None), (HALF, full), (fastest, half)):
        with pytest.raises(ValueError, match=r"^train_target is in"):
            distilled(tmp_path, full, config, given)
