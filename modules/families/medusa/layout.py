"""Medusa heads in FasterDecoding/Medusa, which Text Generation Inference reads, and in vLLM up to 0.32.

Head h at position p predicts token p + 2 + h from the target's final state after the last norm. There a tied block, and
one output layer of all heads, are stored as often as they are applied."""

from ...interfaces.layout import Pairs

BLOCK, FIRST = "heads.{h}.{l}.", "heads.{h}.0."  # Residual blocks of a head, and the one that stays where they are tied
OFFICIAL: Pairs = (("{h}.{l}.linear.", "heads.{h}.{l}.linear."), ("{h}.{layers}.weight", "outputs.{h}.weight"))
VLLM: Pairs = (("blocks.{h}.layers.{l}.", "heads.{h}.{l}.linear."), ("lm_heads.{h}.weight", "outputs.{h}.weight"))
"""As in `vllm/model_executor/models/medusa.py` of vLLM 0.32.0."""
READ: Pairs = (*OFFICIAL, *VLLM, *((start + name, ours) for start in ("medusa_head.", "medusa_heads.")
                                   for name, ours in OFFICIAL))
OUTPUT, TOKENS = "lm_head.weight", "token_map"
"""vLLM's output layer of all heads, and the token that each of its rows scores."""
