"""`draftsmith chat` and `generate`: one conversation with the model loaded once, in a terminal and in a pipe; and marks
that say who wrote each token, without which the answer is the plain one."""

import io
import json
import os
import re
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from draftsmith.data import ChatTemplate
from draftsmith.modules import Chain, DecodeSettings, Request, Target, decode, stream
from draftsmith.modules.decoding.recorders import PassRecorder
from draftsmith.modules.decoding.requests import visible
from draftsmith.recipes.__main__ import main
from draftsmith.recipes.commands import answer_commands
from draftsmith.recipes.commands.answer_commands import BRACKETS, COLOURS, MarkedAnswer, Marks, marks_for
from draftsmith.recipes.reading.command_line import Command
from support.drafters import ScriptedDrafter

LENGTH = 12


class Terminal(io.StringIO):
    """A terminal: what is typed into it, or what it shows."""

    def isatty(self) -> bool:
        return True


class Conversation:
    """Calls of `draftsmith chat` with given input."""

    def __init__(self, artifact: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
        self.artifact, self.monkeypatch, self.capfd = artifact, monkeypatch, capfd
        for name in ("NO_COLOR", "FORCE_COLOR", "TERM"):
            monkeypatch.delenv(name, raising=False)

    def __call__(self, *words: object) -> int:
        return main(["chat", "--artifact", str(self.artifact), "--max-new-tokens", str(LENGTH), *map(str, words)])

    def piped(self, text: str | bytes, *words: object, code: int = 0) -> tuple[str, str]:
        """(what was answered, what was reported) with the text in a pipe."""
        content = text.encode() if isinstance(text, str) else text
        self.monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content), encoding="utf-8"))
        assert self(*words) == code
        return self.capfd.readouterr()

    def typed(self, text: str, *words: object, code: int = 0) -> tuple[str, str]:
        """(what a terminal shows, what was reported) once the text was typed into it."""
        self.monkeypatch.setattr(sys, "stdin", Terminal(text))
        self.monkeypatch.setattr(sys, "stdout", shown := Terminal())
        assert self(*words) == code
        return shown.getvalue(), self.capfd.readouterr().err


@pytest.fixture
def chat(tiny_run: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Conversation:
    return Conversation(tiny_run / "artifact", monkeypatch, capfd)


def plain(target: Target, messages: Sequence[str], *, length: int = LENGTH) -> list[str]:
    """The target's own answers to messages of one conversation."""
    template, said, answers = ChatTemplate(target.tokenizer), list[dict[str, str]](), list[str]()
    for message in messages:
        said.append({"role": "user", "content": message})
        request = Request(tuple(template.prompt(said)), 0, length)
        tokens = decode(target, [request], DecodeSettings()).generations[0].tokens
        answers.append(target.tokenizer.decode(tokens, skip_special_tokens=True))
        said.append({"role": "assistant", "content": answers[-1]})
    return answers


def test_each_line_of_a_pipe_is_a_turn_of_one_conversation(
    chat: Conversation, tiny_target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded, load = [], answer_commands.artifact_target
    monkeypatch.setattr(answer_commands, "artifact_target", lambda *given: loaded.append(1) or load(*given))
    monkeypatch.setenv("FORCE_COLOR", "1")
    answered, reported = chat.piped("hello\n\nand now?\nhello")
    expected = plain(tiny_target, ["hello", "and now?", "hello"])
    assert answered == "".join(f"{answer}\n\n" for answer in expected)
    assert expected[0] != expected[2], "choose another message: the third answer shows that the others were read"
    assert len(loaded) == 1
    found = re.findall(r"^(\d+) tokens: the first by the prompt's pass, (\d+) by (\d+) more, ([\d.]+) tokens per pass",
                       reported, flags=re.MULTILINE)
    assert [int(one[0]) for one in found] == [LENGTH] * 3
    assert reported.count(f"the answer was cut off: --max-new-tokens is {LENGTH}\n") == 3
    assert all(f"{int(drafted) / int(passes):.2f}" == shown for _, drafted, passes, shown in found)


def test_another_conversation_forgets_the_first(chat: Conversation, tiny_target: Target) -> None:
    answered, _ = chat.piped("hello\nand now?\n/new\nhello\n")
    expected = plain(tiny_target, ["hello", "and now?"])
    assert answered == "".join(f"{answer}\n\n" for answer in (*expected, expected[0]))


@pytest.mark.parametrize("end", ["\n", ""])
def test_a_terminal_marks_guesses_until_an_empty_line_or_the_end(
    chat: Conversation, tiny_target: Target, end: str
) -> None:
    shown, _ = chat.typed(f"hello\nand now?\n{end}", "--max-new-tokens", 60)
    legend = COLOURS.legend.partition(" · ")[0]
    assert legend in shown
    kept = shown.partition(legend)[2]
    assert kept.count("\x1b[32m") > 0
    expected = plain(tiny_target, ["hello", "and now?"], length=60)
    assert re.sub("\x1b\\[(32|0)m", "", kept) == "\n> " + "".join(
        f"{answer_commands.visible(answer)}\n\n> " for answer in expected)
    assert "\x1b" not in chat.typed("hello\n", "--show_drafts", "false")[0]


@pytest.fixture(autouse=True)
def heard() -> Iterator[None]:
    """A shell that runs the tests in the background makes them ignore Ctrl-C, and what is ignored stays so."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def interrupted_at(monkeypatch: pytest.MonkeyPatch, passes: int, number: int = signal.SIGINT) -> None:
    """Send this process a signal before a pass of the first answer."""
    original, calls = answer_commands.stream, []

    def signalled(*given: Any, **more: Any) -> Iterator[list[int]]:
        calls.append(1)
        for place, tokens in enumerate(original(*given, **more)):
            if place == passes and len(calls) == 1:
                os.kill(os.getpid(), number)
            yield tokens

    monkeypatch.setattr(answer_commands, "stream", signalled)


def test_an_interrupted_answer_stays_in_the_conversation(
    chat: Conversation, tiny_target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupted_at(monkeypatch, 4)
    words = ("--policy", "none", "--show_drafts", "false")
    shown, reported = chat.typed("hello\nand now?\n", *words)
    start, = plain(tiny_target, ["hello"], length=4)
    template = ChatTemplate(tiny_target.tokenizer)
    said = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": start},
            {"role": "user", "content": "and now?"}]
    following = decode(tiny_target, [Request(tuple(template.prompt(said)), 0, LENGTH)], DecodeSettings()).generations[0]
    assert "stopped; the conversation goes on with what was written" in reported
    answers = [answer_commands.visible(text) for text in (
        start, tiny_target.tokenizer.decode(following.tokens, skip_special_tokens=True))]
    assert shown.partition("> ")[2] == f"{answers[0]}\n> {answers[1]}\n\n> "


def test_other_signals_and_those_of_a_pipe_end_it(chat: Conversation, monkeypatch: pytest.MonkeyPatch) -> None:
    interrupted_at(monkeypatch, 2, signal.SIGTERM)
    assert "stopped by a request to end" in chat.typed("hello\nand now?\n", code=143)[1]
    monkeypatch.undo()
    interrupted_at(monkeypatch, 2)
    assert "stopped by Ctrl-C" in chat.piped("hello\nand now?\n", code=130)[1]


def test_the_end_of_the_context_is_explained(chat: Conversation, tiny_target: Target) -> None:
    context, template = tiny_target.context_length, ChatTemplate(tiny_target.tokenizer)
    long, before = "a" * context, len(template.prompt([{"role": "user", "content": ""}]))
    remedy = rf"the target's context holds {context} tokens, and this conversation has \d+ before an answer; write /new"
    # What is left of it is used: here seven tokens.
    nearly = "a" * (context - before - 7)
    shown, reported = chat.typed(f"{nearly}\nhello\n/new\n{long}\nhello\n", "--show_drafts", "false")
    lines = [line for line in reported.splitlines() if "tokens" in line]
    assert lines[0].startswith("7 tokens:")
    assert re.match(f"the answer was cut off: {remedy}", lines[1])
    assert re.match(remedy, lines[2])
    assert re.match(remedy, lines[3])
    assert lines[4].startswith(f"{LENGTH} tokens:")
    assert lines[5] == f"the answer was cut off: --max-new-tokens is {LENGTH}"
    assert shown.endswith(f"> {answer_commands.visible(plain(tiny_target, ['hello'])[0])}\n\n> ")
    assert re.search(f"draftsmith: error: {remedy}", chat.piped(f"hello\n{long}\n", code=2)[1])


@pytest.mark.parametrize(("text", "says"), [
    (b"hello\ncaf\xe9\n", "the message holds text that is not UTF-8"),
    (b"a\0b\n", "the message holds text that is not UTF-8, or a null character"),
    (b"a" * (answer_commands.MOST_CHARACTERS + 1), "a line of the input has more than 1,048,576 characters; give one")])
def test_a_message_that_cannot_be_read_is_refused(chat: Conversation, text: bytes, says: str) -> None:
    reported = chat.piped(text, code=2)[1]
    assert says in reported
    assert "Traceback" not in reported


def test_a_conversation_of_nothing_ends(chat: Conversation, monkeypatch: pytest.MonkeyPatch) -> None:
    assert chat.piped("") == ("", "")
    monkeypatch.setattr(sys, "stdin", None)
    assert chat() == 0


SIGNS = Marks(guessed=("\ue000", "\ue001"), rejected=("\ue002", "\ue003"), legend="")
"""Marks that no answer contains, so that they differ from its text."""


def marked(target: Target, mode: str, temperature: float = 0.0) -> tuple[str, str, MarkedAnswer, list[int]]:
    """(the marked text, the plain text, the counts, tokens of each pass) of one answer."""
    request = Request((5, 21, 7, 30), 0, 21, temperature)
    settings = DecodeSettings(ignore_eos=True)
    plain = decode(target, [request], settings).generations[0].tokens
    texts = [[*request.tokens, *plain]]
    recorder = PassRecorder()
    answer = MarkedAnswer(target.tokenizer, SIGNS, recorder)
    passes = stream(target, request, settings, drafter=ScriptedDrafter(target.vocab_size, texts, mode),
                    policy=Chain(3), observer=recorder)
    text = "".join(answer.text(passes))
    generation, = decode(target, [request], settings, drafter=ScriptedDrafter(target.vocab_size, texts, mode),
                         policy=Chain(3)).generations
    return text, target.tokenizer.decode(plain, skip_special_tokens=True), answer, generation.emitted


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("mode", ["oracle", "mixed", "wrong"])
def test_marks_taken_away_leave_the_answer(tiny_target: Target, mode: str, temperature: float) -> None:
    text, plain, answer, emitted = marked(tiny_target, mode, temperature)
    kept = re.sub("\ue002.*?\ue003", "", text)
    assert re.sub("[\ue000\ue001]", "", kept) == visible(plain)
    assert answer.tokens == 21
    # A guess that is a special token has no text, so marks may be fewer than guesses, never more.
    assert text.count("\ue000") <= answer.guessed
    assert answer.guessed >= sum(emitted) - len(emitted)


def test_every_accepted_guess_is_marked(tiny_target: Target) -> None:
    text, plain, answer, _ = marked(tiny_target, "oracle")
    assert len(plain) == 21, "choose another prompt: the test wants one character a token"
    assert re.sub("\ue000.\ue001", "g", text, flags=re.S) == plain[0] + "".join(
        "ggg" + plain[place] for place in range(4, 21, 4))
    assert answer.summary().endswith("15 of 21 tokens were guessed")


def test_rejected_guesses_stand_before_the_targets_tokens(tiny_target: Target) -> None:
    text, plain, answer, _ = marked(tiny_target, "wrong")
    assert answer.guessed == 0
    assert "\ue000" not in text
    assert len(re.findall("\ue002[^\ue003]+\ue003", text)) == 20
    assert text[0] == plain[0]


@pytest.mark.parametrize(("terminal", "environment", "expected"), [
    (True, {}, COLOURS), (False, {}, BRACKETS), (True, {"NO_COLOR": "1"}, BRACKETS), (True, {"TERM": "dumb"}, BRACKETS),
    (True, {"NO_COLOR": ""}, COLOURS), (False, {"FORCE_COLOR": "1"}, COLOURS),
    (True, {"FORCE_COLOR": "1", "NO_COLOR": "1"}, BRACKETS),
])
def test_colours_are_for_terminals_that_want_them(terminal: bool, environment: dict[str, str],
                                                  expected: Marks) -> None:
    assert marks_for(terminal, environment) is expected


def test_control_characters_are_visible() -> None:
    assert visible("a\x1b[31m\tb\r\n\x7f\x9b\u202ec\x00") == "a␛[31m\tb␍\n␡\\x9b\\u202ec␀"
    assert visible("a\nb", breaks=False) == "a↵b"
    assert visible("Grüße 世界 🙂") == "Grüße 世界 🙂"


@pytest.fixture
def words(tiny_run: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    for name in ("NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    return ["generate", "--artifact", str(tiny_run / "artifact"), "--prompt", "hi", "--max-new-tokens", "40"]


def test_the_command_marks_the_same_answer(words: list[str], capfd: pytest.CaptureFixture[str],
                                           monkeypatch: pytest.MonkeyPatch) -> None:
    assert main(words) == 0
    plain = capfd.readouterr().out.removesuffix("\n")
    assert main([*words, "--show-drafts"]) == 0
    assert "\x1b" not in (piped := capfd.readouterr().out)
    assert BRACKETS.legend in piped
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert main([*words, "--show-drafts"]) == 0
    shown = capfd.readouterr()
    answer, _, end = shown.out.partition(f"\n\n{COLOURS.legend}\n")
    kept = re.sub("\x1b\\[2;9m.*?\x1b\\[0m", "", answer)
    assert kept != answer
    assert re.sub("\x1b\\[(32|0)m", "", kept) == visible(plain)
    found = re.search(r"(\d+) tokens: the first by the prompt's pass, (\d+) by (\d+) more, ([\d.]+) tokens per pass",
                      shown.err)
    assert found
    tokens, drafted, passes = map(int, found.groups()[:3])
    assert (drafted, found[4]) == (tokens - 1, f"{drafted / passes:.2f}")
    assert re.fullmatch(rf"\d+ of {tokens} tokens were guessed\n", end)


@pytest.mark.parametrize("policy", ["chain-2", "eagle2-8", "dyspec-8", "sampled", "stopping"])
def test_every_policy_can_be_marked(words: list[str], policy: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert main([*words, "--temperature", "0.9", "--policy", policy, "--show-drafts"]) == 0
    assert "tokens were guessed" in capfd.readouterr().out


def test_a_switch_needs_no_value(words: list[str]) -> None:
    command: Command[object] = answer_commands.COMMANDS["generate"]
    for more, expected in ((["--show-drafts"], True), (["--show-drafts", "--seed", "3"], True), ([], False),
                           (["--show-drafts", "false"], False), (["--show_drafts=true"], True)):
        assert command.parse([*words[1:], *more]).settings["show_drafts"] is expected


def test_what_decides_an_answer_is_asked_for_by_name(words: list[str], tmp_path: Path,
                                                     capfd: pytest.CaptureFixture[str]) -> None:
    """Each setting shows in the answer; a lossy rule is named next to it."""
    pytest.importorskip("xgrammar")
    (tmp_path / "schema.json").write_text('{"enum": ["Paris", "London"]}')
    (tmp_path / "form.ebnf").write_text('root ::= "a" | "b" root')
    free = answered(words, capfd)
    for more, holds in (
            (["--json_schema", str(tmp_path / "schema.json")], lambda text: text in ('"Paris"', '"London"')),
            (["--regex", "(yes|no){2}"], lambda text: text in ("yesyes", "yesno", "noyes", "nono")),
            (["--grammar", str(tmp_path / "form.ebnf")], lambda text: set(text) <= {"a", "b"}),
            (["--no_repeat_ngram_size", "1"], lambda text: len(set(text)) == len(text)),
            (["--bad_words", json.dumps([free[0]])], lambda text: free[0] not in text),
            (["--sequence_bias", "{x: 90}"], lambda text: set(text) == {"x"}),
            (["--suppress_tokens", "[10,11]", "--min_new_tokens", "30"], lambda text: len(text) >= 30)):
        found = answered([*words, *more], capfd)
        assert holds(found), (more, found)
    command = [*words, "--temperature", "1", "--policy", "sampled-4"]
    assert main([*command, "--lossy", "kl-0.5"]) == 0
    assert "lossy kl-0.5: this is NOT the target's own answer" in capfd.readouterr().err


def answered(words: list[str], capfd: pytest.CaptureFixture[str]) -> str:
    assert main(words) == 0
    return capfd.readouterr().out.rstrip("\n")


@pytest.mark.parametrize(("more", "says"), [
    (["--json_schema", "nowhere.json"], "cannot read the json_schema nowhere.json: No such file .*; check the path"),
    (["--regex", "(a"], "regex cannot be compiled: .*parenthesis is not closed"),
    (["--regex", "a", "--grammar", "x"], "an answer follows one form, got regex and grammar; leave one out"),
    (["--lossy", "typical"], "temperature 0 with policy fastest is exact"),
    (["--lossy", "typical", "--temperature", "1", "--policy", "none"], "temperature 1 with policy none is exact"),
    (["--lossy", "best", "--temperature", "1"], "there is no lossy rule 'best'; choose typical or kl-0.5"),
    (["--lossy", "kl", "--temperature", "1", "--policy", "chain-2"], "this policy samples none; choose sampled"),
    (["--thinking_tokens", "9"], "thinking_tokens is 9, but the target does not think"),
    (["--thinking_tokens", "-1"], "thinking_tokens must be at least 0, got -1"),
    (["--suppress_tokens", str([*range(200)])], "the biases of tokens rule all of them out"),
    (["--bad_words", "['']"], "bad_words holds a text without a word; leave it out"),
    (["--sequence_bias", "{' ': 2}"], "sequence_bias holds a text without a word"),
    (["--json_schema", "deep.json"], "deep.json is no JSON that can be compiled: nested more than 100 levels deep"),
    (["--grammar", "/dev/zero"], "/dev/zero is no ordinary file and gives more than 67,108,864 bytes"),
    (["--sequence_bias", "{'': 1}", "--bad_words", "['']", "--suppress_tokens", "[-1]"], "suppress_tokens.* must be"),
])
def test_settings_that_make_no_sense_are_refused_in_a_sentence(
    words: list[str], more: list[str], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("xgrammar")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "deep.json").write_text('{"items": ' * 150 + "{}" + "}" * 150)
    assert main([*words, *more]) == 2
    found = capfd.readouterr()
    assert found.out == ""
    assert re.search(says, found.err), found.err
def test_texts_besides_the_prompt_change_no_word(words: list[str], tmp_path: Path,
                                                capfd: pytest.CaptureFixture[str]) -> None:
    def answered(*more: str) -> tuple[str, int]:
        assert main([*words, *more]) == 0
        shown = capfd.readouterr()
        found = re.search(r"by (\d+) more", shown.err)
        assert found
        return shown.out, int(found[1])

    plain, passes = answered("--policy", "none")
    (tmp_path / "former.txt").write_text(plain.removesuffix("\n"))
    for more in (["--reference", str(tmp_path / "former.txt")],
                 ["--reference", str(tmp_path / "former.txt"), "--policy", "none+reference-16"]):
        found, fewer = answered(*more)
        assert found == plain
        assert fewer < passes / 3
    # The target drafts for itself: by the same text every guess is right, by another one some are.
    found, fewer = answered("--draft-prompt", "hi", "--policy", "none+whole_target-3")
    assert (found, fewer) == (plain, -(-passes // 4))
    assert answered("--draft-prompt", "another text", "--policy", "none+whole_target-3")[0] == plain


@pytest.mark.parametrize(("content", "more", "says"), [
    (None, [], "cannot read the reference .*text: No such file or directory; check the path"),
    (b"\x89PNG\r\n\xff", [], "the reference .*text is no text in UTF-8 .*; save it as UTF-8"),
    (b" \n", [], "the reference .*text holds no text; write it, or leave --reference out"),
    (b"a\0b", [], "the reference .*text holds no text"),
    (b"abc", ["--policy", "chain-3+lookup"], r"policy chain-3\+lookup copies from none; ask for chain-3\+reference"),
])
def test_what_is_no_reference_is_refused_before_a_model_is_loaded(
        content: bytes | None, more: list[str], says: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    if content is not None:
        (tmp_path / "text").write_bytes(content)
    assert main(["generate", "--artifact", str(tmp_path / "none"), "--prompt", "hi", "--reference",
                 str(tmp_path / "text"), *more]) == 2
    assert re.search(says, capfd.readouterr().err)
