"""Drafters of blocks: slots against their plain twin, alignment, causality, places that are learned, trees and caches,
what is refused."""

import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from draftsmith.modules import (
    BlockDraft,
    BlockDraftConfig,
    DecodeSettings,
    Features,
    Observation,
    Request,
    StaticTree,
    Target,
    Topology,
    UserError,
    decode,
)
from draftsmith.modules.token_tree import TokenTree
from draftsmith.trainers import draft_module, train_config
from families.block.reference import plain_slots
from support.answers import level, news, packed, read, text
from support.drafters import Wrapped
from support.families import randomised

CONFIGS = {
    "next": BlockDraftConfig(block_size=3),
    "next-whole": BlockDraftConfig(block_size=4, causal=False, num_layers=1),
    "same": BlockDraftConfig(block_size=3, aligned="same", taps=(0,)),
    "same-whole": BlockDraftConfig(block_size=4, aligned="same", causal=False),
    "one": BlockDraftConfig(block_size=1),
    "residual": BlockDraftConfig(block_size=3, num_layers=1, residual=True),
    "convolved": BlockDraftConfig(block_size=4, aligned="same", causal=False, conv=True),
}
TOKENS = list(range(20, 38))


def made(config: BlockDraftConfig, target: Target) -> BlockDraft:
    return randomised(BlockDraft.create(config, target).to(target.dtype))


@pytest.mark.parametrize("name", CONFIGS)
def test_slots_equal_the_plain_twin(name: str, tiny_target_f64: Target) -> None:
    """After every position of packed rows, and the same after sampled ones, with equal gradients."""
    config, target = CONFIGS[name], tiny_target_f64
    drafter = made(config, target)
    features = packed(target, drafter)
    with torch.no_grad():
        found = drafter(features).hidden_BLKD[..., : target.hidden_size]
        for row, segment in ((0, 0), (0, 1), (1, 1), (2, 0)):
            places = (features.segments_BL[row] == segment).nonzero()[:, 0].tolist()
            taps = {layer: states[row, places] for layer, states in features.taps.items()}
            for end in range(len(places) - 1):
                wanted = plain_slots(drafter, taps, int(features.tokens_BL[row, places[end + 1]]), end)
                torch.testing.assert_close(found[row, places[end]], wanted, atol=1e-10, rtol=1e-10)
    grown = []
    # As many sampled places as there are with something to learn: they are all drawn.
    for anchors in (None, 14):
        drafter.config = replace(config, anchors=anchors)
        drafts = drafter.train()(features)
        assert (drafts.indices_BL is None) == (anchors is None)
        assert int(drafts.valid_BLK.any(-1).sum(1).max()) <= 14
        drafter.zero_grad()
        (drafts.hidden_BLKD.sin() * drafts.valid_BLK[..., None]).sum().backward()
        grown.append([parameter.grad.clone() for parameter in drafter.parameters() if parameter.grad is not None])
    for one, other in zip(*grown, strict=True):
        torch.testing.assert_close(one, other, atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("name", CONFIGS)
def test_steps_learn_an_unbroken_run_of_supervised_tokens(name: str, tiny_target: Target) -> None:
    """A gap in the labels, the end of a text and an anchor on the last token end what a block learns."""
    drafter = made(CONFIGS[name], tiny_target).train()
    features = packed(tiny_target, drafter)
    drafts = drafter(features)
    segments, supervised = features.segments_BL.tolist(), features.supervised_BL.tolist()
    assert drafts.offsets == tuple(range(2, 2 + CONFIGS[name].num_steps))
    for row, place in [(row, place) for row in range(3) for place in range(len(segments[0]))]:
        for step, offset in enumerate(drafts.offsets):
            run = range(place + 1, place + offset + 1)
            wanted = segments[row][place] >= 0 and run[-1] < len(segments[row]) and all(
                segments[row][there] == segments[row][place] and supervised[row][there] for there in run)
            assert bool(drafts.valid_BLK[row, place, step]) == wanted


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("counts", [(7,), (3, 1, 3), (2, 0, 5)])
def test_drafts_equal_training_in_chunks_of_any_size(name: str, counts: tuple[int, ...], tiny_target: Target) -> None:
    config, drafter = CONFIGS[name], made(CONFIGS[name], tiny_target)
    features = text(tiny_target, drafter, TOKENS)
    with torch.no_grad():
        hidden_KX, state = drafter(features).hidden_BLKD[0, 6], read(drafter, features, *counts)
        wanted = torch.stack([drafter.project(hidden_KX[step], step).log_softmax(-1)
                              for step in range(config.num_steps)])
        for _again in range(2):
            found, step = [], 0
            while len(found) < config.num_steps:
                scores = drafter.expand(state, level([step], [step - 1], [TOKENS[7 + step]]))
                found += scores.log_probs_BFHQ[0, 0].unbind(0)
                step += 1
            torch.testing.assert_close(torch.stack(found), wanted, atol=1e-5, rtol=1e-4)
            # An empty observation discards the tree: the next one is the same.
            drafter.observe(state, torch.tensor([0]), news(features, 7, 0))
        with pytest.raises(ValueError, match="all of them asked for already"):
            [drafter.expand(state, level([step], [step - 1], [5])) for step in range(config.num_steps + 1)]


@pytest.mark.parametrize("name", ["next", "same-whole"])
def test_the_backbone_runs_once_a_tree_and_keeps_no_slot(name: str, tiny_target: Target) -> None:
    drafter, runs = made(CONFIGS[name], tiny_target), list[int]()
    features = text(tiny_target, drafter, TOKENS)
    drafter.layers[0].register_forward_hook(lambda *_: runs.append(1))
    used, fresh = read(drafter, features, 5), read(drafter, features, 9)
    drafter.expand(used, level([0], [-1], [50]))
    assert (len(runs), used.rows.cache.host_lengths) == (1, [5])
    drafter.observe(used, torch.tensor([0]), news(features, 5, 4))
    asked = level([0], [-1], [51])
    torch.testing.assert_close(drafter.expand(used, asked).log_probs_BFHQ, drafter.expand(fresh, asked).log_probs_BFHQ)
    assert (len(runs), used.rows.cache.host_lengths) == (3, [9])


def test_the_loop_shows_every_position_before_the_root(tiny_target: Target) -> None:
    """The cache has as many positions as the text before each root, over prompts read in chunks, their shared start,
    rows that are used again and accepted paths of any length; a single position that is left out is seen."""
    drafter = made(CONFIGS["next"], tiny_target)
    found, wanted = list[list[int]](), list[list[int]]()

    class Counted(StaticTree):
        def grow(self, drafter: Any, state: Any, roots_B: Any, draws: Any = None) -> TokenTree:
            found.append(state.rows.cache.host_lengths[: len(roots_B)])
            return super().grow(drafter, state, roots_B, draws)

    class Forgetful(Wrapped):
        calls = 0

        def observe(self, state: Any, rows_R: torch.Tensor, observation: Observation) -> None:
            self.calls += 1
            counts_B = observation.counts_B - (torch.arange(len(rows_R)) == 0).long() * (self.calls == 6)
            super().observe(state, rows_R, replace(observation, counts_B=counts_B, host_counts=counts_B.tolist()))

    def seen(_tree: Any, _accepted: Any, slots: Any) -> None:
        wanted.append([len(one.request.tokens) + len(one.tokens) - 1 for one in slots])

    shared = tuple(range(20, 30))
    requests = [Request((*shared, *range(40, 43 + row)), row, 9 + 2 * row) for row in range(4)]
    for one in (drafter, Forgetful(drafter)):
        found.clear(), wanted.clear()
        decode(tiny_target, requests, DecodeSettings(batch_size=2, prefill_chunk=4, ignore_eos=True), drafter=one,
               policy=Counted(Topology.chain(3)), observer=seen)
        assert len(found) > 10
        assert (found == wanted) == (one is drafter)


@pytest.mark.parametrize("name", ["next", "next-whole"])
def test_earlier_slots_depend_on_later_ones_only_if_not_causal(name: str, tiny_target: Target) -> None:
    """Fewer slots at decoding change nothing of a causal block."""
    drafter, fewer = (made(replace(CONFIGS[name], block_size=size), tiny_target) for size in (4, 2))
    fewer.load_state_dict(drafter.state_dict())
    features = text(tiny_target, drafter, TOKENS)
    with torch.no_grad():
        states, first = (one(features).hidden_BLKD for one in (drafter, fewer))
    assert torch.allclose(first, states[:, :, :2], atol=1e-5) == CONFIGS[name].causal


def test_a_block_knows_nothing_after_its_root(tiny_target: Target) -> None:
    """States and tokens from the root's place on, other blocks' roots among them, change no slot but by the root."""
    for config in CONFIGS.values():
        drafter = made(config, tiny_target)
        features = text(tiny_target, drafter, TOKENS)
        tokens = features.tokens_BL.clone()
        tokens[0, 10:] += 20
        taps = {layer: states.clone() for layer, states in features.taps.items()}
        for states in taps.values():
            states[0, 9:] += 1.0
        with torch.no_grad():
            before = drafter(features).hidden_BLKD[0]
            after = drafter(replace(features, tokens_BL=tokens, taps=taps)).hidden_BLKD[0]
        torch.testing.assert_close(after[:9, 0], before[:9, 0], atol=1e-6, rtol=1e-6)
        assert not torch.allclose(after[9, 0], before[9, 0])


@pytest.mark.parametrize("aligned", ["next", "same"])
@pytest.mark.parametrize("shift", [0, pytest.param(1, marks=pytest.mark.long)])
def test_slots_learn_the_tokens_of_their_alignment(aligned: Any, shift: int, tiny_target: Target) -> None:
    """Rotary positions tell the slots apart: on a cycle, whose token is the state, each learns the one its own distance
    ahead; labels one place off do not make it a useful drafter."""
    config = BlockDraftConfig(block_size=3, aligned=aligned, num_layers=1)
    module = draft_module(BlockDraft)(tiny_target, train_config(BlockDraft)(drafter=config, objective="hard"))
    torch.manual_seed(0)
    module.configure_model()
    drafter = module.drafter.train()
    rows = [[30 + (start + place) % 8 for place in range(16)] for start in (0, 3)]
    features = tiny_target.encode(Features.from_rows([(row, [True] * 16) for row in rows]), drafter.taps)
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=1e-2)
    right = drafter.forward
    for _ in range(40):
        optimizer.zero_grad()
        drafts = right(features)
        module.drafter.forward = lambda _features, drafts=drafts: replace(
            drafts, offsets=tuple(offset + shift for offset in drafts.offsets))
        module.loss(features).total.div(100).backward()
        optimizer.step()
    with torch.no_grad():
        hidden = right(features).hidden_BLKD
        for step, offset in enumerate(drafter.offsets):
            guesses = drafter.project(hidden[:, 2:10, step], step).argmax(-1)
            share = float((guesses == features.tokens_BL[:, 2 + offset : 10 + offset]).float().mean())
            assert share > 0.95 if shift == 0 else share < 0.5


def test_a_mask_token_reads_the_targets_row(tiny_target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """The target's own embedding, of which nothing is saved; a drafter without one trains a row."""
    mask = tiny_target.tokenizer.unk_token_id
    with pytest.raises(UserError, match=f"mask_token_id {mask} is '<unk>' to tiny-random, a token that its text has"):
        BlockDraft.create(BlockDraftConfig(mask_token_id=mask), tiny_target)
    kind, special = type(tiny_target.tokenizer), set(tiny_target.tokenizer.all_special_ids) - {mask}
    with monkeypatch.context() as patch:
        # A tokenizer may have a mask of its own.
        patch.setattr(kind, "mask_token_id", mask, raising=False)
        BlockDraft.create(BlockDraftConfig(mask_token_id=mask), tiny_target)
    monkeypatch.setattr(kind, "all_special_ids", property(lambda _: sorted(special)))
    config = BlockDraftConfig(block_size=3, mask_token_id=mask)
    drafter, own = made(config, tiny_target), made(replace(config, mask_token_id=None), tiny_target)
    assert set(own.state_dict()) - set(drafter.state_dict()) == {"mask_embedding"}
    row = tiny_target.model.get_input_embeddings().weight[mask]
    own.load_state_dict({**drafter.state_dict(), "mask_embedding": row})
    features = text(tiny_target, drafter, TOKENS)
    with torch.no_grad():
        torch.testing.assert_close(drafter(features).hidden_BLKD, own(features).hidden_BLKD)
    # An artifact that was written so by hand would fail in its first pass.
    with pytest.raises(UserError, match="mask_token_id must lie between 0 and 99, the rows of the target's embedding"):
        BlockDraft.rebuild({**drafter.describe(), "mask_token_id": 100}, tiny_target.identity)


@pytest.mark.parametrize(("settings", "message"), [
    ({"block_size": 0}, "block_size must be at least 1, got 0"),
    ({"block_size": 1, "aligned": "same"}, "block_size is 1 and aligned 'same', and the only slot would predict the "
     "token that it reads; set block_size to at least 2"),
    ({"aligned": "after"}, "aligned must be one of next, same, got 'after'"),
    ({"taps": (2, 1)}, "taps must be ascending numbers of layers, at least one, got [2, 1]"),
    ({"taps": (0, 9)}, "tap 9 is not a layer of tiny-random; choose from 0 to"),
    ({"anchors": 0}, "anchors must be at least 1, got 0"),
    ({"mask_token_id": 40}, "mask_token_id 40 is"),
    ({"mask_token_id": -1}, "mask_token_id must lie between 0 and"),
    ({"rope_base": 0.0}, "rope_base must be above 0, got 0.0"),
])
def test_impossible_settings_are_refused(settings: dict[str, Any], message: str, tiny_target: Target) -> None:
    with pytest.raises(UserError, match=re.escape(message)):
        BlockDraft.create(BlockDraftConfig(**settings), tiny_target)


def test_a_loss_that_slots_do_not_have_is_refused() -> None:
    """Before a target answers, not in the first step of a training."""
    with pytest.raises(UserError, match=r"feature_weight is 0.5, but slots estimate no state of the target; set"):
        train_config(BlockDraft)(feature_weight=0.5)


def test_rows_too_short_for_a_block_are_refused(tiny_target: Target) -> None:
    drafter = made(BlockDraftConfig(block_size=6), tiny_target).train()
    with pytest.raises(UserError, match="6 draft steps need rows of at least 8 tokens, got 7; lower block_size"):
        drafter(text(tiny_target, drafter, TOKENS[:7]))
