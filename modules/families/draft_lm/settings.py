"""Settings of a draft language model: new layers, some of the target's, or those of a folder."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...config_checks import LATER, Parts, Size
from ...errors import UserError
from ...interfaces.drafter import DrafterConfig
from ...parts.feature_drafter import chosen_taps
from ...target.loading.hf_folder import read_config
from ...target.model import Target
from ...target.submodel import chosen, smaller, windowed


@dataclass(frozen=True, kw_only=True)
class DraftLMConfig(DrafterConfig):
    """The shape of a draft language model, its first weights and its tokens per pass. It has `num_layers` new layers,
    or a copy of some `layers` of the target, or it is the model in a `folder`."""

    training_only = frozenset({"freeze_embedding"})
    layers: tuple[int, ...] | None = None
    """Layers of the target to copy, ascending; width, embedding and output layer are then the target's."""
    folder: str | None = None
    """A Hugging Face folder with the first weights, such as another run's export."""
    num_layers: Parts | None = None
    """Decoder layers of a new model; 2 by default. Few wide layers draft fastest at equal size."""
    hidden_size: Size | None = None
    """Width of a new model; None takes the target's."""
    num_heads: Parts | None = None
    """Attention heads of a new model, with the target's proportion of key-value heads; None keeps the target's width of
    a head."""
    freeze_embedding: bool = False
    """Do not train the embedding. On a CPU its gradient costs more than that of all layers."""
    depths: Parts = 1
    """Tokens guessed in one pass of the draft: above 1, a learned mask token replaces each one not yet known."""
    taps: tuple[int, ...] | None = field(default=None, metadata={LATER: True})
    """Layers of the target, from 0, whose outputs are added to the draft's inputs next to the target's final states
    (PARD-2), ascending; `[]` adds the final states alone, null reads no states. Needs `depths` above 1."""
    mask_token_id: int | None = None
    """A reserved token whose embedding holds the mask token's in exports; None exports without mask tokens."""
    window: Size | None = field(default=None, metadata={LATER: True})
    """Newest tokens of the text that a token sees in every layer, itself included; None leaves windows as they are. A
    Llama with a window is a Mistral. The draft then keeps no more of a long text than these and one pass."""

    def carries(self, name: str, start: Any) -> bool:
        """The mask token names a row of exports alone; states that were not read add nothing at first."""
        taps = name == "taps" and self.taps is not None and set(start.taps or ()) <= set(self.taps)
        return super().carries(name, start) or name == "mask_token_id" or taps

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.mask_token_id is not None and self.depths == 1:
            raise UserError(f"mask_token_id {self.mask_token_id} has no effect with depths 1; set depths to the tokens "
                            "of a draft pass, or leave mask_token_id out")
        if self.window is not None and self.window < self.depths:
            raise UserError(f"window is {self.window}, and the last of {self.depths} tokens of a pass (depths) reads "
                            f"those before it; set window to at least {self.depths}, or leave it out")
        if self.taps is not None and self.depths == 1:
            raise UserError(f"taps {list(self.taps)} are read for mask tokens, and a draft with depths 1 reads tokens "
                            "alone; set depths to the tokens of a draft pass, or leave taps out")
        if self.taps is not None and list(self.taps) != sorted(set(self.taps)):
            raise UserError(f"taps must be ascending numbers of layers, got {list(self.taps)}")
        if self.layers is not None and self.folder is not None:
            raise UserError("set `layers` or `folder`, not both")
        chosen_by = "layers" if self.layers is not None else "folder" if self.folder is not None else None
        for name in ("num_layers", "hidden_size", "num_heads"):
            if chosen_by is not None and getattr(self, name) is not None:
                raise UserError(f"{name} is set by {chosen_by}; leave {name} out, or {chosen_by}")


def planned(config: DraftLMConfig, target: Target) -> Any:
    """Configuration of a draft's initial model, checked against `target` without reading weights. Raises UserError if
    layers, widths, taps or the folder's vocabulary do not fit."""
    if config.folder is not None:
        model = read_config(Path(config.folder), target)
    elif config.layers is not None:
        model = chosen(target, config.layers)
    else:
        model = smaller(target, num_layers=config.num_layers or 2, hidden_size=config.hidden_size,
                        num_heads=config.num_heads)
    if config.taps:
        chosen_taps(config.taps, target)
    check_mask_token(config, target.vocab_size)
    return model if config.window is None else windowed(model, config.window)


def check_mask_token(config: DraftLMConfig, vocab_size: int) -> None:
    """Refuse a mask token outside the vocabulary. Raises UserError."""
    if config.mask_token_id is not None and not 0 <= config.mask_token_id < vocab_size:
        raise UserError(f"mask_token_id must lie between 0 and {vocab_size - 1}, got {config.mask_token_id}")

