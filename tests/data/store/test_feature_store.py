"""States of which some are stored and some computed: the same batches as without any on disk, and the same features."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from draftsmith.data import ChatTemplate, DistillConfig, Manifest, PromptConfig, distill, encode
from draftsmith.data.batches.datamodule import BatchConfig, DraftDataModule
from draftsmith.data.store.feature_shards import state_names
from draftsmith.data.store.feature_store import GIB, affordable
from draftsmith.data.store.state_formats import FORMATS
from draftsmith.modules import Features, MedusaConfig, Target, TargetConfig, UserError
from draftsmith.modules.target.loading.loading import sketch_target
from draftsmith.recipes.__main__ import main
from draftsmith.recipes.commands.memory_plan import stored_bytes
from draftsmith.recipes.commands.pipeline import COMMANDS
from draftsmith.recipes.planning.dry_run import dry_run
from draftsmith.recipes.reading.parsing import Parsed
from draftsmith.recipes.stages.workspace import Workspace
from draftsmith.trainers import fit
from draftsmith.trainers.drafters.medusa import MedusaModule, MedusaTrainConfig

TAPS = (0,)
ONLINE = BatchConfig(row_length=128, rows_per_batch=2, seed=1, states="computed")


def tokens_of(records: Any) -> int:
    return sum(record.tokens for record in records)


def mixed(folder: Path, target: Target, shards: int, itemsize: int = 4, taps: tuple[int, ...] = TAPS) -> BatchConfig:
    """Room for exactly the first shards."""
    wanted = tokens_of(Manifest.load(folder).shards[:shards]) * target.hidden_size * itemsize * len(state_names(taps))
    return replace(ONLINE, states="mixed", store_gib=(wanted + 0.5) / GIB)


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory, tiny_target: Target) -> Path:
    """Two validation and twelve train conversations in five shards, without states."""
    base = tmp_path_factory.mktemp("data")
    texts = ["abcdefghijklmno"[: n + 1] * 2 for n in range(14)]
    (base / "prompts.jsonl").write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    config = DistillConfig(shard_prompts=3, slots=4, max_new_tokens=12, validation_prompts=2)
    source = PromptConfig(origin="file", path=str(base / "prompts.jsonl"))
    distill(tiny_target, source, config, ChatTemplate(tiny_target.tokenizer), base / "out", progress=False)
    return base / "out"


@pytest.fixture
def folder(tokens: Path, tmp_path: Path, tiny_target: Target) -> Path:
    """The same with the states of the first three shards."""
    out = Path(shutil.copytree(tokens, tmp_path / "data"))
    encode(tiny_target, out, TAPS, room=mixed(out, tiny_target, 3).store_bytes, progress=False)
    return out


def same_layout(left: Features, right: Features) -> bool:
    names = ("tokens_BL", "supervised_BL", "segments_BL", "positions_BL")
    return all(torch.equal(getattr(left, name), getattr(right, name)) for name in names)


def test_only_the_first_shards_are_stored(folder: Path, tiny_target: Target) -> None:
    files = sorted(file.name for file in folder.glob("*-*-*.safetensors"))
    held = [record.file for record in Manifest.load(folder).shards[:3]]
    assert len(Manifest.load(folder).shards) == 5
    assert files == sorted(f"{name}-{record}" for record in held for name in ("final", "tap_0"))
    states = sum(tokens_of([record]) * tiny_target.hidden_size * 4 * 2 for record in Manifest.load(folder).shards[:3])
    assert states <= (mixed(folder, tiny_target, 3).store_bytes or 0) < states + 1


def test_rows_with_stored_and_computed_states_equal_those_without_stored_ones(folder: Path,
                                                                              tiny_target: Target) -> None:
    some = DraftDataModule(folder, mixed(folder, tiny_target, 3), TAPS)
    none = DraftDataModule(folder, ONLINE, TAPS)
    kinds = set()
    for number in range(12):
        batch, plain = some.micro_batch(number), none.micro_batch(number)
        assert same_layout(batch, plain)
        assert plain.final_BLD is None
        complete, online = tiny_target.encode(batch, TAPS), tiny_target.encode(plain, TAPS)
        real_BL = batch.segments_BL >= 0
        assert complete.encoded
        for found, wanted in ((complete.final(), online.final()), (complete.taps[0], online.taps[0])):
            scale = float(wanted.abs().max())  # another shape of pass rounds differently
            torch.testing.assert_close(found[real_BL], wanted[real_BL], rtol=0, atol=1e-6 * scale)
        if batch.missing_BL is not None and batch.final_BLD is not None:
            held_BL = real_BL & ~batch.missing_BL
            assert torch.equal(complete.final()[held_BL], batch.final_BLD[held_BL]), "stored states stay as they are"
            assert torch.equal(complete.taps[0][held_BL], batch.taps[0][held_BL])
            kinds |= set(zip(held_BL.any(1).tolist(), batch.missing_BL.any(1).tolist(), strict=True))
            alone = tiny_target.encode(batch.unread(), TAPS)
            assert torch.equal(complete.final()[batch.missing_BL], alone.final()[alone.segments_BL >= 0])
    assert (True, True) in kinds, "no row had states of both kinds"


def test_only_what_is_missing_is_read(folder: Path, tiny_target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    trace = Target.trace

    def watched(self: Target, features: Features, taps: Any = ()) -> Features:
        seen.append(int((features.segments_BL >= 0).sum()))
        return trace(self, features, taps)

    monkeypatch.setattr(Target, "trace", watched)
    data = DraftDataModule(folder, mixed(folder, tiny_target, 3, taps=()))
    module = MedusaModule(tiny_target, MedusaTrainConfig(drafter=MedusaConfig(num_heads=1)))
    batches = [data.micro_batch(number) for number in range(8)]
    wanted = [int((batch.segments_BL >= 0 if batch.missing_BL is None else batch.missing_BL).sum()) for batch in batches
              if not batch.encoded]
    module.configure_model()
    for batch in batches:
        module.encoded(batch)
    assert seen == wanted
    assert 0 < sum(wanted) < sum(int((batch.segments_BL >= 0).sum()) for batch in batches)


def test_how_much_is_stored_changes_no_batch(folder: Path, tiny_target: Target) -> None:
    less, more = (DraftDataModule(folder, mixed(folder, tiny_target, shards), TAPS) for shards in (1, 3))
    assert all(same_layout(less.micro_batch(number), more.micro_batch(number)) for number in range(20))
    assert less.train.states == [None] * 4
    assert [states is not None for states in more.train.states] == [True, True, False, False]


def test_what_others_store_later_changes_no_bit(folder: Path, tiny_target: Target) -> None:
    config = mixed(folder, tiny_target, 3)
    before = [DraftDataModule(folder, config, TAPS).micro_batch(number) for number in range(6)]
    encode(tiny_target, folder, TAPS, progress=False)
    after = [DraftDataModule(folder, config, TAPS).micro_batch(number) for number in range(6)]
    for left, right in zip(before, after, strict=True):
        assert same_layout(left, right)
        assert (left.missing_BL is None) == (right.missing_BL is None)
        assert left.missing_BL is None or (right.missing_BL is not None and torch.equal(left.missing_BL,
                                                                                         right.missing_BL))
    whole = DraftDataModule(folder, replace(config, states="stored", store_gib=None), TAPS)
    assert all(same_layout(whole.micro_batch(number), batch) for number, batch in enumerate(after))


def test_held_out_rows_are_whole_whether_stored_or_not(folder: Path, tiny_target: Target) -> None:
    manifest = Manifest.load(folder)
    assert manifest.shards[0].split == "validation"
    config = replace(mixed(folder, tiny_target, 3), row_length=30)
    data = DraftDataModule(folder, config, TAPS)
    rows = [*data.held_out_features(), *data.held_out_features(1.0)]
    assert tokens_of(manifest.split("validation")) == sum(row.tokens_BL.shape[1] for row in rows)
    assert all(row.encoded for row in rows)


def test_stored_states_of_half_precision_are_widened(tokens: Path, tmp_path: Path, tiny_target: Target) -> None:
    folder = Path(shutil.copytree(tokens, tmp_path / "data"))
    config = mixed(folder, tiny_target, 3, itemsize=2)
    encode(tiny_target, folder, TAPS, form="float16", room=config.store_bytes, progress=False)
    data = DraftDataModule(folder, config, TAPS)
    batches = [batch for batch in map(data.micro_batch, range(8)) if batch.missing_BL is not None]
    assert batches[0].final_BLD is not None
    assert batches[0].final_BLD.dtype == torch.float16
    complete = tiny_target.encode(batches[0], TAPS)
    assert complete.final().dtype == complete.taps[0].dtype == torch.float32
    real_BL = complete.segments_BL >= 0
    online = tiny_target.encode(replace(batches[0], final_BLD=None, missing_BL=None, taps={}), TAPS)
    torch.testing.assert_close(complete.final()[real_BL], online.final()[real_BL], rtol=2e-3, atol=2e-3)


class Killed(Exception):
    """Stands for a kill."""


@pytest.mark.filterwarnings("ignore")
def test_an_interrupted_run_ends_with_the_same_bytes(folder: Path, tmp_path: Path, tiny_target: Target) -> None:
    config = MedusaTrainConfig(drafter=MedusaConfig(num_heads=1), max_steps=6, warmup_steps=1, checkpoint_every=2,
                               validate_every=6, accumulate=2, accelerator="cpu")
    batches = mixed(folder, tiny_target, 3, taps=())

    class Interrupted(MedusaModule):
        def on_train_batch_start(self, batch: Features, batch_idx: int) -> None:
            super().on_train_batch_start(batch, batch_idx)
            if self.global_step == 5:
                raise Killed

    def trained(kind: type[MedusaModule], out: Path) -> bytes:
        fit(kind(tiny_target, config), DraftDataModule(folder, batches), out, progress=False)
        return (out / "best.safetensors").read_bytes()

    whole = trained(MedusaModule, tmp_path / "whole")
    with pytest.raises(Killed):
        trained(Interrupted, tmp_path / "cut")
    encode(tiny_target, folder, progress=False)  # another drafter's run on the same data stores the rest meanwhile
    assert trained(MedusaModule, tmp_path / "cut") == whole


# Recipes --------------------------------------------------------------------------------------------------------------


def parsed(*words: str) -> Parsed[Any]:
    return COMMANDS["run"].parse(["--config", "tiny", *words])


def test_a_recipe_stores_what_has_room_and_trains(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--config", "tiny", "--out", str(tmp_path), "--train.max_steps", "2"]
    assert main(["distill", *words, "--batch.states", "computed"]) == 0
    shards = Manifest.load(tmp_path / "data").shards
    room = (tokens_of(shards[:-1]) * 32 * 4 + 1) / GIB  # the tiny target is 32 wide
    words += ["--batch.states", "mixed", "--batch.store_gib", str(room)]
    assert main(["train", *words]) == 0
    held = {file.name.removeprefix("final-") for file in (tmp_path / "data").glob("final-*")}
    assert held == {record.file for record in shards[:-1]} != set()
    capsys.readouterr()
    assert main(["train", *words]) == 0
    assert capsys.readouterr().out.count("already complete, skipped") == 3


def test_a_limit_that_is_not_set_decides_nothing(tmp_path: Path) -> None:
    """Runs from before there was one are resumed."""
    known = {"row_length": 128, "rows_per_batch": 4, "seed": 0, "states": "stored", "loops": "cut",
             "own_prompts": False}
    for words, batch in (([], known), (["--batch.prefetch", "0"], known),
                         (["--batch.states", "mixed", "--batch.store_gib", "2"],
                          known | {"states": "mixed", "store_gib": 2.0})):
        given = parsed("--out", str(tmp_path), *words)
        assert Workspace(given.values, given.settings).decisive["batch"] == batch


def test_the_plan_counts_what_has_room(tmp_path: Path) -> None:
    words = ("--batch.states", "mixed", "--out", str(tmp_path / "out"))
    sketch = sketch_target(TargetConfig(name="tiny-random"))
    every = stored_bytes(parsed("--out", str(tmp_path)).values, sketch, 1)
    few, many = (stored_bytes(parsed(*words, "--batch.store_gib", str(room)).values, sketch, 1)
                 for room in (1e-5, 1.0))
    assert few == int(1e-5 * GIB) < many == every


def test_a_target_that_learns_has_no_states_to_store(tmp_path: Path) -> None:
    words = ("--batch.states", "mixed", "--batch.store_gib", "1", "--out", str(tmp_path))
    sketch = sketch_target(TargetConfig(name="tiny-random"))
    assert not dry_run(parsed(*words).values, sketch).changes_target
    with pytest.raises(UserError, match=r"states is 'mixed', but Medusa2Module trains the target, .* set batch.states"):
        dry_run(parsed(*words, "--family", "medusa2").values, sketch)


@pytest.mark.parametrize(("settings", "message"), [
    ({"states": "mixed"}, r"batch.store_gib must be above 0 with batch.states mixed, got None; say how many GiB"),
    ({"states": "mixed", "store_gib": 0.0}, r"must be above 0 with batch.states mixed, got 0.0; .*states: computed"),
    ({"states": "mixed", "store_gib": -2.0}, r"must be above 0 with batch.states mixed, got -2.0"),
    ({"states": "mixed", "store_gib": float("inf")}, r"must be above 0 with batch.states mixed, got inf"),
    ({"states": "computed", "store_gib": 2.0}, r"store_gib 2.0 means nothing with batch.states computed; set .*mixed"),
    ({"store_gib": 2.0}, r"batch.store_gib 2.0 means nothing with batch.states stored"),
    ({"states": "both"}, r"batch.states must be stored, computed, mixed or auto, got 'both'"),
])
def test_impossible_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        BatchConfig(**settings)


def test_too_little_room_and_missing_states_are_reported(tokens: Path, folder: Path, tiny_target: Target) -> None:
    small = replace(ONLINE, states="mixed", store_gib=2.0**-20)
    with pytest.raises(UserError, match=r"store_gib 9.54e-07 has no room for the states of the first shard, which take "
                                        r"[\d.e-]+ GiB; raise it, or set batch.states: computed"):
        DraftDataModule(folder, small, TAPS)
    with pytest.raises(UserError, match=r"holds no states; run draftsmith distill .* batch.states: computed"):
        DraftDataModule(tokens, mixed(tokens, tiny_target, 3), TAPS)
    with pytest.raises(UserError, match=r"holds no states final for .*; run draftsmith distill"):
        DraftDataModule(folder, mixed(folder, tiny_target, 4), TAPS)
    manifest = Manifest.load(folder)
    assert affordable(manifest, (), FORMATS["float32"], None) == manifest.shards
