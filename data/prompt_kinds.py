"""Kinds of prompts that a target is asked to write.

A target that writes prompts after nothing but its chat template writes those that are commonest in its training data. A
system prompt before the user's turn steers it (Magpie, arXiv:2406.08464, section 2.2): the system prompts here say what
the assistant is for, and the message that a user sends to such an assistant is written next. They do not stay in the
training data: the prompt is answered as if it had come by itself.
"""

import hashlib
import random
from collections.abc import Sequence

from ..modules import UserError

UNSTEERED = "any"
"""The kind that no system prompt asks for."""
ALL_KINDS = "all"
"""Stands for every kind, the unsteered one included."""
_ASSISTANT = "You are an AI assistant for {}. The user's message {}"
_PURPOSES = {
    "coding": ("programmers", "asks for a short program or for an explanation of a piece of code, and names the "
               "language."),
    "dialogue": ("everyday conversation", "talks about the user's day, plans or feelings and asks for advice."),
    "extraction": ("extracting information", "contains a short text and asks for certain facts in it as a list or as "
                   "JSON."),
    "humanities": ("students of history, philosophy, politics and art", "asks for an explanation, a comparison or a "
                   "discussion of a topic."),
    "math": ("mathematics", "is an exercise with all its numbers: arithmetic, algebra, geometry or probability."),
    "reasoning": ("logic", "is a puzzle or a question about a situation whose answer takes several steps of thought."),
    "retrieval": ("questions about documents", "contains a paragraph and asks a question that the paragraph answers."),
    "rewriting": ("editing", "contains a sentence or a short paragraph and asks to correct it, or to rewrite it in "
                  "another style."),
    "roleplay": ("role play", "asks the assistant to speak as a certain character in a certain situation."),
    "stem": ("science and engineering", "asks how something in physics, chemistry, biology or technology works."),
    "summary": ("summarising", "contains a short text and asks for a summary in one or two sentences."),
    "translation": ("translation", "contains a sentence and asks to translate it from one language into another."),
    "writing": ("writers", "asks for an email, a story, a poem, a description or another short text."),
}
SYSTEM_PROMPTS = {kind: _ASSISTANT.format(*purpose) for kind, purpose in _PURPOSES.items()}
"""The system prompt that asks for each kind."""


def named_kinds(names: Sequence[str]) -> tuple[str, ...]:
    """The kinds of a list of names.

    Raises:
        UserError: if it is empty, a name is unknown or occurs twice, or `all` stands next to others.
    """
    known = (*SYSTEM_PROMPTS, UNSTEERED)
    if list(names) == [ALL_KINDS]:
        return known
    if not names or len(set(names)) < len(names) or not set(names) <= set(known):
        raise UserError(f"prompts.own_kinds must be one or more different names among {', '.join(known)}, or "
                        f"{ALL_KINDS} alone, got {list(names)}; null writes prompts without a system prompt")
    return tuple(names)


def drawn_kind(kinds: Sequence[str], seed: int, number: int) -> str:
    """The kind of prompt `number`, each with equal chance; a pure function of the seed and the number."""
    return _stream("kind", seed, number).choice(kinds)


def drawn_turns(most: int, seed: int, number: int) -> int:
    """The user turns of prompt `number`, from 1 to `most` with equal chance; a pure function as well."""
    return _stream("turns", seed, number).randint(1, most)


def _stream(what: str, seed: int, number: int) -> random.Random:
    return random.Random(int.from_bytes(hashlib.sha256(f"{what} {seed} {number}".encode()).digest()[:8], "little"))
