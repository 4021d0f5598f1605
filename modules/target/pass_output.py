"""The output of a pass of the target.

Shapes: B rows, M nodes with logits, N nodes, D hidden size, V vocabulary.
"""

from dataclasses import dataclass, field

from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class PassOutput:
    """Logits and hidden states of one pass of the target."""

    logits_BMV: Tensor  # Next-token logits at the selected nodes (all of them unless the caller chose)
    final_BND: Tensor  # Final hidden states, after the last norm, at every node
    taps: dict[int, Tensor] = field(default_factory=dict)  # Outputs of the tapped layers at every node, each [B, N, D]
