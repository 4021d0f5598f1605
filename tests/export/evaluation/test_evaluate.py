"""Evaluation: the figures are right, and a changed word is found."""

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from draftsmith.export import EvaluateConfig, Evaluation, Method, Question, evaluate
from draftsmith.export.evaluation import timed_answers
from draftsmith.export.evaluation.lossless import generate
from draftsmith.export.evaluation.timed_answers import TimedDecoder
from draftsmith.modules import Chain, LayerDraft, Policy, SampledTree, StaticTree, Target, Topology, UserError, decode
from draftsmith.modules.baselines.registry import baseline
from draftsmith.modules.decoding.requests import DecodeSettings, Request
from draftsmith.modules.target.loading.tiny_model import tiny_model, tiny_tokenizer
from draftsmith.modules.verification.sampling import Sampling
from support.drafters import ScriptedDrafter, TableDrafter, random_log_probs
from support.policies import branching
from support.tiers import some_long

KEYS = {
    "family", "target", "prompts", "batch_size", "temperature", "new_tokens", "target_passes", "accepted_length",
    "acceptance_by_position", "tokens_per_second", "plain_tokens_per_second", "generate_tokens_per_second", "speedup",
    "contended", "draft_time_share", "lossless",
}
"""Keys that the evaluation promises."""
SETS = {
    "own": [Question.single((1, 5 + place, 40, 9)) for place in range(5)],
    "written": [Question.single((1, 30 + place, 8), category) for category in ("math", "coding") for place in range(3)],
}
PROMPTS = [tuple(question.prompt(())) for questions in SETS.values() for question in questions]
CONFIG = EvaluateConfig(max_new_tokens=21, speed_prompts=2)


def scripted(target: Target, mode: str, policy: Any = None, **request: Any) -> Method:
    """A method that knows the target's answers to PROMPTS, and drafts them or something else."""
    requests = [Request(tokens, index, 40, **request) for index, tokens in enumerate(PROMPTS)]
    answers = decode(target, requests, DecodeSettings(batch_size=8, ignore_eos=True)).generations
    texts = [[*tokens, *answer.tokens] for tokens, answer in zip(PROMPTS, answers, strict=True)]
    return Method(name=mode, family="scripted", drafter=ScriptedDrafter(target.vocab_size, texts, mode),
                  policy_for=lambda _, __: policy or Chain(4))


def run(target: Target, method: Method, config: EvaluateConfig = CONFIG) -> Evaluation:
    return evaluate(target, [method], SETS, config, progress=False).evaluations[0]


@pytest.mark.parametrize("mode", ["random", "wrong", "oracle", "mixed"])
def test_any_draft_is_lossless_in_float64(tiny_target_f64: Target, mode: str) -> None:
    found = run(tiny_target_f64, scripted(tiny_target_f64, mode, StaticTree(Topology.from_paths([(0,), (1,), (0, 0)]))))
    assert (found.overall.lossless.prompts, found.overall.lossless.identical) == (11, 11)
    assert found.overall.lossless.max_logit_gap is None


def test_a_wrong_drafter_gains_nothing(tiny_target_f64: Target) -> None:
    overall = run(tiny_target_f64, scripted(tiny_target_f64, "wrong")).overall
    assert overall.accepted_length == 1.0
    assert overall.acceptance_by_position == ()
    assert overall.target_passes == overall.new_tokens - overall.prompts  # the first token is the prompt's pass


def test_an_oracle_is_accepted_whole(tiny_target_f64: Target) -> None:
    # 21 tokens: one from the prompt's pass, then four passes of 4 accepted and 1 bonus.
    overall = run(tiny_target_f64, scripted(tiny_target_f64, "oracle")).overall
    ended = overall.new_tokens != 21 * overall.prompts
    assert not ended, "choose other prompts: the test wants answers of full length"
    assert overall.accepted_length == 5.0
    assert overall.acceptance_by_position == (1.0, 1.0, 1.0, 1.0)
    assert overall.truncation_rate == 1.0


def test_the_json_has_every_promised_key_at_every_level(tiny_target_f64: Target) -> None:
    methods = [scripted(tiny_target_f64, "mixed"), scripted(tiny_target_f64, "wrong")]
    found = json.loads(json.dumps(evaluate(tiny_target_f64, methods, SETS, CONFIG, progress=False).to_dict(),
                                  allow_nan=False))
    assert found.keys() >= KEYS
    assert found["header"].keys() >= {"machine", "dtype", "threads", "versions"}
    assert found["lossless"].keys() == {"prompts", "identical", "near_tie_divergences", "max_logit_gap", "rounding",
                                        "wrong_references"}
    assert list(found["by_prompt_set"]) == ["own", "written"]
    assert list(found["by_category"]) == ["math", "coding"]
    measured = KEYS - {"family", "target", "batch_size", "temperature", "contended"}
    for group in (*found["by_prompt_set"].values(), *found["by_category"].values()):
        assert group.keys() >= measured
    names = [(one["method"], one["prompt_set"], one["category"]) for one in found["measurements"]]
    groups = [(None, None), ("own", None), ("written", None), (None, "math"), (None, "coding")]
    assert names == [(method, *group) for method in ("mixed", "wrong") for group in groups]
    assert all(one.keys() >= measured | {"temperature", "batch_size"} for one in found["measurements"])
    assert found["measurements"][0]["accepted_length"] == found["accepted_length"]
    assert found["speedup"] == pytest.approx(found["tokens_per_second"] / max(found["plain_tokens_per_second"],
                                                                            found["generate_tokens_per_second"]))


def test_modes_are_groups_where_there_are_several(tiny_target_f64: Target) -> None:
    questions = [replace(one, mode=("thinking", "not thinking")[place % 2]) for place, one in enumerate(SETS["own"])]
    found = evaluate(tiny_target_f64, [scripted(tiny_target_f64, "mixed")], {"own": questions}, CONFIG, progress=False)
    modes = found.evaluations[0].by_mode
    assert {name: one.prompts for name, one in modes.items()} == {"thinking": 3, "not thinking": 2}
    timed = modes["thinking"].tokens_per_second
    assert timed is None or timed > 0
    assert {one["mode"] for one in found.to_dict()["measurements"]} == {None, "thinking", "not thinking"}
    assert not run(tiny_target_f64, scripted(tiny_target_f64, "mixed")).by_mode


def test_groups_add_up(tiny_target_f64: Target) -> None:
    found = run(tiny_target_f64, scripted(tiny_target_f64, "mixed"))
    for key in ("prompts", "new_tokens", "target_passes"):
        assert sum(getattr(group, key) for group in found.by_prompt_set.values()) == getattr(found.overall, key)
    assert found.by_category["math"].prompts == 3


@pytest.mark.parametrize(("mode", "passes"), [("wrong", 20), ("oracle", 4)])
def test_a_batch_makes_as_many_calls_as_its_longest_row_has_passes(tiny_target_f64: Target, mode: str,
                                                                   passes: int) -> None:
    sets = {"own": [Question.single(tokens) for tokens in PROMPTS[:8]]}
    config = EvaluateConfig(max_new_tokens=21, speed_prompts=8, batch_sizes=8)
    method = scripted(tiny_target_f64, mode)
    found = evaluate(tiny_target_f64, [method], sets, config, progress=False).evaluations[0]
    assert (found.target_calls, found.overall.target_passes) == (passes, 8 * passes)
    assert found.overall.lossless.identical == 8


def test_timing_or_not_changes_no_answer(tiny_target_f64: Target) -> None:
    timed = run(tiny_target_f64, scripted(tiny_target_f64, "oracle"), replace(CONFIG, speed_prompts=11))
    untimed = run(tiny_target_f64, scripted(tiny_target_f64, "oracle"), replace(CONFIG, speed_prompts=0))
    assert untimed.overall.speedup is None
    assert untimed.overall.tokens_per_second is None
    assert not untimed.contended
    assert (timed.overall.accepted_length, timed.overall.lossless) == (untimed.overall.accepted_length,
                                                                       untimed.overall.lossless)
    assert timed.overall.draft_time_share is not None
    assert 0 < timed.overall.draft_time_share < 1


def test_sampled_answers_equal_the_plain_loops(tiny_target_f64: Target) -> None:
    method = scripted(tiny_target_f64, "mixed", temperature=0.8)
    config = replace(CONFIG, temperatures=0.8, top_p=0.95)
    found = run(tiny_target_f64, method, config)
    assert found.temperature == 0.8
    assert found.overall.lossless.identical == 11


def test_answers_from_sampled_drafts_have_their_distribution_checked(tiny_target_f64: Target) -> None:
    method = scripted(tiny_target_f64, "mixed", branching(2, 2), temperature=0.8)
    found = run(tiny_target_f64, method, replace(CONFIG, temperatures=0.8))
    assert found.overall.lossless.prompts == 0
    drawn = found.overall.distribution
    assert drawn is not None
    assert drawn.tokens == found.overall.new_tokens
    assert not found.biased
    assert sum(group.distribution.tokens for group in found.by_category.values() if group.distribution) == sum(
        group.new_tokens for group in found.by_category.values())
    assert run(tiny_target_f64, scripted(tiny_target_f64, "mixed")).overall.distribution is None


def test_a_sampling_policy_that_drafts_nothing_is_compared_as_plain_decoding(tiny_target_f64: Target) -> None:
    method = scripted(tiny_target_f64, "mixed", SampledTree(Topology.chain(0)), temperature=0.8)
    found = run(tiny_target_f64, method, replace(CONFIG, temperatures=0.8))
    assert (found.nodes, found.overall.lossless.identical, found.overall.distribution) == (1, 11, None)


@pytest.mark.parametrize(("lossy", "policy", "changed"), [
    ("typical", Chain(4), True), ("kl-0", branching(2, 2), False), ("kl-9", branching(2, 2), True)])
def test_a_lossy_rule_is_named_and_the_answers_that_it_changes_are_counted(
        lossy: str, policy: Any, changed: bool, tiny_target_f64: Target) -> None:
    """Against the exact rule with the same drafts and random numbers; the references stay exact."""
    target = tiny_target_f64
    method = Method(name="table", family="table", policy_for=lambda _, __: policy,
                    drafter=TableDrafter(random_log_probs(target.vocab_size, target.vocab_size)))
    found, exact = (run(target, method, replace(CONFIG, temperatures=0.8, lossy=name)) for name in (lossy, ""))
    assert (found.lossy, exact.lossy, found.faulty, found.overall.distribution) == (lossy, "", False, None)
    assert (found.overall.lossless.prompts, found.overall.lossless.different > 0) == (11, changed)
    assert (found.overall.accepted_length > exact.overall.accepted_length) == changed
    assert (found.to_dict()["lossy"], "lossy" in exact.to_dict(), found.acceptance) == (lossy, False, ())


@pytest.mark.parametrize(("given", "says"), [
    ({"lossy": "typical"}, "evaluate.lossy typical .* temperature 0 and the policy none are exact; leave these out"),
    ({"lossy": "kl", "temperatures": 1.0, "policies": ("static", "none")}, "the policy none are exact"),
    ({"lossy": "most", "temperatures": 1.0}, "there is no lossy rule 'most'; choose typical or kl-0.5")])
def test_lossy_and_exact_settings_do_not_go_together(given: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError, match=says):
        EvaluateConfig(**given)


def test_one_policy_and_one_baseline_need_no_list() -> None:
    config = EvaluateConfig(policies="chain-3", baselines="recycling")
    assert (config.policy_names, config.baseline_names) == (("chain-3",), ("recycling",))
    with pytest.raises(UserError, match="there is no policy 'chains'"):
        EvaluateConfig(policies="chains")


@pytest.mark.parametrize("temperature", some_long([0.8, 0.0], 9))
def test_penalty_and_filters_of_the_settings_hold_for_both_sides(temperature: float, tiny_target_f64: Target) -> None:
    config = replace(CONFIG, repetition_penalty=1.4, top_p=0.95, temperatures=temperature)
    found = evaluate(tiny_target_f64, [scripted(tiny_target_f64, "mixed")], SETS, config, progress=False).evaluations[0]
    assert found.overall.lossless.identical == 11
    plain = run(tiny_target_f64, scripted(tiny_target_f64, "mixed"), replace(CONFIG, temperatures=temperature))
    assert plain.overall.target_passes != found.overall.target_passes, "the penalty changes nothing here"


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_what_a_checkpoint_rules_out_is_ruled_out_on_both_sides(temperature: float) -> None:
    model = tiny_model(dtype=torch.float64)
    free = decode(Target(model, tiny_tokenizer(), name="free"), [Request(PROMPTS[0], 0, 12)], DecodeSettings())
    first, second = dict.fromkeys(free.generations[0].tokens[:6]).keys() - {0}, free.generations[0].tokens[1]
    own = model.generation_config
    own.suppress_tokens, own.min_new_tokens, own.eos_token_id = sorted(first - {second}), 9, second
    own.sequence_bias = [[[40], 2.0]]
    target = Target(model, tiny_tokenizer(), name="ruled")
    config = replace(CONFIG, temperatures=temperature, repetition_penalty=1.2)
    found = run(target, scripted(target, "mixed"), config).overall
    assert found.lossless.identical == 11
    answer = decode(target, [Request(PROMPTS[0], 0, 12)], DecodeSettings()).generations[0].tokens
    assert len(answer) >= 9
    assert not set(own.suppress_tokens) & set(answer)


def lying_generate(change: int) -> Any:
    """`generate` with another token at one index of the answer to the first prompt."""
    def lie(model: Any, target: Target, prompts: Sequence[Sequence[int]], **settings: Any) -> list[list[int]]:
        answers = generate(model, target, prompts, **settings)
        for prompt, answer in zip(prompts, answers, strict=True):
            if tuple(prompt) == PROMPTS[0] and len(answer) > change:
                answer[change] = (answer[change] + 1) % target.vocab_size
        return answers

    return lie


@pytest.mark.parametrize("speed_prompts", [0, 1])
def test_one_changed_word_is_found_and_no_near_tie(tiny_target_f64: Target, monkeypatch: pytest.MonkeyPatch,
                                                   speed_prompts: int) -> None:
    monkeypatch.setattr(timed_answers, "generate", lying_generate(4))
    found = run(tiny_target_f64, scripted(tiny_target_f64, "mixed"), replace(CONFIG, speed_prompts=speed_prompts))
    lossless = found.overall.lossless
    assert (lossless.identical, lossless.near_tie_divergences, lossless.different) == (10, 0, 1)
    assert lossless.max_logit_gap is not None
    assert lossless.max_logit_gap > 1e-3
    assert found.by_prompt_set["own"].lossless.different == 1
    assert found.by_prompt_set["written"].lossless.different == 0


@pytest.mark.parametrize("filters", some_long([{"top_k": 12, "top_p": 0.95}, {}], 9))
@pytest.mark.parametrize("policy", some_long([None, SampledTree(Topology.from_paths([(0,), (1,), (0, 0)]))], 2))
def test_a_temperature_that_the_loop_reads_wrongly_is_seen(
    policy: Policy | None, filters: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loop without drafts draws from the same wrong distribution: transformers' own is the law."""
    model = tiny_model(dtype=torch.float64)
    with torch.no_grad():
        model.lm_head.weight *= 20  # logits as far apart as those of a trained model
    target, processed = Target(model, tiny_tokenizer(), name="decided"), Sampling.processed
    config = replace(CONFIG, temperatures=0.7, speed_prompts=0, max_new_tokens=60, **filters)
    for factor, seen in ((1.0, False), (1.03, True)):
        monkeypatch.setattr(Sampling, "processed", lambda self, logits, temperature, by=factor:
                            processed(self, logits, by * temperature))
        found = run(target, scripted(target, "mixed", policy), config)
        assert found.faulty is seen
        # Where drafts were drawn, the loop without them is at fault.
        assert (found.overall.lossless.wrong_references > 0) is (seen and policy is not None)


@pytest.mark.parametrize(("change", "message"), [
    ({"batch_sizes": 0}, "batch_sizes must be at least 1, got 0"),
    ({"batch_sizes": (1, -4)}, "batch_sizes must be at least 1, got -4"),
    ({"batch_sizes": ()}, "batch_sizes must hold at least one number, got none"),
    ({"temperatures": ()}, "temperatures must hold at least one number, got none"),
    ({"temperatures": float("nan")}, "must be 0 .greedy. or from 0.001 to 1000 .*, got nan"),
    ({"max_new_tokens": 1}, "max_new_tokens must be at least 2, got 1"),
    ({"limit": 0}, "limit must be at least 1, got 0"),
    ({"temperatures": (0.0, -1.0)}, "must be 0 .greedy. or from 0.001 to 1000 .*, got .0.0, -1.0."),
    ({"top_p": 0.0}, "top_p must be above 0, got 0.0"),
    ({"speed_prompts": -1}, "speed_prompts must be at least 0"),
    ({"baselines": ("lookup",)}, "no baseline 'lookup'; choose from prompt_lookup"),
])
def test_settings_out_of_range_are_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        EvaluateConfig(**change)


def test_mistakes_in_prompts_are_named(tiny_target: Target) -> None:
    method = Method(name="plain", family="none", drafter=None)
    with pytest.raises(UserError, match=r"has 500 tokens; with 1 answer of .* 21 it exceeds .* context of 512"):
        evaluate(tiny_target, [method], {"own": [Question.single((5,) * 500)]}, CONFIG, progress=False)
    with pytest.raises(UserError, match="of the set 'own' has no tokens"):
        evaluate(tiny_target, [method], {"own": [Question.single(())]}, CONFIG, progress=False)
    # What the target wrote may take more tokens when it is read again.
    grown = Question(prompt=lambda answers: (5,) * (500 if any(answers) else 10), turns=2)
    with pytest.raises(UserError, match=r"has 500 tokens and asks for 21 more, but the target's context holds 512"):
        evaluate(tiny_target, [method], {"own": [grown] * 2}, CONFIG, progress=False)


def test_baselines_are_methods_by_name(tiny_target_f64: Target) -> None:
    config = replace(CONFIG, baselines=("prompt_lookup", "recycling"), limit=2, speed_prompts=1)
    found = evaluate(tiny_target_f64, [scripted(tiny_target_f64, "mixed")], SETS, config, progress=False).evaluations
    assert [evaluation.name for evaluation in found] == ["mixed", "prompt_lookup", "recycling"]
    assert [evaluation.family for evaluation in found] == ["scripted", "lookup", "recycling"]
    assert all(evaluation.overall.lossless.identical == 4 for evaluation in found)
    alone = evaluate(tiny_target_f64, [], SETS, config, progress=False).evaluations
    assert [evaluation.name for evaluation in alone] == ["prompt_lookup", "recycling"]


def test_the_target_alone_is_a_method_too(tiny_target: Target) -> None:
    method = Method(name="plain", family="none", drafter=None)
    found = evaluate(tiny_target, [method], SETS, replace(CONFIG, limit=2), progress=False)
    assert found.evaluations[0].overall.accepted_length == 1.0
    assert found.header["prompt_sets"] == {"own": 2, "written": 2}
    assert list(found.evaluations[0].by_category) == ["math", "coding"]  # the limit is spread over the set


# Several turns, batch sizes and temperatures --------------------------------------------------------------------------


def talk(place: int, asked: list[Any] | None = None) -> Question:
    """Two turns; the second prompt is the first, the answer to it, and two more tokens."""
    def prompt(answers: Sequence[Sequence[int]]) -> list[int]:
        if asked is not None:
            asked.append([list(answer) for answer in answers])
        return [1, 5 + place, 40, *(token for answer in answers for token in (*answer, 7, 8))]

    return Question(prompt=prompt, turns=2, category=("math", "coding")[place % 2])


def wide_draft(target: Target) -> Method:
    """A draft that is often right: without its last layer the target mostly answers the same."""
    return Method(name="layers", family="layers", drafter=LayerDraft(target, range(target.num_layers - 1)),
                  policy_for=lambda _, __: Chain(2))


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_the_second_turn_follows_the_targets_own_answer(tiny_target_f64: Target, temperature: float) -> None:
    asked: list[Any] = []
    config = EvaluateConfig(max_new_tokens=9, speed_prompts=1, temperatures=temperature, baselines=("prompt_lookup",))
    found = evaluate(tiny_target_f64, [wide_draft(tiny_target_f64)], {"talk": [talk(0, asked)]}, config, progress=False)
    first = Request((1, 5, 40), 0, 9, temperature)
    answer, = decode(tiny_target_f64, [first], DecodeSettings()).generations
    # The prompt of a later turn is made once, for all methods, after its length was tried without an answer; that of
    # the first one for the plan too.
    assert [answers for answers in asked if any(answers)] == [[answer.tokens]]
    for one in found.evaluations:
        assert (one.overall.prompts, one.overall.lossless.identical) == (2, 2)
        assert one.overall.new_tokens == 18
        assert list(one.by_turn) == ["1", "2"]
        assert sum(turn.target_passes for turn in one.by_turn.values()) == one.overall.target_passes
        assert one.by_turn["1"].tokens_per_second is None
        assert one.overall.speedup is not None
        assert one.overall.accepted_length_interval is None  # one question, though it has two turns


def test_both_turns_are_timed_together(tiny_target_f64: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in clock that moves on one second at each reading: each method takes one second a turn."""
    ticks = iter(range(10**6))
    monkeypatch.setattr(timed_answers, "clock", lambda _target: float(next(ticks)))
    config = EvaluateConfig(max_new_tokens=9, speed_prompts=2, baselines=("prompt_lookup",))
    found = evaluate(tiny_target_f64, [], {"talk": [talk(0), talk(1)]}, config, progress=False).evaluations[0].overall
    assert (found.tokens_per_second, found.plain_tokens_per_second, found.generate_tokens_per_second) == (9, 9, 9)
    assert found.speedup_interval == (1.0, 1.0)


def test_every_temperature_and_batch_size_is_measured_on_the_same_prompts(tiny_target_f64: Target) -> None:
    sets = {"talk": [talk(place) for place in range(6)], "own": [Question.single((1, 30 + n, 8)) for n in range(5)]}
    config = EvaluateConfig(max_new_tokens=8, speed_prompts=4, batch_sizes=(1, 3), temperatures=(0.0, 0.8),
                            baselines=("recycling",))
    run_ = evaluate(tiny_target_f64, [wide_draft(tiny_target_f64)], sets, config, progress=False)
    seen = [(one.temperature, one.batch_size, one.name) for one in run_.evaluations]
    assert seen == [(t, b, name) for t in (0.0, 0.8) for b in (1, 3) for name in ("layers", "recycling")]
    assert all(one.overall.prompts == one.overall.lossless.identical == 17 for one in run_.evaluations)
    for temperature in (0.0, 0.8):
        small, large = run_.at(name="layers", temperature=temperature)
        assert small.overall.accepted_length == large.overall.accepted_length > 1.05
        assert small.overall.accepted_length_interval == large.overall.accepted_length_interval
        assert small.overall.tokens_per_second != large.overall.tokens_per_second
    flat = run_.to_dict()["measurements"]
    keys = [(one["method"], one["temperature"], one["batch_size"], one["prompt_set"], one["category"], one["turn"])
            for one in flat]
    assert len(set(keys)) == len(keys) == 8 * 7


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_the_target_alone_answers_a_timed_question_once(temperature: float, tiny_target_f64: Target,
                                                        monkeypatch: pytest.MonkeyPatch) -> None:
    """The answer that is timed without drafts is the reference, which a second turn continues."""
    asked: list[tuple[str, int]] = []
    for name in ("generate", "decode"):
        real = getattr(TimedDecoder, name)

        def watched(self: Any, exchanges: Any, *rest: Any, real: Any = real, name: str = name, **more: Any) -> Any:
            if more.get("tokens") is None and (name == "generate" or rest[0] is None):
                asked.extend((name, one.index) for one in exchanges)
            return real(self, exchanges, *rest, **more)

        monkeypatch.setattr(TimedDecoder, name, watched)
    config = EvaluateConfig(max_new_tokens=8, speed_prompts=2, temperatures=temperature)
    found = evaluate(tiny_target_f64, [wide_draft(tiny_target_f64)], {"talk": [talk(place) for place in range(3)]},
                     config, progress=False)
    # Two timed questions of two turns by both baselines, and the third by the one whose answers are the references.
    own = "decode" if temperature else "generate"
    assert Counter(name for name, _ in asked) == {"generate": 4, "decode": 4} | {own: 6}
    assert len(set(asked)) == len(asked)
    assert found.evaluations[0].overall.lossless.identical == 6


def test_several_answers_to_a_prompt_share_what_a_drafter_remembers(tiny_target_f64: Target) -> None:
    """They are drawn by different numbers, and counted as answers to one prompt."""
    sets = {"own": SETS["own"][:3]}

    def measured(answers: int) -> tuple[Evaluation, dict[str, Any]]:
        drafter, policy = baseline("ngrams", tiny_target_f64)
        method = Method(name="ngrams", family="ngrams", drafter=drafter, policy_for=lambda _, __: policy)
        config = EvaluateConfig(max_new_tokens=21, speed_prompts=1, temperatures=0.05, answers=answers)
        found = evaluate(tiny_target_f64, [method], sets, config, progress=False)
        return found.evaluations[0], found.header

    (one, _), (many, header) = measured(1), measured(6)
    assert (one.overall.prompts, many.overall.prompts) == (3, 18)
    assert many.overall.accepted_length > one.overall.accepted_length
    assert (header["prompt_sets"], header["timed_prompts"], header["settings"]["answers"]) == ({"own": 3}, 1, 6)


def test_several_answers_that_would_be_the_same_are_refused() -> None:
    with pytest.raises(UserError, match="answers 3 to a prompt would all be the same at temperature 0"):
        EvaluateConfig(temperatures=(0, 1), answers=3)
