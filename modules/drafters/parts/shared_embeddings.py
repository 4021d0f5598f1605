"""Base of the drafters that borrow the target's embedding and output layer.

Shapes: B rows, L positions, Q entries of the draft vocabulary, D hidden size.
"""

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from ...errors import UserError
from ...features import Features
from ...interfaces.drafter import Drafter
from ...target.draft_vocabulary import OutputRows, require_ids
from ...target.model import Target


class BorrowingDrafter(Drafter):
    """A drafter that borrows the target's embedding and its output layer, whole or over a reduced draft vocabulary.

    The ids of such a vocabulary, `token_ids` [Q], are saved with the drafter's own weights; borrowed weights are never
    saved. While decoding, its own linear layers run packed.

    Args:
        hidden_size: the target's width.
        vocab_size: the target's vocabulary.
        vocabulary_size: entries of a reduced draft vocabulary; None for the whole vocabulary.

    Raises:
        UserError: if the draft vocabulary is larger than the target's.
    """

    token_ids: Tensor | None

    def __init__(self, *, hidden_size: int, vocab_size: int, vocabulary_size: int | None) -> None:
        if vocabulary_size is not None and vocabulary_size > vocab_size:
            raise UserError(f"vocabulary_size is {vocabulary_size}, but the target has {vocab_size} tokens; set it to "
                            f"at most {vocab_size}, or leave it out")
        super().__init__()
        self.hidden_size, self.vocab_size = hidden_size, vocab_size
        ids = None if vocabulary_size is None else torch.zeros(vocabulary_size, dtype=torch.long)
        self.register_buffer("token_ids", ids)
        self._borrowed: OutputRows | None = None
        self.register_load_state_dict_post_hook(_rebind)  # type: ignore[no-untyped-call]

    def attach(self, target: Target, token_ids_Q: Tensor | None) -> None:
        """Set the draft vocabulary, move to the target's device and bind to the target.

        Raises:
            UserError: if the ids do not agree with the configuration.
        """
        require_ids(None if self.token_ids is None else len(self.token_ids), token_ids_Q)
        if self.token_ids is not None and token_ids_Q is not None:
            self.token_ids.copy_(token_ids_Q)
        # Half precision would lose small updates: trained weights stay in float32.
        self.to(device=target.device, dtype=torch.promote_types(target.dtype, torch.float32))
        self.bind(target)

    def bind(self, target: Target) -> None:
        """Borrow the target's embedding and output layer; bind again after moving it to another device."""
        if (target.hidden_size, target.vocab_size) != (self.hidden_size, self.vocab_size):
            raise UserError(
                f"this {self.family} drafter belongs to a target of width {self.hidden_size} and {self.vocab_size} "
                f"tokens, but {target.identity.name} has width {target.hidden_size} and {target.vocab_size}; use the "
                "target it was trained for")
        self._borrowed = OutputRows(target, self.token_ids)

    def pack_linears(self) -> None:
        """Pre-pack the linear layers for oneDNN where the target's are packed."""
        packing = None if self._borrowed is None else self._borrowed.target.linears.packing
        self._packing.refresh(self, packed_from=0 if packing is None else packing.packed_from)
        if self._borrowed is not None and not self.output_parameters(0):
            self._borrowed.pack()

    def packed_linears(self) -> AbstractContextManager[None]:
        """A block in which the pre-packed linear layers run."""
        return self._packing.installed()

    def _rows(self) -> OutputRows:
        if self._borrowed is None:
            raise RuntimeError(f"this {self.family} drafter is not bound to a target; call bind(target) first")
        return self._borrowed

    @torch.no_grad()
    def _embed(self, tokens: Tensor) -> Tensor:
        embedded: Tensor = self._rows().target.embed_guesses(tokens).to(self.dtype)
        return embedded

    def project(self, hidden: Tensor, step: int) -> Tensor:
        """Draft logits [..., Q] of hidden states [..., D] by the target's output layer, the same for every step."""
        return self._rows()(hidden)

    def following(self, features: Features, places: int) -> Tensor:
        """Embeddings of the tokens `places` after each position, [B, L, D]; zero after the end of its segment."""
        segments_BL, length = features.segments_BL, features.tokens_BL.shape[1]
        after_L = torch.arange(places, places + length, device=segments_BL.device)
        there_L = after_L.clamp(max=length - 1)
        inside_BL = (after_L < length) & (segments_BL[:, there_L] == segments_BL) & (segments_BL >= 0)
        return self._embed(features.tokens_BL[:, there_L]).masked_fill(~inside_BL[..., None], 0)

    def with_noise(self, states: Tensor, noise: float) -> Tensor:
        """The target's states; in training with uniform noise between -noise and noise."""
        if not (self.training and noise):
            return states
        return states + (2 * torch.rand_like(states) - 1) * noise

    @property
    def state_size(self) -> int:
        """The target's width; families with other states override it."""
        return self.hidden_size

    @property
    def token_ids_Q(self) -> Tensor | None:
        """Target id of each entry of the reduced draft vocabulary; None for the whole vocabulary."""
        return self.token_ids

    @property
    def dtype(self) -> torch.dtype:
        """Floating-point type of the weights."""
        return next(self.parameters()).dtype


def _rebind(module: nn.Module, _incompatible: Any) -> None:
    """Borrow again after loading: the loaded token ids may differ from those that selected the borrowed rows."""
    if isinstance(module, BorrowingDrafter) and module._borrowed is not None:
        module.bind(module._borrowed.target)
