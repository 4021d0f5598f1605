"""Draft vocabularies by counts and by the target's probabilities: exact, bounded, kept, and the same after a resume."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from draftsmith.data import ChatTemplate, DistillConfig, Manifest, PromptConfig, TokenShard, distill, encode
from draftsmith.data.batches import label_weights as weighing
from draftsmith.data.batches.label_weights import count_labels, coverage, weigh_labels
from draftsmith.data.batches.learned_tokens import LearnedTokens
from draftsmith.modules import Features, Target
from torch import Tensor

ALL = LearnedTokens()


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory, tiny_target: Target) -> Path:
    """Twelve train and three validation conversations without states."""
    base = tmp_path_factory.mktemp("data")
    texts = ["abcdefghijklmno"[: n + 1] * 2 for n in range(15)]
    (base / "prompts.jsonl").write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    config = DistillConfig(shard_prompts=5, slots=4, max_new_tokens=12, validation_prompts=3, temperatures=(0.0, 1.0))
    source = PromptConfig(origin="file", path=str(base / "prompts.jsonl"))
    distill(tiny_target, source, config, ChatTemplate(tiny_target.tokenizer), base / "out", progress=False)
    return base / "out"


@pytest.fixture
def folder(data: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(data, tmp_path / "data"))


@torch.no_grad()
def told(target: Target, folder: Path) -> tuple[Tensor, int]:
    """(the target's distribution before every label, summed by a plain loop, number of labels)."""
    sums_V, count = torch.zeros(target.vocab_size, dtype=torch.float64), 0
    for record in Manifest.load(folder).split("train"):
        shard = TokenShard.read(folder / record.file)
        for row in range(shard.num_rows):
            place = slice(*shard.span(row))
            tokens, flags = shard.tokens_T[place].tolist(), shard.supervised_T[place].tolist()
            final_LD = target.encode(Features.from_rows([(tokens, flags)])).final()[0]
            for at in range(1, len(tokens)):
                if flags[at]:
                    sums_V += target.logits(final_LD[at - 1]).double().softmax(-1)
                    count += 1
    return sums_V, count


@pytest.mark.parametrize("stored", [True, False])
def test_probabilities_are_those_before_every_label(stored: bool, folder: Path, tiny_target: Target) -> None:
    if stored:
        encode(tiny_target, folder, progress=False)
    expected_V, count = told(tiny_target, folder)
    counts_V = count_labels(folder, ALL)
    assert int(counts_V.sum()) == count == Manifest.load(folder).total("train", "supervised")
    found_V = weigh_labels(tiny_target, folder, ALL, 10_000)
    assert found_V.sum() == pytest.approx(2 * count)
    torch.testing.assert_close(found_V, counts_V + expected_V, rtol=1e-4, atol=1e-4)
    assert torch.equal(weigh_labels(tiny_target, folder, ALL, 0), counts_V.double())


def test_the_positions_and_the_tokens_read_are_bounded(
    folder: Path, tiny_target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, looked = [], []
    logits, encoded = Target.logits, Target.encode

    def counting(self: Target, final: Tensor) -> Tensor:
        looked.append(final.shape[:-1].numel())
        return logits(self, final)

    def reading(self: Target, features: Features, *more: object) -> Features:
        rows.append(int((features.segments_BL >= 0).sum()))
        return encoded(self, features, *more)  # type: ignore[arg-type]

    monkeypatch.setattr(Target, "logits", counting)
    monkeypatch.setattr(Target, "encode", reading)
    monkeypatch.setattr(weighing, "READ_TOKENS", 150)
    monkeypatch.setattr(weighing, "CHUNK_ELEMENTS", {"cpu": 7 * tiny_target.vocab_size, "cuda": 1})
    weigh_labels(tiny_target, folder, ALL, 40)
    assert 0 < sum(rows) <= 260, "about as many tokens as the bound says, a row of each shard at least"
    assert 0 < sum(looked) <= 40
    assert max(looked) <= 7, "a chunk is larger than its bound"
    encode(tiny_target, folder, progress=False)
    rows.clear()
    looked.clear()
    weigh_labels(tiny_target, folder, ALL, 41)
    assert sum(looked) == 41
    assert rows == [], "stored states were computed again"


def test_they_are_kept_with_the_data(folder: Path, tiny_target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weighing, "READ_TOKENS", 150)
    first_V = weigh_labels(tiny_target, folder, ALL, 100)
    other_V = weigh_labels(tiny_target, folder, LearnedTokens(loops="drop"), 100)
    names = sorted(file.name for file in folder.glob("probabilities-*"))
    assert len(names) == 2
    content = (folder / names[0]).read_bytes()
    (folder / names[0]).write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    monkeypatch.setattr(weighing, "READ_TOKENS", 10**6)
    again = [weigh_labels(tiny_target, folder, chosen, 100) for chosen in (ALL, LearnedTokens(loops="drop"))]
    equal = [torch.equal(one, two) for one, two in zip(again, (first_V, other_V), strict=True)]
    assert sorted(equal) == [False, True], "the file that was changed is made anew, the other is read"
    encode(tiny_target, folder, progress=False)
    assert torch.equal(weigh_labels(tiny_target, folder, ALL, 100), again[0]), "other states must not change a choice"


def test_coverage_is_that_of_greedy_held_out_answers(folder: Path) -> None:
    record = Manifest.load(folder).split("validation")[0]
    shard = TokenShard.read(folder / record.file)
    greedy = [token for row in shard.answered_at(0.0) for token, flag in zip(
        shard.tokens_T[slice(*shard.span(row))].tolist(), shard.supervised_T[slice(*shard.span(row))].tolist(),
        strict=True) if flag]
    ids_Q = torch.tensor(sorted(set(greedy))[::2])
    assert coverage(folder, ids_Q) == sum(token in ids_Q.tolist() for token in greedy) / len(greedy)
    assert 0 < coverage(folder, ids_Q) < 1
