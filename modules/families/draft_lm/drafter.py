"""A small language model with the target's vocabulary that reads the text itself and drafts token by token (FastDraft,
arXiv:2411.11055), or several tokens in one pass through mask tokens (PARD, arXiv:2504.18583).

It reads tokens, and with `taps` the target's states too (PARD-2, arXiv:2605.08632). Its state at position p predicts
the token at p + 1: while decoding it reads every token up to the root, and the root's own state scores the root's
children.

Shapes: B rows, L positions, F nodes of a draft pass, H depths scored at once, K draft steps, D hidden size of the
draft, V target vocabulary, Q entries of the draft vocabulary."""

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any, Self, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from ...config_checks import settings_of
from ...errors import UserError
from ...features import Features
from ...interfaces.drafter import Drafter, Drafts, FamilyCard, Training
from ...interfaces.proposer import Observation, Scores
from ...parts.causal_drafter import (
    SLOT,
    WAITING,
    CausalDraft,
    CausalState,
    TextAndSlots,
    by_depth,
    conditional_drop,
    pack,
    useful,
    visible,
)
from ...parts.decoder_block import AttentionContext
from ...parts.feature_drafter import columns_for
from ...row_buffers import RowBuffer
from ...target.attention.segment_attention import DENSE_LENGTH, Sight, mask_arguments, takes_segments, visible_text
from ...target.attention.tree_attention import place_arguments
from ...target.devices.compiled_layers import of_transformers
from ...target.draft_vocabulary import carry_rows, over_all_tokens, require_ids
from ...target.kv_cache import RowCache
from ...target.linear_forms import LinearForms
from ...target.loading.hf_folder import folder_digest, read_model, require_vocabulary
from ...target.loading.model_parts import TargetIdentity, decoder_of, layer_list
from ...target.model import Target, post_process
from ...target.recurrent.recurrent_passes import install
from ...target.submodel import config_of, copy_layers, fields_of, new_model, window_of
from .settings import DraftLMConfig, check_mask_token, planned

SCALE = 0.02  # Factor of what the target's states add to an input, as in PARD-2's code
DROPPED = 0.1  # Share of training texts without it, so that a draft works where nothing gives it the states


class DraftLM(CausalDraft, Drafter[CausalState]):
    """A causal language model of transformers as a drafter; it borrows no weights. Own weights: `decoder.*` under
    transformers' names, `head.weight` unless the output layer is the embedding, `mask_embedding` with several depths,
    `target_proj.weight` with taps, `token_ids` with a reduced vocabulary. Make a new one with `DraftLM.create`."""

    family = "draft_lm"
    card = FamilyCard(
        name="draft language model", papers=("2411.11055", "2504.18583", "2605.08632"),
        guesses="a small model with the target's vocabulary, new or from its layers, token by token or several a pass "
                "through mask tokens, which may read its states",
        cost="needs no target states in training; one model run for each level of the tree")
    config: DraftLMConfig
    config_class = DraftLMConfig
    # Cross entropy on the target's answers at several temperatures, at all depths alike (FastDraft, section 3); 1e-3
    # suits a new model, about half of it an initialised one.
    trained_as = Training(lr=6e-4, warmup_steps=40, weight_decay=0.01, decay=1.0)
    mask_embedding: nn.Parameter | None
    target_proj: nn.Linear | None  # Of the tapped states and the final one, in this order
    reads_states = False
    compiled_form = staticmethod(of_transformers)

    def __init__(self, config: DraftLMConfig, model: Any, target_size: int) -> None:
        super().__init__(config.vocabulary_size)
        self.config, self.architecture = config, model.config
        self.decoder: nn.Module = decoder_of(model)
        if install(self.decoder):
            raise UserError("a draft model reads the nodes of a tree one level at a time, and "
                            f"{type(model).__name__} has recurrent layers; set drafter.folder to a model with "
                            "attention alone")
        output = model.get_output_embeddings()
        self.vocab_size, self.state_size = output.weight.shape
        # A list, which registers nothing: the weights are named under `decoder` alone.
        self.layers = list(layer_list(self.decoder, self.architecture.num_hidden_layers))
        self.compiled_kinds = tuple({type(layer) for layer in self.layers})
        self.num_layers, size = len(self.layers), config.vocabulary_size
        self.cache_groups = [tuple(weight.shape for weight in layer.parameters()) for layer in self.layers]
        check_mask_token(config, self.vocab_size)
        self.kept, self.slots, self.window = range(self.num_layers), config.depths - 1, window_of(self.architecture)
        self.positions = int(getattr(self.architecture, "max_position_embeddings", 1 << 30))
        """Largest context of the draft model, in tokens."""
        if self.slots:
            # The token itself, then mask token after mask token.
            self.reach = self.trained_steps = config.depths
            self.offsets = tuple(range(1, config.depths + 1))
        else:
            self.unrolls, self.offsets = 0, (1,)
        tied = output.weight is self._embedding().weight
        self.head = None if tied and size is None else output if size is None else \
            nn.Linear(self.state_size, size, bias=output.bias is not None)
        self.mask_embedding = nn.Parameter(self._embedding().weight.detach().mean(0)) if self.slots else None
        self.reads_states, self.taps, self.target_proj = config.taps is not None, config.taps or (), None
        self.reads_own_text = not self.reads_states
        if config.taps is not None:
            # Zero: the first drafts are those of a draft that reads tokens alone.
            self.target_proj = nn.Linear((len(self.taps) + 1) * target_size, self.state_size, bias=False)
            nn.init.zeros_(self.target_proj.weight)
        self._embedding().weight.requires_grad_(not config.freeze_embedding)
        self._linears: LinearForms | None = None

    def _embedding(self) -> nn.Embedding:
        return cast(nn.Embedding, self.decoder.get_input_embeddings())  # type: ignore[operator]

    @property
    def device(self) -> torch.device:
        """Device of the weights."""
        return self._embedding().weight.device

    # Making one ------------------------------------------------------------------------------------------------------

    @classmethod
    def fitted(cls, config: DraftLMConfig, target: Target) -> tuple[DraftLMConfig, None]:
        """(settings, None). Raises UserError if the model does not fit this target."""
        planned(config, target)
        return config, None

    @classmethod
    def sources(cls, config: DraftLMConfig) -> dict[str, str]:
        """The hash of the model in the folder."""
        return {} if config.folder is None else {"model_in_folder": folder_digest(Path(config.folder))}

    @classmethod
    def serves_all(cls, description: Mapping[str, Any]) -> bool:
        """True for one that reads tokens alone."""
        return description.get("taps") is None

    @classmethod
    def create(cls, config: DraftLMConfig, target: Target, token_ids_Q: Tensor | None = None,
               start: Self | None = None) -> Self:
        """A new draft model for `target`, bound to it. Raises UserError if layers, folder, ids or start do not fit."""
        require_ids(config.vocabulary_size, token_ids_Q)
        # A target on the meta device, used for planning, has no values.
        architecture = planned(config, target) if start is None else start.architecture
        on_meta = target.device.type == "meta"
        if config.folder is not None and not on_meta:
            model = read_model(Path(config.folder), target)
            if config.window is not None:
                held, model = model.state_dict(), new_model(architecture)
                model.load_state_dict(held)
        else:
            with target.device if on_meta else nullcontext():
                model = new_model(architecture)
        if config.layers is not None and not on_meta:
            copy_layers(model, target, config.layers)
        drafter = cls(config, model, target.hidden_size)
        if start is None and not on_meta:
            with torch.no_grad():
                embedding_VD, output = drafter._embedding().weight, model.get_output_embeddings()
                # Embeddings that are not finite in the model they come from become zero: a guess reads other guesses'
                # states, and 0 * NaN is NaN.
                embedding_VD.masked_fill_(~embedding_VD.isfinite().all(-1, keepdim=True), 0.0)
                if drafter.token_ids is not None and drafter.head is not None and token_ids_Q is not None:
                    drafter.token_ids.copy_(token_ids_Q)
                    for name, parameter in drafter.head.named_parameters():
                        parameter.copy_(getattr(output, name)[token_ids_Q])
                if drafter.mask_embedding is not None and config.mask_token_id is not None:
                    drafter.mask_embedding.copy_(embedding_VD[config.mask_token_id])
        # Half precision would lose small updates: trained weights stay in float32.
        drafter.to(device=target.device, dtype=torch.promote_types(target.dtype, torch.float32))
        if start is not None and not on_meta:
            drafter._take_over(start, token_ids_Q)
        drafter.bind(target)
        return drafter

    @torch.no_grad()
    def _take_over(self, start: Self, token_ids_Q: Tensor | None) -> None:
        """Replace all weights by those of a start. Raises UserError for a token without an output row."""
        apart = ("head.", "token_ids", "target_proj.")
        carried = {name: tensor for name, tensor in start.state_dict().items() if not name.startswith(apart)}
        self.load_state_dict({**self.state_dict(), **carried})
        if self.token_ids is not None and token_ids_Q is not None:
            self.token_ids.copy_(token_ids_Q)
        if self.target_proj is not None and start.target_proj is not None:
            # The final state, whose columns are the last, has no number of a layer.
            columns = columns_for((*self.taps, -1), start.target_proj.weight, (*start.taps, -1))
            self.target_proj.weight.copy_(columns)
        if self.head is None:
            return
        former = start._embedding() if start.head is None else start.head
        there_Q = carry_rows(self.head, token_ids_Q, former, start.token_ids, self.vocab_size)
        if not bool(there_Q.all()):
            # Only a whole output layer has a row for each token: that of the model it came from is not kept.
            raise UserError(f"drafter.vocabulary_size {self.config.vocabulary_size} would need output rows of "
                            f"{int((~there_Q).sum())} tokens that the start of {start.config.vocabulary_size} tokens "
                            "does not have; leave vocabulary_size out to keep those of the start")

    def describe(self) -> dict[str, Any]:
        """The settings and the model's configuration, JSON-ready, without the folder of its first weights."""
        return {**asdict(self.config), "folder": None, "model": fields_of(self.architecture)}

    @classmethod
    def rebuild(cls, description: dict[str, Any], identity: TargetIdentity) -> Self:
        """An equal drafter whose weights are NaN until loaded. Raises UserError on an unknown description."""
        given = settings_of(description, DraftLMConfig, "a draft language model is", "model")
        model = new_model(config_of(given.pop("model")))
        drafter = cls(DraftLMConfig(**given), model, identity.hidden_size)
        with torch.no_grad():
            for parameter in drafter.parameters():
                parameter.fill_(torch.nan)
        return drafter

    def bind(self, target: Target) -> None:
        """Compare the vocabularies, which must be done before it runs; it borrows nothing. Raises UserError if they
        differ, or it reads states of another width."""
        require_vocabulary(self.vocab_size, target, "at hand")
        if self.target_proj is not None and \
                self.target_proj.in_features != (wanted := (len(self.taps) + 1) * target.hidden_size):
            raise UserError(f"the draft model reads {self.target_proj.in_features} numbers of the target's states, and "
                            f"those of {target.identity.name} are {wanted}; load the target it was made for")
        self._linears = target.linears
        if target.dtype == torch.float64:
            # As the target's own: torch has no float64 product over grouped experts.
            self.decoder.set_experts_implementation("eager")  # type: ignore[operator]

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        """Move or cast the weights. Rotary frequencies are only moved: rounded ones would change positions."""
        kept = {name: buffer for name, buffer in self.decoder.named_buffers() if buffer.is_floating_point()}
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, buffer in kept.items():
            owner, _, last = name.rpartition(".")
            setattr(self.decoder.get_submodule(owner), last, buffer.to(self.device))
        return self

    def recompute_layers(self) -> bool:
        """Let training compute the states inside of each layer again."""
        # transformers 5.23 would have it called activation_checkpointing_enable, which 5.17 has not.
        self.decoder.gradient_checkpointing_enable(  # type: ignore[operator]
            gradient_checkpointing_kwargs={"use_reentrant": False})
        return True

    # Training --------------------------------------------------------------------------------------------------------

    def forward(self, features: Features) -> Drafts:
        """States of every depth at all positions; segments do not see each other."""
        if not self.slots:
            positions_BL = features.positions_BL
            final_BLD = self._states(self.embed(features.tokens_BL), visible_text(features, self.decoder), positions_BL,
                                     positions_BL)
            return Drafts(hidden_BLKD=final_BLD[:, :, None], offsets=self.offsets)
        # One pass over the texts and the kept mask tokens; in evaluation mode all are kept.
        kept_BLK = torch.ones(*features.tokens_BL.shape, self.config.depths, dtype=torch.bool, device=self.device)
        if self.training:
            kept_BLK = conditional_drop(useful(features, self.config.depths))
        slots = pack(kept_BLK)
        masks_BS = torch.full_like(slots.anchors_BS, SLOT)
        positions_BS = features.positions_BL.gather(1, slots.anchors_BS) + slots.depths_BS
        positions_BM = torch.cat([features.positions_BL, positions_BS], dim=1).clamp(max=self.positions - 1)
        embedded_BMD = self.embed(torch.cat([features.tokens_BL, masks_BS], dim=1))
        if self.target_proj is not None:
            given_BLD = self._given_text(features)
            masks_BSD = given_BLD.gather(1, slots.anchors_BS[..., None].expand(-1, -1, given_BLD.shape[-1]))
            embedded_BMD = embedded_BMD + torch.cat([given_BLD, masks_BSD], dim=1)
        dense = positions_BM.shape[1] <= DENSE_LENGTH or not takes_segments(self.decoder)
        sight = visible(features, slots) if dense else TextAndSlots.after(features, slots, positions_BM)
        states_BMD = self._states(embedded_BMD, sight, positions_BM, positions_BM)
        hidden_BLKD = by_depth(states_BMD, slots, kept_BLK.shape[1], self.config.depths)
        return Drafts(hidden_BLKD=hidden_BLKD, offsets=self.offsets, valid_BLK=kept_BLK if self.training else None)

    def given(self, final: Tensor, taps: Mapping[int, Tensor]) -> Tensor:
        """Additions of the target's states at tokens to the inputs of the tokens after them, [..., D]."""
        projection = cast(nn.Linear, self.target_proj)
        read = torch.cat([*(taps[layer] for layer in self.taps), final], dim=-1)
        return projection(read.to(projection.weight.dtype)) * SCALE  # type: ignore[no-any-return]

    def _given_text(self, features: Features) -> Tensor:
        """Additions at training rows, [B, L, D]: none at the first token of a text, nor in texts that go without."""
        segments_BL = features.segments_BL
        first_BL = functional.pad(segments_BL[:, 1:] != segments_BL[:, :-1], (1, 0), value=True) | (segments_BL < 0)
        if self.training:
            chance_BL = torch.rand(segments_BL.shape, device=segments_BL.device).gather(1, segments_BL.clamp(min=0))
            first_BL = first_BL | (chance_BL < DROPPED)
        given_BLD = self.given(features.final(), features.taps).roll(1, dims=1)
        return given_BLD.masked_fill(first_BL[..., None], 0.0)

    def project(self, hidden: Tensor, step: int) -> Tensor:
        """Draft logits [..., Q] of states [..., D]; every step has the same output layer."""
        if self.head is None:
            tied_VD = self._embedding().weight
            logits: Tensor = functional.linear(hidden.to(tied_VD.dtype), tied_VD)
        else:
            logits = self.head(hidden.to(self.head.weight.dtype))
        return post_process(logits, self.architecture, self.architecture)

    def output_parameters(self, step: int) -> tuple[nn.Parameter, ...]:
        """The trained weights that `project` reads."""
        found = (self._embedding() if self.head is None else self.head).parameters()
        return tuple(parameter for parameter in found if parameter.requires_grad)

    # Passes ----------------------------------------------------------------------------------------------------------

    def embed(self, tokens: Tensor) -> Tensor:
        """Embeddings [..., D] of token ids; the learned one for mask tokens."""
        if self.mask_embedding is None:
            return cast(Tensor, self._embedding()(tokens))
        found = self._embedding()(tokens.clamp(min=0))
        return torch.where((tokens == SLOT)[..., None], self.mask_embedding.to(found.dtype), found)

    def _states(self, embedded_BFD: Tensor, visible: Sight, positions_BF: Tensor, key_positions_BW: Tensor,
                cache: RowCache | None = None) -> Tensor:
        """Final states of one pass, [B, F, D]."""
        if self._linears is None:
            raise RuntimeError("this draft language model is not bound to a target; call bind(target) first")
        return cast(Tensor, self.decoder(inputs_embeds=embedded_BFD, past_key_values=cache, use_cache=cache is not None,
                                         **place_arguments(positions_BF, key_positions_BW),
                                         **mask_arguments(visible, self.decoder, embedded_BFD)).last_hidden_state)

    def start(self, rows: int, capacity: int) -> CausalState:
        """An empty state; the linear layers are packed if they have changed."""
        tied_VD = self._embedding().weight if self.head is None else None
        packed_from = 0 if self._linears is None else self._linears.packing.packed_from
        self.packing.refresh(self, packed_from=packed_from, output_VD=tied_VD)
        state = super().start(rows, capacity)
        if self.target_proj is not None:
            state.give(RowBuffer(rows, WAITING + 1, self.state_size, device=self.device,
                                 dtype=self._embedding().weight.dtype))
        return state

    def added(self, observation: Observation) -> Tensor:
        """Additions of the target's states at the observed tokens to the inputs of the tokens after them."""
        with self.packing.installed():
            given_RND = self.given(observation.final_BND, observation.taps)
        return given_RND.masked_fill(~observation.real_BN[..., None], 0.0)

    def run(self, tokens_BF: Tensor, attention: AttentionContext, key_positions_BW: Tensor,
            given_BFD: Tensor | None = None) -> Tensor:
        """Final states of one pass."""
        positions_BF = attention.positions_BN.clamp(max=self.positions - 1)
        with self.packing.installed():
            embedded_BFD, visible_BFW = self.embed(tokens_BF), attention.visible_BNW
            embedded_BFD = embedded_BFD if given_BFD is None else embedded_BFD + given_BFD
            return self._states(embedded_BFD, visible_BFW, positions_BF, key_positions_BW, attention.cache)

    def read_out(self, final: Tensor) -> Scores:
        """Scores by its own output layer."""
        packed = self.packing.output
        with self.packing.installed():
            logits = self.project(final, 0) if packed is None else \
                post_process(packed(final), self.architecture, self.architecture)
        return Scores.from_logits(logits, self.token_ids, final)


@torch.no_grad()
def as_model(drafter: DraftLM) -> Any:
    """The draft as a causal language model of transformers, over the whole vocabulary. A reduced output layer becomes a
    whole one, in which no other token is ever the best one (`over_all_tokens`)."""
    given = fields_of(drafter.architecture) | {"tie_word_embeddings": drafter.head is None}
    model = new_model(config_of(given))
    decoder_of(model).load_state_dict(drafter.decoder.state_dict())
    if drafter.head is not None:
        for name, parameter in drafter.head.named_parameters():
            whole = over_all_tokens(parameter.detach(), drafter.token_ids, drafter.vocab_size)
            getattr(model.get_output_embeddings(), name).copy_(whole)
    if drafter.mask_embedding is not None and drafter.config.mask_token_id is not None:
        model.get_input_embeddings().weight[drafter.config.mask_token_id] = drafter.mask_embedding
    return model.to(drafter._embedding().weight.dtype).eval()
