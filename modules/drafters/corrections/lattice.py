"""LiLiCorr's lattice: the likeliest tokens of all slots of a block, encoded together, with a score for each pair of
successive ones (arXiv:2608.20530).

Shapes: N blocks, K slots that guess, C candidates of a slot, D width of a slot's state, W width of the encoder, H
heads, T candidates of a block, K times C, M slots of all blocks.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from ...errors import UserError
from ..parts.decoder_block import RMSNorm
from .correction import Correction, Embed, Logits, Shape

CANDIDATES = 8
"""Likeliest tokens of a slot among which a lattice chooses."""
LAYERS, HEADS, MLP_RATIO = 2, 8, 2
"""Shape of the encoder; the papers' and all published ones'."""
SCALE, LEAST_LENGTH = 8.0, 1e-4
"""Factor of the cosines, and least length of a vector by which it is divided."""
CHUNK = 1 << 24
"""Logits in memory at once where the candidates are found."""


class LatticeLayer(nn.Module):
    """A layer over all candidates of a block, each of which sees all."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.attn_norm, self.mlp_norm = RMSNorm(width, eps=eps), RMSNorm(width, eps=eps)
        self.attn = nn.MultiheadAttention(width, HEADS, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(width, MLP_RATIO * width), nn.SiLU(), nn.Linear(MLP_RATIO * width, width))

    def forward(self, hidden_NTW: Tensor, bias_HTT: Tensor) -> Tensor:
        """The candidates after the layer, [N, T, W], whose attention has these summands."""
        # Not by the module itself, whose kernels for inference take no summand for each head.
        own, normed_NTW = self.attn, self.attn_norm(hidden_NTW)
        joined_NTW = functional.linear(normed_NTW, own.in_proj_weight, own.in_proj_bias)
        query, key, value = torch.unflatten(joined_NTW, -1, (3, HEADS, -1)).transpose(1, 3).unbind(2)
        mixed_NHTE = functional.scaled_dot_product_attention(query, key, value, attn_mask=bias_HTT.to(query.dtype))
        hidden_NTW = hidden_NTW + own.out_proj(mixed_NHTE.transpose(1, 2).flatten(2))
        passed_NTW: Tensor = hidden_NTW + self.mlp(self.mlp_norm(hidden_NTW))
        return passed_NTW


class Lattice(Correction):
    """A choice among the C likeliest tokens of each slot: 8 cos(out of the token before, in of the token), both of an
    encoder that reads all candidates; the logits of the slots enter as features alone. The rank is
    W, and the width of the compared vectors."""

    chooses = encodes = alone_too = own_token = True

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        width, rank, slots, eps, self.entries = self.width, self.rank, self.slots, shape.eps, shape.tokens
        if self.entries < CANDIDATES:
            raise UserError(f"correction is 'lattice', which chooses among {CANDIDATES} tokens, and the target has "
                            f"{self.entries}; set correction to markov")
        self.state_size = width + 2 * CANDIDATES
        self.token_proj = nn.Identity() if rank == width else nn.Linear(width, rank)
        self.pass_hidden_proj, self.context_proj = nn.Linear(width, rank), nn.Linear(width, rank)
        self.feature_mlp = nn.Sequential(nn.LayerNorm(5), nn.Linear(5, rank), nn.SiLU(), nn.Linear(rank, rank))
        self.slot_embedding = nn.Parameter(torch.zeros(1, 1, slots - 1, 1, rank))
        self.rank_embedding = nn.Parameter(torch.zeros(1, 1, 1, CANDIDATES, rank))
        self.relative_slot_bias = nn.Parameter(torch.zeros(HEADS, 2 * slots - 1))
        self.same_slot_bias = nn.Parameter(torch.zeros(HEADS))
        self.layers = nn.ModuleList(LatticeLayer(rank, eps) for _ in range(LAYERS))
        self.output_norm, self.anchor_norm = RMSNorm(rank, eps=eps), RMSNorm(rank, eps=eps)
        self.factor_input_proj = nn.Linear(3 * rank, rank)
        self.out_head, self.in_head = nn.Linear(rank, rank), nn.Linear(rank, rank)
        self.anchor_out_head = nn.Linear(rank, rank)

    def begin(self, slots: Tensor, newest: Tensor | None, logits: Logits, embed: Embed) -> Tensor:
        """Each slot's state, candidates, those of the slot before, and the scores of all pairs; at least float32, in
        which ids are exact."""
        if newest is None:
            raise ValueError("a lattice reads the newest state of the text; give it")
        count = slots.shape[-2]
        ids_MC, log_q_MC = self._likeliest(slots.flatten(0, -2), logits)
        ids_NKC, log_q_NKC = torch.unflatten(ids_MC, 0, (-1, count)), torch.unflatten(log_q_MC, 0, (-1, count))
        start_NC, pairs_NKCC = self.scores(ids_NKC, log_q_NKC, slots.flatten(0, -3), newest.flatten(0, -2), embed)
        # Whatever stands before the first slot, its scores are those after the text.
        first_N1CC = start_NC[:, None, None].expand(-1, 1, CANDIDATES, -1)
        table_NKT = torch.cat([first_N1CC, pairs_NKCC], dim=1).flatten(2)
        held = torch.cat([ids_NKC, ids_NKC.roll(1, dims=1), table_NKT], dim=-1)
        return torch.cat([slots.to(held.dtype), torch.unflatten(held, 0, slots.shape[:-2])], dim=-1)

    def _likeliest(self, slots_MD: Tensor, logits: Logits) -> tuple[Tensor, Tensor]:
        """(the likeliest tokens of each slot, likeliest first, log q of each), [M, C], a few slots at a time."""
        def read(states: Tensor) -> tuple[Tensor, Tensor]:
            found = logits(states)
            found = found.to(torch.promote_types(found.dtype, torch.float32))
            best = found.topk(CANDIDATES, dim=-1)
            return best.indices, best.values - found.logsumexp(-1, keepdim=True)

        pieces = []
        for piece_MD in torch.split(slots_MD, max(1, CHUNK // self.entries)):
            # A gradient reaches the slots through log q; the backward pass makes the logits again, which fill memory.
            pieces.append(checkpoint(read, piece_MD, use_reentrant=False, preserve_rng_state=False)
                          if torch.is_grad_enabled() else read(piece_MD))
        ids, log_q = zip(*pieces, strict=True)
        return torch.cat(ids), torch.cat(log_q)

    def scores(self, ids_NKC: Tensor, log_q_NKC: Tensor, slots_NKD: Tensor, newest_ND: Tensor, embed: Embed
               ) -> tuple[Tensor, Tensor]:
        """(the score of each candidate of the first slot after the text, [N, C], that of each candidate of a later slot
        after each of the slot before, [N, K - 1, C, C]), from candidates, their log-probabilities in their slots, the
        states of the slots and the newest one of the text. Blocks may be shorter than trained."""
        count, order_C = ids_NKC.shape[1], torch.arange(CANDIDATES, device=ids_NKC.device)
        ranks = [order_C.to(log_q_NKC) / (CANDIDATES - 1), order_C == 0]
        features = torch.stack([log_q_NKC, log_q_NKC.exp(), log_q_NKC - log_q_NKC.amax(-1, keepdim=True),
                                *(rank_C.to(log_q_NKC).expand_as(log_q_NKC) for rank_C in ranks)], dim=-1)
        hidden_NKCW = (self.token_proj(embed(ids_NKC)) + self.pass_hidden_proj(slots_NKD)[:, :, None]
                       + self.feature_mlp(features.to(slots_NKD.dtype)) + self.slot_embedding[0, :, :count]
                       + self.rank_embedding[0])
        places_T = torch.arange(count, device=ids_NKC.device).repeat_interleave(CANDIDATES)
        apart_TT = places_T[:, None] - places_T
        bias_HTT = self.relative_slot_bias[:, apart_TT + self.slots - 1] + torch.where(
            apart_TT == 0, self.same_slot_bias[:, None, None], 0.0)
        hidden_NTW = hidden_NKCW.flatten(1, 2)
        for layer in self.layers:
            hidden_NTW = layer(hidden_NTW, bias_HTT)
        hidden_NKCW = self.output_norm(hidden_NTW).unflatten(1, (count, CANDIDATES))
        text_NW = self.anchor_norm(self.context_proj(newest_ND))
        text_NKCW = text_NW[:, None, None].expand_as(hidden_NKCW)
        read = torch.cat([hidden_NKCW, text_NKCW, hidden_NKCW * text_NKCW], dim=-1)
        factors = functional.silu(self.factor_input_proj(read))
        # In float32: softmax of rounded cosines would hold probabilities that are equal by rounding.
        out_NKCW, in_NKCW, after_NW = (
            functional.normalize(found.to(torch.promote_types(found.dtype, torch.float32)), dim=-1, eps=LEAST_LENGTH)
            for found in (self.out_head(factors), self.in_head(factors), self.anchor_out_head(text_NW)))
        start_NC = SCALE * (after_NW[:, None] * in_NKCW[:, 0]).sum(-1)
        return start_NC, SCALE * out_NKCW[:, :-1] @ in_NKCW[:, 1:].mT

    def extend(self, slot: Tensor, path: Tensor, tokens: Tensor, embed: Embed, step: int) -> tuple[Tensor, Tensor]:
        """The slot's state and candidates, and their scores after the token before."""
        parts = [self.width, CANDIDATES, CANDIDATES, CANDIDATES**2]
        state, ids, former, table = torch.split(slot, parts, dim=-1)
        row = (former == tokens[..., None]).long().argmax(-1)[..., None, None].expand(*tokens.shape, 1, CANDIDATES)
        scores = torch.unflatten(table, -1, (CANDIDATES, CANDIDATES)).gather(-2, row)[..., 0, :]
        return path, torch.cat([state, ids, scores], dim=-1)

    def candidates(self, states: Tensor, logits: Logits) -> tuple[Tensor, Tensor]:
        """The candidates and their scores, which the state holds."""
        ids, scores = states[..., self.width :].chunk(2, dim=-1)
        return ids.long(), scores

    def learned(self, slots: Tensor, before: Tensor, valid: Tensor) -> Tensor:
        """The steps of whole blocks before which each true token is one of its slot's candidates: the score of a token
        after one that is none of them does not exist."""
        ids = slots[..., self.width : self.width + CANDIDATES]
        known = (ids[..., :-1, :] == before[..., 1:, None]).any(-1)
        reached = functional.pad(known.long().cumprod(-1), (1, 0), value=1) > 0
        return valid & valid[..., -1:] & reached

    def initialise(self, table_VD: Tensor) -> None:
        """Score at random: with two sides of zeros neither would have a gradient."""
        for head in (self.out_head, self.in_head, self.anchor_out_head):
            nn.init.normal_(head.weight, std=0.02)
            nn.init.zeros_(head.bias)
