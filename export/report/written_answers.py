"""The part of the page with sample answers: each token coloured by its author, rejected guesses on hover."""

from collections.abc import Sequence
from html import escape

from ...modules.decoding.token_text import visible
from ..evaluation.results import SampleAnswer, SampleToken

LONGEST_PROMPT = 400
"""Characters of a question that are shown."""
MOST_GUESSES = 4
"""Rejected guesses that are listed for one token."""
NOTE = (
    "The same text as the target alone would write; the colours only show how it came about. Each pass of the target "
    "checks the draft's guesses, keeps those that are its own choice, and adds one token itself, so the more green, "
    "the fewer passes."
)
STYLE = """  .answer { background: var(--card); border: 1px solid var(--line); border-radius: 10px; padding: 14px 18px;
            margin: 14px 0; }
  .answer h3 { font-size: 15px; margin: 0 0 4px; }
  .answer .question { color: var(--muted); font-size: 14px; margin: 0 0 10px; white-space: pre-wrap; }
  .answer .text { white-space: pre-wrap; overflow-wrap: anywhere; margin: 0; max-width: none; line-height: 1.8; }
  .guess, .guess-key { background: var(--guess); border-radius: 3px; padding: 1px 0;
                       box-shadow: inset 0 -2px 0 var(--draft); }
  .guess + .guess { margin-left: 1px; }
  .missed { border-bottom: 2px dotted var(--warn); cursor: help; }
  .key { max-width: none; }
  .key span { padding: 1px 5px; margin-right: 3px; }
"""


def written_answers(samples: Sequence[SampleAnswer], method: str) -> str:
    """The section; empty without samples."""
    if not samples:
        return ""
    key = ('<p class="muted key"><span class="guess-key">guessed</span> by the draft and accepted &nbsp; '
           '<span>plain</span> written by the target itself &nbsp; <span class="missed">dotted</span> written by the '
           "target after it rejected a guess: hold the pointer over it to see the guess</p>")
    answers = []
    for sample in samples:
        shown = sample.prompt.strip()
        # A long document as the question would push the answer off the screen.
        prompt = shown if len(shown) <= LONGEST_PROMPT else shown[:LONGEST_PROMPT].rstrip() + " …"
        heading = (f"{sample.rank.capitalize()}: {sample.accepted_length:.2f} tokens per pass, {sample.guessed} of "
                   f"{len(sample.tokens)} tokens guessed")
        answers.append(f'<div class="answer"><h3>{escape(heading)}</h3><p class="question">{escape(sample.prompt_set)} '
                       f'prompt: {escape(prompt)}</p><p class="text">{"".join(map(_token, sample.tokens))}</p></div>')
    return (f"<h2>Who wrote the words</h2><p>{escape(NOTE)} Answers of {escape(method)} with the most, the middle and "
            f"the fewest tokens per pass:</p>{key}{''.join(answers)}")


def _token(token: SampleToken) -> str:
    """One token as it stands in the text; a control character is replaced by its sign."""
    # Special tokens, and bytes inside a character, have no text of their own.
    if not token.text:
        return ""
    text = escape(visible(token.text))
    if token.guessed:
        return f'<span class="guess" title="guessed by the draft and accepted">{text}</span>'
    if not token.rejected:
        return text
    guesses = ", ".join(f"“{visible(guess, breaks=False)}”" for guess in token.rejected[:MOST_GUESSES])
    more = ", …" if len(token.rejected) > MOST_GUESSES else ""
    title = f"written by the target; the draft guessed {guesses}{more}"
    return f'<span class="missed" title="{escape(title)}">{text}</span>'
