"""A prompt is what the template renders, in its mode and on its day; answers become what a server would send."""

from datetime import date
from itertools import groupby
from typing import Any

import pytest
from draftsmith.data import ChatTemplate, Prompt
from draftsmith.data.prompts.chat import OTHER_MARKS
from draftsmith.modules import UserError
from draftsmith.modules.target.loading.tiny_model import CHATML, tiny_tokenizer
from support.data import chat_templates as shapes
from support.data.chat_templates import MIXTRAL, THINKING, merging_tokenizer, shaped_tokenizer
from tokenizers import AddedToken


def conversation(texts: list[str]) -> list[dict[str, Any]]:
    return [{"role": ("user", "assistant")[place % 2], "content": text} for place, text in enumerate(texts)]


def test_plain_text_starts_as_the_tokenizer_does_and_never_ends() -> None:
    from tokenizers.processors import TemplateProcessing

    tokenizer = merging_tokenizer(None)
    ids = [(name, tokenizer.convert_tokens_to_ids(name)) for name in ("<bos>", "<eos>")]
    processor = TemplateProcessing(single="<bos> $A <eos>", special_tokens=ids)
    before, tokenizer.backend_tokenizer.post_processor = tokenizer.backend_tokenizer.post_processor, processor
    try:
        tokens = ChatTemplate(tokenizer).prompt(conversation(["hello"]))
    finally:
        # The trained tokenizer is shared between tests.
        if before is not None:
            tokenizer.backend_tokenizer.post_processor = before
    assert tokens[0] == tokenizer.bos_token_id
    assert tokens[-1] != tokenizer.eos_token_id


def test_the_hash_depends_on_every_setting_of_the_template() -> None:
    tokenizer = merging_tokenizer(THINKING)
    tools = [{"type": "function", "function": {"name": "add"}}]
    templates = [
        ChatTemplate(tokenizer),
        ChatTemplate(tokenizer, system="Be brief."),
        ChatTemplate(tokenizer, tools=tools),
        ChatTemplate(tokenizer, modes=(False,)),
        ChatTemplate(tokenizer, modes=(False, True)),
        ChatTemplate(merging_tokenizer(CHATML)),
    ]
    assert len({template.hash for template in templates}) == len(templates)
    assert ChatTemplate(tokenizer).hash == templates[0].hash


def test_thinking_and_the_system_prompt_reach_the_prompt() -> None:
    tokenizer = merging_tokenizer(THINKING)
    asked = conversation(["hello"])
    prompt = tokenizer.decode(ChatTemplate(tokenizer, modes=(False,), system="Be brief.").prompt(asked))
    assert prompt.endswith("<think>\n\n</think>\n\n")
    assert prompt.startswith("<|im_start|>system\nBe brief.")
    own = [{"role": "system", "content": "Mine."}, *asked]
    assert "Be brief." not in tokenizer.decode(ChatTemplate(tokenizer, system="Be brief.").prompt(own))


def test_what_precedes_and_ends_a_users_turn() -> None:
    tokenizer = tiny_tokenizer()
    around = ChatTemplate(tokenizer).user_turn()
    assert tokenizer.decode(list(around.before)) == "<|im_start|>user\n"
    assert tokenizer.decode(list(around.after)) == "<|im_end|>\n"
    mistral = ChatTemplate(merging_tokenizer(MIXTRAL))
    assert mistral.tokenizer.decode(list(mistral.user_turn().after)) == "[/INST]"


@pytest.mark.parametrize(("source", "message"), [
    ("{% for m in messages %}", "chat template fails"),
    ("{{ raise_exception('roles must alternate') }}", "roles must alternate.*target.chat_template"),
    ("{{ cycler() }}", "chat template fails: at least one item has to be provided"),
    ("{% for _ in 'a' %}" * 25 + "{% endfor %}" * 25, "chat template fails: too many statically nested blocks"),
])
def test_a_broken_template_is_one_sentence(source: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        ChatTemplate(merging_tokenizer(source))


def test_an_empty_prompt_is_refused() -> None:
    with pytest.raises(UserError, match="no token at all"):
        ChatTemplate(merging_tokenizer(None)).prompt(conversation([""]))


@pytest.mark.parametrize(("source", "true", "false"), [
    (shapes.QWEN3, "assistant\n", "assistant\n<think>\n\n</think>\n\n"), (shapes.V31, "<think>", "</think>"),
    (shapes.NEMOTRON, "Assistant\n<think>\n", "Assistant\n<think></think>"),
])
def test_modes_are_dealt_to_prompts_in_turn_and_a_row_may_state_its_own(source: str, true: str, false: str) -> None:
    template = ChatTemplate(shaped_tokenizer(source), modes=(True, False))
    prompt, own = Prompt.from_turns("hi", id="1"), Prompt(messages=({"role": "user", "content": "hi"},), id="2",
                                                          thinking=False)
    assert [template.mode(prompt, number) for number in range(4)] == [True, False, True, False]
    assert [template.mode(own, number) for number in range(2)] == [False, False]
    for mode, end in ((True, true), (False, false)):
        assert template.tokenizer.decode(template.prompt(prompt.history(), thinking=mode)).endswith(end)
    with pytest.raises(UserError, match=r"gives several modes.*give one"):
        ChatTemplate(shaped_tokenizer(CHATML), modes=(True, False))


@pytest.mark.parametrize(("source", "today"), [(shapes.GRANITE, "July 26, 2024"), (shapes.LLAMA3, "26 Jul 2024")])
def test_templates_that_ask_the_clock_get_one_day(source: str, today: str) -> None:
    tokenizer = shaped_tokenizer(source)
    template = ChatTemplate(tokenizer)
    assert today in template.rendered(conversation(["hi"]))
    # Others who render this template in between take the clock's.
    tokenizer.apply_chat_template(conversation(["hi"]), tokenize=False)
    assert today in template.rendered(conversation(["hi"]))
    other = ChatTemplate(tokenizer, today=date(2025, 3, 4))
    assert "2025" in other.rendered(conversation(["hi"]))
    assert today in template.rendered(conversation(["hi"]))
    assert template.hash != other.hash


def test_tools_of_a_conversation_stand_in_place_of_the_recipes() -> None:
    tools = [{"type": "function", "function": {"name": name}} for name in ("first", "second")]
    template = ChatTemplate(shaped_tokenizer(shapes.CHATML_CALLS), tools=tools[:1])
    for own, shown in ((tools[1:], ["second"]), (None, ["first"]), ((), [])):
        text = template.rendered(conversation(["hi"]), tools=own)
        assert [name for name in ("first", "second") if name in text] == shown


def spaced_decode(tokenizer: Any) -> Any:
    """The decoder of tokenizers written in Python, which puts spaces around added tokens unless it is asked not to."""
    decode, added = tokenizer.decode, {*tokenizer.added_tokens_decoder}

    def spaced(tokens: list[int], *, spaces_between_special_tokens: bool = True, **settings: Any) -> str:
        between = " " if spaces_between_special_tokens else ""
        return between.join("".join(decode([token], **settings) for token in run) for _, run in groupby(
            tokens, lambda token: token in added and token))

    return spaced


CALL = {"id": "abcdefghi", "function": {"name": "add", "arguments": {}}}
CALLED = [{"role": "assistant", "content": "let me", "tool_calls": [CALL]}, {"role": "tool", "content": "3"}]


@pytest.mark.parametrize(("source", "left_out"), [
    (shapes.CHATML_CALLS, []), (shapes.CHATML, ["tools", "tool calls"]), (None, ["tools", "tool calls"]),
    # It shows tools before the last question alone.
    (shapes.MISTRAL, ["tools", "words before tool calls"])])
def test_what_a_template_does_not_write_is_known(source: str | None, left_out: list[str]) -> None:
    template, asked = ChatTemplate(shaped_tokenizer(source)), conversation(["hi"])
    assert template.unwritten([*asked, *CALLED], [{"type": "function", "function": {"name": "add"}}]) == left_out
    assert template.unwritten(asked) == []


@pytest.mark.parametrize(("source", "text", "thinking", "message"), [
    (shapes.QWEN3, "<think>\nme\n</think>\n\nfine<|im_end|>", True, ("fine", "me")),
    (shapes.QWEN3, "fine<|im_end|>", False, ("fine", None)),
    (shapes.QWEN3, "<think>\nme and", True, ("", "me and")),
    (shapes.QWEN3, "use <think> and </think> so<|im_end|>", True, ("use <think> and </think> so", None)),
    (shapes.V31, "use </think> so<|im_end|>", False, ("use </think> so", None)),
    (shapes.R1, "me\n</think>\n\nfine<|im_end|>", None, ("fine", "me")),
    (shapes.R1, "me, <think> too\n</think>\n\nfine<|im_end|>", None, ("fine", "me, <think> too")),
    (shapes.R1, "me and", None, ("", "me and")),
    (shapes.V31, "me and", True, ("", "me and")), (shapes.V31, "me and", False, ("me and", None)),
    (CHATML, "<think>\nme\n</think>\n\nfine<|im_end|>", None, ("<think>\nme\n</think>\n\nfine", None)),
    *((shapes.QWEN3.replace("<think>", start).replace("</think>", stop), f"{start}\nme\n{stop}\n\nfine<|im_end|>", True,
       ("fine", "me")) for start, stop in OTHER_MARKS[:2]),  # "spaced" decodes token by token, and ◁ has several
])
@pytest.mark.parametrize("marks", ["text", "listed", "flagged", "spaced", "unknown"])
def test_an_answer_in_the_history_is_what_a_server_would_send(source: str, text: str, thinking: bool | None,
                                                              message: tuple[str, str | None], marks: str,
                                                              monkeypatch: pytest.MonkeyPatch) -> None:
    """Marks of thoughts are text, special tokens that the tokenizer lists, or ones that only their own flags make
    special; some tokenizers put spaces around added tokens, and of some the end is the unknown token too."""
    tokenizer = shaped_tokenizer(source, eos="<|im_end|>")
    names = [*next((pair for pair in OTHER_MARKS if pair[1] in source), ("<think>", "</think>"))]
    if marks == "listed" and source != CHATML:
        tokenizer.add_special_tokens({"additional_special_tokens": names})
    elif marks == "flagged" and source != CHATML:
        tokenizer.backend_tokenizer.add_special_tokens([AddedToken(name, normalized=False) for name in names])
        assert not {*names} & {*tokenizer.all_special_tokens}
        assert tokenizer.decode(tokenizer.convert_tokens_to_ids(names), skip_special_tokens=True) == ""
    elif marks == "spaced":
        monkeypatch.setattr(tokenizer, "decode", spaced_decode(tokenizer))
    elif marks == "unknown":
        tokenizer.unk_token = tokenizer.eos_token
    template = ChatTemplate(tokenizer)
    said = template.said(template.encode(text), thinking)
    assert (said["content"], said.get("reasoning_content")) == message
    # The template decides what it keeps of a thought.
    asked = [*conversation(["hi"]), said, *conversation(["and?"])]
    assert ("me" in template.rendered(asked).removeprefix("<|im_start|>")) == ("me" in message[0])
