"""Text for terminals: nothing that is printed moves the cursor, and no value drowns its sentence."""

import os
import pty
import sys
from pathlib import Path

import pytest
from draftsmith.recipes.__main__ import complain, main, one_line
from draftsmith.recipes.commands import answer_commands
from draftsmith.recipes.terminal import one_sentence, printable, say

ESCAPE = "\x1b[2J\x1b]0;title\x07"


@pytest.mark.parametrize(("text", "shown"), [
    ("plain ↵ text ×", "plain ↵ text ×"),
    (ESCAPE, r"\x1b[2J\x1b]0;title\x07"),
    ("a\u202eb\u200bc\ud800\U000e0001", r"a\u202eb\u200bc\ud800\U000e0001"),
    ("a\nb\tc\rd", "a\nb\tc\\x0dd"),
])
def test_control_characters_are_written_as_their_codes(text: str, shown: str) -> None:
    assert printable(text, keep="\n\t") == shown


def test_a_sentence_is_one_line_and_shows_the_ends_of_a_long_word() -> None:
    shown = one_sentence(f"got\n{'9' * 5000}, {ESCAPE}")
    assert shown == f"got {'9' * 100}...(5,001 characters)...{'9' * 49}, " + r"\x1b[2J\x1b]0;title\x07"
    path = "/" + "x" * 198
    assert one_sentence(path) == path


def test_errors_and_warnings_and_progress_lines_show_escapes(capsys: pytest.CaptureFixture[str]) -> None:
    complain(f"a value {ESCAPE}")
    say(f"a line {ESCAPE}\n", file=sys.stderr)
    assert "\x1b" not in (shown := capsys.readouterr().err + one_line(f"a warning {ESCAPE}"))
    assert shown.count(r"\x1b[2J\x1b]0;title\x07") == 3


def test_the_name_of_a_target_is_shown_before_it_is_loaded(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["distill", "--config", "tiny", "--out", str(tmp_path / "out"), "--target.name", ESCAPE]) == 2
    shown = capsys.readouterr()
    assert "\x1b" not in shown.err + shown.out


def test_an_answer_on_a_terminal_shows_its_escapes(tiny_run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answer_commands, "readable", lambda _target, passes: [ESCAPE for _ in passes])
    ours, theirs = pty.openpty()
    with os.fdopen(theirs, "w") as terminal:
        monkeypatch.setattr(sys, "stdout", terminal)
        assert main(["generate", "--artifact", str(tiny_run / "artifact"), "--prompt", "hi", "--max_new_tokens",
                     "4"]) == 0
        monkeypatch.undo()
    shown = os.read(ours, 10_000).decode()
    os.close(ours)
    assert "␛[2J" in shown
    assert "\x1b" not in shown
