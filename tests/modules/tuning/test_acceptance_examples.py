"""Labels of acceptance heads: exact along real roll-outs, against the plain twin."""

from dataclasses import replace

import pytest
import torch
from draftsmith.modules import Drafter, DraftLM, Features, SamplingSetting, Target, UserError, chain_for, decode
from draftsmith.modules.decoding.requests import DecodeSettings, Request
from draftsmith.modules.tuning.acceptance_examples import rollouts
from references import specdec
from support.families import CASES, randomised
from support.policies import FixedLength

PROMPTS = [[3, 9, 30], [4, 8, 15, 16], [5, 5, 6]]
SETTINGS = {
    "greedy": SamplingSetting(), "sampled": SamplingSetting(temperature=1.0),
    "filtered": SamplingSetting(temperature=0.7, top_k=9, top_p=0.9),
}
LENGTH, ANSWER = 3, 8


def draft_lm(target: Target, name: str = "draft-lm") -> DraftLM:
    """A random draft, or one with the target's own layers, slightly changed, over a few tokens: sometimes right."""
    drafter = CASES[name].make(target)
    assert isinstance(drafter, DraftLM)
    if name == "draft-lm":
        return randomised(drafter).eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in drafter.parameters():
            weight += 0.05 * torch.randn(weight.shape, generator=generator)
    return drafter.eval()


def chains(target: Target, drafter: Drafter, setting: SamplingSetting) -> list[tuple[list[int], list[int]]]:
    """(text up to the root, drafted tokens) of each pass over the prompts, in the order of `rollouts`."""
    found = []

    def note(tree, accepted, generations):  # type: ignore[no-untyped-def]
        for row, generation in enumerate(generations):
            found.append(([*generation.request.tokens, *generation.tokens], tree.tokens_BN[row, 1:].tolist()))

    requests = [Request(tuple(tokens), place, ANSWER, setting.temperature) for place, tokens in enumerate(PROMPTS)]
    settings = DecodeSettings(batch_size=2, top_k=setting.top_k, top_p=setting.top_p, min_p=setting.min_p)
    policy = chain_for(setting, LENGTH + 1, FixedLength(LENGTH + 1), check_every=0)
    for part in (requests[:2], requests[2:]):
        decode(target, part, settings, drafter=drafter, policy=policy, observer=note)
    return found


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("name", ["draft-lm", "draft-lm-reduced"])
def test_rollouts_have_the_exact_chances_and_the_states_of_their_tokens(tiny_target_f64: Target, name: str,
                                                                        setting: str) -> None:
    target, drafter = tiny_target_f64, draft_lm(tiny_target_f64, name)
    found = rollouts(target, drafter, PROMPTS, SETTINGS[setting], length=LENGTH, max_new_tokens=ANSWER, batch_size=2)
    texts = chains(target, drafter, SETTINGS[setting])
    assert len(texts) == len(found.chances_E) / LENGTH > 5
    with torch.no_grad():
        for place, (before, tokens) in enumerate(texts):
            for step in range(LENGTH):
                text, token = before + tokens[:step], tokens[step]
                exact = specdec.chance(target, drafter, text, token, SETTINGS[setting])
                assert float(found.chances_E[place * LENGTH + step]) == pytest.approx(exact, abs=1e-5)
                state = specdec.draft_state(drafter, [*text, token])
                torch.testing.assert_close(found.states_ED[place * LENGTH + step], state.float(), atol=1e-5, rtol=1e-5)
    assert float(found.chances_E.mean()) < 1
    assert float(found.chances_E.mean()) > 0 or (name, setting) == ("draft-lm", "greedy")


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("name", ["kangaroo", "kangaroo-reduced"])
def test_kangaroos_states_are_those_of_the_text(tiny_target_f64: Target, name: str, setting: str) -> None:
    """Its first layers read every drafted token exactly, so that drafting has the states of training."""
    target, drafter = tiny_target_f64, randomised(CASES[name].make(tiny_target_f64))
    found = rollouts(target, drafter, PROMPTS, SETTINGS[setting], length=LENGTH, max_new_tokens=ANSWER, batch_size=2)
    texts = chains(target, drafter, SETTINGS[setting])
    assert len(texts) == len(found.chances_E) / LENGTH > 3
    with torch.no_grad():
        for place, (before, tokens) in enumerate(texts):
            text = [*before, *tokens[:LENGTH]]
            features = target.encode(Features.from_rows([(text, [True] * len(text))]), drafter.taps)
            state_TD = drafter(features).hidden_BLKD[0, -LENGTH:, 0]
            found_TD = found.states_ED.unflatten(0, (-1, LENGTH))[place]
            torch.testing.assert_close(found_TD, state_TD.float(), atol=1e-5, rtol=1e-5)


def test_chains_can_be_enough(tiny_target_f64: Target) -> None:
    drafter = draft_lm(tiny_target_f64)
    found = rollouts(tiny_target_f64, drafter, PROMPTS, SamplingSetting(), length=LENGTH, max_new_tokens=ANSWER, most=5)
    assert (found.states_ED.shape, found.chances_E.shape) == ((15, 24), (15,))


def test_answers_are_no_longer_than_the_context(tiny_target_f64: Target) -> None:
    """A prompt that leaves little room gives the drafts that fit, one that leaves none gives none."""
    target, drafter = tiny_target_f64, draft_lm(tiny_target_f64)
    long = [9] * (target.context_length - 2)
    found, alone = (rollouts(target, drafter, prompts, SamplingSetting(), length=LENGTH, max_new_tokens=ANSWER)
                    for prompts in ([PROMPTS[0], long, [9] * target.context_length], PROMPTS[:1]))
    assert len(found.chances_E) > len(alone.chances_E)


def test_drafters_of_few_depths_or_without_states_are_refused(tiny_target_f64: Target) -> None:
    medusa = randomised(CASES["medusa"].make(tiny_target_f64))
    with pytest.raises(UserError, match=r"chains of 20 judged tokens need 21 draft steps, this medusa drafter has \d;"):
        rollouts(tiny_target_f64, medusa, PROMPTS, SamplingSetting(), length=20, max_new_tokens=ANSWER)
    with pytest.raises(UserError, match="reads the drafter's states at its tokens, of which Medusa shows none"):
        rollouts(tiny_target_f64, medusa, PROMPTS, SamplingSetting(), length=1, max_new_tokens=ANSWER)
    with pytest.raises(UserError, match="0 prompts gave no draft of 3 tokens; give more prompts or longer answers"):
        rollouts(tiny_target_f64, draft_lm(tiny_target_f64), [], SamplingSetting(), length=3, max_new_tokens=ANSWER)


@pytest.mark.parametrize("name", ["eagle", "eagle3", "falcon", "draft-lm", "draft-lm-depths"])
def test_scores_come_from_the_states_that_a_drafter_shows(tiny_target_f64: Target, name: str) -> None:
    drafter = randomised(CASES[name].make(tiny_target_f64)).eval()
    recorded = []

    class Watching(FixedLength):
        reads_states = True

        def judge(self, state_BD, step):  # type: ignore[no-untyped-def]
            recorded.append(state_BD)
            return state_BD[:, 0]

    expand, scored = drafter.expand, []

    def noted(state, frontier):  # type: ignore[no-untyped-def]
        scores = expand(state, frontier)
        # A copy: what the drafter shows lies in its state, which is overwritten.
        scored.append(replace(scores, states_BFHD=scores.states_BFHD.clone()))
        return scores

    drafter.expand = noted  # type: ignore[method-assign]
    decode(tiny_target_f64, [Request((3, 9, 30), 0, 6)], DecodeSettings(), drafter=drafter,
           policy=chain_for(SamplingSetting(), 3, Watching(3)))
    assert recorded
    for scores in scored:
        assert scores.states_BFHD is not None
        for depth in range(scores.log_probs_BFHQ.shape[2]):
            own = drafter.project(scores.states_BFHD[:, :, depth], depth).float().log_softmax(-1)
            torch.testing.assert_close(own.to(scores.log_probs_BFHQ), scores.log_probs_BFHQ[:, :, depth], atol=1e-4,
                                       rtol=1e-4)
