"""Prompts, answers by the target, and batches. `DraftDataModule` is imported from its file: it needs Lightning."""

from .answers.distill import distill
from .answers.distill_config import DistillConfig
from .answers.queued_distillation import distill_from_queue
from .answers.writers import Writer
from .prompts.chat import ChatTemplate
from .prompts.sources import Prompt, PromptConfig, load_prompts, read_prompts
from .store.feature_store import WantedStates, encode
from .store.held_out import read_held_out
from .store.token_store import Manifest, ShardRecord, TokenShard

__all__ = [
    "ChatTemplate",
    "DistillConfig",
    "Manifest",
    "Prompt",
    "PromptConfig",
    "ShardRecord",
    "TokenShard",
    "WantedStates",
    "Writer",
    "distill",
    "distill_from_queue",
    "encode",
    "load_prompts",
    "read_held_out",
    "read_prompts",
]
