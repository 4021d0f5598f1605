"""Divergences, near-ties, and the reference that answers are compared with."""

import importlib

import pytest
import torch
from draftsmith.export.evaluation.lossless import (
    compare,
    first_divergence,
    generate,
    greedy_judge,
    native_model,
    sampled_judge,
)
from draftsmith.modules import DecodeSettings, Request, Target, decode
from draftsmith.modules.target.loading.tiny_model import tiny_model, tiny_tokenizer

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


def test_a_tie_is_a_near_tie_and_a_third_token_is_not() -> None:
    target, prompt, best, twin = tied_target(torch.float32)
    third = next(token for token in range(target.vocab_size) if token not in (best, twin))
    tie = compare(prompt, [best, 7], [twin, 7], greedy_judge(target))
    assert (tie.divergence, tie.near_tie) == (0, True)
    assert tie.gap == pytest.approx(0.0, abs=1e-6)
    wrong = compare(prompt, [best, 7], [third, 7], greedy_judge(target))
    assert not wrong.near_tie
    assert wrong.gap is not None
    assert wrong.gap > 1e-3


def test_in_float64_only_ties_are_near_ties() -> None:
    target, prompt, best, twin = tied_target(torch.float64)
    assert compare(prompt, [best], [twin], greedy_judge(target)).near_tie
    with torch.no_grad():
        target.head.weight[twin] *= 1 - 1e-9
    assert not compare(prompt, [best], [twin], greedy_judge(target)).near_tie


def test_half_precision_allows_its_own_rounding() -> None:
    target, prompt, best, twin = tied_target(torch.bfloat16)
    assert compare(prompt, [best], [twin], greedy_judge(target)).near_tie


def test_a_padded_reference_is_made_again_before_anything_is_blamed(tiny_target: Target) -> None:
    judge = greedy_judge(tiny_target)
    assert compare((5,), [1, 2], [1, 3], judge, again=lambda: [1, 2]).divergence is None
    assert compare((5,), [1, 2], [1, 3], judge, again=lambda: [1, 3]).divergence == 1


def test_stopping_early_is_never_a_near_tie(tiny_target: Target) -> None:
    found = compare((5,), [1, 2], [1, 2, 3], greedy_judge(tiny_target))
    assert (found.divergence, found.gap, found.near_tie) == (2, None, False)


def test_a_draw_at_the_edge_of_two_shares_is_a_near_tie(tiny_target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    module = importlib.import_module(sampled_judge.__module__)
    request = Request((5, 9), 0, 4, 1.0)
    judge = sampled_judge(tiny_target, DecodeSettings(), request)
    with tiny_target.native() as model:
        shares_V = model(torch.tensor([[5, 9]])).logits[0, -1].double().softmax(-1)
    edge = float(shares_V[:21].sum())
    for uniform, near in ((edge, True), (edge + 1e-3, False)):
        monkeypatch.setattr(module, "uniform_stream", lambda *_args, value=uniform: [value] * 4)
        assert judge((5, 9), (20, 21)) == (None, near)


def test_at_a_low_temperature_the_edges_are_wider(tiny_target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    module = importlib.import_module(sampled_judge.__module__)
    with tiny_target.native() as model:
        logits_V = model(torch.tensor([[5, 9]])).logits[0, -1].double()
    for temperature, near in ((1.0, False), (0.01, True)):
        judge = sampled_judge(tiny_target, DecodeSettings(), Request((5, 9), 0, 4, temperature))
        edge = float((logits_V / temperature).softmax(-1)[:21].sum())
        monkeypatch.setattr(module, "uniform_stream", lambda *_args, value=edge + 1e-3: [value] * 4)
        assert judge((5, 9), (20, 21))[1] is near


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
