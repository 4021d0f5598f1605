"""The drafter families, each with a file of its name in `drafters`."""

from .drafters.block import BlockDraft
from .drafters.draft_lm import DraftLM
from .drafters.eagle import Eagle
from .drafters.eagle3 import Eagle3
from .drafters.falcon import Falcon
from .drafters.hidden_transfer import HiddenTransfer
from .drafters.hydra import Hydra
from .drafters.kangaroo import Kangaroo
from .drafters.medusa import Medusa
from .drafters.mtp import Mtp
from .drafters.prompt_tokens import PromptTokens
from .interfaces.drafter import Drafter

DRAFTERS: tuple[type[Drafter], ...] = (
    Medusa, Hydra, Eagle, Eagle3, BlockDraft, Falcon, Kangaroo, PromptTokens, HiddenTransfer, DraftLM, Mtp
)
"""Every drafter family; contract, losslessness, artifact and recipe tests run over this tuple."""
