"""The mask covers the assistant's tokens and nothing else, or the conversation is refused."""

from functools import cache

import pytest
from draftsmith.data import ChatTemplate
from draftsmith.data.prompts.chat import Message, Turn, join_turns
from draftsmith.modules import UserError
from draftsmith.modules.target.loading.tiny_model import CHATML, tiny_tokenizer
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from support.chats import ENDS, GEMMA_MARKED, LLAMA3, MARKED_IN_MACRO, MISTRAL, TEXTUAL, THINKING, merging_tokenizer

TEXTS = st.text(
    st.sampled_from("ab the\n .?é漢1") | st.characters(codec="utf-8", exclude_categories=("Cs",)),
    min_size=1,
    max_size=12,
)


@cache
def template_of(source: str, pad: str = "<pad>") -> ChatTemplate:
    return ChatTemplate(merging_tokenizer(source, eos=ENDS[source], pad=pad))


def conversation(texts: list[str]) -> list[dict[str, str]]:
    return [{"role": ("user", "assistant")[place % 2], "content": text} for place, text in enumerate(texts)]


def runs(tokens: list[int], flags: list[bool]) -> list[list[int]]:
    """The unbroken runs of supervised tokens."""
    found: list[list[int]] = []
    for place, (token, flag) in enumerate(zip(tokens, flags, strict=True)):
        if flag and not (place and flags[place - 1]):
            found.append([])
        if flag:
            found[-1].append(token)
    return found


def one_row(template: ChatTemplate, messages: list[Message]) -> tuple[list[int], list[bool]]:
    """(tokens, supervised) of a conversation that is one row."""
    row, = template.rows(messages)
    return row


@pytest.mark.parametrize("source", [CHATML, LLAMA3, GEMMA_MARKED, MISTRAL])
@settings(max_examples=40, deadline=None)
@given(texts=st.lists(st.tuples(TEXTS, TEXTS), min_size=1, max_size=3))
def test_supervised_runs_are_the_answers_with_their_ends(source: str, texts: list[tuple[str, str]]) -> None:
    messages = conversation([text for pair in texts for text in pair])
    template = template_of(source)
    try:
        tokens, flags = one_row(template, messages)
    except UserError:
        assume(False)  # a text that merges with its surroundings is refused, which other tests look at
    found = [template.tokenizer.decode(run) for run in runs(tokens, flags)]
    answers = [answer.strip() if source == LLAMA3 else answer for _, answer in texts]
    assert found == [answer + ENDS[source] for answer in answers]
    whole = template.tokenizer.apply_chat_template(messages, tokenize=False)
    assert template.tokenizer(whole, add_special_tokens=False)["input_ids"][: len(tokens)] == tokens


@pytest.mark.parametrize("source", [CHATML, LLAMA3, MISTRAL])
@settings(max_examples=25, deadline=None)
@given(texts=st.lists(st.tuples(TEXTS, TEXTS), min_size=2, max_size=2))
def test_each_answer_stands_behind_the_prompt_that_decoding_would_use(
    source: str, texts: list[tuple[str, str]]
) -> None:
    messages, template = conversation([text for pair in texts for text in pair]), template_of(source)
    try:
        tokens, flags = one_row(template, messages)
    except UserError:
        assume(False)
    for number in (1, 3):
        prompt = template.prompt(messages[:number])
        assert tokens[: len(prompt)] == prompt
        assert flags[len(prompt)]
        assert not flags[len(prompt) - 1]


@pytest.mark.parametrize("source", [CHATML, LLAMA3, GEMMA_MARKED, MISTRAL])
def test_a_pad_token_that_is_also_the_end_token_changes_nothing(source: str) -> None:
    messages = conversation(["hello", "I am fine", "and the price?", "100"])
    padded = template_of(source, ENDS[source])
    assert padded.tokenizer.pad_token_id == padded.tokenizer.eos_token_id
    tokens, flags = one_row(padded, messages)
    assert tokens == one_row(template_of(source), messages)[0]
    assert [run[-1] for run in runs(tokens, flags)] == [padded.tokenizer.eos_token_id] * 2


def test_marks_and_rendering_message_by_message_agree() -> None:
    unmarked = GEMMA_MARKED.replace("{% generation %}", "").replace("{% endgeneration %}", "")
    messages = conversation(["hello", "the weather", "bread?", "10"])
    incremental = ChatTemplate(merging_tokenizer(unmarked, eos="<end_of_turn>"))
    assert not incremental.marked
    tokens, flags = one_row(template_of(GEMMA_MARKED), messages)
    plain_tokens, plain_flags = one_row(incremental, messages)
    assert tokens[: len(plain_tokens)] == plain_tokens
    assert flags[: len(plain_tokens)] == plain_flags
    assert not any(flags[len(plain_tokens) :])


def test_an_answer_that_merges_with_its_prompt_is_refused() -> None:
    with pytest.raises(UserError, match=r"no longer renders its prompt.*generation"):
        one_row(template_of(CHATML), conversation(["hello", "\n\nfine"]))


def test_marks_inside_a_macro_are_refused() -> None:
    template = ChatTemplate(merging_tokenizer(MARKED_IN_MACRO))
    with pytest.raises(UserError, match=r"joins the assistant's words|do not enclose"):
        one_row(template, conversation(["hello", "fine"]))


def test_marks_around_the_users_words_are_refused() -> None:
    everything = (
        "{% for m in messages %}{% generation %}{{ m['content'] }}{% endgeneration %}{{ eos_token }}{% endfor %}"
    )
    with pytest.raises(UserError, match="do not enclose the assistant's words"):
        one_row(ChatTemplate(merging_tokenizer(everything)), conversation(["hello", "fine"]))


def test_a_token_across_the_border_of_a_mark_is_refused() -> None:
    merging = (
        "{% for m in messages %}{{ m['role'] + ' ' }}{% generation %}{{ m['content'] }}{% endgeneration %}{% endfor %}"
    )
    template = ChatTemplate(merging_tokenizer(merging.replace("m['role'] + ' '", "m['role'] + 'th'")))
    with pytest.raises(UserError, match=r"joins the assistant's words|do not enclose"):
        one_row(template, conversation(["hello", "e weather"]))


def test_without_a_generation_prompt_the_header_is_the_targets_to_write() -> None:
    template = ChatTemplate(merging_tokenizer(TEXTUAL))
    tokens, flags = one_row(template, conversation(["hello", "fine"]))
    answered = template.tokenizer.decode(runs(tokens, flags)[0])
    assert answered == "assistant: fine"


def test_rewritten_history_is_several_rows() -> None:
    template = ChatTemplate(merging_tokenizer(THINKING, eos="<|im_end|>"))
    messages = conversation(["hello", "<think>the user</think>fine", "and you?", "<think>me</think>good"])
    rows = template.rows(messages)
    assert len(rows) == 2
    assert [template.tokenizer.decode(run) for row in rows for run in runs(*row)] == [
        "<think>the user</think>fine<|im_end|>",
        "<think>me</think>good<|im_end|>",
    ]
    for (tokens, flags), asked in zip(rows, (1, 3), strict=True):
        assert tokens[: flags.index(True)] == template.prompt(messages[:asked])


def test_turns_join_only_behind_the_very_tokens_they_were_decoded_behind() -> None:
    turns = [Turn(prompt=[1, 2], answer=[3]), Turn(prompt=[1, 2, 3, 4], answer=[5]), Turn(prompt=[1, 2, 9], answer=[7])]
    assert join_turns(turns) == [
        ([1, 2, 3, 4, 5], [False, False, True, False, True]),
        ([1, 2, 9, 7], [False] * 3 + [True]),
    ]


def test_a_base_model_trains_on_plain_text() -> None:
    template = ChatTemplate(merging_tokenizer(None))
    tokens, flags = one_row(template, conversation(["hello there,", " how are you?"]))
    prompt = template.prompt(conversation(["hello there,"]))
    assert tokens[: len(prompt)] == prompt
    assert template.tokenizer.decode(tokens) == "hello there, how are you?"
    assert flags == [False] * len(prompt) + [True] * (len(tokens) - len(prompt))


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
        ChatTemplate(tokenizer, enable_thinking=False),
        ChatTemplate(merging_tokenizer(CHATML)),
    ]
    assert len({template.hash for template in templates}) == len(templates)
    assert ChatTemplate(tokenizer).hash == templates[0].hash


def test_thinking_and_the_system_prompt_reach_the_prompt() -> None:
    tokenizer = merging_tokenizer(THINKING)
    asked = conversation(["hello"])
    prompt = tokenizer.decode(ChatTemplate(tokenizer, enable_thinking=False, system="Be brief.").prompt(asked))
    assert prompt.endswith("<think>\n\n</think>\n\n")
    assert prompt.startswith("<|im_start|>system\nBe brief.")
    own = [{"role": "system", "content": "Mine."}, *asked]
    assert "Be brief." not in tokenizer.decode(ChatTemplate(tokenizer, system="Be brief.").prompt(own))


def test_what_precedes_and_ends_a_users_turn() -> None:
    tokenizer = tiny_tokenizer()
    around = ChatTemplate(tokenizer).user_turn()
    assert tokenizer.decode(list(around.before)) == "<|im_start|>user\n"
    assert tokenizer.decode(list(around.after)) == "<|im_end|>\n"
    mistral = template_of(MISTRAL)
    assert mistral.tokenizer.decode(list(mistral.user_turn().after)) == "[/INST]"


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{% for m in messages %}", "chat template fails"),
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate.*target.chat_template"),
    ],
)
def test_a_broken_template_is_one_sentence(source: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        ChatTemplate(merging_tokenizer(source))


def test_a_conversation_without_answer_and_an_empty_prompt_are_refused() -> None:
    with pytest.raises(UserError, match="without an answer"):
        one_row(template_of(CHATML), conversation(["hello"]))
    with pytest.raises(UserError, match="no token at all"):
        ChatTemplate(merging_tokenizer(None)).prompt(conversation([""]))
