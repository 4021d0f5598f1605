"""Parts by which the slots of a block know of each other: DFlash 2's convolutions over them, and corrections of the
guesses by the tokens that stand before them in the block.

A backbone scores all slots of a block at once, none of them knowing what the others will be. A correction is asked
twice: `begin` reads the states of a whole block, once, and `extend` adds a token to a path in it. A path is what it
keeps of the tokens so far; its state is what the output layer reads for the next slot. Training asks the same with the
true tokens, from all places at once.

Shapes: B rows, N slots of all blocks of a row, slot by slot, K slots that guess, D width of a slot's state, T taps of a
convolution, G groups of components, J numbers of a slot's kernels, P numbers of a path, X numbers of a state, R rank, Q
entries of the draft vocabulary, V tokens of the target's vocabulary."""

from collections.abc import Callable
from dataclasses import replace
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from ...parts.decoder_block import AttentionContext, BlockConfig, DecoderBlock, GatedMLP, RMSNorm
from ...target.draft_vocabulary import OwnOutput

TAPS, GROUP = 2, 16  # Slots that a convolution reads, and components that share what a slot adds to its kernel
CANDIDATES = 16  # Likeliest tokens of a slot among which a selector chooses
WIDER = 4  # Width of Domino's recurrent state in ranks: the papers have 1,024 and 256
ALONE_UNTIL = 0.5  # Share of a training in which the weight goes from the slots' own guesses to those with its bias

CorrectionName = Literal["none", "markov", "gated", "rnn", "selector", "refiner", "gru", "state"]
"""Names for recipes, see `BlockDraftConfig`."""
Embed = Callable[[Tensor], Tensor]  # The target's embeddings [..., D] of tokens
Logits = Callable[[Tensor], Tensor]  # The output layer's logits [..., Q] of the states of slots, [..., D]


class Shape(NamedTuple):
    """Sizes from which a correction is made: the width D of a slot's state, its rank R, the slots of a block, that of
    the root included, the target's V tokens, Q entries of the draft vocabulary, the eps of norms; and its name."""

    width: int
    rank: int
    slots: int
    tokens: int
    entries: int
    eps: float
    name: CorrectionName


class Correction(nn.Module):
    """No correction: a slot's state alone."""

    path_size = 0  # Numbers that a path keeps, P
    reads_block = False
    """Whether `begin` reads the states of all slots of a block, that of the root too where it guesses nothing."""
    alone_too = False  # Whether the slots learn to guess without it too
    alone_weight = 1.0  # Weight of these guesses next to the corrected ones
    chooses = False  # Whether it chooses among a few candidates of each slot
    own_token = False  # Whether it takes for granted that a slot predicts the token of its own position

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.width, self.rank, self.slots = shape.width, shape.rank, shape.slots
        self.state_size = shape.width  # Numbers of a state, X; the first ones are the slot's state

    def begin(self, slots: Tensor) -> Tensor:
        """The inputs of `extend` at each slot, [..., K, any], whose first ones are the slot's state, from the states of
        a block, [..., K, D]."""
        return slots

    def extend(self, slot: Tensor, path: Tensor, tokens: Tensor, embed: Embed, step: int) -> tuple[Tensor, Tensor]:
        """(the path [..., P] with a token more, the state [..., X] of the slot that guesses the next one), from the
        slot's part of `begin`, the path so far, zeros at the start of a block, and the token after it, [...], there the
        root; `step` is the number of the guess in its block, from 0."""
        return path, slot

    def correct(self, logits: Tensor, states: Tensor) -> Tensor:
        """The logits [..., Q] of states [..., X], from those of the slots alone: the candidates' and minus infinity for
        other tokens, or with the bias of each own output layer, which reads the last numbers of the state."""
        if self.chooses:
            tokens, scores = self.candidates(states, lambda _: logits)
            return torch.full_like(logits, -torch.inf, dtype=scores.dtype).scatter(-1, tokens, scores)
        for layer in self.modules():
            if isinstance(layer, OwnOutput):
                logits = logits + layer(states[..., -layer.in_features :]).to(logits.dtype)
        return logits

    def candidates(self, states: Tensor, logits: Logits) -> tuple[Tensor, Tensor]:
        """(a few tokens, their logits), [..., any] each, of a correction that chooses. Raises ValueError for others."""
        raise ValueError("this correction scores all tokens; it has no candidates")

    @classmethod
    def weighed(cls, weights: tuple[float, ...], progress: float) -> tuple[float, ...]:
        """Weights in the loss of the steps with it, then of those of the slots alone, from those of the block's steps;
        at this progress of the training, from 0 to 1."""
        return (*weights, *(cls.alone_weight * weight for weight in weights))

    def initialise(self, table_VD: Tensor) -> None:
        """Set first weights that correct nothing, from the target's embeddings; called without gradients."""

    def output_parameters(self) -> tuple[nn.Parameter, ...]:
        """The trained weights that `correct` reads."""
        return tuple(weight for part in self.modules() if isinstance(part, OwnOutput) for weight in part.parameters())


def table(tokens: int, rank: int) -> nn.Embedding:
    """A table with a row for each token; NaN until initialised or loaded, so that one that was forgotten shows."""
    return nn.Embedding(tokens, rank, _weight=torch.full((tokens, rank), torch.nan))


class SlotConvolution(nn.Module):
    """A convolution over the slots of a block, before and after a sublayer, whose kernel depends on the slot:
    out_t = sum_tau (base[tau] + delta_t[tau]) x_{t - tau}, a delta for each group of components, zero before a block.
    """

    def __init__(self, width: int, slots: int) -> None:
        super().__init__()
        self.slots = slots
        self.kernel_projection = nn.Linear(width, 2 * TAPS * (width // GROUP), bias=False)
        # Both sides pass the states on at first.
        self.base_kernel = nn.Parameter(torch.eye(TAPS)[0, :, None].repeat(2, 1, width))
        nn.init.zeros_(self.kernel_projection.weight)

    def forward(self, hidden_BND: Tensor, kernels_BNJ: Tensor, side: int) -> Tensor:
        """The states convolved before the sublayer, side 0, or after it, 1; kernels are projections of its input."""
        delta_BNTG = torch.unflatten(kernels_BNJ, -1, (2, TAPS, -1))[:, :, side]
        kernel_BNTD = self.base_kernel[side] + delta_BNTG.repeat_interleave(GROUP, dim=-1)
        mixed_BND: Tensor = kernel_BNTD[:, :, 0] * hidden_BND
        for tap in range(1, min(TAPS, self.slots)):
            # A slot back is as many places back as there are blocks.
            back = tap * (hidden_BND.shape[1] // self.slots)
            before_BND = functional.pad(hidden_BND[:, :-back], (0, 0, back, 0))
            mixed_BND = mixed_BND + kernel_BNTD[:, :, tap] * before_BND
        return mixed_BND


class SlotBlock(DecoderBlock):
    """A layer of the backbone, Qwen3's, with convolutions around its attention and its MLP if `convolved`."""

    def __init__(self, config: BlockConfig, layer: int, slots: int, *, convolved: bool) -> None:
        super().__init__(replace(config, qk_norm=True), layer)
        self.attention_conv = SlotConvolution(config.hidden_size, slots) if convolved else None
        self.mlp_conv = SlotConvolution(config.hidden_size, slots) if convolved else None

    def forward(self, hidden_BND: Tensor, attention: AttentionContext) -> Tensor:
        """The residual stream after the layer, [B, N, D]."""
        if self.attention_conv is None or self.mlp_conv is None:
            return super().forward(hidden_BND, attention)
        normed_BND = self.input_layernorm(hidden_BND)
        kernels_BNJ = self.attention_conv.kernel_projection(normed_BND)
        mixed_BND = self.self_attn(self.attention_conv(normed_BND, kernels_BNJ, 0), attention)
        hidden_BND = hidden_BND + self.attention_conv(mixed_BND, kernels_BNJ, 1)
        normed_BND = self.post_attention_layernorm(hidden_BND)
        kernels_BNJ = self.mlp_conv.kernel_projection(normed_BND)
        added_BND = self.mlp(self.mlp_conv(normed_BND, kernels_BNJ, 0))
        passed_BND: Tensor = hidden_BND + self.mlp_conv(added_BND, kernels_BNJ, 1)
        return passed_BND


class Markov(Correction):
    """A bias W2 b of rank R with b = W1[x] of the token x before: a bigram table of the draft (DSpark). `gated`
    multiplies b by a gate of slot and b; `rnn` reads b into a recurrent state, from which the bias comes."""

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        width, rank = self.width, self.rank
        self.path_size = rank if shape.name == "rnn" else 0
        self.state_size = width + (rank if shape.name == "markov" else 2 * rank)
        self.markov_w1, self.markov_w2 = table(shape.tokens, rank), OwnOutput(rank, shape.entries, bias=False)
        self.gate_proj = nn.Linear(width + rank, rank) if shape.name == "gated" else None
        self.joint_proj = nn.Linear(2 * rank + width, 3 * rank) if shape.name == "rnn" else None

    def extend(self, slot: Tensor, path: Tensor, tokens: Tensor, embed: Embed, step: int) -> tuple[Tensor, Tensor]:
        """The slot's state, then W1[x], then what is made of it."""
        before = self.markov_w1(tokens)
        if self.gate_proj is not None:
            return path, torch.cat([slot, before, before * self.gate_proj(torch.cat([slot, before], -1)).sigmoid()], -1)
        if self.joint_proj is None:
            return path, torch.cat([slot, before], dim=-1)
        keep, new, out = self.joint_proj(torch.cat([path, before, slot], dim=-1)).chunk(3, dim=-1)
        path = keep.sigmoid() * path + (1 - keep.sigmoid()) * new.tanh()
        return path, torch.cat([slot, before, out.tanh()], dim=-1)

    def initialise(self, table_VD: Tensor) -> None:
        """No bias yet. The rows of W1 are the embeddings' principal components, about 1 in size: a token that training
        seldom sees then has neighbours, where the official code draws its row at random."""
        wide_VD = table_VD.to(torch.promote_types(table_VD.dtype, torch.float32))
        values_D, axes_DD = torch.linalg.eigh(wide_VD.mT @ wide_VD / len(wide_VD))
        rows = min(self.rank, len(values_D))
        # The largest first: the new columns of a table that continues one of smaller rank are others then.
        scale = values_D.flip(0)[:rows].clamp(min=1e-12).rsqrt()
        self.markov_w1.weight.zero_()
        self.markov_w1.weight[:, :rows] = wide_VD @ (axes_DD.flip(1)[:, :rows] * scale)
        self.markov_w2.weight.zero_()


class Selector(Correction):
    """A choice among a slot's likeliest tokens b: U(b) + <A[a] * (P h), C[b]> for the token a before (DFlash 2)."""

    chooses = alone_too = True

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        self.state_size, self.most = self.width + self.rank, min(CANDIDATES, shape.tokens)
        self.hidden_projection = nn.Linear(self.width, self.rank, bias=False)
        self.predecessor_codebook, self.successor_codebook = (table(shape.tokens, self.rank) for _ in range(2))

    def begin(self, slots: Tensor) -> Tensor:
        """The slots' states, and P h."""
        return torch.cat([slots, self.hidden_projection(slots)], dim=-1)

    def extend(self, slot: Tensor, path: Tensor, tokens: Tensor, embed: Embed, step: int) -> tuple[Tensor, Tensor]:
        """The slot's state, and what its candidates are compared with."""
        compared = self.predecessor_codebook(tokens) * slot[..., self.width :]
        return path, torch.cat([slot[..., : self.width], compared], dim=-1)

    def candidates(self, states: Tensor, logits: Logits) -> tuple[Tensor, Tensor]:
        """The likeliest tokens of the slot, with their corrected logits."""
        best = logits(states[..., : self.width]).topk(self.most, dim=-1)
        added = (self.successor_codebook(best.indices) * states[..., None, self.width :]).sum(-1)
        return best.indices, best.values + added.to(best.values.dtype)

    def initialise(self, table_VD: Tensor) -> None:
        """Choose the slot's likeliest token: C is zero. A learns nothing before C does."""
        for weight in (self.predecessor_codebook.weight, self.hidden_projection.weight):
            nn.init.normal_(weight, std=0.02)
        self.successor_codebook.weight.zero_()

    def output_parameters(self) -> tuple[nn.Parameter, ...]:
        """C."""
        return tuple(self.successor_codebook.parameters())


class Refiner(Correction):
    """A bias W2 x of the token after slot k, with x = y + MLP(y), y = a_k + sum_{j <= k} L[:, k, j] a_j and
    a_k = Win [Dh h_k ; Dg mean h ; E[t_k]] for the token t_k before the guess; before the first two slots stands the
    root, as in vLLM."""

    reads_block = alone_too = own_token = True
    alone_weight = 0.6

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        width, rank, slots = self.width, self.rank, self.slots
        self.path_size, self.state_size, self.w1 = slots * rank, width + rank, table(shape.tokens, rank)
        self.down_h, self.down_g = nn.Linear(width, rank, bias=False), nn.Linear(width, rank, bias=False)
        self.in_proj = nn.Linear(3 * rank, rank, bias=False)
        self.mix = nn.ParameterDict({"L": torch.zeros(rank, slots, slots)})
        self.mlp = GatedMLP(rank, 2 * rank)
        self.w2 = OwnOutput(rank, shape.entries, bias=False)

    def begin(self, block: Tensor) -> Tensor:
        """The states of the slots that guess, and the parts of their a and of the first slot's that are known."""
        mean = self.down_g(block.mean(-2, keepdim=True)).expand(*block.shape[:-1], -1)
        known = functional.linear(torch.cat([self.down_h(block), mean], -1), self.in_proj.weight[:, : 2 * self.rank])
        first = known[..., :1, :].expand_as(known)
        return torch.cat([block, known, first], dim=-1)[..., 1:, :]

    def extend(self, slot: Tensor, path: Tensor, tokens: Tensor, embed: Embed, step: int) -> tuple[Tensor, Tensor]:
        """The slot's state, and x. A path has the a of each slot so far."""
        state, known, first = torch.split(slot, [self.width, self.rank, self.rank], dim=-1)
        read = functional.linear(self.w1(tokens), self.in_proj.weight[:, 2 * self.rank :])
        kept = [first + read] if step == 0 else list(torch.split(path, self.rank, dim=-1)[: step + 1])
        kept.append(known + read)
        mixed = kept[-1] + sum((self.mix["L"][:, step + 1, place] * one for place, one in enumerate(kept)),
                               torch.zeros_like(known))
        path = torch.cat([*kept, path[..., len(kept) * self.rank :]], dim=-1)
        return path, torch.cat([state, mixed + self.mlp(mixed)], dim=-1)

    def initialise(self, table_VD: Tensor) -> None:
        """No bias yet, where the paper starts with a random one."""
        layers = (self.w1, self.down_h, self.down_g, self.in_proj, *self.mlp.children())
        for layer in layers:
            nn.init.normal_(layer.weight, std=0.02)  # type: ignore[arg-type]
        self.w2.weight.zero_()


class RecurrentBias(Correction):
    """A bias W2 SiLU(W1 [h ; g]) of every guess but the first of a block, with g the state of a gated recurrent unit
    (arXiv:1406.1078, without biases) after the embeddings of all tokens before the guess, the root's first."""

    alone_too = True

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        width, rank = self.width, self.rank
        self.path_size, self.state_size = WIDER * rank, width + rank
        # The names are torch's; so is the order of the three gates: reset, update, new.
        self.prefix_gru = nn.ModuleDict({"weight_ih_l0": nn.Linear(width, 3 * self.path_size, bias=False),
                                         "weight_hh_l0": nn.Linear(self.path_size, 3 * self.path_size, bias=False)})
        self.embed_proj = nn.Sequential(nn.Linear(width + self.path_size, rank, bias=False), nn.SiLU(),
                                        OwnOutput(rank, shape.entries, bias=False))

    def extend(self, slot: Tensor, path: Tensor, tokens: Tensor, embed: Embed, step: int) -> tuple[Tensor, Tensor]:
        """The slot's state, and what W2 reads, zeros for the first guess. A path is the recurrent state."""
        reset, update, new = self.prefix_gru["weight_ih_l0"](embed(tokens)).chunk(3, dim=-1)
        kept_reset, kept_update, kept_new = self.prefix_gru["weight_hh_l0"](path).chunk(3, dim=-1)
        share = (update + kept_update).sigmoid()
        path = (1 - share) * (new + (reset + kept_reset).sigmoid() * kept_new).tanh() + share * path
        if step == 0:
            return path, functional.pad(slot, (0, self.rank))
        return path, torch.cat([slot, self.embed_proj[:2](torch.cat([slot, path], dim=-1))], dim=-1)

    @classmethod
    def weighed(cls, weights: tuple[float, ...], progress: float) -> tuple[float, ...]:
        """The slots learn to guess first."""
        alone = max(0.0, 1 - progress / ALONE_UNTIL)
        return tuple(share * weight for share in (1 - alone, alone) for weight in weights)

    def initialise(self, table_VD: Tensor) -> None:
        """No bias yet, where the paper starts with a random one."""
        for layer in self.prefix_gru.values():
            nn.init.uniform_(layer.weight, -self.path_size**-0.5, self.path_size**-0.5)  # type: ignore[arg-type]
        nn.init.normal_(self.embed_proj[0].weight, std=0.02)  # type: ignore[arg-type]
        self.embed_proj[2].weight.zero_()  # type: ignore[operator]


class StateCorrection(Correction):
    """h + down(SiLU(gate u) * up u) with u = [norm h ; norm e(x)], x the token before: the output layer reads it."""

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        self.hidden_norm, self.embed_norm = (RMSNorm(self.width, eps=shape.eps) for _ in range(2))
        self.mlp = GatedMLP(2 * self.width, self.rank, output_size=self.width)

    def extend(self, slot: Tensor, path: Tensor, tokens: Tensor, embed: Embed, step: int) -> tuple[Tensor, Tensor]:
        """The corrected state."""
        read = torch.cat([self.hidden_norm(slot), self.embed_norm(embed(tokens))], dim=-1)
        return path, slot + self.mlp(read)

    def initialise(self, table_VD: Tensor) -> None:
        """Add nothing yet."""
        self.mlp.down_proj.weight.zero_()


CORRECTIONS: dict[CorrectionName, type[Correction]] = {
    "none": Correction, "markov": Markov, "gated": Markov, "rnn": Markov, "selector": Selector,
    "refiner": Refiner, "gru": RecurrentBias, "state": StateCorrection}
"""Corrections by name."""
