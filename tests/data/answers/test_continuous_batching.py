"""Answers by transformers' continuous batching: those of the target itself, and what it would leave out is refused."""

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from draftsmith.data import ChatTemplate, DistillConfig, PromptConfig, WantedStates, distill
from draftsmith.data.answers import continuous_batching
from draftsmith.data.answers.continuous_batching import BatchAnswerer
from draftsmith.modules import DecodeSettings, Generation, Request, Target, UserError, decode
from draftsmith.modules.target.loading.tiny_model import tiny_model, tiny_tokenizer
from support.prompt_files import contents, many, rows, write_prompts
from support.tiers import some_long
from transformers import Gemma2Config, Gemma2ForCausalLM

SMALL = DistillConfig(shard_prompts=4, slots=4, max_new_tokens=24, validation_prompts=2, test_prompts=1)
SERVED = replace(SMALL, engine="transformers")
PROMPTS = [(1, 5, 9, 22), (3, 4), (7,) * 40, (8, 2, 6), (11, 12, 13)]


def answerer(target: Target, **settings: Any) -> BatchAnswerer:
    given = DecodeSettings(**{"batch_size": 2, **settings})
    return BatchAnswerer(target, ChatTemplate(target.tokenizer), given, 24, lambda _tokens: None)


def answers(target: Target, requests: Sequence[Request], deadline: float | None = None,
            **settings: Any) -> list[Generation]:
    return answerer(target, **settings)._answers(requests, deadline)


def run(target: Target, prompts: PromptConfig, config: DistillConfig, out: Path, **more: Any) -> Any:
    return distill(target, prompts, config, ChatTemplate(target.tokenizer), out, progress=False, **more)


# Answers -------------------------------------------------------------------------------------------------------------


def test_the_data_are_those_of_the_target_itself(tmp_path: Path, tiny_target: Target) -> None:
    prompts, states = write_prompts(tmp_path, many(8)), [WantedStates(taps=(1,))]
    own = run(tiny_target, prompts, SMALL, tmp_path / "own", states=states)
    found = run(tiny_target, prompts, SERVED, tmp_path / "served", states=states)
    assert found.shards == own.shards
    assert found.recipe["distill"]["engine"] == "transformers"
    assert list(rows(tmp_path / "served")) == list(rows(tmp_path / "own"))


def test_greedy_answers_end_where_the_target_ends_them(tiny_target: Target) -> None:
    requests = [Request(tokens, number, 5 + 9 * number) for number, tokens in enumerate(PROMPTS)]
    own = decode(tiny_target, requests, DecodeSettings(batch_size=5)).generations
    ends = {own[2].tokens[3], own[4].tokens[7]}
    target = Target(tiny_model(), tiny_tokenizer(), name="ended")
    target.defaults = replace(target.defaults, eos_ids=tuple(sorted(ends)))
    own = decode(target, requests, DecodeSettings(batch_size=5)).generations
    found = answers(target, requests)
    assert [(one.request, one.tokens, one.finish) for one in found] == [
        (one.request, one.tokens, one.finish) for one in own]
    assert {one.finish for one in found} == {"eos", "length"}


@pytest.mark.parametrize(("temperature", "top_k", "top_p"), some_long([(1.0, 3, 1.0), (0.2, 0, 1.0), (1.5, 0, 0.5)], 3))
def test_sampled_tokens_follow_the_filtered_distribution(
    tiny_target: Target, temperature: float, top_k: int, top_p: float
) -> None:
    count, settings = 1200, {"top_k": top_k, "top_p": top_p, "batch_size": 200}
    requests = [Request((5, 9, 22), number, 1, temperature) for number in range(count)]
    found, own = (Counter(one.tokens[0] for one in written) for written in (
        answers(tiny_target, requests, **settings),
        decode(tiny_target, requests, DecodeSettings(**settings)).generations))
    # Twice the expected distance of two samples of this size.
    distance = sum(abs(found[token] - own[token]) for token in {*found, *own}) / (2 * count)
    assert distance < 2 * (len({*found, *own}) / (torch.pi * count)) ** 0.5
    if top_k or top_p < 1:
        assert len({*found, *own}) < 90, "no filter was at work"


def test_each_shard_has_a_random_stream_of_its_own(tiny_target: Target) -> None:
    first, second = ([one.tokens for one in answers(tiny_target, [Request((5, 9, 22), number, 16, 1.0)
                                                                  for number in numbers])]
                     for numbers in ((0, 1), (2, 3)))
    assert first != second


def test_no_answer_is_started_after_the_deadline(tiny_target: Target) -> None:
    requests = [Request(tokens, number, 4) for number, tokens in enumerate(PROMPTS)]
    assert answers(tiny_target, requests, time.monotonic() - 1) == []
    assert len(answers(tiny_target, requests, time.monotonic() + 60)) == len(requests)


def test_the_target_decodes_as_before_afterwards(tiny_target: Target) -> None:
    requests = [Request(PROMPTS[0], 0, 12)]
    before = decode(tiny_target, requests, DecodeSettings()).generations[0].tokens
    attention = tiny_target.config._attn_implementation
    answers(tiny_target, requests)
    assert tiny_target.config._attn_implementation == attention
    assert decode(tiny_target, requests, DecodeSettings()).generations[0].tokens == before


# Refusals ------------------------------------------------------------------------------------------------------------


def test_another_engine_than_the_target_is_refused(tmp_path: Path, tiny_target: Target,
                                                   monkeypatch: pytest.MonkeyPatch) -> None:
    other = Target(tiny_model(seed=1), tiny_tokenizer(), name="other")
    monkeypatch.setattr(tiny_target, "native", other.native)
    message = r"transformers' continuous batching does not answer as the target does: after .*; set distill.engine: own"
    with pytest.raises(UserError, match=message):
        run(tiny_target, write_prompts(tmp_path, many(9)), SERVED, tmp_path / "out")
    assert not list((tmp_path / "out").glob("train-*"))


@pytest.mark.long
def test_an_engine_that_breaks_is_named_and_costs_no_shard(tmp_path: Path, tiny_target: Target,
                                                           monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = write_prompts(tmp_path, many(16))
    calm = run(tiny_target, prompts, SERVED, tmp_path / "calm")
    forward, calls = type(tiny_target.model).forward, Counter[str]()

    def breaking(model: Any, *given: Any, **named: Any) -> Any:
        if model.config._attn_implementation != "draftsmith":
            calls["passes"] += 1
            if calls["passes"] > 80:
                raise RuntimeError("out of order")
        return forward(model, *given, **named)

    monkeypatch.setattr(continuous_batching, "WAIT", 0.05)
    with monkeypatch.context() as broken:
        broken.setattr(type(tiny_target.model), "forward", breaking)
        with pytest.raises(UserError, match=r"continuous batching ended .*out of order.*; set distill.engine: own"):
            run(tiny_target, prompts, SERVED, tmp_path / "out")
    assert run(tiny_target, prompts, SERVED, tmp_path / "out").shards == calm.shards
    assert contents(tmp_path / "out") == contents(tmp_path / "calm")


def test_a_target_that_caps_attention_scores_is_refused() -> None:
    config = Gemma2Config(vocab_size=96, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
                          num_attention_heads=4, num_key_value_heads=2, head_dim=8, attn_logit_softcapping=50.0)
    target = Target(Gemma2ForCausalLM(config).eval(), tiny_tokenizer(), name="gemma")
    with pytest.raises(UserError, match=r"gemma caps its attention scores at 50, which .* leaves out; set distill"):
        answerer(target)


def test_settings_that_make_no_sense_are_refused() -> None:
    with pytest.raises(UserError, match=r"which answers for the target, and distill.answered_by is text"):
        replace(SERVED, answered_by="text")
