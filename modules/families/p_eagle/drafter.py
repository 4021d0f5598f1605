"""P-EAGLE: EAGLE-3 whose layers guess all tokens of a draft in one pass (arXiv:2602.01469).

At the last position p of the text the layers read the root's token and the target's tapped states, as EAGLE-3 does.
After it stand masks: the d-th, at the position p + d, reads the embedding of a mask token and, in place of tapped
states, a learned one; its state predicts the token at p + 2 + d. It sees the text up to p and the masks before it.

Shapes: B rows, L positions, A of them with masks, M masks of all depths of a row, K tokens of a draft, N new positions,
R rows of a decoding state, D width of the layers, Q draft vocabulary."""

from dataclasses import dataclass, replace
from typing import Any, Self, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from ...config_checks import Parts
from ...errors import UserError
from ...features import Features
from ...interfaces.drafter import Drafts, FamilyCard, Training
from ...interfaces.proposer import Frontier, Observation, Scores, spread
from ...parts.block_cache import BlockRows
from ...parts.causal_drafter import conditional_drop, useful
from ...parts.decoder_block import AttentionContext, BlockConfig
from ...parts.feature_drafter import FIRST_OFFSET, EagleState, columns_for
from ...parts.shared_embeddings import Sizes, shifted
from ...parts.training_time_test import MaskAttention
from ...row_buffers import RowBuffer
from ...target.model import Target
from ..eagle3.drafter import Eagle3, Eagle3Config


@dataclass(frozen=True, kw_only=True)
class PEagleConfig(Eagle3Config):
    """The shape of a P-EAGLE drafter."""

    training_only = Eagle3Config.training_only - {"steps"}  # They decide how far it guesses.
    steps: Parts = 8
    """Tokens that one pass guesses."""
    num_layers: Parts = 4
    """Decoder layers; the first reads token and state, the others are ordinary ones after it."""
    mask_token_id: int | None = None
    """Token of the target whose embedding the masks read; since their state is a learned one, any token will do. None
    takes the target's first end token."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.norm_output:
            raise UserError("norm_output is true, but no guess of a P-EAGLE drafter reads the state of another; leave "
                            "it out")
        if self.head_rank is not None:
            raise UserError(f"head_rank is {self.head_rank}, and a P-EAGLE drafter runs its output layer once a draft; "
                            "leave it out, or train eagle3")


class PEagle(Eagle3):
    """EAGLE-3's layers with masks. Own weights are those of `Eagle3`, and `mask_hidden` [taps D]. Make a new one with
    `PEagle.create`."""

    family = "p_eagle"
    card = FamilyCard(
        name="P-EAGLE", papers=("2602.01469",),
        guesses="EAGLE-3's layers guess all tokens of a draft in one pass, with masks after the text",
        cost="one run of the layers for all levels of a tree")
    config: PEagleConfig
    config_class = PEagleConfig
    # Every depth counts alike, as in the library of vLLM's project.
    trained_as = Training(objective="soft", offsets=True, decay=1.0)
    mask_id: Tensor

    def __init__(self, config: PEagleConfig, sizes: Sizes, block: BlockConfig) -> None:
        super().__init__(config, sizes, block)
        if config.mask_token_id is None or not 0 <= config.mask_token_id < sizes.vocab_size:
            raise UserError(f"mask_token_id must lie between 0 and {sizes.vocab_size - 1}, the rows of the target's "
                            f"embedding, got {config.mask_token_id}; leave it out for the target's end token")
        self.reach = config.steps
        self.mask_hidden = nn.Parameter(torch.full((self.fc.in_features,), torch.nan))
        self.register_buffer("mask_id", torch.tensor([[config.mask_token_id]]), persistent=False)

    @classmethod
    def fitted(cls, config: Any, target: Target) -> tuple[PEagleConfig, BlockConfig]:
        """(settings with taps and mask token chosen, shape of the layers). Raises UserError when they do not fit."""
        found, block = super().fitted(config, target)
        mask = next(iter(target.eos_ids), 0) if config.mask_token_id is None else config.mask_token_id
        return replace(cast(PEagleConfig, found), mask_token_id=mask), block

    def initialise(self, target: Target) -> None:
        """As EAGLE-3; the state of the masks is small noise, which norms make as large as others."""
        super().initialise(target)
        nn.init.normal_(self.mask_hidden, std=0.02)

    def carried(self, start: Self) -> dict[str, Tensor]:
        """The start's tensors; the state of the masks has zeros for further taps, as `fc` has."""
        return {**super().carried(start),
                "mask_hidden": columns_for(self.taps, start.mask_hidden[None], start.taps)[0]}

    def masks(self) -> tuple[Tensor, Tensor]:
        """(embedding, fused state) of a mask, [1, 1, D] each."""
        hidden_11D = self.mask_hidden[None, None]
        return self.embed(self.mask_id), self.fuse(hidden_11D, dict(zip(
            self.taps, hidden_11D.chunk(len(self.taps), dim=-1), strict=True)))

    # Training --------------------------------------------------------------------------------------------------------

    def forward(self, features: Features) -> Drafts:
        """States of all guesses after every position, in one pass; in training of the later ones after a falling share
        of the positions (`conditional_drop`). UserError if the rows are too short for a draft."""
        self.require_rows(features, "steps")
        (rows, length), steps = features.tokens_BL.shape, self.config.steps
        kept_BLK = torch.ones(rows, length, steps, dtype=torch.bool, device=features.tokens_BL.device)
        if self.training:
            kept_BLK = conditional_drop(useful(features, 1 + steps)[..., 1:])
        # A position that keeps a mask keeps those before it: sorted by their number, the first ones have the next.
        depths_BL = kept_BLK.sum(-1)
        order_BL = depths_BL.argsort(dim=1, descending=True, stable=True)
        counts = [count for depth in range(1, steps) if (count := int((depths_BL > depth).sum(1).max()))]
        embedded_11D, mask_11D = self.masks()
        embedded_BLD = shifted(self.embed(features.tokens_BL), features, 1)
        fused_BLD = self.fuse(features.final(), features.taps)
        embedded, read = (torch.cat([text_BLD, one_11D.expand(rows, sum(counts), -1)], dim=1) for text_BLD, one_11D in (
            (embedded_BLD, embedded_11D), (fused_BLD, mask_11D)))
        text = AttentionContext.training(features, self.window)
        attention = MaskAttention.after(text, features, order_BL, counts)
        first_BLD, *others = torch.split(self.finish(self.step(embedded, read, attention)), [length, *counts], dim=1)
        found = [first_BLD]
        for states_BAD in others:
            anchors_BAD = order_BL[:, : states_BAD.shape[1], None].expand_as(states_BAD)
            found.append(torch.zeros_like(first_BLD).scatter(1, anchors_BAD, states_BAD))
        found += [torch.zeros_like(first_BLD)] * (steps - len(found))
        return Drafts(hidden_BLKD=torch.stack(found, dim=2), offsets=tuple(range(FIRST_OFFSET, FIRST_OFFSET + steps)),
                      valid_BLK=kept_BLK if self.training else None)

    # Decoding --------------------------------------------------------------------------------------------------------

    def start(self, rows: int, capacity: int) -> EagleState:
        """A state in which no row has been observed yet; its newest states are those of all guesses."""
        self.pack_linears()
        device, steps = self.fc.weight.device, self.config.steps
        own = RowBuffer(rows, steps * self.state_size, device=device, dtype=self.dtype)
        return EagleState(own, BlockRows(self.num_layers, rows, capacity + steps, device, window=self.window))

    @torch.no_grad()
    def observe(self, state: EagleState, rows_R: Tensor, observation: Observation) -> None:
        """Read the new positions, and the masks after each row's last one, in one pass; the masks are not kept."""
        state.drop_tree()
        (_, width), masks = observation.tokens_BN.shape, self.config.steps - 1
        rows, counts = observation.on_host(rows_R)
        attention = state.rows.read(rows, width + masks)
        # A row with fewer new positions has its masks before the padding.
        order_N = torch.arange(width + masks, device=rows_R.device)
        text_RN1 = (order_N < observation.counts_B[:, None])[..., None]
        with self.packing.installed():
            fused_RND = self.fuse(observation.final_BND, observation.taps)
            embedded_RND, read_RND = (torch.where(text_RN1, pad(text_RND, (0, 0, 0, masks)), one_11D)
                                      for text_RND, one_11D in zip(
                                          (self.embed(observation.next_BN), fused_RND), self.masks(), strict=True))
            own_RND = self.step(embedded_RND, read_RND, attention)
        state.rows.commit(observation.counts_B, counts)
        last_R1 = (observation.counts_B - 1).clamp(min=0)[:, None]
        newest_RKD = spread(own_RND, last_R1 + torch.arange(1 + masks, device=rows_R.device))
        state.own.store(rows_R, newest_RKD.flatten(1), observation.counts_B > 0)

    @torch.no_grad()
    def expand(self, state: EagleState, frontier: Frontier) -> Scores:
        """Scores of every level of the tree below the root; `observe` has run the layers. Raises ValueError for other
        nodes."""
        if state.rooted:
            raise ValueError(f"a {self.family} drafter scores every level from the root at once; pass only the root")
        state.rooted = True
        own_RKD = torch.unflatten(state.own.values[: len(frontier.nodes_BF)], 1, (self.config.steps, -1))
        finished_RKD = self.finish(own_RKD)
        with self.packing.installed():
            logits_RKQ = self.project(finished_RKD, 0)
        return Scores.from_logits(logits_RKQ[:, None], self.token_ids, finished_RKD[:, None])
