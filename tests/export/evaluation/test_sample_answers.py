"""The sample answers of a report: three of those that were measured, with the author of each token."""

import json
from dataclasses import replace
from typing import Any

import pytest
from draftsmith.export import EvaluateConfig, EvaluationRun, Method, Question, evaluate
from draftsmith.export.evaluation.results import Answer
from draftsmith.export.evaluation.summary import _chosen
from draftsmith.modules import (
    Chain,
    DecodeSettings,
    Medusa,
    MedusaConfig,
    Request,
    StaticTree,
    Target,
    Topology,
    decode,
)
from support.drafters import ScriptedDrafter

PROMPTS = [(1, 5 + place, 40, 9) for place in range(6)]
SETS = {"own": [Question.single(tokens) for tokens in PROMPTS[:3]],
        "written": [Question(prompt=lambda _, tokens=tokens: tokens, text="<b>hi</b>") for tokens in PROMPTS[3:]]}
CONFIG = EvaluateConfig(max_new_tokens=21, speed_prompts=1)


def mixed(target: Target, mode: str = "mixed") -> Method:
    """A method that knows the answers, and guesses wrong now and then."""
    requests = [Request(tokens, index, 40) for index, tokens in enumerate(PROMPTS)]
    answers = decode(target, requests, DecodeSettings(batch_size=6)).generations
    texts = [[*tokens, *answer.tokens] for tokens, answer in zip(PROMPTS, answers, strict=True)]
    return Method(name=mode, family="scripted", drafter=ScriptedDrafter(target.vocab_size, texts, mode),
                  policy_for=lambda _, __: Chain(3))


def run(target: Target, method: Method, config: EvaluateConfig = CONFIG) -> EvaluationRun:
    return evaluate(target, [method], SETS, config, progress=False)


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_the_three_answers_are_the_plain_ones(tiny_target_f64: Target, temperature: float) -> None:
    found = run(tiny_target_f64, mixed(tiny_target_f64), replace(CONFIG, temperatures=temperature))
    requests = [Request(tokens, index, 21, temperature) for index, tokens in enumerate(PROMPTS)]
    plain = decode(tiny_target_f64, requests, DecodeSettings(batch_size=6)).generations
    texts = [tiny_target_f64.tokenizer.decode(one.tokens, skip_special_tokens=True) for one in plain]
    assert [one.rank for one in found.samples] == ["best", "median", "worst"]
    assert len({texts.index("".join(token.text for token in one.tokens)) for one in found.samples}) == 3


def test_authors_agree_with_the_passes(tiny_target_f64: Target) -> None:
    for one in run(tiny_target_f64, mixed(tiny_target_f64)).samples:
        passes = 1 + sum(not token.guessed for token in one.tokens[1:])
        # Every pass ends with a token of the target's; the limit may cut the last one.
        assert one.accepted_length == pytest.approx((len(one.tokens) - 1) / (passes - 1), rel=0.2)
        assert one.guessed == sum(token.guessed for token in one.tokens) == len(one.tokens) - passes
        assert not any(token.rejected for token in one.tokens if token.guessed)
    wrong = run(tiny_target_f64, mixed(tiny_target_f64, "wrong")).samples
    assert all(one.accepted_length == 1 and one.guessed == 0 for one in wrong)
    assert all(len(token.rejected) == 1 for one in wrong for token in one.tokens[1:])


def test_the_json_keeps_them(tiny_target_f64: Target) -> None:
    found = run(tiny_target_f64, mixed(tiny_target_f64))
    kept = json.loads(json.dumps(found.to_dict(), allow_nan=False))["sample_answers"]
    assert [one["rank"] for one in kept] == ["best", "median", "worst"]
    assert all(one["prompt"] == "<b>hi</b>" for one in kept if one["prompt_set"] == "written")
    assert all(one["prompt"] for one in kept)
    assert kept[0]["tokens"][0].keys() == {"text", "guessed", "rejected"}


def test_real_heads_and_trees_are_recorded(tiny_target_f64: Target) -> None:
    tree = StaticTree(Topology.from_paths([(0,), (1,), (0, 0)]))
    method = Method(name="medusa", family="medusa", policy_for=lambda _, __: tree,
                    drafter=Medusa.create(MedusaConfig(num_heads=2), tiny_target_f64))
    found = run(tiny_target_f64, method)
    assert max(len(token.rejected) for one in found.samples for token in one.tokens) == 2
    lengths = [one.accepted_length for one in found.samples]
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[0] >= found.evaluations[0].overall.accepted_length >= lengths[-1]


def an_answer(number: int, emitted: tuple[int, ...], **changes: Any) -> Answer:
    fields: dict[str, Any] = {"question": number, "turn": 1, "prompt_set": "own", "category": "",
                              "tokens": (7,) * (1 + sum(emitted)), "emitted": emitted, "truncated": False,
                              "comparison": None}
    return Answer(**(fields | changes))


def test_best_median_and_worst_are_chosen_among_long_answers() -> None:
    answers = [an_answer(0, (4,)), an_answer(1, (1,) * 20), an_answer(2, (3,) * 9), an_answer(3, (2,) * 10),
               an_answer(4, (2,) * 11), an_answer(5, (5,) * 9, turn=2), an_answer(6, ())]
    assert {rank: one.question for rank, one in _chosen(answers).items()} == {"best": 2, "median": 4, "worst": 1}
    assert {rank: one.question for rank, one in _chosen(answers[:2]).items()} == {"best": 0, "median": 1}
    assert _chosen([an_answer(6, ())]) == {}
