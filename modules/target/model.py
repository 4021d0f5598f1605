"""The frozen target model: a causal LM with tree passes and hidden-state taps.

Shapes: B rows, N tokens of a pass, L positions, D hidden size, V vocabulary, W cache slots in use."""

from collections.abc import Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

from ..errors import UserError
from ..features import Features
from .adapter import Adapter
from .attention.segment_attention import Segments, additive, mask_arguments, visible_text
from .attention.tree_attention import CHUNKED, NAME, attend_by, place_arguments, recording, register, tuned
from .devices.compiled_layers import PACKED, CompiledLayers, Compiler, of_transformers
from .devices.placement import Placement
from .linear_forms import LinearForms, Pack, Packing
from .loading import self_check
from .loading.generation_defaults import GenerationDefaults, read_defaults
from .loading.model_parts import TargetIdentity, copy_modules, decoder_of, excerpt, layer_list, rope_by_kind, text_of
from .loading.peft_adapter import MergedAdapter
from .loading.stored_weights import require_finite
from .partial_passes import PassLayout
from .recurrent.recurrent_passes import SegmentPass, install, running
from .target_rows import TargetRows


class Target:
    """A Hugging Face causal language model, frozen, with the few operations the loop and the trainers need. It is no
    `nn.Module`: a trainer that holds it neither saves, moves, casts nor wraps it.

    The model is any causal language model of transformers whose attention takes a mask; of one that reads pictures or
    sound too it is the text alone, see `text_of`. On torch's meta device it has no values and is not checked. With
    another target of which it is a copy, `shared_with`, it shares packed layers of the very same weight. Processes that
    share weights by the placement must run every pass together. Raises UserError if the architecture cannot be
    verified, the check of `self_check` finds that the passes of this class do not equal the model's own, or its
    generation config asks for more than decoding offers."""

    def __init__(self, model: Any, tokenizer: Any, *, name: str, pack: Pack | Packing = 1,
                 shared_with: "Target | None" = None, placement: Placement | None = None) -> None:
        self.tokenizer, self.placement = tokenizer, placement or Placement()
        model = text_of(model, spread=self.placement.spread)
        self_check.refuse_unverifiable(model)
        register()
        model.eval().requires_grad_(False)
        if model.dtype == torch.float64:
            # torch has no float64 product over grouped experts; one expert after the other computes the same.
            model.set_experts_implementation("eager")
        self.model = model
        self.config = model.config.get_text_config()
        self.decoder: nn.Module = decoder_of(model)
        self.head: nn.Module = model.get_output_embeddings()
        self.layers = layer_list(self.decoder, self.config.num_hidden_layers)
        self.linears = LinearForms(model, 0)
        self.dtype: torch.dtype = model.dtype  # Floating-point type of the hidden states
        self.vocab_size = int(model.get_output_embeddings().weight.shape[0])  # Rows of the output layer
        self.hidden_size = int(self.config.hidden_size)  # Width of the hidden states
        self.num_layers = int(self.config.num_hidden_layers)  # Number of decoder layers
        sketched = self.device.type == "meta"
        if not sketched:
            require_finite(model, f"the target {name!r}")
        self.identity = TargetIdentity.of(model, tokenizer, name)
        self.adapter: MergedAdapter | None = getattr(model, "merged_adapter", None)
        self.defaults: GenerationDefaults = read_defaults(model.generation_config, tokenizer, name, self.vocab_size)
        self.eos_ids, self.biases = self.defaults.eos_ids, self.defaults.biases  # Read when the target was loaded
        self.native_attention: str = self.config._attn_implementation
        self.recurrent = install(self.decoder)  # Whether some layers have recurrent states
        self.cache_groups: Sequence[Hashable] = range(self.num_layers)  # Equal where keys and values have equal shapes
        self.kept_layers: Sequence[int] = ()  # Those that draft as `layer_skip`, as a search found them; empty for none
        self.is_native = False  # Whether a block of `native` runs, in which the model knows no trees
        self.broken_V: Tensor | None = None  # True at tokens whose embedding holds NaN or infinity; None without any
        self.compiler = Compiler()  # Of these layers and of those of drafters that draft for them
        self._compiled: CompiledLayers | None = None
        self.kept: list[Any] = []  # Batches of the decoding loop with their records, for the next call
        if not sketched:
            least_V, largest_V = model.get_input_embeddings().weight.detach().aminmax(dim=-1)
            broken_V = ~(least_V.isfinite() & largest_V.isfinite())
            self.broken_V = broken_V if bool(broken_V.any()) else None
            # Float32 products in float32: the shorter mantissas that torch may use look like errors.
            allowed = torch.get_float32_matmul_precision()
            torch.set_float32_matmul_precision("highest")
            try:
                self._check_and_install(pack, None if shared_with is None else shared_with.linears)
            finally:
                torch.set_float32_matmul_precision(allowed)

    def _check_and_install(self, pack: Pack | Packing, shared: LinearForms | None) -> None:
        """Give the model this package's attention and linear layers, and compare it with what it was: UserError if a
        token tree is not read as the model reads text."""
        # The sliding window and the chunk of each layer, in tokens; None where it never ends within the context.
        kinds = getattr(self.config, "layer_types", None) or ["sliding_attention"] * self.config.num_hidden_layers
        window, chunk = (size if size and size < self.context_length else None for size in (
            getattr(self.config, "sliding_window", None), getattr(self.config, "attention_chunk_size", None)))
        reaches = [(window if kind in ("sliding_attention", "hybrid_sliding") else None,
                    chunk if kind == CHUNKED else None) for kind in kinds]
        # A window that the check's text does not leave shows nothing, and in half precision rounding hides errors: an
        # excerpt in float32 is checked too. It is copied while the model still has its own attention to compare with.
        bounds: list[Any] = [part.floor_scale for part in self.decoder.modules() if tuned(part)]
        beyond = any(bound is not None and bound >= self_check.TEXT_LENGTH
                     for bound in chain(bounds, *reaches))
        small = None
        if beyond or self.dtype not in self_check.BOUNDS:
            small = excerpt(self.model, short_windows=beyond, spread=self.placement.spread)
        text_1L = self.readable_tokens(self_check.TEXT_LENGTH)[None]
        name = self.identity.architecture + (f" with {self.adapter.named}" if self.adapter is not None else "")
        with self_check.explained(name), torch.no_grad():
            expected_1LV = self_check.own_logits(self.model, text_1L, steps=self.recurrent)
        self.linears = LinearForms(self.model, pack, shared)
        rows = self.start(1, self_check.TEXT_LENGTH + 1)
        with self_check.explained(name), recording(self.decoder) as calls:
            found_1LV = self_check.read_as_tree(rows, text_1L)
        self.cache_groups = rows.cache.shapes
        attending = {layer: reach for layer, reach in enumerate(reaches)
                     if not self.recurrent or self.cache_groups[layer] is not None}
        self.attention_calls = self_check.check_attention(
            name, self.config, attending, calls, passes=self_check.PASSES, context_length=self.context_length)
        # Latent attention stores what keys and values are made of, and some layers attend with keys of an earlier one.
        read = [tuple(dict.fromkeys(((groups, width), (groups, wide))))
                for _, groups, width, wide in (call.shape for call in calls[: len(attending)])]
        self._stores_what_it_reads = read == [self.cache_groups[layer] for layer in attending]
        self_check.check_logits(name, self.dtype, found_1LV, expected_1LV, recurrent=self.recurrent)
        if small is not None:
            Target(small, None, name=self.identity.name, pack=0)

    @property
    def device(self) -> torch.device:
        """Device of the embeddings: inputs go there."""
        return self.model.get_input_embeddings().weight.device  # type: ignore[no-any-return]

    @property
    def layer_devices(self) -> list[torch.device]:
        """Device of each layer: its keys and values stay there."""
        places = [next(layer.parameters()).device for layer in self.layers]
        # Weights that stay on disk are brought to where the rest is.
        return [self.device if self.placement.slow and place.type == "meta" else place for place in places]

    @property
    def context_length(self) -> int:
        """Most tokens of a sequence, prompt and answer together."""
        # Frequencies of longrope change with the longest position of a pass: a draft or a neighbouring row would change
        # them. Up to their bound they are those of short texts for all.
        bounds = [int(rope["original_max_position_embeddings"])
                  for rope in rope_by_kind(getattr(self.config, "rope_parameters", None)).values()
                  if rope.get("rope_type") == "longrope"]
        # Doge attends to its best keys of more than this many; among equal ones, of repeated tokens, the pass decides.
        if keep := getattr(self.config, "keep_window_size", None):
            bounds.append(int(keep))
        return min([*bounds, int(getattr(self.config, "max_position_embeddings", 1 << 30))])

    def require_plain_layers(self, reader: str, *, apart: bool = True) -> None:
        """Refuse what reads on after tokens that no commit keeps, or runs some layers apart from those before them:
        UserError if layers are recurrent and have the state after the committed text alone, or for some that run
        `apart`, if one reads the keys of an earlier one."""
        name, others = self.identity.architecture, "choose another family, such as medusa, hydra or eagle3"
        if self.recurrent:
            raise UserError(f"{reader} would need the states of {name}'s recurrent layers after every token, and they "
                            f"keep the last one; {others}")
        if apart and None in self.cache_groups:
            raise UserError(f"{reader} would run layers of {name} apart from earlier ones whose keys they read; "
                            f"{others}")

    def to(self, device: torch.device | str) -> "Target":
        """Move the model; packed layers exist on the CPU only. One that is not whole on one device stays in place."""
        if self.placement.spread:
            return self
        if torch.device(device).type != "cpu":
            self.linears.use(Packing(packed_from=0))
        self.model.to(device)
        self.broken_V = None if self.broken_V is None else self.broken_V.to(self.device)
        self.kept.clear()
        return self

    @contextmanager
    def native(self) -> Iterator[Any]:
        """The model as transformers made it, own attention and plain linear layers: the reference for `generate`."""
        # The decoder's alone: nothing else of the model attends, whatever its configuration says.
        outer, self.is_native = self.is_native, True
        attend_by(self.decoder, self.native_attention)
        try:
            with self.linears.plain():
                yield self.model
        finally:
            self.is_native = outer
            if not outer:
                attend_by(self.decoder, NAME)

    def reproducible(self) -> AbstractContextManager[None]:
        """A block for work whose bytes must come out the same again: see `linear_forms`."""
        return self.linears.reproducible()

    def compiled(self) -> AbstractContextManager[None]:
        """A block whose passes run compiled layers; where they cannot be compiled, `compiler.refusal` says why."""
        if self.recurrent:
            self.compiler.refusal = f"{self.identity.architecture} has recurrent layers"
        elif self.placement.spread:
            self.compiler.refusal = "the target's layers are not whole on one device"
        elif self.linears.packed is not None:
            self.compiler.refusal = PACKED
        elif self.attention_calls != 1:
            self.compiler.refusal = (f"a layer of {self.identity.architecture} calls the attention function "
                                     f"{self.attention_calls} times and not once")
        elif not self._stores_what_it_reads:
            self.compiler.refusal = (f"the cache of {self.identity.architecture} holds other keys and values than its "
                                     "attention reads, and a compiled layer must store those")
        elif self.compiler.refusal == PACKED:
            # They no longer are.
            self.compiler.refusal = ""
        if self.compiler.refusal:
            return nullcontext()
        if self._compiled is None:
            self._compiled = CompiledLayers(list(self.layers), self.compiler, of_transformers)
        return self._compiled.installed()

    # Changed copies --------------------------------------------------------------------------------------------------

    def copy_model(self) -> Any:
        """The model once more, as transformers made it, around the very same weights: only its modules are copies,
        which can be replaced or given other weights. UserError if its layers are not whole on one device."""
        if self.placement.spread:
            raise UserError(f"a changed copy of the target needs its layers whole on one device, and target.placement "
                            f"is {self.placement.name}; set target.placement: replicated")
        with self.native() as model:
            return copy_modules(model)

    def adapted(self, adapter: Adapter) -> "Target":
        """This target with an adapter merged into it: another target, in which the adapted layers exist once more (and
        packed once more), all else is shared. UserError if it does not fit."""
        model = self.copy_model()
        adapter.merge_into(model)
        if model.get_output_embeddings().weight is not model.get_input_embeddings().weight:
            # Saved as it is now: with the tie declared, the adapted output layer would be left out.
            model.config.get_text_config().tie_word_embeddings = model.config.tie_word_embeddings = False
        return Target(model, self.tokenizer, name=f"{self.identity.name}, adapted", pack=self.linears.packing,
                      shared_with=self)

    # The output layer ------------------------------------------------------------------------------------------------

    def output_weight(self) -> Tensor:
        """The output layer's weight, [V, D]; borrowed, never to be trained or saved."""
        return self.head.weight.detach()  # type: ignore[operator]

    def post_process(self, logits: Tensor) -> Tensor:
        """The scaling and soft-capping that the model applies to the product with its output weight."""
        return post_process(logits, self.model, self.config)

    def logits(self, final: Tensor) -> Tensor:
        """Next-token logits [..., V] of final states [..., D], exactly as the model computes them."""
        return self.post_process(self.head(final))

    @torch.no_grad()
    def normed(self, states: Tensor) -> Tensor:
        """Final states of outputs of the last layer, [..., D], by the norm after the layers; UserError if none is."""
        parts = dict(self.decoder.named_children())
        place = list(parts.values()).index(self.layers)
        # OPT alone names it before them.
        names = [name for name in (*list(parts)[place:], *parts) if "norm" in name or "ln_" in name]
        if not names:
            raise UserError(f"{self.identity.architecture} has no norm after its layers, so that outputs of the last "
                            "one are no final states; give those in a folder (distill.states_from)")
        own: Tensor = parts[names[0]](states.to(self.device, self.dtype))
        return own.to("cpu", states.dtype)

    def embed(self, tokens: Tensor) -> Tensor:
        """Input embeddings [..., D] of token ids [...], as they enter the decoder."""
        embedded: Tensor = self.model.get_input_embeddings()(tokens)
        # Falcon-H1 alone scales what it looks up, and not what it is given.
        return embedded * self.config.embedding_multiplier if self.config.model_type == "falcon_h1" else embedded

    def embed_guesses(self, tokens: Tensor) -> Tensor:
        """Input embeddings [..., D] of token ids [...] for a drafter: zero where a token has no finite one. Through the
        mask of its attention a NaN would reach the other guesses of its row, and sampled drafts would not be exact."""
        embedded = self.embed(tokens)
        return embedded if self.broken_V is None else embedded.masked_fill(self.broken_V[tokens][..., None], 0.0)

    def readable_tokens(self, count: int) -> Tensor:
        """The first `count` token ids with a finite embedding, [count], repeated where there are fewer."""
        ids = torch.arange(self.vocab_size, device=self.device)
        ids = ids if self.broken_V is None else ids[~self.broken_V]
        return ids[torch.arange(count, device=self.device) % len(ids)]

    # Passes ----------------------------------------------------------------------------------------------------------

    def start(self, rows: int, capacity: int, taps: Sequence[int] = (), prefix: Sequence[int] = ()) -> TargetRows:
        """Open an empty batch of rows, for sequences of `capacity` tokens at most, the largest tree included; the
        passes give the outputs of the layers `taps`. The tokens `prefix`, with which every sequence starts, are read
        once and copied from row to row, as far as they have a finite embedding."""
        return TargetRows(self, rows, capacity, self._checked(taps), prefix)

    def looked_up(self, tokens: Tensor) -> dict[str, Tensor]:
        """The arguments that a decoder looks up by token ids [...] besides embeddings, zero where an id is -1: Gemma 3n
        and 4 would look for the tokens of given embeddings in all of their vocabulary, or go without."""
        if not getattr(self.config, "hidden_size_per_layer_input", 0):
            return {}
        found = self.decoder.get_per_layer_inputs(tokens.clamp(min=0))  # type: ignore[operator]
        return {"per_layer_inputs": found.masked_fill((tokens < 0)[..., None, None], 0.0)}

    def read_nodes(self, embedded_BND: Tensor, tokens_BN: Tensor, layout: PassLayout, cache: Cache) -> Tensor:
        """Final states [B, N, D] of embedded nodes at the places of a layout; the open window of the cache gets their
        keys and values. The token of a virtual node is -1."""
        mask = additive(layout.visible_BNW[:, None], self.dtype)
        # What spreads a model over devices gives each layer copies of its arguments, another mask among them.
        parts = None if layout.parts is None or self.placement.spread else replace(layout.parts, mask=mask)
        final_BND: Tensor = self.decoder(
            inputs_embeds=embedded_BND, attention_mask=mask, past_key_values=cache, use_cache=True,
            **self.looked_up(tokens_BN), tree_parts=parts,
            **place_arguments(layout.positions_BN, layout.key_positions_BW)).last_hidden_state
        return final_BND

    @torch.no_grad()
    def encode(self, features: Features, taps: Sequence[int] = ()) -> Features:
        """Run whole rows through the target, segments isolated, and fill in final states and taps."""
        return self.trace(features, taps)

    def trace(self, features: Features, taps: Sequence[int] = ()) -> Features:
        """`encode` with a graph for gradients, for a target of which something is trained."""
        batch = features.to(self.device)
        embedded_BLD = self.embed(batch.tokens_BL)
        visible = visible_text(batch, self.decoder)
        recurrent: AbstractContextManager[None] = nullcontext()
        if self.recurrent:
            recurrent = running(SegmentPass(visible if isinstance(visible, Segments) else Segments.of(batch)))
        with self.tapping(self._checked(taps)) as states, recurrent:
            final_BLD = self.decoder(inputs_embeds=embedded_BLD, use_cache=False, **self.looked_up(batch.tokens_BL),
                                     **place_arguments(batch.positions_BL, batch.positions_BL),
                                     **mask_arguments(visible, self.decoder, embedded_BLD)).last_hidden_state
        return replace(batch, final_BLD=final_BLD, taps=dict(states))

    @contextmanager
    def tapping(self, taps: Sequence[int]) -> Iterator[dict[int, Tensor]]:
        """Collect the outputs of the layers `taps` of the passes inside the block: the residual stream, pre-norm."""
        states: dict[int, Tensor] = {}

        def keep(layer: int, _module: nn.Module, _args: Any, output: Any) -> None:
            stream: Tensor = output[0] if isinstance(output, tuple) else output
            if stream.dim() != 3:
                raise UserError(f"layer {layer} of {self.identity.architecture} hands on several streams of states "
                                f"{tuple(stream.shape)}, which no drafter reads; choose a family of heads, such as "
                                "medusa or hydra")
            states[layer] = stream.to(self.device)

        handles = [self.layers[layer].register_forward_hook(partial(keep, layer)) for layer in taps]
        try:
            yield states
        finally:
            for handle in handles:
                handle.remove()

    def _checked(self, taps: Sequence[int]) -> tuple[int, ...]:
        for layer in taps:
            if not 0 <= layer < self.num_layers:
                raise UserError(
                    f"tap {layer} is not a layer of {self.identity.name}; choose from 0 to {self.num_layers - 1}")
        return tuple(taps)


def post_process(logits: Tensor, model: Any, config: Any) -> Tensor:
    """The scaling and soft-capping that a model with this text config applies after its output layer."""
    if (scale := getattr(model, "logit_scale", None)) is not None:
        logits = logits * scale
    if (scale := getattr(config, "lm_head_multiplier", None)) is not None:
        logits = logits * scale
    if (divisor := getattr(config, "logits_scaling", None)) is not None:
        logits = logits / divisor
    if (cap := getattr(config, "final_logit_softcapping", None)) is not None:
        logits = cap * torch.tanh(logits / cap)
    return logits
