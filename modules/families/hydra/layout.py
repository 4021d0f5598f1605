"""Hydra heads in the official code (zankner/Hydra).

With a prefix layer (Hydra++, `prefix_embeding_layer`, sic) dropout modules before each layer take a number, too. The
blocks after the first are copies of one block. Head h at position p predicts token p + 2 + h."""

from typing import Any

from ...interfaces.layout import Pairs

BLOCK, FIRST = "heads.{h}.blocks.{l}.", "heads.{h}.blocks.0."
"""Residual blocks of a head after its first one, and the one that stays where they are tied."""
PLAIN: Pairs = (("hydra_mlp.{h}.0.", "heads.{h}.first."), ("hydra_mlp.{h}.{l:1,1}.", BLOCK),
                ("hydra_lm_head.{h}.", "outputs.{h}."))
DROPOUT: Pairs = (("hydra_mlp.{h}.1.", "heads.{h}.first."), ("hydra_mlp.{h}.{l:2,3}.", BLOCK),
                  ("hydra_lm_head.{h}.1.", "outputs.{h}."), ("prefix_embeding_layer.layers.0.", "prefix.block."),
                  ("prefix_embeding_layer.", "prefix."))
EMBEDDING = "input_embed_fn.weight"  # The target's embedding, which the heads read
UNUSED = ("prefix_embeding_layer.embed_tokens.weight", "prefix_embeding_layer.layers.0.self_attn.rotary_emb.inv_freq")
"""Stored by the official code, and not read by it."""
FIXED: dict[str, tuple[Any, ...]] = {"hidden_state_offset": (0,), "grounded_heads": (True,)}
"""Heads that read the final state and the true tokens: the weights do not show which ones they were trained on."""
