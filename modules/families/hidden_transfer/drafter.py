"""Hidden Transfer: linear maps of a middle layer's state stand for the tokens to come in the target's later layers
(arXiv:2404.12022).

Shapes: B rows, G anchors of a row, M virtual nodes, K steps, D hidden size."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from ...config_checks import Size
from ...errors import UserError
from ...interfaces.drafter import FamilyCard, Training
from ...interfaces.proposer import spread
from ...parts.lookahead_drafter import LookaheadConfig, LookaheadDrafter
from ...parts.shared_embeddings import Sizes
from ...target.model import Target
from ...target.partial_passes import ReadText
from ...token_tree import Injection


@dataclass(frozen=True, kw_only=True)
class HiddenTransferConfig(LookaheadConfig):
    """The shape of Hidden Transfer maps."""

    layer: Size | None = None
    """Index of the target's layer that the mapped states enter, at least 1; None takes the middle one. The paper gives
    each step a layer of its own."""


class HiddenTransfer(LookaheadDrafter):
    """K linear maps of the state that enters a middle layer at a token, for the K positions after it. Own weights:
    `maps.{k}.weight` [D, D], and with a reduced vocabulary its ids, `token_ids` [Q]. Make a new one with
    `HiddenTransfer.create`; each map starts as the identity."""

    family = "hidden_transfer"
    card = FamilyCard(
        name="Hidden Transfer", papers=("2404.12022",),
        guesses="linear maps of a middle layer's state, which pass the later layers as the tokens to come",
        cost="each step trains through the later layers; every node of a tree brings more nodes")
    export_refusal = ("no serving engine and no published layout holds Hidden Transfer maps; decode with the artifact "
                      "itself")
    config: HiddenTransferConfig
    config_class = HiddenTransferConfig
    trained_as = Training(objective="soft", lr=1e-3, through_target=True)

    def __init__(self, config: HiddenTransferConfig, sizes: Sizes) -> None:
        super().__init__(config, sizes)
        if config.layer is None:
            raise UserError("layer of Hidden Transfer maps must be set; use HiddenTransfer.create, which chooses it")
        width = sizes.hidden_size
        self.layer, self.taps = config.layer, (config.layer - 1,)
        self.maps = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(config.num_tokens))

    @classmethod
    def fitted(cls, config: HiddenTransferConfig, target: Target) -> tuple[HiddenTransferConfig, None]:
        """The settings with the layer chosen. Raises UserError when it does not fit."""
        target.require_plain_layers("hidden_transfer")
        layers = target.num_layers
        layer = max(1, layers // 2) if config.layer is None else config.layer
        if layer >= layers:
            raise UserError(f"layer must be below the {layers} layers of {target.identity.name}, got {layer}; the "
                            "mapped states must pass at least one")
        return replace(config, layer=layer), None

    def initialise(self, target: Target) -> None:
        """Start as the identity: what enters the layer at the token itself."""
        for weight_DD in self.maps.parameters():
            nn.init.eye_(weight_DD)

    def entering(self, target: Target) -> tuple[Tensor, Injection | None]:
        """Zeros in the first layers, which nothing reads, and the mapped states."""
        def mapped(before_BMD: Tensor, steps_BM: Tensor) -> Tensor:
            """The states [B, M, D] of virtual nodes from those of their anchors."""
            mapped_BMD = torch.zeros_like(before_BMD)
            for step, mapping in enumerate(self.maps):
                found_BMD = mapping(before_BMD.to(self.dtype)).to(before_BMD.dtype)
                mapped_BMD = torch.where((steps_BM == step)[..., None], found_BMD, mapped_BMD)
            return mapped_BMD

        blank_KD = torch.zeros(self.virtual_nodes, self.hidden_size, dtype=target.dtype, device=target.device)
        return blank_KD, Injection(layer=self.layer, states=mapped)

    def read_after(self, text: ReadText, anchors_BG: Tensor) -> Tensor:
        """Final states [B, G, K, D] of the mapped states after positions of a text."""
        before_BGD = spread(self.tapped(text.features.taps)[0], anchors_BG)
        entering_BGKD = torch.stack([mapping(before_BGD) for mapping in self.maps], dim=2)
        final_BMD = text.read(entering_BGKD.flatten(1, 2), *self.group(anchors_BG), first=self.layer)
        return final_BMD.view(*anchors_BG.shape, self.virtual_nodes, final_BMD.shape[-1])
