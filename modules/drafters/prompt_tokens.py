"""Parallel prompt decoding: trained embeddings after a token let the target guess several tokens ahead in the pass that
verifies (PPD, arXiv:2405.18628).

A chain of these prompts read after the newest token, by a pass of its own, is the draft of SDSAT (arXiv:2403.18647)
with a frozen target: `num_tokens` adaptive tokens, `copies: 1`, verified as a chain. Here the guesses cost no pass.

Shapes: B rows, G anchors of a row, M virtual nodes, S slots (steps times copies), D hidden size.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..config_checks import check_sizes
from ..features import Features
from ..interfaces.family_card import FamilyCard
from ..target.model import Target
from ..target.read_text import ReadText
from ..token_tree import Injection
from .parts.lookahead_drafter import LookaheadConfig, LookaheadDrafter

_NOISE = 0.1
"""Noise of the first prompts, relative to the spread of the target's embeddings: copies must differ to learn."""


@dataclass(frozen=True, kw_only=True)
class PromptTokensConfig(LookaheadConfig):
    """The shape of prompt tokens."""

    copies: int = 1
    """Embeddings of each prompt token, which do not see each other and whose states are averaged (the paper's ensemble
    prompt tokens). More cost as many times the nodes of a pass and gained little in the paper."""
    first_text: str = "Next 2 word Next 3 word Next 4 word"
    """Text whose embeddings the prompts start from, one token after another; the official code's intended one."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_sizes(copies=self.copies)


class PromptTokens(LookaheadDrafter):
    """Embeddings of K prompt tokens in C copies; all else is the target.

    Own weights: `prompts` [K C, D], row k C + c for copy c of token k, kept in float32, and with a reduced vocabulary
    its ids, `token_ids` [Q]. Make a new one with `PromptTokens.create`.
    """

    family = "prompt_tokens"
    card = FamilyCard(
        name="Parallel prompt decoding", papers=("2405.18628", "2403.18647"),
        guesses="trained embeddings after each token of the verifying pass, at which the target itself guesses ahead",
        cost="a few thousand weights, trained through the target; every node of a tree brings more nodes, and "
             "`--policy sparse` sizes both",
    )
    config: PromptTokensConfig
    config_class = PromptTokensConfig
    described_as = "prompt tokens are"

    def __init__(self, config: PromptTokensConfig, *, hidden_size: int, vocab_size: int) -> None:
        super().__init__(config, hidden_size=hidden_size, vocab_size=vocab_size, copies=config.copies)
        self.prompts = nn.Parameter(torch.full((self.slots.count, hidden_size), torch.nan))

    @property
    def reads_states(self) -> bool:
        """False: the target reads the text anew, for its keys and values."""
        return False

    @torch.no_grad()
    def initialise(self, target: Target) -> None:
        """Start as the embeddings of the first text, with some noise."""
        ids = self._first_ids(target) or target.readable_tokens(self.slots.count).tolist()
        rows_S = torch.tensor([ids[slot % len(ids)] for slot in range(self.slots.count)], device=target.device)
        start_SD = target.embed_guesses(rows_S).to(self.prompts.dtype)
        self.prompts.copy_(start_SD + _NOISE * start_SD.std() * torch.randn_like(start_SD))

    def _first_ids(self, target: Target) -> list[int]:
        """Tokens of the first text that the target knows; none where it has no tokenizer."""
        if target.tokenizer is None:
            return []
        found = target.tokenizer(self.config.first_text, add_special_tokens=False)["input_ids"]
        return [token for token in found if token < target.vocab_size]

    def entering(self, target: Target) -> tuple[Tensor, Injection | None]:
        """The prompts, which pass all layers."""
        return self.prompts, None

    def read_after(self, text: ReadText, features: Features, anchors_BG: Tensor) -> Tensor:
        """Final states [B, G, S, D] of the prompts after positions of a text."""
        anchors_BM, ahead_BM, sees_MM = self._group(anchors_BG)
        embedded_BMD = self.prompts.repeat(anchors_BG.shape[1], 1).expand(len(anchors_BG), -1, -1)
        final_BMD = text.read(embedded_BMD, anchors_BM, ahead_BM, sees_MM)
        return final_BMD.view(*anchors_BG.shape, self.slots.count, final_BMD.shape[-1])
