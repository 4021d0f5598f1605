"""Parallel prompt decoding: trained embeddings after a token let the target guess several tokens ahead in the pass that
verifies (PPD, arXiv:2405.18628).

A chain of these prompts read after the newest token, by a pass of its own, is the draft of SDSAT (arXiv:2403.18647)
with a frozen target: `num_tokens` adaptive tokens, `copies: 1`, verified as a chain. Here the guesses cost no pass.

Shapes: B rows, G anchors of a row, M virtual nodes, S slots (steps times copies), D hidden size."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ...config_checks import Size
from ...interfaces.drafter import FamilyCard, Training
from ...parts.lookahead_drafter import LookaheadConfig, LookaheadDrafter
from ...parts.shared_embeddings import Sizes
from ...target.model import Target
from ...target.partial_passes import ReadText
from ...token_tree import Injection

_FIRST_TEXT = "Next 2 word Next 3 word Next 4 word"
"""The text whose embeddings the prompts start from, one token after another: the one that the official code intends."""
_NOISE = 0.1
"""Noise of the first prompts, relative to the spread of the target's embeddings: copies must differ to learn."""


@dataclass(frozen=True, kw_only=True)
class PromptTokensConfig(LookaheadConfig):
    """The shape of prompt tokens."""

    copies: Size = 1
    """Embeddings of each prompt token, which do not see each other and whose states are averaged (the paper's ensemble
    prompt tokens). More cost as many times the nodes of a pass and gained little in the paper."""


class PromptTokens(LookaheadDrafter):
    """Embeddings of K prompt tokens in C copies; all else is the target. Own weights: `prompts` [K C, D], row k C + c
    for copy c of token k, kept in float32, and with a reduced vocabulary its ids, `token_ids` [Q]. Make a new one with
    `PromptTokens.create`."""

    family = "prompt_tokens"
    card = FamilyCard(
        name="Parallel prompt decoding", papers=("2405.18628", "2403.18647"),
        guesses="trained embeddings after each token of the verifying pass, at which the target itself guesses ahead",
        cost="a few thousand weights, trained through the target; every node of a tree brings more nodes, and "
             "`--policy sparse` sizes both")
    config: PromptTokensConfig
    config_class = PromptTokensConfig
    # The official code's rate, for the few weights there are.
    trained_as = Training(objective="soft", lr=1e-2, through_target=True)
    reads_states = False  # The target reads the text anew, for its keys and values.

    def __init__(self, config: PromptTokensConfig, sizes: Sizes) -> None:
        super().__init__(config, sizes, config.copies)
        self.prompts = nn.Parameter(torch.full((self.virtual_nodes, sizes.hidden_size), torch.nan))

    @classmethod
    def fitted(cls, config: PromptTokensConfig, target: Target) -> tuple[PromptTokensConfig, None]:
        """The settings. Raises UserError for a target with recurrent layers."""
        target.require_plain_layers("prompt_tokens", apart=False)
        return config, None

    def initialise(self, target: Target) -> None:
        """Start as the embeddings of the first text, with some noise."""
        count, ids = self.virtual_nodes, []
        if target.tokenizer is not None:
            found = target.tokenizer(_FIRST_TEXT, add_special_tokens=False)["input_ids"]
            ids = [token for token in found if token < target.vocab_size]
        ids = ids or target.readable_tokens(count).tolist()
        rows_S = torch.tensor([ids[slot % len(ids)] for slot in range(count)], device=target.device)
        start_SD = target.embed_guesses(rows_S).to(self.prompts.dtype)
        self.prompts.copy_(start_SD + _NOISE * start_SD.std() * torch.randn_like(start_SD))

    def entering(self, target: Target) -> tuple[Tensor, Injection | None]:
        """The prompts, which pass all layers."""
        return self.prompts, None

    def read_after(self, text: ReadText, anchors_BG: Tensor) -> Tensor:
        """Final states [B, G, S, D] of the prompts after positions of a text."""
        embedded_BMD = self.prompts.repeat(anchors_BG.shape[1], 1).expand(len(anchors_BG), -1, -1)
        final_BMD = text.read(embedded_BMD, *self.group(anchors_BG))
        return final_BMD.view(*anchors_BG.shape, self.virtual_nodes, final_BMD.shape[-1])
