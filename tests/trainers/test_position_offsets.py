"""Position offsets in training: the positions that get one, its size, and that nothing else changes."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from draftsmith.modules import Eagle, Eagle3, Eagle3Config, Falcon, FalconConfig, Features, Target, UserError
from draftsmith.trainers import DraftModule, TrainConfig, draft_module, fit, train_config
from draftsmith.trainers.train_config import PositionConfig, with_offsets
from support.cases import CycleData, cycle_target, interrupted
from torch import Tensor

SMALL = train_config(Eagle3)(max_steps=6, lr=1e-2, warmup_steps=2, validate_every=3, validation_nodes=4,
                          checkpoint_every=2, accumulate=2, objective="hard", drafter=Eagle3Config(steps=3),
                          precision="32-true", accelerator="cpu", positions=PositionConfig(offset="max"))


@pytest.fixture(autouse=True)
def two_anchors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of a test are short: two tokens of a conversation keep their positions."""
    monkeypatch.setitem(with_offsets.__globals__, "ANCHORS", 2)


def rows() -> Features:
    """A window from its sixth token on with a whole conversation, and a window alone after padding."""
    segments = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1, -1], [-1, -1, 0, 0, 0, 0, 0, 0, 0]])
    positions = torch.tensor([[5, 6, 7, 0, 1, 2, 3, 4, 0], [0, 0, 0, 1, 2, 3, 4, 5, 6]])
    tokens = torch.arange(18).view(2, 9) + 20
    return Features(tokens_BL=tokens, supervised_BL=segments >= 0, segments_BL=segments, positions_BL=positions)


class Seen(Exception):
    """Raised when a step reaches its loss."""


def training_batch(target: Target, batch: Features, config: TrainConfig) -> Features:
    """The batch that a training step learns from, with the target's states."""
    class Watched(DraftModule):
        drafter_class = config.family

        def loss(self, features: Features) -> Any:
            self.seen = features
            raise Seen

    module = Watched(target, config)
    module.configure_model()
    with pytest.raises(Seen):
        module.training_step(batch, 0)
    return module.encoded(module.seen)


def offsets(features: Features, **settings: int) -> Tensor:
    given = {"limit": 1000, "highest": 100} | settings
    return with_offsets(features, **given).positions_BL - features.positions_BL


def test_positions_after_the_anchors_share_one_offset_per_conversation() -> None:
    found = offsets(rows())
    first, second, third = found[0, 0], found[0, 5], found[1, 4]
    assert found.tolist() == [[*[int(first)] * 3, 0, 0, *[int(second)] * 3, 0], [0] * 4 + [int(third)] * 5]
    assert len({int(first), int(second), int(third)}) == 3


def test_every_offset_up_to_the_limit_occurs_and_none_beyond() -> None:
    """The window of the first row ends at position 7, the others at 4 and 6."""
    found = torch.stack([offsets(rows(), limit=6, highest=9) for _ in range(400)])
    drawn = [set(found[:, row, place].tolist()) for row, place in ((0, 0), (0, 5), (1, 4))]
    assert drawn == [set(range(3)), set(range(6)), set(range(4))]
    assert set(offsets(rows(), limit=2).flatten().tolist()) <= {0, 1, 2}
    assert not offsets(rows(), highest=3).any()


def test_offsets_depend_on_the_seed_alone() -> None:
    torch.manual_seed(4)
    once = offsets(rows())
    torch.manual_seed(4)
    assert torch.equal(offsets(rows()), once)
    assert not torch.equal(offsets(rows()), once)


def test_only_positions_change_and_the_target_reads_its_own(tiny_target: Target) -> None:
    plain, far = (training_batch(tiny_target, rows(), dataclasses.replace(SMALL, positions=positions))
                  for positions in (PositionConfig(), PositionConfig(offset=300)))
    assert torch.equal(plain.positions_BL, rows().positions_BL)
    assert int((far.positions_BL - plain.positions_BL).max()) > 0
    for name in ("tokens_BL", "supervised_BL", "segments_BL", "final_BLD"):
        assert torch.equal(getattr(far, name), getattr(plain, name))
    assert all(torch.equal(far.taps[layer], states) for layer, states in plain.taps.items())


@pytest.mark.parametrize("family", [Eagle, Falcon])
def test_every_feature_drafter_gets_the_same_offsets(family: Any, tiny_target: Target) -> None:
    seen = training_batch(tiny_target, rows(), train_config(family)(positions=PositionConfig(offset=300)))
    assert int((seen.positions_BL - rows().positions_BL).max()) > 0


@pytest.mark.parametrize(("config", "further"), [
    (SMALL, SMALL.drafter.steps - 1),
    # A Falcon drafter of two blocks of two reads its own estimates three positions after a position.
    (train_config(Falcon)(positions=PositionConfig(offset="max"), drafter=FalconConfig(block_size=2, blocks=2)), 3),
], ids=["the last step", "the last block"])
def test_the_highest_position_lies_inside_the_context(config: TrainConfig, further: int, tiny_target: Target) -> None:
    highest = max(int(training_batch(tiny_target, rows(), config).positions_BL.max()) for _ in range(200))
    assert tiny_target.context_length - 12 < highest + further < tiny_target.context_length


@pytest.mark.filterwarnings("ignore:validation decodes only")
def test_a_resumed_run_repeats_its_offsets(tmp_path: Path) -> None:
    def trained(name: str, config: TrainConfig = SMALL) -> dict[str, Tensor]:
        fit(draft_module(Eagle3)(cycle_target(), config), CycleData(), tmp_path / name, progress=False)
        return torch.load(tmp_path / name / "last.ckpt", weights_only=True)["state_dict"]

    whole, near = trained("whole"), trained("near", dataclasses.replace(SMALL, positions=PositionConfig()))
    with interrupted(draft_module(Eagle3), 7):
        trained("parts")
    parts = trained("parts")
    assert all(torch.equal(parts[name], tensor) for name, tensor in whole.items())
    assert not all(torch.equal(near[name], tensor) for name, tensor in whole.items())


def test_an_offset_beyond_the_context_is_refused(tiny_target: Target) -> None:
    config = train_config(Eagle3)(positions=PositionConfig(offset=512))
    with pytest.raises(UserError, match="offset is 512, but the context of tiny-random ends at 512 tokens; lower it"):
        draft_module(Eagle3)(tiny_target, config)


def test_an_unknown_context_length_is_refused(tiny_target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Target, "context_length", 1 << 30)
    with pytest.raises(UserError, match="configuration of tiny-random does not say how long its context is"):
        draft_module(Eagle3)(tiny_target, SMALL)
    draft_module(Eagle3)(tiny_target, dataclasses.replace(SMALL, positions=PositionConfig(offset=30_000)))
