"""Base of the drafters that borrow the target's embedding and output layer.

Shapes: B rows, L positions, Q entries of the draft vocabulary, D hidden size."""

from abc import abstractmethod
from dataclasses import asdict
from typing import Any, ClassVar, Self, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..config_checks import settings_of
from ..errors import UserError
from ..features import Features
from ..interfaces.drafter import Drafter, DrafterConfig
from ..interfaces.proposer import State
from ..target.draft_vocabulary import OutputRows, OwnOutput, carry_rows, require_ids
from ..target.loading.model_parts import TargetIdentity
from ..target.model import Target
from .decoder_block import BlockConfig, GatedMLP, of_block

Sizes = Target | TargetIdentity
"""What has the width and the vocabulary that shape a drafter: a target, or its identity in an artifact."""


class BorrowingDrafter(Drafter[State]):
    """A drafter that borrows the target's embedding and its output layer, whole or over a reduced draft vocabulary.
    Borrowed weights are never saved. While decoding, its own linear layers run packed. It is made of the family's
    settings, the sizes of the target and the shape of its own decoder layers, None without any. Raises UserError if the
    draft vocabulary is larger than the target's."""

    has_block: ClassVar[bool] = False
    """Whether drafters of the family may have decoder layers, whose shape an artifact then describes."""
    block_class: ClassVar[Any] = BlockConfig  # The description of these layers
    compiled_form = staticmethod(of_block)
    former_settings: ClassVar[tuple[str, ...]] = ()
    """Settings that older artifacts name and that follow from others now."""

    def __init__(self, config: DrafterConfig, sizes: Sizes, block: Any = None) -> None:
        size = config.vocabulary_size
        if size is not None and size > sizes.vocab_size:
            raise UserError(f"vocabulary_size is {size}, but the target has {sizes.vocab_size} tokens; set it to at "
                            f"most {sizes.vocab_size}, or leave it out")
        super().__init__(size)
        self.config, self.block = config, block
        self.hidden_size, self.vocab_size = sizes.hidden_size, sizes.vocab_size
        self.state_size = sizes.hidden_size
        self.outputs: nn.ModuleList | tuple[OwnOutput, ...] = ()
        """Output layers of its own by draft step, the last one for all later steps; empty when it reads the target's.
        Set here: a value of the class would hide the modules that a family registers under this name."""
        self._borrowed: OutputRows | None = None
        self.register_load_state_dict_post_hook(_rebind)  # type: ignore[no-untyped-call]

    # Making one ------------------------------------------------------------------------------------------------------

    @classmethod
    def create(cls, config: Any, target: Target, token_ids_Q: Tensor | None = None, start: Self | None = None) -> Self:
        """A new drafter for `target`, initialised and bound to it, with the ids of the reduced draft vocabulary where
        `config`, the family's settings, asks for one. `start` is a drafter of this family, not bound, whose weights it
        takes over. Raises UserError if settings, target, ids and start do not agree."""
        config, block = cls.fitted(config, target)
        if start is not None:
            # A published drafter's layers may have another shape than the target's.
            block = start.block
        with target.device:
            drafter = cls(config, target) if block is None else cls(config, target, block)
        require_ids(config.vocabulary_size, token_ids_Q)
        if drafter.token_ids is not None and token_ids_Q is not None:
            drafter.token_ids.copy_(token_ids_Q)
        # Half precision would lose small updates: trained weights stay in float32.
        drafter.to(device=target.device, dtype=torch.promote_types(target.dtype, torch.float32))
        drafter.bind(target)
        # A target on the meta device, used for planning, has no values to start from.
        if target.device.type == "meta":
            return drafter
        with torch.no_grad():
            drafter.initialise(target)
            if start is not None:
                # What a start lacks keeps its first weights, output rows of other tokens too. Output layers of its own
                # are registered under one name or another.
                own = {id(weight) for layer in drafter.outputs for weight in layer.parameters()}
                apart = {name for name, weight in drafter.named_parameters() if id(weight) in own} | {"token_ids"}
                carried = {name: tensor for name, tensor in drafter.carried(start).items() if name not in apart}
                drafter.load_state_dict({**drafter.state_dict(), **carried})
                for layer, former in zip(drafter.outputs, start.outputs, strict=False):
                    carry_rows(layer, drafter.token_ids, former, start.token_ids, drafter.vocab_size)
        return drafter

    @abstractmethod
    def initialise(self, target: Target) -> None:
        """Set the first weights of a new, bound drafter; called without gradients."""

    def carried(self, start: Self) -> dict[str, Tensor]:
        """The start's tensors under the names, and in the shapes, that they have here."""
        return start.state_dict()

    def describe(self) -> dict[str, Any]:
        """The settings and the shape of the decoder layers, JSON-ready."""
        given = {name: list(value) if isinstance(value, tuple) else value
                 for name, value in asdict(self.config).items()}
        return {**given, "block": self.block and asdict(self.block)} if self.has_block else given

    @classmethod
    def rebuild(cls, description: dict[str, Any], identity: TargetIdentity) -> Self:
        """An equal drafter whose weights are still to be loaded. Raises UserError on an unknown description."""
        described = {name: value for name, value in description.items() if name not in cls.former_settings}
        given = settings_of(described, cls.config_class, f"a drafter of the family {cls.family} is",
                            *["block"] * cls.has_block)
        block = given.pop("block", None)
        config = cls.config_class(**given)
        return cls(config, identity) if block is None else cls(config, identity, cls.block_class.from_dict(block))

    # Borrowed parts --------------------------------------------------------------------------------------------------

    def bind(self, target: Target) -> None:
        """Borrow the target's embedding and output layer; bind again after moving it to another device. Raises
        UserError if the target has another width or vocabulary, or lacks layers that the settings name."""
        if (target.hidden_size, target.vocab_size) != (self.hidden_size, self.vocab_size):
            raise UserError(
                f"this {self.family} drafter belongs to a target of width {self.hidden_size} and {self.vocab_size} "
                f"tokens, but {target.identity.name} has width {target.hidden_size} and {target.vocab_size}; use the "
                "target it was trained for")
        # Settings that name layers were chosen for one target; another of this width may have fewer.
        self.fitted(self.config, target)
        self._borrowed = OutputRows(target, self.token_ids)

    def output_rows(self) -> OutputRows:
        """The target's output layer. Raises RuntimeError before `bind`."""
        if self._borrowed is None:
            raise RuntimeError(f"this {self.family} drafter is not bound to a target; call bind(target) first")
        return self._borrowed

    @torch.no_grad()
    def embed(self, tokens: Tensor) -> Tensor:
        """Embeddings [..., D] of token ids, without gradients; zero where a token has no finite one."""
        target = self.output_rows().target
        # The rows of the target's file, as engines look them up: without the factor that some models' modules apply.
        embedded = functional.embedding(tokens, target.model.get_input_embeddings().weight).to(self.dtype)
        return embedded if target.broken_V is None else embedded.masked_fill(target.broken_V[tokens][..., None], 0)

    def tapped(self, taps: dict[int, Tensor]) -> list[Tensor]:
        """The tapped states in the weights' number format, ascending by layer. Raises ValueError if one is missing."""
        if missing := [layer for layer in self.taps if layer not in taps]:
            raise ValueError(f"the outputs of the target's layers {missing} are missing; encode with drafter.taps")
        return [taps[layer].to(self.dtype) for layer in self.taps]

    def project(self, hidden: Tensor, step: int) -> Tensor:
        """Draft logits [..., Q] of hidden states [..., D] by the output layer of a step, its own or the target's."""
        if not self.outputs:
            return self.output_rows()(hidden)
        return self.output_rows().through(hidden, cast(OwnOutput, self.outputs[min(step, len(self.outputs) - 1)]))

    def output_parameters(self, step: int) -> tuple[nn.Parameter, ...]:
        """The trained weights that `project` reads for a step; empty when the output layer is the target's."""
        return tuple(self.outputs[min(step, len(self.outputs) - 1)].parameters()) if self.outputs else ()

    def with_noise(self, states: Tensor, noise: float) -> Tensor:
        """The target's states; in training with uniform noise between -noise and noise."""
        if not (self.training and noise):
            return states
        return states + (2 * torch.rand_like(states) - 1) * noise

    # Own layers ------------------------------------------------------------------------------------------------------

    @property
    def dtype(self) -> torch.dtype:
        """Floating-point type of the weights."""
        return next(self.parameters()).dtype

    def pack_linears(self) -> None:
        """Pre-pack the linear layers for oneDNN where the target's are packed and they have changed."""
        packing = None if self._borrowed is None else self._borrowed.target.linears.packing
        self.packing.refresh(self, packed_from=0 if packing is None else packing.packed_from)
        if self._borrowed is not None and not self.output_parameters(0):
            self._borrowed.pack()

    def recompute_layers(self) -> bool:
        """Let training compute the states inside of its MLPs again; False where it has none."""
        inner = [part for part in self.modules() if isinstance(part, GatedMLP)]
        for part in inner:
            part.recomputed = True
        return bool(inner)


def shifted(states_BLD: Tensor, features: Features, places: int) -> Tensor:
    """The states `places` after each position, before it where that is negative, [B, L, D]; zero beyond its segment."""
    segments_BL, length = features.segments_BL, features.tokens_BL.shape[1]
    wanted_L = torch.arange(places, places + length, device=segments_BL.device)
    there_L = wanted_L.clamp(min=0, max=length - 1)
    inside_BL = (there_L == wanted_L) & (segments_BL[:, there_L] == segments_BL) & (segments_BL >= 0)
    return states_BLD.index_select(1, there_L).masked_fill(~inside_BL[..., None], 0)


def _rebind(module: nn.Module, _incompatible: Any) -> None:
    """Borrow again after loading: the loaded token ids may differ from those that selected the borrowed rows."""
    if isinstance(module, BorrowingDrafter) and module._borrowed is not None:
        module.bind(module._borrowed.target)
