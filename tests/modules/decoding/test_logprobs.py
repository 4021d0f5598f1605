"""Log-probabilities of emitted tokens: those of a pass of the untouched model, however a token was drafted."""

import dataclasses
from collections.abc import Sequence

import pytest
import torch
from draftsmith.modules import Chain, DecodeError, Policy, Proposer, StaticTree, Target, Topology, decode
from draftsmith.modules.decoding.requests import DecodeResult, DecodeSettings, Generation, Request
from draftsmith.modules.target.loading.tiny_model import tiny_model, tiny_tokenizer
from draftsmith.modules.verification.acceptance_rules import AcceptAll, Typical
from support.answers import requests_for
from support.drafters import ScriptedDrafter
from support.families import CASES, randomised
from support.policies import EVERY, medusa
from support.tiers import some_long

pytestmark = pytest.mark.usefixtures("on_device")

ASKED = DecodeSettings(ignore_eos=True, logprobs=True)
FILTERED = dataclasses.replace(ASKED, top_k=30, top_p=0.9, min_p=0.01, repetition_penalty=1.3, batch_size=3)


def check(target: Target, generations: Sequence[Generation], bound: float = 2e-5) -> None:
    """Every log-probability is that of the model's own pass over prompt and answer."""
    assert generations
    for one in generations:
        with target.native() as model, torch.no_grad():
            text_1L = torch.tensor([[*one.request.tokens, *one.tokens]], device=target.device)
            logits_LV = model(input_ids=text_1L, use_cache=False).logits[0]
        start = len(one.request.tokens) - 1
        expected_TV = logits_LV[start : start + len(one.tokens)].to(torch.promote_types(target.dtype, torch.float32))
        expected_T = expected_TV.log_softmax(-1).gather(1, torch.tensor(one.tokens, device=target.device)[:, None])
        assert len(one.logprobs) == len(one.tokens)
        assert torch.tensor(one.logprobs, device="cpu") == pytest.approx(expected_T[:, 0].cpu().float(), abs=bound)


def decoded(target: Target, settings: DecodeSettings, temperature: float = 0.0, drafter: Proposer | None = None,
            policy: Policy | None = None) -> DecodeResult:
    return decode(target, requests_for(target, 4, 5, temperature), settings, drafter=drafter, policy=policy)


@pytest.mark.parametrize(("policy", "settings", "temperature"), some_long([
    (policy, settings, temperature) for policy in (*EVERY, Chain(3), None)
    for settings, temperature in ((FILTERED, 0.9), (ASKED, 0.0), (ASKED, 0.9), (FILTERED, 0.0))], 4))
def test_every_policy_and_rule(tiny_target: Target, policy: Policy | None, settings: DecodeSettings,
                               temperature: float) -> None:
    drafter = None if policy is None else medusa(tiny_target)
    found = decoded(tiny_target, settings, temperature, drafter, policy)
    check(tiny_target, found.generations)
    without = decoded(tiny_target, dataclasses.replace(settings, logprobs=False), temperature, drafter, policy)
    assert [one.tokens for one in without.generations] == [one.tokens for one in found.generations]
    assert not any(one.logprobs for one in without.generations)


@pytest.mark.parametrize("mode", ["oracle", "mixed", "wrong"])
def test_accepted_guesses_and_the_targets_own_tokens(tiny_target_f64: Target, mode: str) -> None:
    target = tiny_target_f64
    plain = decoded(target, ASKED).generations
    texts = [[*one.request.tokens, *one.tokens] for one in plain]
    drafter, settings = ScriptedDrafter(target.vocab_size, texts, mode), dataclasses.replace(ASKED, batch_size=2)
    tree = Topology.from_paths([(0,), (1,), (0, 0), (0, 0, 0), (1, 0)])
    found = decoded(target, settings, 0.0, drafter, StaticTree(tree))
    assert [one.tokens for one in found.generations] == [one.tokens for one in plain]
    check(target, [*plain, *found.generations], bound=1e-6)
    assert mode != "oracle" or found.accepted_length > 2


@pytest.mark.parametrize(("rule", "policy"), [(Typical(), EVERY[0]), (AcceptAll(), Chain(3))], ids=["typical", "all"])
def test_rules_that_change_the_distribution(tiny_target: Target, rule: Typical | AcceptAll, policy: Policy) -> None:
    settings = dataclasses.replace(ASKED, lossy=rule, batch_size=2)
    check(tiny_target, decoded(tiny_target, settings, 1.1, medusa(tiny_target), policy).generations)


@pytest.mark.parametrize("name", ["prompt-tokens", "kangaroo"])
def test_virtual_nodes_and_shared_layers(tiny_target: Target, name: str) -> None:
    drafter = randomised(CASES[name].make(tiny_target))
    policy = StaticTree(Topology.from_paths([(0,), (1,)]))
    check(tiny_target, decoded(tiny_target, ASKED, 0.0, drafter, policy).generations)


@pytest.mark.parametrize("pack", [0, 1])
@pytest.mark.parametrize("chunk", [3, 512])
def test_prompts_in_pieces_and_packed_layers(pack: int, chunk: int) -> None:
    target = Target(tiny_model(), tiny_tokenizer(), name="tiny", pack=pack)
    # A common start of twelve tokens is read once for all.
    requests = [Request((*range(20, 32), 40 + index, *range(50, 50 + 4 * index)), index, 9) for index in range(3)]
    settings = dataclasses.replace(ASKED, prefill_chunk=chunk, batch_size=2)
    check(target, decode(target, requests, settings).generations)
    check(target, decode(target, requests, settings, drafter=medusa(target), policy=EVERY[1]).generations)


def test_half_precision_is_widened() -> None:
    target = Target(tiny_model(dtype=torch.bfloat16), tiny_tokenizer(), name="tiny")
    check(target, decoded(target, ASKED, 0.0, medusa(target), Chain(2)).generations, bound=0.05)


def test_the_end_of_an_answer_cuts_them_too(tiny_target: Target) -> None:
    plain = decoded(tiny_target, ASKED).generations[0]
    settings = dataclasses.replace(ASKED, ignore_eos=False, eos_ids=(plain.tokens[5],))
    drafter = ScriptedDrafter(tiny_target.vocab_size, [[*plain.request.tokens, *plain.tokens]], "oracle")
    found, = decode(tiny_target, [plain.request], settings, drafter=drafter, policy=Chain(4)).generations
    assert found.tokens == plain.tokens[: plain.tokens.index(plain.tokens[5]) + 1]
    check(tiny_target, [found])


def test_a_row_that_goes_wrong_keeps_those_of_its_tokens() -> None:
    target = Target(tiny_model(), tiny_tokenizer(), name="tiny")
    plain, = decode(target, [Request((5, 9, 33), 0, 12)], ASKED).generations
    broken = tiny_model()
    with torch.no_grad():
        broken.get_input_embeddings().weight[plain.tokens[6]] = torch.nan
    with pytest.raises(DecodeError) as raised:
        decode(Target(broken, tiny_tokenizer(), name="broken"), [plain.request], ASKED)
    found, = raised.value.result.generations
    assert 0 < len(found.tokens) == len(found.logprobs) <= 7
    assert found.logprobs == pytest.approx(plain.logprobs[: len(found.tokens)], abs=1e-5)
