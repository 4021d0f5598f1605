"""A text of the draft's own in place of the prompt: other drafts, the same answers."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from draftsmith.modules import Chain, DecodeError, DecodeSettings, DraftLM, DraftLMConfig, Request, Target, decode
from draftsmith.modules.baselines.registry import LayerDraft
from draftsmith.modules.decoding.requests import Generation
from draftsmith.modules.interfaces.proposer import Proposer
from support.answers import greedy_answers, requests_for
from support.artifacts import heads
from support.targets import random_target

SETTINGS = DecodeSettings(batch_size=3, ignore_eos=True, prefill_chunk=5)


@pytest.fixture(scope="module")
def target() -> Target:
    return random_target(3)


def answered(target: Target, drafter: Proposer, requests: Sequence[Request], **others: object) -> list[Generation]:
    settings = replace(SETTINGS, **others)  # type: ignore[arg-type]
    return decode(target, requests, settings, drafter=drafter, policy=Chain(3)).generations


@pytest.mark.parametrize("kind", ["whole", "layers", "mask tokens"])
def test_the_prompt_as_the_drafts_text_gives_the_same_drafts_and_another_one_the_same_answers(
        kind: str, target: Target) -> None:
    drafter: Proposer = LayerDraft(target, range(3) if kind == "whole" else (0, 2))
    if kind == "mask tokens":
        drafter = DraftLM.create(DraftLMConfig(layers=(0, 2), depths=4), target).eval()
    requests = requests_for(target, 7, 20)
    plain = answered(target, drafter, requests)
    assert [one.tokens for one in plain] == greedy_answers(target, requests)
    # Some rows with a text of their own and some without, in one batch whose rows are used again.
    same = [replace(one, draft_tokens=one.tokens if one.index % 3 else ()) for one in requests]
    found = answered(target, drafter, same)
    assert [(one.tokens, one.emitted) for one in found] == [(one.tokens, one.emitted) for one in plain]
    longer = [replace(one, draft_tokens=tuple(range(4, 44)) + one.tokens[-2:] if one.index % 3 else ())
              for one in requests]
    other = answered(target, drafter, longer)
    assert [one.tokens for one in other] == [one.tokens for one in plain]
    assert [one.emitted for one in other if not one.request.index % 3] == [
        one.emitted for one in plain if not one.request.index % 3]
    if kind == "whole":
        # The target drafts for itself: all is accepted, but where it reads another text.
        assert all(set(one.emitted[:-1]) == {4} for one in found)
        assert any(set(one.emitted[:-1]) != {4} for one in other)


def test_sampled_answers_stay_the_same(target: Target) -> None:
    requests = [replace(one, temperature=1.0) for one in requests_for(target, 4, 20)]
    drafter = LayerDraft(target, range(3))
    texts = [replace(one, draft_tokens=(9, 8, 7)) for one in requests]
    assert [one.tokens for one in answered(target, drafter, texts, seed=4)] == [
        one.tokens for one in answered(target, drafter, requests, seed=4)]


def test_the_drafts_cache_holds_its_own_text_alone(target: Target) -> None:
    drafter = LayerDraft(target, range(3))
    state = drafter.start(1, 100)
    drafter.open(state, torch.tensor([0]), reference=(), own_text=(5,) * 30)
    assert state.read.cache.host_lengths == state.host_lengths == [30]
    drafter.open(state, torch.tensor([0]), reference=(), own_text=())
    assert state.read.cache.host_lengths == state.host_lengths == [0]


def test_a_draft_that_reads_states_and_a_text_beyond_the_context_are_refused(target: Target) -> None:
    requests = [Request((5, 6), 0, 4), Request((5, 6), 1, 4, draft_tokens=(7, 8))]
    with pytest.raises(DecodeError, match="prompt 1 has draft_tokens, but a draft of the family medusa reads the tar"):
        answered(target, heads(target), requests)
    requests[1] = replace(requests[1], draft_tokens=(7,) * target.context_length)
    with pytest.raises(DecodeError, match=r"prompt 1 has a reference of 0 tokens and draft_tokens of .* shorten them"):
        answered(target, LayerDraft(target, (0,)), requests)
