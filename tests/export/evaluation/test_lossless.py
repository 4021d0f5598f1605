"""Divergences, near-ties, and the reference that answers are compared with."""

import importlib
import random

import numpy as np
import pytest
import torch
from draftsmith.export.evaluation.lossless import IMPOSSIBLE, Judge, first_divergence, generate, native_model, positions
from draftsmith.modules import Chain, DecodeSettings, PromptLookup, Request, Target, decode
from draftsmith.modules.target.loading.tiny_model import tiny_model, tiny_tokenizer
from support.tiers import some_long

PROMPTS = [*((1, 5 + place, 40, 9) for place in range(5)), *((1, 30 + place, 8) for place in range(3))]


def tied_target(dtype: torch.dtype) -> tuple[Target, tuple[int, ...], int, int]:
    """(a target, a prompt, its next token, another token with exactly the same logit everywhere)."""
    model = tiny_model(dtype=dtype)
    prompt = (5, 9, 30)
    best = int(model(torch.tensor([prompt])).logits[0, -1].argmax())
    twin = best + 1
    with torch.no_grad():
        model.lm_head.weight[twin] = model.lm_head.weight[best]
    return Target(model, tiny_tokenizer(), name="tied"), prompt, best, twin


def asked(prompt: tuple[int, ...], length: int, temperature: float = 0.0) -> Request:
    return Request(prompt, 0, length, temperature)


def test_a_tie_is_a_near_tie_and_a_third_token_is_not() -> None:
    target, prompt, best, twin = tied_target(torch.float32)
    judge = Judge(target)
    third = next(token for token in range(target.vocab_size) if token not in (best, twin))
    tie = judge.compare(asked(prompt, 1), [best], [twin])
    assert (tie.divergence, tie.near_tie) == (0, True)
    assert tie.gap == pytest.approx(0.0, abs=1e-6)
    wrong = judge.compare(asked(prompt, 1), [best], [third])
    assert not wrong.near_tie
    assert wrong.gap is not None
    assert wrong.gap > 1e-3


def test_in_float64_only_ties_are_near_ties() -> None:
    target, prompt, best, twin = tied_target(torch.float64)
    assert Judge(target).compare(asked(prompt, 1), [best], [twin]).near_tie
    with torch.no_grad():
        target.head.weight[twin] *= 1 - 1e-9
    assert not Judge(target).compare(asked(prompt, 1), [best], [twin]).near_tie


def test_what_follows_a_near_tie_is_compared_too() -> None:
    """With what the target says after the answer's own text: the reference has another one from there on."""
    target, prompt, best, twin = tied_target(torch.float32)
    texts = []
    for first in (best, twin):
        rest = decode(target, [Request((*prompt, first), 0, 9)], DecodeSettings(ignore_eos=True)).generations[0].tokens
        texts.append([first, *rest])
    answer, reference = texts
    assert not set(target.eos_ids) & set(answer)
    request = asked(prompt, len(answer))
    assert Judge(target).compare(request, answer, reference).near_tie
    changed = [*answer[:6], answer[6] + 1, *answer[7:]]
    assert not Judge(target).compare(request, changed, reference).near_tie
    # An answer that ends too early, or at no end token, is a fault of its own.
    assert not Judge(target).compare(request, answer[:-1], reference).near_tie


@pytest.mark.parametrize("dtype", some_long([torch.bfloat16, torch.float32], 2))
def test_a_right_loop_is_never_blamed(dtype: torch.dtype) -> None:
    """In half precision many of its answers differ: two tokens often have the same logit within rounding."""
    target = Target(tiny_model(dtype=dtype), tiny_tokenizer(), name="half")
    requests = [Request((5, 9 + index, 30), index, 24) for index in range(32)]
    copies = PromptLookup(target.device)
    drafted = decode(target, requests, DecodeSettings(batch_size=16), drafter=copies, policy=Chain(4))
    judge, found = Judge(target), []
    with native_model(target) as model:
        for one in drafted.generations:
            reference = generate(model, target, [one.request.tokens], max_new_tokens=24)[0]
            found.append(judge.compare(one.request, one.tokens, reference))
    assert all(one.near_tie for one in found if one.divergence is not None)
    # A token that is none of the best ones is seen in half precision as well.
    requests = [one.request for one in drafted.generations]
    wrong = [judge.compare(one.request, [*one.tokens[:-1], (one.tokens[-1] + 7) % target.vocab_size], one.tokens)
             for one in drafted.generations]
    assert sum(not one.near_tie for one in wrong) > 25


def test_what_all_logits_share_excuses_nothing() -> None:
    """A constant that is added to all logits chooses no token, and rounding is none of its size."""
    target, prompt, best, twin = tied_target(torch.float32)
    request = asked(prompt, 1)
    plain = Judge(target).compare(request, [best], [twin]).slack
    with torch.no_grad():
        target.model.lm_head.bias = torch.nn.Parameter(torch.full((target.vocab_size,), 64.0))
    offset = Judge(target).compare(request, [best], [twin]).slack
    assert plain is not None
    assert offset is not None
    assert offset < 50 * plain
    assert offset < 1e-4


def test_a_padded_reference_is_made_again_before_anything_is_blamed(tiny_target: Target) -> None:
    judge, request = Judge(tiny_target), asked((5,), 2)
    assert judge.compare(request, [1, 2], [1, 3], again=lambda: [1, 2]).divergence is None
    assert judge.compare(request, [1, 2], [1, 3], again=lambda: [1, 3]).divergence == 1
    # To stop early is never a near-tie.
    found = judge.compare(asked((5,), 3), [1, 2], [1, 2, 3])
    assert (found.divergence, found.gap, found.near_tie) == (2, None, False)


def test_a_draw_at_the_edge_of_two_shares_is_a_near_tie(tiny_target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    module = importlib.import_module(Judge.__module__)
    request = Request((5, 9), 0, 1, 1.0)
    with tiny_target.native() as model:
        shares_V = model(torch.tensor([[5, 9]])).logits[0, -1].double().softmax(-1)
    edge = float(shares_V[:21].sum())
    for uniform, drawn in ((edge, {20: True, 21: True, 22: False}), (edge + 1e-3, {20: False, 21: True, 22: False})):
        monkeypatch.setattr(module, "uniform_stream", lambda *_args, value=uniform: np.full(1, value))
        judge = Judge(tiny_target)
        assert {token: judge.compare(request, [token], [21]).near_tie or token == 21 for token in drawn} == drawn
        assert judge.compare(request, [21], [21]).divergence is None


def test_a_sampled_reference_that_is_no_draw_excuses_nothing(tiny_target_f64: Target) -> None:
    request = asked((5, 9), 6, temperature=0.7)
    answer = decode(tiny_target_f64, [request], DecodeSettings()).generations[0].tokens
    wrong = [*answer[:3], (answer[3] + 1) % tiny_target_f64.vocab_size, *answer[4:]]
    found = Judge(tiny_target_f64).compare(request, answer, wrong)
    assert (found.divergence, found.near_tie) == (3, False)


def test_a_sampled_answer_that_ends_elsewhere_is_a_fault(tiny_target_f64: Target) -> None:
    request = asked((5, 9), 12, temperature=0.7)
    answer = list(decode(tiny_target_f64, [request], DecodeSettings()).generations[0].tokens)
    assert Judge(tiny_target_f64).compare(request, answer, answer).divergence is None
    end = tiny_target_f64.eos_ids[0]
    for wrong in (answer[:5], [*answer[:5], end, *answer[6:]]):
        assert Judge(tiny_target_f64).compare(request, wrong, wrong).divergence is not None
        assert IMPOSSIBLE in positions(tiny_target_f64, request, wrong, DecodeSettings())
    assert IMPOSSIBLE not in positions(tiny_target_f64, request, answer, DecodeSettings())


@pytest.mark.parametrize("filters", some_long([{"top_k": 5, "top_p": 0.8}, {"top_p": 0.8}, {"min_p": 0.1}], 2))
def test_tokens_near_the_end_of_a_filter_may_stay_or_go_in_half_precision(filters: dict[str, float]) -> None:
    target = Target(tiny_model(dtype=torch.bfloat16), tiny_tokenizer(), name="half")
    settings = DecodeSettings(batch_size=12, **filters)  # type: ignore[arg-type]
    requests = [Request((5, 9 + index, 30), index, 40, 3.0) for index in range(24)]
    judge = Judge(target, settings)
    # A batch rounds otherwise than the whole pass by which they are judged.
    for one in decode(target, requests, settings).generations:
        assert judge.compare(one.request, one.tokens, one.tokens).divergence is None


def test_a_token_that_is_ruled_out_is_a_fault_without_a_distance() -> None:
    model = tiny_model(dtype=torch.float64)
    model.generation_config.suppress_tokens = [40]
    found = Judge(Target(model, tiny_tokenizer(), name="ruled")).compare(asked((5, 9), 1), [40], [41])
    assert (found.divergence, found.gap, found.near_tie) == (0, None, False)


@pytest.mark.parametrize("filters", [{}, {"top_k": 5}, {"top_p": 0.6}, {"min_p": 0.3}, {"repetition_penalty": 1.3}])
@pytest.mark.parametrize("temperature", some_long([0.05, 0.01, 0.2, 1.0], 3))
def test_wrong_draws_are_seen_in_half_precision_and_right_ones_are_not(temperature: float, filters: dict[str, float]
                                                                       ) -> None:
    target = Target(tiny_model(dtype=torch.bfloat16), tiny_tokenizer(), name="half")
    settings = DecodeSettings(batch_size=16, **filters)  # type: ignore[arg-type]
    requests = [Request((5, 9 + index, 30), index, 12, temperature) for index in range(16)]
    copies = PromptLookup(target.device)
    drafted = decode(target, requests, settings, drafter=copies, policy=Chain(4)).generations
    judge, chance = Judge(target, settings), random.Random(0)

    def drawn(request: Request, answer: list[int]) -> bool:
        return judge.compare(request, answer, answer).divergence is None

    assert all(drawn(one.request, one.tokens) for one in drafted)
    changed = [[*one.tokens[:-1], (one.tokens[-1] + chance.randrange(1, target.vocab_size)) % target.vocab_size]
               for one in drafted]
    seen = sum(not drawn(one.request, answer) for one, answer in zip(drafted, changed, strict=True))
    assert seen >= 14, seen


def test_generate_in_a_padded_batch_equals_generate_alone(tiny_target_f64: Target) -> None:
    prompts = [PROMPTS[0], PROMPTS[6], (5,)]
    with native_model(tiny_target_f64) as model:
        together = generate(model, tiny_target_f64, prompts, max_new_tokens=20)
        alone = [generate(model, tiny_target_f64, [prompt], max_new_tokens=20)[0] for prompt in prompts]
    assert together == alone


def test_generate_ignores_the_settings_of_a_checkpoint_and_they_come_back() -> None:
    target = Target(tiny_model(dtype=torch.float64), tiny_tokenizer(), name="tiny-random")
    with native_model(target) as model:
        expected = generate(model, target, PROMPTS, max_new_tokens=20)
    own = target.model.generation_config
    own.repetition_penalty, own.no_repeat_ngram_size = 3.0, 2
    with native_model(target) as model:
        assert generate(model, target, PROMPTS, max_new_tokens=20) == expected
    assert target.model.generation_config is own
    with target.native() as model:
        row = model.generate(torch.tensor([PROMPTS[0]]), max_new_tokens=20, do_sample=False, pad_token_id=0)
    assert row[0, len(PROMPTS[0]):].tolist() != expected[0]  # the own do change the answer when they are kept


def test_the_reference_ends_at_the_tokens_of_the_generation_config() -> None:
    """The config is swapped while the reference is made; its end token must not be forgotten with it."""
    free = Target(tiny_model(dtype=torch.float64), tiny_tokenizer(), name="free")
    prompt = PROMPTS[0]
    answer = decode(free, [Request(prompt, 0, 30)], DecodeSettings(ignore_eos=True)).generations[0].tokens
    ending = next(token for place, token in enumerate(answer) if place >= 5 and token not in answer[:place])
    model = tiny_model(dtype=torch.float64)
    model.generation_config.eos_token_id = [ending]
    own = model.generate(torch.tensor([prompt]), max_new_tokens=30, do_sample=False)[0, len(prompt):].tolist()
    target = Target(model, tiny_tokenizer(), name="ending")
    with native_model(target) as untouched:
        reference = generate(untouched, target, [prompt], max_new_tokens=30)[0]
    assert reference == own
    assert reference == decode(target, [Request(prompt, 0, 30)], DecodeSettings()).generations[0].tokens
    assert reference[-1] == ending


@pytest.mark.parametrize("place", [3, 6])
def test_the_tokenizers_end_token_does_not_end_an_answer_whose_config_declares_another(place: int) -> None:
    model = tiny_model(dtype=torch.float64)
    tokenizer, prompt = tiny_tokenizer(), PROMPTS[1]
    free = model.generate(torch.tensor([prompt]), max_new_tokens=30, do_sample=False, eos_token_id=None, pad_token_id=0)
    token = int(free[0, len(prompt) + place])
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(token)
    assert tokenizer.eos_token_id == token
    model.generation_config.eos_token_id = 3
    own = model.generate(torch.tensor([prompt]), max_new_tokens=30, do_sample=False, pad_token_id=0)
    target = Target(model, tokenizer, name="two ends")
    found = decode(target, [Request(prompt, 0, 30)], DecodeSettings()).generations[0].tokens
    assert found == own[0, len(prompt):].tolist()
    assert len(found) > place + 1


@pytest.mark.parametrize(("answer", "reference", "place"), [
    ([1, 2, 3], [1, 2, 3], None), ([1, 2, 3], [1, 5, 3], 1), ([1, 2], [1, 2, 3], 2), ([], [1], 0), ([], [], None),
])
def test_first_divergence(answer: list[int], reference: list[int], place: int | None) -> None:
    assert first_divergence(answer, reference) == place
