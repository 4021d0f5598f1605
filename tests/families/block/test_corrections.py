"""Corrections of a block's guesses: what they are at the start, that some text needs them, and that samples drawn with
them leave the target's law exact."""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from draftsmith.modules import (
    BlockDraft,
    BlockDraftConfig,
    DecodeSettings,
    Features,
    Request,
    Target,
    Topology,
    UserError,
    decode,
    policy_named,
)
from draftsmith.modules.families.block.corrections import Markov, Shape
from draftsmith.modules.tuning.acceptance_examples import TEMPERATURES, calibrate_judgement
from draftsmith.modules.verification.acceptance_rules import reject_siblings
from draftsmith.trainers import DraftModule, draft_module, train_config
from families.block.reference import plain_state
from references.rejection import level_law
from support.answers import level, read, text
from support.families import randomised
from torch import Tensor

NAMES = ("markov", "gated", "rnn", "gru", "state", "refiner")
IDS = torch.tensor([5, 9, 30, 31, 60, 61])


def features_of(target: Target, drafter: BlockDraft) -> Features:
    return text(target, drafter, list(range(20, 32)))


def logits(drafter: BlockDraft, features: Features) -> Tensor:
    hidden = drafter(features).hidden_BLKD
    return torch.stack([drafter.project(hidden[:, :, step], step) for step in range(hidden.shape[2])], dim=2)


@pytest.mark.parametrize("name", NAMES)
def test_a_new_correction_corrects_nothing(name: Any, tiny_target: Target) -> None:
    """Also one that is added to a trained drafter without one, and after an artifact's rebuilding."""
    config = BlockDraftConfig(block_size=3, num_layers=1, rank=8, aligned="same" if name == "refiner" else "next")
    plain = randomised(BlockDraft.create(config, tiny_target))
    drafter = BlockDraft.create(replace(config, correction=name), tiny_target, start=plain).eval()
    other = BlockDraft.rebuild(drafter.describe(), tiny_target.identity)
    other.load_state_dict(drafter.state_dict())
    other.bind(tiny_target)
    features = features_of(tiny_target, plain)
    with torch.no_grad():
        wanted = logits(plain, features)
        assert torch.equal(logits(drafter, features), wanted)
        assert torch.equal(logits(other.eval(), features), wanted)
        assert not torch.allclose(logits(randomised(drafter), features), wanted)


def test_a_table_of_further_rank_has_other_directions_in_its_new_columns() -> None:
    """One that continues a smaller one takes over the first columns."""
    tokens_VD = torch.randn(40, 12)
    small, large = (Markov(Shape(width=12, rank=rank, slots=3, tokens=40, entries=40, eps=1e-6, name="markov"))
                    for rank in (3, 6))
    with torch.no_grad():
        for one in (small, large):
            one.initialise(tokens_VD)
    torch.testing.assert_close(large.markov_w1.weight[:, :3], small.markov_w1.weight)


@pytest.mark.long
@pytest.mark.parametrize("name", ["markov", "rnn", "state"])
def test_the_token_after_an_unknown_one_needs_the_correction(name: Any, tiny_target: Target) -> None:
    """Text of pairs (u, v(u)) with random u: after the end of a pair, u is unknown to every slot, and v follows it."""
    torch.manual_seed(0)
    firsts = torch.randint(20, 28, (20, 12))
    rows = torch.stack([firsts, firsts + 30], dim=2).flatten(1).tolist()
    shares = {}
    for correction in ("none", name):
        module = draft_module(BlockDraft)(tiny_target, train_config(BlockDraft)(
            objective="hard", drafter=BlockDraftConfig(block_size=2, num_layers=1, correction=correction, rank=16)))
        module.configure_model()
        drafter = module.drafter.train()
        features, fresh = (tiny_target.encode(Features.from_rows([(row, [True] * 24) for row in some]), drafter.taps)
                           for some in (rows[:14], rows[14:]))
        optimizer = torch.optim.AdamW(drafter.parameters(), lr=3e-2)
        for _ in range(60):
            optimizer.zero_grad()
            module.loss(features).total.div(100).backward()
            optimizer.step()
        with torch.no_grad():
            # After index 2 i the root ends the pair; offset 2 is the next first token, offset 3 its second.
            guesses = logits(drafter.eval(), fresh)[:, :20:2, 1].argmax(-1)
        shares[correction] = float((guesses == fresh.tokens_BL[:, 3:23:2]).float().mean())
    assert shares[name] > 0.9
    assert shares["none"] < 0.5


def test_a_corrected_state_is_that_of_the_formula(tiny_target_f64: Target) -> None:
    """In training and in decoding, after a slot's own token before, and of no other token."""
    config = BlockDraftConfig(block_size=3, num_layers=1, correction="state", rank=5)
    drafter = randomised(BlockDraft.create(config, tiny_target_f64).double())
    plain = BlockDraft.create(replace(config, correction="none"), tiny_target_f64).double().eval()
    plain.load_state_dict({key: value for key, value in drafter.state_dict().items() if key in plain.state_dict()})
    features = features_of(tiny_target_f64, drafter)
    with torch.no_grad():
        found, slots = drafter(features).hidden_BLKD[0], plain(features).hidden_BLKD[0]
        for place in range(9):
            for step in range(3):
                before = int(features.tokens_BL[0, place + 1 + step])
                torch.testing.assert_close(found[place, step], plain_state(drafter, slots[place, step], before),
                                           atol=1e-10, rtol=1e-10)
        state, path = read(drafter, features, 6), [int(features.tokens_BL[0, 6]), 44, 61]
        for step, token in enumerate(path):
            scores = drafter.expand(state, level([step], [step - 1], [token]))
            wanted = tiny_target_f64.logits(plain_state(drafter, slots[5, step], token)).log_softmax(-1)
            torch.testing.assert_close(scores.log_probs_BFHQ[0, 0, 0], wanted, atol=1e-9, rtol=1e-9)


def scores(drafter: BlockDraft, features: Features, path: tuple[int, ...]) -> Tensor:
    """log q [Q] of the children of a path below the root, as decoding makes it; minus infinity for no candidate."""
    state = read(drafter, features, 6)
    for depth, token in enumerate([int(features.tokens_BL[0, 6]), *path]):
        found = drafter.expand(state, level([depth], [depth - 1], [token]))
    log_q_Q = found.log_probs_BFHQ[0, 0, 0]
    if found.candidates_BFHQ is None:
        return log_q_Q
    return torch.full((drafter.vocab_size,), -torch.inf).to(log_q_Q).scatter(0, found.candidates_BFHQ[0, 0, 0], log_q_Q)


def branches(drafter: BlockDraft, features: Features) -> Iterator[tuple[list[int], Tensor]]:
    """(tokens from the root on, log q [Q] of the children) of each node of a tree with branches, level by level."""
    state, root = read(drafter, features, 6), int(features.tokens_BL[0, 6])
    paths: dict[int, list[int]] = {-1: []}
    for new in ([(-1, root)], [(0, 44), (0, 61)], [(1, 7), (2, 8)], [(4, 9), (3, 9)]):
        nodes = [len(paths) - 1 + place for place in range(len(new))]
        found = drafter.expand(state, level(nodes, [parent for parent, _ in new], [token for _, token in new]))
        for place, (node, (parent, token)) in enumerate(zip(nodes, new, strict=True)):
            paths[node] = [*paths[parent], token]
            yield paths[node], found.log_probs_BFHQ[0, place, 0]


Law = Callable[[tuple[int, ...]], Tensor]


def pair_law(p_of: Law, drawn_of: Law, told_of: Law, keep: Callable[[Tensor], Tensor] | None = None,
             stops: tuple[int, ...] = ()) -> Tensor:
    """[V, V] law of two tokens after a tree of two levels with two children each.

    Args:
        p_of: the target's distribution after a path.
        drawn_of: from which children are drawn.
        told_of: by which they are tested.
        keep: which children of a list [.., 2] stay in the tree.
        stops: tokens after which nothing is drafted.
    """
    def law(path: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        told = told_of(path).log()

        def reject(p: Tensor, log_q: Tensor, lists: Tensor, real: Tensor, marks: Tensor) -> Any:
            return reject_siblings(p, told.expand_as(log_q), lists, real if keep is None else keep(lists), marks)

        return level_law(reject, p_of(path), drawn_of(path), 2, True)

    accepted, bonus = law(())
    rows = []
    for token in range(len(accepted)):
        below = p_of((token,)) if token in stops or not accepted[token] else sum(law((token,)))
        rows.append(accepted[token] * below + bonus[token] * p_of((token,)))
    return torch.stack(rows)


def check_law(size: int, drawn: Law, wrong: Callable[[Law], Sequence[Tensor]], least: float) -> Law:
    """Check that tests by what was drawn from leave the law of a random target with `size` tokens, and that the laws
    of other tests, made from that target, differ by at least so much. Returns the target."""
    table = torch.randn(size + 1, size, generator=torch.Generator().manual_seed(5), dtype=torch.float64).softmax(-1)

    def p_of(path: tuple[int, ...]) -> Tensor:
        return table[path[-1] if path else size]

    wanted = table[size][:, None] * table[:size]
    torch.testing.assert_close(pair_law(p_of, drawn, drawn), wanted, atol=1e-12, rtol=0)
    for one in wrong(p_of):
        assert float((one - wanted).abs().max()) > least
    return p_of


def check_choices(drafter: BlockDraft, target: Target, most: int) -> None:
    """Check samples among the candidates of a slot, at temperature 0.7; tests by the slots alone are seen."""
    features = features_of(target, drafter)
    with torch.no_grad():
        slots_KD = drafter(features).hidden_BLKD[0, 5, :, : target.hidden_size]

    def drawn(path: tuple[int, ...]) -> Tensor:
        return (scores(drafter, features, path) / 0.7).softmax(-1)

    def alone(path: tuple[int, ...]) -> Tensor:
        base = target.logits(slots_KD[len(path)])
        return (torch.full_like(base, -torch.inf).scatter(0, *base.topk(most)[::-1]) / 0.7).softmax(-1)

    check_law(target.vocab_size, drawn, lambda p_of: [pair_law(p_of, drawn, alone)], 1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_samples_of_the_corrected_draft_leave_the_targets_law(name: Any, tiny_target_f64: Target) -> None:
    """By enumeration at temperature 0.7. Tests by the draft without its correction, or at temperature 1, are seen; so
    is a cut by a number of the drawn token, and not one by a number of the token before it."""
    config = BlockDraftConfig(block_size=3, num_layers=1, correction=name, rank=4, vocabulary_size=6,
                              aligned="same" if name == "refiner" else "next")
    drafter = BlockDraft.create(config, tiny_target_f64, IDS)
    drafter = randomised(drafter.to(torch.float64))
    own = drafter.correction
    layer = {"state": lambda: own.mlp.up_proj, "gru": lambda: own.embed_proj[2], "refiner": lambda: own.w2}.get(
        name, lambda: own.markov_w2)()
    layer.weight.data *= 8
    plain = BlockDraft.create(replace(config, correction="none"), tiny_target_f64, IDS).double().eval()
    plain.load_state_dict({key: value for key, value in drafter.state_dict().items() if key in plain.state_dict()})
    features = features_of(tiny_target_f64, drafter)

    def at(temperature: float) -> Law:
        return lambda path: (scores(drafter, features, tuple(IDS[list(path)].tolist())) / temperature).softmax(-1)

    def uncorrected(path: tuple[int, ...]) -> Tensor:
        with torch.no_grad():
            return (plain.project(plain(features).hidden_BLKD[0, 5, len(path)], 0) / 0.7).softmax(-1)

    drawn = at(0.7)
    p_of = check_law(6, drawn, lambda p_of: [
        pair_law(p_of, drawn, uncorrected), pair_law(p_of, drawn, at(1.0)),
        pair_law(p_of, drawn, drawn, keep=lambda lists: (lists != 1) & (lists != 4))], 1e-4)
    wanted = torch.stack([p_of(())[token] * p_of((token,)) for token in range(6)])
    torch.testing.assert_close(pair_law(p_of, drawn, drawn, stops=(1, 4)), wanted, atol=1e-12, rtol=0)


WHOLE = "which chooses among all tokens of the target, and vocabulary_size is 50; leave vocabulary_size out"
OWN = "whose slots predict their own token, and aligned is 'next'; set aligned to same, or correction to markov"


@pytest.mark.parametrize(("name", "settings", "message"), [
    ("selector", {"vocabulary_size": 50}, f"correction is 'selector', {WHOLE}"),
    ("refiner", {}, f"correction is 'refiner', {OWN}"),
    ("gru", {"block_size": 1}, "corrects every guess of a block but the first, and block_size 1 drafts one token; rai"),
    ("gru", {"block_size": 2, "aligned": "same"}, "block_size 2 drafts one token; raise block_size, or set correction"),
    *((name, {"aligned": "same", "confidence": True}, "confidence reads the table of a Markov head, and correction is "
       f"{name!r}") for name in ("none", "selector", "refiner", "gru", "state")),
])
def test_impossible_settings_are_refused(name: Any, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=re.escape(message)):
        BlockDraftConfig(correction=name, **settings)


# Judgement ------------------------------------------------------------------------------------------------------------


def judging(target: Target, **settings: Any) -> DraftModule:
    torch.manual_seed(2)
    module = draft_module(BlockDraft)(target, train_config(BlockDraft)(
        objective="hard_tvd", step_weights=0.5, drafter=BlockDraftConfig(
            block_size=3, num_layers=1, correction="markov", rank=4, confidence=True, **settings)))
    module.configure_model()
    randomised(module.drafter.double())
    return module


def test_the_judgement_learns_the_acceptance_and_does_not_change_it(tiny_target_f64: Target) -> None:
    """The loss grows by its cross entropy with the acceptance, a constant; a linear layer of the state makes it."""
    module = judging(tiny_target_f64)
    drafter, features = module.drafter, features_of(tiny_target_f64, module.drafter)
    whole = module.loss(features)
    gradients = torch.autograd.grad(whole.total, list(drafter.parameters()), allow_unused=True)
    drafter.judges = False
    apart, drafts = module.loss(features), drafter(features)
    expected, constant = torch.zeros((), dtype=torch.float64), []
    for step, offset in enumerate(drafts.offsets):
        for place in range(12 - offset):
            state = drafts.hidden_BLKD[0, place, step]
            q = drafter.project(state, step).softmax(-1)
            p = tiny_target_f64.logits(features.final()[0, place + offset - 1]).softmax(-1)
            alpha, chance = torch.minimum(p, q).sum().detach(), drafter.judge(state, step).sigmoid()
            constant.append(float(alpha))
            expected = expected - 0.5**step * (alpha * chance.log() + (1 - alpha) * (1 - chance).log())
    torch.testing.assert_close(whole.total - apart.total, expected, atol=1e-9, rtol=1e-9)
    wanted = torch.autograd.grad(apart.total + expected, list(drafter.parameters()), allow_unused=True)
    for found, other in zip(gradients, wanted, strict=True):
        assert (found is None) == (other is None)
        if found is not None:
            torch.testing.assert_close(found, other, atol=1e-8, rtol=1e-8)
    assert len(set(constant)) > 5


@pytest.mark.parametrize("first", [0, 3])
def test_a_judgement_is_calibrated_step_by_step(first: int, tiny_target_f64: Target) -> None:
    """The temperatures are those of least error of the product, found one after the other by a plain search; a block
    starts with the first token of an answer, or one after it."""
    drafter = judging(tiny_target_f64).drafter
    drafter.confidence.weight.data *= 4
    asked = [False] * (first + 1) if first else []
    rows = [tiny_target_f64.encode(Features.from_rows([(list(range(20, 32)), asked + [True] * (12 - len(asked)))]),
                                   drafter.taps)]
    found = calibrate_judgement(drafter, rows)
    assert torch.equal(found, drafter.judge_temperatures_K)
    drafter.judge_temperatures_K.fill_(1.0)
    with torch.no_grad():
        drafts, tokens = drafter(rows[0]), rows[0].tokens_BL[0]
        before, right = torch.ones(12 - first), torch.ones(12 - first)
        for step, offset in enumerate(drafts.offsets):
            states, count = drafts.hidden_BLKD[0, first : 12 - offset, step], 12 - offset - first
            right = right[:count] * (drafter.project(states, step).argmax(-1) == tokens[first + offset :])
            errors = {}
            for temperature in TEMPERATURES:
                chance = before[:count] * (drafter.judge(states, step) / temperature).sigmoid()
                bins = (chance * 10).long().clamp(max=9)
                gap = sum(abs(float((chance - right)[bins == one].sum())) for one in range(10)) / len(chance)
                errors[temperature] = gap
            chosen = min(TEMPERATURES, key=lambda one: abs(one - float(found[step])))
            assert errors[chosen] <= min(errors.values()) + 1e-9
            assert errors[chosen] < max(errors.values()) - 1e-3
            before = before[:count] * (drafter.judge(states, step) / chosen).sigmoid()


def test_drafts_end_before_a_guess_that_is_judged_unlikely(tiny_target: Target) -> None:
    """With an easy threshold the whole block is drafted, with a hard one nothing; answers stay."""
    drafter = judging(tiny_target).drafter.float()
    features, tree = features_of(tiny_target, drafter), Topology.chain(3)
    requests = [Request((5 + row, 9, 30), row, 12) for row in range(3)]
    plain = decode(tiny_target, requests, DecodeSettings(ignore_eos=True))
    lengths = {}
    for share in (0.001, 0.15, 0.999):
        policy = policy_named(f"confident-{share}", tree, drafter)
        drafted = decode(tiny_target, requests, DecodeSettings(ignore_eos=True), drafter=drafter, policy=policy)
        assert [one.tokens for one in drafted.generations] == [one.tokens for one in plain.generations]
        grown = policy.grow(drafter, read(drafter, features, 6), features.tokens_BL[:, 6])
        lengths[share] = int(grown.real_BN.sum()) - 1
    state = read(drafter, features, 6)
    scores = drafter.expand(state, level([0], [-1], features.tokens_BL[0, 6:7].tolist()))
    first = float(drafter.judge(scores.states_BFHD, 0).detach().sigmoid())
    lengths[first + 0.01] = int(policy_named(f"confident-{first + 0.01:.6f}", tree, drafter).grow(
        drafter, read(drafter, features, 6), features.tokens_BL[:, 6]).real_BN.sum()) - 1
    assert (lengths[0.001], lengths[0.999], lengths[first + 0.01]) == (3, 0, 0)


@pytest.mark.parametrize(("change", "message"), [
    ({"objective": "hard"}, "confidence learns the acceptance from the target's distribution"),
    ({"step_weights": "d_pace"}, "with fixed weights of the steps, got objective 'soft' and step_weights 'd_pace'"),
])
def test_a_judgement_without_an_acceptance_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        train_config(BlockDraft)(drafter=BlockDraftConfig(correction="markov", confidence=True), **change)
    with pytest.raises(UserError, match="confidence reads the table of a Markov head, and correction is 'none'; set"):
        BlockDraftConfig(confidence=True)
