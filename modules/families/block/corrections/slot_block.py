"""Layers of a backbone of slots: Qwen3's, with DFlash 2's convolutions over the slots of a block.

Shapes: B rows, N slots of all blocks of a row, slot by slot, D hidden size, T taps, G groups of components, J numbers
of a slot's kernels.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional

from ....parts.decoder_block import AttentionContext, BlockConfig, DecoderBlock

TAPS, GROUP = 2, 16  # Slots that a convolution reads, and components that share what a slot adds to its kernel


class SlotConvolution(nn.Module):
    """A convolution over the slots of a block, before and after a sublayer, whose kernel depends on the slot:
    out_t = sum_tau (base[tau] + delta_t[tau]) x_{t - tau}, a delta for each group of components, zero before a block.
    """

    def __init__(self, width: int, slots: int) -> None:
        super().__init__()
        self.slots = slots
        self.base_kernel = nn.Parameter(torch.zeros(2, TAPS, width))
        self.kernel_projection = nn.Linear(width, 2 * TAPS * (width // GROUP), bias=False)
        self.reset()

    @torch.no_grad()
    def reset(self) -> None:
        """Let both sides pass the states on."""
        self.base_kernel.zero_()
        self.base_kernel[:, 0] = 1
        self.kernel_projection.weight.zero_()

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
    """A layer of the backbone, with convolutions around its attention and its MLP if `convolved`."""

    def __init__(self, config: BlockConfig, layer: int, slots: int, *, convolved: bool) -> None:
        super().__init__(config, layer, qk_norm=True)
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
