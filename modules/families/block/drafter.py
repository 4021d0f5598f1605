"""Drafters of blocks over the target's states: one backbone scores all slots of a block in one run, and a correction
lets each guess depend on those before it (DFlash, arXiv:2602.06036, and DFlash 2; DSpark, arXiv:2607.05147; JetSpec,
arXiv:2606.18394).

After a text that ends at its token p, whose next token x_{p+1} the target chose, the S slots of a block take the
positions p + 1, p + 2, ...: the first reads the embedding of x_{p+1}, the others that of a mask. The tapped states of
the text, fused, are keys and values of every layer: they have no query, so that each is read once, when it is observed.
With `aligned: next` slot k predicts the token at p + 2 + k, with `aligned: same` that of its own position, p + 1 + k,
which the first slot knows already.

Shapes: B rows, L positions, A of them after which blocks start, S slots, K draft steps, D hidden size, X width of a
state, N new positions, R rows of a decoding state, F frontier nodes, P numbers of a path, Q draft vocabulary."""

from dataclasses import replace
from typing import Self, cast

import torch
from torch import Tensor, nn

from ...errors import UserError
from ...features import Features
from ...interfaces.drafter import Drafts, FamilyCard, Training
from ...interfaces.proposer import DraftState, Frontier, JudgesGuesses, Observation, Scores, spread
from ...parts.block_cache import BlockRows
from ...parts.causal_drafter import useful
from ...parts.decoder_block import AttentionContext, BlockConfig, RMSNorm
from ...parts.feature_drafter import FIRST_OFFSET, FeatureDrafter, block_like, chosen_taps, columns_for, last_norm
from ...parts.shared_embeddings import Sizes
from ...parts.training_time_test import SlotAttention
from ...row_buffers import RowBuffer
from ...target.draft_vocabulary import OwnOutput, carry_rows
from ...target.model import Target
from .corrections import CORRECTIONS, GROUP, Shape, SlotBlock
from .settings import BlockDraftConfig


class BlockState(DraftState):
    """The layers' cache of each row's text, after which the slots of a block take places and are never committed, the
    text's last fused state, None where slots do not read it, and the block and the paths of the tree that grows."""

    slots_RKX: Tensor  # Part of each slot that guesses, as the correction reads it
    nodes_RF: Tensor  # The nodes that were expanded last
    paths_RFP: Tensor  # Numbers that the correction keeps of each node's path

    def __init__(self, rows: BlockRows, newest: RowBuffer | None) -> None:
        self.rows, self.newest, self.caches = rows, newest, (rows.cache,)
        self.held = (rows.cache,) if newest is None else (rows.cache, newest)
        self.drop_tree()

    def drop_tree(self) -> None:
        """Discard the tree with its block."""
        self.level = 0
        self.rows.drop_tree()


class BlockDraft(FeatureDrafter[BlockState], JudgesGuesses):
    """A backbone over the target's states, and a correction. Own weights are named as in DFlash, those of the
    correction after `correction.`; embedding and output layer are the target's. Make one with `BlockDraft.create`."""

    family = "block"
    card = FamilyCard(
        name="DFlash, DFlash 2, Domino, DSpark, JetSpec, XPress",
        papers=("2602.06036", "2605.29707", "2607.05147", "2606.18394", "2608.02438"),
        guesses="decoder layers over several of the target's states guess a block of tokens in one run; a correction "
                "reads those before each guess",
        cost="one run of the layers for a tree, and one of the correction for each level; learns more slowly than "
             "EAGLE-3")
    config: BlockDraftConfig
    config_class = BlockDraftConfig
    trained_as = Training(objective="soft", offsets=True)
    mask_id: Tensor

    def __init__(self, config: BlockDraftConfig, sizes: Sizes, block: BlockConfig) -> None:
        super().__init__(config, sizes, block)
        if config.taps is None:
            raise UserError("the taps of a drafter of blocks must be set; use BlockDraft.create, which chooses them")
        self.taps, self.num_layers, self.block_size = config.taps, config.num_layers, config.block_size
        self.reach = self.trained_steps = config.num_steps
        self.offsets = tuple(range(FIRST_OFFSET, FIRST_OFFSET + config.num_steps))
        width, eps = block.hidden_size, block.norm_eps
        self.fc = nn.Linear(len(config.taps) * sizes.hidden_size, width, bias=False)
        self.hidden_norm = RMSNorm(width, eps=eps)
        self.layers = nn.ModuleList(SlotBlock(block, layer, config.block_size, convolved=config.conv)
                                    for layer in range(config.num_layers))
        self.norm = RMSNorm(width, eps=eps)
        if (mask := config.mask_token_id) is not None and not 0 <= mask < sizes.vocab_size:
            raise UserError(f"mask_token_id must lie between 0 and {sizes.vocab_size - 1}, the rows of the target's "
                            f"embedding, got {mask}")
        if config.mask_token_id is None:
            self.mask_embedding = nn.Parameter(torch.full((width,), torch.nan))
        else:
            self.register_buffer("mask_id", torch.tensor(config.mask_token_id), persistent=False)
        entries = config.vocabulary_size or sizes.vocab_size
        self.correction = CORRECTIONS[config.correction](Shape(
            width, config.rank, config.block_size, sizes.vocab_size, entries, eps, config.correction))
        self.state_size = self.correction.state_size
        self.judges = config.confidence
        self.confidence = nn.Linear(width + config.rank, 1) if config.confidence else None
        if config.confidence:
            self.register_buffer("judge_temperatures_K", torch.ones(config.num_steps))

    @classmethod
    def fitted(cls, config: BlockDraftConfig, target: Target) -> tuple[BlockDraftConfig, BlockConfig]:
        """(settings with the taps chosen, shape of the layers). Raises UserError where taps, mask or width do not fit.
        """
        if config.conv and target.hidden_size % GROUP:
            raise UserError(f"conv has kernels for groups of {GROUP} components, and {target.identity.name} is "
                            f"{target.hidden_size} wide; set conv to false")
        if (mask := config.mask_token_id) is not None:
            # Rows after the tokenizer's last token, its own mask, and tokens added for other purposes stand in no text.
            # A sketch of a target may have no tokenizer: a run asks again.
            tokens = target.tokenizer
            if tokens is not None and 0 <= mask < len(tokens) and mask != tokens.mask_token_id and (
                    mask not in {*tokens.added_tokens_decoder} - {*tokens.all_special_ids, *target.eos_ids}):
                raise UserError(f"mask_token_id {mask} is {tokens.decode([mask])!r} to "
                                f"{target.identity.name}, a token that its text has; choose the id of a reserved "
                                "token, or leave mask_token_id out for a row of the drafter's own")
        return replace(config, taps=chosen_taps(config.taps, target)), block_like(target, config.rope_base, True)

    def initialise(self, target: Target) -> None:
        """Let the context be the highest tap, and every slot pass on what it reads to the target's last norm."""
        self.fc.weight.zero_()
        self.fc.weight[:, -self.hidden_size :] = torch.eye(self.hidden_size, device=self.fc.weight.device)
        for layer in self.layers:
            cast(SlotBlock, layer).zero_output()
        self.norm.weight.copy_(last_norm(target, self.block.norm_eps))
        table_VD = target.model.get_input_embeddings().weight
        if self.config.mask_token_id is None:
            self.mask_embedding.copy_(table_VD.mean(0))
        self.correction.initialise(table_VD)
        if self.confidence is not None:
            nn.init.zeros_(self.confidence.weight)
            nn.init.zeros_(self.confidence.bias)

    def carried(self, start: Self) -> dict[str, Tensor]:
        """The start's tensors; `fc` has columns of zeros for further taps, and a correction those of a new one for
        further ranks and tokens."""
        own, found = {name: tensor.clone() for name, tensor in self.state_dict().items()}, {**super().carried(start)}
        found["fc.weight"] = columns_for(self.taps, start.fc.weight, start.taps)
        for name, part in self.correction.named_modules():
            if isinstance(part, OwnOutput) and self.config.correction == start.config.correction:
                former = cast(OwnOutput, start.correction.get_submodule(name))
                rows = OwnOutput(former.in_features, part.out_features, bias=False).to(part.weight)
                rows.weight.zero_()
                carry_rows(rows, self.token_ids, former, start.token_ids, self.vocab_size)
                found[f"correction.{name}.weight"] = rows.weight
        for name in own.keys() & found.keys() - {"token_ids"}:
            # Further slots and ranks are those of a new drafter, which add nothing.
            kept = tuple(slice(min(sizes)) for sizes in zip(own[name].shape, found[name].shape, strict=True))
            own[name][kept] = found[name][kept].to(own[name])
        return own

    def project(self, hidden: Tensor, step: int) -> Tensor:
        """Draft logits [..., Q] of states [..., X]: the target's output layer, corrected. Steps after those of a block
        are in training the same ones without a correction."""
        logits = self.output_rows()(hidden[..., : self.hidden_size])
        return self.correction.correct(logits, hidden) if step < self.config.num_steps else logits

    def candidates(self, states: Tensor) -> tuple[Tensor, Tensor]:
        """(tokens, their logits), [..., C] each, of a correction that chooses among them, for states [..., X]."""
        return self.correction.candidates(states, self.output_rows())

    def output_parameters(self, step: int) -> tuple[nn.Parameter, ...]:
        """The trained weights that `project` and `judge` read."""
        judging = () if self.confidence is None else tuple(self.confidence.parameters())
        return (*self.correction.output_parameters(), *judging)

    def judge(self, states: Tensor, step: int) -> Tensor:
        """Logit of the acceptance, from the slot's state and W1 of the token before."""
        if self.confidence is None:
            raise ValueError("this drafter does not judge its guesses: its setting confidence is false")
        logit: Tensor = self.confidence(states[..., : self.hidden_size + self.config.rank])[..., 0]
        return logit / self.judge_temperatures_K[step]

    def context(self, taps: dict[int, Tensor]) -> Tensor:
        """The states of the text that all layers read, [B, N, D]."""
        return cast(Tensor, self.hidden_norm(self.fc(torch.cat(self.tapped(taps), dim=-1))))

    def slots(self, roots_BA: Tensor, newest_BAD: Tensor | None, attention: AttentionContext) -> Tensor:
        """States of the slots that guess, or of all if the correction reads them, [B, A, K, D], of blocks with these
        first tokens, after texts with these newest states."""
        mask = self.mask_embedding if self.config.mask_token_id is None else self.embed(self.mask_id)
        first_BAD = self.embed(roots_BA)
        inputs = [first_BAD, *[mask.expand_as(first_BAD)] * (self.block_size - 1)]
        # Slot by slot, so that each slot's states of all blocks are adjacent.
        hidden_BND = torch.cat([slot if newest_BAD is None else slot + newest_BAD for slot in inputs], dim=1)
        for layer in self.layers:
            hidden_BND = layer(hidden_BND, attention)
        first = 0 if self.correction.reads_block else self.block_size - self.config.num_steps
        guessing = hidden_BND.chunk(self.block_size, dim=1)[first:]
        return cast(Tensor, self.norm(torch.stack(guessing, dim=2)))

    # Training --------------------------------------------------------------------------------------------------------

    def forward(self, features: Features) -> Drafts:
        """States of all draft steps along the true tokens: in training after sampled places, if the settings say so,
        otherwise after every position. A step is learned where all tokens up to its label are supervised: a draft
        starts nowhere else, and reaches no token beyond a gap. UserError if rows are too short for a block."""
        self.require_rows(features, "block_size,")
        length, steps = features.tokens_BL.shape[1], self.config.num_steps
        indices_BA: Tensor | None = None
        valid_BAK = useful(features, 1 + steps)[..., 1:] if self.training else None
        if valid_BAK is not None and self.config.anchors is not None and self.config.anchors < length:
            chance_BL = torch.rand(valid_BAK.shape[:2], device=valid_BAK.device).masked_fill(~valid_BAK[..., 0], 2.0)
            indices_BA = chance_BL.topk(self.config.anchors, largest=False).indices.sort().values
            valid_BAK = valid_BAK.gather(1, indices_BA[..., None].expand(-1, -1, steps))
        text = AttentionContext.training(features, self.window)
        attention = SlotAttention.after(text, features, indices_BA, self.block_size, causal=self.config.causal)
        context_BLD = self.context(features.taps)
        for number, layer in enumerate(self.layers):
            attention.text[number] = cast(SlotBlock, layer).self_attn.keys(context_BLD, text)
        order_L = torch.arange(length, device=features.tokens_BL.device)
        places_BA = order_L.expand_as(features.tokens_BL) if indices_BA is None else indices_BA
        # Beyond a row's end stands its last token; no step learns there.
        before_BAK = torch.stack([features.tokens_BL.gather(1, (places_BA + 1 + step).clamp(max=length - 1))
                                  for step in range(steps)], dim=-1)
        newest_BAD = spread(context_BLD, places_BA) if self.config.residual else None
        slots_BAKX = self.correction.begin(self.slots(before_BAK[..., 0], newest_BAD, attention))
        path_BAP = slots_BAKX.new_zeros(*before_BAK.shape[:2], self.correction.path_size)
        if self.correction.path_size:
            states = []
            for step in range(steps):
                path_BAP, state_BAX = self.correction.extend(slots_BAKX[:, :, step], path_BAP, before_BAK[..., step],
                                                             self.embed, step)
                states.append(state_BAX)
            states_BAKX = torch.stack(states, dim=2)
        else:
            # All guesses at once: a table has one dense gradient for them.
            states_BAKX = self.correction.extend(slots_BAKX, path_BAP, before_BAK, self.embed, 0)[1]
        offsets = self.offsets
        if valid_BAK is not None and self.correction.alone_too:
            # The slots alone learn too: the candidates, what engines refine, or what a bias is added to.
            valid_BAK, states_BAKX = valid_BAK.repeat(1, 1, 2), states_BAKX.repeat(1, 1, 2, 1)
            offsets = offsets * 2
        return Drafts(hidden_BLKD=states_BAKX, offsets=offsets, valid_BLK=valid_BAK, indices_BL=indices_BA,
                      choices=steps if valid_BAK is not None and self.correction.chooses else 0,
                      candidates=self.candidates)

    # Decoding --------------------------------------------------------------------------------------------------------

    def start(self, rows: int, capacity: int) -> BlockState:
        """A state in which no row has been observed yet."""
        self.pack_linears()
        device, width = self.fc.weight.device, self.block.hidden_size
        newest = RowBuffer(rows, width, device=device, dtype=self.dtype) if self.config.residual else None
        # The slots of a block take places after the text for one pass, whatever the tree.
        held = BlockRows(self.num_layers, rows, capacity + self.block_size, device, window=self.window)
        return BlockState(held, newest)

    @torch.no_grad()
    def observe(self, state: BlockState, rows_R: Tensor, observation: Observation) -> None:
        """Add the keys and values of the new positions to every layer's cache."""
        state.drop_tree()
        padding_RN1 = ~observation.real_BN[..., None]
        taps = {layer: states.masked_fill(padding_RN1, 0) for layer, states in observation.taps.items()}
        rows, counts = observation.on_host(rows_R)
        attention = state.rows.read(rows, observation.tokens_BN.shape[1])
        with self.packing.installed():
            context_RND = self.context(taps)
            for number, layer in enumerate(self.layers):
                state.rows.cache.write(number, *cast(SlotBlock, layer).self_attn.keys(context_RND, attention))
        if state.newest is not None:
            state.newest.store(rows_R, observation.newest(context_RND), observation.counts_B > 0)
        state.rows.commit(observation.counts_B, counts)

    @torch.no_grad()
    def expand(self, state: BlockState, frontier: Frontier) -> Scores:
        """Scores of the children of one level of the tree; without a correction of all levels at once. The backbone
        runs for the root alone. Raises ValueError if the level is deeper than a block."""
        (rows, width), step, steps = frontier.nodes_BF.shape, state.level, self.config.num_steps
        if step == (1 if self.config.correction == "none" else steps):
            raise ValueError(f"a block of {self.block_size} slots drafts {steps} tokens, all of them asked for already")
        with self.packing.installed():
            if step == 0:
                attention = state.rows.read(list(range(rows)), self.block_size, causal=self.config.causal)
                newest_R1D = None if state.newest is None else state.newest.values[:rows, None]
                state.slots_RKX = self.correction.begin(self.slots(frontier.tokens_BF, newest_R1D, attention)[:, 0])
                paths_RFP = state.slots_RKX.new_zeros(rows, width, self.correction.path_size)
            else:
                paths_RFP = spread(state.paths_RFP, frontier.parents_among(state.nodes_RF))
            state.level, state.nodes_RF = step + 1, frontier.nodes_BF
            if self.config.correction == "none":
                return Scores.from_logits(self.project(state.slots_RKX, 0)[:, None], self.token_ids)
            slot_RFX = state.slots_RKX[:, step, None].expand(-1, width, -1)
            state.paths_RFP, states_RFX = self.correction.extend(slot_RFX, paths_RFP, frontier.tokens_BF, self.embed,
                                                                 step)
            if self.correction.chooses:
                ids_RFQ, logits_RFQ = self.candidates(states_RFX)
                return replace(Scores.from_logits(logits_RFQ[:, :, None], None, states_RFX[:, :, None]),
                               candidates_BFHQ=ids_RFQ[:, :, None], all_guesses=True)
            logits_RFQ = self.project(states_RFX, step)
        return Scores.from_logits(logits_RFQ[:, :, None], self.token_ids, states_RFX[:, :, None])
