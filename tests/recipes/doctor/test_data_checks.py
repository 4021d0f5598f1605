"""Every planted fault of the data is found, in all rows and in a tenth of them; without faults nothing is."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from draftsmith.data import ChatTemplate
from draftsmith.data.answers.distill import TRUNCATED_SHARE
from draftsmith.data.store.token_store import Manifest, Row
from draftsmith.export import Artifact
from draftsmith.modules import Drafter, Target, Topology
from draftsmith.modules.target.loading.tiny_model import tiny_model, tiny_tokenizer
from draftsmith.recipes.commands.doctor import diagnose, lines
from draftsmith.recipes.doctor.case import Case, DataSample, Finding, findings_of, group, spread
from draftsmith.recipes.doctor.target_checks import TARGET_CHECKS, agreement
from draftsmith.recipes.doctor.text_checks import TEXT_CHECKS, rendered
from support.artifacts import TREE, heads, tuning
from support.data.chat_templates import GEMMA, LLAMA3, QWEN3, shaped_tokenizer
from support.data.planted_faults import (
    Change,
    answer,
    answered,
    other_answer,
    other_turn,
    planted,
    sample_of,
    shifted,
    store_states,
    too_short,
    with_answer,
    with_opening,
)
from support.families import cases_of, randomised
from support.targets import recurrent_model
from transformers import LlamaConfig, LlamaForCausalLM

TENTH = pytest.mark.parametrize("share", [pytest.param(1.0, marks=pytest.mark.long), 0.1])


@pytest.fixture(scope="module")
def healthy(tiny_target: Target) -> list[Row]:
    """Greedy answers of the tiny target."""
    return answered(tiny_target)


def case(data: DataSample, target: Target, drafter: Drafter | None = None, template: ChatTemplate | None = None,
         temperature: float = 0.0) -> Case:
    artifact = Artifact(drafter=drafter or heads(target), target=target, topology=TREE, identity=target.identity,
                        provenance={})
    return Case(artifact=artifact, target=target, template=template or ChatTemplate(target.tokenizer), data=data,
                temperature=temperature)


def faults(rows: Sequence[Row], target: Target, made: ChatTemplate | None = None, **of: Any) -> dict[str, Finding]:
    """The findings with a remedy, by name; `made` is the template that rendered the rows."""
    return faults_of(sample_of(rows, target, made), target, **of)


def faults_of(data: DataSample, target: Target, **of: Any) -> dict[str, Finding]:
    one = case(data, target, **of)
    found = [*findings_of((*TEXT_CHECKS, *TARGET_CHECKS), one, data)]
    assert len({finding.name for finding in found}) == len(found)
    # The tiny target, whose weights are random, ends no answer.
    return {finding.name: finding for finding in found if finding.remedy and finding.name != "truncated answers"}


def thinking_target() -> Target:
    """The tiny target with a template that has a switch for thinking."""
    target = Target(tiny_model(), tiny_tokenizer(), name="tiny-random")
    target.tokenizer.chat_template = QWEN3
    return target


def test_healthy_rows_have_no_fault(tiny_target: Target, healthy: list[Row], tmp_path: Path) -> None:
    assert not faults(healthy, tiny_target)
    data = sample_of(healthy, tiny_target, folder=tmp_path)
    store_states(data, tiny_target, (0, 1))
    assert not faults_of(data, tiny_target, drafter=cases_of("eagle3")["eagle3-shared"].make(tiny_target))


def test_the_sample_shows_the_mask(tiny_target: Target, healthy: list[Row]) -> None:
    data = sample_of(healthy, tiny_target)
    (asked, first), (said, second) = rendered(case(data, tiny_target), data)
    assert (first, second) == (False, True)
    assert asked == "<|im_start|>user\na0 and 0<|im_end|>\n<|im_start|>assistant\n"
    assert said


PLANTED: dict[str, tuple[Callable[[Target], Change], str, str]] = {
    "shifted mask": (lambda _: shifted, "mask", "1 token too late"),
    "labels of another turn": (lambda _: other_turn, "turns", "another turn"),
    "too short rows": (lambda _: too_short, "lengths", "3 draft steps"),
    "off-policy": (lambda _: other_answer, "on-policy", "not what the target writes"),
    "another template": (lambda target: with_opening(target, "<|im_end|>\n<|im_start|>assistant\n", "\nBot: "),
                         "template", "another template"),
}


@TENTH
@pytest.mark.parametrize("fault", PLANTED)
def test_a_planted_fault_is_found(tiny_target: Target, healthy: list[Row], fault: str, share: float) -> None:
    change, name, words = PLANTED[fault]
    found = faults(planted(healthy, share, change(tiny_target)), tiny_target)[name]
    assert words in found.verdict
    assert f"{40 * share:.0f} of 40 rows (train-00000:" in found.verdict


@pytest.mark.parametrize("thinks", [True, pytest.param(False, marks=pytest.mark.long)])
def test_another_mode_of_thinking_is_found(thinks: bool) -> None:
    target = thinking_target()
    template = ChatTemplate(target.tokenizer, modes=(thinks,))
    rows = answered(target, template)
    assert not faults(rows, target, template, template=template)
    opening, empty = "<|im_start|>assistant\n", "<|im_start|>assistant\n<think>\n\n</think>\n\n"
    change = with_opening(target, *((opening, empty) if thinks else (empty, opening)))
    for share in (1.0, 0.1):
        found = faults(planted(rows, share, change), target, template, template=template)
        assert "not served" in found["thinking"].verdict
        assert f"{40 * share:.0f} of 40 rows" in found["thinking"].verdict
    both = ChatTemplate(target.tokenizer, modes=(True, False))
    assert "in no row" in faults(rows, target, template, template=both)["thinking"].verdict


def test_another_system_prompt_is_found(tiny_target: Target) -> None:
    brief = ChatTemplate(tiny_target.tokenizer, system="Be brief.")
    rows = answered(tiny_target, brief)
    assert "start otherwise" in faults(rows, tiny_target, brief)["special tokens"].verdict
    assert not faults(rows, tiny_target, brief, template=brief)


@TENTH
def test_end_tokens_that_are_none_are_found(tiny_target: Target, healthy: list[Row], share: float) -> None:
    unknown, plain = tiny_target.tokenizer.unk_token_id, 5
    rows = [with_answer(row, [plain if token == unknown else token for token in row.tokens[answer(row) :]])
            for row in healthy]
    rows = planted(rows, share, lambda row: with_answer(row, [*row.tokens[answer(row) :], unknown]))
    assert "<unk>, which is no end token" in faults(rows, tiny_target)["special tokens"].verdict


def test_drawn_answers_for_greedy_use_are_found(tiny_target: Target, healthy: list[Row]) -> None:
    drawn = answered(tiny_target, temperatures=(1.0,))
    assert set(faults(drawn, tiny_target)) == {"temperature"}
    # The target draws so: with sampled use nothing is wrong, but with greedy answers for it something is.
    assert not faults(drawn, tiny_target, temperature=1.0)
    assert set(faults(healthy, tiny_target, temperature=1.0)) == {"temperature"}
    # Rows that say greedy and were drawn.
    hidden = [replace(row, temperature=0.0) for row in drawn]
    assert "they were drawn" in faults(hidden, tiny_target)["on-policy"].verdict
    mixed = [*healthy[:36], *hidden[36:]]
    assert "4 of 40 rows" in faults(mixed, tiny_target)["on-policy"].verdict
    # Answers of another target at the same temperature.
    reversed_ = planted(drawn, 0.1, other_answer)
    assert "4 of 40 rows" in faults(reversed_, tiny_target, temperature=1.0)["on-policy"].verdict


@TENTH
def test_a_vocabulary_that_is_too_small_is_found(tiny_target: Target, healthy: list[Row], share: float) -> None:
    # Its ids are 3 to 77.
    narrow = heads(tiny_target, vocabulary_size=75)
    rows = [with_answer(row, [3 + token % 70 for token in row.tokens[answer(row) :]]) for row in healthy]
    assert "draft vocabulary" not in faults(rows, tiny_target, drafter=narrow)
    rows = planted(rows, share, lambda row: with_answer(row, [80 + token % 15 for token in row.tokens[answer(row) :]]))
    verdict = faults(rows, tiny_target, drafter=narrow)["draft vocabulary"].verdict
    assert f"{40 * share:.0f} of 40 rows" in verdict


def test_a_vocabulary_that_too_few_answers_chose_is_found(
    tiny_target: Target, healthy: list[Row], tiny_run: Path
) -> None:
    rows = [with_answer(row, [3 + token % 70 for token in row.tokens[answer(row) :]]) for row in healthy]
    folder = tiny_run / "data"
    data = replace(sample_of(rows, tiny_target), folder=folder, manifest=Manifest.load(folder))
    one = case(data, tiny_target, heads(tiny_target, vocabulary_size=75))
    found = {finding.name: finding for finding in findings_of(TEXT_CHECKS, one, data)}["draft vocabulary"]
    assert "hold 100.0% of the answers' tokens, " in found.figure
    assert "too few answers chose the vocabulary" in found.verdict


def test_some_short_answers_are_no_fault_of_a_draft_with_many_steps(tiny_target: Target, healthy: list[Row]) -> None:
    def brief(row: Row) -> Row:
        return with_answer(row, row.tokens[answer(row) :][:8])

    many = heads(tiny_target, num_heads=12)
    assert "lengths" not in faults(planted(healthy, 0.1, brief), tiny_target, drafter=many)
    assert "12 draft steps" in faults(planted(healthy, 0.5, brief), tiny_target, drafter=many)["lengths"].verdict
    assert "12 draft steps" in faults(planted(healthy, 0.1, too_short), tiny_target, drafter=many)["lengths"].verdict


@TENTH
@pytest.mark.parametrize(("fault", "words"), [
    ("another target", "states tap_1 of another target"), ("another layer", "the states tap_0 in place of tap_1"),
    ("another rotary base", "another rotary base"), ("another target, no taps", "states final of another target"),
])
def test_wrong_states_are_found(tiny_target: Target, healthy: list[Row], tmp_path: Path, fault: str, words: str,
                                share: float) -> None:
    data = sample_of(healthy, tiny_target, folder=tmp_path)
    drafter, taps = cases_of("eagle3")["eagle3-shared"].make(tiny_target), (0, 1)
    if fault == "another target, no taps":
        drafter, taps = heads(tiny_target), ()
    if fault == "another layer":
        store_states(data, tiny_target, taps, share=share, layer=0)
    else:
        model = tiny_model(seed=1)
        if fault == "another rotary base":
            settings = tiny_target.model.config.to_dict() | {"rope_parameters": {"rope_type": "default",
                                                                                 "rope_theta": 4.0}}
            model = LlamaForCausalLM(LlamaConfig(**settings)).eval()
            model.load_state_dict(tiny_target.model.state_dict())
        store_states(data, tiny_target, taps, share=share, wrong=Target(model, tiny_tokenizer(), name="other"))
    found = faults_of(data, tiny_target, drafter=drafter)
    assert set(found) == {"stored states"}
    assert words in found["stored states"].verdict


def test_data_of_another_target_say_so(tiny_target: Target, healthy: list[Row]) -> None:
    other = Target(tiny_model(seed=1), tiny_tokenizer(), name="other")
    found = faults_of(sample_of(healthy, tiny_target), other)
    assert found["target of the data"].figure == "tiny-random; here other"
    assert "on-policy" in found


def test_answers_from_a_file_are_not_called_the_target_s(tiny_target: Target, healthy: list[Row]) -> None:
    def origin(rows: Sequence[Row]) -> Finding:
        data = sample_of(rows, tiny_target)
        return next(findings_of(TARGET_CHECKS, case(data, tiny_target), data))

    assert origin(healthy).verdict == "the data are its answers"
    given = [replace(row, source="text") for row in healthy]
    found = origin(given)
    assert (found.figure, found.remedy) == ("", "")
    assert "all answers come from prompts.path" in found.verdict
    assert lines([found])[0].startswith("– target of the data")
    half = origin([*healthy[:20], *given[20:]])
    assert half.figure.endswith("20 of 40 rows come from prompts.path")
    assert half.verdict == "the other rows are its answers"


@pytest.mark.parametrize(("ended", "wrong"), [(10, True), (27, True), (29, False)])
def test_cut_answers_are_judged_as_the_run_warns_of_them(
    tiny_target: Target, healthy: list[Row], ended: int, wrong: bool
) -> None:
    end = min(ChatTemplate(tiny_target.tokenizer).ends)
    rows = [with_answer(row, [*row.tokens[answer(row) :], end if number < ended else 5])
            for number, row in enumerate(healthy)]
    data = sample_of(rows, tiny_target)
    found = {one.name: one for one in findings_of(TEXT_CHECKS, case(data, tiny_target), data)}["truncated answers"]
    assert found.figure == f"{1 - ended / 40:.0%} of 40 answers have no end"
    assert bool(found.remedy) is wrong is (40 - ended > TRUNCATED_SHARE * 40)


def test_words_of_a_small_group_are_none() -> None:
    names = [f"train-00000:{n}" for n in range(100)]
    assert group(names, [7, 8]) == group(names, []) == ""
    assert group(names, [7, 8, 9, 4]) == "4 of 100 rows (train-00000:4, train-00000:7, train-00000:8, ...)"
    # One of each quarter, the same every time.
    assert [25 * part <= row < 25 * part + 25 for part, row in enumerate(spread(range(100), 4))] == [True] * 4
    assert spread(names, 40) == spread(names, 40)
    assert spread(names[:3], 4) == names[:3]


def test_surprise_is_that_of_the_formula(tiny_target: Target) -> None:
    """Surprise above entropy and hits of a long answer, in float64 by hand."""
    states_ND = torch.randn(300, tiny_target.hidden_size, generator=torch.Generator().manual_seed(0))
    log_p_NV = tiny_target.logits(states_ND).double().log_softmax(-1)
    torch.manual_seed(0)
    tokens_N = torch.distributions.Categorical(logits=log_p_NV).sample()
    found = agreement(tiny_target, states_ND, tokens_N, 1.0)
    own_N, entropy_N = log_p_NV[torch.arange(300), tokens_N], -(log_p_NV.exp() * log_p_NV).sum(-1)
    assert found.kl == pytest.approx(float((-own_N - entropy_N).mean()), abs=1e-9)
    assert found.argmax == pytest.approx(float((log_p_NV.argmax(-1) == tokens_N).double().mean()))
    assert not found.off
    assert agreement(tiny_target, states_ND, tokens_N, 0.0).off


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("source", [GEMMA, LLAMA3], ids=["gemma", "llama3"])
def test_a_hybrid_target_with_another_template(source: str) -> None:
    """One that the doctor had not seen: recurrent layers, and a template with a start token and other headers."""
    tokenizer = shaped_tokenizer(source)
    target = Target(recurrent_model("Qwen3Next", vocab_size=len(tokenizer), max_position_embeddings=1024,
                                    eos_token_id=tokenizer.eos_token_id), tokenizer, name="hybrid")
    template, drafter = ChatTemplate(tokenizer, ends=target.eos_ids), randomised(heads(target))
    artifact = Artifact(drafter=drafter, target=target, topology=Topology.chain(2), identity=target.identity,
                        provenance={}, tuning=tuning())
    rows = answered(target, template)
    prompts = [template.prompt([{"role": "user", "content": f"{n} or {n * n}?"}]) for n in range(8)]
    one = Case(artifact=artifact, target=target, template=template, data=sample_of(rows, target, template))
    found = diagnose(one, prompts, Path("none"))
    # A random target ends no answer.
    assert [one.name for one in found.faults] == ["truncated answers"]
    assert {one.name for one in found.findings if one.figure} >= {"mask", "on-policy", "decoding against training",
                                                                 "positions and taps", "ceiling"}
    # The mask of a tenth of the rows is a token late.
    late = sample_of(planted(rows, 0.1, shifted), target, template)
    wrong = {one.name: one for one in findings_of(TEXT_CHECKS, one, late) if one.remedy}
    assert "4 of 40 rows" in wrong["mask"].verdict
    assert set(wrong) == {"mask", "truncated answers"}
