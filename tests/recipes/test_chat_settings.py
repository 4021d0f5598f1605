"""Settings of the chat template: modes, its end against the target's, questions of an evaluation."""

from datetime import date
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from draftsmith.data import ChatTemplate, Prompt
from draftsmith.data.prompts.prompt import parse_prompt
from draftsmith.export import EvaluateConfig
from draftsmith.modules import UserError
from draftsmith.recipes.chat_settings import AskedSets, TemplateConfig, question
from draftsmith.recipes.commands.pipeline import COMMANDS
from support.data import chat_templates as shapes
from support.data.chat_templates import shaped_tokenizer


def target_of(template: str | None, *ends: str, eos: str = "<eos>") -> Any:
    tokenizer = shaped_tokenizer(template, eos=eos)
    return SimpleNamespace(tokenizer=tokenizer, eos_ids=tuple(tokenizer.convert_tokens_to_ids(list(ends))))


@pytest.mark.parametrize(("template", "ends", "warned"), [
    (shapes.CHATML, ("<|endoftext|>",), "<|im_end|>"), (shapes.CHATML, ("<|endoftext|>", "<|im_end|>"), None),
    (shapes.CHATML, (), "<|im_end|>"), (shapes.MARKED, ("<eos>",), "</turn>"),
    (shapes.GLM, ("<|endoftext|>", "<|user|>"), None), (shapes.PHI3, ("<|endoftext|>",), "<|end|>"),
    (shapes.TEXTUAL, ("<eos>",), None), (None, ("<eos>",), None), (shapes.REWRITING, ("<eos>",), None),
])
def test_a_template_whose_end_ends_no_answer_is_named_at_the_start(
    template: str | None, ends: tuple[str, ...], warned: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    TemplateConfig().build(target_of(template, *ends))
    told = f"ends an answer with {warned}, which is no end token of the target"
    assert [told in message for message in caplog.messages] == [True] * (warned is not None)


@pytest.mark.parametrize(("template", "warned"), [
    (shapes.CHATML, True), (None, True), (shapes.CHATML_CALLS, False), (shapes.MISTRAL, False)])
def test_tools_that_the_template_does_not_show_are_named_at_the_start(
    template: str | None, warned: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "tools.json").write_text('[{"type": "function", "function": {"name": "add"}}]')
    TemplateConfig(tools=str(tmp_path / "tools.json")).build(target_of(template, "<|im_end|>", "</s>", eos="</s>"))
    assert [message.partition(" ")[0] for message in caplog.messages if "does not show the tools" in message] == [
        "the"] * warned


def test_templates_are_told_the_date_of_the_settings() -> None:
    messages = [{"role": "user", "content": "hi"}]
    settings = COMMANDS["run"].parse(["--config", "tiny", "--template.date", "2025-03-04"]).values.template
    told, usual = (one.build(target_of(shapes.LLAMA3)) for one in (settings, TemplateConfig()))
    assert "04 Mar 2025" in told.rendered(messages)
    assert "26 Jul 2024" in usual.rendered(messages)
    assert told.hash != usual.hash
    for wrong in ("4 March 2025", "20250304", "2025-W10-2", "2025-02-30", ""):
        with pytest.raises(UserError, match=f"template.date must be a day such as 2024-07-26, got '{wrong}'"):
            TemplateConfig(date=wrong)


def test_questions_have_the_modes_in_turn_and_their_history_is_a_servers() -> None:
    target = target_of(shapes.QWEN3, "<|im_end|>", eos="<|im_end|>")
    template = TemplateConfig(enable_thinking=(True, False)).build(target)
    prompts = [Prompt.from_turns("hi", "and?", id=str(number)) for number in range(8)]
    questions = AskedSets({"own": prompts}, {}).questions(template, EvaluateConfig(), 4096)[0]["own"]
    # Prompts at equal distances, which a limited evaluation takes, have both modes too.
    for chosen in (questions, questions[::2], questions[::4]):
        assert sorted(one.mode for one in chosen) == ["not thinking"] * (len(chosen) // 2) + ["thinking"] * (
            len(chosen) // 2)
    answer = template.encode("<think>\nme\n</think>\n\nfine<|im_end|>")
    for one in questions[:2]:
        first, second = (target.tokenizer.decode(one.prompt(said)) for said in ((), [answer]))
        assert first.endswith("</think>\n\n") == (one.mode == "not thinking")
        assert second.startswith("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nfine<|im_end|>\n")


def test_rows_name_texts_besides_the_prompt() -> None:
    template = ChatTemplate(shaped_tokenizer(shapes.CHATML))
    row = {"turns": ["a", "b"], "reference": ["one", "two"]}
    prompt = parse_prompt(row, "file:1")
    assert parse_prompt(prompt.row, "file:1").reference == row["reference"]
    encoded = [template.tokenizer.encode(text, add_special_tokens=False) for text in ("one", "two")]
    assert question(template, prompt).references == encoded
    row = {"system": "s", "prompt": "a", "reference": "one", "draft_prompt": "b"}
    one = question(template, parse_prompt(row, "file:2"))
    for config, own_text, read in (
            (EvaluateConfig(), False, (0, 0)), (EvaluateConfig(policies="none+reference-4"), False, (1, 0)),
            (EvaluateConfig(baselines="whole_target"), False, (0, 1)), (EvaluateConfig(), True, (0, 1))):
        found = AskedSets({"own": [parse_prompt(row, "file:2")]}, {}).questions(
            template, config, 4096, [SimpleNamespace(reads_own_text=own_text)])[0]["own"][0]  # type: ignore[list-item]
        assert (len(found.references), len(found.draft_tokens) > 0) == read
    assert one.references == encoded[:1]
    assert one.draft_tokens == question(template, parse_prompt({"system": "s", "prompt": "b"}, "file:2")).prompt([])


@pytest.mark.parametrize(("row", "says"), [
    ({"prompt": "a", "reference": 3}, "file:1: reference must be a text, or a list of texts for the row's 1 answers"),
    ({"turns": ["a", "b"], "reference": ["one"]}, "a list of texts for the row's 2 answers, got .'one'.; write it so"),
    ({"prompt": "a", "reference": [["one"]]}, "reference must be a text"),
    ({"turns": ["a", "b"], "draft_prompt": "b"}, "draft_prompt must be a text in a row that asks for one answer"),
    ({"prompt": "a", "draft_prompt": {"a": 1}}, "draft_prompt must be a text"),
])
def test_texts_besides_the_prompt_that_are_none_are_refused(row: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError, match=says):
        question(ChatTemplate(shaped_tokenizer(shapes.CHATML)), parse_prompt(row, "file:1"))
    # Where nobody reads them they are no fault, whatever a table holds there.
    prompts = [parse_prompt(one, "file:1") for one in (row, {**row, "reference": date(2025, 1, 1)})]
    template = ChatTemplate(shaped_tokenizer(shapes.CHATML))
    for policy in ("fastest", "static+lookup"):
        found = AskedSets({"own": prompts}, {}).questions(template, EvaluateConfig(policies=policy), 4096)[0]["own"]
        assert [(*one.references, *one.draft_tokens) for one in found] == [(), ()]
    assert "reference" not in prompts[1].row
