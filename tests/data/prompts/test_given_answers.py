"""Labels of a given answer are what the target would write after the prompt that decoding gives it."""

from functools import cache
from typing import Any

import pytest
from draftsmith.data import ChatTemplate, Message
from draftsmith.data.prompts.given_answers import GivenAnswers, Turn, join_turns
from draftsmith.modules import UserError
from hypothesis import given, settings
from hypothesis import strategies as st
from support.data import chat_templates as shapes
from support.data.chat_templates import merging_tokenizer, shaped_tokenizer

TOOLS = [{"type": "function", "function": {"name": "add"}}]
CALL = {"type": "function", "id": "abcdefghi", "function": {"name": "add", "arguments": {"a": 1}}}
PLAIN: list[Message] = [
    {"role": "user", "content": "hi"}, {"role": "assistant", "content": "fine"},
    {"role": "user", "content": "and?"}, {"role": "assistant", "content": "good 1"},
]
THOUGHTS: list[Message] = [
    PLAIN[0], {**PLAIN[1], "reasoning_content": "the user"}, PLAIN[2], {**PLAIN[3], "reasoning_content": "me\n\nyou"},
]
CALLS: list[Message] = [
    PLAIN[0], {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": "3", "tool_call_id": "abcdefghi"}, {"role": "assistant", "content": "it is 3"},
]
GLM_ENDS = ("<|endoftext|>", "<|user|>", "<|observation|>")
ENDS = {
    shapes.CHATML: ("<|im_end|>",), shapes.CHATML_CALLS: ("<|im_end|>",), shapes.LLAMA2: ("</s>",),
    shapes.LLAMA3: ("<|eot|>",), shapes.MISTRAL: ("</s>",), shapes.GEMMA: ("</turn>",), shapes.QWEN3: ("<|im_end|>",),
    shapes.QWEN3_THINKING: ("<|im_end|>",), shapes.R1: ("<｜end｜>",), shapes.R1_FIRST: ("<｜end｜>",),
    shapes.ENDLESS: ("<｜end｜>",), shapes.NEVER: ("<｜end｜>",),
    shapes.V31: ("<｜end｜>",), shapes.GLM: GLM_ENDS, shapes.GRANITE: ("<|text_end|>",), shapes.NEMOTRON: ("<N12>",),
    shapes.HARMONY: ("<|return|>", "<|call|>"), shapes.PHI3: ("<|endoftext|>", "<|end|>"), shapes.VICUNA: ("</s>",),
    shapes.TEXTUAL: ("<eos>",), None: ("<eos>",), shapes.MARKED: ("</turn>",), shapes.SHOUTING: ("<|im_end|>",),
    shapes.REWRITING: ("<|im_end|>",), shapes.ANSWERS_CLOSED: ("<|endoftext|>", "<|im_end|>"),
}
"""End tokens of the targets."""
Q = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
Q2 = f"{Q}fine<|im_end|>\n<|im_start|>user\nand?<|im_end|>\n<|im_start|>assistant\n"
D = "<s><｜User｜>hi<｜Assistant｜>"
D2 = f"{D}fine<｜end｜><｜User｜>and?<｜Assistant｜>"
N = "<N10>System\n\n<N11>User\nhi\n<N11>Assistant\n"
N2 = f"{N}fine\n<N12>\n<N11>User\nand?\n<N11>Assistant\n"
H = "<|start|>user<|message|>hi<|end|><|start|>assistant"
H2 = f"{H}<|channel|>final<|message|>fine<|end|><|start|>user<|message|>and?<|end|><|start|>assistant"
G = "[gMASK]<|user|>\nhi"
DAY = "<|head|>system<|/head|>\n\nToday: 26 Jul 2024\n\n<|eot|>"
TABLE: list[tuple[str, str | None, list[Message], list[str]]] = [
    ("ChatML", shapes.CHATML, PLAIN,
     [f"{Q}«fine<|im_end|>»\n<|im_start|>user\nand?<|im_end|>\n<|im_start|>assistant\n«good 1<|im_end|>»"]),
    ("ChatML of answers as they were decoded, without a thought and with their end", shapes.CHATML,
     [PLAIN[0], {"role": "assistant", "content": "<think>\n\n</think>\n\nfine<|im_end|>\n"}, *PLAIN[2:]],
     [f"{Q}«fine<|im_end|>»\n<|im_start|>user\nand?<|im_end|>\n<|im_start|>assistant\n«good 1<|im_end|>»"]),
    ("ChatML with another token before the end", shapes.ANSWERS_CLOSED, PLAIN,
     [f"{Q}«fine</tool_call><|im_end|>»\n<|im_start|>user\nand?<|im_end|>\n<|im_start|>assistant\n"
      "«good 1</tool_call><|im_end|>»"]),
    ("ChatML of a model that does not think", shapes.CHATML, THOUGHTS,
     [f"{Q}«fine<|im_end|>»\n<|im_start|>user\nand?<|im_end|>\n<|im_start|>assistant\n«good 1<|im_end|>»"]),
    ("Llama 2", shapes.LLAMA2, PLAIN, ["<s>[[INST]] hi [[/INST]]« fine </s>»<s>[[INST]] and? [[/INST]]« good 1 </s>»"]),
    ("Llama 3 with a date", shapes.LLAMA3, PLAIN,
     [f"<s>{DAY}<|head|>user<|/head|>\n\nhi<|eot|><|head|>assistant<|/head|>\n\n«fine<|eot|>»"
      "<|head|>user<|/head|>\n\nand?<|eot|><|head|>assistant<|/head|>\n\n«good 1<|eot|>»"]),
    ("Mistral", shapes.MISTRAL, PLAIN, ["<s>[INST]hi[/INST]«fine</s>»[INST]and?[/INST]«good 1</s>»"]),
    ("Mistral with tools, which it shows once", shapes.MISTRAL, CALLS,
     ['<s>[TOOLS][{"type": "function", "function": {"name": "add"}}][/TOOLS][INST]hi[/INST]'
      '«[CALLS][{"name": "add", "arguments": {"a": 1}, "id": "abcdefghi"}]</s>»',
      '<s>[INST]hi[/INST][CALLS][{"name": "add", "arguments": {"a": 1}, "id": "abcdefghi"}]</s>'
      "[RESULTS]3[/RESULTS]«it is 3</s>»"]),
    ("Qwen2.5 with tools", shapes.CHATML_CALLS, CALLS,
     ['<|im_start|>system\nTools: [{"type": "function", "function": {"name": "add"}}]<|im_end|>\n'
      f'{Q}«<tool_call>\n{{"name": "add", "arguments": {{"a": 1}}}}\n</tool_call><|im_end|>»\n'
      "<|im_start|>user\n3<|im_end|>\n<|im_start|>assistant\n«it is 3<|im_end|>»"]),
    ("Gemma", shapes.GEMMA, PLAIN,
     ["<s><turn>user\nhi</turn>\n<turn>model\n«fine</turn>»\n<turn>user\nand?</turn>\n<turn>model\n«good 1</turn>»"]),
    ("Qwen3 without thoughts", shapes.QWEN3, PLAIN,
     [f"{Q}<think>\n\n</think>\n\n«fine<|im_end|>»", f"{Q2}<think>\n\n</think>\n\n«good 1<|im_end|>»"]),
    ("Qwen3, words about its marks", shapes.QWEN3,
     [PLAIN[0], {"role": "assistant", "content": "use <think> and </think> tags"}],
     [f"{Q}<think>\n\n</think>\n\n«use <think> and </think> tags<|im_end|>»"]),
    ("Qwen3 with thoughts", shapes.QWEN3, THOUGHTS,
     [f"{Q}«<think>\nthe user\n</think>\n\nfine<|im_end|>»",
      f"{Q2}«<think>\nme\n\nyou\n</think>\n\ngood 1<|im_end|>»"]),
    ("Qwen3, one answer of each kind", shapes.QWEN3, [*PLAIN[:3], THOUGHTS[3]],
     [f"{Q}<think>\n\n</think>\n\n«fine<|im_end|>»", f"{Q2}«<think>\nme\n\nyou\n</think>\n\ngood 1<|im_end|>»"]),
    ("Qwen3 that always thinks, without thoughts", shapes.QWEN3_THINKING, PLAIN,
     [f"{Q}<think>\n\n</think>\n\n«fine<|im_end|>»", f"{Q2}<think>\n\n</think>\n\n«good 1<|im_end|>»"]),
    ("Qwen3 that always thinks", shapes.QWEN3_THINKING, THOUGHTS,
     [f"{Q}<think>\n«the user\n</think>\n\nfine<|im_end|>»",
      f"{Q2}<think>\n«me\n\nyou\n</think>\n\ngood 1<|im_end|>»"]),
    ("R1 without thoughts", shapes.R1, PLAIN,
     [f"{D}<think>\n\n</think>\n\n«fine<｜end｜>»", f"{D2}<think>\n\n</think>\n\n«good 1<｜end｜>»"]),
    ("R1", shapes.R1, THOUGHTS,
     [f"{D}<think>\n«the user\n</think>\n\nfine<｜end｜>»", f"{D2}<think>\n«me\n\nyou\n</think>\n\ngood 1<｜end｜>»"]),
    ("R1, thoughts inside the words", shapes.R1,
     [PLAIN[0], {"role": "assistant", "content": "<think>\nthe user\n</think>\n\nfine"}],
     [f"{D}<think>\n«the user\n</think>\n\nfine<｜end｜>»"]),
    ("R1 before its prompts opened the thought", shapes.R1_FIRST, THOUGHTS,
     [f"{D}«<think>\nthe user\n</think>\n\nfine<｜end｜>»", f"{D2}«<think>\nme\n\nyou\n</think>\n\ngood 1<｜end｜>»"]),
    ("R1 whose prompts close the thought at once", shapes.NEVER, THOUGHTS,
     [f"{D}<think>\n\n</think>\n\n«fine<｜end｜>»", f"{D2}<think>\n\n</think>\n\n«good 1<｜end｜>»"]),
    ("R1 whose prompts close the thought at once, thoughts inside the words", shapes.NEVER,
     [PLAIN[0], {"role": "assistant", "content": "<think>\nthe user\n</think>\n\nfine"}],
     [f"{D}<think>\n\n</think>\n\n«fine<｜end｜>»"]),
    ("V3.1 without thoughts", shapes.V31, PLAIN,
     [f"{D}</think>«fine<｜end｜>»<｜User｜>and?<｜Assistant｜></think>«good 1<｜end｜>»"]),
    ("V3.1", shapes.V31, THOUGHTS,
     [f"{D}<think>«the user</think>fine<｜end｜>»",
      f"{D}</think>fine<｜end｜><｜User｜>and?<｜Assistant｜><think>«me\n\nyou</think>good 1<｜end｜>»"]),
    ("GLM without thoughts, ended by the next message", shapes.GLM, PLAIN,
     [f"{G}/nothink<|assistant|>\n<think></think>«\nfine<|user|>»\nand?/nothink<|assistant|>\n<think></think>"
      "«\ngood 1<|user|>»"]),
    ("GLM", shapes.GLM, THOUGHTS,
     [f"{G}<|assistant|>«\n<think>the user</think>\nfine<|user|>»",
      f"{G}<|assistant|>\n<think></think>\nfine<|user|>\nand?<|assistant|>"
      "«\n<think>me\n\nyou</think>\ngood 1<|user|>»"]),
    ("GLM with tools", shapes.GLM, CALLS,
     [f"{G}/nothink<|assistant|>\n<think></think>«\n<tool_call>add\n{{\"a\": 1}}\n</tool_call><|observation|>»\n3"
      "<|assistant|>\n<think></think>«\nit is 3<|user|>»"]),
    ("Granite with a date", shapes.GRANITE, PLAIN,
     ["<|role|>system<|/role|>Today is July 26, 2024.<|text_end|>\n<|role|>user<|/role|>hi<|text_end|>\n"
      "<|role|>assistant<|/role|>«fine<|text_end|>»\n<|role|>user<|/role|>and?<|text_end|>\n"
      "<|role|>assistant<|/role|>«good 1<|text_end|>»"]),
    ("Nemotron without thoughts", shapes.NEMOTRON, PLAIN,
     [f"{N}<think></think>«fine\n<N12>»", f"{N2}<think></think>«good 1\n<N12>»"]),
    ("Nemotron", shapes.NEMOTRON, THOUGHTS,
     [f"{N}<think>\n«the user\n</think>\n\nfine\n<N12>»", f"{N2}<think>\n«me\n\nyou\n</think>\n\ngood 1\n<N12>»"]),
    ("channels", shapes.HARMONY, PLAIN,
     [f"{H}«<|channel|>final<|message|>fine<|return|>»", f"{H2}«<|channel|>final<|message|>good 1<|return|>»"]),
    ("channels with thoughts", shapes.HARMONY, THOUGHTS[:2],
     [f"{H}«<|channel|>analysis<|message|>the user<|end|>"
      "<|start|>assistant<|channel|>final<|message|>fine<|return|>»"]),
    ("Phi 3, which ends the text too", shapes.PHI3, PLAIN,
     ["<|user|>\nhi<|end|>\n<|assistant|>\n«fine<|end|>»\n<|user|>\nand?<|end|>\n<|assistant|>\n«good 1<|end|>»"]),
    ("Vicuna", shapes.VICUNA, PLAIN, ["A chat. USER: hi ASSISTANT:« fine</s>»USER: and? ASSISTANT:« good 1</s>»"]),
    ("plain text, without a generation prompt", shapes.TEXTUAL, PLAIN,
     ["user: hi\n«assistant: fine<eos>»", "user: hi\nassistant: fine\nuser: and?\n«assistant: good 1<eos>»"]),
    ("no template", None, PLAIN, ["hi«fine<eos>»", "hifine\n\nand?«good 1<eos>»"]),
    ("generation marks that end before the turn does", shapes.MARKED, PLAIN,
     ["<turn>user\nhi</turn>\n<turn>assistant\n«fine</turn>»\n<turn>user\nand?</turn>\n<turn>assistant\n"
      "«good 1</turn>»"]),
]


@cache
def template_of(source: str | None, **settings: Any) -> ChatTemplate:
    tokenizer = shaped_tokenizer(source, eos=ENDS[source][0])
    return ChatTemplate(tokenizer, ends=tokenizer.convert_tokens_to_ids(list(ENDS[source])), **settings)


def turns_of(template: ChatTemplate, messages: list[Message]) -> list[Turn]:
    given, tools = GivenAnswers(template), TOOLS if any("tool_calls" in one for one in messages) else None
    return [given.turn(messages[:place], message, tools) for place, message in enumerate(messages)
            if message["role"] == "assistant"]


def shown(tokenizer: Any, row: tuple[list[int], list[bool]]) -> str:
    """A row as text, its labels in guillemets."""
    found, run, inside = "", list[int](), False
    for token, flag in [*zip(*row, strict=True), (None, None)]:
        if flag is not inside:
            text = tokenizer.decode(run)
            found, run, inside = found + (f"«{text}»" if inside else text), [], bool(flag)
        run.append(token)
    return found


@pytest.mark.parametrize(("name", "source", "messages", "rows"), TABLE, ids=[row[0] for row in TABLE])
def test_rows_of_real_templates(name: str, source: str | None, messages: list[Message], rows: list[str]) -> None:
    template = template_of(source)
    turns = turns_of(template, messages)
    assert [shown(template.tokenizer, row) for row in join_turns(turns)] == rows
    assert all(turn.answer[-1] in template.ends for turn in turns), "the end of a turn is a label"


@pytest.mark.parametrize(("source", "row"), [
    (shapes.QWEN3, f"{Q}«<think>\ntwo and»"), (shapes.QWEN3_THINKING, f"{Q}<think>\n«two and»"),
    (shapes.R1, f"{D}<think>\n«two and»"), (shapes.R1_FIRST, f"{D}«<think>\ntwo and»"),
    (shapes.V31, f"{D}<think>«two and»"), (shapes.GLM, f"{G}<|assistant|>«\n<think>two and»"),
    (shapes.ENDLESS, f"{D}<think>\n«two and»"),
])
@pytest.mark.parametrize("form", ["text", "ended text", "apart"])
def test_an_answer_that_is_cut_inside_its_thought_has_no_end(source: str, row: str, form: str) -> None:
    """As text, also with the end of the turn, and as servers return it, apart from words that never came."""
    template = template_of(source)
    words = "<think>\ntwo and" + (template.tokenizer.convert_ids_to_tokens(template.ends[0]) if "ended" in form else "")
    cut = {"role": "assistant", "content": words}
    if form == "apart":
        cut = {"role": "assistant", "content": "", "reasoning_content": "two and"}
    assert [shown(template.tokenizer, one) for one in join_turns(turns_of(template, [PLAIN[0], cut]))] == [row]
    # In a history it is a thought too, of which the template keeps what it keeps of others.
    later = [PLAIN[0], cut, *PLAIN[2:]]
    whole = [PLAIN[0], {**cut, "content": "", "reasoning_content": "two and"}, *PLAIN[2:]]
    assert turns_of(template, later)[1] == GivenAnswers(template).turn(whole[:3], whole[3])


@pytest.mark.parametrize(("arguments", "written"), [
    ("c.function.arguments", '{"a": "é"}'), ("'' ~ c.function.arguments", '{"a": "é"}'),
    ("c.function.arguments | tojson", '{"a": "é"}'),
    ("c.function.arguments if c.function.arguments is string else c.function.arguments | tojson", '{"a": "é"}'),
    ("c.function.arguments.values() | join", "é"),
])
def test_arguments_of_calls_are_objects_or_json_as_the_template_writes_them(arguments: str, written: str) -> None:
    source = shapes.CHATML_CALLS.replace("c.function | tojson", f"c.function.name + '\\n' + ({arguments})")
    tokenizer = shaped_tokenizer(source, eos="<|im_end|>")
    template = ChatTemplate(tokenizer)
    call = {**CALL, "function": {"name": "add", "arguments": {"a": "é"}}}
    messages = [CALLS[0], {**CALLS[1], "tool_calls": [call]}, *CALLS[2:]]
    for tools in (TOOLS, None):
        assert f"<tool_call>\nadd\n{written}\n</tool_call>" in template.rendered(messages, tools=tools)
    assert template.unwritten(messages, TOOLS) == []
    first, last = turns_of(template, messages)
    assert tokenizer.decode(first.answer) == f"<tool_call>\nadd\n{written}\n</tool_call><|im_end|>"
    assert tokenizer.decode(last.answer) == "it is 3<|im_end|>"


@pytest.mark.parametrize(("source", "messages", "reason"), [
    (shapes.NEVER, [PLAIN[0], {"role": "assistant", "content": "<think>\ntwo and"}], "cut inside a thought, and none"),
    (shapes.QWEN3, [PLAIN[0], {"role": "assistant", "content": "<think>\n"}], "cut inside a thought, .*leave the row"),
    (shapes.SHOUTING, PLAIN, "otherwise than others"), (shapes.REWRITING, PLAIN, "otherwise than without one"),
    (shapes.CHATML, CALLS, "does not write tool calls; set target.chat_template to one that does, or leave such rows"),
    (shapes.CHATML, [PLAIN[0], {"role": "assistant", "content": "a<|im_end|>\nb"}], r"end token .*<\|im_end\|> in"),
    (shapes.GEMMA, [PLAIN[0], *PLAIN], "roles must alternate"),
])
def test_an_answer_that_cannot_be_had_exactly_is_refused(source: str, messages: list[Message], reason: str) -> None:
    with pytest.raises(UserError, match=reason):
        turns_of(template_of(source), messages)


TEXTS = st.text(st.sampled_from("ab the\n .?é漢1") | st.characters(codec="utf-8", exclude_categories=("Cs",)),
                min_size=1, max_size=12).filter(str.strip)


@pytest.mark.parametrize("source", [one for one in ENDS if one not in (
    shapes.SHOUTING, shapes.REWRITING, shapes.ANSWERS_CLOSED)])
@settings(max_examples=15)
@given(texts=st.lists(st.tuples(TEXTS, TEXTS, st.none() | TEXTS), min_size=1, max_size=3))
def test_each_answer_follows_the_prompt_of_decoding(source: str | None,
                                                    texts: list[tuple[str, str, str | None]]) -> None:
    template, messages = template_of(source), list[Message]()
    for asked, words, thought in texts:
        answer = {"role": "assistant", "content": words}
        messages += [{"role": "user", "content": asked},
                     answer if thought is None else {**answer, "reasoning_content": thought}]
    for place, turn in zip(range(1, len(messages), 2), turns_of(template, messages), strict=True):
        prompts = [template.prompt(messages[:place], thinking=mode) for mode in (True, False)]
        if template.tokenizer.decode(turn.prompt).endswith("</think>\n\n"):
            # Closing a thought may merge with the line break that opens it.
            assert any(turn.prompt[: len(prompt) - 1] == prompt[:-1] for prompt in prompts)
        else:
            assert turn.prompt in prompts
        words = template.tokenizer.decode(turn.answer[:-1])
        assert turn.answer[-1] in template.ends
        assert words.rstrip().endswith(messages[place]["content"].strip())


def test_a_text_that_merges_with_its_prompt_is_encoded_apart() -> None:
    template = template_of(shapes.CHATML)
    turn, = turns_of(template, [PLAIN[0], {"role": "assistant", "content": "\n\nfine"}])
    assert turn.prompt == template.prompt(PLAIN[:1])
    joined = template.encode(template.rendered([PLAIN[0], {"role": "assistant", "content": "\n\nfine"}]))
    assert joined[: len(turn.prompt)] != turn.prompt, "the line breaks do merge"
    assert template.tokenizer.decode(turn.answer) == "\n\nfine<|im_end|>"


def test_turns_join_only_after_the_very_tokens_they_were_decoded_after() -> None:
    turns = [Turn(prompt=[1, 2], answer=[3]), Turn(prompt=[1, 2, 3, 4], answer=[5]), Turn(prompt=[1, 2, 9], answer=[7])]
    assert join_turns(turns) == [
        ([1, 2, 3, 4, 5], [False, False, True, False, True]),
        ([1, 2, 9, 7], [False] * 3 + [True]),
    ]


def test_an_answer_costs_two_renderings(monkeypatch: pytest.MonkeyPatch) -> None:
    template = template_of(shapes.QWEN3)
    given, count = GivenAnswers(template), list[bool]()
    given.turn(PLAIN[:1], PLAIN[1])
    rendered = template.rendered
    monkeypatch.setattr(template, "rendered", lambda *given, **named: count.append(True) or rendered(*given, **named))
    given.turn(PLAIN[:3], PLAIN[3])
    assert len(count) == 2


def test_the_text_of_a_conversation_is_never_taken_for_the_templates() -> None:
    template = template_of(shapes.QWEN3)
    text = "fine<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\nfine"
    question: Message = {"role": "user", "content": text}
    turn, = turns_of(template, [question, PLAIN[1]])
    assert template.tokenizer.decode(turn.answer) == "fine<|im_end|>"
    assert template.tokenizer.decode(turn.prompt).count("fine") == 2


def test_a_base_tokenizer_gives_plain_text_with_an_end() -> None:
    template = ChatTemplate(merging_tokenizer(None))
    turn, = turns_of(template, [{"role": "user", "content": "hello there,"}, {"role": "assistant", "content": " you?"}])
    assert template.tokenizer.decode(turn.prompt + turn.answer) == "hello there, you?<eos>"
    assert turn.answer[-1] == template.tokenizer.eos_token_id
