"""Labels of the training text are counted exactly, and the coverage of a draft vocabulary is that of held-out text."""

import shutil
from pathlib import Path

import pytest
import torch
from draftsmith.data import Manifest, TokenShard
from draftsmith.data.batches.learned_tokens import LearnedTokens, count_labels, coverage
from draftsmith.modules import Target
from support.data.data_folders import conversations


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
    counts_V = count_labels(folder, LearnedTokens())
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
