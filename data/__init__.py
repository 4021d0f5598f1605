"""Prompts, answers by the target, and batches. `DraftDataModule` is imported from its file: it needs Lightning."""

from .chat import ChatTemplate
from .distill import distill
from .prompts import Prompt, PromptConfig, load_prompts, read_prompts
from .recipe import DistillConfig
from .sources import Writer
from .states import encode
from .store import Manifest, ShardRecord, TokenShard

__all__ = [
    "ChatTemplate",
    "DistillConfig",
    "Manifest",
    "Prompt",
    "PromptConfig",
    "ShardRecord",
    "TokenShard",
    "Writer",
    "distill",
    "encode",
    "load_prompts",
    "read_prompts",
]
