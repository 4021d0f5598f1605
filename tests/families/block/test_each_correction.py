"""Each correction of a block by its formula, in training and along the branches of a tree, and what its slots learn:
Domino's recurrent bias, XPress's refiner, and DFlash 2's selector with its convolutions."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from draftsmith.modules import BlockDraft, BlockDraftConfig, Features, Target, UserError
from draftsmith.trainers import draft_module, fit, train_config
from draftsmith.trainers.objectives import weighted_mean_loss
from families.block.reference import plain_gru, plain_refiner, plain_slots
from support.cases import CYCLE, CycleData, cycle_target
from support.families import randomised
from torch import Tensor

from .test_corrections import branches, check_choices, features_of, scores

GRU = BlockDraftConfig(block_size=4, num_layers=1, causal=False, correction="gru", rank=3)
SAME = replace(GRU, aligned="same", block_size=5)
REFINER = replace(SAME, correction="refiner", rank=6)
SELECTOR = BlockDraftConfig(block_size=4, num_layers=1, aligned="same", correction="selector", rank=8, conv=True)


def made(config: BlockDraftConfig, target: Target) -> BlockDraft:
    drafter = randomised(BlockDraft.create(config, target).double())
    # So large that guesses depend on it.
    own = drafter.correction
    (own.embed_proj[2] if config.correction == "gru" else own.w2).weight.data *= 40
    return drafter


def block_of(drafter: BlockDraft, features: Features) -> tuple[int, Tensor]:
    """(root, states of all slots) after the sixth token of the text."""
    root = int(features.tokens_BL[0, 6])
    taps = {layer: states[0] for layer, states in features.taps.items()}
    return root, plain_slots(drafter, taps, root, 5, whole=True)


def guess(drafter: BlockDraft, target: Target, block_SD: Tensor, before: list[int]) -> Tensor:
    """Logits of the guess after these tokens, the root first."""
    own, slot_D = drafter.correction, block_SD[len(before) - (drafter.config.aligned == "next")]
    table_VD = target.model.get_input_embeddings().weight
    bias_V = plain_refiner(own, block_SD, before) if drafter.config.correction == "refiner" else \
        plain_gru(own, slot_D, [table_VD[one] for one in before])
    return target.logits(slot_D) + bias_V


@pytest.mark.parametrize("config", [GRU, SAME, REFINER], ids=["gru", "gru-same", "refiner"])
@torch.no_grad()
def test_a_bias_is_that_of_the_formula(config: BlockDraftConfig, tiny_target_f64: Target) -> None:
    """In training along the true tokens, and in decoding, where a node's state is that of a fresh run over its path."""
    drafter = made(config, tiny_target_f64)
    features = features_of(tiny_target_f64, drafter)
    _, block_SD = block_of(drafter, features)
    text, hidden_KX = features.tokens_BL[0].tolist(), drafter(features).hidden_BLKD[0, 5]
    for step in range(4):
        wanted = guess(drafter, tiny_target_f64, block_SD, text[6 : 7 + step])
        torch.testing.assert_close(drafter.project(hidden_KX[step], step), wanted, atol=1e-9, rtol=1e-9)
    for path, found in branches(drafter, features):
        wanted = guess(drafter, tiny_target_f64, block_SD, path).log_softmax(-1)
        torch.testing.assert_close(found, wanted, atol=1e-9, rtol=1e-9)


@torch.no_grad()
def test_the_first_guess_is_the_slots_own_and_later_ones_read_the_whole_path(tiny_target_f64: Target) -> None:
    drafter = made(GRU, tiny_target_f64)
    features = features_of(tiny_target_f64, drafter)
    plain = BlockDraft.create(replace(GRU, correction="none"), tiny_target_f64).double().eval()
    plain.load_state_dict({key: value for key, value in drafter.state_dict().items() if key in plain.state_dict()})
    alone = plain.project(plain(features).hidden_BLKD[0, 5], 0).log_softmax(-1)
    torch.testing.assert_close(scores(drafter, features, ()), alone[0], atol=1e-12, rtol=0)
    one, other = scores(drafter, features, (44, 61, 7)), scores(drafter, features, (50, 61, 7))
    assert float((one - other).abs().max()) > 1e-3
    assert float((one - alone[3]).abs().max()) > 1e-3


@torch.no_grad()
def test_rounds_over_a_whole_block_reach_the_guesses_made_one_by_one(tiny_target_f64: Target) -> None:
    """Engines guess a block at once, again and again, each time after the guesses of the round before: after n rounds
    the first n are those of the walk."""
    drafter = made(REFINER, tiny_target_f64)
    features = features_of(tiny_target_f64, drafter)
    root, block_SD = block_of(drafter, features)
    walk = [root]
    for _ in range(4):
        walk.append(int(guess(drafter, tiny_target_f64, block_SD, walk).argmax()))
    block = [int(tiny_target_f64.logits(block_SD[place]).argmax()) for place in range(1, 5)]
    assert block != walk[1:]
    for rounds in range(1, 6):
        told = [root, *block]
        block = [int(guess(drafter, tiny_target_f64, block_SD, told[: n + 1]).argmax()) for n in range(4)]
        assert block[:rounds] == walk[1 : rounds + 1]
    one, other = ([guess(drafter, tiny_target_f64, block_SD, told[: n + 1]) for n in range(4)]
                  for told in ([root, 5, 6, 7], [root, 5, 9, 7]))
    apart = [float((left - right).abs().max()) for left, right in zip(one, other, strict=True)]
    assert apart[:2] == [0, 0]
    assert min(apart[2:]) > 0


def test_a_new_refiner_adds_nothing_to_the_slots_own_guesses(tiny_target_f64: Target) -> None:
    module = draft_module(BlockDraft)(tiny_target_f64, train_config(BlockDraft)(objective="hard", drafter=REFINER))
    module.configure_model()
    drafter = module.drafter.double().train()
    with torch.no_grad():
        state = drafter(features_of(tiny_target_f64, drafter)).hidden_BLKD[0, 5]
        assert torch.equal(drafter.project(state[1], 1), drafter.project(state[5], 5))


@pytest.mark.parametrize(("config", "progress", "corrected", "alone"), [
    (GRU, 0.0, 0.0, 1.0), (GRU, 0.125, 0.25, 0.75), (GRU, 0.5, 1.0, 0.0), (GRU, 0.9, 1.0, 0.0),
    (REFINER, 0.5, 1.0, 0.6)])
def test_the_loss_weighs_the_slots_own_guesses_and_the_corrected_ones(
    tiny_target_f64: Target, monkeypatch: pytest.MonkeyPatch, config: BlockDraftConfig, progress: float,
    corrected: float, alone: float
) -> None:
    """Domino's from the first to the second in the first half of a training; XPress's both all the time."""
    module = draft_module(BlockDraft)(tiny_target_f64, train_config(BlockDraft)(
        objective="hard", step_weights=0.5, drafter=config))
    module.configure_model()
    module.drafter = drafter = made(config, tiny_target_f64).train()
    monkeypatch.setattr(module, "progress_at", lambda step: progress)
    features = features_of(tiny_target_f64, drafter)
    learned, hidden = module.loss(features), drafter(features).hidden_BLKD
    decay = [1.0, 0.5, 0.25, 0.125]
    assert learned.weights == pytest.approx([share * one for share in (corrected, alone) for one in decay])
    # Of guesses without weight no logits are made.
    counts = [10, 9, 8, 7]
    assert learned.sums_KC[:, 0].tolist() == [*(counts if corrected else [0] * 4), *(counts if alone else [0] * 4)]
    assert "expected_accepted_length" in module.describe(learned.sums_KC, learned.weights, learned.offsets)
    expected = torch.zeros((), dtype=torch.float64)
    for step in range(4):
        for place in range(10 - step):
            label, state = int(features.tokens_BL[0, place + 2 + step]), hidden[0, place, step]
            own = tiny_target_f64.logits(state[: tiny_target_f64.hidden_size])
            for weight, logits in ((corrected, drafter.project(state, step)), (alone, own)):
                expected = expected - weight * decay[step] * logits.log_softmax(-1)[label]
    torch.testing.assert_close(learned.total, expected, atol=1e-9, rtol=1e-9)


@pytest.mark.long
def test_both_alignments_propose_the_same(tmp_path: Path) -> None:
    """After a training on a text that goes round a cycle."""
    proposed = []
    for number, config in enumerate((GRU, SAME)):
        module = draft_module(BlockDraft)(cycle_target(), train_config(BlockDraft)(
            objective="hard", drafter=config, max_steps=200, lr=1.5e-2, warmup_steps=2,
            validate_every=200, checkpoint_every=200, validation_nodes=4, accelerator="cpu"))
        fit(module, CycleData(), tmp_path / str(number), progress=False)
        module.drafter.bind(module.target)
        text = [CYCLE[place % len(CYCLE)] for place in range(12)]
        features = module.target.encode(Features.from_rows([(text, [True] * 12)]), module.drafter.taps)
        path: tuple[int, ...] = ()
        for _ in range(4):
            path = (*path, int(scores(module.drafter.eval(), features, path).argmax()))
        proposed.append(path)
    assert proposed == [tuple(CYCLE[7:11])] * 2


# The selector ---------------------------------------------------------------------------------------------------------


def test_new_convolutions_and_a_new_selector_change_nothing(tiny_target: Target) -> None:
    """Bit by bit, also when they are added to a trained drafter, and after an artifact's rebuilding."""
    plain = randomised(BlockDraft.create(replace(SELECTOR, correction="none", conv=False), tiny_target))
    drafter = BlockDraft.create(SELECTOR, tiny_target, start=plain).eval()
    other = BlockDraft.rebuild(drafter.describe(), tiny_target.identity)
    other.load_state_dict(drafter.state_dict())
    other.bind(tiny_target)
    features = features_of(tiny_target, plain)
    with torch.no_grad():
        wanted = plain(features).hidden_BLKD
        for one in (drafter, other.eval()):
            found = one(features).hidden_BLKD
            assert torch.equal(found[..., : tiny_target.hidden_size], wanted)
            for step in range(3):
                logits = one.project(found[:, :, step], step)
                assert torch.equal(logits.argmax(-1), plain.project(wanted[:, :, step], step).argmax(-1))


def test_the_choice_is_that_of_the_formula(tiny_target_f64: Target) -> None:
    """U(b) + <A[a] * (P h), C[b]> among the sixteen likeliest of U; log q is normalised over these alone."""
    drafter = randomised(BlockDraft.create(SELECTOR, tiny_target_f64).double())
    features, own = features_of(tiny_target_f64, drafter), drafter.correction
    with torch.no_grad():
        slots_KD = drafter(features).hidden_BLKD[0, 5, :, : tiny_target_f64.hidden_size]
        path = (44, 61)
        for depth, before in enumerate([int(features.tokens_BL[0, 6]), *path]):
            base = tiny_target_f64.logits(slots_KD[depth])
            state = own.predecessor_codebook.weight[before] * (own.hidden_projection.weight @ slots_KD[depth])
            wanted = torch.full_like(base, -torch.inf)
            best = base.topk(16).indices
            wanted[best] = base[best] + own.successor_codebook.weight[best] @ state
            found = scores(drafter, features, path[:depth])
            torch.testing.assert_close(found, wanted.log_softmax(-1), atol=1e-9, rtol=1e-9)
            assert float(found.exp().sum()) == pytest.approx(1)
            assert int((found > -torch.inf).sum()) == 16


def test_a_label_that_is_no_candidate_teaches_the_choice_nothing(tiny_target_f64: Target) -> None:
    """In training: cross entropy of the slots alone, and of the choice where the label is offered, whose mean counts as
    much as that of all slots, however few these labels are."""
    module = draft_module(BlockDraft)(tiny_target_f64, train_config(BlockDraft)(
        objective="hard", step_weights=0.5, drafter=SELECTOR))
    module.configure_model()
    drafter = randomised(module.drafter.double()).train()
    drafter.correction.most = 30
    features = features_of(tiny_target_f64, drafter)
    learned, hidden = module.loss(features), drafter(features).hidden_BLKD
    assert learned.weights == (1.0, 0.5, 0.25) * 2
    expected, chosen_loss = (torch.zeros((), dtype=torch.float64) for _ in range(2))
    offered, missed, shares = 0, 0, [0.0, 0.0]
    for step in range(3):
        for place in range(10 - step):
            state, label = hidden[0, place, step], int(features.tokens_BL[0, place + 2 + step])
            base = tiny_target_f64.logits(state[: tiny_target_f64.hidden_size])
            expected, shares[0] = expected - 0.5**step * base.log_softmax(-1)[label], shares[0] + 0.5**step
            chosen = drafter.project(state, step)
            if label in base.topk(30).indices.tolist():
                chosen_loss, offered = chosen_loss - 0.5**step * chosen.log_softmax(-1)[label], offered + 1
                shares[1] += 0.5**step
            else:
                assert bool(chosen[label] == -torch.inf)
                missed += 1
    assert offered > 3
    assert missed > 3
    expected = expected + chosen_loss * shares[0] / shares[1]
    torch.testing.assert_close(learned.total, expected, atol=1e-9, rtol=1e-9)
    divisor = weighted_mean_loss(learned.sums_KC, learned.weights)[1]
    torch.testing.assert_close(float(divisor), 2 * shares[0], atol=1e-9, rtol=1e-9)
    counts = learned.sums_KC[:3, :2].sum(0).tolist()
    assert counts == [offered, missed]
    found = torch.autograd.grad(learned.total, list(drafter.parameters()), allow_unused=True)
    for one, other in zip(found, torch.autograd.grad(expected, list(drafter.parameters()), allow_unused=True),
                          strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            torch.testing.assert_close(one, other, atol=1e-8, rtol=1e-8)


def test_samples_among_the_candidates_leave_the_targets_law(tiny_target_f64: Target) -> None:
    """By enumeration of a tree of two levels with two children each, at temperature 0.7; the draft of the slots alone
    is not what was drawn from."""
    drafter = randomised(BlockDraft.create(SELECTOR, tiny_target_f64).double())
    drafter.correction.most = 3
    drafter.correction.successor_codebook.weight.data *= 8
    check_choices(drafter, tiny_target_f64, 3)


def test_a_width_without_whole_groups_is_refused() -> None:
    target: Any = SimpleNamespace(hidden_size=40, identity=SimpleNamespace(name="odd"))
    with pytest.raises(UserError, match="conv has kernels for groups of 16 components, and odd is 40 wide; set conv"):
        BlockDraft.fitted(SELECTOR, target)
