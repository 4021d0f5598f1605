"""Prompts, answers by the target, and batches. `DraftDataModule` is imported from its file: it needs Lightning."""

from .chat import ChatTemplate
from .distill import distill
from .distill_config import DistillConfig
from .feature_store import WantedStates, encode
from .held_out import read_held_out
from .prompts import Prompt, PromptConfig, load_prompts, read_prompts
from .queued_distillation import distill_from_queue
from .token_store import Manifest, ShardRecord, TokenShard
from .writers import Writer

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
