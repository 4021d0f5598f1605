"""Micro-batch n depends on the seed, n, the rank and the world size alone, and every token is seen once an epoch."""

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from draftsmith.data import ChatTemplate, DistillConfig, Manifest, PromptConfig, TokenShard, distill
from draftsmith.data.datamodule import BatchConfig, DraftDataModule
from draftsmith.data.store.feature_shards import pad
from draftsmith.data.store.token_store import Row, hash_file, prompts_learnable
from draftsmith.modules import Features, Target, UserError
from support.data.data_folders import conversations, encode, shard_record

lightning = pytest.importorskip("lightning")
CONFIG = BatchConfig(row_length=96, rows_per_batch=2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tiny_target: Target) -> Path:
    """Twelve train and three validation conversations of 41 to 63 tokens, with states."""
    out = conversations(tmp_path_factory.mktemp("data"), tiny_target)
    encode(tiny_target, out, (0,))
    return out


def same(left: Features, right: Features) -> bool:
    return torch.equal(left.tokens_BL, right.tokens_BL) and torch.equal(left.final(), right.final())


def segments(batch: Features) -> list[tuple[int, ...]]:
    """The tokens of every segment of a batch."""
    found = []
    for tokens, numbers in zip(batch.tokens_BL.tolist(), batch.segments_BL.tolist(), strict=True):
        for number in range(max(numbers) + 1):
            found.append(tuple(token for token, own in zip(tokens, numbers, strict=True) if own == number))
    return found


def epoch(data: DraftDataModule, number: int = 0) -> range:
    """Numbers of the batches of an epoch."""
    data.plan.batch(10_000)
    return range(data.plan.ends[number - 1] if number else 0, data.plan.ends[number])


def test_a_micro_batch_is_the_same_whenever_it_is_made(folder: Path) -> None:
    first, second = DraftDataModule(folder, CONFIG), DraftDataModule(folder, CONFIG)
    in_order = [first.packed_batch(number).to("cpu") for number in range(20)]
    assert all(same(second.packed_batch(number).to("cpu"), in_order[number]) for number in reversed(range(20)))


def test_every_conversation_is_seen_once_an_epoch_in_a_new_order(folder: Path) -> None:
    data = DraftDataModule(folder, CONFIG)
    epochs = [[segment for n in epoch(data, number) for segment in segments(data.packed_batch(n).to("cpu"))]
              for number in range(2)]
    whole = Counter(tuple(data.train.piece(window).tokens_N.tolist()) for window in data.windows)
    assert len(data.windows) == 12
    assert Counter(epochs[0]) == Counter(epochs[1]) == whole
    assert epochs[0] != epochs[1]


def test_ranks_share_one_order(folder: Path) -> None:
    data = DraftDataModule(folder, CONFIG)
    alone = [data.packed_batch(number).to("cpu") for number in range(12)]
    together = [data.packed_batch(number, rank, 3).to("cpu") for number in range(4) for rank in range(3)]
    assert all(same(left, right) for left, right in zip(alone, together, strict=True))


def test_states_are_the_targets_at_those_tokens(folder: Path, tiny_target: Target) -> None:
    data = DraftDataModule(folder, CONFIG, taps=(0,))
    batch = data.packed_batch(3).to("cpu")
    again = tiny_target.encode(replace(batch, final_BLD=None, taps={}), (0,))
    real = batch.segments_BL >= 0
    torch.testing.assert_close(batch.final()[real], again.final()[real], rtol=0, atol=1e-4)
    torch.testing.assert_close(batch.taps[0][real], again.taps[0][real], rtol=0, atol=1e-4)


def test_long_conversations_become_windows_of_stored_states(folder: Path) -> None:
    data = DraftDataModule(folder, replace(CONFIG, row_length=20), taps=(0,))
    whole = DraftDataModule(folder, CONFIG, taps=(0,))
    assert all(window.stop - window.start <= 20 for window in data.windows)
    for window in data.windows:
        piece = data.train.piece(window)
        assert bool(piece.supervised_N.any())
        parent = next(one for one in whole.windows
                      if one.shard == window.shard and one.start <= window.start < one.stop)
        assert piece.first == window.start - parent.start
        full, place = whole.train.piece(parent), slice(piece.first, piece.first + window.stop - window.start)
        assert full.final is not None
        assert piece.final is not None
        assert torch.equal(full.final.states()[place], piece.final.states())
    supervised = [sum(int(one.train.piece(window).supervised_N.sum()) for window in one.windows)
                  for one in (data, whole)]
    assert supervised[0] == supervised[1] == Manifest.load(folder).total("train", "supervised")


def test_without_stored_states_only_beginnings_are_used(folder: Path) -> None:
    config = replace(CONFIG, row_length=50, states="computed")
    data = DraftDataModule(folder, config)
    assert all(window.first == 0 for window in data.windows)
    batch = data.packed_batch(0).to("cpu")
    assert batch.final_BLD is None
    assert data.validation_features()[0].final_BLD is None


def test_validation_rows_are_whole_and_the_same_every_time(folder: Path, tiny_target: Target) -> None:
    data = DraftDataModule(folder, replace(CONFIG, row_length=30))
    features = data.held_out.whole()
    assert len(features) == 3
    assert [batch.tokens_BL.shape[1] for batch in features] == [
        stop - start for start, stop in (data.held_out.split.shards[0].span(row) for row in range(3))
    ]
    for batch in features:
        assert bool((batch.segments_BL == 0).all())
        supervised = int(batch.supervised_BL.sum())
        greedy = tiny_target.logits(batch.final()).argmax(-1)[:, :-1]
        labels, valid = batch.labels(1)
        assert torch.equal(greedy[valid[:, :-1]], labels[:, :-1][valid[:, :-1]]), "validation answers are greedy"
        assert supervised <= 12
    drawn = data.held_out.whole(1.0)
    assert [one.tokens_BL[0, :9].tolist() for one in drawn] == [one.tokens_BL[0, :9].tolist() for one in features]
    assert [one.tokens_BL.tolist() for one in drawn] != [one.tokens_BL.tolist() for one in features]
    assert not data.held_out.whole(0.5)
    assert same(features[1], data.held_out.whole()[1])


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory, tiny_target: Target) -> Path:
    """Conversations whose prompts the target wrote."""
    folder = tmp_path_factory.mktemp("own")
    config = DistillConfig(shard_prompts=4, slots=4, max_new_tokens=24, validation_prompts=2, budget_tokens=150)
    prompts = PromptConfig(own_max_tokens=96, own_temperature=1.2)
    distill(tiny_target, prompts, config, ChatTemplate(tiny_target.tokenizer), folder, progress=False)
    encode(tiny_target, folder)
    return folder


TEXT = [(7 * place * place + 3 * place) % 61 + 30 for place in range(20)]


def looping(folder: Path, target: Target) -> Path:
    """Two rows of each split that end in 30 repeated tokens, and one that does not."""
    records, answers = [], [TEXT + [40, 41, 42] * 11, TEXT, [50] * 31]
    for split in ("validation", "train"):
        rows = [Row(tokens=(5, 6, 7, *answer), supervised=(False,) * 3 + (True,) * len(answer), prompt=number)
                for number, answer in enumerate(answers)]
        shard = TokenShard.from_rows(rows, [1, 2, 3])
        (file := folder / f"{split}-00000.safetensors").write_bytes(shard.to_bytes())
        counts = dict.fromkeys(("candidates", "prompts", "rows", "by_target", "answers"), 3)
        records.append(shard_record(split=split, sha256=hash_file(file), tokens=len(shard.tokens_T),
                                    supervised=int(shard.supervised_T.sum()), **counts))
    Manifest(target=target.identity, template_hash="", recipe={"prompts": {"origin": "file"}, "distill": {}},
             versions={}, shards=tuple(records), complete=True).save(folder)
    return folder


def test_repetitions_are_left_out_of_batches_and_of_validation(tmp_path: Path, tiny_target: Target) -> None:
    config = replace(CONFIG, row_length=256, states="computed")
    data = DraftDataModule(looping(tmp_path, tiny_target), config)
    pieces = [data.train.piece(window) for window in data.windows]
    assert sum(int(piece.supervised_N.sum()) for piece in pieces) == 44
    assert [len(piece.tokens_N) for piece in pieces] == [26, 23, 4], "what follows the last label need not be read"
    assert [int(row.supervised_BL.sum()) for row in data.validation_features()] == [23, 20, 1]
    assert [int(row.supervised_BL.sum()) for row in data.held_out.whole()] == [53, 20, 31]
    assert [int(row.supervised_BL.sum()) for row in data.held_out.repeating()] == [53, 31]


@pytest.mark.long
def test_prompts_that_the_target_wrote_are_learned_on_request(own: Path, tiny_target: Target) -> None:
    template = ChatTemplate(tiny_target.tokenizer)
    config = replace(CONFIG, row_length=256, own_prompts=True)
    module = DraftDataModule(own, config, around=template.user_turn())
    before, after = (list(part) for part in (template.user_turn().before, template.user_turn().after))
    for window in module.windows:
        piece = module.train.piece(window)
        tokens, flags = piece.tokens_N.tolist(), piece.supervised_N.tolist()
        first = flags.index(True)
        assert tokens[:first] == before, "the first label is not the first token after the template's"
        end = first + flags[first:].index(False)
        assert tokens[end : end + len(after)] == after
    answers = [int(row.supervised_BL.sum()) for row in module.validation_features()]
    assert answers == [int(row.supervised_BL.sum()) for row in DraftDataModule(
        own, replace(config, own_prompts=False)).validation_features()], "held-out prompts are not drafted"


@pytest.mark.long
def test_only_prompts_that_the_target_wrote_after_these_tokens_are_learned(own: Path, folder: Path) -> None:
    prompts = Manifest.load(own).recipe["prompts"]
    assert prompts_learnable(prompts)
    assert prompts_learnable({**prompts, "own_kinds": ["math"], "own_openings": True})
    assert not prompts_learnable({**prompts, "own_kinds": ["math"]}), "after a system prompt"
    given = [DraftDataModule(folder, replace(CONFIG, own_prompts=learned)) for learned in (False, True)]
    labels = [[module.train.piece(window).supervised_N.tolist() for window in module.windows] for module in given]
    assert labels[0] == labels[1], "prompts of a file are never learned"


class Recorder(lightning.LightningModule):  # type: ignore[misc]
    """Keeps the tokens of the batches it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.seen: list[torch.Tensor] = []

    def training_step(self, batch: Features, _number: int) -> torch.Tensor:
        self.seen.append(batch.tokens_BL.clone())
        return self.weight * batch.final().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit(folder: Path, out: Path, steps: int, checkpoint: Path | None = None) -> Recorder:
    module = Recorder()
    trainer = lightning.Trainer(max_steps=steps, accumulate_grad_batches=2, accelerator="cpu", logger=False,
                                enable_progress_bar=False, enable_checkpointing=False, enable_model_summary=False,
                                use_distributed_sampler=False, default_root_dir=out)
    trainer.fit(module, datamodule=DraftDataModule(folder, CONFIG), ckpt_path=checkpoint, weights_only=False)
    trainer.save_checkpoint(out / f"step-{steps}.ckpt")
    return module


@pytest.mark.filterwarnings("ignore")
def test_a_resumed_fit_goes_on_with_the_next_batch(folder: Path, tmp_path: Path) -> None:
    whole = fit(folder, tmp_path, 7)
    data = DraftDataModule(folder, CONFIG)
    assert len(whole.seen) == 14
    assert all(torch.equal(seen, data.packed_batch(number).text.tokens_BL) for number, seen in enumerate(whole.seen))
    first = fit(folder, tmp_path, 3)
    resumed = fit(folder, tmp_path, 7, tmp_path / "step-3.ckpt")
    assert all(torch.equal(left, right) for left, right in zip(whole.seen, first.seen + resumed.seen, strict=True))


def test_bad_folders_are_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"holds no manifest.json"):
        DraftDataModule(tmp_path, CONFIG)
    with pytest.raises(UserError, match=r"no token in the train shards .* is learned within row_length 20"):
        DraftDataModule(folder, replace(CONFIG, row_length=20, states="computed"))
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    replace(Manifest.load(folder), complete=False).save(tmp_path)
    with pytest.raises(UserError, match=r"is not complete; finish it with draftsmith distill"):
        DraftDataModule(tmp_path, CONFIG)


def test_padding_of_a_batch_is_never_supervised(folder: Path) -> None:
    batch = DraftDataModule(folder, CONFIG).packed_batch(0).to("cpu")
    assert not bool(batch.supervised_BL[batch.segments_BL < 0].any())
    assert batch.tokens_BL.shape == (2, 96)
    assert (
        pad([DraftDataModule(folder, CONFIG).train.piece(DraftDataModule(folder, CONFIG).windows[0])]).final_BLD
        is not None
    )
