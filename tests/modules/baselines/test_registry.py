"""Drafters without training, by name, alone and joined with a draft: the answers are the target's own."""

import pytest
import torch
from draftsmith.modules import Chain, Ensemble, Target, Topology, Union, UserError, baseline, decode, parse_joined
from draftsmith.modules.baselines.memories import PromptLookup, TokenRecycling
from draftsmith.modules.baselines.registry import BASELINES, COPIED, PARTNERS, PolicyName, joined_drafter, joined_policy
from draftsmith.modules.decoding.requests import DecodeSettings, Generation, Request
from draftsmith.modules.interfaces.proposer import DraftState, Observation, Proposer, Verified
from draftsmith.modules.policies.base import Policy
from draftsmith.modules.policies.paid import PaidTree
from draftsmith.modules.policies.registry import POLICIES, SPARSE, SPECDEC, policy_named
from draftsmith.modules.policies.trees import SampledTree, StaticTree
from support.answers import frontier, native_greedy, observation, requests_for
from support.families import CASES, randomised
from support.tiers import some_long
from torch import Tensor


def repetitive(target: Target, temperature: float = 0.0) -> list[Request]:
    """Prompts of different lengths that repeat themselves, so that there is something to copy."""
    return [
        Request((*request.tokens, *request.tokens[:3], *request.tokens), request.index, request.max_new_tokens,
                temperature)
        for request in requests_for(target, 8, 40)
    ]


@pytest.mark.parametrize("name", some_long(BASELINES, 3))
def test_greedy_output_is_the_targets_own_in_any_batch(tiny_target_f64: Target, name: str) -> None:
    target, requests = tiny_target_f64, repetitive(tiny_target_f64)
    expected = [native_greedy(target, request.tokens, request.max_new_tokens) for request in requests]
    drafter, policy = baseline(name, target)
    lengths = []
    # Three rows for eight requests: finished rows are refilled, then the batch shrinks. The memory stays.
    for batch_size, chunk in ((1, 512), (3, 7), (8, 16)):
        settings = DecodeSettings(batch_size=batch_size, prefill_chunk=chunk, ignore_eos=True)
        result = decode(target, requests, settings, drafter=drafter, policy=policy)
        assert [generation.tokens for generation in result.generations] == expected
        lengths.append(result.accepted_length)
    assert min(lengths) > 1.0, "nothing was ever accepted: the test would see no mistake"
    if name not in ("recycling", "ngrams"):
        assert lengths[0] == lengths[1] == lengths[2]


def undrawn(name: str, target: Target) -> tuple[Proposer, Policy]:
    """A baseline whose guesses are not drawn, so that the tokens are those of plain decoding, as in a union."""
    drafter, policy = baseline(name, target)
    return drafter, StaticTree(policy.topology) if isinstance(policy, SampledTree) else policy


@pytest.mark.parametrize("name", some_long(BASELINES, 3))
def test_sampled_output_is_the_same_with_and_without(tiny_target_f64: Target, name: str) -> None:
    target, requests = tiny_target_f64, repetitive(tiny_target_f64, 0.7)
    plain = decode(target, requests, DecodeSettings(top_p=0.9, ignore_eos=True))
    drafter, policy = undrawn(name, target)
    settings = DecodeSettings(batch_size=3, prefill_chunk=9, top_p=0.9, ignore_eos=True)
    result = decode(target, requests, settings, drafter=drafter, policy=policy)
    assert [generation.tokens for generation in result.generations] == [g.tokens for g in plain.generations]
    assert result.accepted_length > 1.0


def test_a_batch_of_greedy_and_sampled_rows_ends_where_each_ends(tiny_target_f64: Target) -> None:
    target = tiny_target_f64
    sampled = repetitive(target, 0.8)
    requests = [sampled[place] if place % 2 else request for place, request in enumerate(repetitive(target))]
    plain = decode(target, requests, DecodeSettings()).generations
    for name in BASELINES:
        drafter, policy = undrawn(name, target)
        found = decode(target, requests, DecodeSettings(batch_size=4), drafter=drafter, policy=policy).generations
        assert [(g.tokens, g.finish) for g in found] == [(g.tokens, g.finish) for g in plain], name


def test_a_text_that_repeats_is_copied_in_few_passes(tiny_target_f64: Target) -> None:
    target = tiny_target_f64
    answer = native_greedy(target, (5, 6), 40)
    request = Request((5, 6, *answer, 5, 6), 0, 30)
    expected = native_greedy(target, request.tokens, 30)
    drafter, policy = baseline("suffix_match", target)
    found: Generation = decode(target, [request], DecodeSettings(ignore_eos=True), drafter=drafter,
                               policy=policy).generations[0]
    assert found.tokens == expected


def test_without_a_guess_in_any_row_a_pass_has_one_token(tiny_target_f64: Target) -> None:
    target = tiny_target_f64
    sizes: list[int] = []

    class RecordingChain(Chain):
        def grow(self, *args):  # type: ignore[no-untyped-def]
            tree = super().grow(*args)
            sizes.append(tree.size)
            return tree

    drafter, _ = baseline("prompt_lookup", target)
    requests = [Request((5, 6, 7), 0, 40), Request((8, 9), 1, 40)]
    result = decode(target, requests, DecodeSettings(batch_size=2, ignore_eos=True), drafter=drafter,
                    policy=RecordingChain(7))
    assert sizes[0] == 1
    assert set(sizes) == {1, 8}
    assert [g.tokens for g in result.generations] == [native_greedy(target, r.tokens, 40) for r in requests]


class RecordingDrafter(TokenRecycling):
    """Token Recycling that keeps its observations."""

    def __init__(self, target: Target) -> None:
        super().__init__(target.vocab_size, target.device)
        self.seen: list[Observation] = []

    def observe(self, state: DraftState, rows_R: Tensor, observation: Observation) -> None:
        super().observe(state, rows_R, observation)
        self.seen.append(observation)


def test_observed_logits_belong_to_the_accepted_tokens(tiny_target_f64: Target) -> None:
    target, request = tiny_target_f64, repetitive(tiny_target_f64)[0]
    recorder, (_, policy) = RecordingDrafter(target), baseline("recycling", target)
    answer = decode(target, [request], DecodeSettings(ignore_eos=True, prefill_chunk=4), drafter=recorder,
                    policy=policy).generations[0].tokens
    text = [*request.tokens, *answer]
    with target.native() as model, torch.no_grad():
        truth_LV = model(torch.tensor([text])).logits[0]
    read, accepted = 0, 0
    for observed in recorder.seen:
        verified, count = observed.verified, int(observed.counts_B[0])
        assert verified is not None
        for node, place in enumerate(verified.places_BM[0].tolist()):
            if place >= 0 and read + place < len(text):
                assert int(verified.tokens_BM[0, node]) == int(observed.tokens_BN[0, place]) == text[read + place]
                torch.testing.assert_close(verified.logits_BMV[0, node], truth_LV[read + place], atol=1e-9, rtol=0)
                accepted += 1
        in_pass = verified.places_BM.shape[1] > 1
        assert int((verified.places_BM >= 0).sum()) == (count if in_pass else 1)
        read += count
    assert accepted >= len(answer)


@pytest.mark.parametrize("name", BASELINES)
def test_expanding_never_waits_for_the_device(tiny_target_f64: Target, name: str,
                                              monkeypatch: pytest.MonkeyPatch) -> None:
    target = tiny_target_f64
    drafter, policy = baseline(name, target)
    decode(target, [Request((5, 6, 5, 6), 0, 20)], DecodeSettings(), drafter=drafter, policy=policy)
    state = drafter.start(2, 32)
    logits = torch.zeros(2, 1, target.vocab_size, dtype=torch.float64)
    last = Verified(tokens_BM=torch.full((2, 1), 5), real_BM=torch.ones(2, 1) > 0, logits_BMV=logits,
                    places_BM=torch.full((2, 1), 2))
    drafter.observe(state, torch.arange(2), observation([[5, 6, 5, 6], [7, 8, 9, 7]], last))

    def refuse(*_: object) -> None:
        raise AssertionError("a tensor was read on the host")

    for method in ("item", "tolist", "__bool__", "__int__", "__float__", "__index__"):
        monkeypatch.setattr(torch.Tensor, method, refuse)
    drafter.expand(state, frontier([0], [-1], [[6], [7]]))
    if not isinstance(drafter, PromptLookup):
        drafter.expand(state, frontier([1, 2], [0, 0], [[5, 9], [8, 4]]))


def test_unknown_names_are_refused(tiny_target: Target) -> None:
    with pytest.raises(UserError, match="no baseline 'magic'; choose from prompt_lookup, suffix_match, reference"):
        baseline("magic", tiny_target)


TREE = Topology((-1, 0, 0, 1), (0, 0, 1, 0))


@pytest.mark.parametrize(("name", "parts"), [
    ("static", PolicyName(own="static")), ("static+lookup", PolicyName(own="static", partner="lookup")),
    ("eagle2-32+recycling-8", PolicyName(own="eagle2-32", partner="recycling", size=8)),
    ("sampled-chain-3+layer_skip-2", PolicyName(own="sampled-chain-3", partner="layer_skip", size=2)),
    ("specdec-0.5+suffix", PolicyName(own="specdec-0.5", partner="suffix")),
])
def test_a_name_has_its_parts(name: str, parts: PolicyName) -> None:
    assert parse_joined(name) == parts


@pytest.mark.parametrize(("name", "message"), [
    ("static+", r"'static\+' joins '', which is no drafter without training; choose from lookup, suffix"),
    ("static+magic", r"joins 'magic', which is no drafter.*such as static\+lookup"),
    ("static+lookup+ngrams", r"joins 'lookup\+ngrams', which is no drafter"),
    *((name, "adds to fastest, which chooses static, static.lookup or none and their sizes by itself; ask for fastest "
             "alone, or for static.lookup") for name in ("fastest+lookup", "fastest-16", "fastest-16+ngrams")),
    ("lookup", "there is no policy 'lookup'"), ("+lookup", "there is no policy ''"),
    ("static-0+lookup", "static wants a whole number"),
    ("static+lookup-0", "ends in '0'; lookup wants a whole number of at least 1 and at most 1024"),
    ("static+ngrams-1", "ngrams wants a whole number of at least 2"),
    ("static+lookup-9999", "at most 1024; choose one"), ("static+lookup-", "ends in ''; lookup wants"),
])
def test_other_names_are_refused(name: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        parse_joined(name)


@pytest.mark.parametrize(("name", "nodes"), [
    ("static+lookup", 4 + 7), ("static+lookup-5", 4 + 5), ("eagle2-9+recycling-8", 9 + 7), ("chain-2+suffix", 3 + 10),
    ("sampled+lookup-12", 4 + 12),
])
def test_a_pass_has_room_for_all_guesses_of_both(tiny_target: Target, name: str, nodes: int) -> None:
    parts, drafter = parse_joined(name), CASES["eagle"].make(tiny_target)
    policy = joined_policy(parts, policy_named(parts.own, TREE, drafter), tiny_target)
    assert policy.max_size == nodes
    policy.check(joined_drafter(parts, drafter, tiny_target))


def test_a_chain_of_its_own_length_is_copied(tiny_target: Target) -> None:
    """One lookup serves the policy of its name and that with the sizes found to be the fastest."""
    drafter = CASES["eagle"].make(tiny_target)
    ensemble = joined_drafter(parse_joined("static+lookup"), drafter, tiny_target)
    assert isinstance(ensemble, Ensemble)
    assert isinstance(ensemble.parts[0], PromptLookup)
    own = policy_named("static", TREE, drafter)
    for copied in (1, COPIED):
        union = joined_policy(parse_joined(f"static+lookup-{copied}"), own, tiny_target)
        union.check(ensemble)
        assert union.max_size == 4 + copied
    with pytest.raises(UserError, match="8 tokens deep"):
        joined_policy(parse_joined(f"static+lookup-{COPIED + 1}"), own, tiny_target).check(ensemble)


def answers(target: Target, name: str, temperature: float) -> tuple[list[list[int]], float]:
    """Answers to prompts that repeat themselves, and the tokens of a pass."""
    parts, drafter = parse_joined(name), randomised(CASES["eagle"].make(target))
    policy = joined_policy(parts, policy_named(parts.own, TREE, drafter), target)
    requests = [Request((3 + row, 9, 30, 3 + row, 9, 30, 3 + row), row, 24, temperature) for row in range(3)]
    found = decode(target, requests, DecodeSettings(batch_size=2, ignore_eos=True),
                   drafter=joined_drafter(parts, drafter, target), policy=policy)
    plain = decode(target, requests, DecodeSettings(ignore_eos=True))
    largest = policy.policies[policy.sizes[-1]] if isinstance(policy, PaidTree) else policy
    assert isinstance(largest, Union)
    if temperature == 0 or not policy.samples:
        assert [one.tokens for one in found.generations] == [one.tokens for one in plain.generations]
    return [one.tokens for one in found.generations], found.accepted_length


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("name", some_long(
    [f"{kind}+lookup" for kind in POLICIES if kind not in ("confident", SPARSE, SPECDEC)], 5))
def test_lookup_next_to_any_policy_changes_no_answer(tiny_target_f64: Target, name: str, temperature: float) -> None:
    answers(tiny_target_f64, name, temperature)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("partner", some_long(PARTNERS, 5))
def test_any_partner_changes_no_answer(tiny_target_f64: Target, partner: str, temperature: float) -> None:
    assert answers(tiny_target_f64, f"static+{partner}", temperature)[1] > 1
