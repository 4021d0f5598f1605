"""The record of passes: every pass is seen once, and its guesses and the target's tokens add up to the answer."""

import pytest
import torch
from draftsmith.modules import (
    Chain,
    DecodeSettings,
    Policy,
    Request,
    StaticTree,
    Target,
    TokenTree,
    Topology,
    decode,
    stream,
)
from draftsmith.modules.decoding.recorders import GuessedPass, PassRecorder, WrittenToken
from draftsmith.modules.verification.acceptance_rules import follow
from support.drafters import ScriptedDrafter
from support.policy_cases import EVERY, medusa

pytestmark = pytest.mark.usefixtures("on_device")

PROMPTS = [(5, 20 + place, 7, 30) for place in range(5)]


def requests(temperature: float = 0.0) -> list[Request]:
    return [Request(tokens, 3 * place, 9 + 2 * place, temperature) for place, tokens in enumerate(PROMPTS)]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("policy", EVERY, ids=lambda policy: type(policy).__name__)
def test_every_policy_is_recorded(tiny_target: Target, policy: Policy, temperature: float) -> None:
    recorder = PassRecorder()
    result = decode(tiny_target, requests(temperature), DecodeSettings(batch_size=2, ignore_eos=True),
                        drafter=medusa(tiny_target), policy=policy, observer=recorder)
    for generation in result.generations:
        passes, written = recorder.passes[generation.request.index], recorder.written(generation)
        assert [one.token for one in written] == generation.tokens
        assert len(passes) == len(generation.emitted)
        # A pass adds its accepted guesses and one token of the target's, unless the answer ends before.
        assert [one.accepted + 1 for one in passes][:-1] == generation.emitted[:-1]
        assert passes[-1].accepted + 1 >= generation.emitted[-1]
        assert sum(one.guessed for one in written) == sum(
            min(one.accepted, count) for one, count in zip(passes, generation.emitted, strict=True))
        assert all(one.token not in one.rejected for one in written)
        assert not any(one.rejected for one in written if one.guessed)


@pytest.mark.parametrize(("mode", "guessed", "rejecting"), [("oracle", 8, 0), ("wrong", 0, 10)])
def test_the_authors_of_an_answer(tiny_target: Target, mode: str, guessed: int, rejecting: int) -> None:
    request = Request(PROMPTS[0], 0, 11)
    plain = decode(tiny_target, [request], DecodeSettings(ignore_eos=True)).generations[0].tokens
    recorder = PassRecorder()
    drafter = ScriptedDrafter(tiny_target.vocab_size, [[*PROMPTS[0], *plain]], mode)
    answer, = decode(tiny_target, [request], DecodeSettings(ignore_eos=True), drafter=drafter, policy=Chain(4),
                     observer=recorder).generations
    written = recorder.written(answer)
    assert [one.token for one in written] == plain
    assert sum(one.guessed for one in written) == guessed
    assert sum(bool(one.rejected) for one in written) == rejecting


def test_a_stream_is_observed_before_its_tokens(tiny_target: Target) -> None:
    recorder = PassRecorder()
    seen = []
    passes = stream(tiny_target, Request(PROMPTS[0], 0, 12), DecodeSettings(ignore_eos=True),
                    drafter=medusa(tiny_target), policy=StaticTree(Topology.from_paths([(0,), (1,), (0, 0)])),
                    observer=recorder)
    for place, _tokens in enumerate(passes):
        seen.append(len(recorder.passes.get(0, [])) - place)
    assert set(seen) == {0}


def test_plain_decoding_guesses_nothing(tiny_target: Target) -> None:
    recorder = PassRecorder()
    answer, = decode(tiny_target, requests()[:1], DecodeSettings(ignore_eos=True), observer=recorder).generations
    assert recorder.passes[0] == [GuessedPass()] * answer.passes
    assert recorder.written(answer) == [WrittenToken(token=token, guessed=False) for token in answer.tokens]


def test_rejected_guesses_are_those_next_to_the_targets_token(tiny_target: Target) -> None:
    # The root has two children; the target takes the second, and neither of its two children, one of them twice.
    topology = Topology.from_paths([(0,), (1,), (1, 0), (1, 1), (1, 2)])
    tree = topology.plant(torch.tensor([[9, 10, 11, 12, 13, 12]]))
    accepted = follow(tree, torch.tensor([[11, 0, 20, 0, 0, 0]]))
    recorder = PassRecorder()
    answer = decode(tiny_target, requests()[:1], DecodeSettings()).generations
    recorder(tree, accepted, answer)
    assert recorder.passes[0] == [GuessedPass(accepted=1, rejected=(12, 13))]
    assert recorder.passes[0][0].written([11, 20]) == [
        WrittenToken(token=11, guessed=True), WrittenToken(token=20, guessed=False, rejected=(12, 13))]
    assert recorder.passes[0][0].written([11]) == [WrittenToken(token=11, guessed=True)]


def test_padding_is_no_guess(tiny_target: Target) -> None:
    tree = TokenTree.from_parents(torch.tensor([[9, 10, 11]]), torch.tensor([[-1, 0, 0]]),
                                  torch.tensor([[True, False, True]]))
    recorder = PassRecorder()
    recorder(tree, follow(tree, torch.tensor([[30, 0, 0]])), decode(tiny_target, requests()[:1],
                                                                   DecodeSettings()).generations)
    assert recorder.passes[0] == [GuessedPass(rejected=(11,))]
