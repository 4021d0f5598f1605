"""Drafting by copying from the text so far (prompt lookup, CopySpec arXiv:2503.08643).

Shapes: B rows of a frontier, R rows that change, S rows of a state, L places of the text buffer, N new positions,
G tokens of the longest suffix compared, H tokens copied."""

from dataclasses import dataclass

import torch
from torch import Tensor

from ..config_checks import CheckedSettings, Whole
from ..errors import UserError
from ..interfaces.proposer import Frontier, Observation, Proposer, Scores
from ..parts.causal_drafter import Text


@dataclass(frozen=True, kw_only=True)
class PromptLookupConfig(CheckedSettings):
    """Lengths of the suffix that is searched and of the copy."""

    shortest: Whole = 1  # Smallest number of tokens of a suffix that must have occurred before
    longest: Whole = 3  # Largest number of tokens of a suffix; the longest match is used, then the latest
    copied: Whole = 7  # Number of tokens copied from after the occurrence

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.shortest > self.longest:
            raise UserError(f"shortest must be between 1 and longest ({self.longest}), got {self.shortest}")


class PromptLookup(Proposer[Text]):
    """Drafter that copies the continuation of the latest of the longest earlier matches of the text's last tokens.

    With a short suffix this is prompt lookup decoding, with a long one CopySpec; both originals take the first
    occurrence, and prompt lookup only where a whole continuation follows. Here a copy that reaches the end of the text
    continues with the tokens it has copied, as LZ77 does, so that a short cycle is continued to any length. Tokens are
    compared directly, not by a hash."""

    family = "lookup"

    def __init__(self, config: PromptLookupConfig, device: torch.device) -> None:
        self.config, self.device, self.reach = config, device, config.copied

    def start(self, rows: int, capacity: int) -> Text:
        """Empty texts."""
        return Text(rows, capacity, self.config.longest, self.device)

    def observe(self, state: Text, rows_R: Tensor, observation: Observation) -> None:
        """Append the new tokens."""
        state.append(rows_R, observation)

    def expand(self, state: Text, frontier: Frontier) -> Scores:
        """Scores of the copied tokens, one for each depth, each the only child; no guess in rows without a match.
        Raises ValueError if the frontier is not the root alone."""
        if frontier.nodes_BF.shape[1] != 1:
            raise ValueError("prompt lookup drafts from the root only: a frontier must have 1 node, "
                             f"got {frontier.nodes_BF.shape[1]}")
        tokens_BL, roots_B = state.tokens_SL[: len(frontier.nodes_BF)], state.roots_S[: len(frontier.nodes_BF)]
        ends_B, found_B = self._occurrence(state, tokens_BL, roots_B[:, None])
        distance_B1 = (roots_B - ends_B)[:, None].clamp(min=1)
        copied_H = torch.arange(self.config.copied, device=self.device)
        tokens_BH = tokens_BL.gather(1, ends_B[:, None] + 1 + copied_H % distance_B1)
        scores_BH = torch.where(found_B[:, None], 0.0, -torch.inf).expand_as(tokens_BH)
        candidates_BH = tokens_BH.clamp(min=0)
        return Scores(log_probs_BFHQ=scores_BH[:, None, :, None], candidates_BFHQ=candidates_BH[:, None, :, None])

    def _occurrence(self, text: Text, tokens_BL: Tensor, roots_B1: Tensor) -> tuple[Tensor, Tensor]:
        """(place of the last token of the occurrence to copy from, True where there is one), each [B]."""
        length = self.config.longest
        tail_B1G = text.endings(torch.arange(len(roots_B1), device=self.device), roots_B1, length)
        # Places before the text must not equal each other.
        tail_B1G = torch.where(tail_B1G < 0, -2, tail_B1G)
        equal_BLG = tokens_BL.unfold(1, length, 1)[:, 1:] == tail_B1G
        matched_BL = equal_BLG.flip(-1).long().cumprod(-1).sum(-1)
        places_L = torch.arange(length, tokens_BL.shape[1], device=self.device)
        allowed_BL = (matched_BL >= self.config.shortest) & (places_L < roots_B1)
        # The longest match first, among equals the latest place.
        ranks_BL = torch.where(allowed_BL, matched_BL * tokens_BL.shape[1] + places_L, -1)
        best = ranks_BL.max(-1)
        return torch.where(best.values >= 0, places_L[best.indices], length), best.values >= 0
