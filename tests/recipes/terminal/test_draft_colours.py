"""`generate --show-drafts`: marks say who wrote each token, and without them the answer is the plain one."""

import re
from pathlib import Path

import pytest
from draftsmith.modules import Chain, DecodeSettings, Request, Target, decode, stream
from draftsmith.modules.decoding.recorders import PassRecorder
from draftsmith.modules.decoding.token_text import visible
from draftsmith.recipes.__main__ import main
from draftsmith.recipes.reading.parsing import Command
from draftsmith.recipes.terminal.draft_colours import BRACKETS, COLOURS, MarkedAnswer, Marks, marks_for
from support.drafters import ScriptedDrafter

TINY = Path(__file__).resolve().parents[3] / "recipes" / "tiny.yaml"
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
    from draftsmith.recipes.commands.answer_commands import COMMANDS

    command: Command[object] = COMMANDS["generate"]
    for more, expected in ((["--show-drafts"], True), (["--show-drafts", "--seed", "3"], True), ([], False),
                           (["--show-drafts", "false"], False), (["--show_drafts=true"], True)):
        assert command.parse([*words[1:], *more]).settings["show_drafts"] is expected
