"""Copies from a reference, token by token: the drafts of `ReferenceCopy`."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass
class PlainReferenceCopy:
    """A row's reference and the state of its copies; places are those of the reference followed by the text."""

    reference: Sequence[int]
    longest: int
    copied: int
    first: int
    cursor: int = -1
    misses: int = 0
    length: int = 0
    end: int = 0

    def draft(self, text: Sequence[int]) -> list[int]:
        """The tokens drafted after a text."""
        self.length = self.length or self.first
        known, size = [*self.reference, *text], len(self.reference)
        found: list[tuple[int, bool, int, int]] = []
        for place in range(len(known) - 1):
            start, matched = 0 if place < size else size, 0
            while (matched < min(self.longest, len(text)) and place - matched >= start
                   and known[place - matched] == text[-1 - matched]):
                matched += 1
            expected = place == self.cursor + 1 < size and self.misses == 0
            if place != size - 1 and (matched > min(self.misses, self.longest - 1) or expected):
                ahead = self.cursor < place < size
                found.append((matched, ahead, -place if ahead else place, place))
        if not found:
            return []
        matched, _, _, self.end = max(found)
        if matched and self.end == self.cursor + 1 < size:
            self.cursor = self.end
        if self.end < size:
            return known[self.end + 1 : size][: self.length]
        for place in range(self.length):
            known.append(known[self.end + 1 + place])
        return known[-self.length :]

    def learn(self, drafted: Sequence[int], emitted: Sequence[int]) -> None:
        """Take in the tokens that the target emitted after a draft."""
        right = next((place for place, (one, own) in enumerate(zip(drafted, emitted, strict=False)) if one != own),
                     min(len(drafted), len(emitted)))
        if right and self.end < len(self.reference):
            self.cursor = self.end + right
        self.misses = 0 if right else self.misses + 1
        self.length = min(2 * self.length, self.copied) if right == len(drafted) else self.first
