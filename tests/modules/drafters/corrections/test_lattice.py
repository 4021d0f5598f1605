"""LiLiCorr's lattice: its scores by the formula, its loss by hand, what it learns from, and that samples among its
candidates leave the target's law exact."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from draftsmith.modules import BlockDraft, BlockDraftConfig, Features, Target
from draftsmith.trainers import BlockModule, BlockTrainConfig
from draftsmith.trainers.losses.metrics import COLUMNS, weighted_mean_loss
from references.block import plain_lattice, plain_slots
from support.families import randomised
from torch import Tensor

from .test_corrections import check_choices, features_of, scores

CONFIG = BlockDraftConfig(block_size=4, num_layers=1, aligned="same", causal=False, correction="lattice", rank=16)
PATH = (44, 61)


def made(target: Target, **settings: Any) -> BlockDraft:
    return randomised(BlockDraft.create(replace(CONFIG, **settings), target).double())


def by_hand(drafter: BlockDraft, target: Target, features: Features, end: int
            ) -> tuple[list[list[int]], list[list[list[float]]], Tensor]:
    """(candidates, scores, logits of the slots) after a position of the text."""
    taps = {layer: states[0] for layer, states in features.taps.items()}
    slots_KD = plain_slots(drafter, taps, int(features.tokens_BL[0, end + 1]), end)
    logits_KV = target.logits(slots_KD)
    table_VD = target.model.get_input_embeddings().weight
    newest_D = drafter.context({layer: states[:, : end + 1] for layer, states in features.taps.items()})[0, -1]
    return (*plain_lattice(drafter.correction, slots_KD, newest_D, logits_KV, table_VD), logits_KV)


@torch.no_grad()
def offered_text(drafter: BlockDraft, target: Target) -> list[int]:
    """Twelve tokens that the draft offers, the later ones of each in as many of its slots as possible, but for one."""
    tokens = [20, 41]
    while len(tokens) < 12:
        states = target.encode(Features.from_rows([(tokens, [True] * len(tokens))]), drafter.taps).taps
        taps = {layer: rows[0] for layer, rows in states.items()}
        offers = torch.zeros(target.vocab_size)
        for slot in range(min(3, len(tokens) - 1)):
            end = len(tokens) - 2 - slot
            slots_KD = plain_slots(drafter, taps, tokens[end + 1], end)
            offers[target.logits(slots_KD[slot]).topk(8).indices[2:]] += 1
        tokens.append(int(offers.argmin() if len(tokens) == 7 else offers.argmax()))
    return tokens


@torch.no_grad()
def test_the_choice_is_that_of_the_formula(tiny_target_f64: Target) -> None:
    """In decoding, along a path of candidates; log q is normalised over the eight of a slot alone."""
    drafter = made(tiny_target_f64)
    features = features_of(tiny_target_f64, drafter)
    ids, table, _ = by_hand(drafter, tiny_target_f64, features, 5)
    for ranks in ((), (3,), (3, 6)):
        found = scores(drafter, features, tuple(ids[slot][rank] for slot, rank in enumerate(ranks)))
        wanted = torch.full_like(found, -torch.inf)
        row = table[len(ranks)][ranks[-1] if ranks else 0]
        wanted[ids[len(ranks)]] = torch.tensor(row, dtype=torch.float64)
        torch.testing.assert_close(found, wanted.log_softmax(-1), atol=1e-9, rtol=1e-9)
        assert float(found.exp().sum()) == pytest.approx(1)
        assert int((found > -torch.inf).sum()) == 8


def test_the_loss_is_that_of_the_paper(tiny_target_f64: Target) -> None:
    """Of whole blocks, up to the first true token that is no candidate: 0.25 of cross entropy and of the distractors,
    next to the slots' own, each mean by itself."""
    module = BlockModule(tiny_target_f64, BlockTrainConfig(objective="hard", step_weights=0.5, drafter=CONFIG))
    module.configure_model()
    drafter = randomised(module.drafter.double()).train()
    own = drafter.correction
    tokens = offered_text(drafter, tiny_target_f64)
    features = tiny_target_f64.encode(Features.from_rows([(tokens, [True] * 12)]), drafter.taps)
    targets = tiny_target_f64.logits(features.final()[0])
    learned = module.loss(features)
    assert learned.weights == (0.25, 0.25, 0.25, 1.0, 0.5, 0.25)
    slots, slot_share, choice, places = torch.zeros(()).double(), 0.0, 0.0, 0
    for end in range(10):
        with torch.no_grad():
            ids, table, logits_KV = by_hand(drafter, tiny_target_f64, features, end)
        before = 0
        for step in range(3):
            if end + 2 + step >= 12:
                break
            label = tokens[end + 2 + step]
            slots, slot_share = slots - 0.5**step * logits_KV[step].log_softmax(-1)[label], slot_share + 0.5**step
        for step in range(3 if end + 4 < 12 else 0):
            if (label := tokens[end + 2 + step]) not in ids[step]:
                break
            row, target_V = torch.tensor(table[step][before], dtype=torch.float64), targets[end + 1 + step]
            rank, gaps = ids[step].index(label), (target_V[label] - target_V[ids[step]]).clamp(min=0)
            choice = choice - float(row.log_softmax(-1)[rank]) + float(row.softmax(-1) @ gaps)
            places, before = places + 1, rank
    assert 3 < places < 20
    torch.testing.assert_close(float(learned.total.detach()), float(slots) + 0.25 * choice * slot_share / places,
                               atol=1e-9, rtol=1e-9)
    divisor = float(weighted_mean_loss(learned.sums_KC, learned.weights)[1])
    assert divisor == pytest.approx(1.25 * slot_share)
    assert int(learned.sums_KC[:3, COLUMNS.index("count")].sum()) == places
    # Its gradient reaches the backbone through features and states of the slots, and the encoder.
    for weight in (drafter.fc.weight, own.rank_embedding, own.relative_slot_bias, own.layers[0].attn.in_proj_weight):
        found = torch.autograd.grad(learned.total, weight, retain_graph=True)[0]
        assert float(found.abs().max()) > 0


def test_a_gradient_through_the_candidates_is_that_of_log_q(tiny_target_f64: Target) -> None:
    drafter = made(tiny_target_f64).train()
    features = features_of(tiny_target_f64, drafter)
    weight = drafter.norm.weight
    kept, states = [], {}

    def total() -> Tensor:
        states["now"] = drafter(features).hidden_BLKD[0, 5, :3, -8:]
        return (states["now"] * torch.arange(24).view(3, 8)).sum()

    found = torch.autograd.grad(total(), weight)[0]
    for sign in (1, -1):
        with torch.no_grad():
            weight[3] += sign * 1e-5
            kept.append(float(total()))
            weight[3] -= sign * 1e-5
    assert float(found[3]) == pytest.approx((kept[0] - kept[1]) / 2e-5, rel=1e-5)
    assert abs(float(found[3])) > 1e-3


def test_a_block_with_an_unsupervised_slot_has_no_choice_to_learn(tiny_target_f64: Target) -> None:
    drafter = made(tiny_target_f64).train()
    supervised = [place not in (6, 11) for place in range(12)]
    features = tiny_target_f64.encode(Features.from_rows([(list(range(20, 32)), supervised)]), drafter.taps)
    drafts = drafter(features)
    assert drafts.valid_BLK is not None
    assert drafts.choices == 3
    choices_LK, slots_LK = drafts.valid_BLK[0].chunk(2, dim=-1)
    whole_L = slots_LK[:, -1:]
    assert bool((choices_LK[:, :1] == whole_L).all())
    assert not bool((choices_LK & ~whole_L).any())
    assert 0 < int(whole_L.sum()) < int(slots_LK[:, 0].sum())


@torch.no_grad()
def test_a_permutation_of_candidates_permutes_their_scores(tiny_target_f64: Target) -> None:
    """If no feature of a candidate gives its rank."""
    drafter = made(tiny_target_f64)
    own, generator = drafter.correction, torch.Generator().manual_seed(3)
    ids_NKC = torch.randint(4, 90, (2, 3, 8), generator=generator)
    log_q_NKC = -torch.rand(2, 3, 8, generator=generator).double()
    slots_NKD, newest_ND = torch.randn(2, 3, 32).double(), torch.randn(2, 32).double()

    def found(order: Tensor) -> tuple[Tensor, Tensor]:
        ids, log_q = ids_NKC.clone(), log_q_NKC.clone()
        ids[:, 1], log_q[:, 1] = ids[:, 1, order], log_q[:, 1, order]
        start, pairs = own.scores(ids, log_q, slots_NKD, newest_ND, drafter.embed)
        return start, pairs

    plain, order = torch.arange(8), torch.tensor([3, 1, 7, 0, 2, 6, 5, 4])
    with_ranks = found(order)[1][:, 0], found(plain)[1][:, 0][:, :, order]
    assert float((with_ranks[0] - with_ranks[1]).abs().max()) > 1e-3
    own.rank_embedding.zero_()
    own.feature_mlp[1].weight[:, 3:] = 0
    # The norm would mix a rank into the other features.
    own.feature_mlp[0] = torch.nn.Identity()
    before, after = found(plain), found(order)
    torch.testing.assert_close(after[0], before[0], atol=1e-12, rtol=0)
    torch.testing.assert_close(after[1][:, 0], before[1][:, 0][:, :, order], atol=1e-12, rtol=0)
    torch.testing.assert_close(after[1][:, 1], before[1][:, 1][:, order], atol=1e-12, rtol=0)


@torch.no_grad()
def test_a_shorter_block_reads_the_first_rows_of_the_tables(tiny_target_f64: Target) -> None:
    long, short = made(tiny_target_f64), made(tiny_target_f64, block_size=3)
    weights = {name.removeprefix("correction."): tensor for name, tensor in long.state_dict().items()
               if name.startswith("correction.")}
    weights["slot_embedding"] = weights["slot_embedding"][:, :, :2]
    weights["relative_slot_bias"] = weights["relative_slot_bias"][:, 1:-1]
    short.correction.load_state_dict(weights)
    ids_NKC, log_q_NKC = torch.arange(16).view(1, 2, 8), -torch.rand(1, 2, 8).double()
    given = ids_NKC, log_q_NKC, torch.randn(1, 2, 32).double(), torch.randn(1, 32).double(), long.embed
    for one, other in zip(long.correction.scores(*given), short.correction.scores(*given), strict=True):
        torch.testing.assert_close(one, other, atol=1e-12, rtol=0)


@pytest.mark.long
def test_samples_among_the_candidates_leave_the_targets_law(tiny_target_f64: Target) -> None:
    """By enumeration of a tree of two levels with two children each, at temperature 0.7; the slots alone are not what
    was drawn from."""
    check_choices(made(tiny_target_f64), tiny_target_f64, 8)


def test_a_lattice_goes_on_from_slots_that_guess_alone(tiny_target: Target) -> None:
    """DFlash's weights are carried; the whole vocabulary too, where the start had a reduced one."""
    plain = randomised(BlockDraft.create(replace(CONFIG, correction="none"), tiny_target))
    drafter = BlockDraft.create(CONFIG, tiny_target, start=plain)
    kept = plain.state_dict()
    assert all(torch.equal(drafter.state_dict()[name], tensor) for name, tensor in kept.items())
    assert CONFIG.carries("correction", plain.config)
    assert not CONFIG.inherits("vocabulary_size", plain.config)
    assert not replace(CONFIG, block_size=5).carries("block_size", drafter.config)
