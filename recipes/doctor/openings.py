"""The tokens around an answer by a chat template, and the place at which the mask of a row lets an answer start.

The mask says where an answer starts, and so does the template: its generation prompt stands right before every answer.
"""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from ...data import ChatTemplate
from ...modules import UserError

PROBE = "\ue000"
"""A private character, which stands in no template."""
MOST_SHIFT = 8
"""Largest shift of a mask that is recognised, in tokens; further off it is another template."""
START_KINDS = ("shifted", "other turn", "other template")
"""Wrong starts of an answer by the template."""


@dataclass(frozen=True)
class Placed:
    """The start of an answer, as the template has it."""

    start: str
    """One of START_KINDS; empty for a right one."""
    shift: int = 0
    """Tokens by which the mask is late."""
    opening: tuple[int, ...] = ()
    """Generation prompt that the answer follows; those of thinking and not thinking may differ."""


class Openings:
    """Tokens that a chat template writes before answers and before a user's message.

    Args:
        template: as it is served. Without a source it opens nothing.
    """

    def __init__(self, template: ChatTemplate) -> None:
        self.template = template
        self.by_mode: dict[bool | None, tuple[int, ...]] = {}
        """Tokens before an answer, by mode of thinking."""
        self.before, self.user = tuple[int, ...](), tuple[int, ...]()
        """Tokens before the first user's message, and those of them from the last special one on."""
        if template.source is None:
            return
        asked = [{"role": "user", "content": PROBE}]
        for mode in dict.fromkeys((*template.modes, None, True, False)):
            # A mode that the template refuses has no opening.
            with suppress(UserError):
                bare, text = (template.rendered(asked, mode, prompt) for prompt in (False, True))
                # Some templates write no header: the end of the user's message is what an answer follows.
                before = bare if text.startswith(bare) and text != bare else text[: text.index(PROBE) + 1]
                self.by_mode[mode] = tuple(template.encode_after(before, text[len(before) :]))
        self.before = template.user_turn().before
        special = {*template.tokenizer.all_special_ids}
        places = [place for place, token in enumerate(self.before) if token in special]
        self.user = self.before[max(places, default=0) :]

    @property
    def served(self) -> set[tuple[int, ...]]:
        """Openings of the modes that are served."""
        return {self.by_mode[mode] for mode in self.template.modes if mode in self.by_mode}

    def place(self, tokens: Sequence[int], start: int) -> Placed:
        """The start of an answer that the mask puts at `start`."""
        # The longest first: not thinking may be an opening of thinking and an empty thought.
        known = sorted({one for one in self.by_mode.values() if one}, key=len, reverse=True)
        for distance in range(MOST_SHIFT + 1):
            for shift in (distance, -distance):
                for opening in known:
                    if _ends_at(tokens, start - shift, opening):
                        return Placed("shifted" if shift else "", shift, opening)
            if distance == 0 and self.user and _ends_at(tokens, start, self.user):
                return Placed("other turn")
        return Placed("other template")


def _ends_at(tokens: Sequence[int], end: int, part: tuple[int, ...]) -> bool:
    return len(part) <= end <= len(tokens) and tuple(tokens[end - len(part) : end]) == part
