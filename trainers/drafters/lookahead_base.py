"""Shared training of drafters with virtual nodes: gradients pass through the frozen target.

The labels of a virtual node are what the target would write after its anchor. Where the text is the target's own greedy
answer it says so itself; other text has to be replaced by a roll-out (arXiv:2405.18628, section 3.2).

Shapes: B rows, L positions, G anchors of a row, K steps, T tokens of a roll-out, D hidden size.
"""

from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from ...modules.drafters.parts.lookahead_drafter import LookaheadConfig, LookaheadDrafter
from ...modules.features import Features
from ...modules.interfaces.drafter import Drafts
from ...modules.target.read_text import ReadText
from ..base import DraftModule
from ..losses.objectives import ObjectiveName
from ..steps.train_config import TrainConfig


@dataclass(frozen=True, kw_only=True)
class LookaheadTrainConfig(TrainConfig):
    """Settings shared by prompt tokens and Hidden Transfer."""

    objective: ObjectiveName = "soft"
    """As for all families; the papers have `soft`, the target as teacher."""
    roll_out: bool = False
    """Whether labels are the target's greedy continuation of each insertion point instead of the text: for training
    data that the target did not write greedily. Takes one more pass of the target over the inserted nodes for each
    token guessed."""
    drafter: LookaheadConfig = field(default_factory=LookaheadConfig)
    """The drafter."""


class LookaheadModule(DraftModule):
    """A drafter in training whose guesses the target makes at virtual nodes."""

    config: LookaheadTrainConfig
    drafter: LookaheadDrafter
    needs_whole_target: ClassVar[bool] = True

    @property
    def learns_text(self) -> bool:
        """True if the training data's tokens are labels and no roll-out replaces them."""
        return super().learns_text and not self.config.roll_out

    def training_drafts(self, features: Features) -> tuple[Drafts, Features]:
        """(drafts, the batch that holds their labels): with a roll-out one row for each insertion point."""
        if not (self.config.roll_out and self.drafter.training):
            return super().training_drafts(features)
        text = ReadText(self.target, features)
        anchors_BG, chosen_BG = self.drafter.insertions(text.features)
        rolled = rolled_out(text, anchors_BG, chosen_BG, self.drafter.reach + 1)
        states_XKD = self.drafter.steps_after(text, anchors_BG).flatten(0, 1)
        here_XLK = torch.zeros(*rolled.tokens_BL.shape, self.drafter.reach, dtype=torch.bool, device=anchors_BG.device)
        here_XLK[:, 0] = True
        hidden_XLKD = torch.cat([states_XKD[:, None], states_XKD.new_zeros(
            len(states_XKD), rolled.tokens_BL.shape[1] - 1, *states_XKD.shape[1:])], dim=1)
        return Drafts(hidden_BLKD=hidden_XLKD, offsets=self.drafter.offsets, valid_BLK=here_XLK,
                      estimates=self.drafter.estimates), rolled


@torch.no_grad()
def rolled_out(text: ReadText, anchors_BG: Tensor, chosen_BG: Tensor, count: int) -> Features:
    """The token at each anchor and the target's greedy continuation, one row of T + 1 tokens for each anchor, encoded
    but for its last token, whose states predict no label.

    Args:
        text: what the target has read.
        anchors_BG: positions of its rows.
        chosen_BG: False where there is no insertion point; its row has no labels.
        count: tokens T of the continuation.
    """
    target, groups = text.target, anchors_BG.shape[1]
    last_BGD = text.final_BLD.gather(1, anchors_BG[..., None].expand(-1, -1, text.final_BLD.shape[-1]))
    states, tokens = [last_BGD], [target.logits(last_BGD).argmax(-1)]
    for length in range(1, count):
        order_M = torch.arange(groups * length, device=anchors_BG.device)
        group_M, place_M = order_M // length, order_M % length
        sees_MM = (group_M[:, None] == group_M) & (place_M <= place_M[:, None])
        embedded_BMD = target.embed_guesses(torch.stack(tokens, dim=2).flatten(1))
        final_BMD = text.read(embedded_BMD, anchors_BG.repeat_interleave(length, dim=1),
                              (place_M + 1).expand(len(anchors_BG), -1), sees_MM)
        last_BGD = final_BMD[:, length - 1 :: length]
        states.append(last_BGD)
        tokens.append(target.logits(last_BGD).argmax(-1))
    states.append(torch.zeros_like(last_BGD))
    first_BG = text.features.tokens_BL.gather(1, anchors_BG)
    tokens_XL = torch.stack([first_BG, *tokens], dim=2).flatten(0, 1)
    written_L = torch.arange(count + 1, device=anchors_BG.device) > 0
    order_L = torch.arange(count + 1, device=anchors_BG.device)
    starts_X = text.features.positions_BL.gather(1, anchors_BG).flatten()
    return Features(
        tokens_BL=tokens_XL,
        supervised_BL=written_L & chosen_BG.flatten()[:, None],
        segments_BL=torch.zeros_like(tokens_XL),
        positions_BL=starts_X[:, None] + order_L,
        final_BLD=torch.stack(states, dim=2).flatten(0, 1),
    )
