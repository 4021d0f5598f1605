"""Falcon: blocks against their plain twin, the recurrent network against torch's own, trees against paths, what a draft
costs and what is refused."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from draftsmith.export import EVERY_FORMAT, export_artifact, load_artifact, save_artifact
from draftsmith.modules import (
    Chain,
    Falcon,
    FalconConfig,
    Features,
    Target,
    Topology,
    UserError,
    ranked_text,
)
from draftsmith.modules.families.falcon.recurrence import LSTM, SegmentSteps
from draftsmith.trainers import draft_module, train_config
from families.falcon.reference import told, torch_lstm
from support.answers import check_tree, level, news, packed, read, text
from support.families import randomised

CONFIGS = {"one": FalconConfig(block_size=1), "two": FalconConfig(), "three": FalconConfig(block_size=3)}
TOKENS = list(range(20, 38))


def made(config: FalconConfig, target: Target) -> Falcon:
    return randomised(Falcon.create(config, target).to(target.dtype))


def with_text(config: FalconConfig, target: Target) -> tuple[Falcon, Features]:
    drafter = made(config, target)
    return drafter, text(target, drafter, TOKENS)


# The recurrent network ------------------------------------------------------------------------------------------------


def test_the_lstm_and_its_gradients_equal_torchs() -> None:
    torch.manual_seed(0)
    own = LSTM(6, 4, 2).double()
    theirs, read_BNZ = torch_lstm(own), torch.randn(3, 5, 6, dtype=torch.float64, requires_grad=True)
    before = tuple(torch.randn(2, 3, 4, dtype=torch.float64, requires_grad=True) for _ in range(2))
    weights = torch.randn(3, 5, 4, dtype=torch.float64)
    said, kept = own(read_BNZ, before)
    expected, (last_said, last_kept) = theirs(read_BNZ, before)
    for found, wanted in ((said[-1], expected), (said[:, :, -1], last_said), (kept[:, :, -1], last_kept)):
        torch.testing.assert_close(found, wanted)
    inputs = (read_BNZ, *before)
    ours = torch.autograd.grad((said[-1] * weights).sum() + kept[:, :, -1].sum(), [*inputs, *own.parameters()])
    others = torch.autograd.grad((expected * weights).sum() + last_kept.sum(), [*inputs, *theirs.parameters()])
    names = [name for name, _ in theirs.named_parameters()]
    order = [names.index(f"{kind}_{side}_l{layer}") for layer in (0, 1) for side in ("ih", "hh")
             for kind in ("weight", "bias")]
    for found, wanted in zip(ours, [*others[:3], *(others[3 + place] for place in order)], strict=True):
        torch.testing.assert_close(found, wanted)


def test_the_lstm_continues_anywhere_with_right_gradients() -> None:
    torch.manual_seed(0)
    own, read_BNZ = LSTM(3, 2, 2).double(), torch.randn(2, 5, 3, dtype=torch.float64)
    said, kept = own(read_BNZ, own.zero_memory(2))
    one = own.through(read_BNZ[:, 2], (said[:, :, 1], kept[:, :, 1]))
    torch.testing.assert_close(one, (said[:, :, 2], kept[:, :, 2]))
    after = own(read_BNZ[:, 3:], (said[:, :, 2], kept[:, :, 2]))
    torch.testing.assert_close((said[:, :, 3:], kept[:, :, 3:]), after)
    before = tuple(torch.randn(2, 2, 2, dtype=torch.float64, requires_grad=True) for _ in range(2))
    given = (read_BNZ.requires_grad_(), *before)
    assert torch.autograd.gradcheck(lambda read, *memory: own(read, memory), given)


def test_segments_side_by_side_equal_each_alone() -> None:
    """Outputs, cells and gradients of packed segments; gaps of padding, and two segments of one number in two rows."""
    torch.manual_seed(0)
    own = LSTM(3, 2, 2).double()
    segments_BL = torch.tensor([[0, 0, 0, 1, 1, -1, -1], [0, -1, 1, 1, 1, 1, 1]])
    read_BLZ = torch.randn(2, 7, 3, dtype=torch.float64, requires_grad=True)
    steps = SegmentSteps(segments_BL)
    assert steps.sizes == (6, 4, 2, 1, 1), "as many steps as the longest segment has positions, and nothing twice"
    split = steps.split(read_BLZ)
    assert torch.equal(steps.join(split), read_BLZ)
    together = [steps.join(part) for part in own.through(split, own.zero_memory(6), steps.sizes)]
    weights = torch.randn(2, 2, 2, 7, 2, dtype=torch.float64)
    total, expected = (torch.stack(together) * weights).sum(), torch.zeros(1, dtype=torch.float64)
    for row, start, end in ((0, 0, 3), (0, 3, 5), (0, 5, 7), (1, 0, 1), (1, 1, 2), (1, 2, 7)):
        alone = own(read_BLZ[row : row + 1, start:end], own.zero_memory(1))
        for part, found in zip(alone, together, strict=True):
            torch.testing.assert_close(part[:, 0], found[:, row, start:end])
        expected = expected + (torch.stack(alone)[:, :, 0] * weights[:, :, row, start:end]).sum()
    inputs = [read_BLZ, *own.parameters()]
    ours, theirs = torch.autograd.grad(total, inputs), torch.autograd.grad(expected.sum(), inputs)
    for found, wanted in zip(ours, theirs, strict=True):
        torch.testing.assert_close(found, wanted)


# Blocks ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CONFIGS)
def test_blocks_equal_the_plain_twin(name: str, tiny_target_f64: Target) -> None:
    drafter = made(CONFIGS[name], tiny_target_f64)
    features = packed(tiny_target_f64, drafter)
    blocks, size = 3, CONFIGS[name].block_size
    with torch.no_grad():
        found = torch.stack(drafter.rollout(features, blocks), dim=2)
        for row, segment in ((0, 0), (0, 1), (1, 1), (2, 0)):
            places = (features.segments_BL[row] == segment).nonzero()[:, 0].tolist()
            embedded_LD = tiny_target_f64.embed(features.tokens_BL[row, places[1:]])
            for end in range(len(places) - 1 - blocks * size):
                wanted = told(drafter, features.final()[row, places], embedded_LD, end, blocks)
                torch.testing.assert_close(found[row, places[end]], torch.stack(wanted), atol=1e-10, rtol=1e-10)


def test_every_estimate_of_a_block_sees_its_end(tiny_target: Target) -> None:
    """The relaxed causal mask: a position before the end sees the end, unlike with a strict mask."""
    drafter, features = with_text(FalconConfig(block_size=3), tiny_target)
    final_BLD = features.final().clone()
    final_BLD[0, 6] += 1.0
    with torch.no_grad():
        moved, still = drafter(replace(features, final_BLD=final_BLD)).hidden_BLKD[0], drafter(features).hidden_BLKD[0]
    apart = (moved - still).abs().amax(-1) > 1e-4
    assert bool(apart[6, :3].all())
    assert not bool(apart[:6].any())


def test_a_new_drafter_returns_the_states_of_its_queries(tiny_target: Target) -> None:
    drafter = Falcon.create(FalconConfig(block_size=3), tiny_target).eval()
    features = text(tiny_target, drafter, TOKENS)
    with torch.no_grad():
        hidden = drafter(features).hidden_BLKD[0]
    for place in range(3):
        behind = 2 - place
        torch.testing.assert_close(hidden[2:, place], features.final()[0, 2 - behind : len(TOKENS) - behind])


def test_estimates_are_read_without_gradients(tiny_target: Target) -> None:
    drafter, features = with_text(FalconConfig(blocks=2), tiny_target)
    estimates = drafter.rollout(features, 2)
    for first in estimates[:2]:
        first.retain_grad()
    sum(later.sum() for later in estimates[2:]).backward()
    assert [first.grad for first in estimates[:2]] == [None, None]
    assert all(parameter.grad is not None for parameter in drafter.parameters())


# Decoding -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("counts", [(1,), (2, 0, 1), (3, 1, 3)])
def test_deep_drafts_equal_the_blocks_of_training(name: str, counts: tuple[int, ...], tiny_target: Target) -> None:
    (drafter, features), end = with_text(CONFIGS[name], tiny_target), sum(counts) - 1
    with torch.no_grad():
        hidden_LKD = drafter(features).hidden_BLKD[0]
        state = read(drafter, features, *counts)
        for depth in range(hidden_LKD.shape[1]):
            scores = drafter.expand(state, level([depth], [depth - 1], [TOKENS[end + 1 + depth]]))
            wanted = drafter.project(hidden_LKD[end, depth], depth).log_softmax(-1)
            torch.testing.assert_close(scores.log_probs_BFHQ[0, 0, 0], wanted, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_node_scores_like_its_path_alone(name: str, tiny_target: Target) -> None:
    check_tree(*with_text(CONFIGS[name], tiny_target), [
        ([0], [-1]), ([1, 2, 3], [0, 0, 0]), ([7, 4, 6], [2, 1, 2]), ([9, 8, 10], [7, 4, 7]),
        ([12, 11], [10, 9]), ([15, 13, 14], [12, 12, 11]), ([16], [14])])


@pytest.mark.parametrize("name", CONFIGS)
def test_drafted_states_are_discarded_and_the_targets_are_read(name: str, tiny_target: Target) -> None:
    drafter, features = with_text(CONFIGS[name], tiny_target)
    used, fresh = read(drafter, features, 5), read(drafter, features, 9)
    for nodes, above in (([0], [-1]), ([1, 2], [0, 0]), ([3, 4], [1, 2]), ([5, 6], [4, 4])):
        drafter.expand(used, level(nodes, above, [60 + node for node in nodes]))
    drafter.observe(used, torch.tensor([0]), news(features, 5, 4))
    assert used.rows.cache.host_lengths == [9]
    for nodes, above in (([0], [-1]), ([1, 2], [0, 0]), ([3, 4], [2, 1]), ([5], [4])):
        asked = level(nodes, above, [40 + node for node in nodes])
        torch.testing.assert_close(drafter.expand(used, asked).log_probs_BFHQ,
                                   drafter.expand(fresh, asked).log_probs_BFHQ, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(("size", "depth", "runs"), [(1, 4, 4), (2, 4, 2), (2, 5, 3), (4, 4, 1)])
def test_the_layer_runs_once_for_a_block(size: int, depth: int, runs: int, tiny_target: Target) -> None:
    (drafter, features), calls = with_text(FalconConfig(block_size=size), tiny_target), []
    drafter.layers[0].register_forward_hook(lambda *_: calls.append(1))
    state = read(drafter, features, 6)
    Chain(depth).grow(drafter, state, features.tokens_BL[:, 6])
    assert len(calls) == runs


def test_ranks_cover_whole_blocks(tiny_target: Target) -> None:
    for size, steps in ((2, 6), (4, 8), (7, 7)):
        drafter = made(FalconConfig(block_size=size), tiny_target)
        assert ranked_text(drafter, [text(tiny_target, drafter, TOKENS)]).ranks_PK.shape == (len(TOKENS) - 2, steps)
        assert (drafter.reach, drafter.unrolls, drafter.trained_steps) == (None, None, size)


# Training and refusals ------------------------------------------------------------------------------------------------


def test_noise_is_added_in_training_alone(tiny_target: Target) -> None:
    drafter, features = with_text(FalconConfig(noise=0.1), tiny_target)
    with torch.no_grad():
        still = [drafter.rollout(features, 1)[0] for _ in range(2)]
        moved = drafter.train().rollout(features, 1)[0]
    assert torch.equal(*still)
    assert not torch.allclose(moved, still[0])


@pytest.mark.parametrize(("settings", "estimates_so"), [
    ({"block_size": 0}, "block_size must be at least 1, got 0"),
    ({"block_size": 1.5}, "block_size must be a whole number from 1 to 256, got 1.5"),
    ({"blocks": -1}, "blocks must be at least 1, got -1"),
    ({"vocabulary_size": 0}, "vocabulary_size must be at least 1, got 0"),
    ({"noise": -0.5}, "noise must be at least 0, got -0.5"),
])
def test_impossible_settings_are_refused(settings: dict[str, int], estimates_so: str) -> None:
    with pytest.raises(UserError, match=re.escape(estimates_so)):
        FalconConfig(**settings)


def test_rows_that_are_too_short_are_refused_in_training_alone(tiny_target: Target) -> None:
    drafter = made(FalconConfig(block_size=3, blocks=2), tiny_target).train()
    drafter(text(tiny_target, drafter, TOKENS[:8]))
    with pytest.raises(UserError, match="6 draft steps need rows of at least 8 tokens, got 7; lower block_size or "):
        drafter(text(tiny_target, drafter, TOKENS[:7]))
    assert drafter.eval()(text(tiny_target, drafter, TOKENS[:2])).hidden_BLKD.shape[1:3] == (2, 6)


@pytest.mark.parametrize("format_name", sorted({*EVERY_FORMAT} - {"specdec", "target"}))
def test_it_states_its_export_refusal(format_name: str, tiny_target: Target, tmp_path: Path) -> None:
    drafter = made(FalconConfig(), tiny_target)
    save_artifact(tmp_path / "artifact", drafter, tiny_target.identity, {}, Topology.chain(2))
    with pytest.raises(UserError, match="no serving engine runs a Falcon drafter"):
        export_artifact(load_artifact(tmp_path / "artifact", tiny_target), tiny_target, format_name, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_dropout_is_between_the_recurrent_layers_in_training(tiny_target_f64: Target) -> None:
    made = draft_module(Falcon)(tiny_target_f64, train_config(Falcon)(drafter=FalconConfig(dropout=0.5)))
    made.configure_model()
    made.drafter.to(tiny_target_f64.dtype)
    made.train()
    # A new drafter's last recurrent layer gives zeros, dropped or not.
    lstm, batch = randomised(made.drafter).train().lstm, packed(tiny_target_f64, made.drafter)
    read = torch.randn(3, 18, 2 * tiny_target_f64.hidden_size, dtype=torch.float64)
    first, second = (lstm(read, lstm.zero_memory(3))[0] for _ in range(2))
    assert torch.equal(first[0], second[0]), "the input of the first layer is whole"
    assert not torch.equal(first[1], second[1])
    made.eval()
    first, second = (lstm(read, lstm.zero_memory(3))[0] for _ in range(2))
    assert torch.equal(first, second)
    assert bool(torch.isfinite(made.loss(batch).total))
    with pytest.raises(UserError, match=r"dropout must be below 1, got 1\.0; lower it"):
        FalconConfig(dropout=1.0)
